"""What a notebook uses: only names of ``bullet`` itself, but for pandas and matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bullet
from bullet import compare, load_run, plot_comparison, plot_latency, simulate, table
from bullet.cli.sim import main as sim
from bullet.config import configuration
from bullet.devices.load import load_device
from bullet.errors import BulletError, ConfigError, ResultsError
from bullet.results.columns import RequestTable, StepTable
from bullet.results.waits import waits

DEMO = {"workload": {"trace": "azure-code", "num_requests": 30}, "workload.rate_req_per_s": 5}
POLICIES = ["bullet", "sglang-1024", "sglang-2048", "vllm-1024"]


@pytest.fixture(scope="module")
def runs() -> list[bullet.Run]:
    return compare(DEMO, POLICIES)


def test_the_demos_table_from_the_surface_alone(runs: list[bullet.Run], tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """compare(), simulate() one by one, and the command's folders read back: the table that the command prints."""
    out = tmp_path / "demo"
    assert sim(["compare", "--trace", "azure-code", "--rate", "5", "--num-requests", "30", "--policies", ",".join(POLICIES),
                "--quiet", "--no-report", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trace azure-code: 8,819 rows, built in")
    whole = printed[printed.index("simulated on A100-80GB"):printed.index("\n\nwritten to")]
    assert table(runs) == whole[:whole.index("\nshare of the fluid bound")]
    assert table([simulate({**DEMO, "policy.name": name}) for name in POLICIES]) == table(runs)
    assert table([load_run(out / name) for name in POLICIES]) == table(runs)
    assert whole == (out / "comparison.txt").read_text().strip()
    assert not (tmp_path / "runs").exists()


def test_what_out_keeps_is_what_is_returned(runs: list[bullet.Run], tmp_path: Path) -> None:
    kept = compare(DEMO, "bullet,vllm-1024", out=tmp_path / "cmp", report=False)
    for run, name, whole in zip(kept, ("bullet", "vllm-1024"), (runs[0], runs[3]), strict=True):
        again = load_run(str(tmp_path / "cmp" / name))
        assert run.folder == again.folder == tmp_path / "cmp" / name
        assert run.summary == again.summary == whole.summary
        assert run.config == again.config == whole.config
        # Steps are left on the disk by a comparison that has one, and read when asked for.
        assert run.step_table["end_s"].tolist() == again.step_table["end_s"].tolist() == whole.step_table["end_s"].tolist()
    with pytest.raises(ResultsError, match="not an empty folder"):
        simulate(DEMO, out=tmp_path / "cmp")


def test_a_configuration_may_be_keys_a_file_or_whole(runs: list[bullet.Run], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[workload]\ntrace = "azure-code"\nnum_requests = 30\nrate_req_per_s = 5.0\n[policy]\nname = "vllm-1024"\n')
    for config in (path, str(path), runs[3].config, {**DEMO, "policy": {"name": "vllm-1024", "options": {}}}):
        assert simulate(config).summary == runs[3].summary
    for wrong, words in (({"rate": 5}, "unknown key 'rate'"), ({"device.colour": 1}, "unknown key 'device.colour'"),
                         ({"policy": 3}, "policy = 3: must be a table"), ({"policy.name": "bulet"}, "unknown policy 'bulet'")):
        with pytest.raises(ConfigError, match=words):
            simulate(wrong)
    with pytest.raises(ConfigError, match="each policy once"):
        compare(DEMO, ["bullet", "bullet"])


ROWS = "arrival_s,prompt_tokens,output_tokens\n0,100,1\n1,200,5\n2,300000,5\n"


def test_frames_have_ttft_tpot_and_end_to_end(tmp_path: Path) -> None:
    """Three requests: one token, five, and one too long for the model. Means of the frame are the summary's."""
    pytest.importorskip("pandas")
    trace = tmp_path / "t.csv"
    trace.write_text(ROWS)
    run = simulate({"workload.trace": str(trace), "workload.arrivals": "recorded", "policy.name": "vllm-1024"})
    frame = run.requests.set_index("id")
    assert sorted(frame["status"]) == ["finished", "finished", "rejected"]
    one, five, never = (frame.loc[i] for i in (0, 1, 2))
    assert one["ttft_s"] == one["e2e_s"] == one["finish_s"] > 0
    assert math.isnan(one["tpot_s"])
    assert five["ttft_s"] == five["first_token_s"] - 1
    assert five["e2e_s"] == pytest.approx(five["ttft_s"] + 4 * five["tpot_s"])
    assert all(math.isnan(never[name]) for name in ("ttft_s", "tpot_s", "e2e_s"))
    for name, key in (("ttft_s", "mean_ttft_ms"), ("tpot_s", "mean_tpot_ms"), ("e2e_s", "mean_e2el_ms")):
        assert 1e3 * frame[name].mean() == pytest.approx(run.summary[key])
    assert len(run.steps) == run.summary["steps"]
    assert run.steps["predicted_s"].isna().all()
    assert run.steps["actual_s"].sum() <= run.summary["span_s"] * (1 + 1e-9)


def test_waits_of_a_run_add_up_to_its_first_tokens(runs: list[bullet.Run]) -> None:
    pytest.importorskip("pandas")
    for run in (runs[0], runs[3]):
        frame = run.requests.set_index("id").join(run.waits)
        assert (frame["queued_s"] + frame["prefill_s"] - frame["ttft_s"]).abs().max() < 1e-9
        assert (frame["behind_prefills_s"] + frame["held_back_s"] - frame["queued_s"]).abs().max() < 1e-8
        assert (frame["prefill_s"] + frame["decode_s"] + frame["queued_s"] - frame["e2e_s"]).abs().max() < 1e-9
        assert frame["behind_prefills_s"].max() > 0 <= frame["held_back_s"].min()


def test_waits_by_hand() -> None:
    """Prefills from 1 to 3 and from 5 to 6. One request comes at 0 and is admitted at 1; one at 2, admitted at 5 (1 s behind the
    first, 2 s while none ran); one is never admitted."""
    def step(start_s: float, end_s: float, tokens: int) -> dict[str, float]:
        return {"start_s": start_s, "end_s": end_s, "prefill_tokens": tokens}

    rows = [step(5.0, 6.0, 10), step(1.0, 3.0, 10), step(2.0, 4.5, 0)]
    steps = StepTable({name: np.array([row[name] for row in rows]) for name in rows[0]})
    nan = math.nan
    requests = RequestTable({"arrival_s": np.array([0.0, 2.0, 4.0]), "admitted_s": np.array([1.0, 5.0, nan]),
                             "first_token_s": np.array([3.0, 6.0, nan]), "finish_s": np.array([3.5, nan, nan])})
    found = waits(requests, steps)
    for name, values in (("queued_s", [1, 3, nan]), ("behind_prefills_s", [0, 1, nan]), ("held_back_s", [1, 2, nan]),
                         ("prefill_s", [2, 1, nan]), ("decode_s", [0.5, nan, nan])):
        np.testing.assert_allclose(found[name], values)
    nothing = StepTable({name: np.array([]) for name in rows[0]})
    np.testing.assert_allclose(waits(requests, nothing)["behind_prefills_s"], [0, 0, nan])


def test_step_times_are_the_devices() -> None:
    pytest.importorskip("pandas")
    config = {"device.gpu": "h100", "device.partition_step_sms": 4}
    frame = bullet.step_times(config, prompts=[1000, 500], decode_seqs=8, context_tokens=100)
    device = load_device(configuration(config).device)
    prefill = device.prefill_work([(1000, 0), (500, 0)], 32, logits_seqs=2)
    decode = device.decode_work(8, 800)
    assert frame["decode_sms"].tolist() == list(range(4, 132, 4))
    assert (frame["prefill_sms"] + frame["decode_sms"]).unique().tolist() == [132]
    row = frame[frame["decode_sms"] == 32].iloc[0]
    assert (row["prefill_s"], row["decode_s"]) == pytest.approx(device.corun_seconds(prefill, 100, decode, 32))
    assert row["prefill_alone_s"] == pytest.approx(device.solo_seconds(prefill, 100))
    assert row["decode_alone_s"] == pytest.approx(device.solo_seconds(decode, 32))
    # 6.98 B of 8.03 B parameters are in the layers' GEMMs; 0.53 B in the LM head, on 2 sequences; attention is some 1 % more.
    assert row["prefill_flops_per_s"] * row["prefill_s"] == pytest.approx(2 * (1500 * 6.98e9 + 2 * 0.525e9), rel=0.02)
    # All of these weights once, and 800 tokens of 128 KiB.
    assert row["decode_bytes_per_s"] * row["decode_s"] == pytest.approx(2 * (6.98e9 + 0.525e9) + 800 * 131072, rel=0.02)
    for wrong in ({"prompts": []}, {"prompts": [0]}, {"decode_seqs": 0}, {"context_tokens": 1.5}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = .*: must be whole numbers"):
            bullet.step_times({}, **wrong)  # type: ignore[arg-type]


def test_a_gpus_calls_refuse_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    for call, words in ((lambda: bullet.measure_gpu(tmp_path / "x", device="tpu"), "device = 'tpu': must be cuda or cpu or sim"),
                        (lambda: bullet.measure_gpu(tmp_path / "x", device="simulated", gpu="a101"), "unknown gpu 'a101'"),
                        (lambda: bullet.fit_gpu(tmp_path / "none"), "none: no such table"),
                        (lambda: bullet.plot_gpu(tmp_path / "none"), "none: no such folder"),
                        (lambda: bullet.step_times({"device.gpu": "rtx4090", "device.timing": "table"}), "no SM partition")):
        with pytest.raises(BulletError, match=words):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    bullet.measure_gpu(tmp_path / "sweep", device="simulated", gpu="a100-80gb", splits=[(54, 54)], budget_s=60)
    with pytest.raises(ResultsError, match="not an empty folder"):
        bullet.fit_gpu(tmp_path / "sweep", out=tmp_path / "mine")


def test_without_pandas_one_line_says_so(runs: list[bullet.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = without_frames(runs[1])
    with pytest.raises(ResultsError, match=r"pandas is not installed .*pip install 'bullet-llm\[pandas\]'"):
        _ = run.steps


def without_frames(run: bullet.Run) -> bullet.Run:
    """As if no other test had asked for them."""
    return bullet.Run(run.config, run.summary, run.folder, run.request_table, run.steps_kept)


def test_plots_are_figures(runs: list[bullet.Run]) -> None:
    for figure, panels in ((plot_latency(runs), 2), (plot_comparison(runs), 6), (runs[0].plot_latency(), 2),
                           (runs[0].plot_sms(window_s=2.0), 4)):
        assert type(figure).__name__ == "Figure"
        assert len(figure.axes) == panels
    assert len(plot_latency(runs).axes[0].lines) >= len(runs)


def test_a_stopped_run_has_rows_and_no_figures(tmp_path: Path) -> None:
    policy = tmp_path / "stop.py"
    policy.write_text("from bullet.policies.vllm import Vllm\nclass Stop(Vllm):\n    asked = 0\n"
                      "    def __init__(self, context): super().__init__(context, 1024)\n"
                      "    def next_step(self, lane, state, now_s):\n"
                      "        self.asked += 1\n        if self.asked == 40:\n            raise KeyboardInterrupt\n"
                      "        return super().next_step(lane, state, now_s)\n")
    with pytest.raises(KeyboardInterrupt):
        simulate({**DEMO, "policy.name": f"{policy}:Stop"}, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.summary["complete"] is False
    assert len(run.request_table) == 30
    assert 30 <= len(run.step_table) < 40
    for ask in (run.table, run.plot_latency, run.plot_sms):
        with pytest.raises(ResultsError, match="the run was stopped"):
            ask()


def test_importing_bullet_loads_nothing() -> None:
    code = ("import sys, bullet; from bullet import __version__; "
            "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('numpy', 'pandas', 'bullet')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['bullet', 'bullet.version']"
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = bullet.simulat  # type: ignore[attr-defined]
