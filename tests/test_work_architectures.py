"""What windows, latent attention, experts of three kinds, plain MLPs and narrow weights cost: sums by hand."""

import dataclasses

import pytest

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import ModelSpec
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import kv_capacity_tokens, load_fitted
from bullet.estimators.make import make_estimator
from bullet.state import SplitTable
from bullet.work import (
    attended_pairs,
    decode_attention,
    decoded_context,
    dense_kernels,
    gemm,
    gemm_speed,
    head_kernels,
    prefill_attention,
    windowed_pairs,
)

# 4 layers, hidden 8, MLP 16, 4 heads of 2, 2 KV heads, 32 words
PLAIN = ModelSpec("t", 4, 8, 16, 4, 2, 2, 32, 64)
WINDOWED = dataclasses.replace(PLAIN, window_layers=3, window_tokens=4)
LATENT = ModelSpec("t", 4, 8, 16, 4, 4, 6, 32, 64, kv_lora_rank=5, q_lora_rank=3, rope_dim=2, value_dim=4)
MIXED = ModelSpec("t", 4, 8, 6, 4, 2, 2, 32, 64, num_experts=8, experts_per_token=2, shared_size=12, dense_layers=1,
                  dense_size=16)


def totals(model: ModelSpec, tokens: int, name: str) -> tuple[float, float]:
    found = [k for k in dense_kernels(model, tokens) if k.name == name]
    return sum(k.flops for k in found), sum(k.bytes for k in found)


@pytest.mark.parametrize(("new", "past", "pairs"), [
    (3, 0, 1 + 2 + 3), (6, 0, 1 + 2 + 3 + 4 + 4 + 4), (2, 3, 4 + 4), (2, 1, 2 + 3), (3, 9, 12), (1, 0, 1)])
def test_a_token_sees_the_window_alone(new: int, past: int, pairs: float) -> None:
    assert windowed_pairs(new, past, 4) == pairs
    assert windowed_pairs(new, past, 1000) == attended_pairs(new, past)


def test_prefill_in_the_mean_layer() -> None:
    """One layer of four sees all,
    three a window of 4: 6 new tokens after 10. All: 6 x (10 + 3.5) = 81 pairs over 16 tokens; within
    the window: 24 pairs over 10 tokens (the window's 4 and the new 6)."""
    plain, kernel = prefill_attention(PLAIN, [(6, 10)]), prefill_attention(WINDOWED, [(6, 10)])
    assert plain.flops == 4 * 4 * 2 * 81
    assert kernel.flops == 4 * 4 * 2 * (81 / 4 + 24 * 3 / 4)
    assert kernel.bytes == 2 * 2 * (2 * 4 * 6 + 2 * 2 * (16 / 4 + 10 * 3 / 4))


def test_decodes_read_at_most_the_window() -> None:
    """Three sequences of 10, 10 and 40 tokens: the one full layer reads 60, the others 3 x 4."""
    assert decoded_context(WINDOWED, 3, 60) == 60 / 4 + 12 * 3 / 4
    assert decoded_context(WINDOWED, 3, 9) == 9
    assert decoded_context(PLAIN, 3, 60) == 60
    full, read = decode_attention(PLAIN, 3, 24), decode_attention(WINDOWED, 3, 60)
    assert read == full


def test_latent_attention() -> None:
    """Down to the latents 8 -> 3 and 8 -> 5 + 2, up to 4 heads: queries of 6, keys of 4 and values of 4; out of 4 x 4."""
    shapes = {k.name: (k.rows, k.columns, k.k) for k in dense_kernels(LATENT, 7) if k.k}
    assert shapes == {"q_a": (7, 3, 8), "q_b": (7, 24, 3), "kv_a": (7, 7, 8), "kv_b": (7, 32, 5), "o": (7, 8, 16),
                      "gate_up": (7, 32, 8), "down": (7, 8, 16)}
    weights = sum(k.columns * k.k for k in dense_kernels(LATENT, 1) if k.k)
    assert weights == LATENT.attention_parameters + LATENT.mlp_parameters // 4
    one = decode_attention(LATENT, 1, 10)
    # 4 heads read 7 values of a token for the score and sum its 5 latent ones; the cache's 7 values are read once for all heads.
    assert one.flops == 2 * 4 * (7 + 5) * 10
    assert one.bytes == 2 * (4 * (7 + 5) + 7 * 10)
    # tensor parallel: a head each, the same latents
    assert decode_attention(LATENT, 1, 10, 4).bytes == 2 * (1 * (7 + 5) + 7 * 10)
    # A prefill has whole heads: scores of 6 and sums of 4 for a pair; the past's keys and values are made anew, 4 x (4 + 4) of 5.
    assert prefill_attention(LATENT, [(3, 0)]).flops == 2 * 4 * (6 + 4) * 6
    assert prefill_attention(LATENT, [(3, 2)]).flops == 2 * 4 * (6 + 4) * 12 + 2 * 2 * 5 * 4 * 8


def test_the_cache_of_latents_is_not_divided() -> None:
    model = dataclasses.replace(LATENT, vocab_size=32000)
    one, four = (kv_capacity_tokens(model, GPUS["l4"], DeviceConfig(tensor_parallel=t)) for t in (1, 4))
    assert model.kv_bytes_per_token == 4 * 7 * 2
    assert four == pytest.approx(one, rel=1e-3)


def test_experts_of_three_kinds_in_the_mean_layer() -> None:
    """Three layers of four: 2 of 8 experts of 6, shared ones of 12; the fourth a dense MLP of 16. One token."""
    flops, moved = totals(MIXED, 1, "gate_up")
    assert flops == pytest.approx(2 * 8 * (0.75 * (2 * 12 + 24) + 0.25 * 32))
    # 2 experts are touched by one token; each matrix with its rows: routed 2 x (8 + 12) values, shared 8 + 24, dense 8 + 32
    assert moved == pytest.approx(2 * (0.75 * (2 * 20 + 2 * 8 * 12 + 32 + 8 * 24) + 0.25 * (40 + 8 * 32)))
    per_layer = sum(k.columns * k.k * k.share * (8 if k.name in ("gate_up", "down") and k.columns in (12, 8) and k.k in (8, 6)
                                                 and k.blocks > 1 else 1)
                    for k in dense_kernels(MIXED, 10_000) if k.k and k.name not in ("qkv", "o"))
    assert per_layer * 4 == pytest.approx(MIXED.mlp_parameters)


def test_a_plain_mlp_has_two_matrices() -> None:
    plain = dataclasses.replace(PLAIN, gated_mlp=False)
    assert [(k.name, k.columns, k.k) for k in dense_kernels(plain, 5) if k.name in ("gate_up", "down")] == [
        ("gate_up", 16, 8), ("down", 8, 16)]
    assert totals(plain, 5, "act") == (0.0, 2 * 5 * 2 * 16)


def test_weights_activations_and_cache_have_widths_of_their_own() -> None:
    narrow = dataclasses.replace(PLAIN, mlp_bits=4.25, attention_bits=8, kv_bytes=1)
    assert gemm("g", 3, 5, 7, 2, 4.0).bytes == 2 * (21 + 15) + 35 / 2
    assert totals(narrow, 1, "gate_up")[1] == pytest.approx(2 * (8 + 32) + 8 * 32 * 4.25 / 8)
    assert totals(narrow, 1, "qkv")[1] == 2 * (8 + 16) + 8 * 16
    assert head_kernels(narrow, 1)[1] == head_kernels(PLAIN, 1)[1]
    assert decode_attention(narrow, 1, 10).bytes == 2 * 2 * 2 * 4 + 2 * 2 * 2 * 10
    assert narrow.weight_bytes == PLAIN.weight_bytes - 4 * PLAIN.attention_parameters - PLAIN.mlp_parameters * (2 - 4.25 / 8)


def test_tensor_cores_that_have_fp8_are_twice_as_fast_and_others_widen() -> None:
    fp8 = dataclasses.replace(PLAIN, mlp_bits=8, attention_bits=8, gemm_dtype="fp8")
    assert gemm_speed(fp8, GPUS["h100"]) == pytest.approx(2, rel=1e-3)
    assert gemm_speed(fp8, GPUS["a100-80gb"]) == gemm_speed(PLAIN, GPUS["h100"]) == 1
    assert totals(fp8, 5, "qkv")[0] == totals(PLAIN, 5, "qkv")[0]
    fast = next(k for k in dense_kernels(fp8, 5, 1, 2.0) if k.name == "qkv")
    assert fast.flops == totals(PLAIN, 5, "qkv")[0] / 2


BIG = {"a": dataclasses.replace(PLAIN, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
                                vocab_size=32000, context_tokens=131072)}


def seconds(model: ModelSpec, tokens: int = 0, batch: int = 0, context: int = 0, gpu: str = "h100") -> float:
    device = load_fitted(DeviceConfig(gpu=gpu))
    device = type(device)(model, GPUS[gpu], device.coefficients)
    work = device.prefill_work([(tokens, 0)], 4, logits_seqs=1) if tokens else device.decode_work(batch, context)
    alone = device.solo_seconds(work, device.num_sms)
    if batch:
        assert device.decode_seconds(batch, context, device.num_sms) == pytest.approx(alone, rel=1e-12)
    return alone


def test_a_device_prices_them() -> None:
    """Each shortens or lengthens a step in the direction, and about by the amount, that its bytes and operations tell."""
    big = BIG["a"]
    windowed = dataclasses.replace(big, window_layers=4, window_tokens=512)
    assert seconds(windowed, batch=32, context=32 * 512) == pytest.approx(seconds(big, batch=32, context=32 * 512), rel=1e-12)
    assert seconds(windowed, batch=32, context=32 * 9000) == pytest.approx(seconds(big, batch=32, context=32 * 512), rel=1e-12)
    assert seconds(windowed, tokens=8192) < seconds(big, tokens=8192)
    quarter = dataclasses.replace(big, mlp_bits=4, attention_bits=4)
    assert seconds(quarter, batch=1, context=10) < 0.6 * seconds(big, batch=1, context=10)  # a decode reads weights
    assert seconds(quarter, tokens=8192) == pytest.approx(seconds(big, tokens=8192), rel=0.01)  # a prefill computes in 16 bits
    fp8 = dataclasses.replace(big, mlp_bits=8, attention_bits=8, gemm_dtype="fp8")
    assert 0.5 < seconds(fp8, tokens=8192) / seconds(big, tokens=8192) < 0.65
    assert seconds(fp8, tokens=8192, gpu="a100-80gb") == pytest.approx(seconds(big, tokens=8192, gpu="a100-80gb"), rel=0.01)


def test_a_layer_of_a_mixture_is_the_mean_of_its_layers() -> None:
    """Three sparse layers and a dense one cost together what the four cost one by one,
    to the last rounding but for the overheads'
    order of summation."""
    big = BIG["a"]
    mixed = dataclasses.replace(big, intermediate_size=1024, num_experts=16, experts_per_token=2, dense_layers=1, dense_size=8192)
    sparse = dataclasses.replace(mixed, dense_layers=0, dense_size=0)
    dense = dataclasses.replace(big, intermediate_size=8192)
    for kind in ({"tokens": 700}, {"batch": 9, "context": 9000}):
        whole, head = seconds(mixed, **kind), 0.0
        assert whole + head == pytest.approx(0.75 * seconds(sparse, **kind) + 0.25 * seconds(dense, **kind), rel=1e-9)


@pytest.mark.parametrize("change", [
    {"window_layers": 2, "window_tokens": 300}, {"mlp_bits": 8, "attention_bits": 8, "gemm_dtype": "fp8", "kv_bytes": 1},
    {"gated_mlp": False}, {"num_experts": 16, "experts_per_token": 2, "intermediate_size": 1024, "shared_size": 512,
                           "dense_layers": 1, "dense_size": 4096},
    {"num_kv_heads": 32, "head_dim": 192, "kv_lora_rank": 512, "q_lora_rank": 1536, "rope_dim": 64, "value_dim": 128}])
def test_an_estimator_learns_them_from_samples(change: dict[str, object]) -> None:
    """Half of a device's steps between samples are predicted within a tenth, all within a third, alone on the whole device."""
    model = dataclasses.replace(BIG["a"], **change)  # type: ignore[arg-type]
    device = DeviceModel(model, GPUS["h100"], load_fitted(DeviceConfig(gpu="h100")).coefficients)
    splits = SplitTable.every(132, 2)
    srm = make_estimator("srm", device=device, model=model, gpu=GPUS["h100"], splits=splits, seed=0)
    errors = []
    for tokens in (300, 1500, 6000):
        true = device.solo_seconds(device.prefill_work([(tokens, 0)], 4, logits_seqs=1), 132)
        errors.append(abs(srm.prefill_seconds((tokens,), None)[splits.full] / true - 1))
    for batch, context in ((3, 200), (20, 1000), (100, 2500)):
        true = device.solo_seconds(device.decode_work(batch, batch * context), 132)
        errors.append(abs(srm.decode_seconds(batch, batch * context, 0)[splits.full] / true - 1))
        assert srm.decode_line(batch, batch * context, 0)(splits.full) == pytest.approx(
            float(srm.decode_seconds(batch, batch * context, 0)[splits.full]), rel=1e-12)
    assert sorted(errors)[2] < 0.1
    assert max(errors) < 1 / 3
