"""Summaries as printed tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.files import write_json, write_text

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
    arrivals = f"{rate:g} req/s" if rate is not None else "recorded arrivals"
    group = f"{summary['tensor_parallel']} x " if summary["tensor_parallel"] > 1 else ""
    note = str(summary["device_source"])
    if summary["source"] != "measured":
        note = f"device model: {note}"
    elif not note.startswith("no partition"):  # a real run has no model; what matters is whether SMs were partitioned
        note = f"partition: {note}"
    return (f"{summary['source']} on {group}{str(summary['gpu']).upper()} ({note}), "
            f"{file_name(summary['model'])}; {file_name(summary['trace'])}, {arrivals}, {summary['offered']} "
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
            f"{QUICKEST_STEP_MS:g} ms:", "set device.host_step_s, device.host_prefill_step_s, device.host_request_s."]


def notes_on(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    first = summaries[0]
    notes = ["TTFT and TPOT are of finished requests. SLO attainment: share of all offered requests with "
             f"TPOT <= {first['tpot_slo_ms']:g} ms", "and TTFT within rate x the trace's mean prompt (mean-len) or rate x own "
             "prompt (per-req)."]
    if any(s["estimator"] == "oracle" for s in summaries):
        notes.append("oracle: asks the simulated device itself; an upper bound, not a predictor.")
    notes += host_notes(summaries)
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
        block = [[title, *(cell_text(s[key], form) for s in summaries)] for g, title, key, form in TABLE if g == group]
        widths = [max(map(len, cells)) for cells in block]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*block, strict=True)]
        columns.append([group.center(len(lines[0])), *lines])
    widths = [max(map(len, cells)) for cells in columns]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
             .rstrip() for row in zip(*columns, strict=True)]
    lines.insert(2, "-" * max(map(len, lines)))
    return "\n".join([headline(summaries[0]), *model_line(summaries[0]), "", *lines, "", *notes_on(summaries)])


def write_comparison(folder: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """``comparison.json`` and ``comparison.csv``: every figure of every system; nested ones are in the JSON alone."""
    write_json(folder / "comparison.json", summaries)
    keys = [k for k, v in summaries[0].items() if not isinstance(v, dict)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([["" if s[k] is None else s[k] for k in keys] for s in summaries])
    write_text(folder / "comparison.csv", out.getvalue())
