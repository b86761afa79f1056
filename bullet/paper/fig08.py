"""Fig. 8: operations a second grow with the SMs, bandwidth saturates early. The fitted device's curves beside eq. 1's two
lines, whose knee N_d is the paper's."""

from __future__ import annotations

from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation, within
from bullet.paper.device import a100

WHOLE = 0.95
"""Share of all bandwidth at which it counts as saturated."""
STATED_SMS = 30
TOKENS = 16384


def make(runs: Runs) -> Drawn:
    device = a100()
    n = device.num_sms
    sms = list(range(2, n + 1, 2))
    work = device.prefill_work([(TOKENS, 0)], device.model.num_layers, logits_seqs=0)
    whole_s = device.solo_seconds(work, n)
    compute = [whole_s / device.solo_seconds(work, p) for p in sms]
    bandwidth = [device.bandwidth_share(p) / device.bandwidth_share(n) for p in sms]
    knee = device.gpu.knee_sms
    rows = [
        {"sms": p, "compute_share": c, "bandwidth_share": b, "eq1_compute_share": p / n, "eq1_bandwidth_share": min(1, p / knee)}
        for p, c, b in zip(sms, compute, bandwidth, strict=True)
    ]
    saturated = next(p for p, b in zip(sms, bandwidth, strict=True) if b >= WHOLE)
    at_knee = device.bandwidth_share(STATED_SMS) / device.bandwidth_share(n)
    checks = [
        within(
            f"Fig. 8: SMs that draw {WHOLE:.0%} of the bandwidth",
            STATED_SMS,
            saturated,
            0.1,
            ".0f",
            cause="MuxServe's decode steps on an A100, to which the curve is fitted, have a soft knee: whole steps, not a copy "
            "kernel, and MPS shares, not masks",
        ),
        relation(
            f"Fig. 8: bandwidth on {STATED_SMS} SMs is nearly whole",
            "about 1",
            f"{at_knee:.2f}",
            at_knee >= 0.9,
            near=at_knee >= 0.7,
            how="0.9 or more",
            cause="as above",
        ),
    ]
    canvas, panels = style.canvas(style.COLUMN, 3.0)
    axes = panels[0][0]
    axes.plot(sms, compute, color=style.PHASES["prefill"], label="prefill of 16k tokens, ours")
    axes.plot(sms, bandwidth, color=style.SIZES[2], linestyle=(0, (5, 1.5)), label="bandwidth, ours")
    axes.plot(sms, [p / n for p in sms], color="0.5", linestyle=":", label="eq. 1: compute")
    axes.plot(
        sms, [min(1, p / knee) for p in sms], color="0.5", linestyle=(0, (3, 1, 1, 1)), label=f"eq. 1: bandwidth, N_d = {knee}"
    )
    axes.set(xlabel="SMs", ylabel="share of that on all SMs", ylim=(0, 1.05), xlim=(0, n))
    style.below(canvas, 1)
    return Drawn(canvas, rows, checks)
