"""The project's own kernels and its engine's layers in the sweep: the arithmetic, the SMs they get, who may measure them."""

from __future__ import annotations

import importlib
import inspect

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.catalog.models import ModelSpec  # noqa: E402
from bullet.engine.model import Ops  # noqa: E402
from bullet.errors import ProfileError  # noqa: E402
from bullet.profiler import bench_engine as engine_bench  # noqa: E402
from bullet.profiler.bench import CpuBench  # noqa: E402
from bullet.profiler.plan import Point  # noqa: E402
from bullet.profiler.shapes import ENGINE_LAYERS, OWN_KERNELS, Shape, decode, flops_and_bytes, prefill  # noqa: E402
from bullet.profiles.rows import ENGINE_OPS  # noqa: E402

TINY = ModelSpec("tiny-test", 3, 32, 48, 4, 2, 16, 61, 512)
PREFILL, DECODE = ENGINE_LAYERS


def shop(model=TINY):
    return engine_bench.EngineWorkloads(model, torch.device("cpu"), torch.float32, l2_bytes=1 << 16, limit_bytes=1 << 22)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [(PREFILL, 20, 1, 0), (PREFILL, 24, 2, 17), (DECODE, 3, 3, 33)])
def test_a_repetition_is_one_layer_and_the_same_each_time(op, tokens, batch, context, qk_norm):
    model = ModelSpec("tiny-test", 3, 32, 48, 4, 2, 16, 61, 512, qk_norm=qk_norm)
    source = shop(model)
    work = source.build(op, tokens, batch, context, "prefill")
    before = [r.clone() for r in source.residuals[op, "prefill"]]

    def again(one):
        for residual, kept in zip(source.residuals[op, "prefill"], before, strict=True):
            residual.copy_(kept)
        return one.run(0).clone()

    first = again(work)
    assert first.shape == (tokens, 32)
    assert torch.isfinite(first).all()
    # The cache rows it writes are those it reads; only the residual stream is carried over.
    assert torch.equal(again(work), first)
    assert not torch.equal(work.run(0), first)
    assert torch.equal(again(work.on(7)), first)
    if work.rotation > 1:
        assert not torch.equal(work.run(1), first)


def test_a_residual_stream_that_is_never_put_back_grows_no_faster_than_its_repetitions():
    """No copy in the graph: thousands of repetitions add to one stream, by a layer's input and output each time. In float32 that
    is a straight line; in bfloat16 it ends where a sum no longer tells what is added, 2 to the 8 times that."""
    source = shop()
    work = source.build(DECODE, 2, 2, 20, "decode")
    tops = []
    for n in range(1, 401):
        out = work.run(0)
        if n in (200, 400):
            tops.append(float(source.residuals[DECODE, "decode"][0].abs().max()))
    assert torch.isfinite(out).all()
    assert tops[1] / tops[0] == pytest.approx(2.0, rel=0.05)
    half = engine_bench.EngineWorkloads(TINY, torch.device("cpu"), torch.bfloat16, l2_bytes=1 << 16, limit_bytes=1 << 22)
    work = half.build(DECODE, 2, 2, 20, "decode")
    for _ in range(2000):
        out = work.run(0)
    assert torch.isfinite(out).all()
    assert float(half.residuals[DECODE, "decode"][0].abs().max()) < 2**9 * 5  # inputs are normal numbers


@pytest.mark.parametrize(("op", "tokens", "batch", "context", "own"), [(PREFILL, 24, 2, 17, 5), (DECODE, 3, 3, 33, 6)])
def test_a_layer_is_four_gemms_and_a_handful_of_our_kernels_and_nothing_is_copied(op, tokens, batch, context, own, monkeypatch):
    """As on a GPU, with launches counted in place of made: of torch a layer has its four GEMMs (and views, and room for results),
    no copy, which would be a memcpy node, and no plan, which a step makes once for all its layers. Of ours: two norms, rope with
    the cache write, SiLU-mul, attention (and the join of decode's splits), and nothing else."""
    import triton
    from torch.utils._python_dispatch import TorchDispatchMode

    launched, called = [], []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(triton.runtime.JITFunction, "run",
                        lambda self, *args, grid, warmup, **kwargs: launched.append(self.__name__))
    monkeypatch.setattr(engine_bench, "Ops", lambda kernels: Ops("triton"))
    work = shop().build(op, tokens, batch, context, "prefill").on(7)
    launched.clear()
    with Counts():
        work.run(0)
    free = {"empty", "empty_like", "view", "t", "transpose", "detach", "slice", "select", "as_strided", "alias", "_unsafe_view",
            "empty_strided", "split", "unsqueeze", "reshape", "new_empty"}
    assert [name for name in called if name not in free] == ["mm"] * 4
    assert len(launched) == own
    assert [name for name in launched if "norm" in name] == ["rms_norm_kernel"] * 2


def test_the_pages_of_a_decode_are_all_read():
    """40 tokens lie on three pages a sequence, the new one last: another value in any one of them changes the result."""
    source = shop()
    work = source.build(DECODE, 1, 1, 40, "decode")
    stream = source.residuals[DECODE, "decode"][0].clone()

    def again():
        source.residuals[DECODE, "decode"][0].copy_(stream)
        return work.run(0).clone()

    before = again()
    cache = source._caches["v", "decode", 0]
    for page in range(3):
        kept = cache.clone()
        cache.view(3, -1)[page] += 1.0
        assert not torch.equal(again(), before)
        cache.copy_(kept)
    assert torch.equal(again(), before)


def test_other_operations_are_the_references():
    work = shop().build("norm", 4, 1, 0, "prefill")
    assert work.run(0).shape == (4, 32)


@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [(PREFILL, 5, 2, 0), (DECODE, 4, 2, 10), (DECODE, 2, 2, 0)])
def test_shapes_that_make_no_sense_are_refused(op, tokens, batch, context):
    with pytest.raises(ProfileError, match="must divide evenly"):
        shop().build(op, tokens, batch, context, "decode")


OWN = [("own_prefill_attention", "prefill_attention", "prefill_attention"), ("own_norm", "norm", "rms_norm"),
       ("own_act", "activation", "silu_mul"), ("own_rope", "rope", "rope"), ("own_gemm_gate_up", "gemm", "gemm"),
       ("own_copy", "copy", "copy")]


@pytest.mark.parametrize(("op", "module", "kernel"), OWN)
def test_a_kernel_is_launched_with_its_lanes_sms_on_data_that_its_check_passes(op, module, kernel, monkeypatch):
    """The kernels' torch references stand in: they check shapes, dtypes and strides as the wrappers do."""
    own = importlib.import_module(f"bullet.kernels.{module}")
    known = inspect.signature(getattr(own, kernel)).parameters
    handed = []

    def stand_in(*args, num_sms, **options):
        handed.append(num_sms)
        assert set(options) <= set(known)
        return getattr(own, f"{kernel}_reference")(*(args[:-1] if module == "prefill_attention" else args), **options)

    monkeypatch.setattr(own, kernel, stand_in)
    work = shop().build(op, 24, 1, 0, "prefill")
    assert work.takes_num_sms
    for sms in (20, 112):
        for i in range(work.rotation):
            assert torch.isfinite(work.on(sms).run(i)).all()
    assert set(handed) == {20, 112}


def test_own_kernels_are_given_what_a_layer_of_the_model_gives_them(monkeypatch):
    for op, module, kernel in OWN:
        own = importlib.import_module(f"bullet.kernels.{module}")
        calls = []
        monkeypatch.setattr(own, kernel, lambda *args, calls=calls, **options: calls.append((args, options)) or args[0])
        shop().build(op, 24, 2 if op == "own_prefill_attention" else 1, 0, "prefill").run(0)
        args, options = calls[0]
        if op == "own_act":
            assert args[0].shape == (24, 2 * TINY.intermediate_size)
        elif op == "own_gemm_gate_up":
            assert args[1].shape == (2 * TINY.intermediate_size, TINY.hidden_size)
        elif op == "own_norm":
            assert options["residual"].shape == args[0].shape == (24, TINY.hidden_size)
        elif op == "own_rope":
            positions, slots = args[5], args[6]
            assert positions.tolist() == list(range(24))
            assert len(set(slots.tolist())) == 24  # no slot is written twice
        elif op == "own_prefill_attention":
            tables, starts, lengths = args[3:6]
            assert (starts.tolist(), lengths.tolist()) == ([0, 12, 24], [12, 12])
            assert sorted(tables.flatten().tolist()) == [0, 1]
        else:
            assert args[0].shape == args[1].shape == (24, TINY.hidden_size)


def test_torchs_twins_rotate_and_gate():
    source = shop()
    rope, act = source.build("rope", 6, 1, 0, "prefill"), source.build("act", 6, 1, 0, "prefill")
    assert rope.run(0).shape == (6, TINY.num_heads + TINY.num_kv_heads, TINY.head_dim)
    assert act.run(0).shape == (6, TINY.intermediate_size)
    assert torch.equal(rope.run(0), rope.run(0))


def test_they_count_as_the_operations_they_are():
    for own, torchs in ENGINE_OPS.items():
        shape = decode(own, 4, 64) if "decode" in own else Shape(own, 64)
        assert flops_and_bytes(TINY, shape) == flops_and_bytes(TINY, shape._replace(op=torchs))
        assert shape.phase == shape._replace(op=torchs).phase


def test_mixtures_of_experts_are_left_out():
    moe = ModelSpec("moe", 2, 32, 48, 4, 2, 16, 61, 512, num_experts=4, experts_per_token=2)
    bench = CpuBench(moe, threads=1)
    try:
        assert not bench.allowed(Point("solo", None, "full", prefill(PREFILL, 64)))
        assert not any(bench.allowed(Point("solo", None, "full", Shape(op, 64))) for op in OWN_KERNELS)  # nor on any CPU
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


@pytest.mark.parametrize(("op", "tokens", "batch", "context"), [
    ("engine_prefill", 20, 1, 0), ("engine_prefill", 24, 2, 17), ("engine_prefill_by_layer", 20, 1, 0),
    ("engine_decode", 3, 3, 33)])
def test_a_step_is_taken_again_and_again_and_gives_the_same_tokens(op, tokens, batch, context):
    source = shop()
    work, engine = source.build(op, tokens, batch, context, "prefill"), source.steps.engine
    lengths = {i: (len(s.tokens), s.cached) for i, s in engine.sequences.items()}
    free = len(engine.pool.free)
    first = work.run(0)
    assert len(first) == batch
    for _ in range(20):  # over a block's edge, if anything grew
        assert work.run(0) == first
    assert {i: (len(s.tokens), s.cached) for i, s in engine.sequences.items()} == lengths
    assert free - len(engine.pool.free) <= batch * -(-(tokens // batch) // 16) + batch
    engine.check()


def test_by_layer_is_the_same_prefill_in_more_launches(monkeypatch):
    source, launches = shop(), []
    plain = type(source.steps.engine).run_layers
    monkeypatch.setattr(type(source.steps.engine), "run_layers",
                        lambda self, run, layers, *lane: launches.append(layers) or plain(self, run, layers, *lane))
    whole = source.build("engine_prefill", 20, 1, 0, "prefill").run(0)
    by_layer = source.build("engine_prefill_by_layer", 20, 1, 0, "prefill").run(0)
    assert [*whole.values()] == [*by_layer.values()]
    assert launches == [3, 1, 1, 1]


def test_steps_that_make_no_sense_or_do_not_fit_are_left_out():
    source = shop()
    for op, tokens, batch, context in (("engine_prefill", 5, 2, 0), ("engine_decode", 4, 2, 10), ("engine_decode", 2, 2, 1)):
        with pytest.raises(ProfileError, match="must divide evenly"):
            source.build(op, tokens, batch, context, "prefill")
    assert source.steps.fits(64, 1, 256)
    assert not source.steps.fits(256, 1, 256)  # 448 at most
    bench = CpuBench(ModelSpec("short", 3, 32, 48, 4, 2, 16, 61, 100), threads=1)
    try:
        assert bench.allowed(Point("solo", None, "full", prefill("engine_prefill", 64)))
        assert not bench.allowed(Point("solo", None, "full", prefill("engine_prefill", 128)))
    finally:
        bench.close()


def test_a_step_is_timed_once_after_other_steps(monkeypatch):
    """Nothing in service takes the same step again and again; what runs between is not in its time."""
    ticks, order = iter(range(10_000)), []
    bench = CpuBench(TINY, threads=1, replays=3, min_replay_s=10.0, clock=lambda: float(next(ticks)))
    try:
        steps = bench._shop.steps
        monkeypatch.setattr(steps, "other_steps", lambda: order.append("others"))
        build = steps.build
        monkeypatch.setattr(steps, "build", lambda *shape: build(*shape) if shape[0] != "engine_decode" else type(
            build(*shape))("engine_decode", lambda i: order.append("step"), 1, 0))
        (row,) = bench.measure(Point("solo", None, "full", decode("engine_decode", 2, 20)))
    finally:
        bench.close()
    assert (row.repeats, row.stats.samples) == (1, 3)
    assert order[-6:] == ["others", "step"] * 3
