"""The engine's own duties: blocks, launches, graphs on the right streams, what it refuses; no GPU, no transformers."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fake_cuda import FakeCuda, FakeGraph  # noqa: E402
from stub_driver import StubDriver  # noqa: E402

from bullet.catalog.models import ModelSpec  # noqa: E402
from bullet.engine import engine as engine_module  # noqa: E402
from bullet.engine.engine import Engine  # noqa: E402
from bullet.engine.model import Architecture, Ops  # noqa: E402
from bullet.engine.sequences import BlockPool, kv_block_bytes, kv_blocks_that_fit  # noqa: E402
from bullet.engine.weights import random_weights  # noqa: E402
from bullet.errors import ConfigError, EngineError  # noqa: E402
from bullet.gpu.partition import Lane  # noqa: E402
from bullet.state import Chunk  # noqa: E402

CPU = torch.device("cpu")
TINY = ModelSpec("tiny-test", 3, 32, 48, 4, 2, 16, 61, 512)


def make(spec=TINY, kv_blocks=20, max_tokens=128, ops=None, seed=3, **options):
    arch = Architecture.of(spec, torch.float32)
    engine = Engine(arch, random_weights(arch, seed, CPU), ops or Ops("torch"), kv_blocks=kv_blocks, max_tokens=max_tokens,
                    **options)
    engine.kv.fill_(float("nan"))
    return engine


def prompt(length, seed=0):
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(engine, *ids, lane=engine_module.CPU_LANE):
    run = engine.start_prefill([Chunk(i, len(engine.sequences[i].tokens), 0) for i in ids], lane)
    return engine.run_layers(run, 3, lane).finish()


# ------------------------------------------------------------------------------------- blocks and sequences


@pytest.mark.parametrize(("by_chunk", "first"), [(False, 2), (True, 1)])
def test_blocks_are_taken_at_admission_or_chunk_by_chunk_and_at_a_blocks_edge(by_chunk, first):
    engine = make()
    engine.add(7, prompt(31))
    assert len(engine.pool.free) == 20
    run = engine.start_prefill([Chunk(7, 10, 0)], by_chunk=by_chunk)
    assert len(engine.sequences[7].blocks) == first  # of all 31 tokens, or of 10
    assert engine.run_layers(run, 3).finish() == {}
    run = engine.start_prefill([Chunk(7, 21, 10)], by_chunk=by_chunk)
    assert len(engine.sequences[7].blocks) == 2
    (token,) = engine.run_layers(run, 3).finish().values()
    assert engine.sequences[7].generated == [token]
    blocks = []
    for _ in range(3):  # the 31st to 33rd tokens behind the cache: positions 31, 32, 33
        engine.decode([7]).finish()
        blocks.append(len(engine.sequences[7].blocks))
    assert blocks == [2, 3, 3]
    engine.check()
    assert len(engine.remove(7)) == 4
    assert len(engine.pool.free) == 20


def test_a_past_that_is_assumed_takes_its_blocks_and_the_step_after_it_is_the_same():
    """The cache holds another sequence's keys and values there; as many rows, blocks and tokens as if it had been computed."""
    engine = make()
    engine.fill_cache()
    for i in (1, 2):
        engine.add(i, prompt(40, i))
    prefill(engine, 1)
    engine.add(3, prompt(41, 3))
    engine.assume_cached(3, 40)
    assert engine.sequences[3].cached == engine.sequences[1].cached == 40
    assert len(engine.sequences[3].blocks) == len(engine.sequences[1].blocks) == 3
    engine.check()
    assert set(engine.decode([1, 3]).finish()) == {1, 3}
    assert [len(engine.sequences[i].tokens) for i in (1, 3)] == [42, 42]
    engine.assume_cached(2, 30)
    assert list(engine.run_layers(engine.start_prefill([Chunk(2, 10, 30)]), TINY.num_layers).finish()) == [2]
    with pytest.raises(AssertionError):
        engine.assume_cached(2, 30)  # its blocks are there
    for i in (1, 2, 3):
        engine.remove(i)
    assert len(engine.pool.free) == engine.pool.total


def test_the_pool_counts():
    pool = BlockPool(3)
    taken = pool.take(2)
    assert taken == [0, 1]
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free of 3"):
        pool.take(2)
    pool.give_back(taken)
    assert taken == []
    assert sorted(pool.free) == [0, 1, 2]


def test_same_seed_same_tokens_and_another_seed_others():
    outputs = []
    for seed in (3, 3, 4):
        engine = make(seed=seed)
        engine.add(0, prompt(20))
        prefill(engine, 0)
        for _ in range(10):
            engine.decode([0]).finish()
        outputs.append(engine.remove(0))
    assert outputs[0] == outputs[1] != outputs[2]


def test_misuse_is_an_assertion_with_the_values():
    engine = make()
    engine.add(0, prompt(5))
    engine.add(1, prompt(6))
    with pytest.raises(AssertionError, match="request 0 is known already"):
        engine.add(0, prompt(5))
    with pytest.raises(AssertionError, match="chunk of 3 after 2: request 0 has 0 cached of 5"):
        engine.start_prefill([Chunk(0, 3, 2)])
    with pytest.raises(AssertionError, match="0 of 5 tokens cached, cannot decode"):
        engine.decode([0])
    run = engine.start_prefill([Chunk(0, 5, 0)])
    with pytest.raises(AssertionError, match="request 0 is in a launch"):
        engine.preempt(0)
    launch = engine.run_layers(run, 1)
    with pytest.raises(AssertionError, match="prefill: the launch before"):
        engine.run_layers(run, 1)
    launch.finish()
    with pytest.raises(AssertionError, match="finished twice"):
        launch.finish()
    with pytest.raises(AssertionError, match="3 layers after 1 of 3"):
        engine.run_layers(run, 3)
    engine.run_layers(run, 2).finish()
    with pytest.raises(AssertionError, match=r"twice in \[0, 0\]"):
        engine.decode([0, 0])


def test_what_a_user_may_get_wrong_is_one_line():
    engine = make()
    for tokens, message in (([], "prompt of 0 tokens: must be 1 to 127"), ([1] * 128, "prompt of 128 tokens"),
                            ([5, 61], "token 61: must be below the vocabulary's 61"), ([-1], "token -1")):
        with pytest.raises(EngineError, match=message):
            engine.add(0, tokens)
    with pytest.raises(EngineError, match="600 tokens: tiny-test is made for 512"):
        make(max_tokens=600)
    with pytest.raises(EngineError, match="0 blocks of 16"):
        make(kv_blocks=0)
    with pytest.raises(EngineError, match="CUDA graphs need a GPU"):
        engine.capture([engine_module.CPU_LANE])
    with pytest.raises(ConfigError, match="kernels = 'cuda'"):
        Ops("cuda")
    with pytest.raises(EngineError, match=r"(?s)allocating the KV cache: out of memory on cpu [^\n]*$"):
        make(kv_blocks=1 << 30)  # 12 TiB


def test_kv_blocks_that_fit():
    arch = Architecture.of(TINY, torch.float32)
    assert kv_block_bytes(arch) == 2 * 3 * 2 * 16 * 16 * 4
    one = kv_block_bytes(arch)
    assert kv_blocks_that_fit(arch, 10 * one + 5, one, 16 * 9) == 9
    with pytest.raises(EngineError, match="hold 9 blocks, one sequence of 145 tokens needs 10"):
        kv_blocks_that_fit(arch, 10 * one + 5, one, 16 * 9 + 1)
    with pytest.raises(EngineError, match="hold 0 blocks"):
        kv_blocks_that_fit(arch, one, 2 * one, 1)


def test_weights_larger_than_the_memory_are_refused():
    from bullet.engine.weights import require_room

    arch = Architecture.of(TINY, torch.bfloat16)
    needed = TINY.weight_bytes
    require_room(arch, CPU, needed)
    with pytest.raises(EngineError, match="weights of tiny-test need"):
        require_room(arch, CPU, needed - 1)


def test_mixtures_of_experts_are_refused():
    with pytest.raises(ConfigError, match="simulated only"):
        Architecture.of(ModelSpec("moe", 2, 32, 48, 4, 2, 16, 61, 512, num_experts=4, experts_per_token=2))


# ----------------------------------------------------------------------------------- lanes, events and graphs


class Recorded(Engine):
    """An engine on a fake GPU: what a graph would hold is run anew at each replay, in the captured stream's name."""

    def _decode_static(self, static, bucket, num_sms):
        def effect(stream):
            self.ran.append((stream, bucket, num_sms))
            super(Recorded, self)._decode_static(static, bucket, num_sms)
        self._cuda.launch(1e-3, effect)


def fake(buckets=(1, 2, 4), **options):
    cuda = FakeCuda(StubDriver())
    arch = Architecture.of(TINY, torch.float32)
    engine = Recorded(arch, random_weights(arch, 3, CPU), Ops("torch"), kv_blocks=30, max_tokens=128, buckets=buckets, cuda=cuda,
                      **options)
    engine.kv.fill_(float("nan"))
    engine.ran = []
    lanes = [Lane(name, sms, sms, cuda.Stream()) for name, sms in (("prefill", 80), ("decode", 24), ("decode", 48))]
    return cuda, engine, lanes


def test_one_graph_for_each_lane_and_bucket_on_the_lanes_own_stream():
    cuda, engine, (_, small, large) = fake()
    assert engine.capture([small, large]) == 6
    assert cuda.log.count("capture") == 6
    for (stream, bucket), graph in engine._graphs.items():
        lane = next(x for x in (small, large) if id(x.stream) == stream)
        assert graph.stream is lane.stream
        engine.ran.clear()
        with cuda.stream(lane.stream):
            graph.replay()
        assert engine.ran == [(lane.stream, bucket, lane.sms)]
    engine.close()
    assert not engine._graphs


def test_a_lanes_context_is_current_around_every_capture_and_launch_where_that_is_asked_for():
    entered, inside = [], []

    @contextmanager
    def enter(lane):
        entered.append(lane)
        inside.append(lane)
        yield
        inside.pop()

    _, engine, (prefill_lane, small, large) = fake(enter=enter)
    begin = FakeGraph.capture_begin
    where = []
    try:
        FakeGraph.capture_begin = lambda *args, **kwargs: (where.append(list(inside)), begin(*args, **kwargs))[1]
        engine.capture([small, large])
    finally:
        FakeGraph.capture_begin = begin
    assert where == [[small]] * 3 + [[large]] * 3
    engine.add(0, prompt(20))
    entered.clear()
    prefill(engine, 0, lane=prefill_lane)
    engine.decode([0], large).finish()
    assert entered == [prefill_lane, prefill_lane, large]
    assert inside == []


def test_a_filled_cache_is_waited_for():
    """It is filled on the default stream, for which no lane waits: the first step would be timed beside it."""
    cuda, engine, *_ = fake()
    cuda.log.clear()
    engine.fill_cache()
    assert cuda.log == ["synchronize"]


def test_graphs_decode_as_eager_does_whatever_the_bucket_and_the_lane():
    cuda, engine, (prefill_lane, small, large) = fake()
    engine.capture([small, large])
    eager = make(kv_blocks=30)
    lengths = [1, 16, 17, 30, 5]
    for e in (engine, eager):
        for i, n in enumerate(lengths):
            e.add(i, prompt(n, i))
    assert prefill(engine, *range(5), lane=prefill_lane) == prefill(eager, *range(5))
    for step, ids in enumerate([[0], [0, 1, 2], [3, 1], [0, 1, 2, 3, 4], [4, 2, 0, 1], [3]]):
        engine.ran.clear()
        cuda.log.clear()
        lane = (small, large)[step % 2]
        launch = engine.decode(ids, lane)
        assert launch.finish() == eager.decode(ids).finish()
        assert launch.elapsed_s() is not None
        if len(ids) <= 4:
            bucket = next(b for b in (1, 2, 4) if b >= len(ids))
            assert engine.ran == [(lane.stream, bucket, lane.sms)]
            assert cuda.log.count("replay") == 1
        else:  # a batch beyond the largest bucket
            assert not engine.ran
            assert cuda.log.count("replay") == 0
        assert "capture" not in cuda.log


def test_every_lane_has_prefilled_and_every_tile_height_was_met_before_serving(monkeypatch):
    """On a GPU the first launch of a kernel compiles it and a stream's first product makes cuBLAS's workspace."""
    from bullet.kernels.prefill_attention import tile_sizes

    _, engine, lanes = fake()
    ran = []
    plain = Engine.run_layers
    monkeypatch.setattr(Engine, "run_layers", lambda self, run, layers, lane: (
        ran.append((lane, run.chunks[0].new_tokens)), plain(self, run, layers, lane))[1])
    engine.warm_up(lanes)
    assert {lane.sms for lane, _ in ran} == {80, 24, 48}
    heights = {tile_sizes(torch.bfloat16, 128, tokens)[0] for lane, tokens in ran if lane is lanes[0]}
    assert heights == {tile_sizes(torch.bfloat16, 128, tokens)[0] for tokens in range(1, 300)}
    assert not engine.sequences
    assert len(engine.pool.free) == 30
    engine.check()
    small = make(kv_blocks=1, max_tokens=5)
    small.warm_up([engine_module.CPU_LANE])
    assert len(small.pool.free) == 1


@pytest.mark.parametrize("error", ["OutOfResources", "PTXASError"])
def test_a_kernel_that_triton_refuses_is_one_line_too(error):
    """Triton's errors descend from Exception alone."""
    from triton.runtime import errors

    engine = make()
    engine.device = torch.device("cuda")  # what the guard asks
    exc = {"OutOfResources": errors.OutOfResources(200_000, 101_376, "shared memory"),
           "PTXASError": errors.PTXASError("no\nptxas")}[error]

    def launch():
        with engine.guard("prefill"):
            raise exc

    with pytest.raises(EngineError, match="prefill: the GPU failed") as told:
        launch()
    assert "\n" not in str(told.value)
    engine.device = CPU
    with pytest.raises(type(exc)):
        launch()


def test_a_hand_over_waits_for_the_other_lane_and_moves_no_key():
    _, engine, (prefill_lane, small, _) = fake()
    engine.add(0, prompt(20))
    run = engine.start_prefill([Chunk(0, 20, 0)], prefill_lane)
    launch = engine.run_layers(run, 3, prefill_lane)
    prefill_lane.stream.now += 5.0  # as if the layers took 5 s
    launch._events[1].record(prefill_lane.stream)
    blocks, before = list(engine.sequences[0].blocks), engine.kv.clone()
    launch.finish()
    engine.decode([0], small)
    assert small.stream.now >= 5.0
    assert engine.sequences[0].blocks == blocks
    same = (engine.kv == before) | (engine.kv.isnan() & before.isnan())
    changed = (~same).nonzero()
    assert set(changed[:, 2].tolist()) == {blocks[1]}  # block 1's slot 4: the new token, in every layer, and no other
    assert set(changed[:, 4].tolist()) == {4}


def test_the_runtime_never_loads_the_simulator():
    import subprocess

    code = "import sys; import bullet.engine.engine, bullet.engine.weights; " \
           "print([m for m in sys.modules if m.startswith('bullet.sim')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], text=True, capture_output=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
