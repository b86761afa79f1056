"""What only a GPU can show of the engine: graphs on partitions give the tokens of eager decode. Not yet run on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from bullet.catalog.models import ModelSpec  # noqa: E402
from bullet.engine.engine import Engine  # noqa: E402
from bullet.engine.model import Architecture, Ops  # noqa: E402
from bullet.engine.weights import random_weights  # noqa: E402
from bullet.gpu.partition import Lane, green_context_table  # noqa: E402
from bullet.gpu.splits import granularity, nearest_split  # noqa: E402
from bullet.state import Chunk  # noqa: E402

SPEC = ModelSpec("small", 4, 512, 1024, 8, 2, 64, 1000, 2048)


def generate(engine, prefill_lane, decode_lanes, steps=12):
    for i, n in enumerate((1, 16, 100, 333, 7)):
        engine.add(i, torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(i)).tolist())
    run = engine.start_prefill([Chunk(i, len(s.tokens), 0) for i, s in engine.sequences.items()], prefill_lane)
    for _ in range(4):
        engine.run_layers(run, 1, prefill_lane).finish()
    for step in range(steps):
        engine.decode([0, 1, 2, 3, 4][step % 3:], decode_lanes[step % len(decode_lanes)]).finish()
    return [engine.remove(i) for i in range(5)]


def test_graphs_on_partitions_decode_as_eager_does():
    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    rule = granularity((properties.major, properties.minor))
    splits = [nearest_split(properties.multi_processor_count, rule, share) for share in (0.25, 0.5)]
    arch = Architecture.of(SPEC, torch.float32)
    device = torch.device("cuda")
    with green_context_table(splits, wrap_stream=torch.cuda.ExternalStream) as table:
        engine = Engine(arch, random_weights(arch, 1, device), Ops("triton"), kv_blocks=100, max_tokens=512, device=device,
                        buckets=(1, 2, 4, 8))
        torch.cuda.synchronize()
        table.before_close.append(engine.close)
        lanes = [pair.decode for pair in table.pairs]
        eager = generate(engine, table.pairs[0].prefill, lanes)
        engine.warm_up([pair.prefill for pair in table.pairs])
        assert engine.capture(lanes) == 8
        assert generate(engine, table.pairs[0].prefill, lanes) == eager
    reference = Engine(arch, random_weights(arch, 1, device), Ops("torch"), kv_blocks=100, max_tokens=512, device=device)
    plain = Lane("plain", properties.multi_processor_count, properties.multi_processor_count, torch.cuda.Stream())
    torch.cuda.synchronize()
    assert generate(reference, plain, [plain]) == eager
