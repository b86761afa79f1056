"""Results drawn: each function returns a matplotlib ``Figure``, which a notebook shows and :func:`save` writes.

matplotlib is used without pyplot (a quarter of its start-up) and imported inside functions. Colours are those of Okabe
and Ito, told apart by colour-blind readers. Nothing here computes a metric.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bullet.files import cannot_write, whole_file
from bullet.results import metrics
from bullet.results.columns import RequestTable, StepTable
from bullet.results.tables import headline, label
from bullet.results.timeline import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
STYLES = ("-", "--", "-.", ":")
MAX_POINTS = 2000
WINDOW_S = 10.0
"""Seconds of a run that the SM plot shows step by step."""


def figure_of(width: float, height: float) -> Figure:
    """Empty, in inches, without pyplot. A notebook shows it all the same: it finds ``_repr_png_``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()


def tidy(axes: Any, x: str, y: str) -> None:
    """Names of the axes with their units, a light grid, no box."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """As PNG; equal figures, equal bytes. Makes the folder. :class:`~bullet.errors.ResultsError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise cannot_write(path, exc) from None
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def _thin(count: int) -> NDArray[np.int64]:
    """Indices of at most ``MAX_POINTS`` of ``count`` points, both ends among them."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, MAX_POINTS)).astype(np.int64))


def _cdf(axes: Any, values: NDArray[np.float64], name: str, index: int) -> None:
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    keep = _thin(len(ordered))
    axes.step(ordered[keep], share[keep], where="post", label=name, color=COLOURS[index % len(COLOURS)],
              linestyle=STYLES[index % len(STYLES)], linewidth=1.7)


def plot_cdfs(requests: Sequence[RequestTable], summaries: Sequence[Mapping[str, Any]]) -> Figure:
    """TTFT and TPOT of finished requests, one curve a system, objectives as vertical lines."""
    figure = figure_of(10, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (table, summary) in enumerate(zip(requests, summaries, strict=True)):
        _cdf(left, metrics.ttft_s(table) * 1e3, label(summary), i)
        _cdf(right, metrics.tpot_s(table) * 1e3, label(summary), i)
    slo = requests[0]["ttft_slo_mean_length_s"]
    slos = (float(slo[0]) * 1e3 if len(slo) else None, summaries[0]["tpot_slo_ms"])
    reading = "\n(mean length)" if summaries[0].get("ttft_slo_s_per_token") else ""
    for axes, limit, name in ((left, slos[0], f"TTFT SLO{reading}"), (right, slos[1], "TPOT SLO")):
        axes.set_xscale("log")
        if limit is not None:
            axes.axvline(limit, color="black", linestyle=(0, (1, 1)), linewidth=1.0)
            axes.annotate(f"{name}\n{limit:.0f} ms", (limit, 0.02), xytext=(4, 0), textcoords="offset points", fontsize=7.5,
                          bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0})
    left.set_ylim(0, 1.02)
    tidy(left, "time to first token, TTFT (ms, log scale)", "share of finished requests")
    tidy(right, "time per output token, TPOT (ms, log scale)", "")
    for axes in (left, right):
        axes.grid(which="minor", axis="x", alpha=0.12, linewidth=0.5)
    if len(requests) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(requests)), fontsize=8.5,
                      frameon=False)
    title = headline(summaries[0])
    figure.suptitle(title if len(requests) > 1 else f"{label(summaries[0])}: {title}", fontsize=9)
    return figure


Columns = StepTable | Mapping[str, NDArray[Any]]

# What a step does, in the order of the legend; see-through, so that shared SMs show.
_ALPHA = 0.75
_KINDS = (("prefill", COLOURS[0]), ("mixed batch", COLOURS[3]), ("decode", COLOURS[1]))
_SHARED = "#AF6930"
"""What decode's colour over prefill's comes to, both see-through."""


def _kind(steps: Columns) -> NDArray[np.int64]:
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


def _mean_sms(steps: Columns, chosen: NDArray[np.bool_], edges: NDArray[np.float64]) -> NDArray[np.float64]:
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


class _QueuePeaks:
    """The longest queue at a launch of each bin; of a bin without one that at the next launch. Thinned points would hide it."""

    def __init__(self, edges: NDArray[np.float64]) -> None:
        bins = len(edges) - 1
        self.edges, self.peak = edges, np.full(bins, -1.0)
        self.first_s, self.first = np.full(bins, np.inf), np.zeros(bins)

    def add(self, start_s: NDArray[np.float64], queue: NDArray[Any]) -> None:
        """Launches, in any order."""
        order = np.argsort(start_s, kind="stable")
        start_s, queue = start_s[order], queue[order]
        places = (np.searchsorted(self.edges, start_s, side="right") - 1).clip(0, len(self.peak) - 1)
        np.maximum.at(self.peak, places, queue)
        bins, heads = np.unique(places, return_index=True)
        earlier = start_s[heads] < self.first_s[bins]
        self.first_s[bins[earlier]], self.first[bins[earlier]] = start_s[heads][earlier], queue[heads][earlier]

    def values(self) -> NDArray[np.float64]:
        """By bin."""
        found = np.flatnonzero(self.peak >= 0)
        after = found[np.searchsorted(found, np.arange(len(self.peak))).clip(0, len(found) - 1)]
        return np.where(self.peak >= 0, self.peak, self.first[after])


def plot_sm_share(steps: StepTable, summary: Mapping[str, Any], window_s: float = WINDOW_S) -> Figure:
    """Who holds the SMs (as the paper's Fig. 20): the whole run in bins, and some seconds from its middle step by step.

    Prefill is drawn from the bottom, decode from the top: where both reach, colours mix and SMs are shared; white is idle.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    num_sms = summary["num_sms"]
    figure = figure_of(11.5, 5.0)
    (whole, zoom), (whole_queue, zoom_queue) = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(3, 1))
    present: list[int] = []
    if len(steps):
        starts, last = steps["start_s"], max(float(batch["end_s"].max()) for batch in steps.batches("end_s"))
        first, middle = float(starts.min()), float(np.median(starts))
        del starts
        edges = np.linspace(first, last, 301)
        low = max(first, min(middle - window_s / 2, last - window_s))
        high = min(last, low + window_s)
        shares, peaks, near = np.zeros((len(_KINDS), len(edges) - 1)), _QueuePeaks(edges), []
        shown = None  # of a cluster the right part is one device
        for batch in steps.batches("start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "queue", *(
                ["lane"] if "layout" in summary else [])):
            kind = _kind(batch)
            present += [i for i in range(len(_KINDS)) if i not in present and (kind == i).any()]
            for i in present:
                shares[i] += _mean_sms(batch, kind == i, edges)
            peaks.add(batch["start_s"], batch["queue"])
            inside = (batch["end_s"] > low) & (batch["start_s"] < high)
            if "lane" in batch:
                device = np.array([device_of(lane) for lane in batch["lane"].tolist()], dtype=object)
                shown = device[0] if shown is None and len(device) else shown
                inside &= device == shown
            near.append({"kind": kind[inside], **{name: batch[name][inside] for name in ("start_s", "end_s", "sms", "queue")}})
        present.sort()
        base = np.zeros(len(edges) - 1)
        for i in present:
            held = shares[i]
            lower, upper = (num_sms - held, np.full_like(held, num_sms)) if _KINDS[i][0] == "decode" else (base, base + held)
            whole.stairs(upper, edges, baseline=lower, fill=True, color=_KINDS[i][1], linewidth=0, alpha=_ALPHA)
            base = base + held
        window = {name: np.concatenate([piece[name] for piece in near]) for name in near[0]}
        start, end, kind = window["start_s"], window["end_s"], window["kind"]
        for i in present:
            mine = kind == i
            blocks = _blocks(start[mine], end[mine], window["sms"][mine])
            from_top = _KINDS[i][0] == "decode"
            corners = [((a, num_sms - n), (a, num_sms), (b, num_sms), (b, num_sms - n)) if from_top
                       else ((a, 0), (a, n), (b, n), (b, 0)) for a, b, n in blocks.tolist()]
            zoom.add_collection(PolyCollection(corners, facecolors=_KINDS[i][1], edgecolors="none", alpha=_ALPHA))
        order = np.argsort(start, kind="stable")
        whole_queue.stairs(peaks.values(), edges, color="black", linewidth=0.9)
        zoom_queue.step(start[order], window["queue"][order], where="post", color="black", linewidth=0.9)
        whole.set_xlim(first, last)
        zoom.set_xlim(low, high)
        whole.axvspan(low, high, ymin=1.005, ymax=1.025, color="black", linewidth=0, clip_on=False)
        bin_ms = 1e3 * (edges[1] - edges[0])
        whole.set_title(f"whole run, mean of each {bin_ms:.0f} ms (black mark: the right part)", fontsize=8.5, pad=8)
        zoom.set_title(f"{high - low:.3g} s from its middle, step by step" + (f": {shown}" if shown else ""), fontsize=8.5)
    whole.set_ylim(0, num_sms)
    whole_queue.set_ylim(bottom=0)
    tidy(whole, "", f"SMs held (of {num_sms}):\nprefill from below, decode from above")
    tidy(zoom, "", "")
    tidy(whole_queue, f"{summary['source']} time (s)", "waiting\nrequests")
    tidy(zoom_queue, f"{summary['source']} time (s)", "")
    whole_queue.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    handles = [Patch(color=_KINDS[i][1], alpha=_ALPHA, linewidth=0, label=_KINDS[i][0]) for i in present]
    if summary["sm_share"].get("shared"):
        handles.append(Patch(color=_SHARED, label="both (shared SMs)"))
    handles.append(Patch(facecolor="white", edgecolor="grey", label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    figure.suptitle(f"{label(summary)}: {headline(summary)}", fontsize=9)
    return figure


_SM_TIME = (("prefill_only", "prefill", COLOURS[0], ""), ("hybrid", "chunked batch", COLOURS[3], ""),
            ("shared", "shared", COLOURS[2], "///"), ("decode_only", "decode", COLOURS[1], ""), ("idle", "idle", "white", ""))


def plot_comparison(summaries: Sequence[Mapping[str, Any]]) -> Figure:
    """Latencies (mean, and a tick at P90), throughput, attainment in both readings, and where SM time went."""
    figure = figure_of(11.5, 6.2)
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
    return figure


def plot_validation(requests: Mapping[str, Mapping[str, NDArray[np.float64]]],
                    counts: Mapping[str, Mapping[str, NDArray[np.float64]]], title: str) -> Figure:
    """A recorded run and its replay, by name: distributions of TTFT, TPOT and latency; requests running and waiting in time."""
    figure = figure_of(11, 6.2)
    grid = figure.add_gridspec(2, 6)
    panels = (("ttft", "TTFT, s", 1.0), ("tpot", "TPOT, ms", 1e3), ("latency", "latency, s", 1.0))
    for place, (metric, text, factor) in enumerate(panels):
        axes = figure.add_subplot(grid[0, 2 * place:2 * place + 2])
        for index, (name, values) in enumerate(requests.items()):
            ordered = np.sort(values[metric]) * factor
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=COLOURS[index],
                      linestyle=STYLES[index], label=name)
        tidy(axes, text, "share of requests" if place == 0 else "")
        if place == 0:
            axes.legend(frameon=False)
    for place, name in enumerate(("running", "waiting")):
        axes = figure.add_subplot(grid[1, 3 * place:3 * place + 3])
        for index, series in enumerate(counts.values()):
            axes.step(series["t"], series[name], where="post", color=COLOURS[index], linestyle=STYLES[index], linewidth=1.0)
        tidy(axes, "time, s", f"requests {name}")
    figure.suptitle(title)
    return figure


def plot_bands(panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float, float | None]]]]], x: str,
               title: str) -> Figure:
    """A panel a figure, a curve a system: points (x, mean, half the width of the mean's interval or ``None``), a band where there
    is one."""
    rows = (len(panels) + 2) // 3
    figure = figure_of(11.5, 0.6 + 2.9 * rows)
    names = list(dict.fromkeys(name for _, curves in panels for name in curves))
    for axes, (label_text, curves) in zip(figure.subplots(rows, 3, squeeze=False).ravel(), panels, strict=False):
        for name, points in curves.items():
            index = names.index(name)
            colour = COLOURS[index % len(COLOURS)]
            at, mean = [p[0] for p in points], np.array([p[1] for p in points])
            axes.plot(at, mean, color=colour, linestyle=STYLES[index // len(COLOURS) % len(STYLES)], marker="o", markersize=3,
                      linewidth=1.5, label=name)
            half = np.array([0.0 if p[2] is None else p[2] for p in points])
            if half.any():
                axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.18, linewidth=0)
        tidy(axes, x, label_text)
    for axes in figure.axes[len(panels):]:
        axes.remove()
    if names != [""]:
        curves_of = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend([curves_of[name] for name in names], names, loc="outside lower center", ncols=min(5, len(names)),
                      fontsize=8.5, frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


def plot_tornado(bars: Sequence[tuple[str, str, str, float, float]], base: float, together: Sequence[float], x: str,
                 title: str) -> Figure:
    """A bar an unknown, from what it leads to at its low end to that at its high one (name, low, high, both values), the widest
    on top; dots below: all of them at once. Left of zero something else wins."""
    figure = figure_of(9, 1.7 + 0.42 * (len(bars) + bool(together)))
    axes = figure.add_subplot()
    rows = [name for name, *_ in bars] + (["all together"] if together else [])
    for i, (_, low, high, at_low, at_high) in enumerate(bars):
        for value, end, side, colour in ((at_low, low, -0.15, COLOURS[0]), (at_high, high, 0.15, COLOURS[1])):
            axes.barh(i + side, value - base, left=base, color=colour, height=0.28,
                      label=None if i else "at the low end" if side < 0 else "at the high end")
            right = value >= base
            axes.annotate(end, (value, i + side), xytext=(3 if right else -3, 0), textcoords="offset points", va="center",
                          ha="left" if right else "right", fontsize=7)
    if together:
        axes.plot(together, [len(bars)] * len(together), "o", color="0.35", markersize=4, label="a point of all ranges")
    axes.axvline(base, color="0.35", linewidth=0.9)
    axes.axvline(0, color="black", linewidth=1.2, linestyle="--", label="the winner changes")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    tidy(axes, x, "")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


def plot_points(groups: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """Simulated over measured against measured seconds, a colour a group; the band is 10 % either way."""
    figure = figure_of(9, 4.6)
    axes = figure.add_subplot()
    for index, (name, pairs) in enumerate(groups.items()):
        measured, simulated = np.array(pairs).T
        axes.scatter(measured, simulated / measured, s=14, color=COLOURS[index % len(COLOURS)], label=name,
                     marker="osD^v"[index // len(COLOURS) % 5])
    axes.axhspan(0.9, 1.1, color="0.92", zorder=0)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_xscale("log")
    tidy(axes, "measured, s", "simulated / measured")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title)
    return figure


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
