"""Where a driver's rows go: to a folder (:class:`bullet.results.folder.RunWriter`), or kept in memory."""

from __future__ import annotations

from typing import Any, Protocol

from bullet.results.columns import RequestTable, StepTable

PACK_STEPS = 4096
"""Steps that a run without a folder gathers before it packs them into columns: they are still in the processor's cache."""


class RowSink(Protocol):
    """Takes rows as they come, in the column order of bullet.results."""

    def step(self, row: tuple[Any, ...]) -> None:
        """A step ended."""

    def request(self, row: tuple[Any, ...]) -> None:
        """A request finished, was rejected, or was left unfinished at the end."""

    def tables(self) -> tuple[StepTable, RequestTable]:
        """All rows so far."""


class ListSink:
    """Rows in memory, for runs without a folder."""

    def __init__(self) -> None:
        self.cells: list[Any] = []  # of steps, one row after the other
        self.packed: list[StepTable] = []
        self.requests: list[Any] = []
        self.step = self.cells.extend
        self.request = self.requests.extend

    def pack(self) -> None:
        """Called every ``PACK_STEPS`` steps."""
        self.packed.append(StepTable.from_cells(self.cells))
        self.cells.clear()

    def tables(self) -> tuple[StepTable, RequestTable]:
        """All rows."""
        self.pack()
        return StepTable.concatenate(self.packed), RequestTable.from_cells(self.requests)
