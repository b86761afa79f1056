"""The fluid bound: by hand, against a solver of linear programmes, and where two devices must agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bullet
from bullet.errors import ConfigError
from bullet.state import SplitTable
from bullet.sweeps import bound as bounds
from bullet.sweeps.bound import State, batches, best_mix, load_share, states
from tests import worlds


def state(p: float, d: float) -> State:
    return State(1, 1, p, d)


def test_one_phase_at_a_time_by_hand() -> None:
    # 0.25 s of prefill and 0.5 s of decode a request: 4 / 3 a second, a third of the time prefill.
    mix = best_mix([State(108, 0, 4.0, 0.0), State(0, 108, 0.0, 2.0)])
    assert mix.req_per_s == pytest.approx(4 / 3)
    assert [(one.name, share) for one, share in mix.shares] == [("prefill alone", pytest.approx(1 / 3)),
                                                                ("decode alone", pytest.approx(2 / 3))]


def test_a_split_with_its_tail_by_hand() -> None:
    # Co-running does 3 prefills and 1.5 decodes a second; decode alone 2: x of the split with 3x = 1.5x + 2 (1 - x), x = 4/7.
    split = State(60, 48, 3.0, 1.5)
    mix = best_mix([State(108, 0, 4.0, 0.0), State(0, 108, 0.0, 2.0), split])
    assert mix.req_per_s == pytest.approx(12 / 7)
    assert [(one.name, share) for one, share in mix.shares] == [("60 + 48", pytest.approx(4 / 7)),
                                                                ("decode alone", pytest.approx(3 / 7))]


def test_a_state_that_keeps_pace_alone_needs_no_other() -> None:
    assert best_mix([state(4, 0), state(0, 4), state(3, 3)]) == (3.0, ((state(3, 3), 1.0),))


@settings(deadline=None)  # the solver is imported at the first
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8))
def test_pairs_are_as_good_as_a_solver(rates: Sequence[tuple[float, float]]) -> None:
    linprog = pytest.importorskip("scipy.optimize").linprog
    found = best_mix([state(p, d) for p, d in rates])
    n = len(rates)
    # Variables: shares, then r; prefill and decode may be ahead (what is ahead is idle).
    solved = linprog([0] * n + [-1], A_ub=[[*(-p for p, _ in rates), 1], [*(-d for _, d in rates), 1]], b_ub=[0, 0],
                     A_eq=[[1] * n + [0]], b_eq=[1])
    assert found.req_per_s == pytest.approx(-solved.fun, abs=1e-7)
    assert sum(share for _, share in found.shares) == pytest.approx(1)
    assert min(sum(share * getattr(one, name) for one, share in found.shares)
               for name in ("prefill_req_per_s", "decode_req_per_s")) == pytest.approx(found.req_per_s)


def test_batches_keep_the_order_and_a_long_prompt_is_alone() -> None:
    assert batches(np.array([4000, 4000, 4000, 20_000, 1])) == [[4000, 4000], [4000], [20_000], [1]]


def test_rates_of_a_device_by_hand() -> None:
    """Prefill a millisecond a token on all SMs, twice that on half; a decode step 20 ms whatever; each 1.5 x beside the other."""
    device = worlds.FixedDevice(lambda kind, tokens, sms: (1e-3 * tokens if kind == "prefill" else 0.02) * 108 / sms, (1.5, 1.5))
    load = worlds.workload([(0, 100, 11)] * 4)
    found, seqs, context = states(device, load, SplitTable(108, np.array([54])), 2270)
    assert (seqs, context) == (20, 105.5)  # 2270 // (100 + 5.5 + 8)
    alone_p, alone_d, split = found
    assert alone_p == (108, 0, pytest.approx(10), 0)  # 0.1 s a prompt
    assert alone_d == (0, 108, 0, pytest.approx(20 / 0.02 / 10))  # 20 tokens a step, 10 a request
    assert split == (54, 54, pytest.approx(10 / 3), pytest.approx(100 / 3))
    assert best_mix(found[:2]).req_per_s == pytest.approx(1 / (1 / 10 + 1 / 100))


def test_one_token_outputs_need_no_decode() -> None:
    device = worlds.FixedDevice(lambda kind, tokens, sms: 1e-3 * tokens, (1.0, 1.0))
    found, _, _ = states(device, worlds.workload([(0, 100, 1)] * 4), None, 4000)
    assert best_mix(found).req_per_s == pytest.approx(10)


def test_a_workload_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request fits 50 tokens of KV"):
        states(worlds.A100, worlds.workload([(0, 100, 1)]), None, 50)


def test_the_bound_of_a_shipped_trace_is_above_every_split_and_slicing() -> None:
    found = bullet.bound({"workload.trace": "sharegpt", "workload.num_requests": 200})
    assert found.slicing.req_per_s < found.best_fixed[1].req_per_s <= found.fluid.req_per_s
    assert all(mix.req_per_s >= found.slicing.req_per_s for _, mix in found.fixed)
    assert "fluid bound" in found.text()
    fluid = found.fluid.req_per_s
    line = bounds.Limit(found, offered_req_per_s=fluid / 4).text({"a": fluid / 2, "b": None})
    assert line.endswith(f"): offered 25.0%, a 50.0%, b -. {bounds.CAVEAT}")
    assert bounds.Limit(None, "a closed loop").text({"a": 1.0}) == "share of the fluid bound: not known: a closed loop"


def test_all_splits_of_all_batches_at_once_are_as_one_by_one() -> None:
    """Batches of other sizes have other tiles: the same seconds, whichever way they are asked for."""
    device = worlds.A100
    prefills = [device.prefill_work(batch, device.model.num_layers, logits_seqs=len(batch)) for batch in (
        [(100, 0)], [(700, 0), (90, 0)], [(8192, 0)], [(3000, 0)] * 3)]
    decode = device.decode_work(40, 40 * 900)
    splits = SplitTable.every(108)
    beside, steps = device.coruns_all(prefills, decode, splits)
    pairs = list(zip(splits.prefill_sms.tolist(), splits.decode_sms.tolist(), strict=True))
    one_by_one = np.array([[device.corun_seconds(work, p, decode, d) for p, d in pairs] for work in prefills])
    assert np.allclose(beside, one_by_one[..., 0], rtol=1e-12)
    assert np.allclose(steps, one_by_one[..., 1], rtol=1e-12)


def test_the_estimate_is_the_bound_of_one_phase_at_a_time() -> None:
    config = {"workload.trace": "sharegpt", "workload.num_requests": 200}
    assert bounds.estimated_capacity(config) == pytest.approx(bullet.bound(config).slicing.req_per_s)


def test_offered_load_is_a_share_of_what_one_phase_at_a_time_serves() -> None:
    """Equal requests: a prefill of 1,000 tokens, and 100 steps of a decode batch, each its share of the device's seconds."""
    c = worlds.config("vllm-1024", device__kv_tokens=16 * 1051)
    found = load_share(c, worlds.workload([(i / 2, 1000, 101) for i in range(101)]), worlds.A100)  # 101 in 50 s
    seqs = int(16 * 1051 // (1050.5 + 8))
    prefill_s = worlds.A100.solo_seconds(worlds.A100.prefill_work([(1000, 0)] * 8, 32, logits_seqs=8), 108) / 8
    step_s = worlds.A100.solo_seconds(worlds.A100.decode_work(seqs, round(seqs * 1050.5)), 108)
    assert found == pytest.approx(101 / 50 * (prefill_s + 100 * step_s / seqs), rel=0.02)  # the last batch is not full
    assert load_share(c, worlds.workload([(0.0, 1000, 101)]), worlds.A100) is None
    assert load_share(c, worlds.workload([(0.0, 10**6, 101), (1.0, 10**6, 101)]), worlds.A100) is None
