"""Public kernel tables to rows of :mod:`bullet.profiles.rows`, one module a publisher: every row with its origin, version and
licence.

A publisher's module has ``tables(gpu, kernels, model)`` and reads by :mod:`bullet.profiles.importers.reading`; to add one, a file
and its name in :data:`PUBLISHERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from bullet.catalog.models import get_model
from bullet.devices import PROFILES
from bullet.errors import ProfileError, ResultsError
from bullet.files import Claim
from bullet.profiles.check import check_samples
from bullet.profiles.importers import aiconfigurator, frontier, llmservingsim, vidur
from bullet.profiles.rows import Row, write_parquet

PUBLISHERS: Mapping[str, tuple[ModuleType, ...]] = {
    "a100-80gb": (vidur, aiconfigurator, frontier), "h100": (aiconfigurator, vidur), "rtx4090": (llmservingsim,)}
"""GPU -> whose tables of it are read, in the order of its rows."""


def import_samples(gpu: str, data: Path, out: Path | None = None, replace: bool = False) -> tuple[Path, list[Row]]:
    """:func:`import_public`, written to ``out`` (default: the GPU's profile); where, and the rows.

    :class:`ResultsError` if a file is there, unless ``replace``, or it cannot be written.
    """
    path = out or PROFILES / gpu / "llama-3.1-8b" / "samples.parquet"
    if path.exists() and not replace:
        raise ResultsError(f"{path}: is there: choose another --out, or say --replace")
    rows = import_public(gpu, data)
    with Claim(path.parent, shared=True):
        if path.exists() and not replace:  # another import was faster
            raise ResultsError(f"{path}: is there: choose another --out, or say --replace")
        write_parquet(path, rows, {"gpu": gpu, "source": "measured"})
    return path, rows


def import_public(gpu: str, data: Path) -> list[Row]:
    """All licensed public rows of a GPU that bear on Llama-3.1-8B, checked; ``data``: folder with ``kernels/``."""
    model, kernels = get_model("llama-3.1-8b"), data / "kernels"
    if not kernels.is_dir():
        raise ProfileError(f"{data}: no folder kernels/ with the measured tables there; give it by --data")
    if gpu not in PUBLISHERS:
        raise ProfileError(f"{gpu}: no shipped profile is made of public tables for it: choose {', '.join(PUBLISHERS)}, or "
                           "import a publisher's folder")
    rows: list[Row] = [row for publisher in PUBLISHERS[gpu] for row in publisher.tables(gpu, kernels, model)]
    check_samples(rows)
    return rows
