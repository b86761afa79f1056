"""Open an engine on a device as the driver needs it.

On a CPU: torch references in fp32, no streams; the policy is given the splits of a nominal GPU, which have no effect. On a
GPU: partitions first (each context takes memory), proven as the profiler proves them, then weights, then KV in what is
left, then one decode graph for each lane and batch bucket. The GPU side is not yet run on one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.gpus import GPUS, GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model
from bullet.config import KV_BLOCK_TOKENS, RunConfig
from bullet.devices.load import served_model
from bullet.errors import BulletError, ConfigError, EngineError, ProfileError
from bullet.profiler.bench import CPU_NAME
from bullet.profiler.card import CONTEXT_BYTES, WORKSPACE_BYTES
from bullet.runtime.driver import Machine
from bullet.state import SplitTable
from bullet.work import activation_bytes
from bullet.workload import Workload, stream

CPU_KV_TOKENS = 32_768
SPARE_BYTES = 512 << 20
"""Left free on a GPU beside what :func:`reserve_bytes` counts: loaded kernels, fragments. *Assumed.*"""


@dataclasses.dataclass
class Opened:
    """A machine, the GPU that the policy believes in, and what must be closed."""

    machine: Machine
    gpu: GpuSpec
    pairs: tuple[tuple[int, int], ...]
    """(prefill, decode) SMs of the partitions whose lanes differ; empty without a partition."""
    synchronize: Callable[[], None]


def longest(config: RunConfig, workload: Workload) -> int:
    """Tokens of the longest request that the model can take at all; the others are rejected by name."""
    context = served_model(config.device).context_tokens
    totals = workload.prompt_tokens + workload.output_tokens
    fitting = totals[totals <= context]
    return max(2, int(fitting.max()) if len(fitting) else 2)


def prompts_of(workload: Workload, vocabulary: int, seed: int) -> Callable[[int], Sequence[int]]:
    """Random token ids, each request's from its own stream: no policy changes them."""
    def prompt(request_id: int) -> list[int]:
        rng = stream(seed, f"prompt:{request_id}")
        return rng.integers(0, vocabulary, int(workload.prompt_tokens[request_id])).tolist()
    return prompt


def reserve_bytes(model: ModelSpec, max_tokens: int, lanes: int, largest_batch: int, dtype_bytes: int) -> int:
    """Left free on a GPU for what is no KV cache. Memory of one stream is not another's: each prefill lane keeps the activations
    of the longest prompt, each decode lane those of its largest graph and of its eager run before that; then one batch's logits,
    and a workspace and a context for each."""
    prefill = lanes * activation_bytes(model, max_tokens, dtype_bytes)
    decode = lanes * 2 * activation_bytes(model, largest_batch, dtype_bytes) + largest_batch * model.vocab_size * dtype_bytes
    return prefill + decode + 2 * lanes * (WORKSPACE_BYTES + CONTEXT_BYTES) + SPARE_BYTES


def architecture(name: str, weights: Path | None, dtype: Any) -> Any:
    """Of a built-in model, a ``config.json``, or the folder of its weights; refuses what the engine does not compute."""
    from bullet.engine.model import Architecture

    if weights is not None:
        arch = Architecture.from_hf(weights)
    elif name.endswith(".json"):
        arch = Architecture.from_hf(name)
    else:
        return Architecture.of(get_model(name), dtype)
    return arch if dtype is None else dataclasses.replace(arch, dtype=dtype)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise EngineError(f"torch is not installed ({exc}): pip install 'bullet-llm[gpu]', or simulate with bullet-sim") from None
    return torch


def _weights(arch: Any, folder: Path | None, seed: int, device: Any) -> Any:
    from bullet.engine.weights import load_safetensors, random_weights

    return load_safetensors(folder, arch, device) if folder is not None else random_weights(arch, seed, device)


@contextmanager
def open_machine(device: str, config: RunConfig, max_tokens: int, *, weights: Path | None = None, backend: str = "auto",
                 allow_busy: bool = False, threads: int | None = None, say: Callable[[str], None] = lambda line: None,
                 ) -> Iterator[Opened]:
    """``device``: cpu or cuda. Whatever ends the block, launches are waited for and contexts destroyed."""
    if device == "cpu":
        yield _open_cpu(config, max_tokens, weights, threads)
        return
    with _open_cuda(config, max_tokens, weights, backend, allow_busy, say) as opened:
        yield opened


def _open_cpu(config: RunConfig, max_tokens: int, weights: Path | None, threads: int | None) -> Opened:
    torch = _import_torch()
    from bullet.engine.engine import CPU_LANE, Engine
    from bullet.engine.model import Ops

    if threads is not None:
        torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    arch = architecture(config.device.model, weights, torch.float32)
    kv_blocks = (config.device.kv_tokens or max(CPU_KV_TOKENS, max_tokens + KV_BLOCK_TOKENS)) // KV_BLOCK_TOKENS
    engine = Engine(arch, _weights(arch, weights, config.seed, cpu), Ops("torch"), kv_blocks=kv_blocks, max_tokens=max_tokens)
    gpu = get_gpu(config.device.gpu)
    splits = SplitTable.every(gpu.num_sms, config.device.partition_step_sms)
    machine = Machine(engine, splits, kv_blocks, lambda name, sms: CPU_LANE, CPU_NAME,
                      f"none: lanes take turns, SMs of a nominal {gpu.name}", True,
                      lambda: len(engine.pool.free))
    return Opened(machine, gpu, (), lambda: None)


def known_gpu(name: str, num_sms: int) -> GpuSpec:
    """The data sheet behind a device's name, with the SMs that are really there."""
    try:
        gpu = get_gpu(name)
    except ConfigError:
        raise ConfigError(f"GPU {name!r} is not among {', '.join(GPUS)}: add its data sheet to bullet/catalog/cards, which the "
                          "estimator starts from") from None
    return dataclasses.replace(gpu, num_sms=num_sms)


@contextmanager
def _open_cuda(config: RunConfig, max_tokens: int, folder: Path | None, backend: str, allow_busy: bool,
               say: Callable[[str], None]) -> Iterator[Opened]:
    torch = _import_torch()
    from bullet.engine.engine import BUCKETS, Engine
    from bullet.engine.model import Ops
    from bullet.engine.sequences import kv_blocks_that_fit
    from bullet.profiler import axes, bench_cuda
    from bullet.profiler.check import run_check

    arch = architecture(config.device.model, folder, None)
    spec = arch.spec

    def open_bench(kind: str) -> Any:
        return bench_cuda.open_cuda(spec, backend=kind, core=axes.CORE_DECODE_SHARES, extra=(), allow_busy=allow_busy)[0]

    note = "no partition: plain streams"
    try:
        bench = open_bench("green-context" if backend == "auto" else backend)
    except BulletError as exc:
        if backend != "auto" or isinstance(exc, ProfileError):
            raise
        note = f"no partition: {exc}"
        say(note)
        bench = open_bench("none")
    engine: Any = None

    def close() -> None:
        # A launch still at work holds its stream: wait, then graphs, then streams, then contexts.
        try:
            torch.cuda.synchronize()
        finally:
            if engine is not None:
                engine.close()
            bench.close()

    try:
        pairs: tuple[tuple[int, int], ...] = ()
        enter = None
        if bench.backend == "green-context":
            report = run_check(bench.table, bench, bench.gpu)
            if not report.proven and bench.enter_contexts():  # as the profiler does: once more with the contexts made current
                again = run_check(bench.table, bench, bench.gpu)
                if again.num_proven > report.num_proven:
                    report, enter = again, bench.table.current
                else:
                    bench.leave_contexts()
            pairs = tuple(tuple(p.granted) for p in bench.table.pairs)
            note = f"green contexts, {report.num_proven} of {len(pairs)} splits proven by %smid"
            if not report.proven:
                note += ": results on the others count as no partition"
            for line in report.lines():
                say(line)
        device = torch.device(bench.device)
        dtype = torch.bfloat16 if bench.props.capability >= (8, 0) else torch.float16
        arch = dataclasses.replace(arch, dtype=dtype)
        weights = _weights(arch, folder, config.seed, device)
        kv_blocks = kv_blocks_that_fit(arch, bench.free_bytes(), reserve_bytes(arch.spec, max_tokens, len(pairs) + 1,
                                                                           BUCKETS[-1], dtype.itemsize), max_tokens)
        if config.device.kv_tokens is not None:
            kv_blocks = min(kv_blocks, config.device.kv_tokens // KV_BLOCK_TOKENS)
        engine = Engine(arch, weights, Ops("triton"), kv_blocks=kv_blocks, max_tokens=max_tokens, device=device,
                        enter=enter)
        plain = bench.plain.pairs[0]
        started = time.perf_counter()
        # The plain lanes first: what is loaded or made at a first launch (kernels, cuBLAS's handle) then belongs to the
        # primary context, also where a lane's green context is made current around its work.
        engine.warm_up([plain.prefill, *(p.prefill for p in bench.table.pairs if pairs)])
        graphs = engine.capture([plain.decode, *(p.decode for p in bench.table.pairs if pairs)])
        say(f"kernels compiled and {graphs} decode graphs captured in {time.perf_counter() - started:.1f} s; "
            f"{kv_blocks * KV_BLOCK_TOKENS} tokens of KV")
        n = bench.num_units

        def lane(name: str, sms: int) -> Any:
            if sms == n or not pairs:
                return plain.prefill if name == "prefill" else plain.decode
            return bench.table.lane(name, sms)

        gpu = known_gpu(bench.gpu, n)
        decode = sorted({d for _, d in pairs})
        splits = SplitTable(n, np.array(decode, dtype=np.int64)) if pairs else SplitTable.every(n, 2)
        machine = Machine(engine, splits, kv_blocks, lane, bench.gpu, note, False, lambda: len(engine.pool.free))
        yield Opened(machine, gpu, pairs, torch.cuda.synchronize)
    except BaseException:
        try:
            close()
        except (BulletError, RuntimeError) as exc:  # a lost device refuses this too; the first error is the one to tell
            say(f"while cleaning up: {' '.join(str(exc).split())[:200]}")
        raise
    close()
