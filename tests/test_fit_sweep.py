"""A fit of a sweep that holds torch's operations and the engine's: the one that was asked for comes back, through the files."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from bullet.catalog.gpus import GPUS, get_gpu
from bullet.catalog.models import get_model
from bullet.cli.profile import main as profile
from bullet.cli.sim import main as sim
from bullet.devices import PROFILES
from bullet.devices.coefficients import CALLED, DeviceCoefficients, lent
from bullet.errors import ProfileError
from bullet.gpu.partition import simulated_table
from bullet.gpu.splits import granularity
from bullet.profiler import cells
from bullet.profiler.axes import CORE_DECODE_SHARES, choose_splits, gpu_axes
from bullet.profiler.bench import NO_CLOCKS, lane_units
from bullet.profiler.cells import Side
from bullet.profiler.check import unchecked
from bullet.profiler.plan import Point, Rates, make_plan
from bullet.profiler.shapes import ENGINE_LAYERS, Shape
from bullet.profiler.sweep import run_sweep
from bullet.profiles.journal import Journal
from bullet.profiles.kernels import Fit
from bullet.profiles.rows import ENGINE_OPS, write_parquet
from bullet.profiles.sweeps import model_of, of_implementation, read_rows
from tests.known_device import KnownRates, made_up

LLAMA, GPU = get_model("llama-3.1-8b"), get_gpu("a100-80gb")
SPLITS = choose_splits(108, granularity((8, 0)), CORE_DECODE_SHARES)
ENGINE = made_up(GPU, contention_loss=0.3)
TORCH = made_up(GPU, decode_attention_bandwidth=0.5, decode_attention_overhead_s=3e-5, prefill_attention_efficiency=0.4,
                prefill_attention_overhead_s=3e-5, rowwise_overhead_s=8e-6, contention_loss=0.1,
                rowwise_bandwidth={"norm": 0.3, "rope": 0.2, "act": 0.35, "embedding": 0.4, "qk_norm": 0.3})


class Known:
    """A device that takes what :class:`KnownRates` says, alone, and beside another what its coefficients say of contention."""

    backend, source, gpu, unit, num_units, dtype = "simulated", "simulated", "simulated a100-80gb", "SM", 108, "bfloat16"

    def __init__(self) -> None:
        self.table = simulated_table(SPLITS, 108, (8, 0))
        self.rates = KnownRates(LLAMA, GPU, ENGINE, TORCH)

    torch_attention, busy = None, False

    def seconds(self, point, which):
        """Of each lane that runs in such a window."""
        p, d = lane_units(self, point, "prefill"), lane_units(self, point, "decode")
        own, other = point.shape, point.other
        alone = {"a": self.rates.seconds(LLAMA, own, p if point.kind == "corun" else lane_units(self, point, point.lane))}
        if other is not None:
            alone["b"] = self.rates.seconds(LLAMA, other, d)
        if which != "ab":
            return [alone[which]]
        if point.split is None:  # shared SMs, in a way that no fit of the loss may look at
            return [3 * alone["a"], 3 * alone["b"]]
        device = self.rates.device(own.op)
        prefill = device.prefill_work([(own.tokens, 0)], 1, logits_seqs=0)
        decode = device.hybrid_work((), other.batch, other.batch * other.context_tokens, logits_seqs=0, layers=1)
        return device.corun_seconds(prefill, p, decode, d)

    def measure(self, point):
        lanes = ("prefill" if point.kind == "corun" else point.lane, "decode")

        def sides(which):
            return [Side(lanes[i], (point.shape, point.other)[i], lane_units(self, point, lanes[i]), [seconds] * 25, 1, 0.1, 1.0,
                         1e12) for i, seconds in zip(["ab".index(c) for c in which], self.seconds(point, which), strict=True)]
        return cells.measure(point, lambda steps: [sides(which) for which in steps])

    def allowed(self, point):
        """The device says what layers do beside each other, with a split and without; no controls."""
        return point.kind == "solo" or (point.kind == "corun" and point.shape.op.endswith("_layer")
                                        and point.sharing != "bounded")

    def anchor(self):
        return self.measure(Point("solo", None, "full", Shape("prefill_layer", 2048)))[0]

    def clocks(self):
        return dict(NO_CLOCKS)

    def provenance(self):
        return {}


def swept(folder: Path, keep=lambda point: True) -> Path:
    bench = Known()
    plan = make_plan(LLAMA, gpu_axes(SPLITS, []), Rates(108, 2e14, 1.4e12),
                     allowed=lambda point: bench.allowed(point) and keep(point))
    with Journal(folder / "samples.jsonl", {"gpu": bench.gpu, "source": bench.source}) as journal:
        run_sweep(bench, LLAMA, plan, journal, unchecked(bench.table, bench.gpu, "known"), now=lambda: "2026-11-30")
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swept(tmp_path_factory.mktemp("sweep"))


@pytest.mark.parametrize(("arguments", "implementation", "truth"), [
    ([], "engine", ENGINE), (["--implementation", "torch"], "torch", TORCH)])
def test_the_implementation_asked_for_comes_back_and_is_simulated(sweep, tmp_path, capsys, arguments, implementation, truth):
    out = tmp_path / "profile"
    assert profile(["fit", str(sweep), "--out", str(out), *arguments]) == 0
    found = DeviceCoefficients.from_json(out / "fit.json")
    assert found.source == "fitted to simulated samples"
    for name in ("decode_attention_bandwidth", "decode_attention_overhead_s", "prefill_attention_efficiency",
                 "prefill_attention_overhead_s", "rowwise_overhead_s", "gemm_bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05), name
    for name in ("norm", "rope", "act"):
        assert found.rowwise_bandwidth[name] == pytest.approx(truth.rowwise_bandwidth[name], rel=0.02)
    assert found.bandwidth_knee == pytest.approx(0.4, rel=0.05)
    assert found.contention_loss == pytest.approx(truth.contention_loss, abs=0.03)
    # Layers were never fitted: their seconds are those of their kernels.
    assert found.notes["errors"]["prefill_layer_unfitted"]["median"] < 0.03
    assert found.notes["errors"]["decode_layer_unfitted"]["median"] < 0.03
    assert found.notes["implementation"] == implementation
    assert (found.notes["gpu"], found.notes["model"]) == ("a100-80gb", "llama-3.1-8b")
    assert ("decode_attention" in found.notes["operations"]) == (implementation == "engine")
    page = (out / "SOURCE.md").read_text()
    assert f"`--implementation {implementation}`" in page
    assert ("decode_attention from paged_decode_attention" in page) == (implementation == "engine")
    capsys.readouterr()

    run = ["run", "--trace", "azure-code", "--num-requests", "5", "--no-report", "--quiet", "--device-model", str(out)]
    assert sim([*run, "--out", str(tmp_path / "run")]) == 0
    assert "device model: fitted to simulated samples" in capsys.readouterr().out
    assert sim([*run, "--gpu", "h100", "--out", str(tmp_path / "other")]) == 2
    assert "fitted on gpu a100-80gb, not h100" in capsys.readouterr().err
    assert sim([*run, "--model", "qwen3-32b", "--out", str(tmp_path / "qwen")]) == 0
    assert "fitted to simulated samples on llama-3.1-8b's shapes" in " ".join(capsys.readouterr().out.split())
    assert sim([*run[:-1], str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "must be fit, table, or a folder that holds fit.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_same_fit_from_the_table_as_from_the_folder(sweep, tmp_path):
    rows = read_rows(sweep)
    write_parquet(tmp_path / "samples.parquet", rows, {})
    assert read_rows(tmp_path) == read_rows(tmp_path / "samples.parquet") == rows


def test_torchs_rows_only_are_torchs(tmp_path, capsys):
    rows = read_rows(swept(tmp_path / "a", lambda p: p.shape.op not in ENGINE_OPS))
    assert of_implementation(rows, None).implementation == "torch"
    with pytest.raises(ProfileError, match="none of its kernels was measured alone on the whole device"):
        of_implementation(rows, "engine")


def test_what_the_engine_lacks_is_torchs_and_said(sweep):
    rows = [r for r in read_rows(sweep) if r["op"] != "own_rope" and not (
        r["kind"] == "corun" and r["op"] in ENGINE_LAYERS)]
    chosen = of_implementation(rows, "engine")
    assert "rope: no row of the engine's, torch's" in chosen.notes
    assert chosen.notes[0] == "contention: 0 co-run rows of the engine's layers, 4 needed: torch's layers"
    assert not any("engine_" in r["id"] for r in chosen.rows)  # layers alone are those that ran beside each other
    assert {r["op"] for r in chosen.rows}.isdisjoint(ENGINE_OPS)
    # A GEMM is the engine's too; its own bounded one is not what it runs.
    assert sum(r["op"] == "gemm_gate_up" for r in chosen.rows) == sum(r["op"] == "gemm_gate_up" for r in rows)


def test_bandwidth_against_sms_is_torchs_attentions_where_the_engines_was_not_measured_there(tmp_path, capsys):
    """What a budget or a broken-off sweep leaves: the engine's attention on all SMs, torch's along SMs, half of the tokens. GEMMs
    alone may give all bandwidth to three of a hundred SMs (so they did with the first half of the rows)."""
    rows = [r for r in read_rows(swept(tmp_path / "a")) if not (r["op"].endswith("_layer") and r["kind"] == "solo")]
    last = max(r["order"] for r in rows if r["tier"] == "own kernels")
    early = [r for r in rows if r["order"] <= last]
    assert not any(r["op"] in ("paged_decode_attention", "own_prefill_attention") and r["split_prefill_sms"] for r in early)
    write_parquet(tmp_path / "samples.parquet", early, {})
    assert profile(["fit", str(tmp_path / "samples.parquet"), "--out", str(tmp_path / "out")]) == 0
    line = "rate and bandwidth against SMs: torch's decode_attention and prefill_attention, the engine's not measured there"
    assert f"not of these rows: {line}" in capsys.readouterr().out
    found = DeviceCoefficients.from_json(tmp_path / "out" / "fit.json")
    assert line in found.notes["assumed"]
    assert found.bandwidth_knee == pytest.approx(0.4, rel=0.05)
    assert found.decode_attention_bandwidth == pytest.approx(ENGINE.decode_attention_bandwidth, rel=0.05)
    # Neither one's attention along SMs: A100's own axis, not that of GEMMs.
    without = [r for r in early if not (r["op"] == "decode_attention" and r["split_prefill_sms"])]
    write_parquet(tmp_path / "samples.parquet", without, {})
    assert profile(["fit", str(tmp_path / "samples.parquet"), "--out", str(tmp_path / "other")]) == 0
    found = DeviceCoefficients.from_json(tmp_path / "other" / "fit.json")
    assert found.notes["fitted_on"]["sm_axis"] == "muxserve"
    assert "no decode attention on fewer SMs than all tells bandwidth against SMs" in capsys.readouterr().out


def test_rows_of_a_partition_that_was_not_proven_tell_nothing_of_sms(sweep, tmp_path):
    """They ran on other SMs than were granted: twice as slow as they should be."""
    rows = read_rows(sweep)
    leaky = [r if not r["split_prefill_sms"] else
             {**r, "partition": "unproven", "median_s": r["median_s"] * 2} if r["split_prefill_sms"] == SPLITS[0].prefill_sms else
             {**r, "partition": "proven"} for r in rows]
    assert sum(r["partition"] == "unproven" for r in leaky) > 30
    write_parquet(tmp_path / "samples.parquet", leaky, {})
    assert profile(["fit", str(tmp_path / "samples.parquet"), "--out", str(tmp_path / "out")]) == 0
    found = DeviceCoefficients.from_json(tmp_path / "out" / "fit.json")
    assert found.bandwidth_knee == pytest.approx(0.4, rel=0.05)
    assert found.contention_loss == pytest.approx(ENGINE.contention_loss, abs=0.03)
    assert found.notes["errors"]["decode_layer_unfitted"]["worst"] < 0.05


@pytest.mark.parametrize(("keep", "message"), [
    (lambda p: p.shape.op != "paged_decode_attention" or (p.shape.context_tokens == 4096 and p.shape.batch == 1),
     "decode_attention: 1 rows of this project, at least 6 are needed to fit 3 parameters"),
    (lambda p: (p.shape.op != "gemm_gate_up" and not p.shape.op.startswith("gemm_")) or (p.split is None and p.shape.tokens == 8),
     "gemm: "),
])
def test_too_few_rows_are_one_line(tmp_path, capsys, keep, message):
    assert profile(["fit", str(swept(tmp_path / "few", keep)), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "out" / "fit.json").exists()


def test_rows_taken_beside_other_processes_are_said(sweep, tmp_path, capsys):
    rows = [{**r, "busy": i < 10} for i, r in enumerate(read_rows(sweep))]
    write_parquet(tmp_path / "samples.parquet", rows, {})
    assert profile(["fit", str(tmp_path / "samples.parquet"), "--implementation", "torch"]) == 0
    assert "rows were measured beside other processes (--allow-busy), taken as they are" in capsys.readouterr().out
    assert profile(["fit", str(sweep)]) == 0
    assert "beside other processes" not in capsys.readouterr().out


def test_without_scipy_a_fit_is_one_line(sweep, capsys, monkeypatch):
    """The base install has none, and the GPU's machine need not."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert profile(["fit", str(sweep)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "scipy is not installed" in err
    assert "pip install 'bullet-llm[fit]'" in err


def test_a_folder_without_rows_another_model_and_a_public_table_are_refused(sweep, tmp_path, capsys):
    assert profile(["fit", str(tmp_path)]) == 2
    assert "holds neither samples.jsonl nor samples.parquet" in capsys.readouterr().err
    with Journal(tmp_path / "samples.jsonl", {"gpu": "g", "source": "measured"}):
        pass
    assert profile(["fit", str(tmp_path)]) == 2
    assert "holds no row yet" in capsys.readouterr().err
    assert profile(["fit", str(sweep), "--model", "tiny"]) == 2
    assert "no rows of tiny: it has llama-3.1-8b" in capsys.readouterr().err
    assert profile(["fit", "--gpu", "h100", "--implementation", "torch"]) == 2
    assert "a public table has one of its own" in capsys.readouterr().err
    rows = read_rows(sweep)
    with pytest.raises(ProfileError, match=r"rows of llama-3.1-8b, other: choose one with --model"):
        model_of([*rows, {**rows[0], "model": "other"}], None, "folder")
    with pytest.raises(ProfileError, match=r"give that file as --model FILE\.json"):
        model_of([{**rows[0], "model": "mine#0123abcd"}], None, "folder")


def test_a_point_is_timed_alike_by_the_known_device_and_its_kernels():
    """The test's own device: a layer is its kernels and its share of the embedding."""
    rates = KnownRates(LLAMA, GPU, ENGINE, TORCH)
    kernels = [Shape("norm", 2048), Shape("norm", 2048), *(Shape(op, 2048) for op in (
        "gemm_qkv", "rope", "prefill_attention", "gemm_o", "gemm_gate_up", "act", "gemm_down"))]
    total = sum(rates.seconds(LLAMA, shape, 54) for shape in kernels)
    layer = rates.seconds(LLAMA, Shape("prefill_layer", 2048), 54)
    assert 0 < layer - total < 0.01 * layer



def test_every_card_can_borrow_from_one_whose_name_a_fit_can_say() -> None:
    assert {card.silicon for card in GPUS.values()} <= set(CALLED)
    assert {name: GPUS[name].silicon for name in ("h200", "h20", "b200", "a100-40gb", "l40s")} == {
        "h200": "h100", "h20": "h100", "b200": "h100", "a100-40gb": "a100-80gb", "l40s": "rtx4090"}
    assert lent(["gemm: no measured row, H100's", "host_gap_s 0", "all_reduce: as asked, A100's"]) == {
        "gemm": "H100's", "all_reduce": "A100's"}


@pytest.mark.parametrize(("card", "what", "whose"), [
    ("h200", "gemm", "H100's"), ("h200", "rowwise", "A100's"),  # H100's own fit has these of A100
    ("l40s", "rowwise", "RTX 4090's"), ("l40s", "all_reduce", "A100's"), ("l40s", "rate and bandwidth against SMs", "A100's"),
    ("a100-40gb", "gemm", "A100's")])
def test_what_a_lender_has_itself_borrowed_keeps_its_owner(card: str, what: str, whose: str) -> None:
    gpu = get_gpu(card)
    fit = DeviceCoefficients.from_json(PROFILES / gpu.silicon / "llama-3.1-8b" / "fit.json")
    assert Fit(gpu, LLAMA, lender=gpu.silicon).whose(what, fit) == whose
