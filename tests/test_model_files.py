"""Hugging Face ``config.json``: the published files of models, and what such a file may not hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from bullet.catalog.models import MODELS, ModelSpec, get_model
from bullet.errors import ConfigError

# The keys that are read, with the values of the public files (and some of those that are not read).
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256}
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 25600, "max_position_embeddings": 40960,
    "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936}
QWEN_MOE = QWEN | {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4}


def read(folder: Path, raw: object) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return get_model(str(path))


@pytest.mark.parametrize(("raw", "name"), [
    (LLAMA, "llama-3.1-8b"), (QWEN, "qwen3-32b"),
    (LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
     "llama-3.1-70b")])
def test_a_published_file_gives_the_built_in_model(raw: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert read(folder, raw) == MODELS[name]


def test_weights_are_the_published_counts(tmp_path: Path) -> None:
    """Parameters as the model cards state them; norms are left out."""
    assert MODELS["llama-3.1-8b"].weight_bytes / 2 == pytest.approx(8_030_261_248, rel=1e-4)
    assert MODELS["llama-3.1-70b"].weight_bytes / 2 == pytest.approx(70_553_706_496, rel=1e-4)
    mixture = read(tmp_path, QWEN_MOE)
    assert (mixture.num_experts, mixture.experts_per_token, mixture.intermediate_size, mixture.qk_norm) == (128, 8, 1536, True)
    assert mixture.weight_bytes / 2 == pytest.approx(235e9, rel=2e-3)


def test_what_a_file_may_leave_out(tmp_path: Path) -> None:
    """Heads of hidden / heads, one KV head a head, bf16, embeddings of their own."""
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "torch_dtype", "tie_word_embeddings")}
    model = read(tmp_path, bare)
    assert (model.head_dim, model.num_kv_heads, model.dtype_bytes, model.tie_embeddings) == (128, 32, 2, False)
    # A window that is switched off, or spans the context, changes nothing.
    for window in ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": 131072}):
        assert read(tmp_path, bare | window) == model


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json: "):
        get_model(str(path))
