"""Models by the name under which their weights are published: sizes of their public config.json. Beside the built-in ones, since
they stand in measurements of others; MoE: ``intermediate_size`` is one expert's."""

from __future__ import annotations

import types
from collections.abc import Mapping

from bullet.catalog.spec import ModelSpec

PUBLISHED: Mapping[str, ModelSpec] = types.MappingProxyType({
    "meta-llama/Llama-2-7b-hf": ModelSpec("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
    "meta-llama/Llama-2-70b-hf": ModelSpec("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096),
    "meta-llama/Llama-3.1-8B-Instruct": ModelSpec("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "meta-llama/Llama-3.1-70B-Instruct": ModelSpec("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "codellama/CodeLlama-34b-Instruct-hf": ModelSpec("codellama-34b", 48, 8192, 22016, 64, 8, 128, 32000, 16384),
    "mistralai/Mistral-Nemo-Instruct-2407": ModelSpec("mistral-nemo-12b", 40, 5120, 14336, 32, 8, 128, 131072, 131072),
    "Qwen/Qwen2.5-7B-Instruct": ModelSpec("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768, qkv_bias=True),
    "Qwen/Qwen3-14B": ModelSpec("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, 40960, qk_norm=True),
    "mistralai/Mixtral-8x7B-v0.1": ModelSpec("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768, num_experts=8,
                                             experts_per_token=2),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ModelSpec("mixtral-8x22b", 56, 6144, 16384, 48, 8, 128, 32768, 65536,
                                                       num_experts=8, experts_per_token=2),
})
