"""Operations, bytes and thread blocks by hand; wave quantization against the paper's Table 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet import work
from bullet.catalog.models import MODELS, ModelSpec

LLAMA = MODELS["llama-3.1-8b"]
TINY = ModelSpec("t", num_layers=2, hidden_size=8, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=32,
                 context_tokens=64)

# Table 2: idle % of SM cycles on A100's 108 SMs, QKV / Attn / O.
TABLE_2 = {1024: (11.1, 21.0, 40.7), 2048: (11.1, 5.2, 21.0), 4096: (11.1, 5.2, 5.2), 16384: (1.9, 0.2, 0.2)}


@pytest.mark.parametrize("tokens", TABLE_2)
def test_table_2_qkv_attention_and_o_come_out_to_a_tenth(tokens: int) -> None:
    kernels = {k.name: k for k in work.layer_kernels(LLAMA, [(tokens, 0)], 0, 0)}
    found = [round(100 * work.wave_quantization(kernels[n].blocks, 108).idle, 1) for n in ("qkv", "prefill_attention", "o")]
    assert found == list(TABLE_2[tokens])


def test_waves_by_hand() -> None:
    # 128 blocks, one a SM, on 108 SMs: a full wave and one of 20; 88 of 2 x 108 SM turns are idle.
    assert work.wave_quantization(128, 108) == (2, 20, 88 / 216)
    # Two a SM: 216 fit at once; 128 / 2 = 64 SMs busy.
    assert work.wave_quantization(128, 108, 2) == (1, 64, 44 / 108)
    assert work.wave_quantization(108, 108) == (1, 108, 0.0)


def test_gemm_by_hand() -> None:
    kernel = work.gemm("g", 130, 300, 10, 2)
    assert kernel.flops == 2 * 130 * 300 * 10
    assert kernel.bytes == 2 * (130 * 10 + 10 * 300 + 130 * 300)
    assert kernel.blocks == 2 * 2  # ceil(130 / 128) x ceil(300 / 256)


def test_a_layer_of_the_tiny_model_by_hand() -> None:
    kernels = work.layer_kernels(TINY, [(3, 5)], 2, 20)
    by_name = {k.name: k for k in kernels}
    tokens = 3 + 2
    assert [k.name for k in kernels] == ["norm", "qkv", "rope", "prefill_attention", "decode_attention", "o", "norm", "gate_up",
                                         "act", "down"]
    assert by_name["qkv"].flops == 2 * tokens * (4 + 2 * 2) * 2 * 8
    assert by_name["gate_up"].flops == 2 * tokens * 32 * 8
    assert by_name["down"].flops == 2 * tokens * 8 * 16
    # Three queries after five cached tokens see 6, 7 and 8 keys: 21 pairs, 2 x 2 operations a dimension and head.
    assert by_name["prefill_attention"].flops == 4 * 4 * 2 * (6 + 7 + 8)
    # Queries in and out for 4 heads; keys and values of 8 tokens for 2 heads; 2 bytes, 2 dimensions.
    assert by_name["prefill_attention"].bytes == 2 * 2 * (2 * 4 * 3 + 2 * 2 * 8)
    assert by_name["decode_attention"].flops == 4 * 4 * 2 * 20
    assert by_name["decode_attention"].bytes == 2 * 2 * (2 * 4 * 2 + 2 * 2 * 20)
    assert by_name["act"].bytes == 2 * tokens * 3 * 16


def test_grouped_query_attention_reads_kv_heads_only() -> None:
    mha = ModelSpec("m", 2, 8, 16, 4, 4, 2, 32, 64)
    gqa_bytes = work.decode_attention(TINY, 1, 1000).bytes
    assert gqa_bytes - work.decode_attention(TINY, 1, 0).bytes == pytest.approx(
        (work.decode_attention(mha, 1, 1000).bytes - work.decode_attention(mha, 1, 0).bytes) / 2)
    assert TINY.kv_bytes_per_token == 2 * 2 * 2 * 2 * 2  # k and v, layers, heads, dimensions, bytes


def test_lm_head_runs_on_wanted_sequences_only() -> None:
    assert work.head_kernels(TINY, 0) == []
    head = work.head_kernels(TINY, 3)[-1]
    assert head.name == "lm_head"
    assert head.flops == 2 * 3 * 32 * 8


def test_llama_weights_are_eight_billion() -> None:
    assert LLAMA.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.005)  # 8.03 B parameters on its model card
    assert LLAMA.kv_bytes_per_token == 131072


def test_tensor_parallel_halves_projections_and_adds_all_reduce() -> None:
    one = {k.name: k for k in work.dense_kernels(LLAMA, 64)}
    two = {k.name: k for k in work.dense_kernels(LLAMA, 64, 2)}
    for name in ("qkv", "o", "gate_up", "down"):
        assert two[name].flops == one[name].flops / 2
    assert work.all_reduce_bytes(LLAMA, 64, 1) == 0
    assert work.all_reduce_bytes(LLAMA, 64, 2) == 2 * 64 * 4096 * 2  # two ring all-reduces, (t - 1) / t x 2 = 1 each


def test_experts_touched_never_exceed_all() -> None:
    moe = ModelSpec("moe", 2, 8, 16, 4, 2, 2, 32, 64, num_experts=8, experts_per_token=2)
    weights = {t: next(k for k in work.dense_kernels(moe, t) if k.name == "down").bytes - 2 * t * 2 * (16 + 8) for t in (1, 100)}
    assert weights[1] == pytest.approx(2 * 2 * 16 * 8)  # one token touches two experts
    assert weights[100] == pytest.approx(8 * 2 * 16 * 8, rel=1e-6)  # a hundred touch all eight


def test_a_chunked_prompt_reloads_its_cache() -> None:
    # 16k in chunks of 1,024 beside 24 decodes: ceil(16384 / 1000) = 17 iterations, 17 x 18 / 2 = 153 reloads.
    assert work.chunk_iterations(16384, 1024, 24) == (17, 153)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_chunking_changes_reads_not_pairs(chunks: list[int]) -> None:
    pieces, past = [], 0
    for new in chunks:
        pieces.append((new, past))
        past += new
    whole = work.prefill_attention(TINY, [(past, 0)])
    parts = [work.prefill_attention(TINY, [piece]) for piece in pieces]
    assert sum(p.flops for p in parts) == pytest.approx(whole.flops)
    assert sum(p.bytes for p in parts) >= whole.bytes
