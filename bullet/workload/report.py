"""What was read, in lines of 80 columns: above a run's result, and as all that ``bullet-sim inspect`` prints."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from bullet.config import KV_BLOCK_TOKENS, WorkloadConfig, is_phased
from bullet.workload import Description, Reading, Workload, describe_table, load_trace, load_workload
from bullet.workload.table import closed_text, duration

WIDTH = 80
LOW_LOAD, HIGH_LOAD = 0.3, 1.0
"""Shares of capacity between which a run's load needs no word."""


def run_lines(workload: Workload, config: WorkloadConfig, *, shares_prefixes: bool = False,
              load: float | None = None) -> list[str]:
    """The trace and what was taken of it. ``shares_prefixes``: whether a policy of the run does; ``load``: offered load as a
    share of capacity, where it is known, said where it leaves nothing to compare."""
    lines = _phase_lines(workload) if workload.phases else _reading_lines(config.trace, workload.source, workload.reading)
    found = workload.describe()
    arrivals = f"{config.arrivals} arrivals"
    if workload.closed is not None:
        arrivals = closed_text(workload.closed.clients, config.think_time_s, config.think)
    elif config.rate_req_per_s is None and config.arrivals != "recorded":
        from bullet.workload.schedule import mean_rate

        mean = mean_rate(config)
        assert mean is not None, "drawn arrivals have a rate"
        what = "" if config.rate_profile is None else f" by {config.rate_profile}"
        scale = "" if config.rate_scale == 1 else f" (rates x {config.rate_scale:g})"
        arrivals += f"{what}, {mean:.4g} req/s on average{scale}"
    elif config.arrivals != "recorded":
        arrivals += f" at {config.rate_req_per_s:g} req/s"
    elif config.time_scale != 1:
        arrivals += f", {config.time_scale:g} times as fast"
    rate = "" if workload.closed is not None else f", {_rate(found)}"
    lines += _wrapped(f"requests: {found.rows:,}, {arrivals}{rate}", "  ")
    lines += _wrapped(_lengths(found), "  ")
    if config.warmup is not None:
        unit = " requests" if config.warmup.isdecimal() else ""
        lines += _wrapped(f"warm-up: the first {config.warmup}{unit} are left out of the statistics", "  ")
    if workload.shared_prefix is not None:
        shared = workload.shared_prefix
        tokens = sum(blocks for _, blocks in shared.values())
        share = tokens * KV_BLOCK_TOKENS / max(1, int(workload.prompt_tokens.sum()))
        used = "" if shares_prefixes else "; not used: no policy of this run shares prefixes"
        lines += _wrapped(f"shared prefixes: {len(shared):,} prompts begin as an earlier one does, {share:.1%} of all prompt "
                          f"tokens{used}", "  ")
    elif workload.reading is not None and any("hash_ids:" in note for note in workload.reading.notes):
        lines += _wrapped("shared prefixes: not used, as rows are drawn at random (--arrivals recorded, or workload.sample = "
                          "false)", "  ")
    if load is not None and not LOW_LOAD <= load <= HIGH_LOAD:
        word = "policies will hardly differ" if load < LOW_LOAD else "queues grow as long as it lasts"
        lines += _wrapped(f"offered load: {load:.2f} of capacity: {word}", "  ")
    return lines


def _phase_lines(workload: Workload) -> list[str]:
    """The phases, and then each trace once."""
    cycle_s = sum(phase.seconds for phase in workload.phases)
    turns = ", ".join(f"{one.trace} at {one.rate_req_per_s:g} req/s for {duration(one.seconds)}" for one in workload.phases)
    lines = _wrapped(f"phases: {turns}; again every {duration(cycle_s)}")
    for phase in {phase.trace: phase for phase in workload.phases}.values():
        lines += _reading_lines(phase.trace, phase.source, phase.reading)
    return lines


def inspect_lines(config: WorkloadConfig) -> list[str]:
    """All that there is to say of a trace: how it is read, its times, its lengths, what is not read. Nothing is kept."""
    if is_phased(config.trace):
        return run_lines(load_workload(config, 0), config)
    table, source = load_trace(config, inspecting=True)
    lines = _reading_lines(config.trace, source, table.reading, "" if config.skip_failed else "; a run needs --skip-failed")
    found = describe_table(table)
    asked = table.reading is not None and table.reading.arrival_unit is None
    lines += _wrapped(f"requests: {found.rows:,}, {'times of an unknown unit' if asked else _rate(found)}", "  ")
    lines += _wrapped(_lengths(found), "  ")
    if table.arrival_s is not None and found.rate_req_per_s is not None and len(table.arrival_s) >= 20:
        head = max(2, len(table.arrival_s) // 10)
        span = float(table.arrival_s[head - 1] - table.arrival_s[0])
        if span > 0:
            lines += _wrapped(f"rate of the first tenth: {(head - 1) / span:.3g} req/s; most in a minute: "
                              f"{_most(table.arrival_s):,} requests", "  ")
    if table.reading is not None and table.reading.question:
        lines += _wrapped(f"recorded arrivals: {table.reading.question.removeprefix(f'{Path(config.trace)}: ')}", "  ")
    return lines


def _most(arrival_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    return int(np.max(np.searchsorted(arrival_s, arrival_s + 60.0) - np.arange(len(arrival_s))))


def _reading_lines(trace: str, source: str, reading: Reading | None, failed: str = "") -> list[str]:
    if reading is None:
        return _wrapped(f"trace {trace} ({source})")
    if reading.format == "built in":
        lines = _wrapped(f"trace {trace}: {reading.rows:,} rows, built in ({source})")
    else:
        lines = _wrapped(f"trace {Path(trace).name}: {reading.rows:,} rows, read {reading.format}")
        unit = "" if reading.unit is None else f" ({reading.unit})"
        lines += _wrapped(f"columns: {reading.columns}{unit}", "  ")
    if reading.window:
        lines += _wrapped(f"window: {reading.window}", "  ")
    if reading.failed:
        lines += _wrapped(f"failed: {reading.failed:,} left out (first {reading.first_failed}){failed}", "  ")
    for note in reading.notes:
        lines += _wrapped(note, "  ")
    if reading.ignored:
        lines += _wrapped(f"not read: {', '.join(repr(name)[1:-1] for name in reading.ignored)}", "  ")
    return lines


def _rate(found: Description) -> str:
    if found.span_s is None:
        return "no times"
    if found.rate_req_per_s is None:
        return "all at once"
    return f"{duration(found.span_s)} long, {found.rate_req_per_s:.3g} req/s (CV of the gaps {found.cv:.3g})"


def _lengths(found: Description) -> str:
    def text(what: str, figures: tuple[float, float, float, int]) -> str:
        mean, p50, p90, most = figures
        return f"{what} {mean:,.0f} tokens (p50 {p50:,.0f}, p90 {p90:,.0f}, most {most:,})"

    return f"{text('prompts', found.prompt)}; {text('outputs', found.output)}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)  # names of columns are whatever a file has
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False,
                         break_long_words=False)


