"""The traces that are shipped. ``data/README.md`` has sources, commits, licences and what was changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from bullet.errors import TraceError
from bullet.workload.table import Table


class Builtin(NamedTuple):
    """A shipped trace: what it is, and where it is from with its licence; one line each."""

    description: str
    source: str


BUILTIN: Mapping[str, Builtin] = MappingProxyType({
    "azure-code": Builtin("Azure LLM inference 2023, code completion", "Azure/AzurePublicDataset, CC-BY-4.0"),
    "azure-conv": Builtin("Azure LLM inference 2023, conversation", "Azure/AzurePublicDataset, CC-BY-4.0"),
    "sharegpt": Builtin("ShareGPT, single turn, lengths only", "efeslab/Nanoflow, Apache-2.0"),
    "arxiv": Builtin("arXiv summarisation, long prompts, lengths only", "microsoft/vattention, MIT"),
})


def load_builtin(name: str) -> Table:
    """A shipped trace by name; :class:`TraceError` lists the names."""
    if name not in BUILTIN:
        raise TraceError(f"unknown trace {name!r}: choose one of {', '.join(BUILTIN)}")
    with np.load(Path(__file__).parent / "data" / f"{name}.npz") as data:
        return Table(data.get("arrival_s"), data["prompt_tokens"].astype(np.int64),
                     data["output_tokens"].astype(np.int64))
