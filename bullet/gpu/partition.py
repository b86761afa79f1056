"""Sole owner of SM partitions: a table of (prefill, decode) lane pairs made before anything is measured.

==============  =====================================================================================
backend         what a pair is
==============  =====================================================================================
green-context   two CUDA green contexts with disjoint SMs, one stream each, through cuda-bindings
software        two plain streams; only kernels that take ``num_sms`` respect the bound, no isolation
none            two plain streams on all SMs: the unpartitioned case
simulated       the split arithmetic alone, no device
==============  =====================================================================================

A lane's SMs are what the driver *granted*, read back; what was asked for is kept beside it. That a partition holds is
proven in :mod:`bullet.profiler.check`, never assumed. There is no reservation against the primary context: a kernel on
an ordinary stream runs on every SM, the partitions' too, so both phases go into green contexts.

Sources: CUDA driver API reference, "Green Contexts"; ../shared/GPU.md. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from bullet.errors import PartitionError

log = logging.getLogger(__name__)

BACKENDS = ("green-context", "software", "none", "simulated")

_STREAM_NON_BLOCKING = 1
_GREEN_DEFAULT_STREAM = 1
_ATTRIBUTE_NUM_SMS = 16
_ATTRIBUTE_CC_MAJOR, _ATTRIBUTE_CC_MINOR = 75, 76
MIN_DRIVER_VERSION = 12040
"""First driver (CUDA 12.4, release 550) with green contexts."""
IGNORE_SM_COSCHEDULING = 1
"""Split flag: multiples of 2, large clusters given up. An integer, since its enum was renamed between bindings."""

# Answers that concern this split alone; any other failure concerns the mechanism as a whole.
_SPLIT_REFUSALS = {"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION",
                   "CUDA_ERROR_INVALID_RESOURCE_TYPE"}
_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, "
                            "or use --device cpu or --device simulated",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver has no green contexts: driver 550 or newer is needed "
                                "(not under MIG or vGPU), or use --backend none",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's kernel module and library differ: reboot or reinstall the driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "a context needs about 44 MB: free GPU memory or measure fewer splits (--splits)",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds the GPU exclusively: end it or choose another GPU",
}


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


@dataclass(frozen=True)
class Lane:
    """Where one phase runs: ``sms`` granted, ``asked_sms`` requested, and the stream that carries its work.

    ``stream`` is None for the simulated backend. ``handle`` and ``context``: the driver's own stream and green context,
    where there are any.
    """

    name: str
    sms: int
    asked_sms: int
    stream: Any = None
    handle: int | None = None
    context: Any = None


@dataclass(frozen=True)
class Pair:
    """One entry of the table: both lanes of a split. ``creation_s``: wall-clock seconds to make it."""

    index: int
    asked: Split
    prefill: Lane
    decode: Lane
    creation_s: float = 0.0

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.prefill, self.decode

    @property
    def granted(self) -> Split:
        return Split(self.prefill.sms, self.decode.sms)


@dataclass
class PartitionTable:
    """All pairs of one backend, and the only thing that may destroy them. A context manager; ``close`` is idempotent.

    ``refused``: splits that were not granted, with the reason in one line.
    """

    backend: str
    num_sms: int
    pairs: list[Pair]
    refused: list[tuple[Split, str]] = field(default_factory=list)
    on_close: Callable[[], None] | None = None
    driver: Driver | None = None
    before_close: list[Callable[[], None]] = field(default_factory=list)
    """Called first on close: whoever captured graphs on these streams releases them here."""

    def allow(self, operation: str, takes_num_sms: bool) -> None:
        """Refuse, by name, an operation whose SMs this backend cannot bound."""
        if self.backend == "software" and not takes_num_sms:
            raise PartitionError(f"{operation} is a torch operation: the software backend bounds only kernels that "
                                 "take num_sms (memory_stream, alu_spin); use --backend green-context or none")

    def lane(self, name: str, sms: int) -> Lane:
        """A lane by role and granted SMs."""
        for pair in self.pairs:
            for lane in pair.lanes:
                if lane.name == name and lane.sms == sms:
                    return lane
        raise PartitionError(f"no {name} lane of {sms} SMs in the table: it has "
                             f"{', '.join(str(p.granted) for p in self.pairs) or 'no pair'}")

    @contextmanager
    def current(self, lane: Lane) -> Iterator[None]:
        """The lane's green context is current on this thread; nothing to do for a lane without one."""
        if self.driver is None or lane.context is None:
            yield
            return
        self.driver.call("cuCtxPushCurrent", self.driver.call("cuCtxFromGreenCtx", lane.context))
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def close(self) -> None:
        """Release graphs, then streams, then contexts. Everything is attempted; the first failure is raised last."""
        first: Exception | None = None
        while self.before_close:
            try:
                self.before_close.pop()()
            except Exception as exc:
                first = first or exc
        action, self.on_close = self.on_close, None
        self.pairs = []
        if action is not None:
            try:
                action()
            except Exception as exc:
                first = first or exc
        if first is not None:
            raise first

    def __enter__(self) -> PartitionTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if exc is None:
                raise
            log.warning("while cleaning up: %s", failure)  # the first error is the one to report


# ------------------------------------------------------------------------------------------ the driver


class Driver:
    """The driver's calls through ``cuda.bindings.driver``, each checked; errors say what to do.

    ``module`` is injected by tests: anything with the same functions returning ``(code, *values)``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls) -> Driver:
        """Import the bindings; :class:`PartitionError` if they are missing."""
        try:
            from cuda.bindings import driver
        except ImportError as exc:
            raise PartitionError(f"cuda-bindings is not installed ({exc}): pip install 'cuda-bindings>=12.8,<14', "
                                 "or use --backend none") from None
        return cls(driver)

    def call(self, name: str, *arguments: Any) -> Any:
        """One driver call: its values (none, one, or a tuple), or :class:`PartitionError` in one line."""
        function = getattr(self._module, name, None)
        if function is None:
            raise PartitionError(f"this cuda-bindings has no {name}: green contexts need cuda-bindings 12.8 or newer, "
                                 "or use --backend none")
        try:
            code, *values = function(*arguments)
        except RuntimeError as exc:
            # Raised where libcuda is absent, and where an old libcuda lacks the symbol.
            if name in ("cuInit", "cuDriverGetVersion"):
                raise PartitionError(f"no NVIDIA driver ({_one_line(exc)}): install one, or use --device cpu or "
                                     "--device simulated") from None
            raise PartitionError(f"the driver has no {name} ({_one_line(exc)}): driver 550 (CUDA 12.4) or newer is "
                                 "needed, or use --backend none") from None
        label = getattr(code, "name", str(code))
        if int(code) != 0:
            advice = _ADVICE.get(label, "see the CUDA driver API reference, or use --backend none")
            kind = SplitRefusedError if label in _SPLIT_REFUSALS else PartitionError
            raise kind(f"{name} answered {label}: {advice}")
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def version(self) -> int:
        """CUDA version that the driver supports, 1000 x major + 10 x minor."""
        self.call("cuInit", 0)
        return int(self.call("cuDriverGetVersion"))

    def require_green_contexts(self) -> None:
        """:class:`PartitionError` where the driver is older than green contexts."""
        version = self.version()
        if version < MIN_DRIVER_VERSION:
            raise PartitionError(f"driver supports CUDA {version // 1000}.{version % 1000 // 10}: green contexts need "
                                 "12.4 or newer (driver 550); update the driver, or use --backend none")

    def device(self, ordinal: int) -> tuple[Any, int, tuple[int, int]]:
        """The device, its SMs and its compute capability."""
        device = self.call("cuDeviceGet", ordinal)
        sms, major, minor = (int(self.call("cuDeviceGetAttribute", self._enum("CUdevice_attribute", value), device))
                             for value in (_ATTRIBUTE_NUM_SMS, _ATTRIBUTE_CC_MAJOR, _ATTRIBUTE_CC_MINOR))
        return device, sms, (major, minor)

    def sm_resource(self, device: Any) -> Any:
        return self.call("cuDeviceGetDevResource", device, self._enum("CUdevResourceType", 1))

    def green_sms(self, context: Any) -> int:
        """SMs that a green context holds, read back from the driver."""
        return int(self.call("cuGreenCtxGetDevResource", context, self._enum("CUdevResourceType", 1)).sm.smCount)

    def _enum(self, name: str, value: int) -> Any:
        kind = getattr(self._module, name, None)
        if kind is None:
            raise PartitionError(f"this cuda-bindings has no {name}: green contexts need cuda-bindings 12.8 or newer, "
                                 "or use --backend none")
        return kind(value)


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:200]


class _GreenContexts:
    """Owns every green context and stream it makes, in order of creation, until :meth:`destroy`."""

    def __init__(self, driver: Driver, device: Any) -> None:
        self.driver = driver
        self.device = device
        self.contexts: list[Any] = []
        self.streams: list[Any] = []

    def make_lane(self, name: str, asked_sms: int, resource: Any, priority: int,
                  wrap: Callable[[int], Any]) -> Lane:
        driver = self.driver
        descriptor = driver.call("cuDevResourceGenerateDesc", [resource], 1)
        context = driver.call("cuGreenCtxCreate", descriptor, self.device, _GREEN_DEFAULT_STREAM)
        self.contexts.append(context)
        sms = driver.green_sms(context)
        stream = driver.call("cuGreenCtxStreamCreate", context, _STREAM_NON_BLOCKING, priority)
        self.streams.append(stream)
        return Lane(name, sms, asked_sms, wrap(int(stream)), int(stream), context)

    def destroy(self, keep: tuple[int, int] = (0, 0)) -> None:
        """Streams first: destroying one after its context leaks it. ``keep``: how many of each stay (oldest first)."""
        first: PartitionError | None = None
        for owned, kept, call in ((self.streams, keep[1], "cuStreamDestroy"),
                                  (self.contexts, keep[0], "cuGreenCtxDestroy")):
            while len(owned) > kept:
                try:
                    self.driver.call(call, owned.pop())
                except PartitionError as exc:
                    first = first or exc
        if first is not None:
            raise first


def green_context_table(splits: Iterable[Split], *, driver: Driver | None = None, ordinal: int = 0,
                        wrap_stream: Callable[[int], Any] = lambda handle: handle, flags: int = 0,
                        priorities: tuple[int, int] = (0, 0),
                        clock: Callable[[], float] = time.perf_counter) -> PartitionTable:
    """A pair of green contexts for every split; splits that are not granted go to ``table.refused``. If the mechanism
    fails before any pair is made that is an error; later (too many contexts, say) the pairs until then are kept, and
    the rest counts as refused.

    Per split: the device's SMs -> one group of the exact size and the remainder -> a descriptor, a context, a stream
    each. The group is the prefill side where that is a multiple of the granularity.

    ``wrap_stream``: driver handle -> stream object (``torch.cuda.ExternalStream``); the table, not the wrapper, owns
    the stream. ``priorities``: (prefill, decode), lower is more urgent. Raises :class:`PartitionError` if there is no
    GPU, driver, or support, or if no split at all is granted; whatever was made until then is destroyed.
    """
    driver = driver or Driver.load()
    driver.require_green_contexts()
    device, num_sms, capability = driver.device(ordinal)
    rule = granularity(capability, flags)
    owner = _GreenContexts(driver, device)
    table = PartitionTable("green-context", num_sms, [], on_close=owner.destroy, driver=driver)
    failed = ""
    try:
        for split in splits:
            if failed:
                table.refused.append((split, failed))
                continue
            started = clock()
            mark = len(owner.contexts), len(owner.streams)
            try:
                require_legal(split, num_sms, rule)
                lanes = _make_pair(owner, split, rule, flags, priorities, wrap_stream)
            except PartitionError as exc:
                if not isinstance(exc, SplitRefusedError):
                    if not table.pairs:
                        raise
                    failed = str(exc)
                owner.destroy(keep=mark)
                table.refused.append((split, str(exc)))
                continue
            table.pairs.append(Pair(len(table.pairs), split, *lanes, creation_s=clock() - started))
        if not table.pairs:
            reasons = "; ".join(reason for _, reason in table.refused) or "no split was asked for"
            raise SplitRefusedError(f"no split was granted: {reasons}")
    except BaseException:
        try:
            table.close()
        except PartitionError as failure:
            log.warning("while cleaning up: %s", failure)
        raise
    return table


def _make_pair(owner: _GreenContexts, split: Split, rule: Granularity, flags: int, priorities: tuple[int, int],
               wrap: Callable[[int], Any]) -> tuple[Lane, Lane]:
    grouped_prefill = split.prefill_sms % rule.multiple_sms == 0
    size = split.prefill_sms if grouped_prefill else split.decode_sms
    whole = owner.driver.sm_resource(owner.device)
    groups, count, remainder = owner.driver.call("cuDevSmResourceSplitByCount", 1, whole, flags, size)
    if int(count) != 1:
        raise SplitRefusedError(f"split {split}: the driver made {int(count)} groups of {size} SMs instead of 1")
    if int(remainder.sm.smCount) <= 0:
        raise SplitRefusedError(f"split {split}: the driver granted {int(groups[0].sm.smCount)} SMs and left none")
    first, second = (groups[0], remainder) if grouped_prefill else (remainder, groups[0])
    return (owner.make_lane("prefill", split.prefill_sms, first, priorities[0], wrap),
            owner.make_lane("decode", split.decode_sms, second, priorities[1], wrap))


# ------------------------------------------------------------------------------------- other backends


def software_table(splits: Iterable[Split], num_sms: int, make_stream: Callable[[int], Any]) -> PartitionTable:
    """Plain streams whose kernels bound their own grids: no isolation, no torch operations (:meth:`allow`)."""
    pairs = []
    for index, split in enumerate(splits):
        if min(split) < 1 or sum(split) > num_sms:
            raise SplitRefusedError(f"split {split}: must be positive and at most {num_sms} SMs together")
        pairs.append(Pair(index, split, Lane("prefill", split.prefill_sms, split.prefill_sms, make_stream(0)),
                          Lane("decode", split.decode_sms, split.decode_sms, make_stream(0))))
    return PartitionTable("software", num_sms, pairs)


def unpartitioned_table(num_sms: int, make_stream: Callable[[int], Any],
                        priorities: tuple[int, int] = (0, 0)) -> PartitionTable:
    """One pair of plain streams, each on all SMs. Results on it are labelled "no partition"."""
    asked = Split(num_sms, num_sms)
    return PartitionTable("none", num_sms, [
        Pair(0, asked, Lane("prefill", num_sms, num_sms, make_stream(priorities[0])),
             Lane("decode", num_sms, num_sms, make_stream(priorities[1])))])


def simulated_table(splits: Sequence[Split], num_sms: int, compute_capability: tuple[int, int],
                    flags: int = 0) -> PartitionTable:
    """The arithmetic of the mechanism: what would be granted on such a device, without one."""
    rule = granularity(compute_capability, flags)
    for split in splits:
        require_legal(split, num_sms, rule)
    return PartitionTable("simulated", num_sms, [
        Pair(i, s, Lane("prefill", s.prefill_sms, s.prefill_sms), Lane("decode", s.decode_sms, s.decode_sms))
        for i, s in enumerate(splits)])
