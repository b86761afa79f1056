"""Several devices behind a router: small worlds worked by hand, what is conserved, and one replica against the device alone."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.config import RunConfig, from_mapping, load_run_config, to_toml
from bullet.devices.load import load_device, served_model
from bullet.errors import ConfigError
from bullet.results.columns import RunOutcome
from bullet.results.timeline import way_events
from bullet.sim.run import simulate
from tests.worlds import A100, FixedDevice, config, run, times, workload

BYTES_A_TOKEN = A100.model.kv_bytes_per_token
ONE_S = FixedDevice(lambda kind, tokens, sms: 1.0 if kind == "prefill" else 0.1)
"""A prefill takes a second, a decode iteration a tenth, whatever is in them."""
FREE: dict[str, Any] = {"device__publish_delay_s": 0.0, "device__reconfigure_s": 0.0}


def ways(outcome: RunOutcome) -> dict[str, np.ndarray[Any, Any]]:
    assert outcome.ways is not None
    return outcome.ways


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f") for name in one.columns)


# ---- replicas ------------------------------------------------------------------------------------


def test_round_robin_by_hand() -> None:
    # Three prompts at once on two replicas: 0 and 2 share the first, which prefills one after the other.
    rows = [(0.0, 100, 1), (0.0, 100, 1), (0.0, 100, 1)]
    outcome = run("sglang-100@2", rows, device=ONE_S, **FREE)
    assert ways(outcome)["device"].tolist() == [0, 1, 0]
    assert times(outcome) == {0: (1.0, 1.0), 1: (1.0, 1.0), 2: (2.0, 2.0)}
    assert sorted(set(outcome.steps["lane"].tolist())) == ["replica 0 hybrid", "replica 1 hybrid"]
    assert outcome.num_sms == 2 * A100.num_sms
    assert sum(outcome.sm_seconds.values()) == pytest.approx(2 * A100.num_sms * 2.0)
    assert outcome.sm_seconds["idle"] == pytest.approx(A100.num_sms * 1.0)  # the second replica's second second


@pytest.mark.parametrize(("router", "devices"), [
    ("round-robin", [0, 1, 0, 1]),
    ("least-loaded", [0, 1, 1, 1]),  # 900 tokens against 100, 200, 300
    ("shortest-queue", [0, 1, 0, 1]),
])
def test_routers_by_hand(router: str, devices: list[int]) -> None:
    rows = [(0.0, 900, 1), (0.0, 100, 1), (0.0, 100, 1), (0.0, 100, 1)]
    outcome = run("naive@2", rows, device=ONE_S, cluster__router=router, **FREE)
    assert ways(outcome)["device"].tolist() == devices


def test_shortest_queue_sees_who_waits_now() -> None:
    # At 0.5 s the first replica prefills and nobody waits there; the second has one waiting.
    rows = [(0.0, 100, 1), (0.0, 100, 1), (0.1, 100, 1), (0.2, 100, 1), (1.5, 100, 1)]
    outcome = run("sglang-100@2", rows, device=ONE_S, cluster__router="shortest-queue", **FREE)
    assert ways(outcome)["device"].tolist() == [0, 1, 0, 1, 0]
    assert times(outcome)[4] == (3.0, 3.0)


def test_prefix_aware_goes_where_the_beginning_was_served() -> None:
    world = dataclasses.replace(workload([(0.0, 160, 5), (0.0, 160, 5), (2.0, 160, 5), (2.0, 160, 5)]),
                                shared_prefix={2: (1, 5), 3: (1, 5)})
    chosen = config("sglang-2048@2", cluster__router="prefix-aware", **FREE)
    outcome = simulate(chosen, workload=world, device=A100)
    assert ways(outcome)["device"].tolist() == [0, 1, 1, 1]
    assert outcome.device["prefix_hit_rate"] == pytest.approx(2 * 80 / (4 * 160))


ALONE = [("bullet", {}), ("vllm-1024", {}), ("sglang-1024-mixed", {}), ("static-96", {}),
         ("vllm-1024", {"policy__options__steps_in_flight": 2}),
         ("vllm-1024", {"workload__arrivals": "closed", "workload__concurrency": 8}),
         ("bullet", {"device__noise_std": 0.1, "device__kv_tokens": 12000}),
         ("sglang-1024", {"device__host_request_s": 0.01, "device__kv_tokens": 12000, "workload__warmup": "20"})]


@pytest.mark.parametrize(("policy", "more"), ALONE)
def test_one_replica_is_the_device_alone_to_the_bit(policy: str, more: dict[str, Any]) -> None:
    rate: dict[str, Any] = {} if "workload__arrivals" in more else {"workload__rate_req_per_s": 10.0}
    given: dict[str, Any] = {"workload__trace": "sharegpt", "workload__num_requests": 60, **rate, **more}
    alone, behind = simulate(config(policy, **given)), simulate(config(f"{policy}@1", **given))
    assert same(alone.steps, behind.steps)
    assert same(alone.requests, behind.requests)
    for field in dataclasses.fields(alone):
        if field.name not in ("config", "system", "steps", "requests", "device", "decision_wall_s", "ways"):
            assert np.array_equal(getattr(alone, field.name), getattr(behind, field.name)), field.name
    measures = {key for key in alone.device if alone.device[key] != behind.device[key]}
    assert measures <= {"decision_wall_s"}, measures


# ---- disaggregated ---------------------------------------------------------------------------------


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    outcome = run("sglang-100@1p1d", [(0.0, 100, 3)], device=ONE_S, cluster__link_bytes_per_s=BYTES_A_TOKEN * 200.0,
                  cluster__link_latency_s=0.25, **FREE)
    # Prefill 1 s, 100 tokens at 200 tokens a second, a quarter of latency, two iterations.
    assert times(outcome)[0] == pytest.approx((1.0, 1.0 + 0.5 + 0.25 + 0.2))
    way = ways(outcome)
    assert (way["device"][0], way["decode_device"][0], way["bytes"][0]) == (0, 1, 100 * BYTES_A_TOKEN)
    assert (way["reserved_s"][0], way["leaves_s"][0], way["lands_s"][0]) == pytest.approx((1.0, 1.0, 1.75))
    assert outcome.itl_s.tolist() == pytest.approx([0.85, 0.1])  # the first gap spans the transfer
    assert outcome.device["cluster"]["mean_link_s"] == pytest.approx(0.75)


def test_two_transfers_take_turns_on_a_link() -> None:
    outcome = run("sglang-200@1p2d", [(0.0, 100, 3), (0.0, 100, 3)], device=ONE_S,
                  cluster__link_bytes_per_s=BYTES_A_TOKEN * 200.0, cluster__link_latency_s=0.25, **FREE)
    assert ways(outcome)["leaves_s"].tolist() == pytest.approx([1.0, 1.5])  # one batch, one sender
    assert ways(outcome)["lands_s"].tolist() == pytest.approx([1.75, 2.25])


@pytest.mark.parametrize(("tokens_per_s", "leaves_s", "lands_s"), [
    # 32 layers: the first is ready at 1/32 s. A fast link waits for the last layer and sends it alone.
    (400.0, 1 / 32, 1.0 + 0.25 / 32),
    # A slow link (2 s in all) is busy from the first layer on.
    (50.0, 1 / 32, 1 / 32 + 2.0),
])
def test_layers_leave_while_the_prompt_is_computed(tokens_per_s: float, leaves_s: float, lands_s: float) -> None:
    assert A100.model.num_layers == 32
    outcome = run("sglang-100@1p1d", [(0.0, 100, 3)], device=ONE_S, cluster__link_bytes_per_s=BYTES_A_TOKEN * tokens_per_s,
                  cluster__link_latency_s=0.0, cluster__overlap=True, **FREE)
    way = ways(outcome)
    assert (way["reserved_s"][0], way["leaves_s"][0], way["lands_s"][0]) == pytest.approx((0.0, leaves_s, lands_s))
    assert times(outcome)[0][1] == pytest.approx(lands_s + 0.2)


def test_a_reservation_waits_for_blocks() -> None:
    # 10 blocks where they decode. The first takes 8 (128 tokens), the second needs 8 and waits until it has ended.
    outcome = run("sglang-128@1p1d", [(0.0, 128, 11), (0.0, 128, 2)], device=ONE_S, device__kv_tokens=160,
                  cluster__link_bytes_per_s=BYTES_A_TOKEN * 1e6, cluster__link_latency_s=0.5, **FREE)
    moved = 128 / 1e6
    way = ways(outcome)
    assert way["reserved_s"][0] == pytest.approx(1.0)
    end = 1.0 + moved + 0.5 + 1.0  # ten iterations
    assert times(outcome)[0][1] == pytest.approx(end)
    # Its own prompt had to wait for blocks as well: the first's left the prefill device when it landed.
    assert outcome.requests["first_token_s"][outcome.requests["id"] == 1][0] == pytest.approx(1.5 + moved + 1.0)
    assert way["reserved_s"][1] == pytest.approx(max(end, 2.5 + moved))
    assert times(outcome)[1][1] == pytest.approx(max(end, 2.5 + moved) + moved + 0.5 + 0.1)


def test_a_request_of_one_token_does_not_move() -> None:
    for overlap in (False, True):
        outcome = run("bullet@1p1d", [(0.0, 100, 1)], cluster__overlap=overlap)
        assert ways(outcome)["bytes"].tolist() == [0.0]
        assert outcome.device["cluster"]["requests_moved"] == 0


POLICIES = ("bullet", "vllm-512", "sglang-512", "sglang-512-mixed", "naive")


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=25),
       policy=st.sampled_from(POLICIES), layout=st.sampled_from(["1", "3", "1p1d", "2p1d", "1p2d", "2p2d"]),
       router=st.sampled_from(["round-robin", "least-loaded", "shortest-queue", "prefix-aware"]), overlap=st.booleans(),
       kv_tokens=st.sampled_from([800, 1600, 100_000]), speed=st.sampled_from([1e8, 25e9]))
def test_requests_and_bytes_are_conserved(rows: list[tuple[int, int, int]], policy: str, layout: str, router: str, overlap: bool,
                                          kv_tokens: int, speed: float) -> None:
    """I1 to I5 and I11 in a cluster, blocks checked at every boundary (debug); and the same once more, to the bit."""
    timed = sorted((10e-3 * at, prompt, output) for at, prompt, output in rows)
    given: dict[str, Any] = {"device__kv_tokens": kv_tokens, "cluster__router": router, "cluster__overlap": overlap,
                             "cluster__link_bytes_per_s": speed}
    outcome = run(f"{policy}@{layout}", timed, **given)
    requests, way = outcome.requests, ways(outcome)
    order = np.argsort(requests["id"])
    assert requests["id"][order].tolist() == list(range(len(rows)))
    finished = requests["status"][order] == "finished"
    prompts, outputs = requests["prompt_tokens"][order], requests["output_tokens"][order]
    assert np.array_equal(requests["generated_tokens"][order][finished], outputs[finished])
    assert (finished | (requests["reason"][order] == "over_kv_capacity")).all()
    moves = finished & (outputs > 1) & ("p" in layout)
    assert np.array_equal(way["bytes"], np.where(moves, prompts * BYTES_A_TOKEN, 0))
    assert np.array_equal(np.isfinite(way["lands_s"]), moves)
    first, last = requests["first_token_s"][order], requests["finish_s"][order]
    wire_s = way["lands_s"] - way["leaves_s"]
    assert (wire_s[moves] >= way["bytes"][moves] / speed - 1e-9).all()
    assert (way["lands_s"][moves] > first[moves]).all()
    assert (last[moves] > way["lands_s"][moves]).all()
    assert int(outcome.itl_counts.sum()) == int((outputs[finished] - 1).sum())
    assert sum(outcome.sm_seconds.values()) == pytest.approx(outcome.num_sms * outcome.span_s)
    assert outcome.device["queue_integral_s"] == pytest.approx(outcome.device["wait_sum_s"], abs=1e-6)
    again = run(f"{policy}@{layout}", timed, **given)
    assert same(outcome.steps, again.steps)
    assert same(outcome.requests, again.requests)


# ---- what is said, and refused -----------------------------------------------------------------------


def test_the_configuration_comes_back_and_one_device_says_nothing_of_it() -> None:
    assert "cluster" not in to_toml(RunConfig())
    whole = load_run_config(None, {"cluster.layout": "3p1d", "cluster.decode_policy": "vllm-512", "policy.name": "bullet"})
    assert from_mapping(RunConfig, tomllib.loads(to_toml(whole)), "there and back") == whole
    assert whole.system == "bullet@3p1d"
    assert load_run_config(None, {"cluster.layout": "3p1d", "policy.name": "bullet@4"}).layout == "4"  # its own goes first


@pytest.mark.parametrize(("given", "says"), [
    ({"cluster.layout": "0p1d"}, "each at least 1"),
    ({"cluster.layout": "1p0d"}, "each at least 1"),
    ({"cluster.layout": "0"}, "each at least 1"),
    ({"cluster.layout": "3p"}, "N replicas, as 4, or prefill and decode devices, as 3p1d"),
    ({"cluster.layout": "1p1d", "cluster.link_bytes_per_s": 0.0}, "cluster.link_bytes_per_s = 0.0: must be more than 0"),
    ({"cluster.layout": "2", "device.model": "llama-3.1-70b", "device.tensor_parallel": 16}, "8 or less in a cluster"),
    ({"cluster.layout": "2", "device.tensor_parallel": 64}, "must divide llama-3.1-8b's 32 heads"),
    ({"cluster.layout": "2", "cluster.prefill_policy": "vllm-512"}, "none with 2 replicas"),
    ({"cluster.layout": "1p1d", "cluster.decode_policy": "mine.py:Mine"}, "a built-in policy"),
    ({"cluster.layout": "1p1d", "policy.name": "vllm-512", "policy.options.prefix_cache": True}, "blocks with names"),
])
def test_what_cannot_be_is_refused_in_a_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        simulate(load_run_config(None, {"policy.name": "naive", "workload.num_requests": 3, **given}))
    assert "\n" not in str(caught.value)


def test_a_request_is_one_row_of_the_timeline() -> None:
    outcome = run("sglang-100@1p1d", [(0.0, 100, 3)], device=ONE_S, cluster__link_bytes_per_s=BYTES_A_TOKEN * 200.0,
                  cluster__link_latency_s=0.25, **FREE)
    events = list(way_events(outcome.requests.data, ways(outcome)))[1:]
    assert ['"tid":0' in event for event in events] == [True] * 3
    assert [event.split('"name":"')[1].split('"')[0] for event in events] == [
        "prefill on device 0", f"{100 * BYTES_A_TOKEN} bytes to device 1", "decode on device 1"]


SHIPPED = sorted((Path(__file__).parents[2] / "experiments" / "cluster").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_serve_every_request(path: Path) -> None:
    chosen = load_run_config(path, {"policy.name": "vllm-2048", "workload.num_requests": 10})
    outcome = simulate(chosen)
    figures = outcome.device["cluster"]
    assert figures["gpus"] == figures["devices"] * chosen.device.tensor_parallel
    assert set(outcome.requests["status"].tolist()) == {"finished"}
    bytes_a_token = served_model(chosen.device).kv_bytes_per_token
    moved = outcome.requests["prompt_tokens"][outcome.requests["output_tokens"] > 1].sum() if "p" in str(chosen.layout) else 0
    assert figures.get("kv_bytes_moved", 0) == moved * bytes_a_token


def test_thirty_that_prefill_for_six_stay_small() -> None:
    """A fifth of the scale test (docs/cluster.md): requests by device, evenly; nothing grows with the devices."""
    chosen = load_run_config(None, {"policy.name": "vllm-2048@30p6d", "workload.trace": "sharegpt", "workload.num_requests": 4000,
                                    "workload.rate_req_per_s": 200.0})
    outcome = simulate(chosen, device=load_device(chosen.device))
    counts = np.bincount(ways(outcome)["device"], minlength=30)
    assert counts.min() == 133
    assert counts.max() == 134
    assert (outcome.requests["status"] == "finished").sum() + (outcome.requests["reason"] == "over_context").sum() == 4000
