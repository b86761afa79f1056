"""Decode attention against its reference, and the reference against plain attention."""

from __future__ import annotations

import pytest
import torch
from paged import close, paged_cache

from bullet.kernels import decode_attention as da
from bullet.kernels.launch import interpreted


def problem(lengths, heads, kv_heads, head_dim, block_tokens, dtype, seed=0):
    k, v, tables = paged_cache(lengths, kv_heads, head_dim, block_tokens, dtype, seed)
    q = torch.randn(len(lengths), heads, head_dim, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return q, k, v, tables, torch.tensor(lengths, dtype=torch.int32)


def test_the_interpreter_is_on():
    assert interpreted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "block_tokens"), [
    ([1], 4, 2, 16, 16),
    ([0, 1, 15, 16, 17, 33], 4, 2, 16, 16),  # empty, one token, around a block's edge
    ([63, 64, 65, 0, 0], 6, 2, 24, 16),  # around a tile's edge, a group and a head size that are no powers of two
    ([130, 5], 3, 3, 16, 4),  # no grouping, small blocks
    ([70], 32, 1, 32, 32),  # one KV head, more rows than the least product
])
def test_against_the_reference(lengths, heads, kv_heads, head_dim, block_tokens, dtype):
    q, k, v, tables, n = problem(lengths, heads, kv_heads, head_dim, block_tokens, dtype)
    out = da.decode_attention(q, k, v, tables, n, num_sms=2)
    close(out, da.decode_attention_reference(q, k, v, tables, n))
    for row, tokens in enumerate(lengths):
        if not tokens:
            assert (out[row] == 0).all()


@pytest.mark.parametrize("num_sms", [1, 3, 132])
def test_any_grid_and_cut_give_the_same(num_sms, monkeypatch):
    monkeypatch.setattr(da, "MIN_SPLIT_TOKENS", 1)
    q, k, v, tables, n = problem([300, 1, 0, 129], 4, 2, 16, 16, torch.float32)
    plan = da.plan(n, 2, num_sms)
    assert (plan.split_starts[1:] - plan.split_starts[:-1]).tolist()[2] == 0
    if num_sms == 132:  # far more programs than work: the finest cut
        assert plan.split_tokens.item() == da.BLOCK_TOKENS_READ
        assert plan.split_starts.tolist() == [0, 5, 6, 6, 9]
    out = da.decode_attention(q, k, v, tables, n, num_sms=num_sms, plan_=plan)
    close(out, da.decode_attention_reference(q, k, v, tables, n))


def test_reference_is_plain_attention():
    q, k, v, tables, n = problem([37], 4, 2, 16, 16, torch.float32)
    keys, values = (da.gather(c, tables[0], 37).repeat_interleave(2, 0)[None] for c in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]
    close(da.decode_attention_reference(q, k, v, tables, n), expected)


def test_strided_queries_a_scale_and_a_given_output():
    q, k, v, tables, n = problem([20, 40], 4, 2, 16, 16, torch.float32)
    fused = torch.randn(2, 8, 16)
    fused[:, :4] = q
    out = torch.full((2, 4, 16), float("nan"))
    workspace = da.Workspace.make(da.plan(n, 2, 2).max_splits, 4, 16, q.device)
    given = da.decode_attention(fused[:, :4], k, v, tables, n, num_sms=2, scale=0.5, workspace=workspace, out=out)
    assert given is out
    close(out, da.decode_attention_reference(q, k, v, tables, n, scale=0.5))


def test_large_scores_do_not_overflow():
    q, k, v, tables, n = problem([70, 3], 4, 2, 16, 16, torch.float32)
    out = da.decode_attention(q * 1e4, k, v, tables, n, num_sms=1)
    close(out, da.decode_attention_reference(q * 1e4, k, v, tables, n))


def test_no_sequence():
    q, k, v, tables, n = problem([], 4, 2, 16, 16, torch.float32)
    assert da.decode_attention(q, k, v, tables, n, num_sms=2).shape == (0, 4, 16)


@pytest.mark.parametrize("magnitude", [1e4, 1e15, 1e17])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_any_size_and_sign(magnitude, sign):
    """Several splits whose best score is far below any finite stand-in for minus infinity."""
    k, v, tables = paged_cache([300], 1, 16, 16, torch.float32)
    k = torch.where(k.isnan(), k, sign * k.abs() * magnitude)
    q, n = torch.rand(1, 4, 16, generator=torch.Generator().manual_seed(1)) * magnitude, torch.tensor([300], dtype=torch.int32)
    close(da.decode_attention(q, k, v, tables, n, num_sms=5), da.decode_attention_reference(q, k, v, tables, n))


@pytest.mark.parametrize(("group", "head_dim", "block_tokens"), [(1, 64, 1), (7, 128, 16), (8, 96, 8), (2, 256, 16)])
def test_group_head_and_page_sizes_in_double_precision(group, head_dim, block_tokens):
    """Every score on its own in float64; entries of the tables behind a sequence's last block are garbage."""
    lengths = [0, 1, block_tokens, block_tokens + 1, 97]
    q, k, v, tables, n = problem(lengths, group, 1, head_dim, block_tokens, torch.float32)
    for row, tokens in enumerate(lengths):
        tables[row, -(-tokens // block_tokens):] = (-1, 2**31 - 1)[row % 2]
    out = da.decode_attention(q, k, v, tables, n, num_sms=3)
    for row, tokens in enumerate(lengths):
        places = [(tables[row, t // block_tokens], t % block_tokens) for t in range(tokens)]
        for head in range(group):
            scores = torch.tensor([(k[b, 0, o].double() @ q[row, head].double()).item() for b, o in places]) / head_dim**0.5
            weights = torch.softmax(scores.double(), 0)
            expected = sum((w * v[b, 0, o].double() for w, (b, o) in zip(weights, places, strict=True)), torch.zeros(head_dim))
            close(out[row, head], expected.float())
