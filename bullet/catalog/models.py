"""Models by name and from a Hugging Face ``config.json``: what is needed to count operations and bytes."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bullet.errors import ConfigError, require

# --------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: what is needed to count operations and bytes.

    ``num_experts = 0`` means a dense MLP; otherwise ``intermediate_size`` is that of one expert and each token
    visits ``experts_per_token`` of them.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    dtype_bytes: int = 2
    tie_embeddings: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "context_tokens", "dtype_bytes"):
            require(getattr(self, name) > 0, f"model {self.name}: {name}", getattr(self, name), "positive")
        require(self.num_heads % self.num_kv_heads == 0, f"model {self.name}: num_heads", self.num_heads,
                 f"a multiple of num_kv_heads = {self.num_kv_heads}")
        require((self.num_experts > 0) == (self.experts_per_token > 0)
                 and 0 <= self.experts_per_token <= max(self.num_experts, 0),
                 f"model {self.name}: experts_per_token", self.experts_per_token,
                 f"between 1 and num_experts = {self.num_experts}, or both 0")

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key, value projection's output."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights (norms are left out: under 0.01 %)."""
        attention = self.hidden_size * self.qkv_size + self.num_heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        router = self.hidden_size * self.num_experts
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return (self.num_layers * (attention + mlp + router) + embeddings) * self.dtype_bytes

    @classmethod
    def from_hf(cls, path: str | Path) -> ModelSpec:
        """Read a Hugging Face ``config.json`` (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE field names)."""
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}: cannot be read as a JSON model config ({exc})") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: must hold one JSON object, found {type(raw).__name__}")

        def integer(*names: str, default: int | None = None) -> int:
            for name in names:
                value = raw.get(name)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ConfigError(f"{path}: {name} = {value!r}: must be a whole number, 0 or more")
                return value
            if default is None:
                raise ConfigError(f"{path}: {names[0]!r} is missing")
            return default

        heads = integer("num_attention_heads")
        hidden = integer("hidden_size")
        experts = integer("num_experts", "num_local_experts", default=0)
        dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
        widths = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
        if dtype not in widths:
            raise ConfigError(f"{path}: torch_dtype = {dtype!r}: must be one of {', '.join(widths)}")
        model_type = str(raw.get("model_type", ""))
        if "q_lora_rank" in raw or "kv_lora_rank" in raw:
            raise ConfigError(f"{path}: latent attention (MLA) is not modelled; use a GQA or MHA model")
        if raw.get("quantization_config") is not None:
            raise ConfigError(f"{path}: quantization_config: quantised weights are not modelled; without that key they are "
                              f"counted as {dtype}")
        window = raw.get("sliding_window")
        if (isinstance(window, int) and raw.get("use_sliding_window", True)
                and window < integer("max_position_embeddings")):
            raise ConfigError(f"{path}: sliding_window = {window}: sliding-window attention is not modelled; without that key "
                              "every token attends to all before it")
        if heads == 0:
            raise ConfigError(f"{path}: num_attention_heads = 0: must be positive")
        return cls(
            name=str(raw.get("_name_or_path") or path.parent.name or path.stem),
            num_layers=integer("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=integer("moe_intermediate_size", "intermediate_size") if experts
            else integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=integer("num_key_value_heads", default=heads),
            head_dim=integer("head_dim", default=hidden // heads),
            vocab_size=integer("vocab_size"),
            context_tokens=integer("max_position_embeddings"),
            dtype_bytes=widths[dtype],
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type.startswith("qwen3"),
            num_experts=experts,
            experts_per_token=integer("num_experts_per_tok", default=0) if experts else 0,
        )


# Values of the public config.json of meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, Qwen/Qwen3-32B.
MODELS: Mapping[str, ModelSpec] = types.MappingProxyType({m.name: m for m in (
    ModelSpec("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ModelSpec("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ModelSpec("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960, qk_norm=True),
    ModelSpec("tiny", 4, 256, 512, 4, 2, 64, 1024, 4096),
)})


def get_model(name: str) -> ModelSpec:
    """A built-in model by name, or a path to a ``config.json``."""
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return ModelSpec.from_hf(name)
    raise ConfigError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}, or give a path to a config.json")


def model_label(model: ModelSpec) -> str:
    """A built-in model's name. A config.json is known by what it says as well: another one of the same name is another
    model, and neither resumes nor is divided by the other's rows.
    """
    if MODELS.get(model.name) == model:
        return model.name
    return f"{model.name}#{hashlib.sha256(repr(model).encode()).hexdigest()[:8]}"
