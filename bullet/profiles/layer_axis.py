"""Rate and bandwidth against SMs from whole layers alone on their lanes: what the engine's prefill and decode feel of their SMs.

Every cell of a sweep holds each lane alone, before and after, so that the two phases are measured along SMs far more often than
any single kernel. A layer's seconds are the device's own form; what its kernels' sum misses of a size is a factor of that size,
which does not change with SMs and is not fitted: only how seconds change along SMs is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bullet.devices.fitted import DeviceModel
from bullet.profiles import forms
from bullet.profiles.contention import LAYERS, LayerTerms, layer_work
from bullet.profiles.forms import Array, FitError
from bullet.profiles.least_squares import intervals, solve
from bullet.profiles.rows import Row
from bullet.profiles.sm_axis import AXIS, Errors, on_unknown_sms

LOW, HIGH = np.array([0.0, 1.0, 0.05, 0.5]), np.array([2.0, 2.0, 1.0, 12.0])
STARTS = ((0.4, 1.3, 0.4, 3.0), (0.2, 1.9, 0.6, 1.5), (0.8, 1.15, 0.25, 5.0), (0.5, 1.06, 0.45, 3.0))
"""Slope, cap, knee, sharpness: the first two trade places."""
CORNER = 16
"""Windows between corners of the clock's drift."""
LEAST_COUNTS = 3
"""SM counts of each phase, or its curve is not told."""


def layer_rows(rows: Sequence[Row]) -> list[Row]:
    """Whole layers alone, on SMs that are known."""
    return [r for r in rows if r["op"] in LAYERS and r["kind"] == "solo" and r["origin"] is None and not on_unknown_sms(r)
            and r["cublas_sms"] is None and (r["drift"] is None or abs(r["drift"]) < 0.5)]


class LayersOnSms:
    """Seconds of layers alone under trial coefficients, each size up to a factor of its own."""

    def __init__(self, rows: Sequence[Row], device: DeviceModel) -> None:
        self.rows, self.n = list(rows), float(device.num_sms)
        self.terms = LayerTerms([layer_work(device, r, "") for r in rows])
        self.sms = np.array([float(r["sms"]) for r in rows])
        self.slow = slowness(rows)
        self.measured = np.array([float(r["mean_s"] or r["median_s"]) for r in rows])
        self.op = np.array([r["op"] for r in rows])
        sizes = [(r["op"], r["tokens"], r["batch"], r["context_tokens"]) for r in rows]
        index = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
        self.size = np.array([index[size] for size in sizes])

    def seconds(self, axis: Array, waves: bool = True) -> Array:
        """By the sum of a layer's kernels."""
        slope, cap, knee, sharpness = axis
        rates = np.minimum(cap, 1 + slope * (1 - np.arange(self.n + 1) / self.n))
        inverse = 1 / forms.bandwidth_curve(self.sms / self.n, knee, sharpness)
        return self.terms.seconds(self.sms, np.zeros(len(self.sms)), rates, 1 / self.slow, inverse, waves)

    def factors(self, axis: Array, of: np.ndarray, waves: bool = True) -> Array:
        """Measured over the sum of kernels by size, over the rows ``of``; NaN where none of a size is among them."""
        off = np.log(self.measured / self.seconds(axis, waves))
        total, count = (np.bincount(self.size[of], weights=x, minlength=int(self.size.max()) + 1)
                        for x in (off[of], np.ones(int(of.sum()))))
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Array = np.exp(total / count)
        return found

    def fit(self, of: np.ndarray, waves: bool = True, starts: Sequence[Any] = STARTS) -> Array:
        """Slope, cap, knee, sharpness."""
        def residual(at: Array) -> Array:
            return self.residual(at, of, waves)

        rounds = 40 if len(starts) > 1 else 4  # from where all rows are: not far
        found = [solve(residual, start, LOW, HIGH, rounds=rounds) for start in starts]
        return min(found, key=lambda at: round(float(np.mean(residual(at) ** 2)), 12))

    def residual(self, axis: Array, of: np.ndarray, waves: bool = True) -> Array:
        """Logarithms of measured over predicted, each size's own factor taken out."""
        off: Array = np.log(self.seconds(axis, waves) * self.factors(axis, of, waves)[self.size] / self.measured)[of]
        return off


def slowness(rows: Sequence[Row]) -> Array:
    """How much longer than usual arithmetic took while each row was measured: it follows the card's clock, memory does not.

    By the clock inside the window over what it is on as many SMs at a time of no drift: the two are told apart by a line with a
    corner every :data:`CORNER` rows that all windows share. The anchors' drift stands where no clock was read.
    """
    slow = np.array([1.0 + (r["drift"] or 0.0) for r in rows])
    known = [i for i, r in enumerate(rows) if r["clock_window_hz"]]
    places = list(dict.fromkeys((rows[i]["op"], rows[i]["sms"]) for i in known))
    if len(known) <= 2 * (len(places) + 2):
        return slow
    clock = np.log([rows[i]["clock_window_hz"] for i in known])
    at = np.empty(len(known))
    in_time = sorted(range(len(known)), key=lambda k: (rows[known[k]]["run"] or 0, rows[known[k]]["order"] or 0))
    at[in_time] = np.arange(len(known))
    corners = np.linspace(0, len(known) - 1, max(2, 1 + len(known) // CORNER))
    hats = np.maximum(0.0, 1 - np.abs(at[:, None] - corners) / (corners[1] - corners[0]))
    hats -= hats.mean(0)  # the mean time is that of no drift
    of = np.array([[float((rows[i]["op"], rows[i]["sms"]) == place) for place in places] for i in known])
    design = np.hstack([of, hats])
    found = np.linalg.pinv(design.T @ design, rcond=1e-12, hermitian=True) @ (design.T @ clock)
    slow[known] = np.exp(of @ found[:len(places)] - clock)
    return slow


def axis_of_layers(rows: Sequence[Row], device: DeviceModel
                   ) -> tuple[dict[str, float], dict[str, tuple[float, float]], Errors] | None:
    """The four coefficients, their intervals, and errors where an SM count, or a size, was left out; None where the layers were
    not measured on enough SM counts."""
    own = layer_rows(rows)
    counts = {op: len({r["sms"] for r in own if r["op"] == op}) for op in LAYERS}
    if min(counts.values()) < LEAST_COUNTS:
        return None
    data = LayersOnSms(own, device)
    every = np.ones(len(own), dtype=bool)
    at = data.fit(every)
    errors: Errors = {}
    for label, waves in (("sm_axis_left_out", True), ("sm_axis_left_out_without_waves", False)):
        best = at if waves else data.fit(every, False, [at])
        predicted = np.full(len(own), np.nan)
        for sms in dict.fromkeys(data.sms.tolist()):
            rest = data.sms != sms
            trial = data.fit(rest, waves, [best])
            predicted[~rest] = (data.seconds(trial, waves) * data.factors(trial, rest, waves)[data.size])[~rest]
        for op in (*LAYERS, "all"):
            keep = np.isfinite(predicted) & ((data.op == op) | (op == "all"))
            if keep.any():
                errors[f"{label}:{op}"] = FitError.of(predicted[keep], data.measured[keep]).as_dict()
    predicted = np.full(len(own), np.nan)
    for size in range(int(data.size.max()) + 1):
        rest = data.size != size
        if min(len(set(data.sms[rest & (data.op == op)].tolist())) for op in LAYERS) < LEAST_COUNTS:
            continue
        trial = data.fit(rest, True, [at])
        predicted[~rest] = (data.seconds(trial) * data.factors(trial, ~rest)[data.size])[~rest]
    wider = 1.0  # as of contention: sizes that a fit has not seen are further off than those it has
    if (keep := np.isfinite(predicted)).any():
        off, fitted = (float(np.sqrt(np.mean(x**2))) for x in (np.log(predicted[keep] / data.measured[keep]),
                                                               data.residual(at, every)))
        wider = max(1.0, off / max(fitted, 1e-4))
        errors["sm_axis_size_left_out:all"] = FitError.of(predicted[keep], data.measured[keep]).as_dict()
    # Rows on as many SMs share what waves and tiles do there that no smooth curve follows, those of a cell its clock: whichever
    # way of hanging together leaves the least known.
    groups: tuple[list[Any], ...] = ([r["cell"] or r["id"] for r in own],
                                     list(zip(data.op.tolist(), data.sms.tolist(), strict=True)),
                                     list(zip(data.size.tolist(), data.sms.tolist(), strict=True)))
    half = wider * np.max([intervals(lambda axis: data.residual(axis, every), at, LOW, HIGH, g).half for g in groups], axis=0)
    values, told = dict(zip(AXIS, at.tolist(), strict=True)), {}
    for name, value, width, low, high in zip(AXIS, at.tolist(), half.tolist(), LOW.tolist(), HIGH.tolist(), strict=True):
        told[name] = (max(low, value - width), min(high, value + width)) if np.isfinite(width) else (low, high)
    reached = 1 + values["rate_slope"] * (1 - float(data.sms.min()) / data.n)
    if values["rate_cap"] >= reached:  # no lane came to it: nothing faster than what was seen is assumed
        values["rate_cap"], told["rate_cap"] = max(1.0, reached), (max(1.0, reached), float(HIGH[1]))
    values = {name: round(value, 6) for name, value in values.items()}
    spans = {name: (min(round(low, 4), values[name]), max(round(high, 4), values[name])) for name, (low, high) in told.items()}
    return values, spans, errors
