"""KV blocks where some layers have a sliding window."""

import dataclasses

import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import kv_capacity_tokens
from bullet.errors import ConfigError
from bullet.state import KvCache, Request, kv_cache_of
from bullet.state.batches import WindowedDecodeBatch
from bullet.state.kv import WindowedKvCache
from tests.worlds import A100, run

LLAMA = get_model("llama-3.1-8b")


def windowed(tokens: int, layers: int, num_layers: int = 32):  # type: ignore[no-untyped-def]
    return dataclasses.replace(LLAMA, window_tokens=tokens, window_layers=layers, num_layers=num_layers)


@pytest.mark.parametrize(("layers", "window", "groups"), [
    (32, 0, (32, 1, 0)), (32, 32, (32, 0, 1)),  # Mistral v0.1
    (26, 13, (13, 1, 1)), (36, 18, (18, 1, 1)),  # Gemma 2 2B, gpt-oss-120b
    (62, 52, (10, 1, 6)),  # Gemma 3 27B: 10 full, 52 in 5.2 groups of 10
    (25, 12, (13, 1, 1)),  # 13 full, 12 with a window: vLLM pads to 13 rather than have 3 groups of 12
    (50, 30, (20, 1, 2))])
def test_groups_of_layers(layers: int, window: int, groups: tuple[int, int, int]) -> None:
    """Worked out from vLLM's rule."""
    assert windowed(128 if window else 0, window, layers).kv_groups == groups


def test_capacity_is_of_all_layers_and_more_sequences_fit() -> None:
    """gpt-oss's shape: half of the layers with a window of 128. A sequence of 8,192 tokens takes 512 blocks of the full group and
    8 + 1 of the other: 521, not 1,024."""
    model = windowed(128, 16)
    plain, capacity = (kv_capacity_tokens(m, get_gpu("a100-80gb"), DeviceConfig()) for m in (LLAMA, model))
    assert capacity == plain  # tokens that all layers could hold; of twice as many blocks, each of half the layers
    kv = kv_cache_of(model, 8192)
    assert (kv.total_blocks, kv.blocks_for(8192), kv.block_units) == (1024, 521, 2)
    assert isinstance(kv_cache_of(LLAMA, 8192), KvCache)
    assert kv_cache_of(LLAMA, 8192).total_blocks == 512


def test_growth_stops_when_the_window_is_full() -> None:
    """A window of 40 tokens lies in 3 blocks of 16 at most 4: with one full group and two of the other, the 5th block of tokens
    takes 1 block, the 4th took 3."""
    kv = WindowedKvCache(100, 1, 2, 40)
    assert [kv.blocks_for(t) for t in (0, 1, 16, 17, 64, 65, 160)] == [0, 3, 3, 6, 12, 13, 18]
    assert [kv.growth(t) for t in (0, 1, 16, 48, 63, 64, 80)] == [3, 0, 3, 3, 0, 1, 1]
    assert all(kv.growth(t) == kv.blocks_for(t + 1) - kv.blocks_for(t) for t in range(200))


def test_the_batch_counts_exactly() -> None:
    """Against sums over requests, at every iteration, with joins and leaves between."""
    kv = WindowedKvCache(1000, 1, 2, 40)
    batch = WindowedDecodeBatch(kv)
    requests = [Request(i, 0.0, prompt, 1.0) for i, prompt in enumerate((1, 15, 16, 39, 40, 41, 63, 64, 65, 300))]
    for request in requests:
        request.generated, request.first_token_s = 1, 0.0
    for iteration in range(150):
        if iteration % 7 == 0 and iteration // 7 < len(requests):
            batch.join(requests[iteration // 7])
        if iteration > 70 and iteration % 9 == 0 and len(batch) > 2:
            batch.leave(next(iter(batch.requests.values())))
        cached = [batch.cached(r) for r in batch.requests.values()]
        assert batch.growth_blocks == sum(kv.growth(c) for c in cached)
        assert batch.within_tokens == sum(min(c + 1, 40) for c in cached)
        batch.advance()
    for request in list(batch.requests.values()):
        batch.leave(request)
    assert (batch.within_tokens, batch.growth_blocks, sum(batch.residues), batch._below) == (0, 0, 0, 0)


def test_a_decode_of_unequal_contexts_is_priced_exactly() -> None:
    """One context of 100 and one of 10,000 under a window of 1,000: 1,100 tokens are read in a layer with it, not the 2,000 that
    their mean suggests."""
    device = DeviceModel(windowed(1000, 32), A100.gpu, A100.coefficients)
    plain = DeviceModel(LLAMA, A100.gpu, A100.coefficients)
    exact = device.decode_work(2, 10_100, within_tokens=1100)
    assert exact.bytes == pytest.approx(plain.decode_work(2, 1100).bytes)
    assert device.decode_work(2, 10_100).bytes == pytest.approx(plain.decode_work(2, 2000).bytes)


def test_more_requests_run_at_once() -> None:
    """KV for 8,192 tokens in all layers, requests of 4,096: two at once without windows, three where half of the layers keep 128
    (256 + 9 blocks of 1,024), so that the third does not wait for the first."""
    rows = [(0.0, 4000, 96)] * 3
    for model, at_once in ((LLAMA, 2), (windowed(128, 16), 3)):
        device = DeviceModel(model, A100.gpu, A100.coefficients)
        outcome = run("vllm-8192", rows, device=device, device__kv_tokens=8192)
        assert int(outcome.steps["decode_seqs"].max()) == at_once


def test_named_blocks_are_refused() -> None:
    device = DeviceModel(windowed(128, 16), A100.gpu, A100.coefficients)
    with pytest.raises(ConfigError, match="not modelled for layers with a window, which llama"):
        run("vllm-2048", [(0.0, 100, 2)], device=device, policy__options={"prefix_cache": True})
