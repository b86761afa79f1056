"""Small worlds for tests: workloads by hand, devices whose seconds can be worked out, a run in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bullet.config import DeviceConfig, RunConfig, load_run_config
from bullet.devices.base import Device
from bullet.devices.load import load_device
from bullet.results.columns import RunOutcome
from bullet.sim.run import simulate
from bullet.workload import Workload

A100 = load_device(DeviceConfig())


def workload(rows: Sequence[tuple[float, int, int]]) -> Workload:
    """(arrival, prompt, output) rows."""
    arrival, prompt, output = zip(*rows, strict=True) if rows else ((), (), ())
    prompts = np.array(prompt, dtype=np.int64)
    return Workload("hand-made", "hand-made", np.array(arrival, dtype=float), prompts, np.array(output, dtype=np.int64),
                    float(prompts.mean()) if len(prompts) else 1.0)


def config(policy: str = "bullet", **overrides: Any) -> RunConfig:
    """A configuration with the invariants checked; dotted keys with ``__`` for the dot."""
    return load_run_config(None, {"policy.name": policy, "debug": True,
                                  **{key.replace("__", "."): value for key, value in overrides.items()}})


def run(policy: str, rows: Sequence[tuple[float, int, int]], *, device: Device | None = None,
        **overrides: Any) -> RunOutcome:
    """Simulate rows under a policy."""
    return simulate(config(policy, **overrides), workload=workload(rows), device=device or A100)


def run_with(policy: Any, rows: Sequence[tuple[float, int, int]], *, device: Any = None, record: Any = None,
             **overrides: Any) -> RunOutcome:
    """Simulate rows under a policy object."""
    return simulate(config(**overrides), workload=workload(rows), device=device or A100, policy=policy, record=record)


class FixedDevice(Device):
    """Seconds given by hand: ``solo(kind, tokens, sms)``; beside another, times ``slowdown``.

    ``kind`` is prefill or decode; tokens are new tokens of a prefill (times layers / all layers in the result), sequences
    of a decode.
    """

    source = "by hand"

    def __init__(self, solo: Callable[[str, int, int], float], slowdown: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__(A100.model, A100.gpu)
        self.solo = solo
        self.slowdown = slowdown

    def prefill_work(self, pieces: Any, layers: int, *, logits_seqs: int) -> Any:
        return ("prefill", sum(new for new, _ in pieces), layers / self.model.num_layers)

    def decode_work(self, num_seqs: int, context_tokens: int) -> Any:
        return ("decode", num_seqs, 1.0)

    def hybrid_work(self, pieces: Any, num_seqs: int, context_tokens: int, *, logits_seqs: int) -> Any:
        return ("prefill", sum(new for new, _ in pieces), 1.0)

    def solo_seconds(self, work: Any, sms: int) -> float:
        return self.solo(work[0], work[1], sms) * work[2]

    def corun_seconds(self, prefill: Any, p: int, decode: Any, d: int) -> tuple[float, float]:
        return self.solo_seconds(prefill, p) * self.slowdown[0], self.solo_seconds(decode, d) * self.slowdown[1]


def times(outcome: RunOutcome) -> dict[int, tuple[float, float]]:
    """First-token and finish times by request id."""
    r = outcome.requests
    return {int(i): (float(a), float(b)) for i, a, b in zip(r["id"], r["first_token_s"], r["finish_s"], strict=True)}
