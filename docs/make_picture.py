"""README's picture, docs/sharing.png: ``python docs/make_picture.py`` draws it anew.

Two schedulers, the same requests, the same seconds of a simulated run: who holds which SMs, step by step. Every rectangle is a
row of steps.parquet, from its start to its end and over the SMs that it was launched with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bullet import Run, compare
from bullet.results.plots import COLOURS, save

OUT = Path(__file__).parent / "sharing.png"
LOAD = {"workload.trace": "sharegpt", "workload.rate_req_per_s": 12, "workload.num_requests": 400,
        "workload.max_prompt_tokens": 8000}
SYSTEMS = {"vllm-1024": "lock-step batches (vLLM's scheduler)", "bullet": "Bullet: both phases at once, the split moves"}
BEGIN_S, LENGTH_S = 20.0, 1.2
SHARED = "#AF6930"
"""What decode's colour over prefill's comes to."""
KINDS = (("prefill", COLOURS[0]), ("both in one batch", COLOURS[3]), ("decode", COLOURS[1]))


def blocks(run: Run) -> dict[str, list[tuple[tuple[float, float], ...]]]:
    """Corners of each step's rectangle in the window, by what it does; decode of two lanes hangs from the top."""
    steps, num_sms = run.step_table, int(run.summary["num_sms"])
    found: dict[str, list[tuple[tuple[float, float], ...]]] = {name: [] for name, _ in KINDS}
    inside = (steps["end_s"] > BEGIN_S) & (steps["start_s"] < BEGIN_S + LENGTH_S)
    for i in np.flatnonzero(inside):
        prompts, decodes, sms = (int(steps[name][i]) for name in ("prefill_tokens", "decode_seqs", "sms"))
        kind = KINDS[(1 if decodes else 0) if prompts else 2][0]
        low, high = (num_sms - sms, num_sms) if steps["lane"][i] == "decode" else (0, sms)
        a, b = (1e3 * (float(steps[name][i]) - BEGIN_S) for name in ("start_s", "end_s"))
        found[kind].append(((a, low), (a, high), (b, high), (b, low)))
    return found


def draw() -> Figure:
    """The figure; its text is large, for it is read at 390 pixels too."""
    runs = compare(LOAD, list(SYSTEMS))
    figure = Figure(figsize=(9, 4.4), dpi=142, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, run, title in zip(figure.subplots(2, 1, sharex=True), runs, SYSTEMS.values(), strict=True):
        for name, colour in KINDS:
            axes.add_collection(PolyCollection(blocks(run)[name], facecolors=colour, edgecolors="white", linewidths=0.5,
                                               alpha=0.8))
        axes.set_xlim(0, 1e3 * LENGTH_S)
        axes.set_ylim(0, run.summary["num_sms"])
        axes.set_yticks([0, 54, 108])
        axes.set_title(title, fontsize=17, loc="left")
        axes.set_ylabel("SMs", fontsize=16)
        axes.tick_params(labelsize=14)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms, simulated: Llama-3.1-8B on an A100, ShareGPT at 12 req/s", fontsize=16)
    handles = [Patch(color=colour, alpha=0.8, label=name) for name, colour in KINDS]
    figure.legend(handles=[*handles, Patch(color=SHARED, label="SMs shared")], loc="outside lower center", ncols=4, fontsize=16,
                  frameon=False, columnspacing=1.0, handlelength=1.0, handletextpad=0.4)
    return figure


if __name__ == "__main__":
    save(draw(), OUT)
