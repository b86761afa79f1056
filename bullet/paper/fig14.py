"""Fig. 14: prompts and outputs of the three traces, as shipped (measured by those who published them). The paper's samples
and its drawn values are not published; that the figure shows lengths is our reading."""

from __future__ import annotations

import numpy as np

from bullet.config import WorkloadConfig
from bullet.paper import style
from bullet.paper.base import Drawn, Runs
from bullet.workload import load_workload

TRACES = {"sharegpt": "ShareGPT", "azure-code": "Azure-Code", "arxiv": "arXiv-Summary"}
QUANTILES = np.linspace(0, 1, 201)


def make(runs: Runs) -> Drawn:
    canvas, panels = style.canvas(style.WIDE, 2.3, 1, 2, sharey=True)
    rows = []
    for (trace, name), colour, dash in zip(TRACES.items(), style.SIZES, ("-", (0, (5, 1.5)), (0, (1.5, 1.5))), strict=False):
        workload = load_workload(WorkloadConfig(trace=trace, arrivals="constant", rate_req_per_s=1.0, num_requests=5000), 0)
        for axes, part, tokens in (
            (panels[0][0], "prompt", workload.prompt_tokens),
            (panels[0][1], "output", workload.output_tokens),
        ):
            values = np.quantile(tokens, QUANTILES)
            axes.plot(values, QUANTILES, color=colour, linestyle=dash, label=name)
            axes.set(xscale="log", xlabel=f"{part}, tokens")
            rows += [
                {"trace": trace, "part": part, "quantile": round(float(q), 4), "tokens": float(v)}
                for q, v in zip(QUANTILES, values, strict=True)
            ]
    panels[0][0].set_ylabel("share of requests")
    style.below(canvas)
    return Drawn(canvas, rows, note="5,000 requests drawn from each shipped trace, seed 0.")
