"""The device itself asked, for comparison: an upper bound, named so wherever it is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bullet.catalog.gpus import GpuSpec
from bullet.devices.base import Device, StepWork
from bullet.estimators.base import Array, Sample
from bullet.estimators.roofline import Cache
from bullet.estimators.srm import Srm
from bullet.state import DECODE, PREFILL, SplitTable


class Oracle(Srm):
    """Asks the simulated device itself: an upper bound, not a predictor that anyone could have."""

    def __init__(self, device: Device, gpu: GpuSpec, splits: SplitTable, samples: Sequence[Sample], *,
                 recalibrate: bool, error: float) -> None:
        super().__init__(device.model, gpu, splits, samples, tensor_parallel=device.tensor_parallel,
                         recalibrate=recalibrate, error=error)
        self.name = "oracle"
        self.device = device
        self._works: Cache[tuple[int, ...], StepWork] = Cache()
        self._last_prefill: tuple[object, Array] = (None, np.empty(0))
        self._last_decode: tuple[object, Array] = (None, np.empty(0))

    def _prefill_work(self, prompt_tokens: tuple[int, ...]) -> StepWork:
        found = self._works.get(prompt_tokens)
        if found is None:
            found = self._works.keep(prompt_tokens, self.device.prefill_work(
                [(t, 0) for t in prompt_tokens], self.model.num_layers, logits_seqs=len(prompt_tokens)))
        return found

    def prefill_seconds(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Array:
        """The device's own answer beside that decode batch."""
        if decode is None:
            return super().prefill_seconds(prompt_tokens, None)
        key = (prompt_tokens, decode)
        if key != self._last_prefill[0]:
            self._last_prefill = (key, self.error * self.device.prefill_seconds_all(
                self._prefill_work(prompt_tokens), self.splits, self.device.decode_work(*decode)))
        return self._last_prefill[1] * self.recalibration.over_splits(PREFILL)

    def prefill_at(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None, index: int) -> float:
        """One element of :meth:`prefill_seconds`."""
        return float(self.prefill_seconds(prompt_tokens, decode)[index])

    def prefill_line(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Callable[[int], float]:
        """The same for a few indices."""
        return partial(self.prefill_at, prompt_tokens, decode)

    def _prefill_cell(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        return float(self._prefill_row(prompt_tokens)[index])

    def _uncorrected_prefill(self, prompt_tokens: tuple[int, ...]) -> Array:
        base: Array = self.device.prefill_seconds_all(self._prefill_work(prompt_tokens), self.splits, None) * self.error
        return base

    def decode_at(self, num_seqs: int, context_tokens: int, prefill_tokens: int, index: int) -> float:
        """One element of :meth:`decode_seconds`."""
        return float(self.decode_seconds(num_seqs, context_tokens, prefill_tokens)[index])

    def decode_line(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Callable[[int], float]:
        """The same for a few indices."""
        return partial(self.decode_at, num_seqs, context_tokens, prefill_tokens)

    def decode_seconds(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Array:
        """The device's own answer beside a prefill of one prompt of that length."""
        key = (num_seqs, context_tokens, prefill_tokens)
        if key != self._last_decode[0]:
            beside = self._prefill_work((prefill_tokens,)) if prefill_tokens > 0 else None
            self._last_decode = (key, self.error * self.device.decode_seconds_all(
                self.device.decode_work(num_seqs, context_tokens), self.splits, beside))
        return self._last_decode[1] * self.recalibration.over_splits(DECODE)
