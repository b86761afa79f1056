"""Re-timing worked out by hand: the fraction left is kept when the co-runner changes."""

import pytest

from bullet.policies.base import PolicyContext
from bullet.state import DECODE, PREFILL, DecodeStep, PrefillStep, Step, SystemState, Wait
from tests.worlds import FixedDevice, run_with, times


class TwoLanes:
    """Prefill of one request at a time on 96 SMs, decode on 12."""

    lanes = (PREFILL, DECODE)

    def __init__(self, context: PolicyContext | None = None, layers: int = 32, decode_from_s: float = 0.0) -> None:
        self.layers = layers
        self.decode_from_s = decode_from_s

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if lane == DECODE:
            return Wait(self.decode_from_s) if now_s < self.decode_from_s else DecodeStep(12)
        if state.prefill is not None:
            return PrefillStep(96, min(self.layers, state.prefill.layers_left))
        return PrefillStep(96, self.layers, (state.queue[0].id,))

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


def device(slowdown: tuple[float, float]) -> FixedDevice:
    """Prefill takes 1 s per 100 tokens, decode 1 s, alone."""
    return FixedDevice(lambda kind, tokens, sms: tokens / 100 if kind == "prefill" else 1.0, slowdown)


def test_a_decode_that_starts_halfway_through_a_prefill() -> None:
    """Request 0 (100 tokens, 3 out) and 1 (200 tokens, 1 out), both at t = 0; company doubles prefill, decode x 1.5.

    t 0-1     prefill 0 alone.
    t 1       prefill 1 (2 s alone) and decode of 0 start: prefill would take 4 s, decode 1.5 s.
    t 2.5     decode ends (token 2): prefill has done 1.5 / 4 = 0.375. A second decode starts beside it: nothing changes in
              prefill's rate; decode ends at t 4 with token 3, the last. Prefill has done 3 / 4; alone, what is left takes
              0.25 x 2 s: it ends at t 4.5.
    """
    outcome = run_with(TwoLanes(), [(0.0, 100, 3), (0.0, 200, 1)], device=device((2.0, 1.5)))
    found = times(outcome)
    assert found[0] == pytest.approx((1.0, 4.0), abs=1e-12)
    assert found[1] == pytest.approx((4.5, 4.5), abs=1e-12)
    steps = outcome.steps
    assert steps["corun_s"].tolist() == pytest.approx([0.0, 1.5, 1.5, 3.0])
    # SM-seconds: prefill alone 1 s x 96; both 3 s; prefill alone 0.5 s.
    assert outcome.sm_seconds["prefill_only"] == pytest.approx(4.5 * 96)
    assert outcome.sm_seconds["decode_only"] == pytest.approx(3 * 12)
    assert sum(outcome.sm_seconds.values()) == pytest.approx(4.5 * 108)


def test_a_prefill_whose_layers_meet_a_waiting_decode() -> None:
    """Half the layers at a time; decode of request 0 is held back until t = 2.5; company slows prefill x 3, decode x 2.

    t 0-1     prefill 0 alone: two halves of 0.5 s.
    t 1-2     first half of prefill 1 (200 tokens), alone.
    t 2       second half starts alone: would end at 3.
    t 2.5     decode starts. Half of the second half is done; the rest, alone 0.5 s, takes 1.5 s: ends at 4.0. Decode takes
              2 s beside it: would end at 4.5.
    t 4       prefill ends; decode has done 1.5 / 2; alone the rest takes 0.25 x 1 s: it ends at 4.25.
    """
    outcome = run_with(TwoLanes(layers=16, decode_from_s=2.5), [(0.0, 100, 2), (0.0, 200, 1)], device=device((3.0, 2.0)))
    found = times(outcome)
    assert found[0] == pytest.approx((1.0, 4.25), abs=1e-12)
    assert found[1] == pytest.approx((4.0, 4.0), abs=1e-12)


def test_reconfiguration_is_paid_once_a_change() -> None:
    """A lane that changes its SMs pays ``reconfigure_s`` on that step only."""

    class Growing(TwoLanes):
        def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
            step = super().next_step(lane, state, now_s)
            if isinstance(step, DecodeStep):
                return DecodeStep(12 if state.decode.iteration < 2 else 24)
            return step

    outcome = run_with(Growing(), [(0.0, 100, 5)], device=device((1.0, 1.0)), device__reconfigure_s=0.25)
    assert times(outcome)[0] == pytest.approx((1.0, 1.0 + 4 * 1.0 + 0.25))


def test_ends_at_one_instant_are_settled_once() -> None:
    """Both lanes end at t = 2 exactly: the prefilled request merges into the very next decode iteration."""
    outcome = run_with(TwoLanes(), [(0.0, 100, 3), (0.0, 100, 2)], device=device((1.0, 1.0)))
    # Request 0: first token at 1, then decodes at 2 and (with request 1, prefilled at 2) at 3.
    assert times(outcome) == {0: (1.0, 3.0), 1: (2.0, 3.0)}
    assert outcome.steps["decode_seqs"].tolist() == [0, 0, 1, 2]
