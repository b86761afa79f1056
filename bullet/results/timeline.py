"""A run as a Perfetto trace (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bullet.files import whole_file
from bullet.results.columns import RunOutcome

_CHUNK_ROWS = 8192
_THREADS = {"prefill": 1, "decode": 2, "hybrid": 3}


def perfetto_events(outcome: RunOutcome) -> Iterator[str]:
    """Chrome trace events: a process for the GPU, a thread for each lane, counters only where they change.

    In order of start, a part of the rows at a time: neither the events nor the columns as Python objects stand in memory.
    """
    steps = outcome.steps
    gpu = f"{str(outcome.device.get('gpu')).upper()} ({outcome.source})"
    yield json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": gpu}})
    for lane in sorted(set(steps["lane"].tolist()), key=_THREADS.__getitem__):
        yield json.dumps({"ph": "M", "pid": 1, "tid": _THREADS[lane], "name": "thread_name", "args": {"name": lane}})
    quoted = {reason: json.dumps(reason) for reason in set(steps["reason"].tolist())}
    before: dict[str, Any] = {}
    held_until: dict[str, float] = {}

    def counter(name: str, at_us: float, value: int) -> Iterator[str]:
        if before.get(name) != value:
            before[name] = value
            yield f'{{"ph":"C","pid":1,"name":"{name}","ts":{at_us:.3f},"args":{{"value":{value}}}}}'

    order = np.argsort(steps["start_s"], kind="stable")
    names = ("lane", "start_s", "end_s", "sms", "prefill_tokens", "decode_seqs", "context_tokens", "first_layer", "layers",
             "corun_s", "queue", "kv_used_blocks", "reason")
    for begin in range(0, len(order), _CHUNK_ROWS):
        rows = order[begin:begin + _CHUNK_ROWS]
        for (lane, start, end, sms, prefill, seqs, context, layer, layers, corun, queue, kv, reason) in zip(
                *(steps[name][rows].tolist() for name in names), strict=True):
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


def write_perfetto(outcome: RunOutcome, path: Path) -> None:
    """Streamed: a long run's trace never stands in memory. Open it at ui.perfetto.dev."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in perfetto_events(outcome):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")
