"""vLLM over random worlds: what each step must respect. Single states are in test_rivals.py, token times in sim/."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.errors import ConfigError
from bullet.policies.vllm import Vllm
from bullet.state import HYBRID, Chunk, Decision, HybridStep, Request, SystemState
from tests.policies.loops import World, build

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 400), st.integers(1, 80)), min_size=1, max_size=12)


class Watched:
    """Asks a vLLM policy and checks the answer against the state, request by request."""

    def __init__(self, policy: Vllm) -> None:
        self.policy = policy
        self.observe = policy.observe
        self.admitted: list[int] = []

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        step = self.policy.next_step(lane, state, now_s)
        assert isinstance(step, HybridStep)
        running = [*state.decode.requests.values(), *state.chunked]
        assert len(state.chunked) <= 1
        assert [r.id for r in running] == [i for i in self.admitted if i in {r.id for r in running}], "in order of admission"
        # Victims are a suffix of running, last first; they and the queue get no token in such a step.
        left = running[: len(running) - len(step.preempt)]
        assert step.preempt == tuple(r.id for r in reversed(running[len(left):]))
        decodes = [r for r in left if r.id in state.decode.requests]
        assert step.decode == bool(decodes)
        assert len(decodes) + sum(c.new_tokens for c in step.chunks) <= self.policy.budget_tokens
        assert {c.request_id for c in step.chunks if c.past_tokens} <= {r.id for r in left}
        admitted = [c.request_id for c in step.chunks if c.past_tokens == 0 and c.request_id not in {r.id for r in left}]
        assert admitted == [r.id for r in state.queue.requests[: len(admitted)]]
        assert not (step.preempt and admitted)
        assert len(left) + len(admitted) <= self.policy.max_num_seqs
        self.admitted = [i for i in self.admitted if i not in step.preempt] + admitted
        if step.preempt:
            # With one victim fewer, those that stay would have asked for more than there is.
            free = state.kv.free_blocks + sum(self.held(state, r) for r in running[len(left) + 1:])
            stay = [r for r in running[: len(left) + 1] if r.id in state.decode.requests]
            needed = sum(state.decode.growth_of(r) for r in stay)
            last = running[len(left)]
            if self.policy.by_chunk and last in state.chunked:  # its next chunk asks too
                new = min(last.known_tokens - last.computed_tokens, self.policy.budget_tokens - len(stay))
                needed += state.kv.blocks_for(last.computed_tokens + new) - state.kv.blocks_for(last.computed_tokens)
            assert needed > free
        return step

    def held(self, state: SystemState, r: Request) -> int:
        in_part = r.computed_tokens if self.policy.by_chunk else r.known_tokens
        return state.kv.blocks_for(state.decode.cached(r) if r.id in state.decode.requests else in_part)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, blocks=st.integers(2, 90), seqs=st.integers(1, 12), spare=st.integers(0, 60),
       admission=st.sampled_from(["chunk", "reserve"]))
def test_every_step_is_one_the_engine_could_take(rows: list[tuple[int, int, int]], blocks: int, seqs: int, spare: int,
                                                 admission: str) -> None:
    policy = build(f"vllm-{seqs + spare}", max_num_seqs=seqs, admission=admission)
    assert World(rows, blocks).run_hybrid(Watched(policy)).state.kv.free_blocks == blocks


def test_nobody_is_admitted_past_a_prompt_in_part() -> None:
    """Budget 10, prompts of 25 and 3: the second waits until the first leaves budget over."""
    log = World([(0, 25, 4), (0, 3, 4)], 50).run_hybrid(build("vllm-10", max_num_seqs=4)).log
    assert [step.chunks for _, step in log[:3]] == [  # type: ignore[union-attr]
        (Chunk(0, 10, 0),), (Chunk(0, 10, 10),), (Chunk(0, 5, 20), Chunk(1, 3, 0))]


def test_a_preempted_request_comes_back_first_with_all_it_had_made() -> None:
    """Two requests of 16 tokens and 3 blocks: the first decode takes the last block, the second goes and returns with 17."""
    world = World([(0, 16, 6), (0, 16, 6), (3, 4, 1)], 3)
    log = world.run_hybrid(build("vllm-64", max_num_seqs=4)).log
    steps = [step for _, step in log]
    assert steps[1].preempt == (1,)  # type: ignore[union-attr]
    back = next(step for step in steps[2:] if step.chunks)  # type: ignore[union-attr]
    assert back.chunks[0] == Chunk(1, 17, 0)  # type: ignore[union-attr]
    assert world.requests[1].preemptions == 1


def test_decode_only_steps_are_one_object() -> None:
    world = World([(0, 5, 50)], 50).run_hybrid(build("vllm-64", max_num_seqs=4))
    assert len({id(step) for lane, step in world.log[1:] if lane == HYBRID}) == 1


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        build("vllm-64", max_num_seqs=0)
    with pytest.raises(ConfigError, match="the token budget must be at least max_num_seqs = 65"):
        build("vllm-64", max_num_seqs=65)
    with pytest.raises(ConfigError, match="has no such option; it has: admission, freed_uncached, max_num_seqs, prefix_cache"):
        build("vllm-1024", max_seqs=4)
