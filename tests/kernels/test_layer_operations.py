"""The torch operations against plain arithmetic in float64."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bullet.catalog.models import MODELS, ModelSpec  # noqa: E402
from bullet.errors import ProfileError  # noqa: E402
from bullet.profiler import torch_operations as reference  # noqa: E402

SMALL = ModelSpec("small", 2, 32, 48, 4, 2, 8, 64, 256, dtype_bytes=4)
EXPERTS = dataclasses.replace(SMALL, name="experts", num_experts=4, experts_per_token=2)


def workloads(model=SMALL, **options):
    defaults = {"l2_bytes": 4096, "limit_bytes": 1 << 20}
    return reference.Workloads(model, torch.device("cpu"), torch.float64, **{**defaults, **options})


def naive_attention(q, k, v):
    """q (H, n, D), k and v (K, T, D): every score, one at a time per head."""
    out = torch.empty_like(q)
    heads, n, size = q.shape
    group, total = heads // k.shape[0], k.shape[1]
    for head in range(heads):
        for row in range(n):
            seen = total - n + row + 1
            scores = k[head // group, :seen] @ q[head, row] / math.sqrt(size)
            out[head, row] = torch.softmax(scores, 0) @ v[head // group, :seen]
    return out


@pytest.mark.parametrize(("backend", "wanted"), [("flash", "flash"), ("cudnn", "cudnn")])
def test_attention_on_a_gpu_is_of_one_backend_and_no_other(backend, wanted):
    """What torch may choose from within the block, as torch itself says; elsewhere and afterwards nothing is changed."""
    def enabled():
        found = {"flash": torch.backends.cuda.flash_sdp_enabled(), "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
                 "memory": torch.backends.cuda.mem_efficient_sdp_enabled(), "math": torch.backends.cuda.math_sdp_enabled()}
        return {name for name, on in found.items() if on}

    before = enabled()
    with reference.pinned(SimpleNamespace(is_cuda=True), backend):
        assert enabled() == {wanted}
    with reference.pinned(SimpleNamespace(is_cuda=False), backend):
        assert enabled() == before
    assert enabled() == before


@pytest.mark.parametrize(("new", "past"), [(5, 0), (5, 7), (1, 4)])
def test_prefill_attention_is_causal_and_grouped(new, past):
    torch.manual_seed(0)
    q = torch.randn(2, 4, new, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, past + new, 8, dtype=torch.float64)
    out = reference.prefill_attention(q, k, v)
    for i in range(2):
        torch.testing.assert_close(out[i], naive_attention(q[i], k[i], v[i]))


def test_decode_attention_is_the_last_row_of_prefill():
    torch.manual_seed(1)
    q = torch.randn(3, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(reference.decode_attention(q, k, v),
                               reference.prefill_attention(q[:, :, None], k, v)[:, :, 0])


def naive_layer(model, x, w, positions):
    """One sequence from its start, the textbook way."""
    def norm(t):
        return t / (t.pow(2).mean(-1, keepdim=True) + reference.RMS_EPS).sqrt()

    h = norm(x) * w.norm
    n = x.shape[0]
    qkv = (h @ w.qkv.T).view(n, -1, model.head_dim)
    half = model.head_dim // 2
    rotated = torch.empty_like(qkv)
    for i, position in enumerate(positions):
        for j in range(half):
            angle = position * reference.ROPE_BASE ** (-2 * j / model.head_dim)
            a, b = qkv[i, :, j], qkv[i, :, j + half]
            rotated[i, :, j] = a * math.cos(angle) - b * math.sin(angle)
            rotated[i, :, j + half] = b * math.cos(angle) + a * math.sin(angle)
    heads, kv = model.num_heads, model.num_kv_heads
    attended = naive_attention(rotated[:, :heads].transpose(0, 1), rotated[:, heads:heads + kv].transpose(0, 1),
                               qkv[:, heads + kv:].transpose(0, 1))
    x = x + attended.transpose(0, 1).reshape(n, -1) @ w.o.T
    h = norm(x) * w.norm
    gate, up = (h @ w.gate_up.T).chunk(2, -1)
    return x + (gate * torch.sigmoid(gate) * up) @ w.down.T


def layer_data(model, batch, new, past):
    shop = workloads(model)
    w = shop._layer_weights("prefill", 0)
    x = torch.randn(batch * new, model.hidden_size, dtype=torch.float64)
    caches = torch.zeros(2, batch, model.num_kv_heads, past + new, model.head_dim, dtype=torch.float64)
    positions = torch.arange(past, past + new).repeat(batch)
    return w, x, caches, reference.rope_tables(positions, model.head_dim, torch.float64)


def test_prefill_layer_is_the_textbook_layer():
    torch.manual_seed(2)
    w, x, (k, v), (cos, sin) = layer_data(SMALL, 2, 6, 0)
    out = reference.layer(SMALL, x, w, k, v, cos, sin, 0)
    for i in range(2):
        expected = naive_layer(SMALL, x[i * 6:i * 6 + 6], w, range(6))
        torch.testing.assert_close(out[i * 6:i * 6 + 6], expected)


def test_decode_layer_continues_prefill():
    """Prefill of 7 tokens equals prefill of 6 and one decode step on the cache it left."""
    torch.manual_seed(3)
    w, x, (k, v), (cos, sin) = layer_data(SMALL, 1, 7, 0)
    whole = reference.layer(SMALL, x, w, k, v, cos, sin, 0)
    k2, v2 = torch.zeros(2, 1, 2, 7, 8, dtype=torch.float64)
    reference.layer(SMALL, x[:6], w, k2[:, :, :6], v2[:, :, :6], cos[:6], sin[:6], 0)
    last = reference.layer(SMALL, x[6:], w, k2, v2, cos[6:], sin[6:], 6)
    torch.testing.assert_close(last, whole[6:])
    torch.testing.assert_close(k2, k)


def test_experts_give_every_token_its_share():
    torch.manual_seed(4)
    w, h, _, _ = layer_data(EXPERTS, 1, 6, 0)
    out = reference.mlp(EXPERTS, h, w)
    touched, per = reference.expert_rows(EXPERTS, 6)
    assert (touched, per) == (4, 3)
    expected = torch.zeros_like(h)
    for slot in range(touched * per):
        expert, token = slot // per, slot % 6
        gate, up = (h[token] @ w.gate_up[expert]).chunk(2, -1)
        expected[token] += (gate * torch.sigmoid(gate) * up) @ w.down[expert]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("model", [SMALL, EXPERTS, MODELS["tiny"]])
@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [
    ("gemm_qkv", 5, 1, 0), ("gemm_o", 5, 1, 0), ("gemm_gate_up", 5, 1, 0), ("gemm_down", 5, 1, 0),
    ("gemm_lm_head", 5, 1, 0), ("prefill_attention", 6, 2, 4), ("decode_attention", 3, 3, 8), ("norm", 5, 1, 0),
    ("copy", 5, 1, 0), ("prefill_layer", 6, 2, 0), ("prefill_layer", 6, 1, 4), ("decode_layer", 3, 3, 8)])
def test_every_operation_runs_on_every_input_set(model, op, tokens, batch, context):
    work = workloads(model).build(op, tokens, batch, context, "prefill")
    assert work.name == op
    assert work.rotation == min(64, max(1, -(-3 * 4096 // work.footprint_bytes)))
    outputs = [work.run(i) for i in range(work.rotation)]
    assert all(torch.isfinite(out).all() for out in outputs)
    if work.rotation > 1:
        assert not torch.equal(outputs[0], outputs[1])


def test_lanes_share_no_weights_and_sizes_share_caches():
    shop = workloads()
    shop.build("decode_layer", 2, 2, 8, "decode")
    shop.build("prefill_layer", 8, 1, 0, "prefill")
    assert shop._weight("qkv", "prefill", 0).data_ptr() != shop._weight("qkv", "decode", 0).data_ptr()
    small = shop._cache("k", "decode", 0, 1, 8)
    assert small.data_ptr() == shop._cache("k", "decode", 0, 2, 8).data_ptr()


def test_impossible_shapes_are_refused():
    shop = workloads()
    with pytest.raises(ProfileError, match="7 tokens in 2 sequences"):
        shop.build("prefill_layer", 7, 2, 0, "prefill")
    with pytest.raises(ProfileError, match="must be 1 over 2 or more"):
        shop.build("decode_layer", 4, 2, 8, "decode")
    with pytest.raises(ProfileError, match="no torch reference"):
        shop.build("softmax", 4, 1, 0, "decode")


def test_our_paged_kernel_is_given_each_lanes_sms_and_the_right_pages(monkeypatch):
    """The launch is replaced by the kernel's torch reference: what it is handed must be one decode step over pages."""
    pytest.importorskip("triton")
    from bullet.kernels import decode_attention as own

    handed = []

    def launch(q, k, v, tables, lengths, *, num_sms, plan_, workspace, out):
        handed.append((num_sms, plan_.programs, sorted(tables.flatten().tolist()), lengths.tolist()))
        assert workspace.lse.shape[0] >= plan_.max_splits
        out.copy_(own.decode_attention_reference(q, k, v, tables, lengths))
        return out

    monkeypatch.setattr(own, "decode_attention", launch)
    model = dataclasses.replace(SMALL, head_dim=16)
    shop = reference.Workloads(model, torch.device("cpu"), torch.float32, l2_bytes=4096, limit_bytes=1 << 20)
    work = shop.build("paged_decode_attention", 3, 3, 40, "decode")
    assert work.takes_num_sms
    outputs = [work.on(sms).run(0).clone() for sms in (20, 112)]
    assert [h[0] for h in handed] == [20, 112]
    assert handed[1][1] * 20 == handed[0][1] * 112  # programs in proportion to SMs
    assert {tuple(h[2]) for h in handed} == {tuple(range(9))}  # 3 sequences of ceil(40 / 16) pages, each page once
    assert {tuple(h[3]) for h in handed} == {(40, 40, 40)}
    assert torch.equal(*outputs)
    assert torch.isfinite(outputs[0]).all()
    assert work.footprint_bytes == (2 * 3 * model.num_kv_heads * 48 + 2 * 3 * model.num_heads) * 16 * 4
    with pytest.raises(ProfileError, match="must be one each"):
        shop.build("paged_decode_attention", 6, 3, 40, "decode")
