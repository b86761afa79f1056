"""Build profiles/rtx4090/llama-3.1-8b from the published files: kernel tables, one recorded run, its prefix sharing.

    python experiments/make_rtx4090.py --data <folder with kernels/, serving/ and traces/>

Values are as published, times in seconds; SOURCE.md beside the output says where they are from. The rows of unequal contexts
are in experiments/data (a few of a long file): their times are sums over the three runs of a measurement, and are divided by 3.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa

from bullet.devices.table import ATTENTION_AXES, FILE, HEAD_KERNELS
from bullet.devices.table_skew import COLUMNS
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.parquet import write_table
from bullet.units import MICRO

SOURCE = {"source": "LLMServingSim's profile of vLLM 0.19.0 on an RTX 4090", "gpu": "NVIDIA GeForce RTX 4090",
          "engine": "vLLM 0.19.0, CUDA 12.8, bf16, one GPU", "repository": "casys-kaist/LLMServingSim",
          "commit": "5daddb21a545658d5150b535712d0494584b5278", "licence": "MIT, Copyright (c) 2024, CASYS Lab at KAIST"}
SKEW = Path(__file__).parent / "data" / "rtx4090_skew_one_long.csv"
SKEW_SOURCE = {**SOURCE, "source": "LLMServingSim's skew.csv, one longer context of n, RTX 4090",
               "commit": "a09fa560f737a5307a75f8311c1afb749713962f"}
SKEW_RUNS = 3
"""A published time is the sum over so many runs (meta.yaml: measurement_iterations; tests/test_table_skew.py)."""
OUT = Path(__file__).parent.parent / "profiles" / "rtx4090" / "llama-3.1-8b"


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file, gzipped or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return list(csv.DictReader(text.splitlines()))


def kernel_tables(folder: Path) -> pa.Table:
    """All kernels in one tidy table."""
    names = ("kernel", "tokens", "sequences", *ATTENTION_AXES, "seconds")
    data: dict[str, list[object]] = {name: [] for name in names}

    def add(**values: object) -> None:
        for name in names:
            data[name].append(values.get(name))

    def table(kind: str) -> list[dict[str, str]]:
        return rows(folder / f"RTX4090__Llama-3.1-8B__{kind}.csv.gz")

    for row in table("dense"):
        add(kernel=row["layer"], tokens=int(row["tokens"]), seconds=float(row["time_us"]) * MICRO)
    for row in table("per_sequence"):
        assert row["layer"] in HEAD_KERNELS, row
        add(kernel=row["layer"], sequences=int(row["sequences"]), seconds=float(row["time_us"]) * MICRO)
    published = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    for row in table("attention"):
        add(kernel="attention", seconds=float(row["time_us"]) * MICRO,
            **{ours: int(row[theirs]) for ours, theirs in zip(ATTENTION_AXES, published, strict=True)})
    types = {"kernel": pa.string(), "seconds": pa.float64()}
    return pa.table({name: pa.array(data[name], type=types.get(name, pa.int32())) for name in names}, metadata=SOURCE)


def skew_rows(path: Path) -> pa.Table:
    """Decodes of which one has a longer context, and as many with the mean each; one run's seconds of one layer."""
    names = dict(zip(COLUMNS, ("n", "kv_mean", "kv_big", "t_mean_us", "t_skew_us"), strict=True))
    data: dict[str, list[object]] = {name: [] for name in COLUMNS}
    for row in rows(path):
        assert (row["regime"], row["nb"], row["pc"], row["kp"]) == ("pure", "1", "0", "0"), row
        for ours, theirs in names.items():
            whole = not theirs.startswith("t_")
            data[ours].append(int(row[theirs]) if whole else float(row[theirs]) * MICRO / SKEW_RUNS)
    types = {name: pa.float64() if name.endswith("seconds") else pa.int32() for name in COLUMNS}
    return pa.table({name: pa.array(data[name], type=types[name]) for name in COLUMNS}, metadata=SKEW_SOURCE)


def recorded_run(serving: Path, traces: Path) -> tuple[pa.Table, dict[str, object]]:
    """Requests with what happened to them, and the rest of the run as plain data."""
    stem = "llmservingsim_vllm019_RTX4090"
    requests = rows(serving / f"{stem}_llama31_8b_requests.csv.gz")
    shared = {int(r["request"]): r for r in rows(traces / "sharegpt_llama31_300req_sps10_prefix_sharing.csv")}
    trace = rows(traces / "sharegpt_llama31_300req_sps10_llmservingsim.csv")
    assert [(r["input_toks"], r["output_toks"]) for r in requests] == [(r["input_toks"], r["output_toks"]) for r in trace]
    assert [r["request_id"] for r in requests] == [f"bench-{i}" for i in range(len(requests))]
    times = ("client_arrival_s", "queued_s", "scheduled_s", "first_token_s", "last_token_s")
    columns = {
        "id": pa.array(range(len(requests)), type=pa.int32()),
        "prompt_tokens": pa.array([int(r["input_toks"]) for r in requests], type=pa.int32()),
        "output_tokens": pa.array([int(r["output_toks"]) for r in requests], type=pa.int32()),
        **{name: pa.array([float(r[name]) for r in requests]) for name in times},
        "prefix_donor": pa.array([int(shared[i]["donor"]) if i in shared else None for i in range(len(requests))],
                                 type=pa.int32()),
        "prefix_blocks": pa.array([int(shared[i]["shared_full_blocks_of_16"]) if i in shared else None
                                   for i in range(len(requests))], type=pa.int32()),
    }
    meta = json.loads((serving / f"{stem}_llama31_8b_meta.json").read_text())
    peer: dict[str, dict[str, float]] = {}
    for line in (serving / f"{stem}_peer_simulator_summary.txt").read_text().splitlines():
        parts = line.split()
        if len(parts) == 5 and parts[0] in ("TTFT", "TPOT", "Latency"):
            statistic = {"Mean": "mean", "Median": "p50"}.get(parts[1], parts[1].lower())
            peer[f"{parts[0].lower()}_{statistic}"] = {"measured_ms": float(parts[2]), "peer_simulated_ms": float(parts[3]),
                                                       "error_percent": float(parts[4].rstrip("%"))}
    assert len(peer) == 15, sorted(peer)
    series = [{name: float(value) for name, value in row.items()} for row in rows(serving / f"{stem}_llama31_8b_timeseries.csv")]
    columns_of_series = {name: [row[name] for row in series] for name in series[0]}
    return pa.table(columns, metadata=SOURCE), {**SOURCE, "engine_settings": meta, "peer_simulator": peer,
                                                "timeseries": columns_of_series}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    OUT.mkdir(parents=True, exist_ok=True)
    write_table(OUT / FILE, kernel_tables(data / "kernels" / "llmservingsim"))
    write_table(OUT / SKEW_FILE, skew_rows(SKEW))
    requests, run = recorded_run(data / "serving", data / "traces")
    write_table(OUT / "recorded_requests.parquet", requests)
    (OUT / "recorded_run.json").write_text(json.dumps(run, sort_keys=True) + "\n", encoding="utf-8")
    for path in sorted(OUT.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
