"""Results by what they were computed from: configuration, code, data. A result is a file of its own, written whole.

The key of a run is a digest of its configuration with every default, of the sources that a simulated run passes through, and of
its data: the shipped traces, the GPU's profile, and each file that the configuration names (a trace, a model, a policy's file;
of a device's folder all files). What such a file reads in turn, as a policy of one's own that imports another file, is not seen.
Two sweeps may share a folder: they write equal bytes under equal names, each by a name of its own first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bullet import door
from bullet.catalog.gpus import get_gpu
from bullet.config import RunConfig
from bullet.devices import PROFILES
from bullet.errors import ResultsError
from bullet.files import cannot_write, make_folder

PACKAGE = Path(__file__).parent.parent
DEFAULT = Path("runs") / "cache"
"""Where results are kept unless another folder is given; relative to the folder that the command is run in."""
NOT_IN_A_RUN = frozenset({"api.py", "cli", "engine", "gpu", "kernels", "paper", "profiler", "runtime", "validation",
                          "version.py"})
"""Wings whose sources a simulated run does not pass through (a test)."""
OF_SWEEPS = frozenset({"intervals.py", "measure.py", "steady.py"})
"""Of this wing, what figures depend on."""


def sources(package: Path = PACKAGE) -> list[Path]:
    """The files whose text the figures of a simulated run depend on."""
    found = []
    for path in sorted(package.rglob("*.py")):
        wing, *rest = path.relative_to(package).parts
        if wing not in NOT_IN_A_RUN and (wing != "sweeps" or rest[0] in OF_SWEEPS):
            found.append(path)
    return found


@cache
def _of_file(path: Path, changed_ns: int, size_bytes: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    total = hashlib.sha256()
    for name, path in files:
        about = path.stat()
        total.update(f"{name}\0{_of_file(path.absolute(), about.st_mtime_ns, about.st_size)}\n".encode())
    return total.hexdigest()


@cache
def code_digest() -> str:
    """Of the package's sources, and of the versions that floating point may depend on. Once a process."""
    text = _digest((str(path.relative_to(PACKAGE)), path) for path in sources())
    return f"{text}-py{platform.python_version()}-np{np.__version__}"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder)), path


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Files that strings of a configuration name, alone or as a part (``a.csv@5/60s,b.csv@9/60s``, ``mine.py:Mine``)."""
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            yield from _named(value)
        elif isinstance(value, str):
            for part in dict.fromkeys([value, *re.split(r"[,@]", value), value.rpartition(":")[0]]):
                with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a NUL in it
                    if part and Path(part).is_file():
                        yield part, Path(part)
                    elif key == "timing" and part and Path(part).is_dir():
                        yield from _files(Path(part))


@cache
def _of_folder(folder: Path) -> str:
    return _digest(_files(folder))


def key_of(config: RunConfig) -> str:
    """The name under which a run's result is kept; 40 hexadecimal digits. Shipped data is read once a process."""
    plain = dataclasses.asdict(config)
    card = get_gpu(config.device.gpu)
    parts = (json.dumps(plain, sort_keys=True, default=str), code_digest(), _of_folder(PACKAGE / "workload" / "data"),
             _of_folder(PACKAGE / "catalog" / "cards"), _of_folder(PROFILES / card.name), _of_folder(PROFILES / card.silicon),
             _digest(_named(plain)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


def read_entry(path: Path) -> dict[str, Any] | None:
    """A record from its file; ``None`` where there is none. :class:`ResultsError`: damaged, its checksum differs."""
    if not door.is_file(path, ResultsError):
        return None
    digest, _, text = door.read_text(path, ResultsError).partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ResultsError(f"{path}: damaged")
    record = door.json_value(text, f"{path}: cannot be read", ResultsError)
    if not isinstance(record, dict):
        raise ResultsError(f"{path}: must hold one JSON object, found {door.plain_kind(record)}")
    return record


class Cache:
    """Records (plain JSON) by key, below ``folder``. ``damaged``: entries that could not be read, to be made anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[Path] = []
        make_folder(folder)

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        """A record; ``None`` where there is none, or a damaged one."""
        path = self.path(key)
        try:
            return read_entry(path)
        except ResultsError:
            if path not in self.damaged:
                self.damaged.append(path)
            return None

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Whole or not at all, whoever else writes the same; :class:`~bullet.errors.ResultsError`."""
        path = self.path(key)
        text = json.dumps(record, allow_nan=False)  # in its order, which is that of the table's columns
        try:
            path.parent.mkdir(exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as exc:
            raise cannot_write(path, exc) from None
