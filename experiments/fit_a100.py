"""Fit the A100-80GB device: ``python experiments/fit_a100.py [--data DIR] [--out DIR]``.

Reads public kernel tables (see profiles/a100-80gb/llama-3.1-8b/SOURCE.md), fits on every other token count and reports
errors on the rest, then fits again on all rows for the coefficients that ship. Nothing is fitted to serving results.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from bullet import fit
from bullet.config import ModelSpec, get_gpu, get_model
from bullet.device import DeviceCoefficients, DeviceModel
from bullet.errors import BulletError, ProfileError
from bullet.work import dense_kernels, embedding_bytes

GPU, MODEL = get_gpu("a100-80gb"), get_model("llama-3.1-8b")
VIDUR_GEMMS = {"attn_pre_proj": "qkv", "attn_post_proj": "o", "mlp_up_proj": "gate_up", "mlp_down_proj": "down"}
# Vidur's norms are not fused with the residual; engines fuse it today. No row measures the fused kernel: it is taken to
# last as long as Vidur's norm (its bytes, four hidden states, at the share that gives this time), and Vidur's separate
# "add" is left out.
VIDUR_ROWS = {"input_layernorm": "norm", "post_attention_layernorm": "norm", "attn_rope": "rope", "mlp_act": "act",
              "emb": "embedding"}


PARAMETERS = {"gemm": 7, "rowwise": 5, "prefill_attention": 3, "decode_attention": 3, "all_reduce": 2,
              "bandwidth_against_sms": 2, "rate_against_sms": 2}
ASSUMED = ["contention_loss 0.2", "host_gap_s 0", "qk_norm bandwidth (as norm)",
           "lm_head extrapolates the GEMM family (128256 columns: no measured row)",
           "norm with fused residual lasts as long as the unfused norm that was measured",
           "every family follows attention's curve of bandwidth against SMs", "the sampler costs nothing: no measured row"]


def median_of(table: dict[str, list[float]], column: str, keep: np.ndarray) -> np.ndarray:
    return np.array(table[f"time_stats.{column}.median"])[keep] * 1e-3


def split(tokens: np.ndarray) -> np.ndarray:
    """True for rows to fit on: every other distinct token count."""
    return np.searchsorted(np.unique(tokens), tokens) % 2 == 0


def vidur(data: Path) -> tuple[np.ndarray, dict[str, list[float]], np.ndarray]:
    table = pq.read_table(data / "kernels/vidur/a100__Meta-Llama-3-8B__mlp.parquet").to_pydict()
    keep = np.array(table["num_tensor_parallel_workers"]) == 1
    return np.array(table["num_tokens"])[keep], table, keep


def attention_rows(data: Path, source: str, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = pq.read_table(data / f"kernels/aiconfigurator/a100_sxm__{source}__{kind}_attention_perf.parquet").to_pylist()
    rows = [r for r in rows if (r["num_heads"], r["num_key_value_heads"], r["head_dim"]) == (32, 8, 128)]
    length = "isl" if kind == "context" else "step"
    rows.sort(key=lambda r: (r["batch_size"], r[length]))
    return (np.array([float(r["batch_size"]) for r in rows]), np.array([float(r[length]) for r in rows]),
            np.array([r["latency"] * 1e-3 for r in rows]))


# What MuxServe ran: multi-head attention, no GQA (public config.json of each).
SWEPT = {"7b": ModelSpec("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, 2048),
         "13b": ModelSpec("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, 2048)}
PERCENTS = (30, 40, 50, 60, 70, 80, 90)
Sweep = dict[tuple[int, int], dict[int, float]]
"""(batch, sequence length) -> MPS percent of SMs -> seconds."""


def sweep(data: Path, size: str, phase: str) -> Sweep:
    """Shapes that MuxServe measured at every share of SMs."""
    with gzip.open(data / "unlicensed/muxserve_a100_80gb_mps_sweep_7b_13b_tp1.csv.gz", "rt") as file:
        rows = [r for r in csv.DictReader(file) if r["model"].endswith("-" + size) and float(r[f"{phase}_ms"]) > 0]
    found: Sweep = {}
    for r in rows:
        found.setdefault((int(r["batch_size"]), int(r["seq_len"])), {})[int(float(r["mps_sm_percent"]))] = \
            float(r[f"{phase}_ms"]) * 1e-3
    return {shape: times for shape, times in sorted(found.items()) if len(times) == len(PERCENTS) + 1}


def attention_bandwidth(decode: Sweep) -> np.ndarray:
    """KV bandwidth at each share relative to all SMs: a long context's step less a short one's, same batch.

    The difference is attention alone: weights, sampling and the host's time cancel.
    """
    relative = []
    for batch in sorted({b for b, _ in decode if b >= 32}):  # below, the difference is a millisecond and rounding shows
        short, *_, long = sorted(length for b, length in decode if b == batch)
        more = {p: decode[batch, long][p] - decode[batch, short][p] for p in (*PERCENTS, 100)}
        relative.append([more[100] / more[p] for p in PERCENTS])
    return np.median(np.array(relative), axis=0)


def stretch_of(device: DeviceModel, shapes: list[tuple[int, int]], decode: bool = False) -> np.ndarray:
    """Simulated seconds at each share relative to all SMs; shape (shapes, shares)."""
    n, rows = device.num_sms, []
    for batch, length in shapes:
        work = (device.decode_work(batch, batch * (length + 1)) if decode
                else device.prefill_work([(length, 0)] * batch, device.model.num_layers, logits_seqs=batch))
        rows.append([device.solo_seconds(work, round(n * p / 100)) / device.solo_seconds(work, n) for p in PERCENTS])
    return np.array(rows)


def measured_stretch(times: Sweep) -> np.ndarray:
    """As :func:`stretch_of`."""
    return np.array([[t[p] / t[100] for p in PERCENTS] for t in times.values()])


def sm_axis(data: Path, alone: DeviceCoefficients) -> tuple[DeviceCoefficients, dict[str, dict[str, float]]]:
    """Bandwidth and rate against SMs; only coefficients leave this function (the sources state no licence).

    Fitted on MuxServe's 7B, checked on its 13B. Bandwidth comes from attention's own reads: a copy kernel (lithos)
    draws more on few SMs than serving's kernels do, and is printed beside it.
    """
    share = np.array(PERCENTS) / 100
    decode = {size: sweep(data, size, "decode") for size in SWEPT}
    # Prefills under 2,048 tokens sit on the host's floor of 13-14 ms; above it launches run ahead of the device.
    prefill = {size: {k: v for k, v in sweep(data, size, "prefill").items() if k[0] * k[1] >= 2048} for size in SWEPT}
    knee, sharpness = (round(float(x), 6) for x in fit.fit_bandwidth_curve(share, attention_bandwidth(decode["7b"])))
    curved = dataclasses.replace(alone, bandwidth_knee=knee, bandwidth_sharpness=sharpness)

    def device(size: str, coefficients: DeviceCoefficients) -> DeviceModel:
        return DeviceModel(SWEPT[size], GPU, coefficients)

    def stretch(slope: float, cap: float) -> np.ndarray:
        trial = device("7b", dataclasses.replace(curved, rate_slope=slope, rate_cap=cap))
        return np.median(stretch_of(trial, list(prefill["7b"])), axis=0)

    slope, cap = (round(float(x), 6) for x in
                  fit.fit_rate_curve(stretch, np.median(measured_stretch(prefill["7b"]), axis=0)))
    whole = dataclasses.replace(curved, rate_slope=slope, rate_cap=cap)
    with open(data / "unlicensed/lithos_repro_a100_pcie_tpc_sweep.csv", encoding="utf-8") as file:
        copy = {int(r["sm_count"]): float(r["ema_us_at_seen151"]) for r in csv.DictReader(file)
                if r["op_index_aligned"] == "18"}
    copied = np.array([n / GPU.num_sms for n in sorted(copy)])
    errors: dict[str, dict[str, float]] = {}
    for size, label in (("7b", "fitted"), ("13b", "left_out")):
        errors[f"attention_bandwidth_against_sms_{label}:{size}"] = fit.FitError.of(
            fit.bandwidth_curve(share, knee, sharpness), attention_bandwidth(decode[size])).as_dict()
        errors[f"prefill_stretch_{label}:{size}"] = fit.FitError.of(
            stretch_of(device(size, whole), list(prefill[size])).ravel(), measured_stretch(prefill[size]).ravel()).as_dict()
        seen = "partly_seen" if size == "7b" else "left_out"
        errors[f"decode_step_stretch_{seen}:{size}"] = fit.FitError.of(
            stretch_of(device(size, whole), list(decode[size]), True).ravel(),
            measured_stretch(decode[size]).ravel()).as_dict()
    errors["bandwidth_against_sms_of_a_copy_kernel_unfitted"] = fit.FitError.of(
        fit.bandwidth_curve(copied, knee, sharpness),
        np.array([copy[GPU.num_sms] / copy[n] for n in sorted(copy)])).as_dict()
    return whole, errors


def all_reduces(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """(bytes that each GPU sends, seconds) of vLLM's all-reduce under CUDA graphs, 2 to 8 A100s, to 64 MB."""
    rows = pq.read_table(data / "kernels/aiconfigurator/a100_sxm__vllm_0.14.0__custom_allreduce_perf.parquet").to_pylist()
    # Message sizes are in elements of two bytes: only so do they agree with Vidur's table, which is in bytes.
    rows = [(2 * (r["num_gpus"] - 1) / r["num_gpus"] * r["message_size"] * 2, r["latency"] * 1e-3, r["num_gpus"])
            for r in rows if r["backend"] == "vllm_graph" and r["message_size"] <= 2**25]
    rows.sort()
    return np.array([r[0] for r in rows], dtype=float), np.array([r[1] for r in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("profiles/a100-80gb/llama-3.1-8b"))
    args = parser.parse_args()
    if not (args.data / "kernels").is_dir():
        raise ProfileError(f"{args.data}: no folder kernels/ with the measured tables there; give it by --data")
    errors: dict[str, dict[str, float]] = {}

    tokens, table, keep = vidur(args.data)
    gemms, train = [], []
    for column, name in VIDUR_GEMMS.items():
        shape = next(k for k in dense_kernels(MODEL, 1) if k.name == name)
        for m, seconds, use in zip(tokens, median_of(table, column, keep), split(tokens), strict=True):
            gemms.append((name, fit.Gemm(int(m), shape.columns, shape.k, float(seconds))))
            train.append(bool(use))
    seen = [g for (_, g), use in zip(gemms, train, strict=True) if use]
    for label, waves in (("gemm_left_out", True), ("gemm_left_out_without_waves", False)):
        trial = fit.fit_gemm(seen, GPU, waves)
        for name in (*VIDUR_GEMMS.values(), "all"):
            rest = [g for (n, g), use in zip(gemms, train, strict=True) if not use and name in (n, "all")]
            errors[f"{label}:{name}"] = fit.FitError.of(fit.gemm_seconds(rest, trial, GPU, waves),
                                                        np.array([g.seconds for g in rest])).as_dict()
    gemm = fit.fit_gemm([g for _, g in gemms], GPU)

    families: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for column, name in VIDUR_ROWS.items():
        moved_bytes = (embedding_bytes(MODEL, 1) if name == "embedding"
                       else next(k.bytes for k in dense_kernels(MODEL, 1) if k.name == name))
        families.setdefault(name, []).append((tokens * moved_bytes, median_of(table, column, keep), split(tokens)))
    joined = {name: tuple(np.concatenate(part) for part in zip(*parts, strict=True))
              for name, parts in families.items()}
    shares, overhead_s = fit.fit_rowwise({n: (b[u], s[u]) for n, (b, s, u) in joined.items()}, GPU)
    for name, (moved, seconds, use) in joined.items():
        for label, rest in (("", ~use), ("_from_20_us", ~use & (seconds >= 20e-6))):
            errors[f"rowwise_left_out{label}:{name}"] = fit.FitError.of(
                fit.rowwise_seconds(moved[rest], shares[name], overhead_s, GPU), seconds[rest]).as_dict()
    shares, row_overhead_s = fit.fit_rowwise({n: (b, s) for n, (b, s, _) in joined.items()}, GPU)
    shares["qk_norm"] = shares["norm"]  # no measured row

    batch, length, seconds = attention_rows(args.data, "vllm_0.14.0", "context")
    use = split(length)
    trial = fit.fit_prefill_attention(batch[use], length[use], seconds[use], 32, 128, GPU)
    rest = ~use & (length >= 128)
    errors["prefill_attention_left_out_from_128_tokens"] = fit.FitError.of(fit.prefill_attention_seconds(
        batch[rest], length[rest], 32, 128, trial, GPU), seconds[rest]).as_dict()
    errors["prefill_attention_left_out"] = fit.FitError.of(fit.prefill_attention_seconds(
        batch[~use], length[~use], 32, 128, trial, GPU), seconds[~use]).as_dict()
    context = fit.fit_prefill_attention(batch, length, seconds, 32, 128, GPU)
    other = attention_rows(args.data, "sglang_0.5.10", "context")
    errors["prefill_attention_against_sglang_0.5.10"] = fit.FitError.of(fit.prefill_attention_seconds(
        other[0], other[1], 32, 128, context, GPU), other[2]).as_dict()

    batch, past, seconds = attention_rows(args.data, "vllm_0.14.0", "generation")

    def moved_by(batch: np.ndarray, past: np.ndarray) -> np.ndarray:
        return 2.0 * 128 * (2 * 32 * batch + 2 * 8 * batch * (past + 1))

    moved = moved_by(batch, past)
    use = split(past)
    trial = fit.fit_decode_attention(batch[use], moved[use], seconds[use], GPU)
    errors["decode_attention_left_out"] = fit.FitError.of(
        fit.decode_attention_seconds(batch[~use], moved[~use], trial, GPU), seconds[~use]).as_dict()
    generation = fit.fit_decode_attention(batch, moved, seconds, GPU)
    other = attention_rows(args.data, "sglang_0.5.10", "generation")
    errors["decode_attention_against_sglang_0.5.10"] = fit.FitError.of(fit.decode_attention_seconds(
        other[0], moved_by(other[0], other[1]), generation, GPU), other[2]).as_dict()

    sent, seconds = all_reduces(args.data)
    use = split(sent)
    trial = fit.fit_all_reduce(sent[use], seconds[use], GPU)
    errors["all_reduce_left_out"] = fit.FitError.of(
        fit.all_reduce_seconds(sent[~use], *trial, GPU), seconds[~use]).as_dict()
    link = fit.fit_all_reduce(sent, seconds, GPU)

    unit = [round(float(x), 6) for x in (*gemm[:5], *context[:2], generation[0], link[0])]
    alone = DeviceCoefficients(
        source="fitted",
        gemm_tiles=tuple((r, c, unit[i]) for i, (r, c) in enumerate(fit.TILES)),
        gemm_bandwidth=unit[4], gemm_overhead_s=round(float(gemm[5]), 10),
        gemm_block_overhead_s=round(float(gemm[6]), 10),
        prefill_attention_efficiency=unit[5], prefill_attention_extra_keys=unit[6],
        prefill_attention_overhead_s=round(float(context[2]), 10),
        decode_attention_bandwidth=unit[7], decode_attention_overhead_s=round(float(generation[1]), 10),
        decode_attention_seq_s=round(float(generation[2]), 12),
        rowwise_bandwidth={name: round(share, 6) for name, share in sorted(shares.items())},
        rowwise_overhead_s=round(row_overhead_s, 10),
        rate_slope=0.0, rate_cap=1.0, bandwidth_knee=1.0, bandwidth_sharpness=1.0,
        link_efficiency=unit[8], all_reduce_overhead_s=round(float(link[1]), 10),
    )
    whole, axis_errors = sm_axis(args.data, alone)
    errors |= axis_errors
    coefficients = dataclasses.replace(
        whole, notes={"errors": errors, "parameters": sum(PARAMETERS.values()), "parameters_by_family": PARAMETERS,
                      "assumed": ASSUMED})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fit.json").write_text(coefficients.to_json(), encoding="utf-8")
    (args.out / "SOURCE.md").write_text(source_page(errors), encoding="utf-8")
    for name, error in errors.items():
        print(f"{name:<50} {error}")
    cross_checks(coefficients)
    print(f"wrote {args.out / 'fit.json'}")
    return 0


SOURCE = """\
# A100-80GB, Llama-3.1-8B: where fit.json comes from

Written by `python experiments/fit_a100.py --data <folder with the tables>`; the same tables give the same bytes.
{parameters} parameters. Nothing is fitted to serving results, least of all to the paper's.

| coefficients | fitted on | licence |
|---|---|---|
| GEMM tiles, bandwidth, overheads (7) | microsoft/vidur `data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv`, \
commit 7d47513363ec447a741ac5e47241580b47724fbf, TP 1, fp16, medians | MIT |
| norm, rotary, activation, embedding (5) | the same table | MIT |
| prefill attention (3) | ai-dynamo/aiconfigurator `a100_sxm/attention/vllm/0.14.0` context_attention_perf, 32/8/128 heads, \
commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce | Apache-2.0 |
| decode attention (3) | the same source, generation_attention_perf | Apache-2.0 |
| all-reduce (2), tensor parallel only | the same source, `comm/vllm/0.14.0` custom_allreduce_perf, CUDA-graph rows, 2-8 GPUs, \
to 64 MB | Apache-2.0 |
| bandwidth against SMs (2) | hao-ai-lab/MuxServe `examples/placement/llama.json`, commit \
223148033454e4740f4b4617c72910c370a5604b: 7B decode steps under MPS shares, long context less short. No licence stated: \
coefficients only, no rows | - |
| per-SM rate against busy SMs (2) | the same: 7B prefills of 2,048 tokens or more | - |

Compared, not fitted: AureliusJustin/lithos-reproduction, commit 4d7fb0460efad929711bade1b157cabbb14f120c, a 64 MiB scale under
TPC masks on an A100 PCIe (licence not seen; no rows shipped).

## Errors
Relative, of seconds. *left out*: rows that this fit did not see (kernel tables: every other token count, context or message
size; the shipped coefficients are then fitted on all rows). *partly seen*: the bandwidth curve saw differences of some of
these rows.

| what | rows | median % | P90 % | worst % |
|---|---|---|---|---|
"""
AFTER = """
Reading them: elementwise kernels under 20 us (up to some 500 tokens) are launches and L2 traffic, timed to whole
microseconds: their rows are the bad ones, and sum to under 0.3 ms a step. Prefill attention under 128 tokens pads its
tiles, which the model does not. Two libraries' attention differ by more than either fit does (the `against_sglang` lines). An
all-reduce changes algorithm with size; one line through all of them is rough. A copy kernel draws far more bandwidth on few
SMs than serving's kernels do, hence the curve is fitted on the latter.

## No measured row: extrapolated or assumed
"""


def source_page(errors: dict[str, dict[str, float]]) -> str:
    """``SOURCE.md``: attribution, what was fitted on what, errors."""
    lines = [SOURCE.format(parameters=sum(PARAMETERS.values()))]
    lines += [f"| {name.replace(':', ', ')} | {e['rows']} | " + " | ".join(
        f"{100 * e[key]:.1f}" for key in ("median", "p90", "worst")) + " |\n" for name, e in errors.items()]
    return "".join([*lines, AFTER, *(f"- {text}\n" for text in ASSUMED)])


def cross_checks(coefficients: DeviceCoefficients) -> None:
    """Figures that nothing was fitted to, beside what others measured."""
    device = DeviceModel(MODEL, GPU, coefficients)
    n = GPU.num_sms

    def prefill(pieces: list[tuple[int, int]]) -> float:
        return device.solo_seconds(device.prefill_work(pieces, MODEL.num_layers, logits_seqs=len(pieces)), n) * 1e3

    print("untuned cross-checks (simulated | measured elsewhere), ms:")
    print(f"  decode step, batch 8, context 96:   {device.solo_seconds(device.decode_work(8, 8 * 96), n) * 1e3:7.1f} | "
          "12.3 (vLLM CI), 13.2-14.1 (SGLang, vLLM at 4 req/s; host included), about 11 (sum of kernels)")
    print(f"  prefill 16 x 1024:                  {prefill([(1024, 0)] * 16):7.1f} | 1042 (Argonne), 1090 (Vidur)")
    # Vidur's sums hold no attention and no LM head: leave both out here too.
    bare = DeviceModel(MODEL, GPU, dataclasses.replace(coefficients, prefill_attention_efficiency=1e9,
                                                       prefill_attention_overhead_s=0.0))
    for tokens, vidur_ms in ((1024, 75.1), (2048, 141.8), (4096, 272.9)):
        dense_ms = bare.solo_seconds(bare.prefill_work([(tokens, 0)], MODEL.num_layers, logits_seqs=0), n) * 1e3
        print(f"  prefill {tokens:>5}, no attention or head: {dense_ms:7.1f} | {vidur_ms} (Vidur's layers, unfused adds "
              f"included); whole: {prefill([(tokens, 0)]):.1f}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"fit_a100: error: {exc}")
