"""The device of the paper's figures, and the questions that several of them ask it."""

from __future__ import annotations

from functools import cache

from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_fitted
from bullet.work import head_kernels, layer_kernels

LENGTHS = (1024, 2048, 4096, 16384)


@cache
def a100() -> DeviceModel:
    """Llama-3.1-8B on one A100-80GB, the fitted device."""
    return load_fitted(DeviceConfig())


def chunked(prompt: int, chunk: int) -> list[tuple[float, float]]:
    """(seconds, operations) of each chunk of a prompt, alone on all SMs; the last one asks for the first token."""
    device = a100()
    found = []
    for past in range(0, prompt, chunk):
        tokens = min(chunk, prompt - past)
        layers, last = device.model.num_layers, int(past + tokens == prompt)
        flops = layers * sum(k.flops for k in layer_kernels(device.model, [(tokens, past)], 0, 0)) + sum(
            k.flops for k in head_kernels(device.model, last)
        )
        seconds = device.solo_seconds(device.prefill_work([(tokens, past)], layers, logits_seqs=last), device.num_sms)
        found.append((seconds, flops))
    return found
