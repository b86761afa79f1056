"""SGLang over random worlds, and a hybrid batch's arithmetic. Single states are in test_rivals.py."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bullet.errors import ConfigError
from bullet.state import HybridStep
from tests.policies.loops import World, build

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 400), st.integers(1, 80)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, blocks=st.integers(2, 90), chunk=st.integers(1, 80), mixed=st.booleans(), assumed=st.sampled_from([4, 64, 512]),
       release=st.sampled_from(["0.4.6", "0.5"]))
@example(rows=[(0, 194, 1)], blocks=13, chunk=1, mixed=False, assumed=4, release="0.5")  # its last block has room for the end
def test_everybody_is_served_within_the_cache(rows: list[tuple[int, int, int]], blocks: int, chunk: int, mixed: bool,
                                              assumed: int, release: str) -> None:
    policy = build(f"sglang-{chunk}" + "-mixed" * mixed, assumed_new_tokens=assumed, release=release)
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


def test_retracted_requests_queue_up_behind_who_waits() -> None:
    """11 blocks for three requests that come to need 5 each; 3 arrives before the shortage but finds no room."""
    world = World([(0, 40, 40), (0, 41, 40), (0, 42, 40), (3, 40, 2)], 11)
    log = world.run_hybrid(build("sglang-256", assumed_new_tokens=1)).log
    order = [c.request_id for _, step in log for c in step.chunks]  # type: ignore[union-attr]
    assert next(step.preempt for _, step in log if step.preempt) == (2,)  # type: ignore[union-attr]
    assert order[:5] == [0, 1, 2, 3, 2]


def test_a_full_batch_is_not_asked_again_until_a_decode_step_finds_it_smaller() -> None:
    """8 blocks: 0 and 1 hold 2 and 4, 2 needs 3. 0 ends with the fourth step; the fifth still decodes, the sixth admits."""
    log = World([(0, 20, 4), (0, 60, 9), (1, 40, 2)], 8).run_hybrid(build("sglang-256", assumed_new_tokens=1)).log
    kinds = ["chunk" if step.chunks else "decode" for _, step in log]  # type: ignore[union-attr]
    assert kinds[:7] == ["chunk", "decode", "decode", "decode", "decode", "chunk", "decode"]


def test_a_prompt_that_ends_with_its_first_token_reopens_a_full_batch_at_once() -> None:
    """8 blocks: 0 holds 2, 1 takes 4, which leaves 2 of the 3 that 2 needs. 1 ends with its prefill: 2 is next."""
    log = World([(0, 20, 9), (1, 60, 1), (1, 40, 2)], 8).run_hybrid(build("sglang-256", assumed_new_tokens=1)).log
    assert [[c.request_id for c in step.chunks] for _, step in log[:4]] == [[0], [1], [2], []]  # type: ignore[union-attr]


def test_the_ratio_falls_with_decode_steps_and_starts_over_when_idle() -> None:
    policy = build("sglang-64")
    World([(0, 10, 101)], 20).run_hybrid(policy)
    assert policy.ratio == pytest.approx(0.7 - 100 * (0.7 - 0.098) / 600)
    world = World([(500, 10, 2)], 20)
    world.arrive(500)
    policy.next_step("hybrid", world.state, 500.0)
    assert policy.ratio == 0.7
    mixed = build("sglang-64-mixed", assumed_new_tokens=1)
    World([(0, 1, 50), (5, 630, 1)], 100).run_hybrid(mixed)
    assert mixed.ratio == pytest.approx(0.7 - 39 * (0.7 - 0.098) / 600), "10 of 49 steps were mixed"


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="assumed_new_tokens = 0: must be positive"):
        build("sglang-64", assumed_new_tokens=0)
    with pytest.raises(ConfigError, match="no such option"):
        build("sglang-64-mixed", max_num_seqs=8)
    with pytest.raises(ConfigError, match="initial_new_token_ratio = nan: must be positive"):
        build("sglang-512", initial_new_token_ratio=float("nan"))


@pytest.mark.parametrize(("release", "at"), [("0.4.6", 1), ("0.5", 17)])
def test_a_newcomer_takes_a_page_more_since_0_5(release: str, at: int) -> None:
    """9 blocks, one held: 128 tokens are free, of which 0.7 x (16 - 1) = 10.5 are set aside. 96 + 16 tokens fit in the 117.5 that
    are left; with a page of 16 more they do not before the other, which soon holds two blocks, has ended at its 17th token."""
    log = World([(0, 16, 17), (1, 96, 2)], 9).run_hybrid(build("sglang-256", assumed_new_tokens=16, release=release)).log
    begun = next(i for i, (_, step) in enumerate(log) if any(c.request_id == 1 for c in step.chunks))  # type: ignore[union-attr]
    assert begun == at


@pytest.mark.parametrize(("release", "victims"), [("0.4.6", (5, 4, 3)), ("0.5", (5, 4))])
def test_since_0_5_retraction_ends_when_the_next_step_fits(release: str, victims: tuple[int, ...]) -> None:
    """Six decodes of 17 tokens in 8 blocks: after two have gone 4 blocks are free for 4 that need one each, but 64 tokens are not
    20 for each."""
    log = World([(0, 8, 30)] * 6, 8).run_hybrid(build("sglang-256", assumed_new_tokens=1, release=release)).log
    assert next(step.preempt for _, step in log if step.preempt) == victims  # type: ignore[union-attr]


@pytest.mark.parametrize(("release", "lag"), [("0.4.6", 1), ("0.5", 0)])
def test_since_0_5_who_ended_is_gone_at_the_next_step(release: str, lag: int) -> None:
    """7 blocks, 5 of them held: the third prompt finds room when the first has ended, after steps 0 to 3. 0.4.6 sees that in the
    decode step after."""
    rows = [(0, 56, 4), (0, 8, 20), (1, 40, 2)]
    log = World(rows, 7).run_hybrid(build("sglang-64", assumed_new_tokens=2, release=release)).log
    begun = next(i for i, (_, step) in enumerate(log) if any(c.request_id == 2 for c in step.chunks))  # type: ignore[union-attr]
    assert begun == 4 + lag


@pytest.mark.parametrize("release", ["0.4.6", "0.5"])
def test_without_chunks_a_batch_takes_whole_prompts_up_to_its_most(release: str) -> None:
    """100 tokens a batch: 60, and 50 finds 40 left; 50 and 30, and 300 finds 20; 300 by itself, over the most; then 7 decodes."""
    rows = [(0, 60, 8), (0, 50, 8), (0, 30, 8), (0, 300, 8)]
    policy = build("sglang", max_prefill_tokens=100, assumed_new_tokens=8, release=release)
    log = World(rows, 200).run_hybrid(policy).log
    batches = [[(c.request_id, c.new_tokens, c.past_tokens) for c in step.chunks] for _, step in log]  # type: ignore[union-attr]
    assert batches == [[(0, 60, 0)], [(1, 50, 0), (2, 30, 0)], [(3, 300, 0)], *[[]] * 7]
    assert policy.name == "sglang"


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, blocks=st.integers(2, 90), most=st.integers(1, 500), release=st.sampled_from(["0.4.6", "0.5"]))
def test_without_chunks_no_prompt_is_ever_cut(rows: list[tuple[int, int, int]], blocks: int, most: int, release: str) -> None:
    world = World(rows, blocks).run_hybrid(build("sglang", max_prefill_tokens=most, assumed_new_tokens=64, release=release))
    assert world.state.kv.free_blocks == blocks
    for _, step in world.log:
        assert isinstance(step, HybridStep)
        assert not (step.chunks and step.decode)
        assert all(c.past_tokens == 0 for c in step.chunks)
        assert len(step.chunks) <= 1 or sum(c.new_tokens for c in step.chunks) <= most
