"""Table 2: theoretical idle SM cycles of a layer's kernels. QKV, Attn and O are the paper's to a tenth; MLP and layer are
means over kernels, which the paper weighs by measured durations that it does not give, we by the SM cycles of each kernel's
waves (waves x the work of one block): they are laid beside the paper's, not claimed."""

from __future__ import annotations

from collections.abc import Sequence

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.paper import style
from bullet.paper.base import Check, Drawn, Runs, relation, within
from bullet.work import KernelWork, layer_kernels, wave_quantization

PAPER = {  # tokens: QKV, Attn, O, MLP, layer; idle %
    1024: (11.1, 21.0, 40.7, 13.0, 19.4),
    2048: (11.1, 5.2, 21.0, 7.6, 10.4),
    4096: (11.1, 5.2, 5.2, 7.6, 9.1),
    16384: (1.9, 0.2, 0.2, 0.4, 0.5),
}
COLUMNS = ("QKV", "Attn", "O", "MLP", "layer")
GROUPS = (("qkv",), ("prefill_attention",), ("o",), ("gate_up", "down"), ("qkv", "prefill_attention", "o", "gate_up", "down"))
EXACT = 3
"""So many columns follow from tiles alone."""


def idle_percent(kernels: Sequence[KernelWork], sms: int) -> float:
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


def make(runs: Runs) -> Drawn:
    ours = table(get_gpu("a100-80gb").num_sms)
    rows = [
        {"tokens": tokens, "kernel": name, "ours_idle_percent": mine, "paper_idle_percent": theirs}
        for tokens in PAPER
        for name, mine, theirs in zip(COLUMNS, ours[tokens], PAPER[tokens], strict=True)
    ]
    same = sum(
        round(mine, 1) == theirs
        for tokens in PAPER
        for mine, theirs in list(zip(ours[tokens], PAPER[tokens], strict=True))[:EXACT]
    )
    cause = (
        "means over kernels: the paper weighs them by measured durations of tiles that it does not give, we by the cycles of "
        "each kernel's waves at one tile for all"
    )
    checks: list[Check] = [
        relation(
            "Table 2, QKV, attention and O: cells equal to a tenth of a percent",
            "12 cells",
            f"{same} of 12",
            same == 12,
            how="exact",
        )
    ]
    for index, name in ((3, "MLP"), (4, "layer")):
        checks += [
            within(
                f"Table 2, {name} at {tokens:,} tokens",
                PAPER[tokens][index],
                ours[tokens][index],
                0.1,
                ".1f",
                precision=0.05,
                cause=cause,
                unit=" %",
            )
            for tokens in PAPER
        ]
    canvas, panels = style.canvas(style.WIDE, 2.3, 1, len(COLUMNS), sharey=True)
    for index, (axes, name) in enumerate(zip(panels[0], COLUMNS, strict=True)):
        for offset, (label, colour, values) in enumerate(
            (("ours", style.PHASES["prefill"], ours), ("paper", style.PHASES["decode"], PAPER))
        ):
            axes.bar(
                [i + 0.4 * offset - 0.2 for i in range(len(PAPER))],
                [values[tokens][index] for tokens in PAPER],
                0.38,
                color=colour,
                label=label,
            )
        axes.set_xticks(range(len(PAPER)), [f"{tokens // 1024}k" for tokens in PAPER])
        axes.set(title=name, xlabel="tokens")
    panels[0][0].set_ylabel("idle SM cycles, %")
    style.below(canvas)
    return Drawn(canvas, rows, checks)
