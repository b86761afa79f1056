"""A long queue's order is kept, not made anew: the decisions are those of the short queue's way, which sorts each time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import resolve_slo
from bullet.devices.load import load_device
from bullet.policies import build_policy
from bullet.policies.bullet import Bullet, longqueue, sections
from bullet.sim.run import simulate
from bullet.state import SplitTable
from bullet.workload import Workload
from tests import worlds


def random_burst(seed: int, requests: int) -> Workload:
    """Arrivals at a few instants and between them; lengths that repeat."""
    rng = np.random.default_rng(seed)
    instants = rng.uniform(0.0, 5.0, rng.integers(1, 4))
    arrivals = np.where(rng.random(requests) < 0.7, rng.choice(instants, requests), rng.uniform(0.0, 8.0, requests))
    prompts = np.maximum(1, rng.lognormal(5.5, 1.2, requests).astype(int) // 8 * 8)
    rows = sorted(zip(arrivals.tolist(), np.minimum(prompts, 4000).tolist(), rng.integers(1, 40, requests).tolist(), strict=True))
    return worlds.workload(rows)


def decisions_agree(config: Any, workload: Workload) -> tuple[int, int]:
    """Run it, and ask a policy that never keeps an order the same questions; decisions, and those on a kept order."""
    config = dataclasses.replace(config, slo=resolve_slo(config.slo, config.workload.trace, workload.mean_prompt_tokens))
    device = load_device(config.device)
    splits = SplitTable.every(device.num_sms, config.device.partition_step_sms)

    def made() -> Bullet:
        policy = build_policy(config, get_model(config.device.model), get_gpu(config.device.gpu), splits, device)
        assert isinstance(policy, Bullet)
        return policy

    kept, sorting = made(), made()
    kept.queue.long_from, sorting.queue.long_from = 4, math.inf  # type: ignore[assignment]
    asked = long = 0

    def record(kind: str, what: Any) -> None:
        nonlocal asked, long
        if kind == "observe":
            sorting.observe(*what)
            return
        lane, state, now_s, decision = what
        other: Any = sorting.next_step(lane, state, now_s)
        for name in decision._fields:
            one, two = getattr(decision, name), getattr(other, name)
            if name == "published":
                # Sums by blocks round otherwise; the sign decides.
                for a, b in zip(one, two, strict=True):
                    assert a == (b if b is None else pytest.approx(b, rel=1e-9, abs=1e-9))
                    assert a is None or (a < 0) == (b < 0)
            else:
                assert one == two, f"decision {asked}, {lane} at {now_s}: {name}"
        asked += 1
        long += isinstance(kept.queue._ranked, longqueue.LongRanked)

    simulate(config, workload=workload, device=device, policy=kept, record=record)
    return asked, long


@pytest.mark.parametrize("seed", range(16))
def test_decisions_are_those_of_sorting_each_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks; all readings that the kept order knows; a KV cache so small that decodes are preempted."""
    monkeypatch.setattr(sections, "BLOCK", 4)
    monkeypatch.setattr(longqueue, "MANY", 8 if seed % 2 else 1024)
    options: dict[str, Any] = [{}, {"late_first": True}, {"order": "fcfs"}, {"late_patience": 2.0}, {"repair": False}][seed % 5]
    config = worlds.config("bullet" if seed % 7 else "bullet-literal", policy__options=options, seed=seed,
                           slo__ttft_slo_policy="per_request" if seed % 3 == 0 else "mean_length",
                           policy__estimator="oracle" if seed % 4 == 3 else "srm",
                           device__kv_tokens=8_000 if seed % 2 else 60_000)
    asked, long = decisions_agree(config, random_burst(seed, 150))
    assert long > asked // 4
