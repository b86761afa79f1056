"""How well the scheduler's model knows the simulated device: ``python -m experiments.findings.srm_calibration``.

SRM is calibrated on a few noisy samples of the device and asked for states that it did not sample. Everything here is
simulated, and circular in so far as the device is our own: it shows what the published form can express, no more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import numpy as np

from bullet.config import DeviceConfig
from bullet.devices.base import Device
from bullet.devices.load import load_fitted
from bullet.errors import BulletError
from bullet.estimators.base import Sample
from bullet.estimators.sampling import calibration_states, sample_device
from bullet.estimators.srm import Srm
from bullet.state import PREFILL, SplitTable

INSIDE = ((100, 512, 2048, 8192), (4, 24, 48, 80, 160, 300), (300, 1500, 3500))
"""Prompt lengths, decode batches and mean contexts between the sampled ones."""
OUTSIDE = ((32768, 65536), (700, 1000), (100, 8000))
BATCHES = (1, 8, 32, 64, 80, 128, 256, 512)
LENGTHS = (32, 256, 1024, 4096, 16384)


def errors(model: Srm, device: Device, splits: SplitTable,
           states: tuple[Iterable[int], Iterable[int], Iterable[int]]) -> dict[str, list[float]]:
    """Relative errors of one estimator, per kind of step, over decode's floor to prefill's."""
    lengths, batches, contexts = (list(x) for x in states)
    n, found = splits.num_sms, {"prefill beside decode": [], "decode alone": [], "decode beside prefill": []}
    indices = [i for i, d in enumerate(splits.decode_sms) if n / 9 <= d <= n - n / 9][::5]
    for i in indices:
        d = int(splits.decode_sms[i])
        for batch in batches:
            for context in contexts:
                decode = device.decode_work(batch, batch * context)
                alone_s = model.decode_at(batch, batch * context, 0, i)
                found["decode alone"].append(alone_s / device.solo_seconds(decode, d) - 1)
                for tokens in lengths:
                    prefill = device.prefill_work([(tokens, 0)], device.model.num_layers, logits_seqs=1)
                    prefill_s, decode_s = device.corun_seconds(prefill, n - d, decode, d)
                    found["prefill beside decode"].append(
                        model.prefill_at((tokens,), (batch, batch * context), i) / prefill_s - 1)
                    found["decode beside prefill"].append(
                        model.decode_at(batch, batch * context, tokens, i) / decode_s - 1)
    return found


def print_alpha(model: Srm, splits: SplitTable, samples: list[Sample]) -> None:
    """alpha is what SRM predicts over eq. 1 with D_p: so it holds contention where there is a co-runner."""
    every = [s.seconds / (model.roofline.prefill_seconds((s.tokens,), s.sms) if s.kind == PREFILL
                          else model.roofline.decode_seconds(s.tokens, s.context_tokens, s.sms)) for s in samples]
    print(f"mean alpha over all samples {np.mean(every):.2f} (the paper's, on its A100: 1.61)\n")
    n = splits.num_sms
    picks = [i for i, d in enumerate(splits.decode_sms) if int(d) in (12, 30, 54, 96)] + [splits.full]
    own = [int(d) for d in splits.decode_sms] + [n]
    head = "".join(f"{own[i]:>8}" for i in picks)
    print(f"alpha of prefill, by prompt tokens and decode's SMs{'':<8}{head}")
    for tokens in LENGTHS:
        beside = {i: n - own[i] if i < splits.full else n for i in picks}
        values = [model.prefill_at((tokens,), None, i) / model.roofline.prefill_seconds((tokens,), beside[i]) for i in picks]
        print(f"  {tokens:<57}" + "".join(f"{v:8.2f}" for v in values))
    print(f"alpha of decode at mean context 1000, alone, by sequences{'':<2}{head}")
    for batch in BATCHES:
        values = [model.decode_at(batch, batch * 1000, 0, i) / model.roofline.decode_seconds(batch, batch * 1000, own[i])
                  for i in picks]
        print(f"  {batch:<57}" + "".join(f"{v:8.2f}" for v in values))
    print(f"D_p,sl / D_p, by prefill tokens beside{'':<21}{head}")
    for tokens in LENGTHS:
        print(f"  {tokens:<57}" + "".join(f"{v:8.2f}" for v in model.attainable_share(tokens)[picks]))


def main() -> int:
    """Print alpha, D_{p,sl} and the errors inside and outside the sampled range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="of the samples' noise (default 0)")
    parser.add_argument("--noise", type=float, default=0.03, help="relative, of each sample (default 0.03)")
    parser.add_argument("--gpu", default=DeviceConfig().gpu)
    parser.add_argument("--model", default=DeviceConfig().model)
    args = parser.parse_args()
    try:
        device = load_fitted(DeviceConfig(gpu=args.gpu, model=args.model))
    except BulletError as exc:
        print(f"srm_calibration: {exc}", file=sys.stderr)
        return 2
    splits = SplitTable.every(device.num_sms)
    samples = sample_device(device, calibration_states(device, splits), seed=args.seed, noise_std=args.noise)
    pairs = sum(bool(s.corun_sms) for s in samples) // 2
    print(f"source: simulated (device model: {device.coefficients.source}; {args.gpu}, {args.model}); "
          f"{len(samples) - 2 * pairs} states alone and {pairs} co-running pairs, {args.noise:.0%} noise\n")
    models = {blind: Srm(device.model, device.gpu, splits, samples, blind=blind, recalibrate=False) for blind in (False, True)}
    print_alpha(models[False], splits, samples)
    print(f"\n{'relative error against the device':<34} {'':<10}{'mean |e|':>9}{'P90 |e|':>9}{'worst':>9}{'bias':>9}")
    for label, states in (("inside", INSIDE), ("outside", OUTSIDE)):
        by_model = {m.name: errors(m, device, splits, states) for m in models.values()}
        for kind in ("prefill beside decode", "decode alone", "decode beside prefill"):
            for name, found in by_model.items():
                e = np.array(found[kind])
                size = np.abs(e)
                print(f"{label + ': ' + kind:<34} {name:<10}{size.mean():>9.1%}{np.quantile(size, 0.9):>9.1%}"
                      f"{size.max():>9.1%}{e.mean():>+9.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
