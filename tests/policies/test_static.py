"""Static sharing over random worlds; its batches, its layers, its options."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.errors import ConfigError
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.state import DECODE, PREFILL, Decision, PrefillStep, SplitTable, Wait
from tests.policies.loops import World, build

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 400), st.integers(1, 80)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, blocks=st.integers(2, 90), seed=st.integers(0, 1000), name=st.sampled_from(["static-96", "static-2", "naive"]),
       tokens=st.sampled_from([1, 200, 4096]))
def test_everybody_is_served_within_the_cache(rows: list[tuple[int, int, int]], blocks: int, seed: int, name: str,
                                              tokens: int) -> None:
    world = World(rows, blocks).run_two_lanes(build(name, max_batch_tokens=tokens), seed)
    assert world.state.kv.free_blocks == blocks
    first = [i for _, step in world.log if isinstance(step, PrefillStep) for i in step.admit]
    if not any(r.preemptions for r in world.requests):
        assert first == sorted(first), "first come, first served"


def first_step(rows: list[tuple[int, int, int]], blocks: int = 1000, **options: object) -> Decision:
    world = World(rows, blocks)
    world.arrive(0)
    return build("static-96", **options).next_step(PREFILL, world.state, 0.0)


def test_prompts_are_batched_up_to_a_number_of_tokens() -> None:
    rows = [(0, 100, 2), (0, 100, 2), (0, 100, 2)]
    assert first_step(rows, max_batch_tokens=250).admit == (0, 1)  # type: ignore[union-attr]
    assert first_step(rows, max_batch_tokens=50).admit == (0,)  # type: ignore[union-attr]
    assert first_step([(0, 100, 2), (0, 300, 2), (0, 50, 2)], max_batch_tokens=250).admit == (0,)  # type: ignore[union-attr]


def test_layers_come_in_steps_and_the_last_is_what_is_left() -> None:
    log = World([(0, 20, 1)], 20).run_two_lanes(build("static-96", layers_per_step=3), 0).log
    assert [step.layers for lane, step in log if lane == PREFILL] == [3, 3, 2]  # type: ignore[union-attr]


def test_the_head_waits_for_room_and_nobody_overtakes_it() -> None:
    """20 blocks: a decode holds 7, the head needs 13 and two to grow; the short one behind it would fit."""
    world = World([(0, 100, 30), (1, 200, 2), (1, 10, 2)], 20)
    log = world.run_two_lanes(build("static-96"), 1).log
    assert any(isinstance(step, Wait) and lane == PREFILL for lane, step in log)
    assert [step.admit for _, step in log if isinstance(step, PrefillStep) and step.admit] == [(0,), (1, 2)]


def test_decode_may_have_a_share_of_its_own() -> None:
    world = World([(0, 40, 20), (1, 400, 2)], 200)
    log = world.run_two_lanes(build("static-96", decode_sms=108, free_tails=False), 3).log
    assert {(lane, step.sms) for lane, step in log if not isinstance(step, Wait)} == {(PREFILL, 96), (DECODE, 108)}


@pytest.mark.parametrize(("name", "options", "message"), [
    ("static-96", {"decode_sms": 109}, "must be 2 to 106 in steps of 2, or 108"),
    ("static-96", {"decode_sms": 3}, "= 3: must be"),
    ("static-96", {"decode_sms": -2}, "= -2: must be"), ("static-108", {}, "needs it"),
    ("static-96", {"layers_per_step": 0}, "must be 1 or more"), ("naive", {"max_batch_tokens": 0}, "must be 1 or more"),
    ("static-96", {"free_tails": 1}, "takes true or false"), ("static-0", {}, "must be 1 to")])
def test_options_are_checked(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **options)


UNEVEN = SplitTable(132, np.array([16, 28, 40, 52, 72, 100]))
"""What an H200 grants at the shares that a sweep asks for: one side a multiple of 8."""


def on_uneven(name: str, **options: object) -> Any:
    return make_policy(name, PolicyContext(MODELS["tiny"], GPUS["h200"], UNEVEN, 0.2, None, options))


def test_every_split_of_an_uneven_table_can_be_had() -> None:
    """Prefill's and decode's counts are different numbers there."""
    for decode in UNEVEN.decode_sms.tolist():
        assert on_uneven(f"static-{132 - decode}").target == (132 - decode, decode)
    assert on_uneven("static-60", decode_sms=100).target == (60, 100)
    with pytest.raises(ConfigError, match=r"static-96: prefill SMs must be 32, 60, 80, 92, 104, 116, or 132 .with decode_sms"):
        on_uneven("static-96")
    with pytest.raises(ConfigError, match="decode_sms = 60: must be 16, 28, 40, 52, 72, 100, or 132"):
        on_uneven("static-60", decode_sms=60)
