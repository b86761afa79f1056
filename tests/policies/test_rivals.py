"""vLLM, SGLang and static sharing on small states; the registry."""

import subprocess
import sys
from pathlib import Path

import pytest

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.errors import ConfigError
from bullet.policies import POLICIES, check_name, describe, make_policy, needs_estimator
from bullet.policies.base import PolicyContext
from bullet.policies.twolane import decode_victims, fits
from bullet.state import (
    DECODE,
    PREFILL,
    Chunk,
    HybridStep,
    KvCache,
    Partition,
    PrefillStep,
    Request,
    SplitTable,
    SystemState,
    Wait,
)
from tests.worlds import run

SPLITS = SplitTable.every(108)


def build(name: str, **options: object):  # type: ignore[no-untyped-def]
    return make_policy(name, PolicyContext(MODELS["tiny"], GPUS["a100-80gb"], SPLITS, 0.2, None, options))


def world(prompts: list[int], decodes: list[int] = (), blocks: int = 10_000) -> SystemState:  # type: ignore[assignment]
    """Waiting prompts (ids 0..), running decodes with that many cached tokens (ids 100..)."""
    s = SystemState(SPLITS, KvCache(blocks), 4, Partition(108, 108))
    for i, tokens in enumerate(decodes):
        s.arrive(Request(100 + i, 0.0, tokens, 1.0))
        s.begin_hybrid(HybridStep(108, (Chunk(100 + i, tokens, 0),), False), 0.0)
        for request in s.finish_hybrid(0.0):
            s.join_decode(request)
    for i, tokens in enumerate(prompts):
        s.arrive(Request(i, 0.0, tokens, 1.0))
    return s


def test_vllm_serves_decodes_then_fills_the_budget() -> None:
    step = build("vllm-256").next_step("hybrid", world([100, 100, 100], [30, 30]), 0.0)
    # 256 - 2 decodes = 254: two prompts whole, 54 tokens of the third.
    assert step == HybridStep(108, (Chunk(0, 100, 0), Chunk(1, 100, 0), Chunk(2, 54, 0)), True, by_chunk=True)


def test_vllm_admits_only_prompts_whose_first_chunk_fits_and_stops_at_the_first_that_does_not() -> None:
    # 8 blocks: the decode holds 2. A prompt of 100 tokens needs 7: not now, and the small one behind it waits too.
    s = world([100, 10], [30], blocks=8)
    assert build("vllm-256").next_step("hybrid", s, 0.0) == HybridStep(108, (), True, by_chunk=True)
    # Of a budget of 65 the decode leaves 64 tokens, 4 blocks: the first chunk fits. Reserving the whole prompt would not.
    step = build("vllm-65").next_step("hybrid", s, 0.0)
    assert step == HybridStep(108, (Chunk(0, 64, 0),), True, by_chunk=True)
    assert build("vllm-65", admission="reserve").next_step("hybrid", s, 0.0) == HybridStep(108, (), True)
    s.begin_hybrid(step, 0.0)
    s.check()
    assert s.kv.free_blocks == 8 - 2 - 4
    # The next 36 tokens take 3 blocks more, and 2 are free: the prompt is the tail itself and goes back; nobody is admitted.
    s.finish_hybrid(1.0)
    s.end_hybrid_decode([])
    step = build("vllm-65").next_step("hybrid", s, 1.0)
    assert step == HybridStep(108, (), True, preempt=(0,), reason="preempt", by_chunk=True)
    s.begin_hybrid(step, 1.0)
    s.check()
    assert [(r.id, r.computed_tokens) for r in s.queue] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("gpu", "budget", "seqs"), [("a100-80gb", 2048, 1024), ("h200", 1024, 1024), ("a100-80gb", 512, 512),
                                                     ("rtx4090", 2048, 256), ("rtx4090", 128, 128)])
def test_vllm_takes_the_engines_own_cap_on_sequences(gpu: str, budget: int, seqs: int) -> None:
    """1,024 on 70 GiB and more, else 256; no more than its token budget."""
    assert make_policy(f"vllm-{budget}", PolicyContext(MODELS["tiny"], GPUS[gpu], SPLITS, 0.2, None, {})).max_num_seqs == seqs
    kept = make_policy(f"vllm-{budget}", PolicyContext(MODELS["tiny"], GPUS[gpu], SPLITS, 0.2, None, {"max_num_seqs": 100}))
    assert kept.max_num_seqs == 100


def test_vllm_caps_sequences() -> None:
    step = build("vllm-256", max_num_seqs=3).next_step("hybrid", world([5, 5, 5], [30, 30]), 0.0)
    assert [c.request_id for c in step.chunks] == [0]


def test_vllm_preempts_the_tail_to_the_front() -> None:
    # Three decodes with full blocks (16, 32, 48 tokens: 1 + 2 + 3 blocks) and no free one: the last frees three.
    s = world([9], [16, 32, 48], blocks=6)
    step = build("vllm-256").next_step("hybrid", s, 0.0)
    assert (step.preempt, step.chunks, step.decode) == ((102,), (), True)
    s.begin_hybrid(step, 0.0)
    assert [r.id for r in s.queue] == [102, 0]
    s.check()


@pytest.mark.parametrize(("admission", "goes"), [("reserve", 16), ("chunk", 32)])
def test_vllm_preempts_a_partial_prompt_first(admission: str, goes: int) -> None:
    """One decode with a full block (16 cached) and a prompt of 40; 5 blocks; budget 2: a token each a step.

    Reserved, the prompt holds 3 and the decode 2 from the first step on. The decode's next block is due at 32 cached tokens, 16
    steps on: the prompt, computed in part, is the tail and goes. Chunk by chunk it takes its second block then, the decode its
    third, and 5 are held; at step 32, with 48 cached, the decode asks for a fourth."""
    s = world([40], [16], blocks=5)
    policy = build("vllm-2", max_num_seqs=2, admission=admission)
    for step_index in range(goes + 1):
        step = policy.next_step("hybrid", s, float(step_index))
        assert step.preempt == ((0,) if step_index == goes else ())
        s.begin_hybrid(step, float(step_index))
        s.check()
        assert s.finish_hybrid(step_index + 0.5) == []
        s.end_hybrid_decode([])
    assert [(r.id, r.computed_tokens) for r in s.queue] == [(0, 0)]


def test_sglang_runs_chunks_ahead_of_decodes_and_mixed_together() -> None:
    s = world([600], [30, 30])
    assert build("sglang-512").next_step("hybrid", s, 0.0) == HybridStep(108, (Chunk(0, 512, 0),), False)
    assert build("sglang-512-mixed").next_step("hybrid", s, 0.0) == HybridStep(108, (Chunk(0, 510, 0),), True)
    assert build("sglang-512").next_step("hybrid", world([], [30]), 0.0) == HybridStep(108, (), True)


@pytest.mark.parametrize(("prompt", "chunk"), [(16384, 1024), (1024, 1024), (1025, 1024), (5000, 512)])
def test_a_chunked_prompt_needs_ceil_iterations(prompt: int, chunk: int) -> None:
    """n = ceil(sl / cs) when it is alone; each chunk reads all before it again: n (n + 1) / 2 chunk-lengths of KV."""
    for name in (f"vllm-{chunk}", f"sglang-{chunk}", f"sglang-{chunk}-mixed"):
        steps = run(name, [(0.0, prompt, 1)]).steps
        n = -(-prompt // chunk)
        assert len(steps) == n
        past, reloads = 0, 0
        for tokens in steps["prefill_tokens"].tolist():
            past += tokens
            reloads += past
        if prompt % chunk == 0:
            assert reloads == n * (n + 1) // 2 * chunk


def test_a_chunked_prompt_beside_decodes_needs_more_iterations() -> None:
    """ceil(sl / (cs - ds)): 24 decodes and chunks of 512: 8,000 tokens need ceil(8000 / 488) = 17."""
    rows = [(0.0, 16, 200)] * 24 + [(0.4, 8000, 1)]
    steps = run("sglang-512-mixed", rows).steps
    chosen = (steps["prefill_tokens"] > 0) & (steps["decode_seqs"] == 24)
    assert chosen.sum() == 17


def test_sglang_sets_room_aside_and_retracts_who_made_least() -> None:
    # 0.7 x (512 - 1) tokens for each of two that run, 100 + 512 for the new one: 1,327.4 tokens, 83 blocks;
    # the two hold 4.
    assert build("sglang-512").next_step("hybrid", world([100], [30, 30], blocks=86), 0.0) == HybridStep(108, (), True)
    assert build("sglang-512").next_step("hybrid", world([100], [30, 30], blocks=87), 0.0).chunks
    s = world([], [16, 32, 48], blocks=6)
    s.decode.requests[101].generated += 3
    # Made most stays longest: 101, then by prompt 100, 102. 102 frees 48 tokens of room, 20 for each of the two that stay.
    step = build("sglang-512").next_step("hybrid", s, 0.0)
    assert (step.preempt, step.decode) == ((102,), True)


def test_static_keeps_its_split_and_frees_tails() -> None:
    policy = build("static-96")
    s = world([100, 50], [30])
    step = policy.next_step(PREFILL, s, 0.0)
    assert (step.sms, step.admit, step.target) == (96, (0, 1), Partition(96, 12))
    s.begin_prefill(step, 0.0)
    assert policy.next_step(DECODE, s, 0.0).sms == 12
    assert policy.next_step(DECODE, world([], [30]), 0.0).sms == 108
    assert policy.next_step(PREFILL, world([5]), 0.0).sms == 108
    assert build("static-96", free_tails=False).next_step(DECODE, world([], [30]), 0.0).sms == 12
    assert build("static-108", decode_sms=108).target == Partition(108, 108)
    assert build("naive").target == Partition(108, 108)


def test_prompts_leave_room_to_grow_unless_the_system_is_idle() -> None:
    s = world([], [30], blocks=10)  # 8 free: a prompt, one block for the running sequence, one for itself
    assert fits(s, KvCache(1).blocks_for(96))
    assert not fits(s, KvCache(1).blocks_for(97))
    assert fits(world([], [], blocks=10), KvCache(1).blocks_for(160))


def test_the_fewest_latest_decodes_make_room() -> None:
    assert decode_victims(world([], [16, 32, 48], blocks=7)) == (102,)
    assert decode_victims(world([], [16, 32, 47], blocks=8)) == ()
    s = world([64], [], blocks=4)
    assert isinstance(build("static-96").next_step(PREFILL, s, 0.0), PrefillStep)
    assert isinstance(build("static-96").next_step(PREFILL, world([64], [16], blocks=5), 0.0), Wait)


@pytest.mark.parametrize(("name", "budget"), [("sglang-100", 100), ("sglang-100-mixed", 98)])
def test_sglang_counts_who_ended_until_the_next_step_of_decodes_alone(name: str, budget: int) -> None:
    """Two decode, one ends with that step; a prompt of 300 arrives. Mixed, the engine still leaves two tokens of the chunk to the
    decodes that it counts, though one is gone; then the mixed batch tidies up."""
    s = world([], [30, 30])
    policy = build(name)
    step = policy.next_step("hybrid", s, 0.0)
    assert step == HybridStep(108, (), True)
    s.begin_hybrid(step, 0.0)
    s.finish_hybrid(1.0)
    s.end_hybrid_decode([s.decode.requests[100]])
    s.arrive(Request(0, 0.5, 300, 1.0))
    policy.observe(step, 1.0)
    step = policy.next_step("hybrid", s, 1.0)
    assert step.chunks == (Chunk(0, budget, 0),)
    s.begin_hybrid(step, 1.0)
    s.finish_hybrid(2.0)
    s.end_hybrid_decode([])
    policy.observe(step, 1.0)
    assert policy.next_step("hybrid", s, 2.0).chunks == (Chunk(0, 99 if "mixed" in name else 100, budget),)


# ------------------------------------------------------------------------------------------- registry


@pytest.mark.parametrize(("name", "message"), [
    ("bulet", "unknown policy 'bulet': choose one of bullet,"), ("sglang-0", "the number must be 1 to 999999999"),
    ("vllm-99999999999", "policy .vllm-99999999999.: the number must be 1 to 999999999"),
    ("static-" + 5000 * "9", "the number must be 1 to 999999999"), ("vllm-abc", "unknown policy"),
    ("static-999", "must be 2 to 106"), ("static-95", "in steps of 2"), ("static-108", "needs it"),
    ("nowhere.py:Mine", "no file nowhere.py"), ("file.py", "file.py:Class")])
def test_wrong_names_say_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name)


def test_every_policy_describes_itself() -> None:
    assert [name for name, _ in describe()] == list(POLICIES)
    assert needs_estimator("bullet")
    assert not needs_estimator("vllm-1024")
    check_name("sglang-2048-mixed")


def test_a_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from bullet.policies.vllm import Vllm\nclass Mine(Vllm):\n    def __init__(self, context):\n"
                    "        super().__init__(context, 300)\nclass Half:\n    def __init__(self, context): pass\n")
    assert build(f"{path}:Mine").budget_tokens == 300
    with pytest.raises(ConfigError, match="is not a policy"):
        build(f"{path}:Half")
    with pytest.raises(ConfigError, match="no class 'Other'; it defines: Half, Mine"):
        build(f"{path}:Other")
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError while loading"):
        check_name(f"{path}:Mine")


def test_policies_import_nothing_heavy() -> None:
    code = ("import bullet.policies, bullet.policies.bullet, bullet.policies.vllm, sys; "
            "print([m for m in ('torch', 'matplotlib', 'scipy', 'sklearn', 'pandas') if m in sys.modules])")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
