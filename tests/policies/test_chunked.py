"""SGLang over random worlds, and a hybrid batch's arithmetic. Single states are in test_rivals.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.errors import ConfigError
from bullet.state import HybridStep
from tests.policies.loops import World, build

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 400), st.integers(1, 80)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, blocks=st.integers(2, 90), chunk=st.integers(1, 80), mixed=st.booleans(), assumed=st.sampled_from([4, 64, 512]))
def test_everybody_is_served_within_the_cache(rows: list[tuple[int, int, int]], blocks: int, chunk: int, mixed: bool,
                                              assumed: int) -> None:
    policy = build(f"sglang-{chunk}" + "-mixed" * mixed, assumed_new_tokens=assumed)
    world = World(rows, blocks).run_hybrid(policy)
    assert world.state.kv.free_blocks == blocks
    for _, step in world.log:
        assert isinstance(step, HybridStep)
        assert sum(c.new_tokens for c in step.chunks) <= chunk
        assert mixed or not (step.chunks and step.decode), "chunks run ahead of decodes, not with them"
        assert not (step.preempt and step.chunks)


def test_chunks_run_while_decodes_stand_still() -> None:
    log = World([(0, 8, 30), (3, 100, 2)], 200).run_hybrid(build("sglang-32")).log
    kinds = ["chunk" if step.chunks else "decode" for _, step in log]  # type: ignore[union-attr]
    assert kinds[:8] == ["chunk", "decode", "decode", *["chunk"] * 4, "decode"]


@pytest.mark.parametrize(("prompt", "chunk", "decodes"), [(100, 32, 4), (112, 32, 4), (113, 32, 4), (64, 9, 8)])
def test_a_mixed_prompt_needs_ceil_sl_over_cs_less_ds(prompt: int, chunk: int, decodes: int) -> None:
    rows = [*[(0, 1, 120)] * decodes, (30, prompt, 1)]
    log = World(rows, 500).run_hybrid(build(f"sglang-{chunk}-mixed", assumed_new_tokens=16)).log
    mine = [c for _, step in log for c in step.chunks if c.request_id == decodes]  # type: ignore[union-attr]
    assert len(mine) == -(-prompt // (chunk - decodes))
    assert [c.past_tokens for c in mine] == [i * (chunk - decodes) for i in range(len(mine))]


def test_a_lone_decode_starved_by_a_pending_prompt_retracts_it() -> None:
    """13 blocks: a decode of one block, a prompt of 190 (12 blocks) that takes 14 steps at 14 tokens a step; the decode's
    second block is due before it ends."""
    world = World([(0, 8, 40), (1, 190, 1)], 13).run_hybrid(build("sglang-15-mixed", assumed_new_tokens=1))
    assert world.requests[1].preemptions == 1
    assert [step.preempt for _, step in world.log if step.preempt] == [(1,)]  # type: ignore[union-attr]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="assumed_new_tokens = 0: must be positive"):
        build("sglang-64", assumed_new_tokens=0)
    with pytest.raises(ConfigError, match="no such option"):
        build("sglang-64-mixed", max_num_seqs=8)
