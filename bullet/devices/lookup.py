"""Seconds between measured points, and never beyond them: linear interpolation in a table of samples.

GEMMs and elementwise kernels are read over tokens; attention over batch, then context (decode) or tokens (prefill). What a
query leaves open and the rows do not decide is refused, never averaged over.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bullet.errors import ProfileError
from bullet.piecewise import between

AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("prefill_attention", "prefill_layer"), ("batch", "tokens", "context_tokens")),
    **dict.fromkeys(("decode_attention", "paged_decode_attention", "decode_layer"), ("batch", "context_tokens")),
    "mixed_attention": ("tokens", "context_tokens", "decode_seqs", "decode_context_tokens"), "all_reduce": ("message_bytes",)}
"""Columns that a query runs over, outermost first; other operations: tokens."""
CHOICES = ("origin_version", "columns", "inner", "heads", "kv_heads", "num_gpus")
"""Columns of which a query takes one value as it is, never one between."""


def lookup(rows: Sequence[Mapping[str, Any]], op: str, point: Mapping[str, int], *, sms: int | None = None) -> float:
    """Seconds of ``op`` at a point of its axes, alone on ``sms`` SMs (default: all). ``point`` may hold :data:`CHOICES` as well.

    Repeats count as their median. :class:`ProfileError` names the axis and the measured range if the point is outside, and
    the operations, versions or sizes at hand if the table does not decide.
    """
    own = [r for r in rows if r["op"] == op and r["kind"] == "solo" and r["sms"] == (r["device_sms"] if sms is None else sms)]
    if not own:
        raise ProfileError(f"no rows of {op!r}{'' if sms is None else f' on {sms} SMs'}: the table has "
                           f"{', '.join(sorted({r['op'] for r in rows}))}")
    axes = AXES.get(op, ("tokens",))
    for name in CHOICES:
        found = sorted({r[name] for r in own}, key=lambda value: (value is None, value))
        if name in point:
            own = [r for r in own if r[name] == point[name]]
        elif len(found) > 1:
            raise ProfileError(f"rows of {op!r} differ in {name}: {', '.join(map(str, found))}: choose one")
        if not own:
            raise ProfileError(f"no rows of {op!r} with {name} {point[name]}: the table has {', '.join(map(str, found))}")
    for name in point:
        if name not in (*axes, *CHOICES):
            raise ProfileError(f"{op}: {name} plays no part: its rows run over {', '.join(axes)}")
    missing = [a for a in axes if a not in point]
    if missing:
        raise ProfileError(f"{op}: {missing[0]} is needed")
    values: dict[tuple[float, ...], list[float]] = {}
    for r in own:
        values.setdefault(tuple(float(r[a]) for a in axes), []).append(r["median_s"])
    return _along({k: statistics.median(v) for k, v in values.items()}, axes, [float(point[a]) for a in axes], op)


def _along(values: Mapping[tuple[float, ...], float], axes: Sequence[str], point: Sequence[float], op: str) -> float:
    nodes = sorted({key[0] for key in values})
    x = point[0]
    if not nodes[0] <= x <= nodes[-1]:
        raise ProfileError(f"{op}: {axes[0]} = {x:.15g} is outside the measured {nodes[0]:.15g} to {nodes[-1]:.15g}: "
                           "nothing is extrapolated")

    def at(node: float) -> float:
        inner = {key[1:]: seconds for key, seconds in values.items() if key[0] == node}
        return inner[()] if len(axes) == 1 else _along(inner, axes[1:], point[1:], op)

    if x in nodes:
        return at(x)
    i, share = between(x, nodes)
    low_s = at(nodes[i])
    return low_s + share * (at(nodes[i + 1]) - low_s)
