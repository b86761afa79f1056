"""Goodput: the rate at which attainment falls to 0.9, ours in steady state (4,000 requests, warm-up and drain cut) beside
what the paper's Fig. 15 shows. Runs of 1,000 requests, which the paper's artifact sends, end before a queue has grown: they
would flatter."""

from __future__ import annotations

from collections.abc import Sequence

from bullet.paper import digitised, style
from bullet.paper.base import Check, Drawn, Runs, relation, within
from bullet.paper.fig15 import CAPACITY, POLICY, RATE, TRACE
from bullet.results import metrics
from bullet.sweeps.intervals import Estimate, interval

ATTAINED = "steady.slo_attainment_mean_length"
CAUSES = {
    "azure-code": "on the simulated A100 a 2k prompt takes 150 ms on all SMs, so that 4.42 requests/s are two thirds of the "
    "fluid bound: the "
    "paper's device or sample leaves less (docs/findings.md, section 6)",
}


def knee(runs: Runs, trace: str, policy: str) -> tuple[Estimate | None, int, int]:
    """Over the seeds whose attainment falls to 0.9 within the rates; how many those are, and of how many."""
    rows = runs.where(**{TRACE: trace, POLICY: policy})
    seeds = sorted({row["seed"] for row in rows})
    found: list[float] = []
    for seed in seeds:
        own = sorted((row[RATE], row[ATTAINED]) for row in rows if row["seed"] == seed and row.get(ATTAINED) is not None)
        value = metrics.goodput([r for r, _ in own], [a for _, a in own]) if own else None
        if value is not None and value < own[-1][0]:
            found.append(value)
    return (interval(found) if found else None), len(found), len(seeds)


def make(runs: Runs) -> Drawn:
    paper = digitised.goodputs()
    traces = runs.values(TRACE)
    canvas, panels = style.canvas(style.WIDE, 2.6, 1, len(traces))
    rows, checks = [], []
    for axes, trace in zip(panels[0], traces, strict=True):
        systems = [s for s in runs.values(POLICY) if (trace, s) in paper and runs.where(**{TRACE: trace, POLICY: s})]
        for i, system in enumerate(systems):
            ours, crossed, seeds = knee(runs, trace, system)
            theirs, precision = paper[trace, system]
            look = style.SYSTEMS[system]
            if ours is not None:
                axes.bar(
                    i - 0.2,
                    ours.mean,
                    0.36,
                    color=look.colour,
                    yerr=ours.half_width or 0,
                    error_kw={"linewidth": 0.8},
                    label="ours",
                )
            axes.bar(i + 0.2, theirs, 0.36, color="white", edgecolor=look.colour, hatch="////", label="paper")
            rows.append(
                {"trace": trace, "system": system, "ours_req_per_s": None if ours is None else ours.mean}
                | {"ours_half_width_95": None if ours is None else ours.half_width, "seeds_that_cross": crossed, "seeds": seeds}
                | {"paper_req_per_s": theirs, "paper_precision": precision}
            )
            checks.append(_check(trace, system, ours, crossed, seeds, theirs, precision, runs.values(RATE)))
        axes.set_xticks(range(len(systems)), [style.SYSTEMS[s].name.replace("-", "\n") for s in systems])
        axes.set_title(digitised.TRACES[trace])
    panels[0][0].set_ylabel("requests/s at attainment 0.9")
    note = (
        f"{runs.requests:,} requests a run, {runs.seeds} seeds, steady window; full bars ours, hatched the paper's. "
        "ShareGPT: prompts of 8,192 tokens at most."
    )
    return Drawn(canvas, rows, checks, note)


def _check(
    trace: str,
    system: str,
    ours: Estimate | None,
    crossed: int,
    seeds: int,
    paper: float,
    precision: float,
    rates: Sequence[float],
) -> Check:
    what = f"Fig. 15: {style.SYSTEMS[system].name}, {digitised.TRACES[trace]}: rate at attainment 0.9"
    cause = CAUSES.get(trace, CAPACITY)
    if ours is None or crossed < seeds:
        return relation(
            what,
            f"{paper:g} req/s",
            f"not within the rates on {seeds - crossed} of {seeds} seeds",
            False,
            how="within 20 %",
            cause=cause,
        )
    return within(what, paper, ours.mean, 0.2, ".2f", precision=precision, cause=cause, unit=" req/s")
