"""The engine's books, on the host: requests, their tokens, the KV blocks that hold them, and how many blocks there can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bullet.config import KV_BLOCK_TOKENS
from bullet.engine.model import Architecture
from bullet.errors import EngineError
from bullet.units import GIB

Tensor = torch.Tensor


def kv_block_bytes(arch: Architecture, block_tokens: int = KV_BLOCK_TOKENS) -> int:
    """Bytes of one block over all layers."""
    spec = arch.spec
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_tokens * arch.dtype.itemsize


def kv_blocks_that_fit(arch: Architecture, free_bytes: int, reserve_bytes: int, max_tokens: int,
                       block_tokens: int = KV_BLOCK_TOKENS) -> int:
    """Blocks in ``free_bytes`` less a reserve for activations and graphs; :class:`EngineError` if one sequence of
    ``max_tokens`` does not fit."""
    blocks = max(0, free_bytes - reserve_bytes) // kv_block_bytes(arch, block_tokens)
    needed = -(-max_tokens // block_tokens)
    if blocks < needed:
        raise EngineError(f"KV cache: {free_bytes / GIB:.1f} GiB free less {reserve_bytes / GIB:.1f} reserved hold {blocks} "
                          f"blocks, one sequence of {max_tokens} tokens needs {needed}: free GPU memory, lower the longest "
                          "sequence, or choose a smaller model")
    return blocks


class BlockPool:
    """KV blocks by number: free + held = all (I4)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """``count`` free blocks; the driver's accounting guarantees that they are there."""
        assert count <= len(self.free), f"KV: {count} blocks asked, {len(self.free)} free of {self.total}"
        return [self.free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks, and empty the list."""
        self.free.extend(blocks)
        blocks.clear()
        assert len(self.free) <= self.total, f"KV: {len(self.free)} free of {self.total} blocks"


@dataclass
class Tracked:
    """One request: ``tokens`` are the prompt and what was generated, the first ``cached`` of them in the KV cache."""

    id: int
    tokens: list[int]
    prompt_tokens: int
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    busy: bool = False
    last_event: Any = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens:]


class Sequences:
    """Every request that the engine knows. ``max_tokens``: longest sequence, prompt and output together."""

    def __init__(self, vocabulary: int, kv_blocks: int, block_tokens: int, max_tokens: int) -> None:
        self.vocabulary, self.block_tokens, self.max_tokens = vocabulary, block_tokens, max_tokens
        self.sequences: dict[int, Tracked] = {}
        self.pool = BlockPool(kv_blocks)

    def add(self, request_id: int, prompt: Sequence[int]) -> None:
        """Register a request; it holds no block until its prefill starts."""
        assert request_id not in self.sequences, f"request {request_id} is known already"
        tokens = [int(t) for t in prompt]
        if not 0 < len(tokens) < self.max_tokens:
            raise EngineError(f"request {request_id}: prompt of {len(tokens)} tokens: must be 1 to {self.max_tokens - 1}, or "
                              "raise the longest sequence")
        if not (min(tokens) >= 0 and max(tokens) < self.vocabulary):
            raise EngineError(f"request {request_id}: token {min(tokens) if min(tokens) < 0 else max(tokens)}: "
                              f"must be below the vocabulary's {self.vocabulary}")
        self.sequences[request_id] = Tracked(request_id, tokens, len(tokens))

    def preempt(self, request_id: int) -> None:
        """Free all blocks and keep the tokens: the next prefill computes prompt and output again."""
        sequence = self.idle(request_id)
        self.pool.give_back(sequence.blocks)
        sequence.cached = 0

    def remove(self, request_id: int) -> list[int]:
        """Forget a request; returns the tokens that it generated."""
        self.preempt(request_id)
        return self.sequences.pop(request_id).generated

    def rewind(self, request_id: int, tokens: int, cached: int) -> None:
        """Back to so many tokens, known and cached, blocks kept: for taking the time of the same step again."""
        sequence = self.idle(request_id)
        assert 0 <= cached <= sequence.cached, (request_id, cached, sequence.cached)
        assert cached < tokens <= len(sequence.tokens), (request_id, cached, tokens, len(sequence.tokens))
        del sequence.tokens[tokens:]
        sequence.cached = cached

    def assume_cached(self, request_id: int, tokens: int) -> None:
        """Take a fresh request's blocks and count its first ``tokens`` as cached, without computing them: for taking the time of
        what follows, which does not depend on what the cache holds."""
        sequence = self.idle(request_id)
        assert not sequence.blocks, f"request {request_id} has its blocks"
        assert 0 < tokens < len(sequence.tokens), (request_id, tokens, len(sequence.tokens))
        sequence.blocks = self.pool.take(-(-len(sequence.tokens) // self.block_tokens))
        sequence.cached = tokens

    def check(self) -> None:
        """I4: every block is free or held by exactly one sequence."""
        held = [b for s in self.sequences.values() for b in s.blocks]
        assert sorted(held + self.pool.free) == list(range(self.pool.total)), "KV blocks lost or held twice"

    def idle(self, request_id: int) -> Tracked:
        """A request that no launch is at work on."""
        sequence = self.sequences[request_id]
        assert not sequence.busy, f"request {request_id} is in a launch"
        return sequence

    def rows(self, sequence: Tracked, begin: int, end: int) -> Tensor:
        """Token, position and KV slot of a sequence's rows, int64 ``(3, rows)`` on the host."""
        positions = torch.arange(begin, end)
        blocks = torch.tensor(sequence.blocks, dtype=torch.int64)
        slots = blocks[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        return torch.stack([torch.tensor(sequence.tokens[begin:end], dtype=torch.int64), positions, slots])

    def decode_rows(self, sequences: Sequence[Tracked]) -> Tensor:
        """The same of one row each, the newest token's; lists first, since the lane waits while this is made."""
        size = self.block_tokens
        return torch.tensor([[s.tokens[s.cached] for s in sequences], [s.cached for s in sequences],
                             [s.blocks[s.cached // size] * size + s.cached % size for s in sequences]], dtype=torch.int64)

    def tables(self, sequences: Sequence[Tracked]) -> Tensor:
        """Block tables, int32 ``(sequences, most blocks)`` on the host, 0 behind a sequence's last block."""
        width = max(1, *(len(s.blocks) for s in sequences))
        return torch.from_numpy(np.array([s.blocks + [0] * (width - len(s.blocks)) for s in sequences], dtype=np.int32))

    def grown(self, request_id: int) -> Tracked:
        """A sequence about to decode: all its tokens but the newest are cached, and there is a slot for that one."""
        sequence = self.idle(request_id)
        ready = bool(sequence.blocks) and sequence.cached == len(sequence.tokens) - 1
        assert ready, f"request {request_id}: {sequence.cached} of {len(sequence.tokens)} tokens cached, cannot decode"
        assert len(sequence.tokens) <= self.max_tokens, f"request {request_id} grew beyond {self.max_tokens} tokens"
        if sequence.cached == len(sequence.blocks) * self.block_tokens:
            sequence.blocks += self.pool.take(1)
        return sequence
