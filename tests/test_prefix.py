"""Named KV blocks: order of the free queue, shared prefixes and what a hit costs, by hand."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from bullet.errors import TraceError
from bullet.state import Request
from bullet.state.prefix import PrefixKvCache
from bullet.state.sharing import check_prefixes


def request(id: int, prompt: int) -> Request:
    return Request(id, 0.0, prompt, 1.0)


def admit(kv: PrefixKvCache, r: Request) -> int:
    """All known tokens at once; tokens that were hit."""
    hits = kv.hits(r)
    assert kv.admit(r, hits, r.known_tokens, r.known_tokens)
    kv.check()
    return len(hits) * kv.block_tokens


def test_blocks_come_from_the_head_and_return_last_first() -> None:
    kv = PrefixKvCache(6)
    a, b, c = request(0, 48), request(1, 20), request(2, 30)
    admit(kv, a)
    admit(kv, b)
    assert kv.tables == {0: [1, 2, 3], 1: [4, 5]}
    kv.free(b)
    admit(kv, c)
    assert kv.tables[2] == [6, 5]  # the free queue was 6, 5, 4
    assert kv.free_blocks == 1


def test_blocks_without_a_content_may_be_used_again_first() -> None:
    """Request 1 gives back block 5, which is not full, and 4, which is cached: 5 to the head, 4 to the tail."""
    kv = PrefixKvCache(6, uncached_first=True)
    admit(kv, request(0, 48))
    b = request(1, 20)
    admit(kv, b)
    plan = kv.plan()
    for own in (plan, kv):  # in a plan as in the cache itself
        own.free(b)
        c = request(2, 30)
        assert own.admit(c, own.hits(c), 30, 30)
        assert own.tables[2] == [5, 6]  # the free queue was 5, 6, 4
        assert own.key(1, 0) == (1, 0)
        assert own.hits(request(1, 20)) == [4]


def test_a_hit_stops_short_of_the_last_token() -> None:
    kv = PrefixKvCache(8, {1: (0, 2), 2: (0, 2), 3: (0, 2)})
    admit(kv, request(0, 40))
    assert admit(kv, request(1, 32)) == 16  # both blocks are cached; the second holds its last token
    assert admit(kv, request(2, 33)) == 32
    assert kv.tables[2][:2] == kv.tables[0][:2] == [1, 2]
    # 3 blocks of request 0, 1 new of request 1, 1 new of request 2
    assert kv.used_blocks == 5


def test_blocks_past_the_shared_ones_are_ones_own() -> None:
    kv = PrefixKvCache(8, {1: (0, 1)})
    admit(kv, request(0, 64))
    assert admit(kv, request(1, 64)) == 16
    assert kv.key(1, 0) == (0, 0)
    assert kv.key(1, 1) == (1, 1)


def test_a_donor_may_have_inherited() -> None:
    kv = PrefixKvCache(20, {1: (0, 1), 2: (1, 3)})
    assert [kv.key(2, i) for i in range(4)] == [(0, 0), (1, 1), (1, 2), (2, 3)]
    admit(kv, request(0, 64))
    assert admit(kv, request(2, 64)) == 16  # request 1 never came: of its three blocks only request 0's is there


def test_a_hit_on_a_free_block_costs_capacity_and_one_on_a_held_block_does_not() -> None:
    kv = PrefixKvCache(4, {1: (0, 2), 2: (0, 2)})
    a, b, c = request(0, 33), request(1, 49), request(2, 81)
    admit(kv, a)
    assert kv.cost(kv.hits(b), 49) == 2  # 4 blocks, 2 of them held by a
    assert not kv.admit(b, kv.hits(b), 49, 49)  # 1 is free
    assert 1 not in kv.tables
    kv.free(a)
    assert kv.cost(kv.hits(b), 49) == 4  # the same hits, now free themselves
    assert not kv.admit(c, kv.hits(c), 81, 81)  # 6 blocks are more than there are
    assert admit(kv, b) == 32
    assert kv.free_blocks == 0


def test_ends_of_prompts_are_lost_before_their_beginnings() -> None:
    kv = PrefixKvCache(4, {2: (0, 3)})
    a = request(0, 49)
    admit(kv, a)
    kv.free(a)  # free queue: 4 (part full), 3, 2, 1
    admit(kv, request(1, 32))  # takes 4 and 3: the third block's content is gone
    assert kv.tables[1] == [4, 3]
    assert kv.hits(request(2, 64)) == [1, 2]


def test_the_same_content_twice_is_hit_where_it_is_oldest_and_survives_there_or_here() -> None:
    kv = PrefixKvCache(4, {1: (0, 1), 2: (0, 1)})
    a, b, c = request(0, 16), request(1, 16), request(2, 17)
    admit(kv, a)  # block 1
    assert admit(kv, b) == 0  # its only block holds its last token: computed again, in block 2
    assert kv.hits(c) == [1]
    kv.free(a)
    admit(kv, request(3, 48))  # takes 3, 4 and 1
    assert kv.hits(c) == [2]


def test_full_blocks_are_cached_as_they_fill_and_only_as_far_as_tokens_are_known() -> None:
    kv = PrefixKvCache(4, {1: (0, 2)})
    a, b = request(0, 40), request(1, 40)
    assert kv.admit(a, [], 20, 20)  # a first chunk of 20 tokens
    assert kv.hits(b) == [1]
    assert kv.extend(a, 40, 40)
    assert kv.hits(b) == [1, 2]
    assert kv.extend(a, 48, 48)  # with 8 tokens in flight: the third block is full, but not of known tokens
    assert kv._entered[0] == 2
    a.generated = 8
    assert kv.extend(a, 49, 49)
    assert kv._entered[0] == 3


def test_without_caching_nothing_is_hit() -> None:
    kv = PrefixKvCache(8, {1: (0, 2)}, caching=False)
    admit(kv, request(0, 40))
    assert kv.hits(request(1, 40)) == []


def test_a_plan_leaves_the_cache_as_it_is() -> None:
    kv = PrefixKvCache(6, {1: (0, 2)})
    a = request(0, 40)
    admit(kv, a)
    kv.free(a)
    plan = kv.plan()
    later = request(1, 80)
    assert plan.admit(later, plan.hits(later), 80, 80)
    assert plan.used_blocks == 5
    assert kv.used_blocks == 0
    assert kv.hits(request(1, 40)) == [1, 2]
    kv.check()
    assert admit(kv, request(1, 80)) == 32
    assert kv.tables[1] == plan.tables[1]  # what was planned is what is carried out


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_a_copy_to_whom_it_is_done(seed: int) -> None:
    """The same random changes to a plan and to a true copy: the same answers, and the cache beneath stays as it was."""
    rng = random.Random(seed)
    shared = {i: (rng.randrange(i), rng.randint(1, 3)) for i in range(1, 40)}
    kv = PrefixKvCache(24, shared, caching=seed % 4 != 0)
    requests = [request(i, rng.randint(48, 120)) for i in range(40)]
    held: list[Request] = []

    def change(caches: list[PrefixKvCache]) -> None:
        if held and rng.random() < 0.4:
            gone = held.pop(rng.randrange(len(held)))
            for cache in caches:
                cache.free(gone)
        elif held and rng.random() < 0.5:
            grown = rng.choice(held)
            reach = 16 * len(caches[-1].tables[grown.id]) + rng.randint(1, 32)
            assert len({cache.extend(grown, reach, reach) for cache in caches}) == 1
        else:
            new = rng.choice([r for r in requests if r not in held])
            hits = [cache.hits(new) for cache in caches]
            room = rng.randint(16 * len(hits[0]) + 1, new.prompt_tokens)
            assert all(found == hits[0] for found in hits)
            assert len({cache.cost(hits[0], room) for cache in caches}) == 1
            if {cache.admit(new, hits[0], room, room) for cache in caches} == {True}:
                held.append(new)

    for _ in range(30):
        for _ in range(rng.randint(0, 12)):
            change([kv])
        kv.check()
        before, present, standing = deepcopy(kv), deepcopy(kv), held.copy()
        plan = kv.plan()
        for _ in range(rng.randint(1, 25)):
            change([plan, present])
            assert plan.free_blocks == present.free_blocks
            assert [plan.tables[r.id] for r in held] == [present.tables[r.id] for r in held]
        present.check()
        held[:] = standing
        assert all(getattr(kv, name) == getattr(before, name) for name in PrefixKvCache.__slots__)


def test_a_plan_costs_what_it_touches() -> None:
    kv = PrefixKvCache(100_000)
    a = request(0, 40)
    admit(kv, a)
    plan = kv.plan()
    assert plan.extend(a, 100, 100)
    plan.free(a)
    touched = [len(column.changed) for column in (plan.tables, plan._references, plan._key, plan._cached)]
    assert max(*touched, len(plan._free.left), len(plan._free.tail)) <= 7


@pytest.mark.parametrize(("shared", "message"), [
    ({1: (1, 1)}, "differ"), ({1: (7, 1)}, "among 0 to 1"), ({1: (0, 3)}, "must be 1 to 2"), ({1: (0, 0)}, "must be 1 to 2")])
def test_impossible_sharing_is_refused(shared: dict[int, tuple[int, int]], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        check_prefixes(shared, [40, 64], "by hand")
