"""Tables, plots, a Perfetto trace and a one-file HTML report, all from results; nothing here computes a metric.

matplotlib is used without pyplot (a quarter of its start-up) and imported inside functions. Colours are those of Okabe
and Ito, told apart by colour-blind readers.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet import metrics
from bullet.results import RunOutcome, write_text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
STYLES = ("-", "--", "-.", ":")
MAX_POINTS = 2000

TABLE: tuple[tuple[str, str, str], ...] = (
    ("system", "system", ""), ("estimator", "estimator", ""),
    ("TTFT ms mean", "mean_ttft_ms", ".0f"), ("p90", "p90_ttft_ms", ".0f"), ("p99", "p99_ttft_ms", ".0f"),
    ("TPOT ms mean", "mean_tpot_ms", ".1f"), ("p90", "p90_tpot_ms", ".1f"), ("req/s", "request_throughput", ".2f"),
    ("SLO met: mean-len", "slo_attainment_mean_length", ".3f"), ("per-req", "slo_attainment_per_request", ".3f"),
    ("done", "completed", "d"), ("rej", "rejected", "d"), ("unfin", "unfinished", "d"),
)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form) if form else str(value)


def headline(summary: Mapping[str, Any]) -> str:
    """What the figures are: source, hardware, model, workload."""
    rate = summary["request_rate"]
    arrivals = f"{rate:g} req/s" if rate is not None else "recorded arrivals"
    return (f"{summary['source']} ({summary['device_source']} device model): {summary['model']} on {summary['gpu']}, "
            f"{summary['trace']}, {arrivals}, {summary['offered']} requests, seed {summary['seed']}")


def comparison_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text, one system a row."""
    rows = [[title for title, _, _ in TABLE]]
    rows += [[_cell(s[key], form) for _, key, form in TABLE] for s in summaries]
    widths = [max(len(row[i]) for row in rows) for i in range(len(TABLE))]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    first = summaries[0]
    notes = [f"TPOT SLO {first['tpot_slo_ms']:g} ms. SLO met: share of all offered requests within both objectives, the TTFT "
             "objective read as rate x", "mean prompt of the trace (mean-len) or rate x own prompt (per-req)."]
    if any(s["estimator"] == "oracle" for s in summaries):
        notes.append("oracle: asks the simulated device itself; an upper bound, not a predictor.")
    reasons: dict[str, int] = {}
    for summary in summaries[:1]:
        reasons = summary["rejected_by_reason"]
    if reasons:
        notes.append("rejected: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()))
    return "\n".join([headline(first), "", *lines, "", *notes])


def write_comparison(folder: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """``comparison.json`` and ``comparison.csv``: every figure of every system."""
    write_text(folder / "comparison.json", json.dumps(list(summaries), indent=1, allow_nan=False) + "\n")
    keys = [k for k, v in summaries[0].items() if not isinstance(v, dict)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([["" if s[k] is None else s[k] for k in keys] for s in summaries])
    write_text(folder / "comparison.csv", out.getvalue())


# ----------------------------------------------------------------------------------------------- plots


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _cdf(axes: Any, values: NDArray[np.float64], label: str, index: int) -> None:
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    if len(ordered) > MAX_POINTS:
        keep = np.linspace(0, len(ordered) - 1, MAX_POINTS).astype(int)
        ordered, share = ordered[keep], share[keep]
    axes.step(ordered, share, where="post", label=label, color=COLOURS[index % len(COLOURS)],
              linestyle=STYLES[index // len(COLOURS) % len(STYLES)], linewidth=1.6)


def plot_cdfs(outcomes: Sequence[RunOutcome], summary: Mapping[str, Any], path: Path) -> None:
    """TTFT and TPOT, one curve a system, objectives as vertical lines."""
    figure = _figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    for i, outcome in enumerate(outcomes):
        _cdf(left, metrics.ttft_s(outcome.requests), outcome.system, i)
        _cdf(right, metrics.tpot_s(outcome.requests) * 1e3, outcome.system, i)
    slo = outcomes[0].requests["ttft_slo_mean_length_s"]
    if len(slo):
        left.axvline(float(slo[0]), color="grey", linestyle=":", label="SLO (mean length)")
    right.axvline(outcomes[0].tpot_slo_s * 1e3, color="grey", linestyle=":", label="SLO")
    left.set_xscale("log")
    _tidy(left, "time to first token (s, log)", "share of finished requests")
    _tidy(right, "time per output token (ms)", "share of finished requests")
    right.set_xlim(left=0)
    right.legend(fontsize=8, loc="lower right")
    figure.suptitle(headline(summary), fontsize=9)
    _save(figure, path)


def plot_sm_share(outcome: RunOutcome, summary: Mapping[str, Any], path: Path, window_s: float = 20.0) -> None:
    """SMs of each lane over time and the queue below (as the paper's Fig. 20), from the middle of the run."""
    steps = outcome.steps
    figure = _figure(10, 4.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    start, end = steps["start_s"], steps["end_s"]
    middle = float(start[len(start) // 2]) if len(start) else 0.0
    first, last = middle - window_s / 2, middle + window_s / 2
    for i, lane in enumerate(("prefill", "decode", "hybrid")):
        chosen = (steps["lane"] == lane) & (end > first) & (start < last)
        if not chosen.any():
            continue
        if lane == "hybrid":
            # One lane holds every SM; show what the batch is made of.
            tokens = steps["prefill_tokens"][chosen], steps["decode_seqs"][chosen]
            share = tokens[0] / np.maximum(1, tokens[0] + tokens[1])
            top.step(start[chosen], share * outcome.num_sms, where="post", color=COLOURS[0], linewidth=0.8,
                     label="prefill's share of the batch's tokens, x SMs")
            continue
        times = np.column_stack((start[chosen], end[chosen])).ravel()
        held = np.column_stack((steps["sms"][chosen], np.zeros(chosen.sum()))).ravel()
        top.step(times, held, where="post", color=COLOURS[i], linewidth=0.8, label=f"{lane} SMs")
    chosen = (end > first) & (start < last)
    order = np.argsort(start[chosen], kind="stable")
    bottom.step(start[chosen][order], steps["queue"][chosen][order], where="post", color="black", linewidth=0.9)
    top.set_ylim(0, outcome.num_sms * 1.12)
    top.set_xlim(max(first, 0.0), last)
    top.axhline(outcome.num_sms, color="grey", linewidth=0.6)
    _tidy(top, "", f"SMs held (of {outcome.num_sms})")
    _tidy(bottom, "time (s)", "waiting requests")
    bottom.set_ylim(bottom=0)
    top.legend(fontsize=8, loc="upper right", ncols=2)
    figure.suptitle(f"{outcome.system}: {headline(summary)}", fontsize=9)
    _save(figure, path)


def plot_comparison(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean and P90 TTFT, mean and P90 TPOT, throughput, attainment: one bar a system."""
    figure = _figure(11, 3.6)
    panels = figure.subplots(1, 4)
    systems = [s["system"] for s in summaries]
    places = np.arange(len(systems))
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(systems))]
    specs = (("TTFT (s)", "mean_ttft_ms", "p90_ttft_ms", 1e-3), ("TPOT (ms)", "mean_tpot_ms", "p90_tpot_ms", 1.0),
             ("throughput (req/s)", "request_throughput", None, 1.0),
             ("SLO attainment (mean length)", "slo_attainment_mean_length", None, 1.0))
    for axes, (title, key, upper, factor) in zip(panels, specs, strict=True):
        heights = [(s[key] or 0.0) * factor for s in summaries]
        axes.bar(places, heights, color=colours, width=0.65)
        if upper is not None:
            axes.scatter(places, [(s[upper] or 0.0) * factor for s in summaries], color="black", marker="_", s=90, label="P90")
            axes.legend(fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(places, systems, rotation=40, ha="right", fontsize=8)
        axes.grid(axis="y", alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_ylim(0, 1.05)
    figure.suptitle(headline(summaries[0]), fontsize=9)
    _save(figure, path)


# --------------------------------------------------------------------------------------------- Perfetto


def perfetto_events(outcome: RunOutcome) -> Iterable[str]:
    """Chrome trace events: one process a GPU, one thread a lane, counters written only when they change."""
    steps = outcome.steps
    lanes = {"prefill": 1, "decode": 2, "hybrid": 3}
    yield json.dumps({"ph": "M", "pid": 1, "name": "process_name",
                      "args": {"name": f"{outcome.device.get('gpu')} ({outcome.source})"}})
    for lane, thread in lanes.items():
        yield json.dumps({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": lane}})
    columns = [steps[name].tolist() for name in ("lane", "start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "queue",
                                                 "kv_used_blocks", "reason")]
    before: dict[str, Any] = {}
    for lane, start, end, sms, prefill, seqs, queue, kv, reason in zip(*columns, strict=True):
        at = start * 1e6
        yield (f'{{"ph":"X","pid":1,"tid":{lanes[lane]},"name":"{lane}","ts":{at:.3f},"dur":{(end - start) * 1e6:.3f},'
               f'"args":{{"sms":{sms},"prefill_tokens":{prefill},"decode_seqs":{seqs},"reason":{json.dumps(reason)}}}}}')
        for name, value in ((f"{lane} SMs", sms), ("waiting", queue), ("KV blocks", kv)):
            if before.get(name) != value:
                before[name] = value
                yield f'{{"ph":"C","pid":1,"name":"{name}","ts":{at:.3f},"args":{{"value":{value}}}}}'


def write_perfetto(outcome: RunOutcome, path: Path) -> None:
    """Streamed: a long run's trace never stands in memory."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in perfetto_events(outcome):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")
    temporary.replace(path)


# ------------------------------------------------------------------------------------------------- HTML

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}}
h1{{font-size:1.4em}}h2{{font-size:1.1em;margin-top:2em}}table{{border-collapse:collapse;font-size:13px}}
td,th{{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}}td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}pre{{background:#f6f6f6;padding:1em;overflow:auto;font-size:12px}}.source{{color:#a33}}</style></head><body>
<h1>{title}</h1><p class="source">{headline}</p>{body}</body></html>
"""


def write_html(path: Path, title: str, summaries: Sequence[Mapping[str, Any]], pictures: Sequence[Path],
               config_toml: str) -> None:
    """One self-contained file: table, plots, configuration."""
    head = "".join(f"<th>{html.escape(t)}</th>" for t, _, _ in TABLE)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(_cell(s[key], form))}</td>" for _, key, form in TABLE) + "</tr>"
                   for s in summaries)
    parts = [f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"]
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        name = html.escape(picture.stem.replace("_", " "))
        parts.append(f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{data}">')
    parts.append(f"<h2>configuration</h2><pre>{html.escape(config_toml)}</pre>")
    write_text(path, _PAGE.format(title=html.escape(title), headline=html.escape(headline(summaries[0])), body="".join(parts)))


def write_run_report(folder: Path, outcome: RunOutcome, summary: Mapping[str, Any], config_toml: str) -> None:
    """Plots, Perfetto trace and HTML of one run."""
    plots = [folder / "plots" / "latency_cdf.png", folder / "plots" / "sm_share.png"]
    plot_cdfs([outcome], summary, plots[0])
    plot_sm_share(outcome, summary, plots[1])
    write_perfetto(outcome, folder / "trace.json")
    write_html(folder / "report.html", f"{outcome.system} on {summary['trace']}", [summary], plots, config_toml)


def write_comparison_report(folder: Path, outcomes: Sequence[RunOutcome], summaries: Sequence[Mapping[str, Any]],
                            config_toml: str) -> None:
    """Plots and HTML of a comparison."""
    plots = [folder / "plots" / "latency_cdf.png", folder / "plots" / "comparison.png"]
    plot_cdfs(outcomes, summaries[0], plots[0])
    plot_comparison(summaries, plots[1])
    write_html(folder / "report.html", f"{len(summaries)} systems on {summaries[0]['trace']}", summaries, plots, config_toml)
