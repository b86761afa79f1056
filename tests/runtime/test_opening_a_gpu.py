"""The whole command on a GPU machine that is faked below torch.cuda and the driver: opening, refusing, falling back."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda, FakeKernels, FakeShop  # noqa: E402
from stub_driver import CUresult, StubDriver  # noqa: E402

from bullet.catalog.gpus import get_gpu  # noqa: E402
from bullet.catalog.models import get_model  # noqa: E402
from bullet.cli import measure as profile_cli  # noqa: E402
from bullet.cli import profile  # noqa: E402
from bullet.config import DeviceConfig  # noqa: E402
from bullet.devices.coefficients import DeviceCoefficients  # noqa: E402
from bullet.devices.fitted import DeviceModel  # noqa: E402
from bullet.devices.load import load_device  # noqa: E402
from bullet.gpu.driver import Driver  # noqa: E402
from bullet.profiler import bench_cuda, card  # noqa: E402
from bullet.profiler import bench_engine as engine_bench  # noqa: E402
from bullet.profiler.plan import Rates  # noqa: E402
from bullet.profiler.shapes import decode, prefill  # noqa: E402
from bullet.profiles.journal import read_journal  # noqa: E402
from tests.known_device import KnownRates, made_up  # noqa: E402

RATES = Rates(132, 6e14, 3e12)


@pytest.fixture
def machine(monkeypatch, planned_points_only):
    """``start(**options)`` sets up a machine: options of the stub driver under ``stub``, of the card, and of FakeCuda."""

    def start(*, processes="", memory_error="", capability=(9, 0), stub=None, free_bytes=100 << 30, alias="", name="NVIDIA H200",
              tools=True, **options):
        """``alias``: our own process as nvidia-smi lists it in a container, once CUDA is initialised. ``tools``: NVML or
        nvidia-smi is there."""
        driver = StubDriver(**(stub or {}))
        cuda = FakeCuda(driver, **options)
        for call in ("Event", "Stream", "ExternalStream", "CUDAGraph", "stream", "synchronize", "empty_cache",
                     "graph_pool_handle", "current_blas_handle", "_sleep"):
            monkeypatch.setattr(torch.cuda, call, getattr(cuda, call))
        properties = SimpleNamespace(name=name, multi_processor_count=driver.num_sms, major=capability[0],
                                     minor=capability[1], L2_cache_size=60 << 20, total_memory=141 << 30)
        initialised: list[bool] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(initialised))

        def init():
            initialised.append(True)
            answers["--query-compute-apps=pid,process_name"] += alias

        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info",
                            lambda: cuda.mem_get_info() if cuda.total_bytes else (free_bytes, 141 << 30))
        zeros = torch.zeros

        def on_the_cpu(*shape, device=None, **rest):
            if memory_error and device is not None:
                raise RuntimeError(memory_error)
            return zeros(*shape, **rest)

        monkeypatch.setattr(torch, "zeros", on_the_cpu)
        monkeypatch.setattr(engine_bench, "EngineWorkloads", lambda model, device, dtype, **sizes: FakeShop(cuda, model, RATES))
        monkeypatch.setitem(sys.modules, "bullet.kernels.probe", FakeKernels(cuda))
        monkeypatch.setattr(Driver, "load", classmethod(lambda cls: Driver(driver)))
        answers = {"--query-compute-apps=pid,process_name": processes, "--query-gpu=driver_version": "580.1"}
        # Its clock stands still but for the tests that move it: an answer that is kept is kept for good.
        time = SimpleNamespace(now=0.0)

        def smi(arguments):
            if not tools:
                raise FileNotFoundError("nvidia-smi")
            return answers.get(arguments[3], "1980, 3201, 41, 300\n")

        reader = card.CardReader(command=smi, clock=lambda: time.now)
        monkeypatch.setattr(card.CardReader, "open", classmethod(lambda cls: reader))
        return SimpleNamespace(driver=driver, cuda=cuda, answers=answers, time=time)
    return start


def error_of(command, capsys):
    """Standard error of a command that must end with status 2 and one line."""
    assert profile_cli.main(command) == 2
    err = capsys.readouterr().err
    assert err.startswith("bullet-profile: error: ")
    assert err.count("\n") == 1
    return err


def test_a_gpu_run_opens_proves_measures_and_leaves_nothing(machine, tmp_path, capsys):
    gpu = machine()
    assert profile_cli.main(["gpu", "--budget-s", "60", "--out", str(tmp_path)]) == 0
    assert "12 of 12 pairs proven" in capsys.readouterr().out
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    split_rows = [r for r in rows if r["split_decode_sms"] is not None]
    assert {r["partition"] for r in split_rows} == {"proven"}
    assert {(r["gpu"], r["driver"], r["dtype"], r["compute_capability"], r["busy"]) for r in rows} == {
        ("NVIDIA H200", "580.1", "bfloat16", "9.0", False)}
    assert {r["clock_sm_hz"] for r in rows} == {1.98e9}
    assert nothing_left(gpu)


def test_what_make_gpu_sweeps_in_its_two_parts_can_be_fitted(machine, tmp_path, capsys, monkeypatch):
    """On a faked card whose operations take what two known devices say: 300 s, and 110 of the own kernels in a second process,
    are enough for a fit of the engine."""
    pytest.importorskip("scipy")
    h200 = get_gpu("h200")
    engine = made_up(h200, decode_attention_bandwidth=0.7, prefill_attention_efficiency=0.45)
    torchs = made_up(h200, decode_attention_bandwidth=0.4, prefill_attention_efficiency=0.6)
    monkeypatch.setattr(sys.modules[__name__], "RATES", KnownRates(get_model("llama-3.1-8b"), h200, engine, torchs))
    for part, budget_s in (("corun", "300"), ("own", "110")):
        gpu = machine()
        assert profile_cli.main(["sweep", "--part", part, "--budget-s", budget_s, "--out", str(tmp_path / "sweep")]) == 0
        assert nothing_left(gpu)
    text = capsys.readouterr().out
    # Both aims answered from the rows, prefill attention's at eight sizes; by hand at the largest.
    shape = prefill("prefill_attention", 8192)
    speed = RATES.seconds(RATES.engine.model, shape, 132) / RATES.seconds(
        RATES.engine.model, shape._replace(op="own_prefill_attention"), 132)
    aim = next(line for line in text.splitlines() if line.startswith("own_prefill_attention: "))
    assert f"{100 * speed:.0f} % at 8192x1@0; 60 % wanted, reached at 8 of 8 sizes" in aim
    assert "paged_decode_attention: " in text
    assert nothing_left(gpu)
    assert profile.main(["fit", str(tmp_path / "sweep"), "--out", str(tmp_path / "profile")]) == 0, capsys.readouterr().err
    found = DeviceCoefficients.from_json(tmp_path / "profile" / "fit.json")
    assert (found.source, found.notes["implementation"]) == ("fitted", "engine")
    assert found.decode_attention_bandwidth == pytest.approx(0.7, rel=0.05)
    assert found.prefill_attention_efficiency == pytest.approx(0.45, rel=0.05)
    assert found.notes["operations"]["prefill_attention"] == "own_prefill_attention"
    device = load_device(DeviceConfig(gpu="h200", timing=str(tmp_path / "profile")))
    own = DeviceModel(device.model, h200, engine)
    for batch in (8, 128):
        work = device.decode_work(batch, batch * 2048), own.decode_work(batch, batch * 2048)
        assert device.solo_seconds(work[0], 40) == pytest.approx(own.solo_seconds(work[1], 40), rel=0.03)
    # Torch's operations have sizes enough in that time too.
    assert profile.main(["fit", str(tmp_path / "sweep"), "--implementation", "torch"]) == 0


def nothing_left(gpu) -> bool:
    return not gpu.driver.contexts and not gpu.driver.streams


def test_another_process_on_the_card(machine, tmp_path, capsys):
    gpu = machine(processes="4711, python\n")
    err = error_of(["sweep", "--out", str(tmp_path)], capsys)
    assert "another process is on the GPU (pid 4711 (python)): end it, or pass --allow-busy" in err
    assert gpu.driver.calls == []
    assert profile_cli.main(["sweep", "--allow-busy", "--budget-s", "30", "--out", str(tmp_path)]) == 0
    assert {r["busy"] for r in read_journal(tmp_path / "samples.jsonl")[1]} == {True}
    assert nothing_left(gpu)


def another_comes(gpu, monkeypatch, method, point_s):
    """Another process is on the card from the 31st point on, each ``point_s`` seconds long; the list of points so far."""
    measure, calls = getattr(bench_cuda.CudaBench, method), []

    def arrives(self, point):
        calls.append(point)
        gpu.time.now += point_s
        if len(calls) == 31:
            gpu.answers["--query-compute-apps=pid,process_name"] += "4711, python\n"
        return measure(self, point)

    monkeypatch.setattr(bench_cuda.CudaBench, method, arrives)
    return calls


def test_a_process_that_comes_later_is_not_confused_with_ourselves(machine, tmp_path, capsys, monkeypatch):
    gpu = machine(alias="1, python\n")
    calls = another_comes(gpu, monkeypatch, "measure", 1.0)
    assert "another process has come to the GPU (pid 4711 (python))" in error_of(["sweep", "--out", str(tmp_path)], capsys)
    assert len(calls) == 40  # it is seen after the next point, when what nvidia-smi said ten seconds ago no longer stands
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    assert {r["busy"] for r in rows} == {False}
    assert nothing_left(gpu)


def test_beside_a_process_that_comes_later_rows_are_marked_from_then_on(machine, tmp_path, capsys, monkeypatch):
    """Marked, not ended; who came while a point was measured has disturbed that point too."""
    gpu = machine()
    calls = another_comes(gpu, monkeypatch, "_measure", 20.0)
    assert profile_cli.main(["sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "60", "--allow-busy", "--out",
                             str(tmp_path)]) == 0
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    marked = [r["busy"] for r in rows if r["kind"] != "anchor"]
    assert marked == sorted(marked)  # False before, True after
    first = next(r for r in rows if r["busy"])
    assert calls[30].key in first["id"]
    assert "whole: co-run matrix" in capsys.readouterr().out
    assert nothing_left(gpu)


def test_a_mig_slice_has_no_green_contexts_and_is_measured_without(machine, tmp_path, capsys):
    """One line that says what is in the way; the sweep goes on with plain streams on the slice's SMs, and its plan knows that
    it is a seventh of a card."""
    stub = {"fail": {"cuDeviceGetDevResource": (CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)}, "num_sms": 16}
    gpu = machine(stub=dict(stub), name="NVIDIA H200 MIG 1g.18gb", free_bytes=16 << 30)
    assert "this GPU or driver has no green contexts: driver 555 or newer is needed (not under MIG or vGPU)" in error_of(
        ["check", "--out", str(tmp_path)], capsys)
    gpu = machine(stub=dict(stub), name="NVIDIA H200 MIG 1g.18gb", free_bytes=16 << 30)
    assert profile_cli.main(["sweep", "--part", "corun", "--budget-s", "100", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no partition: cuDeviceGetDevResource answered CUDA_ERROR_NOT_SUPPORTED" in out
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    assert {(r["gpu"], r["device_sms"], r["partition"]) for r in rows} == {("NVIDIA H200 MIG 1g.18gb", 16, "none")}
    assert {r["sharing"] for r in rows if r["kind"] == "corun"} == {"plain", "priority"}
    assert nothing_left(gpu)
    whole, slice_ = (card.rates_for(card.Props(name, sms, (9, 0), 60 << 20, 1 << 34))
                     for name, sms in (("NVIDIA H200", 132), ("NVIDIA H200 MIG 1g.18gb", 16)))
    assert slice_.flops_per_s < whole.flops_per_s / 4


def test_without_nvml_and_nvidia_smi_rows_are_taken_and_their_clocks_unknown(machine, tmp_path, capsys):
    """But for the clock inside the window, which a kernel of ours tells."""
    gpu = machine(tools=False)
    assert profile_cli.main(["sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "60", "--out", str(tmp_path)]) == 0
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    assert {(r["driver"], r["clock_sm_hz"], r["power_w"], r["throttle"]) for r in rows} == {(None, None, None, None)}
    assert all(r["clock_window_hz"] == pytest.approx(1.5e9) for r in rows)
    assert {r["partition"] for r in rows if r["split_decode_sms"] is not None and r["sharing"] == "split"} == {"proven"}
    assert nothing_left(gpu)


def test_a_card_without_a_byte_to_spare(machine, tmp_path, capsys):
    gpu = machine(memory_error="CUDA error:\n out of memory")
    err = error_of(["sweep", "--out", str(tmp_path)], capsys)
    assert "the GPU cannot be used (CUDA error: out of memory): end other processes" in err
    assert nothing_left(gpu)


def test_too_little_memory_for_a_layer(machine, tmp_path, capsys):
    gpu = machine(free_bytes=1 << 28)
    err = error_of(["sweep", "--out", str(tmp_path)], capsys)
    assert "too little memory on NVIDIA H200 for one layer of llama-3.1-8b: end other processes" in err
    assert nothing_left(gpu)


@pytest.mark.parametrize(("stub", "reason"), [
    ({"version": 12020}, "driver supports CUDA 12.2: green contexts need 12.5 or newer (driver 555)"),
    ({"missing": frozenset({"cuDevSmResourceSplitByCount"})}, "the driver has no cuDevSmResourceSplitByCount"),
    ({"absent": frozenset({"CUdevResourceType"})}, "this cuda-bindings has no CUdevResourceType"),
    ({"fail": {"cuDeviceGetDevResource": (CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)}}, "this GPU or driver has no green contexts")])
def test_without_green_contexts_the_check_says_so_and_the_sweep_goes_on_without(machine, tmp_path, capsys, stub, reason):
    gpu = machine(stub=dict(stub))
    assert reason in error_of(["check", "--out", str(tmp_path)], capsys)
    assert reason in error_of(["sweep", "--backend", "green-context", "--out", str(tmp_path)], capsys)
    gpu = machine(stub=dict(stub))
    gpu.answers["--query-compute-apps=pid,process_name"] = ""
    assert profile_cli.main(["sweep", "--budget-s", "30", "--out", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    assert {(r["partition"], r["backend"]) for r in rows} == {("none", "none")}
    assert nothing_left(gpu)


def test_a_partition_that_cannot_be_granted(machine, tmp_path, capsys):
    gpu = machine()
    for command in ("check", "sweep"):
        err = error_of([command, "--splits", "114+18", "--out", str(tmp_path)], capsys)
        assert "split 114+18 of 132 SMs cannot be granted: both sides at least 8 and one a multiple of 8" in err
        assert "nearest is 112+20" in err
    assert nothing_left(gpu)
    # One of two: the other is measured, and the check is not content.
    assert profile_cli.main(["sweep", "--splits", "114+18,112+20", "--budget-s", "20", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "114+18  REFUSED" in out[out.index("Sweep:"):]
    assert profile_cli.main(["check", "--splits", "114+18,112+20"]) == 1
    # On a driver that refuses what should be legal.
    gpu = machine(stub={"fail": {"cuDevSmResourceSplitByCount": (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, 0)}})
    err = error_of(["sweep", "--splits", "112+20", "--out", str(tmp_path / "b")], capsys)
    assert "cuDevSmResourceSplitByCount answered CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION" in err
    assert nothing_left(gpu)


def test_a_kernel_that_fails_in_mid_sweep_costs_its_point(machine, tmp_path, capsys):
    gpu = machine(fail_at={300: "CUDA error: too many resources requested for launch"})
    assert profile_cli.main(["sweep", "--budget-s", "60", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    closing = out[out.index("Sweep:"):]
    assert closing.count("  failed: ") == 1
    assert "too many resources requested for launch" in closing
    assert "plan done" in closing
    assert nothing_left(gpu)


@pytest.mark.parametrize(("launch", "where", "then"), [
    (1, "the first kernel of ours", "triton does not work here (a process ended in the first kernel of ours before)"),
    (("probe", 3), "the partitions' proof", "1 of 1 pairs proven"),
    (("gemm_gate_up", 9), "solo|112+20|",
     "GEMM on a quarter of the SMs: not measured (a process ended in the GEMM on a quarter of the SMs before)"),
    (("engine_decode_layer", 1), "solo|full|full|engine_decode_layer",
     "the engine's layers do not run here (a process ended in the trial of the engine's layers before)"),
    (("kept", 2), "reading the graph of engine_prefill_layer",
     "where kernels run is not kept: a process ended in reading a captured graph before"),
    (("clock", 12), "corun|112+20|both|engine_prefill_layer",
     "left out, since the device was lost there: corun|112+20|both|engine_prefill_layer")])
def test_wherever_the_device_is_lost_the_next_process_goes_on_without_that(machine, tmp_path, capsys, launch, where, then):
    """A sticky fault at one launch: status 3 even where not a row was taken yet, and the same command then measures the rest (the
    matrix alone: without triton a control's copy is torch's own, and really made here)."""
    command = ["sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "32", "--out", str(tmp_path)]
    gpu = machine(fail_at={launch: "CUDA error: an illegal memory access was encountered"}, sticky=True)
    assert profile_cli.main(command) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"bullet-profile: error: {where}")
    assert err.count("\n") == 1
    assert "the GPU answers no more" in err
    assert nothing_left(gpu)
    gpu = machine()
    assert profile_cli.main(command) == 0
    out = capsys.readouterr().out
    assert then in out
    assert "whole: co-run matrix" in out
    rows = read_journal(tmp_path / "samples.jsonl")[1]
    assert len({r["id"] for r in rows}) == len(rows) > 50
    assert nothing_left(gpu)


def test_a_proof_in_which_the_device_is_lost_twice_is_done_without(machine, tmp_path, capsys):
    command = ["sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "60", "--out", str(tmp_path)]
    for _ in range(2):
        machine(fail_at={("probe", 3): "CUDA error: an illegal memory access was encountered"}, sticky=True)
        assert profile_cli.main(command) == 3
    gpu = machine()
    assert profile_cli.main(command) == 0
    assert "0 of 1 pairs proven" in capsys.readouterr().out
    rows = [r for r in read_journal(tmp_path / "samples.jsonl")[1] if r["split_decode_sms"] is not None]
    assert {(r["partition"], r["partition_note"]) for r in rows} == {
        ("unproven", "not proven: a process ended in the partitions' proof before")}
    assert nothing_left(gpu)


def test_a_check_in_which_the_device_is_lost_ends_with_3(machine, capsys):
    gpu = machine(fail_at={("probe", 3): "CUDA error: an illegal memory access was encountered"}, sticky=True)
    assert profile_cli.main(["check"]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert nothing_left(gpu)


def test_the_first_part_covers_the_issues_minimum_on_the_machine_itself(machine, tmp_path, capsys):
    gpu = machine()
    assert profile_cli.main(["gpu", "--part", "corun", "--budget-s", "300", "--out", str(tmp_path)]) == 0
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    cells: dict[tuple, list[dict]] = {}
    for r in rows:
        if r["tier"] == "co-run matrix":
            cells.setdefault((r["cell"], r["cell_order"]), []).append(r)
    assert len(cells) == 144
    for found in cells.values():
        assert [(r["step"], r["lane"]) for r in found] == [(0, "prefill"), (1, "decode"), (3, "decode"), (4, "prefill"),
                                                          (2, "prefill"), (2, "decode")]
        assert len({r["cell"] for r in found}) == 1
    both = [r for r in rows if r["tier"] == "co-run matrix" and r["kind"] == "corun"]
    points = {(r["split_prefill_sms"], r["tokens"], r["corunner_batch"], r["replicate"]) for r in both if r["lane"] == "prefill"}
    assert points == {(r["split_prefill_sms"], r["corunner_tokens"], r["batch"], r["replicate"]) for r in both
                      if r["lane"] == "decode"}
    assert len(points) == 6 * 4 * 3 * 2
    for r in both:  # the fake has no contention, and its clock kernel runs at 1.5 GHz
        assert (r["partition"], r["sharing"], r["group_lane"], r["attention"]) == ("proven", "split", "prefill", "own")
        assert r["slowdown"] == pytest.approx(1.0, rel=1e-6)
        assert r["slowdown_low"] <= r["slowdown"] <= r["slowdown_high"]
        assert r["clock_window_hz"] == pytest.approx(1.5e9)
        assert min(r["mean_s"], r["p95_s"]) > 0
        assert r["samples"] >= 5
        assert 0.3 < r["both_share"] <= 1
        assert r["warm_s"] >= 0.06
        assert r["loaded_s"] >= 0.3
        assert (r["power_w"], r["throttle"], r["clock_sm_hz"]) == (300.0, None, 1.98e9)
    alone = [r for r in rows if r["kind"] == "solo" and r["step"] in (None, 0)]
    assert all(r["warm_s"] >= 0.3 for r in alone)
    assert all(r["warm_s"] >= 0.3 for r in rows if r["kind"] == "anchor")
    assert {r["sharing"] for r in rows if r["kind"] == "corun"} == {"split", "plain", "priority", "bounded"}
    assert {r["corunner"] for r in rows if r["kind"] == "control"} == {"tensor_spin", "l2_stream", "memory_stream", "alu_spin",
                                                                       "idle"}
    assert {r["attention"] for r in rows if r["op"] == "prefill_attention"} == {"flash"}
    assert {r["attention"] for r in rows if r["op"] == "cudnn_prefill_attention"} == {"cudnn"}
    text = (tmp_path / "summary.txt").read_text()
    assert len(text) < 12_000
    assert "whole: co-run matrix, controls, checks, SM axis" in text
    assert capsys.readouterr().out.endswith(text)
    files = list(tmp_path.rglob("*"))
    assert len(files) <= 7  # the engine's archive is the eighth
    assert all(f.stat().st_size < 16 << 20 for f in files)
    assert json.loads((tmp_path / "check.json").read_text())["proven"] is True
    assert nothing_left(gpu)


def test_shapes_of_the_default_model_fit():
    fits = card.fits_in(get_model("llama-3.1-8b"), 2, 130 << 30)
    assert fits(prefill("prefill_layer", 8192))
    assert fits(decode("decode_layer", 256, 4096))


# ------------------------------------------------------------------------------------------ bullet-run


class StandInEngine:
    """Takes what an engine takes and remembers it; ``fail``: raised by ``capture``."""

    fail = None

    def __init__(self, arch, weights, ops, *, kv_blocks, max_tokens, device, enter=None):
        self.arch, self.ops, self.kv_blocks, self.max_tokens, self.device = arch, ops, kv_blocks, max_tokens, device
        self.lanes, self.warmed, self.closed = [], [], False
        StandInEngine.last = self

    def warm_up(self, lanes):
        assert not self.lanes  # before the captures, which hold memory for good
        self.warmed = list(lanes)

    def capture(self, lanes):
        if self.fail is not None:
            raise self.fail
        self.lanes = list(lanes)
        return len(self.lanes)

    def close(self):
        self.closed = True


@pytest.fixture
def serving(machine, monkeypatch):
    """A faked GPU machine for ``open_machine``, which then needs no memory of it."""
    from bullet.engine import engine
    from bullet.runtime import machine as machines

    def start(fail=None, **options):
        monkeypatch.setattr(machines, "_weights", lambda *args: None)
        monkeypatch.setattr(engine, "Engine", type("Engine", (StandInEngine,), {"fail": fail}))
        return machine(**options), machines.open_machine
    return start


def tiny_config(**overrides):
    from bullet.config import load_run_config

    return load_run_config(None, {"device.model": "tiny", **overrides})


def test_a_real_run_gets_a_lane_for_each_split_and_leaves_nothing(serving):
    gpu, open_machine = serving()
    with open_machine("cuda", tiny_config(), 1024) as opened:
        found, engine = opened.machine, StandInEngine.last
        assert found.name == "NVIDIA H200"
        assert found.partition == f"green contexts, {len(opened.pairs)} of {len(opened.pairs)} splits proven by %smid"
        assert found.splits.num_sms == opened.gpu.num_sms == 132
        assert found.splits.decode_sms.tolist() == sorted(d for _, d in opened.pairs)
        for p, d in opened.pairs:
            assert (found.lane("prefill", p).sms, found.lane("decode", d).sms) == (p, d)
        whole = found.lane("prefill", 132)
        assert whole.sms == 132
        assert whole.stream is not found.lane("decode", 132).stream
        assert found.lane("hybrid", 132) is found.lane("decode", 132)
        # The whole device first: what a first launch loads belongs to the primary context, not to one lane's.
        assert engine.lanes == [found.lane("decode", 132), *(found.lane("decode", d) for _, d in opened.pairs)]
        assert engine.warmed == [whole, *(found.lane("prefill", p) for p, _ in opened.pairs)]
        assert not found.turns
        assert engine.arch.dtype == torch.bfloat16
        # 100 GiB free less what seven lanes hold: activations of 1024 tokens, twice those of 256, a workspace of 32 MiB and a
        # context of 44 for either phase; the logits of 256; 512 MiB. A block: 16 tokens, K and V, 4 layers x 2 heads x 64.
        spec = get_model("tiny")
        row = 2 * (3 * spec.intermediate_size + 5 * spec.hidden_size)
        reserved = 7 * (1024 + 512) * row + 256 * spec.vocab_size * 2 + 14 * (76 << 20) + (512 << 20)
        assert found.kv_blocks == engine.kv_blocks == ((100 << 30) - reserved) // (16 * 2 * 4 * 2 * 64 * 2)
    assert engine.closed
    assert nothing_left(gpu)


def test_a_real_run_without_green_contexts_goes_on_and_says_no_partition(serving):
    gpu, open_machine = serving(stub={"version": 12020})
    with open_machine("cuda", tiny_config(), 1024) as opened:
        assert opened.machine.partition.startswith("no partition: driver supports CUDA 12.2")
        assert opened.pairs == ()
        assert opened.machine.lane("prefill", 40).sms == 132
    assert nothing_left(gpu)


@pytest.mark.parametrize("where", ["capture", "run", "interrupt"])
def test_whatever_ends_a_real_run_contexts_are_destroyed(serving, where):
    from bullet.errors import EngineError

    error = KeyboardInterrupt() if where == "interrupt" else EngineError("decode: the GPU failed")
    gpu, open_machine = serving(fail=error if where == "capture" else None)

    def use():
        with open_machine("cuda", tiny_config(), 1024):
            raise error

    with pytest.raises(type(error)):
        use()
    assert StandInEngine.last.closed
    assert nothing_left(gpu)


def test_too_little_memory_for_one_sequence(serving):
    from bullet.errors import EngineError

    gpu, open_machine = serving(free_bytes=1 << 30)
    with pytest.raises(EngineError, match="one sequence of 4096 tokens needs 256"), open_machine("cuda", tiny_config(), 4096):
        pass
    assert nothing_left(gpu)
