"""A run as a Perfetto trace (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.files import whole_file
from bullet.results.columns import StepTable

_CHUNK_ROWS = 8192
_THREADS = {"prefill": 1, "decode": 2, "hybrid": 3}


def perfetto_events(steps: StepTable, gpu: str) -> Iterator[str]:
    """Chrome trace events: a process for the GPU, a thread for each lane, counters only where they change.

    In order of start, a batch of rows at a time: neither the events nor the steps stand in memory.
    ``gpu``: what the process is called.
    """
    yield json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": gpu}})
    lanes: set[str] = set()
    for batch in steps.batches("lane"):
        lanes.update(batch["lane"].tolist())
    for lane in sorted(lanes, key=_THREADS.__getitem__):
        yield json.dumps({"ph": "M", "pid": 1, "tid": _THREADS[lane], "name": "thread_name", "args": {"name": lane}})
    quoted: dict[str, str] = {}
    before: dict[str, Any] = {}
    held_until: dict[str, float] = {}

    def counter(name: str, at_us: float, value: int) -> Iterator[str]:
        if before.get(name) != value:
            before[name] = value
            yield f'{{"ph":"C","pid":1,"name":"{name}","ts":{at_us:.3f},"args":{{"value":{value}}}}}'

    for columns in _by_start(steps):
        for (lane, start, end, sms, prefill, seqs, context, layer, layers, corun, queue, kv, reason) in zip(
                *columns, strict=True):
            if reason not in quoted:
                quoted[reason] = json.dumps(reason)
            at, until = start * 1e6, end * 1e6
            for other, free in held_until.items():
                if free < at - 1e-3:
                    yield from counter(f"{other} SMs", free, 0)
            held_until[lane] = until
            title = "mixed" if prefill and seqs else "prefill" if prefill else "decode"
            yield (f'{{"ph":"X","pid":1,"tid":{_THREADS[lane]},"name":"{title}","ts":{at:.3f},"dur":{until - at:.3f},'
                   f'"args":{{"sms":{sms},"prefill_tokens":{prefill},"decode_seqs":{seqs},"context_tokens":{context},'
                   f'"layers":"{layer}-{layer + layers - 1}","beside_other_lane_s":{corun:.6f},"reason":{quoted[reason]}}}}}')
            yield from counter(f"{lane} SMs", at, sms)
            yield from counter("waiting requests", at, queue)
            yield from counter("KV blocks used", at, kv)
    for lane, free in held_until.items():
        yield from counter(f"{lane} SMs", free, 0)


_COLUMNS = ("lane", "start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "context_tokens", "first_layer", "layers",
            "corun_s", "queue", "kv_used_blocks", "reason")


def _by_start(steps: StepTable) -> Iterator[list[list[Any]]]:
    """``_COLUMNS`` of the rows in order of start, as lists, ``_CHUNK_ROWS`` at most at a time.

    Rows stand in order of their ends: those of a batch are kept back until no later batch has an earlier start.
    """
    earliest = [float(batch["start_s"].min()) for batch in steps.batches("start_s")]
    later = [*np.minimum.accumulate(earliest[::-1])[::-1][1:], np.inf][:len(earliest)]
    held: dict[str, NDArray[Any]] | None = None
    for batch, bound in zip(steps.batches(*_COLUMNS), later, strict=True):
        rows = batch if held is None else {name: np.concatenate((held[name], batch[name])) for name in _COLUMNS}
        order = np.argsort(rows["start_s"], kind="stable")
        ready = int(np.searchsorted(rows["start_s"][order], bound, side="right"))
        for begin in range(0, ready, _CHUNK_ROWS):
            some = order[begin:min(begin + _CHUNK_ROWS, ready)]
            yield [rows[name][some].tolist() for name in _COLUMNS]
        kept = np.sort(order[ready:])
        held = {name: rows[name][kept] for name in _COLUMNS}


def write_perfetto(steps: StepTable, gpu: str, path: Path) -> None:
    """Streamed: a long run's trace never stands in memory. Open it at ui.perfetto.dev."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in perfetto_events(steps, gpu):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")
