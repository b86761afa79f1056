"""Every branch of Algorithm 1 on small states, with an estimator whose answers are a table.

The toy device has 12 SMs in splits of 2: d = 2, 4, 6, 8, 10 at indices 0..4, and index 5 is "alone on all 12".
Prefill of t tokens on p SMs takes t / p seconds (index 5: t / 12); a decode step takes ``STEP[index]``. TPOT SLO 1 s.
"""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext
from bullet.policies.bullet import Bullet, BulletLiteral
from bullet.policies.bullet.forecast import PoppedBatch, RunningBatch, StepForecast, p90
from bullet.state import (
    DECODE,
    PREFILL,
    DecodeStep,
    KvCache,
    Partition,
    PrefillStep,
    Published,
    Request,
    SplitTable,
    SystemState,
    Wait,
)

SPLITS = SplitTable.every(12)
P = np.array([10, 8, 6, 4, 2, 12], dtype=float)


class Tabulated:
    name = "table"
    splits = SPLITS

    def __init__(self, step: tuple[float, ...] = (2.0, 1.0, 0.8, 0.6, 0.5, 0.4), intensity: float = 1e9) -> None:
        self.step = np.array(step)
        self.intensity = intensity
        self.seen: list[tuple[str, int, float, float]] = []

    def prefill_seconds(self, prompt_tokens, decode):
        return sum(prompt_tokens) / P

    def prefill_line(self, prompt_tokens, decode):
        return lambda index: float(sum(prompt_tokens) / P[index])

    def prefill_base(self, prompt_tokens):
        return prompt_tokens / P

    def prefill_base_at(self, prompt_tokens, index):
        return float(sum(prompt_tokens) / P[index])

    def prefill_correction(self, index):
        return 1.0

    def decode_seconds(self, num_seqs, context_tokens, prefill_tokens):
        return self.step

    def decode_at(self, num_seqs, context_tokens, prefill_tokens, index):
        return float(self.step[index])

    def decode_line(self, *state):
        return lambda index: self.decode_at(*state, index)

    def prefill_intensity(self, prompt_tokens):
        return self.intensity * len(prompt_tokens)

    def ridge(self, index):
        return 100.0

    def observe(self, phase, sms, predicted_s, elapsed_s):
        self.seen.append((phase, sms, predicted_s, elapsed_s))


def policy(estimator: Tabulated | None = None, cls: type[Bullet] = Bullet, **options: object) -> Bullet:
    context = PolicyContext(MODELS["tiny"], GPUS["a100-80gb"], SPLITS, 1.0, estimator or Tabulated(),
                            {"layers_per_step": 1} | options)
    return cls(context)


def world(queue: list[tuple[float, int, float]] = (), running: list[tuple[float, int]] = (), *,  # type: ignore[assignment]
          target: tuple[int, int] = (8, 4), batch: int | None = None, batch_slo: float = 100.0, layers_done: int = 0,
          blocks: int = 1000) -> SystemState:
    """``queue``: (arrival, tokens, SLO). ``running``: (first-token time, tokens generated). ``batch``: P's tokens."""
    s = SystemState(SPLITS, KvCache(blocks), 4, Partition(*target))
    number = 100
    for first_s, generated in running:
        request = Request(number, 0.0, 8, 1.0)
        number += 1
        s.arrive(request)
        s.begin_prefill(PrefillStep(12, 4, (request.id,)), 0.0)
        s.finish_prefill(first_s)
        request.generated = generated
        s.ready.remove(request)
        s.kv.give_back(1)
        s.kv.take(s.kv.blocks_for(request.known_tokens - 1))
        s.decode.join(request)
    if batch is not None:
        s.arrive(Request(50, 0.0, batch, batch_slo))
        s.begin_prefill(PrefillStep(8, max(layers_done, 1), (50,)), 0.0)
        if layers_done:
            s.finish_prefill(0.0)
        else:
            s.in_flight.clear()
    for i, (arrival, tokens, slo) in enumerate(queue):
        s.arrive(Request(i, arrival, tokens, slo))
    return s


# ---------------------------------------------------------------------------------- the two plain cases


def test_no_decodes_gives_prefill_everything() -> None:
    step = policy().next_step(PREFILL, world([(0.0, 24, 10.0)]), 1.0)
    assert isinstance(step, PrefillStep)
    assert (step.sms, step.admit, step.target, step.reason) == (12, (0,), Partition(12, 0), "no-decode")
    assert step.predicted_s == pytest.approx(24 / 12 / 4)  # one layer of four
    # TTFT estimated under the present split (8, 4): 1 s waited and 24 / 8 = 3 s to come, of 10.
    assert step.published == Published(ttft_margin_s=pytest.approx(6.0))


def test_no_prefill_gives_decode_everything() -> None:
    step = policy().next_step(DECODE, world(running=[(0.0, 5)]), 1.0)
    assert isinstance(step, DecodeStep)
    assert (step.sms, step.target, step.predicted_s, step.reason) == (12, Partition(0, 12), 0.4, "no-prefill")


# ---------------------------------------------------------------------------------- TPOT and its margin


def test_tpot_margin_by_hand() -> None:
    """(now - d + T) / (g + 1) <= 1: with 6 tokens (g = 5), first at 0, now 4: T may be 2 s; the present d = 4 takes 1 s."""
    step = policy().next_step(DECODE, world(running=[(0.0, 6)], batch=80), 4.0)
    assert step.published == Published(tpot_margin_s=pytest.approx(6 - 4 - 1.0))


def test_a_step_in_flight_counts_its_token_and_its_remainder() -> None:
    """Under a candidate: (now - d + remainder + T) / (g + 2): g = 5, now 4, remainder 0.75: T may be 7 - 4.75 = 2.25 s."""
    s = world(running=[(0.0, 6)], batch=80)
    s.begin_decode(DecodeStep(4, predicted_s=1.0), 3.75)
    assert policy().tpot.limit(s, 4.0) == pytest.approx(2.25)


def test_waiting_to_merge_counts() -> None:
    s = world(running=[(0.0, 6)])
    s.arrive(Request(7, 0.0, 8, 1.0))
    s.begin_prefill(PrefillStep(12, 4, (7,)), 3.0)
    s.finish_prefill(3.5)
    # Its next token is its second: (4 - 3.5 + T) / 1 <= 1: T <= 0.5; of two requests P90 is the worse.
    assert policy().tpot.limit(s, 4.0) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 30)), min_size=1, max_size=40), st.floats(0.01, 5))
def test_the_limit_is_p90s(running: list[tuple[float, int]], step_s: float) -> None:
    """A step meets P90(tpot) <= SLO exactly when it is no longer than the limit."""
    limit = policy().tpot.limit(world(running=running), 10.0)
    tpot = sorted((10.0 - first + step_s) / generated for first, generated in running)
    if abs(step_s - limit) > 1e-9:
        assert (tpot[math.ceil(0.9 * len(tpot)) - 1] <= 1.0) == (step_s <= limit)


@given(st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=60))
def test_the_limit_follows_joins_and_leaves(events: list[int | None]) -> None:
    """``None``: the policy looks; a number: that many joins, or that one leaves. It always sees what a fresh one would."""
    p, s, number = policy(), world(), 0
    for event in [*events, None]:
        if event is None:
            assert p.tpot.limit(s, 50.0) == policy().tpot.limit(s, 50.0)
        elif event % 2 and s.decode.requests:
            s.decode.leave(list(s.decode.requests.values())[event % s.decode.size])
        else:
            for _ in range(event):
                request = Request(number, 0.0, 10, 1.0)
                request.first_token_s, request.generated = number * 0.37 % 5, 1 + number % 7
                s.decode.join(request)
                number += 1
            s.decode.advance()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50))
def test_p90_by_sorting(values: list[float]) -> None:
    rank = math.ceil(0.9 * len(values))
    assert p90(np.array(values)) == sorted(values)[rank - 1]
    assert (sorted(values)[len(values) // 10] >= 0) == (sum(v >= 0 for v in values) >= rank)  # as the policy tests it


# --------------------------------------------------------------------------------------- the branches


def choose(lane: str, s: SystemState, now: float, p: Bullet | None = None) -> tuple[str, Partition | None]:
    step = (p or policy()).next_step(lane, s, now)
    return step.reason, step.target


def test_reduce_decode_takes_the_smallest_d_in_time() -> None:
    """TPOT met: d = 2 takes 2 s, over the SLO of one step; d = 4 takes 1 s: kept. Without the cap d = 2 serves (limit 6 s)."""
    s = world(running=[(0.0, 10)], batch=80, target=(6, 6))
    assert choose(PREFILL, s, 4.0) == ("reduce-decode", Partition(8, 4))
    assert choose(PREFILL, s, 4.0, policy(cap_next_step=False)) == ("reduce-decode", Partition(10, 2))
    assert choose(PREFILL, s, 4.0, policy(cap_next_step=False, decode_floor=0.25)) == ("reduce-decode", Partition(8, 4))
    # A present d of 0 or N counts as N.
    for target in ((12, 0), (0, 12), (12, 12)):
        s.target = Partition(*target)
        assert choose(PREFILL, s, 4.0) == ("reduce-decode", Partition(8, 4))


def test_reduce_decode_never_raises_d_and_keeps_the_split_if_none_serves() -> None:
    s = world(running=[(0.0, 10)], batch=80, target=(10, 2))
    assert choose(PREFILL, s, 4.0) == ("keep", Partition(10, 2))


def test_a_fixed_split_is_kept_whatever_the_margins_say() -> None:
    for slo in (1.0, 100.0):
        s = world([(0.0, 24, slo)], [(0.0, 10)])
        step = policy(fixed_decode_sms=6).next_step(PREFILL, s, 4.0)
        assert isinstance(step, PrefillStep)
        assert (step.sms, step.target, step.reason) == (6, Partition(6, 6), "fixed")


def test_reduce_decode_without_a_split_to_keep_balances() -> None:
    slow = Tabulated((9.0, 8.0, 7.0, 6.0, 5.0, 4.0))
    s = world(running=[(0.0, 10)], batch=80, target=(12, 0))
    assert choose(PREFILL, s, 4.0, policy(slow))[0] == "balanced"


def test_reduce_prefill_takes_the_largest_p_that_meets_both() -> None:
    """TPOT lost (published), TTFT kept: g = 4, first at 0, now 4.3: T may be 0.7 s: d = 8. P (80 tokens on 4 SMs: 20 s)."""
    s = world(running=[(0.0, 5)], batch=80)
    s.decode_published = Published(tpot_margin_s=-0.1)
    assert choose(PREFILL, s, 4.3) == ("reduce-prefill", Partition(4, 8))


def test_reduce_prefill_keeps_ttft_if_both_cannot_be_met() -> None:
    """P must end by 16: 80 / p + 4.4 <= 16 needs p >= 8 (10 s); T <= 0.6 needs d >= 8. The smallest p that keeps TTFT: 8."""
    s = world(running=[(0.0, 5)], batch=80, batch_slo=16.0)
    s.decode_published = Published(tpot_margin_s=-0.1)
    assert choose(PREFILL, s, 4.4) == ("reduce-prefill", Partition(8, 4))


def test_reduce_prefill_without_ttft_under_any_split_balances() -> None:
    """TTFT was met on all N only (80 / 12 = 6.7 s, SLO 11.5, now 4.4): the best split takes 8 s."""
    s = world(running=[(0.0, 5)], batch=80, batch_slo=11.5, target=(12, 0))
    s.decode_published = Published(tpot_margin_s=-0.1)
    assert choose(PREFILL, s, 4.4)[0] == "balanced"


def test_an_empty_decode_batch_is_satisfied_whatever_it_last_published() -> None:
    """The batch that lost its TPOT is gone; one request waits to merge: (3 - 2.9 + T) / 1 <= 1: T = 0.8 on d = 6 serves."""
    s = world(batch=80)
    s.ready.append(ready := Request(9, 0.0, 16, 1.0))
    ready.generated, ready.first_token_s = 1, 2.9
    s.decode_published = Published(tpot_margin_s=-3.0)
    s.target = Partition(0, 12)
    assert choose(PREFILL, s, 3.0) == ("reduce-decode", Partition(6, 6))


def test_both_lost_balances_the_worse_ratio() -> None:
    """P of 80 tokens, SLO 8, at t = 4: TTFT / SLO = (4 + 80 / p) / 8 = 1.5, 1.75, 2.17, 3, 5.5 for p = 10 .. 2.
    One decode, g = 2, first at 0, so tpot = (4 + T) / 3 = 2.0, 1.67, 1.6, 1.53, 1.5 for d = 2 .. 10.
    max = 2.0, 1.75, 2.17, ..: p = 8. With the cap d = 2 (2 s) was out anyway.
    """
    s = world(running=[(0.0, 3)], batch=80, batch_slo=8.0)
    s.decode_published = Published(tpot_margin_s=-1.0)
    for p in (policy(), policy(cap_next_step=False)):
        assert choose(PREFILL, s, 4.0, p) == ("balanced", Partition(8, 4))


def test_balance_counts_the_step_in_flight_and_who_waits_to_merge() -> None:
    """The world above. A step in flight with 0.5 s to go gives a token: tpot = (4.5 + T) / 4 = 1.63, 1.38, ..: p = 10.

    With g = 11 instead tpot is 0.5, and p = 10 too; but a request that waits to merge since its first token at 1.9 has
    2.1 + T = 4.1, 3.1, 2.9, 2.7, 2.6, and P90 of two is the worse: max = 4.1, 3.1, 2.9, 3.0, 5.5: p = 6.
    """
    free = {"cap_next_step": False}
    s = world(running=[(0.0, 3)], batch=80, batch_slo=8.0)
    s.decode_published = Published(tpot_margin_s=-1.0)
    s.begin_decode(DecodeStep(4, predicted_s=1.0), 3.5)
    assert choose(PREFILL, s, 4.0, policy(**free)) == ("balanced", Partition(10, 2))
    s = world(running=[(0.0, 12)], batch=80, batch_slo=8.0)
    s.decode_published = Published(tpot_margin_s=-1.0)
    assert choose(PREFILL, s, 4.0, policy(**free)) == ("balanced", Partition(10, 2))
    s.ready.append(ready := Request(9, 0.0, 16, 1.0))
    ready.generated, ready.first_token_s = 1, 1.9
    assert choose(PREFILL, s, 4.0, policy(**free)) == ("balanced", Partition(6, 6))


@given(st.lists(st.floats(0.05, 5) | st.sampled_from([1.0, 2.0]), min_size=6, max_size=6), st.integers(20, 400),
       st.floats(1, 60), st.integers(1, 8),
       st.lists(st.tuples(st.floats(0, 3), st.integers(1, 100), st.floats(1, 50)), max_size=6))
def test_balance_equals_an_exhaustive_search(steps: list[float], tokens: int, slo: float, generated: int,
                                             queue: list[tuple[float, int, float]]) -> None:
    """Flat stretches (decode that has saturated the memory) included: ties go to the larger p."""
    table = Tabulated(tuple(sorted(steps, reverse=True)))
    s = world(sorted(queue), [(0.0, generated)], batch=tokens, batch_slo=slo)
    p = policy(table, decode_floor=0.0, cap_next_step=False, order="fcfs")
    ttft = RunningBatch(p.queue, s, s.prefill, 4.0, None, 1.0, 0.0)
    worst = []
    for i in range(5):
        done = np.cumsum([tokens / P[i], *(t / P[i] for _, t, _ in sorted(queue))])
        ratios = [(4.0 + done[0]) / slo, *((4.0 - a + d) / o for (a, _, o), d in zip(sorted(queue), done[1:], strict=True))]
        worst.append(max(p90(np.array(ratios)), (4.0 + table.step[i]) / generated))
    found = p._set_balanced(s, 4.0, StepForecast(table, (1, 1, tokens)), p.tpot.limit(s, 4.0), ttft)
    assert worst[found] == pytest.approx(min(worst))
    assert all(w > worst[found] for w in worst[:found])  # ties to the larger p


@given(st.lists(st.floats(0.05, 5) | st.sampled_from([1.0, 2.0]), min_size=6, max_size=6),
       st.lists(st.tuples(st.floats(0, 3), st.integers(1, 100), st.floats(1, 50)), min_size=1, max_size=12),
       st.lists(st.tuples(st.floats(0, 3), st.integers(1, 8)), min_size=1, max_size=12))
def test_balance_of_a_popped_batch(steps: list[float], queue: list[tuple[float, int, float]],
                                   running: list[tuple[float, int]]) -> None:
    """P90 over all of Q as it was before the pop, and over all that decode, against every split in turn."""
    table = Tabulated(tuple(sorted(steps, reverse=True)))
    s = world(sorted(queue), running)
    p = policy(table, decode_floor=0.0, cap_next_step=False, order="fcfs")
    worst = []
    for i in range(5):
        done = np.cumsum([t / P[i] for _, t, _ in sorted(queue)])
        ratios = [(4.0 - a + d) / o for (a, _, o), d in zip(sorted(queue), done, strict=True)]
        worst.append(max(p90(np.array(ratios)), p90(np.array([(4.0 - f + table.step[i]) / g for f, g in running]))))
    ttft = PoppedBatch(p.queue.sort(s, 4.0, 0), 4.0)
    found = p._set_balanced(s, 4.0, StepForecast(table, (1, 1, 1)), p.tpot.limit(s, 4.0), ttft)
    assert worst[found] == pytest.approx(min(worst))
    assert all(w > worst[found] - 1e-9 for w in worst[:found])


def test_balance_takes_the_larger_p_where_more_decode_sms_help_nothing() -> None:
    """tpot = (4 + T) / 3 is 5/3 for every d, TTFT is in time on all: nothing to gain from a smaller p."""
    flat = Tabulated((1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    s = world(running=[(0.0, 3)], batch=20, batch_slo=1000.0)
    p = policy(flat, decode_floor=0.0)
    ttft = RunningBatch(p.queue, s, s.prefill, 4.0, None, 1.0, 0.0)  # type: ignore[arg-type]
    assert p._set_balanced(s, 4.0, StepForecast(flat, (1, 1, 20)), p.tpot.limit(s, 4.0), ttft) == 0


def test_balance_keeps_the_cap_on_one_step() -> None:
    """Deep in TTFT trouble p = 10 is the best ratio, but a step on d = 2 takes 2 s: d = 4 is the least within 1 s."""
    s = world(running=[(0.0, 3)], batch=800, batch_slo=1.0)
    s.decode_published = Published(tpot_margin_s=-1.0)
    assert choose(PREFILL, s, 4.0) == ("balanced", Partition(8, 4))
    assert choose(PREFILL, s, 4.0, policy(cap_next_step=False)) == ("balanced", Partition(10, 2))


# ------------------------------------------------------------------------- KV, delay, hand-over


def test_kv_full_leaves_decode_its_share() -> None:
    """The waiting head (800 tokens: 50 blocks) does not fit. The largest d up to N / 2 = 6 that keeps P's TTFT."""
    s = world([(0.0, 800, 10.0)], [(0.0, 10)], batch=80, blocks=40)
    assert choose(PREFILL, s, 4.0) == ("kv-full", Partition(6, 6))
    assert choose(DECODE, s, 4.0) == ("kv-full", Partition(6, 6))
    # P must end by 13: 80 / p <= 9 needs p >= 10: d = 2 at most.
    s = world([(0.0, 800, 10.0)], [(0.0, 10)], batch=80, batch_slo=13.0, blocks=40)
    assert choose(PREFILL, s, 4.0) == ("kv-full", Partition(10, 2))
    # Nothing keeps it: 2N/9 = 2.67, so 4.
    s = world([(0.0, 800, 10.0)], [(0.0, 10)], batch=80, batch_slo=5.0, blocks=40)
    assert choose(PREFILL, s, 4.0) == ("kv-full", Partition(8, 4))


def test_kv_full_asks_for_the_head_in_policy_order() -> None:
    """Free are 40 - 4 - 5 = 31 blocks, less 2 of headroom. The long prompt (50 blocks) is the head only if first come."""
    s = world([(0.0, 800, 99.0), (0.0, 160, 99.0)], [(0.0, 50)], batch=80, blocks=40)
    assert choose(PREFILL, s, 40.0)[0] != "kv-full"
    assert choose(DECODE, s, 40.0)[0] != "kv-full"
    for lane in (PREFILL, DECODE):
        assert choose(lane, s, 40.0, policy(order="fcfs"))[0] == "kv-full"


def test_kv_full_counts_what_the_new_batch_takes() -> None:
    """Two prompts of 10 blocks, 20 free (of 24: one decode holds 4): the second no longer fits when the first has its own."""
    s = world([(0.0, 160, 99.0), (0.0, 160, 99.0)], [(0.0, 50)], blocks=24)
    step = policy().next_step(PREFILL, s, 40.0)
    assert (step.admit, step.reason) == ((0,), "kv-full")  # type: ignore[union-attr]


def test_decode_waits_if_the_prefill_batch_holds_all_blocks() -> None:
    """One decode of exactly four blocks needs a fifth, and P holds the rest: preempting itself would gain nothing."""
    s = world(running=[(0.0, 57)], batch=80, blocks=9)
    assert s.decode.growth_blocks == 1
    step = policy().next_step(DECODE, s, 4.0)
    assert (type(step), step.reason) == (Wait, "kv-full")


def test_the_prediction_leaves_victims_out() -> None:
    """Two decodes of 64 tokens each need a block, one is free: the later one goes, one sequence of 65 is predicted."""
    s = world(running=[(0.0, 57), (0.0, 57)], blocks=9)
    asked = []
    table = Tabulated()
    table.decode_at = lambda *key: asked.append(key) or 0.4  # type: ignore[func-returns-value, method-assign]
    assert policy(table).next_step(DECODE, s, 4.0).preempt == (101,)  # type: ignore[union-attr]
    assert asked[-1] == (1, 65, 0, 5)


def test_nothing_fits_and_nothing_runs_waits_for_decode_on_all_sms() -> None:
    s = world([(0.0, 800, 10.0)], [(0.0, 10)], blocks=40)
    step = policy().next_step(PREFILL, s, 4.0)
    assert (type(step), step.reason, step.target) == (Wait, "kv-full", Partition(0, 12))
    assert policy().next_step(DECODE, s, 4.0).sms == 12  # type: ignore[union-attr]


def test_delayed_decode_waits_as_long_as_its_objective_allows() -> None:
    """TTFT lost under the chosen split (40 / 8 = 5 s, SLO 5), TPOT met: g = 9, first at 0, now 4.5: T may be 5.5 s, the
    step on d = 4 takes 1: decode could start at 9 and still keep its P90, but waits at most one SLO: until 5.5. A layer
    on all 12 takes 40 / 12 / 4 = 0.83 s: it ends by then."""
    p = policy()
    s = world(running=[(0.0, 10)], batch=40, batch_slo=5.0)
    prefill = p.next_step(PREFILL, s, 4.5)
    assert (prefill.reason, prefill.sms, prefill.target) == ("delayed-decode", 12, Partition(8, 4))  # type: ignore[union-attr]
    wait = p.next_step(DECODE, s, 4.5)
    assert isinstance(wait, Wait)
    assert (wait.until_s, wait.target) == (pytest.approx(5.5), Partition(8, 4))
    # Asked again at the next launch: the delay is not extended. Then decode starts with that d.
    assert p.next_step(DECODE, s, 5.0).until_s == pytest.approx(5.5)  # type: ignore[union-attr]
    step = p.next_step(DECODE, s, 5.5)
    assert (type(step), step.sms) == (DecodeStep, 4)  # type: ignore[union-attr]
    assert choose(DECODE, s, 4.5, policy(delayed_decode=False))[0] == "reduce-decode"


def test_delayed_decode_starts_early_when_slack_is_short() -> None:
    """g = 5, now 4.5: T may be 1.5, the step takes 1: it starts at 5.0 at the latest."""
    s = world(running=[(0.0, 6)], batch=20, batch_slo=5.0)
    assert policy().next_step(DECODE, s, 4.5).until_s == pytest.approx(5.0)  # type: ignore[union-attr]


def test_no_delay_that_prefill_could_not_use() -> None:
    """A layer of 80 tokens takes 1.67 s on all SMs: it would outlast the delay of 1 s and share decode's SMs."""
    s = world(running=[(0.0, 10)], batch=80, batch_slo=5.0)
    assert choose(PREFILL, s, 4.5) == ("reduce-decode", Partition(8, 4))
    # In flight on 8 it has 2.5 s to go: prefill's next launch comes after decode's latest start.
    s.begin_prefill(PrefillStep(8, 1, predicted_s=2.5), 4.5)
    assert choose(DECODE, s, 4.5) == ("reduce-decode", Partition(8, 4))
    assert choose(DECODE, s, 6.2)[0] == "delayed-decode"  # 0.8 s to go: the next one is in time


def test_decode_waits_as_the_prefill_launch_decided() -> None:
    """P90 over Q is lost (the long one ends at 4.5 + (4 + 80) / 8 = 15), so the popped batch has the device; that the
    popped request itself is in time is no reason for decode to start beside it on shared SMs."""
    s = world([(0.0, 4, 99.0), (0.0, 80, 5.0)], [(0.0, 10)])
    p = policy(repair=False)
    step = p.next_step(PREFILL, s, 4.5)
    assert (step.reason, step.admit) == ("delayed-decode", (0,))  # type: ignore[union-attr]
    s.begin_prefill(step, 4.5)  # type: ignore[arg-type]
    assert p.next_step(DECODE, s, 4.5).until_s == pytest.approx(5.5)  # type: ignore[union-attr]


def test_no_delay_when_prefill_has_nothing_to_launch() -> None:
    """P is late and its last layer in flight: waiting would help nobody, unless more waits behind it."""
    s = world(running=[(0.0, 10)], batch=40, batch_slo=1.0, layers_done=3)
    s.begin_prefill(PrefillStep(8, 1, predicted_s=0.9), 4.4)
    assert choose(DECODE, s, 4.5, policy(hand_over="off"))[0] == "reduce-decode"
    s.arrive(Request(1, 4.0, 16, 10.0))
    assert choose(DECODE, s, 4.5)[0] == "delayed-decode"


def test_no_delay_while_a_step_is_in_flight() -> None:
    s = world(running=[(0.0, 10)], batch=40, batch_slo=5.0)
    s.begin_decode(DecodeStep(4, predicted_s=1.0), 4.4)
    assert choose(PREFILL, s, 4.5)[0] == "reduce-decode"


def test_hand_over_shares_the_tail() -> None:
    """P's last layer of four: 8 tokens on 8 SMs: 0.25 s, under a step of 1 s; nothing can follow: decode takes all."""
    s = world(running=[(0.0, 10)], batch=8, layers_done=3)
    step = policy().next_step(DECODE, s, 4.0)
    assert (step.reason, step.sms, step.target) == ("hand-over", 12, Partition(8, 4))  # type: ignore[union-attr]
    assert choose(DECODE, s, 4.0, policy(hand_over="off"))[0] == "reduce-decode"
    # A batch can follow: no hand-over, unless Q too ends within the step (8 / 8 = 1 s more: it does not).
    s.arrive(Request(1, 0.0, 8, 10.0))
    assert choose(DECODE, s, 4.0)[0] == "reduce-decode"
    assert choose(DECODE, s, 4.0, policy(hand_over="queue"))[0] == "reduce-decode"
    # The head of Q does not fit: nothing can follow either.
    full = world([(0.0, 800, 10.0)], [(0.0, 10)], batch=8, layers_done=3, blocks=40)
    assert choose(DECODE, full, 4.0)[0] == "hand-over"
    short = world([(0.0, 4, 10.0)], [(0.0, 10)], batch=8, layers_done=3)
    assert choose(DECODE, short, 4.0, policy(hand_over="queue"))[0] == "hand-over"


# -------------------------------------------------------------------------------- order and batches


def ranks(p: Bullet, s: SystemState, now: float) -> list[int]:
    return [r.id for r in p.queue.sort(s, now, 5)]


def test_least_latency_first_ties_by_arrival() -> None:
    s = world([(0.0, 48, 99.0), (0.1, 12, 99.0), (0.2, 12, 99.0), (0.3, 6, 99.0)])
    assert ranks(policy(), s, 1.0) == [3, 1, 2, 0]
    assert ranks(policy(order="fcfs"), s, 1.0) == [0, 1, 2, 3]


def test_late_requests_go_last_but_not_for_ever() -> None:
    """At t = 10: 0 is late (SLO 1) by 10 x, 1 by 90 % only: not late. Patience of 5: 0 has waited 10 SLOs and goes first."""
    s = world([(0.0, 24, 1.0), (1.0, 12, 10.0), (2.0, 6, 10.0)])
    assert ranks(policy(), s, 10.0) == [2, 1, 0]
    assert ranks(policy(late_patience=5.0), s, 10.0) == [0, 2, 1]
    assert ranks(policy(late_first=True), s, 10.0) == [0, 2, 1]


def test_a_request_that_the_sort_made_late_moves_back_in_time() -> None:
    """0: 24 tokens (2 s), due in 3 s. 1 and 2: 12 tokens (1 s) each. Sorted 1, 2, 0 ends at 4: late, though first in order
    of arrival it ends at 2. Last place in time: after 1 (1 + 2 = 3)."""
    s = world([(0.0, 24, 3.0), (0.0, 12, 99.0), (0.0, 12, 99.0)])
    assert ranks(policy(), s, 0.0) == [1, 0, 2]
    assert ranks(policy(repair=False), s, 0.0) == [1, 2, 0]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 60), st.sampled_from([0.2, 1.0, 5.0, 20.0, 60.0])), min_size=2,
                max_size=9), st.booleans(), st.sampled_from([1.5, 20.0]))
def test_order_and_repair_word_by_word(queue: list[tuple[float, int, float]], late_first: bool, patience: float) -> None:
    """The sort and the repair, spelled out with lists."""
    now = 10.0
    queue = sorted(queue, key=lambda row: row[0])
    own = [t / 12 for _, t, _ in queue]

    def ends(order: list[int]) -> dict[int, float]:
        done = np.cumsum([own[i] for i in order])
        return dict(zip(order, done.tolist(), strict=True))

    def in_time(i: int, end_s: float) -> bool:
        return end_s <= queue[i][2] - (now - queue[i][0])

    late = [i for i, (a, _, o) in enumerate(queue) if now - a > o]
    first = [i for i in late if late_first or now - queue[i][0] > patience * queue[i][2]]
    timely = sorted((i for i in range(len(queue)) if i not in late), key=lambda i: (own[i], i))
    order = [*first, *timely, *(i for i in late if i not in first)]
    by_arrival = ends(list(range(len(queue))))
    for i in range(len(queue)):
        if in_time(i, by_arrival[i]) and not in_time(i, ends(order)[i]):
            at = order.index(i)
            places = [to for to in range(at) if in_time(i, sum(own[j] for j in order[:to]) + own[i])]
            if places:
                order.insert(places[-1], order.pop(at))
    assert ranks(policy(late_first=late_first, late_patience=patience), world(queue), now) == order


def test_the_released_codes_order() -> None:
    s = world([(0.0, 12, 10.0), (0.5, 12, 1.0)])
    assert ranks(policy(order="normalised"), s, 1.0) == [1, 0]  # (0.5 + 1) / 1 over (1 + 1) / 10


def test_a_recomputed_request_stays_in_front() -> None:
    s = world([(0.0, 6, 9.0)], [(0.0, 5), (0.1, 4)])
    s.begin_decode(DecodeStep(12, preempt=(101,)), 1.0)
    assert ranks(policy(), s, 1.0) == [101, 0]


def test_batches_grow_to_the_ridge_and_to_the_cache() -> None:
    s = world([(0.0, 12, 99.0), (0.0, 24, 99.0), (0.0, 36, 99.0)])
    # Intensity 60 a prompt, ridge 100: two prompts.
    assert policy(Tabulated(intensity=60.0)).next_step(PREFILL, s, 0.0).admit == (0, 1)  # type: ignore[union-attr]
    assert policy().next_step(PREFILL, s, 0.0).admit == (0,)  # type: ignore[union-attr]
    small = world([(0.0, 32, 99.0), (0.0, 48, 99.0)], blocks=4)  # 2 blocks, then 3: only the head fits
    assert policy(Tabulated(intensity=1.0)).next_step(PREFILL, small, 0.0).admit == (0,)  # type: ignore[union-attr]


# -------------------------------------------------------------------------------------------- the rest


def test_the_letter_has_no_floor_no_cap_and_puts_late_first() -> None:
    literal = policy(cls=BulletLiteral)
    assert (literal.floor, literal.cap_next_step, literal.options["late_first"]) == (0, False, True)
    s = world(running=[(0.0, 10)], batch=80, target=(6, 6))
    assert choose(PREFILL, s, 4.0, literal) == ("reduce-decode", Partition(10, 2))


def test_without_partitions_both_lanes_hold_everything() -> None:
    s = world(running=[(0.0, 10)], batch=80)
    for lane in (PREFILL, DECODE):
        step = policy(partition=False).next_step(lane, s, 4.0)
        assert (step.sms, step.target) == (12, Partition(12, 12))  # type: ignore[union-attr]


def test_without_partitions_decode_is_still_delayed() -> None:
    """P (SLO 5, now 4.5) is late on all SMs too: decode waits one SLO; in time (SLO 100) it does not."""
    late = world(running=[(0.0, 10)], batch=80, batch_slo=5.0)
    p = policy(partition=False)
    assert p.next_step(DECODE, late, 4.5).until_s == pytest.approx(5.5)  # type: ignore[union-attr]
    assert p.next_step(DECODE, late, 5.5).reason == "shared"
    assert choose(DECODE, late, 4.5, policy(partition=False, delayed_decode=False))[0] == "shared"


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(1, 200), st.sampled_from([0.1, 2.0, 30.0])), max_size=6),
       st.lists(st.tuples(st.floats(0, 4), st.integers(1, 12)), max_size=6), st.none() | st.integers(1, 100),
       st.sampled_from([1.0, 100.0]), st.sampled_from([(8, 4), (0, 12), (12, 0), (12, 12), (2, 10)]),
       st.sampled_from([60, 1000]), st.sampled_from([-1.0, 1.0]), st.sampled_from([Bullet, BulletLiteral]))
def test_deciding_changes_nothing_and_does_not_depend_on_what_was_asked_before(
        queue: list[tuple[float, int, float]], running: list[tuple[float, int]], batch: int | None, batch_slo: float,
        target: tuple[int, int], blocks: int, margin: float, cls: type[Bullet]) -> None:
    s = world(sorted(queue), running, target=target, batch=batch, batch_slo=batch_slo, blocks=blocks)
    s.decode_published, s.prefill_published = Published(tpot_margin_s=margin), Published(ttft_margin_s=margin)
    used = policy(cls=cls)
    lanes = [PREFILL] * bool(queue or batch) + [DECODE] * bool(running)
    for lane in lanes:
        before = pickle.dumps(s)
        step = used.next_step(lane, s, 4.0)
        assert pickle.dumps(s) == before
        if DECODE not in lanes or PREFILL not in lanes:
            assert used.next_step(lane, s, 4.0) == policy(cls=cls).next_step(lane, copy.deepcopy(s), 4.0) == step
        if step.target is not None:
            assert min(step.target) >= 0
            assert max(step.target) <= 12
        if isinstance(step, DecodeStep | PrefillStep):
            assert 0 < step.sms <= 12
            if step.reason in ("reduce-decode", "reduce-prefill", "balanced", "keep", "kv-full"):
                assert sum(step.target) == 12  # type: ignore[arg-type]
                assert step.target.decode_sms >= SPLITS.decode_sms[used.floor]  # type: ignore[union-attr]


def test_observations_reach_the_estimator_but_for_shared_steps() -> None:
    table = Tabulated()
    p = policy(table)
    p.observe(DecodeStep(4, 1.0, reason="reduce-decode"), 1.2)
    p.observe(DecodeStep(12, 1.0, reason="hand-over"), 1.2)
    p.observe(PrefillStep(8, 1, (), 0.5, reason="reduce-decode"), 0.6)
    p.observe(PrefillStep(12, 1, (), 0.5, reason="delayed-decode"), 0.6)
    assert table.seen == [(DECODE, 4, 1.0, 1.2), (PREFILL, 8, 0.5, 0.6)]


@pytest.mark.parametrize(("options", "message"), [
    ({"knob": 1}, "no such option"), ({"late_first": "yes"}, "takes true or false"),
    ({"order": "random"}, "least, fcfs or normalised"),
    ({"hand_over": "x"}, "off, batch or queue"), ({"layers_per_step": 0}, "1 or more"), ({"decode_floor": 1.5}, "under 1"),
    ({"delay_limit": -1.0}, "0 or more"), ({"late_patience": float("nan")}, "0 or more"),
    ({"fixed_decode_sms": 3}, "2 to 10 in the partition's steps")])
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(**options)
