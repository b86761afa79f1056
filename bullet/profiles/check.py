"""What a table of samples may hold: :func:`check_samples` refuses, with its row, what no GPU could have measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bullet.catalog.gpus import BYTES_SLACK, FLOOR_S, GPUS, PEAK_SLACK, UNIT_FACTOR, GpuSpec, get_gpu, plain
from bullet.errors import ConfigError, ProfileError
from bullet.profiles.rows import ENGINE_OPS, ENGINE_PHASES, KINDS, SOURCES

A100, A800, H100, RTX4090 = "NVIDIA A100 80GB", "NVIDIA A800 80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
DEVICES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    A100: "a100-80gb",
    A800: "a100-80gb",  # A100's silicon and HBM with less NVLink
    H100: "h100",
    "NVIDIA H200": "h200",
    RTX4090: "rtx4090",
}
"""Device names as tables give them -> our GPU, beside the catalog's own names. Another is refused, never guessed."""
LEAST_S = 0.2e-6
"""No kernel is launched and done sooner: a value below is in another unit."""
SHAPE = ("tokens", "batch", "context_tokens", "decode_seqs", "decode_context_tokens", "columns", "inner", "heads", "kv_heads",
         "head_dim", "num_gpus", "message_bytes")
"""Columns that make a row's identity, beside version and operation."""
KNOWN_OPS = ("gemm", "prefill_attention", "cudnn_prefill_attention", "decode_attention", "paged_decode_attention",
             "mixed_attention", "norm", "qk_norm", "rope", "act", "embedding", "sampler", "copy", "all_reduce")
SAME = ("kind", "op", *SHAPE, "backend", "partition", "lane", "unit", "sms", "split_prefill_sms", "split_decode_sms", "corunner",
        "corunner_tokens", "corunner_batch", "corunner_context_tokens", "corunner_sms", "origin_version", "model", "dtype")
"""Two rows of one table that agree in these measured the same thing, whatever their ids say."""
REPEAT = "|repeat "
"""What numbers a measurement's further times in its id."""
WIDEST_SPREAD = 4.0
"""Repeats of any publisher's, at most: times of 3 us and up in whole microseconds."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "gemm": ("tokens", "columns", "inner"), "norm": ("tokens", "bytes"), "rope": ("tokens", "bytes"), "act": ("tokens", "bytes"),
    "embedding": ("tokens", "bytes"), "prefill_attention": ("tokens", "batch", "context_tokens", "flops", "bytes"),
    "decode_attention": ("batch", "context_tokens", "bytes"), "all_reduce": ("num_gpus", "message_bytes", "bytes")}
"""What a fit reads of an operation's rows; GEMMs that carry a name of the model's need ``tokens`` alone."""


def gpu_of(name: str, where: str, card: GpuSpec | None = None) -> GpuSpec:
    """Our GPU for a device name; "simulated <gpu>" is that of the simulator's samples, whose ``source`` says so. ``card``: one
    that the user gave, which its own name and aliases mean."""
    name = name.removeprefix("simulated ")
    if card is not None and plain(name) in {plain(card.name), *map(plain, card.aliases)}:
        return card
    if name in DEVICES:
        return get_gpu(DEVICES[name])
    try:
        return get_gpu(name) if not name.endswith(".toml") else GPUS[name]
    except (ConfigError, KeyError):
        raise ProfileError(f"{where}: unknown device {name!r}: known are {', '.join(DEVICES)} and the names of --gpu "
                           f"({', '.join(GPUS)}); another card's data sheet goes to --gpu CARD.toml") from None


def is_card(name: str, card: GpuSpec) -> bool:
    """Whether a device name is that card's; one that is not known is another's."""
    try:
        return gpu_of(name, name, card) is card
    except ProfileError:
        return False


def roofline_s(row: Mapping[str, Any], gpu: GpuSpec) -> float:
    """Least seconds that the data sheet allows for the row's SMs' share of compute and all of memory."""
    flops, moved = row["flops"] or 0.0, row["bytes"] or 0.0
    if row["op"] == "all_reduce":
        return float(moved / gpu.link_bytes_per_s)
    share = row["sms"] / row["device_sms"]
    # Fewer SMs clock higher, but no part of a chip does the whole chip's work.
    return float(max(flops / (gpu.peak_flops * min(1.0, 2 * share)), (moved - gpu.l2_bytes) / gpu.mem_bytes_per_s, 0.0))


def check_samples(rows: Sequence[Mapping[str, Any]], *, min_neighbours: int = 4, card: GpuSpec | None = None) -> GpuSpec:
    """The one GPU that all rows were measured on (``card``: as for :func:`gpu_of`).

    :class:`ProfileError`, naming the row, for: mixed GPUs or sources, a repeated measurement that is not numbered as one, no
    time at all, a count that is absent or negative, a rate above the data sheet's, and a value ``UNIT_FACTOR`` off its
    neighbours (same origin and operation) or its roofline.
    """
    if not rows:
        raise ProfileError("no samples")
    gpu = gpu_of(str(rows[0]["gpu"]), name_of(rows[0]), card)
    seen: dict[str, Mapping[str, Any]] = {}
    alike: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    groups: dict[tuple[Any, ...], list[tuple[float, Mapping[str, Any]]]] = {}
    for row in rows:
        if row["gpu"] != rows[0]["gpu"] and gpu_of(str(row["gpu"]), name_of(row), card) is not gpu:
            raise ProfileError(f"{name_of(row)}: measured on {row['gpu']}, others on {rows[0]['gpu']}: one GPU a table")
        if row["source"] != rows[0]["source"]:
            raise ProfileError(f"{name_of(row)}: source {row['source']!r}, others {rows[0]['source']!r}: one kind a table")
        if row["kind"] != "anchor" and row["id"] in seen:
            raise ProfileError(f"{name_of(row)} repeats row {_place(seen[row['id']])}: {row['id']}")
        seen[row["id"]] = row
        check_place(row, gpu)
        if not row["median_s"] > 0:
            raise ProfileError(f"{name_of(row)}: {row['median_s']} s: must be positive")
        if row["kind"] != "anchor":
            check_repeat(row, alike.setdefault(_key(row), row))
        check_counts(row)
        if row["op"] != "all_reduce":  # small ones stay in caches, whatever the link
            check_peak(row, gpu)
        seconds = roofline_s(row, gpu) + FLOOR_S
        groups.setdefault((row["origin"], row["op"], row["sms"]), []).append((row["median_s"] / seconds, row))
    for found in groups.values():
        middle = statistics.median(ratio for ratio, _ in found)
        for ratio, row in found:
            if len(found) >= min_neighbours and not 1 / UNIT_FACTOR < ratio / middle < UNIT_FACTOR:
                raise ProfileError(f"{name_of(row)}: {row['median_s']:.3g} s is {_times(ratio / middle)} its neighbours' for its "
                                   "work: another unit?")
            if ratio > UNIT_FACTOR:
                raise ProfileError(f"{name_of(row)}: {row['median_s']:.3g} s is {_times(ratio)} what {gpu.name}'s data sheet "
                                   "allows: another unit?")
    for row in rows:
        if row["median_s"] < LEAST_S:
            raise ProfileError(f"{name_of(row)}: {row['median_s']:.3g} s: no kernel takes less than {LEAST_S:g} s: another unit?")
    return gpu


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    # A layer's norms have one shape and are several kernels: their names end the id.
    kernel = row["id"].partition(REPEAT)[0].rpartition("|")[2] if row["op"] == "norm" else None
    # A cell's windows alone are taken twice on purpose, and what cuBLAS was told or how lanes share makes another measurement.
    return (*(row[name] for name in SAME), kernel, "|told" in row["id"],
            *(row.get(name) for name in ("cell", "step", "sharing", "cublas_sms")))


def check_repeat(row: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse a row that measures what ``first`` does, unless it is numbered as a repeat of it and not too far from it."""
    if row is first:
        return
    times = f"{first['median_s'] * 1e6:.6g} and {row['median_s'] * 1e6:.6g} us"
    if row["id"].partition(REPEAT)[0] != first["id"].partition(REPEAT)[0]:
        raise ProfileError(f"{name_of(row)} measures what row {_place(first)} does ({times}) under another id, {row['id']!r}: "
                           f"leave one out, or number it {first['id'] + REPEAT + '2'!r}")
    if max(row["median_s"], first["median_s"]) > WIDEST_SPREAD * min(row["median_s"], first["median_s"]):
        raise ProfileError(f"{name_of(row)} repeats row {_place(first)}: {times} are further apart than repeats can be")


def check_place(row: Mapping[str, Any], gpu: GpuSpec) -> None:
    """Refuse a kind or source that is none, an operation that nobody knows, and SMs that the device has not."""
    for name, allowed in (("kind", KINDS), ("source", SOURCES)):
        if row[name] not in allowed:
            raise ProfileError(f"{name_of(row)}: {name} = {row[name]!r}: must be {', '.join(allowed)}")
    op = row["op"]
    if op not in (*KNOWN_OPS, *ENGINE_OPS, *ENGINE_PHASES) and not op.startswith("gemm_") and not op.endswith("_layer"):
        raise ProfileError(f"{name_of(row)}: op = {op!r}: must be gemm_*, *_layer, {', '.join(KNOWN_OPS)}")
    if row["device_sms"] != gpu.num_sms:
        raise ProfileError(f"{name_of(row)}: device_sms = {row['device_sms']}: {gpu.name} has {gpu.num_sms}")
    if not 1 <= row["sms"] <= gpu.num_sms:
        raise ProfileError(f"{name_of(row)}: sms = {row['sms']}: must be 1 to {gpu.num_sms}")


def check_counts(row: Mapping[str, Any]) -> None:
    """Refuse a row without a count that a fit reads, or with one that no measurement has."""
    op = row["op"]
    needed = ("tokens",) if op.startswith("gemm_") else NEEDED.get(op, ())
    for name in dict.fromkeys((*needed, *SHAPE, "flops", "bytes")):
        value, least = row[name], 0 if name in ("context_tokens", "decode_context_tokens", "flops", "bytes") else 1
        if value is None and name in needed:
            raise ProfileError(f"{name_of(row)}: {name} is missing: {op} needs {', '.join(needed)}")
        if value is not None and value < (least if name in needed else 0):
            raise ProfileError(f"{name_of(row)}: {name} = {value:g}: must be {least if name in needed else 0} or more")
    if op.startswith("gemm") and None not in (found := [row[name] for name in ("tokens", "columns", "inner", "flops")]):
        m, n, k, flops = found
        if not math.isclose(flops, 2.0 * m * n * k, rel_tol=1e-6):
            raise ProfileError(f"{name_of(row)}: {flops:.6g} flops, but {m} x {n} x {k} are {2.0 * m * n * k:.6g}: one is wrong")


def check_peak(row: Mapping[str, Any], gpu: GpuSpec) -> None:
    """Refuse a row that beats the data sheet."""
    seconds, flops, moved = row["median_s"], row["flops"] or 0.0, row["bytes"] or 0.0
    if flops > PEAK_SLACK * gpu.peak_flops * seconds:
        raise ProfileError(f"{name_of(row)}: {flops / seconds / 1e12:.4g} TFLOPS is above {gpu.name}'s peak of "
                           f"{gpu.peak_flops / 1e12:.4g}: another unit or device?")
    if moved > BYTES_SLACK * gpu.mem_bytes_per_s * seconds + gpu.l2_bytes:
        raise ProfileError(f"{name_of(row)}: {moved / seconds / 1e9:.4g} GB/s is above {gpu.name}'s peak of "
                           f"{gpu.mem_bytes_per_s / 1e9:.4g}: another unit or device?")


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 1 else f"1/{1 / ratio:.0f} of"


def name_of(row: Mapping[str, Any]) -> str:
    """A row as errors call it: whose, where in its file, of what."""
    place = str(row.get("origin") or row["gpu"]).split()
    whose = place[1] if row.get("origin") and len(place) > 1 else " ".join(place)
    return f"{whose}: row {_place(row)} ({row['op']})"


def _place(row: Mapping[str, Any]) -> Any:
    return row["id"] if row["order"] is None else row["order"]
