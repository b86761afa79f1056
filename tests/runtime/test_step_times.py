"""Step times as they are taken: what is computed for them, on an engine whose steps take known times."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeClock, FakeEngine

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.runtime.driver import Machine
from bullet.runtime.machine import Opened
from bullet.runtime.step_times import measure_steps
from bullet.state import SplitTable

LLAMA = get_model("llama-3.1-8b")
FLOPS_PER_TOKEN, FLOPS_PER_S = 2 * 8.0e9, 6e14


def seconds(kind, tokens, layers):
    """An 8B model on an H200 at some 60 % of its data sheet; a decode iteration takes 8 ms."""
    return 0.008 if kind == "decode" else 0.004 + tokens * FLOPS_PER_TOKEN / FLOPS_PER_S * layers / 32


def opened(clock, blocks=50_000):
    pairs = ((116, 16), (108, 24), (92, 40), (76, 56), (60, 72), (36, 96))
    engine = FakeEngine(clock, seconds, turns=False, blocks=blocks, max_tokens=8704, layers=32)
    splits = SplitTable(132, np.array([d for _, d in pairs], dtype=np.int64))
    machine = Machine(engine, splits, blocks, lambda name, sms: (name, sms), "fake", "fake", False, engine.free)
    return Opened(machine, get_gpu("h200"), pairs, lambda: None)


def test_step_times_of_an_8b_model_leave_most_of_a_gpus_minute_to_the_runs():
    """ENGINE_S of ``make gpu BUDGET_S=240`` is 96 s, start-up and graphs included. Prefilling the contexts that decodes attend
    (2.6 million tokens, 80 s at these rates) left no time for a run."""
    clock = FakeClock(1e-4)
    machine = opened(clock)
    profile = measure_steps(machine, LLAMA, repeats=3, clock=clock)
    steps = [(kind, tokens, layers) for kind, tokens, layers, *_ in machine.machine.engine.log if kind != "preempt"]
    assert sum(tokens * layers / 32 for kind, tokens, layers in steps if kind == "prefill") < 300_000
    # The co-runs' own seconds aside, in which both lanes are kept busy on purpose; this clock passes by looks alone there.
    assert sum(seconds(*step) for step in steps) < 25
    assert len(profile.corun) == 6
    assert profile.batches[-1] == 128
    assert profile.contexts[-1] == 2048
    assert np.ravel(profile.decode_s) == pytest.approx(0.008)
    assert profile.prefill_s[-1] == pytest.approx(seconds("prefill", 8192, 32))
    assert profile.launch_s == pytest.approx(0.004)
    assert machine.machine.engine.free() == 50_000  # every sequence is gone again


def test_what_24_gib_leave_beside_8b_weights_is_enough():
    """Llama-3.1-8B in bf16 takes 15.0 GiB; of 23.5 less 1 for contexts and 4 kept free, 3.5 GiB hold 1,790 blocks of 2 MiB.
    Half of them hold 6 sequences of 2,048 tokens: the longest context is left out, and 8 sequences of 1,024 are measured."""
    clock = FakeClock(1e-4)
    machine = opened(clock, 1790)
    profile = measure_steps(machine, LLAMA, repeats=1, clock=clock)
    assert (profile.batches, profile.contexts) == ((1, 8), (128, 1024))
    assert profile.prefill_tokens[-1] == 8192
    assert machine.machine.engine.free() == 1790
