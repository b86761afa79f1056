"""The CUDA bench on a fake device: which stream captures, what a window contains, and how failures end."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda, FakeEvent, FakeGraph, FakeKernels, FakeShop, FakeStream  # noqa: E402
from stub_driver import StubDriver  # noqa: E402

from bullet.catalog.models import MODELS, get_model  # noqa: E402
from bullet.cli import measure as profile_cli  # noqa: E402
from bullet.errors import PartitionError  # noqa: E402
from bullet.gpu.driver import Driver  # noqa: E402
from bullet.gpu.partition import green_context_table, unpartitioned_table  # noqa: E402
from bullet.gpu.splits import Split, granularity  # noqa: E402
from bullet.profiler import bench_cuda, card, lane_graphs, session  # noqa: E402
from bullet.profiler.axes import choose_splits  # noqa: E402
from bullet.profiler.bench import DeviceLostError, PointError  # noqa: E402
from bullet.profiler.check import run_check  # noqa: E402
from bullet.profiler.plan import Point, Rates  # noqa: E402
from bullet.profiler.shapes import Shape, decode, flops_and_bytes, prefill  # noqa: E402
from bullet.profiles.journal import read_journal  # noqa: E402
from bullet.profiles.rows import ENGINE_OPS, read_parquet  # noqa: E402

LLAMA = get_model("llama-3.1-8b")
SPLIT = Split(112, 20)
PREFILL, DECODE = prefill("prefill_layer", 2048), decode("decode_layer", 32, 1024)
CORUN = Point("corun", SPLIT, "both", PREFILL, DECODE)
RATES = Rates(132, 6e14, 3e12)
PROPS = card.Props("NVIDIA stub", 132, (9, 0), 60 << 20, 1 << 37)


def open_bench(splits=(SPLIT,), kernels=True, model=LLAMA, read_processes=list, **options):
    stub = StubDriver()
    cuda = FakeCuda(stub, **options)
    table = green_context_table(splits, driver=Driver(stub), wrap_stream=cuda.ExternalStream)
    shop = FakeShop(cuda, model, RATES)
    bench = bench_cuda.CudaBench(
        model, table, unpartitioned_table(132, cuda.Stream), PROPS, shop, cuda,
        FakeKernels(cuda) if kernels else None, dtype="bfloat16", dtype_bytes=2, versions={"driver": "stub"},
        read_clocks=lambda: {"clock_sm_hz": 1.98e9}, read_processes=read_processes)
    return bench, cuda, stub


def about(bench, point):
    """The rows that a cell is about, without its windows alone."""
    return [m for m in bench.measure(point) if not m.part]


def test_alone_takes_what_the_lane_takes():
    bench, _, _ = open_bench()
    (row,) = bench.measure(Point("solo", SPLIT, "decode", DECODE))
    assert row.stats.median_s == pytest.approx(RATES.seconds(LLAMA, DECODE, 20), rel=1e-6)
    assert (row.lane, row.sms, row.corunner, row.window_s) == ("decode", 20, "idle", None)
    (full,) = bench.measure(Point("solo", None, "full", DECODE))
    assert full.stats.median_s == pytest.approx(RATES.seconds(LLAMA, DECODE, 132), rel=1e-6)
    assert full.sms == 132


def test_corun_times_both_lanes_inside_the_window():
    bench, _, _ = open_bench()
    p, d = about(bench, CORUN)
    assert (p.lane, p.shape, p.sms, p.corunner_shape, p.corunner_sms) == ("prefill", PREFILL, 112, DECODE, 20)
    assert (d.lane, d.shape, d.sms, d.corunner_shape, d.corunner_sms) == ("decode", DECODE, 20, PREFILL, 112)
    assert d.stats.median_s == pytest.approx(RATES.seconds(LLAMA, DECODE, 20), rel=1e-6)
    assert p.stats.samples >= 5
    assert d.stats.samples >= 20
    assert d.window_s > 8 * p.stats.median_s
    moved = flops_and_bytes(LLAMA, PREFILL)[1]
    assert d.corunner_bytes_per_s == pytest.approx(moved / RATES.seconds(LLAMA, PREFILL, 112), rel=1e-6)


def test_nothing_disturbs_a_window():
    bench, cuda, _ = open_bench()
    bench.measure(CORUN)
    bench.measure(Point("control", SPLIT, "decode", DECODE, control="memory_stream"))
    windows = 0
    for inside in timed_stretches(cuda.log):
        windows += 1
        assert set(inside) <= {"record", "replay", "wait"}
    assert windows >= 3
    assert "capture" in cuda.log


def timed_stretches(log):
    """From each first ``record`` to the last before the next synchronisation."""
    for synchronising, part in itertools.groupby(log, key=lambda call: call == "synchronize"):
        calls = list(part)
        if not synchronising and "record" in calls:
            yield calls[calls.index("record"):len(calls) - calls[::-1].index("record")]


@pytest.mark.parametrize("control", ["alu_spin", "memory_stream", "tensor_spin", "l2_stream"])
def test_controls_time_one_lane(control):
    bench, _, _ = open_bench()
    (row,) = about(bench, Point("control", SPLIT, "decode", DECODE, control=control))
    assert (row.lane, row.corunner, row.corunner_shape, row.corunner_sms) == ("decode", control, None, 112)
    assert (row.corunner_bytes_per_s is None) == control.endswith("_spin")
    assert row.stats.samples >= 20


@pytest.mark.parametrize("beside", ["decode", "alu_spin"])
def test_a_replay_thousands_of_times_shorter_than_the_other_is_made_longer(beside, monkeypatch):
    """Prefill on few SMs of a slow card beside a small decode batch: 3,000 replays would be needed to cover its window."""
    bench, _, _ = open_bench([Split(20, 112)])
    slow = bench.graphs.shop.rates = Rates(132, 1e14, 3e12)
    long, short = prefill("prefill_layer", 8192), decode("decode_layer", 1, 1024)
    assert slow.seconds(LLAMA, long, 20) * 13 > 1500 * lane_graphs.SPIN_S
    lengths, run = [], bench.graphs.run
    monkeypatch.setattr(bench.graphs, "run", lambda windows, **options: lengths.append(
        max(t.count for window in windows for t in window)) or run(windows, **options))
    if beside == "decode":
        first, second = about(bench, Point("corun", Split(20, 112), "both", long, short))
        assert second.stats.median_s == pytest.approx(slow.seconds(LLAMA, short, 112))
    else:
        first, = about(bench, Point("control", Split(20, 112), "prefill", long, control=beside))
    assert first.stats.median_s == pytest.approx(slow.seconds(LLAMA, long, 20))
    assert first.stats.samples >= 8
    assert max(lengths) <= lane_graphs.TRAIN_LIMIT


def test_unpartitioned_corun_runs_on_two_plain_streams():
    bench, _, _ = open_bench()
    p, d = about(bench, Point("corun", None, "both", PREFILL, DECODE))
    assert (p.sms, d.sms) == (132, 132)


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch):
    """A graph that the collector destroys in mid-capture voids the capture."""
    collecting = []
    end = FakeGraph.capture_end

    def noted(self):
        collecting.append(gc.isenabled())
        end(self)

    monkeypatch.setattr(FakeGraph, "capture_end", noted)
    bench, _, _ = open_bench()
    bench.measure(CORUN)
    assert set(collecting) == {False}
    assert gc.isenabled()


def test_serialised_lanes_are_found_out():
    bench, _, _ = open_bench(serial=True)
    # On this device the queue order decides: one train runs to its end, and the other's start event has fired already.
    with pytest.raises(PointError, match="may not run at the same time"):
        bench.measure(CORUN)


def test_check_on_the_bench_proves_and_finds_leaking_graphs():
    bench, _, stub = open_bench(splits=(SPLIT, Split(104, 28)))
    report = run_check(bench.table, bench, bench.gpu)
    assert report.proven
    assert report.pairs[1].decode_smids == sorted(stub.contexts[bench.table.pairs[1].decode.context])
    leaking, _, _ = open_bench(graphs_leak="always")
    report = run_check(leaking.table, leaking, leaking.gpu)
    assert not report.proven
    assert "graph: prefill ran on 132 SMs, granted 112" in report.pairs[0].reasons


def test_graphs_that_leave_their_partition_are_captured_inside_its_context(gpu, tmp_path, capsys):
    gpu.options["graphs_leak"] = "without context"
    assert profile_cli.main(["sweep", "--budget-s", "30", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "0 of 12 pairs proven by streams alone; once more with each green context made current" in text
    assert "12 of 12 pairs proven" in text[text.index("Sweep:"):]
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {r["partition"] for r in rows if r["split_decode_sms"] is not None} == {"proven"}
    (_, stub), = gpu.opened
    assert stub.pushed is None
    assert stub.calls.count("cuCtxPushCurrent") == stub.calls.count("cuCtxPopCurrent") > 100


def test_lanes_that_only_took_turns_are_no_reason_to_enter_contexts():
    bench, _, stub = open_bench(serial=True)
    report = session.prove(bench, "")
    assert report.num_proven == 0
    assert "eager: the lanes ran one after the other" in report.pairs[0].reasons
    assert "cuCtxPushCurrent" not in stub.calls


def test_contexts_that_do_not_help_are_left_again():
    bench, _, stub = open_bench(graphs_leak="always")
    report = session.prove(bench, "")
    assert report.num_proven == 0
    entered = stub.calls.count("cuCtxPushCurrent")
    assert entered
    bench.measure(CORUN)
    assert stub.calls.count("cuCtxPushCurrent") == entered


def test_green_contexts_on_which_nothing_runs_fall_back_to_plain_streams(gpu, tmp_path, capsys, monkeypatch):
    def refuse(self, pair, mode):
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(bench_cuda.CudaBench, "probe_pair", refuse)
    assert profile_cli.main(["sweep", "--budget-s", "30", "--out", str(tmp_path)]) == 0
    assert "every probe on a green context failed (probe failed: RuntimeError: CUDA error: invalid resource handle)" in (
        capsys.readouterr().out)
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {(r["backend"], r["partition"]) for r in rows} == {("none", "none")}
    assert any(r["kind"] == "corun" for r in rows)
    assert len(gpu.opened) == 2
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)
    assert profile_cli.main(["check"]) == 1  # the check itself falls back to nothing


def test_a_broken_triton_costs_the_proof_and_one_control(gpu, tmp_path, capsys, monkeypatch):
    def broken(self, out, spin_ns):
        raise FileNotFoundError("no C compiler: set CC")

    monkeypatch.setattr(FakeKernels, "launch_gate", broken)
    monkeypatch.setattr(FakeCuda, "_sleep", lambda self, cycles: self.launch(cycles / 1.5e9), raising=False)
    monkeypatch.setattr(lane_graphs.LaneGraphs, "control", lambda self, name, lane: self.graph(DECODE, lane, "decode"))
    assert profile_cli.main(["sweep", "--budget-s", "280", "--out", str(tmp_path)]) == 0
    assert "triton does not work here (no C compiler: set CC)" in capsys.readouterr().out
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {r["partition"] for r in rows if r["split_decode_sms"] is not None} == {"unproven"}
    assert {r["corunner"] for r in rows} == {"idle", "prefill_layer", "decode_layer", "memory_stream"}


def test_a_probe_that_fails_on_plain_streams_is_a_failed_control(monkeypatch):
    bench, _, _ = open_bench()

    def broken():
        raise OSError("ptxas: not found")

    monkeypatch.setattr(bench, "probe_plain", broken)
    monkeypatch.setattr(bench, "switch_seconds", broken)
    report = run_check(bench.table, bench, bench.gpu)
    assert report.control_reasons == ["probe failed on a plain stream: OSError: ptxas: not found"]
    assert not report.proven
    assert "negative control: FAILED: probe failed on a plain stream" in "\n".join(report.lines())
    assert report.verdict(SPLIT) == ("unproven", report.control_reasons[0])


def test_without_triton_no_proof_and_no_alu_spin():
    bench, cuda, _ = open_bench(kernels=False)
    cuda._sleep = lambda cycles: cuda.launch(cycles / 1.5e9)
    assert not bench.allowed(Point("control", SPLIT, "decode", DECODE, control="alu_spin"))
    assert bench.allowed(CORUN)
    assert len(about(bench, CORUN)) == 2
    with pytest.raises(PartitionError, match="needs triton"):
        run_check(bench.table, bench, bench.gpu)


def test_our_own_decode_kernel_is_bound_to_its_lane_and_needs_triton():
    bench, _, _ = open_bench()
    build, bound = bench.graphs.shop.build, []

    def with_lanes(*shape, role):
        work = build(*shape, role=role)
        work.on = lambda sms: bound.append(sms) or work
        return work

    bench.graphs.shop.build = with_lanes
    shape = decode("paged_decode_attention", 32, 1024)
    pair = Point("corun", SPLIT, "both", Shape("gemm_gate_up", 2048), shape)
    for point in (Point("solo", None, "full", shape), Point("solo", SPLIT, "decode", shape)):
        assert bench.allowed(point)
        bench.measure(point)
    assert bound == [132, 20]
    plain, _, _ = open_bench(kernels=False)
    assert [plain.allowed(p) for p in (Point("solo", SPLIT, "decode", shape), pair, CORUN)] == [False, False, True]
    for op in ENGINE_OPS:
        own = Point("solo", SPLIT, "decode", Shape(op, 32, 32, 1024))
        assert (bench.allowed(own), plain.allowed(own)) == (True, False)
    bench.model = dataclasses.replace(LLAMA, num_experts=8, experts_per_token=2)
    assert [op for op in ENGINE_OPS if bench.allowed(Point("solo", None, "full", Shape(op, 32, 32, 1024)))] == [
        "paged_decode_attention"]


def test_a_failing_kernel_costs_its_point_only():
    bench, _, _ = open_bench(fail_at={3: "CUDA error: invalid\n configuration"})
    with pytest.raises(PointError, match="invalid configuration"):
        bench.measure(CORUN)
    assert len(about(bench, CORUN)) == 2


def test_errors_of_any_class_cost_their_point_but_our_own_bugs_show(monkeypatch):
    bench, _, _ = open_bench()
    for error in (ValueError("ptxas\n failed"), KeyError("cubin"), OSError("no cc")):
        monkeypatch.setattr(bench, "_windows", lambda point, steps, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(PointError):
            bench.measure(Point("solo", SPLIT, "decode", DECODE))
    monkeypatch.setattr(bench, "_windows", lambda point, steps: (_ for _ in ()).throw(AssertionError("ours")))
    with pytest.raises(AssertionError, match="ours"):
        bench.measure(Point("solo", SPLIT, "decode", DECODE))


def test_a_pool_lives_as_long_as_graphs_are_captured_into_it():
    """The check's graphs go at once; the sweep captures on the same streams."""
    bench, cuda, _ = open_bench()
    assert run_check(bench.table, bench, bench.gpu).proven
    assert len(about(bench, CORUN)) == 2
    assert all(count >= 1 for count in cuda.pool_graphs.values())
    bench.graphs.drop()
    assert set(cuda.pool_graphs.values()) == {0}
    assert len(about(bench, CORUN)) == 2


def test_a_kernel_that_fails_during_capture_ends_the_capture(monkeypatch):
    probe, cuda, _ = open_bench()
    probe.measure(Point("solo", SPLIT, "decode", DECODE))
    first_capture = cuda.log.index("capture")
    assert cuda.log[:first_capture].count("replay") == 0
    bench, cuda, _ = open_bench(fail_at={4: "CUDA error: operation not permitted when stream is capturing"})
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: cuda.recording.remove(pool), raising=False)
    with pytest.raises(PointError, match="not permitted when stream is capturing"):
        bench.measure(Point("solo", SPLIT, "decode", DECODE))
    assert cuda.capturing is None
    assert not cuda.recording
    assert bench.measure(Point("solo", SPLIT, "decode", DECODE))


def test_an_allocator_that_stays_recording_costs_no_further_point(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    bench, cuda, _ = open_bench(fail_at={4: "CUDA error: operation not permitted when stream is capturing"})
    with pytest.raises(PointError, match="not permitted when stream is capturing"):
        bench.measure(Point("solo", SPLIT, "decode", DECODE))
    assert cuda.recording
    assert bench.measure(Point("solo", SPLIT, "decode", DECODE))
    bench.graphs.drop()  # emptying the cache is refused then: no reason to stop
    assert bench.measure(CORUN)


def test_out_of_memory_drops_what_is_cached_and_tries_once_more():
    bench, cuda, _ = open_bench(fail_at={3: "CUDA out of memory. Tried to allocate 9 GiB"})
    assert len(about(bench, CORUN)) == 2
    assert "empty_cache" in cuda.log
    assert bench.graphs.shop.cleared == 1
    bench, cuda, _ = open_bench(fail_at=dict.fromkeys(range(3, 99), "CUDA out of memory. Tried to allocate 9 GiB"))
    with pytest.raises(PointError, match="out of GPU memory"):
        bench.measure(CORUN)
    assert bench.graphs.shop.cleared == 2


def test_little_memory_drops_what_is_cached_before_building_more():
    bench, cuda, _ = open_bench(free_share=0.05)
    bench.measure(Point("solo", SPLIT, "decode", DECODE))
    assert cuda.log[:2] == ["synchronize", "empty_cache"]


def test_a_lost_device_says_how_to_resume_and_leaves_no_context():
    bench, _, stub = open_bench(fail_at={9: "CUDA error: an illegal memory access"}, sticky=True)
    with pytest.raises(DeviceLostError, match=r"answers no more .* rows until here are kept; .* --skip prefill_layer"):
        bench.measure(CORUN)
    bench.close()
    assert not stub.contexts
    assert not stub.streams


def test_close_releases_graphs_first_and_is_idempotent():
    bench, _, stub = open_bench()
    bench.measure(CORUN)
    stub.calls.clear()
    bench.close()
    bench.close()
    assert bench.graphs.captured == {}
    assert stub.calls == ["cuStreamDestroy"] * 2 + ["cuGreenCtxDestroy"] * 2


# ------------------------------------------------------------------------------------------ the command line


@pytest.fixture
def gpu(monkeypatch, planned_points_only):
    """``bullet-profile`` with a fake GPU behind it; returns what was opened."""
    opened = []

    def open_cuda(model, *, backend, core, extra, asked=(), allow_busy=False, **options):
        if backend == "none":
            stub = StubDriver()
            cuda = FakeCuda(stub)
            table = unpartitioned_table(132, cuda.Stream)
            bench, _, _ = open_bench(model=model)
            bench.table.close()
            bench.table, bench.backend = table, "none"
            opened.append((bench, stub))
            return bench, [], {"busy": False}
        if gpu_options.pop("old_driver", False):
            raise PartitionError("driver supports CUDA 12.2: green contexts need 12.5 or newer (driver 555)")
        rule = granularity((9, 0))
        core_splits = list(asked) or list(choose_splits(132, rule, core))
        every = list(dict.fromkeys([*core_splits, *choose_splits(132, rule, extra)]))
        bench, _, stub = open_bench(every, model=model, **gpu_options)
        opened.append((bench, stub))
        return bench, core_splits, {"busy": False}

    gpu_options: dict = {}
    monkeypatch.setattr(bench_cuda, "open_cuda", open_cuda)
    return SimpleNamespace(opened=opened, options=gpu_options)


def test_gpu_run_end_to_end(gpu, tmp_path, capsys):
    assert profile_cli.main(["gpu", "--budget-s", "100", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.index("Partition check") < text.index("Plan:") < text.index("Sweep:")
    assert len(text[text.index("Sweep:"):]) < 12_000
    assert "12 of 12 pairs proven" in text[-12_000:]
    assert "Co-run (engine's layers), measured on NVIDIA stub" in text[-12_000:]
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert all(f.stat().st_size < 16 << 20 for f in files)
    rows, metadata = read_parquet(tmp_path / "samples.parquet")
    assert metadata["gpu"] == "NVIDIA stub"
    corun = [r for r in rows if r["kind"] == "corun" and r["split_decode_sms"] is not None]
    assert {r["partition"] for r in corun} == {"proven"}
    assert len({r["split_decode_sms"] for r in corun}) >= 6
    assert all(r["slowdown"] == pytest.approx(1.0, rel=1e-3) for r in corun)  # the fake has no contention
    assert all(r["driver"] == "stub" and r["clock_sm_hz"] == 1.98e9 and r["compute_capability"] == "9.0" for r in rows)
    assert json.loads((tmp_path / "check.json").read_text())["proven"] is True
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)


def test_a_second_call_resumes_and_adds_nothing(gpu, tmp_path, capsys):
    command = ["sweep", "--budget-s", "40", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 0
    before = (tmp_path / "samples.jsonl").read_text()
    assert profile_cli.main([*command[:1], "--budget-s", "40", "--out", str(tmp_path)]) == 0
    after = (tmp_path / "samples.jsonl").read_text()
    assert after.startswith(before)
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    ids = [r["id"] for r in rows]
    assert len(ids) == len(set(ids))
    assert "rows are there already" in capsys.readouterr().out


def test_lost_device_keeps_rows_and_exits_3(gpu, tmp_path, capsys):
    gpu.options.update(fail_at={2000: "CUDA error: an illegal memory access"}, sticky=True)
    assert profile_cli.main(["sweep", "--budget-s", "240", "--out", str(tmp_path)]) == 3
    captured = capsys.readouterr()
    assert "rows until here are kept" in captured.err
    assert "Traceback" not in captured.err
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert len(rows) > 10
    assert (tmp_path / "samples.parquet").exists()
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)


@pytest.mark.parametrize(("limits", "left"), [("HANG_S = 0.1", ""), ("LEAST_HANG_S = 0.1", ", lambda: -1.0")])
def test_a_gpu_that_hangs_ends_the_process_and_rows_are_kept(tmp_path, limits, left):
    """In a process of its own, since it is ended: nothing ever answers it but the bound, the sooner where no budget is left."""
    code = textwrap.dedent("""
        import sys, threading
        from pathlib import Path
        from bullet.profiler import lane_graphs
        from bullet.profiles.journal import Journal

        lane_graphs.LIMITS
        row = dict(id="a", kind="solo", op="copy", backend="none", partition="none", lane="full", sms=1, device_sms=1,
                   corunner="idle", median_s=1.0, samples=1, source="measured", gpu="g", measured_at="now")
        with Journal(Path(sys.argv[1]), {"gpu": "g", "source": "measured"}) as journal:
            journal.append(row)
            with lane_graphs.bounded("corun|112+20"LEFT):
                threading.Event().wait()
    """).replace("LIMITS", limits).replace("LEFT", left)
    path = tmp_path / "samples.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "corun|112+20: the GPU has not answered for 0 s: rows until here are kept" in done.stderr
    assert [row["id"] for row in read_journal(path)[1]] == ["a"]


def test_every_wait_for_the_gpu_is_bounded(gpu, tmp_path, monkeypatch):
    depth, waits = [], []

    @contextmanager
    def bounded(what, left_s=None):
        depth.append(what)
        try:
            yield
        finally:
            depth.pop()

    for module in (bench_cuda, lane_graphs):
        monkeypatch.setattr(module, "bounded", bounded)
    for kind in (FakeCuda, FakeStream, FakeEvent):
        def wait(self, real=kind.synchronize):
            waits.append(list(depth))
            real(self)
        monkeypatch.setattr(kind, "synchronize", wait)
    gpu.options["graphs_leak"] = "without context"  # so that contexts are entered too
    assert profile_cli.main(["gpu", "--budget-s", "60", "--out", str(tmp_path)]) == 0
    assert len(waits) > 100
    assert all(waits)


@pytest.mark.parametrize(("number", "status", "said"), [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGHUP, 129, "stopped by SIGHUP")])
def test_a_signal_keeps_rows_destroys_contexts_and_is_resumed(gpu, tmp_path, capsys, monkeypatch, number, status, said):
    before = signal.getsignal(signal.SIGTERM)
    calls = itertools.count()
    measure = bench_cuda.CudaBench.measure

    def signalled(self, point):
        if next(calls) == 7:
            os.kill(os.getpid(), number)
        return measure(self, point)

    monkeypatch.setattr(bench_cuda.CudaBench, "measure", signalled)
    command = ["sweep", "--budget-s", "40", "--out", str(tmp_path)]
    assert profile_cli.main(command) == status
    captured = capsys.readouterr()
    assert f"{said}, " in captured.out
    assert "left: the same command resumes" in captured.out
    assert captured.err == ""
    kept = [r["id"] for r in read_journal(tmp_path / "samples.jsonl")[1]]
    assert len([i for i in kept if "|anchor|" not in i]) >= 7
    assert (tmp_path / "samples.parquet").exists()
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)
    assert signal.getsignal(signal.SIGTERM) is before
    assert profile_cli.main(command) == 0
    ids = [r["id"] for r in read_journal(tmp_path / "samples.jsonl")[1]]
    assert ids[:len(kept)] == kept
    assert len(set(ids)) == len(ids) > len(kept)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_check_destroys_contexts(gpu, capsys, monkeypatch, number, status):
    monkeypatch.setattr(bench_cuda.CudaBench, "probe_plain", lambda self: os.kill(os.getpid(), number))
    assert profile_cli.main(["check"]) == status
    assert capsys.readouterr().err == (
        f"bullet-profile: {'interrupted' if number == signal.SIGINT else 'stopped by SIGTERM'}; nothing was written\n")
    assert len(gpu.opened) == 1
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)


def test_another_process_that_arrives_ends_the_sweep(gpu, tmp_path, capsys):
    there = [["pid 5"]] * 30 + [["pid 5", "pid 77 (python)"]] * 99  # pid 5 is ours, under a container's number
    gpu.options["read_processes"] = lambda: there.pop(0)
    command = ["sweep", "--budget-s", "240", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "another process has come to the GPU (pid 77 (python)): rows until here are kept" in captured.err
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert sum(r["kind"] == "anchor" for r in rows) == 2
    assert len(rows) > 40
    assert (tmp_path / "samples.parquet").exists()
    assert all(not stub.contexts and not stub.streams for _, stub in gpu.opened)
    gpu.options.pop("read_processes", None)
    assert profile_cli.main(["sweep", "--budget-s", "60", "--out", str(tmp_path)]) == 0


def test_results_that_cannot_be_continued_cost_no_device_time(gpu, tmp_path, capsys):
    cases = {"file": "x", "folder": None, "schema": '{"schema": "other"}\n', "text": "not json\n",
             "version": '{"schema": "bullet-samples", "version": 99}\n'}
    for name, content in cases.items():
        out = tmp_path / name
        if name == "file":
            out.write_text(content)
        else:
            (out / "samples.jsonl").mkdir(parents=True) if content is None else out.mkdir()
            if content:
                (out / "samples.jsonl").write_text(content)
        assert profile_cli.main(["gpu", "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert str(out) in err
    assert gpu.opened == []
    assert profile_cli.main(["check", "--out", str(tmp_path / "file")]) == 2
    assert gpu.opened == []


def test_old_driver_check_fails_in_one_line_and_sweep_goes_on_unpartitioned(gpu, tmp_path, capsys):
    gpu.options["old_driver"] = True
    assert profile_cli.main(["check"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("bullet-profile: error: driver supports CUDA 12.2")
    assert err.count("\n") == 1
    gpu.options["old_driver"] = True
    assert profile_cli.main(["sweep", "--budget-s", "40", "--out", str(tmp_path)]) == 0
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {r["partition"] for r in rows} == {"none"}
    assert any(r["kind"] == "corun" for r in rows)
    assert "no partition: driver supports CUDA 12.2" in capsys.readouterr().out


def test_unproven_pairs_mark_their_rows(gpu, tmp_path, capsys):
    gpu.options["graphs_leak"] = "always"
    assert profile_cli.main(["sweep", "--budget-s", "40", "--out", str(tmp_path)]) == 0
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    split_rows = [r for r in rows if r["split_decode_sms"] is not None]
    assert {r["partition"] for r in split_rows} == {"unproven"}
    assert "graph: prefill ran on 132 SMs" in split_rows[0]["partition_note"]
    assert "0 of 12 pairs proven" in capsys.readouterr().out
    assert profile_cli.main(["check"]) == 1


def test_another_gpus_table_is_refused(gpu, tmp_path, capsys):
    (tmp_path / "samples.jsonl").write_text(json.dumps(
        {"schema": "bullet-samples", "version": 1, "gpu": "NVIDIA A100", "source": "measured"}) + "\n")
    assert profile_cli.main(["sweep", "--budget-s", "40", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "holds rows of gpu 'NVIDIA A100', this is 'NVIDIA stub': choose another --out" in err
    assert all(not stub.contexts for _, stub in gpu.opened)


def test_a_model_too_large_for_the_memory_is_one_line(gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_cuda.CudaBench, "free_bytes", lambda self: 1 << 20)
    assert profile_cli.main(["sweep", "--out", str(tmp_path)]) == 2
    assert "too little memory on NVIDIA stub for one layer of llama-3.1-8b" in capsys.readouterr().err


def test_software_backend_names_the_operation(monkeypatch, tmp_path, capsys):
    from bullet.gpu.partition import software_table

    def open_cuda(model, **options):
        bench, cuda, _ = open_bench(model=model)
        bench.table.close()
        bench.table, bench.backend = software_table([SPLIT], 132, cuda.Stream), "software"
        return bench, [], {}

    monkeypatch.setattr(bench_cuda, "open_cuda", open_cuda)
    assert profile_cli.main(["sweep", "--backend", "software", "--out", str(tmp_path)]) == 2
    assert "gemm_qkv is a torch operation: the software backend bounds only" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_no_gpu_is_one_line(capsys):
    assert profile_cli.main(["check"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no usable GPU" in err
    assert "--device cpu" in err


# ------------------------------------------------------------------------------------------- the card's state


class FakeNvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            return {"nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetTemperature": 41, "nvmlDeviceGetPowerUsage": 123456,
                    "nvmlSystemGetDriverVersion": b"580.1", "nvmlDeviceGetHandleByIndex": "handle",
                    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)]}.get(name)
        return call


def test_card_state_through_nvml_reads_only():
    nvml = FakeNvml()
    reader = card.CardReader("0", nvml=nvml)
    assert reader.clocks() == {"clock_sm_hz": 1.98e9, "clock_mem_hz": 1.98e9, "temperature_c": 41.0,
                               "power_w": pytest.approx(123.456), "throttle": None}
    assert reader.driver() == "580.1"
    assert reader.processes() == ["pid 1"]
    assert not [c for c in nvml.calls if "Set" in c or "Reset" in c]


def test_card_state_through_nvidia_smi_is_kept_for_a_while():
    asked, now = [], [0.0]

    def command(arguments):
        asked.append(arguments)
        if "driver_version" in arguments[3]:
            return "580.1\n"
        if "compute-apps" in arguments[3]:
            return "77, python\n"
        return "1980, [N/A], 41, 300.5\n"

    reader = card.CardReader("1", command=command, clock=lambda: now[0])
    assert reader.clocks() == {"clock_sm_hz": 1.98e9, "clock_mem_hz": None, "temperature_c": 41.0, "power_w": 300.5,
                               "throttle": None}
    reader.clocks()
    assert len(asked) == 1
    now[0] = 11.0
    reader.clocks()
    assert len(asked) == 2
    now[0] = 500.0
    slow = card.CardReader("1", clock=lambda: now[0], command=lambda a: (now.__setitem__(0, now[0] + 2), "1, 2, 3, 4")[1])
    assert slow.clocks()["power_w"] == 4.0
    now[0] += 39.0  # an answer that took 2 s is kept for 40 s: at most 5 % of a run
    slow.clocks()
    assert now[0] == 541.0
    now[0] += 2.0
    slow.clocks()
    assert now[0] == 545.0
    assert (reader.driver(), reader.processes()) == ("580.1", ["pid 77 (python)"])
    assert all(a[3].startswith("--query-") for a in asked)


def test_card_state_without_any_tool_is_unknown():
    def command(arguments):
        raise subprocess.CalledProcessError(9, arguments)

    reader = card.CardReader("0", command=command)
    assert set(reader.clocks().values()) == {None}
    assert (reader.driver(), reader.processes()) == (None, [])


def test_planning_rates_know_the_gpus_by_name():
    def named(name, num_sms):
        return card.rates_for(card.Props(name, num_sms, (9, 0), 1, 1)).bytes_per_s
    assert named("NVIDIA H200", 132) == pytest.approx(0.7 * 4.8e12)
    assert named("NVIDIA H20", 78) == pytest.approx(0.7 * 4.0e12)
    assert named("NVIDIA A100-SXM4-80GB", 108) == pytest.approx(0.7 * 2.039e12)
    assert named("NVIDIA GeForce RTX 4090", 128) == pytest.approx(0.7 * 1.008e12)
    assert named("NVIDIA Unheard Of", 100) == pytest.approx(0.7 * 1.2e12)
    assert named("NVIDIA H200", 33) == pytest.approx(0.7 * 1.2e12)  # a quarter of it


def test_fits_is_about_the_free_memory():
    fits = card.fits_in(MODELS["llama-3.1-8b"], 2, 8 << 30)
    assert fits(Shape("gemm_qkv", 2048))
    assert not fits(decode("decode_layer", 1024, 4096))
