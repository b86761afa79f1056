"""Workloads: which requests arrive when. Built-in traces by name, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.workload.arrivals import draw_arrivals, recorded_arrivals, stream
from bullet.workload.readers import Table, read_trace

__all__ = ["BUILTIN", "Builtin", "Workload", "describe", "load_builtin", "load_workload", "stream"]


class Builtin(NamedTuple):
    """A shipped trace: one line on what it is and where it is from (data/README.md has commit and licence)."""

    description: str
    source: str


BUILTIN: Mapping[str, Builtin] = MappingProxyType({
    "azure-code": Builtin("Azure LLM inference 2023, code completion", "Azure/AzurePublicDataset, CC-BY-4.0"),
    "azure-conv": Builtin("Azure LLM inference 2023, conversation", "Azure/AzurePublicDataset, CC-BY-4.0"),
    "sharegpt": Builtin("ShareGPT, single turn, lengths only", "efeslab/Nanoflow, Apache-2.0"),
    "arxiv": Builtin("arXiv summarisation, long prompts, lengths only", "microsoft/vattention, MIT"),
})


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, ids 0 .. n - 1.

    ``arrival_s``: float64 (n,); ``prompt_tokens``, ``output_tokens``: int64 (n,). ``mean_prompt_tokens``: over the whole
    trace, not this sample (the ``mean_length`` reading of the TTFT objective).
    """

    name: str
    source: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    mean_prompt_tokens: float

    def __len__(self) -> int:
        return len(self.arrival_s)


def load_builtin(name: str) -> Table:
    """A shipped trace."""
    path = Path(__file__).parent / "data" / f"{name}.npz"
    with np.load(path) as data:
        arrival = data.get("arrival_s")
        return Table(arrival, data["prompt_tokens"].astype(np.int64), data["output_tokens"].astype(np.int64))


def load_workload(config: WorkloadConfig, seed: int) -> Workload:
    """The requests of a run; :class:`TraceError` names file, line and what is allowed."""
    if config.trace in BUILTIN:
        table, source = load_builtin(config.trace), BUILTIN[config.trace].source
    elif "/" in config.trace or "." in config.trace or Path(config.trace).exists():
        table, source = read_trace(config), config.trace
    else:
        raise TraceError(f"unknown trace {config.trace!r}: choose one of {', '.join(BUILTIN)}, or give a path to a .csv or "
                         ".jsonl file")
    rows = len(table.prompt_tokens)
    count = config.num_requests
    if config.arrivals == "recorded":
        # A recorded trace is taken as it is, from its start: lengths stay with their times.
        count = rows if count is None else count
        _enough(config.trace, count, rows)
        arrivals = recorded_arrivals(table.arrival_s, config, config.trace)[:count]
        pick = np.arange(count)
    else:
        count = rows if count is None else count
        arrivals = draw_arrivals(config, count, seed)
        if config.sample:
            pick = stream(seed, "lengths").integers(0, rows, count)
        else:
            _enough(config.trace, count, rows)
            pick = np.arange(count)
    return Workload(config.trace, source, arrivals, table.prompt_tokens[pick], table.output_tokens[pick],
                    float(table.prompt_tokens.mean()))


def _enough(trace: str, count: int, rows: int) -> None:
    if count > rows:
        raise TraceError(f"{trace}: has {rows} requests: --num-requests must be at most that (asked: {count}); lengths can "
                         "repeat with --arrivals poisson and workload.sample = true")


class Description(NamedTuple):
    """Statistics of a trace; ``None`` where it has no arrival times."""

    rows: int
    prompt: tuple[float, float, float, int]  # mean, p50, p90, max
    output: tuple[float, float, float, int]
    span_s: float | None
    rate_req_per_s: float | None
    cv: float | None


def describe(name: str) -> Description:
    """Of a built-in trace, as recorded."""
    table = load_builtin(name)

    def four(values: NDArray[np.int64]) -> tuple[float, float, float, int]:
        return (float(values.mean()), float(np.percentile(values, 50)), float(np.percentile(values, 90)), int(values.max()))

    span = rate = cv = None
    if table.arrival_s is not None:
        gaps = np.diff(table.arrival_s)
        span = float(table.arrival_s[-1])
        rate, cv = len(table.arrival_s) / span, float(gaps.std() / gaps.mean())
    return Description(len(table.prompt_tokens), four(table.prompt_tokens), four(table.output_tokens), span, rate, cv)
