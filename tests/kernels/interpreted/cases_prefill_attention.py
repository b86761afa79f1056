"""Prefill attention against its reference, the reference against plain attention, and chunks against a whole prompt."""

from __future__ import annotations

import pytest
import torch
from paged import close, paged_cache

from bullet.kernels import prefill_attention as pa

CPU = torch.device("cpu")


def problem(new, past, heads, kv_heads, head_dim, block_tokens, dtype, seed=0):
    lengths = [n + p for n, p in zip(new, past, strict=True)]
    k, v, tables = paged_cache(lengths, kv_heads, head_dim, block_tokens, dtype, seed)
    q = torch.randn(sum(new), heads, head_dim, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    return q, k, v, tables, starts, torch.tensor(lengths, dtype=torch.int32)


def run(args, new, past, num_sms=2, tile_rows=16, **options):
    return pa.prefill_attention(*args, pa.plan(new, past, tile_rows, CPU), num_sms=num_sms, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("new", "past", "heads", "kv_heads", "head_dim", "block_tokens"), [
    ([1], [0], 4, 2, 16, 16),  # one token, no past
    ([0, 1, 5, 0], [0, 40, 0, 7], 4, 2, 16, 16),  # chunks without rows; a decode-like row
    ([15, 16, 17, 33], [0, 16, 15, 31], 4, 2, 16, 16),  # around the edges of blocks and tiles
    ([20], [100], 6, 2, 24, 8),  # several key tiles of past, odd group and head size
    ([37, 3], [0, 0], 3, 3, 32, 32),
])
def test_against_the_reference(new, past, heads, kv_heads, head_dim, block_tokens, dtype):
    args = problem(new, past, heads, kv_heads, head_dim, block_tokens, dtype)
    close(run(args, new, past), pa.prefill_attention_reference(*args))


@pytest.mark.parametrize("tile_rows", [16, 32])
@pytest.mark.parametrize("num_sms", [1, 50])
def test_any_grid_and_tile_give_the_same(num_sms, tile_rows):
    new, past = [50, 7], [3, 64]
    args = problem(new, past, 4, 2, 16, 16, torch.float32)
    close(run(args, new, past, num_sms, tile_rows), pa.prefill_attention_reference(*args))


def test_reference_is_plain_causal_attention():
    q, k, v, tables, starts, lengths = problem([37], [0], 4, 2, 16, 16, torch.float32)
    keys, values = (pa.gather(c, tables[0], 37).repeat_interleave(2, 0)[None] for c in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, is_causal=True)
    close(pa.prefill_attention_reference(q, k, v, tables, starts, lengths), expected[0].transpose(0, 1))


def test_chunks_give_what_the_whole_prompt_gives():
    q, k, v, tables, starts, lengths = problem([45], [0], 4, 2, 16, 16, torch.float32)
    whole = run((q, k, v, tables, starts, lengths), [45], [0])
    done = 0
    for chunk in (1, 15, 16, 13):
        args = (q[done:done + chunk], k, v, tables, torch.tensor([0, chunk], dtype=torch.int32),
                torch.tensor([done + chunk], dtype=torch.int32))
        close(run(args, [chunk], [done]), whole[done:done + chunk])
        done += chunk


def test_strided_queries_a_scale_and_a_given_output():
    q, k, v, tables, starts, lengths = problem([20], [4], 4, 2, 16, 16, torch.float32)
    fused = torch.randn(20, 8, 16)
    fused[:, :4] = q
    out = torch.full((20, 4, 16), float("nan"))
    assert run((fused[:, :4], k, v, tables, starts, lengths), [20], [4], scale=0.5, out=out) is out
    close(out, pa.prefill_attention_reference(q, k, v, tables, starts, lengths, scale=0.5))


def test_tiles_are_listed_longest_first():
    plan = pa.plan([40, 5], [0, 100], 16, CPU)
    assert plan.tile_seq.tolist() == [1, 0, 0, 0]
    assert plan.tile_row.tolist() == [0, 32, 16, 0]


def test_no_rows():
    args = problem([0], [5], 4, 2, 16, 16, torch.float32)
    assert run(args, [0], [5]).shape == (0, 4, 16)


@pytest.mark.parametrize(("group", "head_dim", "block_tokens"), [(1, 64, 1), (7, 128, 16), (8, 96, 8), (2, 256, 16)])
def test_group_head_and_page_sizes_with_garbage_in_unused_table_entries(group, head_dim, block_tokens):
    new, past = [17, 1, 0], [30, 15, 9]
    q, k, v, tables, starts, lengths = problem(new, past, group, 1, head_dim, block_tokens, torch.float32)
    for row, tokens in enumerate(lengths.tolist()):
        tables[row, -(-tokens // block_tokens):] = (-1, 2**31 - 1)[row % 2]
    out = run((q, k, v, tables, starts, lengths), new, past, num_sms=3)
    close(out, pa.prefill_attention_reference(q, k, v, tables, starts, lengths))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_any_size_and_sign(sign):
    q, k, v, tables, starts, lengths = problem([20], [280], 4, 1, 16, 16, torch.float32)
    args = (q.abs() * 1e17, torch.where(k.isnan(), k, sign * k.abs() * 1e17), v, tables, starts, lengths)
    close(run(args, [20], [280]), pa.prefill_attention_reference(*args))
