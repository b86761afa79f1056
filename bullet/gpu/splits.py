"""In what sizes a mechanism splits a GPU's SMs (CUDA driver API, cuDevSmResourceSplitByCount), and which splits that leaves."""

from __future__ import annotations

from typing import NamedTuple

from bullet.errors import PartitionError

IGNORE_SM_COSCHEDULING = 1
"""Split flag: multiples of 2, large clusters given up. An integer, since its enum was renamed between bindings."""


class Granularity(NamedTuple):
    """Least SMs of a group, and the step between legal sizes."""

    min_sms: int
    multiple_sms: int


class Split(NamedTuple):
    """SMs asked for: prefill's and decode's."""

    prefill_sms: int
    decode_sms: int

    def __str__(self) -> str:
        return f"{self.prefill_sms}+{self.decode_sms}"


class SplitRefusedError(PartitionError):
    """One split that the device cannot grant; others may be possible."""


def granularity(compute_capability: tuple[int, int], flags: int = 0) -> Granularity:
    """What the driver splits in, by compute capability (CUDA driver API, cuDevSmResourceSplitByCount).

    With :data:`IGNORE_SM_COSCHEDULING` Hopper and above also take multiples of 2.
    """
    major = compute_capability[0]
    if major < 6:
        raise PartitionError(f"compute capability {major}.{compute_capability[1]}: green contexts need 6.0 or newer")
    if major == 6:
        return Granularity(1, 1)
    if major == 7:
        return Granularity(2, 2)
    if major == 8:
        return Granularity(4, 2)
    return Granularity(2, 2) if flags & IGNORE_SM_COSCHEDULING else Granularity(8, 8)


def is_legal(split: Split, num_sms: int, rule: Granularity) -> bool:
    """Both sides at least the minimum, together all SMs, and one of them a multiple: the other is the remainder."""
    p, d = split
    return (p + d == num_sms and min(p, d) >= rule.min_sms
            and (p % rule.multiple_sms == 0 or d % rule.multiple_sms == 0))


def legal_splits(num_sms: int, rule: Granularity) -> list[Split]:
    """Every split that the mechanism can grant, in ascending decode SMs; empty on a device too small."""
    return [s for d in range(1, num_sms) if is_legal(s := Split(num_sms - d, d), num_sms, rule)]


def nearest_split(num_sms: int, rule: Granularity, decode_share: float) -> Split:
    """The legal split whose decode share is nearest; ties go to the one whose prefill side is the group.

    The remainder carries no co-scheduling guarantee, and it is prefill's GEMMs that use clusters.
    """
    splits = legal_splits(num_sms, rule)
    if not splits:
        raise PartitionError(f"{num_sms} SMs cannot be split in groups of at least {rule.min_sms}: "
                             "use a larger GPU or --backend none")
    return min(splits, key=lambda s: (abs(s.decode_sms - decode_share * num_sms), s.prefill_sms % rule.multiple_sms,
                                      s.decode_sms))


def require_legal(split: Split, num_sms: int, rule: Granularity) -> None:
    """Raise :class:`SplitRefusedError` with the nearest legal split."""
    if is_legal(split, num_sms, rule):
        return
    share = split.decode_sms / num_sms
    raise SplitRefusedError(
        f"split {split} of {num_sms} SMs cannot be granted: both sides at least {rule.min_sms} and one a multiple of "
        f"{rule.multiple_sms}, together {num_sms}; nearest is {nearest_split(num_sms, rule, share)}")
