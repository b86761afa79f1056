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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet import metrics
from bullet.results import RunOutcome, StepTable, cannot_write, write_text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
STYLES = ("-", "--", "-.", ":")
MAX_POINTS = 2000
WINDOW_S = 10.0
"""Seconds of a run that the SM plot shows step by step."""
NAME_WIDTH = 28

TABLE: tuple[tuple[str, str, str, str], ...] = (
    # group, title, key of the summary, format
    *((f"{name} ms", title, f"{part}_{name.lower()}_ms", form) for name, form in (("TTFT", ".0f"), ("TPOT", ".1f"))
      for title, part in (("mean", "mean"), ("P90", "p90"), ("P99", "p99"))),
    ("", "req/s", "request_throughput", ".2f"),
    ("SLO attainment", "mean-len", "slo_attainment_mean_length", ".3f"),
    ("SLO attainment", "per-req", "slo_attainment_per_request", ".3f"),
    ("requests", "done", "completed", "d"), ("requests", "rejected", "rejected", "d"),
    ("requests", "unfin.", "unfinished", "d"),
)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def label(summary: Mapping[str, Any]) -> str:
    """The system's name with the estimator that it asked; of a user's policy, without the folders."""
    name = _plain(summary["system"])
    asked = f" ({summary['estimator']})" if summary["estimator"] else ""
    room = NAME_WIDTH - len(asked)
    return (name if len(name) <= room else ".." + name[-(room - 2):]) + asked


def _plain(name: object) -> str:
    """A file without its folders, which config.toml and the summary keep."""
    return str(name).rpartition("/")[2]


def headline(summary: Mapping[str, Any]) -> str:
    """What the figures are: source, hardware, model, workload."""
    rate = summary["request_rate"]
    arrivals = f"{rate:g} req/s" if rate is not None else "recorded arrivals"
    group = f"{summary['tensor_parallel']} x " if summary["tensor_parallel"] > 1 else ""
    note = str(summary["device_source"])
    if summary["source"] != "measured":
        note = f"device model: {note}"
    elif not note.startswith("no partition"):  # a real run has no model; what matters is whether SMs were partitioned
        note = f"partition: {note}"
    return (f"{summary['source']} on {group}{str(summary['gpu']).upper()} ({note}), "
            f"{_plain(summary['model'])}; {_plain(summary['trace'])}, {arrivals}, {summary['offered']} "
            f"{'request' if summary['offered'] == 1 else 'requests'}, seed {summary['seed']}")


def _notes(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    first = summaries[0]
    notes = ["TTFT and TPOT are of finished requests. SLO attainment: share of all offered requests with "
             f"TPOT <= {first['tpot_slo_ms']:g} ms", "and TTFT within rate x the trace's mean prompt (mean-len) or rate x own "
             "prompt (per-req)."]
    if any(s["estimator"] == "oracle" for s in summaries):
        notes.append("oracle: asks the simulated device itself; an upper bound, not a predictor.")
    rejected = {label(s): ", ".join(f"{count} {reason}" for reason, count in s["rejected_by_reason"].items())
                for s in summaries if s["rejected"]}
    if rejected and len(rejected) == len(summaries) and len(set(rejected.values())) == 1:
        notes.append(f"rejected: {next(iter(rejected.values()))}")
    else:
        notes += [f"rejected by {name}: {reasons}" for name, reasons in rejected.items()]
    return notes


def comparison_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text, one system a row, under 120 columns; says first that it is simulated, and on what."""
    columns = [["", "system", *map(label, summaries)]]
    for group in dict.fromkeys(group for group, *_ in TABLE):
        block = [[title, *(_cell(s[key], form) for s in summaries)] for g, title, key, form in TABLE if g == group]
        widths = [max(map(len, cells)) for cells in block]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*block, strict=True)]
        columns.append([group.center(len(lines[0])), *lines])
    widths = [max(map(len, cells)) for cells in columns]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
             .rstrip() for row in zip(*columns, strict=True)]
    lines.insert(2, "-" * max(map(len, lines)))
    return "\n".join([headline(summaries[0]), "", *lines, "", *_notes(summaries)])


def write_comparison(folder: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """``comparison.json`` and ``comparison.csv``: every figure of every system; nested ones are in the JSON alone."""
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
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format="png", metadata={"Software": None})
        temporary.replace(path)
    except OSError as exc:
        raise cannot_write(path, exc, temporary) from None


def _thin(count: int) -> NDArray[np.int64]:
    """Indices of at most ``MAX_POINTS`` of ``count`` points, both ends among them."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, MAX_POINTS)).astype(np.int64))


def _cdf(axes: Any, values: NDArray[np.float64], name: str, index: int) -> None:
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    keep = _thin(len(ordered))
    axes.step(ordered[keep], share[keep], where="post", label=name, color=COLOURS[index % len(COLOURS)],
              linestyle=STYLES[index % len(STYLES)], linewidth=1.7)


def plot_cdfs(outcomes: Sequence[RunOutcome], summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """TTFT and TPOT of finished requests, one curve a system, objectives as vertical lines."""
    figure = _figure(10, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (outcome, summary) in enumerate(zip(outcomes, summaries, strict=True)):
        _cdf(left, metrics.ttft_s(outcome.requests) * 1e3, label(summary), i)
        _cdf(right, metrics.tpot_s(outcome.requests) * 1e3, label(summary), i)
    slo = outcomes[0].requests["ttft_slo_mean_length_s"]
    slos = (float(slo[0]) * 1e3 if len(slo) else None, outcomes[0].tpot_slo_s * 1e3)
    for axes, limit, name in ((left, slos[0], "TTFT SLO\n(mean length)"), (right, slos[1], "TPOT SLO")):
        axes.set_xscale("log")
        if limit is not None:
            axes.axvline(limit, color="black", linestyle=(0, (1, 1)), linewidth=1.0)
            axes.annotate(f"{name}\n{limit:.0f} ms", (limit, 0.02), xytext=(4, 0), textcoords="offset points", fontsize=7.5,
                          bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0})
    left.set_ylim(0, 1.02)
    _tidy(left, "time to first token, TTFT (ms, log scale)", "share of finished requests")
    _tidy(right, "time per output token, TPOT (ms, log scale)", "")
    for axes in (left, right):
        axes.grid(which="minor", axis="x", alpha=0.12, linewidth=0.5)
    if len(outcomes) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(outcomes)), fontsize=8.5,
                      frameon=False)
    title = headline(summaries[0])
    figure.suptitle(title if len(outcomes) > 1 else f"{label(summaries[0])}: {title}", fontsize=9)
    _save(figure, path)


# What a step does, in the order of the legend; see-through, so that shared SMs show.
_ALPHA = 0.75
_KINDS = (("prefill", COLOURS[0]), ("mixed batch", COLOURS[3]), ("decode", COLOURS[1]))
_SHARED = "#AF6930"
"""What decode's colour over prefill's comes to, both see-through."""


def _kind(steps: StepTable) -> NDArray[np.int64]:
    """Index into ``_KINDS`` of every step, by what it carries and not by its lane: a chunked lane does all three."""
    prefill, decode = steps["prefill_tokens"] > 0, steps["decode_seqs"] > 0
    return np.where(prefill & decode, 1, np.where(decode, 2, 0))


def _blocks(starts: NDArray[np.float64], ends: NDArray[np.float64], sms: NDArray[Any]) -> NDArray[np.float64]:
    """Back-to-back steps on equally many SMs as one rectangle; rows of (start, end, sms)."""
    if not len(starts):
        return np.empty((0, 3))
    order = np.argsort(starts, kind="stable")
    starts, ends, sms = starts[order], ends[order], sms[order]
    new = np.r_[True, (starts[1:] > ends[:-1] + 1e-6) | (sms[1:] != sms[:-1])]
    first = np.flatnonzero(new)
    last = np.r_[first[1:] - 1, len(starts) - 1]
    return np.column_stack((starts[first], ends[last], sms[first]))


def _mean_sms(steps: StepTable, chosen: NDArray[np.bool_], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """SMs held by the chosen steps, averaged over each bin: exact, from SM-seconds up to each edge."""
    times = np.concatenate((steps["start_s"][chosen], steps["end_s"][chosen]))
    change = np.concatenate((steps["sms"][chosen], -steps["sms"][chosen])).astype(float)
    order = np.argsort(times, kind="stable")
    times, held = times[order], np.cumsum(change[order])
    if not len(times):
        return np.zeros(len(edges) - 1)
    total = np.r_[0.0, np.cumsum(held[:-1] * np.diff(times))]
    upto = np.interp(edges, times, total)
    result: NDArray[np.float64] = np.diff(upto) / np.diff(edges)
    return result


def plot_sm_share(outcome: RunOutcome, summary: Mapping[str, Any], path: Path, window_s: float = WINDOW_S) -> None:
    """Who holds the SMs (as the paper's Fig. 20): the whole run in bins, and some seconds from its middle step by step.

    Prefill is drawn from the bottom, decode from the top: where both reach, colours mix and SMs are shared; white is idle.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    steps, num_sms = outcome.steps, outcome.num_sms
    figure = _figure(11.5, 5.0)
    (whole, zoom), (whole_queue, zoom_queue) = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(3, 1))
    start, end, kind = steps["start_s"], steps["end_s"], _kind(steps)
    present = [i for i in range(len(_KINDS)) if (kind == i).any()]
    if len(steps):
        first, last = float(start.min()), float(end.max())
        edges = np.linspace(first, last, 301)
        base = np.zeros(len(edges) - 1)
        for i in present:
            held = _mean_sms(steps, kind == i, edges)
            lower, upper = (num_sms - held, np.full_like(held, num_sms)) if _KINDS[i][0] == "decode" else (base, base + held)
            whole.stairs(upper, edges, baseline=lower, fill=True, color=_KINDS[i][1], linewidth=0, alpha=_ALPHA)
            base = base + held
        middle = float(np.median(start))
        low = max(first, min(middle - window_s / 2, last - window_s))
        high = min(last, low + window_s)
        inside = (end > low) & (start < high)
        for i in present:
            mine = inside & (kind == i)
            blocks = _blocks(start[mine], end[mine], steps["sms"][mine])
            from_top = _KINDS[i][0] == "decode"
            corners = [((a, num_sms - n), (a, num_sms), (b, num_sms), (b, num_sms - n)) if from_top
                       else ((a, 0), (a, n), (b, n), (b, 0)) for a, b, n in blocks.tolist()]
            zoom.add_collection(PolyCollection(corners, facecolors=_KINDS[i][1], edgecolors="none", alpha=_ALPHA))
        order = np.argsort(start, kind="stable")
        times, queue = start[order], steps["queue"][order]
        # The peak of each bin: thinning points would hide short queues.
        places = np.searchsorted(times, edges[:-1]).clip(0, len(times) - 1)
        whole_queue.stairs(np.maximum.reduceat(queue, places), edges, color="black", linewidth=0.9)
        zoom_queue.step(times, queue, where="post", color="black", linewidth=0.9)
        whole.set_xlim(first, last)
        zoom.set_xlim(low, high)
        whole.axvspan(low, high, ymin=1.005, ymax=1.025, color="black", linewidth=0, clip_on=False)
        bin_ms = 1e3 * (edges[1] - edges[0])
        whole.set_title(f"whole run, mean of each {bin_ms:.0f} ms (black mark: the right part)", fontsize=8.5, pad=8)
        zoom.set_title(f"{high - low:.3g} s from its middle, step by step", fontsize=8.5)
    whole.set_ylim(0, num_sms)
    whole_queue.set_ylim(bottom=0)
    _tidy(whole, "", f"SMs held (of {num_sms}):\nprefill from below, decode from above")
    _tidy(zoom, "", "")
    _tidy(whole_queue, f"{outcome.source} time (s)", "waiting\nrequests")
    _tidy(zoom_queue, f"{outcome.source} time (s)", "")
    whole_queue.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    handles = [Patch(color=_KINDS[i][1], alpha=_ALPHA, linewidth=0, label=_KINDS[i][0]) for i in present]
    if outcome.sm_seconds.get("shared"):
        handles.append(Patch(color=_SHARED, label="both (shared SMs)"))
    handles.append(Patch(facecolor="white", edgecolor="grey", label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    figure.suptitle(f"{label(summary)}: {headline(summary)}", fontsize=9)
    _save(figure, path)


_SM_TIME = (("prefill_only", "prefill", COLOURS[0], ""), ("hybrid", "chunked batch", COLOURS[3], ""),
            ("shared", "shared", COLOURS[2], "///"), ("decode_only", "decode", COLOURS[1], ""), ("idle", "idle", "white", ""))


def plot_comparison(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Latencies (mean, and a tick at P90), throughput, attainment in both readings, and where SM time went."""
    figure = _figure(11.5, 6.2)
    panels = figure.subplots(2, 3).ravel()
    systems = [label(s).replace(" (", "\n(") for s in summaries]
    places = np.arange(len(systems))
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(systems))]
    for axes, (title, name, factor, form) in zip(panels, (
            ("TTFT (s): bar mean, tick P90", "ttft_ms", 1e-3, ".2f"), ("TPOT (ms): bar mean, tick P90", "tpot_ms", 1.0, ".0f"),
            ("end to end (s): bar mean, tick P90", "e2el_ms", 1e-3, ".1f")), strict=False):
        _bars(axes, places, [s[f"mean_{name}"] for s in summaries], factor, form, colours,
              upper=[s[f"p90_{name}"] for s in summaries])
        axes.set_title(title, fontsize=9.5)
    _bars(panels[3], places, [s["request_throughput"] for s in summaries], 1.0, ".2f", colours)
    panels[3].set_title("throughput (requests/s)", fontsize=9.5)
    for shift, reading, hatch in ((-0.2, "mean_length", ""), (0.2, "per_request", "////")):
        _bars(panels[4], places + shift, [s[f"slo_attainment_{reading}"] for s in summaries], 1.0, ".2f", colours, 0.38, hatch)
    panels[4].axhline(0.9, color="black", linewidth=0.8, linestyle=":")
    panels[4].set_ylim(0, 1.12)
    panels[4].set_title("SLO attainment (hatched: per request)", fontsize=9.5)
    base = np.zeros(len(systems))
    for key, name, colour, hatch in _SM_TIME:
        share = np.array([s["sm_share"].get(key) or 0.0 for s in summaries])
        if share.any():
            panels[5].bar(places, share, bottom=base, width=0.65, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5,
                          label=name)
            base += share
    panels[5].set_ylim(0, 1)
    panels[5].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    panels[5].set_title("share of SM time", fontsize=9.5)
    for axes in panels:
        axes.set_xticks(places, systems, rotation=30, ha="right", fontsize=8)
        axes.grid(axis="y", alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(headline(summaries[0]), fontsize=9.5)
    _save(figure, path)


def plot_validation(requests: Mapping[str, Mapping[str, NDArray[np.float64]]],
                    counts: Mapping[str, Mapping[str, NDArray[np.float64]]], title: str, path: Path) -> None:
    """A recorded run and its replay, by name: distributions of TTFT, TPOT and latency; requests running and waiting in time."""
    figure = _figure(11, 6.2)
    grid = figure.add_gridspec(2, 6)
    panels = (("ttft", "TTFT, s", 1.0), ("tpot", "TPOT, ms", 1e3), ("latency", "latency, s", 1.0))
    for place, (metric, text, factor) in enumerate(panels):
        axes = figure.add_subplot(grid[0, 2 * place:2 * place + 2])
        for index, (name, values) in enumerate(requests.items()):
            ordered = np.sort(values[metric]) * factor
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=COLOURS[index],
                      linestyle=STYLES[index], label=name)
        _tidy(axes, text, "share of requests" if place == 0 else "")
        if place == 0:
            axes.legend(frameon=False)
    for place, name in enumerate(("running", "waiting")):
        axes = figure.add_subplot(grid[1, 3 * place:3 * place + 3])
        for index, series in enumerate(counts.values()):
            axes.step(series["t"], series[name], where="post", color=COLOURS[index], linestyle=STYLES[index], linewidth=1.0)
        _tidy(axes, "time, s", f"requests {name}")
    figure.suptitle(title)
    _save(figure, path)


def plot_points(groups: Mapping[str, Sequence[tuple[float, float]]], title: str, path: Path) -> None:
    """Simulated over measured against measured seconds, a colour a group; the band is 10 % either way."""
    figure = _figure(9, 4.6)
    axes = figure.add_subplot()
    for index, (name, pairs) in enumerate(groups.items()):
        measured, simulated = np.array(pairs).T
        axes.scatter(measured, simulated / measured, s=14, color=COLOURS[index % len(COLOURS)], label=name,
                     marker="osD^v"[index // len(COLOURS) % 5])
    axes.axhspan(0.9, 1.1, color="0.92", zorder=0)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_xscale("log")
    _tidy(axes, "measured, s", "simulated / measured")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title)
    _save(figure, path)


def _bars(axes: Any, places: NDArray[Any], values: Sequence[float | None], factor: float, form: str, colours: Sequence[str],
          width: float = 0.65, hatch: str = "", upper: Sequence[float | None] | None = None) -> None:
    """Bars with their values above them, and above a tick at ``upper``; what is undefined has a dash and no bar."""
    axes.bar(places, [(v or 0.0) * factor for v in values], width=width, color=colours, hatch=hatch, edgecolor="white",
             linewidth=0.5)
    for x, value, high in zip(places, values, upper or [None] * len(values), strict=True):
        text, top = ("-", 0.0) if value is None else (format(value * factor, form), value * factor)
        if high is not None:
            top = max(top, high * factor)
            text += f"\nP90 {high * factor:{form}}"
            axes.plot([x - width / 2.6, x + width / 2.6], [high * factor] * 2, color="black", linewidth=1.6)
        axes.annotate(text, (x, top), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom",
                      fontsize=7 if width > 0.5 else 6.5)
    axes.margins(y=0.16 if upper else 0.08)


# --------------------------------------------------------------------------------------------- Perfetto


_CHUNK_ROWS = 8192
_THREADS = {"prefill": 1, "decode": 2, "hybrid": 3}


def perfetto_events(outcome: RunOutcome) -> Iterator[str]:
    """Chrome trace events: a process for the GPU, a thread for each lane, counters only where they change.

    In order of start, a part of the rows at a time: neither the events nor the columns as Python objects stand in memory.
    """
    steps = outcome.steps
    gpu = f"{str(outcome.device.get('gpu')).upper()} ({outcome.source})"
    yield json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": gpu}})
    for lane in sorted(set(steps["lane"].tolist()), key=_THREADS.__getitem__):
        yield json.dumps({"ph": "M", "pid": 1, "tid": _THREADS[lane], "name": "thread_name", "args": {"name": lane}})
    quoted = {reason: json.dumps(reason) for reason in set(steps["reason"].tolist())}
    before: dict[str, Any] = {}
    held_until: dict[str, float] = {}

    def counter(name: str, at_us: float, value: int) -> Iterator[str]:
        if before.get(name) != value:
            before[name] = value
            yield f'{{"ph":"C","pid":1,"name":"{name}","ts":{at_us:.3f},"args":{{"value":{value}}}}}'

    order = np.argsort(steps["start_s"], kind="stable")
    names = ("lane", "start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "context_tokens", "first_layer", "layers",
             "corun_s", "queue", "kv_used_blocks", "reason")
    for begin in range(0, len(order), _CHUNK_ROWS):
        rows = order[begin:begin + _CHUNK_ROWS]
        for (lane, start, end, sms, prefill, seqs, context, layer, layers, corun, queue, kv, reason) in zip(
                *(steps[name][rows].tolist() for name in names), strict=True):
            at, until = start * 1e6, end * 1e6
            for other, free in held_until.items():
                if free < at - 1e-3:
                    yield from counter(f"{other} SMs", free, 0)
            held_until[lane] = until
            title = "mixed" if prefill and seqs else "prefill" if prefill else "decode"
            yield (f'{{"ph":"X","pid":1,"tid":{_THREADS[lane]},"name":"{title}","ts":{at:.3f},"dur":{until - at:.3f},'
                   f'"args":{{"sms":{sms},"prefill_tokens":{prefill},"decode_seqs":{seqs},"context_tokens":{context},'
                   f'"layers":"{layer}-{layer + layers - 1}","beside_other_lane_s":{corun:.6f},"reason":{quoted[reason]}}}}}')
            yield from counter(f"{lane} SMs", at, sms)
            yield from counter("waiting requests", at, queue)
            yield from counter("KV blocks used", at, kv)
    for lane, free in held_until.items():
        yield from counter(f"{lane} SMs", free, 0)


def write_perfetto(outcome: RunOutcome, path: Path) -> None:
    """Streamed: a long run's trace never stands in memory. Open it at ui.perfetto.dev."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            separator = ""
            for event in perfetto_events(outcome):
                file.write(separator + event)
                separator = ",\n"
            file.write("\n]}\n")
        temporary.replace(path)
    except OSError as exc:
        raise cannot_write(path, exc, temporary) from None


# ------------------------------------------------------------------------------------------------- HTML

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}}
h1{{font-size:1.4em}}h2{{font-size:1.1em;margin-top:2em}}table{{border-collapse:collapse;font-size:13px}}
td,th{{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}}td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}pre{{background:#f6f6f6;padding:1em;overflow:auto;font-size:12px}}.source{{color:#a33}}</style></head><body>
<h1>{title}</h1><p class="source">{headline}</p>{body}</body></html>
"""


def _rows_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """Every figure of a summary as text, nested ones by dotted name."""
    rows: dict[str, str] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            rows |= {f"{key}.{inner}": text for inner, text in _rows_of(value).items()}
        else:
            # Four digits, but never as 1.4e+04: a reader compares rows.
            digits = ",.0f" if isinstance(value, float) and abs(value) >= 1000 else ".4g"
            rows[key] = format(value, digits) if isinstance(value, float) else "-" if value is None else str(value)
    return rows


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table><thead>{row(head, 'th')}</thead><tbody>{''.join(row(r, 'td') for r in rows)}</tbody></table>"


def write_html(path: Path, title: str, summaries: Sequence[Mapping[str, Any]], pictures: Sequence[tuple[str, Path]],
               config_toml: str) -> None:
    """One self-contained file: table, plots with their captions, every figure, configuration."""
    head = ["system", *(f"{group} {name}".strip() for group, name, _, _ in TABLE)]
    parts = [_html_table(head, [[label(s), *(_cell(s[key], form) for _, _, key, form in TABLE)] for s in summaries]),
             f"<p>{html.escape(' '.join(_notes(summaries)))}</p>"]
    for caption, picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        text = html.escape(caption)
        parts.append(f'<h2>{text}</h2><img alt="{text}" src="data:image/png;base64,{data}">')
    figures = [_rows_of(s) for s in summaries]
    keys = dict.fromkeys(key for rows in figures for key in rows)
    parts.append("<h2>Every figure</h2>" + _html_table(["", *map(label, summaries)],
                                                       [[key, *(rows.get(key, "-") for rows in figures)] for key in keys]))
    whose = "" if len(summaries) == 1 else f" of {label(summaries[0])} (the others' policies: config.toml in their folders)"
    parts.append(f"<h2>Configuration{html.escape(whose)}</h2><pre>{html.escape(config_toml)}</pre>")
    write_text(path, _PAGE.format(title=html.escape(title), headline=html.escape(headline(summaries[0])), body="".join(parts)))


def write_run_report(folder: Path, outcome: RunOutcome, summary: Mapping[str, Any], config_toml: str) -> None:
    """Plots, Perfetto trace and HTML of one run."""
    cdf, share = folder / "plots" / "latency_cdf.png", folder / "plots" / "sm_share.png"
    plot_cdfs([outcome], [summary], cdf)
    plot_sm_share(outcome, summary, share)
    write_perfetto(outcome, folder / "trace.json")
    write_html(folder / "report.html", f"{label(summary)} on {_plain(summary['trace'])}", [summary],
               [("TTFT and TPOT", cdf), ("SMs over time", share)], config_toml)


def write_comparison_report(folder: Path, outcomes: Sequence[RunOutcome], summaries: Sequence[Mapping[str, Any]],
                            run_folders: Sequence[Path], config_toml: str) -> None:
    """Plots and HTML of a comparison; ``run_folders``: the runs', each with its own report already written."""
    bars, cdf = folder / "plots" / "comparison.png", folder / "plots" / "latency_cdf.png"
    plot_comparison(summaries, bars)
    plot_cdfs(outcomes, summaries, cdf)
    shares = [(f"SMs over time: {label(summary)}", run / "plots" / "sm_share.png")
              for summary, run in zip(summaries, run_folders, strict=True)]
    write_html(folder / "report.html", f"{len(summaries)} systems on {_plain(summaries[0]['trace'])}", summaries,
               [("Comparison", bars), ("TTFT and TPOT", cdf), *shares], config_toml)
