"""How well the scheduler's model knows the simulated device: ``python experiments/srm_calibration.py``.

SRM is calibrated on a few noisy samples of the device and asked for states that it did not sample. Everything here is
simulated, and circular in so far as the device is our own: it shows what the published form can express, no more.
"""

from __future__ import annotations

import sys

import numpy as np

from bullet.config import DeviceConfig
from bullet.device import load_device
from bullet.perf import make_estimator, sample_device
from bullet.state import SplitTable


def main() -> int:
    device, splits = load_device(DeviceConfig()), SplitTable.every(108)
    samples = sample_device(device, splits, seed=0)
    print(f"source: simulated ({device.coefficients.source} A100); {len(samples)} samples with 3 % noise, "
          f"{sum(bool(s.corun_sms) for s in samples)} of them co-running")
    states = {"inside the sampled range": ((512, 2048, 8192), (8, 24, 64, 128), (300, 1500, 3500)),
              "outside it": ((32768, 65536), (192, 256), (100, 8000))}
    for label, (lengths, batches, contexts) in states.items():
        for name in ("srm", "srm-blind"):
            model = make_estimator(name, device=device, model=device.model, gpu=device.gpu, splits=splits, seed=0,
                                   recalibrate=False)
            prefill, alone, beside = [], [], []
            for tokens in lengths:
                step = device.prefill_work([(tokens, 0)], device.model.num_layers, logits_seqs=1)
                for i in range(5, 53, 6):
                    d = int(splits.decode_sms[i])
                    prefill.append(model.prefill_at((tokens,), None, i) / device.solo_seconds(step, 108 - d) - 1)
                    for batch in batches:
                        for context in contexts:
                            decode = device.decode_work(batch, batch * context)
                            _, truth = device.corun_seconds(step, 108 - d, decode, d)
                            beside.append(model.decode_at(batch, batch * context, tokens, i) / truth - 1)
                            alone.append(model.decode_at(batch, batch * context, 0, i) / device.solo_seconds(decode, d) - 1)
            line = "  ".join(f"{kind} {np.mean(np.abs(e)) * 100:5.1f} % (bias {np.mean(e) * 100:+5.1f})" for kind, e in
                             (("prefill alone", prefill), ("decode alone", alone), ("decode beside a prefill", beside)))
            print(f"{label:<25} {name:<10} mean |error|: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
