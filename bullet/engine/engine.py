"""The engine: launches of prefill layers and decode iterations on a lane, over a paged KV cache and the sequences in it.

A driver asks for a launch, waits for it as it likes, and then finishes it; only then do the sequences change. One host
thread, at most one launch outstanding in each phase::

    engine.add(id, prompt) -> start_prefill([Chunk..]) -> run_layers(run, n, lane).finish() .. -> decode(ids, lane).finish()
                                     ^                        stops after any layer                      |
                                     '--------------- preempt(id): blocks freed, tokens kept ------------'

Prefill writes keys and values into the blocks from which decode reads them: a hand-over moves block numbers only. On a
GPU a decode iteration is one CUDA graph for each (lane, batch bucket), captured on the lane's own stream before serving
(:meth:`Engine.capture`), since a node's SMs are fixed at capture. On a CPU everything runs eagerly with torch references.

Nothing here reads a clock: a launch on a GPU is timed by its own pair of events, on a CPU by the driver.
The GPU side is not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from bullet.config import KV_BLOCK_TOKENS
from bullet.engine.model import Architecture, Batch, Chunks, Decodes, Model, Ops, Weights
from bullet.engine.sequences import Sequences, Tracked
from bullet.errors import EngineError
from bullet.gpu.partition import Lane
from bullet.state import Chunk

log = logging.getLogger(__name__)
Tensor = torch.Tensor

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes with a graph; a batch takes the next larger one, a larger batch than all runs eagerly."""
WARM_UP_TOKENS = (16, 32, 64, 128)
"""Prompts whose tiles have every height that prefill attention knows, so that each is compiled before serving."""
CPU_LANE = Lane("cpu", 1, 1)
"""Where there is no stream and SMs mean nothing."""


@dataclass
class PrefillRun:
    """A batch between its first layer and its last: everything that the next layers need."""

    chunks: tuple[Chunk, ...]
    decode_ids: tuple[int, ...]
    batch: Batch
    residual: Tensor | None = None
    x: Tensor | None = None
    layers_done: int = 0
    emits: list[int] = field(default_factory=list)
    """Sequences that get a token after the last layer, in the order of ``batch.last_rows``."""


class Launch:
    """Work queued on a lane. ``finish`` waits for it, updates the sequences and returns the new tokens by id."""

    def __init__(self, engine: Engine, ids: Sequence[int], emits: Sequence[int], tokens: Tensor | None,
                 advance: dict[int, int], events: tuple[Any, Any] | None, phase: str, logits: Tensor | None = None) -> None:
        self._engine, self._ids, self._emits, self._tokens = engine, ids, emits, tokens
        self._advance, self._events, self._phase = advance, events, phase
        self.logits = logits

    def done(self) -> bool:
        """Whether the device is through with it; never blocks."""
        if self._events is None:
            return True
        with self._engine.guard(self._phase):
            return bool(self._events[1].query())

    def finish(self) -> dict[int, int]:
        """Block until done; call once."""
        engine = self._engine
        if self._events is not None:
            with engine.guard(self._phase):
                self._events[1].synchronize()
        return engine._finish(self._phase, self._ids, self._emits, self._tokens, self._advance)

    def elapsed_s(self) -> float | None:
        """Seconds on the device between its first and last operation; None on a CPU."""
        if self._events is None:
            return None
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3


class Engine(Sequences):
    """See the module's text. ``max_tokens``: longest sequence, prompt and output together. ``enter``: makes a lane's green
    context current (:meth:`bullet.gpu.partition.PartitionTable.current`), where the check found that its stream alone
    is not enough. ``cuda``: a test's stand-in for ``torch.cuda``, which is taken where the device is a GPU."""

    def __init__(self, arch: Architecture, weights: Weights, ops: Ops, *, kv_blocks: int, max_tokens: int,
                 device: torch.device | str = "cpu", block_tokens: int = KV_BLOCK_TOKENS,
                 buckets: Sequence[int] = BUCKETS, enter: Callable[[Lane], Any] | None = None, cuda: Any = None) -> None:
        spec = arch.spec
        if max_tokens > spec.context_tokens:
            raise EngineError(f"longest sequence of {max_tokens} tokens: {spec.name} is made for {spec.context_tokens}")
        if kv_blocks < 1 or block_tokens < 1 or block_tokens & (block_tokens - 1):
            raise EngineError(f"KV cache of {kv_blocks} blocks of {block_tokens} tokens: at least one block, a power of two long")
        self.arch, self.ops, self.device = arch, ops, torch.device(device)
        self._enter = enter
        self._cuda = torch.cuda if cuda is None and self.device.type == "cuda" else cuda
        self.table_width = -(-max_tokens // block_tokens)
        self.buckets = tuple(sorted(buckets))
        self._outstanding: dict[str, bool] = {"prefill": False, "decode": False}
        shape = (spec.num_layers, 2, kv_blocks, spec.num_kv_heads, block_tokens, spec.head_dim)
        with self.guard("allocating the KV cache"):
            self.kv = torch.empty(shape, dtype=arch.dtype, device=self.device)
            self.model = Model(arch, weights, ops, max_tokens, self.device)
        super().__init__(spec.vocab_size, kv_blocks, block_tokens, max_tokens)  # after the cache, which may not fit
        self._graphs: dict[tuple[int, int], Any] = {}
        self._pools: dict[int, Any] = {}
        self._static: _DecodeBuffers | None = None

    def fill_cache(self) -> None:
        """Normal numbers all over the cache: what is assumed of it then looks like keys and values."""
        with self.guard("filling the KV cache"):
            self.kv.normal_()
            if self._cuda is not None:
                self._cuda.synchronize()  # no lane's stream waits for the default one

    # ---- prefill -----------------------------------------------------------------------------------

    def start_prefill(self, chunks: Sequence[Chunk], lane: Lane = CPU_LANE, decode_ids: Sequence[int] = (), *,
                      by_chunk: bool = False) -> PrefillRun:
        """Make a batch of chunks, each starting where its sequence's cache ends; ``decode_ids`` ride along (a hybrid
        batch). A sequence's first chunk takes the blocks of all its known tokens; ``by_chunk``, each those of its own tokens."""
        assert chunks or decode_ids, "an empty batch"
        members, new, past = [], [], []
        rows: list[Tensor] = []
        for request_id, count, done in chunks:
            sequence = self.idle(request_id)
            known = len(sequence.tokens)
            fits = count > 0 and done == sequence.cached and done + count <= known
            assert fits, f"chunk of {count} after {done}: request {request_id} has {sequence.cached} cached of {known} tokens"
            lacking = -(-(done + count if by_chunk else known) // self.block_tokens) - len(sequence.blocks)
            if lacking > 0:
                sequence.blocks += self.pool.take(lacking)
            rows.append(self.rows(sequence, done, done + count))
            members.append(sequence)
            new.append(count)
            past.append(done)
        decoding = [self.grown(i) for i in decode_ids]
        if decoding:
            rows.append(self.decode_rows(decoding))
        for sequence in members + decoding:
            assert not sequence.busy, f"request {sequence.id} twice in a batch"
            sequence.busy = True
        ends = zip(members, new, past, accumulate(new), strict=True)
        emits = [(s.id, end - 1) for s, n, p, end in ends if p + n == len(s.tokens)]
        emits += [(s.id, sum(new) + i) for i, s in enumerate(decoding)]
        with self.guard("prefill"), self._on(lane):
            batch = self._batch(rows, members, new, past, decoding)
            batch.last_rows = torch.tensor([row for _, row in emits], dtype=torch.int64).to(self.device)
        return PrefillRun(tuple(chunks), tuple(decode_ids), batch, emits=[i for i, _ in emits])

    def _batch(self, rows: Sequence[Tensor], members: Sequence[Tracked], new: list[int], past: list[int],
               decoding: Sequence[Tracked]) -> Batch:
        tokens, positions, slots = torch.cat(list(rows), 1).to(self.device)
        chunks = decodes = None
        if members:
            starts = list(accumulate(new, initial=0))
            lengths = [n + p for n, p in zip(new, past, strict=True)]
            starts_, lengths_ = (torch.tensor(v, dtype=torch.int32).to(self.device) for v in (starts, lengths))
            plan = self.ops.tiles(new, past, self.arch.dtype, self.arch.spec.head_dim, self.device)
            chunks = Chunks(sum(new), self.tables(members).to(self.device), starts_, lengths_, plan)
        if decoding:
            lengths = torch.tensor([s.cached + 1 for s in decoding], dtype=torch.int32)
            decodes = Decodes(self.tables(decoding).to(self.device), lengths.to(self.device))
        return Batch(tokens, positions, slots, chunks, decodes)

    def run_layers(self, run: PrefillRun, layers: int, lane: Lane = CPU_LANE) -> Launch:
        """The next ``layers`` layers of a batch; after the last one its complete prompts get their first token."""
        last = run.layers_done + layers
        total = self.arch.spec.num_layers
        assert run.layers_done < last <= total, f"{layers} layers after {run.layers_done} of {total}"
        ids = [c.request_id for c in run.chunks] + list(run.decode_ids)
        tokens = logits = None
        self._launching("prefill", ids)
        with self.guard("prefill"), self._on(lane):
            self._wait_for(ids, lane)
            events = self._start_event(lane)
            if run.residual is None:
                run.residual = self.model.embed(run.batch)
            run.x, run.residual = self.model.layers(run.batch, run.x, run.residual, self.kv, run.layers_done, last, lane.sms)
            run.layers_done = last
            if last == total and run.emits:
                logits = self.model.logits(run.batch, run.x, run.residual, lane.sms)
                tokens = self._to_host(logits.argmax(-1))
            self._end_event(events, lane, ids)
        if last < total:
            return Launch(self, (), (), None, {}, events, "prefill")
        advance = {c.request_id: c.new_tokens for c in run.chunks} | dict.fromkeys(run.decode_ids, 1)
        return Launch(self, ids, run.emits, tokens, advance, events, "prefill", logits)

    # ---- decode ------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], lane: Lane = CPU_LANE) -> Launch:
        """One token for every sequence: the lane's graph of the batch's bucket, or eagerly where none was captured."""
        assert ids, "nothing to decode"
        assert len(set(ids)) == len(ids), f"a request twice in {ids}"
        sequences = [self.grown(i) for i in ids]
        bucket = next((b for b in self.buckets if b >= len(ids)), None)
        graph = None if bucket is None else self._graphs.get((id(lane.stream), bucket))
        self._launching("decode", ids)
        for sequence in sequences:
            sequence.busy = True
        with self.guard("decode"), self._on(lane):
            self._wait_for(ids, lane)
            events = self._start_event(lane)
            logits = None
            if graph is not None:
                assert self._static is not None
                self._static.fill(sequences, bucket, self)
                graph.replay()
                tokens = self._to_host(self._static.next_tokens[:len(ids)])
            else:
                logits = self._decode_forward(self._batch([self.decode_rows(sequences)], (), [], [], sequences), lane.sms)
                tokens = self._to_host(logits.argmax(-1))
            self._end_event(events, lane, ids)
        return Launch(self, ids, ids, tokens, dict.fromkeys(ids, 1), events, "decode", logits)

    def _decode_forward(self, batch: Batch, num_sms: int) -> Tensor:
        x, residual = self.model.layers(batch, None, self.model.embed(batch), self.kv, 0, self.arch.spec.num_layers, num_sms)
        return self.model.logits(batch, x, residual, num_sms)

    def warm_up(self, lanes: Sequence[Lane]) -> None:
        """Small prefills on every lane before serving: kernels compile and cuBLAS makes each stream's workspace now, and not
        in the time of the first requests."""
        room = min(self.max_tokens - 1, self.pool.total * self.block_tokens)
        if self._cuda is not None:
            with self.guard("making the weights"):
                self._cuda.synchronize()  # weights may still be under way on a stream that no lane waits for
        for lane in lanes:
            for tokens in WARM_UP_TOKENS if lane is lanes[0] else WARM_UP_TOKENS[:1]:
                self.add(-1, [0] * min(tokens, room))
                run = self.start_prefill([Chunk(-1, min(tokens, room), 0)], lane)
                self.run_layers(run, self.arch.spec.num_layers, lane).finish()
                self.remove(-1)

    def capture(self, lanes: Sequence[Lane]) -> int:
        """Capture a decode graph for every lane and bucket, before serving: capture synchronises. Returns how many.

        A first eager run on the lane's stream compiles kernels and makes cuBLAS's workspace there; the capture itself
        names the stream, since a graph's kernels keep the SMs of the stream that they were captured on.
        """
        cuda = self._cuda
        if cuda is None or (self.device.type == "cuda" and not self.ops.fused):
            raise EngineError("CUDA graphs need a GPU and kernels = triton: elsewhere decode runs eagerly")
        assert not any(self._outstanding.values()), "capture before serving"
        self._static = self._static or _DecodeBuffers(self.buckets[-1], self.table_width, self.device)
        with self.guard("capturing decode graphs"):
            cuda.synchronize()
            for lane in lanes:
                for bucket in reversed(self.buckets):  # the largest first: smaller ones fit into its memory
                    self._graphs[id(lane.stream), bucket] = self._capture_one(lane, bucket)
            cuda.synchronize()
        return len(self._graphs)

    def _capture_one(self, lane: Lane, bucket: int) -> Any:
        assert self._static is not None
        static, stream, cuda = self._static, lane.stream, self._cuda
        # Graphs of one stream never run at once, so they share memory; all live until close, as torch's pools demand.
        if id(stream) not in self._pools:
            self._pools[id(stream)] = cuda.graph_pool_handle()
        pool = self._pools[id(stream)]
        with self._on(lane):
            static.fill((), bucket, self)
            self._decode_static(static, bucket, lane.sms)
            stream.synchronize()
            graph = cuda.CUDAGraph()
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._decode_static(static, bucket, lane.sms)
            except BaseException:
                with suppress(RuntimeError):  # the capture is void; the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _decode_static(self, static: _DecodeBuffers, bucket: int, num_sms: int) -> None:
        """What a graph holds: fixed inputs to fixed outputs."""
        static.next_tokens[:bucket] = self._decode_forward(static.batch(bucket), num_sms).argmax(-1)

    def close(self) -> None:
        """Release graphs before the lanes' streams go (register it with ``PartitionTable.before_close``)."""
        self._graphs.clear()
        self._pools.clear()
        self._static = None

    # ---- inside ------------------------------------------------------------------------------------

    def _launching(self, phase: str, ids: Sequence[int]) -> None:
        assert not self._outstanding[phase], f"{phase}: the launch before {list(ids)} is not finished"
        self._outstanding[phase] = True

    def _finish(self, phase: str, ids: Sequence[int], emits: Sequence[int], tokens: Tensor | None,
                advance: dict[int, int]) -> dict[int, int]:
        assert self._outstanding[phase], f"{phase}: finished twice"
        self._outstanding[phase] = False
        for request_id in ids:
            sequence = self.sequences[request_id]
            sequence.cached += advance[request_id]
            sequence.busy = False
        result = {} if tokens is None else dict(zip(emits, tokens.tolist(), strict=True))
        for request_id, token in result.items():
            self.sequences[request_id].tokens.append(token)
        return result

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """A failing allocation, and on a GPU a failing kernel, as one line; other errors on a CPU are ours and stay.

        Triton's own errors (shared memory, ptxas) are no RuntimeErrors.
        """
        try:
            yield
        except Exception as exc:
            if not (isinstance(exc, RuntimeError) or type(exc).__module__.split(".")[0] == "triton"):
                raise
            message = " ".join(str(exc).split())[:160]
            if any(sign in message.lower() for sign in ("out of memory", "not enough memory", "can't allocate memory")):
                raise EngineError(f"{what}: out of memory on {self.device} ({message}): lower the KV cache, the batch or the "
                                  "number of splits, or end other processes on it") from None
            if self.device.type != "cuda":
                raise
            raise EngineError(f"{what}: the GPU failed ({message}): finished requests are kept; run again, and with "
                              "CUDA_LAUNCH_BLOCKING=1 to see which kernel it was") from None

    @contextmanager
    def _on(self, lane: Lane) -> Iterator[None]:
        """The lane's stream is current, and its green context where that is asked for."""
        if self._cuda is None:
            yield
            return
        with nullcontext() if self._enter is None else self._enter(lane), self._cuda.stream(lane.stream):
            yield

    def _wait_for(self, ids: Sequence[int], lane: Lane) -> None:
        # The other lane's last work on these sequences: their keys and values must be there.
        if self._cuda is not None:
            for event in {id(e): e for i in ids if (e := self.sequences[i].last_event) is not None}.values():
                lane.stream.wait_event(event)

    def _start_event(self, lane: Lane) -> tuple[Any, Any] | None:
        if self._cuda is None:
            return None
        events = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        events[0].record(lane.stream)
        return events

    def _end_event(self, events: tuple[Any, Any] | None, lane: Lane, ids: Sequence[int]) -> None:
        if events is not None:
            events[1].record(lane.stream)
            for request_id in ids:
                self.sequences[request_id].last_event = events[1]

    def _to_host(self, tokens: Tensor) -> Tensor:
        """Queue the copy of a launch's tokens to the host; they are there once its end event is."""
        if self.device.type != "cuda":
            return tokens
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        return host.copy_(tokens, non_blocking=True)


class _DecodeBuffers:
    """Inputs and outputs of the decode graphs, at fixed addresses: on the device, and pinned on the host.

    One set serves all lanes: at most one decode iteration is outstanding. A bucket reads the first rows of each; rows
    behind the batch have length 0 and slot -1, which attention and the cache write skip.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        def both(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            return host, torch.zeros(shape, dtype=dtype, device=device)

        self.pairs = {"tokens": both(rows, dtype=torch.int64), "positions": both(rows, dtype=torch.int64),
                      "slots": both(rows, dtype=torch.int64), "lengths": both(rows, dtype=torch.int32),
                      "tables": both(rows, width, dtype=torch.int32)}
        self.next_tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def batch(self, bucket: int) -> Batch:
        """Views of the device's first ``bucket`` rows."""
        device = {name: pair[1][:bucket] for name, pair in self.pairs.items()}
        return Batch(device["tokens"], device["positions"], device["slots"], None,
                     Decodes(device["tables"], device["lengths"]))

    def fill(self, sequences: Sequence[Tracked], bucket: int, engine: Engine) -> None:
        """Write a batch's inputs and queue their copies on the current stream."""
        host = {name: pair[0] for name, pair in self.pairs.items()}
        count = len(sequences)
        for name, empty in (("tokens", 0), ("positions", 0), ("slots", -1), ("lengths", 0)):
            host[name][count:bucket] = empty
        if count:
            rows = engine.decode_rows(sequences)
            for name, values in zip(("tokens", "positions", "slots"), rows, strict=True):
                host[name][:count] = values
            host["lengths"][:count] = rows[1] + 1
            tables = engine.tables(sequences)
            host["tables"][:count, :tables.shape[1]] = tables
        for pinned, device in self.pairs.values():
            device[:bucket].copy_(pinned[:bucket], non_blocking=True)
