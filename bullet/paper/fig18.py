"""Fig. 18: Llama-3.1-70B on 8 x H100 and Qwen3-235B-A22B in FP8 on 8 x H20, tensor parallel. The paper calls the trace
Splitwise: azure-conv of the same publication is our reading."""

from __future__ import annotations

from bullet.paper.base import Drawn, Runs
from bullet.paper.large import Panel, draw


def make(runs: Runs) -> Drawn:
    return draw(
        runs,
        [
            Panel(
                "Llama3.1-70B_8xH100_Splitwise",
                "70B, 8 x H100",
                {"device__model": "llama-3.1-70b"},
                "which of the publication's traces, and which sample, is not given; ours is below its capacity at these rates",
            ),
            Panel(
                "Qwen3-235B-A22B_8xH20_Splitwise",
                "Qwen3-235B, 8 x H20",
                {"device__model": "qwen3-235b-a22b-fp8"},
                "experts' kernels are priced from dense GEMMs (no table of this model's); the trace as on the left",
            ),
        ],
        "Fig. 18",
        f"{runs.requests:,} requests a run, {runs.seeds} seeds. 3P1D, which the paper has beside them, is a cluster: not in "
        f"this figure.",
    )
