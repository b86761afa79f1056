"""Whether two sweeps of one device agree within their intervals: a profile that the next sweep would contradict is not published.

Asked of three things: seconds (the median difference, which drift and boost make a few per cent), slow-downs (row by row, each
with its interval and the scatter between visits), and the coefficients that a fit of each would state. numpy alone: it runs where
the sweeps were taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_fitted
from bullet.errors import ProfileError
from bullet.profiles.check import REPEAT, gpu_of
from bullet.profiles.contention import fit_contention
from bullet.profiles.layer_axis import axis_of_layers
from bullet.profiles.rows import Row, agreement
from bullet.profiles.sweeps import of_implementation, read_rows

SECONDS_LIMIT = 0.05
"""Median difference of seconds."""
WITHIN = 2.576
"""Standard deviations: 99 of 100 differences of two sweeps of one device lie within."""


@dataclass
class Agreement:
    """``lines``: what was compared; ``against``: what contradicts, empty if they agree."""

    lines: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        return not self.against

    @property
    def verdict(self) -> str:
        """One line."""
        return "the two sweeps agree" if self.agree else f"the two sweeps do not agree: {'; '.join(self.against[:3])}" + (
            f"; and {len(self.against) - 3} more" if len(self.against) > 3 else "")


def compare(first: Path, second: Path) -> Agreement:
    """Two folders of ``bullet-profile sweep``, or tables; :class:`ProfileError` if they are not of one device."""
    return compare_rows(read_rows(first), read_rows(second), str(first), str(second))


def compare_rows(rows: Sequence[Row], others: Sequence[Row], first: str, second: str) -> Agreement:
    """See :func:`compare`; ``first``, ``second``: what the tables are called in an error."""
    for name in ("gpu", "source"):
        found = [sorted({str(r[name]) for r in table}) for table in (rows, others)]
        if found[0] != found[1] or len(found[0]) != 1:
            raise ProfileError(f"{first} is of {name} {', '.join(found[0])!r}, {second} of {', '.join(found[1])!r}: "
                               "only tables of one device are compared")
    out = Agreement()
    common, difference = agreement(rows, others)
    out.lines.append(f"{common} measurements in common; median difference {100 * difference:.1f} % (within "
                     f"{100 * SECONDS_LIMIT:.0f} % wanted)")
    if difference > SECONDS_LIMIT:
        out.against.append(f"seconds differ by {100 * difference:.1f} % in the median")
    _slowdowns(out, rows, others)
    _coefficients(out, rows, others)
    return out


def _scatter(rows: Sequence[Row]) -> float:
    """Variance of ln slow-down between visits of one combination, beyond what replays of a visit tell; 0 without two visits."""
    visits: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "corun" and row["slowdown"] and row["cell"]:
            visits.setdefault(f"{str(row['cell']).partition('|visit')[0]}|{row['lane']}", []).append(row)
    pairs = [own for own in visits.values() if len(own) > 1]
    if not pairs:
        return 0.0
    between = [float(np.var([math.log(r["slowdown"]) for r in own], ddof=1)) for own in pairs]
    return max(0.0, float(np.mean(between)) - float(np.mean([_variance(r) for own in pairs for r in own])))


def _variance(row: Row) -> float:
    """Of ln slow-down, from the row's interval."""
    if row["slowdown_low"] is None or row["slowdown_high"] is None or row["slowdown_low"] <= 0:
        return 0.0
    return float((math.log(row["slowdown_high"] / row["slowdown_low"]) / (2 * 1.96)) ** 2)


def _slowdowns(out: Agreement, rows: Sequence[Row], others: Sequence[Row]) -> None:
    beside = {r["id"]: r for r in rows if r["slowdown"] and r["kind"] != "solo"}
    pairs = [(beside[r["id"]], r) for r in others if r["slowdown"] and r["kind"] != "solo" and r["id"] in beside]
    scatter = _scatter(rows) + _scatter(others)
    for lane in ("prefill", "decode"):
        own = [(a, b) for a, b in pairs if a["lane"] == lane]
        variance = np.array([_variance(a) + _variance(b) + scatter for a, b in own])
        if not own or not (variance > 0).all():
            continue
        off = np.array([math.log(b["slowdown"] / a["slowdown"]) for a, b in own])
        beyond = int(np.sum(np.abs(off) > WITHIN * np.sqrt(variance)))
        allowed = math.ceil(0.01 * len(own) + 3 * math.sqrt(0.0099 * len(own)))
        weight = 1 / variance
        mean, error = float(np.sum(weight * off) / np.sum(weight)), float(1 / np.sqrt(np.sum(weight)))
        out.lines.append(f"{lane}: {len(own)} slow-downs in common, {beyond} further apart than both intervals allow (up to "
                         f"{allowed} by chance); the second's higher by {100 * mean:+.2f} % on the whole, "
                         f"+- {100 * WITHIN * error:.2f}")
        if beyond > allowed:
            out.against.append(f"{beyond} of {len(own)} {lane} slow-downs lie outside their intervals, {allowed} could by chance")
        # A per cent is of no consequence to any decision, however sure.
        if abs(mean) > max(WITHIN * error, 0.01):
            out.against.append(f"{lane} slow-downs differ by {100 * mean:+.1f} % on the whole, +- {100 * WITHIN * error:.1f}")


def _fits(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Coefficients and intervals under the card's shipped or analytic kernels: not a profile, but the same ruler for both."""
    gpu, label = gpu_of(str(rows[0]["gpu"]), "the rows"), str(rows[0]["model"])
    device = load_fitted(DeviceConfig(gpu=gpu.name, model=label))
    own = of_implementation(rows, None).rows
    values: dict[str, float] = {}
    spans: dict[str, tuple[float, float]] = {}
    if (layers := axis_of_layers(own, device)) is not None:
        values, spans = dict(layers[0]), dict(layers[1])
        device = DeviceModel(device.model, device.gpu, dataclasses.replace(device.coefficients, **layers[0]))
    try:
        found = fit_contention(own, device)
    except ProfileError:  # too few rows
        return values, spans
    return values | found.coefficients, spans | found.intervals


def _coefficients(out: Agreement, rows: Sequence[Row], others: Sequence[Row]) -> None:
    gpu = str(rows[0]["gpu"]).removeprefix("simulated ")
    labels = {str(r["model"]) for r in (*rows, *others)}
    try:
        known = gpu_of(gpu, "the rows").name in GPUS and len(labels) == 1 and labels <= set(MODELS)
    except ProfileError:  # a CPU, a card that is not built in
        known = False
    if not known:
        return
    (a, low), (b, high) = _fits(rows), _fits(others)
    for name in a:
        if name not in b or name not in low or name not in high:
            continue
        spans = [low[name], high[name]]
        # Intervals that do not touch: of ten coefficients one in a hundred would be further apart than one difference allows.
        apart = max(span[0] for span in spans) > min(span[1] for span in spans) + 1e-3
        text = " and ".join(f"{value:.3g} ({span[0]:.3g} to {span[1]:.3g})"
                            for value, span in zip((a[name], b[name]), spans, strict=True))
        out.lines.append(f"{name}: {text}{': apart' if apart else ''}")
        if apart:
            out.against.append(f"{name} {text}")


def pooled(rows: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Both sweeps' rows as one table: the second's numbered as repeats, its cells and runs its own."""
    runs = 1 + max((r["run"] or 0 for r in rows), default=0)
    return [*rows, *({**r, "id": f"{r['id']}{REPEAT}2", "cell": None if r["cell"] is None else f"{r['cell']}|sweep 2",
                      "run": (r["run"] or 0) + runs} for r in others)]
