"""The paper's results, read off its figures: zejia-lin/BulletServe ``assets/*.png`` (Apache-2.0). ``data/README.md`` has the
commit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "data"
TRACES: Mapping[str, str] = {"sharegpt": "ShareGPT", "azure-code": "Azure-Code", "arxiv": "arXiv-Summary"}
SYSTEMS: Mapping[str, str] = {
    "bullet": "Bullet",
    "vllm-1024": "vLLM",
    "sglang-1024-mixed": "SGLang-1024",
    "sglang-2048-mixed": "SGLang-2048",
    "nanoflow-1024": "Nanoflow",
}
"""Ours: theirs. Their chunked systems behave as hybrid batches do; the engine's own default has chunks ahead of decodes."""


class Point(NamedTuple):
    """A marker. ``value`` is ``None`` where it leaves the axes, above ``bound``."""

    value: float | None
    bound: float | None
    precision: float


@cache
def llama8b() -> Mapping[tuple[str, str, str, float], Point]:
    """Fig. 15 by trace, metric, system (our names) and rate."""
    ours_of = {theirs: ours for ours, theirs in SYSTEMS.items()}
    trace_of = {theirs: ours for ours, theirs in TRACES.items()}
    found = {}
    for row in _rows("bullet_fig_llama8b_a100_digitised.csv"):
        bound = row["bound"].lstrip("<>")
        found[trace_of[row["workload"]], row["metric"], ours_of[row["system"]], float(row["request_rate_req_s"])] = Point(
            float(row["value"]) if row["value"] else None,
            float(bound) if bound else None,
            float(row["reading_precision_abs"] or 0),
        )
    return found


@cache
def goodputs() -> Mapping[tuple[str, str], tuple[float, float]]:
    """The rate at which attainment falls to 0.9, and its precision, by trace and system (our names)."""
    ours_of = {theirs: ours for ours, theirs in SYSTEMS.items()}
    trace_of = {theirs: ours for ours, theirs in TRACES.items()}
    return {
        (
            next(ours for name, ours in trace_of.items() if row["workload"].startswith(name.partition("-")[0])),
            ours_of[row["system"]],
        ): (float(row["rate_at_90pct_SLO_attainment_req_s"]), float(row["reading_precision_abs"]))
        for row in _rows("bullet_fig_llama8b_a100_goodput90_digitised.csv")
    }


@cache
def large(panel: str) -> Mapping[tuple[str, float], Point]:
    """Normalised latency, ms a token, by system (their name) and rate, of a panel of Fig. 17 or 18."""
    return {
        (row["system"], float(row["request_rate_req_s"])): Point(
            float(row["normalized_latency_ms_per_token"]) if row["normalized_latency_ms_per_token"] else None,
            None,
            float(row["reading_precision_abs"] or 0),
        )
        for row in _rows("bullet_fig_70b_hopper_digitised.csv")
        if row["panel"] == panel
    }


def pairs_agree(ours: Mapping[str, float], theirs: Mapping[str, Point]) -> tuple[int, int]:
    """Pairs of systems that stand in the paper's order, and how many its reading tells apart.

    A marker off the axes stands above all that are on them; two off the axes are not told apart.
    """
    names = [name for name in theirs if name in ours]
    same = told = 0
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            order = _order(theirs[a], theirs[b])
            if order == 0:
                continue
            told += 1
            same += (ours[a] - ours[b]) * order > 0
    return same, told


def _order(a: Point, b: Point) -> int:
    """The sign of a - b, 0 where the readings do not tell."""
    if a.value is None and b.value is None:
        return 0
    if a.value is None:
        return 1
    if b.value is None:
        return -1
    apart = a.value - b.value
    return 0 if abs(apart) <= a.precision + b.precision else 1 if apart > 0 else -1


def _rows(name: str) -> Sequence[Mapping[str, str]]:
    with open(DATA / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
