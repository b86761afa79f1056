"""How far a sweep has come, on disk at every point: what a process that ends without a word leaves to the next.

``progress.json``: ``now``, the point under way; ``cut``, points in which a process ended without a word, as by a time limit,
which are tried once more; ``lost``, points in which the device was lost or hung, or that were cut twice; ``tiers``, points
measured and planned, of every part so far. Rows are in the journal; this says what not to try again, and what is whole. What is
tried before the first point, and what is kept beside points, has a name of its own there (:data:`TRIALS`), so that a fault in it
costs no point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bullet import door
from bullet.errors import ProfileError, ResultsError
from bullet.profiler.bench import DeviceLostError
from bullet.profiler.plan import SHARINGS, Point

NAME = "progress.json"
SUSPECT_POINTS = 2
"""What is in so many lost points is left out altogether."""
TRIALS = {"kernels": "the first kernel of ours", "proof": "the partitions' proof", "gemm": "the GEMM on a quarter of the SMs",
          "layers": "the trial of the engine's layers", "evidence": "reading a captured graph"}
"""What is no point and may lose the device too -> in words. It is not tried again after that; the proof, on which all rows rest,
once more."""


class Progress:
    """``path`` None: nothing is kept. Opening it takes up what is there: a point that was under way then was cut."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.now: str | None = None
        self.found: str | None = None
        """What was under way when the process before ended."""
        self.lost: list[str] = []
        self.cut: list[str] = []
        self.tiers: Mapping[str, tuple[int, int]] = {}
        if path is not None and path.exists():
            try:
                found = door.read_object(path, ProfileError)
                self.lost, self.cut = ([str(key) for key in found[name]] for name in ("lost", "cut"))
                self.tiers = {str(tier): (int(done), int(planned)) for tier, (done, planned) in found["tiers"].items()}
                if (now := found["now"]) is not None:
                    self.found = str(now)
                    if self.found in self.cut:
                        self.cut.remove(self.found)
                        self.lost.append(self.found)
                    else:
                        self.cut.append(self.found)
            except (ProfileError, ValueError, KeyError, TypeError, AttributeError):
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

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Something of :data:`TRIALS` is under way; a device that is lost in it is not laid to the point around it."""
        before, self.now = self.now, name
        self._write()
        try:
            yield
        except DeviceLostError:
            self.lost.append(name)
            before = None
            raise
        finally:
            self.now = before
            self._write()

    def spoilt(self, name: str) -> str:
        """Why not to try this of :data:`TRIALS`, or empty: a process has ended in it before."""
        enough = self.lost.count(name) >= (2 if name == "proof" else 1)
        return f"a process ended in {TRIALS[name]} before" if enough else ""

    def settle(self) -> bool:
        """A process of ours that was not cut from outside ended without a word, in a crash or a hang: what was under way is lost.
        Whether anything was."""
        if self.found is None:
            return False
        if self.found in self.cut:
            self.cut.remove(self.found)
            self.lost.append(self.found)
        self._write()
        return True

    def suspects(self) -> set[str]:
        """What is in :data:`SUSPECT_POINTS` lost points or more: what is particular about them (a load, a way of sharing, cuBLAS
        that was told), or else their operations, of which one that was lost alone is certain."""
        counts: dict[str, int] = {}
        for key in self.lost:
            kind, _, _, shape, other, *further = [*key.split("|"), *[""] * 5]
            special = {word for word in further if word} | ({other} if kind == "control" else set())
            ops = {shape.partition(":")[0], other.partition(":")[0]} - {""}
            for name in special or ops:
                counts[name] = counts.get(name, 0) + (SUSPECT_POINTS if kind == "solo" and not special else 1)
        return {name for name, count in counts.items() if count >= SUSPECT_POINTS}

    def allows(self, point: Point) -> bool:
        """Whether to try it."""
        if point.key in self.lost:
            return False
        special = {point.sharing if point.sharing != SHARINGS[0] else "", "told" if point.told else ""}
        return not self.suspects() & {point.shape.op, point.other.op if point.other else point.control, *special}

    def _write(self) -> None:
        if self.path is None:
            return
        text = json.dumps({"now": self.now, "lost": self.lost, "cut": self.cut, "tiers": self.tiers}, indent=1) + "\n"
        beside = self.path.with_suffix(".tmp")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        except OSError as exc:
            with suppress(OSError):  # half a file, whose room a full disk has use for
                beside.unlink(missing_ok=True)
            raise ResultsError(f"{self.path}: cannot be written ({exc.strerror}): rows until here are kept") from None


def tier_line(tiers: Mapping[str, tuple[int, int]]) -> str:
    """Which tiers are whole, which are begun, which are not."""
    whole = [t for t, (done, planned) in tiers.items() if planned and done >= planned]
    begun = [f"{t} {done} of {planned}" for t, (done, planned) in tiers.items() if 0 < done < planned]
    none = [t for t, (done, planned) in tiers.items() if planned and not done]
    parts = [f"whole: {', '.join(whole) or 'no tier'}", f"begun: {', '.join(begun)}" if begun else "",
             f"not begun: {', '.join(none)}" if none else ""]
    return "; ".join(part for part in parts if part)
