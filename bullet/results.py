"""One folder a run: rows as they come, merged at the end, nothing overwritten, nothing lost.

``config.toml`` (resolved), ``requests.parquet``, ``steps.parquet``, ``summary.json``; ``timing.json`` (wall-clock figures:
the one file that differs between equal runs). While a run goes on rows go to numbered part files; closing merges them
through a temporary file and a rename. An interrupted run keeps its rows, and its summary says ``"complete": false``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.config import RunConfig, to_toml
from bullet.errors import ResultsError

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

PART_ROWS = 16384


class Table:
    """Columns of a results file as numpy arrays (strings as an array of objects; null times as NaN)."""

    columns: Mapping[str, str] = MappingProxyType({})

    def __init__(self, data: dict[str, NDArray[Any]]) -> None:
        self.data = data

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.data[name]

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Any, ...]]) -> Any:
        """Rows in the order of ``columns``."""
        data: dict[str, NDArray[Any]] = {}
        parts = zip(*rows, strict=True) if rows else ((),) * len(cls.columns)
        for (name, kind), values in zip(cls.columns.items(), parts, strict=True):
            data[name] = np.array(values, dtype=object if kind == "str" else kind)
        return cls(data)

    @classmethod
    def concatenate(cls, tables: Sequence[Any]) -> Any:
        """One after the other."""
        if not tables:
            return cls.from_rows([])
        return cls({name: np.concatenate([t[name] for t in tables]) for name in cls.columns})


class StepTable(Table):
    """Steps, in the order in which they ended."""

    columns = STEP_COLUMNS


class RequestTable(Table):
    """Requests, in the order in which they were closed."""

    columns = REQUEST_COLUMNS


@dataclass
class RunOutcome:
    """What a driver returns. ``itl_s``: gaps between tokens, ``itl_counts``: how many tokens had each.

    ``sm_seconds``: prefill_only, decode_only, hybrid, shared, idle; adds up to N x ``span_s`` (I5).
    """

    config: RunConfig
    system: str
    steps: StepTable
    requests: RequestTable
    itl_s: NDArray[np.float64]
    itl_counts: NDArray[np.int64]
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


def _arrow(table: Table, source: str) -> Any:
    import pyarrow as pa

    arrays, fields = [], []
    for name, kind in table.columns.items():
        values = table[name]
        if kind == "str":
            # Names repeat: a dictionary of the few, codes for the many. Built by hand: handing lists to pyarrow would
            # import pandas where it is installed.
            known = {text: i for i, text in enumerate(sorted(set(values.tolist())))}
            codes = np.fromiter((known[v] for v in values.tolist()), dtype=np.int32, count=len(values))
            array = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(list(known), type=pa.string()))
        elif kind == "f8":
            array = pa.array(values, mask=np.isnan(values))
        else:
            array = pa.array(values)
        arrays.append(array)
        fields.append(pa.field(name, array.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata={"source": source}))


def write_parquet(path: Path, table: Table, source: str) -> None:
    """Write through a temporary file, so that a reader never sees half a table."""
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".tmp")
    pq.write_table(_arrow(table, source), temporary, compression="zstd", row_group_size=1 << 20)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """As :func:`write_parquet`, for text."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Strict JSON: an undefined figure is null, never NaN."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def create_folder(folder: Path) -> None:
    """Make a fresh results folder; an empty one may be used, anything else is refused."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ResultsError(f"{folder}: exists already and is not an empty folder: choose another --out (nothing is "
                               "overwritten)")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.tmp"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ResultsError(f"{folder}: cannot be written ({exc.strerror}): choose another --out") from None


class RunWriter:
    """Takes a run's rows. ``close`` ends a whole run, ``abort`` one that was stopped."""

    def __init__(self, folder: Path, *, source: str = "simulated", part_rows: int = PART_ROWS) -> None:
        create_folder(folder)
        self.folder = folder
        self.source = source
        self.part_rows = part_rows
        self._parts = folder / "parts"
        self._parts.mkdir()
        self._rows: dict[type[Table], list[tuple[Any, ...]]] = {StepTable: [], RequestTable: []}
        self._written: dict[type[Table], list[Path]] = {StepTable: [], RequestTable: []}
        self._step_rows, self._request_rows = self._rows[StepTable], self._rows[RequestTable]
        self._tables: tuple[StepTable, RequestTable] | None = None

    def resolved(self, config: RunConfig) -> None:
        """Store the configuration as it will be run."""
        write_text(self.folder / "config.toml", to_toml(config))

    def step(self, row: tuple[Any, ...]) -> None:
        """A row of ``STEP_COLUMNS``."""
        self._step_rows.append(row)
        if len(self._step_rows) >= self.part_rows:
            self._flush(StepTable)

    def request(self, row: tuple[Any, ...]) -> None:
        """A row of ``REQUEST_COLUMNS``."""
        self._request_rows.append(row)
        if len(self._request_rows) >= self.part_rows:
            self._flush(RequestTable)

    def _flush(self, cls: type[Table]) -> None:
        rows = self._rows[cls]
        if not rows:
            return
        path = self._parts / f"{cls.__name__.removesuffix('Table').lower()}s-{len(self._written[cls]):05d}.parquet"
        write_parquet(path, cls.from_rows(rows), self.source)
        self._written[cls].append(path)
        rows.clear()

    def tables(self) -> tuple[StepTable, RequestTable]:
        """All rows so far."""
        if self._tables is None:
            found = []
            for cls, rows in self._rows.items():
                parts = [read_table(path, cls) for path in self._written[cls]]
                found.append(cls.concatenate([*parts, cls.from_rows(rows)]))
            self._tables = (found[0], found[1])
        return self._tables

    def _merge(self) -> None:
        steps, requests = self.tables()
        write_parquet(self.folder / "steps.parquet", steps, self.source)
        write_parquet(self.folder / "requests.parquet", requests, self.source)
        for paths in self._written.values():
            for path in paths:
                path.unlink()
        self._parts.rmdir()

    def close(self, outcome: RunOutcome, summary: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Merge the parts; write summary and timing."""
        self._merge()
        write_json(self.folder / "summary.json", {"complete": True, **summary})
        write_json(self.folder / "timing.json", timing)

    def abort(self, why: str) -> None:
        """Keep what there is, and say that it is not all."""
        self._tables = None
        self._merge()
        status = self.tables()[1]["status"].tolist()
        counts = {name: status.count(name) for name in ("finished", "rejected", "unfinished")}
        write_json(self.folder / "summary.json", {"complete": False, "why": why, "source": self.source,
                                                  "offered": len(status), **counts})


def read_table(path: Path, cls: type[Table]) -> Any:
    """Read a results file back; :class:`ResultsError` names it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as exc:
        raise ResultsError(f"{path}: cannot be read as parquet ({exc})") from None
    missing = [name for name in cls.columns if name not in table.column_names]
    if missing:
        raise ResultsError(f"{path}: not a results file of this version: no column {', '.join(missing)}")
    data: dict[str, NDArray[Any]] = {}
    for name, kind in cls.columns.items():
        column = table.column(name).combine_chunks()
        if kind == "str":
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            names = np.array(column.dictionary.to_pylist(), dtype=object)
            codes = column.indices.to_numpy(zero_copy_only=False)
            data[name] = names[codes] if len(codes) else np.empty(0, dtype=object)
        else:
            data[name] = column.to_numpy(zero_copy_only=False).astype(kind)
    return cls(data)


def load_run(folder: Path) -> tuple[dict[str, Any], StepTable, RequestTable]:
    """Summary, steps and requests of a stored run."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ResultsError(f"{folder}: no readable summary.json ({exc})") from None
    return summary, read_table(folder / "steps.parquet", StepTable), read_table(folder / "requests.parquet", RequestTable)
