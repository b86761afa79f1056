"""Parquet: read with one line that says what is wrong, written whole or not at all. pyarrow is imported on use.

Pages carry parquet's own checksums, and the footer one of the whole file (:data:`DIGEST`): a bit that flipped on a disk or on the
way does not read back as another value. Files without them, of earlier versions and of others, are read as they are.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bullet.door import PIECE_BYTES, reason
from bullet.errors import BulletError, ProfileError
from bullet.files import whole_file

DIGEST = b"bullet_crc32"
"""Key of the footer's metadata: CRC-32 of the file, in hexadecimal, with zeros in its own place."""
_BLANK = b"00000000"
_TAIL_BYTES = 8
"""Length of the footer, and parquet's four letters."""
MOST_ROWS = 50_000_000
MOST_UNPACKED_BYTES = 8 << 30
"""More is no table of ours: a few bytes can claim any number of rows."""


@contextmanager
def told(path: Path, what: str, error: type[BulletError]) -> Iterator[None]:
    """``error`` for whatever pyarrow finds within the block: the file cannot be read as ``what``."""
    import pyarrow as pa

    try:
        yield
    except (OSError, KeyError, ValueError, MemoryError, OverflowError, pa.ArrowException) as exc:
        raise error(f"{path}: cannot be read as {what} ({reason(exc)})") from None


def open_file(path: Path, what: str = "parquet", error: type[BulletError] = ProfileError) -> Any:
    """A ``pyarrow.parquet.ParquetFile``, whose bytes are those that were written; it is a context manager."""
    import pyarrow.parquet as pq

    with told(path, what, error):
        _verify(path, error)
        return pq.ParquetFile(path, page_checksum_verification=True)


def read_table(path: Path, what: str = "parquet", columns: Sequence[str] | None = None,
               error: type[BulletError] = ProfileError) -> tuple[Any, dict[str, str]]:
    """The pyarrow table (``columns`` in that order; default all) and the file's metadata.

    ``error`` names the file where it cannot be read as ``what``, is damaged, or lacks one of the columns.
    """
    with told(path, what, error), open_file(path, what, error) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if file.metadata.num_rows > MOST_ROWS or sum(g.total_byte_size for g in groups) > MOST_UNPACKED_BYTES:
            raise error(f"{path}: holds more than {MOST_ROWS} rows or {MOST_UNPACKED_BYTES >> 30} GiB: is it the right file?")
        table = file.read(columns=columns)
        if columns is not None:
            table = table.select(columns)  # a column that is not there is left out without a word until here
        table.validate(full=True)
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k != DIGEST}
    return table, metadata


def write_table(path: Path, table: Any, **options: Any) -> None:
    """Whole or not at all (:func:`bullet.files.whole_file`); ``options``: pyarrow's. Equal tables and options, equal bytes.
    """
    write_tables(path, [table], **options)


def write_tables(path: Path, tables: Iterable[Any], **options: Any) -> None:
    """As :func:`write_table`, of tables of one schema as they come, a row group each (or more); one at least."""
    import pyarrow.parquet as pq

    size = options.pop("row_group_size", None)
    with whole_file(path) as temporary:
        rest = iter(tables)
        first = next(rest)
        with pq.ParquetWriter(temporary, first.schema, compression="zstd", write_page_checksum=True, **options) as writer:
            writer.write_table(first, row_group_size=size)
            for table in rest:
                writer.write_table(table, row_group_size=size)
            writer.add_key_value_metadata({DIGEST: _BLANK})
        place, blank = _digest_place(temporary)
        assert blank == _BLANK, f"the footer's digest is {blank!r} at {place}"
        with temporary.open("rb+") as file:
            file.seek(place)
            file.write(b"%08x" % _crc(temporary, place))


def row_groups(path: Path, columns: Sequence[str], error: type[BulletError] = ProfileError) -> Iterator[Any]:
    """The file's row groups as pyarrow tables, one at a time."""
    with told(path, "parquet", error), open_file(path, error=error) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=list(columns))
            table.validate(full=True)
            yield table


def _digest_place(path: Path) -> tuple[int, bytes]:
    """Where the digest stands in the file, and what it is; empty where there is none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < _TAIL_BYTES:
            return 0, b""
        file.seek(size - _TAIL_BYTES)
        (length,) = struct.unpack("<I", file.read(4))
        start = max(0, size - _TAIL_BYTES - length)
        file.seek(start)
        footer = file.read(length)
    at = footer.rfind(DIGEST)
    # Thrift writes key and value one after the other, each after its field's byte and its length's.
    place = at + len(DIGEST) + 2
    return (0, b"") if at < 0 else (start + place, footer[place:place + len(_BLANK)])


def _crc(path: Path, place: int) -> int:
    crc = at = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            left, right = place - at, place + len(_BLANK) - at
            if left < len(piece) and right > 0:
                piece = piece[:max(0, left)] + _BLANK[max(0, -left):len(piece) - left] + piece[max(0, right):]
            crc, at = zlib.crc32(piece, crc), at + len(piece)
    return crc


def _verify(path: Path, error: type[BulletError]) -> None:
    place, digest = _digest_place(path)
    if place and digest != b"%08x" % _crc(path, place):
        raise error(f"{path}: damaged: its bytes are not those that were written: copy it again, or make it anew")
