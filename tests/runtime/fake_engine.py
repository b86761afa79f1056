"""An engine without tensors and a clock without time: the driver's loop, alone.

Work takes the seconds given by ``seconds(kind, tokens, layers)``. ``turns``: calls block, as on a CPU; else launches end
on the clock while the host goes on, as on a GPU. The engine keeps its own books of blocks and cached tokens, written the
slow way, so that the driver's can be held against them.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bullet.config import load_run_config, resolve_slo
from bullet.errors import EngineError
from bullet.policies import make_policy, needs_estimator
from bullet.policies.base import PolicyContext
from bullet.results.columns import RequestTable, StepTable
from bullet.runtime.driver import Machine, Replay
from bullet.state import SplitTable
from bullet.workload import Workload

BLOCK = 16


class FakeClock:
    """Moves when slept on, or when an engine that blocks works. ``cost_s``: what each look at it costs."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now, self.cost_s = 100.0, cost_s

    def __call__(self) -> float:
        self.now += self.cost_s
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))  # a clock never stands still


class FakeLaunch:
    def __init__(self, engine, ends, seconds, ids, advance, emits) -> None:
        self.engine, self.ends, self.seconds, self.ids, self.advance, self.emits = engine, ends, seconds, ids, advance, emits

    def done(self) -> bool:
        return self.engine.clock.now >= self.ends - 1e-12

    def finish(self):
        for i in self.ids:
            self.engine.busy.discard(i)
            self.engine.cached[i] += self.advance[i]
        for i in self.emits:
            self.engine.tokens[i] += 1
        return dict.fromkeys(self.emits, 0)

    def elapsed_s(self):
        return None if self.engine.turns else self.seconds


class FakeEngine:
    def __init__(self, clock, seconds, *, turns, blocks=1000, max_tokens=4096, layers=4, fail_at=None) -> None:
        self.clock, self.seconds, self.turns, self.max_tokens, self.layers = clock, seconds, turns, max_tokens, layers
        self.total, self.fail_at = blocks, fail_at
        self.prompt, self.tokens, self.cached, self.blocks = {}, {}, {}, {}
        self.busy, self.log, self.calls = set(), [], 0

    def free(self) -> int:
        return self.total - sum(self.blocks.values())

    def add(self, i, prompt):
        assert i not in self.tokens
        self.prompt[i] = self.tokens[i] = len(prompt)
        self.cached[i] = self.blocks[i] = 0

    def preempt(self, i):
        assert i not in self.busy
        self.cached[i] = self.blocks[i] = 0
        self.log.append(("preempt", i))

    def fill_cache(self):
        pass

    def assume_cached(self, i, tokens):
        assert self.blocks[i] == 0 < tokens < self.tokens[i]
        self.blocks[i], self.cached[i] = -(-self.tokens[i] // BLOCK), tokens

    @property
    def sequences(self):
        return self.tokens

    def remove(self, i):
        self.preempt(i)
        self.log.pop()
        made = self.tokens.pop(i) - self.prompt[i]
        del self.blocks[i]
        return [0] * made

    def _work(self, kind, tokens, layers, ids, advance, emits, lane):
        self.calls += 1
        if self.calls == self.fail_at:
            raise EngineError("prefill: the GPU failed (illegal address): finished requests are kept")
        assert self.free() >= 0
        seconds = self.seconds(kind, tokens, layers)
        self.log.append((kind, tokens, layers, lane, self.clock.now))
        self.busy.update(ids)
        if self.turns:
            self.clock.now += seconds
        ends = self.clock.now if self.turns else self.clock.now + seconds
        return FakeLaunch(self, ends, seconds, ids, advance, emits)

    def _decoding(self, ids):
        for i in ids:
            assert i not in self.busy
            assert self.cached[i] == self.tokens[i] - 1 > 0, f"request {i} cannot decode"
            if self.cached[i] == self.blocks[i] * BLOCK:
                self.blocks[i] += 1

    def start_prefill(self, chunks, lane, decode_ids=(), *, by_chunk=False):
        for i, new, past in chunks:
            assert i not in self.busy
            assert past == self.cached[i]
            assert past + new <= self.tokens[i]
            self.blocks[i] = max(self.blocks[i], -(-(past + new if by_chunk else self.tokens[i]) // BLOCK))
            self.busy.add(i)
        self._decoding(decode_ids)
        return {"chunks": chunks, "decodes": list(decode_ids), "done": 0}

    def run_layers(self, run, layers, lane):
        run["done"] += layers
        assert run["done"] <= self.layers
        tokens = sum(c.new_tokens for c in run["chunks"]) + len(run["decodes"])
        if run["done"] < self.layers:
            return self._work("prefill", tokens, layers, [], {}, [], lane)
        advance = {c.request_id: c.new_tokens for c in run["chunks"]} | dict.fromkeys(run["decodes"], 1)
        emits = [c.request_id for c in run["chunks"] if c.past_tokens + c.new_tokens == self.tokens[c.request_id]]
        return self._work("prefill", tokens, layers, list(advance), advance, emits + run["decodes"], lane)

    def decode(self, ids, lane):
        self._decoding(ids)
        return self._work("decode", len(ids), self.layers, list(ids), dict.fromkeys(ids, 1), list(ids), lane)


class Sink:
    def __init__(self) -> None:
        self.steps, self.requests = [], []
        self.step, self.request = self.steps.append, self.requests.append

    def tables(self):
        return StepTable.from_rows(self.steps), RequestTable.from_rows(self.requests)


def unit(kind, tokens, layers):
    """A millisecond a layer of prefill, whatever its size; two milliseconds an iteration."""
    return 1e-3 * layers if kind == "prefill" else 2e-3


def workload(rows) -> Workload:
    arrival, prompt, output = zip(*rows, strict=True) if rows else ((), (), ())
    prompts = np.array(prompt, dtype=np.int64)
    return Workload("hand-made", "hand-made", np.array(arrival, dtype=float), prompts, np.array(output, dtype=np.int64),
                    float(prompts.mean()) if len(prompts) else 1.0)


def replay(rows, policy="naive", *, turns=True, seconds=unit, blocks=1000, max_tokens=4096, fail_at=None, cost_s=0.0,
           sink=None, estimator=None, before=None, clock=None, config=None, **options):
    """A run of rows (arrival, prompt, output) on 8 SMs and 4 layers; returns the Replay, its engine and its sink."""
    clock = clock or FakeClock(cost_s)
    engine = FakeEngine(clock, seconds, turns=turns, blocks=blocks, max_tokens=max_tokens, fail_at=fail_at)
    requests = workload(rows)
    if config is None:
        config = load_run_config(None, {"device.model": "tiny", "debug": True, "device.publish_delay_s": 0.0,
                                        "policy.name": policy if isinstance(policy, str) else "naive",
                                        **{k.replace("__", "."): v for k, v in options.items() if "__" in k}})
    config = dataclasses.replace(config, slo=resolve_slo(config.slo, "x", requests.mean_prompt_tokens))
    splits = SplitTable.every(8)
    machine = Machine(engine, splits, blocks, lambda name, sms: (name, sms), "fake", "fake, no partition", turns, engine.free)
    chosen = policy if not isinstance(policy, str) else build(policy, config, splits, estimator)
    sink = sink or Sink()
    driver_options = {k: v for k, v in options.items() if "__" not in k}
    run = Replay(config, requests, machine, chosen, sink, lambda i: [1] * rows[i][1], clock=clock, sleep=clock.sleep,
                 **driver_options)
    if before is not None:
        before(run)
    run.run()
    return run, engine, sink


def build(name, config, splits, estimator=None):
    from bullet.catalog.gpus import get_gpu
    from bullet.catalog.models import get_model

    gpu = dataclasses.replace(get_gpu("a100-80gb"), num_sms=splits.num_sms, bandwidth_knee_sms=2)
    model = get_model("tiny")
    if estimator is None and needs_estimator(name):
        from bullet.devices.coefficients import analytic_coefficients
        from bullet.devices.fitted import DeviceModel
        from bullet.estimators.make import make_estimator

        device = DeviceModel(model, gpu, analytic_coefficients(gpu))
        estimator = make_estimator("srm", device=device, model=model, gpu=gpu, splits=splits, seed=0)
    return make_policy(name, PolicyContext(model, gpu, splits, config.slo.tpot_s, estimator, config.policy.options))


def times(sink):
    """First token and finish of each request by id."""
    table = RequestTable.from_rows(sink.requests)
    return {int(i): (float(a), float(b)) for i, a, b in zip(table["id"], table["first_token_s"], table["finish_s"], strict=True)}
