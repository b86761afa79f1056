"""The engine against transformers' Llama and Qwen3, tiny random models in fp32: logits, and greedy tokens of a ragged
batch however the work is cut up. The engine starts with NaN in every KV slot, so a read of anything unwritten shows."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from bullet.engine.engine import Engine  # noqa: E402
from bullet.engine.model import Architecture, Ops  # noqa: E402
from bullet.engine.weights import load_safetensors  # noqa: E402
from bullet.state import Chunk  # noqa: E402

CPU = torch.device("cpu")
OUTPUT = 32
LENGTHS = (1, 2, 15, 16, 17, 40, 33)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 48}
SIZES = {"vocab_size": 211, "hidden_size": 60, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "dtype": "float32",
             "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.15}
KINDS = {
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-one-kv-head-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Products this small gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class World:
    """A model of transformers, its folder, its prompts, and what it makes of them."""

    def __init__(self, kind, folder):
        name, options = KINDS[kind]
        torch.manual_seed(len(kind))
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
        self.reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for parameter_name, parameter in self.reference.named_parameters():
            if "norm" in parameter_name:  # 1 as made: a forgotten weight would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        self.reference.save_pretrained(folder)
        self.folder = folder
        generator = torch.Generator().manual_seed(5)
        self.prompts = [torch.randint(0, 211, (n,), generator=generator).tolist() for n in LENGTHS]
        self.outputs = [self._greedy(p) for p in self.prompts]

    def logits(self, tokens):
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0]

    def _greedy(self, prompt):
        tokens = list(prompt)
        for _ in range(OUTPUT):
            best = self.logits(tokens)[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-4, "a near tie: choose another seed"
            tokens.append(best.indices[0].item())
        return tokens[len(prompt):]

    def engine(self, kv_blocks=64, block_tokens=16, **options):
        arch = Architecture.from_hf(self.folder)
        engine = Engine(arch, load_safetensors(self.folder, arch, CPU), Ops("torch"), kv_blocks=kv_blocks, max_tokens=128,
                        block_tokens=block_tokens, **options)
        engine.kv.fill_(float("nan"))
        for i, prompt in enumerate(self.prompts):
            engine.add(i, prompt)
        return engine


@pytest.fixture(scope="module", params=list(KINDS))
def world(request, tmp_path_factory, _one_thread):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return World(request.param, tmp_path_factory.mktemp(request.param))


def prefill(engine, chunks, layers=None, **options):
    """Whole, or ``layers`` at a time."""
    run = engine.start_prefill([Chunk(*c) for c in chunks], **options)
    tokens = {}
    while run.layers_done < engine.arch.spec.num_layers:
        tokens = engine.run_layers(run, min(layers or 99, engine.arch.spec.num_layers - run.layers_done)).finish()
    return tokens


def whole(engine, ids):
    return [(i, len(engine.sequences[i].tokens), 0) for i in ids]


def decode_to_the_end(engine, ids):
    """Sequences leave as they reach their output, so the batch is ragged in length and shrinks."""
    while running := [i for i in ids if len(engine.sequences[i].generated) < OUTPUT]:
        engine.decode(running).finish()
        engine.check()


def assert_outputs(world, engine):
    for i, expected in enumerate(world.outputs):
        assert engine.sequences[i].generated == expected, i
    for i in range(len(world.outputs)):
        engine.remove(i)
    assert len(engine.pool.free) == engine.pool.total


def test_prefill_logits(world):
    engine = world.engine()
    run = engine.start_prefill([Chunk(i, n, 0) for i, n in enumerate(LENGTHS)])
    launch = engine.run_layers(run, engine.arch.spec.num_layers)
    expected = torch.stack([world.logits(p)[-1] for p in world.prompts])
    torch.testing.assert_close(launch.logits, expected, rtol=1e-4, atol=1e-4)
    assert launch.finish() == {i: out[0] for i, out in enumerate(world.outputs)}


def test_greedy_tokens_of_a_ragged_batch(world):
    engine = world.engine()
    prefill(engine, whole(engine, range(len(LENGTHS))))
    decode_to_the_end(engine, range(len(LENGTHS)))
    assert_outputs(world, engine)


def test_chunked_prefill(world):
    """Chunks of 1, 7 and 16 tokens, several prompts' in a batch, decodes of complete ones riding along."""
    engine = world.engine(block_tokens=8)
    left = dict(enumerate(LENGTHS))
    sizes = [1, 7, 16]
    step = 0
    while left:
        chunks = []
        for i in list(left)[:3]:
            count = min(left[i], sizes[(i + step) % 3])
            chunks.append((i, count, LENGTHS[i] - left[i]))
            left[i] -= count
            if not left[i]:
                del left[i]
        ready = [i for i in range(len(LENGTHS)) if 0 < len(engine.sequences[i].generated) < OUTPUT]
        tokens = prefill(engine, chunks, decode_ids=ready)
        assert set(tokens) == {*ready, *(c[0] for c in chunks if c[0] not in left)}
        engine.check()
        step += 1
    decode_to_the_end(engine, range(len(LENGTHS)))
    assert_outputs(world, engine)


@pytest.mark.parametrize("layers", [1, 3])
def test_layerwise_prefill_between_decode_iterations(world, layers):
    """While a batch of prompts goes up a few layers at a time, the sequences before it go on decoding."""
    engine = world.engine()
    prefill(engine, whole(engine, [0, 3]))
    running = [0, 3]
    for batch in ([1, 2], [4, 5, 6]):
        run = engine.start_prefill([Chunk(*c) for c in whole(engine, batch)])
        tokens = {}
        while run.layers_done < engine.arch.spec.num_layers:
            part = engine.run_layers(run, min(layers, engine.arch.spec.num_layers - run.layers_done))
            engine.decode(running).finish()  # while the layers are outstanding
            assert not tokens
            tokens = part.finish()
            engine.check()
        assert set(tokens) == set(batch)
        running += batch
    decode_to_the_end(engine, range(len(LENGTHS)))
    assert_outputs(world, engine)


def test_preemption_and_recompute(world):
    """Sequences lose their cache in the middle, others overwrite it, and the tokens come out the same."""
    engine = world.engine(kv_blocks=24)
    prefill(engine, whole(engine, range(5)))
    for _ in range(5):
        engine.decode([0, 1, 2, 3, 4]).finish()
    prefill(engine, [(5, 17, 0)])  # a chunk, then it is preempted too
    for victim in (1, 4, 5):
        held = list(engine.sequences[victim].blocks)
        engine.preempt(victim)
        engine.kv[:, :, held] = float("nan")
        engine.check()
    assert len(engine.sequences[4].generated) == 6
    prefill(engine, whole(engine, [6]))
    for _ in range(3):
        engine.decode([6, 0, 2]).finish()
    prefill(engine, whole(engine, [4, 1]), layers=2)
    prefill(engine, [(5, 20, 0)])
    prefill(engine, [(5, 20, 20)])
    decode_to_the_end(engine, range(len(LENGTHS)))
    assert_outputs(world, engine)


def test_one_token_prompt_alone(world):
    engine = world.engine()
    assert prefill(engine, whole(engine, [0]), layers=1) == {0: world.outputs[0][0]}
    decode_to_the_end(engine, [0])
    assert engine.sequences[0].generated == world.outputs[0]
