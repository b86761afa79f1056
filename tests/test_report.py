"""Tables, plots and traces of hand-made outcomes: what they say, and what a reader could be misled by."""

import base64
import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bullet.config import RunConfig, SloConfig, resolve_slo
from bullet.errors import ResultsError
from bullet.results import columns, metrics, page, plots, tables, timeline
from bullet.results.columns import REQUEST_COLUMNS, RequestTable, RunOutcome, StepTable
from bullet.results.folder import RunWriter, load_run

PNG = b"\x89PNG"


def step(lane: str, start: float, end: float, sms: int, prefill: int, seqs: int, queue: int = 0,
         kv: int = 0) -> tuple[Any, ...]:
    return (0, lane, lane, start, end, sms, prefill, seqs, 10 * seqs, 0, 4, 0.1, end - start, 0.0, 0, queue, kv, 96, 12,
            'a "why"')


TWO_LANES = [step("prefill", 0.0, 1.0, 96, 500, 0, queue=2, kv=5), step("decode", 0.5, 2.0, 12, 0, 3, kv=5),
             step("prefill", 1.0, 2.0, 96, 500, 0, kv=5), step("decode", 3.0, 4.0, 108, 0, 3, kv=4)]
CHUNKED = [step("hybrid", 0.0, 1.0, 108, 500, 0), step("hybrid", 1.0, 2.0, 108, 400, 3), step("hybrid", 2.0, 4.0, 108, 0, 3)]


def outcome(system: str, steps: list[tuple[Any, ...]], finished: int = 20, rejected: int = 0) -> RunOutcome:
    rows = [(i, 0.1 * i, 100, 5, "finished", "", 0.1 * i, 0.1 * i + 0.3, 0.1 * i + 1.0, 5, 0, 0.15, 0.4) for i in range(finished)]
    rows += [(finished + i, 0.0, 9000, 5, "rejected", "over_context", None, None, None, 0, 0, 9.0, 0.4) for i in range(rejected)]
    return RunOutcome(RunConfig(slo=resolve_slo(SloConfig(), "azure-code", 2048.0)), system, StepTable.from_rows(steps),
                      RequestTable.from_rows(rows), np.array([0.2]), np.array([80]),
                      {"prefill_only": 192.0, "decode_only": 126.0, "shared": 0.0, "idle": 114.0}, 4.0, 108, 100,
                      3, 5, 1e-4, 0.2, {"gpu": "a100-80gb", "model": "llama-3.1-8b", "source": "fitted"})


def summaries(*outcomes: RunOutcome) -> list[dict[str, Any]]:
    return [metrics.summarise(o) for o in outcomes]


# ---------------------------------------------------------------------------------------------- tables


def test_the_table_says_what_it_is_and_fits_a_terminal() -> None:
    both = summaries(outcome("bullet-literal", TWO_LANES, 999), outcome("sglang-1024-mixed", CHUNKED, 20, 3))
    both[0]["mean_ttft_ms"] = 123456.0
    lines = tables.comparison_table(both).splitlines()
    assert " ".join(lines[:2]) == ("simulated on A100-80GB (device model: fitted), llama-3.1-8b; azure-code, 5 req/s, 999 "
                                   "requests, seed 0")
    assert tables.headline(both[0] | {"tensor_parallel": 4}).startswith("simulated on 4 x A100-80GB (device")
    assert page._rows_of({"a": 14468.49, "b": 0.04719938, "c": {"d": 999.96}}) == {"a": "14,468", "b": "0.0472", "c.d": "1000"}
    assert max(map(len, lines)) <= 80
    assert "123456" in next(line for line in lines if line.startswith("bullet-literal"))
    for text, blocks in ((lines, 2), (tables.comparison_table(both, 150).splitlines(), 1)):
        rows = [line for line in text if line.startswith("sglang-1024-mixed")]
        cells = [cell for row in rows for cell in row.split()[2:]]
        assert cells == ["300", "300", "300", "175.0", "175.0", "175.0", "6.90", "6.90", "0.870", "0.000", "20", "3", "0"]
        assert "rejected by sglang-1024-mixed (srm): 3 over_context" in text
        # Columns line up: every row ends where the rule ends.
        rules = [line for line in text if line.startswith("---")]
        others = [line for line in text if line.startswith("bullet-literal")]
        assert [*map(len, rows)] == [*map(len, others)] == [*map(len, rules)]
        assert len(rows) == blocks


def test_an_undefined_figure_is_a_dash() -> None:
    row = next(line for line in tables.comparison_table(summaries(outcome("x", [], 0, 2)), 150).splitlines() if line[:2] == "x ")
    assert row.split() == ["x", *"--------", "0.000", "0.000", "0", "2", "0"]


def test_objectives_are_said_in_seconds() -> None:
    """Where they are from as well; an absolute one has one reading, printed once."""
    summary = summaries(outcome("bullet", TWO_LANES))[0] | {"mean_prompt_tokens": 4289.75}
    absolute = summary | {"ttft_slo_s": 0.5, "ttft_slo_s_per_token": None, "tpot_slo_ms": 30.0, "slo_by_default": None}
    text = " ".join(tables.comparison_table([absolute]).split())
    assert "with TTFT <= 0.5 s and TPOT <= 0.03 s. Good requests per second met both." in text
    assert not any(words in text for words in ("mean-len", "per-req", "Table 4"))
    default = summary | {"ttft_slo_s": 12.86925, "ttft_slo_s_per_token": 0.003, "tpot_slo_ms": 150.0,
                         "slo_by_default": "ttft tpot"}
    text = tables.objectives(default | {"trace": "logs/mine.csv"})
    assert "TPOT <= 0.15 s and TTFT <= 12.87 s, 3 ms x the trace's mean prompt of 4,290 tokens (mean-len)" in text
    assert text.endswith("TTFT and TPOT: ShareGPT's of the paper's Table 4, taken by default: it has none for mine.csv; set "
                         "yours with --ttft and --tpot.")
    assert tables.objectives(default | {"slo_by_default": "tpot"}).endswith("TPOT: the paper's Table 4.")
    old = {key: value for key, value in summary.items() if not key.startswith("ttft_slo_s")}  # of an earlier version
    assert "rate x own prompt (per-req)" in tables.objectives(old)


def test_the_oracle_is_named_and_a_users_policy_is_short() -> None:
    summary = summaries(outcome("bullet", TWO_LANES))[0]
    summary["estimator"] = "oracle"
    text = tables.comparison_table([summary])
    assert "bullet (oracle)" in text
    assert "not a predictor" in text
    assert tables.label({"system": "/long/way/to/mine.py:Mine", "estimator": None}) == "mine.py:Mine"
    assert len(tables.label({"system": "x" * 99, "estimator": "srm-blind"})) == tables.NAME_WIDTH


def test_common_rejections_are_said_once() -> None:
    text = tables.comparison_table(summaries(outcome("a", CHUNKED, 5, 1), outcome("b", CHUNKED, 5, 1)))
    assert [line for line in text.splitlines() if line.startswith("rejected")] == ["rejected: 1 over_context"]


def test_comparison_files_hold_every_figure(tmp_path: Path) -> None:
    both = summaries(outcome("a", TWO_LANES), outcome("b", CHUNKED, 0, 1))
    tables.write_comparison(tmp_path, both)
    assert json.loads((tmp_path / "comparison.json").read_text()) == both
    with open(tmp_path / "comparison.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["system"] for row in rows] == ["a", "b"]
    assert float(rows[0]["mean_ttft_ms"]) == pytest.approx(300)
    assert rows[1]["mean_ttft_ms"] == ""


# ----------------------------------------------------------------------------------------------- plots


def test_back_to_back_steps_are_one_block() -> None:
    blocks = plots._blocks(np.array([2.0, 0.0, 1.0, 5.0]), np.array([3.0, 1.0, 2.0, 6.0]), np.array([12, 96, 96, 12]))
    assert blocks.tolist() == [[0, 2, 96], [2, 3, 12], [5, 6, 12]]


def test_mean_sms_of_bins_are_exact() -> None:
    steps = StepTable.from_rows(TWO_LANES)
    decode = plots._mean_sms(steps, steps["lane"] == "decode", np.array([0.0, 1.0, 2.0, 3.5, 4.0]))
    assert decode.tolist() == pytest.approx([6, 12, 36, 108])
    assert plots._mean_sms(steps, steps["lane"] == "none", np.array([0.0, 1.0])).tolist() == [0]


def test_thinned_points_keep_both_ends() -> None:
    kept = plots._thin(100_000)
    assert (kept[0], kept[-1], len(kept)) == (0, 99_999, plots.MAX_POINTS)
    assert plots._thin(3).tolist() == [0, 1, 2]
    assert plots._thin(0).tolist() == []


@pytest.mark.parametrize("steps", [TWO_LANES, CHUNKED, TWO_LANES[:1], []])
@pytest.mark.parametrize("finished", [20, 1, 0])
def test_reports_of_any_run_are_drawn(steps: list[tuple[Any, ...]], finished: int, tmp_path: Path) -> None:
    one = outcome("toy", steps, finished, 1)
    page.write_run_report(tmp_path, one, summaries(one)[0], "seed = 0\n")
    for name in ("latency_cdf", "sm_share"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(PNG)
    assert not list(tmp_path.rglob("*.tmp"))


def test_plots_of_equal_runs_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        one = outcome("toy", TWO_LANES)
        plots.save(plots.plot_sm_share(one.steps, summaries(one)[0]), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_stored_run_gives_the_figures_of_the_run(tmp_path: Path) -> None:
    """Columns and summary are all that a plot takes, and both are in the folder."""
    one = outcome("toy", TWO_LANES)
    (summary,) = summaries(one)
    with RunWriter(tmp_path / "run") as writer:
        writer.resolved(one.config)
        for row in TWO_LANES:
            writer.step(row)
        for i in range(len(one.requests)):
            writer.request(tuple(one.requests[name][i] for name in REQUEST_COLUMNS))
        writer.close(one, summary, {})
    page.write_run_report(tmp_path / "run", one, summary, "")
    run = load_run(tmp_path / "run")
    for name, figure in (("latency_cdf", plots.plot_cdfs([run.requests], [run.summary])),
                         ("sm_share", plots.plot_sm_share(run.steps, run.summary))):
        plots.save(figure, tmp_path / "again.png")
        assert (tmp_path / "again.png").read_bytes() == (tmp_path / "run" / "plots" / f"{name}.png").read_bytes(), name


def test_the_page_is_one_file_with_everything(tmp_path: Path) -> None:
    outcomes = [outcome("a<b", TWO_LANES), outcome("c", CHUNKED)]
    both = summaries(*outcomes)
    folders = [tmp_path / "a", tmp_path / "c"]
    for one, summary, folder in zip(outcomes, both, folders, strict=True):
        page.write_run_report(folder, one, summary, "")
    page.write_comparison_report(tmp_path, [one.requests for one in outcomes], both, folders, 'trace = "<x>"\n')
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == 4
    assert all(base64.b64decode(p).startswith(PNG) for p in pictures)
    assert 'src="http' not in text
    assert "href" not in text
    assert "a&lt;b" in text
    assert "a<b" not in text
    assert "&lt;x&gt;" in text
    assert "sm_share.idle" in text
    assert "simulated on A100-80GB" in text


def test_pyplot_stays_out(tmp_path: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from pathlib import Path\n"
            "from tests.test_report import *\n"
            f"one = outcome('toy', TWO_LANES); page.write_run_report(Path({str(tmp_path)!r}), one, summaries(one)[0], '')\n"
            "print([m for m in ('pandas', 'matplotlib.pyplot', 'scipy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = outcome("toy", CHUNKED)
    (tmp_path / "x.png").mkdir()
    with pytest.raises(ResultsError, match=r"x\.png: cannot be written"):
        plots.save(plots.plot_cdfs([one.requests], summaries(one)), tmp_path / "x.png")
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(ResultsError, match=r"trace\.json: cannot be written"):
        timeline.write_perfetto(one.steps, "A100-80GB (simulated)", tmp_path / "trace.json")


# --------------------------------------------------------------------------------------------- Perfetto


def events(tmp_path: Path, steps: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    timeline.write_perfetto(outcome("toy", steps).steps, "A100-80GB (simulated)", tmp_path / "trace.json")
    found: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return found


def test_the_trace_names_gpu_lanes_and_steps(tmp_path: Path) -> None:
    found = events(tmp_path, TWO_LANES)
    assert [e["args"]["name"] for e in found if e["ph"] == "M"] == ["A100-80GB (simulated)", "prefill", "decode"]
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert slices == [(1, "prefill", 0, 1e6), (2, "decode", 0.5e6, 1.5e6), (1, "prefill", 1e6, 1e6), (2, "decode", 3e6, 1e6)]
    first = next(e for e in found if e["ph"] == "X")["args"]
    assert (first["sms"], first["layers"], first["reason"]) == (96, "0-3", 'a "why"')
    assert [e["name"] for e in events(tmp_path, CHUNKED) if e["ph"] == "X"] == ["prefill", "mixed", "decode"]


def test_counters_change_only_where_they_change_and_fall_when_a_lane_is_idle(tmp_path: Path) -> None:
    found = [(e["name"], e["ts"] / 1e6, e["args"]["value"]) for e in events(tmp_path, TWO_LANES) if e["ph"] == "C"]
    by_name = {name: [(t, v) for n, t, v in found if n == name] for name, _, _ in found}
    assert by_name == {"prefill SMs": [(0, 96), (2, 0)], "decode SMs": [(0.5, 12), (2, 0), (3, 108), (4, 0)],
                       "waiting requests": [(0, 2), (0.5, 0)], "KV blocks used": [(0, 5), (3, 4)]}


def test_a_trace_in_parts_is_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = events(tmp_path, TWO_LANES)
    monkeypatch.setattr(timeline, "_CHUNK_ROWS", 1)
    assert events(tmp_path, TWO_LANES) == whole


def test_a_long_runs_timeline_is_in_order_of_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that ends after forty decodes is written before them, however the rows are cut into batches."""
    rows = [("decode", 0.1 * i + 0.05, 0.1 * i + 0.15) for i in range(40)]
    rows.append(("prefill", 0.0, 4.2))
    template = TWO_LANES[0]
    steps = [(i, lane, lane, start, end, *template[5:]) for i, (lane, start, end) in enumerate(rows)]
    starts = []
    for size in (1000, 7):
        monkeypatch.setattr(columns, "BATCH_ROWS", size)
        events = [json.loads(event) for event in timeline.perfetto_events(outcome("toy", steps, 1, 1).steps, "GPU")]
        starts.append([(e["ts"], e["tid"]) for e in events if e["ph"] == "X"])
    assert starts[0] == starts[1] == sorted(starts[0])
    assert starts[0][0] == (0.0, 1)


def test_queue_peaks_of_bins_however_rows_are_cut() -> None:
    start, queue = np.array([0.1, 0.2, 2.5, 2.6, 3.9, 4.0]), np.array([1, 5, 2, 7, 4, 3])
    for cut in (6, 2):
        peaks = plots._QueuePeaks(np.array([0.0, 1.0, 2.0, 3.0, 4.0]))
        for begin in range(0, 6, cut):
            peaks.add(start[begin:begin + cut], queue[begin:begin + cut])
        assert peaks.values().tolist() == [5, 2, 7, 4]  # the second bin has no launch: the next one found 2 waiting
