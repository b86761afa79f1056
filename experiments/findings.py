"""What others claim of these policies, asked of ours: ``python experiments/findings.py [--seeds 3] [--tables 123456]``.

Llama-3.1-8B on one simulated A100, the 13 points of Fig. 15 (rates x traces). Each table answers one question: the paper's
Fig. 22 (static splits) and Fig. 23 (what each part of the scheduler brings), and how far results rest on what nobody has
measured: who gets SMs that both lanes hold, contention loss, estimator error. All figures are simulated, means over seeds;
attainment is the mean-length reading.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bullet.config import load_run_config
from bullet.devices.load import load_device
from bullet.errors import BulletError
from bullet.results.metrics import summarise
from bullet.sim.run import simulate

POINTS = [(trace, rate) for trace, rates in (("sharegpt", (10.0, 15.0, 20.0, 25.0)), ("azure-code", (4.0, 4.5, 5.0, 5.5)),
                                             ("arxiv", (0.5, 0.6, 0.7, 0.8, 0.9))) for rate in rates]
STATIC = ("static-72", "static-84", "static-90", "static-96", "static-102")
FIXED, DECODE_SMS = "policy.options.fixed_decode_sms", (6, 12, 18, 24, 36)
SHARES = (0.25, 0.5, 0.75, 0.95)
CHUNKED = ("vllm-1024", "sglang-1024-mixed", "sglang-2048-mixed", "sglang-1024", "sglang-2048")
PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # Fig. 23
    "naive": ("naive", {}),
    "w/ partition (fcfs, no delay)": ("bullet", {"policy.options.order": "fcfs", "policy.options.delayed_decode": False}),
    "w/ scheduler (no partition)": ("bullet", {"policy.options.partition": False}),
    "bullet": ("bullet", {}),
}


class Runs:
    """Simulates each (policy, point, overrides) once a seed and keeps the means."""

    def __init__(self, num_requests: int, seeds: int) -> None:
        self.num_requests, self.seeds = num_requests, seeds
        self.known: dict[str, dict[str, float]] = {}

    def __call__(self, policy: str, point: tuple[str, float], overrides: Mapping[str, Any] | None = None) -> dict[str, float]:
        key = repr((policy, point, sorted((overrides or {}).items())))
        if key not in self.known:
            rows = []
            for seed in range(self.seeds):
                config = load_run_config(None, {
                    "workload.trace": point[0], "workload.rate_req_per_s": point[1], "policy.name": policy, "seed": seed,
                    "workload.num_requests": self.num_requests, **(overrides or {})})
                rows.append(summarise(simulate(config, device=load_device(config.device))))
            self.known[key] = {
                "attainment": float(np.mean([r["slo_attainment_mean_length"] for r in rows])),
                "ttft_s": float(np.mean([r["mean_ttft_ms"] for r in rows])) / 1e3,
                "tpot_ms": float(np.mean([r["mean_tpot_ms"] for r in rows])),
                "throughput": float(np.mean([r["request_throughput"] for r in rows])),
                "max_step_ms": float(np.max([r["max_decode_step_ms"] for r in rows])),
            }
        return self.known[key]


def table(title: str, rows: Mapping[str, Callable[[tuple[str, float]], str]],
          points: list[tuple[str, float]] = POINTS, width: int = 10) -> None:
    """One line a system, one column a point."""
    print(f"\n{title}\n{'':<32}" + "".join(f"{trace[:5]} {rate:g}".rjust(width) for trace, rate in points))
    for name, cell in rows.items():
        print(f"{name:<32}" + "".join(cell(point).rjust(width) for point in points), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", default="123456", help="which of the six tables to print")
    args = parser.parse_args()
    run = Runs(args.num_requests, args.seeds)
    print(f"source = simulated, A100-80GB fitted device, Llama-3.1-8B, {args.num_requests} requests, "
          f"means of {args.seeds} seed(s)")

    def cell(key: str, form: str, policy: str, **overrides: Any) -> Callable[[tuple[str, float]], str]:
        names = {k.replace("__", "."): v for k, v in overrides.items()}
        return lambda point: format(run(policy, point, names)[key], form)

    if "1" in args.tables:
        table("1. attainment: is floor and cap enough? (the letter of Algorithm 1 beside our reading)",
              {p: cell("attainment", ".3f", p) for p in ("bullet", "bullet-literal")})
        table("   longest decode step, ms (TPOT SLO: 150 / 200 / 175)",
              {p: cell("max_step_ms", ".0f", p) for p in ("bullet", "bullet-literal")})
        table("   mean TPOT, ms", {p: cell("tpot_ms", ".0f", p) for p in ("bullet", "bullet-literal", *CHUNKED)})

    if "2" in args.tables:
        table("2. attainment of static splits (prefill SMs fixed, tails free; Fig. 22)",
              {p: cell("attainment", ".3f", p) for p in (*STATIC, "bullet")})

        def best(point: tuple[str, float]) -> str:
            split = max(STATIC, key=lambda p: run(p, point)["attainment"])
            return f"{run('bullet', point)['attainment'] - run(split, point)['attainment']:+.3f}"

        def best_fixed(point: tuple[str, float]) -> str:
            fixed = max(run("bullet", point, {FIXED: d})["attainment"] for d in DECODE_SMS)
            return f"{fixed - run('bullet', point)['attainment']:+.3f}"

        table("   attainment of bullet with its split fixed (sorted queue, batches, hand-over as in bullet)",
              {f"bullet, {108 - d} / {d}": cell("attainment", ".3f", "bullet", **{FIXED.replace(".", "__"): d})
               for d in DECODE_SMS})
        table("   the best fixed split of each point less bullet", {"fixed less adaptive": best_fixed})
        table("   bullet less the best static split of each point", {"gain": best})
        one = max(STATIC, key=lambda p: sum(run(p, point)["attainment"] for point in POINTS))
        table(f"   bullet less {one}, the best on average",
              {"gain": lambda point: f"{run('bullet', point)['attainment'] - run(one, point)['attainment']:+.3f}"})

    if "3" in args.tables:
        table("3. mean TTFT of chunked systems over bullet's",
              {p: lambda point, p=p: f"{run(p, point)['ttft_s'] / run('bullet', point)['ttft_s']:.1f}" for p in CHUNKED})

    if "4" in args.tables:
        table("4. hand-over and delayed decode: attainment",
              {"bullet": cell("attainment", ".3f", "bullet"),
               "hand-over off": cell("attainment", ".3f", "bullet", policy__options__hand_over="off"),
               "delayed decode off": cell("attainment", ".3f", "bullet", policy__options__delayed_decode=False),
               "fcfs": cell("attainment", ".3f", "bullet", policy__options__order="fcfs")})

    if "5" in args.tables:
        few = [("azure-code", 5.0), ("arxiv", 0.7), ("sharegpt", 15.0)]
        for share in SHARES:
            table(f"5. prefill takes {share:g} of shared SMs (assumed): mean TTFT s / mean TPOT ms / attainment (Fig. 23)",
                  {name: lambda point, p=policy, o=options, s=share: "{ttft_s:.2f} / {tpot_ms:.0f} / {attainment:.3f}".format(
                      **run(p, point, {**o, "device.shared_prefill_share": s}))
                   for name, (policy, options) in PARTS.items()}
                  | {"static-96": lambda point, s=share: "{ttft_s:.2f} / {tpot_ms:.0f} / {attainment:.3f}".format(
                      **run("static-96", point, {"device.shared_prefill_share": s}))}, few, 24)

    if "6" in args.tables:
        high = [("sharegpt", 15.0), ("sharegpt", 20.0), ("azure-code", 5.5), ("arxiv", 0.8), ("arxiv", 0.9)]
        table("6. attainment of bullet against what is uncertain", {
            "as is": cell("attainment", ".3f", "bullet"),
            "estimator 20 % high": cell("attainment", ".3f", "bullet", policy__estimator_error=1.2, policy__recalibrate=False),
            "estimator 20 % low": cell("attainment", ".3f", "bullet", policy__estimator_error=0.8, policy__recalibrate=False),
            "srm-blind": cell("attainment", ".3f", "bullet", policy__estimator="srm-blind"),
            "oracle": cell("attainment", ".3f", "bullet", policy__estimator="oracle"),
            "contention loss 0": cell("attainment", ".3f", "bullet", device__contention_scale=0.0),
            "contention loss 0.4": cell("attainment", ".3f", "bullet", device__contention_scale=2.0),
            "L_step 1": cell("attainment", ".3f", "bullet", policy__options__layers_per_step=1),
            "L_step 8": cell("attainment", ".3f", "bullet", policy__options__layers_per_step=8),
            "decode floor 2 SMs": cell("attainment", ".3f", "bullet", policy__options__decode_floor=2 / 108),
            "decode floor 24 SMs": cell("attainment", ".3f", "bullet", policy__options__decode_floor=24 / 108),
            "naive": cell("attainment", ".3f", "naive"),
        }, high)

    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"findings: {exc}")
