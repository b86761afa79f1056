"""What a scheduler may ask of a performance model, and a sample that one learns from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.state import SplitTable

Array = NDArray[np.float64]


class Estimator(Protocol):
    """What a policy may ask. Returned arrays have length ``splits.full + 1`` and must not be written to."""

    name: str
    splits: SplitTable

    def prefill_seconds(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Array:
        """Whole prefill of that batch on each split; ``decode``: (sequences, context tokens) beside it, or none."""

    def prefill_line(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Callable[[int], float]:
        """``prefill_seconds(..)`` as a function of the index, for a few of them: cheaper. Good until the next ``observe``."""

    def decode_line(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Callable[[int], float]:
        """``decode_seconds(..)`` as a function of the index, for a few of them: cheaper. Good until the next ``observe``."""

    def prefill_base(self, prompt_tokens: int) -> Array:
        """One prompt alone, before online correction."""

    def prefill_base_at(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        """A batch of prompts before online correction on one split."""

    def prefill_correction(self, index: int) -> float:
        """Online correction now: ``prefill_seconds((t,), None)[i] = prefill_base(t)[i] * prefill_correction(i)``."""

    def decode_seconds(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Array:
        """One iteration beside a prefill of that many tokens (0: alone); the last entry is alone on N."""

    def prefill_intensity(self, prompt_tokens: tuple[int, ...]) -> float:
        """A layer's operations per byte."""

    def ridge(self, index: int) -> float:
        """C_p / D_p on prefill's side of a split."""

    def observe(self, phase: str, sms: int, predicted_s: float, elapsed_s: float) -> None:
        """A step predicted (correction included) at ``predicted_s`` took ``elapsed_s``."""


class Sample(NamedTuple):
    """One measured state: a whole prefill of one prompt, or one decode iteration, in seconds.

    ``tokens``: prompt tokens of a prefill, sequences of a decode; ``context_tokens``: attended over a decode batch, past
    tokens of a prefill. ``corun_sms``, ``corun_tokens``: the same of what ran beside it throughout (0: nothing did).
    """

    kind: str
    sms: int
    tokens: int
    context_tokens: int
    seconds: float
    corun_sms: int = 0
    corun_tokens: int = 0
    source: str = "simulated"
