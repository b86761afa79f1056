"""What only a GPU can show of the kernels: values in bf16, and the figures that they are made for. Not yet run on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from bullet.kernels import activation, copy, decode_attention, gemm, norm, prefill_attention, rope  # noqa: E402

TOLERANCE = 1e-2
"""Relative to the largest value of a float32 reference."""


def close(actual, expected):
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error.item() <= TOLERANCE


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def cache_of(lengths, kv_heads=8, head_dim=128, block_tokens=16, dtype=torch.bfloat16):
    blocks_of = [-(-n // block_tokens) for n in lengths]
    order = torch.randperm(sum(blocks_of) + 1).tolist()
    k, v = (torch.randn(len(order), kv_heads, block_tokens, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max([*blocks_of, 1]), dtype=torch.int32)
    for row, blocks in enumerate(blocks_of):
        tables[row, :blocks] = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int32)
    return k, v, tables.cuda()


def seconds(run, repeats=20):
    """Median of event pairs on the current stream, every run behind a flush of L2."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("lengths", [[1], [0, 1, 15, 16, 17, 4000], [2048] * 64])
@pytest.mark.parametrize("fraction", [1, 4])
def test_decode_attention(lengths, fraction):
    k, v, tables = cache_of(lengths)
    q = torch.randn(len(lengths), 32, 128, device="cuda", dtype=torch.bfloat16)
    n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out = decode_attention.decode_attention(q, k, v, tables, n, num_sms=sms() // fraction)
    close(out, decode_attention.decode_attention_reference(q.float(), k.float(), v.float(), tables, n))


@pytest.mark.parametrize(("new", "past"), [([1], [0]), ([0, 1, 17, 513], [5, 100, 0, 33]), ([2048, 100], [0, 4096])])
def test_prefill_attention(new, past):
    lengths = [a + b for a, b in zip(new, past, strict=True)]
    k, v, tables = cache_of(lengths)
    q = torch.randn(sum(new), 32, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0)], dtype=torch.int32, device="cuda")
    n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows, _ = prefill_attention.tile_sizes(q.dtype, 128, max(new))
    plan = prefill_attention.plan(new, past, rows, q.device)
    out = prefill_attention.prefill_attention(q, k, v, tables, starts, n, plan, num_sms=sms())
    close(out, prefill_attention.prefill_attention_reference(q.float(), k.float(), v.float(), tables, starts, n))


def test_rowwise_gemm_and_copy():
    x, weight = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((1000, 4096), (4096,)))
    residual = torch.randn_like(x)
    close(norm.rms_norm(x, weight, 1e-5, num_sms=sms(), residual=residual.clone()),
          norm.rms_norm_reference(x, weight, 1e-5, residual=residual.clone()))
    close(activation.silu_mul(x, num_sms=sms()), activation.silu_mul_reference(x.float()))
    matrix = torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) / 64
    close(gemm.gemm(x, matrix, num_sms=sms()), gemm.gemm_reference(x.float(), matrix.float()))
    assert torch.equal(copy.copy(x, torch.empty_like(x), num_sms=8), x)
    k, v, _ = cache_of([2000])
    qkv = torch.randn(1000, 48 * 128, device="cuda", dtype=torch.bfloat16)
    tables = [torch.randn(4096, 64, device="cuda") for _ in range(2)]
    positions, slots = torch.arange(1000, device="cuda"), torch.randperm(2000, device="cuda")[:1000]
    k32, v32 = k.float(), v.float()
    q = rope.rope(qkv, k, v, *tables, positions, slots, num_sms=sms())
    close(q, rope.rope_reference(qkv.float(), k32, v32, *tables, positions, slots))
    close(k, k32)
    close(v, v32)


def test_decode_attention_reaches_70_percent_of_copy_bandwidth():
    lengths = [4096] * 64
    k, v, tables = cache_of(lengths)
    q = torch.randn(64, 32, 128, device="cuda", dtype=torch.bfloat16)
    n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan = decode_attention.plan(n, 8, sms())
    workspace = decode_attention.Workspace.make(plan.max_splits, 32, 128, q.device)
    ours = seconds(lambda: decode_attention.decode_attention(q, k, v, tables, n, num_sms=sms(), plan_=plan,
                                                             workspace=workspace))
    target = torch.empty_like(k)
    copied = seconds(lambda: copy.copy(k, target, num_sms=sms()))
    used = sum(lengths) * 8 * 128 * 2 * 2
    assert used / ours >= 0.7 * (2 * k.numel() * 2 / copied)


def test_prefill_attention_reaches_60_percent_of_sdpa():
    tokens = 8192
    k, v, tables = cache_of([tokens])
    q = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    starts, n = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, tokens], [tokens]))
    rows, _ = prefill_attention.tile_sizes(q.dtype, 128, tokens)
    plan = prefill_attention.plan([tokens], [0], rows, q.device)
    ours = seconds(lambda: prefill_attention.prefill_attention(q, k, v, tables, starts, n, plan, num_sms=sms()))
    dense = [decode_attention.gather(c, tables[0], tokens)[None] for c in (k, v)]
    rows_first = q.transpose(0, 1)[None].contiguous()
    theirs = seconds(lambda: torch.nn.functional.scaled_dot_product_attention(rows_first, *dense, is_causal=True,
                                                                              enable_gqa=True))
    assert theirs / ours >= 0.6
