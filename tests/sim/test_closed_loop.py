"""A closed loop by hand, against the theory of one machine and N clients, and under every family of policy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from bullet.config import WorkloadConfig, load_run_config
from bullet.errors import ConfigError
from bullet.results.columns import RunOutcome
from bullet.sim.run import simulate
from bullet.workload import ClosedLoop, load_workload
from tests.sim.test_queueing import OneAtATime
from tests.worlds import FixedDevice, config, workload

MS_PER_TOKEN = FixedDevice(lambda kind, tokens, sms: tokens * 1e-3)


def loop(policy: Any, rows: list[tuple[int, int]], clients: int, think_s: list[float], **overrides: Any) -> RunOutcome:
    """(prompt, output) rows; ``think_s`` in the order in which thinking begins."""
    open_loop = workload([(0.0, prompt, output) for prompt, output in rows])
    load = dataclasses.replace(open_loop, closed=ClosedLoop(clients, np.array(think_s, dtype=float)))
    named = isinstance(policy, str)
    return simulate(config(policy if named else "bullet", **overrides), workload=load, policy=None if named else policy,
                    device=MS_PER_TOKEN)


def column(outcome: RunOutcome, name: str) -> list[float]:
    """By id."""
    return outcome.requests[name][np.argsort(outcome.requests["id"])].tolist()


def test_two_clients_by_hand() -> None:
    """1 s a request, one at a time: A's runs [0, 1], B's waits for it; each next one is sent when the last one ends."""
    outcome = loop(OneAtATime(), [(1000, 1)] * 5, 2, [0.0] * 5)
    assert column(outcome, "arrival_s") == pytest.approx([0, 0, 1, 2, 3])
    assert column(outcome, "finish_s") == pytest.approx([1, 2, 3, 4, 5])
    assert outcome.device["queue_integral_s"] == pytest.approx(outcome.device["wait_sum_s"])  # I11
    assert outcome.device["wait_sum_s"] == pytest.approx(4.0)  # all but the first wait 1 s
    assert outcome.span_s == pytest.approx(5.0)


def test_two_clients_that_think_by_hand() -> None:
    """Thinking 0.5 and 0.7 s at first; A's request runs [0.5, 1.5], B's (sent at 0.7) [1.5, 2.0]. A thinks 0.1 s: sent at 1.6,
    runs [2.0, 3.0]; B thinks 3 s: sent at 5.0."""
    outcome = loop(OneAtATime(), [(1000, 1), (500, 1), (1000, 1), (1000, 1)], 2, [0.5, 0.7, 0.1, 3.0])
    assert column(outcome, "arrival_s") == pytest.approx([0.5, 0.7, 1.6, 5.0])
    assert column(outcome, "finish_s") == pytest.approx([1.5, 2.0, 3.0, 6.0])
    assert outcome.span_s == pytest.approx(5.5)


def test_who_thinks_less_sends_first() -> None:
    """The requests are sent in order, whoever is ready: ids follow arrivals."""
    outcome = loop(OneAtATime(), [(1000, 1), (2000, 1), (3000, 1)], 3, [5.0, 1.0, 3.0])
    assert column(outcome, "arrival_s") == pytest.approx([1.0, 3.0, 5.0])
    assert column(outcome, "prompt_tokens") == [1000, 2000, 3000]


def test_a_rejected_request_frees_its_client() -> None:
    outcome = loop(OneAtATime(), [(1000, 1), (10**6, 1), (1000, 1)], 1, [0.0, 0.25, 0.5])
    assert column(outcome, "arrival_s") == pytest.approx([0.0, 1.25, 1.75])
    assert outcome.requests["status"].tolist() == ["finished", "rejected", "finished"]


def test_more_clients_than_requests() -> None:
    outcome = loop("vllm-1024", [(100, 2)] * 3, 50, [0.0] * 3)
    assert column(outcome, "arrival_s") == [0.0] * 3


@pytest.mark.parametrize("policy", ["bullet", "static-54", "naive", "sglang-512", "sglang-512-mixed", "vllm-512", "vllm-2048"])
@pytest.mark.parametrize("think_s", [0.0, 0.3])
def test_every_policy_keeps_the_loop(policy: str, think_s: float) -> None:
    """Never more than N requests are in the system, never fewer while some are unsent and nobody thinks; the same seed, the
    same run."""
    c = load_run_config(None, {"policy.name": policy, "workload.concurrency": 6, "workload.think_time_s": think_s,
                               "workload.num_requests": 60, "debug": True})
    first, again = simulate(c), simulate(c)
    arrival, finish = np.array(column(first, "arrival_s")), np.array(column(first, "finish_s"))
    assert (column(again, "arrival_s"), column(again, "finish_s")) == (arrival.tolist(), finish.tolist())
    assert (np.diff(arrival) >= 0).all()
    inside = [int(((arrival <= t) & (finish > t)).sum()) for t in arrival]
    assert max(inside) == 6 if think_s == 0 else max(inside) <= 6
    if think_s == 0:
        assert {n for t, n in zip(arrival, inside, strict=True) if t < arrival[-1]} == {6}
        assert arrival[6:].tolist() == np.sort(finish)[:54].tolist()  # each sent at the moment that one ended
    assert first.device["queue_integral_s"] == pytest.approx(first.device["wait_sum_s"], abs=1e-9)  # I11


def test_blocks_by_name_in_a_closed_loop() -> None:
    c = load_run_config(None, {"policy.name": "vllm-512", "policy.options.prefix_cache": True, "workload.concurrency": 4,
                               "workload.num_requests": 30, "debug": True})
    outcome = simulate(c)
    arrival, finish = np.array(column(outcome, "arrival_s")), np.array(column(outcome, "finish_s"))
    assert arrival[4:].tolist() == np.sort(finish)[:26].tolist()


@pytest.mark.parametrize(("clients", "think_s"), [(4, 0.3), (8, 0.3)])
def test_one_machine_and_n_clients(clients: int, think_s: float) -> None:
    """The machine-repair model M/M/1//N: exponential service (0.1 s) and thinking; P(n in the system) = P(0) N!/(N - n)! (s/z)^n,
    throughput (1 - P(0)) / s, within the confidence limits of ten seeds."""
    service_s, found = 0.1, []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        count = 4000
        prompts = np.maximum(1, np.round(rng.exponential(service_s * 1e4, count))).astype(np.int64)  # 0.1 ms a token
        load = dataclasses.replace(workload([(0.0, int(p), 1) for p in prompts]),
                                   closed=ClosedLoop(clients, rng.exponential(think_s, count)))
        outcome = simulate(config(debug=False, device__kv_tokens=10**8, device__model="llama-3.1-8b"), workload=load,
                           policy=OneAtATime(), device=FixedDevice(lambda kind, tokens, sms: tokens * 1e-4))
        arrival, finish = np.array(column(outcome, "arrival_s")), np.array(column(outcome, "finish_s"))
        tail = slice(count // 10, -count // 10)
        found.append((len(finish[tail]) - 1) / (np.sort(finish)[tail][-1] - np.sort(finish)[tail][0]))
        assert outcome.requests["status"].tolist() == ["finished"] * count
        assert (arrival <= finish).all()
    weights = [math.factorial(clients) / math.factorial(clients - n) * (service_s / think_s) ** n for n in range(clients + 1)]
    theory = (1 - weights[0] / sum(weights)) / service_s
    standard_error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - theory) < 3.25 * standard_error  # t, 9 degrees of freedom, 99 %
    assert standard_error < 0.02 * theory  # so that the check above can fail


def test_thinks_are_drawn_by_seed() -> None:
    base = WorkloadConfig(arrivals="closed", concurrency=3, think_time_s=2.0, num_requests=4000)
    loads = [load_workload(dataclasses.replace(base, think=think), seed)
             for think, seed in (("exponential", 1), ("exponential", 1), ("exponential", 2), ("constant", 1))]
    first, same, other, constant = (load.closed.think_s for load in loads if load.closed is not None)
    assert first.tolist() == same.tolist() != other.tolist()
    assert first.mean() == pytest.approx(2.0, rel=0.05)
    assert first.std() == pytest.approx(2.0, rel=0.1)
    assert set(constant.tolist()) == {2.0}
    assert loads[0].prompt_tokens.tolist() == loads[3].prompt_tokens.tolist()


@pytest.mark.parametrize(("options", "words"), [
    ({"arrivals": "closed"}, r"workload.concurrency \(--concurrency\) = None: must be a number of clients"),
    ({"arrivals": "poisson", "concurrency": 4}, "must be none with poisson arrivals"),
    ({"think_time_s": 1.0}, "must be 0 with poisson arrivals"),
    ({"arrivals": "closed", "concurrency": 4, "think": "often"}, "must be exponential or constant"),
    ({"arrivals": "closed", "concurrency": 4, "think_time_s": -1.0}, r"must be 0 to 10\^6 s"),
])
def test_what_a_loop_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkloadConfig(**options)
