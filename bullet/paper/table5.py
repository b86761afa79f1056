"""Table 5: what a decision costs. Ours is *measured* where it is made, in CPU time of this machine; publishing between
processes and changing a mask are the paper's, which the simulator takes over (``device.publish_delay_s``,
``device.reconfigure_s``)."""

from __future__ import annotations

import statistics
import time

from bullet.config import DeviceConfig
from bullet.estimators.make import make_estimator
from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation
from bullet.paper.device import a100
from bullet.state import SplitTable

STATED_US = {"metadata, one way": 210.0, "prediction": 10.2, "SM reconfiguration": 4.1}
STATES, REPEATS = 2000, 5


def prediction_us() -> float:
    """Microseconds of CPU time that a prediction of both phases at one state takes: mean over states, median over repeats."""
    device = a100()
    splits = SplitTable.every(device.num_sms)
    model = make_estimator("srm", device=device, model=device.model, gpu=device.gpu, splits=splits, seed=0)
    found = []
    for repeat in range(REPEATS):
        started = time.process_time()
        for i in range(STATES):
            seqs, prompt, index = 1 + i % 200, 16 + i * (repeat + 1), i % splits.full
            model.prefill_at((prompt,), (seqs, 500 * seqs + i), index)
            model.decode_at(seqs, 500 * seqs + i, prompt, index)
        found.append(1e6 * (time.process_time() - started) / STATES)
    return statistics.median(found)


def make(runs: Runs) -> Drawn:
    ours = prediction_us()
    default = DeviceConfig()
    values = {
        "metadata, one way": (1e6 * default.publish_delay_s, "the paper's, taken over"),
        "prediction": (ours, "measured here"),
        "SM reconfiguration": (1e6 * default.reconfigure_s, "the paper's, taken over"),
    }
    rows = [
        {"overhead": name, "ours_us": value, "ours_source": source, "paper_mean_us": STATED_US[name]}
        for name, (value, source) in values.items()
    ]
    checks = [
        relation(
            "Table 5: a prediction costs microseconds, far below a step",
            "10.2 us",
            f"{ours:.1f} us (this machine)",
            ours < 100,
            how="under 100 us",
            cause="this machine is slow, or busy",
        )
    ]
    canvas, panels = style.canvas(style.COLUMN, 2.2)
    axes = panels[0][0]
    places = range(len(values))
    axes.barh(
        [i + 0.2 for i in places],
        [value for value, _ in values.values()],
        0.38,
        color=style.PHASES["prefill"],
        label="ours (prediction measured here, else the paper's)",
    )
    axes.barh([i - 0.2 for i in places], list(STATED_US.values()), 0.38, color=style.PHASES["decode"], label="paper")
    axes.set_yticks(places, list(values))
    axes.set(xscale="log", xlabel="us")
    style.below(canvas, 1)
    return Drawn(canvas, rows, checks)
