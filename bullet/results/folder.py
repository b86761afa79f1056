"""One folder a run: rows as they come, merged at the end, nothing overwritten, nothing lost.

``config.toml`` (resolved), ``requests.parquet``, ``steps.parquet``, ``summary.json``; ``timing.json`` (wall-clock figures:
the one file that differs between equal runs). While a run goes on rows go to numbered part files; closing merges them
through a temporary file and a rename. An interrupted run keeps its rows, and its summary says ``"complete": false``; so
does, from the first moment, that of a run that is killed outright. docs/results.md describes the files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bullet import door, parquet, signals
from bullet.config import RunConfig, load_run_config, to_toml
from bullet.errors import ResultsError
from bullet.files import LOCK, Claim, cannot_write, write_json, write_text
from bullet.results.columns import BATCH_ROWS, REQUEST_COLUMNS, STEP_COLUMNS, RequestTable, RunOutcome, StepTable, Table

PART_ROWS = 16384
"""Rows that are held in memory before they go to a part file: 6 MB; a killed run loses no more than these."""
KEPT_ROWS = 1 << 15
"""Rows of parts that stay in memory as well: 5 MB."""
IDLE_S, MOST_S = 2.0, 4.0
"""Measured rows go to the disk when they are as old as this and nothing runs, or in any case (:meth:`RunWriter.poll`)."""


def _arrow(table: Table, metadata: Mapping[str, str]) -> Any:
    import pyarrow as pa

    def numbers(values: NDArray[Any]) -> Any:
        """NaN is null. From the bytes, as all here: ``pa.array`` would import pandas where it is installed."""
        present = ~np.isnan(values)
        valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        data = pa.py_buffer(np.ascontiguousarray(values))
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, data])

    arrays, fields = [], []
    for name, kind in table.columns.items():
        values = table[name]
        if kind == "str":
            # Names repeat: a dictionary of the few, codes for the many.
            texts = values.tolist()
            known = {text: i for i, text in enumerate(sorted(set(texts)))}
            codes = np.fromiter(map(known.__getitem__, texts), dtype=np.int32, count=len(texts))
            names = [text.encode() for text in known]
            ends = np.cumsum([0, *map(len, names)], dtype=np.int32)
            array = pa.DictionaryArray.from_arrays(
                numbers(codes), pa.StringArray.from_buffers(len(names), pa.py_buffer(ends), pa.py_buffer(b"".join(names))))
        else:
            array = numbers(values)
        arrays.append(array)
        fields.append(pa.field(name, array.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=dict(metadata)))


def write_parquet(path: Path, table: Table, metadata: Mapping[str, str]) -> None:
    """Whole or not at all. Equal rows and metadata, equal bytes.

    ``metadata``: at least ``source`` (simulated, measured). :class:`ResultsError` if it cannot be written.
    """
    def parts() -> Iterator[Any]:
        cls, none = StepTable if isinstance(table, StepTable) else RequestTable, True
        for columns in table.batches():
            yield _arrow(cls(columns), metadata)
            none = False
        if none:
            yield _arrow(cls.from_cells([]), metadata)

    # Dictionaries of numbers nearly all different, and statistics of a row group, cost three quarters of the time
    # and make the file larger.
    parquet.write_tables(path, parts(), write_statistics=False,
                         use_dictionary=[name for name, kind in table.columns.items() if kind == "str"])


class StoredSteps(StepTable):
    """Steps that stay in their files (and a last few in memory): columns are read when they are asked for, and not kept."""

    def __init__(self, paths: Sequence[Path] = (), rest: StepTable | None = None, rows: int = 0) -> None:
        super().__init__({})
        self.paths, self.rest, self.rows = list(paths), rest, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.concatenate([batch[name] for batch in self.batches(name)])

    def batches(self, *names: str) -> Iterator[dict[str, NDArray[Any]]]:
        wanted = names or tuple(self.columns)
        held: list[dict[str, NDArray[Any]]] = []
        count = 0
        rest = [] if self.rest is None else [{name: self.rest[name] for name in wanted}]
        for piece in chain(_pieces(self.paths, self.columns, wanted), rest):
            held.append(piece)
            count += len(piece[wanted[0]])
            while count >= BATCH_ROWS:
                whole = held[0] if len(held) == 1 else {name: np.concatenate([h[name] for h in held]) for name in wanted}
                yield {name: column[:BATCH_ROWS] for name, column in whole.items()}
                count -= BATCH_ROWS
                held = [{name: column[BATCH_ROWS:] for name, column in whole.items()}] if count else []
        if count:
            yield {name: np.concatenate([h[name] for h in held]) for name in wanted}


def _pieces(paths: Sequence[Path], columns: Mapping[str, str], names: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Columns of the files, a row group at a time."""
    for path in paths:
        for table in parquet.row_groups(path, names, ResultsError):
            yield {name: _column(table.column(name), columns[name]) for name in names}


class RunWriter:
    """Takes a run's rows. ``close`` ends a whole run, ``abort`` one that was stopped.

    As a context manager it aborts by itself if the block is left, by whatever exception, before ``close``; if that comes
    before ``resolved``, when nothing has run, it leaves no trace. Raises :class:`ResultsError` if ``folder`` exists and is
    not empty, or cannot be written.
    """

    def __init__(self, folder: Path, *, source: str = "simulated", part_rows: int = PART_ROWS) -> None:
        self._stopping = self._merged = self.ended = self._resolved = False
        self.part_rows = part_rows
        self._step_limit = part_rows * len(STEP_COLUMNS)
        signals.listen(self)  # from here on nothing is stopped half-way
        try:
            self._claim = Claim(folder)
        except BaseException:
            signals.unlisten(self)
            raise
        self.folder = self._claim.folder
        self.source = source
        self.metadata = {"source": source}
        self._parts = self.folder / "parts"
        self._cells: dict[type[Table], list[Any]] = {StepTable: [], RequestTable: []}
        self._written = {StepTable: 0, RequestTable: 0}  # part files
        self._rows = {StepTable: 0, RequestTable: 0}  # in them
        self._kept: dict[type[Table], list[Any] | None] = {StepTable: [], RequestTable: []}
        """What stands in the part files, while it is little: a short run does not read its own rows back."""
        self._step_cells, self._request_cells = self._cells[StepTable], self._cells[RequestTable]
        self._offered: int | None = None
        self._tables: tuple[StepTable, RequestTable] | None = None
        self._flushed_s = time.monotonic()
        try:
            self._parts.mkdir()
            self._say_incomplete("still running, or killed; rows that were written are in parts/", {})
        except BaseException as exc:
            self._undo()
            if isinstance(exc, OSError):
                raise cannot_write(self._parts, exc) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if not self.ended and exc is not None and not (
                self._resolved or any(self._cells.values()) or any(self._written.values())):
            self._undo()
        elif not self.ended:
            why = ("left before its end" if exc is None else "interrupted" if isinstance(exc, KeyboardInterrupt)
                   else f"{type(exc).__name__}: {exc}")
            # A full disk stopped the run and stops this too: the part files stay, and the first error is the one to tell.
            with contextlib.suppress(ResultsError) if exc is not None else contextlib.nullcontext(), signals.held():
                self.abort(why)
        self._end()
        if exc is None:
            signals.check()  # too late for this run, which is whole; not for what would follow

    def _end(self) -> None:
        self.ended = True
        self._claim.release()
        signals.unlisten(self)

    def _undo(self) -> None:
        with contextlib.suppress(OSError):  # somebody else's files are in there by now
            (self.folder / "summary.json").unlink(missing_ok=True)
            self._parts.rmdir()
        self._claim.release(undo=True)
        self._end()

    def resolved(self, config: RunConfig, offered: int | None = None) -> None:
        """Store the configuration as it will be run; its hardware, model and policy go into the tables' metadata.

        ``offered``: how many requests there are, so that those without a row count as unfinished if the run is stopped.
        """
        self._resolved, self._offered = True, offered
        write_text(self.folder / "config.toml", to_toml(config))
        self.metadata |= {"gpu": config.device.gpu, "model": config.device.model, "policy": config.policy.name}

    def step(self, row: tuple[Any, ...]) -> None:
        """A row of ``STEP_COLUMNS``. Raises :class:`~bullet.signals.Stopped`, the row kept, once ``request_stop`` was called."""
        cells = self._step_cells
        cells.extend(row)
        if len(cells) >= self._step_limit:
            if len(cells) >= self.part_rows * len(STEP_COLUMNS):
                self._flush(StepTable)
            if self._stopping:
                raise signals.stopped()

    def request(self, row: tuple[Any, ...]) -> None:
        """A row of ``REQUEST_COLUMNS``."""
        cells = self._request_cells
        cells.extend(row)
        if len(cells) >= self.part_rows * len(REQUEST_COLUMNS):
            self._flush(RequestTable)

    def request_stop(self) -> None:
        """Stop the run at its next step; safe to call from a signal handler.

        An exception raised by the handler itself could strike between a state change and its row, and a request would
        vanish from the account.
        """
        self._stopping = True
        self._step_limit = 0

    @property
    def stopping(self) -> bool:
        """Whether ``request_stop`` was called."""
        return self._stopping

    def poll(self, busy: bool = True) -> bool:
        """For a driver whose time passes: rows that wait go to the disk, at best when it is not ``busy``: writing them takes
        milliseconds. Returns :attr:`stopping`."""
        if time.monotonic() - self._flushed_s > (MOST_S if busy else IDLE_S):
            for cls, cells in self._cells.items():
                if cells:
                    self._flush(cls)
            self._flushed_s = time.monotonic()
        return self._stopping

    def _flush(self, cls: type[Table]) -> None:
        with signals.held():
            cells = self._cells[cls]
            table = cls.from_cells(cells)
            write_parquet(self._part(cls, self._written[cls]), table, self.metadata)
            self._written[cls] += 1
            self._rows[cls] += len(table)
            cells.clear()
            kept = self._kept[cls]
            if kept is not None:
                kept.append(table)
                if self._rows[cls] > KEPT_ROWS:
                    self._kept[cls] = None

    def _part(self, cls: type[Table], number: int) -> Path:
        return self._parts / f"{_stem(cls)}-{number:05d}.parquet"

    def tables(self) -> tuple[StepTable, RequestTable]:
        """All rows so far; of a long run the steps are in files."""
        if self._tables is None:
            steps, requests = (self._unwritten(cls) for cls in (StepTable, RequestTable))
            if self._kept[StepTable] is None:
                parts = self._written[StepTable]
                steps = StoredSteps([self._part(StepTable, n) for n in range(parts)], steps, self._rows[StepTable] + len(steps))
            if self._kept[RequestTable] is None:
                parts = self._written[RequestTable]
                stored = _pieces([self._part(RequestTable, n) for n in range(parts)], REQUEST_COLUMNS, tuple(REQUEST_COLUMNS))
                requests = RequestTable.assembled(self._rows[RequestTable] + len(requests), chain(stored, [requests.data]))
            self._tables = (steps, requests)
        return self._tables

    def _unwritten(self, cls: type[Table]) -> Any:
        """Rows in memory: all, while the parts' are kept."""
        table, kept = cls.from_cells(self._cells[cls]), self._kept[cls]
        return cls.concatenate([*kept, table]) if kept else table

    def _merge(self) -> None:
        steps, requests = self.tables()
        write_parquet(self.folder / f"{_stem(StepTable)}.parquet", steps, self.metadata)
        write_parquet(self.folder / f"{_stem(RequestTable)}.parquet", requests, self.metadata)
        self._merged = True
        if isinstance(steps, StoredSteps):
            steps.paths, steps.rest = [self.folder / f"{_stem(StepTable)}.parquet"], None
        try:
            for cls, written in self._written.items():
                for number in range(written):
                    self._part(cls, number).unlink()
            self._parts.rmdir()
        except OSError as exc:
            raise cannot_write(self._parts, exc) from None

    def _say_incomplete(self, why: str, counts: Mapping[str, Any]) -> None:
        write_json(self.folder / "summary.json", {"complete": False, "why": why, "source": self.source, **counts})

    def close(self, outcome: RunOutcome, summary: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Merge the parts; write summary and timing. :class:`ResultsError` if that fails: the parts stay."""
        if "source" in outcome.device:
            self.metadata["device_source"] = str(outcome.device["source"])
        with signals.held():
            self._merge()
            if outcome.ways is not None:
                _write_ways(self.folder / WAYS, outcome.ways, self.metadata)
            write_json(self.folder / "timing.json", timing)
            write_json(self.folder / "summary.json", {"complete": True, **summary})
            self._end()

    def abort(self, why: str) -> dict[str, int]:
        """Keep what there is, and say that it is not all. Returns requests offered, finished, rejected, unfinished."""
        if not self._merged:
            self._tables = None
            self._merge()
        status = self.tables()[1]["status"].tolist()
        finished, rejected = status.count("finished"), status.count("rejected")
        offered = max(len(status), self._offered or 0)
        counts = {"offered": offered, "finished": finished, "rejected": rejected, "unfinished": offered - finished - rejected}
        self._say_incomplete(why, counts)
        self._end()
        return counts


WAYS = "ways.parquet"
"""Of a cluster's run: each request's way, a row a request by its id (docs/cluster.md)."""


def _write_ways(path: Path, ways: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    import pyarrow as pa

    table = pa.table({name: pa.array(column) for name, column in ways.items()})
    parquet.write_tables(path, iter([table.replace_schema_metadata(dict(metadata))]), write_statistics=False,
                         use_dictionary=False)


def read_ways(folder: Path) -> dict[str, NDArray[Any]] | None:
    """The ways of a cluster's run, columns by name; ``None`` of one device."""
    path = folder / WAYS
    if not door.is_file(path, ResultsError):
        return None
    table, _ = parquet.read_table(path, error=ResultsError)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _stem(cls: type[Table]) -> str:
    return "steps" if cls is StepTable else "requests"


def read_table(path: Path, cls: type[Table]) -> Any:
    """Read a results file back; :class:`ResultsError` names it."""
    import pyarrow as pa

    if not door.is_file(path, ResultsError):
        raise ResultsError(f"{path}: no such file")
    table, _ = parquet.read_table(path, error=ResultsError)
    missing = [name for name in cls.columns if name not in table.column_names]
    if missing:
        raise ResultsError(f"{path}: not a results file of this version: no column {', '.join(missing)}")
    try:
        return cls({name: _column(table.column(name), kind) for name, kind in cls.columns.items()})
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as exc:
        raise ResultsError(f"{path}: a column is not of the type it should be ({exc})") from None


def _column(chunks: Any, kind: str) -> NDArray[Any]:
    column = chunks.combine_chunks()
    if kind != "str":
        return _numbers(column).astype(kind)
    names = np.array(column.dictionary.to_pylist(), dtype=object)
    codes = _numbers(column.indices)
    return names[codes] if len(codes) else np.empty(0, dtype=object)


def _numbers(column: Any) -> NDArray[Any]:
    """Without ``to_numpy``, a cast or a scalar of pyarrow's: each imports pandas, or pyarrow's functions, a tenth of a second."""
    import pyarrow as pa

    if str(column.type) == "bool":
        return _bits(column.buffers()[1], column)
    if not column.null_count:
        return np.from_dlpack(column)
    valid = _bits(column.buffers()[0], column)
    values = pa.Array.from_buffers(column.type, len(column), [None, column.buffers()[1]], offset=column.offset)
    return np.where(valid, np.from_dlpack(values), np.nan)


def _bits(buffer: Any, column: Any) -> NDArray[Any]:
    bits = np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little")
    return bits[column.offset:column.offset + len(column)]


def discard(folder: Path) -> None:
    """Take away a stopped run, to run it again; :class:`ResultsError` if anything else is in its folder."""
    files = [path for path in (*folder.iterdir(), *(folder / "parts").glob("*")) if path.name != "parts"]
    known = {"config.toml", "requests.parquet", "steps.parquet", "summary.json", "timing.json"}
    strangers = [path for path in files if path.name not in known and path.parent.name != "parts" and path.suffix != ".tmp"
                 and path.name != LOCK]
    if strangers:
        raise ResultsError(f"{strangers[0]}: is no file of the stopped run in {folder}: choose another --out")
    try:
        for path in files:
            path.unlink()
        if (folder / "parts").is_dir():
            (folder / "parts").rmdir()
        folder.rmdir()
    except OSError as exc:
        raise ResultsError(f"{folder}: cannot be taken away ({exc.strerror}): choose another --out") from None


class StoredRun(NamedTuple):
    """A results folder read back. ``summary["complete"]`` is false for a run that was stopped."""

    config: RunConfig
    summary: dict[str, Any]
    steps: StepTable
    requests: RequestTable


def load_run(folder: Path) -> StoredRun:
    """Read a results folder; of a killed run, what is in its part files. :class:`ResultsError` names what is amiss."""
    path = folder / "summary.json"
    summary = door.read_object(path, ResultsError, "the summary of a run")
    if not isinstance(summary.get("complete"), bool):
        raise ResultsError(f"{path}: is not the summary of a run: it has no \"complete\"")
    steps, requests = (_stored(folder, cls) for cls in (StepTable, RequestTable))
    return StoredRun(load_run_config(folder / "config.toml"), summary, steps, requests)


def _stored(folder: Path, cls: type[Table]) -> Any:
    whole, parts = folder / f"{_stem(cls)}.parquet", folder / "parts"
    if door.exists(whole, ResultsError) or not door.is_folder(parts, ResultsError):
        return read_table(whole, cls)
    return cls.concatenate([read_table(path, cls) for path in sorted(parts.glob(f"{_stem(cls)}-*.parquet"))])
