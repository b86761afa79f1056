"""What every device has: what drivers, the oracle and the samplers of an estimator ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.state import SplitTable

StepWork: TypeAlias = Any
"""What a step does, independent of SMs: built and priced by one device, opaque to all others."""


class Device(ABC):
    """One GPU, or a tensor-parallel group seen as one, that serves one model. All times in seconds; ``sms``, ``p``, ``d``: of
    ``num_sms``; ``pieces``: (new, past) tokens of each prompt; ``context_tokens``: tokens attended, the new ones included,
    over the batch."""

    asks_longest = False
    """Whether ``hybrid_work`` wants ``longest_tokens``, the longest context among the decodes. Only the paged driver knows it."""
    has_host_time = False
    """Whether its seconds hold host time as well as kernels'."""
    asks_within = False
    """Whether ``decode_work`` and ``hybrid_work`` take ``within_tokens``: of the decodes' contexts at most the window's each."""
    calibration: Mapping[str, Any] = {}
    """Sizes at which an estimator takes its samples, where they are not :mod:`bullet.estimators.sampling`'s own."""
    calibration_noise_std = 0.03
    """Relative noise of those samples."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int = 1) -> None:
        self.model = model
        self.gpu = gpu
        self.tensor_parallel = tensor_parallel
        self.num_sms = gpu.num_sms

    @property
    @abstractmethod
    def source(self) -> str:
        """Where seconds are from, one line."""

    def sampled(self) -> Device:
        """The device as an estimator's samples see it."""
        return self

    @abstractmethod
    def prefill_work(self, pieces: Sequence[tuple[int, int]], layers: int, *, logits_seqs: int) -> StepWork:
        """``layers`` of the model's layers over the pieces; the LM head on ``logits_seqs`` sequences (0: none)."""

    @abstractmethod
    def decode_work(self, num_seqs: int, context_tokens: int) -> StepWork:
        """A whole iteration."""

    @abstractmethod
    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, *, logits_seqs: int,
                    layers: int | None = None) -> StepWork:
        """One lock-step batch: dense kernels once over all tokens, attention of both parts; all layers unless said."""

    @abstractmethod
    def solo_seconds(self, work: Any, sms: int) -> float:
        """The step alone on ``sms`` SMs, the others idle."""

    @abstractmethod
    def corun_seconds(self, prefill: Any, p: int, decode: Any, d: int) -> tuple[float, float]:
        """Full durations of each if the other ran beside it throughout. ``p + d > N``: the excess is shared."""

    def decode_seconds(self, num_seqs: int, context_tokens: int, sms: int) -> float:
        """``solo_seconds(decode_work(num_seqs, context_tokens), sms)``, to the last bit."""
        return self.solo_seconds(self.decode_work(num_seqs, context_tokens), sms)

    def prefill_seconds_all(self, work: StepWork, splits: SplitTable, decode: StepWork | None) -> NDArray[np.float64]:
        """Prefill's seconds on each split beside ``decode`` (or alone), and alone on N; shape (n + 1,)."""
        return self._all(work, decode, splits, True)

    def decode_seconds_all(self, work: StepWork, splits: SplitTable, prefill: StepWork | None) -> NDArray[np.float64]:
        """Decode's seconds on each split beside ``prefill`` (or alone), and alone on N; shape (n + 1,)."""
        return self._all(work, prefill, splits, False)

    def _all(self, work: Any, other: Any, splits: SplitTable, is_prefill: bool) -> NDArray[np.float64]:
        pairs = zip(splits.prefill_sms.tolist(), splits.decode_sms.tolist(), strict=True)
        if other is None:
            seconds = [self.solo_seconds(work, p if is_prefill else d) for p, d in pairs]
        elif is_prefill:
            seconds = [self.corun_seconds(work, p, other, d)[0] for p, d in pairs]
        else:
            seconds = [self.corun_seconds(other, p, work, d)[1] for p, d in pairs]
        return np.array([*seconds, self.solo_seconds(work, splits.num_sms)])

    def coruns_all(self, prefills: Sequence[Any], decode: Any,
                   splits: SplitTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of each prefill, and of the decode step, beside each other on each split; two arrays (prefills, splits)."""
        pairs = list(zip(splits.prefill_sms.tolist(), splits.decode_sms.tolist(), strict=True))
        both = np.array([[self.corun_seconds(work, p, decode, d) for p, d in pairs] for work in prefills])
        return both[..., 0], both[..., 1]

    def min_prefill_seconds(self, prompt_tokens: int) -> float:
        """No schedule brings a first token sooner (I3); 0 where a device knows no bound."""
        return 0.0
