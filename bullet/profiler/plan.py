"""Which points a sweep measures, in which order, and how long that takes. Pure: no torch, no clock.

Priority, in two parts that may run in processes of their own: the co-run matrix of the layers that serve, twice; controls;
checks (torch's layers, cuBLAS told of its lane, cuDNN); the SM axis. Then the project's own kernels beside torch's on the whole
device and the sizes that the least fit needs; more shapes; pairs of operations at once; the own kernels along SMs; shapes on a
lane; a finer co-run matrix. ``budget_s`` cuts this list at the end, so that a larger budget measures a superset. What is kept
runs in an order drawn from the seed within each tier and replicate: a run that is cut off has lost the least important part,
and slow drift does not line up with an axis.

Estimated times rest on data-sheet rates and assumed overheads: they are for planning, never results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.gpu.splits import Split
from bullet.profiler import timing
from bullet.profiler.axes import Axes, ends_first, spread_order
from bullet.profiler.shapes import ENGINE_LAYERS, OWN_PREFILL, PAGED, TORCH_LAYERS, Shape, kernels_of
from bullet.profiles.rows import ENGINE_OPS

PARTS = {"corun": ("co-run matrix", "engine phases", "controls", "checks", "SM axis"),
         "own": ("own kernels", "shapes", "co-running operations", "own kernels on SMs", "shapes on a lane",
                 "finer co-run matrix")}
"""What runs in one process: a kernel of ours that loses the device then costs nothing of what came before."""
TIERS = tuple(itertools.chain(*PARTS.values()))
CONTROLS = ("tensor_spin", "l2_stream", "memory_stream", "alu_spin", "idle")
"""Loads on the other lane: power without memory, L2 without HBM, HBM, arithmetic of little power, nothing."""
SHARINGS = ("plain", "priority", "bounded")
"""Without a split: plain streams, decode's at high priority, grids bounded as a split would bound them."""
ANCHOR_EVERY = 20
LEAD_S = 0.3
"""Load before the first window of a cell, and before an anchor: clocks are then those of serving, not of an idle card."""
NEXT_LEAD_S = 0.06
"""The same load before each further window of a cell, which follows the one before without a pause."""


@dataclass(frozen=True)
class Point:
    """One measurement. ``split`` None: no partition, the whole device.

    ``solo``: ``shape`` alone on ``lane`` (``full`` without a split). ``control``: the same beside ``control`` on the
    other lane. ``corun``: ``shape`` in the prefill lane and ``other`` in the decode lane at once (bullet/profiler/cells.py).
    ``sharing``: one of :data:`SHARINGS`, empty with a split of SMs; ``bounded`` takes its sizes from ``split``.
    ``told``: cuBLAS is told the lane's SMs. ``replicate``: which visit.
    """

    kind: str
    split: Split | None
    lane: str
    shape: Shape
    other: Shape | None = None
    control: str = ""
    sharing: str = ""
    told: bool = False
    replicate: int = 0
    tier: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def key(self) -> str:
        """Stable text; equal keys are the same measurement."""
        parts = [self.kind, str(self.split or "full"), self.lane, str(self.shape), str(self.other or self.control or "")]
        parts += [self.sharing] if self.sharing not in ("", "plain") else []
        parts += ["told"] if self.told else []
        return "|".join(parts)

    def row_ids(self, prefix: str) -> list[str]:
        """Ids of the rows that it is about; ``prefix`` names model and element type. A cell's windows alone have ids of their
        own beside these (:mod:`bullet.profiler.sweep`)."""
        lanes = ("prefill", "decode") if self.kind == "corun" else (self.lane,)
        return [f"{prefix}|{self.key}{f'|visit {self.replicate}' if self.replicate else ''}|{lane}" for lane in lanes]


@dataclass(frozen=True)
class Rates:
    """Assumed speeds, for estimates only. ``point_s``: host work a window; ``capture_s``: warm-up and capture of an operation
    on a lane; ``compile_s``: kernels of ours, once; ``replays``: timed, at most."""

    num_units: int
    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 1e-5
    knee_share: float = 0.3
    point_s: float = 0.02
    capture_s: float = 0.12
    compile_s: float = 12.0
    startup_s: float = 20.0
    replays: int = 25
    min_replay_s: float = 1e-3
    leads_s: tuple[float, float] = (LEAD_S, NEXT_LEAD_S)

    def seconds(self, model: ModelSpec, shape: Shape, units: int) -> float:
        """One repetition on ``units`` of the device: the larger of arithmetic and bytes, kernel by kernel."""
        share = units / self.num_units
        bandwidth = self.bytes_per_s * min(1.0, share / self.knee_share)
        return sum(max(k.flops / (self.flops_per_s * share), k.bytes / bandwidth) + self.launch_s
                   for k in kernels_of(model, shape))

    def point_seconds(self, model: ModelSpec, point: Point) -> float:
        """The whole point but captures: windows with the load before them, and host work."""
        def replay(shape: Shape, lane: str) -> float:
            units = self.num_units if point.split is None else getattr(point.split, f"{lane}_sms")
            return max(self.seconds(model, shape, units), self.min_replay_s)

        def alone(replay_s: float) -> float:
            return replay_s * timing.solo_count(replay_s, self.replays)

        first_s, next_s = self.leads_s
        own_s = replay(point.shape, "prefill" if point.kind == "corun" else point.lane)
        if point.kind == "solo":
            return self.point_s + first_s + alone(own_s)
        other_s = self.min_replay_s if point.other is None else replay(point.other, "decode")
        least = timing.SOLO_LEAST if point.shape.phase == "prefill" else self.replays, self.replays if point.other else 1
        both_s = own_s * timing.train_lengths(own_s, other_s, *least, limit=1 << 30)[0]
        if point.other is None:
            return 3 * self.point_s + first_s + 2 * next_s + 2 * alone(own_s) + both_s
        return 5 * self.point_s + first_s + 4 * next_s + 2 * (alone(own_s) + alone(other_s)) + both_s

    def captures(self, point: Point) -> list[tuple[object, ...]]:
        """What must be captured for it: an operation on a lane's stream."""
        where = (point.split, point.sharing, point.told)
        if point.other is None:
            return [(point.shape, *where, point.lane)] + ([(point.control, *where, point.lane)] if point.control else [])
        return [(point.shape, *where, "prefill"), (point.other, *where, "decode")]


@dataclass(frozen=True)
class Plan:
    """Points in order of execution. ``left_out``: points per tier that the budget or the memory cut."""

    points: tuple[Point, ...]
    estimated_s: float
    budget_s: float | None
    seed: int
    left_out: dict[str, int]
    too_large: tuple[Shape, ...] = ()
    """Shapes that would not fit in the device's memory."""
    spare: tuple[Point, ...] = ()
    """What the budget cut, in order of priority: for time that is left if the estimates were too long."""
    startup_s: float = 0.0
    every: dict[str, int] = field(default_factory=dict)
    """Points of each tier, measured before, planned and cut."""

    def counts(self) -> dict[str, int]:
        """Points per tier."""
        found = dict.fromkeys(TIERS, 0)
        for point in self.points:
            found[point.tier] += 1
        return {tier: n for tier, n in found.items() if n or self.left_out.get(tier)}

    def ends_s(self) -> dict[str, float]:
        """Tier -> estimated seconds from the start until its last point."""
        ends, at_s = {}, self.startup_s
        for tier in self.counts():
            at_s += sum(p.seconds for p in self.points if p.tier == tier)
            ends[tier] = at_s
        return ends

    def describe(self, unit: str = "SM", began_s: float = 0.0) -> list[str]:
        """The plan in lines, for printing before anything runs; ``began_s``: added to the times."""
        lines, ends = [], self.ends_s()
        for tier, planned in self.counts().items():
            left = self.left_out.get(tier, 0)
            tail = f", {left} left out" if left else ""
            seconds = sum(p.seconds for p in self.points if p.tier == tier)
            lines.append(f"  {tier:<22} {planned:4d} points, about {seconds:5.0f} s, done by {began_s + ends[tier]:4.0f} s{tail}")
        corun = [p for p in self.points if p.kind == "corun" and p.tier in ("co-run matrix", "finer co-run matrix")]
        visits = max((p.replicate for p in corun), default=0) + 1
        combinations = {(p.split, p.shape, p.other) for p in corun}
        lines.append(f"  co-run: {len({p.split for p in corun})} splits x {len({p.shape for p in corun})} prefill sizes x "
                     f"{len({p.other for p in corun})} decode sizes, {len(combinations)} combinations, both directions, "
                     f"{visits} visit{'s' if visits > 1 else ''}: {len(corun)} cells")
        alone = [p for p in self.points if p.kind == "solo"]
        counts = {p.split and getattr(p.split, f"{p.lane}_sms") for p in alone}
        lines.append(f"  alone: {len(counts)} {unit} counts, {len({p.shape for p in alone})} shapes, "
                     f"{len(alone)} combinations")
        if self.too_large:
            lines.append(f"  too large for the memory: {', '.join(map(str, self.too_large[:6]))}"
                         f"{' ..' if len(self.too_large) > 6 else ''}")
        budget = f" of {self.budget_s:.0f} s" if self.budget_s is not None else " (no budget given)"
        lines.append(f"  estimated {self.estimated_s:.0f} s{budget}, order from seed {self.seed}")
        return lines


def make_plan(model: ModelSpec, axes: Axes, rates: Rates, *, budget_s: float | None = None, seed: int = 0,
              fits: Callable[[Shape], bool] = lambda shape: True,
              allowed: Callable[[Point], bool] = lambda point: True,
              done: frozenset[str] | set[str] = frozenset(), prefix: str = "", parts: Sequence[str] = tuple(PARTS)) -> Plan:
    """Choose, thin and order the points.

    ``fits``: whether a shape's data fits in memory. ``allowed``: whether the backend can measure the point at all.
    ``done``: row ids (with ``prefix``) that need no second measurement. ``parts``: of :data:`PARTS`. Raises
    :class:`ProfileError` if the budget is too short for the first group, unless everything is done.
    """
    wanted = {tier for part in parts for tier in PARTS[part]}
    too_large = tuple(s for s in dict.fromkeys(axes.every_shape()) if not fits(s))
    chosen: dict[tuple[str, int], Point] = {}
    spare: list[Point] = []
    left_out: dict[str, int] = {}
    every: dict[str, int] = {}
    total = rates.startup_s
    anchor_s = rates.point_s + rates.leads_s[0] + rates.replays * 3e-3
    open_ = True
    first_group_s: float | None = None
    seen: set[tuple[str, int]] = set()
    captured: set[tuple[object, ...]] = set()
    compiled = False
    for tier, group in _groups(axes):
        if tier not in wanted:
            continue
        fresh = [replace(p, tier=tier) for p in group if (p.key, p.replicate) not in seen and allowed(p)
                 and p.shape not in too_large and p.other not in too_large]
        seen.update((p.key, p.replicate) for p in group)
        every[tier] = every.get(tier, 0) + len(fresh)
        fresh = [p for p in fresh if not done.issuperset(p.row_ids(prefix)) or not done]
        if not fresh:
            continue
        # Compiling is what the first of our kernels costs, wherever the plan has it.
        compile_s = 0.0 if compiled or not _ours(fresh) else rates.compile_s
        timed = []
        for p in fresh:
            new = [c for c in rates.captures(p) if c not in captured]
            captured.update(new)
            timed.append(replace(p, seconds=rates.point_seconds(model, p) + len(new) * rates.capture_s + compile_s
                                 + anchor_s / ANCHOR_EVERY))
            compile_s = 0.0
        compiled = compiled or _ours(fresh)
        seconds = sum(p.seconds for p in timed)
        if first_group_s is None:
            first_group_s = total + 2 * anchor_s + seconds
        if budget_s is not None and total + 2 * anchor_s + seconds > budget_s:
            open_ = False  # a prefix, not a knapsack: a larger budget then measures a superset
        if not open_:
            left_out[tier] = left_out.get(tier, 0) + len(fresh)
            spare += timed
            continue
        total += seconds
        chosen.update(((p.key, p.replicate), p) for p in timed)
    if not chosen and first_group_s is not None:
        raise ProfileError(f"--budget-s {budget_s:g}: the first group of points needs about {first_group_s:.0f} s, start-up "
                           "included; give more time")
    generator = random.Random(f"{seed}:sweep-order")
    ordered: list[Point] = []
    for tier in TIERS:
        for replicate in range(axes.replicates):
            points = [p for p in chosen.values() if p.tier == tier and p.replicate == replicate]
            generator.shuffle(points)
            ordered += points
    return Plan(tuple(ordered), total + 2 * anchor_s, budget_s, seed, left_out, too_large, tuple(spare), rates.startup_s,
                every)


def _ours(points: Sequence[Point]) -> bool:
    return any(op in ENGINE_OPS for p in points for op in (p.shape.op, p.other and p.other.op))


def _groups(axes: Axes) -> Iterator[tuple[str, list[Point]]]:
    """Groups in descending priority; a group is measured whole or not at all."""
    for replicate in range(axes.replicates):
        yield from (("co-run matrix", g) for g in _matrix(axes.splits, axes.corun_prefill, axes.corun_decode, replicate))
    # On every lane too: on one thread these are the same again, at another time; a shared CPU is not the same all the time.
    places = [None, *((split, lane) for split in axes.splits for lane in ("prefill", "decode"))]
    yield from (("engine phases", [_solo(place, shape)]) for shape in axes.phases for place in places)
    yield from (("controls", g) for g in _controls(axes))
    yield from (("checks", g) for g in _checks(axes))
    for s, o in spread_order([(s, o) for s in range(len(places)) for o in range(len(axes.sm_axis))]):
        yield "SM axis", [_solo(places[s], axes.sm_axis[o])]
    for shape in axes.own:
        twin = _solo(None, shape._replace(op=ENGINE_OPS[shape.op]))
        yield "own kernels", [_solo(None, shape), twin]
    for shape in axes.least:  # attention is held against torch's at every size
        beside = [_solo(None, shape._replace(op=ENGINE_OPS[shape.op]))] if shape.op in (PAGED, OWN_PREFILL) else []
        yield "own kernels", [_solo(None, shape), *beside]
    for shape in axes.shapes:
        yield "shapes", [_solo(None, shape)]
    for split in _spread(axes.splits)[:3]:
        for p, d in axes.corun_operations:
            yield "co-running operations", [Point("corun", split, "both", p, d)]
    further = (*axes.own, *axes.sm_axis_rest)
    for s, o in spread_order([(s, o) for s in range(len(places)) for o in range(len(further))]):
        yield "own kernels on SMs", [_solo(places[s], further[o])]
    # A lane of the middle split for each phase: a small and a large partition.
    middle = axes.splits[len(axes.splits) // 2] if axes.splits else None
    for shape in axes.shapes:
        if middle is not None:
            lane = "decode" if shape.phase == "decode" else "prefill"
            yield "shapes on a lane", [_solo((middle, lane), shape)]
    everything = (*axes.splits, *axes.extra_splits)
    yield from (("finer co-run matrix", g) for g in _matrix(everything, axes.corun_prefill, axes.corun_decode))
    yield from (("finer co-run matrix", g) for g in _matrix(
        everything, (*axes.corun_prefill, *axes.extra_corun_prefill), (*axes.corun_decode, *axes.extra_corun_decode)))


def _spread(splits: Sequence[Split]) -> list[Split]:
    """Ends first, then middles."""
    return [splits[i] for i in ends_first(len(splits))] if splits else []


def _matrix(splits: Sequence[Split], prefills: Sequence[Shape], decodes: Sequence[Shape], replicate: int = 0
            ) -> Iterator[list[Point]]:
    """A combination is one cell, with its runs alone in it."""
    indices = itertools.product(range(len(splits)), range(len(prefills)), range(len(decodes)))
    for i, j, k in spread_order(list(indices)):
        yield [Point("corun", splits[i], "both", prefills[j], decodes[k], replicate=replicate)]


def _middle(shapes: Sequence[Shape]) -> Shape:
    return shapes[(len(shapes) - 1) // 2]


def _controls(axes: Axes) -> Iterator[list[Point]]:
    """Unpartitioned combinations at the ends of both axes, each way of sharing; then the loads beside each phase at its middle
    size, on the splits at the ends and in the middle; nothing at all beside them once, which says what a window is worth."""
    ends = [[s for i, s in enumerate(shapes) if i in (0, len(shapes) - 1)] for shapes in (axes.corun_prefill, axes.corun_decode)]
    middle = axes.splits[len(axes.splits) // 2] if axes.splits else None
    for p, d in itertools.product(*ends):
        yield [Point("corun", None, "both", p, d, sharing="plain")]
        yield [Point("corun", None, "both", p, d, sharing="priority")]
        if middle is not None:
            yield [Point("corun", middle, "both", p, d, sharing="bounded", told=True)]
    if not axes.corun_prefill or not axes.corun_decode:
        return
    own = {"prefill": _middle(axes.corun_prefill), "decode": _middle(axes.corun_decode)}
    for split in _spread(axes.splits)[:3]:
        for control, lane in itertools.product(CONTROLS, ("decode", "prefill")):
            if control != "idle" or split == axes.splits[0]:
                yield [Point("control", split, lane, own[lane], control=control)]


def _checks(axes: Axes) -> Iterator[list[Point]]:
    """Beside the matrix: torch's own layers, the same layers with cuBLAS told of its lane, and attention by cuDNN."""
    if axes.layers != ENGINE_LAYERS or not axes.corun_prefill or not axes.corun_decode:
        return
    p, d = _middle(axes.corun_prefill), _middle(axes.corun_decode)
    torchs = (p._replace(op=TORCH_LAYERS[0]), d._replace(op=TORCH_LAYERS[1]))
    for split in _spread(axes.splits)[:3]:
        yield [Point("corun", split, "both", p, d, told=True)]
        yield [Point("corun", split, "both", *torchs)]
    for split in axes.splits:
        yield [replace(_solo((split, lane), shape), told=True) for lane, shape in (("prefill", p), ("decode", d))]
    for shape in axes.cudnn:
        yield [_solo(None, shape)]
        yield from ([_solo((split, "prefill"), shape)] for split in axes.splits[:1])


def _solo(place: tuple[Split, str] | None, shape: Shape) -> Point:
    return Point("solo", None, "full", shape) if place is None else Point("solo", place[0], place[1], shape)
