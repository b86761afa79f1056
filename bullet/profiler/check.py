"""Does a partition hold? Never assumed: judged from SM sets that a probe kernel saw.

A pair is *proven* if, eager and inside a captured graph: each lane's set of %smid has as many members as the driver says
it granted; the two sets are disjoint; eager and graph saw the same sets; and blocks of both lanes ran at the same time for
most of the shorter probe (ranges that touch can be time slices).
The proof stands only if the probe can fail: a plain stream must show every SM of the device, and two plain streams
judged as if they were a pair must be found to overlap.

Pure but for :func:`run_check`, which asks a :class:`Prober` (:mod:`bullet.profiler.bench_cuda`, or a test's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bullet.errors import BulletError, one_line
from bullet.files import make_folder, write_text
from bullet.gpu.partition import Pair, PartitionTable
from bullet.gpu.splits import Split

MODES = ("eager", "graph")


CONCURRENT_SHARE = 0.5
"""Of the shorter probe's time, in which blocks of both must run."""
QUARTER_RATIO = (0.7, 1.6)
"""A GEMM on a quarter of the SMs over the same on all, in cycles, relative to the SMs' ratio. Below: it ran on other SMs than its
lane's. Public sweeps: 6.1 to 6.6 for 16 of 132 SMs (8.25), which higher clocks on few SMs explain in part; tiles that fit few SMs
badly lie above."""


class Reading(NamedTuple):
    """One probe: SMs seen, first start and last end (ns, a clock common to the device), blocks that ran and were launched.
    ``spans``: times in which at least one of its blocks ran, disjoint and in order; empty: not known."""

    smids: frozenset[int]
    start_ns: int
    end_ns: int
    blocks_run: int
    blocks: int
    spans: tuple[tuple[int, int], ...] = ()


class Prober(Protocol):
    """What the check asks of a device."""

    def probe_pair(self, pair: Pair, mode: str) -> tuple[Reading, Reading]:
        """Both lanes at once, eager or as replays of graphs captured on the lanes' streams."""
        ...

    def probe_plain(self) -> tuple[Reading, Reading]:
        """Two plain streams at once: the negative control."""
        ...

    def switch_seconds(self, first: Pair, second: Pair) -> float:
        """From the end of work on one pair's stream to the start of work on another's, through an event."""
        ...


@dataclass
class PairVerdict:
    """What was found for one pair. ``reasons`` is empty exactly if it is proven."""

    asked: Split
    granted: Split
    reasons: list[str]
    prefill_smids: list[int] = field(default_factory=list)
    decode_smids: list[int] = field(default_factory=list)
    together_s: float = 0.0
    creation_s: float = 0.0

    @property
    def proven(self) -> bool:
        return not self.reasons


@dataclass
class CheckReport:
    """The check of a whole table. ``overlaps[i][j]``: SMs shared by lanes i and j, lanes in the order of ``lane_names``."""

    gpu: str
    backend: str
    num_sms: int
    pairs: list[PairVerdict]
    refused: list[tuple[Split, str]]
    control_reasons: list[str]
    control_sms: int
    lane_names: list[str]
    overlaps: list[list[int]]
    switch_s: float | None
    note: str = ""
    gemm: list[str] = field(default_factory=list)
    """What a GEMM on a quarter of the SMs showed, in lines; ``gemm_reasons``: where that speaks against the partitions."""
    gemm_reasons: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Every pair, and the negative control behaved."""
        return bool(self.pairs) and self.num_proven == len(self.pairs)

    @property
    def num_proven(self) -> int:
        """Pairs proven; none counts if the negative control failed, or a GEMM left its lane."""
        return 0 if self.control_reasons or self.gemm_reasons else sum(p.proven for p in self.pairs)

    def verdict(self, split: Split) -> tuple[str, str]:
        """``(partition, note)`` for rows measured on the pair granted as ``split``."""
        if self.backend in ("none", "software", "simulated", "cpu"):
            return "none", self.note
        for pair in self.pairs:
            if pair.granted == split:
                reasons = pair.reasons or self.control_reasons or self.gemm_reasons
                return ("proven", "") if not reasons else ("unproven", "; ".join(reasons))
        return "unproven", "pair was not checked"

    def write(self, path: Path, plan: Sequence[str] = ()) -> None:
        """As JSON, SM sets and overlaps included; ``plan``: what will be measured on them, in lines."""
        make_folder(path.parent)
        write_text(path, json.dumps({"proven": self.proven, **asdict(self), "plan": list(plan)}, indent=1) + "\n")

    def lines(self) -> list[str]:
        """The verdicts for printing, one line a pair."""
        out = [f"Partition check: {self.gpu}, {self.num_sms} SMs, backend {self.backend}"]
        if self.note:
            out.append(f"  {self.note}")
        for p in self.pairs:
            asked = "" if p.asked == p.granted else f" (asked {p.asked})"
            if p.proven:
                tail = f"{len(p.prefill_smids)} and {len(p.decode_smids)} SMs seen, disjoint, " \
                       f"together for {p.together_s * 1e3:.2f} ms"
            else:
                tail = "; ".join(p.reasons)
            out.append(f"  {p.granted!s:>8}{asked}  {'PROVEN  ' if p.proven else 'UNPROVEN'}  {tail}; "
                       f"made in {p.creation_s * 1e3:.1f} ms")
        out += [f"  {split!s:>8}  REFUSED   {reason}" for split, reason in self.refused]
        if self.pairs and (self.control_sms or self.control_reasons):
            control = "; ".join(self.control_reasons) or f"plain stream saw all {self.control_sms} SMs, and two plain " \
                                                        "streams overlap as they should"
            out.append(f"  negative control: {'FAILED: ' if self.control_reasons else ''}{control}")
        out += [f"  {line}" for line in self.gemm]
        out += [f"  ERROR: {reason}" for reason in self.gemm_reasons]
        if self.switch_s is not None:
            out.append(f"  switch between pairs: {self.switch_s * 1e6:.1f} us (event wait, device side)")
        if len(self.lane_names) > 2:
            out.append(f"  shared SMs across pairs: {_cross_overlaps(self)}")
        if self.backend != "green-context":
            return out
        refused = f", {len(self.refused)} refused" if self.refused else ""
        out.append(f"  {self.num_proven} of {len(self.pairs)} pairs proven{refused}")
        return out


def _cross_overlaps(report: CheckReport) -> str:
    """How many SMs one pair's prefill lane shares with another pair's decode lane, least and most beyond p + d - N."""
    excess = []
    for i, a in enumerate(report.pairs):
        for j, b in enumerate(report.pairs):
            if i != j and report.overlaps:
                expected = max(0, a.granted.prefill_sms + b.granted.decode_sms - report.num_sms)
                excess.append(report.overlaps[2 * i][2 * j + 1] - expected)
    return (f"prefill of one with decode of another share {min(excess)} to {max(excess)} SMs more than p + d - N; "
            "all of it in the JSON file") if excess else "one pair only"


def judge(granted: Split, eager: tuple[Reading, Reading], graph: tuple[Reading, Reading] | None) -> list[str]:
    """Why a pair is not proven; empty if it is. ``graph`` None: not tried, which is itself a reason."""
    reasons = []
    for mode, readings in (("eager", eager), ("graph", graph)):
        if readings is None:
            reasons.append(f"{mode}: not probed")
            continue
        for lane, sms, reading in zip(("prefill", "decode"), granted, readings, strict=True):
            if reading.blocks_run != reading.blocks:
                reasons.append(f"{mode}: only {reading.blocks_run} of {reading.blocks} {lane} blocks ran")
            if len(reading.smids) != sms:
                reasons.append(f"{mode}: {lane} ran on {len(reading.smids)} SMs, granted {sms}")
        shared = readings[0].smids & readings[1].smids
        if shared:
            reasons.append(f"{mode}: the lanes share {len(shared)} SMs")
        if together_ns(*readings) <= 0:
            reasons.append(f"{mode}: the lanes ran one after the other")
        elif (share := concurrent_share(*readings)) is not None and share < CONCURRENT_SHARE:
            reasons.append(f"{mode}: blocks of both lanes ran at once for {100 * share:.0f} % of the shorter probe: time slices?")
    if graph is not None:
        for lane, a, b in zip(("prefill", "decode"), eager, graph, strict=True):
            if a.smids != b.smids:
                reasons.append(f"{lane}: graph ran on other SMs than eager ({len(a.smids ^ b.smids)} differ)")
    return reasons


def together_ns(first: Reading, second: Reading) -> int:
    """Nanoseconds in which both ran; 0 or less if one ended before the other began."""
    return min(first.end_ns, second.end_ns) - max(first.start_ns, second.start_ns)


def merged(intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Their union, disjoint and in order."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return tuple(out)


def reading_of(buffer: Any) -> Reading:
    """Of a probe's buffers (bullet/kernels/probe.py), after it ran."""
    smids = buffer.smid.cpu().tolist()
    ran = [i for i, smid in enumerate(smids) if smid >= 0]
    starts, ends = buffer.start.cpu().tolist(), buffer.end.cpu().tolist()
    if not ran:
        return Reading(frozenset(), 0, 0, 0, len(smids))
    return Reading(frozenset(smids[i] for i in ran), min(starts[i] for i in ran), max(ends[i] for i in ran), len(ran),
                   len(smids), merged([(starts[i], ends[i]) for i in ran]))


def concurrent_share(first: Reading, second: Reading) -> float | None:
    """Time in which blocks of both ran, over the shorter one's; None where spans are not known."""
    lengths = [sum(end - start for start, end in reading.spans) for reading in (first, second)]
    if min(lengths) <= 0:
        return None
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first.spans for b in second.spans)
    return both / min(lengths)


def judge_gemm(lane_sms: int, device_sms: int, lane_s: float, whole_s: float, clocks_hz: tuple[float | None, float | None]
               ) -> list[str]:
    """Why a GEMM alone on a lane speaks against its partition; empty if it is slower about as the lane is smaller. Clocks inside
    both windows, where known, turn seconds into cycles: few SMs may run faster."""
    ratio = lane_s / whole_s
    if clocks_hz[0] and clocks_hz[1]:
        ratio *= clocks_hz[0] / clocks_hz[1]
    wanted = device_sms / lane_sms
    low, high = (edge * wanted for edge in QUARTER_RATIO)
    if low <= ratio <= high:
        return []
    return [f"a GEMM on {lane_sms} of {device_sms} SMs takes {ratio:.2f} times as long as on all, {wanted:.2f} wanted: "
            + ("its kernels leave the lane" if ratio < low else "it does not use the lane")]


def judge_control(num_sms: int, plain: tuple[Reading, Reading]) -> list[str]:
    """Why the probe cannot be trusted; empty if a plain stream sees all SMs and two of them are found to overlap."""
    reasons = []
    seen = len(plain[0].smids)
    if seen != num_sms:
        reasons.append(f"a plain stream showed {seen} of {num_sms} SMs, so the probe misses some")
    if not any("share" in reason for reason in judge(Split(num_sms, num_sms), plain, plain)):
        reasons.append("two plain streams look disjoint, so the probe cannot tell a partition from none")
    return reasons


def overlap_matrix(sets: Sequence[frozenset[int]]) -> list[list[int]]:
    """Members that each two sets share; the diagonal is their sizes."""
    return [[len(a & b) for b in sets] for a in sets]


def unchecked(table: PartitionTable, gpu: str, note: str) -> CheckReport:
    """A report for backends in which there is nothing to prove, or no way to."""
    pairs = [] if table.backend != "green-context" else [
        PairVerdict(p.asked, p.granted, [note], creation_s=p.creation_s) for p in table.pairs]
    return CheckReport(gpu, table.backend, table.num_sms, pairs, list(table.refused), [], 0, [], [], None, note)


def run_check(table: PartitionTable, prober: Prober, gpu: str) -> CheckReport:
    """Probe every pair of the table, eager and captured, and the negative control.

    A pair whose probe fails is unproven with that reason; the others go on. So is every pair if the control fails.
    """
    nothing = Reading(frozenset(), 0, 0, 0, 0)
    plain, control = (nothing, nothing), list[str]()
    try:
        plain = prober.probe_plain()
        control = judge_control(table.num_sms, plain)
    except BulletError:
        raise
    except Exception as exc:
        control.append(f"probe failed on a plain stream: {one_line(f'{type(exc).__name__}: {exc}', 160)}")
    verdicts, sets, names = [], [], []
    for pair in table.pairs:
        readings: Mapping[str, Any] = {}
        reasons: list[str] = []
        try:
            readings = {mode: prober.probe_pair(pair, mode) for mode in MODES}
        except BulletError:
            raise
        except Exception as exc:  # a launch or a capture that the driver refused
            reasons.append(f"probe failed: {one_line(f'{type(exc).__name__}: {exc}', 160)}")
        if readings:
            reasons = judge(pair.granted, readings["eager"], readings["graph"])
        eager = readings.get("eager")
        smids = (eager[0].smids, eager[1].smids) if eager else (frozenset[int](), frozenset[int]())
        together = max(0, together_ns(*eager)) / 1e9 if eager else 0.0
        verdicts.append(PairVerdict(pair.asked, pair.granted, reasons, sorted(smids[0]), sorted(smids[1]), together,
                                    pair.creation_s))
        sets += smids
        names += [f"{pair.granted} prefill", f"{pair.granted} decode"]
    switch = None
    if table.pairs:
        with suppress(Exception):  # a number that is nice to have
            switch = prober.switch_seconds(table.pairs[0], table.pairs[-1])
    return CheckReport(gpu, table.backend, table.num_sms, verdicts, list(table.refused), control,
                       len(plain[0].smids), names, overlap_matrix(sets), switch)
