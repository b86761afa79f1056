"""Wall time and memory of the simulator, by hand: ``python benchmarks/speed.py [--runs 5]``.

5,000 azure-conv requests, Poisson 6.45 req/s, on one core. Each figure is the median of the runs, each run a fresh
process: requests simulated per second of wall time after import and loading, mean decision, and the whole command
without plots with its peak memory (the operating system's own accounting of the finished child).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSIDE = """
import json, sys, time
from bullet.config import load_run_config
from bullet.sim.run import simulate
from bullet.workload import load_workload
from bullet.devices.load import load_device
import bullet.policies.bullet, bullet.policies.chunked, bullet.policies.vllm
config = load_run_config(None, json.loads(sys.argv[1]))
workload, device = load_workload(config.workload, config.seed), load_device(config.device)
started = time.perf_counter()
outcome = simulate(config, workload=workload, device=device)
wall_s = time.perf_counter() - started
print(json.dumps({"req_per_s": len(workload.arrival_s) / wall_s, "wall_s": wall_s,
                  "steps": len(outcome.steps), "decision_us": outcome.decision_wall_s / outcome.decisions * 1e6}))
"""


def one_core() -> None:
    """Keep the child on one processor, as the figures say."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def inside(policy: str, rate: float, requests: int) -> dict[str, float]:
    """One simulation in a fresh process, timed from after import and loading."""
    overrides = {"workload.trace": "azure-conv", "workload.rate_req_per_s": rate, "workload.num_requests": requests,
                 "policy.name": policy}
    done = subprocess.run([sys.executable, "-c", INSIDE, json.dumps(overrides)], check=True, capture_output=True,
                          text=True, preexec_fn=one_core)
    return json.loads(done.stdout)


def whole(arguments: list[str]) -> tuple[float, float]:
    """Wall seconds and peak MB of one whole command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "bullet-sim"), *arguments]
        if "--help" not in arguments:
            command += ["--out", str(Path(folder) / "run")]
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=one_core)  # noqa: PLW1509 - no threads here
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
        return time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    load = ["--trace", "azure-conv", "--rate", "6.45", "--num-requests", "5000", "--no-report", "--quiet"]
    print(f"{'policy':<12} {'req/s':>8} {'steps':>8} {'us/step':>8} {'us/decision':>12} {'command s':>10} {'MB':>6}")
    for policy in ("vllm-1024", "sglang-1024", "bullet"):
        rows = [inside(policy, 6.45, 5000) for _ in range(runs)]
        commands = [whole(["run", "--policy", policy, *load]) for _ in range(runs)]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        seconds, megabytes = (statistics.median(column) for column in zip(*commands, strict=True))
        print(f"{policy:<12} {middle['req_per_s']:>8.0f} {middle['steps']:>8.0f} "
              f"{middle['wall_s'] / middle['steps'] * 1e6:>8.2f} {middle['decision_us']:>12.2f} {seconds:>10.2f} "
              f"{megabytes:>6.0f}")
    helps = [whole(["--help"])[0] for _ in range(runs)]
    print(f"bullet-sim --help: {statistics.median(helps):.3f} s")
    print(f"python {sys.version.split()[0]}, median of {runs}, one core; peak memory of the driver process "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB is not included")


if __name__ == "__main__":
    main()
