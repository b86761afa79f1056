"""KV blocks with identity: shared prefixes, and requests whose next token is still in flight.

:mod:`bullet.state` counts blocks, which is enough as long as no two requests share one. Here each block is known by name,
as in vLLM V1 (``v1/core/block_pool.py``, ``kv_cache_manager.py``):

- Free blocks form a queue. New blocks come from its head; a request's blocks return to its tail, last block first, so that
  the ends of prompts are lost before their beginnings. Later engines return blocks that hold nothing cached to the head
  (``uncached_first``): they are handed out before anything cached is lost.
- A full block is entered in the cache when the tokens that fill it are scheduled, under a key that stands for its whole
  prefix. It keeps the key after it is freed, until it is handed out anew.
- A request that is admitted takes over the longest run of cached blocks that its known tokens begin with, short of the last
  token, which must be computed to have its logits. Such a hit on a free block takes that block out of the queue: it costs
  free capacity like a new one. A hit on a referenced block costs nothing.

:class:`PagedState` holds what the engine's scheduler holds, in its terms. ``running`` is one list in order of admission.
With two steps in flight, a request's ``computed_tokens`` runs ahead of the tokens delivered: it counts what has been
scheduled, and ``unknown`` counts the tokens that steps in flight are about to deliver.

    known = prompt + generated       lacking = known + unknown - computed      gives a token when lacking falls to 0
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from bullet.config import KV_BLOCK_TOKENS
from bullet.state.decisions import HybridStep, Partition, SplitTable
from bullet.state.kv import KvCache
from bullet.state.requests import HYBRID, Phase, Request
from bullet.state.sharing import Key, SharedPrefixes
from bullet.state.system import InFlight, SystemState


class Paging(NamedTuple):
    """How a policy wants blocks and steps handled; a policy without one gets the counted cache and one step in flight.

    ``reserve``: a request takes the blocks of all its known tokens when admitted, else step by step. ``resume_back``:
    preempted requests return to the back of the queue instead of its front. ``steps_in_flight``: 1, or 2 (the next step is
    decided while one still runs). ``uncached_first``: of freed blocks those that nothing is cached in are used again first.
    """

    prefix_cache: bool
    reserve: bool
    resume_back: bool
    steps_in_flight: int
    uncached_first: bool = False


_GONE: Any = object()
_ALONE = (0, 0)
"""What stands for the donor of a request that shares nothing."""
MOST_BLOCKS = 1 << 32
"""A content is the number of the first request that had it, times this, and the block's index."""


class _Overlay:
    """A dict or list under changes that are kept apart from it."""

    __slots__ = ("base", "changed")

    def __init__(self, base: Any) -> None:
        self.base = base
        self.changed: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        value = self.changed.get(key)
        if value is None:  # unchanged, or a key column's None
            return self.base[key] if key not in self.changed else None
        if value is _GONE:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        value = self.changed.get(key)
        if value is None:
            return self.base.get(key, default)
        return default if value is _GONE else value

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changed[key] = value

    def __delitem__(self, key: Any) -> None:
        self.changed[key] = _GONE


class _Tables(_Overlay):
    """Requests' blocks: a list is copied when it is first asked for, as it may be written to."""

    __slots__ = ()

    def __getitem__(self, key: int) -> list[int]:
        if key not in self.changed:
            self.changed[key] = self.base[key].copy()
        table: list[int] = super().__getitem__(key)
        return table

    def pop(self, key: int) -> list[int]:
        table = self[key]
        del self[key]
        return table


class _FreeQueue:
    """The queue of free blocks: what is beneath is read on from its head, what comes before and behind is kept apart."""

    __slots__ = ("base", "head", "left", "tail")

    def __init__(self, base: OrderedDict[int, None]) -> None:
        self.base = iter(base)
        self.left: set[int] = set()  # taken out of the middle of the queue beneath
        self.head: OrderedDict[int, None] = OrderedDict()
        self.tail: OrderedDict[int, None] = OrderedDict()

    def popitem(self, last: bool) -> tuple[int, None]:
        assert not last
        if self.head:
            return self.head.popitem(last=False)
        for block in self.base:
            if block not in self.left:
                self.left.add(block)
                return block, None
        return self.tail.popitem(last=False)

    def __setitem__(self, block: int, value: None) -> None:
        self.tail[block] = value

    def move_to_end(self, block: int, last: bool) -> None:
        assert not last
        del self.tail[block]
        self.head[block] = None
        self.head.move_to_end(block, last=False)

    def __delitem__(self, block: int) -> None:
        if block in self.tail:
            del self.tail[block]
        elif block in self.head:
            del self.head[block]
        else:
            self.left.add(block)


class PrefixKvCache(KvCache):
    """Blocks ``1 .. total``. Free + referenced = all; cached blocks may be either."""

    __slots__ = ("_cached", "_entered", "_free", "_key", "_references", "_shared", "caching", "tables", "uncached_first")

    def __init__(self, total_blocks: int, shared: SharedPrefixes | None = None, *, caching: bool = True,
                 block_tokens: int = KV_BLOCK_TOKENS, uncached_first: bool = False) -> None:
        super().__init__(total_blocks, block_tokens)
        self.caching, self.uncached_first = caching, uncached_first
        #: request id -> its blocks, in order of its tokens
        self.tables: dict[int, list[int]] = {}
        self._shared = dict(shared or {})
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total_blocks + 1))
        self._references: list[int] = [0] * (total_blocks + 1)
        self._key: list[int | None] = [None] * (total_blocks + 1)  # its content (:meth:`contents`), once it is full
        # The block that holds a content, or those that do, oldest first: the first is the one that is hit.
        self._cached: dict[int, Any] = {}
        self._entered: dict[int, int] = {}  # request id -> how many of its blocks are in the cache

    def plan(self) -> PrefixKvCache:
        """This cache as it would become: what is done to it stays in the plan. Good until the cache itself changes.

        It costs what is touched, whatever the cache's size: the columns are this cache's, seen through overlays.
        """
        other = PrefixKvCache.__new__(PrefixKvCache)
        other.total_blocks, other.block_tokens, other.caching = self.total_blocks, self.block_tokens, self.caching
        other.uncached_first = self.uncached_first
        other.free_blocks, other.peak_blocks, other._shared = self.free_blocks, self.peak_blocks, self._shared
        overlay: Any = _Overlay
        tables: Any = _Tables(self.tables)
        free: Any = _FreeQueue(self._free)
        other.tables, other._free = tables, free
        other._references, other._key = overlay(self._references), overlay(self._key)
        other._cached, other._entered = overlay(self._cached), overlay(self._entered)
        return other

    def contents(self, request_id: int, begin: int, end: int) -> list[int]:
        """What a request's blocks ``begin .. end - 1`` hold, as numbers: an earlier request's where the prompts agree so far."""
        owner, stop = request_id, end
        runs: list[range] = []
        while stop > begin:
            donor, blocks = self._shared.get(owner, _ALONE)
            agreed = blocks if blocks < stop else stop
            first = agreed if agreed > begin else begin
            if first < stop:
                runs.append(range(owner * MOST_BLOCKS + first, owner * MOST_BLOCKS + stop))
            owner, stop = donor, agreed
        runs.reverse()
        return list(chain.from_iterable(runs))

    def key(self, request_id: int, index: int) -> Key:
        """Content of a request's block, in words: whose it is, and which of its blocks."""
        return divmod(self.contents(request_id, index, index + 1)[0], MOST_BLOCKS)

    # ---- questions -------------------------------------------------------------------------------

    def hits(self, request: Request) -> list[int]:
        """Cached blocks that the request would take over; at least its last known token is left to compute."""
        found: list[int] = []
        if self.caching:
            cached = self._cached.get
            for content in self.contents(request.id, 0, (request.known_tokens - 1) // self.block_tokens):
                blocks = cached(content)
                if blocks is None:
                    break
                found.append(blocks if type(blocks) is int else blocks[0])
        return found

    def cost(self, hits: Sequence[int], tokens: int) -> int:
        """Free blocks that admitting a request with room for ``tokens`` takes: new ones, and hits that are free now."""
        references = self._references
        return self.blocks_for(tokens) - len(hits) + sum([references[block] == 0 for block in hits])

    # ---- changes ---------------------------------------------------------------------------------

    def admit(self, request: Request, hits: Sequence[int], room_tokens: int, computed_tokens: int) -> bool:
        """Take over ``hits`` and new blocks up to ``room_tokens``; nothing if too few are free."""
        if self.cost(hits, room_tokens) > self.free_blocks:
            return False
        assert request.id not in self.tables, f"{request} holds blocks already"
        references, free, taken = self._references, self._free, 0
        for block in hits:
            if references[block] == 0:
                del free[block]
                taken += 1
            references[block] += 1
        self.take(taken)
        self.tables[request.id] = list(hits)
        self._entered[request.id] = len(hits)
        grown = self.extend(request, room_tokens, computed_tokens)
        assert grown, f"{request}: blocks were counted and then not found"
        return True

    def extend(self, request: Request, room_tokens: int, computed_tokens: int) -> bool:
        """Room for ``room_tokens`` in all; nothing if too few blocks are free. Blocks full of known tokens are cached."""
        table, size = self.tables[request.id], self.block_tokens
        lacking = -(-room_tokens // size) - len(table)
        if lacking > 0:
            if lacking > self.free_blocks:
                return False
            free, held, references = self._free, self._key, self._references
            for _ in range(lacking):
                block, _ = free.popitem(last=False)
                if held[block] is not None:
                    self._forget(block)
                references[block] = 1
                table.append(block)
            self.take(lacking)
        if self.caching:
            known = request.known_tokens
            full = (computed_tokens if computed_tokens < known else known) // size
            entered = self._entered[request.id]
            if full > entered:  # most tokens fill no block
                held, cached = self._key, self._cached
                for content, block in zip(self.contents(request.id, entered, full), table[entered:full], strict=True):
                    held[block] = content
                    others = cached.get(content)
                    cached[content] = block if others is None else (
                        (others, block) if type(others) is int else (*others, block))
                self._entered[request.id] = full
        return True

    def free(self, request: Request) -> None:
        """Give back a request's blocks, last first; one that others hold stays referenced."""
        references, free, given = self._references, self._free, 0
        empty: list[int] = []
        for block in reversed(self.tables.pop(request.id)):
            left = references[block] - 1
            references[block] = left
            if left == 0:
                free[block] = None
                given += 1
                if self.uncached_first and self._key[block] is None:
                    empty.append(block)
        for block in reversed(empty):
            free.move_to_end(block, last=False)
        self.give_back(given)
        del self._entered[request.id]

    def _forget(self, block: int) -> None:
        """A block is handed out anew: what it held is no longer cached there."""
        content = self._key[block]
        assert content is not None
        self._key[block] = None
        blocks = self._cached[content]
        if blocks == block:
            del self._cached[content]
            return
        left = tuple(b for b in blocks if b != block)
        self._cached[content] = left if len(left) > 1 else left[0]

    def check(self) -> None:
        """I4 with shared blocks, the slow way."""
        held = [0] * (self.total_blocks + 1)
        for table in self.tables.values():
            for block in table:
                held[block] += 1
        assert held == self._references, "references differ from the tables"
        assert len(self._free) == self.free_blocks == sum(count == 0 for count in held[1:]), (
            f"I4: {len(self._free)} in the free queue, {self.free_blocks} counted, of {self.total_blocks} blocks")
        assert all(held[block] == 0 for block in self._free)
        for content, blocks in self._cached.items():
            blocks = (blocks,) if isinstance(blocks, int) else blocks
            assert all(self._key[block] == content for block in blocks), divmod(content, MOST_BLOCKS)


class PagedState(SystemState):
    """The engine's queues: ``queue`` and ``running``. ``decode``, ``chunked``, ``prefill`` and ``ready`` stay empty.

    ``ending``: requests whose last token is in flight; they are scheduled no more. (The engine knows: clients announce
    when to stop. A policy learns it no sooner.)
    """

    def __init__(self, splits: SplitTable, kv: PrefixKvCache, num_layers: int, initial: Partition, paging: Paging) -> None:
        super().__init__(splits, kv, num_layers, initial)
        self.blocks = kv
        self.paging = paging
        self.running: list[Request] = []
        self.ending: set[int] = set()
        self.unknown: dict[int, int] = {}

    # ---- questions -------------------------------------------------------------------------------

    def lacking(self, request: Request) -> int:
        """Tokens of a running request that no step has been scheduled for; 1 for one that decodes."""
        return request.known_tokens + self.unknown[request.id] - request.computed_tokens

    def room(self, request: Request, computed_tokens: int) -> int:
        """Tokens to have room for when a request is admitted to compute up to ``computed_tokens``."""
        return request.known_tokens if self.paging.reserve else computed_tokens

    # ---- transitions: drivers only ---------------------------------------------------------------

    def begin_paged(self, step: HybridStep, now_s: float) -> list[tuple[Request, bool]]:
        """Carry out what a step says of blocks and queues; its requests in order, and whether each gets a token by it.

        A victim goes when a request before it finds no blocks, as in the engine, the rest behind all others: what it gives back
        may be handed out next.
        """
        victims = list(reversed(step.preempt))
        running = {request.id: request for request in self.running}
        unknown, blocks = self.unknown, self.blocks
        served: list[tuple[Request, bool]] = []
        for request_id, new, past in step.chunks:
            found = running.get(request_id)
            if found is not None:
                request = found
                assert request.computed_tokens == past, f"{request}: a chunk starts at {past}"
                while not (fits := blocks.extend(request, past + new, past + new)) and victims:
                    self._send_back(victims.pop(), now_s)
            else:
                while victims:
                    self._send_back(victims.pop(), now_s)
                request = self._take_in(request_id, now_s)
                hits = blocks.hits(request)
                assert len(hits) * blocks.block_tokens == past, f"{request}: {len(hits)} blocks hit, {past} tokens said"
                if blocks.caching:
                    blocks.asked_tokens += request.known_tokens
                    blocks.hit_tokens += past
                fits = blocks.admit(request, hits, self.room(request, past + new), past + new)
            assert fits, f"{request}: no blocks for {new} tokens after {past}"
            lacking = request.known_tokens + unknown[request_id] - past - new
            assert new > 0 <= lacking, f"{request}: {new} tokens after {past}"
            request.computed_tokens = past + new
            if lacking == 0:
                unknown[request_id] += 1
            served.append((request, lacking == 0))
        while victims:
            self._send_back(victims.pop(), now_s)
        assert served, f"{step}: an empty batch"
        self.in_flight[HYBRID] = InFlight(step, now_s)
        return served

    def _send_back(self, victim: int, now_s: float) -> None:
        request = self.running.pop()
        assert request.id == victim, f"{request} is the tail of running, not {victim}"
        self.blocks.free(request)
        request.phase = Phase.WAITING
        request.computed_tokens = 0
        request.preemptions += 1
        request.queued_s = now_s
        if self.paging.resume_back:
            self.queue.append(request)
        else:
            self.queue.push_front(request)

    def _take_in(self, request_id: int, now_s: float) -> Request:
        request = self.queue.remove(request_id)
        assert self.unknown.setdefault(request_id, 0) == 0, f"{request} still has a token in flight"
        request.phase = Phase.DECODE
        if request.admitted_s is None:
            request.admitted_s = now_s
        self.running.append(request)
        return request

    def deliver(self, request: Request, now_s: float) -> None:
        """A step ended that gives this request a token; it may have been preempted since."""
        self.unknown[request.id] -= 1
        request.generated += 1
        if request.first_token_s is None:
            request.first_token_s = now_s
        if request.phase is Phase.WAITING:
            self.queue.refresh(request)

    def finish(self, request: Request) -> None:
        """It has all its tokens: out of ``running``, or out of the queue if it was preempted meanwhile."""
        if request.phase is Phase.WAITING:
            self.queue.remove(request.id)
        else:
            self.running.remove(request)
            self.blocks.free(request)
        self.ending.discard(request.id)
        del self.unknown[request.id]
        request.phase = Phase.FINISHED

    def check(self) -> None:
        """Blocks, and the arithmetic of tokens."""
        self.blocks.check()
        assert set(self.blocks.tables) == {request.id for request in self.running}
        for request in self.running:
            held = len(self.blocks.tables[request.id])
            assert held >= self.blocks.blocks_for(request.computed_tokens), f"{request} holds {held} blocks"
            assert self.lacking(request) >= 0, request
        assert all(request.computed_tokens == 0 for request in self.queue)
