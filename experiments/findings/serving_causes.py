"""Why simulated serving differs from what others measured: candidates for a cause, in figures. Nothing is set from them.

    python -m experiments.findings.serving_causes --data <folder with unlicensed/muxserve_..csv.gz>

1. Time of a decode step beyond the kernels, in an engine of 2024 on an A100: MuxServe's measured steps less the simulated ones.
2. SGLang's and vLLM's ShareGPT points with that time added: what would be left.
3. The same with every prompt of the mean length: what the unknown distribution of prompts can do to TTFT, at most.
4. Elementwise kernels in Argonne's prefill.
5. Bandwidth of decode attention in Argonne's batches, from steps at two lengths.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import ModelSpec
from bullet.devices.fitted import DeviceModel
from bullet.devices.terms import FittedWork
from bullet.errors import ProfileError
from bullet.sim.run import simulate
from bullet.validation.serving import SENT_MEANS, build_device, build_workload, metrics_of, run_config, simulate_point
from bullet.validation.serving_points import Point, shipped

FILE = "muxserve_a100_80gb_mps_sweep_7b_13b_tp1.csv.gz"
SOURCE = "hao-ai-lab/MuxServe, commit 223148033454e4740f4b4617c72910c370a5604b (no licence stated: not shipped)"
LLAMA_7B = ModelSpec("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, 2048)


class SlowHost(DeviceModel):
    """The device with time outside the kernels: a decode step's grows with its sequences, one with prompts has its own."""

    decode_s = sequence_s = prefill_s = 0.0

    def decode_work(self, num_seqs: int, context_tokens: int) -> FittedWork:
        """As the device's, later by the host's time."""
        return _later(super().decode_work(num_seqs, context_tokens), self.decode_s + self.sequence_s * num_seqs)

    def hybrid_work(self, pieces: Any, num_seqs: int, context_tokens: int, **options: Any) -> FittedWork:
        """As the device's, later by the host's time."""
        if not pieces:
            return self.decode_work(num_seqs, context_tokens)
        return _later(super().hybrid_work(pieces, num_seqs, context_tokens, **options), self.prefill_s)


def _later(work: FittedWork, seconds: float) -> FittedWork:
    work.fixed_s += seconds
    return work


def beyond_kernels(path: Path, device: DeviceModel) -> tuple[dict[int, float], float]:
    """Median over contexts of measured less simulated seconds: of decode steps by batch, and of prefills up to 512 tokens."""
    try:
        with gzip.open(path, "rt", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["model"] == "llama-7b" and r["mps_sm_percent"] == "100"]
    except OSError as exc:
        raise ProfileError(f"{path}: cannot be read ({exc})") from None
    decode: dict[int, list[float]] = {}
    prefill = []
    for row in rows:
        batch, length = int(row["batch_size"]), int(row["seq_len"])
        if float(row["decode_ms"]) > 0:
            ours = device.solo_seconds(device.decode_work(batch, batch * (length + 1)), device.num_sms)
            decode.setdefault(batch, []).append(float(row["decode_ms"]) / 1e3 - ours)
        if float(row["prefill_ms"]) > 0 and batch * length <= 512:
            work = device.prefill_work([(length, 0)] * batch, device.model.num_layers, logits_seqs=batch)
            prefill.append(float(row["prefill_ms"]) / 1e3 - device.solo_seconds(work, device.num_sms))
    return {batch: float(np.median(x)) for batch, x in sorted(decode.items())}, float(np.median(prefill))


def served(point: Point, device: DeviceModel, prompt: int | None = None) -> Mapping[str, float]:
    """A ShareGPT point as sent on some device; ``prompt``: the length of every prompt."""
    workload = build_workload(point)
    if prompt is not None:
        workload = dataclasses.replace(workload, prompt_tokens=np.full(len(workload), prompt))
    return metrics_of(point, simulate(run_config(point), workload=workload, device=device))


def show(label: str, found: Mapping[str, float]) -> None:
    """One line of medians."""
    print(f"  {label:<58}" + "".join(f"{found[m] * 1e3:>9.2f}" for m in ("ttft_p50", "tpot_p50", "itl_p50")))


def main() -> None:
    """Print all five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    points = {p.name: p for p in shipped()}
    a100 = build_device(points["sharegpt SGLang 0.3.0 4 req/s"])
    older = DeviceModel(LLAMA_7B, get_gpu("a100-80gb"), a100.coefficients)
    decode, prefill_s = beyond_kernels(folder / "unlicensed" / FILE, older)
    print(f"1. A100 80 GB, llama-7b, {SOURCE}:")
    print("   measured less simulated, ms a decode step by sequences (median over contexts):")
    print("   " + ", ".join(f"{batch}: {s * 1e3:.2f}" for batch, s in decode.items()))
    batches = [b for b in decode if b <= 64]
    sequence_s, decode_s = np.polyfit(batches, [decode[b] for b in batches], 1)
    print(f"   to 64 sequences: {decode_s * 1e3:.2f} ms + {sequence_s * 1e6:.0f} us a sequence; prefills to 512 tokens: "
          f"{prefill_s * 1e3:.2f} ms")
    slow = SlowHost(a100.model, a100.gpu, a100.coefficients)
    slow.decode_s, slow.sequence_s, slow.prefill_s = float(decode_s), float(sequence_s), prefill_s
    print(f"2., 3. ShareGPT as sent, seed 0; ms{'':<33}{'TTFT P50':>9}{'TPOT P50':>9}{'ITL P50':>9}")
    for point in (p for p in points.values() if p.kind == "sharegpt"):
        print(f"  {point.name}")
        show("  measured", point.measured)
        show("  simulated", served(point, a100))
        show("  simulated with the time of 1.", served(point, slow))
        show(f"  simulated, each prompt {SENT_MEANS[0]:.0f} tokens", served(point, a100, round(SENT_MEANS[0])))
        show(f"  simulated, time of 1., each prompt {SENT_MEANS[0]:.0f} tokens", served(point, slow, round(SENT_MEANS[0])))
    print("4. simulated prefill of 16 x 1024 in steps of 8 prompts, ms: whole, and with elementwise kernels free")
    for gpu in (get_gpu("a100-40gb"), a100.gpu):
        free = dataclasses.replace(a100.coefficients, rowwise_overhead_s=0.0,
                                   rowwise_bandwidth=dict.fromkeys(a100.coefficients.rowwise_bandwidth, 1e9))
        whole, bare = (2e3 * d.solo_seconds(d.prefill_work([(1024, 0)] * 8, 32, logits_seqs=8), gpu.num_sms)
                       for d in (DeviceModel(a100.model, gpu, c) for c in (a100.coefficients, free)))
        print(f"   {gpu.name}: {whole:.0f}, {bare:.0f}")
    print("5. bandwidth of decode attention, GB/s, from the time a token at 1024 + 1024 and at 2048 + 2048")
    for gpu, engine in ((gpu, engine) for gpu in ("a100-40gb", "h100") for engine in ("TensorRT-LLM", "vLLM")):
        for batch in (16, 32):
            pair = [points[f"Argonne {engine} {gpu} {batch} x {n}+{n}"] for n in (1024, 2048)]
            moved = batch * 1.5 * 1024 * a100.model.kv_bytes_per_token
            ours = [simulate_point(p)["batch"] for p in pair]
            both = [moved / (t[1] / 2048 - t[0] / 1024) / 1e9 for t in ([p.measured["batch"] for p in pair], ours)]
            print(f"   {gpu}, {engine}, {batch} sequences: measured {both[0]:.0f}, simulated {both[1]:.0f}")


if __name__ == "__main__":
    main()
