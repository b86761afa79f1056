"""What co-running costs, from all co-run rows of a sweep: by lane and by what the other side demands, with intervals.

The device's own form (:mod:`bullet.devices.fitted`), for rows of whole layers at once:

    own memory seconds x  u / (g (1 - loss h - l2_loss a))      h: the co-runner's granted share of the bandwidth
    own compute seconds x  clock alone / clock beside the other  a: share of all SM time that its GEMMs fill (through L2)

``loss`` and ``l2_loss`` by lane. Of the controls a memory stream has ``h`` as measured and no ``a``, an L2 stream the reverse:
its bytes over those that GEMMs on all SMs would read through L2. Clocks are the rows' own where a window measured them, else the
device's; what a co-runner takes from the clock is a line of its own (``clock_loss_*``), for power is shared by the whole chip.
Rows without a split tell ``shared_prefill_share`` once the losses are known.

A slow-down is a ratio of means in one cell: drift of the card is in both, so drifted rows count as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bullet.devices.fitted import DeviceModel
from bullet.devices.terms import Blocks, FittedWork
from bullet.errors import ProfileError
from bullet.profiles import forms
from bullet.profiles.forms import Array, FitError
from bullet.profiles.least_squares import intervals, solve
from bullet.profiles.rows import Row

LAYERS = ("prefill_layer", "decode_layer")
LEAST_ROWS, LEAST_SIZES = 4, 3
LOSSES = ("prefill_contention_loss", "decode_contention_loss", "prefill_l2_loss", "decode_l2_loss")
LOW, HIGH = np.full(4, -0.5), np.full(4, 1.0)
"""Where a loss is looked for: below 0 too, or an interval around none would be cut in half before it is known."""
UNTOLD = 0.25
"""Half an interval wider than this, and the rows do not tell a coefficient: what L2 costs a lane is then in what bandwidth does,
a share of shared SMs is left out; both are said."""
L2_BYTES_PER_FLOP = (128 + 256) / (128 * 256)
"""That a GEMM reads through L2 in 16 bits with an output tile of 128 x 256, the largest of the device's."""
STREAMS = ("memory_stream", "l2_stream")
WIDEST_LEFT = 0.05
"""As the device has it: a lane keeps a twentieth of its bandwidth."""


def layer_work(device: DeviceModel, row: Row, prefix: str) -> FittedWork:
    """A row's whole layer, or its co-runner's (``corunner_``), as the device's work."""
    op = row["corunner"] if prefix else row["op"]
    tokens, batch, context = (row[f"{prefix}{name}"] for name in ("tokens", "batch", "context_tokens"))
    if op == "decode_layer":
        return device.hybrid_work((), batch, batch * context, logits_seqs=0, layers=1)
    return device.prefill_work([(tokens // batch, context)] * batch, 1, logits_seqs=0)


class LayerTerms:
    """Works of one layer each as arrays: :meth:`DeviceModel.solo_seconds` of all of them under any rate and bandwidth."""

    def __init__(self, works: Sequence[FittedWork | None]) -> None:
        terms: list[list[tuple[tuple[Blocks, ...], float]]] = [[] if w is None else [
            *((tiles.choices, moved_s) for tiles, moved_s in w.dense.gemms),
            *((((block_s, blocks),), moved_s) for block_s, blocks, moved_s in w.attention)] for w in works]
        width = max((len(t) for t in terms), default=0)
        most = max((len(tiles) for own in terms for tiles, _ in own), default=1)
        padded = np.zeros((len(works), width, most, 2))
        self.moved_s = np.zeros((len(works), width))
        for i, own in enumerate(terms):
            for k, (tiles, moved_s) in enumerate(own):
                padded[i, k] = [*tiles, *[tiles[-1]] * (most - len(tiles))]
                self.moved_s[i, k] = moved_s
        #: Of each work, kernel and tile.
        self.block_s, self.blocks = padded[..., 0], padded[..., 1]
        self.row_s, self.fixed_s, self.bytes, self.gemm_sm_s = (np.array(
            [0.0 if w is None else float(of(w)) for w in works]) for of in (
                lambda w: w.dense.row_s, lambda w: w.dense.fixed_s + w.attention_fixed_s + w.fixed_s, lambda w: w.bytes,
                lambda w: w.gemm_sm_s()))

    def seconds(self, sms: Array, beside: Array, rates: Array, speed: Array, inverse: Array, waves: bool = True) -> Array:
        """One value a work. ``sms`` as waves are counted; ``beside``: busy SMs of the chip besides; ``rates``: of an SM, by all
        busy ones; ``speed``: a factor on them, clocks and shares; ``inverse``: 1 / share of the bandwidth.

        As :func:`bullet.devices.terms.compute_seconds`; without waves the rate is that of the SMs at hand.
        """
        at_hand, n = sms[:, None, None], len(rates) - 1
        if waves:
            rounds = np.ceil(self.blocks / at_hand)
            most = np.where(rounds > 1, np.ceil(self.blocks / np.maximum(rounds - 1, 1)) - 1 + beside[:, None, None], n)
            busy = np.minimum(np.maximum(most, at_hand + beside[:, None, None]), n)
        else:
            rounds = np.maximum(np.minimum(self.blocks, 1.0), self.blocks / at_hand)
            busy = np.minimum(at_hand + beside[:, None, None], n)
        compute_s = (rounds * self.block_s / rates[busy.astype(int)]).min(2) / speed[:, None]
        seconds: Array = np.maximum(compute_s, self.moved_s * inverse[:, None]).sum(1) + self.row_s * inverse + self.fixed_s
        return seconds

    def take(self, keep: np.ndarray) -> LayerTerms:
        """Those works alone."""
        part = copy(self)
        for name, values in vars(self).items():
            setattr(part, name, values[keep])
        return part


class CorunRows:
    """Rows of lanes beside another as arrays, and the device's slow-down of each under trial losses."""

    def __init__(self, rows: Sequence[Row], alone: Sequence[Row], device: DeviceModel) -> None:
        self.rows, self.device = list(rows), device
        self.n = float(device.num_sms)
        self.own = LayerTerms([layer_work(device, r, "") for r in rows])
        self.other = LayerTerms([layer_work(device, r, "corunner_") if r["corunner"] in LAYERS else None for r in rows])
        self.prefill = np.array([r["op"] == "prefill_layer" for r in rows])
        self.sms, self.other_sms = (np.array([float(r[name] or 0) for r in rows]) for name in ("sms", "corunner_sms"))
        self.shared = np.array([r["split_prefill_sms"] is None for r in rows])
        self.measured = np.array([float(r["slowdown"]) for r in rows])
        self.clock = clock_ratios(rows, alone)
        rate = np.array([0.0 if r["corunner"] not in STREAMS else r["corunner_bytes_per_s"] for r in rows])
        l2 = np.array([r["corunner"] == "l2_stream" for r in rows])
        c = device.coefficients
        l2_rate = L2_BYTES_PER_FLOP * device.gpu.peak_flops * c.gemm_tiles[0][2]
        self.peak = device.gpu.mem_bytes_per_s * c.peak_bandwidth
        self.stream_use, self.stream_gemms = np.where(l2, 0.0, rate), np.where(l2, rate / l2_rate, 0.0)
        self.rates = np.minimum(c.rate_cap, 1 + c.rate_slope * (1 - np.arange(self.n + 1) / self.n))

    def _bandwidth(self, sms: Array) -> Array:
        c = self.device.coefficients
        return forms.bandwidth_curve(np.maximum(sms, 1e-9) / self.n, c.bandwidth_knee, c.bandwidth_sharpness)

    def demands(self, share: float = 0.5) -> tuple[Array, Array]:
        """``h`` and ``a`` of each row's co-runner."""
        _, granted, gemms, *_ = self._side(share)
        return granted / self.peak, gemms

    def _side(self, share: float) -> tuple[Array, ...]:
        taken = np.where(self.prefill, share, 1 - share)
        held, other_held = self.sms, self.other_sms
        shared = np.where(self.shared, np.maximum(0.0, held + other_held - self.n), 0.0)
        real, other_real = held - (1 - taken) * shared, other_held - taken * shared
        part, other_part = (np.where(shared > 0, own / np.maximum(all_held, 1.0), 1.0)
                            for own, all_held in ((real, held), (other_real, other_held)))
        # A clock measured beside the other is told as a factor on that alone.
        timed = np.isfinite(self.clock)
        beside = np.where(timed, 0.0, np.where(self.shared, self.n, other_held))
        speed = np.where(timed, self.clock, 1.0) * part
        inverse, other_inverse = 1 / self._bandwidth(real), 1 / self._bandwidth(other_real)
        whole = np.where(shared > 0, self.n, 0.0)
        own_s = self.own.seconds(held, whole, self.rates, part, inverse)
        other_s = np.maximum(self.other.seconds(np.maximum(other_held, 1.0), whole, self.rates, other_part, other_inverse), 1e-12)
        use = self.own.bytes / own_s
        other_use = np.maximum(self.other.bytes / other_s, self.stream_use)
        gemms = self.other.gemm_sm_s / (self.n * other_s) + self.stream_gemms
        half = self.peak / 2
        fits = use + other_use <= self.peak
        grant = np.where(fits, use, np.where(use <= half, use, np.where(other_use <= half, self.peak - other_use, half)))
        other_grant = np.where(fits, other_use, np.where(use <= half, self.peak - use,
                                                         np.where(other_use <= half, other_use, half)))
        return use / grant, other_grant, gemms, beside, speed, inverse

    def slowdowns(self, losses: Sequence[float] | Array, share: float = 0.5) -> Array:
        """``losses`` in the order of :data:`LOSSES`."""
        wait, other_grant, gemms, beside, speed, inverse = self._side(share)
        loss, l2 = (np.where(self.prefill, losses[i], losses[i + 1]) for i in (0, 2))
        slow = wait / np.maximum(WIDEST_LEFT, 1 - loss * other_grant / self.peak - l2 * gemms)
        together = self.own.seconds(self.sms, beside, self.rates, speed, inverse * slow)
        none = np.zeros(len(self.sms))
        alone = self.own.seconds(self.sms, none, self.rates, none + 1, 1 / self._bandwidth(self.sms))
        ratio: Array = together / alone
        return ratio

    def take(self, keep: np.ndarray) -> CorunRows:
        """Those rows alone."""
        part = copy(self)
        part.rows = [r for r, wanted in zip(self.rows, keep, strict=True) if wanted]
        part.own, part.other = self.own.take(keep), self.other.take(keep)
        for name in ("prefill", "sms", "other_sms", "shared", "measured", "clock", "stream_use", "stream_gemms"):
            setattr(part, name, getattr(self, name)[keep])
        return part


def clock_ratios(rows: Sequence[Row], alone: Sequence[Row]) -> Array:
    """Clock beside the other over the clock alone in the same cell; NaN where a window has none."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in alone:
        if row["kind"] == "solo" and row["cell"] is not None and row["clock_window_hz"]:
            found.setdefault((row["cell"], row["lane"]), []).append(row["clock_window_hz"])
    return np.array([row["clock_window_hz"] / statistics.fmean(found[row["cell"], row["lane"]])
                     if row["clock_window_hz"] and (row["cell"], row["lane"]) in found else np.nan for row in rows])


@dataclass
class Contention:
    """Coefficients as the device takes them, their intervals, errors on rows left out, and what is said beside."""

    coefficients: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def keep(self, name: str, value: float, half: float, low: float = 0.0, high: float = 1.0) -> None:
        """A coefficient and its interval, within what it can be."""
        value = min(max(value, low), high)
        self.coefficients[name] = round(value, 4)
        self.intervals[name] = (round(min(max(value - half, low), self.coefficients[name]), 4),
                                round(max(min(value + half, high), self.coefficients[name]), 4))


def corun_rows(rows: Sequence[Row], *, split: bool, sharing: str = "plain") -> list[Row]:
    """Layers beside each other, with a slow-down. ``split``: each on its own SMs, and beside streams too; else on shared ones."""
    found = []
    for row in rows:
        if not row["slowdown"] or row["op"] not in LAYERS or (row["cell"] is None and row["drift_ok"] is False):
            continue
        pair = row["kind"] == "corun" and {row["op"], row["corunner"]} == set(LAYERS)
        stream = row["kind"] == "control" and row["corunner"] in STREAMS and row["corunner_bytes_per_s"]
        own_sms = row["split_prefill_sms"] is not None and row["partition"] != "unproven"
        shared = row["split_prefill_sms"] is None and row["sms"] == row["device_sms"]
        if (own_sms and (pair or stream)) if split else (shared and pair and (row["sharing"] or "plain") == sharing):
            found.append(row)
    return found


def fit_contention(rows: Sequence[Row], device: DeviceModel) -> Contention:
    """All of it; empty without co-run rows of layers on a split. :class:`ProfileError` with fewer than :data:`LEAST_ROWS`."""
    out = Contention()
    own = corun_rows(rows, split=True)
    pairs = [r for r in own if r["kind"] == "corun"]
    if not pairs:
        return out
    if len(pairs) < LEAST_ROWS:
        raise ProfileError(f"contention: {len(pairs)} co-run rows with a slow-down, at least {LEAST_ROWS} are needed to fit "
                           "the loss")
    data = CorunRows(own, rows, device)
    target = np.log(data.measured)

    def residual_of(part: CorunRows, names: Sequence[str]) -> Callable[[Array], Array]:
        wanted = np.log(part.measured)
        return lambda at: np.log(part.slowdowns(_full(names, at))) - wanted

    names: Sequence[str] = [name for name in LOSSES if "l2" not in name or _separable(own, name.partition("_")[0])]
    out.assumed += [f"{name} 0: fewer than {LEAST_SIZES} sizes beside it, and no L2 stream"
                    for name in LOSSES if name not in names]
    while True:
        residual, (low, high) = residual_of(data, names), _bounds(names)
        at = solve(residual, np.full(len(names), 0.1), low, high)
        solution = intervals(residual, at, low, high, [combination(r) for r in own])
        wide = [(half, name) for half, name in zip(solution.half, names, strict=True) if "l2" in name and half > UNTOLD]
        if not wide:
            break
        # Of a lane that arithmetic binds, or that only one kind of co-runner was beside, the two demands cannot be told apart.
        out.assumed.append(f"{max(wide)[1]} 0: not told from what bandwidth costs, and in that")
        names = [name for name in names if name != max(wide)[1]]
    # A lane that was never timed beside the other: one loss stands for both.
    untold = [name for name, half in zip(names, solution.half, strict=True) if not np.isfinite(half)]
    out.assumed += [f"{name} {'0' if 'l2' in name else 'as contention_loss'}: the rows do not tell it" for name in untold]
    losses = _full(names, at)
    wider = _left_out(out, data, residual_of, names, at)
    both = _one_loss(out, data, wider)
    for name in LOSSES:
        if name in names and name not in untold:
            i = list(names).index(name)
            out.keep(name, float(at[i]), wider * float(solution.half[i]))
        elif "l2" not in name:
            losses[LOSSES.index(name)] = both
    out.errors["slowdown_fitted"] = FitError.of(data.slowdowns(losses), data.measured).as_dict()
    out.errors["slowdown_without_losses"] = FitError.of(data.slowdowns(np.zeros(4)), data.measured).as_dict()
    out.notes["attained_bandwidth_share"] = attained(pairs)
    out.notes["contention_rows"] = {"co-run": len(pairs), "beside streams": len(own) - len(pairs),
                                    "visits more than one": sum((r["replicate"] or 0) > 0 for r in pairs),
                                    "clock measured": int(np.isfinite(data.clock).sum()),
                                    "spread": round(float(np.std(np.log(data.slowdowns(losses)) - target)), 4)}
    _clock(out, rows, device, losses)
    for sharing in ("plain", "priority"):
        _shared(out, rows, device, losses, wider**2 * solution.covariance, names, sharing)
    return out


def _full(names: Sequence[str], at: Array) -> Array:
    """All four: an L2 part that is not there is 0; of one lane's loss the other's stands for both."""
    known = dict(zip(names, at, strict=True))
    bandwidth = [known.get(name) for name in LOSSES[:2]]
    first = next((x for x in bandwidth if x is not None), 0.0)
    return np.array([*(first if x is None else x for x in bandwidth), *(known.get(name, 0.0) for name in LOSSES[2:])])


def _bounds(names: Sequence[str]) -> tuple[Array, Array]:
    return LOW[:len(names)], HIGH[:len(names)]


def combination(row: Row) -> Hashable:
    """Split and both sizes: rows that share what the form lacks of them; both lanes and all visits. Of a sweep told apart from
    another one."""
    own = (row["tokens"], row["batch"], row["context_tokens"])
    other = (row["corunner_tokens"], row["corunner_batch"], row["corunner_context_tokens"])
    sides = (own, other) if row["op"] == "prefill_layer" else (other, own)
    return (row["split_prefill_sms"], row["split_decode_sms"], *sides, row["corunner"] if row["kind"] == "control" else "")


def _separable(rows: Sequence[Row], lane: str) -> bool:
    """Whether what L2 costs a lane can be told from what bandwidth does: its co-runners differ in how much of either they ask."""
    beside = [r for r in rows if r["op"] == f"{lane}_layer"]
    sizes = {(r["corunner_tokens"], r["corunner_batch"], r["corunner_context_tokens"]) for r in beside if r["kind"] == "corun"}
    return len(sizes) >= LEAST_SIZES or "l2_stream" in {r["corunner"] for r in beside}


def _one_loss(out: Contention, data: CorunRows, wider: float) -> float:
    """One loss for both lanes and both demands: what stands for a lane that has none of its own."""
    def residual(at: Array) -> Array:
        off: Array = np.log(data.slowdowns([at[0], at[0], 0.0, 0.0])) - np.log(data.measured)
        return off

    at = solve(residual, [0.2], LOW[:1], HIGH[:1])
    found = intervals(residual, at, LOW[:1], HIGH[:1], [combination(r) for r in data.rows])
    out.keep("contention_loss", float(at[0]), wider * float(found.half[0]))
    return float(at[0])


def _left_out(out: Contention, data: CorunRows, residual_of: Callable[[CorunRows, Sequence[str]], Callable[[Array], Array]],
              names: Sequence[str], start: Array) -> float:
    """Cross-validation: each split, each prefill size and each decode size predicted by a fit that has not seen it.

    Returns how much wider intervals must be than the rows' scatter makes them: where sizes or splits that a fit has not seen are
    further off than those it has, the form lacks something that groups of rows share.
    """
    low, high = _bounds(names)
    fitted = float(np.sqrt(np.mean(residual_of(data, names)(start) ** 2)))
    wider = 1.0
    sizes = [combination(r) for r in data.rows]
    for label, place in (("splits", 0), ("prefill_sizes", 2), ("decode_sizes", 3)):
        keys: list[Any] = [size[place] for size in sizes]  # type: ignore[index]
        if len(set(keys)) < 2:
            continue
        predicted = np.full(len(keys), np.nan)
        for key in dict.fromkeys(keys):
            rest = np.array([other != key for other in keys])
            if rest.sum() < LEAST_ROWS:
                continue
            trial = solve(residual_of(data.take(rest), names), start, low, high, rounds=4)
            predicted[~rest] = data.slowdowns(_full(names, trial))[~rest]
        seen = np.isfinite(predicted)
        if seen.any():
            out.errors[f"slowdown_left_out:{label}"] = FitError.of(predicted[seen], data.measured[seen]).as_dict()
            off = float(np.sqrt(np.mean(np.log(predicted[seen] / data.measured[seen]) ** 2)))
            wider = max(wider, off / max(fitted, 1e-4))
    return wider


def attained(pairs: Sequence[Row]) -> dict[str, dict[str, float]]:
    """D_{p,sl}: share of its own bandwidth that decode attains beside an sl-token prefill; small batches, which bytes bind."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in pairs:
        if row["op"] == "decode_layer" and row["batch"] <= 64:
            found.setdefault((row["corunner_tokens"], row["sms"]), []).append(1 / row["slowdown"])
    shares: dict[str, dict[str, float]] = {}
    for (tokens, sms), values in sorted(found.items()):
        shares.setdefault(str(tokens), {})[str(sms)] = round(statistics.median(values), 4)
    return shares


CLOCK = ("clock_loss_arithmetic", "clock_loss_bandwidth")


def _clock(out: Contention, rows: Sequence[Row], device: DeviceModel, losses: Array) -> None:
    """Power: how much of its clock a lane loses to the other's arithmetic and to its traffic, from the clocks inside windows."""
    split = [r for r in rows if r["op"] in LAYERS and r["slowdown"] and r["split_prefill_sms"] and r["partition"] != "unproven"]
    beside = {"corun": LAYERS, "control": (*STREAMS, "tensor_spin", "alu_spin", "idle")}
    own = [r for r in split if r["corunner"] in beside.get(r["kind"], ())]
    data = CorunRows(own, rows, device)
    known = np.isfinite(data.clock)
    if known.sum() < 2 * LEAST_ROWS:
        return
    bandwidth, _ = data.demands()
    none = np.zeros(len(own))
    arithmetic = data.other.gemm_sm_s / np.maximum(data.n * data.other.seconds(
        np.maximum(data.other_sms, 1.0), none, data.rates, none + 1, 1 / data._bandwidth(data.other_sms)), 1e-12)
    spin = np.array([r["corunner"] == "tensor_spin" for r in own])
    arithmetic = np.where(spin, data.other_sms / data.n, np.where(data.other.bytes > 0, arithmetic, 0.0))
    design = np.stack([arithmetic, bandwidth], axis=1)[known]
    lost = -np.log(data.clock[known])
    low, high = np.full(2, -1.0), np.full(2, 1.0)

    def residual(at: Array) -> Array:
        off: Array = design @ at - lost
        return off

    at = solve(residual, [0.0, 0.0], low, high)
    found = intervals(residual, at, low, high, [combination(r) for r, k in zip(own, known, strict=True) if k])
    out.notes["clock"] = {name: {"value": round(float(v), 4), "low": round(float(v - h), 4), "high": round(float(v + h), 4)}
                          for name, v, h in zip(CLOCK, at, found.half, strict=True) if h < UNTOLD}
    out.notes["clock"]["lost_beside_another"] = round(float(np.median(1 - data.clock[known])), 4)


def _shared(out: Contention, rows: Sequence[Row], device: DeviceModel, losses: Array, covariance: Array, names: Sequence[str],
            sharing: str) -> None:
    """Who gets shared SMs, from layers at once without a split: the losses as found, their own uncertainty carried along."""
    own = corun_rows(rows, split=False, sharing=sharing)
    name = "shared_prefill_share" + ("" if sharing == "plain" else f"_{sharing}")
    if len(own) < LEAST_ROWS:
        if sharing == "plain":
            out.assumed.append("shared_prefill_share 0.5")
        return
    data, low, high = CorunRows(own, rows, device), np.array([0.02]), np.array([0.98])

    def share_at(losses: Array) -> tuple[Array, Callable[[Array], Array]]:
        def residual(at: Array) -> Array:
            off: Array = np.log(data.slowdowns(losses, float(at[0]))) - np.log(data.measured)
            return off

        # More than one minimum is possible: waves and bandwidth both depend on it.
        found = [solve(residual, [start], low, high) for start in (0.3, 0.6, 0.85)]
        return min(found, key=lambda at: float(np.sum(np.abs(residual(at))))), residual

    at, residual = share_at(losses)
    half = float(intervals(residual, at, low, high, [combination(r) for r in own]).half[0])
    for i, loss in enumerate(names):
        deviation = float(np.sqrt(covariance[i, i]))
        if np.isfinite(deviation):
            moved = np.array(losses)
            moved[LOSSES.index(loss)] += deviation
            half = float(np.hypot(half, 2.6 * float(share_at(moved)[0][0] - at[0])))
    error = FitError.of(data.slowdowns(losses, float(at[0])), data.measured)
    out.errors[f"slowdown_{sharing}_streams_fitted"] = error.as_dict()
    if half > UNTOLD:
        if sharing == "plain":
            out.assumed.append("shared_prefill_share 0.5: the rows without a split do not tell it")
        return
    if sharing == "plain":
        out.keep(name, float(at[0]), half, 0.001, 0.999)
    else:
        out.notes[name] = {"value": round(float(at[0]), 4), "low": round(float(at[0]) - half, 4),
                           "high": round(float(at[0]) + half, 4)}
