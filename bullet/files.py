"""One way to write: whole or not at all, nothing overwritten silently."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.errors import ResultsError


def cannot_write(path: Path, exc: OSError) -> ResultsError:
    """The error to raise."""
    return ResultsError(f"{path}: cannot be written ({exc.strerror or exc})")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write under; leaving the block gives the file its own name, so that a reader never sees half of it.

    Renamed once the bytes are on the disk: no crash leaves an empty file under the final name. :class:`ResultsError` names
    ``path`` if it cannot be written; half a file, whose room a full disk has use for, is taken away.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, exc) from None


def write_text(path: Path, text: str, *, replace: bool = True) -> None:
    """Write UTF-8 text, whole or not at all; :class:`ResultsError`.

    ``replace`` false: other bytes than these are not written over; the same again are no loss.
    """
    if not replace:
        try:
            kept = path.read_bytes() if path.exists() else None
        except OSError as exc:
            raise ResultsError(f"{path}: cannot be read ({exc.strerror}): choose another --out") from None
        if kept not in (None, text.encode()):
            raise ResultsError(f"{path}: is there and differs: choose another --out, or say --replace")
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Strict JSON: an undefined figure is null, never NaN."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def make_folder(folder: Path) -> None:
    """One that may be there, whatever it holds; :class:`ResultsError` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ResultsError(f"{folder}: cannot be made ({exc.strerror}): choose another --out") from None


def create_folder(folder: Path) -> bool:
    """Make a fresh results folder; an empty one may be used, anything else is refused. Returns whether it is new."""
    try:
        made = not folder.exists()
        if not made and (not folder.is_dir() or any(folder.iterdir())):
            raise ResultsError(f"{folder}: exists already and is not an empty folder: choose another --out (nothing is "
                               "overwritten)")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.tmp"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise ResultsError(f"{folder}: cannot be written ({exc.strerror}): choose another --out") from None
    return made


def safe_name(name: str) -> str:
    """A name as part of a path."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".") or "run"


def fresh_folder(out: Path | None, name: str) -> Path:
    """The folder that was asked for, or a new one under runs/; makes neither."""
    if out is not None:
        return out
    base = Path("runs") / f"{safe_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
