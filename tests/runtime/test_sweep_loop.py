"""The sweep's loop, on a scripted device, on this machine's CPU and on the simulator's device."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from bullet.catalog.models import get_model
from bullet.cli import measure as profile_cli
from bullet.gpu.partition import simulated_table
from bullet.gpu.splits import Split, granularity
from bullet.profiler import cells
from bullet.profiler.axes import CORE_DECODE_SHARES, EXTRA_DECODE_SHARES, choose_splits, gpu_axes
from bullet.profiler.bench import NO_CLOCKS, BusyError, DeviceLostError, PointError, SimulatedBench, lane_units, other_lane
from bullet.profiler.cells import Measurement, Side
from bullet.profiler.check import unchecked
from bullet.profiler.plan import ANCHOR_EVERY, Point, Rates, make_plan
from bullet.profiler.shapes import ENGINE_LAYERS, Shape, decode, flops_and_bytes, prefill
from bullet.profiler.summary import MAX_CHARS, corun_lines, fit, operation_lines, own_kernel_lines
from bullet.profiler.sweep import run_prefix, run_sweep
from bullet.profiler.timing import Stats
from bullet.profiles.journal import Journal, read_journal
from bullet.profiles.rows import finalise
from bullet.signals import Stopped

LLAMA = get_model("llama-3.1-8b")
SPLITS = choose_splits(132, granularity((9, 0)), CORE_DECODE_SHARES)
RATES = Rates(132, 6e14, 3e12, startup_s=10.0, compile_s=0.0)


class Clock:
    """Seconds that pass only when the scripted device says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A device that takes ``cost_s`` (or what that says of it) a point and fails as told: point number -> exception."""

    backend, source, gpu, unit, num_units, dtype = "simulated", "simulated", "scripted", "SM", 132, "bfloat16"
    torch_attention, busy, seconds = None, False, 1e-3

    def __init__(self, clock: Clock, cost_s=0.3, fail: dict[int, BaseException] | None = None) -> None:
        self.clock, self.cost_s, self.fail = clock, cost_s, fail or {}
        self.count = self.anchors = 0
        self.table = simulated_table(SPLITS, 132, (9, 0))

    def measure(self, point):
        self.count += 1
        self.clock.now += self.cost_s(point) if callable(self.cost_s) else self.cost_s
        if self.count in self.fail:
            raise self.fail[self.count]
        own = "prefill" if point.kind == "corun" else point.lane
        lanes = (own, other_lane(own))
        shapes = (point.shape, point.other)

        def side(at):
            return Side(lanes[at], shapes[at], lane_units(self, point, lanes[at]), [self.seconds] * 25, 1, 0.1, 1.0, 1e12)

        return cells.measure(point, lambda steps: [[side("ab".index(lane)) for lane in which] for which in steps])

    def anchor(self):
        self.anchors += 1
        return Measurement("full", Shape("prefill_layer", 2048), 132, Stats(2e-3, 2e-3, 2e-3, 25), 1)

    def clocks(self):
        return dict(NO_CLOCKS)

    def provenance(self):
        return {"driver": "1"}


def run(tmp_path, bench, plan, **options):
    report = unchecked(bench.table, bench.gpu, "scripted")
    with Journal(tmp_path / "samples.jsonl", {"gpu": bench.gpu, "source": bench.source}) as journal:
        result = run_sweep(bench, LLAMA, plan, journal, report, clock=bench.clock, now=lambda: "2026-11-30T00:00:00+00:00",
                           **options)
        return result, journal.rows


def plan_for(budget_s):
    return make_plan(LLAMA, gpu_axes(SPLITS, []), RATES, budget_s=budget_s)


def test_every_point_becomes_its_rows_with_anchors_between(tmp_path):
    bench = Scripted(Clock())
    plan = plan_for(60)
    result, rows = run(tmp_path, bench, plan)
    assert (result.measured, result.left, result.failed, result.stopped) == (len(plan.points), 0, [], "")
    about = {i for p in plan.points for i in p.row_ids("llama-3.1-8b|bfloat16|simulated")}
    measured = [r for r in rows if r["id"] in about]
    assert sum(r["kind"] == "corun" for r in measured) > 0
    assert len(rows) == len(measured) + 4 * sum(p.kind == "corun" for p in plan.points) + bench.anchors
    assert [r["id"] for r in measured] == [i for p in plan.points for i in p.row_ids("llama-3.1-8b|bfloat16|simulated")]
    assert bench.anchors == 2 + (len(plan.points) - 1) // ANCHOR_EVERY
    gaps = [i for i, r in enumerate(rows) if r["kind"] == "anchor"]
    assert rows[0]["kind"] == rows[-1]["kind"] == "anchor"
    assert max(b - a for a, b in itertools.pairwise(gaps)) <= 6 * ANCHOR_EVERY + 1
    assert [r["order"] for r in rows] == list(range(len(rows)))
    assert {r["partition"] for r in rows} == {"none"}
    assert all(r["driver"] == "1" and r["seed"] == 0 and r["flops"] is not None for r in rows)


def test_a_point_that_fails_is_named_and_the_rest_measured(tmp_path):
    bench = Scripted(Clock(), fail={3: PointError("kernel refused")})
    plan = plan_for(30)
    result, _ = run(tmp_path, bench, plan)
    assert result.failed == [(plan.points[2].key, "kernel refused")]
    assert result.measured == len(plan.points) - 1


@pytest.mark.parametrize(("failure", "status"), [
    (DeviceLostError("gone"), 3), (BusyError("pid 7 has come"), 2), (KeyboardInterrupt(), 130), (Stopped(signal.SIGTERM), 143),
    (Stopped(signal.SIGHUP), 129)])
def test_what_was_measured_is_kept_and_resumed(tmp_path, failure, status):
    plan = plan_for(30)
    result, rows = run(tmp_path, Scripted(Clock(), fail={11: failure}), plan)
    assert (result.measured, result.status) == (10, status)
    assert result.left == len(plan.points) - 10
    assert result.stopped
    kept = [r["id"] for r in rows]
    bench = Scripted(Clock())
    result, rows = run(tmp_path, bench, plan)
    assert bench.count == len(plan.points) - 10
    ids = [r["id"] for r in rows]
    assert ids[:len(kept)] == kept
    assert len(ids) == len(set(ids))
    assert {r["run"] for r in rows} == {0, 1}


def test_a_slow_device_stops_at_the_budget(tmp_path):
    clock = Clock()
    plan = plan_for(60)
    result, _ = run(tmp_path, Scripted(clock, cost_s=2.0), plan, budget_s=60.0)
    assert result.stopped == "budget of 60 s reached"
    assert result.left > 0
    assert 45 <= clock.now - 100 <= 60


@pytest.mark.parametrize("times", [2, 8])
def test_a_machine_slower_than_assumed_measures_the_corun_matrix_and_keeps_the_budget(tmp_path, times):
    """The plan of 240 s when every point takes ``times`` as long as estimated, on 132 SMs."""
    clock = Clock()
    bench = Scripted(clock, cost_s=lambda point: times * point.seconds)
    extra = choose_splits(132, granularity((9, 0)), EXTRA_DECODE_SHARES)
    plan = make_plan(LLAMA, gpu_axes(SPLITS, extra), RATES, budget_s=240)
    result, rows = run(tmp_path, bench, plan, budget_s=240.0)
    assert result.stopped == "budget of 240 s reached"
    assert 200 < clock.now - 100 < 240
    corun = {(r["split_decode_sms"], r["tokens"], r["corunner_batch"]) for r in rows
             if r["kind"] == "corun" and r["lane"] == "prefill" and r["tier"] == "co-run matrix"}
    assert {r["tier"] for r in rows} == {"anchor", "co-run matrix"}  # nothing else is begun before the matrix is whole
    if times == 2:  # all cells once, and some of them again
        assert len(corun) == 72
        assert {r["replicate"] for r in rows if r["kind"] == "corun"} == {0, 1}
    else:
        assert len(corun) > 20
        assert {r["replicate"] for r in rows if r["kind"] == "corun"} == {0}


def test_estimates_are_corrected_before_five_planned_seconds_are_over(tmp_path):
    """Twenty times slower, and a plan of 60 points at 0.2 s: the 12 points' 4 s each are known after the second."""
    clock = Clock()
    plan = plan_for(60)
    slow = dataclasses.replace(plan, points=tuple(dataclasses.replace(p, seconds=0.2) for p in plan.points[:60]), spare=())
    result, _ = run(tmp_path, Scripted(clock, cost_s=4.0), slow, budget_s=45.0)
    assert result.stopped == "budget of 45 s reached"
    assert result.measured == 10  # 43 s but for the closing: an eleventh would end at 44
    assert clock.now - 100 == 40.0


def test_a_point_of_a_cpu_that_outlasts_the_budget_ends_with_it(tmp_path):
    """A busy machine: from the fourth replay on each takes 10 s. The budget's 20 s are over within the third point."""
    pytest.importorskip("torch")
    from bullet.profiler.bench import CpuBench

    clock, turns = Clock(), itertools.count()
    bench = CpuBench(get_model("tiny"), threads=1, replays=7, clock=lambda: clock.now)

    class Work:
        rotation = 1

        def run(self, index):
            clock.now += 0.1 if next(turns) < 12 else 10.0

    bench.clock = clock
    bench._workload = lambda shape, lane: Work()
    points = tuple(Point("solo", None, "full", prefill("prefill_layer", n), tier="shapes", seconds=0.5) for n in (8, 16, 32))
    plan = dataclasses.replace(plan_for(60), points=points, spare=())
    try:
        result, rows = run(tmp_path, bench, plan, budget_s=20.0)
    finally:
        bench.close()
    assert result.stopped == "budget of 20 s reached"
    assert result.failed == []
    assert (result.measured, result.left) == (0, 3)
    assert clock.now - 100 < 20 + 10.0  # one replay, not seven of each of three points
    assert {r["kind"] for r in rows} == {"anchor"}


def test_a_machine_faster_than_assumed_spends_the_time_left_on_what_was_cut(tmp_path):
    clock = Clock()
    bench = Scripted(clock, cost_s=lambda point: point.seconds / 4)
    plan = plan_for(60)
    whole = make_plan(LLAMA, gpu_axes(SPLITS, []), RATES)
    assert {p.key for p in (*plan.points, *plan.spare)} == {p.key for p in whole.points}
    result, rows = run(tmp_path, bench, plan, budget_s=60.0)
    assert (result.stopped, result.left, result.failed) == ("", 0, [])
    assert result.beyond == result.measured - len(plan.points) > 100
    assert 50 < clock.now - 100 < 60
    expected = [i for p in (*plan.points, *plan.spare)[:result.measured] for i in p.row_ids("llama-3.1-8b|bfloat16|simulated")]
    assert [r["id"] for r in rows if r["kind"] != "anchor" and "alone " not in r["id"]] == expected


def test_progress_says_what_is_left(tmp_path):
    said = []
    run(tmp_path, Scripted(Clock(), cost_s=2.0), plan_for(30), say=said.append)
    assert said[0].startswith("[3/")
    assert "s to go" in said[0]


def test_a_foreign_exception_is_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, Scripted(Clock(), fail={5: ZeroDivisionError()}), plan_for(30))
    assert len([r for r in read_journal(tmp_path / "samples.jsonl")[1] if r["kind"] != "anchor"]) >= 4


def test_the_printed_tables_stay_short(tmp_path):
    _, rows = run(tmp_path, Scripted(Clock()), make_plan(LLAMA, gpu_axes(SPLITS, []), RATES))
    table = corun_lines(finalise(rows), "scripted", ENGINE_LAYERS)
    assert "Co-run (engine's layers), scripted" in table[0]
    text = fit(["verdict"] * 20, [table] * 9)
    assert len("\n".join(text)) <= MAX_CHARS
    assert any("more lines: see the samples file" in line for line in text)
    assert "1.00/1.00" in table[2]


def test_operations_and_layers_are_printed_apart(tmp_path):
    _, rows = run(tmp_path, Scripted(Clock()), make_plan(LLAMA, gpu_axes(SPLITS, []), RATES))
    wide = "gemm_gate_up"
    for row in rows:  # prefill's gate + up beside decode attention: 3 and 2 times the run alone, whatever layers show
        if (row["op"], row["corunner"]) in ((wide, "decode_attention"), ("decode_attention", wide)):
            row["slowdown"] = 3.0 if row["lane"] == "prefill" else 2.0
    rows = finalise(rows)
    layers, operations = corun_lines(rows, "scripted"), operation_lines(rows, "scripted")
    assert all("2.00" not in line and "3.00" not in line for line in layers)
    assert [line.split() for line in operations if line.startswith(f"{wide} | decode_attention")] == [
        [wide, "|", "decode_attention", *["2.00/3.00"] * 3]]
    assert operations[1].split() == ["prefill", "|", "decode", "112+20", "96+36", "32+100"]
    assert len(operations) == 18  # a title, the columns, 16 pairs


def test_own_kernels_are_held_against_the_best_copy_and_torchs_attention(tmp_path):
    """By hand: two copies of 1 and 2 GB in 1 ms, so 2 TB/s is the copy's; 1.5 GB of cache in 1 ms are 75 % of it and 0.6 GB 30 %;
    prefill attention of 2 ms beside SDPA's 1 ms has half its speed. Lanes and drifted rows play no part."""
    _, rows = run(tmp_path, Scripted(Clock()), make_plan(LLAMA, gpu_axes(SPLITS, []), RATES))
    rows = finalise(rows)
    attention = [r for r in rows if r["op"] == "paged_decode_attention" and r["kind"] == "solo" and r["sms"] == 132]
    for row in rows:
        if row["op"] in ("copy", "own_copy"):
            row["bytes"] = {"copy": 1e9, "own_copy": 2e9}[row["op"]]
        elif row["op"] == "paged_decode_attention":
            row["bytes"] = 1.5e9 if row["sms"] == 132 else 9e9
        elif row["op"] == "own_prefill_attention":
            row["median_s"] = 2e-3
    attention[3]["bytes"] = 6e8
    lines = own_kernel_lines(rows, "scripted")
    at = "{tokens}x{batch}@{context_tokens}".format(**attention[3])
    assert lines[0].startswith("paged_decode_attention: 75 % of copy bandwidth at ")
    assert lines[0].endswith(f", 30 % at {at}; 70 % wanted, reached at {len(attention) - 1} of {len(attention)} sizes")
    assert lines[1].startswith("own_prefill_attention: 50 % of SDPA's speed at ")
    assert "60 % wanted, reached at 0 of" in lines[1]
    assert "Own kernels and layers, scripted" in lines[2]
    (act,) = [line.split() for line in lines if line.startswith("own_act") and " 2048x1@0" in line]
    assert act[2:5] == ["1000.0", "1000.0", "1.00"]
    without = own_kernel_lines([r for r in rows if "copy" not in r["op"]], "scripted")
    assert without[0].startswith("own_prefill_attention")  # no copy, no share of its bandwidth
    assert own_kernel_lines([r for r in rows if not r["op"].startswith(("own", "paged", "engine"))], "scripted") == []


# ---------------------------------------------------------------------------------------- CPU and simulated


def test_cpu_sweep_is_real_labelled_and_short(tmp_path, capsys):
    pytest.importorskip("torch")
    assert profile_cli.main(["sweep", "--device", "cpu", "--budget-s", "9", "--threads", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Co-run, CPU, no partition, lanes alternate: not contention" in text
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {r["gpu"] for r in rows} == {"CPU, no partition"}
    assert {r["partition"] for r in rows} == {"none"}
    assert {r["unit"] for r in rows} == {"thread"}
    assert {r["kind"] for r in rows} >= {"solo", "corun", "anchor"}
    assert all(r["median_s"] > 0 and r["torch"] for r in rows)
    assert len(list(tmp_path.iterdir())) <= 8


def test_cpu_bench_restores_the_threads_and_alternates():
    torch = pytest.importorskip("torch")
    from bullet.gpu.splits import Split
    from bullet.profiler.bench import CpuBench
    from bullet.profiler.plan import Point
    from bullet.profiler.shapes import decode, prefill

    before = torch.get_num_threads()
    ticks = iter(range(10**6))
    bench = CpuBench(get_model("tiny"), threads=3, replays=4, clock=lambda: float(next(ticks)))
    used = []
    set_threads = torch.set_num_threads

    def noted(count):
        used.append(count)
        set_threads(count)

    torch.set_num_threads = noted
    try:
        point = Point("corun", Split(2, 1), "both", prefill("prefill_layer", 16), decode("decode_layer", 2, 8))
        before_p, before_d, p, d, after_d, after_p = bench.measure(point)
    finally:
        torch.set_num_threads = set_threads
    assert used[-29:] == [2] * 4 + [1] * 4 + [2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2] + [1] * 4 + [2] * 4
    assert [m.part for m in (before_p, before_d, p, d, after_d, after_p)] == [
        "alone before", "alone before", "", "", "alone after", "alone after"]
    assert (before_p.sms, after_d.sms, p.step, p.columns["slowdown"]) == (2, 1, 2, 1.0)
    assert (p.sms, d.sms) == (2, 1)
    assert p.stats.median_s == d.stats.median_s == 1.0  # each replay spans one tick
    assert d.stats.samples >= 4
    bench.close()
    assert torch.get_num_threads() == before


def test_check_refuses_a_cpu_and_simulates_a_gpu(capsys):
    assert profile_cli.main(["check", "--device", "cpu"]) == 2
    assert "a CPU has no SM partitions" in capsys.readouterr().err
    assert profile_cli.main(["check", "--device", "simulated", "--splits", "112+20"]) == 0
    text = capsys.readouterr().out
    assert "112+20  would be granted" in text
    assert "PROVEN" not in text
    assert profile_cli.main(["check", "--device", "simulated", "--splits", "114+18"]) == 2
    assert "split 114+18 of 132 SMs cannot be granted" in capsys.readouterr().err


def test_simulated_sweep_is_labelled_and_repeats_with_its_seed(tmp_path, capsys):
    def sweep(name, *options):
        command = ["sweep", "--device", "simulated", "--splits", "112+20,72+60", "--out", str(tmp_path / name), *options]
        assert profile_cli.main(command) == 0
        return {r["id"]: r["median_s"] for r in read_journal(tmp_path / name / "samples.jsonl")[1]}

    one, again, other, exact = sweep("a"), sweep("b"), sweep("c", "--seed", "1"), sweep("d", "--noise-std", "0")
    text = capsys.readouterr().out
    assert "Co-run, SIMULATED simulated h200" in text
    assert "measured on" not in text
    assert one == again
    assert one != other
    assert one != exact
    assert max(abs(one[i] / exact[i] - 1) for i in exact) < 0.05
    rows = finalise(read_journal(tmp_path / "d" / "samples.jsonl")[1])
    assert {r["source"] for r in rows} == {"simulated"}
    slow = [r["slowdown"] for r in rows if r["kind"] == "corun"]
    assert min(slow) >= 1.0 - 1e-9
    assert max(slow) > 1.0


def test_simulated_rows_are_samples_of_the_device():
    """Without noise, and by the device's own answers: a layer alone, both sides of a pair, the least bytes beside it."""
    bench = SimulatedBench(LLAMA, "h200", simulated_table(SPLITS, 132, (9, 0)), noise_std=0.0)
    p_shape, d_shape = prefill("prefill_layer", 512, 256, batch=2), decode("decode_layer", 16, 1024)
    device = bench.device
    p_work = device.prefill_work([(512, 256)] * 2, 1, logits_seqs=0)
    d_work = device.hybrid_work((), 16, 16 * 1024, logits_seqs=0, layers=1)
    (alone,) = bench.measure(Point("solo", Split(112, 20), "decode", d_shape))
    assert (alone.sms, alone.stats.samples) == (20, 25)
    assert alone.stats.median_s == pytest.approx(device.solo_seconds(d_work, 20), rel=1e-12)
    (full,) = bench.measure(Point("solo", None, "full", p_shape))
    assert full.stats.median_s == pytest.approx(device.solo_seconds(p_work, 132), rel=1e-12)
    p, d = [m for m in bench.measure(Point("corun", Split(112, 20), "both", p_shape, d_shape)) if not m.part]
    assert d.columns["slowdown"] == pytest.approx(d.stats.median_s / alone.stats.median_s)
    assert (p.stats.median_s, d.stats.median_s) == pytest.approx(device.corun_seconds(p_work, 112, d_work, 20), rel=1e-12)
    assert (p.lane, p.sms, p.corunner_shape, p.corunner_sms) == ("prefill", 112, d_shape, 20)
    assert (d.lane, d.sms, d.corunner_shape, d.corunner_sms) == ("decode", 20, p_shape, 112)
    assert d.corunner_bytes_per_s == pytest.approx(flops_and_bytes(LLAMA, p_shape)[1] / p.stats.median_s)


@pytest.mark.parametrize(("command", "message"), [
    (["sweep", "--device", "tpu"], "invalid choice"),
    (["sweep", "--splits", "112-20"], "must read prefill+decode"),
    (["sweep", "--budget-s", "-1"], "must be a positive number"),
    (["sweep", "--budget-s", "nan"], "must be a positive number"),
    (["sweep", "--budget-s", "soon"], "'soon': must be a positive number"),
    (["sweep", "--device", "simulated", "--model", "gpt-9"], "unknown model 'gpt-9'"),
    (["sweep", "--device", "simulated", "--noise-std", "-1"], "--noise-std: '-1': must be a number, 0 or more"),
    (["sweep", "--device", "simulated", "--noise-std", "nan"], "must be a number, 0 or more"),
    (["sweep", "--device", "cpu", "--threads", "0"], "'0': must be a whole number, 1 or more"),
    (["sweep", "--device", "cpu", "--splits", "1+1"], "a CPU has no SMs to split"),
    (["check", "--device", "simulated", "--backend", "software"], "only --device cuda has backends"),
    (["sweep", "--skip", "softmax"], "invalid choice"),
    ([], "required"),
])
def test_bad_input_is_one_line(command, message, capsys, tmp_path):
    assert profile_cli.main([*command, *(["--out", str(tmp_path)] if command else [])]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_plan_only_needs_no_device(capsys):
    assert profile_cli.main(["sweep", "--plan-only", "--gpu", "a100-80gb", "--budget-s", "600", "--part", "corun"]) == 0
    text = capsys.readouterr().out
    assert "nothing is measured" in text
    assert "6 splits x 4 prefill sizes x 3 decode sizes, 72 combinations, both directions" in text


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_process_that_is_signalled_in_mid_sweep_says_so_and_resumes(tmp_path, number, status):
    """The whole command in a process of its own: it waits in its sixth point, the signal comes, a second call goes on."""
    code = textwrap.dedent("""
        import sys, time
        from bullet.cli import measure as profile_cli
        from bullet.profiler.bench import SimulatedBench
        measure, calls = SimulatedBench.measure, []

        def waits(self, point):
            calls.append(point)
            if len(calls) == 6:
                print("waiting", flush=True)
                while True:  # signal.pause() would miss a signal that comes just before it
                    time.sleep(0.05)
            return measure(self, point)

        SimulatedBench.measure = waits
        sys.exit(profile_cli.main(sys.argv[1:]))
    """)
    command = ["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        for line in process.stdout:
            if line == "waiting\n":
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err == ""
    assert "left: the same command resumes" in out
    _, kept, _ = read_journal(tmp_path / "samples.jsonl")
    assert len([r for r in kept if r["kind"] != "anchor"]) >= 5
    assert profile_cli.main(command) == 0
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert [r["id"] for r in rows[:len(kept)]] == [r["id"] for r in kept]
    assert len({r["id"] for r in rows}) == len(rows) > len(kept)


@pytest.mark.parametrize("device", ["simulated", "cpu"])
def test_a_folder_that_cannot_be_written_or_resumed_is_one_line(tmp_path, capsys, device):
    if device == "cpu":
        pytest.importorskip("torch")
    (tmp_path / "file").write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    row = {"schema": "bullet-samples", "version": 1, "gpu": "NVIDIA A100", "source": "measured"}
    (other / "samples.jsonl").write_text(json.dumps(row) + "\n")
    for out, message in ((tmp_path / "file", "exists already"), (tmp_path / "file" / "x", "cannot be written"),
                         (other, "holds rows of gpu 'NVIDIA A100'")):
        assert profile_cli.main(["sweep", "--device", device, "--budget-s", "9", "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert str(out) in err
        assert message in err
    assert (other / "samples.jsonl").read_text() == json.dumps(row) + "\n"


def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path, capsys, monkeypatch):
    write = Journal._write

    def full(self, record):
        if len(self.rows) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, record)

    monkeypatch.setattr(Journal, "_write", full)
    command = ["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "cannot be written (No space left on device): rows until here are kept" in err
    assert "whole: no tier; not begun: co-run matrix" in out
    assert len(read_journal(tmp_path / "samples.jsonl")[1]) == 4
    monkeypatch.undo()
    assert profile_cli.main(command) == 0


def test_a_full_disk_is_one_line_and_no_row_is_lost(tmp_path):
    """The system's own refusal in the middle of a line: a process that may write no file beyond 40,000 bytes."""
    code = textwrap.dedent("""
        import resource, sys
        from bullet.cli import measure as profile_cli
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        sys.exit(profile_cli.main(sys.argv[1:]))
    """)
    command = ["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be written (File too large): rows until here are kept" in done.stderr
    assert (tmp_path / "samples.jsonl").stat().st_size == 40_000
    kept = read_journal(tmp_path / "samples.jsonl")[1]
    assert len(kept) > 10
    assert profile_cli.main(command) == 0
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    assert rows[:len(kept)] == kept
    assert len({r["id"] for r in rows}) == len(rows) > len(kept)


def test_nobody_reads_the_output(tmp_path):
    command = [sys.executable, "-m", "bullet.cli.profile", "sweep", "--device", "simulated", "--out", str(tmp_path)]
    end, other = os.pipe()
    os.close(end)
    with open(other, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_sweep_that_was_killed_gets_its_table_from_its_rows(tmp_path, capsys):
    assert profile_cli.main(["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]) == 0
    before = (tmp_path / "samples.parquet").read_bytes()
    table = capsys.readouterr().out.split("Co-run (engine's layers),")[1]
    (tmp_path / "samples.parquet").unlink()
    (tmp_path / "summary.txt").unlink()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"id": "half a li')
    assert profile_cli.main(["table", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rows of simulated h200 (simulated): 0 proven, 0 unproven," in out
    assert out.split("Co-run (engine's layers),")[1] == table
    assert (tmp_path / "samples.parquet").read_bytes() == before
    assert (tmp_path / "summary.txt").read_text() == out
    assert profile_cli.main(["table", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "samples.jsonl").write_text('{"schema": "bullet-samples", "version": 1, "gpu": "g", "source": "measured"}\n')
    assert profile_cli.main(["table", str(tmp_path)]) == 2
    assert "holds no row yet" in capsys.readouterr().err


def test_two_configs_of_one_name_are_two_models():
    bench = Scripted(Clock())
    other = dataclasses.replace(LLAMA, num_layers=2)
    assert run_prefix(bench, LLAMA) == "llama-3.1-8b|bfloat16|simulated"
    names = {run_prefix(bench, m) for m in (LLAMA, other, dataclasses.replace(LLAMA, num_layers=3))}
    assert len(names) == 3
    assert run_prefix(bench, other) == run_prefix(bench, dataclasses.replace(LLAMA, num_layers=2))


def test_two_configs_of_one_name_in_one_folder_are_not_divided_by_each_other(tmp_path):
    """The second model takes twice as long, alone and beside: every slow-down stays 1."""
    for model, cost in ((LLAMA, 1e-3), (dataclasses.replace(LLAMA, num_layers=2), 2e-3)):
        device = Scripted(Clock())
        device.seconds = cost
        plan = make_plan(model, gpu_axes(SPLITS, []), RATES, budget_s=40, prefix=run_prefix(device, model))
        with Journal(tmp_path / "samples.jsonl", {"gpu": "scripted", "source": "simulated"}) as journal:
            run_sweep(device, model, plan, journal, unchecked(device.table, "scripted", ""), clock=device.clock)
    rows = finalise(read_journal(tmp_path / "samples.jsonl")[1])
    coruns = [r for r in rows if r["kind"] == "corun"]
    assert {r["slowdown"] for r in coruns} == {1.0}
    assert len({r["model"] for r in coruns}) == 2


def test_models_of_one_folder_are_printed_apart_the_latest_first(tmp_path, capsys):
    command = ["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 0
    alone = [line for line in capsys.readouterr().out.splitlines() if "112+20" in line]
    assert profile_cli.main([*command, "--model", "qwen3-32b"]) == 0
    summary = (tmp_path / "summary.txt").read_text()
    assert [line for line in summary.splitlines() if line.startswith("Co-run (engine's layers)")] == [
        f"Co-run (engine's layers), SIMULATED simulated h200, {model}: slow-down of decode / prefill over the same lane alone "
        "(~ drifted, ? unproven, all: no split)" for model in ("qwen3-32b", "llama-3.1-8b")]
    assert [line for line in summary.splitlines() if "112+20" in line][-len(alone):] == alone
    assert profile_cli.main(["table", str(tmp_path)]) == 0
    assert "llama-3.1-8b: slow-down" in (tmp_path / "summary.txt").read_text()


def test_another_gpus_folder_stays_as_it_is(tmp_path, capsys):
    command = ["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 0
    (tmp_path / ".writable").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert profile_cli.main([*command, "--gpu", "h100"]) == 2
    assert "holds rows of gpu 'simulated h200'" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_sweep_in_which_every_point_fails_is_an_error(tmp_path):
    plan = make_plan(LLAMA, gpu_axes(SPLITS, []), RATES, budget_s=40)
    result, rows = run(tmp_path, Scripted(Clock(), fail={n: PointError("no such kernel") for n in range(999)}), plan)
    assert result.status == 2
    assert result.stopped.startswith("no point could be measured; the first: ")
    assert "no such kernel" in result.stopped
    assert result.measured == 0
    assert {r["kind"] for r in rows} <= {"anchor"}


def test_compare_two_tables(tmp_path, capsys):
    for name, seed in (("a", "0"), ("b", "1")):
        assert profile_cli.main(["sweep", "--device", "simulated", "--splits", "112+20", "--seed", seed,
                                 "--out", str(tmp_path / name)]) == 0
    assert profile_cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "measurements in common; median difference" in capsys.readouterr().out
    assert profile_cli.main(["sweep", "--device", "simulated", "--gpu", "h100", "--splits", "112+20", "--out",
                             str(tmp_path / "c")]) == 0
    assert profile_cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "only tables of one device are compared" in capsys.readouterr().err


def test_what_a_gpu_run_imports():
    """No tqdm or matplotlib; torch, triton, pyarrow and cuda-bindings only where they are used."""
    code = textwrap.dedent("""
        import sys
        import bullet.runtime, bullet.cli.measure, bullet.profiles.rows
        import bullet.profiler.bench_cuda, bullet.profiler.check, bullet.profiler.sweep, bullet.gpu.partition
        found = {"tqdm", "matplotlib", "scipy", "pandas", "torch", "triton", "pyarrow", "cuda"} & set(sys.modules)
        assert not found, found
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_whole_run_imports_nothing_beyond_what_a_gpu_machine_has(tmp_path):
    pytest.importorskip("torch")
    code = textwrap.dedent(f"""
        import sys
        for name in ("tqdm", "matplotlib", "scipy", "sklearn", "pyarrow"):
            sys.modules[name] = None  # an import of it fails
        from bullet.cli import measure as profile_cli
        code = profile_cli.main(["sweep", "--device", "cpu", "--budget-s", "6", "--threads", "2", "--out", {str(tmp_path)!r}])
        sys.exit(code)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pyarrow is not installed: no samples.parquet" in done.stdout
    assert (tmp_path / "samples.jsonl").exists()
