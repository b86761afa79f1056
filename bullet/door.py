"""The one way in for files: JSON, JSON lines, TOML, CSV, packed or not, are opened here, and decoded into types.

Whatever the bytes, a caller gets sound values or one error of its own kind, in one line that names the file, what is wrong and
what is allowed: never another exception, never a file's worth of memory for a few packed bytes. Sound: UTF-8 without lone
surrogates or control characters, whole numbers of 64 bits, finite numbers, no key twice, nested no deeper than
:data:`MOST_DEPTH`. Types, absent and unknown keys are msgspec's to check (:func:`typed`); it is imported on use. Parquet's door
is :mod:`bullet.parquet`.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import functools
import gzip
import json
import math
import os
import re
import tomllib
import types
import typing
import zlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from bullet.errors import BulletError, one_line, short

_T = TypeVar("_T")
Error = type[BulletError]
"""The kind of error that a caller's files end in."""

MOST_DOCUMENT_BYTES = 64 << 20
"""Of a JSON or TOML file, which is read whole: the largest that are known, indices of sharded weights, are of some megabytes."""
MOST_UNPACKED_BYTES = 1 << 30
"""Of a file that is read line by line."""
MOST_LINE_BYTES = 16 << 20
"""Of one of its lines: the first of a record holds all requests."""
MOST_DEPTH = 64
PIECE_BYTES = 1 << 20
PACKED: Mapping[str, tuple[bytes, str]] = types.MappingProxyType({
    "gzip": (b"\x1f\x8b", ".gz"), "zstd": (b"\x28\xb5\x2f\xfd", ".zst"), "xz": (b"\xfd7zXZ\x00", ".xz"),
    "bzip2": (b"BZh", ".bz2")})
"""First bytes and ending of the packed files that are read."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ODD_JSON = re.compile(r"[0-9]{19}|[eE]\+?[0-9]{3}|\\u(?:[dD][89a-fA-F]|00[01789])|\\[bf]|[\x7f-\x9f]")
"""What a sound JSON text seldom holds: only then are its values looked at one by one."""


# ------------------------------------------------------------------------------------------------ bytes and text


def is_file(path: Path, error: Error) -> bool:
    """Whether a file is there; ``error`` where a folder on the way may not be looked into (``Path.is_file`` raises there)."""
    return _looked(path, path.is_file, error)


def is_folder(path: Path, error: Error) -> bool:
    """As :func:`is_file`."""
    return _looked(path, path.is_dir, error)


def exists(path: Path, error: Error) -> bool:
    """As :func:`is_file`, whatever it is."""
    return _looked(path, path.exists, error)


def _looked(path: Path, look: Callable[[], bool], error: Error) -> bool:
    try:
        return look()
    except (OSError, ValueError) as exc:
        raise error(f"{path}: cannot be looked at ({reason(exc)})") from None


def reason(exc: Exception) -> str:
    """Why, in a few words and without the path, which the message has."""
    return one_line((exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__, 200)


@contextmanager
def unpacked(path: Path, error: Error, what: str = "") -> Iterator[tuple[IO[bytes], str | None, int]]:
    """A file's bytes, how they were packed (``None``: not) and their number as packed. By content, also where the name does not
    say so: a browser may unpack the name but not the file. ``error``, where it cannot be opened or what is read within the block
    is damaged; ``what`` it should be, for the message.
    """
    kind: str | None = None
    damaged: list[type[Exception]] = [gzip.BadGzipFile, zlib.error]
    try:
        with path.open("rb") as file:
            head = file.peek(8)[:8]
            kind = next((k for k, (magic, ending) in PACKED.items() if head.startswith(magic) or path.suffix == ending), None)
            yield _stream(file, kind, damaged), kind, os.fstat(file.fileno()).st_size
    except EOFError:
        raise error(f"{path}: truncated {kind} file, its end is missing: copy or download it again") from None
    except tuple(damaged) as exc:
        raise error(_unsound(path, kind, exc)) from None
    except OSError as exc:
        if kind is not None and exc.errno is None:  # bz2's, pyarrow's
            raise error(_unsound(path, kind, exc)) from None
        words = {errno.ENOENT: f"no such {what}", errno.EISDIR: f"is a folder: give a {what}"}.get(exc.errno or 0, "")
        raise error(f"{path}: {words if words and what else f'cannot be read ({reason(exc)})'}") from None
    except ValueError as exc:
        if "null byte" not in str(exc):  # a NUL in the path itself
            raise
        raise error(f"{str(path)!r}: not a file name ({exc})") from None


def _unsound(path: Path, kind: str | None, exc: Exception) -> str:
    return (f"{path}: not a sound {kind} file ({reason(exc)}): copy or download it again, or rename it if it is not "
            "compressed")


def _stream(file: IO[bytes], kind: str | None, damaged: list[type[Exception]]) -> Any:
    """Unpacked; to ``damaged`` goes what the library raises."""
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)
    if kind == "xz":
        import lzma

        damaged.append(lzma.LZMAError)
        return lzma.LZMAFile(file)
    if kind == "bzip2":
        import bz2

        return bz2.BZ2File(file)
    if kind == "zstd":
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return file


def pieces(path: Path, error: Error, most_bytes: int = MOST_UNPACKED_BYTES) -> Generator[bytes, None, None]:
    """The file's bytes a megabyte at a time, unpacked; ``error`` also where it holds more than ``most_bytes``."""
    total = 0
    with unpacked(path, error) as (source, kind, _):
        while piece := source.read(PIECE_BYTES):
            total += len(piece)
            if total > most_bytes:
                raise error(f"{path}: holds more than {most_bytes >> 20} MiB{' unpacked' if kind else ''}, the most "
                            "that is read: is it the right file?")
            yield piece


def read_text(path: Path, error: Error, what: str = "text") -> str:
    """The whole of a small file; ``what`` it is to be, for the message."""
    data = b"".join(pieces(path, error, MOST_DOCUMENT_BYTES))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise error(f"{path}: cannot be read as {what} ({_not_utf8(exc)})") from None


def _not_utf8(exc: UnicodeDecodeError) -> str:
    return f"byte {exc.start}, 0x{exc.object[exc.start]:02x}, is not UTF-8"


def lines(path: Path, error: Error, *, whole: bool = False) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line, its line end with it; never more than one line and one piece in memory.

    ``whole``: a last line without a line end, of a writer that was stopped, is left out.
    """
    number, rest = 0, b""
    with closing(pieces(path, error)) as source:
        for piece in source:
            *done, rest = (rest + piece).split(b"\n")
            for line in done:
                number += 1
                yield number, _line(path, error, number, line) + "\n"
            if len(rest) > MOST_LINE_BYTES:
                raise error(f"{path}:{number + 1}: a line of more than {MOST_LINE_BYTES >> 20} MiB: is it a text file?")
    if rest and not whole:
        yield number + 1, _line(path, error, number + 1, rest)


def _line(path: Path, error: Error, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as exc:
        raise error(f"{path}:{number}: {_not_utf8(exc)}: save it as UTF-8") from None


# ------------------------------------------------------------------------------------------------ documents


def read_json(path: Path, error: Error, what: str = "JSON") -> Any:
    """The sound value of a JSON file."""
    return json_value(read_text(path, error, what), f"{path}: cannot be read as {what}", error)


def read_object(path: Path, error: Error, what: str = "JSON") -> dict[str, Any]:
    """As :func:`read_json`, of a file that holds one object."""
    value = read_json(path, error, what)
    if not isinstance(value, dict):
        raise error(f"{path}: must hold one JSON object, found {plain_kind(value)}")
    return value


def json_value(text: str, where: str, error: Error) -> Any:
    """The sound value of a JSON text; ``where`` begins the message."""
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
        if _ODD_JSON.search(text) or text.count("[") + text.count("{") > MOST_DEPTH:
            _check(value)
    except (ValueError, RecursionError) as exc:
        raise error(f"{where} ({_why(exc)})") from None
    return value


def json_lines(path: Path, error: Error, hint: str = "") -> Iterator[tuple[int, Any]]:
    """Line number and value of each whole line; ``hint`` ends the message."""
    for number, line in lines(path, error, whole=True):
        try:
            yield number, json_value(line, f"{path}: line {number} is not JSON", error)
        except error as exc:
            raise error(f"{exc}{hint}") from None


def read_toml(path: Path, error: Error, what: str = "TOML", controls: bool = False) -> dict[str, Any]:
    """The sound keys of a TOML file; ``controls``: a text may hold control characters, as a file name may."""
    return toml_value(read_text(path, error, what), f"{path}: cannot be read as {what}", error, controls)


def toml_value(text: str, where: str, error: Error, controls: bool = False) -> dict[str, Any]:
    """The sound keys of a TOML text; ``where`` begins the message."""
    try:
        value = tomllib.loads(text)
        _check(value, controls)
    except (ValueError, RecursionError) as exc:
        raise error(f"{where} ({_why(exc)})") from None
    return value


def _why(exc: Exception) -> str:
    return f"nested deeper than {MOST_DEPTH}" if isinstance(exc, RecursionError) else reason(exc)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {short(next(k for k in keys if keys.count(k) > 1))} is there twice")
    return found


def sound(value: Any, where: str, error: Error, controls: bool = False) -> None:
    """``error`` for a value that a flag gave and that no file may hold."""
    try:
        _check(value, controls)
    except ValueError as exc:
        raise error(f"{where}: {reason(exc)}") from None


def _check(value: Any, controls: bool = False) -> None:
    """``ValueError`` for what no file of ours may hold."""
    level, depth = [value], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(f"nested deeper than {MOST_DEPTH}")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str):
                if not controls and _CONTROL.search(one):
                    raise ValueError(f"{short(one)} holds a control character")
                if not one.isascii():
                    one.encode()  # a lone surrogate: UnicodeEncodeError is a ValueError
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise ValueError(f"{one} is no finite number")
            elif isinstance(one, bool) or one is None:
                pass
            elif not isinstance(one, int):
                raise ValueError(f"{one} is a {type(one).__name__}: must be text, a number, true, false, a list or a table")
            elif not -2**63 <= one < 2**63:
                raise ValueError("a whole number of more than 64 bits")
        level, depth = below, depth + 1


# ------------------------------------------------------------------------------------------------ tables


Cells = dict[str, str]
"""A row of a CSV file by column."""


def read_csv(path: Path, needed: Iterable[str], error: Error, *, comment: str = "") -> Iterator[tuple[int, Cells]]:
    """The rows below the header that names the columns: line on which each ends, and its cells.

    ``error`` where a ``needed`` column is not there, one is there twice, or a row is not as long as the header. Lines that are
    blank or begin with ``comment`` are left out.
    """
    at = 1

    def texts() -> Iterator[str]:
        nonlocal at
        for at, line in lines(path, error):
            if control := _CONTROL.search(line):
                raise error(f"{path}:{at}: holds the control character {control.group()!r}: is it a text file?")
            if not (comment and line.startswith(comment)):
                yield line

    header: list[str] | None = None
    try:
        for cells in csv.reader(texts(), strict=True):
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue
            if header is None:
                header = cells
                absent = [name for name in needed if name not in header]
                if absent:
                    raise error(f"{path}: no column {absent[0]!r}: it has {short(', '.join(header), 200)}")
                doubled = next((name for name in header if header.count(name) > 1), None)
                if doubled is not None:
                    raise error(f"{path}:{at}: column {short(doubled)} is there twice")
                continue
            if len(cells) != len(header):
                raise error(f"{path}:{at}: {len(cells)} cells where the header has {len(header)}")
            yield at, dict(zip(header, cells, strict=True))
    except csv.Error as exc:
        raise error(f"{path}:{at}: not CSV ({reason(exc)})") from None
    if header is None:
        raise error(f"{path}: holds no rows")


# ------------------------------------------------------------------------------------------------ types


PLAIN_NAMES: Mapping[str, str] = types.MappingProxyType({
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "null": "none", "array": "a list",
    "object": "a table of keys"})
"""How messages call the types that a value may have."""
FLAGS = "configuration"
"""Where values come from that a command line gave."""
_PACKAGE = Path(__file__).parent


def plain_kind(value: Any) -> str:
    """How messages call what was found."""
    for kind, name in ((bool, "bool"), (str, "str"), (int, "int"), (float, "float"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return PLAIN_NAMES[name]
    return PLAIN_NAMES["null"]


def typed(value: Any, kind: type[_T], where: str | Path, error: Error, prefix: str = "", *,
          others: bool = False) -> _T:
    """Plain data as a ``kind`` (a dataclass or a container of those): whole numbers may stand for floats, nothing
    else for anything. ``error`` names ``where`` and, after ``prefix``, the key: absent, unknown (unless ``others``
    may be there too), or of another type.

    What is right at a glance (:func:`_plainly`), as nearly all flags and the package's own files are, does not ask msgspec, which
    takes 30 ms to import and words the refusals. Without it (``make gpu`` installs nothing) what the package ships and what flags
    say is taken as it is; other files are refused.
    """
    try:
        if _plainly(value, kind, others):
            return typing.cast(_T, _built(value, kind))
    except BulletError as exc:  # of a __post_init__
        raise error(f"{where}: {exc}") from None
    except (TypeError, ValueError):  # a key that is missing: msgspec has the words
        pass
    try:
        import msgspec
    except ImportError:
        if where != FLAGS and not Path(where).is_relative_to(_PACKAGE):
            raise error(f"{where}: is checked by msgspec, which is not installed here: pip install msgspec") from None
        return typing.cast(_T, _built(value, kind))
    unknown = None if others else _unknown(value, kind, prefix)
    if unknown is not None:
        raise error(f"{where}: {unknown}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise error(f"{where}: {_told(str(exc), value, prefix)}") from None
    except UnicodeEncodeError as exc:
        raise error(f"{where}: {short(exc.object)}: is not UTF-8, as a file's name may be: rename it") from None
    except BulletError as exc:  # of a __post_init__
        raise error(f"{where}: {exc}") from None


@functools.cache
def type_hints(kind: Hashable) -> Mapping[str, Any]:
    """A dataclass's fields with their types; a class that is not one has none."""
    return typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def _unknown(value: Any, kind: Any, prefix: str) -> str | None:
    """What msgspec ignores in a dataclass: keys that it does not have."""
    if not (dataclasses.is_dataclass(kind) and isinstance(value, dict)):
        return None
    hints = type_hints(typing.cast(Hashable, kind))
    for key, inner in value.items():
        if key not in hints:
            return f"unknown key {short(f'{prefix}{key}')}: allowed are {', '.join(sorted(hints))}"
        told = _unknown(inner, hints[key], f"{prefix}{key}.")
        if told is not None:
            return told
    return None


_MISSING = re.compile(r"Object missing required field `(.*?)`")
_EXPECTED = re.compile(r"Expected `(.*?)`( of length [0-9]+| of at least length [0-9]+)?(?:, got .*)?")
_AT = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)


def _told(message: str, value: Any, prefix: str) -> str:
    """msgspec's words as ours: the key, its value, what is allowed."""
    found = _AT.fullmatch(message)
    assert found is not None
    what, place = found.group(1), found.group(2) or ""
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", place):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):  # [...]: one of a table's, not said which
            break
    key = (prefix + place.removeprefix(".")).removesuffix(".")
    absent, expected = _MISSING.fullmatch(what), _EXPECTED.fullmatch(what)
    if absent is not None:
        name = absent.group(1)
        return f"{key}.{name} is missing" if key else f"{name!r} is missing"
    if expected is not None:
        names = [PLAIN_NAMES.get(name, name) for name in expected.group(1).split(" | ")]
        what = f"must be {' or '.join(names)}{expected.group(2) or ''}"
    return f"{key} = {short(value)}: {what}" if key else what


def _plainly(value: Any, kind: Any, others: bool = False) -> bool:
    """Whether ``value`` is a ``kind`` beyond doubt. Where it is not, msgspec decides: this knows a few kinds only, and nothing of
    a key that is missing."""
    if kind is Any:
        return True
    if kind is float:
        return type(value) in (float, int)
    if kind in (int, str, bool, type(None)):
        return type(value) is kind
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_plainly(value, one, others) for one in inner)
    if dataclasses.is_dataclass(kind):
        hints = type_hints(typing.cast(Hashable, kind))
        if type(value) is not dict or not (others or value.keys() <= hints.keys()):
            return False
        pairs = [(one, hints[name]) for name, one in value.items() if name in hints]
    elif origin in (list, tuple) and type(value) is list:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis or origin is list else inner
        if len(kinds) != len(value):
            return False
        pairs = list(zip(value, kinds, strict=True))
    elif origin in (dict, Mapping) and type(value) is dict:
        pairs = [pair for key, one in value.items() for pair in ((key, inner[0]), (one, inner[1]))]
    else:
        return False
    return all(_plainly(one, of, others) for one, of in pairs)


def _built(value: Any, kind: Any) -> Any:
    """Plain data that are right as a ``kind``."""
    origin, inner_kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        exact_first = sorted(inner_kinds, key=lambda one: one is not type(value))
        kind = next((one for one in exact_first if _plainly(value, one, True)), None)
        return value if kind is None else _built(value, kind)
    if kind is float and type(value) is int:
        return float(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = type_hints(typing.cast(Hashable, kind))
        return typing.cast("type[Any]", kind)(**{name: _built(inner, hints[name]) for name, inner in value.items()
                                                 if name in hints})
    if origin is tuple and isinstance(value, list):
        if inner_kinds[-1] is Ellipsis:
            inner_kinds = (inner_kinds[0],) * len(value)
        return tuple(_built(inner, of) for inner, of in zip(value, inner_kinds, strict=True))
    if origin is list and isinstance(value, list):
        return [_built(inner, inner_kinds[0]) for inner in value]
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: _built(inner, inner_kinds[1]) for key, inner in value.items()}
    return value
