"""Parquet: read with one line that says what is wrong, written whole or not at all. pyarrow is imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bullet.errors import BulletError, ProfileError
from bullet.files import whole_file


def read_table(path: Path, what: str = "parquet", columns: Sequence[str] | None = None,
               error: type[BulletError] = ProfileError) -> tuple[Any, dict[str, str]]:
    """The pyarrow table (``columns`` in that order; default all) and the file's metadata.

    ``error`` names the file where it cannot be read as ``what``, or lacks one of the columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=columns)
        if columns is not None:
            table = table.select(columns)  # a column that is not there is left out without a word until here
    except (OSError, KeyError, pa.ArrowException) as exc:
        raise error(f"{path}: cannot be read as {what} ({str(exc).splitlines()[0]})") from None
    return table, {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}


def write_table(path: Path, table: Any, **options: Any) -> None:
    """Whole or not at all (:func:`bullet.files.whole_file`); ``options``: pyarrow's. Equal tables and options, equal bytes.
    """
    import pyarrow.parquet as pq

    with whole_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", **options)
