"""Bullet on every built-in trace at 1.2 x Fig. 15's highest rate: nobody starves, no lane idles for nothing (I8)."""

from typing import Any

import numpy as np
import pytest

from bullet.policies.twolane import fits
from bullet.results.columns import RunOutcome
from bullet.sim.run import simulate
from bullet.state import DECODE, PREFILL, SystemState, Wait
from bullet.workload import load_workload
from tests.checks import Recorder, check_idling
from tests.worlds import config

RATES = {"sharegpt": 30.0, "azure-code": 6.6, "azure-conv": 7.74, "arxiv": 1.08}
COUNT = 250


class WaitsChecked(Recorder):
    """Each Wait, at the moment it is said: is there truly nothing that the lane should do?"""

    def __init__(self, tpot_slo_s: float) -> None:
        super().__init__()
        self.tpot_slo_s = tpot_slo_s
        self.reasons: set[tuple[str, str]] = set()

    def __call__(self, kind: str, values: tuple[Any, ...]) -> None:
        super().__call__(kind, values)
        if kind != "next_step" or not isinstance(values[3], Wait):
            return
        lane, state, now_s, wait = values
        self.reasons.add((lane, wait.reason))
        if lane == PREFILL:
            self.full(state)
        else:
            # Delayed decode: prefill has something to launch, and the delay is at most one objective long.
            assert (wait.reason, state.prefill is not None) == ("delayed-decode", True)
            assert now_s < wait.until_s <= now_s + self.tpot_slo_s + 1e-9

    def full(self, state: SystemState) -> None:
        """Some prompt at the head of Q does not fit, and decodes are there whose end will free blocks."""
        assert state.prefill is None
        assert not all(fits(state, state.kv.blocks_for(request.known_tokens)) for request in state.queue)
        assert state.decode_seqs > 0


@pytest.fixture(scope="module", params=RATES)
def replay(request: pytest.FixtureRequest) -> tuple[RunOutcome, WaitsChecked]:
    c = config("bullet", debug=False, workload__trace=request.param, workload__rate_req_per_s=RATES[request.param],
               workload__num_requests=COUNT)
    recorder = WaitsChecked({"sharegpt": 0.15, "azure-code": 0.2, "azure-conv": 0.15, "arxiv": 0.175}[request.param])
    return simulate(c, workload=load_workload(c.workload, 3), record=recorder), recorder


def test_everything_finishes(replay: tuple[RunOutcome, WaitsChecked]) -> None:
    assert replay[0].requests["status"].tolist() == ["finished"] * COUNT


def test_no_lane_idles_but_by_a_justified_wait(replay: tuple[RunOutcome, WaitsChecked]) -> None:
    outcome, recorder = replay
    check_idling(outcome, recorder)
    assert recorder.reasons <= {(DECODE, "delayed-decode"), (PREFILL, "kv-full")}


def test_no_decode_step_is_longer_than_twice_the_objective(replay: tuple[RunOutcome, WaitsChecked]) -> None:
    outcome = replay[0]
    decode = outcome.steps["lane"] == DECODE
    assert (outcome.steps["end_s"] - outcome.steps["start_s"])[decode].max() <= 2 * outcome.tpot_slo_s


def test_nobody_waits_behind_later_arrivals_for_ever(replay: tuple[RunOutcome, WaitsChecked]) -> None:
    """A request that has waited 20 x its TTFT objective is overtaken no more (``late_patience``)."""
    r = replay[0].requests
    order = np.argsort(r["id"])  # ids are in order of arrival
    arrival, admitted = r["arrival_s"][order], r["admitted_s"][order]
    overdue = arrival + 20 * r["ttft_slo_mean_length_s"][order]
    for later in range(1, COUNT):
        overtaken = (admitted[:later] > admitted[later]) & (admitted[later] > overdue[:later])
        assert not overtaken.any(), f"{later} overtook {np.flatnonzero(overtaken).tolist()}"
