"""Readers of trace files: the Azure CSV as published, generic CSV and JSONL; plain or gzip.

Every refusal is one line with the file, the line and what is allowed; nothing is skipped, clipped or repaired.
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

PROMPT_NAMES = ("prompt_tokens", "ContextTokens", "input_tokens", "input_toks", "input_length", "num_prefill_tokens",
                "prompt_len")
OUTPUT_NAMES = ("output_tokens", "GeneratedTokens", "output_toks", "output_length", "num_decode_tokens", "output_len")
ARRIVAL_NAMES = ("arrival_s", "arrival_time", "arrived_at", "TIMESTAMP", "timestamp", "arrival_time_ns")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
YEAR_S = 366 * 86400.0
MOST_TOKENS = 10**9
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?$")


class Table(NamedTuple):
    """A trace as read: arrival seconds (or none), prompt and output tokens."""

    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def read_trace(config: WorkloadConfig) -> Table:
    """Read ``config.trace`` in ``config.format`` (auto: .jsonl by name, else CSV; Azure's by its header)."""
    path = Path(config.trace)
    text = _text(path)
    name = path.name.removesuffix(".gz")
    kind = config.format
    if kind == "auto":
        kind = "jsonl" if name.endswith((".jsonl", ".ndjson")) else "csv"
    rows = _jsonl_rows(path, text) if kind == "jsonl" else _csv_rows(path, text)
    return _columns(path, rows, config)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: is a folder, not a trace file") from None
    except EOFError:
        raise TraceError(f"{path}: truncated gzip file: the end is missing") from None
    except (gzip.BadGzipFile, zlib.error) as exc:
        raise TraceError(f"{path}: named .gz but not a sound gzip file ({exc})") from None
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read ({exc.strerror})") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise TraceError(f"{path}:{line}: byte 0x{data[exc.start]:02x} is not UTF-8: save the trace as UTF-8") from None


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue
            if header is None:
                header = [c.strip() for c in cells]
                doubled = sorted({h for h in header if header.count(h) > 1})
                if doubled:
                    raise TraceError(f"{path}:{reader.line_num}: column {doubled[0]!r} stands twice in the header")
                yield reader.line_num, dict.fromkeys(header)
                continue
            if len(cells) != len(header):
                raise TraceError(f"{path}:{reader.line_num}: {len(cells)} cells where the header has {len(header)}")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as exc:
        raise TraceError(f"{path}:{reader.line_num}: not CSV ({exc})") from None


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    first = True
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{path}:{number}: not JSON ({exc})") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: each line must be one JSON object, found {type(row).__name__}")
        if first:
            yield number, dict.fromkeys(row)
            first = False
        yield number, row


def _pick(path: Path, wanted: str | None, known: tuple[str, ...], header: list[str], what: str, flag: str) -> str | None:
    if wanted is not None:
        if wanted not in header:
            raise TraceError(f"{path}: no column {wanted!r} for {what}: it has {', '.join(header)}")
        return wanted
    found = next((name for name in known if name in header), None)
    if found is None and what != "arrival times":
        raise TraceError(f"{path}: no column for {what}: it has {', '.join(header)}; name one by {flag} (known names: "
                         f"{', '.join(known)})")
    return found


def _columns(path: Path, rows: Iterator[tuple[int, Mapping[str, object]]], config: WorkloadConfig) -> Table:
    try:
        _, header_row = next(rows)
    except StopIteration:
        raise TraceError(f"{path}: empty: must hold a header and at least one request") from None
    header = list(header_row)
    prompt = _pick(path, config.prompt_column, PROMPT_NAMES, header, "prompt tokens", "workload.prompt_column")
    output = _pick(path, config.output_column, OUTPUT_NAMES, header, "output tokens", "workload.output_column")
    arrival = _pick(path, config.arrival_column, ARRIVAL_NAMES, header, "arrival times", "workload.arrival_column")
    if config.format == "azure" and (prompt, output, arrival) != ("ContextTokens", "GeneratedTokens", "TIMESTAMP"):
        raise TraceError(f"{path}: not the Azure format: its columns are TIMESTAMP, ContextTokens, GeneratedTokens")
    assert prompt is not None
    assert output is not None
    unit = "ns" if arrival == "arrival_time_ns" and config.arrival_column is None else config.arrival_unit
    prompts, outputs, arrivals = [], [], []
    before = -math.inf
    start: float | None = None
    stamps: set[bool] = set()
    for line, row in rows:
        prompts.append(_tokens(path, line, prompt, row.get(prompt)))
        outputs.append(_tokens(path, line, output, row.get(output)))
        if arrival is None:
            continue
        stamp, at_s = _time(path, line, arrival, row.get(arrival), UNITS[unit])
        stamps.add(stamp)
        start = at_s if start is None else start
        if len(stamps) > 1 or at_s - start > YEAR_S:
            raise TraceError(f"{path}:{line}: {arrival} = {row.get(arrival)!r} lies more than a year after the first: epoch "
                             "and relative times are mixed, or the unit (workload.arrival_unit) is wrong")
        if at_s < before:
            raise TraceError(f"{path}:{line}: {arrival} = {row.get(arrival)!r} is before the line above: times must not "
                             "decrease")
        before = at_s
        arrivals.append(at_s)
    if not prompts:
        raise TraceError(f"{path}: has a header but no requests")
    return Table(np.array(arrivals) - arrivals[0] if arrivals else None, np.array(prompts, dtype=np.int64),
                 np.array(outputs, dtype=np.int64))


def _tokens(path: Path, line: int, column: str, value: object) -> int:
    number: object = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_TOKENS:
        shown = "missing" if value is None else repr(value)
        raise TraceError(f"{path}:{line}: {column} = {shown}: must be a whole number of tokens, 1 or more")
    return number


def _time(path: Path, line: int, column: str, value: object, unit_s: float) -> tuple[bool, float]:
    """(whether it is a date, seconds); dates as Azure publishes them, with up to nine digits of a second, UTC."""
    if isinstance(value, str):
        match = _AZURE_TIME.match(value.strip())
        if match:
            try:
                whole = datetime.fromisoformat(match.group(1) + "+00:00")
            except ValueError:
                raise TraceError(f"{path}:{line}: {column} = {value!r}: not a date") from None
            # Parted so that 100 ns digits survive: an epoch in a double keeps only some 200 ns.
            since = whole.timestamp() - 1_500_000_000
            return True, since + (int(match.group(2)) / 10 ** len(match.group(2)) if match.group(2) else 0.0)
        try:
            value = float(value)
        except ValueError:
            value = None if not isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "missing" if value is None else repr(value)
        raise TraceError(f"{path}:{line}: {column} = {shown}: must be a time: a number (workload.arrival_unit) or "
                         "YYYY-MM-DD HH:MM:SS.fffffff")
    return False, value * unit_s
