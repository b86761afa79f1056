"""Make the built-in traces from the published tables: ``python experiments/make_traces.py --data DIR``.

Only token counts and arrival times are kept, as compressed arrays that load in milliseconds; values are unchanged.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from pathlib import Path

import numpy as np

TRACES = {
    "azure-code": ("azure_llm_2023_code.csv.gz", "ContextTokens", "GeneratedTokens", "arrival_s"),
    "azure-conv": ("azure_llm_2023_conv.csv.gz", "ContextTokens", "GeneratedTokens", "arrival_s"),
    "sharegpt": ("sharegpt_lengths_nanoflow.csv.gz", "ContextTokens", "GeneratedTokens", None),
    "arxiv": ("arxiv_summarization_long_podattn.csv.gz", "num_prefill_tokens", "num_decode_tokens", None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the published CSVs")
    parser.add_argument("--out", type=Path, default=Path("bullet/workload/data"))
    args = parser.parse_args()
    for name, (file_name, prompt, output, arrival) in TRACES.items():
        path = args.data / file_name
        if not path.is_file():
            sys.exit(f"make_traces: error: no file {path}")
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        arrays = {"prompt_tokens": np.array([int(r[prompt]) for r in rows], dtype=np.int32),
                  "output_tokens": np.array([int(r[output]) for r in rows], dtype=np.int32)}
        if arrival:
            arrays["arrival_s"] = np.array([float(r[arrival]) for r in rows])
        np.savez_compressed(args.out / f"{name}.npz", **arrays)
        print(f"{name}: {len(rows)} rows, {(args.out / f'{name}.npz').stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
