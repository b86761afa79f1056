"""Configurations and weights: what is read, and one clear line for what is missing, damaged or unsupported."""

from __future__ import annotations

import json
import math
import pickle
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.catalog.models import MODELS, ModelSpec  # noqa: E402
from bullet.engine.model import Architecture, Llama3Scaling  # noqa: E402
from bullet.engine.weights import load_safetensors, random_weights  # noqa: E402
from bullet.errors import ConfigError, EngineError  # noqa: E402
from tests.test_fuzz_readers import MUTATIONS, mutated, refused  # noqa: E402

CPU = torch.device("cpu")
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
          "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64, "torch_dtype": "float32",
          "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"}


def write_config(folder, **changes):
    folder.mkdir(exist_ok=True)
    raw = {k: v for k, v in {**CONFIG, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------- config.json


def test_a_config_is_read(tmp_path):
    arch = Architecture.from_hf(write_config(tmp_path / "m"))
    assert (arch.model_type, arch.dtype, arch.rms_eps, arch.rope_theta, arch.scaling) == ("llama", torch.float32, 1e-5, 5e5, None)
    assert (arch.spec.num_heads, arch.spec.num_kv_heads, arch.spec.head_dim) == (2, 1, 16)
    assert arch == Architecture.from_hf(tmp_path / "m" / "config.json")
    assert Architecture.from_hf(write_config(tmp_path / "m", rope_theta=...)).rope_theta == 10_000.0
    assert Architecture.from_hf(write_config(tmp_path / "m", model_type="qwen3", head_dim=16)).spec.qk_norm


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_styles(tmp_path, style):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 777.0}
    arch = Architecture.from_hf(write_config(tmp_path / "m", **{style: rope}, rope_theta=... if style != "rope_scaling" else 5e5))
    assert arch.scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)
    assert arch.rope_theta == 777.0


def test_rope_tables_by_hand():
    """Head size 4: frequencies 1 and 1/100. Of 600 original tokens the first turns 95 times, the second 0.95 times: with
    2 and 4 as bounds the first is kept, the second stretched; with 0.5 and 1.5 it lies 0.45 of the way between."""
    spec = ModelSpec("m", 1, 8, 8, 2, 1, 4, 10, 1000)
    plain = Architecture(spec, "llama", torch.float32, 1e-5, 10_000.0)
    cos, sin = plain.rope_tables(4, CPU)
    assert cos[3].tolist() == pytest.approx([math.cos(3.0), math.cos(0.03)])
    assert sin[3].tolist() == pytest.approx([math.sin(3.0), math.sin(0.03)])
    for low, high, second in ((2.0, 4.0, 0.03 / 8), (0.5, 1.5, None)):
        scaled = Architecture(spec, "llama", torch.float32, 1e-5, 10_000.0, Llama3Scaling(8.0, low, high, 600))
        keep = 600 * 0.01 / (2 * math.pi) - 0.5
        expected = second if second is not None else 0.03 * (keep + (1 - keep) / 8)
        assert scaled.rope_tables(4, CPU)[1][3].tolist() == pytest.approx([math.sin(3.0), math.sin(expected)], rel=1e-5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "mixtral"}, "model_type = 'mixtral': the engine runs llama and qwen3"),
    ({"model_type": ...}, "'model_type' is missing|model_type = None"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}, "model_type = 'qwen3_moe'"),
    ({"attention_bias": True}, "attention_bias = True: the engine supports False only"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
    ({"head_dim": 8}, "head_dim = 8: must be even, 16 to 256"),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be a positive number"),
    ({"rope_theta": "big"}, "rope_theta = 'big'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "must exceed"),
    ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be an object"),
    ({"hidden_size": ...}, "'hidden_size' is missing"),
    # transformers would take 128 and 32 for them, not what follows from the other sizes as in a Llama.
    ({"model_type": "qwen3"}, "'head_dim' is missing: a Qwen3's"),
    ({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": None}, "'num_key_value_heads' is missing: a Qwen3's"),
])
def test_what_the_engine_does_not_compute_is_refused_by_name(tmp_path, changes, message):
    folder = write_config(tmp_path / "m", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        Architecture.from_hf(folder)
    assert "config.json" in one_line(error)


def test_a_config_nested_without_end_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read as a JSON model config") as error:
        Architecture.from_hf(tmp_path)
    one_line(error)


# ---------------------------------------------------------------------------------------- random weights


def test_random_weights_follow_the_seed_and_the_architecture():
    arch = Architecture.of(MODELS["tiny"], torch.float32)
    first, again, other = (random_weights(arch, seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(first.layers[3].qkv, again.layers[3].qkv)
    assert not torch.equal(first.layers[3].qkv, other.layers[3].qkv)
    assert first.layers[0].qkv.shape == (512, 256)
    assert first.layers[0].gate_up.shape == (1024, 256)
    assert first.layers[0].down.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert first.head is not first.embed
    total = sum(t.numel() for layer in first.layers for t in vars(layer).values() if t is not None and t.dim() == 2)
    assert (total + first.embed.numel() + first.head.numel()) * arch.spec.dtype_bytes == arch.spec.weight_bytes


# ------------------------------------------------------------------------------------------- safetensors


def named_tensors(arch):
    """Every tensor under its Hugging Face name, as the fused weights were cut from."""
    spec, weights = arch.spec, random_weights(arch, 5, CPU)
    q = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    named = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm, "lm_head.weight": weights.head}
    for i, w in enumerate(weights.layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        named |= {f"model.layers.{i}.input_layernorm.weight": w.input_norm,
                  f"model.layers.{i}.post_attention_layernorm.weight": w.post_norm, f"{at}.o_proj.weight": w.o,
                  f"{at}.q_proj.weight": w.qkv[:q], f"{at}.k_proj.weight": w.qkv[q:q + kv],
                  f"{at}.v_proj.weight": w.qkv[q + kv:], f"{mlp}.gate_proj.weight": w.gate_up[:spec.intermediate_size],
                  f"{mlp}.up_proj.weight": w.gate_up[spec.intermediate_size:], f"{mlp}.down_proj.weight": w.down}
    return weights, {name: tensor.contiguous() for name, tensor in named.items()}


@pytest.fixture
def sharded(tmp_path):
    """A model in two shards with an index."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = write_config(tmp_path / "m")
    arch = Architecture.from_hf(folder)
    weights, named = named_tensors(arch)
    files = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in named}
    for file in set(files.values()):
        save_file({n: t for n, t in named.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder, arch, weights


def test_shards_are_read_and_fused(sharded):
    folder, arch, weights = sharded
    loaded = load_safetensors(folder, arch, CPU)
    assert torch.equal(loaded.embed, weights.embed)
    assert torch.equal(loaded.head, weights.head)
    for ours, expected in zip(loaded.layers, weights.layers, strict=True):
        for name, tensor in vars(expected).items():
            assert (getattr(ours, name) is None) if tensor is None else torch.equal(getattr(ours, name), tensor), name


def test_weights_take_the_configs_dtype(sharded):
    folder, _, weights = sharded
    arch = Architecture.from_hf(write_config(folder, torch_dtype="bfloat16"))
    loaded = load_safetensors(folder, arch, CPU)
    assert torch.equal(loaded.layers[1].down, weights.layers[1].down.to(torch.bfloat16))


def first_shard(folder):
    return folder / "model-00001-of-00002.safetensors"


def cut(folder):
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


def drop(folder):
    first_shard(folder).unlink()


def overwrite(folder):
    first_shard(folder).write_bytes(b"<html>404</html>" * 100)


def empty(folder):
    first_shard(folder).write_bytes(b"")


def bad_index(folder):
    (folder / "model.safetensors.index.json").write_text("{]")


def endless_index(folder):
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def index_elsewhere(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../m.safetensors"}}))


def index_without_a_tensor(folder):
    path = folder / "model.safetensors.index.json"
    files = json.loads(path.read_text())["weight_map"]
    del files["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps({"weight_map": files}))


def index_of_the_wrong_shard(folder):
    path = folder / "model.safetensors.index.json"
    files = json.loads(path.read_text())["weight_map"]
    files["model.layers.1.mlp.up_proj.weight"] = first_shard(folder).name
    path.write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(("damage", "message"), [
    (drop, "model-00001-of-00002.safetensors: the shard is missing: download the model again"),
    (cut, "model-00001-of-00002.safetensors: damaged or not safetensors"),
    (overwrite, "model-00001-of-00002.safetensors: damaged or not safetensors"),
    (empty, "model-00001-of-00002.safetensors: damaged or not safetensors"),
    (bad_index, "index.json: cannot be read as an index with a weight_map"),
    (endless_index, "index.json: cannot be read as an index with a weight_map .nested deeper"),
    (index_elsewhere, r"shard '../m.safetensors': must be the name of a .safetensors file in the same folder"),
    (index_without_a_tensor, "tensor 'model.layers.1.mlp.up_proj.weight' is in no shard"),
    (index_of_the_wrong_shard, "00001-of-00002.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' cannot be read"),
])
def test_a_missing_or_damaged_file_is_one_line(sharded, damage, message):
    folder, arch, _ = sharded
    damage(folder)
    with pytest.raises(EngineError, match=message) as error:
        load_safetensors(folder, arch, CPU)
    assert str(folder) in one_line(error)


def test_shapes_are_checked(sharded):
    folder, _, _ = sharded
    arch = Architecture.from_hf(write_config(folder, intermediate_size=64))
    with pytest.raises(EngineError, match=r"gate_proj.weight' is \(48, 32\), config.json says \(64, 32\)") as error:
        load_safetensors(folder, arch, CPU)
    one_line(error)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    folder = write_config(tmp_path / "m")
    arch = Architecture.from_hf(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(EngineError, match=r"holds pytorch_model.bin, which is a pickle and is never loaded"):
        load_safetensors(folder, arch, CPU)


def test_an_empty_and_a_missing_folder(tmp_path):
    arch = Architecture.from_hf(write_config(tmp_path / "m"))
    with pytest.raises(EngineError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_safetensors(tmp_path / "m", arch, CPU)
    with pytest.raises(EngineError, match="no such folder"):
        load_safetensors(tmp_path / "nowhere", arch, CPU)


def test_random_weights_beyond_this_machines_memory_are_refused_before_they_are_made(monkeypatch):
    from bullet.catalog.models import get_model
    from bullet.engine import weights

    arch = Architecture.of(get_model("tiny"), torch.float32)
    monkeypatch.setattr(weights, "_memory_bytes", lambda: 1 << 20)
    with pytest.raises(EngineError, match=r"weights of tiny need .* end other processes on the machine"):
        weights.random_weights(arch, 0, torch.device("cpu"))


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_read_or_refused_in_one_line(sharded, file):
    """2,000 mutations by default. Of a struck shard other numbers may come, and nothing worse: it has no checksum."""
    folder, arch, _ = sharded

    def read(path):
        load_safetensors(folder, Architecture.from_hf(folder) if file == "config.json" else arch, CPU)

    good = (folder / file).read_bytes()
    for seed in range(MUTATIONS):
        (folder / file).write_bytes(mutated(good, random.Random(seed)))
        try:
            refused(folder / file, read)
        except BaseException as exc:
            exc.add_note(f"mutation {seed}")
            raise
    (folder / file).write_bytes(good)
    assert refused(folder / file, read) is None
