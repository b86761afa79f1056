"""Norm, rotary embedding with its cache write, and SiLU-mul against their references; those against torch or by hand."""

from __future__ import annotations

import math

import pytest
import torch
from paged import close

from bullet.kernels import activation, norm, rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 64), (5, 100), (19, 128)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm(rows, width, dtype, with_residual):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    residual = torch.randn(rows, width).to(dtype) if with_residual else None
    expected_residual = None if residual is None else residual.clone()
    out = norm.rms_norm(x, weight, 1e-5, num_sms=1, residual=residual)
    close(out, norm.rms_norm_reference(x, weight, 1e-5, residual=expected_residual))
    if residual is not None:
        if dtype == torch.bfloat16:  # the interpreter cuts off where hardware rounds
            close(residual, expected_residual)
        else:
            assert torch.equal(residual, expected_residual)


def test_norm_reference_is_torchs():
    x, weight = torch.randn(4, 32), torch.randn(32)
    close(norm.rms_norm_reference(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (32,), weight, 1e-5))


def test_norm_of_no_rows_and_of_strided_rows():
    assert norm.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, num_sms=1).shape == (0, 8)
    wide = torch.randn(3, 16)
    close(norm.rms_norm(wide[:, :8], torch.ones(8), 1e-5, num_sms=1),
          norm.rms_norm_reference(wide[:, :8].contiguous(), torch.ones(8), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 100), (2, 1025)])
def test_silu_mul(rows, width, dtype):
    gate_up = (torch.randn(rows, 2 * width) * 3).to(dtype)
    close(activation.silu_mul(gate_up, num_sms=1), activation.silu_mul_reference(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_of_large_gates():
    """exp(200) is infinite in float32, and 1 / (1 + inf) is the 0 that it should be."""
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 2.0, 2.0]])
    assert activation.silu_mul(gate_up, num_sms=1).tolist() == [[0.0, 400.0, 0.0]]


def rope_problem(rows, heads, kv_heads, head_dim, page, dtype, with_norm):
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    blocks = 8
    k_cache, v_cache = (torch.full((blocks, kv_heads, page, head_dim), 9.0, dtype=dtype) for _ in range(2))
    positions = torch.randint(0, 50, (rows,), generator=generator)
    slots = torch.randperm(blocks * page, generator=generator)[:rows]
    if rows > 2:
        slots[1] = -1
    angle = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    weights = {f"{n}_weight": torch.randn(head_dim, generator=generator).to(dtype) for n in "qk"} if with_norm else {}
    return (qkv, k_cache, v_cache, angle.cos(), angle.sin(), positions, slots), weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim", "page"), [
    (1, 4, 2, 16, 16), (7, 6, 3, 24, 4), (20, 1, 1, 2, 16), (0, 4, 2, 16, 16)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope(rows, heads, kv_heads, head_dim, page, dtype, with_norm):
    args, weights = rope_problem(rows, heads, kv_heads, head_dim, page, dtype, with_norm)
    expected_caches = args[1].clone(), args[2].clone()
    q = rope.rope(*args, num_sms=1, **weights)
    close(q, rope.rope_reference(args[0], *expected_caches, *args[3:], **weights))
    for cache, expected in zip(args[1:3], expected_caches, strict=True):
        close(cache, expected)  # what is not a slot keeps its 9s
        assert (cache == 9.0).all(-1).sum() >= cache.shape[0] * cache.shape[1] * page - rows * kv_heads


def test_rope_by_hand():
    """One head of size 2 turned by a quarter: (x, y) -> (-y, x); the key lands in its slot, the value as it was."""
    cos, sin = torch.tensor([[1.0], [math.cos(math.pi / 2)]]), torch.tensor([[0.0], [1.0]])
    k_cache, v_cache = torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2)
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    q = rope.rope(qkv, k_cache, v_cache, cos, sin, torch.tensor([1]), torch.tensor([6]), num_sms=1)
    assert q.flatten().tolist() == pytest.approx([-2.0, 1.0], abs=1e-6)
    assert k_cache[1, 0, 2].tolist() == pytest.approx([-4.0, 3.0], abs=1e-6)
    assert v_cache[1, 0, 2].tolist() == [5.0, 6.0]
    assert k_cache.count_nonzero() == 2
