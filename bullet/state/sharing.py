"""A counted KV cache whose full prompt blocks are known by content, so that prompts with a common beginning share them.

Only the blocks that prompts fill have names; a prompt's last tokens and what is generated are counted, as in
:class:`~bullet.state.kv.KvCache`. So a decode step costs what it costs without sharing. The life of a block with a name, as in
SGLang's radix cache (``mem_cache/radix_cache.py``)::

    computed (its request's own) -> cached, held by n requests -> cached, held by none -> evicted

- A block that holds a content which is cached already is given back when it has been computed, and its request holds the other.
- A request that is admitted holds the longest run of cached blocks that its known tokens begin with, short of the last token,
  which must be computed to have its logits. It keeps them until it ends or is preempted; then they stay cached.
- Blocks that nobody holds are free to take: they are evicted when blocks run short, those first that were given back first, of
  one request the last first. Hence a block is never cached without those before it.

Requests that are admitted together hold their hits before any of them takes a block, so none evicts another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bullet.config import KV_BLOCK_TOKENS
from bullet.errors import TraceError
from bullet.state.kv import KvCache
from bullet.state.requests import Request

SharedPrefixes = Mapping[int, tuple[int, int]]
"""request id -> (an earlier request, how many full blocks both prompts begin with)."""
Key = tuple[int, int]
"""A block's content with all before it: (the first request that had it, block index)."""


def check_prefixes(shared: SharedPrefixes, prompt_tokens: Sequence[int] | NDArray[np.int64], where: str,
                   block_tokens: int = KV_BLOCK_TOKENS) -> None:
    """Refuse sharing that cannot be: an unknown donor, or more blocks than the two prompts have."""
    for request, (donor, blocks) in shared.items():
        if not (0 <= donor < len(prompt_tokens) and 0 <= request < len(prompt_tokens) and donor != request):
            raise TraceError(f"{where}: request {request} shares a prefix with request {donor}: both must be among 0 to "
                             f"{len(prompt_tokens) - 1}, and differ")
        most = min(prompt_tokens[request], prompt_tokens[donor]) // block_tokens
        if not 0 < blocks <= most:
            raise TraceError(f"{where}: requests {request} and {donor} share {blocks} blocks: must be 1 to {most}")


class SharingKvCache(KvCache):
    """Free + referenced = all (I4); free ones may be cached, referenced ones held by several."""

    __slots__ = ("_holders", "_idle", "_keys", "_last_hits", "_named", "_shared")

    sharing = True

    def __init__(self, total_blocks: int, shared: SharedPrefixes | None = None, block_tokens: int = KV_BLOCK_TOKENS) -> None:
        super().__init__(total_blocks, block_tokens)
        self._shared: Mapping[int, tuple[int, int]] = shared or {}
        self._holders: dict[Key, int] = {}  # cached content -> requests that hold it
        self._idle: OrderedDict[Key, None] = OrderedDict()  # of it what none holds, in order of eviction
        self._named: dict[int, int] = {}  # request id -> how many of its first blocks are cached ones that it holds
        self._last_hits: dict[int, int] = {}  # request id -> hits when it was last asked for
        self._keys: dict[int, list[Key]] = {}  # request id -> contents of its full prompt blocks, while they are asked for

    def _contents(self, request: Request) -> list[Key]:
        """Content of each full prompt block: an earlier request's where the prompts agree that far."""
        keys = self._keys.get(request.id)
        if keys is None:
            owner, end = request.id, request.prompt_tokens // self.block_tokens
            runs: list[tuple[int, int, int]] = []
            while end:
                donor, blocks = self._shared.get(owner, (owner, 0))
                begin = min(blocks, end)
                runs.append((owner, begin, end))
                owner, end = donor, begin
            keys = self._keys[request.id] = [(owner, i) for owner, begin, end in reversed(runs) for i in range(begin, end)]
        return keys

    # ---- questions -------------------------------------------------------------------------------

    def hits(self, request: Request) -> int:
        """Cached blocks that the request begins with; at least its last known token is left to compute."""
        number = request.id
        keys, holders = self._keys.get(number) or self._contents(request), self._holders
        low, high = 0, min(len(keys), (request.prompt_tokens + request.generated - 1) // self.block_tokens)
        # A block is cached only if those before it are; most often as many as when last asked.
        last = self._last_hits.get(number, 0)
        if last <= high:
            if last == high or keys[last] not in holders:
                if last == 0 or keys[last - 1] in holders:
                    return last
                high = last - 1
            else:
                low = last + 1
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in holders:
                low = middle + 1
            else:
                high = middle
        self._last_hits[number] = low
        return low

    def past(self, request: Request) -> int:
        return self.hits(request) * self.block_tokens

    def fresh(self, request: Request) -> int:
        return request.known_tokens - self.hits(request) * self.block_tokens

    def blocks_to_admit(self, request: Request, pinned: set[Key]) -> int:
        keys, hits = self._contents(request), self.hits(request)
        blocks = self.blocks_for(request.known_tokens) - hits
        for key in reversed(keys[:hits]):
            if self._holders[key]:
                break  # and so are all before it
            if key not in pinned:
                pinned.add(key)
                blocks += 1
        return blocks

    def freed(self, request: Request, tokens: int) -> int:
        """Of blocks that others hold as well, none."""
        named = self._named.get(request.id, 0)
        alone = sum(self._holders[key] == 1 for key in self._contents(request)[:named])
        return self.blocks_for(tokens) - named + alone

    # ---- changes ---------------------------------------------------------------------------------

    def take(self, blocks: int) -> None:
        super().take(blocks)
        while len(self._idle) > self.free_blocks:
            key, _ = self._idle.popitem(last=False)
            del self._holders[key]

    def reserve(self, requests: Sequence[Request]) -> list[int]:
        for request in requests:
            hits = self.hits(request)
            for key in self._contents(request)[:hits]:
                self._hold(key)
            self._named[request.id] = hits
            self.asked_tokens += request.known_tokens
            self.hit_tokens += hits * self.block_tokens
        for request in requests:
            self.take(self.blocks_for(request.known_tokens) - self._named[request.id])
        return [self._named[request.id] * self.block_tokens for request in requests]

    def _hold(self, key: Key) -> None:
        if not self._holders[key]:
            del self._idle[key]
            super().take(1)
        self._holders[key] += 1

    def computed(self, request: Request, tokens: int) -> None:
        keys, named = self._contents(request), self._named[request.id]
        full = min(tokens // self.block_tokens, len(keys))
        for key in keys[named:full]:
            if key in self._holders:
                self.give_back(1)  # its own: another's holds the same
                self._hold(key)
            else:
                self._holders[key] = 1
        self._named[request.id] = max(named, full)

    def release(self, request: Request, tokens: int) -> None:
        named, holders, idle = self._named.pop(request.id), self._holders, self._idle
        already = len(idle)
        for key in reversed(self._contents(request)[:named]):
            left = holders[key] = holders[key] - 1
            if not left:
                idle[key] = None
        self.give_back(self.blocks_for(tokens) - named + len(idle) - already)
        del self._keys[request.id]
        self._last_hits.pop(request.id, None)

    def check(self, held: Mapping[int, tuple[Request, int]]) -> int:
        """Referenced blocks, the slow way; ``held``: request id -> it, and the tokens that it has room for."""
        holders: dict[Key, int] = {}
        counted = 0
        for request, tokens in held.values():
            named = self._named[request.id]
            counted += self.blocks_for(tokens) - named
            for key in self._contents(request)[:named]:
                holders[key] = holders.get(key, 0) + 1
        assert set(self._named) == set(held), "requests that hold blocks and are gone, or the reverse"
        assert holders == {key: n for key, n in self._holders.items() if n}, "holders differ from what requests hold"
        assert set(self._idle) == {key for key, n in self._holders.items() if not n}, "idle blocks differ from the cached"
        assert len(self._idle) <= self.free_blocks, f"{len(self._idle)} cached blocks in {self.free_blocks} free ones"
        return counted + len(holders)
