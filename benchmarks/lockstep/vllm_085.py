"""vLLM 0.8.5's own scheduler and KV cache manager, without an engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.lockstep.stubs import Finder, Stub, absent, package
from benchmarks.lockstep.worlds import BLOCK, Outcome, World, tokens_of

REAL = ("vllm.v1.core.kv_cache_manager", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.specialized_manager", "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.interface",
        "vllm.v1.core.sched.output", "vllm.v1.core.sched.utils", "vllm.v1.core.encoder_cache_manager",
        "vllm.v1.kv_cache_interface", "vllm.v1.request", "vllm.v1.engine", "vllm.v1.outputs", "vllm.v1.metrics.stats",
        "vllm.v1.spec_decode.metrics")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class _List:
    """A view of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, at: Any) -> Any:
        return self.items[at]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        return iter(self.items)


def load(source: Path) -> dict[str, Any]:
    """The modules of an unpacked sdist; what they do not need is stubbed."""
    given = {"vllm.utils": {"cdiv": cdiv, "GiB_bytes": 1 << 30, "sha256": hash, "is_list_of": lambda *_: True},
             "vllm.logger": {"init_logger": lambda name: Stub()}}
    given["vllm.v1.utils"] = {"ConstantList": _List}
    sys.meta_path.insert(0, Finder(("vllm", *absent("torch", "msgspec", "prometheus_client")), REAL, given))
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.metrics", "vllm.v1.spec_decode"):
        package(name, str(source.joinpath(*name.split("."))))
    names = ("vllm.v1.core.sched.scheduler", "vllm.v1.request", "vllm.v1.kv_cache_interface")
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in names}


class Theirs:
    """Its scheduler in a world."""

    def __init__(self, modules: dict[str, Any], world: World) -> None:
        interface = modules["kv_cache_interface"]
        spec = interface.FullAttentionSpec(BLOCK, 1, 1, None, False)
        # One block is the null block, which no request gets.
        kv = interface.KVCacheConfig(num_blocks=world.blocks + 1, tensors={},
                                     kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)])
        config = Stub(
            scheduler_config=Stub(max_num_seqs=world.seqs, max_num_batched_tokens=world.budget, max_model_len=1 << 20,
                                  long_prefill_token_threshold=0),
            cache_config=Stub(num_gpu_blocks=world.blocks + 1, block_size=BLOCK, enable_prefix_caching=world.caching,
                              prefix_caching_hash_algo="builtin"),
            lora_config=None, kv_transfer_config=None, speculative_config=None, model_config=Stub(is_multimodal_model=False))
        structured = Stub(grammar_bitmask=lambda *_: None)
        self.modules, self.world = modules, world
        self.scheduler = modules["scheduler"].Scheduler(config, kv, structured)

    def arrive(self, number: int) -> None:
        row = self.world.rows[number]
        params = Stub(max_tokens=row.output, guided_decoding=None, ignore_eos=True, stop_token_ids=(), logprobs=None,
                      prompt_logprobs=None)
        self.scheduler.add_request(self.modules["request"].Request(
            str(number), tokens_of(self.world, number), None, None, None, params, None, 0.0))

    def idle(self) -> None:
        pass

    def step(self) -> Outcome | None:
        scheduler = self.scheduler
        before = [request.request_id for request in scheduler.running]
        decided = scheduler.schedule()
        after = {request.request_id for request in scheduler.running}
        tokens = dict(decided.num_scheduled_tokens)
        found = Outcome({int(i): n for i, n in tokens.items()}, frozenset(int(i) for i in before if i not in after),
                        scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        ids = list(tokens)
        sampled = []
        for i in ids:
            request = scheduler.requests[i]
            whole = request.num_computed_tokens == request.num_tokens
            sampled.append([int(i) * 10_000 + 5_000 + request.num_output_tokens] if whole else [])
        scheduler.update_from_output(decided, Stub(sampled_token_ids=sampled, spec_token_ids=None, logprobs=None,
                                                   prompt_logprobs_dict={}, req_id_to_index={i: k for k, i in enumerate(ids)}))
        return found if tokens or found.preempted else None
