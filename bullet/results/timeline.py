"""A run as a Perfetto trace (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.files import whole_file
from bullet.results.columns import StepTable

_CHUNK_ROWS = 8192
_THREADS = {"prefill": 1, "decode": 2, "hybrid": 3}
_REQUESTS = 0
"""The process whose threads are a cluster's requests."""


def device_of(lane: str) -> str:
    """Which device of a cluster a lane is of, ``replica 0 decode``; empty where there is one device."""
    return lane.rpartition(" ")[0]


def perfetto_events(steps: StepTable, gpu: str) -> Iterator[str]:
    """Chrome trace events: a process for the GPU, a thread for each lane, counters only where they change.

    In order of start, a batch of rows at a time: neither the events nor the steps stand in memory.
    ``gpu``: what the process is called.
    """
    lanes: set[str] = set()
    for batch in steps.batches("lane"):
        lanes.update(batch["lane"].tolist())
    devices = sorted({device_of(lane) for lane in lanes} or {""}, key=lambda d: (d.split(" ")[0] == "decode", len(d), d))
    process = {device: i for i, device in enumerate(devices, 1)}
    for device, pid in process.items():
        yield json.dumps({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{device} {gpu}".strip()}})
    thread = {lane: (process[device_of(lane)], _THREADS[lane.rpartition(" ")[2]]) for lane in lanes}
    for lane in sorted(lanes, key=thread.__getitem__):
        pid, tid = thread[lane]
        yield json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane.rpartition(" ")[2]}})
    quoted: dict[str, str] = {}
    before: dict[Any, Any] = {}
    held_until: dict[str, float] = {}

    def counter(pid: int, name: str, at_us: float, value: int) -> Iterator[str]:
        if before.get((pid, name)) != value:
            before[pid, name] = value
            yield f'{{"ph":"C","pid":{pid},"name":"{name}","ts":{at_us:.3f},"args":{{"value":{value}}}}}'

    for columns in _by_start(steps):
        for (lane, start, end, sms, prefill, seqs, context, layer, layers, corun, queue, kv, reason) in zip(
                *columns, strict=True):
            if reason not in quoted:
                quoted[reason] = json.dumps(reason)
            at, until = start * 1e6, end * 1e6
            for other, free in held_until.items():
                if free < at - 1e-3:
                    yield from counter(thread[other][0], f"{other} SMs", free, 0)
            held_until[lane] = until
            pid, tid = thread[lane]
            title = "mixed" if prefill and seqs else "prefill" if prefill else "decode"
            yield (f'{{"ph":"X","pid":{pid},"tid":{tid},"name":"{title}","ts":{at:.3f},"dur":{until - at:.3f},'
                   f'"args":{{"sms":{sms},"prefill_tokens":{prefill},"decode_seqs":{seqs},"context_tokens":{context},'
                   f'"layers":"{layer}-{layer + layers - 1}","beside_other_lane_s":{corun:.6f},"reason":{quoted[reason]}}}}}')
            yield from counter(pid, f"{lane} SMs", at, sms)
            yield from counter(pid, "waiting requests", at, queue)
            yield from counter(pid, "KV blocks used", at, kv)
    for lane, free in held_until.items():
        yield from counter(thread[lane][0], f"{lane} SMs", free, 0)


def way_events(requests: Mapping[str, NDArray[Any]], ways: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """A request's way through a cluster in one row (a thread): what it waits for and where, what is computed, what moves."""
    yield json.dumps({"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests"}})
    order = np.argsort(requests["id"], kind="stable")
    for k in order.tolist():
        i = int(requests["id"][k])
        first, second = (int(ways[name][i]) for name in ("device", "decode_device"))
        granted, leaves, lands = (float(ways[name][i]) for name in ("reserved_s", "leaves_s", "lands_s"))
        arrival, admitted, token, finish = (float(requests[name][k]) for name in (
            "arrival_s", "admitted_s", "first_token_s", "finish_s"))
        parts = [(f"waits for device {first}", arrival, admitted), (f"prefill on device {first}", admitted, token)]
        if np.isfinite(lands):
            parts += [(f"waits for blocks of device {second}", token, max(token, granted)),
                      ("waits for the link", max(token, granted), max(token, granted, leaves)),
                      (f"{ways['bytes'][i]:.0f} bytes to device {second}", max(token, leaves), lands)]
        parts.append((f"decode on device {second if second >= 0 else first}", lands if np.isfinite(lands) else token, finish))
        for name, begin, end in parts:
            if end > begin:
                yield (f'{{"ph":"X","pid":{_REQUESTS},"tid":{i},"name":"{name}","ts":{begin * 1e6:.3f},'
                       f'"dur":{(end - begin) * 1e6:.3f}}}')


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


def write_perfetto(steps: StepTable, gpu: str, path: Path, more: Iterable[str] = ()) -> None:
    """Streamed: a long run's trace never stands in memory. Open it at ui.perfetto.dev. ``more``: events of :func:`way_events`."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in chain(perfetto_events(steps, gpu), more):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")
