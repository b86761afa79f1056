"""What Fig. 17 and 18 share: normalised latency of large models on eight GPUs against the rate, ours beside the paper's
markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bullet.paper import digitised, style
from bullet.paper.base import Check, Drawn, Runs, relation, within
from bullet.paper.fig15 import RATE

THEIRS = {"bullet": "Bullet", "vllm-2048": "vLLM", "sglang-2048-mixed": "SGLang"}
FIGURE = "mean_normalized_latency_ms"


class Panel(NamedTuple):
    """One of the paper's, and where our runs of it are."""

    name: str
    title: str
    places: dict[str, Any]
    cause: str


def draw(runs: Runs, panels: Sequence[Panel], figure: str, note: str) -> Drawn:
    canvas, grid = style.canvas(style.WIDE, 2.8, 1, len(panels))
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for axes, panel in zip(grid[0], panels, strict=True):
        paper = digitised.large(panel.name)
        rates = sorted({row[RATE] for row in runs.where(**panel.places)})
        means: dict[tuple[str, float], float] = {}
        for system, theirs in THEIRS.items():
            ours = [runs.estimate(FIGURE, policy__name=system, workload__rate_req_per_s=rate, **panel.places) for rate in rates]
            style.curve(axes, system, rates, [o.mean for o in ours], [o.half_width for o in ours])
            marks = sorted((rate, p.value) for (s, rate), p in paper.items() if s == theirs and p.value is not None)
            style.points(axes, system, [r for r, _ in marks], [v for _, v in marks])
            for rate, o in zip(rates, ours, strict=True):
                means[system, rate] = o.mean
                there = paper.get((theirs, rate))
                rows.append(
                    {
                        "panel": panel.name,
                        "system": system,
                        "rate_req_per_s": rate,
                        "ours_ms_per_token": o.mean,
                        "ours_half_width_95": o.half_width,
                        "paper_ms_per_token": None if there is None else there.value,
                    }
                )
        axes.set(title=panel.title, xlabel="requests/s")
        style.log(axes)
        same = told = 0
        for rate in rates:
            marked = {s: paper[name, rate] for s, name in THEIRS.items() if (name, rate) in paper}
            agreed, pairs = digitised.pairs_agree({s: means[s, rate] for s in marked}, marked)
            same, told = same + agreed, told + pairs
        share = same / told if told else 1.0
        checks.append(
            relation(
                f"{figure}: {panel.title}: pairs of systems in the paper's order",
                f"{told} pairs",
                f"{same} of {told}",
                share >= 0.8,
                near=share >= 0.6,
                how="80 %",
                cause=panel.cause,
            )
        )
        least = rates[0]
        value = paper.get(("Bullet", least))
        if value is not None and value.value is not None:
            checks.append(
                within(
                    f"{figure}: {panel.title}: Bullet at {least:g} requests/s, ms a token",
                    value.value,
                    means["bullet", least],
                    0.2,
                    ".0f",
                    precision=value.precision,
                    cause=panel.cause,
                )
            )
    grid[0][0].set_ylabel("normalised latency, ms a token")
    style.below(canvas, 3)
    return Drawn(canvas, rows, checks, note)
