"""Microseconds a prediction takes, by hand: ``python benchmarks/prediction.py [--gpu h100] [--runs 5]``.

A state is a decode batch beside a prefill on one split: two predictions, one of each phase. States come as a scheduler asks
for them: the decode batch grows a token a sequence each time, a prompt is asked for 18 times (eight launches of four layers,
ten decode iterations), then a new one comes. Also given: every prompt and batch new, which no cache helps. Each figure is
CPU time, the mean over states, the median over runs. The paper's predictor takes 10.2 us a prediction (Table 5, its machine).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from bullet.catalog.gpus import GPUS
from bullet.config import DeviceConfig
from bullet.devices.load import load_device
from bullet.estimators.base import Estimator
from bullet.estimators.make import make_estimator
from bullet.state import SplitTable

STATES = 20_000
ASKED = 18
"""Predictions a prompt: eight launches of four layers and ten decode iterations."""
State = tuple[int, int, int, int]
"""(prompt tokens, sequences, context tokens, index of the split)."""


def served(rng: np.random.Generator, splits: SplitTable) -> list[State]:
    """States in the order in which serving meets them."""
    states: list[State] = []
    seqs, context = 40, 40 * 500
    while len(states) < STATES:
        prompt = int(np.clip(rng.lognormal(6.6, 0.8), 16, 8000))  # about a thousand tokens, as azure-conv
        for _ in range(ASKED):
            states.append((prompt, seqs, context, int(rng.integers(splits.full))))
            context += seqs
        seqs = int(np.clip(seqs + rng.integers(-3, 4), 1, 256))
        context = seqs * 500
    return states[:STATES]


def unseen(rng: np.random.Generator, splits: SplitTable) -> list[State]:
    """Every state with a prompt and a batch of its own, as far as integers last."""
    prompts = rng.permutation(np.arange(16, 16 + STATES))
    return [(int(p), 1 + i % 512, 500 * (1 + i % 512) + i, int(rng.integers(splits.full))) for i, p in enumerate(prompts)]


def mean_us(ask: Callable[[State], object], states: list[State]) -> float:
    """One pass, in the order given."""
    started = time.process_time()
    for state in states:
        ask(state)
    return 1e6 * (time.process_time() - started) / len(states)


def questions(estimator: Estimator) -> dict[str, Callable[[State], object]]:
    """What is timed."""
    def one(state: State) -> float:
        prompt, seqs, context, index = state
        return (estimator.prefill_at((prompt,), (seqs, context), index)
                + estimator.decode_at(seqs, context, prompt, index))

    def every(state: State) -> object:
        prompt, seqs, context, _ = state
        return (estimator.prefill_seconds((prompt,), (seqs, context)), estimator.decode_seconds(seqs, context, prompt))

    return {"one state (both phases)": one, "all partitions (both phases)": every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    device = load_device(DeviceConfig(gpu=args.gpu))
    splits = SplitTable.every(device.num_sms)
    print(f"{args.gpu}, {splits.full} partitions, llama-3.1-8b; us, mean over {STATES} states, median of {args.runs} runs")
    for name in ("srm", "srm-blind"):
        for label, make in (("as served", served), ("every state new", unseen)):
            found: dict[str, list[float]] = {}
            for run in range(args.runs):
                states = make(np.random.default_rng(run), splits)
                fresh = {what: make_estimator(name, device=device, model=device.model, gpu=device.gpu, splits=splits, seed=0)
                         for what in ("one state (both phases)", "all partitions (both phases)")}
                for what, estimator in fresh.items():  # a fresh one each: no figure warms another's cache
                    found.setdefault(what, []).append(mean_us(questions(estimator)[what], states))
            for what, values in found.items():
                print(f"{name:<10} {label:<16} {what:<30} {statistics.median(values):7.2f}")


if __name__ == "__main__":
    main()
