"""Fig. 3: prefill's speed grows about as its SMs, decode's comes early. Each phase alone, relative to all SMs."""

from __future__ import annotations

import dataclasses

from bullet.devices.fitted import DeviceModel
from bullet.paper import style
from bullet.paper.base import Drawn, Runs, relation
from bullet.paper.device import a100

PROMPTS = (1024, 4096, 16384, 65536)
BATCHES, CONTEXT = (32, 64, 96, 128), 2048


def make(runs: Runs) -> Drawn:
    device = a100()
    n = device.num_sms
    works = {
        ("prefill", tokens): device.prefill_work([(tokens, 0)], device.model.num_layers, logits_seqs=1) for tokens in PROMPTS
    }
    works |= {("decode", batch): device.decode_work(batch, batch * CONTEXT) for batch in BATCHES}
    shares = [sms / n for sms in range(6, n + 1, 6)]
    speed = {
        key: [device.solo_seconds(work, n) / device.solo_seconds(work, round(share * n)) for share in shares]
        for key, work in works.items()
    }
    rows = [
        {"phase": phase, "prompt_tokens_or_batch": size, "share_of_sms": share, "relative_speed": value}
        for (phase, size), values in speed.items()
        for share, value in zip(shares, values, strict=True)
    ]
    half = shares.index(0.5)
    prefill, decode = (
        [values[half] for (phase, _), values in speed.items() if phase == wanted] for wanted in ("prefill", "decode")
    )
    coefficients = dataclasses.replace(device.coefficients, rate_slope=0.0)
    plain = DeviceModel(device.model, device.gpu, coefficients)
    level = [
        plain.solo_seconds(work, n) / plain.solo_seconds(work, n // 2)
        for tokens in PROMPTS
        for work in (plain.prefill_work([(tokens, 0)], device.model.num_layers, logits_seqs=1),)
    ]
    checks = [
        relation(
            "Fig. 3: prefill scales nearly linearly (speed on half of the SMs)",
            "near 0.5",
            f"{min(prefill):.2f} to {max(prefill):.2f}",
            all(0.45 <= v <= 0.58 for v in prefill),
            near=all(0.4 <= v <= 0.65 for v in prefill),
            how="0.45 to 0.58",
            cause="the fitted device's SMs are up to a fifth faster while others idle, as MuxServe measured on an A100 (clocks); "
            f"without that term it is {min(level):.2f} to {max(level):.2f}",
        ),
        relation(
            "Fig. 3: decode saturates early (speed on half of the SMs)",
            "well above 0.5",
            f"{min(decode):.2f} to {max(decode):.2f}",
            all(v > 0.65 for v in decode),
            near=all(v > 0.55 for v in decode),
            how="over 0.65",
            cause="the fitted bandwidth curve, measured by MuxServe on an A100, saturates later than the paper's",
        ),
    ]
    canvas, panels = style.canvas(style.WIDE, 2.7, 1, 2, sharey=True)
    for axes, wanted, title in (
        (panels[0][0], "prefill", "prefill, one prompt"),
        (panels[0][1], "decode", "decode, context 2,048"),
    ):
        sizes = [size for phase, size in speed if phase == wanted]
        for colour, marker, size in zip(style.SIZES, "osD^", sizes, strict=True):
            axes.plot(
                shares,
                speed[wanted, size],
                color=colour,
                marker=marker,
                markersize=2.5,
                label=f"{size // 1024}k tokens" if wanted == "prefill" else f"batch {size}",
            )
        axes.plot([0, 1], [0, 1], color="0.5", linestyle=":", linewidth=0.9, label="linear")
        axes.set(title=title, xlabel="share of the SMs", xlim=(0, 1.02), ylim=(0, 1.05))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    panels[0][0].set_ylabel("speed, relative to all SMs")
    return Drawn(canvas, rows, checks)
