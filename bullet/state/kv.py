"""The paged KV cache: free and referenced blocks add up to all of them (I4)."""

from __future__ import annotations

from bullet.config import KV_BLOCK_TOKENS
from bullet.errors import ConfigError


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
