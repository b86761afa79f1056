"""Seconds between measured points, and never beyond them: linear interpolation in a table of samples.

GEMMs and elementwise kernels are read over tokens; attention over batch, then context (decode) or tokens (prefill).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from bullet.errors import ProfileError

AXES: Mapping[str, tuple[str, ...]] = {"prefill_attention": ("batch", "tokens", "context_tokens"),
                                       "decode_attention": ("batch", "context_tokens")}
"""Columns that a query runs over, outermost first; other operations: tokens."""


def lookup(rows: Sequence[Mapping[str, Any]], op: str, point: Mapping[str, int], *, sms: int | None = None) -> float:
    """Seconds of ``op`` at a point of its axes, alone on ``sms`` SMs (default: all).

    Repeats count as their median. :class:`ProfileError` names the axis and the measured range if the point is outside, and
    the operations or versions at hand if the table does not decide.
    """
    own = [r for r in rows if r["op"] == op and r["kind"] == "solo" and r["sms"] == (sms or r["device_sms"])]
    if not own:
        raise ProfileError(f"no rows of {op!r}{f' on {sms} SMs' if sms else ''}: the table has "
                           f"{', '.join(sorted({r['op'] for r in rows}))}")
    for name in ("origin_version", "columns", "inner", "heads", "kv_heads"):
        found = sorted({str(r[name]) for r in own})
        if len(found) > 1:
            raise ProfileError(f"rows of {op!r} differ in {name}: {', '.join(found)}: choose one")
    axes = AXES.get(op, ("tokens",))
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
        raise ProfileError(f"{op}: {axes[0]} = {x:g} is outside the measured {nodes[0]:g} to {nodes[-1]:g}: "
                           "nothing is extrapolated")
    i = bisect_left(nodes, x)

    def at(node: float) -> float:
        inner = {key[1:]: seconds for key, seconds in values.items() if key[0] == node}
        return inner[()] if len(axes) == 1 else _along(inner, axes[1:], point[1:], op)

    if nodes[i] == x:
        return at(x)
    low, high = nodes[i - 1], nodes[i]
    return at(low) + (x - low) / (high - low) * (at(high) - at(low))
