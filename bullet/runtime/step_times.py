"""Take the times of an engine's steps, as the driver launches them: what an estimator starts from, and a simulation runs on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bullet.catalog.models import ModelSpec
from bullet.config import KV_BLOCK_TOKENS
from bullet.devices.measured import StepProfile
from bullet.errors import ProfileError
from bullet.runtime.machine import Opened
from bullet.state import Chunk

LONGEST_CORUN = 20
"""How many times its window a co-run may last until each lane has ended three steps."""
LEAST_TOKENS = {"cpu": 80, "cuda": 1040}
"""Longest sequence that :func:`measure_steps` takes at least: its second context and 16 tokens of room."""
PROBE_TOKENS = 2048
"""Largest prompt whose time is taken on every split: beyond, a few SMs take seconds."""


class _Steps:
    """Times steps as the driver launches them."""

    FIRST_ID = 1 << 40

    def __init__(self, opened: Opened, spec: ModelSpec, seed: int, clock: Callable[[], float]) -> None:
        self.opened, self.machine, self.engine, self.clock = opened, opened.machine, opened.machine.engine, clock
        self.layers = spec.num_layers
        self.rng = np.random.default_rng(seed)
        self.vocabulary = spec.vocab_size
        self.next_id = self.FIRST_ID

    def add(self, tokens: int) -> int:
        self.next_id += 1
        self.engine.add(self.next_id, self.rng.integers(0, self.vocabulary, tokens).tolist())
        return self.next_id

    def timed(self, go: Callable[[], Any]) -> float:
        started = self.clock()
        launch = go()
        launch.finish()
        on_device = launch.elapsed_s()
        return float(self.clock() - started if on_device is None else on_device)

    def add_cached(self, context: int) -> int:
        """A sequence that can decode its next token over ``context``. Its past is not computed: 128 sequences of 2,048 tokens
        would cost more than all that is timed, and no time depends on what the cache holds."""
        request = self.add(context)
        self.engine.assume_cached(request, context - 1)
        return request

    def whole(self, tokens: int, where: Any, past: int = 0) -> float:
        """A prefill of ``tokens`` after ``past``, all layers at once."""
        request = self.add(tokens + past)
        if past:
            self.engine.assume_cached(request, past)
        seconds = self.run([Chunk(request, tokens, past)], self.layers, where)[0]
        self.engine.remove(request)
        return seconds

    def run(self, chunks: Sequence[Chunk], layers: int, where: Any) -> list[float]:
        """A batch, ``layers`` at a time."""
        state: dict[str, Any] = {}

        def first() -> Any:
            state["run"] = self.engine.start_prefill(chunks, where)
            return self.engine.run_layers(state["run"], layers, where)

        seconds = [self.timed(first)]
        for _ in range(self.layers // layers - 1):
            seconds.append(self.timed(lambda: self.engine.run_layers(state["run"], layers, where)))
        return seconds

    def decode(self, batch: int, context: int, where: Any, repeats: int) -> float:
        """Iterations around ``context`` tokens attended by each sequence."""
        ids = [self.add_cached(max(2, context - 1)) for _ in range(batch)]
        seconds = [self.timed(lambda: self.engine.decode(ids, where)) for _ in range(repeats)]
        for i in ids:
            self.engine.remove(i)
        return statistics.median(seconds)

    def slowdowns(self, p: int, d: int, tokens: int, batch: int, context: int, seconds: float) -> tuple[float, float]:
        """Both lanes kept busy for ``seconds``, longer where a lane has not yet ended three steps: median step of each over
        its median alone on the same SMs."""
        lanes = self.machine.lane("prefill", p), self.machine.lane("decode", d)
        ids = [self.add_cached(context + 1) for _ in range(batch)]
        alone = (statistics.median(self.whole(tokens, lanes[0]) for _ in range(3)),
                 statistics.median(self.timed(lambda: self.engine.decode(ids, lanes[1])) for _ in range(5)))
        found: tuple[list[float], list[float]] = ([], [])
        prefill = decode = request = None
        began, most = self.clock(), self.engine.max_tokens - context - 8
        while (spent := self.clock() - began) < seconds or (min(map(len, found)) < 3 and spent < LONGEST_CORUN * seconds):
            if len(found[1]) >= most:
                break
            if prefill is None:
                request = self.add(tokens)
                prefill = self.engine.run_layers(self.engine.start_prefill([Chunk(request, tokens, 0)], lanes[0]), self.layers,
                                                 lanes[0])
            if decode is None:
                decode = self.engine.decode(ids, lanes[1])
            if prefill.done():
                prefill.finish()
                found[0].append(prefill.elapsed_s())
                self.engine.remove(request)
                prefill = None
            if decode.done():
                decode.finish()
                found[1].append(decode.elapsed_s())
                decode = None
        for launch in (prefill, decode):
            if launch is not None:
                launch.finish()
        if prefill is not None:
            self.engine.remove(request)
        for i in ids:
            self.engine.remove(i)
        if min(map(len, found)) < 2:
            raise ProfileError(f"step times on {p}+{d} SMs: fewer than 2 steps of a lane in {LONGEST_CORUN * seconds:g} s")
        return statistics.median(found[0][1:]) / alone[0], statistics.median(found[1][1:]) / alone[1]


def measure_steps(opened: Opened, model: ModelSpec, *, seed: int = 0, repeats: int = 5,
                  prefill_tokens: Sequence[int] | None = None, batches: Sequence[int] | None = None,
                  contexts: Sequence[int] | None = None, corun_s: float = 0.5,
                  clock: Callable[[], float] = time.perf_counter) -> StepProfile:
    """Medians of ``repeats`` steps each, the engine otherwise idle. Sizes that its cache cannot hold are left out."""
    machine, engine = opened.machine, opened.machine.engine
    steps = _Steps(opened, model, seed, clock)
    n, cpu = machine.splits.num_sms, machine.turns
    room = min(engine.max_tokens - 16, machine.kv_blocks * KV_BLOCK_TOKENS // 2)
    defaults = (1, 16, 64, 128, 256, 512, 1024, 2048) if cpu else (1, 64, 256, 512, 1024, 2048, 4096, 8192)
    sizes = [t for t in prefill_tokens or defaults if t <= room]
    contexts = [c for c in contexts or ((16, 64, 192) if cpu else (128, 1024, 2048)) if c <= room]
    batches = list(batches or ((1, 4, 12) if cpu else (1, 8, 32, 64, 128)))
    blocks = machine.kv_blocks // 2

    def fitting() -> list[int]:
        return [b for b in batches if contexts and b * (-(-(contexts[-1] + 16) // KV_BLOCK_TOKENS)) <= blocks]

    while len(contexts) > 2 and len(fitting()) < 2:  # two batches tell more than a third context: 8B's weights on 24 GiB
        contexts.pop()
    batches = fitting()
    if len(sizes) < 2 or len(contexts) < 2 or len(batches) < 2:
        raise ProfileError(f"step times: longest sequence of {engine.max_tokens} tokens and {machine.kv_blocks} KV blocks leave "
                           "too few sizes to measure: raise device.kv_tokens, take longer requests, or give --steps FILE")
    prefill_lane, decode_lane = machine.lane("prefill", n), machine.lane("decode", n)
    engine.fill_cache()

    def median(tokens: int, lane: Any, past: int = 0) -> float:
        steps.whole(tokens, lane, past)  # compiles, warms up
        return statistics.median(steps.whole(tokens, lane, past) for _ in range(repeats))

    # Sizes in turn, not one after the other: a step in service also finds the caches as another left them.
    for tokens in sizes:
        steps.whole(tokens, prefill_lane)
    rounds: dict[tuple[int, ...], list[float]] = {}
    for _ in range(repeats):
        for tokens in sizes:
            rounds.setdefault((tokens,), []).append(steps.whole(tokens, prefill_lane))
        for b in batches:
            for c in contexts:
                rounds.setdefault((b, c), []).append(steps.decode(b, c, decode_lane, 2))
    found = {size: statistics.median(seconds) for size, seconds in rounds.items()}
    prefill_s = tuple(found[t,] for t in sizes)
    decode_s = tuple(tuple(found[b, c] for c in contexts) for b in batches)
    probe = sizes[len(sizes) // 2]
    groups = [steps.run([Chunk(steps.add(probe), probe, 0)], 1, prefill_lane) for _ in range(repeats)]
    for i in list(engine.sequences):
        if i > _Steps.FIRST_ID:
            engine.remove(i)
    layer = [statistics.median(group[i] for group in groups) for i in range(model.num_layers)]
    launch_s = max(0.0, sum(layer) - prefill_s[sizes.index(probe)]) / max(1, model.num_layers - 1)
    head_s = max(0.0, layer[-1] - statistics.median(layer[:-1] or layer))
    past = min(4 * probe, room - probe)
    pair_s = max(0.0, median(probe, prefill_lane, past) - prefill_s[sizes.index(probe)]) / (probe * past) if past > 0 else 0.0

    p_factors, d_factors, corun = [(n, 1.0)], [(n, 1.0)], []
    big = max([t for t in sizes if t <= PROBE_TOKENS] or sizes[:1])
    batch, context = batches[len(batches) // 2], contexts[len(contexts) // 2]
    for p, d in opened.pairs:
        p_factors.append((p, median(big, machine.lane("prefill", p)) / prefill_s[sizes.index(big)]))
        d_factors.append((d, steps.decode(batch, context, machine.lane("decode", d), repeats)
                          / decode_s[len(batches) // 2][len(contexts) // 2]))
        corun.append((p, d, *steps.slowdowns(p, d, big, batch, context, corun_s)))
    return StepProfile(machine.name, machine.partition, model.name, n, machine.turns, tuple(sizes), prefill_s, tuple(batches),
                       tuple(contexts), decode_s, launch_s, head_s, pair_s, tuple(sorted(p_factors)), tuple(sorted(d_factors)),
                       tuple(corun))
