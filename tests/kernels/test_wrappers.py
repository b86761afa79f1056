"""What the wrappers refuse, each with the values: no kernel starts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.kernels import activation, copy, decode_attention, gemm, norm, prefill_attention, rope  # noqa: E402
from bullet.kernels.launch import power_of_two  # noqa: E402


def cache(kv_heads=2, block_tokens=16, head_dim=16, dtype=torch.float32):
    return torch.zeros(3, kv_heads, block_tokens, head_dim, dtype=dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


TABLE = torch.zeros(1, 2, dtype=torch.int32)
Q = torch.zeros(1, 4, 16)


@pytest.mark.parametrize(("q", "k", "v", "tables", "lengths", "message"), [
    (Q[0], cache(), cache(), TABLE, i32(3), r"q must be \(B, H, D\)"),
    (Q.double(), cache(), cache(), TABLE, i32(3), "dtype torch.float64"),
    (Q, cache(dtype=torch.float16), cache(), TABLE, i32(3), "k_cache is torch.float16, must be torch.float32"),
    (Q, cache(head_dim=32), cache(head_dim=32), TABLE, i32(3), "head size 16 of q, 32 of the cache"),
    (Q, cache(), cache(block_tokens=8), TABLE, i32(3), "must agree"),
    (Q, cache(block_tokens=12), cache(block_tokens=12), TABLE, i32(3), "block of 12 tokens"),
    (Q, cache(3), cache(3), TABLE, i32(3), "4 query heads must be a multiple of 3"),
    (Q, cache(), cache(), TABLE, torch.tensor([3]), "lengths must be contiguous int32"),
    (Q, cache(), cache(), TABLE, i32(3, 4), "1 queries, 1 block tables, 2 lengths"),
])
def test_decode_attention(q, k, v, tables, lengths, message):
    with pytest.raises(ValueError, match=message):
        decode_attention.decode_attention(q, k, v, tables, lengths, num_sms=4)
    with pytest.raises(ValueError, match=message):
        decode_attention.decode_attention_reference(q, k, v, tables, lengths)


def test_decode_attention_refuses_another_batchs_plan_and_a_small_workspace():
    args = (Q, cache(), cache(), TABLE, i32(3))
    with pytest.raises(ValueError, match="plan is for 2 sequences, the batch has 1"):
        decode_attention.decode_attention(*args, num_sms=4, plan_=decode_attention.plan(i32(3, 4), 2, 4))
    with pytest.raises(ValueError, match="workspace"):
        decode_attention.decode_attention(*args, num_sms=4, workspace=decode_attention.Workspace.make(1, 4, 16, Q.device))
    with pytest.raises(ValueError, match="num_sms = 0"):
        decode_attention.decode_attention(*args, num_sms=0)


@pytest.mark.parametrize("lengths", [[0], [1], [128], [129], [70, 0, 20], [100_000] + [1] * 63, [5000] * 200])
@pytest.mark.parametrize("num_sms", [1, 16, 132])
def test_a_plan_covers_every_token_within_its_bound(lengths, num_sms):
    """Splits x their size reach each length, one fewer does not, and there are never more than the buffers hold."""
    plan = decode_attention.plan(i32(*lengths), 8, num_sms)
    cut = plan.split_tokens.item()
    assert cut % decode_attention.BLOCK_TOKENS_READ == 0
    splits = plan.split_starts.diff().tolist()
    for count, length in zip(splits, lengths, strict=True):
        assert (count - 1) * cut < length <= count * cut or (count == length == 0)
    assert plan.split_starts[-1].item() <= plan.max_splits


def test_prefill_attention():
    plan = prefill_attention.plan([2], [0], 16, Q.device)
    args = (torch.zeros(2, 4, 16), cache(), cache(), TABLE)
    with pytest.raises(ValueError, match=r"1 block tables, 1 lengths, 3 starts \(one more\)"):
        prefill_attention.prefill_attention(*args, i32(0, 1, 2), i32(2), plan, num_sms=4)
    with pytest.raises(ValueError, match="num_sms = -1"):
        prefill_attention.prefill_attention(*args, i32(0, 2), i32(2), plan, num_sms=-1)


def test_rowwise():
    with pytest.raises(ValueError, match=r"weight \(9,\) \(width,\)"):
        norm.rms_norm(torch.zeros(2, 8), torch.ones(9), 1e-5, num_sms=4)
    with pytest.raises(ValueError, match=r"residual \(3, 8\) must be as x \(2, 8\)"):
        norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, num_sms=4, residual=torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"gate_up \(2, 7\)"):
        activation.silu_mul(torch.zeros(2, 7), num_sms=4)
    tables = torch.zeros(5, 8)
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="leave 0 query heads beside 2 KV heads"):
        rope.rope(torch.zeros(1, 64), cache(), cache(), tables, tables, rows, rows, num_sms=4)
    with pytest.raises(ValueError, match="cos must be contiguous float32"):
        rope.rope(torch.zeros(1, 128), cache(), cache(), tables[:, :4], tables, rows, rows, num_sms=4)
    with pytest.raises(ValueError, match="come together"):
        rope.rope(torch.zeros(1, 128), cache(), cache(), tables, tables, rows, rows, num_sms=4, q_weight=torch.ones(16))


def test_gemm_and_copy():
    with pytest.raises(ValueError, match=r"weight \(3, 9\) \(columns, depth\)"):
        gemm.gemm(torch.zeros(2, 8), torch.zeros(3, 9), num_sms=4)
    with pytest.raises(ValueError, match="x has stride 2 along its last axis"):
        gemm.gemm(torch.zeros(8, 2).t(), torch.zeros(3, 8), num_sms=4)
    with pytest.raises(ValueError, match="must agree"):
        copy.copy(torch.zeros(3), torch.zeros(4), num_sms=4)
    with pytest.raises(ValueError, match="num_sms = 0"):
        copy.copy(torch.zeros(3), torch.zeros(3), num_sms=0)


KERNELS = {
    "rms_norm": lambda n: norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, num_sms=n),
    "silu_mul": lambda n: activation.silu_mul(torch.zeros(2, 8), num_sms=n),
    "rope": lambda n: rope.rope(torch.zeros(1, 128), cache(), cache(), torch.zeros(5, 8), torch.zeros(5, 8),
                                *torch.zeros(2, 1, dtype=torch.int64), num_sms=n),
    "gemm": lambda n: gemm.gemm(torch.zeros(2, 8), torch.zeros(3, 8), num_sms=n),
    "copy": lambda n: copy.copy(torch.zeros(3), torch.zeros(3), num_sms=n),
    "decode_attention": lambda n: decode_attention.decode_attention(Q, cache(), cache(), TABLE, i32(3), num_sms=n,
                                                                    plan_=decode_attention.plan(i32(3), 2, 4)),
    "prefill_attention": lambda n: prefill_attention.prefill_attention(
        torch.zeros(2, 4, 16), cache(), cache(), TABLE, i32(0, 2), i32(2), prefill_attention.plan([2], [0], 16, Q.device),
        num_sms=n)}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_sms", [0, -3])
def test_a_grid_of_nothing_is_refused(name, num_sms):
    """A GPU launches 0 programs without a word, and the output stays whatever the memory held."""
    with pytest.raises(ValueError, match=f"{name}: num_sms = {num_sms} must be positive"):
        KERNELS[name](num_sms)


def test_a_plan_for_other_sms_or_too_tall_tiles_is_refused():
    with pytest.raises(ValueError, match="the plan has 12 programs, 5 SMs take 15"):
        KERNELS["decode_attention"](5)
    args = (torch.zeros(2, 4, 16), cache(), cache(), TABLE, i32(0, 2), i32(2))
    for rows in (8, 48, 64):
        with pytest.raises(ValueError, match=f"plan of {rows} rows a tile: torch.float32 with head size 16"):
            prefill_attention.prefill_attention(*args, prefill_attention.plan([2], [0], rows, Q.device), num_sms=4)


def test_tensors_elsewhere_are_refused():
    """A kernel follows an address wherever it points: into another device's memory it fails later, as something else."""
    there = torch.device("meta")
    with pytest.raises(ValueError, match="rms_norm: weight is on meta, x on cpu"):
        norm.rms_norm(torch.zeros(2, 8), torch.ones(8, device=there), 1e-5, num_sms=4)
    with pytest.raises(ValueError, match="rms_norm: residual is on meta, x on cpu"):
        norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, num_sms=4, residual=torch.zeros(2, 8, device=there))
    with pytest.raises(ValueError, match="silu_mul: out is on meta, gate_up on cpu"):
        activation.silu_mul(torch.zeros(2, 8), num_sms=4, out=torch.zeros(2, 4, device=there))
    with pytest.raises(ValueError, match="gemm: weight is on meta"):
        gemm.gemm(torch.zeros(2, 8), torch.zeros(3, 8, device=there), num_sms=4)
    with pytest.raises(ValueError, match="copy: target is on meta"):
        copy.copy(torch.zeros(3), torch.zeros(3, device=there), num_sms=4)
    with pytest.raises(ValueError, match="decode_attention: block_tables is on meta"):
        decode_attention.decode_attention(Q, cache(), cache(), TABLE.to(there), i32(3), num_sms=4)
    with pytest.raises(ValueError, match="prefill_attention: plan is on meta"):
        prefill_attention.prefill_attention(torch.zeros(2, 4, 16), cache(), cache(), TABLE, i32(0, 2), i32(2),
                                            prefill_attention.plan([2], [0], 16, there), num_sms=4)
    with pytest.raises(ValueError, match="rope: cos is on meta"):
        rope.rope(torch.zeros(1, 128), cache(), cache(), torch.zeros(5, 8, device=there), torch.zeros(5, 8),
                  *torch.zeros(2, 1, dtype=torch.int64), num_sms=4)


def test_power_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 16, 17)] == [1, 1, 2, 4, 16, 32]
