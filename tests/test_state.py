"""The state's transitions and the arithmetic that makes them O(1), against walking every request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.errors import PartitionError
from bullet.state import (
    Chunk,
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    Phase,
    PrefillStep,
    Request,
    SplitTable,
    SystemState,
)


def state(blocks: int = 100) -> SystemState:
    return SystemState(SplitTable.every(108), KvCache(blocks), 32, Partition(108, 108))


def test_splits_by_hand() -> None:
    splits = SplitTable.every(8, 2)
    assert splits.decode_sms.tolist() == [2, 4, 6]
    assert splits.prefill_sms.tolist() == [6, 4, 2]
    assert splits.full == 3
    with pytest.raises(PartitionError, match="must divide"):
        SplitTable.every(9, 2)


def test_a_prompt_through_the_lanes() -> None:
    s = state()
    s.arrive(Request(0, 0.0, 17, 1.0))
    assert s.queue.known_tokens == [17]
    s.begin_prefill(PrefillStep(108, 20, (0,)), 1.0)
    assert s.kv.used_blocks == 2  # 17 tokens
    assert s.finish_prefill(2.0) == ()
    s.begin_prefill(PrefillStep(108, 12), 2.0)
    (request,) = s.finish_prefill(3.0)
    assert (request.phase, request.generated, request.first_token_s) == (Phase.READY, 1, 3.0)
    # 17 tokens cached; the next decode attends to 18.
    assert (s.decode_seqs, s.decode_context_tokens, s.decode_growth_blocks()) == (1, 18, 0)
    s.begin_decode(DecodeStep(108), 3.0)
    s.check()
    s.finish_decode([])
    assert s.decode.cached(request) == 18
    assert s.decode.generated(request) == 2
    s.begin_decode(DecodeStep(108), 4.0)
    s.finish_decode([request])
    assert (request.generated, s.kv.used_blocks, request.phase) == (3, 0, Phase.FINISHED)


def test_a_full_block_needs_another() -> None:
    s = state()
    s.arrive(Request(0, 0.0, 16, 1.0))
    s.begin_prefill(PrefillStep(108, 32, (0,)), 0.0)
    s.finish_prefill(1.0)
    assert s.kv.used_blocks == 1
    assert s.decode_growth_blocks() == 1  # its 16 tokens fill their block
    s.begin_decode(DecodeStep(108), 1.0)
    assert s.kv.used_blocks == 2
    s.finish_decode([])
    assert s.decode.growth_blocks == 0


def test_preemption_frees_all_and_recomputes_what_was_generated() -> None:
    s = state()
    for i in range(2):
        s.arrive(Request(i, float(i), 20, 1.0))
    s.begin_prefill(PrefillStep(108, 32, (0, 1)), 2.0)
    s.finish_prefill(3.0)
    s.begin_decode(DecodeStep(108), 3.0)
    s.finish_decode([])
    s.arrive(Request(2, 3.5, 5, 1.0))
    s.begin_decode(DecodeStep(108, preempt=(1,)), 4.0)
    assert [r.id for r in s.queue] == [1, 2]  # in front
    victim = s.queue[0]
    assert (victim.phase, victim.known_tokens, victim.preemptions) == (Phase.WAITING, 22, 1)  # 20 + 2 generated
    assert s.kv.used_blocks == 2  # request 0: 22 tokens
    s.finish_decode([])
    s.begin_prefill(PrefillStep(108, 32, (1,)), 5.0)
    s.finish_prefill(6.0)
    assert (victim.generated, victim.first_token_s) == (3, 3.0)  # a new token, the first token's time kept
    s.check()


@pytest.mark.parametrize(("prompt", "held"), [(15, 1), (16, 1), (17, 2)])
def test_a_prefilled_request_preempted_before_its_first_decode_gives_back_what_it_holds(prompt: int, held: int) -> None:
    """Its newest token is not cached: 16 prompt tokens hold one block, though 17 tokens are known."""
    s = state()
    s.arrive(Request(0, 0.0, prompt, 1.0))
    s.arrive(Request(1, 0.0, 1, 1.0))
    s.begin_prefill(PrefillStep(108, 32, (0, 1)), 0.0)
    s.finish_prefill(1.0)
    assert s.kv.used_blocks == held + 1
    s.begin_decode(DecodeStep(108, preempt=(0,)), 1.0)
    assert s.kv.used_blocks == 1
    s.check()
    assert s.queue.known_tokens == [prompt + 1]


def test_chunks_and_decodes_in_one_batch() -> None:
    s = state()
    for i in range(2):
        s.arrive(Request(i, 0.0, 30, 1.0))
    s.begin_hybrid(HybridStep(108, (Chunk(0, 20, 0),), False), 0.0)
    assert s.finish_hybrid(1.0) == []
    s.begin_hybrid(HybridStep(108, (Chunk(0, 10, 20), Chunk(1, 5, 0)), False), 1.0)
    (done,) = s.finish_hybrid(2.0)
    assert done.id == 0
    s.join_decode(done)
    assert [(r.id, r.computed_tokens) for r in s.chunked] == [(1, 5)]
    s.begin_hybrid(HybridStep(108, (Chunk(1, 25, 5),), True), 2.0)
    s.check()
    (other,) = s.finish_hybrid(3.0)
    s.end_hybrid_decode([])
    s.release(other)  # a one-token output ends with its prompt
    assert (len(s.decode), s.decode.generated(done), other.phase) == (1, 2, Phase.FINISHED)
    s.check()


def test_a_broken_rule_is_an_assertion() -> None:
    s = state(1)
    s.arrive(Request(0, 0.0, 17, 1.0))
    with pytest.raises(AssertionError, match="overdrawn"):
        s.begin_prefill(PrefillStep(108, 32, (0,)), 0.0)
    with pytest.raises(KeyError):
        state().queue.remove(3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5)), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_batch_arithmetic_equals_walking_every_request(events: list[tuple[int, int]], random: object) -> None:
    """Joins, iterations and departures in any order: counters, residues and columns match a naive model."""
    s = state(100_000)
    naive: dict[int, list[int]] = {}  # id -> [cached, generated]
    for number, (prompt, kind) in enumerate(events):
        if kind <= 2:
            s.arrive(Request(number, 0.0, prompt, 1.0))
            s.begin_prefill(PrefillStep(108, 32, (number,)), float(number))
            s.finish_prefill(float(number))
            s.begin_decode(DecodeStep(108), float(number))
            naive[number] = [prompt, 1]
        elif s.decode.requests:
            s.begin_decode(DecodeStep(108), float(number))
        else:
            continue
        leaving = [r for i, r in enumerate(s.decode.requests.values()) if (i + kind) % 5 == 4]
        assert s.decode.context_tokens == sum(cached + 1 for cached, _ in naive.values())
        s.finish_decode(leaving)
        for values in naive.values():
            values[0] += 1
            values[1] += 1
        for request in leaving:
            assert request.generated == naive.pop(request.id)[1]
        s.check()
        assert s.decode.growth_blocks == sum(cached % 16 == 0 for cached, _ in naive.values())
        columns = sorted(zip(s.decode.first_token_s.tolist(), (s.decode.generated_offset + s.decode.iteration).tolist(),
                             strict=True))
        assert columns == sorted((float(i), float(generated)) for i, (_, generated) in naive.items())
