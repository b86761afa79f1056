"""The plan: what 240 s must cover, thinning, order, resuming."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet import work
from bullet.catalog.models import MODELS, get_model
from bullet.errors import PartitionError, ProfileError
from bullet.gpu.splits import Split, granularity, is_legal
from bullet.profiler.plan import (
    CORE_DECODE_SHARES,
    ENGINE_LAYERS,
    EXTRA_DECODE_SHARES,
    GEMMS,
    OPS,
    OWN_KERNELS,
    TIERS,
    Point,
    Rates,
    Shape,
    choose_splits,
    cpu_axes,
    decode,
    flops_and_bytes,
    gpu_axes,
    make_plan,
    prefill,
    spread_order,
)
from bullet.profiles.kernels import FAMILIES, PARAMETERS
from bullet.profiles.rows import ENGINE_OPS

LLAMA = get_model("llama-3.1-8b")
HOPPER = granularity((9, 0))
H200 = Rates(132, 0.6 * 989.4e12, 0.7 * 4.8e12)


def axes(num_sms=132, rule=HOPPER):
    core = choose_splits(num_sms, rule, CORE_DECODE_SHARES)
    return gpu_axes(core, choose_splits(num_sms, rule, EXTRA_DECODE_SHARES))


def test_240_seconds_cover_what_the_issue_asks():
    plan = make_plan(LLAMA, axes(), H200, budget_s=240)
    assert plan.estimated_s <= 240
    corun = {(p.split, p.shape, p.other) for p in plan.points if p.kind == "corun" and p.split is not None}
    splits, prefills, decodes = ({c[i] for c in corun} for i in range(3))
    full = [s for s in splits if {(s, p, d) for p in prefills for d in decodes if p.op == "prefill_layer"} & corun]
    complete = [s for s in full if sum(c[0] == s for c in corun) >= 12]
    assert len(complete) >= 6
    core = axes()
    assert {(s, p, d) for s in core.splits for p in core.corun_prefill for d in core.corun_decode} <= corun
    assert len(core.splits) >= 6
    assert len({p.tokens for p in core.corun_prefill}) >= 3
    assert len({d.batch for d in core.corun_decode}) >= 4
    alone: dict[Shape, set[int]] = {}
    for p in plan.points:
        if p.kind == "solo":
            sms = 132 if p.split is None else getattr(p.split, f"{p.lane}_sms")
            alone.setdefault(p.shape, set()).add(sms)
    assert sum(len(sms) >= 10 for sms in alone.values()) >= 8
    assert {s.op for s, sms in alone.items() if len(sms) >= 10} == set(OPS)


def test_what_make_gpu_leaves_to_the_sweep_of_240_seconds_covers_it_too_and_a_fit():
    """Two fifths of the budget are the engine's: 144 s hold the co-run matrix, 8 operations on 10 SM counts, each own kernel
    beside its twin in torch, the engine's layers at once, and twice as many rows as each family of the engine has parameters."""
    plan = make_plan(LLAMA, axes(), H200, budget_s=144)
    assert plan.estimated_s <= 144
    assert sum(p.tier == "co-run matrix" and p.kind == "corun" for p in plan.points) == 72
    alone: dict[Shape, set[int]] = {}
    for p in plan.points:
        if p.kind == "solo":
            alone.setdefault(p.shape, set()).add(132 if p.split is None else getattr(p.split, f"{p.lane}_sms"))
    assert len({s.op for s, sms in alone.items() if len(sms) >= 10}) >= 8
    whole = {s for s, sms in alone.items() if 132 in sms}
    for op in (*OWN_KERNELS, *ENGINE_LAYERS):
        assert any(s.op == op and s._replace(op=ENGINE_OPS[op]) in whole for s in whole), op
    assert sum(p.kind == "corun" and (p.shape.op, p.other.op) == ENGINE_LAYERS for p in plan.points) == 3
    rows = {family: sum(ENGINE_OPS.get(s.op, s.op) in ops and (s.op in ENGINE_OPS or s.op in GEMMS) for s in whole)
            for family, ops in FAMILIES.items()}
    for family in ("gemm", "rowwise", "prefill_attention", "decode_attention"):
        assert rows[family] >= 2 * PARAMETERS[family], family


def test_both_directions_are_two_rows_of_one_window():
    point = Point("corun", Split(112, 20), "both", prefill("prefill_layer", 2048), decode("decode_layer", 8, 1024))
    assert point.row_ids("m") == [f"m|{point.key}|prefill", f"m|{point.key}|decode"]


def test_controls_and_the_unpartitioned_case_are_planned():
    plan = make_plan(LLAMA, axes(), H200, budget_s=240)
    controls = {(p.control, p.lane) for p in plan.points if p.kind == "control"}
    assert controls == {(c, lane) for c in ("alu_spin", "memory_stream") for lane in ("prefill", "decode")}
    assert sum(p.kind == "corun" and p.split is None for p in plan.points) == 12


def test_single_operations_run_beside_each_other_with_their_runs_alone():
    plan = make_plan(LLAMA, axes(), H200, budget_s=240)
    pairs = [p for p in plan.points if p.tier == "co-running operations" and p.kind == "corun"]
    assert {p.split.decode_sms for p in pairs} == {16, 40, 100}
    assert {(p.shape.op, p.other.op) for p in pairs} == set(itertools.product(
        ("gemm_gate_up", "prefill_attention", "norm", "copy"), ("decode_attention", "paged_decode_attention", "gemm_gate_up",
                                                            "gemm_lm_head")))
    keys = {p.key for p in plan.points}
    for p in pairs:
        assert Point("solo", p.split, "prefill", p.shape).key in keys
        assert Point("solo", p.split, "decode", p.other).key in keys


def test_everything_is_on_granted_splits():
    for point in make_plan(LLAMA, axes(), H200).points:
        assert point.split is None or is_legal(point.split, 132, HOPPER)


budgets = st.floats(16, 500)


@settings(max_examples=15, deadline=None)
@given(budgets, budgets, st.integers(0, 3))
def test_a_larger_budget_measures_a_superset(a, b, seed):
    small, large = (make_plan(LLAMA, axes(), H200, budget_s=s, seed=seed) for s in sorted((a, b)))
    assert {p.key for p in small.points} <= {p.key for p in large.points}
    assert small.estimated_s <= large.estimated_s <= max(a, b)


@settings(max_examples=15, deadline=None)
@given(budgets)
def test_every_corun_has_its_runs_alone(budget_s):
    plan = make_plan(LLAMA, axes(), H200, budget_s=budget_s)
    keys = [p.key for p in plan.points]
    assert len(keys) == len(set(keys))
    for p in plan.points:
        if p.kind == "corun" and p.split is not None:
            assert Point("solo", p.split, "prefill", p.shape).key in keys
            assert Point("solo", p.split, "decode", p.other).key in keys
        if p.kind == "control":
            assert Point("solo", p.split, p.lane, p.shape).key in keys


def test_thinning_keeps_the_corun_matrix_first():
    seen = []
    on_a_gpu = [t for t in TIERS if t != "engine phases"]  # a graph holds no host work
    for budget_s in (20, 60, 90, 120, 180, 300):
        plan = make_plan(LLAMA, axes(), H200, budget_s=budget_s)
        tiers = [t for t in TIERS if any(p.tier == t for p in plan.points)]
        assert tiers == on_a_gpu[:len(tiers)]
        seen.append(len(tiers))
        for early, late in itertools.pairwise(tiers):
            assert not plan.left_out.get(early), f"{late} was begun before {early} was whole"
    assert seen == sorted(seen)
    assert seen[0] == 1
    assert seen[-1] == len(on_a_gpu)


def test_a_thin_corun_matrix_still_spans_its_axes():
    plan = make_plan(LLAMA, axes(), H200, budget_s=25)
    corun = [p for p in plan.points if p.kind == "corun"]
    assert len(corun) < 30
    assert {p.shape.tokens for p in corun} >= {512, 8192}
    assert {p.other.batch for p in corun} >= {8, 256}
    assert len({p.split for p in corun}) >= 3


def test_order_is_drawn_from_the_seed_within_each_tier():
    one, again, other = (make_plan(LLAMA, axes(), H200, budget_s=150, seed=s) for s in (1, 1, 2))
    assert one.points == again.points
    assert one.points != other.points
    assert {p.key for p in one.points} == {p.key for p in other.points}
    ranks = [TIERS.index(p.tier) for p in one.points]
    assert ranks == sorted(ranks)
    first = [p for p in one.points if p.tier == TIERS[0]]
    assert len({p.split for p in first[:12]}) >= 4


def test_budget_too_short_says_how_long_is_needed():
    with pytest.raises(ProfileError, match=r"--budget-s 5: one co-run combination .* needs about 1\d s"):
        make_plan(LLAMA, axes(), H200, budget_s=5)


def test_done_rows_are_not_planned_again():
    whole = make_plan(LLAMA, axes(), H200, budget_s=60)
    half = {i for p in whole.points[::2] for i in p.row_ids("m")}
    rest = make_plan(LLAMA, axes(), H200, budget_s=60, done=half, prefix="m")
    assert not {i for p in rest.points for i in p.row_ids("m")} & half
    everything = {i for p in make_plan(LLAMA, axes(), H200).points for i in p.row_ids("m")}
    assert make_plan(LLAMA, axes(), H200, budget_s=5, done=everything, prefix="m").points == ()


def test_shapes_too_large_for_the_memory_are_named():
    plan = make_plan(LLAMA, axes(), H200, fits=lambda s: s.tokens < 8192)
    assert prefill("prefill_layer", 8192) in plan.too_large
    assert all(p.shape.tokens < 8192 for p in plan.points)
    assert any("too large for the memory" in line for line in plan.describe())


def test_what_a_backend_cannot_measure_is_left_out():
    plan = make_plan(LLAMA, axes(), H200, allowed=lambda p: p.kind == "solo")
    assert {p.kind for p in plan.points} == {"solo"}


def test_without_partitions_the_plan_is_the_whole_device():
    plan = make_plan(LLAMA, gpu_axes([], []), H200, budget_s=120)
    assert {p.split for p in plan.points} == {None}
    assert any(p.kind == "corun" for p in plan.points)


def test_plan_is_described_with_its_estimate_first_things_first():
    plan = make_plan(LLAMA, axes(), H200, budget_s=240, seed=7)
    text = "\n".join(plan.describe())
    assert "co-run matrix" in text
    assert f"estimated {plan.estimated_s:.0f} s of 240 s, order from seed 7" in text


@pytest.mark.parametrize("model", [*MODELS.values(), dataclasses.replace(MODELS["tiny"], name="moe", num_experts=8,
                                                                        experts_per_token=2)])
@pytest.mark.parametrize("op", OPS)
def test_every_operation_of_any_model_counts(model, op):
    shape = decode(op, 8, 64) if "decode" in op else Shape(op, 8)
    flops, moved = flops_and_bytes(model, shape)
    assert moved > 0
    assert flops > 0 or ENGINE_OPS.get(op, op) in ("norm", "copy", "rope", "act")
    assert flops_and_bytes(model, shape._replace(tokens=16, batch=16 if "decode" in op else 1))[1] > moved


def test_counts_agree_with_the_work_model():
    flops, _ = flops_and_bytes(LLAMA, Shape("gemm_qkv", 2048))
    assert flops == 2 * 2048 * 6144 * 4096
    assert flops_and_bytes(LLAMA, Shape("gemm_lm_head", 64))[0] == 2 * 64 * 128256 * 4096
    kernels = work.layer_kernels(LLAMA, [(512, 512)] * 2, 0, 0)
    assert flops_and_bytes(LLAMA, prefill("prefill_layer", 512, 512, batch=2))[0] == sum(k.flops for k in kernels)
    with pytest.raises(ProfileError, match="operation 'softmax'"):
        flops_and_bytes(LLAMA, Shape("softmax", 1))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_spread_order_is_a_permutation_that_starts_at_a_corner(sizes):
    grid = list(itertools.product(*map(range, sizes)))
    ordered = spread_order(grid)
    assert sorted(ordered) == grid
    assert ordered[0] == (0,) * len(sizes)
    if max(sizes) > 1:
        assert any(ordered[1][a] == sizes[a] - 1 > 0 for a in range(len(sizes)))


def test_small_devices():
    assert [s.decode_sms for s in choose_splits(108, granularity((8, 0)), CORE_DECODE_SHARES)] == [12, 22, 32, 44, 60, 80]
    with pytest.raises(PartitionError, match="12 SMs cannot be split"):
        choose_splits(12, HOPPER, CORE_DECODE_SHARES)


def test_a_cpu_takes_the_engines_steps_right_after_the_corun_matrix():
    cpu = cpu_axes([Split(1, 1)], [Split(1, 1)])
    plan = make_plan(MODELS["tiny"], cpu, Rates(2, 4e9, 4e9, point_s=0.03, startup_s=4.0))
    tiers = [p.tier for p in plan.points]
    assert list(dict.fromkeys(tiers))[:2] == ["co-run matrix", "engine phases"]
    steps = [p for p in plan.points if p.shape.op == "engine_decode"]
    assert {p.tier for p in steps} == {"engine phases"}
    assert len(steps) == 3 * len({p.shape for p in steps}) == 45  # the whole device and both lanes: three times on one thread
    flops, _ = flops_and_bytes(MODELS["tiny"], decode("engine_decode", 4, 64))
    layer, _ = flops_and_bytes(MODELS["tiny"], decode("engine_decode_layer", 4, 64))
    head, _ = flops_and_bytes(MODELS["tiny"], Shape("gemm_lm_head", 4))
    assert flops == MODELS["tiny"].num_layers * layer + head


def test_toy_sizes_are_toys():
    plan = make_plan(MODELS["tiny"], cpu_axes([Split(1, 1)], []), Rates(2, 4e9, 4e9, point_s=0.03, startup_s=4.0))
    assert max(p.shape.tokens for p in plan.points) <= 1024
