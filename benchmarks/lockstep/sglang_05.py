"""SGLang 0.5's own loop, adder, memory budget, retraction and ratio, without an engine: no prefixes, pages of one token.

Its ``ScheduleBatch`` moves tensors; here a batch keeps the requests alone, and borrows what that class decides (whom to retract,
whether the next step fits). What is stubbed and asked for a number would fail at once.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.lockstep.stubs import Finder, Stub, absent, package
from benchmarks.lockstep.worlds import BLOCK, Outcome, World

REAL = ("sglang.srt.managers.scheduler_components.new_token_ratio_tracker", "sglang.srt.mem_cache.prefill_budget",
        "sglang.srt.managers.schedule_policy", "sglang.srt.managers.schedule_batch", "sglang.srt.managers.scheduler")
OUTSIDE = ("torch", "triton", "zmq", "setproctitle", "psutil", "orjson", "transformers", "huggingface_hub", "requests", "fastapi",
           "aiohttp", "PIL", "pybase64", "torchvision", "uvloop", "einops", "xgrammar", "pydantic", "starlette", "openai",
           "prometheus_client", "msgspec", "sgl_kernel", "dill", "cuda", "torch_memory_saver", "pynvml", "numba", "tiktoken",
           "soundfile", "av", "decord", "scipy", "tqdm", "regex")
RATIO, LEAST_RATIO, DECAY_STEPS, RETRACT_STEPS, LONGEST = 0.7, 0.098, 600, 20, 4096
"""The engine's defaults (``environ.py``), which its stubbed environment does not give."""


def load(source: Path) -> dict[str, Any]:
    """The modules of an unpacked wheel; what they do not need is stubbed, what they ask the environment is given."""
    logging.getLogger("sglang").setLevel(logging.CRITICAL)  # what it says where memory runs out is no use here
    sys.meta_path.insert(0, Finder(("sglang", *absent(*OUTSIDE)), REAL, {}))
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.mem_cache",
                 "sglang.srt.managers.scheduler_components"):
        package(name, str(source.joinpath(*name.split("."))))
    modules: dict[str, Any] = {name.rpartition(".")[2]: importlib.import_module(name) for name in REAL}
    schedule = SimpleNamespace(prefill_max_requests=None, schedule_policy="fcfs", retraction_policy="length")
    policy, batch, scheduler = (modules[name] for name in ("schedule_policy", "schedule_batch", "scheduler"))
    for module in (policy, batch, scheduler):
        module.get_schedule = lambda: schedule
    policy.get_exec = lambda: SimpleNamespace(features=SimpleNamespace(enable_encoder_swa_bounded_replay=False))
    policy.mamba_prefill_chunk_grid = policy.page_interleave_shard_size = lambda *_: 1
    policy._use_exact_chunk_fill = lambda: False
    policy._IS_HIP, policy.CLIP_MAX_NEW_TOKENS = False, LONGEST
    batch.beam_retraction_order = lambda order, _: order
    batch.num_beam_member_rows = lambda _: 0
    scheduler.TEST_RETRACT = False
    modules["new_token_ratio_tracker"].envs = SimpleNamespace(
        SGLANG_RETRACT_DECODE_STEPS=SimpleNamespace(get=lambda: RETRACT_STEPS))
    return modules


class Slots:
    """A pool of token slots, counted."""

    page_size = 1

    def __init__(self, size: int, budget: Any) -> None:
        self.left, self.budget = size, budget

    def available_size(self) -> int:
        return self.left

    def create_prefill_budget(self, tree: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        return self.budget(self, tree, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_: Any) -> int:
        return 0

    def check_decode_capacity(self, *, num_tokens: int, **_: Any) -> bool:
        return self.left >= num_tokens


class Tree:
    """A cache without prefixes."""

    buffer_pipeline = storage_prefetch_retries = None

    def evictable_size(self) -> int:
        return 0

    def supports_mamba(self) -> bool:
        return False

    def lock(self, _: Any) -> None:
        pass

    def finish_storage_prefetch_admission(self, *_: Any, **__: Any) -> None:
        pass

    unlock = discard_storage_prefetch_accounting = lock


class Row:
    """A request, as far as scheduling asks."""

    beam_group = last_node = token_indices_to_pool = priority = lock = None
    host_hit_length = swa_host_hit_length = auxiliary_swa_host_hit_length = storage_hit_length = inflight_middle_chunks = 0
    retracted_stain = host_hit_is_storage = False

    def __init__(self, number: int, prompt: int, output: int, announced: int) -> None:
        self.rid, self.origin_input_ids, self.output_ids, self.output = str(number), [number] * prompt, [], output
        self.sampling_params = SimpleNamespace(max_new_tokens=announced, ignore_eos=False)
        self.prefix_len = self.extend_end = 0
        self.cache_request_handle = self.time_stats = Stub()
        self.kv = SimpleNamespace(kv_committed_len=0, holds_kv=False, holds_mamba=False, req_pool_idx=None)

    @property
    def full_untruncated_fill_ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def finished(self) -> bool:
        return len(self.output_ids) >= self.output

    def needs_host_load_back(self) -> bool:
        return False

    def init_next_round_input(self, _: Any = None) -> None:
        pass

    def fulfilled_storage_hit_len(self, _: int) -> int:
        return 0


def batches(modules: dict[str, Any], slots: Slots, tree: Tree) -> type:
    """The class of batches, in one pool."""
    theirs = modules["schedule_batch"].ScheduleBatch

    class Batch:
        """Requests that run together."""

        is_prefill_only = return_logprob = False
        input_embeds = hisparse_coordinator = None
        token_to_kv_pool_allocator, tree_cache = slots, tree
        req_to_token_pool: Any = None
        spec_algorithm = SimpleNamespace(is_none=lambda: True)
        retract_decode, check_decode_mem = theirs.retract_decode, theirs.check_decode_mem
        new_tokens_required_next_decode = theirs.new_tokens_required_next_decode
        _get_decode_retraction_order = staticmethod(theirs._get_decode_retraction_order)

        def __init__(self, reqs: list[Row], batch_is_full: bool = False, chunked_req: Row | None = None) -> None:
            self.reqs, self.batch_is_full, self.chunked_req, self.prompts = reqs, batch_is_full, chunked_req, 0
            self.decoding_reqs: list[Row] | None = None
            self.forward_mode = SimpleNamespace(is_extend=lambda: self.prompts > 0)

        @classmethod
        def init_new(cls, reqs: list[Row], *_: Any, chunked_req: Row | None = None) -> Batch:
            return cls(list(reqs), chunked_req=chunked_req)

        def is_empty(self) -> bool:
            return not self.reqs

        def batch_size(self) -> int:
            return len(self.reqs)

        def filter_batch(self, reqs_to_exclude: Any = None, keep_indices: list[int] | None = None) -> None:
            if keep_indices is None:
                keep_indices = [i for i, r in enumerate(self.reqs) if not r.finished() and r not in (reqs_to_exclude or ())]
            self.reqs = [self.reqs[i] for i in keep_indices]

        def merge_batch(self, other: Batch) -> None:
            self.reqs.extend(other.reqs)

        def release_req(self, at: int, *_: Any, **__: Any) -> bool:
            give_back(slots, self.reqs[at])
            self.reqs[at].retracted_stain = True
            return True

        def prepare_for_extend(self) -> None:
            self.prompts = len(self.reqs)
            for row in self.reqs:
                take(slots, row, row.extend_len)

        def prepare_for_decode(self) -> None:
            self.prompts = 0
            for row in self.reqs:
                take(slots, row, 1)

        def mix_with_running(self, running: Batch) -> None:
            self.reqs = self.reqs + running.reqs

    return Batch


def take(slots: Slots, row: Row, tokens: int) -> None:
    assert tokens <= slots.left, f"{tokens} tokens of {slots.left}"
    slots.left -= tokens
    row.kv.kv_committed_len += tokens


def give_back(slots: Slots, row: Row) -> None:
    slots.left += row.kv.kv_committed_len
    row.kv.kv_committed_len = row.prefix_len = row.extend_end = 0


class Theirs:
    """Its loop in a world. ``announced``: the greatest output that clients say they take."""

    def __init__(self, modules: dict[str, Any], world: World, mixed: bool, announced: int, whole: bool = False) -> None:
        self.world, self.announced = world, announced
        self.slots = slots = Slots(world.blocks * BLOCK, modules["prefill_budget"].PrefillBudget)
        tree = Tree()
        module = modules["scheduler"]
        module.ScheduleBatch = batches(modules, slots, tree)
        module.get_parallel = lambda: SimpleNamespace(pp_max_micro_batch_size=world.seqs)
        tracker = modules["new_token_ratio_tracker"].NewTokenRatioTracker(
            init=RATIO, min=LEAST_RATIO, decay=(RATIO - LEAST_RATIO) / DECAY_STEPS, current=RATIO)
        same = SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
                               maybe_convert_decode_to_extend=lambda batch: batch)
        scheduler = self.scheduler = object.__new__(module.Scheduler)
        self.retracted: list[Row] = []
        plain: dict[str, Any] = dict.fromkeys((
            "dllm_config", "prefill_delayer", "min_free_slots_delayer", "dynamic_chunk_sizer", "hisparse_coordinator",
            "decode_offload_manager", "lora_drainer", "truncation_align_size", "_pending_chunked_abort_req"))
        plain |= dict.fromkeys((
            "enable_hisparse", "require_mlp_sync", "enable_priority_preemption", "is_hybrid_swa", "enable_lora", "enable_overlap",
            "enable_hicache_storage", "enable_lmcache", "enable_hierarchical_cache", "enable_unified_cache_external_linker",
            "enable_priority_scheduling", "enable_skip_finishing_decode"), False)
        scheduler.__dict__.update(plain | {
            "chunked_req": None, "last_batch": None, "running_batch": module.ScheduleBatch([]), "waiting_queue": [],
            "tree_cache": tree, "token_to_kv_pool_allocator": slots, "page_size": 1, "is_mixed_chunk": mixed,
            "req_to_token_pool": SimpleNamespace(available_size=lambda: 10**6), "result_queue": [], "max_prefill_bs": 0,
            "max_prefill_tokens": world.budget if whole else 16384,
            "chunked_prefill_size": None if whole else world.budget, "max_running_requests": world.seqs,
            "new_token_ratio_tracker": tracker, "priority_scheduling_preemption_threshold": 0, "processed_tokens_counter": 0,
            "policy": SimpleNamespace(calc_priority=lambda *_, **__: None, shortest_prefill_chunk_limit=lambda *_: None),
            "grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: False), "dp_attn_adapter": same,
            "ngram_embedding_manager": SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
            "beam_coordinator": SimpleNamespace(pending_member_rows=lambda _: 0), "_prefill_decode_interval_remaining": 0,
            "prefill_decode_interval": 0, "model_config": None, "forward_ct": 1,
            "spec_algorithm": SimpleNamespace(is_none=lambda: True),
            "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False)),
            "load_inquirer": SimpleNamespace(_get_num_pending_tokens=lambda **_: 0),
            "metrics_reporter": SimpleNamespace(num_retracted_reqs=0, enable_metrics=False),
            "_process_hicache_events": lambda: None, "process_pending_chunked_abort": lambda: None,
            "stash_chunked_request": lambda row: setattr(row, "prefix_len", row.extend_end),
            "get_prefill_adder_class": lambda: modules["schedule_policy"].PrefillAdder,
            "_add_request_to_queue": self._queue})

    def _queue(self, row: Row, is_retracted: bool = False) -> None:
        if is_retracted:
            self.retracted.append(row)
        self.scheduler.waiting_queue.append(row)

    def arrive(self, number: int) -> None:
        row = self.world.rows[number]
        self.scheduler.waiting_queue.append(Row(number, row.prompt, row.output, self.announced))

    def _next(self) -> Any:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        if not plan.batch_to_run:
            scheduler.last_batch = None
            if scheduler.running_batch.is_empty() and scheduler.chunked_req is None and not scheduler.waiting_queue:
                scheduler.new_token_ratio_tracker.reset()
        return plan.batch_to_run

    def idle(self) -> None:
        """A pass of the loop with nobody there."""
        assert self._next() is None

    def step(self) -> Outcome | None:
        scheduler, slots = self.scheduler, self.slots
        self.retracted.clear()
        batch = self._next()
        if batch is None:  # the loop tries again at once
            batch = self._next()
        if batch is None:
            return None
        tokens = {int(r.rid): r.extend_len for r in batch.reqs[:batch.prompts]}
        tokens |= {int(r.rid): 1 for r in batch.reqs[batch.prompts:]}
        found = Outcome(tokens, frozenset(int(r.rid) for r in self.retracted), slots.available_size())
        for row in batch.reqs:
            if row.inflight_middle_chunks > 0:
                row.inflight_middle_chunks -= 1
                continue
            row.output_ids.append(7)
            if row.finished():
                give_back(slots, row)
        scheduler.last_batch = batch
        return found

