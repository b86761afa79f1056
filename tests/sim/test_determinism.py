"""I7 and what it rests on: configuration, seed and the past decide; policies derive all from what they see."""

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bullet.estimators.make import make_estimator
from bullet.policies import make_policy, needs_estimator
from bullet.policies.base import PolicyContext
from bullet.sim.run import simulate
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    Chunk,
    DecodeStep,
    HybridStep,
    PrefillStep,
    SplitTable,
    Step,
    SystemState,
    Wait,
)
from bullet.workload import Workload
from tests.checks import step_rows
from tests.worlds import A100, FixedDevice, config, run, run_with, times

FAMILIES = ("bullet", "bullet-literal", "bullet-plus", "static-96", "naive", "sglang-512", "sglang-512-mixed", "vllm-512")

# Bursts, long and short, on a cache that makes every family preempt.
RNG = np.random.default_rng(8)
LOAD = [(0.2 * (i // 8), int(p), int(o)) for i, (p, o) in enumerate(zip(
    RNG.choice([16, 100, 700, 2500], 48), RNG.choice([1, 300, 400], 48), strict=True))]
ROOT = Path(__file__).parents[2]
PRESSURE = {"debug": False, "device__kv_tokens": 4_000, "device__noise_std": 0.05}


def options(name: str) -> dict[str, Any]:
    """SGLang sets room aside for what requests may generate: announced short, they outgrow it."""
    return {"assumed_new_tokens": 16} if name.startswith("sglang") else {}


def load(rows: list[tuple[float, int, int]]) -> Workload:
    """Rows with a fixed mean prompt, so that the objective does not depend on which rows there are."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Workload("made", "made", arrival.astype(float), prompt, output, 800.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_load_makes_every_family_preempt(name: str) -> None:
    outcome = simulate(config(name, policy__options=options(name), **PRESSURE), workload=load(LOAD))
    assert outcome.requests["preemptions"].sum() >= 4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_future_does_not_change_the_past(name: str) -> None:
    """Without the last burst, all that ended before the first of them is the same to the last bit."""
    first = LOAD[:40]
    until_s = LOAD[40][0]
    whole = simulate(config(name, **PRESSURE), workload=load(LOAD))
    cut = simulate(config(name, **PRESSURE), workload=load(first))
    before = int((whole.steps["end_s"] < until_s).sum())
    assert before > 20
    assert step_rows(whole)[:before] == step_rows(cut)[:before]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_policy_sees_an_output_length(name: str) -> None:
    """With longer outputs, all that is launched before the first request would have finished is the same."""
    rows = [(t, p, 50) for t, p, _ in LOAD[:24]]
    short = simulate(config(name, **PRESSURE), workload=load(rows))
    long = simulate(config(name, **PRESSURE), workload=load([(t, p, 60) for t, p, _ in rows]))
    until_s = float(short.requests["finish_s"].min())
    before = int((short.steps["end_s"] < until_s).sum())
    assert before > 40
    assert step_rows(short)[:before] == step_rows(long)[:before]


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_change_noise_and_nothing_else(name: str) -> None:
    first, again, other = (step_rows(simulate(config(name, seed=seed, **PRESSURE), workload=load(LOAD)))
                           for seed in (1, 1, 2))
    assert first == again
    assert first != other
    if not needs_estimator(name):  # an estimator draws its samples with the seed
        quiet = [step_rows(simulate(config(name, seed=seed, device__kv_tokens=4_000, debug=False), workload=load(LOAD)))
                 for seed in (1, 2)]
        assert quiet[0] == quiet[1]


def test_another_process_with_other_hashes_gives_the_same_rows() -> None:
    """Nothing is ordered by hash or address."""
    code = ("from tests.sim.test_determinism import *\n"
            "rows = [step_rows(simulate(config(n, **PRESSURE), workload=load(LOAD))) for n in ('bullet', 'vllm-512')]\n"
            "print(hashlib.sha256(repr(rows).encode()).hexdigest())")
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                              capture_output=True, text=True, cwd=ROOT)
        found.add(done.stdout)
    rows = [step_rows(simulate(config(n, **PRESSURE), workload=load(LOAD))) for n in ("bullet", "vllm-512")]
    assert found == {hashlib.sha256(repr(rows).encode()).hexdigest() + "\n"}


class TwoLanes:
    """One prompt at a time, in steps of ``layers`` on 96 SMs; decodes on 12."""

    lanes = (PREFILL, DECODE)

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if lane == DECODE:
            return DecodeStep(12)
        admit = (state.queue[0].id,) if state.prefill is None else ()
        return PrefillStep(96, self.layers, admit)

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


def test_noise_is_keyed_by_lane_and_step() -> None:
    """Steps take 1 s (a whole prefill) alone or not, so a step's seconds are its factor, whatever runs in between.

    With 2 prefill steps a prompt rather than 1 the prefill lane draws twice as often; decode's factors stay.
    """
    device = FixedDevice(lambda kind, tokens, sms: 1.0)
    rows = [(0.0, 10, 8), (0.0, 10, 8)]

    def factors(layers: int, seed: int) -> dict[str, list[float]]:
        steps = run_with(TwoLanes(layers), rows, device=device, device__noise_std=0.2, seed=seed).steps
        whole_s = steps["actual_s"] * 32 / steps["layers"]
        return {lane: whole_s[steps["lane"] == lane].tolist() for lane in (PREFILL, DECODE)}

    once, twice, other = factors(32, 0), factors(16, 0), factors(32, 1)
    shared = min(len(once[DECODE]), len(twice[DECODE]))
    assert shared >= 7
    assert once[DECODE][:shared] == pytest.approx(twice[DECODE][:shared], rel=1e-12)
    assert once[PREFILL] == pytest.approx(twice[PREFILL][:2], rel=1e-12)
    assert once[PREFILL] != pytest.approx(once[DECODE][:2])  # lanes have streams of their own
    assert once[DECODE] != pytest.approx(other[DECODE])
    assert len(set(once[DECODE])) == len(once[DECODE])


def test_noise_has_the_spread_asked_for() -> None:
    """log(factor) is normal with mean 0 and the given standard deviation: 4,000 steps give it to about 3 %."""
    device = FixedDevice(lambda kind, tokens, sms: 1.0)
    steps = run_with(TwoLanes(32), [(0.0, 10, 4000)], device=device, device__noise_std=0.2, debug=False).steps
    logs = np.log(steps["actual_s"])
    assert abs(logs.mean()) < 4 * 0.2 / np.sqrt(len(logs))
    assert logs.std() == pytest.approx(0.2, rel=4 / np.sqrt(2 * len(logs)))


# ----------------------------------------------------------------------------------------------- replay


def fingerprint(state: SystemState) -> Any:
    """All that a policy can reach, by value."""
    def of(request: Any) -> tuple[Any, ...]:
        return tuple(getattr(request, name) for name in request.__slots__)

    batch, decode = state.prefill, state.decode
    return (
        [of(r) for r in state.queue], state.queue.version, list(state.queue.arrival_s),
        list(state.queue.ttft_slo_s), list(state.queue.known_tokens),
        batch and ([of(r) for r in batch.requests], batch.layers_done, batch.tokens),
        [of(r) for r in state.ready], [of(r) for r in state.chunked], [of(r) for r in decode.requests.values()],
        decode.iteration, decode.version, decode.cached_tokens, list(decode.residues), decode.first_token_s.tolist(),
        decode.generated_offset.tolist(), state.kv.free_blocks, dict(state.in_flight), state.target,
        state.prefill_published, state.decode_published)


@pytest.mark.parametrize(("name", "estimator"), [*((name, "srm") for name in FAMILIES), ("bullet", "oracle")])
def test_a_record_replays_into_a_fresh_policy(name: str, estimator: str) -> None:
    """Honesty rule 3, by the driver's own record, under memory pressure and noise; and no policy mutates the state."""
    splits = SplitTable.every(108)

    def fresh() -> Any:
        asked = make_estimator(estimator, device=A100, model=A100.model, gpu=A100.gpu, splits=splits, seed=0)
        return make_policy(name, PolicyContext(A100.model, A100.gpu, splits, 0.05, asked, options(name)))

    live = fresh()

    class Watched:
        lanes = live.lanes
        observe = staticmethod(live.observe)

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            before = fingerprint(state)
            decision = live.next_step(lane, state, now_s)
            assert fingerprint(state) == before, "the policy changed the state"
            return decision

    records: list[tuple[str, bytes]] = []
    outcome = run_with(Watched(), LOAD[:24], record=lambda kind, values: records.append((kind, pickle.dumps(values))),
                       **PRESSURE)
    assert outcome.requests["preemptions"].sum() > 0
    again = fresh()
    for kind, stored in records:
        values = pickle.loads(stored)
        if kind == "observe":
            again.observe(*values)
        else:
            lane, state, now_s, decision = values
            assert again.next_step(lane, state, now_s) == decision
    kinds = [kind for kind, _ in records]
    assert kinds.count("next_step") >= kinds.count("observe") > 150


def test_a_steady_step_is_what_asking_each_time_would_give() -> None:
    """Repeated without asking, or asked for at every step: the same rows, and far fewer questions."""
    splits = SplitTable.every(108)

    class Asking:
        lanes = (HYBRID,)

        def __init__(self, steady: bool) -> None:
            self.vllm = make_policy("vllm-512", PolicyContext(A100.model, A100.gpu, splits, 0.05, None, {}))
            self.steady = steady
            self.observed: list[float] = []

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            answer = self.vllm.next_step(lane, state, now_s)
            return answer._replace(steady=answer.steady and self.steady) if isinstance(answer, HybridStep) else answer

        def observe(self, step: Step, elapsed_s: float) -> None:
            self.observed.append(elapsed_s)

    for more in ({"device__kv_tokens": 4_000, "device__noise_std": 0.05}, {}):
        policies = [Asking(steady) for steady in (True, False)]
        once, each = (run_with(policy, LOAD, device=A100, **more) for policy in policies)
        assert step_rows(once) == step_rows(each)
        assert repr(once.requests.data) == repr(each.requests.data)
        assert (once.itl_s.tolist(), once.itl_counts.tolist()) == (each.itl_s.tolist(), each.itl_counts.tolist())
        assert policies[0].observed == policies[1].observed == each.steps["actual_s"].tolist()
        assert once.decisions < each.decisions - 100


def test_an_arrival_at_the_very_end_of_a_repeated_step_is_let_in_there() -> None:
    """Every step takes 1 s: prefill 0-1, tokens at 2, 3, 4 in repeated steps; the second comes at 4 and is admitted at 4."""
    outcome = run("vllm-512", [(0.0, 10, 9), (4.0, 10, 2)], device=FixedDevice(lambda kind, tokens, sms: 1.0))
    assert outcome.decisions < 8  # steps were repeated
    assert outcome.requests["admitted_s"].tolist() == [4.0, 0.0]  # in the order of their ends
    assert times(outcome) == {0: (1.0, 9.0), 1: (5.0, 6.0)}


def test_a_steady_step_that_holds_more_than_decodes_is_refused() -> None:
    class Wrong:
        lanes = (HYBRID,)

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            head = state.queue[0]
            return HybridStep(108, (Chunk(head.id, head.known_tokens, 0),), False, steady=True)

        def observe(self, step: Step, elapsed_s: float) -> None:
            """It learns nothing."""

    with pytest.raises(AssertionError, match="decodes alone"):
        run_with(Wrong(), [(0.0, 10, 3)], device=A100)
