"""Fig. 20: Azure-Code at 5 requests/s in time: prefill's SMs and the waiting requests under Bullet, SGLang-2048's beside it."""

from __future__ import annotations

import numpy as np

from bullet.api import simulate
from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation, within
from bullet.paper.fig15 import CAPACITY, POLICY, RATE
from bullet.state import PREFILL

SYSTEMS = ("bullet", "sglang-2048-mixed")
SHOWN_S = (20.0, 60.0)
AT, LATER = 5.0, (6.0, 6.5)
"""The paper's rate, and two nearer to what the simulated device can serve."""
RATIOS = (("time in the queue", "mean_queue_ms", 4.17), ("mean TTFT", "mean_ttft_ms", 9.15), ("mean TPOT", "mean_tpot_ms", 1.33))


def make(runs: Runs) -> Drawn:
    canvas, panels = style.canvas(style.WIDE, 3.6, 2, 1, sharex=True)
    top, bottom = panels[0][0], panels[1][0]
    rows, sms_seen = [], np.empty(0)
    for system in SYSTEMS:
        run = simulate(
            {
                "policy.name": system,
                "workload.trace": "azure-code",
                "workload.rate_req_per_s": 5.0,
                "workload.num_requests": 400,
                "seed": 0,
            }
        )
        look = style.SYSTEMS[system]
        steps, requests = run.step_table, run.request_table
        if system == "bullet":
            prefill = np.array([kind == PREFILL for kind in steps["kind"]])
            start, sms = steps["start_s"][prefill], steps["sms"][prefill]
            beside = sms < run.summary["num_sms"]
            sms_seen = sms[beside]
            top.step(start, sms, where="post", color=look.colour, linewidth=0.7)
            rows += [
                {"series": "prefill_sms", "system": system, "time_s": float(t), "value": int(n)}
                for t, n in zip(start, sms, strict=True)
                if SHOWN_S[0] <= t < SHOWN_S[1]
            ]
        arrived, admitted = requests["arrival_s"], requests["admitted_s"]
        times = np.arange(*SHOWN_S, 0.05)
        waiting = np.searchsorted(np.sort(arrived), times, "right") - np.searchsorted(np.sort(admitted), times, "right")
        bottom.step(times, waiting, where="post", color=look.colour, linestyle=look.dash, label=look.name)
        rows += [
            {"series": "waiting", "system": system, "time_s": round(float(t), 3), "value": int(n)}
            for t, n in zip(times, waiting, strict=True)
        ]
    top.axhspan(84, 108, color=style.PHASES["idle"], zorder=0, label="paper: swings between 84 and 108")
    top.set(ylabel="prefill's SMs, Bullet", ylim=(0, 112), xlim=SHOWN_S)
    bottom.set(ylabel="requests waiting", xlabel="time, s")
    style.below(canvas)

    def ratio(figure: str, rate: float = AT) -> float:
        other, bullet = (runs.mean(figure, **{POLICY: system, RATE: rate}) for system in (SYSTEMS[1], SYSTEMS[0]))
        return other / bullet

    low, high = (int(np.quantile(sms_seen, q)) for q in (0.05, 0.95)) if len(sms_seen) else (0, 0)
    checks = [
        relation(
            "Fig. 20: prefill's SMs beside decode",
            "84 to 108",
            f"{low} to {high} (5th to 95th percentile)",
            low >= 80,
            near=low >= 60,
            how="84 or more",
            cause="ours moves in steps of 2 SMs and decode keeps as few as it needs, so prefill holds more",
        ),
        *(
            within(
                f"Fig. 20: SGLang-2048's {name}, times Bullet's",
                stated,
                ratio(figure),
                0.2,
                cause=f"load: with the same requests at "
                f"{', '.join(f'{rate:g} requests/s it is {ratio(figure, rate):.2f}' for rate in LATER)}. " + CAPACITY,
                unit=" x",
            )
            for name, figure, stated in RATIOS
        ),
    ]
    return Drawn(
        canvas,
        rows,
        checks,
        f"The timeline is one run (seed 0, 400 requests); ratios are means over {runs.seeds} seeds of {runs.requests:,}.",
    )
