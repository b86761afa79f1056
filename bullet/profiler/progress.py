"""How far a sweep has come, on disk at every point: what a process that ends without a word leaves to the next.

``progress.json``: ``now``, the point under way; ``cut``, points in which a process ended without a word, as by a time limit,
which are tried once more; ``lost``, points in which the device was lost, or that were cut twice; ``tiers``, points measured and
planned, of every part so far. Rows are in the journal; this says what not to try again, and what is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bullet.errors import ResultsError
from bullet.profiler.plan import Point

NAME = "progress.json"
SUSPECT_POINTS = 2
"""An operation that is in so many lost points is left out altogether."""


class Progress:
    """``path`` None: nothing is kept. Opening it takes up what is there: a point that was under way then was cut."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.now: str | None = None
        self.lost: list[str] = []
        self.cut: list[str] = []
        self.tiers: Mapping[str, tuple[int, int]] = {}
        if path is not None and path.exists():
            try:
                found: Any = json.loads(path.read_text(encoding="utf-8"))
                self.lost, self.cut = ([str(key) for key in found[name]] for name in ("lost", "cut"))
                self.tiers = {str(tier): (int(done), int(planned)) for tier, (done, planned) in found["tiers"].items()}
                if (now := found["now"]) is not None:
                    (self.lost if now in self.cut else self.cut).append(str(now))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass  # it was cut while it was written: nothing is known, and nothing is left out

    def begin(self, point: Point) -> None:
        """This point is under way."""
        self.now = point.key
        self._write()

    def end(self, tiers: Mapping[str, tuple[int, int]], *, lost: bool = False) -> None:
        """It has ended, whichever way; ``tiers``: measured and planned points of each. Written with the next point, or now if it
        was lost."""
        if lost and self.now is not None:
            self.lost.append(self.now)
        self.now, self.tiers = None, {**self.tiers, **tiers}
        if lost:
            self._write()

    def close(self) -> None:
        """No point is under way any more: a process that ends by itself."""
        if self.now is not None or self.tiers:
            self.now = None
            self._write()

    def suspects(self) -> set[str]:
        """Operations that are in :data:`SUSPECT_POINTS` lost points or more, and those of a point that was lost alone."""
        ops: dict[str, int] = {}
        for key in self.lost:
            kind, _, _, shape, other, *_ = [*key.split("|"), "", "", "", "", ""]
            for name in {shape.partition(":")[0], other.partition(":")[0]} - {""}:
                ops[name] = ops.get(name, 0) + (SUSPECT_POINTS if kind == "solo" else 1)
        return {op for op, count in ops.items() if count >= SUSPECT_POINTS}

    def allows(self, point: Point) -> bool:
        """Whether to try it."""
        if point.key in self.lost:
            return False
        return not self.suspects() & {point.shape.op, point.other.op if point.other else point.control}

    def _write(self) -> None:
        if self.path is None:
            return
        text = json.dumps({"now": self.now, "lost": self.lost, "cut": self.cut, "tiers": self.tiers}, indent=1) + "\n"
        try:
            beside = self.path.with_suffix(".tmp")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        except OSError as exc:
            raise ResultsError(f"{self.path}: cannot be written ({exc.strerror}): rows until here are kept") from None


def tier_line(tiers: Mapping[str, tuple[int, int]]) -> str:
    """Which tiers are whole, which are begun, which are not."""
    whole = [t for t, (done, planned) in tiers.items() if planned and done >= planned]
    begun = [f"{t} {done} of {planned}" for t, (done, planned) in tiers.items() if 0 < done < planned]
    none = [t for t, (done, planned) in tiers.items() if planned and not done]
    parts = [f"whole: {', '.join(whole) or 'no tier'}", f"begun: {', '.join(begun)}" if begun else "",
             f"not begun: {', '.join(none)}" if none else ""]
    return "; ".join(part for part in parts if part)
