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

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from bullet.errors import PartitionError
from bullet.gpu.driver import Driver
from bullet.gpu.splits import Granularity, Split, SplitRefusedError, granularity, require_legal

log = logging.getLogger(__name__)

_STREAM_NON_BLOCKING = 1
_GREEN_DEFAULT_STREAM = 1


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
    """One entry of the table: both lanes of a split. ``creation_s``: wall-clock seconds to make it. ``group``: the lane that
    holds the group of SMs that was asked for, while the other has the remainder; empty where nothing is split."""

    index: int
    asked: Split
    prefill: Lane
    decode: Lane
    creation_s: float = 0.0
    group: str = ""

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
            table.pairs.append(Pair(len(table.pairs), split, *lanes, creation_s=clock() - started, group=_group(split, rule)))
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


def _group(split: Split, rule: Granularity) -> str:
    """Which side of a split is asked for as a group: prefill wherever that is possible."""
    return "prefill" if split.prefill_sms % rule.multiple_sms == 0 else "decode"


def _make_pair(owner: _GreenContexts, split: Split, rule: Granularity, flags: int, priorities: tuple[int, int],
               wrap: Callable[[int], Any]) -> tuple[Lane, Lane]:
    grouped_prefill = _group(split, rule) == "prefill"
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


def plain_table(backend: str, num_sms: int, splits: Iterable[Split], make_stream: Callable[[int], Any] = lambda priority: None,
                priorities: tuple[int, int] = (0, 0)) -> PartitionTable:
    """Pairs that nothing but their users' word keeps apart, and no driver owns."""
    return PartitionTable(backend, num_sms, [
        Pair(i, s, Lane("prefill", s.prefill_sms, s.prefill_sms, make_stream(priorities[0])),
             Lane("decode", s.decode_sms, s.decode_sms, make_stream(priorities[1]))) for i, s in enumerate(splits)])


def software_table(splits: Sequence[Split], num_sms: int, make_stream: Callable[[int], Any]) -> PartitionTable:
    """Plain streams whose kernels bound their own grids: no isolation, no torch operations (:meth:`allow`)."""
    for split in splits:
        if min(split) < 1 or sum(split) > num_sms:
            raise SplitRefusedError(f"split {split}: must be positive and at most {num_sms} SMs together")
    return plain_table("software", num_sms, splits, make_stream)


def unpartitioned_table(num_sms: int, make_stream: Callable[[int], Any],
                        priorities: tuple[int, int] = (0, 0)) -> PartitionTable:
    """One pair of plain streams, each on all SMs. Results on it are labelled "no partition"."""
    return plain_table("none", num_sms, [Split(num_sms, num_sms)], make_stream, priorities)


def simulated_table(splits: Sequence[Split], num_sms: int, compute_capability: tuple[int, int],
                    flags: int = 0) -> PartitionTable:
    """The arithmetic of the mechanism: what would be granted on such a device, without one."""
    rule = granularity(compute_capability, flags)
    for split in splits:
        require_legal(split, num_sms, rule)
    table = plain_table("simulated", num_sms, splits)
    table.pairs = [dataclasses.replace(pair, group=_group(pair.granted, rule)) for pair in table.pairs]
    return table
