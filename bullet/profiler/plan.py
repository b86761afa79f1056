"""Which points a sweep measures, in which order, and how long that takes. Pure: no torch, no clock.

Priority: the co-run matrix and the runs alone that its slow-downs need; the project's own kernels beside torch's on the
whole device, its engine's layers at once, and the sizes that the least fit needs; controls; the SM axis of torch's
operations; more shapes; pairs of operations at once; the own kernels along SMs; shapes on a lane; a finer co-run matrix.
``budget_s`` cuts this list at the end, so that a larger budget measures a superset. What is kept runs in an order drawn from
the seed within each tier: a run that is cut off has lost the least important part, and slow drift does not line up with an axis.

Estimated times rest on data-sheet rates and assumed overheads: they are for planning, never results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bullet import work
from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.gpu.splits import Granularity, Split, legal_splits, nearest_split
from bullet.profiles.rows import ENGINE_OPS, ENGINE_PHASES

TIERS = ("co-run matrix", "engine phases", "own kernels", "controls", "SM axis", "shapes", "co-running operations",
         "own kernels on SMs", "shapes on a lane", "finer co-run matrix")
CONTROLS = ("alu_spin", "memory_stream")
ANCHOR_EVERY = 20

GEMMS = ("gemm_qkv", "gemm_o", "gemm_gate_up", "gemm_down", "gemm_lm_head")
PAGED, OWN_PREFILL = "paged_decode_attention", "own_prefill_attention"
OWN_ROWWISE = ("own_norm", "own_rope", "own_act")
OWN_KERNELS = (PAGED, OWN_PREFILL, *OWN_ROWWISE, "own_gemm_gate_up", "own_copy")
"""The project's own Triton kernels, which bound their own grids; those of :data:`bullet.profiles.rows.ENGINE_OPS` are torch's."""
ENGINE_LAYERS = ("engine_prefill_layer", "engine_decode_layer")
"""A layer as the project's engine runs it: paged cache, fused kernels; ``prefill_layer``, ``decode_layer`` are torch's."""
OPS = (*GEMMS, "prefill_attention", "decode_attention", "norm", "rope", "act", "copy", "prefill_layer", "decode_layer",
       *OWN_KERNELS, *ENGINE_LAYERS)
_PHASE = {"prefill_attention": "prefill", "prefill_layer": "prefill", "decode_attention": "decode", "decode_layer": "decode",
          ENGINE_PHASES[0]: "prefill", ENGINE_PHASES[1]: "prefill", ENGINE_PHASES[2]: "decode"}


class Shape(NamedTuple):
    """One operation at one size.

    ``tokens``: new tokens over the batch (rows of a GEMM). ``context_tokens``, per sequence: past tokens for prefill,
    tokens attended (the new one included) for decode; 0 for other operations.
    """

    op: str
    tokens: int
    batch: int = 1
    context_tokens: int = 0

    @property
    def phase(self) -> str:
        """prefill, decode, or either."""
        return _PHASE.get(ENGINE_OPS.get(self.op, self.op), "either")

    def __str__(self) -> str:
        return f"{self.op}:{self.tokens}x{self.batch}@{self.context_tokens}"


def prefill(op: str, new_tokens: int, past_tokens: int = 0, batch: int = 1) -> Shape:
    """A prefill shape of ``batch`` equal sequences."""
    return Shape(op, new_tokens * batch, batch, past_tokens)


def decode(op: str, batch: int, context_tokens: int) -> Shape:
    """A decode shape: one new token a sequence over ``context_tokens`` attended."""
    return Shape(op, batch, batch, context_tokens)


def kernels_of(model: ModelSpec, shape: Shape) -> list[work.KernelWork]:
    """The kernels that one repetition stands for (bullet.work)."""
    if shape.op in ENGINE_OPS:
        return kernels_of(model, shape._replace(op=ENGINE_OPS[shape.op]))
    new = shape.tokens // shape.batch
    pieces = [(new, shape.context_tokens)] * shape.batch
    if shape.op == "prefill_attention":
        return [work.prefill_attention(model, pieces)]
    if shape.op == "decode_attention":
        return [work.decode_attention(model, shape.batch, shape.batch * shape.context_tokens)]
    if shape.op == "prefill_layer":
        return work.layer_kernels(model, pieces, 0, 0)
    if shape.op == "decode_layer":
        return work.layer_kernels(model, [], shape.batch, shape.batch * shape.context_tokens)
    if shape.op in ENGINE_PHASES:
        decodes = shape.batch if shape.phase == "decode" else 0
        layer = work.layer_kernels(model, [] if decodes else pieces, decodes, decodes * shape.context_tokens)
        return [*layer * model.num_layers, *work.head_kernels(model, shape.batch)]
    if shape.op == "gemm_lm_head":
        return [work.gemm("lm_head", shape.tokens, model.vocab_size, model.hidden_size, model.dtype_bytes)]
    if shape.op == "copy":
        return [work.KernelWork("copy", 0.0, 2.0 * model.dtype_bytes * shape.tokens * model.hidden_size, shape.tokens)]
    name = shape.op.removeprefix("gemm_")
    for kernel in work.dense_kernels(model, shape.tokens):
        if kernel.name == name:
            return [kernel]
    raise ProfileError(f"operation {shape.op!r}: choose one of {', '.join(OPS)}")


def flops_and_bytes(model: ModelSpec, shape: Shape) -> tuple[float, float]:
    """Operations and least bytes of one repetition."""
    kernels = kernels_of(model, shape)
    return sum(k.flops for k in kernels), sum(k.bytes for k in kernels)


@dataclass(frozen=True)
class Point:
    """One measurement. ``split`` None: no partition, the whole device.

    ``solo``: ``shape`` alone on ``lane`` (``full`` without a split). ``control``: the same beside ``control`` on the
    other lane. ``corun``: ``shape`` in the prefill lane and ``other`` in the decode lane at once, both timed: two rows.
    """

    kind: str
    split: Split | None
    lane: str
    shape: Shape
    other: Shape | None = None
    control: str = ""
    tier: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def key(self) -> str:
        """Stable text; equal keys are the same measurement."""
        parts = [self.kind, str(self.split or "full"), self.lane, str(self.shape), str(self.other or self.control or "")]
        return "|".join(parts)

    def row_ids(self, prefix: str) -> list[str]:
        """Ids of the rows that it yields; ``prefix`` names model and element type."""
        lanes = ("prefill", "decode") if self.kind == "corun" else (self.lane,)
        return [f"{prefix}|{self.key}|{lane}" for lane in lanes]


@dataclass(frozen=True)
class Rates:
    """Assumed speeds, for estimates only. ``point_s``: capture, warm-up and host work a point; ``replays``: timed."""

    num_units: int
    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 1e-5
    knee_share: float = 0.3
    point_s: float = 0.3
    startup_s: float = 10.0
    replays: int = 25
    min_replay_s: float = 2e-4
    min_prefill_samples: int = 8

    def seconds(self, model: ModelSpec, shape: Shape, units: int) -> float:
        """One repetition on ``units`` of the device: the larger of arithmetic and bytes, kernel by kernel."""
        share = units / self.num_units
        bandwidth = self.bytes_per_s * min(1.0, share / self.knee_share)
        return sum(max(k.flops / (self.flops_per_s * share), k.bytes / bandwidth) + self.launch_s
                   for k in kernels_of(model, shape))

    def point_seconds(self, model: ModelSpec, point: Point) -> float:
        """The whole point, capture and warm-up included."""
        def train(shape: Shape, lane: str, count: int) -> float:
            units = self.num_units if point.split is None else getattr(point.split, f"{lane}_sms")
            return count * max(self.seconds(model, shape, units), self.min_replay_s)

        if point.other is not None:
            longest = max(train(point.shape, "prefill", self.min_prefill_samples),
                          train(point.other, "decode", self.replays))
            return self.point_s + 2 * longest  # calibration and warm-up are about a window more
        return self.point_s + 1.3 * train(point.shape, point.lane, self.replays)


@dataclass(frozen=True)
class Axes:
    """The grid. The first of each pair is the core, the second what a larger budget adds."""

    splits: tuple[Split, ...]
    extra_splits: tuple[Split, ...]
    corun_prefill: tuple[Shape, ...]
    extra_corun_prefill: tuple[Shape, ...]
    corun_decode: tuple[Shape, ...]
    extra_corun_decode: tuple[Shape, ...]
    sm_axis: tuple[Shape, ...]
    shapes: tuple[Shape, ...]
    corun_operations: tuple[tuple[Shape, Shape], ...] = ()
    """Pairs of single operations, each taken from ``sm_axis`` or ``own``: which part of a layer disturbs which."""
    least: tuple[Shape, ...] = ()
    """Those of ``shapes`` without which the engine's operations cannot be fitted."""
    own: tuple[Shape, ...] = ()
    """The project's own kernels and its engine's layers, each at a size of its twin in torch."""
    phases: tuple[Shape, ...] = ()
    """The engine's whole steps, and what tells a launch and the LM head apart from them."""


# Decode shares of a device: from the least that keeps decode alive to more than half. Round numbers, denser where the
# paper's controller spends its time.
CORE_DECODE_SHARES = (0.12, 0.2, 0.3, 0.4, 0.55, 0.75)
EXTRA_DECODE_SHARES = (0.06, 0.15, 0.25, 0.35, 0.48, 0.65, 0.85)


def choose_splits(num_units: int, rule: Granularity, shares: Iterable[float]) -> tuple[Split, ...]:
    """The legal split nearest each decode share, duplicates dropped."""
    if not legal_splits(num_units, rule):
        nearest_split(num_units, rule, 0.5)  # raises, with what to do
    return tuple(dict.fromkeys(nearest_split(num_units, rule, share) for share in shares))


def gpu_axes(splits: Sequence[Split], extra_splits: Sequence[Split]) -> Axes:
    """Sizes for an 8B-class model on a data-centre GPU."""
    return _axes(splits, extra_splits, prefills=(512, 2048, 8192), extra_prefills=(1024, 4096),
                 batches=(8, 32, 128, 256), extra_batches=(1, 64), context=1024, extra_contexts=(4096,),
                 tokens=2048, batch=64, copy_tokens=32768)


def cpu_axes(splits: Sequence[Split], extra_splits: Sequence[Split]) -> Axes:
    """Toy sizes: they prove the loop, in seconds. With them the engine's steps, which a device can be made of."""
    whole, by_layer, iteration = ENGINE_PHASES
    phases = (*(prefill(whole, n) for n in (1, 16, 32, 64, 128, 256)), prefill(whole, 64, 128), prefill(whole, 64, 256),
              prefill(by_layer, 16), prefill(by_layer, 64),
              *(decode(iteration, b, c) for b in (1, 2, 4, 8, 16) for c in (16, 64, 192)), Shape("gemm_lm_head", 1),
              *(prefill(ENGINE_LAYERS[0], n) for n in (16, 64, 256)), *(decode(ENGINE_LAYERS[1], b, 64) for b in (1, 4, 16)))
    axes = _axes(splits, extra_splits, prefills=(32, 64, 128), extra_prefills=(48,), batches=(1, 2, 4, 8),
                 extra_batches=(16,), context=64, extra_contexts=(256,), tokens=64, batch=4, copy_tokens=1024)
    return replace(axes, phases=phases)


def _axes(splits: Sequence[Split], extra_splits: Sequence[Split], *, prefills: tuple[int, ...],
          extra_prefills: tuple[int, ...], batches: tuple[int, ...], extra_batches: tuple[int, ...], context: int,
          extra_contexts: tuple[int, ...], tokens: int, batch: int, copy_tokens: int) -> Axes:
    shapes = [Shape(op, m) for op in GEMMS[:-1] for m in (*batches, *prefills) if m not in (tokens, batch)]
    shapes += [Shape("gemm_lm_head", m) for m in (*batches, *extra_batches) if m != batch]
    for op in ("prefill_attention", OWN_PREFILL):
        shapes += [prefill(op, n) for n in (*prefills, *extra_prefills) if n != tokens]
        shapes += [prefill(op, tokens, past) for past in (tokens, 3 * tokens)]
        shapes += [prefill(op, tokens // 4, 0, batch=4)]
    shapes += [decode(op, b, c) for op in ("decode_attention", PAGED) for b in (*batches, *extra_batches)
               for c in (context, *extra_contexts) if (b, c) != (batch, context)]
    shapes += [Shape(op, m) for op in ("norm", "rope", "act", *OWN_ROWWISE, "copy") for m in (*batches[-1:], *prefills)
               if m != (copy_tokens if op == "copy" else tokens)]
    shapes += [prefill("prefill_layer", tokens, tokens), prefill("prefill_layer", tokens // 4, 0, batch=4)]
    shapes += [decode("decode_layer", b, c) for b in batches for c in extra_contexts]
    wide, narrow = Shape("gemm_gate_up", tokens), Shape("gemm_gate_up", batch)
    attention, cached = prefill("prefill_attention", tokens), decode("decode_attention", batch, context)
    paged, rowwise = decode(PAGED, batch, context), tuple(Shape(op, tokens) for op in ("norm", "rope", "act"))
    return Axes(
        corun_operations=tuple(itertools.product((wide, attention, Shape("norm", tokens), Shape("copy", copy_tokens)),
                                                 (cached, paged, narrow, Shape("gemm_lm_head", batch)))),
        splits=tuple(splits), extra_splits=tuple(s for s in extra_splits if s not in splits),
        corun_prefill=tuple(prefill("prefill_layer", n) for n in prefills),
        extra_corun_prefill=tuple(prefill("prefill_layer", n) for n in extra_prefills),
        corun_decode=tuple(decode("decode_layer", b, context) for b in batches),
        extra_corun_decode=(*(decode("decode_layer", b, context) for b in extra_batches),
                            *(decode("decode_layer", batches[1], c) for c in extra_contexts)),
        sm_axis=(*(Shape(op, tokens) for op in GEMMS[:-1]), Shape("gemm_lm_head", batch), Shape("gemm_gate_up", batch),
                 attention, cached, *rowwise, Shape("copy", copy_tokens), prefill("prefill_layer", tokens),
                 decode("decode_layer", batch, context)),
        own=(paged, prefill(OWN_PREFILL, tokens), *(Shape(op, tokens) for op in (*OWN_ROWWISE, "own_gemm_gate_up")),
             Shape("own_copy", copy_tokens), prefill(ENGINE_LAYERS[0], tokens), decode(ENGINE_LAYERS[1], batch, context)),
        least=_least(shapes), shapes=_in_turn(shapes))


FIT_ROWS = {PAGED: 5, OWN_PREFILL: 5, **dict.fromkeys(OWN_ROWWISE, 3), **dict.fromkeys(GEMMS, 2)}
"""Sizes, beside the one on the SM axis, that a fit of the engine's own operations needs at least (bullet.fit_profile)."""


def _by_op(shapes: Sequence[Shape]) -> dict[str, list[Shape]]:
    of: dict[str, list[Shape]] = {}
    for shape in dict.fromkeys(shapes):
        of.setdefault(shape.op, []).append(shape)
    return {op: [own[i] for i in _ends_first(len(own))] for op, own in of.items()}


def _least(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """:data:`FIT_ROWS` of each operation, from the ends of its list."""
    return tuple(s for op, own in _by_op(shapes).items() for s in own[:FIT_ROWS.get(op, 0)])


def _in_turn(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """One of each operation, then the next of each: a budget that cuts the list leaves none without."""
    return tuple(s for turn in itertools.zip_longest(*_by_op(shapes).values()) for s in turn if s is not None)


def spread_order(items: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Grid indices so that every prefix covers all axes: ends before middles before the rest, sums of ranks first."""
    if not items:
        return []
    ranks = []
    for axis in range(len(items[0])):
        size = 1 + max(item[axis] for item in items)
        ranks.append({value: rank for rank, value in enumerate(_ends_first(size))})
    return sorted(items, key=lambda item: (sum(ranks[a][v] for a, v in enumerate(item)), item))


def _ends_first(size: int) -> list[int]:
    """0, size - 1, then midpoints of the widest gaps, breadth first."""
    order = list(dict.fromkeys((0, size - 1)))
    gaps = [(0, size - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


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

    def counts(self) -> dict[str, int]:
        """Points per tier."""
        found = dict.fromkeys(TIERS, 0)
        for point in self.points:
            found[point.tier] += 1
        return {tier: n for tier, n in found.items() if n or self.left_out.get(tier)}

    def describe(self, unit: str = "SM") -> list[str]:
        """The plan in lines, for printing before anything runs."""
        lines = []
        for tier, planned in self.counts().items():
            seconds = sum(p.seconds for p in self.points if p.tier == tier)
            left = self.left_out.get(tier, 0)
            tail = f", {left} left out" if left else ""
            lines.append(f"  {tier:<20} {planned:4d} points, about {seconds:5.0f} s{tail}")
        corun = [p for p in self.points if p.kind == "corun" and p.split is not None and p.shape.op == "prefill_layer"]
        lines.append(f"  co-run: {len({p.split for p in corun})} splits x {len({p.shape for p in corun})} prefill sizes x "
                     f"{len({p.other for p in corun})} decode sizes, {len(corun)} combinations, both directions")
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
              done: frozenset[str] | set[str] = frozenset(), prefix: str = "") -> Plan:
    """Choose, thin and order the points.

    ``fits``: whether a shape's data fits in memory. ``allowed``: whether the backend can measure the point at all.
    ``done``: row ids (with ``prefix``) that need no second measurement. Raises :class:`ProfileError` if the budget is
    too short for one co-run combination with the runs alone that it needs, unless everything is done.
    """
    too_large = tuple(s for s in dict.fromkeys(_all_shapes(axes)) if not fits(s))
    chosen: dict[str, Point] = {}
    spare: list[Point] = []
    left_out: dict[str, int] = {}
    total = rates.startup_s
    anchor_s = rates.point_s
    open_ = True
    first_group_s: float | None = None
    seen: set[str] = set()
    for tier, group in _groups(axes):
        fresh = [replace(p, tier=tier) for p in group if p.key not in seen and allowed(p)
                 and p.shape not in too_large and p.other not in too_large]
        seen.update(p.key for p in group)
        fresh = [p for p in fresh if not done.issuperset(p.row_ids(prefix)) or not done]
        if not fresh:
            continue
        timed = [replace(p, seconds=rates.point_seconds(model, p)) for p in fresh]
        seconds = sum(p.seconds for p in timed) + len(timed) * anchor_s / ANCHOR_EVERY
        if first_group_s is None:
            first_group_s = total + 2 * anchor_s + seconds
        if budget_s is not None and total + 2 * anchor_s + seconds > budget_s:
            open_ = False  # a prefix, not a knapsack: a larger budget then measures a superset
        if not open_:
            left_out[tier] = left_out.get(tier, 0) + len(fresh)
            spare += timed
            continue
        total += seconds
        chosen.update((p.key, p) for p in timed)
    if not chosen and first_group_s is not None:
        raise ProfileError(f"--budget-s {budget_s:g}: one co-run combination with its runs alone needs about "
                           f"{first_group_s:.0f} s, start-up included; give more time")
    generator = random.Random(f"{seed}:sweep-order")
    ordered: list[Point] = []
    for tier in TIERS:
        points = [p for p in chosen.values() if p.tier == tier]
        generator.shuffle(points)
        ordered += points
    return Plan(tuple(ordered), total + 2 * anchor_s, budget_s, seed, left_out, too_large, tuple(spare))


def _all_shapes(axes: Axes) -> Iterator[Shape]:
    return itertools.chain(axes.corun_prefill, axes.corun_decode, axes.extra_corun_prefill, axes.extra_corun_decode,
                           axes.sm_axis, axes.phases, axes.own, axes.shapes)


def _groups(axes: Axes) -> Iterator[tuple[str, list[Point]]]:
    """Groups in descending priority; a group is measured whole or not at all."""
    yield from (("co-run matrix", g) for g in _matrix(axes.splits, axes.corun_prefill, axes.corun_decode))
    # On every lane too: on one thread these are the same again, at another time; a shared CPU is not the same all the time.
    places = [None, *((split, lane) for split in axes.splits for lane in ("prefill", "decode"))]
    yield from (("engine phases", [_solo(place, shape)]) for shape in axes.phases for place in places)
    for shape in axes.own:
        twin = _solo(None, shape._replace(op=ENGINE_OPS[shape.op]))
        yield "own kernels", [_solo(None, shape), twin]
    layers = tuple(s for s in axes.own if s.op in ENGINE_LAYERS)
    for split in _spread(axes.splits)[:3]:
        if len(layers) == 2:
            yield "own kernels", _pair(split, *layers)
    for shape in axes.least:  # attention is held against torch's at every size
        twin = [_solo(None, shape._replace(op=ENGINE_OPS[shape.op]))] if shape.op in (PAGED, OWN_PREFILL) else []
        yield "own kernels", [_solo(None, shape), *twin]
    yield from (("controls", g) for g in _controls(axes))
    for s, o in spread_order([(s, o) for s in range(len(places)) for o in range(len(axes.sm_axis))]):
        yield "SM axis", [_solo(places[s], axes.sm_axis[o])]
    for shape in axes.shapes:
        yield "shapes", [_solo(None, shape)]
    for split in _spread(axes.splits)[:3]:
        for p, d in axes.corun_operations:
            yield "co-running operations", _pair(split, p, d)
    for s, o in spread_order([(s, o) for s in range(len(places)) for o in range(len(axes.own))]):
        yield "own kernels on SMs", [_solo(places[s], axes.own[o])]
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


def _pair(split: Split, p: Shape, d: Shape) -> list[Point]:
    """Both at once, and each alone on its lane."""
    return [Point("corun", split, "both", p, d), _solo((split, "prefill"), p), _solo((split, "decode"), d)]


def _spread(splits: Sequence[Split]) -> list[Split]:
    """Ends first, then middles."""
    return [splits[i] for i in _ends_first(len(splits))] if splits else []


def _matrix(splits: Sequence[Split], prefills: Sequence[Shape], decodes: Sequence[Shape]) -> Iterator[list[Point]]:
    """A combination, with its two runs alone: without them there is no slow-down. Whole device first among those."""
    indices = itertools.product(range(len(splits)), range(len(prefills)), range(len(decodes)))
    for i, j, k in spread_order(list(indices)):
        split, p, d = splits[i], prefills[j], decodes[k]
        yield [*_pair(split, p, d), _solo(None, p), _solo(None, d)]


def _controls(axes: Axes) -> Iterator[list[Point]]:
    """Unpartitioned combinations, then both control loads beside each phase at its middle size."""
    for j, k in spread_order(list(itertools.product(range(len(axes.corun_prefill)), range(len(axes.corun_decode))))):
        yield [Point("corun", None, "both", axes.corun_prefill[j], axes.corun_decode[k])]
    p = axes.corun_prefill[len(axes.corun_prefill) // 2]
    d = axes.corun_decode[len(axes.corun_decode) // 2]
    for (i,) in spread_order([(i,) for i in range(len(axes.splits))]):
        split = axes.splits[i]
        for control in CONTROLS:
            yield [Point("control", split, "decode", d, control=control), _solo((split, "decode"), d)]
            yield [Point("control", split, "prefill", p, control=control), _solo((split, "prefill"), p)]


def _solo(place: tuple[Split, str] | None, shape: Shape) -> Point:
    return Point("solo", None, "full", shape) if place is None else Point("solo", place[0], place[1], shape)
