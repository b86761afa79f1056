"""Formats of traces, one module each. A new one is a module and a line in ``FORMATS``.

A module says what it is (``TITLE``) and is one of two kinds:

- columns: ``COLUMNS`` (plain name -> as published; a header with all of them is taken for this format) and ``LAYOUT`` (in plain
  names), for a file of CSV, JSONL or Parquet;
- a document: ``found(path)``, whether the file is one, and ``read(path, config)``, which opens it as
  :class:`bullet.workload.rows.Rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from bullet.workload.formats import (
    azure,
    bailian,
    bench,
    blis,
    burstgpt,
    llmservingsim,
    mooncake,
    own_run,
    sharegpt,
    splitwise,
    vidur,
)

CONTAINERS = ("csv", "jsonl", "parquet")
"""Files with a row a request under any names (:func:`bullet.workload.layout.generic`)."""

FORMATS: Mapping[str, ModuleType] = MappingProxyType({
    "azure": azure,
    "bailian": bailian,
    "mooncake": mooncake,
    "burstgpt": burstgpt,
    "splitwise": splitwise,
    "blis": blis,
    "vidur": vidur,
    "llmservingsim": llmservingsim,
    "run": own_run,
    "sharegpt": sharegpt,
    "bench": bench,
})
"""In the order in which a header is compared with them: bailian's has mooncake's columns and more."""
