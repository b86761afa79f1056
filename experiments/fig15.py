"""Fig. 15 beside ours: ``python -m experiments.fig15 [--seeds 8] [--cache DIR] [--jobs N]``.

Llama-3.1-8B on one A100: mean TTFT, mean TPOT, throughput and SLO attainment at the paper's rates, ours (simulated, steady state,
the runs of experiments/conclusions.py) beside the paper's (digitised). Compare shapes, orders and ratios, at equal load: the
paper's traces' samples are not published, and its capacity lies lower than ours.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from bullet.errors import BulletError
from bullet.sweeps.cache import DEFAULT, Cache
from bullet.sweeps.pool import Pool
from experiments.conclusions import REQUESTS, collect, mean
from experiments.questions import QUESTIONS

PAPER = Path(__file__).parent / "data" / "bullet_fig_llama8b_a100_digitised.csv"
# The paper's rows for chunked systems are its hybrid batches; the engine's own default stands in docs/findings.md.
SYSTEMS = {"bullet": "Bullet", "vllm-1024": "vLLM", "sglang-1024-mixed": "SGLang-1024", "sglang-2048-mixed": "SGLang-2048"}
TRACES = {"sharegpt": "ShareGPT", "azure-code": "Azure", "arxiv": "arXiv"}
METRICS = {"mean_TTFT_s": ("TTFT", -1), "mean_TPOT_ms": ("TPOT", -1), "throughput_req_s": ("req/s", 1),
           "SLO_attainment": ("att", 1)}
"""The paper's metric: our figure, and whether more (1) or less (-1) is better."""


def paper_values() -> dict[tuple[str, str, str, float], float]:
    """By workload, system, metric and rate; markers that leave the axes are not there."""
    values = {}
    with open(PAPER, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["value"]:
                key = row["workload"], row["system"], row["metric"], float(row["request_rate_req_s"])
                values[key] = float(row["value"])
    return values


def same_order(ours: dict[str, float], theirs: dict[str, float]) -> tuple[int, int]:
    """Of all pairs of systems, how many stand in the same order in both (ties count); and how many pairs there are."""
    names = list(theirs)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1:]]
    return sum((ours[a] - ours[b]) * (theirs[a] - theirs[b]) >= 0 for a, b in pairs), len(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=REQUESTS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=None)
    args = parser.parse_args()
    question = QUESTIONS["fig15"]
    pool = Pool(Cache(args.cache), args.jobs)
    found = collect({"fig15": question}, args.seeds, args.num_requests, pool, read=False)["fig15"]
    paper = paper_values()
    print(f"ours: simulated, A100-80GB fitted device, {args.num_requests} requests, {args.seeds} seeds | paper: digitised")
    agreed = {metric: [0, 0] for metric in METRICS}
    for workload, runs in found.items():
        trace, rate = workload.split()
        theirs = next((w for w, *_ in paper if trace in TRACES and w.startswith(TRACES[trace])), None)
        if theirs is None:
            continue
        print(f"\n{workload} req/s")
        for system, name in SYSTEMS.items():
            parts = []
            for metric, (figure, _) in METRICS.items():
                there = paper.get((theirs, name, metric, float(rate)))
                parts.append(f"{metric} {mean(runs[system], figure):8.3f} | {'-' if there is None else format(there, '.3f'):>7}")
            print(f"  {system:<18} " + "   ".join(parts))
        for metric, (figure, sign) in METRICS.items():
            known = {s: sign * paper[key] for s, name in SYSTEMS.items() if (key := (theirs, name, metric, float(rate))) in paper}
            same, pairs = same_order({s: sign * mean(runs[s], figure) for s in known}, known)
            agreed[metric][0] += same
            agreed[metric][1] += pairs
    print("\npairs of systems in the paper's order: "
          + ", ".join(f"{metric} {same} of {pairs}" for metric, (same, pairs) in agreed.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"fig15: {exc}")
