"""The batches that run: whole prompts going through the layers, and the requests that gain a token each iteration.

Cost does not grow with tokens: a decode iteration over n requests moves one counter. A request in the batch is
described relative to that counter (``iteration``), so nothing is touched until it joins or leaves::

    tokens in the KV cache = cached at joining    + (iteration - iteration at joining)
    tokens generated       = generated at joining + (iteration - iteration at joining)

and it needs a fresh KV block in the iterations congruent to one residue of the block size, so a histogram of
residues tells how many blocks the next iteration takes. Where layers have a window a request's needs shrink once, when
its window is full: that iteration is known when it joins, and filed (:class:`WindowedDecodeBatch`).
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
from numpy.typing import NDArray

from bullet.config import KV_BLOCK_TOKENS
from bullet.state.kv import WindowedKvCache
from bullet.state.requests import Phase, Request


class PrefillBatch:
    """Whole prompts that go through the layers together; fixed until the last layer."""

    __slots__ = ("deadline_s", "layers_done", "layers_left", "num_layers", "past", "requests", "tokens", "total_tokens")

    def __init__(self, requests: tuple[Request, ...], num_layers: int) -> None:
        self.requests = requests
        #: Tokens to compute of each, and those that were cached when it was admitted.
        self.past = tuple(r.computed_tokens for r in requests)
        self.tokens = tuple(r.known_tokens - r.computed_tokens for r in requests)
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

    def growth_of(self, request: Request) -> int:
        """Fresh KV blocks that the next iteration needs for this request."""
        return int(self.cached(request) % self.block_tokens == 0)

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


class WindowedDecodeBatch(DecodeBatch):
    """Where some layers have a sliding window: ``residues`` counts blocks of all groups of layers, and ``within_tokens`` is
    ``context_tokens`` with at most the window's of each request, exactly."""

    __slots__ = ("_below", "_fill", "_kv", "_reach", "within_tokens")

    def __init__(self, kv: WindowedKvCache) -> None:
        super().__init__(kv.block_tokens)
        self._kv = kv
        self.within_tokens = 0
        self._below = 0  # requests whose context is shorter than the window
        # How many requests stop taking blocks of layers with a window at an iteration, and how many contexts reach it then.
        self._fill: dict[int, int] = {}
        self._reach: dict[int, int] = {}

    def growth_of(self, request: Request) -> int:
        return self._kv.growth(self.cached(request))

    def _file(self, request: Request, count: int) -> None:
        """Enter a request that joins (1) or take out one that leaves (-1): all of it follows from how it joined."""
        kv = self._kv
        start = request.join_iteration - request.join_tokens  # the iteration at which it would have had no token
        units, full = kv.full_groups - 1, start + kv.full_at_tokens  # the plain batch counts 1
        if full > self.iteration:
            units += kv.window_groups
            self._fill[full] = self._fill.get(full, 0) + count
        self.residues[start % self.block_tokens] += count * units
        reached = start + kv.window_tokens - 1
        if reached > self.iteration:
            self._below += count
            self._reach[reached] = self._reach.get(reached, 0) + count
            self.within_tokens += count * (self.iteration - start + 1)
        else:
            self.within_tokens += count * kv.window_tokens

    def join(self, request: Request) -> None:
        super().join(request)
        self._file(request, 1)

    def leave(self, request: Request) -> int:
        self._file(request, -1)
        return super().leave(request)

    def advance(self) -> None:
        super().advance()
        self.within_tokens += self._below
        self._below -= self._reach.pop(self.iteration, 0)
        filled = self._fill.pop(self.iteration, 0)
        if filled:
            self.residues[self.iteration % self.block_tokens] -= filled * self._kv.window_groups
