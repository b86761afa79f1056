"""Fig. 16: medians and 90th percentiles of TTFT and TPOT on ShareGPT. The paper's bars are not at hand as numbers; its text
has Bullet's TTFT at 20 requests/s."""

from __future__ import annotations

from bullet.paper import style
from bullet.paper.base import Drawn, Runs, within
from bullet.paper.fig15 import POLICY, RATE

FIGURES = (("ttft", "TTFT, s", 1e-3), ("tpot", "TPOT, ms", 1.0))
STATED_S = {"mean": 0.16, "p90": 0.31}


def make(runs: Runs) -> Drawn:
    rates, systems = runs.values(RATE), runs.values(POLICY)
    canvas, panels = style.canvas(style.WIDE, 2.6, 1, 2)
    rows = []
    width = 0.8 / len(systems)
    for axes, (name, label, factor) in zip(panels[0], FIGURES, strict=True):
        for j, system in enumerate(systems):
            at = [i + width * (j + 0.5) - 0.4 for i in range(len(rates))]
            median, high = (
                [runs.mean(f"{part}_{name}_ms", policy__name=system, workload__rate_req_per_s=rate) * factor for rate in rates]
                for part in ("median", "p90")
            )
            look = style.SYSTEMS[system]
            axes.bar(at, median, width * 0.92, color=look.colour, label=look.name)
            axes.plot(at, high, linestyle="none", marker="_", markersize=7, color="black")
            rows += [
                {"metric": name, "system": system, "rate_req_per_s": rate, "median": m, "p90": h, "unit": label.split(", ")[1]}
                for rate, m, h in zip(rates, median, high, strict=True)
            ]
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set(xlabel="requests/s", ylabel=label)
        style.log(axes)
    style.below(canvas, 4)
    where = {"policy__name": "bullet", "workload__rate_req_per_s": 20}
    checks = [
        within(
            f"Section 4: Bullet's {part} TTFT, ShareGPT at 20 requests/s",
            value,
            runs.mean(f"{part}_ttft_ms", **where) / 1e3,
            0.2,
            cause="not known; a sample with longer prompts blocks the queue (docs/findings.md, section 1: with and without)",
            unit=" s",
        )
        for part, value in STATED_S.items()
    ]
    return Drawn(
        canvas,
        rows,
        checks,
        f"Bars: medians, ticks: P90. {runs.requests:,} requests a run, means over {runs.seeds} seeds; prompts of 8,192 tokens "
        f"at most.",
    )
