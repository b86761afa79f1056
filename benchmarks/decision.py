"""Microseconds per decision of ``bullet``, by hand: ``python benchmarks/decision.py [--policy bullet] [--runs 5]``.

Llama-3.1-8B on the modelled A100, estimator ``srm``; 60 decodes run. For each queue length one cycle, as a prompt of
32 layers gives at L_step = 4: a pop, seven more prefill launches, ten decode iterations; a request arrives each cycle.
Time passes as predicted. Each figure is the median over runs of the mean over cycles; transitions are not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import DeviceConfig
from bullet.devices.load import load_device
from bullet.estimators.make import make_estimator
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.state import (
    DECODE,
    PREFILL,
    DecodeStep,
    KvCache,
    Partition,
    PrefillStep,
    Request,
    SplitTable,
    SystemState,
)

DECODES = 60
CYCLES = 60
WARM_UP = 10


class Bench:
    """One state and one policy; keeps the queue's length and the batch's size, and adds up decision times by kind."""

    def __init__(self, policy: str, queued: int, late: bool) -> None:
        device = load_device(DeviceConfig())
        self.splits = SplitTable.every(device.num_sms)
        estimator = make_estimator("srm", device=device, model=device.model, gpu=device.gpu, splits=self.splits, seed=0)
        self.policy = make_policy(policy, PolicyContext(get_model("llama-3.1-8b"), get_gpu("a100-80gb"), self.splits,
                                                        0.15, estimator, {}))
        n = self.splits.num_sms
        self.state = SystemState(self.splits, KvCache(28_000), device.model.num_layers, Partition(n, n))
        self.rng = np.random.default_rng(0)
        self.now_s, self.number = 100.0, 0
        self.spent: dict[str, list[float]] = {"pop": [], PREFILL: [], DECODE: []}
        self.slo_s = 1.0 if late else 1e4
        for _ in range(DECODES):
            request = self.arrive()
            self.state.begin_prefill(PrefillStep(n, 32, (request.id,)), self.now_s)
            self.state.finish_prefill(self.now_s)
        self.state.begin_decode(DecodeStep(n), self.now_s)
        self.state.finish_decode(())
        for _ in range(queued):
            self.arrive()
        self.now_s += 5.0 if late else 0.05

    def arrive(self) -> Request:
        """Lengths as in azure-conv: log-normal about a thousand tokens."""
        prompt = int(np.clip(self.rng.lognormal(6.6, 0.8), 16, 8000))
        request = Request(self.number, self.now_s, prompt, self.slo_s)
        self.number += 1
        self.state.arrive(request)
        return request

    def ask(self, lane: str, kind: str) -> PrefillStep | DecodeStep:
        """One timed decision; a delayed decode is launched on N instead, as if the delay had passed."""
        started = time.perf_counter()
        step = self.policy.next_step(lane, self.state, self.now_s)
        self.spent[kind].append(time.perf_counter() - started)
        if step.target is not None:
            self.state.target = step.target
        if step.published is not None:
            setattr(self.state, f"{lane}_published", step.published)
        if isinstance(step, PrefillStep | DecodeStep):
            return step
        return DecodeStep(self.splits.num_sms, 0.02)

    def cycle(self) -> None:
        """A pop and the rest of its layers; a decode iteration beside each launch, and two more."""
        state = self.state
        self.arrive()
        kind, launches = "pop", 0
        while launches == 0 or state.prefill is not None:
            prefill = self.ask(PREFILL, kind)
            assert isinstance(prefill, PrefillStep)
            kind, launches = PREFILL, launches + 1
            state.begin_prefill(prefill, self.now_s)
            self.iterate()
            self.policy.observe(prefill, prefill.predicted_s or 0.01)
            for request in state.finish_prefill(self.now_s):
                state.release(request)
        self.iterate()
        self.iterate()

    def iterate(self) -> None:
        decode = self.ask(DECODE, DECODE)
        assert isinstance(decode, DecodeStep)
        self.state.begin_decode(decode, self.now_s)
        self.now_s += decode.predicted_s or 0.02
        self.state.finish_decode(())
        self.policy.observe(decode, decode.predicted_s or 0.02)


def run(policy: str, queued: int, late: bool) -> dict[str, float]:
    """Mean microseconds by kind, and over all decisions."""
    bench = Bench(policy, queued, late)
    for _ in range(WARM_UP):
        bench.cycle()
    for times in bench.spent.values():
        times.clear()
    for _ in range(CYCLES):
        bench.cycle()
    every = [t for times in bench.spent.values() for t in times]
    return {kind: 1e6 * statistics.fmean(times) for kind, times in [*bench.spent.items(), ("all", every)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="bullet")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{'queued':>6} {'TTFT':>6} {'us/pop':>8} {'prefill':>8} {'decode':>8} {'all':>8}")
    for queued in (0, 20, 400):
        for late in (False, True):
            rows = [run(arguments.policy, queued, late) for _ in range(arguments.runs)]
            middle = [statistics.median(row[kind] for row in rows) for kind in ("pop", PREFILL, DECODE, "all")]
            print(f"{queued:>6} {'lost' if late else 'met':>6} " + " ".join(f"{value:>8.1f}" for value in middle))


if __name__ == "__main__":
    main()
