"""One first-come-first-served lane at batch 1 is a queue that theory knows."""

import numpy as np
import pytest

from bullet.policies.base import PolicyContext
from bullet.sim.run import simulate
from bullet.state import HYBRID, Chunk, HybridStep, Step, SystemState, Wait
from bullet.workload import Workload
from tests.worlds import A100, FixedDevice, config, run, run_with, times


class OneAtATime:
    """A whole prompt at a time, nothing else."""

    lanes = (HYBRID,)

    def __init__(self, context: PolicyContext | None = None) -> None:
        pass

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if state.decode.requests:
            return HybridStep(108, (), True)
        head = state.queue[0]
        return HybridStep(108, (Chunk(head.id, head.known_tokens, 0),), False)

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


def mean_wait(prompts: np.ndarray, rate: float, seed: int) -> float:
    """Mean seconds from arrival to start of service, the first tenth left out; service takes 1 ms a prompt token."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(prompts)))
    load = Workload("w", "w", arrivals, prompts, np.ones(len(prompts), dtype=np.int64), 1.0)
    outcome = simulate(config(debug=False, device__kv_tokens=10**8), workload=load, policy=OneAtATime(),
                       device=FixedDevice(lambda kind, tokens, sms: tokens * 1e-3))
    order = np.argsort(outcome.requests["id"])
    waits = (outcome.requests["admitted_s"] - outcome.requests["arrival_s"])[order]
    return float(waits[len(waits) // 10 :].mean())


@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize("service", ["constant", "two-point"])
def test_mean_wait_is_pollaczek_and_khinchines(load: float, service: str) -> None:
    """W = rate E[S^2] / (2 (1 - load)): M/D/1 and M/G/1, within the confidence limits of ten seeds."""
    found = []
    for seed in range(10):
        rng = np.random.default_rng(1000 + seed)
        count = 6000
        prompts = np.full(count, 100) if service == "constant" else np.where(rng.random(count) < 0.8, 50, 300)
        found.append(mean_wait(prompts.astype(np.int64), load / 0.1, seed))  # E[S] = 0.1 s either way
    second_moment = 0.1**2 if service == "constant" else 0.8 * 0.05**2 + 0.2 * 0.3**2
    theory = (load / 0.1) * second_moment / (2 * (1 - load))
    standard_error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found) - theory) < 3.25 * standard_error  # t, 9 degrees of freedom, 99 %
    assert standard_error < 0.15 * theory  # so that the check above can fail


def test_littles_law_and_the_queue_integral() -> None:
    """I11: the integrated queue length equals the sum of the waits."""
    rng = np.random.default_rng(5)
    rows = [(float(t), int(p), 3) for t, p in zip(np.cumsum(rng.exponential(0.02, 300)), rng.integers(50, 900, 300), strict=True)]
    outcome = run_with(OneAtATime(), rows)
    assert outcome.device["queue_integral_s"] == pytest.approx(outcome.device["wait_sum_s"], rel=1e-9)
    assert outcome.device["wait_sum_s"] > 1.0


def test_an_added_request_delays_no_earlier_one() -> None:
    """I9."""
    rows = [(0.1 * i, 400 + 50 * (i % 5), 4) for i in range(20)]
    before = times(run_with(OneAtATime(), rows))
    late = (rows[10][0] + 0.05, 700, 5)
    after = times(run_with(OneAtATime(), [*rows[:11], late, *rows[11:]]))
    for i in range(11):
        assert after[i] == before[i]
    for i in range(11, 20):
        assert after[i + 1][0] >= before[i][0]
        assert after[i + 1][1] >= before[i][1]


def test_one_request_takes_what_the_device_says() -> None:
    """I10, to 1e-9: prefill of the whole prompt, then one iteration a token with a growing context."""
    prompt, output = 777, 9
    expected = A100.solo_seconds(A100.hybrid_work([(prompt, 0)], 0, 0, logits_seqs=1), 108)
    first = expected
    for i in range(1, output):
        expected += A100.solo_seconds(A100.decode_work(1, prompt + i), 108)
    for policy in ("vllm-1024", "sglang-1024", "sglang-1024-mixed"):
        outcome = simulate(config(policy), workload=Workload("w", "w", np.array([2.0]), np.array([prompt]), np.array([output]),
                                                             float(prompt)))
        assert times(outcome)[0] == pytest.approx((2.0 + first, 2.0 + expected), abs=1e-9)


@pytest.mark.parametrize("policy", ["static-96", "naive", "bullet", "bullet-literal"])
def test_one_request_through_two_lanes_takes_what_the_device_says(policy: str) -> None:
    """I10: eight steps of 4 of the 32 layers, the LM head in the last; then an iteration a token. All on all SMs."""
    prompt, output = 777, 9
    first = sum(A100.solo_seconds(A100.prefill_work([(prompt, 0)], 4, logits_seqs=head), 108) for head in [0] * 7 + [1])
    rest = sum(A100.solo_seconds(A100.decode_work(1, prompt + i), 108) for i in range(1, output))
    outcome = run(policy, [(2.0, prompt, output)])
    assert times(outcome)[0] == pytest.approx((2.0 + first, 2.0 + first + rest), abs=1e-9)
