"""Simulated against measured: recorded runs of vLLM 0.19.0 on two cards, replayed from the kernel tables of the same publisher
alone, nothing fitted. Not in the paper; it says how far a simulation of ours can be believed."""

from __future__ import annotations

import numpy as np

from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation
from bullet.validation.comparison import errors, mean_absolute
from bullet.validation.recorded import load_recorded
from bullet.validation.replay import Scenario, replay

CARDS = {"rtx4090": "RTX 4090", "rtxpro6000": "RTX PRO 6000"}
PANELS = (("ttft", "TTFT, s", 1.0), ("tpot", "TPOT, ms", 1e3), ("latency", "latency, s", 1.0))


def make(runs: Runs) -> Drawn:
    canvas, panels = style.canvas(style.WIDE, 4.2, len(CARDS), len(PANELS), sharey=True)
    rows, checks = [], []
    for line, (card, name) in zip(panels, CARDS.items(), strict=True):
        recorded = load_recorded(card)
        ours = replay(recorded, Scenario())
        off = errors(ours.statistics(), recorded.statistics())
        rows += [
            {
                "card": card,
                "statistic": statistic,
                "measured_s": recorded.statistics()[statistic],
                "simulated_s": ours.statistics()[statistic],
                "error": value,
            }
            for statistic, value in off.items()
        ]
        size = mean_absolute(off)
        checks.append(
            relation(
                f"Recorded run, {name}: mean absolute error of 15 statistics",
                "-",
                f"{size:.1%}",
                size <= 0.02,
                near=size <= 0.08,
                how="2 %",
                cause="steps with a prompt are 5 % short: host time and launches that no table has (docs/validation.md)",
            )
        )
        sides = (
            ("measured", recorded.per_request(), "black", "-"),
            ("simulated", ours.per_request(), style.SIZES[2], (0, (3, 1.5))),
        )
        for axes, (metric, label, factor) in zip(line, PANELS, strict=True):
            for side, values, colour, dash in sides:
                ordered = np.sort(values[metric]) * factor
                axes.step(
                    ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=colour, linestyle=dash, label=side
                )
            axes.set(xlabel=label, title=name if metric == "ttft" else "")
        line[0].set_ylabel("share of requests")
    style.below(canvas)
    return Drawn(
        canvas,
        rows,
        checks,
        "Kernel tables alone, one replay a card with the arrivals as sent; which errors cancel in it: docs/validation.md.",
    )
