"""Fig. 17: Llama-3.1-70B, tensor parallel on 8 x A100 with the paper's 20 GB/s between GPUs (its Table 3), chunks of 2,048."""

from __future__ import annotations

from bullet.paper.base import Drawn, Runs
from bullet.paper.large import Panel, draw

CAUSE = (
    "the all-reduce over 20 GB/s rules: its efficiency is that of NVLink rows (assumed here), and the paper's samples are not "
    "published"
)


def make(runs: Runs) -> Drawn:
    return draw(
        runs,
        [
            Panel("Llama3.1-70B_8xA100(A800)_ShareGPT", "ShareGPT", {"workload__trace": "sharegpt"}, CAUSE),
            Panel("Llama3.1-70B_8xA100(A800)_Azure-Code", "Azure-Code", {"workload__trace": "azure-code"}, CAUSE),
        ],
        "Fig. 17",
        f"{runs.requests:,} requests a run, {runs.seeds} seeds; a link of 20 GB/s, one way, as the paper states it.",
    )
