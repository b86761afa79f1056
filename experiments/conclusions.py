"""Conclusions in steady state: ``python -m experiments.conclusions [--questions A,B] [--seeds 8] [--read] [--write FILE.md]``.

Llama-3.1-8B on one simulated A100-80GB, 4,000 requests a run, 8 paired seeds; figures of the steady window (first 20 % and last
10 % of the time of arrivals cut), attainment under the mean-length reading, ± half of the 95 % interval. experiments/questions.py
has the questions. Where arms race (fixed splits), the best of each workload in hindsight stands for all: two are left after
seed 0, one after seed 1.

Runs are kept in ``--cache``, one seed of all questions after the other: the same command again runs what is missing, and one
that was stopped can be read (``--read``) with the seeds that there are. ``--write``: tables go between the marks
``<!-- conclusions: NAME -->`` and ``<!-- end -->`` of a Markdown file. ``--plots DIR``: its pictures.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bullet.config import RunConfig
from bullet.errors import BulletError
from bullet.files import write_text
from bullet.results import metrics, plots
from bullet.sweeps.bound import bound
from bullet.sweeps.cache import DEFAULT, Cache, key_of
from bullet.sweeps.intervals import Estimate, interval, paired
from bullet.sweeps.pool import Pool, Progress
from bullet.workload import load_workload
from experiments.questions import BULLET, OVERLOADS, QUESTIONS, TRAIN, Question, config_of

REQUESTS = 4000
FIGURES = {"att": ("steady.slo_attainment_mean_length", 1.0, ".3f"), "TTFT": ("steady.mean_ttft_ms", 1e-3, ".2f"),
           "P99": ("steady.p99_ttft_ms", 1e-3, ".1f"), "TPOT": ("steady.mean_tpot_ms", 1.0, ".0f"),
           "req/s": ("steady.throughput", 1.0, ".2f"), "sat": ("saturation.throughput", 1.0, ".3f"),
           "step": ("max_decode_step_ms", 1.0, ".0f"), "mix": ("saturation.mix", 1.0, ".2f")}
NAMES = {"att": "attainment", "TTFT": "mean TTFT, s", "P99": "P99 TTFT, s", "TPOT": "mean TPOT, ms", "req/s": "requests/s",
         "latency": "mean TTFT s / P99 TTFT s / mean TPOT ms", "step": "longest decode step, ms",
         "sat": "requests/s at saturation", "mix": "mean tokens of what was served then / of all"}
GROWS = "\\*"
"""Behind a figure most of whose runs grow: it depends on how long the run was."""
LEFT = (2, 1)
"""Of a race, how many are left after seed 0, and after seed 1."""
Runs = dict[int, Mapping[str, Any]]
"""By seed, a run's figures."""
Found = dict[str, dict[str, Runs]]
"""By workload and arm."""


def value(run: Mapping[str, Any], figure: str) -> float:
    key, factor, _ = FIGURES[figure]
    return float(run[key]) * factor


def mean(runs: Runs, figure: str, seeds: Sequence[int] | None = None) -> float:
    return float(np.mean([value(runs[seed], figure) for seed in (runs if seeds is None else seeds)]))


def estimate(runs: Runs, figure: str) -> Estimate:
    return interval([value(run, figure) for run in runs.values()])


def difference(ours: Runs, theirs: Runs, figure: str) -> Estimate:
    """``ours`` less ``theirs``, paired by the seeds that both have."""
    seeds = [seed for seed in ours if seed in theirs]
    return paired([value(ours[seed], figure) for seed in seeds], [value(theirs[seed], figure) for seed in seeds])


def racing(race: Sequence[str], runs: Mapping[str, Runs], seed: int) -> list[str] | None:
    """Which arms of a race run on ``seed``, by attainment on seeds 0 and 1; ``None``: earlier seeds are missing. Of equals the
    first stays."""
    left = list(race)
    for earlier, keep in zip(range(seed), LEFT, strict=False):
        if any(earlier not in runs.get(arm, {}) for arm in left):
            return None
        by_mean = {arm: mean(runs[arm], "att", range(earlier + 1)) for arm in left}
        left = sorted(left, key=lambda arm: -by_mean[arm])[:keep]
    return [arm for arm in race if arm in left]


def best(race: Sequence[str], runs: Mapping[str, Runs]) -> str | None:
    """The winner: of the arms that have most seeds, the highest mean."""
    there = [arm for arm in race if runs.get(arm)]
    most = max((len(runs[arm]) for arm in there), default=0)
    return max((arm for arm in there if len(runs[arm]) == most), key=lambda arm: mean(runs[arm], "att"), default=None)


def wanted(question: Question, found: Found, seed: int) -> Iterator[tuple[str, str]]:
    """(workload, arm) that run on ``seed``."""
    for workload in question.workloads:
        racers = racing(question.racers(workload), found.get(workload, {}), seed)
        for arm in question.arms:
            if arm not in question.race or (racers is not None and arm in racers):
                yield workload, arm


def collect(questions: Mapping[str, Question], seeds: int, requests: int, pool: Pool, read: bool) -> dict[str, Found]:
    """Every question's runs: a seed of all of them after the other. ``read``: what is in the cache, no more."""
    found: dict[str, Found] = {name: {} for name in questions}
    for seed in range(seeds):
        places: list[tuple[str, str, str, str]] = []
        configs: dict[str, RunConfig] = {}
        for name, question in questions.items():
            if seed >= question.seeds:
                continue
            for workload, arm in wanted(question, found[name], seed):
                config = config_of(workload, question.arms[arm], seed, requests)
                key = key_of(config)
                configs[key] = config
                places.append((key, name, workload, arm))
        if read:
            records = {key: record for key in configs if (record := pool.cache.get(key)) is not None}
        else:
            records = pool.run(configs)
        for key, name, workload, arm in places:
            record = records.get(key)
            if record is None:
                continue
            if "figures" not in record:
                raise BulletError(f"{name}, {workload}, {arm}, seed {seed}: {record['error']}")
            found[name].setdefault(workload, {}).setdefault(arm, {})[seed] = record["figures"]
    return found


def growth(runs: Runs) -> str:
    """How many of an arm's runs are ``stationary``, ``growing`` and ``falling``."""
    counts = Counter(run["steady.growth"] for run in runs.values())
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def mark(runs: Runs) -> str:
    """``GROWS`` where batch or queue grow in most runs."""
    return GROWS if 2 * sum(run["steady.growth"] == "growing" for run in runs.values()) > len(runs) else ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def latency(runs: Runs) -> str:
    return " / ".join(format(mean(runs, figure), FIGURES[figure][2]) for figure in ("TTFT", "P99", "TPOT"))


def cell(question: Question, runs: Mapping[str, Runs], arm: str, figure: str) -> str:
    """A figure of an arm: its mean, or its difference from the baseline."""
    mine, base = runs.get(arm, {}), runs.get(question.baseline, {})
    if not mine or (not question.absolute and not set(mine) & set(base)):
        return "-"
    if figure == "latency":
        return latency(mine) + mark(mine)
    form = FIGURES[figure][2]
    if question.absolute or arm == question.baseline:
        return estimate(mine, figure).text(form) + mark(mine)
    return difference(mine, base, figure).text("+" + form) + mark(mine)


def count(runs: Mapping[str, Runs], arms: Sequence[str]) -> str:
    """Seeds of a row: one number, or the least and the most."""
    numbers = sorted({len(runs[arm]) for arm in arms if runs.get(arm)})
    return "-" if not numbers else f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def arms_table(question: Question, found: Found, figure: str) -> str:
    """A workload a row, an arm a column."""
    arms = [arm for arm in question.arms if arm not in question.race]
    rows = [[workload, count(found[workload], arms), *(cell(question, found[workload], arm, figure) for arm in arms)]
            for workload in question.workloads if workload in found]
    less = "" if question.absolute or figure == "latency" else f"; less {question.baseline} but in its own column"
    return f"{NAMES[figure]}{less}:\n\n{markdown(['workload', 'seeds', *arms], rows)}"


def race_table(question: Question, found: Found) -> str:
    """The best of the race beside each other arm, by workload."""
    arms = [arm for arm in question.arms if arm not in question.race]
    rows = []
    for workload in question.workloads:
        runs = found.get(workload, {})
        one = best(question.race, runs)
        if one is None or any(not runs.get(arm) for arm in arms):
            continue
        row = [workload, count(runs, [one, *arms]), one, estimate(runs[one], "att").text() + mark(runs[one])]
        for arm in arms:
            row += [estimate(runs[arm], "att").text() + mark(runs[arm]), difference(runs[arm], runs[one], "att").text("+.3f")]
        rows.append(row)
    return markdown(["workload", "seeds", "best fixed", "its attainment",
                     *(title for arm in arms for title in (arm, f"{arm} - it"))], rows)


def ladder_table(question: Question, found: Found) -> str:
    """A workload a row, an objective a column: adaptive, the best fixed split (its SMs), their difference."""
    names = list(dict.fromkeys(workload.partition(" @")[0] for workload in question.workloads))
    objectives = list(dict.fromkeys(workload.partition(" @")[2] for workload in question.workloads))
    rows = []
    for name in names:
        row = [name]
        for tpot in objectives:
            runs = found.get(f"{name} @{tpot}", {})
            one = best(question.race, runs)
            if one is None or not runs.get(question.baseline):
                row.append("-")
                continue
            gain = difference(runs[question.baseline], runs[one], "att")
            ours, theirs = mean(runs[question.baseline], "att"), mean(runs[one], "att")
            row.append(f"{ours:.3f}, {theirs:.3f} ({one}): **{gain.text('+.3f')}**{mark(runs[question.baseline])}")
        rows.append(row)
    return markdown(["workload", *(f"TPOT {float(tpot) * 1e3:g} ms" for tpot in objectives)], rows)


def contention_table(question: Question, found: Found) -> str:
    """A workload and a loss a row: ``bullet``, and its gain over each of the others, all on the same device."""
    losses: dict[str, dict[str, str]] = {}
    for arm in question.arms:
        name, _, loss = arm.partition(", loss ")
        losses.setdefault(loss or "0.2", {})[name] = arm
    rows = []
    for workload in question.workloads:
        for loss, arms in sorted(losses.items()):
            runs = {name: found.get(workload, {}).get(arm, {}) for name, arm in arms.items()}
            if all(runs.values()):
                base = runs.pop(question.baseline)
                rows.append([workload, loss, count({"-": base}, ["-"]), estimate(base, "att").text() + mark(base),
                             *(difference(base, other, "att").text("+.3f") for other in runs.values())])
    return markdown(["workload", "loss", "seeds", question.baseline, *(f"less {name}" for name in losses["0.2"] if
                                                                       name != question.baseline)], rows)


PLUS_FIGURES = ("att", "TTFT", "P99")


def _end(one: Estimate, side: int) -> float:
    """An end of an interval; where one seed leaves none, its mean."""
    return one.mean + side * (one.half_width or 0.0)


def plus_table(question: Question, found: Found) -> str:
    """``bullet-plus`` less ``bullet``, and less the best fixed split; then what it must reach, counted."""
    rows, gains = [], {"train": [], "test": []}
    counts: Counter[str] = Counter()
    for workload in question.workloads:
        runs = found.get(workload, {})
        if not runs.get("plus") or not runs.get("bullet"):
            continue
        half = "train" if workload in TRAIN else "test"
        counts["workloads"] += 1
        diff = {figure: difference(runs["plus"], runs["bullet"], figure) for figure in PLUS_FIGURES}
        gains[half].append(diff["att"].mean)
        one = best(question.race, runs)
        less = None if one is None else difference(runs["plus"], runs[one], "att")
        counts["attainment worse than bullet's beyond the interval"] += _end(diff["att"], 1) < 0
        counts["better beyond it"] += _end(diff["att"], -1) > 0
        counts["worse than the best fixed split's beyond it"] += less is not None and _end(less, 1) < 0
        for figure in ("TTFT", "P99"):
            counts[f"{NAMES[figure].partition(',')[0]} higher by the mean"] += diff[figure].mean > 0
            counts[f"{NAMES[figure].partition(',')[0]} higher beyond the interval"] += _end(diff[figure], -1) > 0
        rows.append([workload, half, count(runs, ["bullet", "plus"]),
                     *(f"{mean(runs[arm], 'att'):.3f}{mark(runs[arm])}" for arm in ("bullet", "plus")),
                     diff["att"].text("+.3f"), "-" if one is None or less is None else f"{less.text('+.3f')} ({one})",
                     f"{latency(runs['bullet'])}", f"{latency(runs['plus'])}", diff["P99"].text("+.1f")])
    said = [f"mean gain, {half}: {np.mean(own):+.4f} over {len(own)} workloads" for half, own in gains.items() if own]
    every = [gain for own in gains.values() for gain in own]
    if every:
        said.append(f"all: {np.mean(every):+.4f}")
    text = markdown(["workload", "half", "seeds", "bullet", "bullet-plus", "difference", "less the best fixed split",
                     "bullet: mean, P99 TTFT s, TPOT ms", "bullet-plus", "P99, difference"], rows)
    return f"{text}\n\n{'; '.join(said)}. Of {counts.pop('workloads')} workloads: " + ", ".join(
        f"{name} on {number}" for name, number in counts.items()) + "."


def crossing(question: Question, found: Found, trace: str, arm: str) -> Estimate | str:
    """The rate at which attainment falls below 0.9, linear between the points, of each seed; text where not all cross."""
    places = [workload for workload in question.workloads
              if workload.startswith(f"{trace} ") and found.get(workload, {}).get(arm)]
    if not places:
        return "-"
    rates = [float(workload.split()[1]) for workload in places]
    seeds = sorted(set.intersection(*(set(found[workload][arm]) for workload in places)))
    values = []
    for seed in seeds:
        met = [value(found[workload][arm][seed], "att") for workload in places]
        values.append(metrics.goodput(rates, met))
    under, over = sum(one is None for one in values), sum(one == rates[-1] for one in values)
    ends = (f"under {rates[0]:g}", under), (f"{rates[-1]:g} or more", over)
    said = [f"{rate} on {number}" for rate, number in ends if number]
    if said:
        return f"{', '.join(said)} of {len(seeds)} seeds"
    return interval([one for one in values if one is not None])


def goodput_table(question: Question, found: Found) -> str:
    traces = list(dict.fromkeys(workload.split()[0] for workload in question.workloads))
    rows = []
    for arm in question.arms:
        row = [arm]
        for trace in traces:
            one = crossing(question, found, trace, arm)
            row.append(one if isinstance(one, str) else one.text(".3f" if trace == "arxiv" else ".2f"))
        rows.append(row)
    return markdown(["goodput, req/s", *traces], rows)


def capacities(found: Mapping[str, Found]) -> dict[str, float]:
    """What ``bullet`` serves at most, by trace."""
    return {workload.split()[0]: mean(runs["bullet"], "sat") for workload, runs in found.get("capacity", {}).items()
            if runs.get("bullet")}


@cache
def fluid_bound(workload: str) -> float:
    """Requests per second; seed 0's lengths."""
    return bound(config_of(workload, BULLET, 0, REQUESTS)).fluid.req_per_s


def capacity_table(question: Question, found: Found) -> str:
    """Shares of the fluid bound that systems reach at saturation, beside the two tables of figures."""
    rows = []
    for workload in question.workloads:
        if workload in found:
            limit = fluid_bound(workload)
            rows.append([workload, f"{limit:.3f}", *("-" if not (runs := found[workload].get(arm)) else
                                                     f"{mean(runs, 'sat') / limit:.1%}" for arm in question.arms)])
    return f"share of the fluid bound:\n\n{markdown(['workload', 'bound, req/s', *question.arms], rows)}"


@cache
def longest(workload: str, seeds: int, requests: int) -> tuple[int, ...]:
    """The longest prompt of each seed, in tokens."""
    configs = [config_of(workload, BULLET, seed, requests) for seed in range(seeds)]
    return tuple(int(load_workload(config.workload, config.seed).prompt_tokens.max()) for config in configs)


def workloads_table(found: Mapping[str, Found], capacities: Mapping[str, float], requests: int) -> str:
    """Every workload once: longest prompts, load as a share of what ``bullet`` serves at most, whether it stands still."""
    rows = []
    for workload in dict.fromkeys(w for question in found.values() for w in question if "@" not in w and w not in OVERLOADS):
        runs = max((question[workload].get("bullet", {}) for question in found.values() if workload in question), key=len)
        if not runs:
            continue
        tokens = sorted(longest(workload, len(runs), requests))
        seconds = [run["steady.end_s"] - run["steady.start_s"] for run in runs.values()]
        offered = float(np.mean([run["steady.offered"] / s for run, s in zip(runs.values(), seconds, strict=True)]))
        base = capacities.get(workload.split()[0])
        rows.append([workload, f"{offered:.2f}", "-" if base is None else f"{offered / base:.2f}",
                     f"{offered / fluid_bound(workload):.2f}",
                     f"{tokens[0]:,} / {tokens[len(tokens) // 2]:,} / {tokens[-1]:,}", growth(runs)])
    return markdown(["workload", "offered, req/s", "/ bullet's capacity", "/ fluid bound",
                     "longest prompt: least, median, most of the seeds", "bullet's batch and queue, runs"], rows)


def draw(folder: Path, found: Mapping[str, Found], seeds: int) -> None:
    """``fig15.png``: attainment over the rate; ``adapting.png``: the gain over the objective, and over drift."""
    about = f"simulated, Llama-3.1-8B on A100-80GB; {REQUESTS} requests, up to {seeds} seeds, 95 % bands"
    if "fig15" in found:
        panels = []
        for trace in dict.fromkeys(workload.split()[0] for workload in QUESTIONS["fig15"].workloads):
            curves: dict[str, list[tuple[float, float, float | None]]] = {}
            for workload, arms in found["fig15"].items():
                if workload.split()[0] == trace:
                    for arm, runs in arms.items():
                        one = estimate(runs, "att")
                        curves.setdefault(arm, []).append((float(workload.split()[1]), one.mean, one.half_width))
            panels.append((f"attainment, {trace}", {name: sorted(points) for name, points in curves.items()}))
        figure = plots.plot_bands(panels, "requests per second", about)
        for axes in figure.axes:
            axes.set_ylim(-0.03, 1.03)
        plots.save(figure, folder / "fig15.png")
    gains: list[tuple[str, dict[str, list[tuple[float, float, float | None]]]]] = []
    for name, title in (("ladder", "TPOT objective, ms"),
                        ("drift", "swing of a sine, 12 ± x req/s")):
        curves = {}
        for workload, runs in found.get(name, {}).items():
            where, _, tpot = workload.partition(" @")
            one_fixed = best(QUESTIONS[name].race, runs)
            if one_fixed is None or not runs.get("bullet"):
                continue
            gain = difference(runs["bullet"], runs[one_fixed], "att")
            x, curve = (float(tpot) * 1e3, where) if name == "ladder" else (
                (float(where.split()[3]) - float(where.split()[2])) / 2, f"TPOT {float(tpot) * 1e3:g} ms")
            curves.setdefault(curve, []).append((x, gain.mean, gain.half_width))
        if curves:
            gains.append((title, {curve: sorted(points) for curve, points in curves.items()}))
    if gains:
        figure = plots.plot_bands(gains, "", f"bullet less the best fixed split in hindsight; {about}")
        for axes, (words, _) in zip(figure.axes, gains, strict=True):
            axes.set(xlabel=words, ylabel="gain in attainment", ylim=(-0.3, 0.75))
        plots.save(figure, folder / "adapting.png")


def tables(name: str, question: Question, found: Found) -> str:
    """A question's tables."""
    if name == "plus":
        return plus_table(question, found)
    if name in ("ladder", "drift"):
        return ladder_table(question, found)
    if question.race:
        return race_table(question, found)
    if name == "contention":
        return contention_table(question, found)
    first = {"fig15": goodput_table, "capacity": capacity_table}.get(name)
    parts = [] if first is None else [first(question, found)]
    return "\n\n".join([*parts, *(arms_table(question, found, figure) for figure in question.figures)])


def written(text: str, name: str, table: str) -> str:
    """``text`` with what stands between a name's marks replaced; :class:`BulletError` where there are none."""
    start, end = f"<!-- conclusions: {name} -->", "<!-- end -->"
    before, sep, after = text.partition(start)
    _, closed, rest = after.partition(end)
    if not sep or not closed:
        raise BulletError(f"no {start} .. {end}")
    return f"{before}{start}\n{table}\n{end}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", default=",".join(QUESTIONS), help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--num-requests", type=int, default=REQUESTS)
    parser.add_argument("--cache", type=Path, default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--read", action="store_true", help="run nothing: what is kept already")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables there, between their marks")
    parser.add_argument("--plots", type=Path, metavar="DIR")
    args = parser.parse_args()
    names = args.questions.split(",")
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        raise BulletError(f"--questions {unknown[0]}: choose of {', '.join(QUESTIONS)}")
    questions = {name: QUESTIONS[name] for name in names}

    def tell(progress: Progress) -> None:
        left = "" if progress.left_s is None else f", {progress.left_s / 60:.0f} min left"
        print(f"\r{progress.done} of {progress.total}{left}   ", end="", file=sys.stderr, flush=True)

    found = collect(questions, args.seeds, args.num_requests, Pool(Cache(args.cache), args.jobs, progress=tell), args.read)
    report(questions, found, args.num_requests, args.seeds, args.write, args.plots)
    return 0


def report(questions: Mapping[str, Question], found: Mapping[str, Found], requests: int, seeds: int, file: Path | None,
           folder: Path | None) -> None:
    """Tables to the terminal, or into a file; pictures into a folder."""
    made = {name: tables(name, question, found[name]) for name, question in questions.items()}
    made["workloads"] = workloads_table(found, capacities(found), requests)
    if file is None:
        for name, text in made.items():
            print(f"\n## {QUESTIONS[name].title if name in QUESTIONS else name}\n\n{text}")
    else:
        page = file.read_text(encoding="utf-8")
        for name, text in made.items():
            page = written(page, name, text)
        write_text(file, page)
    if folder is not None:
        draw(folder, found, seeds)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"conclusions: {exc}")
