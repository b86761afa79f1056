"""Fig. 22: prefill on a fixed number of SMs, decode free to use all (MuxServe-like), on Azure-Code.

The paper's text and caption differ on whether more SMs help TTFT and harm TPOT; which of the two holds here is said. SMs that
both lanes hold are shared in time; who gets how much of it is *assumed*: half each, and beside it nine tenths for prefill."""

from __future__ import annotations

from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation, within
from bullet.paper.fig15 import POLICY, RATE, SHARE

FIGURES = (
    ("mean_ttft_ms", "mean TTFT, s", 1e-3),
    ("p90_ttft_ms", "P90 TTFT, s", 1e-3),
    ("mean_tpot_ms", "mean TPOT, ms", 1.0),
    ("slo_attainment_mean_length", "SLO attainment", 1.0),
)
AT = 5.0
HALF, MOST = 0.5, 0.9


def make(runs: Runs) -> Drawn:
    rates, systems = runs.values(RATE), runs.values(POLICY)
    canvas, panels = style.canvas(style.WIDE, 2.9, 1, len(FIGURES))
    rows = []
    for axes, (figure, label, factor) in zip(panels[0], FIGURES, strict=True):
        for system in systems:
            for share in shares_of(system):
                ours = [
                    runs.estimate(figure, **{POLICY: system, RATE: rate, **({} if share is None else {SHARE: share})})
                    for rate in rates
                ]
                look = style.SYSTEMS[system]
                axes.plot(
                    rates,
                    [o.mean * factor for o in ours],
                    color=look.colour,
                    linestyle=look.dash,
                    marker=look.marker,
                    alpha=0.4 if share == HALF else 1.0,
                    label=look.name if share is None else f"{look.name}, {share:g} of shared time",
                )
                rows += [
                    {"system": system, "shared_prefill_share": share, "rate_req_per_s": rate, "figure": figure, "mean": o.mean}
                    | {"half_width_95": o.half_width}
                    for rate, o in zip(rates, ours, strict=True)
                ]
        axes.set(xlabel="requests/s", title=label)
        if "TTFT" in label:
            style.log(axes)
        axes.set_xticks(rates)
    style.below(canvas, 3)

    def at(figure: str, system: str, share: float | None = None) -> float:
        return runs.mean(figure, **{POLICY: system, RATE: AT, **({} if share is None else {SHARE: share})})

    def ratio(figure: str, system: str, share: float = HALF) -> float:
        return at(figure, system, share) / at(figure, "bullet")

    chunked = min(at("mean_ttft_ms", s) for s in systems if not s.startswith("static") and s != "bullet")

    def cause(ours: float) -> str:
        return (
            f"prefill and decode share SMs half and half here (assumed); with {MOST:g} of the time for prefill it is {ours:.2f}"
        )

    numbers = (
        ("108 SMs, mean TTFT, times Bullet's", 1.20, lambda share: ratio("mean_ttft_ms", "static-108", share), 0.2),
        ("108 SMs, P90 TTFT, times Bullet's", 1.19, lambda share: ratio("p90_ttft_ms", "static-108", share), 0.2),
        ("108 SMs, attainment, of Bullet's", 0.87, lambda share: ratio("slo_attainment_mean_length", "static-108", share), 0.1),
        (
            "84 SMs, mean TTFT, times the best chunked system's",
            1.78,
            lambda share: at("mean_ttft_ms", "static-84", share) / chunked,
            0.2,
        ),
        ("84 SMs, throughput, of Bullet's", 0.941, lambda share: ratio("request_throughput", "static-84", share), 0.05),
    )
    checks = [
        within(f"Fig. 22: {name}", stated, of(HALF), room, cause=cause(of(MOST)), unit=" x") for name, stated, of, room in numbers
    ]
    ttft, tpot = ([at(figure, f"static-{p}", MOST) for p in (84, 108)] for figure in ("mean_ttft_ms", "mean_tpot_ms"))
    caption = ttft[1] < ttft[0] and tpot[1] > tpot[0]
    checks.append(
        relation(
            "Fig. 22: caption: more SMs for prefill lower TTFT and harm TPOT; text: 108 SMs have a low TPOT",
            "contradictory",
            f"{'the caption' if caption else 'the text'} holds: TTFT {ttft[0] / 1e3:.1f} to {ttft[1] / 1e3:.1f} s, TPOT "
            f"{tpot[0]:.0f} to "
            f"{tpot[1]:.0f} ms ({MOST:g} of shared time)",
            True,
            how="which of two",
        )
    )
    return Drawn(
        canvas, rows, checks, f"{runs.requests:,} requests a run, means over {runs.seeds} seeds; decode may use all 108 SMs."
    )


def shares_of(system: str) -> tuple[float | None, ...]:
    """Both assumptions of a system whose lanes share SMs."""
    return (HALF, MOST) if system.startswith("static") else (None,)
