"""Summaries as printed tables."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.config import TABLE_4_SLOS, trace_name
from bullet.files import write_json, write_text
from bullet.workload.table import closed_text

NAME_WIDTH = 28

TABLE: tuple[tuple[str, str, str, str], ...] = (
    # group, title, key of the summary, format
    *((f"{name} ms", title, f"{part}_{name.lower()}_ms", form) for name, form in (("TTFT", ".0f"), ("TPOT", ".1f"))
      for title, part in (("mean", "mean"), ("P90", "p90"), ("P99", "p99"))),
    ("req/s", "done", "request_throughput", ".2f"), ("req/s", "good", "request_goodput", ".2f"),
    ("SLO attainment", "mean-len", "slo_attainment_mean_length", ".3f"),
    ("SLO attainment", "per-req", "slo_attainment_per_request", ".3f"),
    ("requests", "done", "completed", "d"), ("requests", "rejected", "rejected", "d"),
    ("requests", "unfin.", "unfinished", "d"),
)


WIDTH = 80
"""Columns of a terminal, unless it is known to have more."""
ABSOLUTE = ("SLO", "attained", "slo_attainment_mean_length", ".3f")
"""In place of both readings, where the TTFT objective is the same for every request."""


def columns_of(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Those of ``TABLE`` that say something of these runs."""
    if not all(s.get("ttft_slo_s") is not None and s.get("ttft_slo_s_per_token") is None for s in summaries):
        return list(TABLE)
    return [column if column[2] != "slo_attainment_mean_length" else ABSOLUTE for column in TABLE
            if column[2] != "slo_attainment_per_request"]


def cell_text(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def label(summary: Mapping[str, Any]) -> str:
    """The system's name with the estimator that it asked; of a user's policy, without the folders."""
    name = file_name(summary["system"])
    asked = f" ({summary['estimator']})" if summary["estimator"] else ""
    room = NAME_WIDTH - len(asked)
    return (name if len(name) <= room else ".." + name[-(room - 2):]) + asked


def file_name(name: object) -> str:
    """A file without its folders, which config.toml and the summary keep."""
    return str(name).rpartition("/")[2]


def headline(summary: Mapping[str, Any]) -> str:
    """What the figures are: source, hardware, model, workload."""
    rate = summary["request_rate"]
    clients = summary.get("max_concurrency")
    arrivals = (f"{rate:g} req/s" if rate is not None else "recorded arrivals" if clients is None else
                closed_text(clients, summary["think_time_s"], summary["think"]))
    group = f"{summary['tensor_parallel']} x " if summary["tensor_parallel"] > 1 else ""
    note = str(summary["device_source"])
    if summary["source"] != "measured":
        note = f"device model: {note}"
    elif not note.startswith("no partition"):  # a real run has no model; what matters is whether SMs were partitioned
        note = f"partition: {note}"
    return (f"{summary['source']} on {group}{str(summary['gpu']).upper()} ({note}), "
            f"{file_name(summary['model'])}; {trace_name(str(summary['trace']))}, {arrivals}, {summary['offered']} "
            f"{'request' if summary['offered'] == 1 else 'requests'}, seed {summary['seed']}")


def model_line(summary: Mapping[str, Any]) -> list[str]:
    """Size of a simulated model, and what its reader had to decide; of runs that kept neither, nothing."""
    if summary.get("parameters") is None:
        return []
    said = [f"{summary['parameters'] / 1e9:.4g} B parameters", f"{summary['weight_bytes'] / 2**30:.4g} GiB of weights",
            f"{summary['kv_bytes_per_token'] / 1024:.4g} KiB of KV a token"]
    if summary["window_tokens"]:
        within = f"{summary['window_kv_bytes_per_token'] / 1024:.4g}"
        said[-1] += f" ({within} of them in windows of {summary['window_tokens']} tokens)"
    return [f"{file_name(summary['model'])}: {', '.join(said)}" + "".join(f"; {note}" for note in summary["model_notes"])]


QUICKEST_STEP_MS = 5.0
"""No public engine ends a step sooner: its host takes as long."""


def host_notes(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A word where simulated steps are shorter than any engine's, as their host time is left at 0."""
    short = [s["mean_decode_step_ms"] for s in summaries if s.get("host_time") is False
             and s["mean_decode_step_ms"] is not None and s["mean_decode_step_ms"] < QUICKEST_STEP_MS]
    if not short:
        return []
    return [f"host time 0 assumed: the kernels of a decode step take {min(short):.2g} ms, and no public engine's steps are under "
            f"{QUICKEST_STEP_MS:g} ms: set device.host_step_s, device.host_prefill_step_s, device.host_request_s."]


def objectives(summary: Mapping[str, Any]) -> str:
    """The objectives in seconds, where they come from, and what attainment and goodput are."""
    tpot = f"TPOT <= {summary['tpot_slo_ms'] / 1e3:.4g} s"
    rate, ttft_s = summary.get("ttft_slo_s_per_token"), summary.get("ttft_slo_s")
    good = ("" if "request_goodput" not in summary else
            " Good requests per second met both" + (" (mean-len)." if rate is not None or ttft_s is None else "."))
    share = "SLO attainment: share of all offered requests with"
    if ttft_s is None:  # of an earlier version
        return f"{share} {tpot} and TTFT within rate x the trace's mean prompt (mean-len) or rate x own prompt (per-req).{good}"
    if rate is None:
        text = f"{share} TTFT <= {ttft_s:.4g} s and {tpot}.{good}"
    else:
        text = (f"{share} {tpot} and TTFT <= {ttft_s:.4g} s, {rate * 1e3:g} ms x the trace's mean prompt of "
                f"{summary['mean_prompt_tokens']:,.0f} tokens (mean-len), or {rate * 1e3:g} ms x own prompt (per-req).{good}")
    names, trace = (summary.get("slo_by_default") or "").upper().split(), summary["trace"]
    if names and trace in TABLE_4_SLOS:
        text += f" {' and '.join(names)}: the paper's Table 4."
    elif names:
        flags = " and ".join(f"--{name.lower()}" for name in names)
        text += (f" {' and '.join(names)}: ShareGPT's of the paper's Table 4, taken by default: it has none for "
                 f"{trace_name(str(trace))}; set yours with {flags}.")
    return text


def notes_on(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    first = summaries[0]
    notes = [f"TTFT and TPOT are of finished requests. {objectives(first)}"]
    if any(s["estimator"] == "oracle" for s in summaries):
        notes.append("oracle: asks the simulated device itself; an upper bound, not a predictor.")
    hits = [f"{label(s)} {s['prefix_hit_rate']:.1%}" for s in summaries if s.get("prefix_hit_rate") is not None]
    if hits:
        notes.append(f"prefix cache hits: {', '.join(hits)}")
    notes += host_notes(summaries)
    rejected = {label(s): ", ".join(f"{count} {reason}" for reason, count in s["rejected_by_reason"].items())
                for s in summaries if s["rejected"]}
    if rejected and len(rejected) == len(summaries) and len(set(rejected.values())) == 1:
        notes.append(f"rejected: {next(iter(rejected.values()))}")
    else:
        notes += [f"rejected by {name}: {reasons}" for name, reasons in rejected.items()]
    return notes


def comparison_table(summaries: Sequence[Mapping[str, Any]], width: int = WIDTH,
                     measured: Mapping[str, Any] | None = None) -> str:
    """Aligned text, one system a row; says first that it is simulated, and on what. Columns that do not fit in ``width`` stand in
    a further block of rows below. ``measured``: figures of a benchmark of the real engine, as a row of their own, and what the
    simulated ones are of them."""
    rows = list(summaries) if measured is None else [*summaries, measured]
    return "\n".join([*(wrapped(line, width) for line in (headline(summaries[0]), *model_line(summaries[0]))), "",
                      grid([label(s) for s in rows],
                           [(group, title, [cell_text(s.get(key), form) for s in rows])
                            for group, title, key, form in columns_of(summaries)], width),
                      "", *(wrapped(note, width) for note in (
                          *notes_on(summaries), *([] if measured is None else measured_notes(summaries, measured))))])


def measured_row(figures: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A benchmark's figures as a row of the table; its goodput is by its own objectives, which its file does not hold."""
    kept = {key: value for key, value in figures.items() if key != "request_goodput"}
    return {**kept, "system": f"measured: {file_name(file)}", "estimator": None, "source": "measured"}


def measured_notes(summaries: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> list[str]:
    """Simulated figures as multiples of the measured ones."""
    keys = {"mean_ttft_ms": "mean TTFT", "p99_ttft_ms": "P99 TTFT", "mean_tpot_ms": "mean TPOT", "p99_tpot_ms": "P99 TPOT",
            "request_throughput": "req/s"}
    notes = ["measured: by a benchmark of a real engine, on whatever hardware it ran; - is not in its file."]
    for summary in summaries:
        ratios = [f"{name} {summary[key] / measured[key]:.2f}" for key, name in keys.items()
                  if isinstance(measured.get(key), int | float) and measured[key] and summary[key] is not None]
        notes.append(f"simulated / measured, {label(summary)}: {', '.join(ratios) or 'no figure in common'}")
    return notes


def wrapped(text: str, width: int) -> str:
    """Lines of at most ``width`` columns."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def grid(names: Sequence[str], columns: Sequence[tuple[str, str, Sequence[str]]], width: int, corner: str = "system") -> str:
    """Columns of (group, title, cells) beside the rows' names, groups kept together; blocks one below the other where the width
    does not suffice."""
    blocks: list[list[list[str]]] = []
    head = ["", corner, *names]
    room = 0
    for group in dict.fromkeys(group for group, *_ in columns):
        part = [[title, *cells] for g, title, cells in columns if g == group]
        widths = [max(map(len, cells)) for cells in part]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*part, strict=True)]
        column = [group.center(len(lines[0])), *lines]
        if not blocks or room + 2 + len(max(column, key=len)) > width:
            blocks.append([head])
            room = max(map(len, head))
        blocks[-1].append(column)
        room += 2 + max(map(len, column))
    text = []
    for block in blocks:
        widths = [max(map(len, cells)) for cells in block]
        lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
                 .rstrip() for row in zip(*block, strict=True)]
        lines.insert(2, "-" * max(map(len, lines)))
        text.append("\n".join(lines))
    return "\n\n".join(text)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lines of CSV; ``None`` is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return out.getvalue()


def write_comparison(folder: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """``comparison.json`` and ``comparison.csv``: every figure of every system; nested ones are in the JSON alone."""
    write_json(folder / "comparison.json", summaries)
    keys = [k for k, v in summaries[0].items() if not isinstance(v, dict)]
    write_text(folder / "comparison.csv", csv_text(keys, ([s.get(k) for k in keys] for s in summaries)))
