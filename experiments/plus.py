"""``bullet-plus`` beside ``bullet`` and the best fixed split of each workload: ``python experiments/plus.py [--seeds 8]``.

The 13 points of Fig. 15 and the 12 named workloads in which sharing is hard; simulated, Llama-3.1-8B on one A100-80GB. Figures
are of the steady window (first 20 % and last 10 % of the time of arrivals cut), attainment under the mean-length reading;
differences are paired by seed, with half their 95 % interval. The fixed split is the best of ``FIXED`` by mean attainment, in
hindsight.

``bullet-plus``'s parameters were chosen on the workloads marked ``train`` alone. ``--ablate``: each of its parts off, on these.
Runs are kept in ``--cache``: the same command again runs what is missing. Seeds come one after the other, so that a run that was
stopped can be read with fewer (``--seeds``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bullet.config import RunConfig, load_run_config
from bullet.sweeps.cache import DEFAULT, Cache, key_of
from bullet.sweeps.intervals import interval, paired
from bullet.sweeps.pool import Pool, Progress
from bullet.workload.named import named

TRAIN = ("azure-code 5", "azure-code 5.5", "sharegpt 15", "sharegpt 20", "arxiv 0.6", "arxiv 0.8", "arxiv 0.9",
         "turns-calm", "turns-fast", "turns-azure", "day-chat", "bursts-code", "bursts-long")
TEST = ("azure-code 4", "azure-code 4.5", "sharegpt 10", "sharegpt 25", "arxiv 0.5", "arxiv 0.7",
        "turns", "turns-slow", "turns-long", "day-code", "day-long", "bursts-chat")
FIXED = (4, 12, 24, 36, 48, 60)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {"bullet": ("bullet", {}), "plus": ("bullet-plus", {})}
ARMS |= {f"d={d}": ("bullet", {"fixed_decode_sms": d}) for d in FIXED}
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "no throughput split": ("bullet-plus", {"throughput_split": False}),
    "TPOT by P90": ("bullet-plus", {"tpot_one_in": 10}),
    "batches to the ridge": ("bullet-plus", {"batch_tokens": 0}),
    "late by arrival": ("bullet-plus", {"late": "arrival"}),
    "overdue strictly first": ("bullet-plus", {"overdue_every": 1}),
    "bullet, as it was": ("bullet", {"decode_floor": 1 / 9, "hand_over": "batch"}),
}
FIGURES = {"att": ("steady.slo_attainment_mean_length", 1.0), "TTFT": ("steady.mean_ttft_ms", 1e-3),
           "P99": ("steady.p99_ttft_ms", 1e-3), "TPOT": ("steady.mean_tpot_ms", 1.0)}
Figures = Mapping[str, Any]


def config_of(workload: str, arm: tuple[str, Mapping[str, Any]], seed: int, requests: int) -> RunConfig:
    """One run."""
    trace, _, rate = workload.partition(" ")
    keys: dict[str, Any] = {"workload.trace": trace, "workload.rate_req_per_s": float(rate)} if rate else named(workload)
    policy, options = arm
    return load_run_config(None, keys | {"policy.name": policy, "seed": seed, "workload.num_requests": requests} | {
        f"policy.options.{name}": value for name, value in options.items()})


def values(runs: Sequence[Figures], figure: str) -> list[float]:
    key, factor = FIGURES[figure]
    return [run[key] * factor for run in runs]


def print_table(found: Mapping[tuple[str, str], Sequence[Figures]], workloads: Sequence[str]) -> None:
    """A workload a line; then means and counts."""
    print(f"{'workload':<15} {'half':<5} {'growth':<10} | {'att bullet':>10} {'plus':>6} {'plus - bullet':>15} | {'best d':>7} "
          f"{'att':>6} {'plus - it':>15} | {'TTFT s':>8} {'plus':>8} {'diff':>14} | {'P99 s':>7} {'plus':>7} {'diff':>14} | "
          f"{'TPOT':>5} {'plus':>5}")
    gains: dict[str, list[float]] = {"train": [], "test": []}
    counts = dict.fromkeys(("att worse", "att worse than d", "TTFT worse", "P99 worse", "TTFT above", "P99 above"), 0)
    rows = 0
    for workload in workloads:
        bullet, plus = found.get((workload, "bullet"), ()), found.get((workload, "plus"), ())
        n = min(len(bullet), len(plus))
        if not n:
            continue
        rows += 1
        bullet, plus = bullet[:n], plus[:n]
        half = "train" if workload in TRAIN else "test"
        diff = {name: paired(values(plus, name), values(bullet, name)) for name in FIGURES}
        mean = {name: (np.mean(values(bullet, name)), np.mean(values(plus, name))) for name in FIGURES}
        gains[half].append(diff["att"].mean)
        fixed = {arm: runs for (w, arm), runs in found.items() if w == workload and arm.startswith("d=") and runs}
        best = max(fixed, key=lambda arm: float(np.mean(values(fixed[arm], "att"))), default=None)
        against = "-", "-", "-"
        if best is not None:
            m = min(n, len(fixed[best]))
            less = paired(values(plus[:m], "att"), values(fixed[best][:m], "att"))
            against = best, f"{np.mean(values(fixed[best][:m], 'att')):.3f}", less.text("+.3f")
            counts["att worse than d"] += less.mean + (less.half_width or 0.0) < 0
        for name, worse in (("TTFT", "TTFT"), ("P99", "P99")):
            counts[f"{worse} worse"] += diff[name].mean - (diff[name].half_width or 0.0) > 0
            counts[f"{worse} above"] += diff[name].mean > 0
        counts["att worse"] += diff["att"].mean + (diff["att"].half_width or 0.0) < 0
        growth = max({run["steady.growth"] or "-" for run in plus}, key=[run["steady.growth"] or "-" for run in plus].count)
        print(f"{workload:<15} {half:<5} {growth:<10} | {mean['att'][0]:>10.3f} {mean['att'][1]:>6.3f} "
              f"{diff['att'].text('+.3f'):>15} | {against[0]:>7} {against[1]:>6} {against[2]:>15} | "
              f"{mean['TTFT'][0]:>8.2f} {mean['TTFT'][1]:>8.2f} "
              f"{diff['TTFT'].text('+.2f'):>14} | {mean['P99'][0]:>7.1f} {mean['P99'][1]:>7.1f} {diff['P99'].text('+.1f'):>14} | "
              f"{mean['TPOT'][0]:>5.0f} {mean['TPOT'][1]:>5.0f}")
    for half, own in gains.items():
        if own:
            print(f"mean gain in attainment, {half}: {np.mean(own):+.4f} over {len(own)} workloads")
    print(f"of {rows}: " + ", ".join(f"{name} {count}" for name, count in counts.items())
          + "   (worse: beyond the interval; above: by the mean)")


def print_ablation(found: Mapping[tuple[str, str], Sequence[Figures]], workloads: Sequence[str]) -> None:
    """Each part off, less the whole: attainment, and the ratio of mean and P99 TTFT, means over workloads and seeds."""
    print(f"\n{'part off':<24} {'workloads':>9} {'att':>16} {'TTFT x':>8} {'P99 x':>8}")
    for arm in ABLATIONS:
        there = [w for w in workloads if found.get((w, arm)) and found.get((w, "plus"))]
        if not there:
            continue
        att, ttft, p99 = [], [], []
        for w in there:
            n = min(len(found[w, arm]), len(found[w, "plus"]))
            off, on = found[w, arm][:n], found[w, "plus"][:n]
            att.append(float(np.mean(values(off, "att")) - np.mean(values(on, "att"))))
            for ratios, name in ((ttft, "TTFT"), (p99, "P99")):
                ratios.append(float(np.mean(values(off, name)) / np.mean(values(on, name))))
        print(f"{arm:<24} {len(there):>9} {interval(att).text('+.4f'):>16} {np.exp(np.mean(np.log(ttft))):>8.3f} "
              f"{np.exp(np.mean(np.log(p99))):>8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--fixed-seeds", type=int, help="of the fixed splits (default: as --seeds)")
    parser.add_argument("--num-requests", type=int, default=4000)
    parser.add_argument("--workloads", default=",".join((*TRAIN, *TEST)))
    parser.add_argument("--ablate", type=int, default=0, metavar="SEEDS", help="parts off, on the training half")
    parser.add_argument("--cache", type=Path, default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--read", action="store_true", help="run nothing: what is kept already")
    args = parser.parse_args()
    workloads = args.workloads.split(",")
    fixed_seeds = args.seeds if args.fixed_seeds is None else args.fixed_seeds
    wanted: dict[str, tuple[str, str, RunConfig]] = {}

    def want(arms: Mapping[str, tuple[str, Mapping[str, Any]]], seeds: int, where: Sequence[str]) -> None:
        for seed in range(seeds):
            for workload in where:
                for name, arm in arms.items():
                    config = config_of(workload, arm, seed, args.num_requests)
                    wanted[key_of(config)] = workload, name, config

    pair = {name: ARMS[name] for name in ("bullet", "plus")}
    want(pair, args.seeds, workloads)
    want({name: arm for name, arm in ARMS.items() if name not in pair}, fixed_seeds, workloads)
    want(ABLATIONS, args.ablate, [w for w in workloads if w in TRAIN])

    def tell(progress: Progress) -> None:
        left = "" if progress.left_s is None else f", {progress.left_s / 60:.0f} min left"
        print(f"\r{progress.done} of {progress.total}{left}   ", end="", file=sys.stderr, flush=True)

    cache = Cache(args.cache)
    if args.read:
        records = {key: record for key in wanted if (record := cache.get(key)) is not None}
    else:
        records = Pool(cache, args.jobs, progress=tell).run({key: config for key, (_, _, config) in wanted.items()})
    found: dict[tuple[str, str], list[Figures]] = {}
    for key, (workload, name, _) in wanted.items():
        record = records.get(key)
        if record is not None and "figures" in record:
            found.setdefault((workload, name), []).append(record["figures"])
        elif record is not None:
            print(f"{workload}, {name}: {record['error']}", file=sys.stderr)
    print(f"simulated, A100-80GB fitted device, Llama-3.1-8B; {args.num_requests} requests, up to {args.seeds} seeds")
    print_table(found, workloads)
    print_ablation(found, workloads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
