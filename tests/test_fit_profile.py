"""Fits of whole tables: made-up coefficients come back from the rows that they predict; too little is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.cli.profile import main as profile
from bullet.config import DeviceConfig
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_device
from bullet.devices.lookup import lookup
from bullet.devices.terms import compute_seconds
from bullet.errors import ProfileError
from bullet.profiles import forms as fit
from bullet.profiles import kernels as fit_profile
from bullet.profiles import sm_axis as fit_sms
from bullet.profiles.check import A100, RTX4090
from bullet.profiles.contention import Contention, fit_contention
from bullet.profiles.fit import fit_samples, waves_by_evidence
from bullet.profiles.importers.reading import (
    Origin,
    all_reduce_columns,
    attention_columns,
    gemm_columns,
    make_row,
    rowwise_columns,
)
from bullet.profiles.rows import Row, finalise, read_parquet, write_parquet
from bullet.profiles.source_page import MARK, source_page, write_page
from experiments.findings import gemm_shapes

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
LLAMA, GPU = get_model("llama-3.1-8b"), get_gpu("a100-80gb")
SHIPPED = {gpu: ROOT / "profiles" / gpu / "llama-3.1-8b" for gpu in ("a100-80gb", "h100", "rtx4090")}
TRUTH = dataclasses.replace(
    load_device(DeviceConfig()).coefficients, gemm_tiles=((128, 256, 0.8), (128, 128, 0.7), (64, 128, 0.65), (64, 64, 0.6)),
    gemm_bandwidth=0.75, gemm_overhead_s=4e-6, gemm_block_overhead_s=2e-6, prefill_attention_efficiency=0.6,
    prefill_attention_extra_keys=200.0, prefill_attention_overhead_s=1e-5, decode_attention_bandwidth=0.8,
    decode_attention_overhead_s=1.5e-5, decode_attention_seq_s=3e-7,
    rowwise_bandwidth={"norm": 0.6, "rope": 0.5, "act": 0.7, "embedding": 0.4, "qk_norm": 0.6}, rowwise_overhead_s=2e-6,
    rate_slope=0.4, rate_cap=1.25, bandwidth_knee=0.4, bandwidth_sharpness=3.0)
HEADS = (32, 8, 128)
ORIGIN = Origin("made/up", "0", "made up 1.0", "MIT")


def made(columns: dict[str, Any], seconds: float, index: int) -> Row:
    return make_row(ORIGIN, Path("made.csv"), index, A100, float(seconds), columns)


def made_table(c: DeviceCoefficients = TRUTH) -> list[Row]:
    """Rows that the coefficients predict exactly."""
    rows: list[Row] = []
    parameters = np.array([*(e for _, _, e in c.gemm_tiles), c.gemm_bandwidth, c.gemm_overhead_s, c.gemm_block_overhead_s])
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for m in (1, 16, 64, 100, 200, 400, 777, 1024, 1500, 3000, 8192):
            seconds = fit.gemm_seconds([fit.Gemm(m, n, k, 0.0)], parameters, GPU)[0]
            rows.append(made(gemm_columns(m, n, k, LLAMA), seconds, len(rows)))
    for name in ("norm", "rope", "act", "embedding"):
        for m in (8, 100, 512, 4096, 16384):
            columns = rowwise_columns(name, m, LLAMA)
            seconds = columns["bytes"] / (GPU.mem_bytes_per_s * c.rowwise_bandwidth[name]) + c.rowwise_overhead_s
            rows.append(made(columns, seconds, len(rows)))
    for b in (1, 4, 16, 64, 512):
        for tokens in (16, 128, 512, 2048, 8192):
            columns = attention_columns("decode_attention", b, 1, tokens, HEADS)
            attention = np.array([c.decode_attention_bandwidth, c.decode_attention_overhead_s, c.decode_attention_seq_s])
            seconds = fit.decode_attention_seconds(np.array([b]), np.array([columns["bytes"]]), attention, GPU)[0]
            rows.append(made(columns, seconds, len(rows)))
            if b <= 16:
                attention = np.array([c.prefill_attention_efficiency, c.prefill_attention_extra_keys,
                                      c.prefill_attention_overhead_s])
                seconds = fit.prefill_attention_seconds(np.array([float(b)]), np.array([float(tokens)]), 32, 128, attention,
                                                        GPU)[0]
                rows.append(made(attention_columns("prefill_attention", b, tokens, 0, HEADS), seconds, len(rows)))
    return rows


BORROWED = load_device(DeviceConfig()).coefficients


# ------------------------------------------------------------------------------------------ kernel families


def test_made_up_coefficients_come_back() -> None:
    out = fit_profile.fit_profile(made_table(), LLAMA, borrowed=BORROWED)
    v = out.values
    assert v["decode_attention_bandwidth"] == pytest.approx(0.8, rel=0.02)
    assert v["decode_attention_overhead_s"] == pytest.approx(1.5e-5, rel=0.02)
    assert v["decode_attention_seq_s"] == pytest.approx(3e-7, rel=0.02)
    assert v["prefill_attention_efficiency"] == pytest.approx(0.6, rel=0.02)
    assert v["prefill_attention_extra_keys"] == pytest.approx(200, rel=0.05)
    assert v["rowwise_bandwidth"] == pytest.approx({**TRUTH.rowwise_bandwidth}, rel=0.01)
    assert v["rowwise_overhead_s"] == pytest.approx(2e-6, rel=0.02)
    # GEMM parameters of tiles that are seldom chosen are loose; seconds are not.
    assert v["gemm_bandwidth"] == pytest.approx(0.75, rel=0.02)
    assert out.errors["gemm_left_out:all"]["p90"] < 0.05
    assert out.errors["prefill_attention_left_out"]["worst"] < 0.02
    # Nothing measured an all-reduce or an LM head: said, and the former is the borrowed one.
    assert "all_reduce: no measured row, A100's" in out.assumed
    assert v["link_efficiency"] == BORROWED.link_efficiency
    assert any("lm_head extrapolates" in text for text in out.assumed)
    assert out.sources == dict.fromkeys(("gemm", "rowwise", "prefill_attention", "decode_attention"), "made up 1.0")


def test_a_second_source_is_compared_and_moves_nothing() -> None:
    rows = made_table()
    slower = [{**r, "origin_version": "other 2.0", "id": r["id"] + "x", "median_s": 1.5 * r["median_s"]} for r in rows]
    alone = fit_profile.fit_profile(rows, LLAMA, borrowed=BORROWED, asked={"gemm": "made up 1.0"})
    both = fit_profile.fit_profile([*rows, *slower], LLAMA, borrowed=BORROWED,
                                   asked=dict.fromkeys(("gemm", "rowwise", "decode_attention", "prefill_attention"),
                                                       "made up 1.0"))
    assert both.values == alone.values
    assert both.errors["decode_attention_against_other 2.0"]["median"] == pytest.approx(1 / 3, abs=0.01)
    with pytest.raises(ProfileError, match=r"gemm: no rows of 'else': the table has made up 1.0, other 2.0"):
        fit_profile.fit_profile([*rows, *slower], LLAMA, borrowed=BORROWED, asked={"gemm": "else"})
    with pytest.raises(ProfileError, match="unknown family 'gem'"):
        fit_profile.fit_profile(rows, LLAMA, borrowed=BORROWED, asked={"gem": "else"})


def test_the_order_of_rows_changes_nothing() -> None:
    rows = made_table()
    first = fit_profile.fit_profile(rows, LLAMA, borrowed=BORROWED)
    again = fit_profile.fit_profile(rows[::-1], LLAMA, borrowed=BORROWED)
    assert (first.values, first.errors) == (again.values, again.errors)


@pytest.mark.parametrize(("op", "keep", "message"), [
    ("gemm_", 6, r"gemm: 6 rows of made up 1.0, at least 14 are needed to fit 7 parameters"),
    ("decode_attention", 3, r"decode_attention: 3 rows of made up 1.0, at least 6"),
    ("norm", 0, "norm bandwidth: the table has no rows for it"),
])
def test_too_few_rows_are_refused(op: str, keep: int, message: str) -> None:
    rows = made_table()
    few = [r for r in rows if r["op"].startswith(op)][:keep]
    with pytest.raises(ProfileError, match=message):
        fit_profile.fit_profile([r for r in rows if not r["op"].startswith(op)] + few, LLAMA,
                                borrowed=BORROWED if keep else None)


def test_gemms_that_show_one_side_of_the_roofline_are_refused() -> None:
    """Up to 100 tokens all are bound by bytes on an A100 (156 operations a byte); from 777 on all by operations."""
    rows = made_table()
    for keep, message in ((lambda r: r["tokens"] <= 100, r"gemm: 0 rows of made up 1.0 are bound by operations, of 1 to 100 "
                                                         "tokens; at least 4 are needed .*: measure more tokens"),
                          (lambda r: r["tokens"] >= 777, "gemm: 0 rows of made up 1.0 are bound by bytes, of 777 to 8192 ")):
        with pytest.raises(ProfileError, match=message):
            fit_profile.fit_profile([r for r in rows if not r["op"].startswith("gemm_") or keep(r)], LLAMA, borrowed=BORROWED)


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"row made up 1.0\|gemm_qkv.*: has the shapes of llama-3.1-8b, not of tiny: give its"):
        fit_profile.fit_profile(made_table(), get_model("tiny"), borrowed=BORROWED)


def test_a_family_of_too_few_rows_can_be_borrowed_by_name() -> None:
    rows = made_table()
    few = [r for r in rows if r["op"] != "decode_attention"] + [r for r in rows if r["op"] == "decode_attention"][:3]
    out = fit_profile.fit_profile(few, LLAMA, borrowed=BORROWED, borrow=["decode_attention"])
    assert out.values["decode_attention_bandwidth"] == BORROWED.decode_attention_bandwidth
    assert "decode_attention: as asked, A100's" in out.assumed
    assert "decode_attention" not in out.sources
    with pytest.raises(ProfileError, match="unknown family 'decode'"):
        fit_profile.fit_profile(few, LLAMA, borrowed=BORROWED, borrow=["decode"])


def test_a_row_above_the_peak_spoils_the_fit_by_name() -> None:
    rows = made_table()
    rows[10] = {**rows[10], "median_s": rows[10]["median_s"] / 2}
    with pytest.raises(ProfileError, match=r"row 10 \(gemm_qkv\): .* above a100-80gb's peak"):
        fit_profile.fit_profile(rows, LLAMA, borrowed=BORROWED)


# ----------------------------------------------------------------------------------------------- SM axis


def sweep_of(device: DeviceModel, sms: tuple[int, ...]) -> dict[str, fit_sms.Sweep]:
    """Kernels as the device times them on few SMs, 1e-5 s of launch inside each."""
    shapes = {"gemm": [(m, n, k) for m in (1, 64, 512, 4096) for n, k in ((6144, 4096), (4096, 14336))],
              "decode_attention": [(b, 4096) for b in (1, 16, 128)], "prefill_attention": [(t,) for t in (512, 4096)]}
    c = device.coefficients
    found: dict[str, fit_sms.Sweep] = {}
    for op, own in shapes.items():
        for shape in own:
            (tiles, moved_s), overhead_s = fit_sms._terms(op, shape, device)
            rates = [min(c.rate_cap, 1 + c.rate_slope * (1 - p / 108)) for p in range(109)]
            found.setdefault(op, {})[shape] = {
                p: max(compute_seconds(tiles, p, 0, rates), moved_s / device.bandwidth_share(p)) + overhead_s + 1e-5 for p in sms}
    return found


def test_rate_and_bandwidth_against_sms_come_back_from_kernels() -> None:
    device = DeviceModel(LLAMA, GPU, TRUTH)
    sweeps = sweep_of(device, (8, 16, 24, 32, 48, 64, 80, 96, 108))
    # The solver must not need the answer: a device without it has the same kernels.
    flat = DeviceModel(LLAMA, GPU, dataclasses.replace(TRUTH, **fit_sms.FLAT))
    axis, errors = fit_sms.axis_of_kernels(sweeps, flat)
    assert axis == pytest.approx({"rate_slope": 0.4, "rate_cap": 1.25, "bandwidth_knee": 0.4, "bandwidth_sharpness": 3.0},
                                 rel=0.02)
    assert errors["sm_axis_left_out:all"]["worst"] < 0.01
    assert errors["sm_axis_left_out_without_waves:all"]["worst"] > 0.05  # the made-up device has waves, and it shows


def test_an_sm_axis_of_few_points_is_refused() -> None:
    device = DeviceModel(LLAMA, GPU, TRUTH)
    with pytest.raises(ProfileError, match=r"SM axis: \d rows on fewer SMs than all, at least 10"):
        fit_sms.axis_of_kernels({"gemm": {(64, 6144, 4096): {54: 2e-5, 108: 1e-5}}}, device)


def test_attention_bandwidth_is_a_difference_of_steps() -> None:
    """Steps of 10 ms + context at a bandwidth that halves at half the SMs: weights and host cancel."""
    decode = {(64, length): {p: 10e-3 + length * 1e-5 * (100 / p) for p in (*fit_sms.PERCENTS, 100)} for length in (32, 128, 512)}
    assert fit_sms.attention_bandwidth(decode) == pytest.approx([p / 100 for p in fit_sms.PERCENTS])


def test_a_folder_without_the_sweeps_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"muxserve.*cannot be read"):
        fit_sms.muxserve(tmp_path, "7b", "decode")
    with pytest.raises(ProfileError, match=r"greenctx_h100_matmul.csv: cannot be read"):
        fit_sms.greenctx(tmp_path)


def test_waves_stay_unless_the_rows_left_out_speak_against_them() -> None:
    def errors(on: float, off: float) -> dict[str, dict[str, float]]:
        return {"gemm_left_out:all": {"median": on, "p90": on}, "gemm_left_out_without_waves:all": {"median": off, "p90": off}}

    assert waves_by_evidence(errors(0.05, 0.048))["evidence"] == "not against"
    assert waves_by_evidence(errors(0.05, 0.04))["evidence"] == "against"
    assert waves_by_evidence({})["evidence"] == "not against"


# --------------------------------------------------------------------------------------------- contention


def corun_rows(device: DeviceModel) -> list[Row]:
    """Whole layers beside each other as the device times them: both sides of each pair, and both alone."""
    rows: list[Row] = []

    def row(kind: str, lane: str, op: str, tokens: int, batch: int, context: int, sms: int, seconds: float,
            beside: tuple[str, int, int, int, int] | None) -> None:
        other = dict(zip(("corunner", "corunner_tokens", "corunner_batch", "corunner_context_tokens", "corunner_sms"),
                         beside or ("idle", None, None, None, None), strict=True))
        split = {"split_prefill_sms": sms if lane == "prefill" else 108 - sms,
                 "split_decode_sms": sms if lane == "decode" else 108 - sms}
        rows.append({
            "id": f"{kind}{len(rows)}", "kind": kind, "op": op, "tokens": tokens, "batch": batch, "context_tokens": context,
            "backend": "green-context", "partition": "proven", "lane": lane, "sms": sms, "device_sms": 108,
            "median_s": seconds, "samples": 25, "source": "measured", "gpu": "NVIDIA A100-SXM4-80GB", "run": 0,
            "order": len(rows), "measured_at": "2026-11-30", "model": LLAMA.name, "dtype": "bfloat16", **split, **other})

    for p in (54, 72, 90):
        for tokens, batch in ((1024, 8), (1024, 64), (4096, 8), (4096, 64)):
            prefill = device.prefill_work([(tokens, 0)], 1, logits_seqs=0)
            decode = device.hybrid_work((), batch, batch * 2048, logits_seqs=0, layers=1)
            p_s, d_s = device.corun_seconds(prefill, p, decode, 108 - p)
            row("corun", "prefill", "prefill_layer", tokens, 1, 0, p, p_s, ("decode_layer", batch, batch, 2048, 108 - p))
            row("corun", "decode", "decode_layer", batch, batch, 2048, 108 - p, d_s, ("prefill_layer", tokens, 1, 0, p))
            row("solo", "prefill", "prefill_layer", tokens, 1, 0, p, device.solo_seconds(prefill, p), None)
            row("solo", "decode", "decode_layer", batch, batch, 2048, 108 - p, device.solo_seconds(decode, 108 - p), None)
    return finalise(rows)


@pytest.mark.parametrize("loss", [0.0, 0.35])
def test_the_loss_comes_back_from_co_running_layers(loss: float) -> None:
    device = DeviceModel(LLAMA, GPU, dataclasses.replace(TRUTH, contention_loss=loss))
    rows = corun_rows(device)
    found = fit_contention(rows, DeviceModel(LLAMA, GPU, TRUTH))
    for name in ("contention_loss", "prefill_contention_loss", "decode_contention_loss"):
        assert found.coefficients[name] == pytest.approx(loss, abs=0.002), name
    for label in ("splits", "prefill_sizes", "decode_sizes"):
        assert found.errors[f"slowdown_left_out:{label}"]["worst"] < 0.01
    shares = found.notes["attained_bandwidth_share"]
    assert set(shares) == {"1024", "4096"}
    assert set(shares["1024"]) == {"18", "36", "54"}
    measured = sorted(1 / r["slowdown"] for r in rows if r["kind"] == "corun" and r["lane"] == "decode"
                      and r["sms"] == 54 and r["corunner_tokens"] == 1024)
    assert shares["1024"]["54"] == pytest.approx(np.median(measured), abs=1e-4)


def test_contention_needs_rows_or_is_assumed() -> None:
    device = DeviceModel(LLAMA, GPU, TRUTH)
    assert fit_contention(made_table(), device) == Contention()
    shared = [{**r, "split_prefill_sms": None, "split_decode_sms": None} for r in corun_rows(device)]
    assert fit_contention(shared, device) == Contention()  # unpartitioned rows tell how SMs are shared, not the loss
    with pytest.raises(ProfileError, match="contention: 2 co-run rows with a slow-down, at least 4"):
        fit_contention(finalise(corun_rows(device)[:4]), device)


# ------------------------------------------------------------------------------------------ shipped, command


@pytest.mark.parametrize("gpu", sorted(SHIPPED))
def test_shipped_fits_follow_from_shipped_samples_to_the_byte(gpu: str) -> None:
    rows, _ = read_parquet(SHIPPED[gpu] / "samples.parquet")
    again = fit_samples(rows, LLAMA)  # the SM axis is kept: its sources are not shipped
    assert again.to_json() == (SHIPPED[gpu] / "fit.json").read_text()
    assert (SHIPPED[gpu] / "SOURCE.md").read_text().endswith(f"{MARK}\n{source_page(again, rows, LLAMA)}")


@pytest.mark.skipif(not (DATA / "unlicensed").is_dir(), reason="the sweeps over SMs are not here")
def test_the_shipped_sm_axis_of_h100_follows_from_the_published_sweep() -> None:  # A100's: test_fit.py
    rows, _ = read_parquet(SHIPPED["h100"] / "samples.parquet")
    again = fit_samples(rows, LLAMA, sm_data=DATA / "unlicensed")
    assert again.to_json() == (SHIPPED["h100"] / "fit.json").read_text()
    assert (SHIPPED["h100"] / "SOURCE.md").read_text().endswith(source_page(again, rows, LLAMA))


def test_shipped_errors_are_what_was_aimed_at_or_explained() -> None:
    for gpu, folder in SHIPPED.items():
        errors = DeviceCoefficients.from_json(folder / "fit.json").notes["errors"]
        assert errors["gemm_left_out:all"]["median"] < 0.05, gpu
        assert errors["gemm_left_out:all"]["p90"] < 0.15, gpu
        assert "Reading them:" in (folder / "SOURCE.md").read_text()
    h100 = DeviceCoefficients.from_json(SHIPPED["h100"] / "fit.json").notes["errors"]
    assert h100["sm_axis_left_out:all"]["median"] < 0.07


def test_fit_and_show_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "made.parquet"
    write_parquet(table, made_table(), {"gpu": "a100-80gb", "source": "measured"})
    assert profile(["fit", str(table), "--out", str(tmp_path / "out")]) == 0
    assert "gemm left out, all" in capsys.readouterr().out
    written = DeviceCoefficients.from_json(tmp_path / "out" / "fit.json")
    assert written.notes["fitted_on"]["gemm"] == "made up 1.0"
    assert "made/up" in (tmp_path / "out" / "SOURCE.md").read_text()
    assert profile(["show", str(table), "--op", "gemm_qkv", "--tokens", "150"]) == 0
    assert "us, measured, linear between measured points" in capsys.readouterr().out
    assert profile(["show", str(table), "--op", "gemm_qkv", "--tokens", "9000"]) == 2
    assert "tokens = 9000 is outside the measured 1 to 8192" in capsys.readouterr().err
    assert profile(["show", str(table), "--op", "gemm_qkv", "--tokens", "150", "--sms", "0"]) == 2
    assert "no rows of 'gemm_qkv' on 0 SMs" in capsys.readouterr().err
    assert profile(["fit", str(tmp_path / "none.parquet")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_fit_or_table_that_differs_is_not_written_over_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "made.parquet", tmp_path / "out"
    write_parquet(table, made_table(), {"gpu": "a100-80gb", "source": "measured"})
    command = ["fit", str(table), "--out", str(out)]
    assert profile(command) == 0
    fitted = (out / "fit.json").read_bytes()
    assert profile(command) == 0  # the same bytes again
    (out / "fit.json").write_text("mine")
    capsys.readouterr()
    assert profile(command) == 2
    assert "fit.json: is there and differs: choose another --out, or say --replace" in capsys.readouterr().err
    assert (out / "fit.json").read_text() == "mine"
    assert profile([*command, "--replace"]) == 0
    assert (out / "fit.json").read_bytes() == fitted
    before = table.read_bytes()
    assert profile(["import", "--data", str(tmp_path), "--out", str(table)]) == 2
    assert "made.parquet: is there: choose another --out, or say --replace" in capsys.readouterr().err
    assert table.read_bytes() == before


@pytest.mark.parametrize(("change", "message"), [
    ({"gpu": RTX4090}, "measured on NVIDIA GeForce RTX 4090, others on NVIDIA A100"),
    ({"gpu": "CPU, no partition"}, "measured on CPU, no partition, NVIDIA A100 80GB: one device a table"),
    ({"median_s": 1.0}, "its neighbours' for its work: another unit"),
])
def test_a_table_that_no_fit_takes_answers_no_question(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any],
                                                       message: str) -> None:
    rows = made_table()
    write_parquet(tmp_path / "t.parquet", [*rows[:5], {**rows[5], **change}, *rows[6:]], {})
    assert profile(["show", str(tmp_path / "t.parquet"), "--op", "gemm_qkv", "--tokens", "150"]) == 2
    assert message in capsys.readouterr().err
    write_parquet(tmp_path / "empty.parquet", [], {})
    assert profile(["fit", str(tmp_path / "empty.parquet")]) == 2
    assert "empty.parquet: holds no rows" in capsys.readouterr().err


def test_a_table_of_another_gpu_than_asked_is_refused_before_any_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "made.parquet"
    write_parquet(table, made_table(), {"gpu": "a100-80gb", "source": "measured"})
    for command in ("fit", "show"):
        assert profile([command, str(table), "--gpu", "h100", *(("--op", "norm") if command == "show" else ())]) == 2
        assert "measured on a100-80gb, not on --gpu h100" in capsys.readouterr().err
    (tmp_path / "taken").write_text("")
    assert profile(["fit", str(table), "--out", str(tmp_path / "taken")]) == 2
    told = capsys.readouterr()
    assert "exists already and is not an empty folder" in told.err
    assert not told.out


def test_a_profile_is_shown_with_units_sources_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(["show", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    lines = {line[:36].strip(): line[36:].split(maxsplit=1) for line in text.splitlines() if len(line) > 90}
    c = load_device(DeviceConfig(gpu="h100")).coefficients
    assert text.startswith("h100, llama-3.1-8b: fitted; rowwise: A100's, 19 parameters")
    assert lines["gemm_overhead_s"][0] == f"{c.gemm_overhead_s * 1e6:.4g}"
    assert lines["gemm_overhead_s"][1].split()[0] == "us"
    assert lines["gemm_bandwidth"][1].startswith("of 3,350 GB/s")
    assert lines["rate_slope"][1].endswith("greenctx")
    for name in ("rowwise_bandwidth norm", "all_reduce_overhead_s", "contention_loss", "host_gap_s"):
        assert lines[name][1].endswith("assumed"), name
    assert len([line for line in text.splitlines() if line.startswith("  ") and line.rstrip()[-1].isdigit()]) >= len(
        c.notes["errors"])
    assert profile(["show", "--gpu", "h200"]) == 0
    assert "h200, llama-3.1-8b: analytic, h100's efficiencies\ndata sheet of h200" in capsys.readouterr().out


def test_what_a_command_would_not_look_at_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in ((["--tokens", "5"], "--tokens: looks an operation up, and --op names none"),
                           (["--sms", "5"], "--sms: looks"),
                           (["--gpu", "h200", "--op", "norm", "--tokens", "5"], "h200/llama-3.1-8b/samples.parquet: no such")):
        assert profile(["show", *asked]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "tp", "source"), [
    ("a100-80gb", 1, "fitted"), ("h100", 1, "fitted; rowwise: A100's"),
    ("rtx4090", 1, "fitted; rate and bandwidth against SMs: A100's"),
    ("rtx4090", 2, "fitted; all_reduce, rate and bandwidth against SMs: A100's; all-reduce over PCIe 4.0 x16, 32 GB/s"),
    ("h200", 1, "analytic, h100's efficiencies")])
def test_a_fitted_device_says_what_it_has_of_another_gpu(gpu: str, tp: int, source: str) -> None:
    assert load_device(DeviceConfig(gpu=gpu, tensor_parallel=tp)).source == source


def test_a_page_keeps_what_others_wrote_above_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "SOURCE.md"
    write_page(path, "# first\n")
    assert path.read_text() == f"{MARK}\n# first\n"
    path.write_text("# by hand\n\n" + path.read_text())
    write_page(path, "# second\n")
    write_page(path, "# second\n")
    assert path.read_text() == f"# by hand\n\n{MARK}\n# second\n"


def test_the_search_stays_on_its_grid_and_leaves_alone_what_no_row_fixes() -> None:
    x = np.linspace(1, 9, 30)
    found = fit.search(lambda p: np.log((p[0] * x + p[1]) / (0.7 * x + 3)), (0.2, 1.0, 5.0), (0.1, 0.0, 0.0), (1.0, 9.0, 9.0),
                       (0.05, 0.25, 0.5))
    assert found.tolist() == pytest.approx([0.7, 3.0, 5.0])  # nothing depends on the third
    bound = fit.search(lambda p: np.log(p[0] * x / (2 * x)), (0.2,), (0.1,), (1.0,), (0.05,))
    assert bound.tolist() == [1.0]


# ------------------------------------------------------------------------------------------------- lookup


def test_lookup_is_linear_between_rows_and_stops_at_their_ends() -> None:
    def gemm(m: int, seconds: float) -> Row:
        return make_row(ORIGIN, Path("t.csv"), m, RTX4090, seconds, gemm_columns(m, 6144, 4096, LLAMA))

    rows = [gemm(100, 1e-3), gemm(200, 3e-3), {**gemm(200, 5e-3), "id": "repeat"}]
    assert lookup(rows, "gemm_qkv", {"tokens": 100}) == 1e-3
    assert lookup(rows, "gemm_qkv", {"tokens": 200}) == pytest.approx(4e-3)  # the median of the repeats
    assert lookup(rows, "gemm_qkv", {"tokens": 125}) == pytest.approx(1.75e-3)
    for tokens in (99, 201):
        with pytest.raises(ProfileError, match=f"tokens = {tokens} is outside the measured 100 to 200"):
            lookup(rows, "gemm_qkv", {"tokens": tokens})
    with pytest.raises(ProfileError, match="no rows of 'gemm_o': the table has gemm_qkv"):
        lookup(rows, "gemm_o", {"tokens": 1})
    with pytest.raises(ProfileError, match="tokens is needed"):
        lookup(rows, "gemm_qkv", {})
    with pytest.raises(ProfileError, match="no rows of 'gemm_qkv' on 64 SMs"):
        lookup(rows, "gemm_qkv", {"tokens": 100}, sms=64)


def test_lookup_of_attention_runs_over_batch_then_context() -> None:
    rows = [make_row(ORIGIN, Path("t.csv"), i, RTX4090, (b * 1000 + c) * 1e-6,
                     attention_columns("decode_attention", b, 1, c, HEADS))
            for i, (b, c) in enumerate([(1, 100), (1, 300), (3, 100), (3, 200)])]
    assert lookup(rows, "decode_attention", {"batch": 2, "context_tokens": 150}) == pytest.approx(2150e-6)
    with pytest.raises(ProfileError, match="context_tokens = 250 is outside the measured 100 to 200"):
        lookup(rows, "decode_attention", {"batch": 2, "context_tokens": 250})  # batch 3 was not measured there


def test_lookup_never_averages_over_what_a_query_leaves_open() -> None:
    def row(i: int, seconds: float, columns: dict[str, Any]) -> Row:
        return make_row(ORIGIN, Path("t.csv"), i, RTX4090, seconds, columns)

    mixed = [row(i, (past + 2 * seqs + 3 * kd) * 1e-6, attention_columns(
        "mixed_attention", 1, 64, past, HEADS, decode_seqs=seqs, decode_context=kd))
        for i, (past, seqs, kd) in enumerate((p, n, k) for p in (0, 100) for n in (1, 9) for k in (16, 32))]
    with pytest.raises(ProfileError, match="mixed_attention: context_tokens is needed"):
        lookup(mixed, "mixed_attention", {"tokens": 64})
    point = {"tokens": 64, "context_tokens": 50, "decode_seqs": 5, "decode_context_tokens": 24}
    assert lookup(mixed, "mixed_attention", point) == pytest.approx((50 + 10 + 72) * 1e-6)
    with pytest.raises(ProfileError, match="no rows of 'mixed_attention' with columns 6144: the table has None"):
        lookup(mixed, "mixed_attention", {**point, "columns": 6144})
    layers = [{**row(i, c * 1e-6, attention_columns("decode_attention", 4, 1, c, HEADS)), "op": "decode_layer"}
              for i, c in enumerate((100, 300))]
    assert lookup(layers, "decode_layer", {"batch": 4, "context_tokens": 200}) == pytest.approx(200e-6)
    with pytest.raises(ProfileError, match="decode_layer: tokens plays no part: its rows run over batch, context_tokens"):
        lookup(layers, "decode_layer", {"batch": 4, "context_tokens": 200, "tokens": 4})
    reduced = [row(i, size * t * 1e-9, all_reduce_columns(t, size)) for i, (t, size) in enumerate(
        (t, s) for t in (2, 4) for s in (1000, 3000))]
    with pytest.raises(ProfileError, match="differ in num_gpus: 2, 4: choose one"):
        lookup(reduced, "all_reduce", {"message_bytes": 2000})
    assert lookup(reduced, "all_reduce", {"message_bytes": 2000, "num_gpus": 4}) == pytest.approx(8e-6)
    grid = [row(i, n * 1e-9, gemm_columns(64, n, 4096, LLAMA)) for i, n in enumerate((5000, 7000))]
    with pytest.raises(ProfileError, match="differ in columns: 5000, 7000: choose one"):
        lookup(grid, "gemm", {"tokens": 64})
    assert lookup(grid, "gemm", {"tokens": 64, "columns": 7000}) == pytest.approx(7e-6)


def test_a_shapes_rate_and_idle_share() -> None:
    """1 ms for 2 x 1,024 x 4,096 x 4,096 operations; 8 x 16 = 128 tiles on 108 SMs: two waves, 88 of 216 slots idle."""
    rows = [fit.Gemm(1024, 4096, 4096, 1e-3), fit.Gemm(100, 4096, 4096, 5e-3)]  # the second is no long prompt
    rate, idle = gemm_shapes.plateau(rows, GPU)
    assert rate == pytest.approx(2 * 1024 * 4096 * 4096 / 1e-3)
    assert idle == pytest.approx(88 / 216)
