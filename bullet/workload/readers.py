"""Readers of trace files: the Azure CSV as published, generic CSV and JSONL; plain or gzip.

A trace is a table with a row per request: prompt tokens, output tokens and, if it has them, arrival times. Every
refusal is one line with the file, the line, the column, the value and what is allowed. Nothing is skipped (but blank
lines), clipped or repaired: a trace that is half right gives results that look right.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig
from bullet.errors import TraceError

# Column names tried in this order where the configuration names none, compared in lower case with "_" for blanks.
# In brackets: who publishes traces with them.
PROMPT_NAMES = ("prompt_tokens", "contexttokens",  # (Azure, Nanoflow)
                "num_prefill_tokens",  # (Vidur, Sarathi-Serve, POD-Attention)
                "input_tokens", "input_toks",  # (LLMServingSim)
                "input_length",  # (Mooncake, Qwen-Bailian)
                "request_tokens",  # (BurstGPT)
                "input_len", "prompt_length", "prompt_len")
OUTPUT_NAMES = ("output_tokens", "generatedtokens", "num_decode_tokens", "output_toks", "output_length",
                "response_tokens", "output_len", "generated_tokens", "completion_tokens")
ARRIVAL_NAMES = tuple(stem + suffix for suffix in ("_s", "_ms", "_us", "_ns", "")
                      for stem in ("arrival", "arrival_time", "arrived_at", "timestamp"))
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

MOST_TOKENS = 10**9
"""Above every context length there is: what is larger is a wrong column or a broken file."""
YEAR_S = 366 * 86400.0
LATEST_S = 1e11
"""Seconds since 1970 until the year 5138: a later time is in another unit (today in milliseconds is 1.7e12)."""
MOST_REQ_PER_S = 1e5
"""A recorded rate above it means times in another unit (no published service trace reaches 1e4)."""
SHOWN_CHARACTERS = 60

_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
                   r"(Z|[+-][0-9]{2}:?[0-9]{2})?")


class Table(NamedTuple):
    """A trace as read: seconds since the first row (``None``: no times), prompt and output tokens; of one length."""

    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


class Columns(NamedTuple):
    """Names of the columns to read; ``per_second`` is the unit of a numeric arrival column."""

    prompt: str
    output: str
    arrival: str | None
    per_second: int


Row = tuple[int, Mapping[str, object]]
"""Line number, from 1, and the cells by column name."""


def read_trace(config: WorkloadConfig) -> Table:
    """Read the file ``config.trace`` in ``config.format``.

    ``auto`` goes by the name (.jsonl, .ndjson, .csv; .gz after it), else by the first character ("{" opens JSONL), and
    takes a CSV with Azure's three columns for Azure's. Token counts are whole numbers from 1 to 10^9. Times must not
    decrease; they are numbers in ``config.arrival_unit`` or dates (UTC unless they carry an offset), never both.

    Raises :class:`TraceError` with one line if the file is not such a table.
    """
    path = Path(config.trace)
    text = _text(path)
    kind = _kind(path, text) if config.format == "auto" else config.format
    if kind == "jsonl":
        line, header, rows = _open_jsonl(path, text)
    else:
        line, header, rows = _open_csv(path, text)
    return _parse(path, rows, _choose(f"{path}:{line}", header, config))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        # By content also without the name: a browser may unpack the name but not the file.
        if path.suffix == ".gz" or data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: is a folder: give a trace file") from None
    except EOFError:
        raise TraceError(f"{path}: truncated gzip file, its end is missing: copy or download it again") from None
    except (gzip.BadGzipFile, zlib.error) as exc:
        raise TraceError(f"{path}: not a sound gzip file ({exc}): rename it if it is not compressed") from None
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read ({exc.strerror})") from None
    except ValueError as exc:  # a NUL in the path itself
        raise TraceError(f"{str(path)!r}: not a file name ({exc})") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        # exc.object, not data: the decoder takes the byte order mark off first, and exc.start counts from there.
        line = exc.object[: exc.start].count(b"\n") + 1
        raise TraceError(f"{path}:{line}: byte 0x{exc.object[exc.start]:02x} is not UTF-8: save the trace as UTF-8"
                         ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise TraceError(f"{path}:{line}: holds a NUL character (UTF-16, or not a text file): save the trace as UTF-8")
    return text


def _kind(path: Path, text: str) -> str:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith(".csv"):
        return "csv"
    return "jsonl" if text.lstrip()[:1] in ("{", "[") else "csv"


def _open_csv(path: Path, text: str) -> tuple[int, list[str], Iterator[Row]]:
    """The header's line, the header and an iterator over the rows below it."""
    records = _csv_records(path, text)
    first = next(records, None)
    if first is None:
        raise TraceError(f"{path}: empty: must hold a header line and at least one request")
    line, header = first[0], [cell.strip() for cell in first[1]]
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise TraceError(f"{path}:{line}: column {_shown(doubled)} stands twice in the header")
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise TraceError(f"{path}:{line}: header {_shown(header[0])}: columns must be separated by commas")
    if all(_number(cell) is not None for cell in header):
        raise TraceError(f"{path}:{line}: the first line must name the columns, found numbers ({_listed(header)})")

    def rows() -> Iterator[Row]:
        for line, cells in records:
            if len(cells) != len(header):
                raise TraceError(f"{path}:{line}: {len(cells)} cells where the header has {len(header)}")
            yield line, dict(zip(header, cells, strict=True))

    return line, header, rows()


def _csv_records(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Records that are not blank, each with the line on which it starts (a quoted cell may hold line ends)."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as exc:
        raise TraceError(f"{path}:{line}: not CSV ({exc})") from None


def _open_jsonl(path: Path, text: str) -> tuple[int, list[str], Iterator[Row]]:
    """The first object's line and keys, and an iterator over all objects."""
    rows = _jsonl_rows(path, text)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path}: empty: must hold at least one request, one JSON object a line")

    def all_rows() -> Iterator[Row]:
        yield first
        yield from rows

    return first[0], list(first[1]), all_rows()


def _jsonl_rows(path: Path, text: str) -> Iterator[Row]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content, object_pairs_hook=_object)
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


def _choose(where: str, header: list[str], config: WorkloadConfig) -> Columns:
    """Which columns to read: as configured, else by known name."""
    prompt_names: tuple[str, ...] = PROMPT_NAMES
    output_names: tuple[str, ...] = OUTPUT_NAMES
    arrival_names: tuple[str, ...] = ARRIVAL_NAMES
    if config.format == "azure":
        missing = next((name for name in AZURE_COLUMNS if name not in header), None)
        if missing is not None:
            raise TraceError(f"{where}: not the Azure format: column {missing} is missing; must have "
                             f"{', '.join(AZURE_COLUMNS)}, has {_listed(header)}")
        arrival_names, prompt_names, output_names = ((name.lower(),) for name in AZURE_COLUMNS)
    prompt = _pick(where, header, config.prompt_column, prompt_names, "prompt")
    output = _pick(where, header, config.output_column, output_names, "output")
    arrival = None if config.arrival_column == "" else _pick(where, header, config.arrival_column, arrival_names,
                                                             "arrival")
    if prompt is None or output is None:
        what, known = ("prompt", prompt_names) if prompt is None else ("output", output_names)
        raise TraceError(f"{where}: no column of {what} tokens: name it by workload.{what}_column, or call it one of "
                         f"{', '.join(known)}; the file has {_listed(header)}")
    if len({prompt, output, arrival}) < 3:
        raise TraceError(f"{where}: prompt tokens, output tokens and arrival times must be three columns, not "
                         f"{_listed([prompt, output, arrival or ''])}")
    return Columns(prompt, output, arrival, PER_SECOND[_unit(where, arrival, config.arrival_unit)])


def _pick(where: str, header: list[str], wanted: str | None, known: tuple[str, ...], what: str) -> str | None:
    if wanted is not None:
        if wanted not in header:
            raise TraceError(f"{where}: no column {wanted!r} (workload.{what}_column): the file has {_listed(header)}")
        return wanted
    plain = {name.strip().lower().replace(" ", "_"): name for name in reversed(header)}
    return next((plain[name] for name in known if name in plain), None)


def _unit(where: str, arrival: str | None, configured: str) -> str:
    """The unit in the column's name, if it has one, else the configured one; they may not contradict."""
    match = re.search(r"_(s|ms|us|ns)$", arrival or "")
    if match is None:
        return configured
    if configured not in ("s", match.group(1)):
        raise TraceError(f"{where}: workload.arrival_unit = {configured!r}: column {arrival!r} says {match.group(1)}")
    return match.group(1)


def _parse(path: Path, rows: Iterator[Row], columns: Columns) -> Table:
    prompts: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    first: _Time | None = None
    before: _Time | None = None
    line = 0
    for line, row in rows:
        prompts.append(_tokens(path, line, columns.prompt, row.get(columns.prompt)))
        outputs.append(_tokens(path, line, columns.output, row.get(columns.output)))
        if columns.arrival is None:
            continue
        shown = row.get(columns.arrival)
        time = _time(path, line, columns.arrival, shown, columns.per_second)
        first = first or time
        before = before or time
        where = f"{path}:{line}: {columns.arrival} = {_shown(shown)}"
        if time.kind != first.kind:
            raise TraceError(f"{where} is a {time.kind}, the first row's a {first.kind}: times must be of one kind")
        at_s = (time.value - first.value) / time.per_second
        if abs(time.value - before.value) / time.per_second > YEAR_S or at_s > YEAR_S:
            raise TraceError(f"{where} lies more than a year from the rows above: epoch and relative times are mixed, "
                             "or workload.arrival_unit is wrong")
        if time.value < before.value:
            raise TraceError(f"{where} is before the row above: times must not decrease (sort the trace by time)")
        before = time
        arrivals.append(at_s)
    if not prompts:
        raise TraceError(f"{path}: has a header but no requests: must hold at least one")
    if len(arrivals) >= 10 and 0 < arrivals[-1] < (len(arrivals) - 1) / MOST_REQ_PER_S:
        raise TraceError(f"{path}:{line}: {columns.arrival}: {len(arrivals)} requests within {arrivals[-1]:.3g} s, "
                         f"over {MOST_REQ_PER_S:,.0f} a second: is workload.arrival_unit right?")
    return Table(np.array(arrivals) if arrivals else None, np.array(prompts, dtype=np.int64),
                 np.array(outputs, dtype=np.int64))


def _tokens(path: Path, line: int, column: str, value: object) -> int:
    number = _number(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)  # 12.0, as tools write whole numbers in a column that had gaps
    if not isinstance(number, int) or not 1 <= number <= MOST_TOKENS:
        raise TraceError(f"{path}:{line}: {column} = {_shown(value)}: must be a whole number of tokens, 1 to 10^9")
    return number


class _Time(NamedTuple):
    """A time on the trace's own axis: ``value / per_second`` seconds, from 1970 for a date.

    Integers stay integers until the first row's time is taken off: a double holds today's epoch to 0.2 us only, and
    Azure's times have seven digits.
    """

    kind: str
    value: int | float
    per_second: int


def _time(path: Path, line: int, column: str, value: object, per_second: int) -> _Time:
    number = _number(value)
    if number is not None:
        # Compared unscaled: an integer of a thousand digits cannot be made a double.
        if 0 <= number <= LATEST_S * per_second:
            return _Time("number", number, per_second)
        if number > 0 and number != math.inf:
            raise TraceError(f"{path}:{line}: {column} = {_shown(value)}: after the year 5000: is "
                             "workload.arrival_unit right?")
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        day, clock, fraction, offset = match.groups()
        try:
            whole = datetime.fromisoformat(f"{day}T{clock}{offset or '+00:00'}")
        except ValueError as exc:
            raise TraceError(f"{path}:{line}: {column} = {_shown(value)}: not a date ({exc})") from None
        nanoseconds = int(whole.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))
        return _Time("date with offset" if offset else "date", nanoseconds, 10**9)
    raise TraceError(f"{path}:{line}: {column} = {_shown(value)}: must be a number, 0 or more "
                     "(workload.arrival_unit), or a date YYYY-MM-DD HH:MM:SS.fffffff; "
                     'workload.arrival_column = "" leaves the column out')


def _number(value: object) -> int | float | None:
    """An integer where it is written as one, else a float; ``None`` if it is no number."""
    if isinstance(value, str):
        if "_" in value or not value.isascii():  # Python takes 1_000 and other scripts' digits; trace formats do not
            return None
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def _shown(value: object) -> str:
    """A value for a message of one line."""
    if value is None:
        return "missing"
    if isinstance(value, str) and not value.strip():
        return "empty"
    try:
        text = repr(value)
    except ValueError:  # an integer too long for Python to print
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name)[1:-1] for name in names)
    return shown if len(shown) <= 4 * SHOWN_CHARACTERS else shown[: 4 * SHOWN_CHARACTERS - 3] + "..."
