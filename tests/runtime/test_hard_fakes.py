"""What a card, a driver or a library may do that a polite fake does not: each is done here, and what the kit says of it."""

# ruff: noqa: F811 - a fixture of another file is imported by its name
from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import Boost  # noqa: E402
from stub_driver import SINCE, CUresult, StubDriver, gpcs_of  # noqa: E402
from test_opening_a_gpu import error_of, machine, nothing_left  # noqa: E402, F401

from bullet.catalog.models import get_model  # noqa: E402
from bullet.cli import measure as profile_cli  # noqa: E402
from bullet.gpu.driver import Driver  # noqa: E402
from bullet.gpu.partition import green_context_table  # noqa: E402
from bullet.gpu.splits import IGNORE_SM_COSCHEDULING, Split  # noqa: E402
from bullet.profiler import bench_cuda, card  # noqa: E402
from bullet.profiler.axes import CORE_DECODE_SHARES, choose_splits, gpu_axes  # noqa: E402
from bullet.profiler.evidence import read_evidence  # noqa: E402
from bullet.profiler.shapes import decode, flops_and_bytes, prefill  # noqa: E402
from bullet.profiles.journal import read_journal  # noqa: E402

SWEEP = ["sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "60"]


def rows_of(folder):
    return read_journal(folder / "samples.jsonl")[1]


# ------------------------------------------------------------------------------------------ the driver


def test_error_numbers_are_those_of_the_bindings():
    driver = pytest.importorskip("cuda.bindings.driver")
    for code in CUresult:
        assert int(driver.CUresult[code.name]) == code.value, code.name
    assert CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION == 915


def test_groups_are_rounded_up_and_rows_say_what_was_granted(machine, tmp_path, capsys):
    """A driver that splits in sixteens, which no table here knows: 104 become 112, as 112 are; the two
    are one pair of rows."""
    gpu = machine(stub={"step": 16})
    command = [*SWEEP, "--out", str(tmp_path)]
    command[command.index("112+20")] = "104+28,112+20,80+52"
    assert profile_cli.main(command) == 0
    out = capsys.readouterr().out
    assert "112+20 (asked 104+28)  PROVEN" in out
    assert "3 of 3 pairs proven" in out
    rows = rows_of(tmp_path)
    assert {(r["split_prefill_sms"], r["split_decode_sms"]) for r in rows if r["split_decode_sms"]} == {(112, 20), (80, 52)}
    assert len({r["id"] for r in rows}) == len(rows)
    assert nothing_left(gpu)


def test_an_odd_size_without_coscheduling_is_rounded_too():
    stub = StubDriver()
    with green_context_table([Split(122, 10)], driver=Driver(stub), flags=IGNORE_SM_COSCHEDULING) as made:
        assert made.pairs[0].granted == (122, 10)
    small = StubDriver(num_sms=108, capability=(8, 0), step=4)
    with green_context_table([Split(94, 14)], driver=Driver(small)) as made:
        assert (made.pairs[0].asked, made.pairs[0].granted) == ((94, 14), (96, 12))


def test_groups_hold_clusters_and_remainders_what_is_left_and_the_kit_keeps_both(machine, tmp_path):
    """132 SMs in GPCs of 18 and 16: 112 are fourteen eights, the remainder holds two pairs that no cluster of eight fits in. SMs
    of a lane are not neighbours, and one pair's prefill shares more with another's decode than arithmetic says."""
    gpu = machine()
    command = [*SWEEP, "--out", str(tmp_path)]
    command[command.index("112+20")] = "112+20,20+112"
    assert profile_cli.main(command) == 0
    stored = json.loads((tmp_path / "check.json").read_text())
    assert stored["proven"]
    first, second = stored["pairs"]
    gpcs = gpcs_of(132)
    assert sorted(map(len, gpcs)) == [16] * 6 + [18] * 2
    assert all(len(set(first["prefill_smids"]) & set(gpc)) % 8 == 0 for gpc in gpcs)
    assert not all(len(set(first["decode_smids"]) & set(gpc)) % 8 == 0 for gpc in gpcs)
    assert first["prefill_smids"] != list(range(112))
    assert first["prefill_smids"] == second["decode_smids"]  # the same group, asked for twice
    assert stored["overlaps"][0][3] == 112  # by arithmetic 112 + 112 - 132 = 92
    sides = {(r["split_prefill_sms"], r["group_lane"]) for r in rows_of(tmp_path) if r["split_decode_sms"]}
    assert sides == {(112, "prefill"), (20, "decode")}
    assert nothing_left(gpu)


@pytest.mark.parametrize("version", [12020, 12040])
def test_a_driver_from_before_streams_of_green_contexts(machine, tmp_path, capsys, version):
    """12.4 has the contexts but no streams of theirs: found before anything is made."""
    assert SINCE["cuGreenCtxCreate"] == 12040 < SINCE["cuGreenCtxStreamCreate"] == 12050
    gpu = machine(stub={"version": version})
    err = error_of([*SWEEP, "--backend", "green-context", "--out", str(tmp_path)], capsys)
    assert f"driver supports CUDA 12.{version % 1000 // 10}: green contexts need 12.5 or newer (driver 555)" in err
    assert gpu.driver.calls == ["cuInit", "cuDriverGetVersion"]
    # Without the look at the version it would have found out only after a context was made.
    stub = StubDriver(version=version)
    stub.version = 12050
    stub.missing = frozenset({"cuGreenCtxStreamCreate"})
    with pytest.raises(Exception, match="the driver has no cuGreenCtxStreamCreate"):
        green_context_table([Split(112, 20)], driver=Driver(stub))
    assert not stub.contexts


def test_a_resource_configuration_that_is_refused_is_one_splits_and_named_by_its_error(machine, tmp_path, capsys):
    """More SMs than eights of one GPC make: 915, and the split beside it is measured."""
    gpu = machine(stub={"step": 136})
    err = error_of([*SWEEP, "--out", str(tmp_path)], capsys)
    assert "no split was granted: cuDevSmResourceSplitByCount answered CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION" in err
    assert nothing_left(gpu)


# ------------------------------------------------------------------------------------------ contexts of events and streams


def test_events_that_are_their_contexts_own_are_found_out_and_made_there(machine, tmp_path, capsys):
    """An event is of the context that was current when it was made: on a lane's stream it is refused until that lane's context
    is current, and no time is measured from one lane's event to the other's. All is measured then, and proven."""
    gpu = machine(strict_events=True)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 pairs proven by streams alone; once more with each green context made current" in out
    assert "1 of 1 pairs proven" in out
    assert "failed:" not in out
    rows = rows_of(tmp_path)
    assert {r["partition"] for r in rows if r["split_decode_sms"] is not None and r["sharing"] == "split"} == {"proven"}
    assert all(r["slowdown"] == pytest.approx(1, rel=1e-6) for r in rows if r["kind"] == "corun")
    assert {r["tier"] for r in rows} >= {"co-run matrix", "controls", "checks", "SM axis"}
    assert gpu.driver.stack == []
    assert nothing_left(gpu)


def test_a_stream_that_was_destroyed_is_not_worked_on(machine, monkeypatch):
    """The fake's own refusal, and the order of closing that it guards: graphs, streams, contexts."""
    gpu = machine()
    stream = None
    with green_context_table([Split(112, 20)], driver=Driver(gpu.driver), wrap_stream=gpu.cuda.ExternalStream) as made:
        stream = made.pairs[0].decode.stream
        with gpu.cuda.stream(stream):
            gpu.cuda.launch(1e-3)
    with pytest.raises(RuntimeError, match="invalid resource handle"), gpu.cuda.stream(stream):
        gpu.cuda.launch(1e-3)


# ------------------------------------------------------------------------------------------ memory


def test_a_small_card_drops_what_is_cached_and_measures_all_that_fits(machine, tmp_path, capsys):
    """8 GiB, of which every operation's data and every stream's activations take their part: no point is lost to memory."""
    gpu = machine(total_bytes=8 << 30)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "failed:" not in out
    assert gpu.cuda.peak > 0.6 * (8 << 30)
    assert gpu.cuda.charged == 0  # all was given back
    assert "whole: co-run matrix" in out
    assert nothing_left(gpu)


def test_a_card_too_small_for_a_point_loses_that_point_alone_and_says_so(machine, tmp_path, capsys, monkeypatch):
    """The plan believes that all fits; the card does not hold the longest prefill beside the rest."""
    monkeypatch.setattr(card, "fits_in", lambda *args: lambda shape: True)
    gpu = machine(total_bytes=2 << 30)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "out of GPU memory (CUDA out of memory. Tried to allocate" in out
    assert "end other processes or leave the shape out with --skip" in out
    rows = rows_of(tmp_path)
    assert {r["tokens"] for r in rows if r["op"] == "engine_prefill_layer" and r["kind"] == "corun"}.isdisjoint({8192})
    assert len(rows) > 50
    assert "begun: co-run matrix" in out
    assert nothing_left(gpu)


def test_the_memory_that_the_plan_states_is_enough_for_the_engines_layers(machine, tmp_path, capsys):
    """What the plan prints bounds what the fake was asked for, with six splits' lanes; and holds it within a factor of three."""
    gpu = machine(total_bytes=130 << 30)
    assert profile_cli.main(["sweep", "--part", "corun", "--budget-s", "300", "--out", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory: "))
    planned = float(line.split()[1]) * 2**30
    assert gpu.cuda.peak <= planned <= 3 * gpu.cuda.peak
    assert nothing_left(gpu)


def test_memory_by_hand():
    """Llama-3.1-8B at bf16: 8,192 new tokens of prefill take 8192 x 2 x (3 x 14336 + 5 x 4096) bytes on each lane and on the two
    plain streams; decode's 256 sequences of 1,024 tokens hold 2 x 256 x 1024 x 8 x 128 x 2 bytes of keys and values."""
    model = get_model("llama-3.1-8b")
    plan = card.memory_plan(model, [prefill("engine_prefill_layer", 8192), decode("engine_decode_layer", 256, 1024)], 6, 2,
                            60 << 20, 130 << 30)
    assert plan.activations_bytes == 8 * (8192 + 256) * 2 * (3 * 14336 + 5 * 4096)
    prefill_cache = min(3 * (60 << 20), 64 * 2 * 8192 * 8 * 128 * 2)
    assert plan.caches_bytes == 2 * 256 * 1024 * 8 * 128 * 2 + prefill_cache
    assert plan.streams_bytes == 16 * ((32 << 20) + (44 << 20))
    assert "of 130.0 GiB free" in plan.line()
    # A shape whose activations on every lane do not fit is left out of the plan by name.
    held = 6 * 8192 * 2 * (3 * 14336 + 5 * 4096) + 2 * flops_and_bytes(model, prefill("engine_prefill_layer", 8192))[1]
    for free, fits in ((2 * held, True), (2 * held - 4, False)):
        assert card.fits_in(model, 2, int(free), lanes=6)(prefill("engine_prefill_layer", 8192)) is fits


# ------------------------------------------------------------------------------------------ libraries


def test_a_gemm_that_leaves_its_lane_is_an_error_and_no_row_counts_as_proven(machine, tmp_path, capsys):
    """The probe, a kernel of ours, keeps to the lane; cuBLAS does not: the quarter of the SMs is no slower than all."""
    gpu = machine(escapes=("gemm_",))
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ERROR: a GEMM on 20 of 132 SMs takes 1.00 times as long as on all, 6.60 wanted: its kernels leave the lane" in out
    assert "0 of 1 pairs proven" in out
    rows = [r for r in rows_of(tmp_path) if r["split_decode_sms"] is not None]
    assert {r["partition"] for r in rows} == {"unproven"}
    assert all("its kernels leave the lane" in r["partition_note"] for r in rows if r["sharing"] == "split")
    assert json.loads((tmp_path / "check.json").read_text())["proven"] is False
    # The check says it too, and is not content.
    machine(escapes=("gemm_",))
    assert profile_cli.main(["check"]) == 1
    assert "its kernels leave the lane" in capsys.readouterr().out
    assert nothing_left(gpu)


def test_kernels_of_a_library_in_another_context_are_found_in_the_graphs(machine, tmp_path, capsys):
    """Attention alone leaves its lane: neither the probe nor the GEMM shows it, the nodes of the captured graph do."""
    machine(escapes=("prefill_attention",))
    assert profile_cli.main([*SWEEP, "--budget-s", "90", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 pairs proven" in out
    assert "prefill_attention on prefill of 112 SMs: its kernels are in another context than the lane's" in out
    kept = read_evidence(tmp_path / "graphs.jsonl.gz")
    wrong = {(r["op"], r["lane"]) for r in kept if r["context"] and {n["context"] for n in r["nodes"]} != {r["context"]}}
    assert {op for op, _ in wrong} == {"prefill_attention"}
    assert {(r["op"], r["lane"], r["sms"]) for r in kept} >= {
        ("engine_prefill_layer", "prefill", 112), ("engine_decode_layer", "decode", 20), ("gemm_gate_up", "decode", 20)}


def test_a_copy_inside_a_layer_is_named(machine, tmp_path, capsys):
    machine(copies=("engine_decode_layer", "copy"))
    assert profile_cli.main([*SWEEP, "--budget-s", "90", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "engine_decode_layer on decode of 20 SMs: 1 memcpy nodes inside the layer" in out
    assert "copy on" not in out  # which it is meant to be


def test_a_torch_that_keeps_no_graph_costs_the_reading_and_no_row(machine, tmp_path, capsys, monkeypatch):
    gpu = machine()
    make = gpu.cuda.CUDAGraph

    def graph():
        return make()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "failed:" not in out
    assert "Where kernels ran is not known: " in out
    assert "unexpected keyword argument 'keep_graph'" in out
    assert "whole: co-run matrix" in out


# ------------------------------------------------------------------------------------------ clocks


def test_clocks_that_fall_under_load_are_those_of_serving_in_every_window(machine, tmp_path):
    """A quarter faster after a rest (each capture is one), settling within 80 ms of load: every timed window follows 0.3 s of
    load, so that ratios are 1 within 1 % and clocks within 3 %, though the card rests before every cell."""
    gpu = machine(clock=Boost(), capture_s=0.1)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    ratios = [r["slowdown"] for r in rows if r["kind"] in ("corun", "control")]
    assert len(ratios) > 40
    assert ratios == [pytest.approx(1, abs=0.01)] * len(ratios)
    assert all(1.5e9 <= r["clock_window_hz"] < 1.03 * 1.5e9 for r in rows)
    assert all(abs(r["solo_drift"]) < 0.01 for r in rows if r["kind"] == "corun")
    assert nothing_left(gpu)


def test_without_the_load_before_them_the_same_clocks_would_be_taken_for_contention(machine, tmp_path, monkeypatch):
    """The test before can fail: with no lead the first window of a cell runs faster than those after it, and rows say so."""
    monkeypatch.setattr(bench_cuda.CudaBench, "_train", staticmethod(
        lambda lane, graph, count, lead_s: bench_cuda.Train(lane, graph, count, 1)))
    machine(clock=Boost(), capture_s=0.1)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    first = [r for r in rows_of(tmp_path) if r["kind"] == "corun" and r["lane"] == "prefill" and r["tokens"] == 512]
    assert max(r["slowdown"] for r in first) > 1.02
    assert max(abs(r["solo_drift"]) for r in first) > 0.05


def test_a_card_that_slows_down_over_the_sweep_is_marked_and_its_cells_are_still_right(machine, tmp_path, capsys):
    """A tenth of the clock is lost between the first minute and the second: anchors tell, rows around are marked, and ratios of
    windows that lie side by side do not move."""
    machine(clock=lambda at_s: 1.0 if at_s < 20 else 0.9)
    assert profile_cli.main([*SWEEP, "--out", str(tmp_path)]) == 0
    assert "Anchors: largest drift 1" in capsys.readouterr().out
    rows = rows_of(tmp_path)
    clocks = {round(r["clock_window_hz"] / 1.5e9, 2) for r in rows}
    assert clocks >= {0.9, 1.0}
    steady = [r for r in rows if r["kind"] == "corun" and abs(r["solo_drift"]) < 0.01]
    assert len(steady) > 20
    assert all(r["slowdown"] == pytest.approx(1, abs=0.01) for r in steady)


def test_a_faked_card_has_the_core_splits_of_a_real_one():
    """What these tests measure on is what an H200 is asked for."""
    splits = choose_splits(132, bench_cuda.granularity((9, 0)), CORE_DECODE_SHARES)
    with green_context_table(splits, driver=Driver(StubDriver())) as made:
        assert [p.granted for p in made.pairs] == list(splits)
        assert not made.refused
    assert gpu_axes(splits, []).splits == splits
    assert sys.modules["fake_cuda"].INVALID_HANDLE.endswith("invalid resource handle")
