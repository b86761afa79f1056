"""A publisher's folder as it lies on disk: told apart, its card and model named, scattered points, experts and shards served."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import DeviceConfig
from bullet.devices.grid import cell, filled, interpolated, laid_out
from bullet.devices.load import load_device
from bullet.devices.table import TableDevice, check_tables, read_tables, tables_from_rows
from bullet.devices.table_group import measured_curve
from bullet.errors import BulletError, ConfigError, ProfileError
from bullet.profiles.importers.folder import import_folder
from tests.test_table_device import US, row, small_rows

TINY = get_model("tiny")  # 4 layers, hidden 256, 4 heads and 2 KV heads of 64, intermediate 512, vocabulary 1,024
FOLDERS = Path(__file__).parents[2] / "shared" / "data" / "kernels" / "llmservingsim_folders"


# -------------------------------------------------------------------------------------------- scattered points


def test_two_grids_become_one_with_holes_filled_between_their_points():
    """x + 10 y at (0, 0), (0, 2), (2, 0), (2, 2) and at (1, 0), (1, 3), (2, 3): (1, 2) lies between points, (0, 3) beyond."""
    points = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 0), (1, 3), (2, 3)]
    axes, grid = laid_out(points, [x + 10 * y for x, y in points])
    full = filled(grid, axes)
    assert full[1, 1] == pytest.approx(1 + 20)
    assert math.isnan(full[0, 2])
    assert all(full[int(np.searchsorted(axes[0], x)), int(np.searchsorted(axes[1], y))] == x + 10 * y for x, y in points)
    assert interpolated(full, axes, (0.5, 1)) == pytest.approx(10.5)
    assert interpolated(full, axes, (0.75, 2.5)) == pytest.approx(25.75)  # on the triangle of (0, 2), (1, 2), (1, 3)
    assert math.isnan(interpolated(full, axes, (0.25, 2.5)))  # on its other side
    assert math.isnan(interpolated(full, axes, (0, 4)))


def test_a_full_grid_stays_as_it_is_and_a_cell_is_linear_on_each_axis():
    axes = (np.array([0.0, 1.0]), np.array([0.0, 4.0]))
    grid = np.array([[1.0, 3.0], [2.0, 7.0]])
    assert (filled(grid, axes) == grid).all()
    assert interpolated(grid, axes, (0.5, 1)) == pytest.approx(0.75 * 1.5 + 0.25 * 5)
    known = {(0, 0): 1.0, (1, 0): 2.0, (1, 1): 7.0}
    assert cell(lambda sides: known.get(sides, math.nan), (0.5, 0.25)) == pytest.approx(0.5 * 1 + 0.25 * 2 + 0.25 * 7)
    assert math.isnan(cell(lambda sides: known.get(sides, math.nan), (0.25, 0.5)))


def test_each_family_is_answered_inside_its_own_points_alone():
    """Of 4 decodes alone 48 keys were measured too, one beside a prompt ends at 32: what one family has, the other lacks."""
    rows = [*small_rows(), row("attention", (1 + 4 * 48) * US, attention=(0, 0, 4, 48)),
            row("attention", (1 + 48) * US, attention=(0, 0, 1, 48))]
    d = TableDevice(TINY, get_gpu("rtx4090"), tables_from_rows(rows, "by hand", "by hand"))
    assert d.attention_seconds(0, 0, 1, 40) == pytest.approx(41 * US)
    with pytest.raises(ProfileError, match="attention of 16 prompt tokens after 0, beside 1 decodes of 40 lies outside"):
        d.attention_seconds(16, 0, 1, 40)


# -------------------------------------------------------------------------------------------- experts, norms, shards


def moe_rows():
    """50 us for as many experts as one token visits, 100 us for twice as many; what a token adds is 1 us."""
    return [{"kernel": "moe", "tokens": n, "experts": e, "seconds": (50 * e / 2 + n) * US, "sequences": None}
            for n in (1, 2, 4, 8) for e in (2, 4, 8) if e <= 2 * n]


def test_experts_take_the_place_of_the_mlp_and_query_key_norms_come_once_a_layer():
    model = TINY.__class__("moe", 4, 256, 512, 4, 2, 64, 1024, 4096, num_experts=8, experts_per_token=2, qk_norm=True)
    rows = [r for r in small_rows() if r["kernel"] not in ("gate_up_proj", "act_fn", "down_proj")]
    rows += [row("qk_norm", 3 * US, tokens=n) for n in (1, 101)] + moe_rows()
    tables = tables_from_rows(rows, "by hand", "by hand")
    check_tables(tables, model, get_gpu("rtx4090"), "t")
    d = TableDevice(model, get_gpu("rtx4090"), tables)
    # 3 tokens touch 8 (1 - 0.75^3) = 4.625 of 8 experts: in the triangle of (2, 4), (4, 4), (4, 8), where all is linear.
    experts = 25 * 4.625 + 3
    dense = 5 * (1 + 0.3)  # two norms, qkv, rotary, o
    expected = 4 * (dense + 3 + experts) + 2 * (1 + 0.3) + 4 * (1 + 3 * 16) + 2 * 2 * 3
    assert d.decode_work(3, 3 * 17).seconds == pytest.approx(expected * US)
    assert "uniform routing: assumed" in d.source
    with pytest.raises(ProfileError, match="t: has qk_norm, which tiny has not"):
        check_tables(tables, TINY, get_gpu("rtx4090"), "t")


def test_an_all_reduce_is_read_between_measured_messages_of_one_source():
    rows = [{"op": "all_reduce", "kind": "solo", "num_gpus": g, "message_bytes": b, "origin_version": v, "median_s": s}
            for g, b, v, s in ((2, 1024.0, "a", 1e-5), (2, 4096.0, "a", 3e-5), (2, 4096.0, "a", 5e-5), (4, 1024.0, "b", 1.0),
                               (2, 1024.0, "b", 9e-5))]
    assert measured_curve(rows, 2, None) == ([1024.0, 4096.0], [1e-5, 4e-5], "a")
    assert measured_curve(rows, 2, "b") == ([1024.0], [9e-5], "b")
    assert measured_curve(rows, 8, None) is None


# -------------------------------------------------------------------------------------------- folders


def published(tmp_path: Path, *, heads: int = 4, degree: int = 1,
              gpu: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition") -> Path:
    """LLMServingSim's layout of a tiny model's shard."""
    folder = tmp_path / "perf" / "CARD" / "org" / "tiny" / "bf16"
    shard = folder / f"tp{degree}"
    shard.mkdir(parents=True)
    (folder / "meta.yaml").write_text(
        f"vllm_version: 0.19.0\ngpu: {gpu}\nhardware: CARD\nprofiled_at: '2026-04-24'\nmodel: org/tiny\nvariant: bf16\n"
        f"tp_degrees: [1, 2]\nengine_effective:\n  enforce_eager: true\n  hf_overrides:\n    num_attention_heads: {heads}\n"
        f"    vocab_size: {1024 * heads // 4}\nmeasurement_iterations: 3\n".replace("\\\n", "\n"))
    dense = [f"{name},{n},{5 + n / 100}" for name in ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn",
                                                      "down_proj", "embedding", "final_layernorm") for n in (1, 64, 256)]
    (shard / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]).replace("\\\n", "\n") + "\n")
    (shard / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "".join(
        f"{name},{n},{5 + n / 10}\n" for name in ("lm_head", "sampler") for n in (1, 16)))
    points = [(0, 0, n, k) for n in (1, 16) for k in (16, 256)] + [(c, p, 0, 0) for c in (16, 64) for p in (0, 128)]
    points += [(c, p, n, k) for c in (16, 64) for p in (0, 128) for n in (1, 16) for k in (16, 256)]
    (shard / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + "".join(
        f"{c},{p},{n},{k},{8 + c / 10 + p / 100 + n * k / 1000}\n" for c, p, n, k in points))
    return folder


def test_a_folder_of_another_card_and_model_serves(tmp_path: Path) -> None:
    found = import_folder(published(tmp_path), tmp_path / "out")
    assert (found.gpu.name, found.model.name) == ("rtxpro6000", "tiny")
    assert [path.name for path in found.written] == ["samples.parquet", "engine_tables.parquet"]
    assert {r["gpu"] for r in found.rows} == {"NVIDIA RTX PRO 6000 Blackwell Server Edition"}
    assert found.rows[0]["origin"] == "casys-kaist/LLMServingSim profiler/perf/CARD/org/tiny/bf16/tp1/dense.csv taken 2026-04-24"
    device = load_device(DeviceConfig(gpu="rtxpro6000", model="tiny", timing=str(tmp_path / "out")))
    seconds = device.solo_seconds(device.decode_work(1, 17), device.num_sms)
    assert seconds == pytest.approx((8 * 4 * 5.01 + 2 * 5.01 + 4 * (8 + 0.001 + 16 / 1000 - 0.001) + 2 * 5.1) * US)
    with pytest.raises(BulletError, match="is there: choose another --out"):
        import_folder(tmp_path / "perf", tmp_path / "out")


def test_a_shard_serves_with_an_all_reduce_that_is_labelled(tmp_path: Path) -> None:
    import_folder(published(tmp_path, heads=2, degree=2), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no tables for device.tensor_parallel = 1 in .* there are for 2"):
        load_device(DeviceConfig(gpu="rtxpro6000", model="tiny", timing=str(tmp_path / "out")))
    device = load_device(DeviceConfig(gpu="rtxpro6000", model="tiny", timing=str(tmp_path / "out"), tensor_parallel=2))
    assert isinstance(device, TableDevice)
    assert "all-reduce of 2 GPUs not measured" in device.source
    alone = TableDevice(TINY, device.gpu, read_tables(tmp_path / "out" / "engine_tables.tp2.parquet").__class__(
        **{**vars(device.tables), "tensor_parallel": 1}))
    counts, seconds = device.tables.dense["all_reduce"]
    more = device.decode_work(1, 17).seconds - alone.decode_work(1, 17).seconds
    assert more == pytest.approx(4 * 2 * float(np.interp(1, counts, seconds)))  # two in each of 4 layers


def test_experts_of_one_gpu_alone_leave_the_other_shards_out_by_name(tmp_path: Path) -> None:
    """As the public folder of Qwen3-30B-A3B: tp1 and tp2, experts in tp1 alone."""
    (tmp_path / "moe.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 1024, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}))
    folder = published(tmp_path)
    dense = (folder / "tp1" / "dense.csv").read_text().splitlines()
    kept = [line for line in dense if line.partition(",")[0] not in ("gate_up_proj", "act_fn", "down_proj")]
    (folder / "tp1" / "dense.csv").write_text("\n".join([*kept, *(f"qk_norm,{n},3" for n in (1, 64, 256))]) + "\n")
    shutil.copytree(folder / "tp1", folder / "tp2")
    with pytest.raises(ProfileError, match=r"no moe\.csv in any of its tp folders: a step of .* has experts"):
        import_folder(folder, tmp_path / "none", model=str(tmp_path / "moe.json"))
    (folder / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n" + "".join(
        f"{n},{e},{50 + e + n}\n" for n in (1, 4, 64, 256) for e in (2, 4, 8) if e <= 2 * n))
    found = import_folder(folder, tmp_path / "out", model=str(tmp_path / "moe.json"))
    assert [path.name for path in found.written] == ["samples.parquet", "engine_tables.parquet"]
    assert found.notes[0].startswith("tp2: no moe.csv, so no engine table")


def test_a_query_outside_is_refused_or_the_fits_as_configured(tmp_path: Path) -> None:
    import_folder(published(tmp_path), tmp_path / "out")
    config = {"gpu": "rtxpro6000", "model": "tiny", "timing": str(tmp_path / "out")}
    with pytest.raises(ProfileError, match=r"lies outside what was measured .* device.table_outside=fit"):
        load_device(DeviceConfig(**config)).decode_work(1, 1000)
    device = load_device(DeviceConfig(**config, table_outside="fit"))
    assert isinstance(device, TableDevice)
    assert device.outside is not None
    inside = device.decode_work(1, 17).seconds
    beyond = device.decode_work(1, 1000).seconds
    within = 4 * device.attention_seconds(0, 0, 1, 16)
    assert beyond == pytest.approx(inside - within + device.outside.attention_seconds((), 1, 1000))
    assert device.by_fit == {"attention": 1}
    assert "1 attention queries" in device.source


@pytest.mark.parametrize(("options", "change", "message"), [
    ({"gpu": "h100"}, {}, r"measured on NVIDIA RTX PRO 6000 .*, not on --gpu h100"),
    ({"model": "llama-3.1-8b"}, {}, "another model's table"),
    ({}, {"gpu": "Matrox G400"}, "unknown device 'Matrox G400'"),
])
def test_another_card_or_model_is_refused_and_nothing_is_written(tmp_path, options, change, message):
    with pytest.raises(ProfileError, match=message):
        import_folder(published(tmp_path, **change), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_card_of_ones_own_stands_for_the_folders(tmp_path: Path) -> None:
    (tmp_path / "card.toml").write_text(
        'name = "g400"\nnum_sms = 40\npeak_bf16_tflops = 100\nmem_gb_per_s = 900\nmem_gib = 48\ncompute_capability = [9, 0]\n'
        'source = "by hand"\n')
    found = import_folder(published(tmp_path, gpu="Matrox G400"), tmp_path / "out", gpu=str(tmp_path / "card.toml"))
    assert {(r["gpu"], r["device_sms"]) for r in found.rows} == {("g400", 40)}


def test_what_is_no_publishers_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no tables that are known"):
        import_folder(tmp_path, tmp_path / "out")
    published(tmp_path)
    (tmp_path / "perf/CARD/org/other/bf16/tp1").mkdir(parents=True)
    for name in ("meta.yaml", "tp1/dense.csv"):
        (tmp_path / "perf/CARD/org/other/bf16" / name).write_text("x")
    with pytest.raises(ProfileError, match="holds 2 profiles: give one of them"):
        import_folder(tmp_path / "perf", tmp_path / "out")


@pytest.mark.skipif(not FOLDERS.is_dir(), reason="the measured tables are not here")
def test_the_public_folders_are_read_as_published(tmp_path: Path) -> None:
    """A point of the x1.5 grid, one of the x2 grid, and what lies between them; experts; a shard of two."""
    import_folder(FOLDERS / "RTXPRO6000" / "Qwen" / "Qwen3-32B", tmp_path / "q")
    tables = read_tables(tmp_path / "q" / "engine_tables.tp2.parquet")
    d = TableDevice(get_model("qwen3-32b"), get_gpu("rtxpro6000"), tables.__class__(**{
        **vars(tables), "dense": {**tables.dense, "all_reduce": (np.array([0.0, 1e6]), np.zeros(2))}}))
    published_us = {}
    for line in (FOLDERS / "RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2/attention.csv").read_text().splitlines()[1:]:
        *key, us = line.split(",")
        published_us[tuple(map(int, key))] = float(us)
    for point in ((24, 512, 4, 768), (32, 16, 4, 16), (0, 0, 1, 16), (2048, 13122, 0, 0), (16, 0, 128, 16384)):
        assert d.attention_seconds(*point) == pytest.approx(published_us[point] * 1e-6, rel=1e-12)
    low, high = d.attention_seconds(16, 16, 4, 16), d.attention_seconds(32, 16, 4, 16)
    assert d.attention_seconds(24, 16, 4, 16) == pytest.approx((low + high) / 2)  # 24 has no past of 16: between 16 and 32


def test_a_number_that_is_none_is_named_with_its_row(tmp_path: Path) -> None:
    folder = published(tmp_path)
    path = folder / "tp1" / "moe.csv"
    path.write_text("tokens,activated_experts,time_us\n1,2,nan\n")
    with pytest.raises(ProfileError, match=r"moe.csv: row 0: time_us"):
        import_folder(folder, tmp_path / "out")


def test_single_kernels_of_the_other_publishers_by_their_repositorys_paths(tmp_path: Path) -> None:
    """AIConfigurator: a GEMM of the model's, two around one that was not timed, one beside the point. Vidur: its one topology."""
    table = tmp_path / "aic" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.19.0" / "gemm_perf.txt"
    table.parent.mkdir(parents=True)
    shapes = [(4096, 4096), (16384, 4096), (32768, 4096), (4096, 512)]
    table.write_text("framework,version,device,gemm_dtype,m,n,k,latency\n" + "".join(
        f"VLLM,0.19.0,NVIDIA H100 80GB HBM3,bfloat16,{m},{n},{k},{0.05 + m * n * k * 4e-12}\n"
        for n, k in shapes for m in (64, 128)))
    found = import_folder(tmp_path / "aic", tmp_path / "a", model="llama-3.1-8b")
    assert found.gpu.name == "h100"
    assert {(r["op"], r["columns"], r["inner"]) for r in found.rows} == {
        ("gemm_o", 4096, 4096), ("gemm", 16384, 4096), ("gemm", 32768, 4096)}
    # qkv (6,144 columns) lies between 4,096 and 16,384, gate_up (28,672) between 16,384 and 32,768.
    assert found.rows[0]["origin"].split()[1] == "h100_sxm/gemm/vllm/0.19.0/gemm_perf.txt"
    for topology, milliseconds in (("a100_dgx", 0.05), ("a100_pairwise_nvlink", 0.5)):
        path = tmp_path / "vidur" / "data" / "profiling" / "network" / topology / "all_reduce.csv"
        path.parent.mkdir(parents=True)
        path.write_text("time_stats.all_reduce.median,num_workers,size,devices_per_node\n"
                        + "".join(f"{milliseconds},2,{size},2\n" for size in (2048, 4096)))
    found = import_folder(tmp_path / "vidur", tmp_path / "v", model="llama-3.1-8b")
    assert found.gpu.name == "a100-80gb"
    # Beside a card that is not known here, the one that is asked for.
    unknown = tmp_path / "vidur" / "data" / "profiling" / "network" / "a40_dgx"
    shutil.copytree(unknown.with_name("a100_dgx"), unknown)
    beside = import_folder(tmp_path / "vidur", tmp_path / "b", model="llama-3.1-8b", gpu="a100")
    assert [(r["op"], r["median_s"]) for r in beside.rows] == [(r["op"], r["median_s"]) for r in found.rows]
    assert [(r["op"], r["num_gpus"], r["message_bytes"], r["median_s"]) for r in found.rows] == [
        ("all_reduce", 2, 2048.0, pytest.approx(5e-5)), ("all_reduce", 2, 4096.0, pytest.approx(5e-5))]
