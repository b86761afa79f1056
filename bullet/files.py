"""One way to write: whole or not at all, nothing overwritten silently."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bullet.errors import ResultsError
from bullet.signals import held


def cannot_write(path: Path, exc: OSError) -> ResultsError:
    """The error to raise."""
    return ResultsError(f"{path}: cannot be written ({exc.strerror or exc})")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write under; leaving the block gives the file its own name, so that a reader never sees half of it.

    Renamed once the bytes are on the disk: no crash leaves an empty file under the final name. :class:`ResultsError` names
    ``path`` if it cannot be written; half a file, whose room a full disk has use for, is taken away.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # nobody else's
    try:
        with held():
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise cannot_write(path, exc) from None
        raise


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


def absolute(folder: Path) -> Path:
    """Of the present folder; :class:`ResultsError` if that is gone, or the name is one that parquet's library cannot spell."""
    try:
        str(folder).encode()
        return Path(os.path.abspath(folder))
    except UnicodeEncodeError:
        raise ResultsError(f"{str(folder)!r}: is not UTF-8: choose another --out") from None
    except OSError as exc:
        raise ResultsError(f"{folder}: there is no present folder ({exc.strerror}): choose an absolute --out") from None


LOCK = ".lock"


class Claim:
    """A folder that this command alone writes, made if it is not there; a context manager.

    One that holds anything is refused, unless ``resumes`` names a file in it, or ``shared`` says that its files are replaced by
    their own rules. Leaving the block by an exception takes away what was made and is still empty: a refused command leaves
    nothing. :class:`ResultsError` in one line, also to the loser of a race.
    """

    def __init__(self, folder: Path, *, resumes: str | None = None, shared: bool = False) -> None:
        self.folder = absolute(folder)  # a user's policy may go elsewhere meanwhile
        self._made: list[Path] = []
        self._lock: int | None = None
        try:
            with held():
                self._make()
                self._take()
                self.found = frozenset(name for name in os.listdir(self.folder) if name != LOCK)
                if self.found and not shared and resumes not in self.found:
                    raise self._not_empty()
        except OSError as exc:
            self.release(undo=True)
            raise ResultsError(f"{self.folder}: cannot be written ({exc.strerror}): choose another --out") from None
        except BaseException:
            self.release(undo=True)
            raise

    def _not_empty(self) -> ResultsError:
        return ResultsError(f"{self.folder}: exists already and is not an empty folder: choose another --out (nothing is "
                            "overwritten)")

    def _make(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.is_dir()]
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileExistsError:
                if path.is_dir():  # another command made it just now
                    continue
                if path == self.folder:
                    raise self._not_empty() from None
                raise NotADirectoryError(20, f"{path} is no folder") from None
            self._made.insert(0, path)

    def _take(self) -> None:
        """The lock goes with the process, so that one that was killed leaves none."""
        path = self.folder / LOCK
        while self._lock is None:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ResultsError(f"{self.folder}: another command is writing there: wait for its end or choose another "
                                   "--out") from None
            except OSError:
                pass  # a file system without locks
            try:
                same = os.path.samestat(os.fstat(lock), os.stat(path))
            except FileNotFoundError:  # its owner has just taken it away
                same = False
            if same:
                self._lock = lock
            else:
                os.close(lock)

    def release(self, *, undo: bool = False) -> None:
        """Others may write there; ``undo``: and what was made goes if it is empty."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.folder / LOCK)
            os.close(self._lock)
            self._lock = None
        if undo:
            with contextlib.suppress(OSError):  # somebody else's files are in there by now
                for path in self._made:
                    path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.release(undo=exc is not None)


def safe_name(name: str) -> str:
    """A name as part of a path."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".") or "run"


def fresh_folder(out: Path | None, name: str) -> Path:
    """The folder that was asked for, or a new one under runs/, absolute; makes neither."""
    if out is not None:
        return absolute(out)
    base = absolute(Path("runs")) / f"{safe_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
