"""The engine on the Triton kernels, interpreted, against the engine on their torch references."""

from __future__ import annotations

import pytest
import torch

from bullet.catalog.models import ModelSpec
from bullet.engine.engine import Engine
from bullet.engine.model import Architecture, Ops
from bullet.engine.weights import random_weights
from bullet.state import Chunk

CPU = torch.device("cpu")
SPECS = {
    "llama": ModelSpec("llama", 2, 32, 48, 4, 2, 16, 61, 128),
    "qwen3": ModelSpec("qwen3", 2, 36, 40, 6, 2, 24, 61, 128, qk_norm=True, tie_embeddings=True),
}


@pytest.mark.parametrize("gemm", ["torch", "triton"])
@pytest.mark.parametrize("name", list(SPECS))
def test_kernels_generate_what_the_references_do(name, gemm):
    arch = Architecture.of(SPECS[name], torch.float32)
    engines = [Engine(arch, random_weights(arch, 1, CPU), ops, kv_blocks=16, max_tokens=64)
               for ops in (Ops("triton", gemm), Ops("torch"))]
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 61, (n,), generator=generator).tolist() for n in (1, 16, 19)]
    logits = []
    for engine in engines:
        engine.kv.fill_(float("nan"))
        for i, prompt in enumerate(prompts):
            engine.add(i, prompt)
        run = engine.start_prefill([Chunk(0, 1, 0), Chunk(1, 16, 0), Chunk(2, 7, 0)])
        engine.run_layers(run, 1).finish()
        launches = [engine.run_layers(run, 1)]
        launches[-1].finish()
        run = engine.start_prefill([Chunk(2, 12, 7)], decode_ids=[0, 1])
        launches.append(engine.run_layers(run, 2))
        launches[-1].finish()
        for _ in range(2):
            launches.append(engine.decode([2, 0, 1]))
            launches[-1].finish()
        logits.append([launch.logits for launch in launches])
    for ours, expected in zip(*logits, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for i in range(3):
        assert engines[0].sequences[i].tokens == engines[1].sequences[i].tokens
        assert len(engines[0].sequences[i].generated) == (3 if i == 2 else 4)
