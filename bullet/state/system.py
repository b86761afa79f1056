"""What a policy may know, and the only legal transitions.

A policy reads :class:`SystemState` and returns a step; a driver (simulated or real) carries the step out through
``begin_*`` and ``finish_*``. True output lengths are not here: drivers keep them and say which requests finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bullet.state.batches import DecodeBatch, PrefillBatch, WindowedDecodeBatch
from bullet.state.decisions import DecodeStep, HybridStep, Partition, PrefillStep, Published, SplitTable, Step
from bullet.state.kv import KvCache, WindowedKvCache
from bullet.state.requests import DECODE, HYBRID, PREFILL, Phase, Request, WaitingQueue
from bullet.state.sharing import SharingKvCache


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
        self._by_chunk = False  # whether they hold blocks for what is computed of them, or for all their known tokens
        self._launched: list[Request] = []  # requests of the chunks in flight
        self.admitted: list[Request] = []  # by the last step that had chunks
        self.decode = WindowedDecodeBatch(kv) if isinstance(kv, WindowedKvCache) else DecodeBatch(kv.block_tokens)
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
            growth += self.kv.growth(request.known_tokens - 1)
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
            self.prefill = PrefillBatch(tuple(self._admit(step.admit, now_s)), self.num_layers)
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
            self.kv.computed(request, request.known_tokens)
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
        self._by_chunk = step.by_chunk
        if step.by_chunk:
            return self._take_by_chunk(step, by_id, now_s)
        coming = [request_id for request_id, _, _ in step.chunks if request_id not in by_id]
        self.admitted = self._admit(coming, now_s) if coming else []
        for request in self.admitted:
            by_id[request.id] = request
            self.chunked.append(request)
        for request_id, new, past in step.chunks:
            request = by_id[request_id]
            assert request.computed_tokens == past, f"{request}: chunk starts at {past}"
            assert 0 < new <= request.prompt_tokens + request.generated - past, (
                f"{request}: a chunk is empty or runs over its prompt: {new} tokens")
            launched.append(request)
        return launched

    def _take_by_chunk(self, step: HybridStep, by_id: dict[int, Request], now_s: float) -> list[Request]:
        """As above; each chunk takes the blocks that its own tokens need."""
        kv, launched = self.kv, []
        self.admitted, blocks = [], 0
        assert not kv.sharing, "blocks with shared prefixes are reserved whole"
        for request_id, new, past in step.chunks:
            request = by_id.get(request_id)
            if request is None:
                request = self._dequeue(request_id, now_s)
                self.chunked.append(request)
                self.admitted.append(request)
            assert request.computed_tokens == past, f"{request}: chunk starts at {past}"
            assert 0 < new <= request.prompt_tokens + request.generated - past, (
                f"{request}: a chunk is empty or runs over its prompt: {new} tokens")
            blocks += kv.blocks_for(past + new) - (kv.blocks_for(past) if past else 0)
            launched.append(request)
        kv.take(blocks)
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
        sharing = self.kv.sharing
        for request, (_, new_tokens, _) in zip(self._launched, step.chunks, strict=True):
            request.computed_tokens += new_tokens
            if sharing:
                self.kv.computed(request, request.computed_tokens)
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
            kv.release(request, decode.leave(request))
            request.phase = Phase.FINISHED

    def join_decode(self, request: Request) -> None:
        """A request whose prompt is complete joins the decode batch between iterations."""
        self.decode.join(request)

    def release(self, request: Request) -> None:
        """A request ended right after its prefill (READY or just completed): free its KV."""
        if request.phase is Phase.READY:
            self.ready.remove(request)
        self.kv.release(request, request.known_tokens - 1)
        request.phase = Phase.FINISHED

    # ---- inside ----------------------------------------------------------------------------------

    def _admit(self, request_ids: Sequence[int], now_s: float) -> list[Request]:
        requests = [self._dequeue(request_id, now_s) for request_id in request_ids]
        for request, past in zip(requests, self.kv.reserve(requests), strict=True):
            request.computed_tokens = past
        return requests

    def _dequeue(self, request_id: int, now_s: float) -> Request:
        request = self.queue.remove(request_id)
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
                self.kv.release(request, self.decode.leave(request))
            else:
                waiting = self.chunked if any(r.id == request_id for r in self.chunked) else self.ready
                request = next(r for r in waiting if r.id == request_id)
                waiting.remove(request)
                held = (request.known_tokens - 1 if request.phase is Phase.READY else
                        request.computed_tokens if self._by_chunk else request.known_tokens)
                self.kv.release(request, held)
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
        room = {r.id: (r, decode.cached(r) + (1 if in_flight else 0)) for r in decode.requests.values()}
        room |= {r.id: (r, r.known_tokens - 1) for r in self.ready}
        step = self.in_flight[HYBRID].step if HYBRID in self.in_flight else None
        new = {chunk.request_id: chunk.new_tokens for chunk in step.chunks} if isinstance(step, HybridStep) else {}
        room |= {r.id: (r, r.computed_tokens + new.get(r.id, 0) if self._by_chunk else r.known_tokens) for r in self.chunked}
        room |= {r.id: (r, r.known_tokens) for r in (self.prefill.requests if self.prefill is not None else ())}
        if isinstance(kv, SharingKvCache):
            held = kv.check(room)
        else:
            held = sum(kv.blocks_for(tokens) for _, tokens in room.values())
        assert held + kv.free_blocks == kv.total_blocks, (
            f"I4: {held} referenced + {kv.free_blocks} free != {kv.total_blocks} blocks")
        assert decode.cached_tokens == sum(decode.cached(r) for r in decode.requests.values())
        growth = sum(decode.growth_of(r) for r in decode.requests.values())
        assert growth == decode.growth_blocks, f"{growth} blocks are needed next, counted {decode.growth_blocks}"
        if isinstance(kv, WindowedKvCache) and isinstance(decode, WindowedDecodeBatch):
            within = sum(min(decode.cached(r) + 1, kv.window_tokens) for r in decode.requests.values())
            assert within == decode.within_tokens, f"{within} tokens lie within windows, counted {decode.within_tokens}"
        phases: list[tuple[Iterable[Request], Phase]] = [
            (self.queue, Phase.WAITING), (self.ready, Phase.READY), (self.chunked, Phase.PREFILL),
            (decode.requests.values(), Phase.DECODE)]
        for group, phase in phases:
            for request in group:
                assert request.phase is phase, f"{request} among {phase.name}"
