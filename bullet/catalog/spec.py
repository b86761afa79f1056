"""A model by its numbers: what is needed to count operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from bullet.errors import require


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: what is needed to count operations and bytes.

    ``num_experts = 0`` means a dense MLP; otherwise ``intermediate_size`` is that of one routed expert, each token visits
    ``experts_per_token`` of them and, where there are any, shared experts of ``shared_size`` in all, and ``dense_layers`` of the
    layers have a dense MLP of ``dense_size`` instead.

    ``window_layers`` of the layers attend to the last ``window_tokens`` tokens alone. ``kv_lora_rank > 0`` means latent attention
    (DeepSeek V2): ``head_dim`` is a query's, ``rope_dim`` of it rotated, a value has ``value_dim``, and the cache holds
    ``kv_lora_rank + rope_dim`` values a token and layer.

    Widths: ``dtype_bytes`` of activations, embeddings and norms; ``attention_bits``, ``mlp_bits``, ``head_bits`` of a weight,
    scales included (0: as the activations); ``kv_bytes`` of a value in the KV cache (0 likewise); ``gemm_dtype``: what tensor
    cores multiply where the GPU has it (``16``, ``fp8``, ``int8``). ``notes``: what a reader had to decide, for the headline.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    dtype_bytes: int = 2
    tie_embeddings: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    learned_positions: int = 0
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_size: int = 0
    window_tokens: int = 0
    window_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    attention_bits: float = 0.0
    mlp_bits: float = 0.0
    head_bits: float = 0.0
    kv_bytes: int = 0
    gemm_dtype: str = "16"
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "context_tokens", "dtype_bytes"):
            require(getattr(self, name) > 0, f"model {self.name}: {name}", getattr(self, name), "positive")
        require(self.num_heads % self.num_kv_heads == 0, f"model {self.name}: num_heads", self.num_heads,
                f"a multiple of num_kv_heads = {self.num_kv_heads}")
        require((self.num_experts > 0) == (self.experts_per_token > 0)
                and 0 <= self.experts_per_token <= max(self.num_experts, 0),
                f"model {self.name}: experts_per_token", self.experts_per_token,
                f"between 1 and num_experts = {self.num_experts}, or both 0")
        require(0 <= self.dense_layers < self.num_layers and (self.dense_layers > 0) == (self.dense_size > 0),
                f"model {self.name}: dense_layers", self.dense_layers, f"0 to {self.num_layers - 1}, with a dense_size")
        require(0 <= self.window_layers <= self.num_layers and (self.window_layers > 0) == (self.window_tokens > 0),
                f"model {self.name}: window_layers", self.window_layers, f"0 to {self.num_layers}, with window_tokens")
        # One value stands for "as the activations", so that equal models are equal.
        for name in ("attention_bits", "mlp_bits", "head_bits"):
            if not getattr(self, name):
                object.__setattr__(self, name, 8.0 * self.dtype_bytes)
        if not self.kv_bytes:
            object.__setattr__(self, "kv_bytes", self.dtype_bytes)

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key, value projection's output (not of latent attention)."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Values that one token adds to the KV cache of one layer."""
        return self.kv_lora_rank + self.rope_dim if self.kv_lora_rank else 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_groups(self) -> tuple[int, int, int]:
        """Layers of a group in the KV cache, and groups of layers without and with a window. As vLLM's hybrid KV cache manager
        groups them: as many layers a group as the rarer kind has, the last group of the other kind padded; one group of each kind
        where the one has less than half as many again."""
        window = self.window_layers
        full = self.num_layers - window
        few, many = sorted((full, window))
        size = many if many < 1.5 * few or not few else few
        return size, -(-full // size), -(-window // size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the KV cache over all layers, as long as it lies in every window."""
        return self.num_layers * self.kv_values_per_token * self.kv_bytes

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, biases included."""
        hidden, heads = self.hidden_size, self.num_heads
        if self.kv_lora_rank:
            query = hidden * self.q_lora_rank + self.q_lora_rank * heads * self.head_dim if self.q_lora_rank \
                else hidden * heads * self.head_dim
            nope = self.head_dim - self.rope_dim
            return (query + hidden * (self.kv_lora_rank + self.rope_dim) + self.kv_lora_rank * heads * (nope + self.value_dim)
                    + heads * self.value_dim * hidden)
        return (hidden * self.qkv_size + heads * self.head_dim * hidden + self.qkv_size * self.qkv_bias + hidden * self.o_bias)

    @property
    def mlp_parameters(self) -> int:
        """Weights of all layers' MLPs: dense, routed and shared experts, routers, biases."""
        def mlp(size: int) -> int:
            matrices = 3 if self.gated_mlp else 2
            return matrices * self.hidden_size * size + ((matrices - 1) * size + self.hidden_size) * self.mlp_bias

        if not self.num_experts:
            return self.num_layers * mlp(self.intermediate_size)
        sparse = (self.num_experts * mlp(self.intermediate_size) + (mlp(self.shared_size) if self.shared_size else 0)
                  + self.hidden_size * (self.num_experts + self.shared_gate))
        return (self.num_layers - self.dense_layers) * sparse + self.dense_layers * mlp(self.dense_size)

    @property
    def num_parameters(self) -> int:
        """All weights but norms' (under 0.01 %)."""
        embeddings = (self.vocab_size * (1 if self.tie_embeddings else 2) + self.learned_positions) * self.hidden_size
        return self.num_layers * self.attention_parameters + self.mlp_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights (norms are left out: under 0.01 %). Tied embeddings are there once, in the embedding's width."""
        embeddings = (self.vocab_size + self.learned_positions) * self.hidden_size * self.dtype_bytes
        head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size * self.head_bits / 8
        attention = self.num_layers * self.attention_parameters * self.attention_bits / 8
        return round(attention + self.mlp_parameters * self.mlp_bits / 8 + embeddings + head)
