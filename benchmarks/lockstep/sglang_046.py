"""SGLang 0.4.6's own scheduler loop, batches and adder, without an engine: its cache without prefixes, pages of one token.

torch stands for numpy arrays here, which is all that its batches do with it; the pools count tokens and rows as the engine's do.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lockstep.stubs import Finder, Stub, absent, package
from benchmarks.lockstep.worlds import BLOCK, Outcome, World

REAL = ("sglang.srt.managers.scheduler", "sglang.srt.managers.schedule_batch", "sglang.srt.managers.schedule_policy",
        "sglang.srt.managers.scheduler_output_processor_mixin", "sglang.srt.mem_cache.chunk_cache",
        "sglang.srt.mem_cache.base_prefix_cache", "sglang.global_config")
EOS = -1


class Tensor(np.ndarray[Any, Any]):
    """An array with the methods of torch's that are used."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def cpu(self) -> Any:
        return self

    def numpy(self) -> Any:
        return np.asarray(self)

    def clone(self) -> Any:
        return self.copy()

    def add_(self, value: Any) -> Any:
        self += value
        return self


def tensor(values: Any, **_: Any) -> Any:
    return np.array(values, dtype=np.int64).view(Tensor)


class Mode:
    """How a batch runs: a batch with prompts is an extension, mixed or not."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed")

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_idle(self) -> bool:
        return False


class Modes:
    EXTEND, MIXED, DECODE, IDLE = Mode("extend"), Mode("mixed"), Mode("decode"), Mode("idle")


class Sampling:
    """Nothing is sampled."""

    penalizer_orchestrator = types.SimpleNamespace(is_required=False)

    @classmethod
    def from_schedule_batch(cls, *_: Any) -> Sampling:
        return cls()

    def filter_batch(self, *_: Any) -> None:
        pass

    merge_batch = filter_batch


class Rows:
    """Rows of the table from requests to tokens."""

    device = "cpu"

    def __init__(self, size: int, tokens: int) -> None:
        self.req_to_token = np.zeros((size, tokens), dtype=np.int64).view(Tensor)
        self.free_slots = list(range(size))

    def alloc(self, count: int) -> list[int]:
        found, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return found

    def free(self, row: int) -> None:
        self.free_slots.append(row)

    def write(self, where: Any, values: Any) -> None:
        self.req_to_token[where] = values


class Slots:
    """A pool of token slots."""

    page_size = 1

    def __init__(self, size: int) -> None:
        self.left = list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self.left)

    def alloc(self, count: int) -> Any:
        if count > len(self.left):
            return None
        found, self.left = self.left[:count], self.left[count:]
        return tensor(found)

    def free(self, slots: Any) -> None:
        self.left.extend(int(slot) for slot in slots)
        assert len(set(self.left)) == len(self.left), "a slot was freed twice"

    def free_group_begin(self) -> None:
        pass

    free_group_end = free_group_begin


def load(source: Path) -> dict[str, Any]:
    """The modules of an unpacked sdist; what they do not need is stubbed."""
    given: dict[str, dict[str, Any]] = {
        "torch": {"tensor": tensor, "cat": lambda parts: np.concatenate(parts).view(Tensor), "int64": None, "int32": None},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": Modes},
        "sglang.srt.sampling.sampling_batch_info": {"SamplingBatchInfo": Sampling},
        "sglang.srt.utils": {"get_bool_env_var": lambda *_: False, "get_compiler_backend": lambda: None}}
    outside = absent("torch", "triton", "zmq", "setproctitle", "psutil", "orjson", "transformers", "huggingface_hub", "requests",
                     "fastapi", "aiohttp", "PIL")
    sys.meta_path.insert(0, Finder(("sglang", *outside), REAL, given))
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.mem_cache"):
        package(name, str(source.joinpath(*name.split("."))))
    modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in REAL}
    modules["schedule_batch"].global_server_args_dict["attention_backend"] = "torch_native"
    return modules


class Theirs:
    """Its loop in a world. ``announced``: the greatest output that clients say they take; ``whole``: no chunks, the world's
    budget is what a prefill batch may have."""

    def __init__(self, modules: dict[str, Any], world: World, mixed: bool, announced: int, whole: bool = False) -> None:
        self.modules, self.world, self.announced = modules, world, announced
        batch, policy = modules["schedule_batch"], modules["scheduler"].Scheduler
        self.slots = Slots(world.blocks * BLOCK)
        self.rows = Rows(4 * len(world.rows) + 8, 1024)
        scheduler = self.scheduler = object.__new__(policy)
        scheduler.__dict__.update(
            last_batch=None, chunked_req=None, running_batch=batch.ScheduleBatch(reqs=[], batch_is_full=False), waiting_queue=[],
            tree_cache=modules["chunk_cache"].ChunkCache(self.rows, self.slots), req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots, grammar_queue=[], max_running_requests=world.seqs,
            max_prefill_tokens=world.budget if whole else 16384,
            enable_hierarchical_cache=False, policy=types.SimpleNamespace(calc_priority=lambda queue: None), new_token_ratio=0.7,
            init_new_token_ratio=0.7, min_new_token_ratio=0.098, new_token_ratio_decay=(0.7 - 0.098) / 600,
            chunked_prefill_size=None if whole else world.budget, is_mixed_chunk=mixed, lora_paths=None, enable_metrics=False,
            attn_tp_rank=1,
            model_config=types.SimpleNamespace(is_encoder_decoder=False, vocab_size=1), enable_overlap=False,
            spec_algorithm=types.SimpleNamespace(is_eagle=lambda: False, is_none=lambda: True), decode_mem_cache_buf_multiplier=1,
            server_args=types.SimpleNamespace(enable_custom_logit_processor=False, enable_dp_attention=False,
                                              enable_sp_layernorm=False, speculative_algorithm=None, page_size=1,
                                              decode_log_interval=10**9),
            is_generation=True, num_generated_tokens=0, forward_ct_decode=0, page_size=1, return_health_check_ct=0,
            disaggregation_mode=None, stream_output=lambda *_: None)

    def arrive(self, number: int) -> None:
        row = self.world.rows[number]
        params = types.SimpleNamespace(max_new_tokens=self.announced, ignore_eos=False, stop_token_ids={EOS}, stop_strs=[],
                                       custom_params=None)
        request = self.modules["schedule_batch"].Req(str(number), "", [number] * row.prompt, params)
        self.scheduler.waiting_queue.append(request)

    def idle(self) -> None:
        """A pass of the loop with nobody there."""
        scheduler = self.scheduler
        assert scheduler.get_next_batch_to_run() is None
        scheduler.new_token_ratio, scheduler.last_batch = scheduler.init_new_token_ratio, None

    def step(self) -> Outcome | None:
        scheduler = self.scheduler
        retracted: list[Any] = []

        def back(requests: list[Any], *_: Any) -> None:
            retracted.extend(requests)
            scheduler.waiting_queue.extend(requests)

        scheduler._extend_requests_to_queue = back
        batch = scheduler.get_next_batch_to_run()
        if batch is None:  # the loop tries again at once
            scheduler.new_token_ratio, scheduler.last_batch = scheduler.init_new_token_ratio, None
            batch = scheduler.get_next_batch_to_run()
        found = None
        if batch is not None:
            prompts = batch.forward_mode.is_extend()
            tokens = {int(r.rid): r.extend_input_len if prompts else 1 for r in batch.reqs}
            found = Outcome(tokens, frozenset(int(r.rid) for r in retracted), self.slots.available_size())
            ids = [EOS if len(r.output_ids) + 1 == self.world.rows[int(r.rid)].output else 7 for r in batch.reqs]
            batch.output_ids = tensor(ids)
            result = types.SimpleNamespace(logits_output=Stub(hidden_states=None), next_token_ids=tensor(ids), bid=0,
                                           extend_input_len_per_req=None, extend_logprob_start_len_per_req=None)
            scheduler.process_batch_result(batch, result)
        scheduler.last_batch = batch
        return found
