"""The grid of a sweep: which splits, which sizes, and what of them comes first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bullet.gpu.splits import Granularity, Split, legal_splits, nearest_split
from bullet.profiler.shapes import (
    CUDNN,
    ENGINE_LAYERS,
    GEMMS,
    OWN_KERNELS,
    OWN_PREFILL,
    OWN_ROWWISE,
    PAGED,
    TORCH_LAYERS,
    Shape,
    decode,
    prefill,
)
from bullet.profiles.rows import ENGINE_PHASES


@dataclass(frozen=True)
class Axes:
    """``extra_``: what a larger budget adds. ``layers``: names of the prefill and the decode layer that the matrix runs."""

    layers: tuple[str, str]
    splits: tuple[Split, ...]
    extra_splits: tuple[Split, ...]
    corun_prefill: tuple[Shape, ...]
    extra_corun_prefill: tuple[Shape, ...]
    corun_decode: tuple[Shape, ...]
    extra_corun_decode: tuple[Shape, ...]
    sm_axis: tuple[Shape, ...]
    shapes: tuple[Shape, ...]
    replicates: int = 2
    corun_operations: tuple[tuple[Shape, Shape], ...] = ()
    """Pairs of single operations, each taken from ``sm_axis`` or ``own``: which part of a layer disturbs which."""
    least: tuple[Shape, ...] = ()
    """Those of ``shapes`` without which the engine's operations cannot be fitted."""
    own: tuple[Shape, ...] = ()
    """The project's own kernels and its engine's layers, each at a size of its twin in torch."""
    phases: tuple[Shape, ...] = ()
    """The engine's whole steps, and what tells a launch and the LM head apart from them."""
    cudnn: tuple[Shape, ...] = ()
    sm_axis_rest: tuple[Shape, ...] = ()
    """Further operations of torch along SMs, after all else of the axis."""

    def every_shape(self) -> Iterable[Shape]:
        """All that may be measured, matrix first."""
        return itertools.chain(self.corun_prefill, self.corun_decode, self.extra_corun_prefill, self.extra_corun_decode,
                               self.sm_axis, self.phases, self.own, self.shapes, self.cudnn, self.sm_axis_rest)


# Decode shares of a device: from the least that keeps decode alive to more than half, denser where the paper's controller
# spends its time. Of 132 SMs: 112 + 20, 104 + 28, 96 + 36, 80 + 52, 64 + 68, 32 + 100.
CORE_DECODE_SHARES = (0.15, 0.21, 0.27, 0.39, 0.515, 0.76)
EXTRA_DECODE_SHARES = (0.09, 0.33, 0.45, 0.58, 0.64, 0.88)


def choose_splits(num_units: int, rule: Granularity, shares: Iterable[float]) -> tuple[Split, ...]:
    """The split nearest each decode share in which prefill has the group and decode the remainder, duplicates dropped.

    Never the other way round: the remainder carries no co-scheduling guarantee, and sides that alternated along the axis would
    lay that difference over the effect of the SMs.
    """
    grouped = [s for s in legal_splits(num_units, rule) if s.prefill_sms % rule.multiple_sms == 0]
    if not grouped:
        nearest_split(num_units, rule, 0.5)  # raises, with what to do
    return tuple(dict.fromkeys(min(grouped, key=lambda s: (abs(s.decode_sms - share * num_units), s.decode_sms))
                               for share in shares))


def gpu_axes(splits: Sequence[Split], extra_splits: Sequence[Split], layers: tuple[str, str] = ENGINE_LAYERS) -> Axes:
    """Sizes for an 8B-class model on a data-centre GPU."""
    return _axes(splits, extra_splits, layers, prefills=(512, 2048, 4096, 8192), extra_prefills=(1024,),
                 batches=(8, 64, 256), extra_batches=(1, 32, 128), context=1024, extra_contexts=(4096,),
                 tokens=2048, batch=64, copy_tokens=32768)


def cpu_axes(splits: Sequence[Split], extra_splits: Sequence[Split]) -> Axes:
    """Toy sizes: they prove the loop, in seconds. With them the engine's steps, which a device can be made of."""
    whole, by_layer, iteration = ENGINE_PHASES
    phases = (*(prefill(whole, n) for n in (1, 16, 32, 64, 128, 256)), prefill(whole, 64, 128), prefill(whole, 64, 256),
              prefill(by_layer, 16), prefill(by_layer, 64),
              *(decode(iteration, b, c) for b in (1, 2, 4, 8, 16) for c in (16, 64, 192)), Shape("gemm_lm_head", 1),
              *(prefill(ENGINE_LAYERS[0], n) for n in (16, 64, 256)), *(decode(ENGINE_LAYERS[1], b, 64) for b in (1, 4, 16)))
    axes = _axes(splits, extra_splits, TORCH_LAYERS, prefills=(32, 64, 128), extra_prefills=(48,), batches=(1, 2, 4, 8),
                 extra_batches=(16,), context=64, extra_contexts=(256,), tokens=64, batch=4, copy_tokens=1024)
    return replace(axes, phases=phases, replicates=1, cudnn=())


def _axes(splits: Sequence[Split], extra_splits: Sequence[Split], layers: tuple[str, str], *, prefills: tuple[int, ...],
          extra_prefills: tuple[int, ...], batches: tuple[int, ...], extra_batches: tuple[int, ...], context: int,
          extra_contexts: tuple[int, ...], tokens: int, batch: int, copy_tokens: int) -> Axes:
    sizes = sorted({*batches, *extra_batches})
    shapes = [Shape(op, m) for op in GEMMS[:-1] for m in (*sizes, *prefills) if m not in (tokens, batch)]
    shapes += [Shape("gemm_lm_head", m) for m in sizes if m != batch]
    for op in ("prefill_attention", OWN_PREFILL):
        shapes += [prefill(op, n) for n in (*prefills, *extra_prefills) if n != tokens]
        shapes += [prefill(op, tokens, past) for past in (tokens, 3 * tokens)]
        shapes += [prefill(op, tokens // 4, 0, batch=4)]
    shapes += [decode(op, b, c) for op in ("decode_attention", PAGED) for b in (*batches, *extra_batches)
               for c in (context, *extra_contexts) if (b, c) != (batch, context)]
    shapes += [Shape(op, m) for op in ("norm", "rope", "act", *OWN_ROWWISE, "copy") for m in (*batches[-1:], *prefills)
               if m != (copy_tokens if op == "copy" else tokens)]
    for op in dict.fromkeys((layers[0], TORCH_LAYERS[0])):
        shapes += [prefill(op, tokens, tokens), prefill(op, tokens // 4, 0, batch=4)]
    shapes += [decode(op, b, c) for op in dict.fromkeys((layers[1], TORCH_LAYERS[1])) for b in batches for c in extra_contexts]
    wide, narrow = Shape("gemm_gate_up", tokens), Shape("gemm_gate_up", batch)
    attention, cached = prefill("prefill_attention", tokens), decode("decode_attention", batch, context)
    paged, rowwise = decode(PAGED, batch, context), tuple(Shape(op, tokens) for op in ("norm", "rope", "act"))
    whole = [*(prefill(op, tokens) for op in dict.fromkeys((layers[0], TORCH_LAYERS[0]))),
             *(decode(op, batch, context) for op in dict.fromkeys((layers[1], TORCH_LAYERS[1])))]
    return Axes(
        layers=layers,
        corun_operations=tuple(itertools.product((wide, attention, Shape("norm", tokens), Shape("copy", copy_tokens)),
                                                 (cached, paged, narrow, Shape("gemm_lm_head", batch)))),
        splits=tuple(splits), extra_splits=tuple(s for s in extra_splits if s not in splits),
        corun_prefill=tuple(prefill(layers[0], n) for n in prefills),
        extra_corun_prefill=tuple(prefill(layers[0], n) for n in extra_prefills),
        corun_decode=tuple(decode(layers[1], b, context) for b in batches),
        extra_corun_decode=(*(decode(layers[1], b, context) for b in extra_batches),
                            *(decode(layers[1], batches[1], c) for c in extra_contexts)),
        # Whole layers first: from them comes the SM axis of both phases; the rest says which part of a layer makes it.
        sm_axis=(*whole, wide, cached, attention, narrow, Shape("copy", copy_tokens), Shape("gemm_qkv", tokens),
                 Shape("gemm_lm_head", batch)),
        sm_axis_rest=(Shape("gemm_o", tokens), Shape("gemm_down", tokens), *rowwise),
        own=(paged, prefill(OWN_PREFILL, tokens), *(Shape(op, tokens) for op in (*OWN_ROWWISE, "own_gemm_gate_up")),
             Shape("own_copy", copy_tokens), prefill(ENGINE_LAYERS[0], tokens), decode(ENGINE_LAYERS[1], batch, context)),
        least=_least(shapes), shapes=_in_turn(shapes), cudnn=(prefill(CUDNN, tokens),))


FIT_ROWS = {PAGED: 5, OWN_PREFILL: 5, **dict.fromkeys(OWN_ROWWISE, 3), **dict.fromkeys(GEMMS, 2)}
"""Sizes, beside the one on the SM axis, that a fit of the engine's own operations needs at least (bullet.profiles.kernels)."""
assert set(FIT_ROWS) - set(GEMMS) <= set(OWN_KERNELS)


def _by_op(shapes: Sequence[Shape]) -> dict[str, list[Shape]]:
    of: dict[str, list[Shape]] = {}
    for shape in dict.fromkeys(shapes):
        of.setdefault(shape.op, []).append(shape)
    return {op: [own[i] for i in ends_first(len(own))] for op, own in of.items()}


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
        ranks.append({value: rank for rank, value in enumerate(ends_first(size))})
    return sorted(items, key=lambda item: (sum(ranks[a][v] for a, v in enumerate(item)), item))


def ends_first(size: int) -> list[int]:
    """0, size - 1, then midpoints of the widest gaps, breadth first."""
    order = list(dict.fromkeys((0, size - 1)))
    gaps = [(0, size - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order if size else []
