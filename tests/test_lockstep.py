"""The comparison with published schedulers, without them: ours beside itself, and beside one that goes astray."""

import importlib
import sys
from typing import Any

import pytest

from benchmarks.lockstep import worlds
from benchmarks.lockstep.stubs import Finder, Stub
from benchmarks.lockstep.worlds import Ours, Outcome, Row, World


def same(a: Outcome, b: Outcome) -> bool:
    return a == b


class Astray(Ours):
    """From its third step on it says that one block more is free."""

    steps = 0

    def step(self) -> Outcome | None:
        self.steps += 1
        found = super().step()
        return found._replace(free=found.free + 1) if found is not None and self.steps > 2 else found


WORLD = World(7, (Row(0, 40, 3), Row(1, 10, 2)), 20, 32, 4, False)


def ours(world: World, kind: type[Ours] = Ours) -> Ours:
    return kind(world, worlds.make(f"vllm-{world.budget}", {"max_num_seqs": world.seqs, "prefix_cache": world.caching}))


def test_a_world_by_hand() -> None:
    engine = ours(WORLD)
    engine.arrive(0)
    # 32 of the prompt's 40 tokens: 2 blocks of 20.
    assert engine.step() == Outcome({0: 32}, frozenset(), 18)
    engine.arrive(1)
    # Its last 8 take a block, the newcomer's 10 another.
    assert engine.step() == Outcome({0: 8, 1: 10}, frozenset(), 16)
    assert engine.step() == Outcome({0: 1, 1: 1}, frozenset(), 16)
    assert engine.step() == Outcome({0: 1}, frozenset(), 17)


def test_blocks_filled_in_a_step_are_hit_in_it() -> None:
    """6 blocks. After 40 of the first prompt's 64 tokens 3 are held; its other 24 take one and leave 2. The second has 80 tokens,
    5 blocks, 3 of which it shares with the first: two are cached, the third by this step's chunk. So 2 are enough."""
    world = World(0, (Row(0, 64, 2), Row(0, 80, 2, 0, 3)), 6, 40, 4, True)
    engine = Ours(world, worlds.make("vllm-40", {"max_num_seqs": 4, "prefix_cache": True, "admission": "check"}))
    engine.arrive(0)
    engine.arrive(1)
    assert engine.step() == Outcome({0: 40}, frozenset(), 3)
    assert engine.step() == Outcome({0: 24, 1: 16}, frozenset(), 1)


def test_a_scheduler_beside_itself_does_not_differ_and_one_that_goes_astray_is_caught_at_its_step() -> None:
    assert worlds.compare(WORLD, ours(WORLD), ours(WORLD), same) is None
    line = worlds.compare(WORLD, ours(WORLD), ours(WORLD, Astray), same)
    assert line is not None
    assert line.startswith("world 7, step 2: ours Outcome(tokens={0: 1, 1: 1}, preempted=frozenset(), free=16), theirs")


@pytest.mark.parametrize(("tight", "caching"), [(False, False), (True, False), (True, True)])
def test_worlds_end_and_are_the_same_for_a_seed(tight: bool, caching: bool) -> None:
    for seed in range(20):
        world = worlds.draw(seed, tight=tight, caching=caching)
        assert world == worlds.draw(seed, tight=tight, caching=caching)
        assert worlds.compare(world, ours(world), ours(world), same) is None


def test_prompts_that_begin_alike_have_the_same_tokens_so_far() -> None:
    world = World(0, (Row(0, 40, 1), Row(0, 50, 1, 0, 2), Row(0, 60, 1, 1, 1)), 20, 32, 4, True)
    first, second, third = (worlds.tokens_of(world, i) for i in range(3))
    assert first[:32] == second[:32]
    assert first[32] != second[32]
    assert third[:16] == first[:16]
    assert third[16] != second[16]
    assert [len(tokens) for tokens in (first, second, third)] == [40, 50, 60]


def test_what_is_stubbed_takes_anything() -> None:
    finder = Finder(("nonsuch",), ("nonsuch.real",), {"nonsuch.given": {"number": 7}})
    sys.meta_path.insert(0, finder)
    try:
        module: Any = importlib.import_module("nonsuch.some.where")
        assert importlib.import_module("nonsuch.given").number == 7
        assert issubclass(type("Mine", (module.Base,), {}), Stub)

        @module.decorator
        def one() -> int:
            return 1

        assert one() == 1
        assert module.Generic[int] is module.Generic
        assert Stub(length=3).length == 3
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("nonsuch.real")
    finally:
        sys.meta_path.remove(finder)
