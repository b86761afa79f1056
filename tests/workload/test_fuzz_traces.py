"""Every format of traces, on files that something has damaged: a table, or one printable line.

Deterministic, and by the mutations of tests/test_fuzz_readers.py; ``BULLET_MUTATIONS`` tries more.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bullet.config import WorkloadConfig
from bullet.workload import load_workload
from bullet.workload.formats.bench import measured_figures
from bullet.workload.report import inspect_lines, run_lines
from tests.test_fuzz_readers import MUTATIONS, besiege, mutated, refused

ROWS = [(0.0, 130, 5), (0.5, 40, 7), (2.25, 300, 1)]
MOONCAKE = [{"timestamp": int(1000 * t), "input_length": p, "output_length": o, "hash_ids": [0, i]} for i, (t, p, o)
            in enumerate(ROWS)]
BENCH = {"date": "20260101-000000", "backend": "vllm", "request_rate": 4.0, "duration": 9.0, "completed": 3, "failed": 0,
         "request_throughput": 0.22, "mean_ttft_ms": 12.5, "input_lens": [10, 20, 30], "output_lens": [1, 2, 3],
         "start_times": [5.0, 6.0, 7.5], "errors": ["", "", ""]}


def csv(header: str, row: Callable[[float, int, int], str]) -> str:
    return header + "\n" + "".join(row(*values) + "\n" for values in ROWS)


FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("t.csv", csv("arrival_s,prompt_tokens,output_tokens", lambda t, p, o: f"{t},{p},{o}"), {}),
    "quoted": ("t.csv", csv("arrival_s,input_len,output_len,text", lambda t, p, o: f'{t},{p},{o},"a ""b"",\nc"'), {}),
    "two clocks": ("t.csv", csv("arrival_s,timestamp_ms,input_len,output_len", lambda t, p, o: f"{t},{1000 * t},{p},{o}"), {}),
    "azure": ("t.csv", csv("TIMESTAMP,ContextTokens,GeneratedTokens",
                           lambda t, p, o: f"2023-11-16 18:17:{t:010.7f},{p},{o}"), {}),
    "burstgpt": ("t.csv", csv("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
                              lambda t, p, o: f"{t},GPT-4,{p},{o},{p + o},API log"), {"skip_failed": True}),
    "splitwise": ("t.csv", csv("request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
                               lambda t, p, o: f"{p},2,0,{t},1,{p},{o}"), {}),
    "blis": ("t.csv", csv("request_id,prefix_group,prefix_length,input_tokens,output_tokens,server_input_tokens,arrival_time_us,"
                          "status,error_message", lambda t, p, o: f"{p},a,64,{p},{o},{p + 64},{1e6 * t:.0f},ok,"), {}),
    "vidur": ("t.csv", csv("arrived_at,num_prefill_tokens,num_decode_tokens", lambda t, p, o: f"{t},{p},{o}"), {}),
    "mooncake": ("t.jsonl", "".join(json.dumps(row) + "\n" for row in MOONCAKE), {"format": "mooncake"}),
    "bailian": ("t.jsonl", "".join(json.dumps({"chat_id": i, "parent_chat_id": -1, **row, "type": "text", "turn": 1}) + "\n"
                                   for i, row in enumerate(MOONCAKE)), {}),
    "llmservingsim": ("t.jsonl", "".join(json.dumps({"input_toks": p, "output_toks": o, "arrival_time_ns": int(1e9 * t),
                                                     "input_tok_ids": [1, 2]}) + "\n" for t, p, o in ROWS), {}),
    "array": ("t.json", json.dumps([{"arrival_s": t, "input_len": p, "output_len": o} for t, p, o in ROWS], indent=1), {}),
    "benchmark": ("t.json", json.dumps(BENCH), {})}


def read(path: Path, options: dict[str, Any]) -> None:
    """All that a command does with a trace: what is printed of it is one line each, its requests can be served."""
    config = WorkloadConfig(trace=str(path), arrivals="recorded", num_requests=None, **options)
    workload = load_workload(config, 0)
    assert (np.diff(workload.arrival_s) >= 0).all()
    assert np.isfinite(workload.arrival_s).all()
    assert min(workload.prompt_tokens.min(), workload.output_tokens.min()) >= 1
    for line in [*inspect_lines(config), *run_lines(workload, config)]:
        assert line.isprintable(), repr(line)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_trace_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file, text, options = FILES[name]
    besiege(tmp_path / file, text.encode(), lambda path: read(path, options), MUTATIONS)


def test_a_damaged_result_of_a_benchmark_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Beside simulated rows: what comes of it is numbers or nothing."""
    path = tmp_path / "t.json"

    def figures(path: Path) -> None:
        from bullet.results.tables import measured_row

        measured_row(measured_figures(path), path)

    besiege(path, json.dumps(BENCH).encode(), figures, MUTATIONS)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_a_damaged_archive_is_read_or_refused_in_one_line(ending: str, tmp_path: Path) -> None:
    """The packed bytes themselves are struck."""
    data = FILES["plain"][1].encode()
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress,
                                                 ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True)}
    besiege(tmp_path / f"t.csv{ending}", pack[ending](data), lambda path: read(path, {}), MUTATIONS)


def test_a_damaged_parquet_trace_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    times, prompts, outputs = (list(column) for column in zip(*ROWS, strict=True))
    pq.write_table(pa.table({"arrival_s": times, "input_len": prompts, "output_len": outputs}), path)
    good, told = path.read_bytes(), 0
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(good, random.Random(seed)))
        told += refused(path, lambda path: read(path, {})) is not None
    assert told > MUTATIONS / 2


def test_a_flipped_bit_of_a_runs_own_requests_is_never_another_request(tmp_path: Path) -> None:
    from bullet.api import simulate

    simulate({"workload.num_requests": 5, "policy.name": "vllm-1024"}, out=tmp_path / "run", report=False)
    path = tmp_path / "run" / "requests.parquet"
    good, told = path.read_bytes(), 0
    config = WorkloadConfig(trace=str(path), arrivals="recorded", num_requests=None)
    rows = load_workload(config, 0).prompt_tokens.tolist()
    for seed in range(200):
        at = random.Random(seed).randrange(8 * len(good))
        path.write_bytes(good[:at // 8] + bytes([good[at // 8] ^ (1 << at % 8)]) + good[at // 8 + 1:])

        def same(path: Path) -> None:
            assert load_workload(config, 0).prompt_tokens.tolist() == rows

        told += refused(path, same) is not None
    assert told > 180


@pytest.mark.parametrize("odd", [
    pa.array([None, 1, 2]), pa.array([True, False, True]), pa.array(["1", "", "\x1b[2J"]), pa.array([b"\xff", b"", b"1"]),
    pa.array([[1], [2], None]), pa.array([{"a": 1}] * 3), pa.array([2**62] * 3), pa.array([2**64 - 1] * 3, pa.uint64()),
    pa.array([float("nan"), float("inf"), -1e308]), pa.array([2**50] * 3, pa.timestamp("s")),
    pa.array([2**31 - 1] * 3, pa.date32()), pa.array([2**62] * 3, pa.duration("s")), pa.array([1, 2, 3], pa.decimal128(38, 0)),
    pa.nulls(3), pa.array([0, 0, 0], pa.int8()),
    pa.array(["a", "b", "a"]).dictionary_encode()], ids=lambda odd: str(odd.type))
def test_an_odd_column_is_read_or_refused_in_one_line(odd: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    times, prompts, outputs = (list(column) for column in zip(*ROWS, strict=True))
    good = {"arrival_s": times, "input_len": prompts, "output_len": outputs}
    for name in good:
        pq.write_table(pa.table(good | {name: odd}), path)
        refused(path, lambda path: read(path, {}))
        refused(path, lambda path: read(path, {"arrival_unit": "ms"}))
