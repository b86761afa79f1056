"""What a notebook uses: only names of ``bullet`` itself, but for pandas and matplotlib."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import bullet
from bullet import compare, load_run, plot_comparison, plot_latency, simulate, table
from bullet.cli.sim import main as sim
from bullet.errors import ConfigError, ResultsError

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
    assert table(runs) == printed[printed.index("simulated on A100-80GB"):printed.index("\n\nwritten to")]
    assert table([simulate({**DEMO, "policy.name": name}) for name in POLICIES]) == table(runs)
    assert table([load_run(out / name) for name in POLICIES]) == table(runs) == (out / "comparison.txt").read_text().strip()
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
