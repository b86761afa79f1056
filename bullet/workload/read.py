"""Trace files to tables: the format is recognised, its columns are read in batches and checked against each other.

Every refusal is one line with the file, the line, the column, the value and what is allowed. Nothing is skipped (but blank
lines, and failed rows on request, counted), clipped or repaired, and nothing that a file leaves open is guessed: a trace that
is half right gives results that look right.
"""

from __future__ import annotations

import dataclasses
import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.workload.cuts import Window
from bullet.workload.formats import CONTAINERS, FORMATS
from bullet.workload.layout import GOOD_WORDS, NO_ERROR_WORDS, Layout, as_configured, by_plain_name, generic, published
from bullet.workload.rows import Batch, Rows, container_of, open_rows
from bullet.workload.table import BlockIds, Reading, Table, duration
from bullet.workload.values import Clock, Where, not_tokens, shown, tokens

MOST_ROWS = 10**8
"""Three columns of that length take 2.4 GB."""
MOST_REQ_PER_S = 1e5
"""A recorded rate above it means times in another unit (no published service trace reaches 1e4)."""
SAME_S = 1e-3
"""Two clocks that agree to this, or to a millionth of the span, are one."""
PREFIX_GROUP = "prefix_group"
"""BLIS: prompts of a group begin with the same ``prefix_length`` tokens."""
HINT_FAILED = " (a failed request? --skip-failed leaves such rows out and counts them)"
BLOCK_SIZES = (512, 16, 8, 32, 64, 128, 256, 1024)
"""Tokens that one of a prompt's block ids may stand for, publishers' sizes first."""


def read_trace(config: WorkloadConfig, *, inspecting: bool = False) -> Table:
    """Read the file ``config.trace`` in ``config.format``.

    ``auto`` goes by the name (.jsonl, .csv, .parquet, .json; .gz, .zst, .xz or .bz2 after it), else by the first character, and
    takes a file with a publisher's columns for the publisher's. Token counts are whole numbers from 1 to 10^9. Times must not
    decrease; they are numbers of a stated unit or dates (UTC unless they carry an offset), never both. Where nothing states the
    unit there are no times, and ``reading.question`` asks. ``inspecting``: failed rows are counted and left out without being
    asked for, and block ids are not kept.

    Raises :class:`TraceError` with one line if the file is not such a table.
    """
    path = Path(config.trace)
    with _rows(path, config) as (rows, layout):
        return _Reader(path, rows.header, layout, config, inspecting).read(rows)


@contextmanager
def _rows(path: Path, config: WorkloadConfig) -> Iterator[tuple[Rows, Layout]]:
    """The open file and what is read of it."""
    wanted = None if config.format in ("auto", *CONTAINERS) else FORMATS[config.format]
    if wanted is not None and not hasattr(wanted, "COLUMNS"):
        with wanted.open_document(path, config) as (rows, layout):
            yield rows, as_configured(rows.where, rows.header, layout, config)
        return
    container = config.format if config.format in CONTAINERS else container_of(path)
    if config.format == "auto" and container in ("json", "jsonl"):
        for module in FORMATS.values():
            if not hasattr(module, "COLUMNS") and module.found(path):
                with module.open_document(path, config) as (rows, layout):
                    yield rows, as_configured(rows.where, rows.header, layout, config)
                return
    with open_rows(path, container) as rows:
        yield rows, _layout(rows, wanted, config)


def _layout(rows: Rows, wanted: Any, config: WorkloadConfig) -> Layout:
    if wanted is not None:
        return published(rows.where, rows.header, config, wanted.LAYOUT, wanted.COLUMNS, wanted.TITLE)
    if config.format == "auto":
        known = by_plain_name(rows.header)
        for module in FORMATS.values():
            if hasattr(module, "COLUMNS") and all(name in known for name in module.COLUMNS):
                asked = getattr(module, "UNIT_ASKED", "")
                layout = dataclasses.replace(module.LAYOUT, unit=None, hint=asked) if asked else module.LAYOUT
                return published(rows.where, rows.header, config, layout, module.COLUMNS, module.TITLE)
    return generic(rows.where, rows.header, config, "by the names of its columns")


class _Reader:
    """One file's batches to one table."""

    def __init__(self, path: Path, header: list[str], layout: Layout, config: WorkloadConfig, inspecting: bool) -> None:
        self.path, self.header, self.layout, self.config = path, header, layout, config
        self.inspecting = inspecting
        self.rows = 0
        self.prompts: list[NDArray[np.int64]] = []
        self.outputs: list[NDArray[np.int64]] = []
        self.order: list[NDArray[np.int64]] = []
        self.clock = Clock(layout.arrival, layout.unit, layout.order is None) if layout.arrival is not None else None
        self.others = [Clock(name, unit, ordered=False) for name, unit in layout.clocks]
        self.failed: list[tuple[int, int, str]] = []  # row, line, why
        self.reasons: dict[str, str] = {}
        self.ids, self.id_counts = array("q"), array("q")
        self.fits = set(BLOCK_SIZES if layout.block_tokens is None else (layout.block_tokens,))
        self.engine_rows = 0
        self.last_line = 0

    def read(self, rows: Rows) -> Table:
        # Millions of small rows and no reference cycles: the cyclic collector only costs time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            for batch in rows.batches(self.layout.columns()):
                self._add(batch)
        finally:
            if collecting:
                gc.enable()
        if not self.rows:
            raise TraceError(f"{self.path}: has a header but no requests: must hold at least one")
        return self._table(rows.notes)

    # ---- a batch -------------------------------------------------------------------------------------

    def _add(self, batch: Batch) -> None:
        layout, where = self.layout, Where(self.path, batch.lines)
        count = len(batch.lines)
        if self.rows + count > MOST_ROWS:
            raise TraceError(f"{self.path}: has more than {MOST_ROWS:,} rows: cut it, a run takes {MOST_ROWS:,} at most")
        self.last_line = batch.lines[-1]
        failed = self._failures(batch)
        prompt = self._prompt(batch, where, failed)
        output = tokens(where, layout.output, batch.columns[layout.output])
        self._no_tokens(batch, layout.output, output, failed)
        good = ~failed
        for name in layout.same_output:
            self._same(batch, where, name, layout.output, output, good, "output")
        for name in layout.totals:
            total = tokens(where, name, batch.columns[name])
            wrong = good & (total != prompt + output)
            if wrong.any():
                i = int(wrong.argmax())
                raise TraceError(f"{where(i)}: {name} = {total[i]}, but {'+'.join(layout.prompt)} = {prompt[i]} and "
                                 f"{layout.output} = {output[i]}: which are the prompt's and the output's tokens? "
                                 "name the columns by workload.prompt_column and workload.output_column")
        for name in layout.ones:
            other = tokens(where, name, batch.columns[name])
            if (other != 1).any():
                i = int((other != 1).argmax())
                raise TraceError(f"{where(i)}: {name} = {other[i]}: must be 1 (one request a row)")
        for clock in (self.clock, *self.others):
            if clock is not None:
                clock.add(where, batch.columns[clock.column])
        if layout.order is not None:
            self.order.append(tokens(where, layout.order, batch.columns[layout.order]))
        if layout.ids is not None:
            self._block_ids(batch, where, prompt)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.rows += count

    def _failures(self, batch: Batch) -> NDArray[np.bool_]:
        """Rows whose status says that the request failed."""
        failed = np.zeros(len(batch.lines), dtype=bool)
        for name in self.layout.status:
            good = NO_ERROR_WORDS if name.lower().startswith("error") else GOOD_WORDS
            words = [str(value).strip().lower() for value in batch.columns[name]]
            if set(words) <= good:
                continue
            for i, word in enumerate(words):
                if word not in good and not failed[i]:
                    failed[i] = True
                    self._fail(batch, i, f"{name} = {shown(batch.columns[name][i])}: a failed request")
        return failed

    def _fail(self, batch: Batch, i: int, why: str) -> None:
        self.failed.append((self.rows + i, batch.lines[i], self.reasons.setdefault(why, why)))

    def _no_tokens(self, batch: Batch, name: str, counts: NDArray[np.int64], failed: NDArray[np.bool_]) -> None:
        """Rows without any count as failed as well."""
        for i in np.flatnonzero((counts == 0) & ~failed).tolist():
            failed[i] = True
            self._fail(batch, i, not_tokens(name, batch.columns[name][i]) + HINT_FAILED)

    def _prompt(self, batch: Batch, where: Where, failed: NDArray[np.bool_]) -> NDArray[np.int64]:
        layout = self.layout
        parts = [tokens(where, name, batch.columns[name]) for name in layout.prompt]
        prompt: NDArray[np.int64] = np.sum(parts, axis=0) if len(parts) > 1 else parts[0]
        # Of several columns the last is what is new in the request.
        self._no_tokens(batch, layout.prompt[-1], prompt if len(parts) == 1 else parts[-1], failed)
        for name in layout.prefixes:
            prefix = tokens(where, name, batch.columns[name])
            if (prefix > 0).any():
                i = int((prefix > 0).argmax())
                self._ask_prompt(where(i), batch, i, [name, *layout.same_prompt], f"{name}+{layout.prompt[-1]}")
        for name in layout.same_prompt:
            self._same(batch, where, name, layout.prompt[-1], prompt, ~failed, "prompt")
        if layout.engine is not None:
            engine = tokens(where, layout.engine, batch.columns[layout.engine])
            counted = engine > 0
            less = counted & (engine < prompt) & ~failed
            if less.any():
                i = int(less.argmax())
                self._ask_prompt(where(i), batch, i, [layout.engine, *layout.prompt[:-1]], "+".join(layout.prompt))
            self.engine_rows += int(counted.sum())
            prompt = np.where(counted, engine, prompt)
        return prompt

    def _same(self, batch: Batch, where: Where, name: str, chosen: str, counts: NDArray[np.int64], good: NDArray[np.bool_],
              what: str) -> None:
        """``name`` must say the same; 0 says nothing."""
        other = tokens(where, name, batch.columns[name])
        wrong = good & (other != counts) & (other > 0)
        if wrong.any():
            i = int(wrong.argmax())
            if what == "prompt":
                self._ask_prompt(where(i), batch, i, [name], name)
            raise TraceError(f"{where(i)}: {chosen} = {counts[i]} beside {name} = {other[i]}: which is the whole {what}? "
                             f"workload.{what}_column={chosen} or ={name}")

    def _ask_prompt(self, place: str, batch: Batch, i: int, beside: list[str], other: str) -> None:
        chosen = self.layout.prompt[-1]
        values = " and ".join(f"{n} = {shown(batch.columns[n][i])}" for n in beside)
        choices = dict.fromkeys([other, *(n for n in beside if n in (*self.layout.same_prompt, self.layout.engine)), chosen])
        raise TraceError(f"{place}: {chosen} = {shown(batch.columns[chosen][i])} beside {values}: which are the whole prompt's "
                         f"tokens? --set workload.prompt_column={', or ='.join(choices)}")

    def _block_ids(self, batch: Batch, where: Where, prompt: NDArray[np.int64]) -> None:
        name = self.layout.ids
        assert name is not None
        cells = [[] if cell is None else cell for cell in batch.columns[name]]
        if not set(map(type, cells)) <= {list, np.ndarray}:
            self.fits.clear()  # a CSV's text: not read
            return
        counts = array("q", map(len, cells))
        if not self.inspecting:
            for i, ids in enumerate(cells):
                try:
                    self.ids.extend(ids)
                except (OverflowError, TypeError):
                    if not all(isinstance(v, int | np.integer) and -2**63 <= v < 2**64 for v in ids):
                        raise TraceError(f"{where(i)}: {name} = {shown(ids)}: must be a list of whole numbers of 64 "
                                         "bits") from None
                    self.ids.extend([int(v) - 2**64 if v >= 2**63 else int(v) for v in ids])
        self.id_counts.extend(counts)
        found = np.frombuffer(counts, dtype=np.int64)
        for size in tuple(self.fits):
            if ((found != prompt // size) & (found != -(-prompt // size))).any():
                self.fits.discard(size)

    # ---- all of them ---------------------------------------------------------------------------------

    def _table(self, left_out: list[str]) -> Table:
        layout, config = self.layout, self.config
        prompt, output = np.concatenate(self.prompts), np.concatenate(self.outputs)
        self.prompts.clear()
        self.outputs.clear()
        arrival_s, unit, question = self._times()
        keep = np.ones(self.rows, dtype=bool)
        window = ""
        if config.window is not None:
            keep, window = Window.parse(config.window).of(self.rows, arrival_s, str(self.path))
        dropped = [one for one in self.failed if keep[one[0]]]
        if dropped and not (config.skip_failed or self.inspecting):
            _, line, why = min(dropped)
            more = f"; {len(dropped)} such rows" if len(dropped) > 1 else ""
            hint = "" if HINT_FAILED in why else ": --skip-failed leaves such rows out and counts them"
            raise TraceError(f"{self.path}:{line}: {why}{hint}{more}")
        if dropped:
            keep[[row for row, _, _ in dropped]] = False
        if not keep.any():
            raise TraceError(f"{self.path}: no request is left{window and f' in {window}'}"
                             + (f": {len(dropped)} failed rows were left out" if dropped else ""))
        rows = np.flatnonzero(keep)
        if layout.order is not None and arrival_s is not None:
            rows = rows[np.lexsort((np.concatenate(self.order)[rows], arrival_s[rows]))]
        notes = left_out.copy()
        if layout.engine is not None and self.engine_rows:
            notes.append(f"{layout.engine} stands for the prompt in {self.engine_rows:,} of {self.rows:,} rows, as the engine "
                         "counted")
        if PREFIX_GROUP in self.header:
            notes.append(f"{PREFIX_GROUP} not used: the prompts of a group are as long as they are, but share nothing (shared "
                         "prefixes are read of hash_ids)")
        blocks = self._blocks(rows, notes)
        ignored = tuple(name for name in self.header if name not in layout.columns() and name != PREFIX_GROUP)
        first_failed = f"line {min(dropped)[1]}: {min(dropped)[2].removesuffix(HINT_FAILED)}" if dropped else ""
        reading = Reading(layout.format if layout.format.startswith("by ") else f"as {layout.format}", self._columns(), unit,
                          self.rows, len(dropped), first_failed, window, ignored, tuple(notes), question,
                          layout.unit or (None if question and layout.arrival else "s"))
        whole = len(rows) == self.rows and layout.order is None
        if not whole:
            prompt, output = prompt[rows], output[rows]
            arrival_s = None if arrival_s is None else arrival_s[rows] - arrival_s[rows[0]]
        return Table(arrival_s, prompt, output, reading, blocks)

    def _columns(self) -> str:
        layout = self.layout
        prompt = "+".join(layout.prompt)
        if layout.engine is not None and self.engine_rows:
            prompt = layout.engine if self.engine_rows == self.rows else f"{layout.engine} or {prompt}"
        text = f"prompt = {prompt}, output = {layout.output}"
        return text if layout.arrival is None else f"{text}, arrival = {layout.arrival}"

    def _times(self) -> tuple[NDArray[np.float64] | None, str | None, str]:
        """Seconds since the first row; their unit and what states it; else what to ask."""
        clock, layout = self.clock, self.layout
        if clock is None:
            return None, None, layout.hint
        at = clock.seconds()
        if not clock.stated:
            span = float(at[-1] - at[0])
            first, last = clock.shown
            hint = f"; {layout.hint}" if layout.hint else ""
            return None, None, (
                f"{self.path}: {clock.column} has no unit: its {self.rows:,} times from {first} to {last} span {duration(span)} "
                f"as seconds, {duration(span / 1e3)} as milliseconds: say which by --set workload.arrival_unit=s, =ms, =us or =ns"
                f"{hint}")
        assert layout.arrival is not None
        span = float(at.max())
        if len(at) >= 10 and 0 < span < (len(at) - 1) / MOST_REQ_PER_S:
            raise TraceError(f"{self.path}:{self.last_line}: {clock.column}: {len(at)} requests within {span:.3g} s, over "
                             f"{MOST_REQ_PER_S:,.0f} a second: is workload.arrival_unit right?")
        for other in self.others:
            self._one_clock(at, other)
        if (clock.kind or "").startswith("date"):
            return at, "dates", ""
        source = layout.unit_from or f"as {layout.format} files are"
        return at, f"{layout.unit}, by {source}" if layout.unit_from else f"{layout.unit}, {source}", ""

    def _one_clock(self, at: NDArray[np.float64], other: Clock) -> None:
        """A second column of times must tell the same ones; where its unit is not stated, in one of the units."""
        assert self.clock is not None
        found = other.seconds()
        tolerance = SAME_S + 1e-6 * float(at.max())
        scales = (1.0,) if other.stated else (1.0, 1e-3, 1e-6, 1e-9)
        gaps = [abs(found * scale - at) for scale in scales]
        if not any((gap <= tolerance).all() for gap in gaps):
            i = int((gaps[0] > tolerance).argmax())
            raise TraceError(f"{self.path}: two clocks: row {i + 1} is {at[i]:.6g} s after the first by {self.clock.column}, and "
                             f"{found[i]:.6g}{' s' if other.stated else ''} by {other.column}: name the one to use by "
                             f"workload.arrival_column={self.clock.column} or ={other.column}")

    def _blocks(self, rows: NDArray[np.int64], notes: list[str]) -> BlockIds | None:
        name = self.layout.ids
        if name is None:
            return None
        if not self.fits or not any(self.id_counts):
            notes.append(f"{name} not used: as many ids as a prompt has blocks of {' or '.join(map(str, self._sizes()))} tokens "
                         "were expected")
            return None
        size = next(s for s in self._sizes() if s in self.fits)
        counts = np.frombuffer(self.id_counts, dtype=np.int64)
        notes.append(f"{name}: {counts.mean():.1f} a prompt, of {size} tokens each")
        if self.inspecting:
            return None
        ids = np.frombuffer(self.ids, dtype=np.int64)
        ends = np.cumsum(counts)
        if len(rows) == self.rows and self.layout.order is None:
            return BlockIds(ids, ends, size)
        starts = ends - counts
        parts = [ids[starts[r] : ends[r]] for r in rows.tolist()]
        return BlockIds(np.concatenate(parts), np.cumsum(counts[rows]), size)

    def _sizes(self) -> tuple[int, ...]:
        return BLOCK_SIZES if self.layout.block_tokens is None else (self.layout.block_tokens,)

