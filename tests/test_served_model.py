"""What a run says of its model, and what changes it: width of the KV cache, length of the context, host time."""

import json
from pathlib import Path

import pytest

from bullet import api
from bullet.cli.sim import main
from bullet.config import DeviceConfig, load_run_config
from bullet.devices.load import host_label, kv_capacity_tokens, load_device, served_model
from bullet.errors import ConfigError
from tests.worlds import run, times

QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936}
FP8_KV = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
    "weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def model_file(tmp_path: Path, **more: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN, **more}))
    return str(path)


def test_fp8_kv_halves_bytes_and_doubles_capacity() -> None:
    plain, fp8 = (DeviceConfig(kv_dtype=kind) for kind in ("auto", "fp8"))
    a, b = served_model(plain), served_model(fp8)
    assert (a.kv_bytes_per_token, b.kv_bytes_per_token) == (131072, 65536)
    tokens = [kv_capacity_tokens(load_device(c).model, load_device(c).gpu, c) for c in (plain, fp8)]
    assert tokens[1] == pytest.approx(2 * tokens[0], abs=32)
    # A long decode reads half the bytes of KV: its attention takes half as long beyond what does not grow.
    a_s, b_s = ([load_device(c).decode_seconds(8, 8 * context, 108) for context in (1000, 100_000)] for c in (plain, fp8))
    assert b_s[1] - b_s[0] == pytest.approx((a_s[1] - a_s[0]) / 2, rel=0.02)


def test_auto_is_what_the_checkpoint_asks_for(tmp_path: Path) -> None:
    """As vLLM takes it: a ``kv_cache_scheme`` makes the cache fp8."""
    name = model_file(tmp_path, quantization_config=FP8_KV)
    assert [served_model(DeviceConfig(model=name, kv_dtype=kind)).kv_bytes for kind in ("auto", "fp8", "16")] == [1, 1, 2]


def test_a_shorter_context_rejects_what_is_over_it() -> None:
    rows = [(0.0, 900, 100), (0.0, 901, 100)]
    assert set(run("vllm-2048", rows, device__max_model_len=1000).requests["reason"].tolist()) == {"", "over_context"}
    with pytest.raises(ConfigError, match="must be at most llama"):
        served_model(DeviceConfig(max_model_len=131073))


@pytest.mark.parametrize("policy", ["vllm-2048", "sglang-2048", "static-96"])
def test_host_time_is_added_to_steps_and_requests(policy: str) -> None:
    """One request at a time: 10 ms a step, 5 more with a prompt, 3 a request. A prefill cut by layers adds up."""
    rows = [(0.0, 500, 11), (10.0, 700, 21)]
    plain = times(run(policy, rows))
    found = times(run(policy, rows, device__host_step_s=0.010, device__host_prefill_step_s=0.005, device__host_request_s=0.003))
    for i, (_, _, output) in enumerate(rows):
        assert found[i][0] - plain[i][0] == pytest.approx(0.018, abs=1e-9)
        assert found[i][1] - plain[i][1] == pytest.approx(0.018 + 0.010 * (output - 1), abs=1e-9)


@pytest.mark.parametrize(("policy", "layers", "launches"), [("vllm-2048", None, 1), ("static-96", 4, 8), ("static-96", 32, 1)])
def test_a_launch_costs_however_few_layers_it_has(policy: str, layers: int | None, launches: int) -> None:
    """One request alone: 1 + 2 ms a launch. A prefill of 32 layers is one, or eight of four layers; each iteration is one."""
    rows = [(0.0, 500, 11)]
    options = {} if layers is None else {"policy__options": {"layers_per_step": layers}}
    first, finish = times(run(policy, rows, **options))[0]
    later, end = times(run(policy, rows, **options, device__host_launch_s=0.001, device__device_launch_s=0.002))[0]
    assert later - first == pytest.approx(0.003 * launches, abs=1e-9)
    assert end - finish == pytest.approx(0.003 * (launches + 10), abs=1e-9)
    assert host_label(DeviceConfig(host_launch_s=0.001)) == "; host time 1 ms a launch"


def test_small_model_host_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The public run: TTFT 12.4 ms and TPOT 4.2 ms at 128 tokens in and out; without host time 3.1 and 2.48, and a word."""
    config = {"device.model": model_file(tmp_path), "policy.name": "vllm-8192", "workload.arrivals": "recorded"}
    (tmp_path / "short.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,128,128\n5,128,128\n")
    config["workload.trace"] = str(tmp_path / "short.csv")
    bare = api.simulate(config)
    assert bare.summary["mean_ttft_ms"] == pytest.approx(3.1, abs=0.1)
    assert bare.summary["mean_tpot_ms"] == pytest.approx(2.48, abs=0.03)
    assert "host time 0 assumed: the kernels of a decode step take 2.5 ms" in " ".join(bare.table().split())
    hosted = api.simulate({**config, "device.host_step_s": 0.0017, "device.host_prefill_step_s": 0.0056,
                           "device.host_request_s": 0.002})
    assert hosted.summary["mean_tpot_ms"] == pytest.approx(4.2, abs=0.03)
    assert hosted.summary["mean_ttft_ms"] == pytest.approx(12.4, abs=0.1)
    said = " ".join(hosted.table().split())
    assert "host time 0 assumed" not in said
    assert "host time 1.7 ms a step, 5.6 ms more with a prompt, 2 ms a request" in said


def test_the_headline_names_the_model_s_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """28 x (2 x 1024 x 2048 + 2 x 1024 x 1024 + 3 x 1024 x 3072) + 151936 x 1024 = 0.5960 B, 1.11 GiB, 28 x 2 x 8 x 128 bytes of
    fp8 KV = 56 KiB."""
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,128,8\n")
    assert main(["run", "--model", model_file(tmp_path, torch_dtype="float32"), "--kv-dtype", "fp8", "--max-model-len", "4096",
                 "--trace", str(trace), "--arrivals", "recorded", "--policy", "vllm-2048", "--no-report", "--quiet",
                 "--out", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("config.json: 0.596 B parameters, 1.11 GiB of weights, 56 KiB of KV a token; float32 checkpoint, served in 16 bits"
            in said)
    kept = load_run_config(tmp_path / "run" / "config.toml").device
    assert (kept.kv_dtype, kept.max_model_len) == ("fp8", 4096)
    assert api.load_run(tmp_path / "run").summary["kv_bytes_per_token"] == 57344
