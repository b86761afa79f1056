"""Fig. 21: ShareGPT at 20 requests/s: how the SMs' time is spent, and latency end to end. Ours counts SMs that hold a step;
the paper's counters count active cycles, so that waves' idle SMs are in ours and not in its."""

from __future__ import annotations

from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation, within
from bullet.paper.fig15 import POLICY

NAMES = {"shared": "both at once on shared SMs"}
PARTS = {"prefill_only": "prefill", "decode_only": "decode", "hybrid": "hybrid", "shared": "shared", "idle": "idle"}


def make(runs: Runs) -> Drawn:
    systems = runs.values(POLICY)
    share = {system: {part: runs.mean(f"sm_share.{part}", policy__name=system) for part in PARTS} for system in systems}
    rows = [
        {"system": system, "part": part, "share_of_sm_time": value}
        for system, parts in share.items()
        for part, value in parts.items()
    ]
    canvas, panels = style.canvas(style.WIDE, 2.2, 1, 2)
    axes = panels[0][0]
    for i, system in enumerate(systems):
        left = 0.0
        for part, phase in PARTS.items():
            axes.barh(i, share[system][part], left=left, color=style.PHASES[phase], label=NAMES.get(phase, phase))
            left += share[system][part]
    axes.set_yticks(range(len(systems)), [style.SYSTEMS[s].name for s in systems])
    axes.set(xlabel="share of all SMs' time", xlim=(0, 1))
    e2e = {system: runs.mean("mean_e2el_ms", policy__name=system) / 1e3 for system in systems}
    for i, system in enumerate(systems):
        panels[0][1].barh(i, e2e[system], color=style.SYSTEMS[system].colour)
    panels[0][1].set_yticks(range(len(systems)), [""] * len(systems))
    panels[0][1].set(xlabel="mean latency end to end, s")
    style.below(canvas)
    active = 100 * (1 - share["bullet"]["idle"])
    more = active - 100 * (1 - share["sglang-1024-mixed"]["idle"])
    checks = [
        within(
            "Fig. 21: Bullet's active SMs",
            86.2,
            active,
            0.1,
            ".1f",
            unit=" %",
            cause="ours counts SMs that hold a step, idle ones in a wave included",
        ),
        relation(
            "Fig. 21: more active than SGLang, points",
            "+11.2",
            f"{more:+.1f}",
            more > 5,
            near=more > -1,
            how="over 5 points",
            cause="a lock-step batch holds all SMs as long as it runs, whatever it uses of them: held is not active",
        ),
        within(
            "Fig. 21: mean latency end to end, SGLang-1024 to Bullet",
            25.8 / 21.4,
            e2e["sglang-1024-mixed"] / e2e["bullet"],
            0.1,
            cause="Bullet gives prefill the SMs and lets TPOT rise to its objective; the paper's SGLang at this rate is past "
            "its capacity, "
            "ours is not",
            unit=" x",
        ),
    ]
    return Drawn(canvas, rows, checks, f"{runs.requests:,} requests a run, means over {runs.seeds} seeds.")
