"""The plan: what 240 s must cover, thinning, order, resuming."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet import work
from bullet.catalog.models import MODELS, get_model
from bullet.cli import measure as profile_cli
from bullet.errors import PartitionError, ProfileError
from bullet.gpu.splits import Split, granularity, is_legal
from bullet.profiler.axes import CORE_DECODE_SHARES, EXTRA_DECODE_SHARES, choose_splits, cpu_axes, gpu_axes, spread_order
from bullet.profiler.plan import PARTS, TIERS, Point, Rates, make_plan
from bullet.profiler.shapes import ENGINE_LAYERS, GEMMS, OPS, OWN_KERNELS, Shape, decode, flops_and_bytes, prefill
from bullet.profiles.kernels import FAMILIES, PARAMETERS
from bullet.profiles.rows import ENGINE_OPS

LLAMA = get_model("llama-3.1-8b")
HOPPER = granularity((9, 0))
H200 = Rates(132, 0.6 * 989.4e12, 0.7 * 4.8e12)


def axes(num_sms=132, rule=HOPPER):
    core = choose_splits(num_sms, rule, CORE_DECODE_SHARES)
    return gpu_axes(core, choose_splits(num_sms, rule, EXTRA_DECODE_SHARES))


def planned(budget_s=600, parts=("corun",), **options):
    return make_plan(LLAMA, axes(), H200, budget_s=budget_s, parts=parts, **options)


def test_the_first_half_of_ten_minutes_holds_the_matrix_twice_controls_and_the_sm_axis():
    """Proof (start-up) and whole matrix inside 180 s, controls, checks and SM axis inside 300 s, by the kit's own estimate."""
    plan = planned(300)
    assert not plan.left_out
    ends = plan.ends_s()
    assert ends["co-run matrix"] <= 180
    assert max(ends[tier] for tier in PARTS["corun"] if tier in ends) <= plan.estimated_s <= 300
    assert list(ends) == ["co-run matrix", "controls", "checks", "SM axis"]
    core = axes()
    cells = [(p.split, p.shape, p.other, p.replicate) for p in plan.points if p.tier == "co-run matrix"]
    assert (len(core.splits), len(core.corun_prefill), len(core.corun_decode)) == (6, 4, 3)
    every = itertools.product(core.splits, core.corun_prefill, core.corun_decode, (0, 1))
    assert sorted(map(str, cells)) == sorted(map(str, every))
    assert {p.shape.op for p in plan.points if p.tier == "co-run matrix"} == {ENGINE_LAYERS[0]}
    alone: dict[Shape, set[int]] = {}
    for p in plan.points:
        if p.kind == "solo":
            alone.setdefault(p.shape, set()).add(132 if p.split is None else getattr(p.split, f"{p.lane}_sms"))
    assert {s.op for s, sms in alone.items() if len(sms) == 13} >= {*ENGINE_LAYERS, "prefill_layer", "decode_layer",
                                                                   "gemm_gate_up", "decode_attention", "prefill_attention"}


def test_ten_minutes_are_planned_in_three_parts_and_printed(capsys):
    assert profile_cli.main(["stages", "--plan-only", "--gpu", "h200", "--budget-s", "600"]) == 0
    text = capsys.readouterr().out
    done = {line.split(" points")[0].strip().rsplit(" ", 1)[0].strip(): float(line.split("done by")[1].split()[0])
            for line in text.splitlines() if "done by" in line and "points" in line}
    assert done["co-run matrix"] <= 180
    assert done["SM axis"] <= 300
    assert 300 < done["own kernels"] <= 600
    assert "144 cells" in text
    assert "Part engine, from 384 s" in text
    assert "one archive by 600 s" in text


def test_every_point_is_estimated_with_the_load_before_its_windows():
    """By hand: five windows of a co-run, 0.3 s before the first and 0.06 before the others, 20 ms of host work each; 7 ms of
    replays of a millisecond alone, 26 of them; beside each other 1.5 times 28 of them."""
    rates = Rates(132, 1e18, 1e18, launch_s=0.0)
    point = Point("corun", Split(112, 20), "both", prefill("engine_prefill_layer", 512), decode("engine_decode_layer", 8, 1024))
    assert rates.point_seconds(LLAMA, point) == pytest.approx(5 * 0.02 + 0.3 + 4 * 0.06 + 4 * 26e-3 + 42e-3)
    assert rates.point_seconds(LLAMA, Point("solo", None, "full", point.shape)) == pytest.approx(0.02 + 0.3 + 26e-3)


def test_own_kernels_and_what_a_fit_needs_follow_in_the_second_part():
    """Each own kernel beside its twin in torch, and twice as many rows as each family of the engine has parameters."""
    plan = planned(110, parts=("own",))
    whole = {p.shape for p in plan.points if p.kind == "solo" and p.split is None}
    for op in (*OWN_KERNELS, *ENGINE_LAYERS):
        assert any(s.op == op and s._replace(op=ENGINE_OPS[op]) in whole for s in whole), op
    rows = {family: sum(ENGINE_OPS.get(s.op, s.op) in ops and (s.op in ENGINE_OPS or s.op in GEMMS) for s in whole)
            for family, ops in FAMILIES.items()}
    for family in ("gemm", "rowwise", "prefill_attention", "decode_attention"):
        assert rows[family] >= 2 * PARAMETERS[family], family


def test_both_directions_are_two_rows_of_one_window():
    point = Point("corun", Split(112, 20), "both", prefill("prefill_layer", 2048), decode("decode_layer", 8, 1024))
    assert point.row_ids("m") == [f"m|{point.key}|prefill", f"m|{point.key}|decode"]


def test_controls_separate_causes_and_sharing_without_a_split_has_three_ways():
    plan = planned(300)
    controls = {(p.control, p.lane) for p in plan.points if p.kind == "control"}
    assert controls == {(c, lane) for c in ("tensor_spin", "l2_stream", "memory_stream", "alu_spin", "idle")
                        for lane in ("prefill", "decode")}
    shared = [p for p in plan.points if p.tier == "controls" and p.kind == "corun"]
    assert {p.sharing: sum(q.sharing == p.sharing for q in shared) for p in shared} == {"plain": 4, "priority": 4, "bounded": 4}
    assert all((p.split is None) == (p.sharing != "bounded") for p in shared)
    assert {p.shape.op for p in plan.points if p.tier == "controls"} <= set(ENGINE_LAYERS)


def test_torchs_layers_cublas_told_of_its_lane_and_cudnn_are_checks_beside():
    checks = [p for p in planned(300).points if p.tier == "checks"]
    assert sum(p.kind == "corun" and p.shape.op == "prefill_layer" for p in checks) == 3
    assert sum(p.kind == "corun" and p.told for p in checks) == 3
    told = {(p.lane, getattr(p.split, f"{p.lane}_sms")) for p in checks if p.kind == "solo" and p.told}
    assert len(told) == 12
    assert sum(p.shape.op == "cudnn_prefill_attention" for p in checks) == 2
    # The same points without it are in the plan too: once with, once without.
    keys = {p.key for p in planned(300).points}
    assert all(dataclasses.replace(p, told=False).key in keys for p in checks if p.told and p.kind == "corun")


def test_prefill_has_the_group_on_every_split():
    for s in (*axes().splits, *axes().extra_splits):
        assert s.prefill_sms % 8 == 0
    assert [tuple(s) for s in axes().splits] == [(112, 20), (104, 28), (96, 36), (80, 52), (64, 68), (32, 100)]


def test_single_operations_run_beside_each_other():
    plan = make_plan(LLAMA, axes(), H200, parts=("own",))
    pairs = [p for p in plan.points if p.tier == "co-running operations"]
    assert {p.split.decode_sms for p in pairs} == {20, 36, 100}
    assert {(p.shape.op, p.other.op) for p in pairs} == set(itertools.product(
        ("gemm_gate_up", "prefill_attention", "norm", "copy"), ("decode_attention", "paged_decode_attention", "gemm_gate_up",
                                                            "gemm_lm_head")))


def test_everything_is_on_granted_splits():
    for point in make_plan(LLAMA, axes(), H200).points:
        assert point.split is None or is_legal(point.split, 132, HOPPER)


budgets = st.floats(40, 700)


@settings(max_examples=15, deadline=None)
@given(budgets, budgets, st.integers(0, 3))
def test_a_larger_budget_measures_a_superset(a, b, seed):
    small, large = (make_plan(LLAMA, axes(), H200, budget_s=s, seed=seed) for s in sorted((a, b)))
    assert {p.key for p in small.points} <= {p.key for p in large.points}
    assert small.estimated_s <= large.estimated_s <= max(a, b)


def test_thinning_keeps_the_corun_matrix_first_and_replicates_before_the_rest():
    seen = []
    on_a_gpu = [t for t in TIERS if t != "engine phases"]  # a graph holds no host work
    for budget_s in (40, 120, 190, 230, 320, 400, 2000):
        plan = make_plan(LLAMA, axes(), H200, budget_s=budget_s)
        tiers = [t for t in TIERS if any(p.tier == t for p in plan.points)]
        assert tiers == on_a_gpu[:len(tiers)]
        seen.append(len(tiers))
        for early, late in itertools.pairwise(tiers):
            assert not plan.left_out.get(early), f"{late} was begun before {early} was whole"
        visits = [sum(p.replicate == r and p.tier == "co-run matrix" for p in plan.points) for r in (0, 1)]
        assert visits[1] == 0 or visits[0] == 72
        ranks = [p.replicate for p in plan.points if p.tier == "co-run matrix"]
        assert ranks == sorted(ranks)
    assert seen == sorted(seen)
    assert seen[0] == 1
    assert seen[-1] == len(on_a_gpu)


def test_a_thin_corun_matrix_still_spans_its_axes():
    plan = make_plan(LLAMA, axes(), H200, budget_s=60)
    corun = [p for p in plan.points if p.kind == "corun"]
    assert 8 < len(corun) < 40
    assert {p.shape.tokens for p in corun} >= {512, 8192}
    assert {p.other.batch for p in corun} >= {8, 256}
    assert len({p.split for p in corun}) >= 3


def test_order_is_drawn_from_the_seed_within_each_tier():
    one, again, other = (make_plan(LLAMA, axes(), H200, budget_s=300, seed=s) for s in (1, 1, 2))
    assert one.points == again.points
    assert one.points != other.points
    assert {p.key for p in one.points} == {p.key for p in other.points}
    ranks = [TIERS.index(p.tier) for p in one.points]
    assert ranks == sorted(ranks)
    first = [p for p in one.points if p.tier == TIERS[0]]
    assert len({p.split for p in first[:12]}) >= 4


def test_budget_too_short_says_how_long_is_needed():
    with pytest.raises(ProfileError, match=r"--budget-s 5: the first group of points needs about 3\d s"):
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
    assert prefill("engine_prefill_layer", 8192) in plan.too_large
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
    assert [s.decode_sms for s in choose_splits(108, granularity((8, 0)), CORE_DECODE_SHARES)] == [16, 22, 30, 42, 56, 82]
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
