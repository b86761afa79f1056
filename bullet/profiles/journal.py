"""A sweep's rows while it runs: JSON lines, of which a cut-off loses at most the one being written."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bullet import door
from bullet.errors import ProfileError, ResultsError
from bullet.profiles.rows import SCHEMA, SCHEMA_VERSION, Row, check_row


class Journal:
    """Append-only rows on disk, flushed one by one. A context manager.

    ``identity``: what must agree for rows to be comparable (gpu, source, backend). Opening an existing journal reads its
    rows; :class:`ProfileError` if it is of another schema or identity, broken anywhere but in its last line,
    or while another process writes it; :class:`ResultsError` if it cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.path = path
        self.identity = dict(identity)
        self.rows: list[Row] = []
        self.run = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what a full disk refused must not be tried again on closing.
            self._file = path.open("ab", buffering=0)
            try:
                self._begin()
            except BaseException:
                self._file.close()
                raise
        except OSError as exc:
            raise ResultsError(f"{path}: cannot be written ({exc.strerror}): choose another --out") from None

    def _begin(self) -> None:
        path = self.path
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProfileError(f"{path}: another sweep is writing it: wait for its end or choose another --out") from None
        except OSError:
            pass  # a file system without locks
        if not path.stat().st_size:
            try:
                self._write({"schema": SCHEMA, "version": SCHEMA_VERSION, **self.identity})
            except OSError:
                os.truncate(path, 0)  # half a first line is no table
                raise
            return
        header, self.rows, good_bytes = read_journal(path)
        _require_same(path, header, self.identity)
        self.run = 1 + max((row["run"] or 0 for row in self.rows), default=0)
        if good_bytes < path.stat().st_size:
            os.truncate(path, good_bytes)  # half a line, from a run that was cut off

    def append(self, row: Mapping[str, Any]) -> Row:
        """Check, write and flush one row."""
        full = check_row(row)
        try:
            self._write(full)
        except OSError as exc:
            raise ResultsError(f"{self.path}: cannot be written ({exc.strerror}): rows until here are kept") from None
        self.rows.append(full)
        return full

    def _write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        while line:
            line = line[self._file.write(line):]

    def done(self) -> set[str]:
        """Ids measured so far, anchors aside."""
        return {row["id"] for row in self.rows if row["kind"] != "anchor"}

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_journal(path: Path) -> tuple[dict[str, Any], list[Row], int]:
    """Header, rows, and the bytes that hold whole lines (a last line cut short is left out)."""
    raw = b"".join(door.pieces(path, ProfileError))
    whole = raw[:raw.rfind(b"\n") + 1]
    records = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            record = door.json_value(line.decode(), "", ProfileError)
        except (ProfileError, UnicodeDecodeError):
            record = None
        if not isinstance(record, dict):
            raise ProfileError(f"{path}: line {number} is not a JSON object: move the file away or choose another --out")
        records.append(record)
    if not records or records[0].get("schema") != SCHEMA:
        raise ProfileError(f"{path}: not a {SCHEMA} file: move it away or choose another --out")
    header = records[0]
    if header.get("version") != SCHEMA_VERSION:
        raise ProfileError(f"{path}: schema version {header.get('version')!r}, this version writes {SCHEMA_VERSION}: "
                           "choose another --out")
    rows = [check_row(r, f"{path}: line {i}") for i, r in enumerate(records[1:], 2)]
    return header, rows, len(whole)


def _require_same(path: Path, header: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    for name, value in identity.items():
        if header.get(name) != value:
            raise ProfileError(f"{path}: holds rows of {name} {header.get(name)!r}, this is {value!r}: "
                               "choose another --out to start a new table")
