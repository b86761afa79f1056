"""Table 2 of the paper, theoretical idle SM cycles by wave quantization: ``python experiments/table2.py``.

Analytic: nothing here is measured. QKV, Attn and O are the paper's to a tenth (a test). MLP and layer are means over
kernels; the paper weighs them by measured durations that it does not give, we by the SM cycles of each kernel's waves
(waves x the work of one block), so these two columns are printed beside the paper's, not claimed.
"""

from __future__ import annotations

import sys

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.work import KernelWork, layer_kernels, wave_quantization

PAPER = {  # tokens: QKV, Attn, O, MLP, layer; idle %
    1024: (11.1, 21.0, 40.7, 13.0, 19.4),
    2048: (11.1, 5.2, 21.0, 7.6, 10.4),
    4096: (11.1, 5.2, 5.2, 7.6, 9.1),
    16384: (1.9, 0.2, 0.2, 0.4, 0.5),
}
GROUPS = (("qkv",), ("prefill_attention",), ("o",), ("gate_up", "down"), ("qkv", "prefill_attention", "o", "gate_up", "down"))


def idle_percent(kernels: list[KernelWork], sms: int) -> float:
    """Idle share of the SM cycles that the kernels' waves take, in percent."""
    held = idle = 0.0
    for kernel in kernels:
        waves = wave_quantization(kernel.blocks, sms)
        cycles = waves.waves * kernel.flops / kernel.blocks
        held += cycles
        idle += cycles * waves.idle
    return 100 * idle / held


def table(sms: int) -> dict[int, tuple[float, ...]]:
    """Our rows, as ``PAPER``."""
    model, rows = get_model("llama-3.1-8b"), {}
    for tokens in PAPER:
        kernels = layer_kernels(model, [(tokens, 0)], 0, 0)
        rows[tokens] = tuple(idle_percent([k for k in kernels if k.name in group], sms) for group in GROUPS)
    return rows


def main() -> int:
    gpu = get_gpu("a100-80gb")
    print(f"idle % of SM cycles, Llama-3.1-8B on {gpu.num_sms} SMs; source = analytic; ours (paper's)")
    print(f"{'tokens':>7}" + "".join(f"{name:>15}" for name in ("QKV", "Attn", "O", "MLP", "layer")))
    for tokens, ours in table(gpu.num_sms).items():
        print(f"{tokens:>7}" + "".join(f"{a:>8.1f} ({b:4.1f})" for a, b in zip(ours, PAPER[tokens], strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
