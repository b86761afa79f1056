"""The paged KV cache: free and referenced blocks add up to all of them (I4)."""

from __future__ import annotations

from collections.abc import Sequence

from bullet.catalog.spec import ModelSpec
from bullet.config import KV_BLOCK_TOKENS
from bullet.errors import ConfigError
from bullet.state.requests import Request


class KvCache:
    """Paged KV cache, counted in blocks: free + referenced = all (I4). ``block_units``: blocks that hold a block's worth of
    tokens in all layers, 1 where all layers are alike; ``tokens_a_block``: that worth, for one block."""

    __slots__ = ("asked_tokens", "block_tokens", "block_units", "free_blocks", "hit_tokens", "peak_blocks", "tokens_a_block",
                 "total_blocks")

    sharing = False
    """Whether requests share blocks of common beginnings (:class:`~bullet.state.sharing.SharingKvCache`)."""

    def __init__(self, total_blocks: int, block_tokens: int = KV_BLOCK_TOKENS) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ConfigError(f"KV cache of {total_blocks} blocks of {block_tokens} tokens: both must be positive")
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        self.block_tokens = block_tokens
        self.block_units = 1
        self.tokens_a_block: float = block_tokens
        self.peak_blocks = 0
        #: Where prefixes are shared: known tokens of all requests as they were admitted, and of these what was cached.
        self.asked_tokens = self.hit_tokens = 0

    # ---- a request's part: here nothing is ever cached --------------------------------------------

    def past(self, request: Request) -> int:
        """Tokens of a waiting request that need not be computed."""
        return 0

    def fresh(self, request: Request) -> int:
        """Tokens of a waiting request that a prefill must compute."""
        return request.prompt_tokens + request.generated

    def blocks_to_admit(self, request: Request, pinned: set[tuple[int, int]]) -> int:
        """Free blocks that admitting a request takes, and cached ones that it would hold go to ``pinned``: what others before it,
        admitted with it, hold already costs nothing."""
        return self.blocks_for(request.known_tokens)

    def freed(self, request: Request, tokens: int) -> int:
        """Blocks that come free, at least, when a request gives up its ``tokens``."""
        return self.blocks_for(tokens)

    def reserve(self, requests: Sequence[Request]) -> list[int]:
        """Take blocks for all known tokens of requests; returns how many tokens of each are there already."""
        blocks = 0
        for request in requests:
            blocks += self.blocks_for(request.prompt_tokens + request.generated)
        self.take(blocks)
        return [0] * len(requests)

    def computed(self, request: Request, tokens: int) -> None:
        """The first ``tokens`` of a request are in the cache."""

    def release(self, request: Request, tokens: int) -> None:
        """A request gives up its ``tokens``."""
        self.give_back(self.blocks_for(tokens))

    # ---- blocks ----------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block_tokens)

    def growth(self, tokens: int) -> int:
        """Blocks that one token more than ``tokens`` takes."""
        return int(tokens % self.block_tokens == 0)

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


def kv_cache_of(model: ModelSpec, tokens: int) -> KvCache:
    """The cache that holds so many tokens of a model in all its layers."""
    blocks = tokens // KV_BLOCK_TOKENS
    _, full, window = model.kv_groups
    if not window:
        return KvCache(blocks)
    return WindowedKvCache(blocks * (full + window), full, window, model.window_tokens)


class WindowedKvCache(KvCache):
    """Layers with a sliding window among the others, as vLLM's hybrid KV cache manager keeps them (``v1/core/kv_cache_utils.py``,
    ``single_type_kv_cache_manager.py``).

    Layers of a kind stand in groups of equal size, all groups share one pool of equal blocks, and a block holds ``block_tokens``
    tokens in the layers of one group. ``full_groups`` hold a whole sequence; ``window_groups`` the blocks that the last
    ``window_tokens`` tokens can lie in, one more than fill the window. What a prompt's chunk under way holds beyond its window
    until the next step is left out.
    """

    __slots__ = ("full_groups", "window_blocks", "window_groups", "window_tokens")

    def __init__(self, total_blocks: int, full_groups: int, window_groups: int, window_tokens: int,
                 block_tokens: int = KV_BLOCK_TOKENS) -> None:
        super().__init__(total_blocks, block_tokens)
        assert full_groups >= 0 < window_groups, (full_groups, window_groups)
        self.full_groups, self.window_groups, self.window_tokens = full_groups, window_groups, window_tokens
        self.window_blocks = -(-window_tokens // block_tokens) + 1
        self.block_units = full_groups + window_groups
        self.tokens_a_block = block_tokens / self.block_units

    @property
    def full_at_tokens(self) -> int:
        """A sequence of so many tokens takes no further block of the layers with a window."""
        return self.window_blocks * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        blocks = -(-tokens // self.block_tokens)
        return self.full_groups * blocks + self.window_groups * min(blocks, self.window_blocks)

    def growth(self, tokens: int) -> int:
        if tokens % self.block_tokens:
            return 0
        return self.full_groups + (self.window_groups if tokens < self.full_at_tokens else 0)
