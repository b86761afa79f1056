"""bullet-plus: each part by hand on the toy device of test_bullet.py (12 SMs; prefill of t tokens on p SMs takes t / p seconds);
without its parts it is bullet."""

from __future__ import annotations

import dataclasses

import pytest

from bullet.config import load_run_config
from bullet.errors import ConfigError
from bullet.policies.plus import BulletPlus
from bullet.sim.run import simulate
from bullet.state import DECODE, PREFILL, Partition, PrefillStep, Request
from tests.policies.test_bullet import Tabulated, policy, world

OFF = {"throughput_split": False, "tpot_one_in": 10, "batch_tokens": 0, "late": "arrival", "overdue_every": 1}


def plus(estimator: Tabulated | None = None, **options: object) -> BulletPlus:
    made = policy(estimator, BulletPlus, **options)
    assert isinstance(made, BulletPlus)
    return made


@pytest.mark.parametrize(("trace", "rate"), [("sharegpt", 24.0), ("arxiv", 1.1)])
def test_without_its_parts_it_is_bullet(trace: str, rate: float) -> None:
    """In overload, with full caches: the same times to the last bit."""
    base = load_run_config(None, {"workload.trace": trace, "workload.rate_req_per_s": rate, "workload.num_requests": 150,
                                  "device.kv_tokens": 60_000})
    runs = [simulate(dataclasses.replace(base, policy=dataclasses.replace(base.policy, name=name, options=options)))
            for name, options in (("bullet", {}), ("bullet-plus", OFF), ("bullet-plus", {}))]
    one, other, whole = (run.requests["finish_s"].tolist() for run in runs)
    assert one == other
    assert one != whole


# ------------------------------------------------------------------------------------------------- order


def served(p: BulletPlus, rows: list[tuple[float, int, float]], now_s: float) -> list[int]:
    s = world(rows)
    return [request.id for request in p.queue.sort(s, now_s, p.full)]


def test_late_requests_follow_by_waited_over_own_seconds() -> None:
    """At 20, SLO 5: 0 (waited 20 for 10 s of work: 2), 1 (15 for 1 s: 15) and 2 (10 for 4 s: 2.5) are late, 3 and 4 are not."""
    rows = [(0.0, 120, 5.0), (5.0, 12, 5.0), (10.0, 48, 5.0), (18.0, 24, 5.0), (19.0, 12, 5.0)]
    assert served(plus(), rows, 20.0) == [4, 3, 1, 2, 0]
    assert served(plus(late="arrival"), rows, 20.0) == [4, 3, 0, 1, 2]


def test_the_overdue_lead_every_so_manyth_batch() -> None:
    """Overdue from 2 x SLO on: 0 and 1. They lead the first batch and the fourth; between these they stand last."""
    rows = [(0.0, 120, 5.0), (5.0, 12, 5.0), (14.0, 48, 5.0), (18.0, 24, 5.0), (19.0, 12, 5.0)]
    p = plus(late_patience=2.0, overdue_every=3, batch_tokens=0)
    for batches, order in ((0, [0, 1, 4, 3, 2]), (1, [4, 3, 2, 0, 1]), (2, [4, 3, 2, 0, 1]), (3, [0, 1, 4, 3, 2])):
        assert p.queue.batches == batches
        s = world(rows)
        ranked = p.queue.sort(s, 20.0, p.full)
        assert [request.id for request in ranked] == order
        assert [request.id for request in p.queue.pop(s, ranked, 0)] == order[:1]


def test_a_batch_is_filled_past_the_ridge() -> None:
    """Every prompt is past it already. 100 + 200 + 212 = 512 tokens; the next would be over."""
    rows = [(0.0, 100, 1e4), (0.0, 200, 1e4), (0.0, 212, 1e4), (0.0, 300, 1e4)]
    for tokens, count in ((512, 3), (511, 2), (0, 1)):
        step = plus(batch_tokens=tokens).next_step(PREFILL, world(rows), 1.0)
        assert isinstance(step, PrefillStep)
        assert step.admit == tuple(range(count))


# -------------------------------------------------------------------------------------------------- TPOT


def test_one_in_so_many_may_miss() -> None:
    """Eleven decodes, of which one is 4 s behind: P90 lets it go, one in 50 does not. g = 5 and first at 0: 6 - now are left."""
    s = world(running=[(0.0, 6)] * 10 + [(0.0, 2)])
    assert plus(tpot_one_in=10).tpot.limit(s, 1.0) == pytest.approx(5.0)
    assert plus().tpot.limit(s, 1.0) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------- split


def pressed(blocks: int) -> tuple[BulletPlus, object]:
    """Ten decodes of 58 tokens, a prefill batch of 80 beside; mean prompt 12 tokens, mean output 40."""
    p = plus(Tabulated((0.9, 0.8, 0.6, 0.5, 0.45, 0.4)), split_from=0.5, split_full=0.9)
    p.left, p.mean_output, p.queue.mean_prompt = 100, 40.0, 12.0
    return p, world(running=[(0.0, 50)] * 10, batch=80, blocks=blocks, target=(2, 10))


def test_the_split_of_best_throughput_by_hand() -> None:
    """Prefill of prompts of 12 tokens takes 12 / p s each: 1.2, 1.5, 2, 3, 6; alone 1. Decode of 30 tokens, in steps that 10
    requests share, 3 steps each: 2.7, 2.4, 1.8, 1.5, 1.35; alone 1.2. Both, then the longer one's rest alone:
    1.2 + (1 - 1.2 / 2.7) 1.2 = 1.87; 1.5 + .45; 1.8 + .1; 1.5 + .5; 1.35 + .78: the first."""
    p, s = pressed(1000)
    p.mean_output = 30.0
    assert p.best_split(s) == 0  # type: ignore[arg-type]
    p.mean_output, p._best_of = 60.0, -1  # 6 steps: 5.4, 4.8, 3.6, 3, 2.7; 2.4: 1.2 + 1.87, 1.5 + 1.65, 2 + 1.07, 3, 2.7 + .55
    assert p.best_split(s) == 3  # type: ignore[arg-type]


def test_d_moves_with_the_cache() -> None:
    """40 blocks are held (ten of 50 + 8 tokens: 4 each) and 5 of the batch of 80. Of 100 that is under a half: the least d. Of
    65: 0.69, (0.69 - 0.5) / 0.4 = 0.48 of the way from index 0 to 3: 1. Of 48: 0.94: all of it."""
    found = []
    for blocks in (100, 65, 48):
        p, s = pressed(blocks)
        p.mean_output = 60.0
        used = s.kv.total_blocks - s.kv.free_blocks  # type: ignore[attr-defined]
        assert used == 45
        step = p.next_step(DECODE, s, 5.0)  # type: ignore[arg-type]
        found.append((step.target, step.reason))
    assert found == [(Partition(10, 2), "reduce-decode"), (Partition(8, 4), "reduce-decode"), (Partition(4, 8), "reduce-decode")]


def test_nothing_is_moved_before_outputs_are_known() -> None:
    p, s = pressed(48)
    p.left = 0
    assert p.next_step(DECODE, s, 5.0).target == Partition(10, 2)  # type: ignore[arg-type]


def test_the_mean_output_is_of_those_that_left() -> None:
    p, s = plus(), world(running=[(0.0, 1)])  # which stays
    for number, tokens in enumerate((3, 5)):
        request = Request(number, 0.0, 10, 1.0)
        request.first_token_s, request.generated = 0.0, 1
        s.decode.join(request)
        for _ in range(tokens - 1):
            s.decode.advance()
        s.decode.leave(request)
        p.next_step(DECODE, s, 1.0)
    assert (p.left, p.mean_output) == (2, 4.0)


@pytest.mark.parametrize(("option", "value", "message"), [
    ("late", "x", "ratio or arrival"), ("tpot_one_in", 0, "1 or more"), ("overdue_every", 0, "1 or more"),
    ("batch_tokens", -1, "0 or more"), ("split_from", 1.0, "from 0 to under 1"), ("split_full", 0.4, "over split_from"),
    ("kv", 1, "bullet-plus has no such option")])
def test_options_are_refused_by_name(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.options\.{option}.*{message}"):
        plus(**{option: value})
