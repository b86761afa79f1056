"""``bullet-run`` from the command line: what it refuses without torch, and with torch a tiny model on this CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
from contextlib import contextmanager

import pytest

from bullet.cli import run as run_cli
from bullet.devices.measured import MeasuredDevice, StepProfile
from bullet.results.folder import load_run

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")

TRACE = "arrival_s,prompt_tokens,output_tokens\n0.0,20,3\n0.01,40,5\n0.02,33,1\n0.03,17,4\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def model(tmp_path):
    """Two layers of a Llama, small enough to run in a test."""
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 256, "torch_dtype": "float32"}))
    return path


def run(*args):
    return run_cli.main([str(a) for a in args])


def replay_args(trace, model, out, policy="sglang-64"):
    return ("replay", "--device", "cpu", "--trace", trace, "--arrivals", "recorded", "--model", model, "--policy", policy,
            "--out", out, "--no-report", "--quiet")


def one_line(capsys):
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("bullet-run: error: ")
    return err


def test_what_is_wrong_is_said_in_one_line(trace, tmp_path, capsys):
    assert run("replay", "--policy", "nonesuch", "--trace", trace, "--arrivals", "recorded") == 2
    assert "unknown policy 'nonesuch'" in one_line(capsys)
    assert run("replay", "--gpu", "h100", "--trace", trace) == 2
    assert "--gpu: with --device cuda" in one_line(capsys)
    assert run("replay", "--device", "cpu", "--threads", "0") == 2
    assert "--threads 0: must be 1 or more" in one_line(capsys)
    for flag in (("--estimator", "oracle"), ("--steps", "s.json")):
        assert run("replay", "--device", "cpu", "--policy", "naive", *flag) == 2
        assert f"{' '.join(flag)} has no effect: naive predicts nothing" in one_line(capsys)
    (tmp_path / "steps.json").write_text("{}")
    assert run("replay", "--device", "cpu", "--trace", trace, "--arrivals", "recorded", "--steps", tmp_path / "steps.json") == 2
    assert "steps.json: 'hardware' is missing" in one_line(capsys)
    blind = ("replay", "--device", "cpu", "--trace", trace, "--arrivals", "recorded", "--policy", "vllm-256")
    for flag, value in (("--estimator", "oracle"), ("--steps", tmp_path / "steps.json")):
        assert run(*blind, flag, value) == 2
        assert f"{flag} {value} has no effect: vllm-256 predicts nothing" in one_line(capsys)
    for record, why in ((tmp_path / "none" / "r.jsonl", f"no folder {tmp_path / 'none'}"), (trace, "exists already")):
        assert run(*blind, "--record", record, "--out", tmp_path / "runs") == 2
        assert why in one_line(capsys)
    assert run("recheck", tmp_path / "none.jsonl") == 2
    assert "none.jsonl: cannot be read (No such file" in one_line(capsys)
    assert not (tmp_path / "runs").exists()


def test_a_record_that_cannot_be_and_two_models_are_refused_before_anything_runs(trace, model, tmp_path, capsys):
    args = replay_args(trace, model, tmp_path / "out")
    assert run(*args, "--record", tmp_path / "nowhere" / "r.jsonl") == 2
    assert f"no folder {tmp_path / 'nowhere'}: make it, or choose another --record" in one_line(capsys)
    assert run(*args, "--weights", tmp_path) == 2
    assert "the weights' own config.json is taken, leave --model out" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_step_times_name_the_least_they_take(model, tmp_path, capsys):
    assert run("steps", "--device", "cpu", "--model", model, "--max-tokens", "79", "--out", tmp_path / "out") == 2
    assert "--max-tokens 79: step times take 80 or more on cpu, up to small's 256" in one_line(capsys)
    assert run("steps", "--device", "cuda", "--max-tokens", "1039", "--out", tmp_path / "out") == 2
    assert "step times take 1040 or more on cuda" in one_line(capsys)
    assert not (tmp_path / "out").exists()


@needs_torch
def test_the_least_is_enough_and_one_less_is_not(model):
    from bullet.catalog.models import get_model
    from bullet.config import load_run_config
    from bullet.errors import ProfileError
    from bullet.runtime.machine import open_machine
    from bullet.runtime.step_times import LEAST_TOKENS, measure_steps

    config = load_run_config(None, {"device.model": str(model)})
    for tokens, enough in ((LEAST_TOKENS["cpu"], True), (LEAST_TOKENS["cpu"] - 1, False)):
        with open_machine("cpu", config, tokens) as opened:
            if enough:
                assert measure_steps(opened, get_model(str(model)), repeats=1).contexts == (16, 64)
            else:
                with pytest.raises(ProfileError, match="too few sizes"):
                    measure_steps(opened, get_model(str(model)), repeats=1)


@needs_torch
def test_a_record_on_a_full_disk_keeps_the_requests_and_accounts_for_the_rest(trace, model, tmp_path, capsys):
    import resource

    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0.0,9,120\n" * 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, hard))  # beyond every table, and within the record
        assert run(*replay_args(trace, model, tmp_path / "out", "naive"), "--record", tmp_path / "r.jsonl") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "r.jsonl: cannot be written (File too large)" in one_line(capsys)
    stored = load_run(tmp_path / "out")
    assert stored.summary["offered"] == len(stored.requests) == 4
    assert not stored.summary["complete"]
    assert len(stored.steps) > 5


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
def test_without_torch_it_says_so(trace, tmp_path, capsys):
    assert run(*replay_args(trace, "tiny", tmp_path / "out")) == 2
    assert "torch is not installed" in one_line(capsys)
    assert not (tmp_path / "out").exists()


@needs_torch
@pytest.mark.parametrize("policy", ["bullet", "bullet-plus", "naive", "sglang-64", "vllm-256"])
def test_a_replay_on_the_cpu_leaves_the_simulators_folder(trace, model, tmp_path, capsys, policy):
    out = tmp_path / "out"
    assert run(*replay_args(trace, model, out, policy), "--record", tmp_path / "r.jsonl") == 0
    text = capsys.readouterr().out
    told = " ".join(text.split())  # in lines of the terminal's width
    assert "measured on CPU, NO PARTITION (partition: none: lanes take turns, SMs of a nominal a100-80gb)" in told
    assert "hand-over" in text
    stored = load_run(out)
    assert stored.summary["source"] == "measured"
    assert stored.summary["gpu"] == "CPU, no partition"
    assert stored.summary["completed"] == 4
    assert sorted(stored.requests["generated_tokens"].tolist()) == [1, 3, 4, 5]
    assert (stored.requests["first_token_s"] > stored.requests["arrival_s"]).all()
    host = json.loads((out / "timing.json").read_text())["host"]
    assert host["prediction"]["count"] > 0
    assert (host["hand_over"]["count"] > 0) == (policy in ("bullet", "bullet-plus", "naive"))
    assert run("recheck", tmp_path / "r.jsonl") == 0
    assert "a fresh policy decides the same" in capsys.readouterr().out
    assert run(*replay_args(trace, model, out, policy)) == 2
    assert "exists already" in one_line(capsys)
    model.unlink()  # the record has the model's sizes: it is checked elsewhere too
    assert run("recheck", tmp_path / "r.jsonl") == 0


@needs_torch
def test_ctrl_c_keeps_finished_requests(trace, model, tmp_path, monkeypatch, capsys):
    from bullet.results.folder import RunWriter

    plain = RunWriter.request

    def interrupted(self, row):
        plain(self, row)
        self.request_stop()

    monkeypatch.setattr(RunWriter, "request", interrupted)
    assert run(*replay_args(trace, model, tmp_path / "out")) == 130
    assert "1 of 4 requests finished" in capsys.readouterr().err
    stored = load_run(tmp_path / "out")
    assert not stored.summary["complete"]
    assert sorted(stored.requests["status"].tolist()) == ["finished", *["unfinished"] * 3]


@needs_torch
def test_an_engine_that_fails_in_mid_run_is_one_line_with_rows_kept(trace, model, tmp_path, monkeypatch, capsys):
    from bullet.engine.engine import Engine
    from bullet.errors import EngineError

    plain, calls = Engine.decode, []

    def fails(self, *args):
        calls.append(None)
        if len(calls) > 3:
            raise EngineError("decode: the GPU failed (an illegal memory access was encountered): finished requests are kept")
        return plain(self, *args)

    monkeypatch.setattr(Engine, "decode", fails)
    assert run(*replay_args(trace, model, tmp_path / "out", "naive")) == 2
    assert "the GPU failed" in one_line(capsys)
    assert len(load_run(tmp_path / "out").requests) == 4


@needs_torch
def test_models_and_weights_that_cannot_run_are_refused(trace, model, tmp_path, capsys):
    config = json.loads(model.read_text())
    other = tmp_path / "other" / "config.json"
    other.parent.mkdir()
    other.write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert run(*replay_args(trace, other, tmp_path / "out")) == 2
    assert "other/config.json: model_type = 'gpt2': the engine runs llama and qwen3 (dense)" in one_line(capsys)
    args = [a for a in replay_args(trace, model, tmp_path / "out") if a not in ("--model", model)]
    assert run(*args, "--weights", model.parent) == 2
    assert "holds neither model.safetensors" in one_line(capsys)
    assert run("steps", "--device", "cpu", "--weights", model.parent, "--out", tmp_path / "out") == 2
    assert "holds neither model.safetensors" in one_line(capsys)
    assert not (tmp_path / "out").exists()


@needs_torch
def test_no_gpu_is_one_line(trace, tmp_path, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is at hand")
    assert run("replay", "--trace", trace, "--arrivals", "recorded", "--out", tmp_path / "out") == 2
    assert "no usable GPU" in one_line(capsys)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- step times

PROFILE = StepProfile("a box", "none", "tiny", 108, True, (10, 110), (0.02, 0.12), (1, 3), (10, 20),
                      ((0.01, 0.02), (0.03, 0.06)), 0.004, 0.008, 1e-6, ((108, 1.0),), ((54, 2.0), (108, 1.0)))


def device(**options):
    from bullet.catalog.gpus import get_gpu
    from bullet.catalog.models import get_model

    return MeasuredDevice(PROFILE, get_model("tiny"), get_gpu("a100-80gb"), **options)


def test_step_times_are_interpolated_as_said():
    """Whole prefill of 60 tokens: 70 ms. Of the four layers one, without the head: 4 + (70 - 4 - 8) / 4 ms."""
    found = device()
    assert found.solo_seconds(found.prefill_work([(60, 0)], 4, logits_seqs=1), 108) == pytest.approx(0.070)
    assert found.solo_seconds(found.prefill_work([(60, 0)], 1, logits_seqs=0), 108) == pytest.approx(0.0185)
    # 50 tokens after 100 others attend to 100 more keys each: 5000 pairs of a microsecond.
    assert found.solo_seconds(found.prefill_work([(50, 100)], 4, logits_seqs=1), 108) == pytest.approx(0.060 + 0.005)
    assert found.solo_seconds(found.decode_work(2, 30), 108) == pytest.approx(0.030)
    assert found.solo_seconds(found.decode_work(2, 30), 54) == pytest.approx(0.060)
    assert found.solo_seconds(found.decode_work(5, 50), 108) == pytest.approx(0.05)  # beyond: the last piece goes on


def test_lanes_that_take_turns_last_as_long_as_both():
    found = device()
    works = found.prefill_work([(60, 0)], 4, logits_seqs=1), found.decode_work(2, 30)
    assert found.corun_seconds(works[0], 54, works[1], 108) == pytest.approx((0.1, 0.1))
    assert device(sharing="fair").corun_seconds(works[0], 54, works[1], 108) == pytest.approx((0.14, 0.06))


def test_step_times_survive_their_file(tmp_path):
    (tmp_path / "steps.json").write_text(PROFILE.to_json())
    assert StepProfile.from_json(tmp_path / "steps.json") == PROFILE


@needs_torch
def test_step_times_of_another_model_or_machine_are_refused(trace, model, tmp_path, capsys):
    path = tmp_path / "steps.json"
    here = {"model": "small", "hardware": "CPU, no partition"}
    for changes, words in (({}, "steps.json: step times of tiny, the model is small: measure its own"),
                           ({"model": "small"}, "step times of a box with 108 SMs, this is CPU, no partition with 108"),
                           ({**here, "num_sms": 132, "prefill_sms": ((132, 1.0),), "decode_sms": ((132, 1.0),)},
                            "with 132 SMs, this is CPU, no partition with 108: measure them here")):
        path.write_text(dataclasses.replace(PROFILE, **changes).to_json())
        assert run(*replay_args(trace, model, tmp_path / "out", "bullet"), "--steps", path) == 2
        assert words in one_line(capsys)
    assert not (tmp_path / "out").exists()


@needs_torch
@pytest.mark.parametrize(("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"),
                                                      (signal.SIGTERM, 143, "stopped by SIGTERM"),
                                                      (signal.SIGHUP, 129, "stopped by SIGHUP")])
def test_a_signal_before_the_first_run_unwinds_and_is_said(model, tmp_path, monkeypatch, capsys, number, status, said):
    """While step times are taken no run has a handler yet: the machine is closed all the same, and the folder named."""
    from bullet.runtime import machine, step_times

    closed = []

    @contextmanager
    def opened(*args, **kwargs):
        try:
            with real(*args, **kwargs) as found:
                yield found
        finally:
            closed.append(True)

    real = machine.open_machine
    monkeypatch.setattr(machine, "open_machine", opened)
    monkeypatch.setattr(step_times, "measure_steps", lambda *args, **kwargs: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "out"
    assert run("steps", "--device", "cpu", "--model", model, "--out", out) == status
    assert capsys.readouterr().err == f"bullet-run: {said}; nothing was written\n"
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before
