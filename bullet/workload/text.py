"""Bytes of a trace file as text: unpacked, checked and cut into lines as they stream by, so that size costs no memory."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bullet.door import PACKED, unpacked
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

def plain_name(path: Path) -> str:
    """The file's name in lower case without the ending that says how it is packed."""
    name = path.name.lower()
    return next((name.removesuffix(ending) for _, ending in PACKED.values() if name.endswith(ending)), name)


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
    with unpacked(path, TraceError, "trace file") as (stream, packed, size):
        raw = _Checked(path, stream, packed, size, most_line_bytes)
        yield io.TextIOWrapper(io.BufferedReader(raw, BLOCK_BYTES), encoding="utf-8-sig", newline=newline)


def first_character(path: Path) -> str:
    """The first that is no blank, of the first block; empty if there is none."""
    with text_of(path, "") as text:
        return text.read(4096).lstrip()[:1]
