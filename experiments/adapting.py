"""Does adapting the split pay? ``python experiments/adapting.py [--workloads A,B] [--requests 4000] [--seeds 8] [--out DIR]``.

Named workloads in which sharing is hard (bullet/workload/named.py) and two that do not drift, under a ladder of TPOT objectives.
Each policy with its split chosen at every step, beside the same scheduler with one fixed split: of all those the one that does
best on that workload at that objective, chosen in hindsight from the very runs that it is judged on, so it is a little better
than anybody could choose. Attainment (mean-length reading) of the requests between warm-up and drain, means over paired seeds,
differences with 95 % intervals. All simulated. Runs are cached: what was stopped goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bullet.errors import BulletError
from bullet.files import Claim, write_text
from bullet.results import plots
from bullet.sweeps.intervals import Estimate, interval, paired
from bullet.sweeps.sweep import Sweep, csv_text, sweep
from bullet.workload.named import NAMED, named

FIXED, TPOT = "policy.options.fixed_decode_sms", "slo.tpot_s"
STEADY: Mapping[str, Mapping[str, Any]] = {  # no drift, to compare with
    "steady-code": {"workload.trace": "azure-code", "workload.rate_req_per_s": 5.0},
    "steady-chat": {"workload.trace": "sharegpt", "workload.rate_req_per_s": 16.0, "workload.max_prompt_tokens": 8192},
}
WORKLOADS = ("steady-code", "steady-chat", "turns-calm", "turns", "turns-fast", "turns-slow", "day-chat", "day-code",
             "bursts-code", "bursts-chat")
LADDER_S = (0.15, 0.1, 0.075, 0.05)
DECODE_SMS = (6, 12, 18, 24, 36, 48)
"""Of 108; 6 is the least that the ladder's loosest objective is met with, 48 the most that leaves prefill its work."""
FIGURE = "steady.slo_attainment_mean_length"
SWINGS = ((12.0, 12.0), (9.0, 15.0), (6.0, 18.0), (3.0, 21.0), (0.5, 23.5))
"""Lowest and highest rate of a sine about 12 requests per second: one workload, more and more drift."""


class Cell(NamedTuple):
    """One workload at one objective. ``gain``: adaptive less the best fixed split, seed by seed."""

    workload: str
    tpot_s: float
    adaptive: Estimate
    fixed_sms: int
    fixed: Estimate
    gain: Estimate


def cell(workload: str, tpot_s: float, by_sms: Mapping[int, Mapping[int, float]]) -> Cell:
    """``by_sms``: decode's fixed SMs (0: chosen at every step) -> seed -> attainment. Of equals the smaller share is the best."""
    means = {sms: sum(values.values()) / len(values) for sms, values in by_sms.items() if sms}
    best = max(means, key=lambda sms: (means[sms], -sms))
    seeds = [seed for seed in by_sms[0] if seed in by_sms[best]]
    ours, theirs = ([by_sms[sms][seed] for seed in seeds] for sms in (0, best))
    return Cell(workload, tpot_s, interval(ours), best, interval(theirs), paired(ours, theirs))


def cells_of(workload: str, found: Sweep) -> list[Cell]:
    """A workload's cells, an objective each, from the tightest."""
    values: dict[float, dict[int, dict[int, float]]] = {}
    for row in found.rows:
        if row["error"] is not None:
            raise BulletError(f"{workload}: {row['error']}")
        values.setdefault(row[TPOT], {}).setdefault(row[FIXED], {})[row["seed"]] = row[FIGURE]
    return [cell(workload, tpot_s, by_sms) for tpot_s, by_sms in sorted(values.items())]


def keys_of(workload: str) -> dict[str, Any]:
    """The configuration of a name, of either kind."""
    return dict(STEADY[workload]) if workload in STEADY else named(workload)


def table(found: Sequence[Cell]) -> str:
    """A workload a line, an objective a column: adaptive / best fixed (its SMs), and their difference."""
    ladder = sorted({one.tpot_s for one in found}, reverse=True)
    head = ["workload", *(f"TPOT {tpot_s * 1e3:g} ms: adaptive, fixed (SMs), gain" for tpot_s in ladder)]
    rows = [head]
    for name in dict.fromkeys(one.workload for one in found):
        at = {one.tpot_s: one for one in found if one.workload == name}
        rows.append([name, *(f"{c.adaptive.mean:.3f}  {c.fixed.mean:.3f} ({c.fixed_sms})  {c.gain.text('+.3f')}"
                             for c in map(at.__getitem__, ladder))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def draw(path: Path, found: Sequence[Cell], drift: Sequence[tuple[float, Cell]], title: str) -> None:
    """Two panels with 95 % bands: the gain over the objective, a curve a workload; the gain over drift, a curve an objective."""
    over_slo: dict[str, list[tuple[float, float, float | None]]] = {}
    for one in found:
        over_slo.setdefault(one.workload, []).append((one.tpot_s * 1e3, one.gain.mean, one.gain.half_width))
    over_drift: dict[str, list[tuple[float, float, float | None]]] = {}
    for swing, one in drift:
        over_drift.setdefault(f"TPOT {one.tpot_s * 1e3:g} ms", []).append((swing, one.gain.mean, one.gain.half_width))
    panels = [("gain in attainment, over the TPOT SLO in ms", over_slo)]
    if drift:
        panels.append(("gain, over the swing of a sine (12 +- x req/s)", over_drift))
    plots.save(plots.plot_bands(panels, "", title), path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="bullet", help="one that has fixed_decode_sms (default %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join((*STEADY, *NAMED))}")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--tpot-ms", default=",".join(f"{s * 1e3:g}" for s in LADDER_S), metavar="A,B,..", help="(%(default)s)")
    parser.add_argument("--decode-sms", default=",".join(map(str, DECODE_SMS)), metavar="A,B,..",
                        help="fixed splits (%(default)s)")
    parser.add_argument("--no-drift", action="store_true", help="leave the second panel out")
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True, help="a fresh folder: adapting.txt, adapting.csv, adapting.png")
    args = parser.parse_args()

    ladder = [float(ms) * 1e-3 for ms in args.tpot_ms.split(",")]
    splits = [int(sms) for sms in args.decode_sms.split(",")]

    def run(name: str, keys: Mapping[str, Any]) -> list[Cell]:
        print(f"{name}: {len(ladder) * (1 + len(splits)) * args.seeds} runs", file=sys.stderr, flush=True)
        return cells_of(name, sweep({**keys, "policy.name": args.policy, "workload.num_requests": args.requests},
                                    {TPOT: ladder, FIXED: [0, *splits]}, seeds=args.seeds, cache=args.cache,
                                    jobs=args.jobs, say=lambda line: print(line, file=sys.stderr)))

    with Claim(args.out) as claim:
        found: list[Cell] = []
        for name in args.workloads.split(","):
            found += run(name, keys_of(name))
        drift: list[tuple[float, Cell]] = []
        if not args.no_drift:
            for low, high in SWINGS:
                rates: dict[str, Any] = {"workload.rate_profile": f"sine:{low:g}:{high:g}:360s"} if high > low else {
                    "workload.rate_req_per_s": low}
                keys = {"workload.trace": "sharegpt", "workload.max_prompt_tokens": 8192, **rates}
                drift += [((high - low) / 2, one) for one in run(f"sine {low:g}-{high:g}", keys)]
        title = (f"simulated, Llama-3.1-8B on A100-80GB: {args.policy} less the best fixed split, {args.requests} requests, "
                 f"{args.seeds} seeds, 95 % intervals")
        text = f"{title}\n\n{table(found)}\n" + (f"\n{table([one for _, one in drift])}\n" if drift else "")
        write_text(claim.folder / "adapting.txt", text)
        write_text(claim.folder / "adapting.csv", csv_text(
            ["workload", "tpot_s", "adaptive", "adaptive_half_width", "fixed_sms", "fixed", "fixed_half_width", "gain",
             "gain_half_width", "seeds"],
            [[c.workload, c.tpot_s, c.adaptive.mean, c.adaptive.half_width, c.fixed_sms, c.fixed.mean, c.fixed.half_width,
              c.gain.mean, c.gain.half_width, c.gain.seeds] for c in [*found, *(one for _, one in drift)]]))
        draw(claim.folder / "adapting.png", found, drift, title)
        print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"adapting: {exc}")
