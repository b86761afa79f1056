"""The engine's layers in the sweep: the same arithmetic as the engine's own model, and who may measure them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.config import ModelSpec  # noqa: E402
from bullet.errors import ProfileError  # noqa: E402
from bullet.runtime import engine_bench  # noqa: E402
from bullet.runtime.bench import CpuBench  # noqa: E402
from bullet.runtime.plan import ENGINE_LAYERS, Point, decode, flops_and_bytes, prefill  # noqa: E402

TINY = ModelSpec("tiny-test", 3, 32, 48, 4, 2, 16, 61, 512)
PREFILL, DECODE = ENGINE_LAYERS


def shop(model=TINY):
    return engine_bench.EngineWorkloads(model, torch.device("cpu"), torch.float32, l2_bytes=1 << 16, limit_bytes=1 << 22)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [(PREFILL, 20, 1, 0), (PREFILL, 24, 2, 17), (DECODE, 3, 3, 33)])
def test_a_repetition_is_one_layer_and_the_same_each_time(op, tokens, batch, context, qk_norm):
    model = ModelSpec("tiny-test", 3, 32, 48, 4, 2, 16, 61, 512, qk_norm=qk_norm)
    work = shop(model).build(op, tokens, batch, context, "prefill")
    first = work.run(0).clone()
    assert first.shape == (tokens, 32)
    assert torch.isfinite(first).all()
    # The cache rows it writes are those it reads, and the residual stream is not carried over.
    assert torch.equal(work.run(0), first)
    assert torch.equal(work.on(7).run(0), first)
    if work.rotation > 1:
        assert not torch.equal(work.run(1), first)


def test_the_pages_of_a_decode_are_all_read():
    """40 tokens lie on three pages a sequence, the new one last: another value in any one of them changes the result."""
    source = shop()
    work = source.build(DECODE, 1, 1, 40, "decode")
    before = work.run(0).clone()
    cache = source._caches["v", "decode", 0]
    for page in range(3):
        kept = cache.clone()
        cache.view(3, -1)[page] += 1.0
        assert not torch.equal(work.run(0), before)
        cache.copy_(kept)
    assert torch.equal(work.run(0), before)


def test_other_operations_are_the_references():
    work = shop().build("norm", 4, 1, 0, "prefill")
    assert work.run(0).shape == (4, 32)


@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [(PREFILL, 5, 2, 0), (DECODE, 4, 2, 10), (DECODE, 2, 2, 0)])
def test_shapes_that_make_no_sense_are_refused(op, tokens, batch, context):
    with pytest.raises(ProfileError, match="must divide evenly"):
        shop().build(op, tokens, batch, context, "decode")


def test_they_count_as_the_layers_they_are():
    for own, torchs in ((prefill(PREFILL, 64), prefill("prefill_layer", 64)),
                        (decode(DECODE, 4, 64), decode("decode_layer", 4, 64))):
        assert flops_and_bytes(TINY, own) == flops_and_bytes(TINY, torchs)
        assert own.phase == torchs.phase


def test_mixtures_of_experts_are_left_out():
    moe = ModelSpec("moe", 2, 32, 48, 4, 2, 16, 61, 512, num_experts=4, experts_per_token=2)
    bench = CpuBench(moe, threads=1)
    try:
        assert not bench.allowed(Point("solo", None, "full", prefill(PREFILL, 64)))
        assert bench.allowed(Point("solo", None, "full", prefill("prefill_layer", 64)))
    finally:
        bench.close()


def test_a_cpu_measures_them():
    ticks = iter(range(10_000))
    bench = CpuBench(TINY, threads=1, replays=3, min_replay_s=0.0, clock=lambda: float(next(ticks)))
    try:
        (row,) = bench.measure(Point("solo", None, "full", prefill(PREFILL, 32)))
    finally:
        bench.close()
    assert row.shape.op == PREFILL
    assert row.stats.samples == 3
