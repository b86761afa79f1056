"""``bullet-run`` as a whole on a faked GPU: opened, proven, captured, served, step times taken, everything destroyed."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import count

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_opening_a_gpu import machine, nothing_left  # noqa: E402, F401

from bullet.catalog.gpus import get_gpu  # noqa: E402
from bullet.cli import run as run_cli  # noqa: E402
from bullet.devices.coefficients import analytic_coefficients  # noqa: E402
from bullet.errors import EngineError  # noqa: E402
from bullet.results.folder import load_run  # noqa: E402
from bullet.validation import closed_loop as run_validate  # noqa: E402


@pytest.fixture
def served(machine, monkeypatch, tmp_path):  # noqa: F811
    """``start(policy, **options)``: a real run on the fake machine; exit status, folder and machine. The engine computes on
    the CPU, what it asks of torch.cuda is the fake's; a launch takes 1 ms of the fake's time."""
    from bullet.engine import engine, model

    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.0,20,3\n0.0,40,5\n0.001,33,1\n0.002,17,4\n")

    small = tmp_path / "small" / "config.json"
    small.parent.mkdir()
    small.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 256, "torch_dtype": "bfloat16"}))

    def start(policy, *arguments, command=None, engine_options=None, **options):
        gpu = machine(**options)
        engine_class, ops = engine.Engine, model.Ops

        class Faked(engine_class):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, cuda=gpu.cuda, buckets=(1, 2), **kwargs)

            def _decode_static(self, static, bucket, num_sms):
                self._cuda.launch(1e-3, lambda stream: super(Faked, self)._decode_static(static, bucket, num_sms))

            def _end_event(self, events, lane, ids):
                self._cuda.spend(lane.stream, 1e-3)
                super()._end_event(events, lane, ids)

        for name, method in (engine_options or {}).items():
            setattr(Faked, name, method)
        monkeypatch.setattr(engine, "Engine", Faked)
        monkeypatch.setattr(model, "Ops", lambda kernels: ops("torch"))
        out = tmp_path / "out"
        what = command or ("replay", "--trace", str(tmp_path / "t.csv"), "--arrivals", "recorded", "--policy", policy)
        status = run_cli.main([*what, "--model", str(small), "--set", "device.kv_tokens=2048", "--set", "debug=true",
                               "--no-report", "--quiet", "--out", str(out), *arguments])
        return status, out, gpu
    return start


@pytest.mark.parametrize("policy", ["bullet", "bullet-literal", "bullet-plus", "naive", "static-64", "static-104", "sglang-64",
                                    "sglang-64-mixed", "vllm-256"])
def test_a_real_run_opens_a_gpu_proves_captures_serves_and_leaves_nothing(served, capsys, policy):
    status, out, gpu = served(policy)
    text = capsys.readouterr().out
    assert status == 0
    assert "14 decode graphs captured" in text  # six lanes and the whole device, two buckets each
    assert gpu.cuda.log.count("capture") >= 14
    stored = load_run(out)
    assert stored.requests["status"].tolist() == ["finished"] * 4
    assert set(np.round(stored.steps["actual_s"] * 1e3, 6).tolist()) <= {1.0, 2.0}  # by its events: a launch, with a graph's 1 ms
    assert stored.config.device.gpu == "h200"
    assert "6 of 6 splits proven by %smid" in json.loads((out / "timing.json").read_text())["partition"]
    assert nothing_left(gpu)


def test_a_real_run_makes_contexts_current_where_streams_alone_are_not_enough(served, capsys):
    status, out, gpu = served("bullet", graphs_leak="without context")
    assert status == 0
    assert "6 of 6 splits proven by %smid" in json.loads((out / "timing.json").read_text())["partition"]
    assert nothing_left(gpu)


def test_a_real_run_without_green_contexts_says_no_partition(served, capsys):
    status, out, gpu = served("naive", stub={"version": 12020})
    assert status == 0
    assert json.loads((out / "timing.json").read_text())["partition"].startswith("no partition: ")
    assert nothing_left(gpu)


def test_an_engine_that_fails_on_a_gpu_keeps_rows_and_destroys_contexts(served, capsys):
    def fails(self, ids, lane):
        raise EngineError("decode: the GPU failed (an illegal memory access was encountered)")

    status, out, gpu = served("naive", engine_options={"decode": fails})
    assert status == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "the GPU failed" in err
    assert len(load_run(out).requests) == 4
    assert nothing_left(gpu)


def test_a_validation_on_a_gpu_measures_each_split_and_closes_the_loop(served, capsys, monkeypatch, tmp_path):
    """Step times on every lane and beside the other, then a run, then the table; few sizes, since the CPU computes them.
    A co-run's window is over before a lane has ended three steps: it goes on until then."""
    from bullet.runtime import step_times

    monkeypatch.setattr(step_times, "measure_steps", partial(
        step_times.measure_steps, prefill_tokens=(1, 16), batches=(1, 2), contexts=(16, 32), clock=count(0.0, 0.2).__next__))
    monkeypatch.setitem(run_validate.LENGTHS, False, ((8, 60), (2, 6)))
    status, out, gpu = served("naive", command=("validate", "--policies", "naive", "--num-requests", "4", "--rate", "50"))
    text, err = capsys.readouterr()
    assert err == ""
    assert status == 0
    profile = json.loads((out / "steps.json").read_text())
    assert len(profile["corun"]) == 6
    assert all(p + d == 132 for p, d, _, _ in profile["corun"])
    assert profile["hardware"] == "NVIDIA H200"
    assert not profile["turns"]
    assert "Simulated against measured on NVIDIA H200 (partition: green contexts, 6 of 6 splits proven" in text
    assert nothing_left(gpu)
    # The same runs on a fit of that card's sweep instead, from the files alone.
    fitted = tmp_path / "fitted"
    fitted.mkdir()
    (fitted / "fit.json").write_text(analytic_coefficients(get_gpu("h200")).to_json())
    assert run_cli.main(["validate", "--from", str(out), "--profile", str(fitted)]) == 0
    assert "the simulator knows the machine by the profile" in capsys.readouterr().out
    result = json.loads((out / "validation.json").read_text())
    assert result["device"].startswith("analytic, h100's efficiencies, of unknown origin")  # its file was made by hand
    assert result["runs"][0]["completed"] == [4, 4]


def test_a_gpu_machine_without_what_only_plots_and_fits_need_measures_and_simulates(served, capsys, monkeypatch):
    """torch, triton, cuda-bindings, numpy and pyarrow are all that measuring and the table beside it ask for."""
    from bullet.runtime import step_times

    for name in ("scipy", "sklearn", "pandas", "matplotlib", "tqdm", "transformers", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)
        for part in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.setitem(sys.modules, part, None)
    monkeypatch.setattr(step_times, "measure_steps", partial(
        step_times.measure_steps, prefill_tokens=(1, 16), batches=(1, 2), contexts=(16, 32), clock=count(0.0, 0.2).__next__))
    monkeypatch.setitem(run_validate.LENGTHS, False, ((8, 60), (2, 6)))
    status, out, gpu = served("naive", command=("validate", "--policies", "naive", "--num-requests", "4", "--rate", "50",
                                                "--budget-s", "100"))
    text, err = capsys.readouterr()
    assert (status, err) == (0, "")
    assert "Simulated against measured on NVIDIA H200" in text
    assert json.loads((out / "real" / "naive" / "summary.json").read_text())["completed"] == 4
    assert nothing_left(gpu)


def test_without_pyarrow_no_device_is_opened(served, capsys, monkeypatch):
    """Its rows could not be kept: found before anything is measured."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for command in (None, ("validate", "--policies", "naive")):
        status, out, gpu = served("naive", command=command)
        err = capsys.readouterr().err
        assert status == 2
        assert err.count("\n") == 1
        assert "pyarrow is not installed" in err
        assert gpu.cuda.log == []
        assert not out.exists()
