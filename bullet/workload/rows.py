"""Files with a row a request: CSV, JSONL and Parquet as batches of columns, read as they stream by."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bullet.errors import TraceError
from bullet.workload.text import first_character, plain_name, text_of
from bullet.workload.values import Cells, listed, number, shown

BATCH_ROWS = 8192
BLOCK_CHARACTERS = 2**16
MOST_ITEM_CHARACTERS = 2**26
"""Of one item of a JSON array."""


class Batch(NamedTuple):
    """Some rows: the line on which each starts (in Parquet its number), and the cells of the columns that were asked for."""

    lines: Sequence[int]
    columns: dict[str, Cells]


class Rows:
    """An open file: where its columns are named, their names, and its rows from the first, once."""

    def __init__(self, where: str, header: list[str], batches: Any) -> None:
        self.where, self.header, self._batches = where, header, batches

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """All rows, these columns."""
        yield from self._batches(columns)


def container_of(path: Path) -> str:
    """``csv``, ``jsonl``, ``parquet`` or ``json`` (an array), by name, else by the first character."""
    name = plain_name(path)
    for kind, endings in (("parquet", (".parquet", ".pq")), ("jsonl", (".jsonl", ".ndjson")), ("csv", (".csv",)),
                          ("json", (".json",))):
        if name.endswith(endings):
            return "jsonl" if kind == "json" and first_character(path) != "[" else kind
    return {"{": "jsonl", "[": "json"}.get(first_character(path), "csv")


@contextmanager
def open_rows(path: Path, container: str) -> Iterator[Rows]:
    """Open a file of that container; :class:`TraceError` if it is none."""
    if container == "parquet":
        with _open_parquet(path) as rows:
            yield rows
        return
    if container == "json":
        with text_of_json(path) as text:
            yield _open_array(path, text)
        return
    with text_of(path, "\n" if container == "jsonl" else "") as text:
        yield (_open_jsonl if container == "jsonl" else _open_csv)(path, text)


@contextmanager
def text_of_json(path: Path) -> Iterator[Any]:
    """The text of a JSON array that is read item by item, and may stand on one line."""
    with text_of(path, "", most_line_bytes=2**62) as text:
        yield text


def array_items(path: Path, text: Any) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array, each with its number from 1; at most one of them is held."""
    decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode
    buffer = text.read(BLOCK_CHARACTERS).lstrip()
    if buffer[:1] != "[":
        raise TraceError(f"{path}: must be a JSON array, found {shown(buffer[:1])}")
    at, number, more = 1, 0, True
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            item, at = decode(buffer, at)
        except (ValueError, RecursionError) as exc:
            part = text.read(max(BLOCK_CHARACTERS, len(buffer) - at)) if more and len(buffer) - at < MOST_ITEM_CHARACTERS else ""
            if not part:
                raise TraceError(f"{path}: item {number + 1}: not JSON ({exc})") from None
            buffer, at = buffer[at:] + part, 0
            continue
        number += 1
        yield number, item


def _open_array(path: Path, text: Any) -> Rows:
    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for place, item in array_items(path, text):
            if not isinstance(item, dict):
                raise TraceError(f"{path}:{place}: each item must be a JSON object, found {type(item).__name__}")
            yield place, item

    return _of_objects(path, objects(), "a JSON array of objects")


def _open_csv(path: Path, text: Any) -> Rows:
    records = _csv_records(path, text)
    first = next(records, None)
    if first is None:
        raise TraceError(f"{path}: empty: must hold a header line and at least one request")
    line, header = first[0], [cell.strip() for cell in first[1]]
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise TraceError(f"{path}:{line}: column {shown(doubled)} stands twice in the header")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise TraceError(f"{path}:{line}: header {shown(header[0])}: columns must be separated by commas")
    if all(number(cell) is not None for cell in header):
        raise TraceError(f"{path}:{line}: the first line must name the columns, found numbers ({listed(header)})")

    def whole_rows() -> Iterator[tuple[int, list[str]]]:
        for line, cells in records:
            if len(cells) != len(header):
                raise TraceError(f"{path}:{line}: {len(cells)} cells where the header has {len(header)}")
            yield line, cells

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        places = [(name, header.index(name)) for name in columns]
        return _batched(whole_rows(), lambda rows: {name: [row[i] for row in rows] for name, i in places})

    return Rows(f"{path}:{line}", header, batches)


def _batched(rows: Iterator[tuple[int, Any]], columns: Callable[[list[Any]], dict[str, Cells]]) -> Iterator[Batch]:
    lines: list[int] = []
    held: list[Any] = []
    try:
        for line, row in rows:
            lines.append(line)
            held.append(row)
            if len(held) == BATCH_ROWS:
                yield Batch(lines, columns(held))
                lines, held = [], []
    except TraceError:
        if held:
            yield Batch(lines, columns(held))  # what is wrong further up is told first
        raise
    if held:
        yield Batch(lines, columns(held))


def _csv_records(path: Path, text: Any) -> Iterator[tuple[int, list[str]]]:
    """Records that are not blank, each with the line on which it starts (a quoted cell may hold line ends)."""
    reader = csv.reader(text, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as exc:
        raise TraceError(f"{path}:{line}: not CSV ({exc})") from None


def _open_jsonl(path: Path, text: Any) -> Rows:
    return _of_objects(path, _json_objects(path, text), "one JSON object a line")


def _of_objects(path: Path, objects: Iterator[tuple[int, dict[str, Any]]], what: str) -> Rows:
    """The first object's keys are the header."""
    first = next(objects, None)
    if first is None:
        raise TraceError(f"{path}: empty: must hold at least one request, {what}")

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        return _batched(itertools.chain([first], objects),
                        lambda rows: {name: [row.get(name) for row in rows] for name in columns})

    return Rows(f"{path}:{first[0]}", list(first[1]), batches)


def _json_objects(path: Path, text: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = json.JSONDecoder(object_pairs_hook=_object).decode
    for line, content in enumerate(text, start=1):
        if content.isspace():
            continue
        try:
            row = decode(content)
        except (ValueError, RecursionError) as exc:
            raise TraceError(f"{path}:{line}: not one JSON object a line ({exc})") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{line}: each line must be one JSON object, found {type(row).__name__}")
        yield line, row


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key stands twice")
    return row


@contextmanager
def _open_parquet(path: Path) -> Iterator[Rows]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except (OSError, pa.ArrowException) as exc:
        raise TraceError(f"{path}: cannot be read as Parquet ({str(exc).splitlines()[0]})") from None

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        done = 0
        try:
            for part in file.iter_batches(BATCH_ROWS, columns=list(columns)):
                yield Batch(range(done + 1, done + part.num_rows + 1), {name: _cells(part.column(name)) for name in columns})
                done += part.num_rows
        except (OSError, pa.ArrowException) as exc:
            raise TraceError(f"{path}: cannot be read as Parquet ({str(exc).splitlines()[0]})") from None

    with file:
        yield Rows(str(path), file.schema_arrow.names, batches)


def _cells(column: Any) -> Cells:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.string())
    if column.null_count == 0 and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        numbers: Cells = column.to_numpy(zero_copy_only=False)
        return numbers
    cells: list[Any] = column.to_pylist()
    return cells
