"""The table device: a grid small enough to interpolate by hand, and the shipped RTX 4090 tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.config import DeviceConfig
from bullet.devices import PROFILES
from bullet.devices.load import load_device
from bullet.devices.table import (
    ATTENTION_AXES,
    HEAD_KERNELS,
    LAYER_KERNELS,
    ONCE_KERNELS,
    TableDevice,
    check_tables,
    read_tables,
    table_path,
    tables_from_rows,
)
from bullet.errors import ConfigError, ProfileError
from tests import worlds

US = 1e-6
TINY = MODELS["tiny"]  # 4 layers


def row(kernel, seconds, tokens=None, sequences=None, attention=(None,) * 4):
    return {"kernel": kernel, "tokens": tokens, "sequences": sequences, "seconds": seconds,
            **dict(zip(ATTENTION_AXES, attention, strict=True))}


def small_rows():
    """Dense: 1 us + 1 us per 10 tokens, each kernel. Head: 2 us a request. Attention as below, decodes at 16 and 32 keys."""
    rows = [row(k, 1 * US + n * US / 10, tokens=n) for k in (*LAYER_KERNELS, *ONCE_KERNELS) for n in (1, 11, 101)]
    rows += [row(k, 2 * US * n, sequences=n) for k in HEAD_KERNELS for n in (1, 8)]
    for pc in (0, 16, 64):
        for kp in (0, 100) if pc else (0,):
            for nd in (0, 1, 4):
                if not pc and not nd:
                    continue
                if pc and nd == 4:
                    continue  # the hole beside a prefill
                for kd in (16, 32) if nd else (0,):
                    rows.append(row("attention", (1 + pc + kp / 10 + nd * kd) * US, attention=(pc, kp, nd, kd)))
    return rows


def device():
    return TableDevice(TINY, GPUS["rtx4090"], tables_from_rows(small_rows(), "by hand", "by hand"))


def test_each_axis_is_linear_between_measured_points():
    d = device()
    assert d.attention_seconds(40, 50, 1, 24) == pytest.approx((1 + 40 + 5 + 24) * US)  # bilinear pieces sum up
    assert d.attention_seconds(0, 0, 2, 16) == pytest.approx((1 + 16 + (64 - 16) / 3) * US)  # a third of the way from 1 to 4
    assert d.attention_seconds(8, 0, 1, 16) == pytest.approx((1 + 8 + 16) * US)  # between no prefill and one of 16
    assert d.attention_seconds(8, 100, 1, 16) == pytest.approx((1 + 8 + 5 + 16) * US)  # no prefill has no past: 0 there
    assert d.attention_seconds(64, 100, 0, 0) == pytest.approx((1 + 64 + 10) * US)
    assert d.clamped == 0


def test_a_step_is_dense_plus_attention_plus_head():
    d = device()
    dense = 8 * 4 * (1 + 0.7) + 2 * (1 + 0.7)  # 8 kernel runs in each of 4 layers, 2 once, at 7 tokens
    assert d.decode_work(2, 2 * 17).seconds == pytest.approx(
        ((8 * 4 + 2) * (1 + 0.2) + 4 * (1 + 16 + 16) + 2 * 2 * 2) * US)
    # one piece of 6 tokens after 10 and one decode after 16
    work = d.hybrid_work([(6, 10)], 1, 17, logits_seqs=2)
    # one prefill of 6 after 10: linear in pc from 0 (no past there) to 16
    attention = (1 + 6 + 6 / 16 * 1 + 16)
    assert work.seconds == pytest.approx((dense + 4 * attention + 2 * 2 * 2) * US)
    assert d.solo_seconds(work, 128) == work.seconds


def test_several_prefills_become_one_with_as_many_pairs():
    d = device()
    # 20 and 20 tokens with no past: pairs 400, a single prompt of sqrt(800) tokens, though 40 go through the dense kernels
    two = d.hybrid_work([(20, 0), (20, 0)], 0, 0, logits_seqs=2).seconds
    attention = 1 + 800 ** 0.5
    assert two == pytest.approx(((8 * 4 + 2) * 5.0 + 4 * attention + 2 * 2 * 2) * US)
    # 20 after 60 and 20 after 0: pairs 20 * 70 + 20 * 10 = 1,600 = 40 * (kp + 20): one of 40 after 20
    both = d.hybrid_work([(20, 60), (20, 0)], 0, 0, logits_seqs=2).seconds
    assert both == pytest.approx(((8 * 4 + 2) * 5.0 + 4 * (1 + 40 + 2) + 8) * US)


def test_a_piece_of_one_token_is_a_decode():
    d = device()
    assert d.hybrid_work([(1, 16)], 0, 0, logits_seqs=1).seconds == d.decode_work(1, 17).seconds


def test_outside_the_tables_is_refused_with_the_range():
    d = device()
    for call in (lambda: d.decode_work(5, 5 * 20), lambda: d.decode_work(1, 40),
                 lambda: d.hybrid_work([(200, 0)], 0, 0, logits_seqs=1), lambda: d.hybrid_work([(64, 500)], 0, 0, logits_seqs=1),
                 lambda: d.hybrid_work([(30, 0)], 3, 60, logits_seqs=4), lambda: d.decode_work(9, 9 * 20)):
        with pytest.raises(ProfileError, match="outside what was measured"):
            call()
    with pytest.raises(ProfileError, match=r"up to 64 after 100, and 4 decodes \(1 beside a prefill\) of 32\)"):
        d.hybrid_work([(30, 0)], 3, 60, logits_seqs=4)


def test_a_hole_is_refused_with_what_was_measured_there():
    """Four decodes were measured at 16 keys only, one at 32 too."""
    rows = [r for r in small_rows() if r["kernel"] != "attention" or r["decode_sequences"] < 4 or r["kv_decode_tokens"] == 16]
    d = TableDevice(TINY, GPUS["rtx4090"], tables_from_rows(rows, "by hand", "by hand"))
    assert d.decode_work(3, 3 * 17).seconds > 0
    with pytest.raises(ProfileError, match=r"4 decodes \(1 beside a prefill\) of 32; 4 decodes of 16 at most"):
        d.decode_work(3, 3 * 25)


def test_the_lower_rim_is_clamped_and_counted():
    d = device()
    assert d.attention_seconds(0, 0, 1, 3) == d.attention_seconds(0, 0, 1, 16)
    assert d.attention_seconds(5, 0, 0, 0) == d.attention_seconds(16, 0, 0, 0)
    assert d.clamped == 2


def test_counts_below_the_first_measured_are_refused_too():
    """A kernel that was measured from 11 tokens on says nothing of 5; likewise the head from 2 requests on."""
    rows = [r for r in small_rows() if not (r["kernel"] == "qkv_proj" and r["tokens"] == 1)]
    rows += [row("lm_head", 3 * US, sequences=2)]
    rows = [r for r in rows if not (r["kernel"] == "lm_head" and r["sequences"] == 1)]
    d = TableDevice(TINY, GPUS["rtx4090"], tables_from_rows(rows, "by hand", "by hand"))
    with pytest.raises(ProfileError, match=r"a step of 5 tokens lies outside what was measured \(11 to 101 tokens a step\)"):
        d.hybrid_work([(5, 0)], 0, 0, logits_seqs=0)
    with pytest.raises(ProfileError, match=r"logits of 1 requests lies outside what was measured \(2 to 8\)"):
        d.hybrid_work([(20, 0)], 0, 0, logits_seqs=1)
    assert d.hybrid_work([(20, 0)], 0, 0, logits_seqs=2).seconds > 0
    assert d.min_prefill_seconds(20) > 0


@pytest.mark.parametrize(("times", "message"), [(1e-3, "is faster than what rtx4090's data sheet allows"),
                                                (1e3, "a hundred times what rtx4090's data sheet allows")])
def test_a_whole_table_in_other_units_is_refused(times, message):
    model, gpu = MODELS["llama-3.1-8b"], GPUS["rtx4090"]
    shipped = read_tables(table_path(PROFILES / gpu.name / model.name))
    check_tables(shipped, model, gpu, "t.parquet")
    other = dataclasses.replace(shipped, dense={name: (n, s * times) for name, (n, s) in shipped.dense.items()})
    with pytest.raises(ProfileError, match=rf"t.parquet: qkv_proj: .* {message}"):
        check_tables(other, model, gpu, "t.parquet")


@pytest.mark.parametrize(("change", "message"), [
    (lambda rows: rows.append(rows[0]), "twice"),
    (lambda rows: rows.append(row("attention", 7.0, attention=(0, 0, 1, 64))), "between 0 and 1 s"),
    (lambda rows: rows.append(row("attention", float("nan"), attention=(0, 0, 1, 64))), "between 0 and 1 s"),
    (lambda rows: rows.append(row("mystery", US, tokens=1)), "mystery"),
    (lambda rows: rows.append(row("qkv_proj", US, tokens=-4)), "whole numbers"),
    (lambda rows: rows.clear(), "needs 2 rows"),
    (lambda rows: rows.append(row("qkv_proj", 3e-3, tokens=7)), r"qkv_proj: .*\(7.0,\).*hundred times apart"),
    (lambda rows: rows.append(row("attention", 0.5, attention=(0, 0, 1, 64))), "attention: .*hundred times apart"),
])
def test_bad_rows_are_refused_by_name(change, message):
    rows = small_rows()
    change(rows)
    with pytest.raises(ProfileError, match=message):
        tables_from_rows(rows, "by hand", "by hand")


def test_the_shipped_tables_give_back_their_own_points():
    tables = read_tables(table_path(PROFILES / "rtx4090" / "llama-3.1-8b"))
    d = load_device(DeviceConfig(gpu="rtx4090", timing="table"))
    for i, j, k, m in ((3, 4, 5, 6), (0, 0, 9, 11), (8, 11, 8, 11), (1, 0, 0, 0), (8, 3, 1, 1)):
        at = [float(axis[x]) for axis, x in zip(tables.axes, (i, j, k, m), strict=True)]
        assert d.attention_seconds(at[0], at[1], int(at[2]), at[3]) == pytest.approx(tables.attention[i, j, k, m], rel=1e-12)
    # A decode step reads 16 GB of weights at 1 TB/s: no less, and not twice as long.
    assert 0.0149 < d.decode_work(1, 100).seconds < 0.03
    assert np.all(np.diff([d.decode_work(n, 500 * n).seconds for n in (1, 16, 64, 128, 256)]) > 0)


def test_table_mode_serves_one_lane_policies_and_refuses_the_rest():
    rows = [(0.0, 600, 5), (0.01, 900, 4)]
    done = worlds.run("vllm-1024", rows, device=load_device(DeviceConfig(gpu="rtx4090", timing="table")),
                      device__gpu="rtx4090", device__timing="table")
    assert (done.requests["status"] == "finished").all()
    assert done.device["source"].startswith("table: ")
    for policy in ("bullet", "naive", "static-96"):
        with pytest.raises(ConfigError, match="one-lane policy"):
            worlds.run(policy, rows, device=load_device(DeviceConfig(gpu="rtx4090", timing="table")), device__gpu="rtx4090",
                       device__timing="table")
    with pytest.raises(ConfigError, match=r"no measured tables of .* on h200 .* a100-80gb with llama-3.1-8b, h100 with"):
        load_device(DeviceConfig(gpu="h200", timing="table"))
    with pytest.raises(ConfigError, match="tensor_parallel = 2"):
        load_device(DeviceConfig(gpu="rtx4090", timing="table", tensor_parallel=2))
