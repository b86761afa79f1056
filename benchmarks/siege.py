"""Random configurations, the files of each run checked for the invariants, by hand: ``python benchmarks/siege.py [--runs N]``.

Traces, models, GPUs, policies and their options, KV sizes, noise and SLOs are drawn by a run's number, so that ``--first N
--runs 1`` repeats run N. Workers are processes, each run in a folder of its own, and what is checked is read back from there:
requests.parquet, steps.parquet, summary.json and config.toml. The numbers of runs that broke an invariant, raised or hung are
printed and their folders kept; ``--log`` appends each run's line to a file and leaves out, next time, what stands in it.

From files alone: I1 and I2 (each request once, with its tokens), I3 (no first token before arrival + the least prefill), I4
(blocks used within all; their peak), I5 (SMs within N; shares add up to one), I6 (steps as they end, a lane's never overlap), I7
(each 16th run anew: the same bytes), I8 (the whole device never idles while a request that will be served is there), I9 and I10
(a lone request takes its steps' seconds, without a gap), I11 (the queue at launches against the requests that wait then).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from bullet.api import load_run, simulate
from bullet.catalog.models import get_model
from bullet.devices.load import load_device

ANEW = 16
"""Each so-manyth run is run twice."""
CPU_LIMIT_S = 120.0
"""A run of this size that takes longer hangs."""
ONE_LANE = ("vllm-64", "vllm-512", "vllm-2048", "sglang-64", "sglang-512", "sglang-1024", "sglang-64-mixed", "sglang-512-mixed")
TWO_LANES = ("bullet", "bullet", "bullet", "bullet-literal", "static-96", "static-54", "naive")
PAIRS = (("tiny", "a100-80gb"), ("llama-3.1-8b", "a100-80gb"), ("llama-3.1-8b", "h100"), ("qwen3-32b", "h20"))
BULLET_OPTIONS: dict[str, tuple[Any, ...]] = {
    "layers_per_step": (1, 2, 8), "decode_floor": (0.0, 0.5), "cap_next_step": (False,), "order": ("fcfs", "normalised"),
    "late_first": (True,), "late_patience": (0.0, 2.0), "repair": (False,), "hand_over": ("off", "queue"),
    "delayed_decode": (False,), "delay_limit": (0.0, 3.0), "fixed_decode_sms": (24,), "partition": (False,)}
VLLM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (1, 3, 64), "prefix_cache": (True,), "admission": ("check", "chunk"), "steps_in_flight": (2,),
    "resume": ("back",)}


def draw(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """One configuration; its trace is written to ``folder``."""
    rng = np.random.default_rng([seed, number])

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    count = int(one_of(1, 2, 8, 30, 30, 80, 80, 200))
    gaps = rng.exponential(one_of(0.0, 1e-3, 0.02, 0.2, 2.0), count) * (rng.random(count) < one_of(0.1, 0.5, 1.0))
    prompts = np.clip(rng.lognormal(one_of(2.0, 4.5, 6.5), one_of(0.1, 1.2), count), 1, 20_000).astype(int)
    outputs = np.clip(rng.lognormal(one_of(0.3, 2.0, 4.0), 1.0, count), 1, 600).astype(int)
    at_s = np.cumsum(gaps)
    if at_s[-1] < count / 1e5:  # over 100,000 a second is refused as another unit's; at one instant is not
        at_s[:] = 0.0
    rows = zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    trace = folder / "trace.csv"
    lines = "".join(f"{t!r},{p},{o}\n" for t, p, o in rows)
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{lines}", encoding="utf-8")
    policy = str(one_of(*ONE_LANE, *TWO_LANES))
    model, gpu = one_of(*PAIRS)
    if policy.startswith("static") and gpu == "h20":
        policy = "static-54"
    largest = int((prompts + outputs).max())
    chosen: dict[str, Any] = {
        "workload.trace": str(trace), "policy.name": policy, "device.model": model, "device.gpu": gpu,
        "seed": int(rng.integers(5)), "device.noise_std": one_of(0.0, 0.0, 0.05, 0.3), "debug": bool(rng.random() < 0.5)}
    if rng.random() < 0.7:
        chosen["workload.arrivals"] = "recorded"
    else:
        chosen |= {"workload.arrivals": one_of("poisson", "constant", "gamma"), "workload.num_requests": count,
                   "workload.rate_req_per_s": one_of(0.5, 5.0, 50.0)}
    if rng.random() < 0.6:
        chosen["device.kv_tokens"] = max(16, int(one_of(16, largest, largest + 64, 2 * largest, 5 * largest + 500)))
    if rng.random() < 0.3:
        chosen |= {"slo.tpot_s": one_of(0.005, 0.02, 1.0), "slo.ttft_s_per_token": one_of(1e-5, 1e-3, 1.0)}
    if policy in TWO_LANES:
        chosen |= {"device.publish_delay_s": one_of(0.0, 0.21e-3, 0.05), "device.reconfigure_s": one_of(0.0, 4.1e-6, 0.01),
                   "device.contention_scale": one_of(0.0, 1.0, 4.0), "device.shared_prefill_share": one_of(0.25, 0.5, 0.95)}
    if policy.startswith("bullet"):
        chosen |= {"policy.estimator": one_of("srm", "srm", "srm-blind", "oracle"),
                   "policy.estimator_error": one_of(1.0, 0.5, 2.0), "slo.ttft_slo_policy": one_of("mean_length", "per_request")}
    options = BULLET_OPTIONS if policy.startswith("bullet") else VLLM_OPTIONS if policy.startswith("vllm") else {}
    for name in sorted(options):
        if rng.random() < 0.15:
            chosen[f"policy.options.{name}"] = one_of(*options[name])
    if policy.startswith("vllm"):  # a check of blocks by name takes a time with the cache, and a tiny model's has millions
        chosen.setdefault("device.kv_tokens", 20 * largest + 500)
    if policy == "vllm-64":
        chosen.setdefault("policy.options.max_num_seqs", 64)
    return chosen


def broken(folder: Path) -> list[str]:
    """The invariants that a run folder breaks, in words."""
    found: list[str] = []

    def hold(name: str, holds: Any) -> None:
        if not np.all(holds):
            found.append(name)

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    run = load_run(folder)
    config, requests, steps = run.config, run.request_table, run.step_table
    status, n = requests["status"], summary["num_sms"]
    done = status == "finished"
    prompts, outputs, made = requests["prompt_tokens"], requests["output_tokens"], requests["generated_tokens"]
    hold("I1: each request once", np.array_equal(np.sort(requests["id"]), np.arange(summary["offered"])))
    hold("I1: counts", summary["offered"] == summary["completed"] + summary["rejected"] + summary["unfinished"])
    hold("I1: counts are the rows'", (summary["completed"], summary["rejected"]) == (done.sum(), (status == "rejected").sum()))
    hold("I1: nobody unfinished", summary["complete"] and not summary["unfinished"])
    context, blocks = get_model(config.device.model).context_tokens, summary["kv_blocks"]
    served = (prompts + outputs <= context) & (-(-(prompts + outputs - 1) // 16) <= blocks)
    hold("I1: refused is what cannot be served", done == served)
    hold("I2: tokens", (made == np.where(done, outputs, 0)) & (requests["reason"] == "") == done)
    arrival, admitted, first, finish = (requests[name][done] for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s"))
    hold("I3: order", (arrival <= admitted) & (admitted < first) & ((first < finish) == (outputs[done] > 1)) & (first <= finish))
    start, end, lane, sms = steps["start_s"], steps["end_s"], steps["lane"], steps["sms"]
    if not config.device.noise_std:
        device = load_device(config.device)
        least = np.array([device.min_prefill_seconds(int(p)) for p in prompts[done]])
        hold("I3: first token before the least prefill", first - arrival >= least * (1 - 1e-12))
    hold("I4: blocks", (steps["kv_used_blocks"] > 0) & (steps["kv_used_blocks"] <= blocks))
    # A cache with names also counts what was planned and preempted within a step.
    hold("I4: peak", (steps["kv_used_blocks"].max() if len(steps) else 0) <= summary["kv_peak_blocks"] <= blocks)
    hold("I5: shares", not len(steps) or abs(sum(summary["sm_share"].values()) - 1) < 1e-6)
    hold("I5: SMs", (sms > 0) & (sms <= n))
    hold("I6: in order of their ends", np.diff(end) >= 0)
    hold("I6: seconds", (end > start) & (np.abs(end - start - steps["actual_s"]) <= 1e-9 * (1 + end)))
    for name in set(lane):
        mine = lane == name
        hold(f"I6: steps of {name} overlap", start[mine][1:] >= end[mine][:-1])
    if len(steps):
        order = np.argsort(start, kind="stable")
        reach = np.maximum.accumulate(end[order])
        gap = np.flatnonzero(start[order][1:] > reach[:-1])
        for begin, until in zip(reach[gap].tolist(), start[order][1:][gap].tolist(), strict=True):
            # An arrival is noticed at once; one exactly at ``until`` ends the gap.
            hold(f"I8: idle from {begin} to {until}", (finish <= begin) | (arrival >= until))
        waits = (arrival[:, None] < start) & (admitted[:, None] > start)
        if not summary["preemptions"] and len(start) * len(arrival) < 4_000_000:
            exact = ~np.isin(start, arrival) & ~np.isin(start, admitted)
            behind = config.policy.options.get("steps_in_flight", 1) == 2  # decided, and counted, a step ahead
            hold("I11: queue", behind or np.array_equal(steps["queue"][exact], waits.sum(axis=0)[exact]))
    if summary["offered"] == 1 and done.all():
        hold("I10: a lone request's seconds", abs(finish[0] - arrival[0] - float((end - start).sum())) <= 1e-9 * (1 + finish[0]))
    return found


def attempt(number: int, seed: int, folder: Path) -> tuple[list[str], float, float]:
    """Run one, check its files; what broke, CPU seconds and seconds."""
    folder.mkdir(parents=True)
    began_s, problems = (time.process_time(), time.perf_counter()), []
    spent_s = (0.0, 0.0)
    try:
        chosen = draw(number, seed, folder)
        try:
            simulate(chosen, out=folder / "run", report=False)
        finally:
            spent_s = time.process_time() - began_s[0], time.perf_counter() - began_s[1]
        problems = broken(folder / "run")
        if number % ANEW == 0:
            simulate(chosen, out=folder / "anew", report=False)
            for path in sorted((folder / "run").iterdir()):
                if path.name != "timing.json" and path.read_bytes() != (folder / "anew" / path.name).read_bytes():
                    problems.append(f"I7: {path.name} differs")
    except Exception:
        (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
        problems.append(traceback.format_exc().strip().splitlines()[-1])
    if not problems:
        shutil.rmtree(folder)
    return problems, *spent_s


def work(numbers: Any, told: Any, seed: int, root: Path) -> None:
    """One worker: says what it begins, and what came of it."""
    for number in iter(numbers.get, None):
        told.put((os.getpid(), number, None, time.process_time(), 0.0))
        told.put((os.getpid(), number, *attempt(number, seed, root / str(number))))


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Exit status 1 if a run broke an invariant, raised or hung."""
    parser = argparse.ArgumentParser(description="Random configurations against the invariants.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit-s", type=float, help="begin no run after so many seconds")
    parser.add_argument("--log", type=Path, help="a line a run; numbers in it are left out (resume)")
    args = parser.parse_args()
    known: set[int] = set()
    if args.log and args.log.exists():
        known = {int(line.split()[1]) for line in args.log.read_text(encoding="utf-8").splitlines()
                 if int(line.split()[0]) == args.seed}
    todo = [number for number in range(args.first, args.first + args.runs) if number not in known]
    root = Path(tempfile.mkdtemp(prefix="siege-"))
    context = multiprocessing.get_context("spawn")
    numbers, told = context.Queue(), context.Queue()
    started_s, given, finished, failed, slow = time.perf_counter(), 0, 0, {}, 0
    workers: dict[int, Any] = {}
    running: dict[int, tuple[int, float]] = {}

    def hire() -> None:
        worker = context.Process(target=work, args=(numbers, told, args.seed, root), daemon=True)
        worker.start()
        workers[worker.pid or 0] = worker

    def give() -> None:
        nonlocal given
        if given < len(todo) and not (args.limit_s and time.perf_counter() - started_s > args.limit_s):
            numbers.put(todo[given])
            given += 1

    for _ in range(min(args.workers, len(todo))):
        hire()
        give()
    while finished < given:
        try:
            pid, number, problems, cpu_s, wall_s = told.get(timeout=5)
        except Exception:  # nobody said anything: does one hang?
            for pid, (number, begun_s) in list(running.items()):
                if not workers[pid].is_alive() or cpu_seconds(pid) - begun_s > CPU_LIMIT_S:
                    workers.pop(pid).kill()
                    del running[pid]
                    failed[number] = ["hangs, or its process died"]
                    finished += 1
                    print(f"run {number}: {failed[number][0]}; in {root / str(number)}", flush=True)
                    hire()
                    give()
            continue
        if problems is None:
            running[pid] = number, cpu_s
            continue
        running.pop(pid, None)
        finished += 1
        slow += wall_s > 2 * cpu_s + 0.05
        if problems:
            failed[number] = problems
            print(f"run {number}: {'; '.join(problems[:3])}; in {root / str(number)}", flush=True)
        if args.log:
            with args.log.open("a", encoding="utf-8") as log:
                log.write(f"{args.seed} {number} {cpu_s:.3f} {wall_s:.3f} {'; '.join(problems) or 'sound'}\n")
        give()
        if finished % 500 == 0:
            print(f"{finished} runs, {len(failed)} failed, {time.perf_counter() - started_s:.0f} s", flush=True)
    for _ in workers:
        numbers.put(None)
    print(f"{finished} runs with seed {args.seed} ({len(known)} known before): {len(failed)} failed {sorted(failed)}; "
          f"{slow} took more than twice their CPU seconds (on a busy machine some do)")
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
