"""Workloads: which requests arrive when. Built-in traces by name, or a file; docs/traces.md tells how to add one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.config import KV_BLOCK_TOKENS, WorkloadConfig, is_phased
from bullet.errors import ConfigError, TraceError
from bullet.workload.arrivals import (
    LATEST_ARRIVAL_S,
    draw_arrivals,
    draw_thinks,
    recorded_arrivals,
    scheduled_arrivals,
    stream,
)
from bullet.workload.builtin import BUILTIN, Builtin, load_builtin
from bullet.workload.cuts import Window, counted_from
from bullet.workload.table import BlockIds, Reading, Table, shared_prefixes

__all__ = ["BUILTIN", "Builtin", "ClosedLoop", "Description", "PhaseTrace", "Reading", "Workload", "describe", "describe_table",
           "load_builtin", "load_trace", "load_workload", "resolved", "stream"]

MOST_REQUESTS = 10**8
"""Three arrays of that length take 2.4 GB; a larger count is a slip of the hand."""
FILE_OPTIONS = ("format", "arrival_column", "prompt_column", "output_column", "arrival_unit", "skip_failed", "tokenizer")


class Description(NamedTuple):
    """Statistics of a trace or workload; ``None`` where there are no arrival times, or too few to tell.

    ``prompt``, ``output``: tokens as mean, p50, p90, max (percentiles interpolated as numpy does). ``span_s``: last
    arrival - first. ``rate_req_per_s``: rows / span. ``cv``: coefficient of variation of the gaps, 1 for Poisson.
    """

    rows: int
    prompt: tuple[float, float, float, int]
    output: tuple[float, float, float, int]
    span_s: float | None
    rate_req_per_s: float | None
    cv: float | None


class ClosedLoop(NamedTuple):
    """``clients`` that each wait for their last request to end, then think; ``think_s``: float64 (n,), in the order in which
    thinking begins, whoever's it is."""

    clients: int
    think_s: NDArray[np.float64]


class PhaseTrace(NamedTuple):
    """A phase's trace as it was read."""

    trace: str
    rate_req_per_s: float
    seconds: float
    source: str
    reading: Reading | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, ids 0 .. n - 1.

    ``arrival_s``: float64 (n,), never decreasing; ``prompt_tokens``, ``output_tokens``: int64 (n,). ``source``: where the lengths
    are from, one line. ``mean_prompt_tokens``: over the whole trace, not this sample (the ``mean_length`` reading of the TTFT
    objective). ``closed``: arrivals follow from the run (``arrival_s`` is then all zero): the requests are sent in order, by
    whichever client is ready. ``phases``: of rates that change, the trace of each. ``shared_prefix``: which prompts begin with
    the same full KV blocks as another's (request -> (that one, blocks)); read where a policy shares prefixes. ``reading``: how
    the trace was read.
    """

    name: str
    source: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    mean_prompt_tokens: float
    shared_prefix: Mapping[int, tuple[int, int]] | None = None
    reading: Reading | None = None
    closed: ClosedLoop | None = None
    phases: tuple[PhaseTrace, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    def describe(self) -> Description:
        """Statistics of these requests (not of the whole trace)."""
        return describe_table(Table(self.arrival_s, self.prompt_tokens, self.output_tokens))


def load_workload(config: WorkloadConfig, seed: int, replica: int = 0) -> Workload:
    """The requests of a run: same arguments, same requests.

    Drawn arrivals: lengths are sampled with replacement, or taken in order if ``config.sample`` is off. Recorded
    arrivals: rows are taken in order from the first, since a recorded time belongs to its lengths. Lengths depend on
    the seed and count only, never on the rate; ``replica`` tells apart repetitions under one seed. No row is dropped
    or clipped: what does not fit a model is for the driver to reject.

    Raises :class:`TraceError` for a trace that is unknown, unreadable or too short, :class:`ConfigError` for options
    that do not go together. The arrays are read-only: a comparison hands the same ones to every policy.
    """
    if is_phased(config.trace):
        return _load_phases(config, seed, replica)
    table, source = load_trace(config)
    rows = len(table.prompt_tokens)
    count = _count(config, rows)
    recorded, closed = config.arrivals == "recorded", None
    if count > rows and (recorded or not config.sample):
        raise TraceError(f"{config.trace}: has {rows} requests, {count} were asked for (workload.num_requests, "
                         "--num-requests): ask for fewer, or let lengths repeat with --arrivals poisson and "
                         "workload.sample = true")
    if recorded:
        if table.arrival_s is None and table.reading is not None and table.reading.question:
            raise TraceError(table.reading.question)
        arrival_s = recorded_arrivals(table.arrival_s, config)[:count]
    elif config.arrivals == "closed":
        assert config.concurrency is not None
        arrival_s, closed = np.zeros(count), ClosedLoop(config.concurrency, draw_thinks(config, count, seed, replica))
    elif config.rate_profile is not None:
        from bullet.workload.schedule import rates_of

        found = rates_of(config)
        assert found is not None
        arrival_s, _ = scheduled_arrivals(config, found[0], count, seed, replica)
    else:
        arrival_s = draw_arrivals(config, count, seed, replica)
    if recorded or not config.sample:
        pick = np.arange(count)
    else:
        pick = stream(seed, "lengths", replica).integers(0, rows, count)
    in_order = recorded or not config.sample
    workload = Workload(config.trace, source, arrival_s, table.prompt_tokens[pick], table.output_tokens[pick],
                        float(table.prompt_tokens.mean()), _shared(table, count) if in_order else None, table.reading, closed)
    return _sealed(config, workload)


def _count(config: WorkloadConfig, rows: int) -> int:
    count = rows if config.num_requests is None else config.num_requests
    if count > MOST_REQUESTS:
        raise ConfigError(f"workload.num_requests (--num-requests) = {count}: must be {MOST_REQUESTS:,} at most")
    return count


def _load_phases(config: WorkloadConfig, seed: int, replica: int) -> Workload:
    """Phases of several traces in turns. A request's lengths depend on its number and on the phase it falls into; ``sample`` off:
    each phase goes on in its trace where its last turn ended. The mean prompt is that of a whole cycle."""
    from bullet.workload.schedule import parse_phases, rates_of

    phases = parse_phases(config.trace)
    alone = {phase.trace: dataclasses.replace(config, trace=phase.trace, rate_scale=1.0, rate_req_per_s=1.0) for phase in phases}
    loaded = {trace: load_trace(one) for trace, one in alone.items()}
    tables = [loaded[phase.trace][0] for phase in phases]
    count = _count(config, sum(len(table.prompt_tokens) for table, _ in loaded.values()))
    found = rates_of(config)
    assert found is not None
    arrival_s, which = scheduled_arrivals(config, found[0], count, seed, replica)
    prompt, output = np.empty(count, np.int64), np.empty(count, np.int64)
    for number, (phase, table) in enumerate(zip(phases, tables, strict=True)):
        mine, rows = which == number, len(table.prompt_tokens)
        if config.sample:
            pick = stream(seed, f"lengths of phase {number}", replica).integers(0, rows, count)[mine]
        else:
            pick = np.arange(int(mine.sum()))
            if len(pick) > rows:
                raise TraceError(f"{phase.trace}: has {rows} requests, {len(pick)} of {count} fall into its phases "
                                 "(workload.sample = false): ask for fewer, or let lengths repeat with workload.sample = true")
        prompt[mine], output[mine] = table.prompt_tokens[pick], table.output_tokens[pick]
    share = [phase.rate_req_per_s * phase.seconds for phase in phases]
    mean = sum(part * float(table.prompt_tokens.mean()) for part, table in zip(share, tables, strict=True)) / sum(share)
    parts = tuple(PhaseTrace(*phase, loaded[phase.trace][1], loaded[phase.trace][0].reading) for phase in phases)
    source = "; ".join(dict.fromkeys(part.source for part in parts))
    return _sealed(config, Workload(config.trace, source, arrival_s, prompt, output, mean, phases=parts))


def _sealed(config: WorkloadConfig, workload: Workload) -> Workload:
    """With a warm-up that leaves something, and arrays that nobody writes to."""
    arrival_s, closed, count = workload.arrival_s, workload.closed, len(workload)
    # Of a closed loop it is not known beforehand how long it takes.
    if not counted_from(config.warmup, np.arange(count), arrival_s if closed is None else np.linspace(0, LATEST_ARRIVAL_S, count)
                        ).any():
        raise ConfigError(f"workload.warmup (--warmup) = {config.warmup!r}: leaves none of the {count} requests, which arrive "
                          f"within {arrival_s[-1] - arrival_s[0]:.6g} s: must be less")
    for array in (workload.arrival_s, workload.prompt_tokens, workload.output_tokens):
        array.flags.writeable = False
    return workload


def describe(name: str) -> Description:
    """Statistics of a built-in trace as recorded; :class:`TraceError` if there is none of that name."""
    return describe_table(load_builtin(name))


def resolved(config: WorkloadConfig, workload: Workload) -> WorkloadConfig:
    """The configuration with what ``None`` stood for, so that the stored one is whole: how many requests, and the unit in which
    the trace's times were read (``s`` where it has none, or dates)."""
    unit = config.arrival_unit if workload.reading is None else workload.reading.arrival_unit
    return dataclasses.replace(config, num_requests=len(workload), arrival_unit=unit)


def load_trace(config: WorkloadConfig, *, inspecting: bool = False) -> tuple[Table, str]:
    """The trace that a configuration names, the part in its window, and one line that says where it is from."""
    name = config.trace
    if name in BUILTIN:
        default = WorkloadConfig()
        # A stored configuration has arrival_unit = "s", which is what they are in.
        option = next((o for o in FILE_OPTIONS if getattr(config, o) != getattr(default, o)
                       and (o, getattr(config, o)) != ("arrival_unit", "s")), None)
        if option is not None:
            raise ConfigError(f"workload.{option} = {getattr(config, option)!r}: is for trace files, {name} is "
                              f"built in (a file of that name: ./{name})")
        return _capped(_cut(load_builtin(name), config), config), BUILTIN[name].source
    # What looks like a path is one, so that a mistyped file name is called missing and not an unknown trace.
    if name and ("/" in name or "." in name or _exists(name)):
        from bullet.workload.read import read_trace  # twenty modules, for a file alone

        return _capped(read_trace(config, inspecting=inspecting), config), name
    raise TraceError(f"unknown trace {name!r}: choose one of {', '.join(BUILTIN)}, or give a path to a .csv or .jsonl "
                     "file")


def _capped(table: Table, config: WorkloadConfig) -> Table:
    """Without the rows whose prompt is longer than asked for, which the reading counts."""
    most = config.max_prompt_tokens
    if most is None or not (long := table.prompt_tokens > most).any():
        return table
    rows = np.flatnonzero(~long)
    if not len(rows):
        raise TraceError(f"{config.trace}: no prompt has {most} tokens or less (workload.max_prompt_tokens, --max-prompt): the "
                         f"shortest has {table.prompt_tokens.min()}")
    blocks, reading, arrival_s = table.blocks, table.reading, table.arrival_s
    if blocks is not None:
        ends = blocks.ends
        starts = np.concatenate([[0], ends[:-1]])
        blocks = BlockIds(np.concatenate([blocks.ids[starts[i]:ends[i]] for i in rows]), np.cumsum((ends - starts)[rows]),
                          blocks.block_tokens)
    if reading is not None:
        left_out = f"longer than {most:,} tokens (--max-prompt): {int(long.sum()):,} rows left out"
        reading = dataclasses.replace(reading, notes=(*reading.notes, left_out))
    return Table(None if arrival_s is None else arrival_s[rows] - arrival_s[rows[0]], table.prompt_tokens[rows],
                 table.output_tokens[rows], reading, blocks)


def _cut(table: Table, config: WorkloadConfig) -> Table:
    """A built-in trace's window, and what there is to say of its reading."""
    columns = "prompt, output" + (", arrival" if table.arrival_s is not None else "")
    reading = Reading("built in", columns, "s" if table.arrival_s is not None else None, len(table.prompt_tokens))
    if config.window is None:
        return table._replace(reading=reading)
    keep, words = Window.parse(config.window).of(len(table.prompt_tokens), table.arrival_s, config.trace)
    arrival_s = table.arrival_s
    return Table(None if arrival_s is None else arrival_s[keep] - arrival_s[keep][0], table.prompt_tokens[keep],
                 table.output_tokens[keep], dataclasses.replace(reading, window=words))


def _shared(table: Table, count: int) -> dict[int, tuple[int, int]] | None:
    """Shared prefixes of the first ``count`` rows by their block ids."""
    if table.blocks is None:
        return None
    end = int(table.blocks.ends[count - 1])
    return shared_prefixes(BlockIds(table.blocks.ids[:end], table.blocks.ends[:count], table.blocks.block_tokens),
                           table.prompt_tokens, KV_BLOCK_TOKENS)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a file name, or with a NUL in it
        return False


def describe_table(table: Table) -> Description:
    def tokens(values: NDArray[np.int64]) -> tuple[float, float, float, int]:
        p50, p90 = np.percentile(values, (50, 90))
        return float(values.mean()), float(p50), float(p90), int(values.max())

    span = rate = cv = None
    if table.arrival_s is not None:
        span = float(table.arrival_s[-1] - table.arrival_s[0])
        if span > 0:
            gaps = np.diff(table.arrival_s)
            rate, cv = len(table.arrival_s) / span, float(gaps.std() / gaps.mean())
    return Description(len(table.prompt_tokens), tokens(table.prompt_tokens), tokens(table.output_tokens),
                       span, rate, cv)
