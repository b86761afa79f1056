"""Build a profile of tables and one recorded run, profiles/<gpu>/llama-3.1-8b, from the published files.

    python experiments/make_recorded.py --gpu rtx4090 | rtxpro6000 --data <folder with kernels/, serving/ and traces/>

Values are as published, times in seconds; SOURCE.md beside the output says where they are from. The RTX 4090's rows of unequal
contexts are in experiments/data (a few of a long file); published times of those are sums over the three runs of a measurement,
and are divided by 3.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa

from bullet.devices.table import COLUMNS as KERNEL_COLUMNS
from bullet.devices.table import FILE
from bullet.devices.table_skew import COLUMNS
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.parquet import write_table
from bullet.profiles.importers import llmservingsim

NAMES = {"rtx4090": ("RTX4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "12.8"),
         "rtxpro6000": ("RTXPRO6000", "RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "13.0")}
"""Card -> as the publisher's paths have it, for short, the device's name, CUDA."""
SKEW = Path(__file__).parent / "data" / "rtx4090_skew_one_long.csv"
SKEW_COMMIT = {"rtx4090": "a09fa560f737a5307a75f8311c1afb749713962f"}
SKEW_RUNS = 3
"""A published time is the sum over so many runs (meta.yaml: measurement_iterations; tests/test_table_skew.py)."""
PROFILES = Path(__file__).parent.parent / "profiles"


def source_of(gpu: str) -> dict[str, str]:
    """What every file says of itself."""
    _, short, name, cuda = NAMES[gpu]
    return {"source": f"LLMServingSim's profile of vLLM 0.19.0 on an {short}", "gpu": name,
            "engine": f"vLLM 0.19.0, CUDA {cuda}, bf16, one GPU", "repository": llmservingsim.REPOSITORY,
            "commit": llmservingsim.COMMIT, "licence": "MIT, Copyright (c) 2024, CASYS Lab at KAIST"}


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file, gzipped or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return list(csv.DictReader(text.splitlines()))


def kernel_tables(kernels: Path, gpu: str) -> pa.Table:
    """All kernels in one tidy table."""
    if gpu == "rtx4090":
        paths = [kernels / "llmservingsim" / f"RTX4090__Llama-3.1-8B__{kind}.csv.gz" for kind in (
            "dense", "per_sequence", "attention")]
    else:
        folder = kernels / "llmservingsim_folders" / NAMES[gpu][0] / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1"
        paths = [folder / f"{kind}.csv" for kind in ("dense", "per_sequence", "attention")]
    return llmservingsim.as_table(list(llmservingsim.table_rows(*paths)), KERNEL_COLUMNS, source_of(gpu))


def skew_rows(path: Path, gpu: str = "rtx4090") -> pa.Table:
    """Decodes of which one has a longer context, and as many with the mean each; one run's seconds of one layer."""
    source = source_of(gpu)
    return llmservingsim.as_table(llmservingsim.skew_rows(path, SKEW_RUNS), COLUMNS, {
        **source, "source": f"LLMServingSim's skew.csv, one longer context of n, {NAMES[gpu][1]}",
        "commit": SKEW_COMMIT.get(gpu, source["commit"])})


def recorded_run(serving: Path, traces: Path, gpu: str) -> tuple[pa.Table, dict[str, object]]:
    """Requests with what happened to them, and the rest of the run as plain data."""
    stem, source = f"llmservingsim_vllm019_{NAMES[gpu][0]}", source_of(gpu)
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
    # What one run's settings say and another's do not is there, as null.
    meta = {"kv_cache": None, "hardware": None, **json.loads((serving / f"{stem}_llama31_8b_meta.json").read_text())}
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
    return pa.table(columns, metadata=source), {**source, "engine_settings": meta, "peer_simulator": peer,
                                                "timeseries": columns_of_series}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", choices=sorted(NAMES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    data, gpu = args.data, args.gpu
    out = PROFILES / gpu / "llama-3.1-8b"
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / FILE, kernel_tables(data / "kernels", gpu))
    published = data / "kernels" / "llmservingsim_folders" / NAMES[gpu][0] / "meta-llama/Llama-3.1-8B/bf16/tp1/skew.csv"
    write_table(out / SKEW_FILE, skew_rows(SKEW if gpu == "rtx4090" else published, gpu))
    requests, run = recorded_run(data / "serving", data / "traces", gpu)
    write_table(out / "recorded_requests.parquet", requests)
    (out / "recorded_run.json").write_text(json.dumps(run, sort_keys=True) + "\n", encoding="utf-8")
    for path in sorted(out.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
