"""Parameter counts of every architecture that transformers has, against its own modules (built without memory)."""

import json
from pathlib import Path
from typing import Any

import pytest

from bullet.catalog.architectures import ARCHITECTURES
from bullet.catalog.reader import read_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# What a class's own defaults leave open.
CHOSEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1}, "bloom": {"hidden_size": 1024},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoeshared": {"shared_intermediate_size": 1024}, "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 48}}
LM_HEAD_BIASES = {"phi", "gptj"}
"""One value for each word of the vocabulary, which the count leaves out."""
ABSENT = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "internlm2", "deepseek", "kimi_k2"}
"""Not causal-LM classes of transformers: nothing to compare with."""


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - ABSENT))
def test_parameters_are_those_of_the_modules(model_type: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(model_type, **CHOSEN.get(model_type, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {id(p): (name, p.numel()) for name, p in model.named_parameters()}.values()  # tied ones once
    norms = sum(count for name, count in tensors if "norm" in name or "ln_" in name)
    found = sum(count for _, count in tensors) - norms
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(), default=str))
    counted = read_config(path).num_parameters
    if model_type in LM_HEAD_BIASES:
        counted += config.vocab_size
    assert counted == pytest.approx(found, rel=1e-6)
