"""Make the built-in traces from the published tables: ``python experiments/make_traces.py --data DIR``.

DIR holds the CSVs under the names below, plain or .gz; bullet/workload/data/README.md says where they come from. Only
token counts and arrival times are kept, as compressed arrays that load in milliseconds; values are unchanged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from bullet.config import WorkloadConfig
from bullet.errors import BulletError
from bullet.workload.read import read_trace

# The file; whether its times are meant (Nanoflow's TIMESTAMP is one constant).
TRACES = {
    "azure-code": ("azure_llm_2023_code.csv", True),
    "azure-conv": ("azure_llm_2023_conv.csv", True),
    "sharegpt": ("sharegpt_lengths_nanoflow.csv", False),
    "arxiv": ("arxiv_summarization_long_podattn.csv", False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the published CSVs")
    parser.add_argument("--out", type=Path, default=Path("bullet/workload/data"))
    args = parser.parse_args()
    for name, (file_name, timed) in TRACES.items():
        path = args.data / file_name
        if not path.is_file():
            path = path.with_name(f"{file_name}.gz")
        try:
            table = read_trace(WorkloadConfig(trace=str(path), format="azure" if timed else "csv",
                                              arrival_column=None if timed else ""))
        except BulletError as exc:
            sys.exit(f"make_traces: error: {exc}")
        arrays: dict[str, np.ndarray] = {"prompt_tokens": table.prompt_tokens.astype(np.int32),
                                         "output_tokens": table.output_tokens.astype(np.int32)}
        if table.arrival_s is not None:
            arrays["arrival_s"] = table.arrival_s
        out = args.out / f"{name}.npz"
        np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
        print(f"{name}: {len(table.prompt_tokens)} rows, {out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
