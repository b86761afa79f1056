"""The real driver's loop with an engine and a clock that are not real: every time below is worked out by hand.

A layer of prefill takes 1 ms and an iteration 2 ms; the model has 4 layers. No torch.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeClock, replay, times

import bullet
from bullet.errors import ConfigError, EngineError, NoProgressError, PolicyError
from bullet.policies.custom import Custom
from bullet.results import metrics
from bullet.state import DECODE, HYBRID, PREFILL, Chunk, DecodeStep, HybridStep, PrefillStep, Wait

POLICIES = ("bullet", "bullet-literal", "bullet-plus", "static-6", "naive", "sglang-64", "sglang-64-mixed", "vllm-256")
MS = 1e-3


class TwoLanes:
    """One prompt at a time, ``layers`` at a time, decodes on two SMs."""

    lanes = (PREFILL, DECODE)

    def __init__(self, layers=2):
        self.layers, self.seen = layers, []

    def next_step(self, lane, state, now_s):
        if lane == DECODE:
            return DecodeStep(2, predicted_s=2 * MS)
        if state.prefill is None:
            return PrefillStep(6, self.layers, (state.queue[0].id,))
        return PrefillStep(6, min(self.layers, state.prefill.layers_left))

    def observe(self, step, elapsed_s):
        self.seen.append((type(step).__name__, elapsed_s))


def test_one_request_takes_its_prefill_and_its_iterations():
    """4 layers, then two more tokens: 4 + 2 x 2 ms, counted from the arrival and not from the run's start."""
    run, engine, sink = replay([(0.5, 20, 3)], TwoLanes())
    first, finish = times(sink)[0]
    assert first == pytest.approx(0.504)
    assert finish == pytest.approx(0.508)
    assert [entry[0] for entry in engine.log] == ["prefill", "prefill", "decode", "decode"]
    assert engine.log[0][3] == ("prefill", 6)
    assert engine.log[2][3] == ("decode", 2)
    assert engine.free() == 1000
    assert run.itl_s == pytest.approx([2 * MS, 2 * MS])


def test_on_one_processor_lanes_take_turns_and_a_step_includes_the_wait_for_its_turn():
    """The first request decodes from 4 ms on while the second is prefilled two layers at a time: prefill, decode,
    prefill, decode. The first of these starts at once; each other one lasts its own 2 ms and the other's 2 ms."""
    policy = TwoLanes()
    _, engine, sink = replay([(0.0, 20, 3), (0.001, 20, 1)], policy)
    assert [(e[0], round(e[4] - 100, 6)) for e in engine.log] == [
        ("prefill", 0.0), ("prefill", 0.002), ("prefill", 0.004), ("decode", 0.006), ("prefill", 0.008), ("decode", 0.01)]
    found = times(sink)
    assert found[0] == pytest.approx((0.004, 0.012))
    assert found[1] == pytest.approx((0.010, 0.010))
    steps, _ = sink.tables()
    both = steps["corun_s"] > 0
    assert steps["actual_s"][both].tolist() == pytest.approx([2 * MS, 4 * MS, 4 * MS, 4 * MS])
    assert [seconds for _, seconds in policy.seen[2:]] == pytest.approx([2 * MS, 4 * MS, 4 * MS, 4 * MS])
    assert set(steps["corun_sms"][both].tolist()) == {2, 6}


def test_on_a_gpu_both_lanes_run_and_events_time_a_step():
    """The same requests where launches do not block: the second prefill (4 ms) and both iterations run side by side.
    A step's time is its own events', whatever the host's polling adds to its row's end."""
    policy = TwoLanes()
    _, engine, sink = replay([(0.0, 20, 3), (0.001, 20, 1)], policy, turns=False)
    found = times(sink)
    late = 4 * 20e-6  # a poll is 20 us; four ends in a row
    assert found[0][1] == pytest.approx(0.008, abs=late)
    assert found[1][0] == pytest.approx(0.008, abs=late)
    steps, _ = sink.tables()
    assert steps["actual_s"].tolist() == pytest.approx([2 * MS] * 6)
    assert np.all(steps["end_s"] - steps["start_s"] >= steps["actual_s"] - 1e-9)
    assert np.sum(steps["corun_s"] > 0) == 4
    assert engine.free() == 1000


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request_to_its_length(policy, turns):
    rng = np.random.default_rng(7)
    rows = [(float(t), int(p), int(o)) for t, p, o in zip(
        np.cumsum(rng.exponential(0.004, 40)), rng.integers(1, 200, 40), rng.integers(1, 30, 40), strict=True)]
    run, engine, sink = replay(rows, policy, turns=turns, blocks=60)
    _, requests = sink.tables()
    assert (requests["status"] == "finished").all()
    assert sorted(requests["id"].tolist()) == list(range(40))
    assert (requests["generated_tokens"] == requests["output_tokens"]).all()
    assert (requests["first_token_s"] >= requests["arrival_s"]).all()
    assert engine.free() == 60
    assert not engine.tokens
    outcome = run.outcome()
    summary = metrics.summarise(outcome)
    assert summary["source"] == "measured"
    assert summary["gpu"] == "fake"
    # Every token after a request's first is one gap.
    assert len(outcome.itl_s) == sum(o - 1 for _, _, o in rows)
    assert sum(outcome.sm_seconds.values()) == pytest.approx(8 * outcome.span_s)


def run_workload(rows):
    from fake_engine import workload

    return workload(rows)


def test_a_full_cache_preempts_in_the_engine_too():
    """Two requests of 15 tokens grow to 31: four blocks in all, three there are. One is preempted and computed again."""
    run, engine, sink = replay([(0.0, 15, 17), (0.0, 15, 17)], "naive", blocks=3)
    assert ("preempt", 1) in engine.log
    _, requests = sink.tables()
    assert requests["preemptions"].sum() == 1
    assert (requests["generated_tokens"] == 17).all()
    again = [entry for entry in engine.log if entry[0] == "prefill"]
    assert again[-1][1] > 15  # what it had generated is part of the second prefill
    assert run.state.kv.free_blocks == 3


def test_requests_that_can_never_fit_are_refused_by_name():
    _, _, sink = replay([(0.0, 4000, 200), (0.0, 100, 50), (0.0, 20, 2)], "vllm-256", blocks=5)
    _, requests = sink.tables()
    assert dict(zip(requests["id"].tolist(), requests["reason"].tolist(), strict=True)) == {
        0: "over_context", 1: "over_kv_capacity", 2: ""}


def test_a_chunked_prompt_rides_with_the_decodes():
    """Chunks of 32 of an 80-token prompt, in steps of 4 ms (a prefill of all layers); the iteration after takes 2 ms."""

    class Chunked:
        lanes = (HYBRID,)

        def next_step(self, lane, state, now_s):
            for request in [*state.chunked, *state.queue]:
                new = min(32, request.known_tokens - request.computed_tokens)
                return HybridStep(8, (Chunk(request.id, new, request.computed_tokens),), bool(state.decode.size))
            return HybridStep(8)

        def observe(self, step, elapsed_s):
            pass

    _, engine, sink = replay([(0.0, 80, 2), (0.013, 10, 1)], Chunked())
    assert [(e[0], e[1]) for e in engine.log] == [("prefill", 32), ("prefill", 32), ("prefill", 16), ("decode", 1),
                                                  ("prefill", 10)]
    assert times(sink)[0] == pytest.approx((0.012, 0.014))
    assert times(sink)[1] == pytest.approx((0.018, 0.018))


def test_waits_are_slept_until_their_time():
    class Waits(TwoLanes):
        def next_step(self, lane, state, now_s):
            return Wait(0.2) if now_s < 0.2 else super().next_step(lane, state, now_s)

    run, _, sink = replay([(0.0, 20, 1)], Waits())
    assert times(sink)[0][0] == pytest.approx(0.204)
    assert run.decisions == 3  # asked once, and not at every nap


@pytest.mark.parametrize(("answer", "error", "message"), [
    (Wait(), NoProgressError, "waits for nothing"),
    (Wait(-1.0), NoProgressError, "already past"),
    (Wait(math.nan), NoProgressError, "waits for nothing"),
    (PrefillStep(9, 1, (0,)), NoProgressError, "asked for 9 SMs"),
    (DecodeStep(2), ConfigError, "must be a PrefillStep or a Wait"),
])
def test_a_policy_that_misbehaves_is_told(answer, error, message):
    class Misbehaves(TwoLanes):
        def next_step(self, lane, state, now_s):
            return answer

    with pytest.raises(error, match=message):
        replay([(0.0, 10, 2)], Misbehaves())


@pytest.mark.parametrize(("answer", "message"), [
    (PrefillStep(6.0, 1, (0,)), "a PrefillStep with sms = 6.0: must be a whole number"),
    (PrefillStep(6, 1, (0,), reason=None), "reason = None: must be text"),
    (Wait("soon"), "a Wait with until_s = 'soon': must be None or a time"),
])
def test_a_users_answer_with_a_field_of_another_kind_is_told(answer, message):
    class Misbehaves(TwoLanes):
        def next_step(self, lane, state, now_s):
            return answer

    policy = Custom("mine.py:Misbehaves", Path("mine.py"), Misbehaves())
    with pytest.raises(PolicyError, match=message):
        replay([(0.0, 10, 2)], policy, policy__name="mine.py:Misbehaves")


def test_a_stop_keeps_what_is_finished_and_accounts_for_the_rest():
    calls = []

    def stop(busy):
        calls.append(None)
        return len(calls) > 9

    runs = []
    with pytest.raises(KeyboardInterrupt):
        replay([(0.0, 20, 1), (0.0, 20, 9), (0.5, 20, 2)], TwoLanes(), stop=stop, before=runs.append)
    (run,) = runs
    run.close_unfinished()
    _, requests = run.sink.tables()
    assert dict(zip(requests["id"].tolist(), requests["status"].tolist(), strict=True)) == {
        0: "finished", 1: "unfinished", 2: "unfinished"}


def test_a_kernel_that_fails_in_mid_run_ends_it_with_rows_kept():
    runs = []
    with pytest.raises(EngineError, match="the GPU failed"):
        replay([(0.0, 20, 1), (0.1, 20, 9)], TwoLanes(), fail_at=4, before=runs.append)
    (run,) = runs
    run.close_unfinished()
    _, requests = run.sink.tables()
    assert requests["status"].tolist() == ["finished", "unfinished"]


def test_host_times_are_those_of_table_5():
    """Each look at this clock costs a microsecond: a decision, and a hand-over, take one look; the first use of a lane is
    no reconfiguration."""

    class Moves(TwoLanes):
        def next_step(self, lane, state, now_s):
            step = super().next_step(lane, state, now_s)
            return step._replace(sms=4) if lane == DECODE and state.decode.iteration else step

    run, _, _ = replay([(0.0, 20, 3)], Moves(), clock=FakeClock(1e-6))
    host = run.host.summary()
    assert host["prediction"]["count"] == run.decisions
    assert host["prediction"]["mean_us"] == pytest.approx(1.0, rel=1e-6)
    assert host["hand_over"]["count"] == 1
    assert host["reconfiguration"]["count"] == 1
    assert run.timing(1.0)["busy_s"]["prefill"] == pytest.approx(4 * MS, rel=1e-2)


def test_what_a_lane_publishes_the_other_sees_at_its_next_decision():
    from bullet.state import Partition, Published

    seen = []

    class Tells(TwoLanes):
        def next_step(self, lane, state, now_s):
            step = super().next_step(lane, state, now_s)
            if lane == DECODE:
                seen.append((state.target, state.prefill_published))
                return step
            return step._replace(target=Partition(6, 2), published=Published(ttft_margin_s=1.5))

    replay([(0.0, 20, 2)], Tells())
    assert seen == [(Partition(6, 2), Published(1.5, None))]


def test_reports_and_plots_of_the_simulator_work_on_a_real_run(tmp_path):
    pytest.importorskip("matplotlib")
    from bullet.config import to_toml
    from bullet.results import page

    rows = [(0.0, 20, 3), (0.001, 60, 4)]
    run, _, _ = replay(rows, "static-6", turns=False)
    outcome = run.outcome()
    page.write_run_report(tmp_path, outcome, metrics.summarise(outcome), to_toml(outcome.config))
    page = (tmp_path / "report.html").read_text()
    assert "measured on FAKE" in page
    assert "simulated" not in page.split("</p>")[0]
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_the_loop_needs_no_torch_and_never_the_simulator():
    code = ("import sys; import bullet.runtime.driver, bullet.runtime.record, bullet.devices.measured, bullet.cli.run; "
            "print([m for m in ('torch', 'triton', 'matplotlib', 'bullet.sim') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_nothing_in_runtime_imports_the_simulator():
    for path in (Path(bullet.__file__).parent / "runtime").glob("*.py"):
        text = path.read_text()
        assert "bullet.sim" not in text, path.name
