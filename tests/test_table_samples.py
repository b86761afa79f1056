"""Samples of single kernels as the table device reads them: a small table by hand, and the shipped ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.cli.sim import main as sim
from bullet.config import DeviceConfig
from bullet.devices import PROFILES
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_device
from bullet.devices.table import TableDevice
from bullet.devices.table_samples import COLUMNS, gemm_curve, tables_of
from bullet.errors import ProfileError
from bullet.profiles.rows import read_parquet
from bullet.work import dense_kernels, head_kernels

US = 1e-6
TINY = MODELS["tiny"]  # 4 layers
GPU = GPUS["a100-80gb"]
FIT = dataclasses.replace(
    DeviceCoefficients.from_json(PROFILES / "a100-80gb" / "llama-3.1-8b" / "fit.json"),
    notes={"fitted_on": {"gemm": "maker", "rowwise": "maker", "prefill_attention": "other", "decode_attention": "other"}})


def row(op, seconds, version="maker", **columns):
    return dict.fromkeys(COLUMNS) | {"op": op, "kind": "solo", "corunner": "idle", "sms": 108, "device_sms": 108,
                                               "origin_version": version, "median_s": seconds, "batch": 1} | columns


def gemm(op, n, seconds):
    kernel = next(k for k in dense_kernels(TINY, 1) if k.name == op)
    return row(f"gemm_{op}", seconds, tokens=n, columns=kernel.columns, inner=kernel.k)


def attention(op, seconds, **columns):
    return row(op, seconds, "other", heads=TINY.num_heads, kv_heads=TINY.num_kv_heads, head_dim=TINY.head_dim, **columns)


def small_rows():
    """GEMMs 10 us + 1 us a token, elementwise 2 us + 0.1 us a token; attention 1 us a prompt token, 1 us a sequence and key."""
    rows = [gemm(op, n, (10 + n) * US) for op in ("qkv", "o", "gate_up", "down") for n in (1, 101)]
    rows += [row(op, (2 + n / 10) * US, tokens=n) for op in ("norm", "rope", "act", "embedding") for n in (1, 101)]
    rows += [attention("prefill_attention", n * US, tokens=n, context_tokens=0) for n in (1, 64)]
    rows += [attention("decode_attention", b * (c - 1) * US, batch=b, context_tokens=c) for b in (1, 4) for c in (2, 33)]
    return rows


def device(rows):
    return TableDevice(TINY, GPU, tables_of(rows, TINY, GPU, FIT, "by hand"))


def test_a_step_is_measured_kernels_and_the_fits_head():
    d, fit = device(small_rows()), DeviceModel(TINY, GPU, FIT)
    # 40 prompt tokens beside 2 decodes after 20: 42 tokens through 4 GEMMs and 4 elementwise kernels; embedding, last norm once
    layer = 4 * (10 + 42) + 4 * (2 + 4.2) + (40 + 2 * 20)
    head_s = fit.kernel_seconds(head_kernels(TINY, 3)[1:])
    work = d.hybrid_work([(40, 0)], 2, 42, logits_seqs=3)
    assert work.seconds == pytest.approx((4 * layer + 2 * (2 + 4.2)) * US + head_s)
    assert d.source == ("table: gemm, rowwise by maker, prefill attention, decode attention by other, interpolated; "
                        "from the fit: LM head, attention to earlier chunks; mixed attention as prefill + decode; no sampler")


def test_earlier_chunks_add_what_the_fit_says():
    d, fit = device(small_rows()), DeviceModel(TINY, GPU, FIT)
    extra_s = [fit.solo_seconds(fit.prefill_work([(64, past)], 1, logits_seqs=0), 108) for past in (0, 256)]
    assert d.attention_seconds(64, 256, 0, 0) == pytest.approx(64 * US + extra_s[1] - extra_s[0])
    assert d.attention_seconds(64, 256, 0, 0) > 64 * US


def test_kernels_without_rows_come_from_the_fit_by_name():
    rows = [r for r in small_rows() if r["op"] not in ("norm", "rope")]
    d, fit = device(rows), DeviceModel(TINY, GPU, FIT)
    norm, rope = (next(k for k in dense_kernels(TINY, 101) if k.name == name) for name in ("norm", "rope"))
    assert "from the fit: LM head, attention to earlier chunks, norm, rope;" in d.source
    dense_s = 4 * (4 * 111 + 12.1) * US + 12.1 * US + 9 * fit.kernel_seconds([norm]) + 4 * fit.kernel_seconds([rope])
    assert d._dense_seconds(101) == pytest.approx(dense_s)


def test_a_measured_head_and_repeats():
    rows = [*small_rows(), *(row("gemm_lm_head", 7 * US * n, tokens=n, columns=TINY.vocab_size, inner=TINY.hidden_size)
                             for n in (1, 9))]
    rows += [gemm("o", 1, 13 * US), gemm("o", 1, 90 * US)]  # three repeats: the median, 13
    d = device(rows)
    assert "LM head" not in d.source
    plain = device(small_rows())
    assert d._head_seconds(5) == pytest.approx(35 * US)
    assert d._dense_seconds(1) - plain._dense_seconds(1) == pytest.approx(4 * 2 * US)


def test_a_shape_between_two_is_linear_and_none_beyond():
    rows = [row("gemm", (c / 100 + n) * US, tokens=n, columns=c, inner=64) for c in (100, 300) for n in (1, 5)]
    (counts, seconds), how = gemm_curve(rows, 150, 64)
    assert how == "between 100 and 300 columns"
    assert list(counts) == [1, 5]
    assert seconds == pytest.approx([2.5 * US, 6.5 * US])
    for columns, inner in ((90, 64), (301, 64), (150, 32)):
        with pytest.raises(ProfileError, match=f"no rows of a GEMM of {columns} columns and an inner size of {inner}"):
            gemm_curve(rows, columns, inner)


@pytest.mark.parametrize(("gone", "message"), [
    ("prefill_attention", "by hand: no rows of prefill attention with"),
    ("decode_attention", "by hand: no rows of decode attention with"),
    ("gemm", "by hand: no rows of GEMMs of 'maker'"),
])
def test_what_must_be_measured_is_asked_for(gone, message):
    with pytest.raises(ProfileError, match=message):
        device([r for r in small_rows() if not r["op"].startswith(gone)])


@pytest.mark.parametrize(("gpu", "attention", "gemms"), [("a100-80gb", "vllm 0.14.0", "vidur 2024 (fp16)"),
                                                         ("h100", "vllm 0.19.0", "sglang 0.5.10")])
def test_the_shipped_samples_give_back_their_own_points(gpu, attention, gemms):
    rows, _ = read_parquet(PROFILES / gpu / "llama-3.1-8b" / "samples.parquet")
    d = load_device(DeviceConfig(gpu=gpu, timing="table"))
    for op, batch, context in (("decode_attention", 32, 1024), ("decode_attention", 1, 4096), ("prefill_attention", 1, 2048)):
        own, = (r["median_s"] for r in rows if r["op"] == op and r["origin_version"] == attention and r["batch"] == batch
                and context == (r["context_tokens"] if op == "decode_attention" else r["tokens"]))
        asked = (0, 0, batch, context - 1) if op == "decode_attention" else (context, 0, 0, 0)
        assert d.attention_seconds(*asked) == pytest.approx(own)
    qkv = [r["median_s"] for r in rows if r["op"] == "gemm_qkv" and r["origin_version"] == gemms and r["tokens"] == 512]
    counts, seconds = d.tables.dense["qkv_proj"]
    assert seconds[list(counts).index(512)] == pytest.approx(np.median(qkv))
    assert "from the fit: LM head" in d.source
    # Not far from the fit, which was made of the same rows: a decode step and a prompt.
    fit = load_device(DeviceConfig(gpu=gpu))
    for step in ({"pieces": (), "num_seqs": 32, "context_tokens": 32_000, "logits_seqs": 32},
                 {"pieces": [(1024, 0)], "num_seqs": 0, "context_tokens": 0, "logits_seqs": 1}):
        assert d.hybrid_work(**step).seconds == pytest.approx(fit.solo_seconds(fit.hybrid_work(**step), fit.num_sms), rel=0.1)


def test_a_run_says_where_its_seconds_are_from_and_ends_where_tables_do(tmp_path, capsys):
    def run(*flags):
        return sim(["run", "--gpu", "a100-80gb", "--device-model", "table", "--policy", "vllm-1024", "--no-report", *flags])

    assert run("--num-requests", "5", "--rate", "1", "--out", str(tmp_path / "a")) == 0
    assert "from the fit: LM head, attention to earlier chunks" in " ".join(capsys.readouterr().out.split())
    assert run("--set", "workload.trace='azure-conv'", "--rate", "40", "--num-requests", "600", "--out", str(tmp_path / "b")) == 2
    error = capsys.readouterr().err.strip()
    assert "lies outside what was measured" in error.splitlines()[-1]
    assert "decodes of 511 at most" in error
    assert "Traceback" not in error
