"""The loop closed: an engine that takes exactly its step times is simulated exactly; the table and the command."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics

import numpy as np
import pytest
from fake_engine import build, replay, workload

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.cli import run as run_cli
from bullet.config import load_run_config
from bullet.devices.measured import MeasuredDevice, StepProfile, along
from bullet.errors import ProfileError
from bullet.profiles.rows import ENGINE_PHASES
from bullet.profiles.sweeps import read_rows
from bullet.results.columns import RequestTable, StepTable
from bullet.sim.run import simulate
from bullet.validation import closed_loop as run_validate

PREFILL_S, DECODE_S = (0.004, 0.010, 0.050), (0.002, 0.006)
PROFILE = StepProfile("a fake", "none", "tiny", 8, True, (1, 50, 500), PREFILL_S, (1, 9), (10, 20),
                      tuple((s, s) for s in DECODE_S), 0.0, 0.0, 0.0, ((8, 1.0),), ((8, 1.0),))


def seconds(kind, tokens, layers):
    """The profile's, without the device's arithmetic."""
    if kind == "prefill":
        return along(tokens, (1, 50, 500), PREFILL_S) * layers / 4
    return 0.002 + (tokens - 1) * 0.0005


def requests(count=30):
    rng = np.random.default_rng(5)
    return [(float(t), int(p), int(o)) for t, p, o in zip(
        np.cumsum(rng.exponential(0.03, count)), rng.integers(1, 200, count), rng.integers(1, 9, count), strict=True)]


@pytest.mark.parametrize("policy", ["vllm-256", "sglang-64"])
def test_an_engine_that_keeps_to_its_step_times_is_simulated_to_the_microsecond(policy):
    """One lane, so no sharing: the same decisions at the same times. The fake's clock moves by naps and by work only."""
    config = load_run_config(None, {"device.model": "tiny", "policy.name": policy, "device.publish_delay_s": 0.0,
                                    "device.kv_tokens": 16000, "device.reconfigure_s": 0.0})
    run, _, sink = replay(requests(), policy, config=config, seconds=seconds)
    gpu = dataclasses.replace(get_gpu("a100-80gb"), num_sms=8, bandwidth_knee_sms=2)
    device = MeasuredDevice(PROFILE, get_model("tiny"), gpu)
    outcome = simulate(run.config, workload=workload(requests()), device=device,
                       policy=build(policy, run.config, run.state.splits))
    real = RequestTable.from_rows(sink.requests)
    assert len(outcome.steps) == len(sink.steps)
    for name in ("id", "first_token_s", "finish_s"):
        assert real[name].tolist() == pytest.approx(outcome.requests[name].tolist(), abs=1e-6)
    rows = run_validate.step_rows(outcome.steps, StepTable.from_rows(sink.steps), device)
    (row,) = rows
    assert row["lane"] == "hybrid"
    assert row["same_work_abs_error"] == pytest.approx(0.0, abs=1e-6)
    assert row["count"] == [len(sink.steps)] * 2


def test_steps_of_known_error_are_found_to_have_it():
    """A prefill that really took 25 ms where the step times say 10: an error of -60 %."""
    def row(lane, sms, tokens, seconds, corun_s=0.0):
        return (0, lane, lane, 0.0, seconds, sms, tokens, 0, 0, 0, 4, None, seconds, corun_s, 0, 0, 0, 8, 8, "")

    gpu = dataclasses.replace(get_gpu("a100-80gb"), num_sms=8, bandwidth_knee_sms=2)
    device = MeasuredDevice(PROFILE, get_model("tiny"), gpu)
    simulated = StepTable.from_rows([row("prefill", 8, 50, 0.010), row("prefill", 4, 50, 0.020, 0.01)])
    measured = StepTable.from_rows([row("prefill", 8, 50, 0.025)])
    rows = {(r["sms"], r["beside"]): r for r in run_validate.step_rows(simulated, measured, device)}
    assert rows[8, False]["same_work_error"] == pytest.approx(-0.6)
    assert rows[8, False]["median_s"] == pytest.approx([0.010, 0.025])
    assert rows[4, True]["count"] == [1, 0]
    assert rows[4, True]["same_work_error"] is None


def test_drift_is_after_over_before():
    slower = dataclasses.replace(PROFILE, prefill_s=(0.004, 0.010, 0.100))
    assert run_validate.drift(PROFILE, slower) == pytest.approx([1.0, 1.0, 2.0])


def test_drift_is_of_the_sizes_that_both_have():
    """A second sweep that its budget cut: a prompt size and a context fewer."""
    cut = dataclasses.replace(PROFILE, prefill_tokens=(1, 500), prefill_s=(0.004, 0.200), contexts=(20,),
                              decode_s=tuple((3 * s,) for s in DECODE_S))
    assert run_validate.drift(PROFILE, cut) == pytest.approx([3.0, 1.0, 4.0])
    with pytest.raises(ProfileError, match="no size in common"):
        run_validate.drift(PROFILE, dataclasses.replace(cut, prefill_tokens=(2, 3), batches=(3, 4)))


def test_splits_are_those_that_the_machine_granted():
    granted = dataclasses.replace(PROFILE, num_sms=132, decode_sms=((16, 3.0), (28, 2.0), (132, 1.0)), prefill_sms=((132, 1.0),))
    config = load_run_config(None, {})
    assert run_validate.splits_of(granted, config).decode_sms.tolist() == [16, 28]
    assert run_validate.splits_of(PROFILE, config).decode_sms.tolist() == [2, 4, 6]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_validate_on_the_cpu_and_again_from_its_files(tmp_path, capsys):
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 512, "torch_dtype": "float32"}))
    out = tmp_path / "out"
    assert run_cli.main(["validate", "--device", "cpu", "--model", str(path), "--policies", "bullet,sglang-64",
                         "--num-requests", "6", "--quiet", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Simulated against measured on CPU, no partition" in text
    result = json.loads((out / "validation.json").read_text())
    assert [run["policy"] for run in result["runs"]] == ["bullet", "sglang-64"]
    assert all(run["completed"] == [6, 6] for run in result["runs"])
    assert result["runs"][0]["prediction_error"][1] > 0
    # The loop is on disk: a sweep's rows, the profile that they make, the runs, the simulations.
    rows = read_rows(out / "sweep")
    assert {r["gpu"] for r in rows} == {"CPU, no partition"}
    assert set(ENGINE_PHASES) < {r["op"] for r in rows}
    steps = StepProfile.from_json(out / "profile" / "steps.json")
    assert dict(zip(steps.prefill_tokens, steps.prefill_s, strict=True))[64] == pytest.approx(statistics.median(
        r["median_s"] for r in rows if (r["op"], r["tokens"], r["context_tokens"]) == ("engine_prefill", 64, 0)))
    assert "interpolated" in (out / "profile" / "SOURCE.md").read_text()
    assert (out / "sweep-after" / "samples.jsonl").is_file()
    assert "the simulator knows the machine by rows of its sweep alone" in text
    assert len(result["drift"]) == 3
    assert run_cli.main(["validate", "--from", str(out)]) == 0
    assert json.loads((out / "validation.json").read_text()) == result
    # Elsewhere, without the model's file: the folder has all of it.
    out = out.rename(tmp_path / "moved")
    path.unlink()
    assert run_cli.main(["validate", "--from", str(out)]) == 0
    assert json.loads((out / "validation.json").read_text()) == result
    # On another profile: twice as slow.
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "steps.json").write_text(dataclasses.replace(
        steps, prefill_s=tuple(2 * s for s in steps.prefill_s)).to_json())
    assert run_cli.main(["validate", "--from", str(out), "--profile", str(tmp_path / "slow")]) == 0
    assert "the simulator knows the machine by the profile" in capsys.readouterr().out
    slow = json.loads((out / "validation.json").read_text())["runs"][0]["figures"]["mean TTFT ms"]
    assert slow[0] > 1.1 * result["runs"][0]["figures"]["mean TTFT ms"][0]
    assert slow[1] == result["runs"][0]["figures"]["mean TTFT ms"][1]
    assert run_cli.main(["validate", "--device", "cpu", "--profile", str(tmp_path / "slow")]) == 2
    assert "--profile: goes with --from DIR" in capsys.readouterr().err

    # A run that was stopped is left out by name; where none came to its end there is no table, and one line says so.
    def stop(name):
        (out / "real" / name / "summary.json").write_text(json.dumps({"complete": False, "why": "interrupted"}))

    capsys.readouterr()
    stop("bullet")
    assert run_cli.main(["validate", "--from", str(out)]) == 0
    assert "Left out, stopped before its end: bullet\n" in capsys.readouterr().out
    stop("sglang-64")
    assert run_cli.main(["validate", "--from", str(out)]) == 2
    assert "no run came to its end" in capsys.readouterr().err


def test_a_budget_takes_fewer_requests_then_fewer_policies():
    """At 2 req/s, 1.5 times the arrivals' 0.5 s each: 100 s hold 133 requests, 33 for each of four, 8 in a 24th of it."""
    names = ["a", "b", "c", "d"]
    assert run_validate.fitting(names, 30, 2.0, 100.0) == (names, 30)
    assert run_validate.fitting(names, 60, 2.0, 100.0) == (names, 33)
    assert run_validate.fitting(names, 60, 2.0, 23.0) == (names[:3], 10)
    assert run_validate.fitting(names, 3, 2.0, 3.0) == (names[:1], 3)
    with pytest.raises(ProfileError, match=r"5 s are left .* too few for 8 requests at 2\.00 req/s"):
        run_validate.fitting(names, 60, 2.0, 5.0)


def test_a_folder_that_is_no_validation_is_refused(tmp_path, capsys):
    assert run_cli.main(["validate", "--from", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
