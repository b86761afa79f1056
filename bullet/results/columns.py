"""What a run is in rows: steps, requests, and the outcome that holds both."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.config import RunConfig

STEP_COLUMNS: Mapping[str, str] = MappingProxyType({
    "step": "i8", "lane": "str", "kind": "str", "start_s": "f8", "end_s": "f8", "sms": "i4", "prefill_tokens": "i4",
    "decode_seqs": "i4", "context_tokens": "i8", "first_layer": "i4", "layers": "i4", "predicted_s": "f8", "actual_s": "f8",
    "corun_s": "f8", "corun_sms": "i4", "queue": "i4", "kv_used_blocks": "i4", "target_prefill_sms": "i4",
    "target_decode_sms": "i4", "reason": "str",
})
"""Columns of steps.parquet, in the order of a row. ``predicted_s`` is null where the policy predicts nothing;
``corun_sms``: SMs of the first co-runner (0: none); ``queue``: requests waiting at launch."""

REQUEST_COLUMNS: Mapping[str, str] = MappingProxyType({
    "id": "i8", "arrival_s": "f8", "prompt_tokens": "i8", "output_tokens": "i8", "status": "str", "reason": "str",
    "admitted_s": "f8", "first_token_s": "f8", "finish_s": "f8", "generated_tokens": "i8", "preemptions": "i4",
    "ttft_slo_per_request_s": "f8", "ttft_slo_mean_length_s": "f8",
})
"""Columns of requests.parquet. Times are null where the request did not get that far."""

BATCH_ROWS = 1 << 16
"""Rows of a batch, wherever they are kept: sums over batches come out the same for a run in memory and one in files."""


def _packed(cells: list[Any], kind: str) -> NDArray[Any]:
    """One column; through ``array``, which is half as dear as numpy's look at each cell. Null times become NaN."""
    if kind == "str":
        return np.array(cells, dtype=object)
    if cells and cells.count(cells[0]) == len(cells):  # as many columns of a lock-step system are
        return np.full(len(cells), math.nan if cells[0] is None else cells[0], dtype=kind)
    code = {"f8": "d", "i8": "q", "i4": "i"}[kind]
    try:
        return np.frombuffer(array(code, cells), dtype=kind)
    except TypeError:
        if kind != "f8":
            raise
        return np.frombuffer(array("d", [math.nan if cell is None else cell for cell in cells]))


class Table:
    """Columns of a results file as numpy arrays (strings as an array of objects; null times as NaN)."""

    columns: Mapping[str, str] = MappingProxyType({})

    def __init__(self, data: dict[str, NDArray[Any]]) -> None:
        self.data = data

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def batches(self, *names: str) -> Iterator[dict[str, NDArray[Any]]]:
        """These columns (all, if none is named) ``BATCH_ROWS`` rows at a time, the last batch with fewer."""
        for begin in range(0, len(self), BATCH_ROWS):
            yield {name: self[name][begin:begin + BATCH_ROWS] for name in names or self.columns}

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[Any, ...]]) -> Any:
        """Rows in the order of ``columns``."""
        return cls.from_cells([cell for row in rows for cell in row])

    @classmethod
    def from_cells(cls, cells: list[Any]) -> Any:
        """Rows one after the other, as a flat list: cheaper to gather, and much cheaper to turn into columns."""
        width = len(cls.columns)
        assert len(cells) % width == 0, f"{len(cells)} cells of {width} columns"
        return cls({name: _packed(cells[i::width], kind) for i, (name, kind) in enumerate(cls.columns.items())})

    @classmethod
    def concatenate(cls, tables: Sequence[Any]) -> Any:
        """One after the other."""
        if not tables:
            return cls.from_cells([])
        return cls({name: np.concatenate([t[name] for t in tables]) for name in cls.columns})

    @classmethod
    def assembled(cls, rows: int, pieces: Iterable[Mapping[str, NDArray[Any]]]) -> Any:
        """As :meth:`concatenate`, of pieces that come one by one and ``rows`` rows in all: none stands in memory twice."""
        whole = {name: np.empty(rows, dtype=object if kind == "str" else kind) for name, kind in cls.columns.items()}
        at = 0
        for piece in pieces:
            end = at + len(next(iter(piece.values())))
            for name, column in piece.items():
                whole[name][at:end] = column
            at = end
        assert at == rows, f"{at} rows of {rows}"
        return cls(whole)


class StepTable(Table):
    """Steps, in the order in which they ended."""

    columns = STEP_COLUMNS


class RequestTable(Table):
    """Requests, in the order in which they were closed."""

    columns = REQUEST_COLUMNS


@dataclass
class RunOutcome:
    """What a driver returns. ``itl_s``: gaps between tokens, ``itl_counts``: how many tokens had each (int32);
    where the run had a warm-up, of those after it.

    ``sm_seconds``: prefill_only, decode_only, hybrid, shared, idle; adds up to N x ``span_s`` (I5).
    """

    config: RunConfig
    system: str
    steps: StepTable
    requests: RequestTable
    itl_s: NDArray[np.float64]
    itl_counts: NDArray[np.integer[Any]]
    sm_seconds: dict[str, float]
    span_s: float
    num_sms: int
    kv_blocks: int
    split_changes: int
    decisions: int
    decision_wall_s: float
    tpot_slo_s: float
    device: dict[str, Any] = field(default_factory=dict)
    source: str = "simulated"
    ways: dict[str, NDArray[Any]] | None = None
    """Of a cluster: each request's way (docs/cluster.md)."""


class Rows(NamedTuple):
    """What a run leaves in rows, where nothing else of it is asked."""

    steps: StepTable
    requests: RequestTable
