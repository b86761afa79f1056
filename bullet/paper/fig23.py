"""Fig. 23: parts of Bullet on Azure-Code and arXiv: naive (both lanes on all SMs, no scheduler), with the partition alone,
with the scheduler alone, all. Where both lanes hold all SMs it is *assumed* who gets their time: half each, and beside it
nine tenths for prefill."""

from __future__ import annotations

from bullet.paper import style
from bullet.paper.base import Check, Drawn, Runs, relation
from bullet.paper.digitised import TRACES
from bullet.paper.fig15 import POLICY, RATE, SHARE, TRACE
from bullet.paper.fig22 import HALF, MOST

FIGURES = (
    ("mean_ttft_ms", "mean TTFT, s", 1e-3),
    ("mean_tpot_ms", "mean TPOT, ms", 1.0),
    ("slo_attainment_mean_length", "SLO attainment", 1.0),
)
BARS = (
    ("bullet", HALF),
    ("bullet-partition", HALF),
    ("bullet-scheduler", HALF),
    ("naive", HALF),
    ("bullet-scheduler", MOST),
    ("naive", MOST),
)


def make(runs: Runs) -> Drawn:
    canvas, panels = style.canvas(style.WIDE, 4.2, len(runs.values(TRACE)), len(FIGURES))
    rows: list[dict[str, object]] = []
    checks: list[Check] = []
    for line, trace in zip(panels, runs.values(TRACE), strict=True):
        rates = sorted({row[RATE] for row in runs.where(**{TRACE: trace})})
        for axes, (figure, label, factor) in zip(line, FIGURES, strict=True):
            for j, (system, share) in enumerate(BARS):
                ours = [runs.estimate(figure, **{TRACE: trace, POLICY: system, RATE: rate, SHARE: share}) for rate in rates]
                look = style.SYSTEMS[system]
                axes.bar(
                    [i + 0.14 * j - 0.35 for i in range(len(rates))],
                    [o.mean * factor for o in ours],
                    0.13,
                    color=look.colour if share == HALF else "white",
                    edgecolor=look.colour,
                    hatch="" if share == HALF else "////",
                    label=look.name if share == HALF else f"{look.name}, {MOST:g} of shared time to prefill",
                    yerr=[(o.half_width or 0) * factor for o in ours],
                    error_kw={"linewidth": 0.8},
                )
                rows += [
                    {"trace": trace, "system": system, "shared_prefill_share": share, "rate_req_per_s": rate, "figure": figure}
                    | {"mean": o.mean, "half_width_95": o.half_width}
                    for rate, o in zip(rates, ours, strict=True)
                ]
            axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
            axes.set(title=f"{TRACES[trace]}: {label}", xlabel="requests/s")
            if "TTFT" in label:
                style.log(axes)
            else:
                axes.set_ylim(0, 1.05 if "SLO" in label else None)
        checks += _checks(runs, trace, rates[-1])
    style.below(canvas, 3)
    note = (
        f"{runs.requests:,} requests a run, {runs.seeds} seeds. The paper gives no rates for this figure: ours are near Bullet's "
        "capacity."
    )
    return Drawn(canvas, rows, checks, note)


def _checks(runs: Runs, trace: str, rate: float) -> list[Check]:
    def of(figure: str, share: float) -> dict[str, float]:
        return {
            system: runs.mean(figure, **{TRACE: trace, POLICY: system, RATE: rate, SHARE: share})
            for system in runs.values(POLICY)
        }

    checks = []
    for what, paper, figure, form, factor, holds in (
        ("naive has a higher TPOT than all of Bullet", "higher", "mean_tpot_ms", ".0f", 1.0, lambda v: v["naive"] > v["bullet"]),
        (
            "the partition alone betters naive's TPOT",
            "lower",
            "mean_tpot_ms",
            ".0f",
            1.0,
            lambda v: v["bullet-partition"] < v["naive"],
        ),
        (
            "the partition alone has a worse TTFT than all of Bullet",
            "higher",
            "mean_ttft_ms",
            ".2f",
            1e-3,
            lambda v: v["bullet-partition"] > v["bullet"],
        ),
        (
            "all of Bullet has the best attainment, to 0.005",
            "best",
            "slo_attainment_mean_length",
            ".3f",
            1.0,
            lambda v: v["bullet"] >= max(v.values()) - 0.005,
        ),
    ):
        said = {}
        for share in (HALF, MOST):
            values = of(figure, share)
            said[share] = holds(values), ", ".join(f"{style.SYSTEMS[s].name} {v * factor:{form}}" for s, v in values.items())
        (met, ours), (also, other) = said[HALF], said[MOST]
        checks.append(
            relation(
                f"Fig. 23: {TRACES[trace]} at {rate:g}: {what}",
                paper,
                ours,
                met,
                near=also,
                cause=f"who gets shared SMs is assumed, half each; with {MOST:g} for prefill it "
                f"{'holds' if also else 'does not hold either'}: {other}",
            )
        )
    return checks
