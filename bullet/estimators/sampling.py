"""Samples of a device as a GPU's sweep would give them: which states, with which noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bullet.devices.base import Device
from bullet.errors import ProfileError
from bullet.estimators.base import Sample
from bullet.state import DECODE, PREFILL, SplitTable


class SampledState(NamedTuple):
    """What :func:`sample_device` is to sample: a prefill, a decode, or both at once, each on its SMs.

    ``pieces``: (new, past) tokens of each prompt, none for decode alone. ``num_seqs``, ``context_tokens``: as
    :class:`Sample`; no sequences for prefill alone. ``layers`` None: the whole model with its LM head; else that many
    layers without it.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    prefill_sms: int = 0
    num_seqs: int = 0
    context_tokens: int = 0
    decode_sms: int = 0
    layers: int | None = None


def calibration_states(device: Device, splits: SplitTable, *,
                       prefill_tokens: Sequence[int] = (32, 256, 1024, 4096, 16384),
                       batches: Sequence[int] = (1, 8, 32, 64, 96, 128, 512), corun_batches: Sequence[int] = (8, 64, 512),
                       contexts: Sequence[int] = (256, 4096)) -> list[SampledState]:
    """The few states that calibrate an estimator.

    SM axis: two counts for prefill (half and all), four for decode (its floor N/9, N_d, half, all: between N_d and all
    the straight line of eq. 1 and a soft knee differ most), three for co-running (decode's floor, half, prefill's
    floor: nothing is extrapolated between them).
    """
    n, d = splits.num_sms, splits.decode_sms

    def at_least(sms: float) -> int:
        return int(d[min(len(d) - 1, int(np.searchsorted(d, sms - 1e-9)))])

    floor, knee, half = at_least(n / 9), at_least(device.gpu.knee_sms), at_least(n / 2)
    states = [SampledState(((tokens, 0),), sms) for tokens in prefill_tokens for sms in (half, n)]
    states += [SampledState(num_seqs=batch, context_tokens=batch * context, decode_sms=sms)
               for batch in batches for context in contexts for sms in sorted({floor, knee, half, n})]
    states += [SampledState(((tokens, 0),), n - sms, batch, batch * context, sms)
               for tokens in prefill_tokens for sms in sorted({floor, half, n - floor})
               for batch in corun_batches for context in contexts]
    return states


def sample_device(device: Device, states: Sequence[SampledState], *, seed: int, noise_std: float = 0.03,
                  repeats: int = 1) -> list[Sample]:
    """Noisy samples of the simulated device, alone and co-running, as a GPU would give them: ``repeats`` of each state,
    in order. A state with both phases gives a sample of either side, decode's first.

    The only place that draws from the device. Noise is log-normal, ``noise_std`` relative (95 % of the paper's states lie
    within 6.8 %: section 3.2.3).
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0, 0x5A]))
    samples: list[Sample] = []

    def noisy(seconds: float) -> float:
        return seconds * math.exp(noise_std * float(rng.standard_normal()))

    for state in states:
        pieces, p, seqs, context, d, layers = state
        tokens = sum(new for new, _ in pieces)
        past = sum(past for _, past in pieces)
        works = []
        if pieces:
            works.append(device.prefill_work(pieces, layers or device.model.num_layers,
                                             logits_seqs=0 if layers else len(pieces)))
        if seqs:
            works.append(device.hybrid_work((), seqs, context, logits_seqs=0 if layers else seqs, layers=layers))
        if not works:
            raise ProfileError(f"state {state}: needs a prefill or a decode")
        if len(works) == 1:
            alone_s = device.solo_seconds(works[0], p if pieces else d)
            own = (PREFILL, p, tokens, past) if pieces else (DECODE, d, seqs, context)
            samples += [Sample(*own, noisy(alone_s)) for _ in range(repeats)]
            continue
        prefill_s, decode_s = device.corun_seconds(works[0], p, works[1], d)
        for _ in range(repeats):
            samples.append(Sample(DECODE, d, seqs, context, noisy(decode_s), p, tokens))
            samples.append(Sample(PREFILL, p, tokens, past, noisy(prefill_s), d, seqs))
    return samples
