"""vLLM 0.33's own scheduler and KV cache manager, without an engine. One step in flight, as ours in these worlds."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.lockstep.stubs import Finder, Stub, absent, package
from benchmarks.lockstep.worlds import BLOCK, Outcome, World, tokens_of

REAL = ("vllm.v1.core.kv_cache_manager", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.kv_cache_coordinator", "vllm.v1.core.single_type_kv_cache_manager", "vllm.v1.core.sched.scheduler",
        "vllm.v1.core.sched.interface", "vllm.v1.core.sched.output", "vllm.v1.core.sched.request_queue",
        "vllm.v1.core.sched.utils", "vllm.v1.core.encoder_cache_manager", "vllm.v1.kv_cache_interface",
        "vllm.v1.kv_cache_spec_registry", "vllm.v1.request", "vllm.v1.engine", "vllm.v1.metrics.stats", "vllm.v1.utils",
        "vllm.utils.math_utils")
PACKAGES = ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.metrics")


def load(source: Path) -> dict[str, Any]:
    """The modules of an unpacked sdist; what they do not need is stubbed."""
    given: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": lambda name: Stub()},
        "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: 2},
        "vllm.utils.hashing": {"xxhash": hash, "xxhash_cbor": hash},
    }
    outside = absent("torch", "msgspec", "prometheus_client", "psutil", "zmq", "cbor2", "uvloop", "cloudpickle", "pydantic",
                     "fastapi", "regex")
    sys.meta_path.insert(0, Finder(("vllm", *outside), REAL, given))
    for name in PACKAGES:
        package(name, str(source.joinpath(*name.split("."))))
    sys.modules["vllm.utils"].length_from_prompt_token_ids_or_embeds = lambda ids, embeds: len(ids)  # type: ignore[attr-defined]
    sys.modules["vllm"].envs = Stub()  # type: ignore[attr-defined]
    names = ("vllm.v1.core.sched.scheduler", "vllm.v1.request", "vllm.v1.kv_cache_interface", "vllm.v1.core.kv_cache_utils")
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in names}


class Theirs:
    """Its scheduler in a world."""

    def __init__(self, modules: dict[str, Any], world: World, *, reserve: bool = True) -> None:
        interface = modules["kv_cache_interface"]
        spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=None)
        # One block is the null block, which no request gets.
        kv = interface.KVCacheConfig(num_blocks=world.blocks + 1, kv_cache_tensors=[],
                                     kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)])
        off = SimpleNamespace(enabled=False)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(
                max_num_seqs=world.seqs, max_num_active_seqs=None, max_num_batched_tokens=world.budget,
                max_num_scheduled_tokens=None, long_prefill_token_threshold=0, long_prefill_token_threshold_adaptive=False,
                policy="fcfs", watermark=0.0, prefill_schedule_interval=1, scheduler_reserve_full_isl=reserve,
                enable_chunked_prefill=True),
            cache_config=SimpleNamespace(num_gpu_blocks=world.blocks + 1, enable_prefix_caching=world.caching,
                                         enable_mamba_shared_prefix_checkpoint=False, mamba_cache_mode="none"),
            model_config=SimpleNamespace(uses_mrope=False, is_encoder_decoder=False, max_model_len=1 << 20,
                                         runner_type="generate", is_diffusion=False, supports_multimodal_inputs=False,
                                         return_sampling_mask=False),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                                            data_parallel_index=0, data_parallel_size=1, pipeline_parallel_size=1),
            observability_config=SimpleNamespace(per_request_spec_decode_metrics=None, kv_cache_metrics=False),
            ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
            lora_config=None, kv_events_config=None, kv_transfer_config=None, ec_transfer_config=None, speculative_config=None,
            aux_output_config=off, is_mm_encoder_only=False, num_speculative_tokens=0, num_lookahead_tokens=0,
            num_prefill_lookahead_tokens=0, num_hash_lookahead_tokens=0, max_in_flight_tokens=world.budget,
            max_concurrent_batches=1, use_v2_model_runner=False)
        structured = SimpleNamespace(accept_tokens=lambda *_: True, grammar_bitmask=lambda *_: None)
        self.modules, self.world = modules, world
        self.hasher = None
        if world.caching:
            utils = modules["kv_cache_utils"]

            def digest(value: Any) -> bytes:
                return hashlib.sha256(repr(value).encode()).digest()

            utils.init_none_hash(digest)
            self.hasher = utils.get_request_block_hasher(BLOCK, digest)
        self.scheduler = modules["scheduler"].Scheduler(config, kv, structured, BLOCK)

    def arrive(self, number: int) -> None:
        row = self.world.rows[number]
        params = SimpleNamespace(max_tokens=row.output, min_tokens=0, extra_args=None, num_logprobs=None, logprobs=None,
                                 prompt_logprobs=None, structured_outputs=None, ignore_eos=True, eos_token_id=None,
                                 stop_token_ids=(), repetition_detection=None, skip_reading_prefix_cache=False)
        self.scheduler.add_request(self.modules["request"].Request(
            str(number), tokens_of(self.world, number), params, None, arrival_time=0.0, block_hasher=self.hasher))

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
        scheduler.update_from_output(decided, SimpleNamespace(
            sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={},
            pooler_output=None, num_nans_in_logits=None, kv_connector_output=None, ec_connector_output=None, cudagraph_stats=None,
            aux_output_connector_output=None, sampling_masks=None, req_id_to_index={i: k for k, i in enumerate(ids)}))
        return found if tokens or found.preempted else None
