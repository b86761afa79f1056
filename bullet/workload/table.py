"""A trace as read, and what is said about the reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DURATIONS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


class BlockIds(NamedTuple):
    """Ids of the prompts' blocks, one row after the other: row i's are ``ids[ends[i - 1] : ends[i]]`` (from 0 for the first).

    Equal ids at the same place, after equal ids before it, are equal tokens.
    """

    ids: NDArray[np.int64]
    ends: NDArray[np.int64]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How a trace was read, for those who have to believe it.

    ``columns``: what each figure is of. ``unit``: of the times, with what states it; ``None``: no times, ``question`` is then
    what to ask if they are wanted. ``rows``: of the file, before ``window``; ``failed``: left out as failed. ``notes``: whatever
    else a reader should know. ``arrival_unit``: what a stored configuration says of the unit, ``None`` where it is unknown.
    """

    format: str
    columns: str
    unit: str | None
    rows: int
    failed: int = 0
    first_failed: str = ""
    window: str = ""
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    question: str = ""
    arrival_unit: str | None = "s"


class Table(NamedTuple):
    """Seconds since the first row (``None``: no times), prompt and output tokens; of one length."""

    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    reading: Reading | None = None
    blocks: BlockIds | None = None


def shared_prefixes(blocks: BlockIds, prompt_tokens: Sequence[int] | NDArray[np.int64],
                    kv_block_tokens: int) -> dict[int, tuple[int, int]]:
    """Row -> (the earliest row that begins with the same blocks for as long as any earlier one does, how many KV blocks that is).

    Rows that share less than a KV block are not in it. A tree of ids: one step a block.
    """
    tree: dict[tuple[int, int], int] = {}  # (node, id) -> node; 0 is the root
    owners = [0]  # node -> the row that was the first to get there
    shared: dict[int, tuple[int, int]] = {}
    start = 0
    ids = blocks.ids
    for row, end in enumerate(blocks.ends.tolist()):
        node = depth = 0
        owner: int | None = None
        for key in ids[start:end].tolist():
            child = tree.get((node, key))
            if child is None:
                child = tree[node, key] = len(owners)
                owners.append(row)
            elif owners[child] != row:
                depth, owner = depth + 1, owners[child]
            node = child
        if owner is not None:
            tokens = min(depth * blocks.block_tokens, int(prompt_tokens[row]), int(prompt_tokens[owner]))
            if tokens >= kv_block_tokens:
                shared[row] = (owner, tokens // kv_block_tokens)
        start = end
    return shared


def duration(seconds: float) -> str:
    """3,501.7 s as it is read: "3,502 s (58 minutes)"."""
    text = f"{seconds:,.4g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    for size, name in DURATIONS:
        if seconds >= 2 * size:
            return f"{text} ({seconds / size:.3g} {name})"
    return text


def closed_text(clients: int, think_time_s: float, think: str) -> str:
    """A closed loop in words."""
    kind = "" if think == "exponential" else f", {think}"
    who = f"closed loop of {clients:,} client{'s' if clients > 1 else ''}"
    return who + (f" that think{'' if clients > 1 else 's'} {think_time_s:g} s{kind}" if think_time_s else "")
