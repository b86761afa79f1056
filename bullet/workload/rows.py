"""Files with a row a request: CSV, JSONL and Parquet as batches of columns, read as they stream by."""

from __future__ import annotations

import csv
import itertools
import json
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bullet.door import is_file
from bullet.errors import TraceError
from bullet.parquet import open_file, told
from bullet.workload.text import first_character, plain_name, text_of
from bullet.workload.values import Cells, listed, number, shown

BATCH_ROWS = 8192
BLOCK_CHARACTERS = 2**16
MOST_ITEM_CHARACTERS = 2**26
"""Of one item of a JSON array."""

_LINE_ENDS = re.compile(r"\r\n|\r|\n")


class Batch(NamedTuple):
    """Some rows: the line on which each starts (in Parquet its number), and the cells of the columns that were asked for."""

    lines: Sequence[int]
    columns: dict[str, Cells]


class Rows:
    """An open file: where its columns are named, their names, and its rows from the first, once."""

    def __init__(self, where: str, header: list[str], batches: Any) -> None:
        self.where, self.header, self._batches = where, header, batches
        self.notes: list[str] = []  # once all are read: what was left out of them

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
    parts = _csv_records(path, text)
    lines, records = next(parts, ([], []))
    if not records:
        raise TraceError(f"{path}: empty: must hold a header line and at least one request")
    line, header = lines[0], [cell.strip() for cell in records[0]]
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise TraceError(f"{path}:{line}: column {shown(doubled)} stands twice in the header")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise TraceError(f"{path}:{line}: header {shown(header[0])}: columns must be separated by commas")
    if all(number(cell) is not None for cell in header):
        raise TraceError(f"{path}:{line}: the first line must name the columns, found numbers ({listed(header)})")

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        places = [header.index(name) for name in columns]
        for lines, rows in itertools.chain([(lines_after, records[1:])], parts):
            whole = next((i for i, row in enumerate(rows) if len(row) != len(header)), len(rows))
            if whole:
                yield Batch(lines[:whole], _columns(columns, places, rows[:whole]))
            if whole < len(rows):  # what is wrong further up has been told
                raise TraceError(f"{path}:{lines[whole]}: {len(rows[whole])} cells where the header has {len(header)}")

    lines_after = lines[1:]
    return Rows(f"{path}:{line}", header, batches)


def _columns(names: Sequence[str], keys: Sequence[Any], rows: Sequence[Any]) -> dict[str, Cells]:
    """Columns of rows, by place or by key."""
    if len(keys) == 1:
        return {names[0]: [row[keys[0]] for row in rows]}
    return dict(zip(names, zip(*map(operator.itemgetter(*keys), rows), strict=True), strict=True))


def _csv_records(path: Path, text: Any) -> Iterator[tuple[Sequence[int], list[list[str]]]]:
    """Records that are not blank, some at a time, each with the line on which it starts (a quoted cell may hold line ends)."""
    reader = csv.reader(text, strict=True)
    wrong: csv.Error | None = None
    while wrong is None:
        line = reader.line_num + 1
        rows: list[list[str]] = []
        try:
            rows.extend(itertools.islice(reader, BATCH_ROWS))
        except csv.Error as exc:
            wrong = exc
        if not rows and wrong is None:
            return
        starts: Sequence[int] = range(line, line + len(rows) + 1)
        if wrong is not None or reader.line_num + 1 != starts[-1]:
            starts = list(itertools.accumulate((1 + sum(len(_LINE_ENDS.findall(cell)) for cell in row) for row in rows),
                                               initial=line))
        if not all(rows) or any(len(row) == 1 and not row[0].strip() for row in rows):
            kept = [i for i, row in enumerate(rows) if row and (len(row) > 1 or row[0].strip())]
            starts, rows = [*(starts[i] for i in kept), starts[-1]], [rows[i] for i in kept]
        if rows:
            yield starts[:-1], rows
    raise TraceError(f"{path}:{starts[-1]}: not CSV ({wrong})") from None


def _open_jsonl(path: Path, text: Any) -> Rows:
    return _of_objects(path, _json_objects(path, text), "one JSON object a line")


def _of_objects(path: Path, objects: Iterator[tuple[int, dict[str, Any]]], what: str) -> Rows:
    """The first object's keys are the header."""
    first = next(objects, None)
    if first is None:
        raise TraceError(f"{path}: empty: must hold at least one request, {what}")

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        for lines, rows in _batched(itertools.chain([first], objects)):
            try:
                yield Batch(lines, _columns(columns, columns, rows))
            except KeyError:  # a key that some rows lack
                yield Batch(lines, {name: [row.get(name) for row in rows] for name in columns})

    return Rows(f"{path}:{first[0]}", list(first[1]), batches)


def _batched(rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[list[int], list[Any]]]:
    """Lines and rows, some at a time; those before what is wrong are handed on first."""
    wrong: TraceError | None = None
    while wrong is None:
        held: list[tuple[int, Any]] = []
        try:
            held.extend(itertools.islice(rows, BATCH_ROWS))
        except TraceError as exc:
            wrong = exc
        if held:
            yield [line for line, _ in held], [row for _, row in held]
        elif wrong is None:
            return
    raise wrong


def _json_objects(path: Path, text: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = json.JSONDecoder(object_pairs_hook=_object).decode
    decoder: Any = json.JSONDecoder()
    scan = decoder.scan_once  # without what decode does about it, which costs as much again
    for line, content in enumerate(text, start=1):
        try:
            row, end = scan(content, 0)
            # Every key once: two quotes a key and none elsewhere. Else a closer look.
            plain = type(row) is dict and content.count('"') == 2 * len(row) and (end == len(content) or content[end:].isspace())
        except (StopIteration, ValueError, RecursionError):
            plain = False
        if not plain:
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
    if not is_file(path, TraceError):
        raise TraceError(f"{path}: no such trace file")
    with open_file(path, "Parquet", TraceError) as file:
        def batches(columns: Sequence[str]) -> Iterator[Batch]:
            done = 0
            with told(path, "Parquet", TraceError):
                for part in file.iter_batches(BATCH_ROWS, columns=list(columns)):
                    part.validate(full=True)
                    yield Batch(range(done + 1, done + part.num_rows + 1), {name: _cells(part.column(name)) for name in columns})
                    done += part.num_rows

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
