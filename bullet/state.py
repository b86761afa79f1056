"""What a policy may know, and the only legal transitions.

A policy reads :class:`SystemState` and returns a step; a driver (simulated or real) carries the step out through
``begin_*`` and ``finish_*``. True output lengths are not here: drivers keep them and say which requests finished.

Cost does not grow with tokens: a decode iteration over n requests moves one counter. A request in the batch is
described relative to that counter (``iteration``), so nothing is touched until it joins or leaves::

    tokens in the KV cache = cached at joining    + (iteration - iteration at joining)
    tokens generated       = generated at joining + (iteration - iteration at joining)

and it needs a fresh KV block in the iterations congruent to one residue of the block size, so a histogram of
residues tells how many blocks the next iteration takes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.config import KV_BLOCK_TOKENS
from bullet.errors import ConfigError, PartitionError

PREFILL = "prefill"
DECODE = "decode"
HYBRID = "hybrid"


class Phase(IntEnum):
    """Where a request is. READY: prefilled, waiting to merge into the decode batch."""

    WAITING = 0
    PREFILL = 1
    READY = 2
    DECODE = 3
    FINISHED = 4
    REJECTED = 5


class Request:
    """One request as the scheduler sees it; its output length is not known here.

    ``generated``: tokens generated when it last joined or left the decode batch (inside the batch ask
    :meth:`DecodeBatch.generated`). ``computed_tokens``: progress of a chunked prefill. ``first_token_s`` keeps its
    value through preemption.
    """

    __slots__ = ("admitted_s", "arrival_s", "computed_tokens", "first_token_s", "generated", "id", "join_iteration",
                 "join_tokens", "phase", "preemptions", "prompt_tokens", "queued_s", "slot", "ttft_slo_s")

    def __init__(self, id: int, arrival_s: float, prompt_tokens: int, ttft_slo_s: float) -> None:
        self.id = id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.ttft_slo_s = ttft_slo_s
        self.phase = Phase.WAITING
        self.generated = 0
        self.computed_tokens = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.queued_s = arrival_s
        self.preemptions = 0
        self.join_iteration = 0
        self.join_tokens = 0
        self.slot = -1

    @property
    def known_tokens(self) -> int:
        """Tokens that a prefill must compute: the prompt, and after a preemption what was generated too."""
        return self.prompt_tokens + self.generated

    def __repr__(self) -> str:
        return (f"Request({self.id}, {self.phase.name}, prompt={self.prompt_tokens}, generated={self.generated}, "
                f"computed={self.computed_tokens})")


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
    blocks are not free, so a driver need not ask until then.
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


class Wait(NamedTuple):
    """Launch nothing until ``until_s`` (``None``: until something changes), and ask again at any change."""

    until_s: float | None = None
    published: Published | None = None
    target: Partition | None = None
    reason: str = ""


Step = PrefillStep | DecodeStep | HybridStep
Decision = Step | Wait


class InFlight:
    """A step that a lane is executing: it keeps the SMs it was launched with."""

    __slots__ = ("start_s", "step")

    def __init__(self, step: Step, start_s: float) -> None:
        self.step = step
        self.start_s = start_s

    def remaining_s(self, now_s: float) -> float:
        """Predicted seconds left, 0 if overdue or never predicted."""
        predicted = self.step.predicted_s
        if predicted is None:
            return 0.0
        left = self.start_s + predicted - now_s
        return left if left > 0.0 else 0.0


# -------------------------------------------------------------------------------------------- KV cache


class KvCache:
    """Paged KV cache, counted in blocks: free + referenced = all (I4)."""

    __slots__ = ("block_tokens", "free_blocks", "peak_blocks", "total_blocks")

    def __init__(self, total_blocks: int, block_tokens: int = KV_BLOCK_TOKENS) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ConfigError(f"KV cache of {total_blocks} blocks of {block_tokens} tokens: both must be positive")
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.block_tokens = block_tokens
        self.peak_blocks = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block_tokens)

    @property
    def used_blocks(self) -> int:
        """Referenced blocks."""
        return self.total_blocks - self.free_blocks

    def take(self, blocks: int) -> None:
        """Reference ``blocks`` free ones; taking more than are free is a policy's bug."""
        self.free_blocks -= blocks
        assert self.free_blocks >= 0, f"KV overdrawn by {-self.free_blocks} of {self.total_blocks} blocks"
        used = self.total_blocks - self.free_blocks
        if used > self.peak_blocks:
            self.peak_blocks = used

    def give_back(self, blocks: int) -> None:
        """Free ``blocks``."""
        self.free_blocks += blocks
        assert self.free_blocks <= self.total_blocks, f"KV: {self.free_blocks} free of {self.total_blocks} blocks"


# ------------------------------------------------------------------------------------- queue and batches


class _Column:
    """A growing column of floats: elements are written one by one, cheaply, and read as one numpy array."""

    __slots__ = ("items", "view")

    def __init__(self) -> None:
        self._hold(array("d", bytes(8 * 64)))

    def _hold(self, items: array[float]) -> None:
        self.items = items
        self.view: NDArray[np.float64] = np.frombuffer(items)

    def set(self, index: int, value: float) -> None:
        """Write one element; room is made for it."""
        if index >= len(self.items):
            self._hold(self.items + array("d", bytes(8 * max(len(self.items), index + 1 - len(self.items)))))
        self.items[index] = value


class WaitingQueue:
    """Requests not yet admitted, in order of arrival; preempted ones are put in front.

    Columns are kept beside the list, so that a policy can weigh hundreds of requests at once: ``arrival_s``,
    ``ttft_slo_s``, ``known_tokens`` (to prefill), in the order of ``requests``; not to be written to. ``version`` changes with
    every change: results may be cached against it.
    """

    __slots__ = ("arrival_s", "known_tokens", "requests", "ttft_slo_s", "version")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrival_s: list[float] = []
        self.ttft_slo_s: list[float] = []
        self.known_tokens: list[int] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Request:
        return self.requests[index]

    def append(self, request: Request) -> None:
        """Enqueue a new arrival."""
        self.requests.append(request)
        self.arrival_s.append(request.arrival_s)
        self.ttft_slo_s.append(request.ttft_slo_s)
        self.known_tokens.append(request.known_tokens)
        self.version += 1

    def push_front(self, request: Request) -> None:
        """Enqueue a preempted request ahead of all."""
        self.requests.insert(0, request)
        self.arrival_s.insert(0, request.arrival_s)
        self.ttft_slo_s.insert(0, request.ttft_slo_s)
        self.known_tokens.insert(0, request.known_tokens)
        self.version += 1

    def refresh(self, request: Request) -> None:
        """A waiting request gained a token, from a step that was in flight when it was preempted."""
        self.known_tokens[self.requests.index(request)] = request.known_tokens
        self.version += 1

    def remove(self, request_id: int) -> Request:
        """Take one request out; ``KeyError`` if it does not wait."""
        requests = self.requests
        if requests and requests[0].id == request_id:
            index = 0
        else:
            index = next((i for i, r in enumerate(requests) if r.id == request_id), -1)
            if index < 0:
                raise KeyError(request_id)
        del self.arrival_s[index], self.ttft_slo_s[index], self.known_tokens[index]
        self.version += 1
        return requests.pop(index)


class PrefillBatch:
    """Whole prompts that go through the layers together; fixed until the last layer."""

    __slots__ = ("deadline_s", "layers_done", "layers_left", "num_layers", "requests", "tokens", "total_tokens")

    def __init__(self, requests: tuple[Request, ...], num_layers: int) -> None:
        self.requests = requests
        self.tokens = tuple(r.known_tokens for r in requests)
        self.total_tokens = sum(self.tokens)
        self.num_layers = num_layers
        #: Layers that ended, and layers still to end (those in flight are among these).
        self.layers_done, self.layers_left = 0, num_layers
        #: Latest finish at which every request still meets its TTFT SLO; a request that already has its first
        #: token (recomputed after preemption) has no TTFT left to miss.
        self.deadline_s = min((r.arrival_s + r.ttft_slo_s for r in requests if r.first_token_s is None),
                              default=float("inf"))

    def advance(self, layers: int) -> None:
        """Layers ended."""
        self.layers_done += layers
        self.layers_left -= layers


CHANGES_KEPT = 16
"""Joins and leaves that a decode batch remembers: who follows them step by step is seldom further behind."""


class DecodeBatch:
    """Requests that gain a token each iteration, in order of admission (see the module's text for the arithmetic)."""

    __slots__ = ("_first_token_s", "_generated_offset", "_slots", "block_tokens", "changes", "context_tokens", "iteration",
                 "requests", "residues", "size", "version")

    def __init__(self, block_tokens: int = KV_BLOCK_TOKENS) -> None:
        self.requests: dict[int, Request] = {}
        self.size = 0  # len(requests), which is asked several times a step
        self.iteration = 0
        self.version = 0
        #: The last joins (True) and leaves, one for each step of ``version``: a request's entries in the columns below.
        self.changes: deque[tuple[float, int, bool]] = deque(maxlen=CHANGES_KEPT)
        self.block_tokens = block_tokens
        self.residues = [0] * block_tokens
        #: Tokens that the next iteration attends to, its new ones included, over the batch.
        self.context_tokens = 0
        self._first_token_s, self._generated_offset = _Column(), _Column()
        self._slots: list[Request] = []

    def __len__(self) -> int:
        return self.size

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache over the batch, between iterations."""
        return self.context_tokens - self.size

    @property
    def growth_blocks(self) -> int:
        """Fresh KV blocks that the next iteration needs."""
        return self.residues[self.iteration % self.block_tokens]

    @property
    def first_token_s(self) -> NDArray[np.float64]:
        """First-token times, shape (len,), in slot order."""
        return self._first_token_s.view[: self.size]

    @property
    def generated_offset(self) -> NDArray[np.float64]:
        """Tokens generated less ``iteration``, shape (len,), in slot order; constant while a request stays."""
        return self._generated_offset.view[: self.size]

    def cached(self, request: Request) -> int:
        """Tokens of one request in the KV cache, between iterations."""
        return request.join_tokens + self.iteration - request.join_iteration

    def generated(self, request: Request) -> int:
        """Tokens that one request has generated so far."""
        return request.generated + self.iteration - request.join_iteration

    def needs_block(self, request: Request) -> bool:
        """Whether the next iteration needs a fresh block for this request."""
        return self.cached(request) % self.block_tokens == 0

    def advance(self) -> None:
        """An iteration ended: every request has one more token."""
        self.iteration += 1
        self.context_tokens += self.size

    def join(self, request: Request) -> None:
        """Add a prefilled request: its KV holds all known tokens but the newest."""
        assert request.first_token_s is not None, request
        cached = request.prompt_tokens + request.generated - 1
        request.phase = Phase.DECODE
        request.join_iteration = self.iteration
        request.join_tokens = cached
        self.requests[request.id] = request
        self.size += 1
        self.context_tokens += cached + 1
        self.residues[(self.iteration - cached) % self.block_tokens] += 1
        slot = request.slot = len(self._slots)
        self._slots.append(request)
        self._first_token_s.set(slot, request.first_token_s)
        offset = request.generated - self.iteration
        self._generated_offset.set(slot, offset)
        self.changes.append((request.first_token_s, offset, True))
        self.version += 1

    def leave(self, request: Request) -> int:
        """Take a request out between iterations; returns the tokens it holds in the KV cache."""
        gained = self.iteration - request.join_iteration
        cached = request.join_tokens + gained
        request.generated += gained
        del self.requests[request.id]
        self.size -= 1
        self.context_tokens -= cached + 1
        self.residues[(request.join_iteration - request.join_tokens) % self.block_tokens] -= 1
        slot, last = request.slot, len(self._slots) - 1
        if slot != last:  # swap-remove keeps the columns dense
            moved = self._slots[slot] = self._slots[last]
            moved.slot = slot
            for column in (self._first_token_s, self._generated_offset):
                column.items[slot] = column.items[last]
        self._slots.pop()
        request.slot = -1
        assert request.first_token_s is not None, request
        self.changes.append((request.first_token_s, request.generated - self.iteration, False))
        self.version += 1
        return cached


# -------------------------------------------------------------------------------------------- the state


class SystemState:
    """Queue, batches, KV blocks, what runs and what is published: all that a policy may know.

    Two-lane systems use ``prefill`` (whole prompts, layer by layer) and ``ready``; chunked systems use ``chunked``
    (admitted prompts not yet computed in full, in order of admission). ``in_flight`` maps a lane to its step;
    ``target``, ``prefill_published`` and ``decode_published`` are as the lane being asked can see them.
    """

    def __init__(self, splits: SplitTable, kv: KvCache, num_layers: int, initial: Partition) -> None:
        self.splits = splits
        self.kv = kv
        self.num_layers = num_layers
        self.queue = WaitingQueue()
        self.prefill: PrefillBatch | None = None
        self.ready: list[Request] = []
        self.chunked: list[Request] = []
        self._launched: list[Request] = []  # requests of the chunks in flight
        self.decode = DecodeBatch(kv.block_tokens)
        self.in_flight: dict[str, InFlight] = {}
        self.target = initial
        self.prefill_published = Published()
        self.decode_published = Published()

    # ---- questions -------------------------------------------------------------------------------

    @property
    def decode_seqs(self) -> int:
        """Sequences of the next decode iteration: the batch and those waiting to merge."""
        return self.decode.size + len(self.ready)

    @property
    def decode_context_tokens(self) -> int:
        """Tokens attended by the next decode iteration, those waiting to merge included."""
        return self.next_decode()[1]

    def next_decode(self) -> tuple[int, int]:
        """``decode_seqs`` and ``decode_context_tokens`` at once: every decision asks for both."""
        decode, ready = self.decode, self.ready
        context = decode.context_tokens
        if not ready:
            return decode.size, context
        for request in ready:
            context += request.prompt_tokens + request.generated
        return decode.size + len(ready), context

    def decode_growth_blocks(self) -> int:
        """Fresh KV blocks that the next decode iteration needs, merging requests included."""
        growth = self.decode.growth_blocks
        for request in self.ready:
            growth += (request.known_tokens - 1) % self.kv.block_tokens == 0
        return growth

    # ---- transitions: drivers only ---------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request joins the queue."""
        self.queue.append(request)

    def begin_prefill(self, step: PrefillStep, now_s: float) -> None:
        """Launch layers; with ``admit`` take those requests out of the queue and reserve their KV first."""
        if step.preempt:
            self._preempt(step.preempt, now_s)
        if step.admit:
            assert self.prefill is None, "a prefill batch is fixed until its last layer"
            requests = tuple(self._admit(i, now_s) for i in step.admit)
            self.prefill = PrefillBatch(requests, self.num_layers)
        assert self.prefill is not None, f"{step}: nothing to prefill"
        assert 0 < step.layers <= self.prefill.layers_left, f"{step}: {self.prefill.layers_left} layers are left"
        self.in_flight[PREFILL] = InFlight(step, now_s)

    def finish_prefill(self, now_s: float) -> tuple[Request, ...]:
        """Layers ended; after the last one the batch's requests have a token more and are returned (READY)."""
        step = self.in_flight.pop(PREFILL).step
        batch = self.prefill
        assert batch is not None
        assert isinstance(step, PrefillStep)
        batch.advance(step.layers)
        if batch.layers_left:
            return ()
        self.prefill = None
        for request in batch.requests:
            self._emit_first(request, now_s)
            request.phase = Phase.READY
            self.ready.append(request)
        return batch.requests

    def begin_decode(self, step: DecodeStep, now_s: float) -> list[Request]:
        """Merge READY requests (returned), take the KV blocks of the coming tokens, launch."""
        if step.preempt:
            self._preempt(step.preempt, now_s)
        merged, self.ready = self.ready, []  # a new list: the driver keeps the merged one until the iteration ends
        for request in merged:
            self.decode.join(request)
        assert self.decode.size, f"{step}: nothing to decode"
        self.kv.take(self.decode.growth_blocks)
        self.in_flight[DECODE] = InFlight(step, now_s)
        return merged

    def finish_decode(self, finished: Iterable[Request]) -> None:
        """Every request of the batch gained a token; the driver says which reached their end."""
        del self.in_flight[DECODE]
        self.end_hybrid_decode(finished)

    def begin_hybrid(self, step: HybridStep, now_s: float) -> list[Request]:
        """Admit chunks without a past, take KV blocks for the decodes' tokens, launch; returns each chunk's request."""
        if step.preempt:
            self._preempt(step.preempt, now_s)
        decode = self.decode
        assert step.chunks or (step.decode and decode.size), f"{step}: an empty batch"
        self._launched = launched = self._begin_chunks(step, now_s) if step.chunks else []
        if step.decode:
            self.kv.take(decode.residues[decode.iteration % decode.block_tokens])
        self.in_flight[HYBRID] = InFlight(step, now_s)
        return launched

    def _begin_chunks(self, step: HybridStep, now_s: float) -> list[Request]:
        launched: list[Request] = []
        by_id = {r.id: r for r in self.chunked} if self.chunked else {}
        for request_id, new, past in step.chunks:
            request = by_id.get(request_id)
            if request is None:
                assert past == 0, f"{step}: request {request_id} has no past"
                request = self._admit(request_id, now_s)
                self.chunked.append(request)
            assert request.computed_tokens == past, f"{request}: chunk starts at {past}"
            assert 0 < new <= request.prompt_tokens + request.generated - past, (
                f"{request}: a chunk is empty or runs over its prompt: {new} tokens")
            launched.append(request)
        return launched

    def finish_hybrid(self, now_s: float) -> list[Request]:
        """The batch ended; requests whose prompt is complete have a token more and are returned.

        The driver then calls :meth:`end_hybrid_decode` for the decodes and :meth:`join_decode` or :meth:`release`
        for each returned request, so that a one-token output never enters the decode batch.
        """
        step = self.in_flight.pop(HYBRID).step
        assert isinstance(step, HybridStep)
        if not step.chunks:
            return []
        complete: list[Request] = []
        for i, request in enumerate(self._launched):
            request.computed_tokens += step.chunks[i].new_tokens
            if request.computed_tokens == request.prompt_tokens + request.generated:
                self._emit_first(request, now_s)
                complete.append(request)
                self.chunked.remove(request)
        return complete

    def end_hybrid_decode(self, finished: Iterable[Request]) -> None:
        """As :meth:`finish_decode`, for the decodes of a hybrid batch."""
        decode, kv = self.decode, self.kv
        decode.advance()
        for request in finished:
            kv.give_back(-(-decode.leave(request) // kv.block_tokens))
            request.phase = Phase.FINISHED

    def join_decode(self, request: Request) -> None:
        """A request whose prompt is complete joins the decode batch between iterations."""
        self.decode.join(request)

    def release(self, request: Request) -> None:
        """A request ended right after its prefill (READY or just completed): free its KV."""
        if request.phase is Phase.READY:
            self.ready.remove(request)
        self.kv.give_back(self.kv.blocks_for(request.known_tokens - 1))
        request.phase = Phase.FINISHED

    # ---- inside ----------------------------------------------------------------------------------

    def _admit(self, request_id: int, now_s: float) -> Request:
        request = self.queue.remove(request_id)
        self.kv.take(-(-(request.prompt_tokens + request.generated) // self.kv.block_tokens))
        request.phase = Phase.PREFILL
        if request.admitted_s is None:
            request.admitted_s = now_s
        return request

    def _emit_first(self, request: Request, now_s: float) -> None:
        request.generated += 1
        request.computed_tokens = 0
        if request.first_token_s is None:
            request.first_token_s = now_s

    def _preempt(self, victims: tuple[int, ...], now_s: float) -> None:
        """Preemption by recompute: free all KV, forget progress, back to the front of the queue."""
        for request_id in victims:
            request = self.decode.requests.get(request_id)
            if request is not None:
                assert DECODE not in self.in_flight, f"{request} is in the iteration in flight"
                self.kv.give_back(self.kv.blocks_for(self.decode.leave(request)))
            else:
                waiting = self.chunked if any(r.id == request_id for r in self.chunked) else self.ready
                request = next(r for r in waiting if r.id == request_id)
                waiting.remove(request)
                held = request.known_tokens - (1 if request.phase is Phase.READY else 0)
                self.kv.give_back(self.kv.blocks_for(held))
            request.phase = Phase.WAITING
            request.computed_tokens = 0
            request.preemptions += 1
            request.queued_s = now_s
            self.queue.push_front(request)

    def check(self) -> None:
        """I4 and the batch arithmetic, recomputed the slow way; for debug runs."""
        kv, decode = self.kv, self.decode
        in_flight = DECODE in self.in_flight or (
            HYBRID in self.in_flight and getattr(self.in_flight[HYBRID].step, "decode", False))
        held = sum(kv.blocks_for(decode.cached(r) + (1 if in_flight else 0)) for r in decode.requests.values())
        held += sum(kv.blocks_for(r.known_tokens - 1) for r in self.ready)
        held += sum(kv.blocks_for(r.known_tokens) for r in self.chunked)
        if self.prefill is not None:
            held += sum(kv.blocks_for(t) for t in self.prefill.tokens)
        assert held + kv.free_blocks == kv.total_blocks, (
            f"I4: {held} referenced + {kv.free_blocks} free != {kv.total_blocks} blocks")
        assert decode.cached_tokens == sum(decode.cached(r) for r in decode.requests.values())
        growth = sum(decode.needs_block(r) for r in decode.requests.values())
        assert growth == decode.growth_blocks, f"{growth} requests need a block, counted {decode.growth_blocks}"
        phases: list[tuple[Iterable[Request], Phase]] = [
            (self.queue, Phase.WAITING), (self.ready, Phase.READY), (self.chunked, Phase.PREFILL),
            (decode.requests.values(), Phase.DECODE)]
        for group, phase in phases:
            for request in group:
                assert request.phase is phase, f"{request} among {phase.name}"
