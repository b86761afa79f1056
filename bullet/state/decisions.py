"""What a policy may answer: a step for its lane, or to wait; the splits it may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.errors import PartitionError

# ------------------------------------------------------------------------------------------- SM splits


@dataclass(frozen=True)
class SplitTable:
    """The splits (p, d), p + d = N, that a partition mechanism can grant, in ascending d.

    Arrays "over all splits" have length ``n + 1``: one entry a split, and at index ``full`` the lane alone on all N.
    """

    num_sms: int
    decode_sms: NDArray[np.int64]

    def __post_init__(self) -> None:
        d = self.decode_sms
        if not (len(d) and d[0] > 0 and d[-1] < self.num_sms and np.all(np.diff(d) > 0)):
            raise PartitionError(f"decode SMs {d.tolist()}: must ascend within 1..{self.num_sms - 1}")

    @classmethod
    def every(cls, num_sms: int, step_sms: int = 2) -> SplitTable:
        """Both sides multiples of ``step_sms`` (2: what libsmctrl grants in the paper)."""
        if num_sms % step_sms or num_sms < 2 * step_sms:
            raise PartitionError(f"partition step of {step_sms} SMs: must divide the device's {num_sms} into 2 or more")
        return cls(num_sms, np.arange(step_sms, num_sms, step_sms, dtype=np.int64))

    @property
    def prefill_sms(self) -> NDArray[np.int64]:
        """Prefill's side of each split."""
        return self.num_sms - self.decode_sms

    @property
    def full(self) -> int:
        """Index of "alone on all N SMs"."""
        return len(self.decode_sms)


class Partition(NamedTuple):
    """SMs that each phase is to hold. The sum may exceed N: the excess is shared. (N, N) shares everything."""

    prefill_sms: int
    decode_sms: int


# ----------------------------------------------------------------------------------------------- steps


class Published(NamedTuple):
    """What one lane tells the other.

    ``ttft_margin_s``: seconds by which the P90 (while a batch runs: the worst) estimated TTFT is inside its SLO;
    ``tpot_margin_s``: seconds by which the next decode step may lengthen with P90(TPOT) still inside; negative:
    missed; ``None``: nothing said. A P90 meets its SLO exactly when the order statistic of the slacks is not negative.
    """

    ttft_margin_s: float | None = None
    tpot_margin_s: float | None = None


class PrefillStep(NamedTuple):
    """Run ``layers`` more layers of the prefill batch on ``sms`` SMs; ``admit`` (ids) starts a new batch first."""

    sms: int
    layers: int
    admit: tuple[int, ...] = ()
    predicted_s: float | None = None
    published: Published | None = None
    target: Partition | None = None
    preempt: tuple[int, ...] = ()
    reason: str = ""


class DecodeStep(NamedTuple):
    """One token for every request of the decode batch, newly prefilled ones merged first, on ``sms`` SMs."""

    sms: int
    predicted_s: float | None = None
    published: Published | None = None
    target: Partition | None = None
    preempt: tuple[int, ...] = ()
    reason: str = ""


class Chunk(NamedTuple):
    """``new_tokens`` of one request's prompt, after ``past_tokens`` already computed."""

    request_id: int
    new_tokens: int
    past_tokens: int


class HybridStep(NamedTuple):
    """One lock-step batch: prompt chunks (those with no past are admitted) and, if ``decode``, all decodes.

    ``steady`` (a step of decodes alone): the answer would stay the same until a request arrives or the next iteration's KV
    blocks are not free, so a driver need not ask until then. ``by_chunk``: a prompt takes KV blocks for the tokens of its chunks
    as they come, not for all its known tokens when it is admitted; the same in all of a policy's steps.
    """

    sms: int
    chunks: tuple[Chunk, ...] = ()
    decode: bool = True
    overlap: str = "none"
    predicted_s: float | None = None
    published: Published | None = None
    target: Partition | None = None
    preempt: tuple[int, ...] = ()
    reason: str = ""
    steady: bool = False
    by_chunk: bool = False


class Wait(NamedTuple):
    """Launch nothing until ``until_s`` (``None``: until something changes), and ask again at any change."""

    until_s: float | None = None
    published: Published | None = None
    target: Partition | None = None
    reason: str = ""


Step = PrefillStep | DecodeStep | HybridStep
Decision = Step | Wait
