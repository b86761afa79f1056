"""The driver's guards and edges, each with a policy of a few lines. test_invariants.py has the plain misbehaviours."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bullet.errors import NoProgressError
from bullet.results.columns import RequestTable
from bullet.results.folder import RunWriter, read_table
from bullet.sim import driver
from bullet.sim import run as run_module
from bullet.sim.run import simulate
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    Chunk,
    DecodeStep,
    HybridStep,
    Partition,
    PrefillStep,
    Published,
    Step,
    SystemState,
    Wait,
)
from tests.worlds import FixedDevice, config, run, run_with, times, workload

FAMILIES = ("bullet", "bullet-literal", "bullet-plus", "static-96", "naive", "sglang-512", "sglang-512-mixed", "vllm-512")


class Policy:
    """Serves whole prompts one at a time, with all decodes in between."""

    lanes: tuple[str, ...] = (HYBRID,)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if state.decode.requests:
            return HybridStep(108, (), True)
        head = state.queue[0]
        return HybridStep(108, (Chunk(head.id, head.known_tokens, 0),), False)

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


class TwoLanes(Policy):
    """One prompt at a time on 96 SMs, decodes on 12."""

    lanes = (PREFILL, DECODE)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if lane == DECODE:
            return DecodeStep(12)
        if state.prefill is None:
            return PrefillStep(96, 32, (state.queue[0].id,))
        return PrefillStep(96, state.prefill.layers_left)


ONE_SECOND = FixedDevice(lambda kind, tokens, sms: 1.0)


# --------------------------------------------------------------------------------------- stuck policies


@pytest.mark.parametrize("step_s", [1e-3, 0.0])
def test_a_policy_that_polls_for_ever_is_stuck(step_s: float) -> None:
    """LLMServingSim#55: nothing runs and logs spin. Each Wait moves time on, by a millisecond or by its last bit."""

    class Polls(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            return Wait(now_s + step_s if step_s else math.nextafter(now_s, math.inf))

    with pytest.raises(NoProgressError, match=r"0 of 1 requests closed, 1 waiting \(head: Request\(0, WAITING"):
        run_with(Polls(), [(1.0, 100, 2)], debug=False)


@pytest.mark.parametrize("step_s", [1e-12, 1e-11])
def test_a_policy_that_creeps_towards_a_far_arrival_is_stuck(step_s: float) -> None:
    """Time moves, an arrival is to come, and yet it would take years to get there."""

    class Creeps(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            return Wait(now_s + step_s)

    with pytest.raises(NoProgressError, match="decisions at one instant"):
        run_with(Creeps(), [(1.0, 100, 2), (1e6, 100, 2)], debug=False)


def test_a_policy_that_polls_until_its_time_comes_is_not_stuck() -> None:
    class Polls(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            return Wait(now_s + 1e-3) if now_s < 5.0 else super().next_step(lane, state, now_s)

    found = times(run_with(Polls(), [(1.0, 100, 1)], device=ONE_SECOND))
    assert found[0] == pytest.approx((6.0, 6.0), abs=2e-3)


@pytest.mark.parametrize("until_s", [math.inf, math.nan])
def test_waiting_for_no_time_at_all_is_stuck(until_s: float) -> None:
    class Waits(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            return Wait(until_s)

    with pytest.raises(NoProgressError, match="waits for nothing"):
        run_with(Waits(), [(0.0, 100, 2)])


def test_a_decode_lane_that_always_waits_is_stuck_once_prefill_is_done() -> None:
    class NeverDecodes(TwoLanes):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            return Wait() if lane == DECODE else super().next_step(lane, state, now_s)

    with pytest.raises(NoProgressError, match=r"1 of 3 requests closed, 0 waiting \(head: None\).*2 ready, 0 decoding"):
        run_with(NeverDecodes(), [(0.0, 10, 1), (0.0, 10, 2), (0.0, 10, 2)], device=ONE_SECOND)


@pytest.mark.parametrize("sms", [0, -2, 109])
@pytest.mark.parametrize("lane", [PREFILL, DECODE])
def test_an_impossible_number_of_sms_is_refused(lane: str, sms: int) -> None:
    class Asks(TwoLanes):
        def next_step(self, asked: str, state: SystemState, now_s: float) -> Step | Wait:
            step = super().next_step(asked, state, now_s)
            assert not isinstance(step, Wait)
            return step._replace(sms=sms) if asked == lane else step

    with pytest.raises(NoProgressError, match=f"asked for {sms} SMs: the device has 1 to 108"):
        run_with(Asks(), [(0.0, 10, 2)])


@pytest.mark.parametrize("ending", ["stuck", "interrupted"])
def test_a_stopped_run_keeps_a_row_for_every_request(ending: str, tmp_path: Path) -> None:
    """offered = finished + rejected + unfinished also then: 1 done, 2 refused, 1 decoding, 1 waiting, 1 to come."""

    class Stops(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            if now_s < 4.0:
                return super().next_step(lane, state, now_s)
            if ending == "interrupted":
                raise KeyboardInterrupt
            return Wait(now_s)

    # 0: first token at 1, second and last at 2. 3: first token at 3, decodes from then on. 4 waits. 5 comes at t = 9.
    rows = [(0.0, 10, 2), (0.0, 5000, 2), (0.0, 131_072, 2), (0.5, 10, 50), (0.6, 10, 2), (9.0, 10, 2)]
    writer, small = RunWriter(tmp_path / "run"), config(device__kv_tokens=1600)
    with pytest.raises((NoProgressError, KeyboardInterrupt)):
        simulate(small, workload=workload(rows), device=ONE_SECOND, policy=Stops(), writer=writer)
    writer.abort("stopped by the test")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    requests = read_table(tmp_path / "run" / "requests.parquet", RequestTable)
    assert summary["complete"] is False
    assert {k: summary[k] for k in ("offered", "finished", "rejected", "unfinished")} == {
        "offered": 6, "finished": 1, "rejected": 2, "unfinished": 3}
    found = {i: (status, reason, made) for i, status, reason, made in zip(
        requests["id"].tolist(), requests["status"], requests["reason"], requests["generated_tokens"], strict=True)}
    assert found == {0: ("finished", "", 2), 1: ("rejected", "over_kv_capacity", 0), 2: ("rejected", "over_context", 0),
                     3: ("unfinished", "", 2), 4: ("unfinished", "", 0), 5: ("unfinished", "not yet arrived", 0)}


# ------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("policy", FAMILIES)
def test_one_token_outputs_never_decode(policy: str) -> None:
    outcome = run(policy, [(0.01 * i, 50 + i, 1) for i in range(20)])
    assert outcome.steps["decode_seqs"].sum() == 0
    assert len(outcome.itl_s) == 0
    assert np.array_equal(outcome.requests["first_token_s"], outcome.requests["finish_s"])


@pytest.mark.parametrize("policy", FAMILIES)
def test_no_requests(policy: str) -> None:
    outcome = run(policy, [])
    assert (len(outcome.requests), len(outcome.steps), outcome.span_s) == (0, 0, 0.0)
    assert set(outcome.sm_seconds.values()) == {0.0}


@pytest.mark.parametrize("policy", FAMILIES)
def test_only_requests_that_are_refused(policy: str) -> None:
    outcome = run(policy, [(1.0, 200_000, 1), (2.0, 200_000, 1)])
    assert outcome.requests["status"].tolist() == ["rejected"] * 2
    assert (outcome.span_s, outcome.sm_seconds["idle"]) == (1.0, 108.0)


@pytest.mark.parametrize(("prompt", "output", "status"), [
    (4000, 96, "finished"), (4000, 97, "rejected"), (4096, 1, "rejected"), (4095, 1, "finished")])
def test_the_context_holds_prompt_and_output(prompt: int, output: int, status: str) -> None:
    """The tiny model's context is 4,096 tokens."""
    c = config("vllm-512", device__model="tiny")
    assert simulate(c, workload=workload([(0.0, prompt, output)])).requests["status"].tolist() == [status]


@pytest.mark.parametrize("policy", FAMILIES)
def test_requests_at_one_instant_are_seen_together(policy: str) -> None:
    """Two short prompts at t = 0 share the first batch: the first decision sees both."""
    outcome = run(policy, [(0.0, 30, 3), (0.0, 40, 3)])
    assert outcome.steps["prefill_tokens"][0] == 70
    assert len(set(outcome.requests["first_token_s"].tolist())) == 1


def test_a_request_that_arrives_as_a_step_ends_joins_the_next() -> None:
    """t 0-1 prompt 0, 1-2 its token 2; request 1 arrives at exactly 2.0, is served 2-3."""
    found = times(run_with(Policy(), [(0.0, 10, 2), (2.0, 10, 1)], device=ONE_SECOND))
    assert found == {0: (1.0, 2.0), 1: (3.0, 3.0)}


def test_a_request_preempted_before_its_first_decode_has_its_gap_counted_once() -> None:
    """Each step takes 1 s. Prompt A 0-1, decode A 1-2, prompt B 2-3, decode A with B preempted 3-4, prompt B and its
    token again 4-5, decode both 5-6.

    Tokens of A at 1, 2, 4, 6: gaps 1, 2, 2. Tokens of B at 3, 5, 6: gaps 2, 1.
    """

    class Scripted(Policy):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            if now_s in (1.0, 5.0):
                return HybridStep(108, (), True)
            if now_s == 3.0:
                return HybridStep(108, (), True, preempt=(1,))
            head = state.queue[0]
            return HybridStep(108, (Chunk(head.id, head.known_tokens, 0),), False)

    outcome = run_with(Scripted(), [(0.0, 10, 4), (1.5, 20, 3)], device=ONE_SECOND)
    assert sorted(np.repeat(outcome.itl_s, outcome.itl_counts).tolist()) == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert times(outcome) == {0: (1.0, 6.0), 1: (3.0, 6.0)}
    assert outcome.steps["prefill_tokens"].tolist() == [10, 0, 20, 0, 21, 0]
    # B waited 1.5-2 and, preempted, 3-4.
    assert outcome.device["wait_sum_s"] == outcome.device["queue_integral_s"] == 1.5


# -------------------------------------------------------------------------------------- the shared board


class Publishes(TwoLanes):
    """Prefill, 4 layers (1 / 8 s) at a time, publishes its launch number; both lanes note what they see and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, float | None, Partition]] = []
        self.launches = 0

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        self.seen.append((lane, now_s, state.prefill_published.ttft_margin_s, state.target))
        if lane == DECODE:
            return DecodeStep(12)
        self.launches += 1
        admit = (state.queue[0].id,) if state.prefill is None else ()
        return PrefillStep(96, 4, admit, published=Published(ttft_margin_s=float(self.launches)),
                           target=Partition(108 - 2 * self.launches, 2 * self.launches))


@pytest.mark.parametrize(("delay_s", "at_decode"), [(0.0, 9.0), (0.0625, 8.0), (0.25, 7.0)])
def test_published_values_reach_the_other_lane_after_the_delay(delay_s: float, at_decode: float) -> None:
    """Request 0's 8 launches are at 0, 1/8 .. 7/8 (numbers 1-8), request 1's first (number 9) at t = 1.

    Decode is asked first at t = 1, after prefill. With no delay it sees number 9; a delay of 1/16 hides that one but
    not number 8, of 7/8; a delay of 1/4 leaves number 7, of 6/8, which becomes visible at exactly t = 1. The prefill
    lane sees its own at once.
    """
    policy = Publishes()
    device = FixedDevice(lambda kind, tokens, sms: 1.0)
    run_with(policy, [(0.0, 10, 2), (0.0, 10, 1)], device=device, device__publish_delay_s=delay_s)
    first_decode = next(s for s in policy.seen if s[0] == DECODE)
    assert first_decode == (DECODE, 1.0, at_decode, Partition(108 - 2 * int(at_decode), 2 * int(at_decode)))
    own = [(margin, target) for lane, _, margin, target in policy.seen if lane == PREFILL]
    assert own[0] == (None, Partition(108, 108))
    assert own[1:] == [(float(n), Partition(108 - 2 * n, 2 * n)) for n in range(1, 16)]


def test_the_latest_target_wins_by_the_time_it_was_written() -> None:
    """Decode writes (54, 54) at t = 1; prefill's (96, 12) of t = 0.5 reaches decode at 1.499 and changes nothing."""

    class Writers(TwoLanes):
        def __init__(self) -> None:
            self.decode_sees: list[tuple[float, Partition]] = []

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            if lane == DECODE:
                self.decode_sees.append((now_s, state.target))
                return DecodeStep(12, target=Partition(54, 54) if now_s == 1.0 else None)
            admit = (state.queue[0].id,) if state.prefill is None else ()
            return PrefillStep(96, 16, admit, target=Partition(96, 12) if now_s == 0.5 else None)

    policy = Writers()
    run_with(policy, [(0.0, 10, 4)], device=ONE_SECOND, device__publish_delay_s=0.999)
    assert policy.decode_sees == [(1.0, Partition(108, 108)), (2.0, Partition(54, 54)), (3.0, Partition(54, 54))]


def test_rows_tell_what_ran_beside_what() -> None:
    """Prompt 0 alone for 1 s; then decode of 0 (12 SMs) and prompt 1 (96 SMs) together from 1 to 2."""
    steps = run_with(TwoLanes(), [(0.0, 10, 2), (0.0, 20, 1)], device=ONE_SECOND).steps
    columns = ("lane", "start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "context_tokens", "corun_s",
               "corun_sms", "queue")
    assert [tuple(steps[c][i] for c in columns) for i in range(3)] == [
        (PREFILL, 0.0, 1.0, 96, 10, 0, 0, 0.0, 0, 2),
        (PREFILL, 1.0, 2.0, 96, 20, 0, 0, 1.0, 12, 1),
        (DECODE, 1.0, 2.0, 12, 0, 1, 11, 1.0, 96, 0)]  # attends to the prompt's 10 and the token it computes


def test_of_two_targets_written_at_one_instant_decodes_is_the_last() -> None:
    """At t = 1 prefill is asked first and writes (96, 12), then decode (54, 54): in the end both lanes see decode's."""

    class Writers(TwoLanes):
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, Partition]] = []

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            self.seen.append((lane, now_s, state.target))
            step = super().next_step(lane, state, now_s)
            mine = Partition(96, 12) if lane == PREFILL else Partition(54, 54)
            return step._replace(target=mine if now_s == 1.0 else None)

    policy = Writers()
    run_with(policy, [(0.0, 10, 3), (0.0, 10, 1), (0.0, 10, 1)], device=ONE_SECOND)
    assert [seen for seen in policy.seen if seen[1] == 2.0] == [
        (PREFILL, 2.0, Partition(54, 54)), (DECODE, 2.0, Partition(54, 54))]


def test_what_a_lane_has_not_looked_at_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request decodes for 3,000 steps and nothing arrives: prefill has nothing to decide, and then sees the last target."""
    seen: list[int] = []
    unseen: list[int] = []
    running: list[driver.Simulation] = []

    class Watched(driver.Simulation):
        def run(self) -> None:
            running.append(self)
            super().run()

    class Counting(TwoLanes):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            if lane == PREFILL:
                seen.append(state.target.decode_sms)
                return PrefillStep(96, 32, (state.queue[0].id,))
            unseen.append(len(running[0].lanes[0].pending))
            return DecodeStep(12, target=Partition(106, 2 + 2 * (state.decode.iteration % 3)))

    monkeypatch.setattr(run_module, "Simulation", Watched)
    run_with(Counting(), [(0.0, 10, 3001), (5000.0, 10, 1)], device=ONE_SECOND, debug=False)
    assert max(unseen) == driver.PENDING_KEPT
    assert seen[-1] == 2 + 2 * (2999 % 3)
