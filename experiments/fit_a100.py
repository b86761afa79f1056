"""Fit the A100-80GB device from the public tables and set it beside what others measured:
``python experiments/fit_a100.py [--data DIR] [--out DIR]``.

The same as ``bullet-profile import`` and ``fit --sm-data``, then untuned cross-checks. Nothing is fitted to serving results.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.errors import BulletError
from bullet.profiles.fit import fit_table
from bullet.profiles.importers import import_public

GPU, MODEL = get_gpu("a100-80gb"), get_model("llama-3.1-8b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("profiles/a100-80gb/llama-3.1-8b"))
    args = parser.parse_args()
    rows = import_public(GPU.name, args.data)
    fitted = fit_table(rows, MODEL, sm_data=args.data / "unlicensed")
    path = fitted.write(args.out, replace=True)
    print("\n".join(fitted.lines()))
    cross_checks(fitted.device)
    print(f"wrote {path}")
    return 0


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
