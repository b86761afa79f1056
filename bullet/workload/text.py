"""Bytes of a trace file as text: unpacked, checked and cut into lines as they stream by, so that size costs no memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bullet.errors import TraceError
from bullet.units import MIB

BLOCK_BYTES = MIB
MOST_LINE_BYTES = 64 * MIB
"""No row is that long; a file without line ends would be held in memory whole."""
MOST_RATIO, SMALL_BYTES = 200, 64 * MIB
"""Tables of numbers pack 4 to 20 times; what unpacks to more than this many times its size (and to more than the second) is a
mistake or a trap."""
MOST_DOCUMENT_BYTES = 2**30
"""Of a JSON file that is one document and has to be held in memory."""

PACKED = {"gzip": (b"\x1f\x8b", ".gz"), "zstd": (b"\x28\xb5\x2f\xfd", ".zst"), "xz": (b"\xfd7zXZ\x00", ".xz"),
          "bzip2": (b"BZh", ".bz2")}
"""First bytes and ending of the packed files that are read."""


def plain_name(path: Path) -> str:
    """The file's name in lower case without the ending that says how it is packed."""
    name = path.name.lower()
    return next((name.removesuffix(ending) for _, ending in PACKED.values() if name.endswith(ending)), name)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], str | None, int]]:
    """The file unpacked, how it was packed (``None``: plain) and its size as packed; what goes wrong while it is read is one
    line (:class:`TraceError`)."""
    kind: str | None = None
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            file.seek(0)
            # By content also without the name: a browser may unpack the name but not the file.
            kind = next((k for k, (magic, ending) in PACKED.items() if head.startswith(magic) or path.suffix == ending), None)
            yield _unpacked(file, kind), kind, path.stat().st_size
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: is a folder: give a trace file") from None
    except EOFError:
        raise TraceError(f"{path}: truncated {kind} file, its end is missing: copy or download it again") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as exc:
        raise _unsound(path, kind, exc) from None
    except OSError as exc:
        if kind is not None and exc.errno is None:  # bz2's, pyarrow's
            raise _unsound(path, kind, exc) from None
        raise TraceError(f"{path}: cannot be read ({exc.strerror})") from None
    except ValueError as exc:
        if "null byte" not in str(exc):  # a NUL in the path itself
            raise
        raise TraceError(f"{str(path)!r}: not a file name ({exc})") from None


def _unsound(path: Path, kind: str | None, exc: Exception) -> TraceError:
    return TraceError(f"{path}: not a sound {kind} file ({str(exc).splitlines()[0] if str(exc) else 'empty'}): rename it if it "
                      "is not compressed")


def _unpacked(file: IO[bytes], kind: str | None) -> Any:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)
    if kind == "xz":
        return lzma.LZMAFile(file)
    if kind == "bzip2":
        return bz2.BZ2File(file)
    if kind == "zstd":
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return file


class _Checked(io.RawIOBase):
    """The bytes of a stream, with what cannot be a trace refused by line: not UTF-8, NUL characters, a line or a whole without
    end."""

    def __init__(self, path: Path, stream: IO[bytes], packed: str | None, packed_bytes: int, most_line_bytes: int) -> None:
        self.path, self.stream, self.packed, self.most_line_bytes = path, stream, packed, most_line_bytes
        self.most_bytes = max(SMALL_BYTES, MOST_RATIO * packed_bytes) if packed else None
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.block, self.at = b"", 0
        self.lines = self.in_line = self.total = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.at == len(self.block):
            self._next()
        part = self.block[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def _next(self) -> None:
        block = self.block = bytes(self.stream.read(BLOCK_BYTES))
        self.at = 0
        self.total += len(block)
        if self.most_bytes is not None and self.total > self.most_bytes:
            raise TraceError(f"{self.path}: unpacks to more than {self.most_bytes:,} bytes, {MOST_RATIO} times its size as "
                             f"{self.packed}: unpack it first if that is right")
        try:
            self.decoder.decode(block, final=not block)
        except UnicodeDecodeError as exc:
            line = self.lines + exc.object[: exc.start].count(b"\n") + 1
            raise TraceError(f"{self.path}:{line}: byte 0x{exc.object[exc.start]:02x} is not UTF-8: save the trace as UTF-8"
                             ) from None
        if b"\0" in block:
            line = self.lines + block[: block.index(b"\0")].count(b"\n") + 1
            raise TraceError(f"{self.path}:{line}: holds a NUL character (UTF-16, or not a text file): save the trace as UTF-8")
        ends = block.count(b"\n")
        self.in_line = len(block) - block.rindex(b"\n") - 1 if ends else self.in_line + len(block)
        if self.in_line > self.most_line_bytes:
            raise TraceError(f"{self.path}:{self.lines + ends + 1}: a line of more than {self.most_line_bytes:,} bytes: is this "
                             "a trace with a request a line?")
        self.lines += ends


@contextmanager
def text_of(path: Path, newline: str, most_line_bytes: int = MOST_LINE_BYTES) -> Iterator[io.TextIOWrapper]:
    """The file as text, a byte order mark taken off; ``newline`` as of :func:`open`."""
    with opened(path) as (stream, packed, size):
        raw = _Checked(path, stream, packed, size, most_line_bytes)
        yield io.TextIOWrapper(io.BufferedReader(raw, BLOCK_BYTES), encoding="utf-8-sig", newline=newline)


def first_character(path: Path) -> str:
    """The first that is no blank, of the first block; empty if there is none."""
    with text_of(path, "") as text:
        return text.read(4096).lstrip()[:1]
