"""The package from a script or a notebook: simulate, compare, read back, look at frames and figures. docs/api.md is its manual.

``from bullet import simulate, compare, load_run`` loads nothing before one of them is used; pandas and matplotlib are imported
by the properties and methods that give frames and figures.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bullet import policies as known_policies
from bullet import work
from bullet.config import Config, RunConfig, configuration, to_toml
from bullet.devices.base import Device
from bullet.devices.load import load_device
from bullet.errors import ConfigError, ResultsError, short
from bullet.files import Claim, safe_name, write_json, write_text
from bullet.policies.sharing import share_options
from bullet.results import folder as folders
from bullet.results import metrics, tables
from bullet.results.columns import RequestTable, Rows, RunOutcome, StepTable
from bullet.signals import Say, Watch, silent, unwatched
from bullet.state import SplitTable
from bullet.workload import Workload, load_workload, resolved
from bullet.workload.report import run_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from bullet.profiles.fit import Fitted
    from bullet.sweeps.bound import Limit


@dataclass(frozen=True, eq=False)
class Run:
    """One run, simulated or measured, whole or stopped. ``folder``: where it is kept, if it is.

    ``summary``: the figures of summary.json (docs/results.md says what each one is); ``summary["complete"]`` is false for a run
    that was stopped, which has requests and steps but no figures.
    """

    config: RunConfig
    summary: Mapping[str, Any]
    folder: Path | None
    request_table: RequestTable = field(repr=False)
    steps_kept: StepTable | None = field(default=None, repr=False)

    @cached_property
    def step_table(self) -> StepTable:
        """Steps as numpy columns; read from the folder where they are not in memory."""
        if self.steps_kept is not None:
            return self.steps_kept
        assert self.folder is not None
        table: StepTable = folders.read_table(self.folder / "steps.parquet", StepTable)
        return table

    @cached_property
    def requests(self) -> DataFrame:
        """A row a request: the columns of requests.parquet, and ``ttft_s``, ``tpot_s``, ``e2e_s`` (seconds; NaN where the request
        did not finish, and TPOT of one-token outputs). Needs pandas."""
        table, frame = self.request_table, _frame(self.request_table.data)
        done = table["status"] == "finished"
        for name, of, have in (("ttft_s", metrics.ttft_s, done), ("e2e_s", metrics.e2e_s, done),
                               ("tpot_s", metrics.tpot_s, done & (table["output_tokens"] > 1))):
            seconds = np.full(len(table), np.nan)
            seconds[have] = of(table)
            frame[name] = seconds
        return frame

    @cached_property
    def steps(self) -> DataFrame:
        """A row a step: the columns of steps.parquet; ``predicted_s`` is NaN where the policy predicts nothing. Needs pandas."""
        return _frame(self.step_table.data)

    @cached_property
    def waits(self) -> DataFrame:
        """A row a request, by its id: where its time went (:func:`bullet.results.waits.waits`), in seconds. Needs pandas."""
        from bullet.results.waits import waits

        return _frame({"id": self.request_table["id"], **waits(self.request_table, self.step_table)}).set_index("id")

    def table(self) -> str:
        """What ``bullet-sim run`` prints."""
        return table([self])

    def plot_latency(self) -> Figure:
        """Distributions of TTFT and TPOT."""
        return plot_latency([self])

    def plot_sms(self, window_s: float = 10.0) -> Figure:
        """Who holds the SMs: the whole run, and ``window_s`` seconds from its middle step by step."""
        from bullet.results import plots

        return plots.plot_sm_share(self.step_table, _figures(self), window_s)


def _frame(columns: Mapping[str, Any]) -> DataFrame:
    try:
        import pandas as pd
    except ImportError as exc:
        raise ResultsError(f"pandas is not installed ({exc}): pip install 'bullet-llm[pandas]'") from None
    return pd.DataFrame(columns)


def _figures(run: Run) -> Mapping[str, Any]:
    if not run.summary["complete"]:
        why = run.summary.get("why", "no reason given")
        raise ResultsError(f"{run.folder}: the run was stopped ({why}): it has rows, but no figures for a table or a plot")
    return run.summary


# ------------------------------------------------------------------------------------------- several runs


def table(runs: Sequence[Run], width: int = tables.WIDTH, measured: Mapping[str, Any] | None = None) -> str:
    """What ``bullet-sim compare`` prints: one run a row, in ``width`` columns; ``measured``: a row of
    :func:`bullet.results.tables.measured_row`."""
    return "\n".join([tables.comparison_table([_figures(run) for run in runs], width, measured),
                      *(tables.wrapped(note, width) for note in option_notes([run.config for run in runs]))])


def plot_latency(runs: Sequence[Run]) -> Figure:
    """Distributions of TTFT and TPOT, one curve a run."""
    from bullet.results import plots

    return plots.plot_cdfs([run.request_table for run in runs], [_figures(run) for run in runs])


def plot_comparison(runs: Sequence[Run]) -> Figure:
    """Latencies, throughput, attainment and where SM time went, one bar a run."""
    from bullet.results import plots

    return plots.plot_comparison([_figures(run) for run in runs])


# ------------------------------------------------------------------------------------------- running, reading


def simulate(config: Config, *, out: str | Path | None = None, report: bool = True, watch: Watch = unwatched,
             say: Say = silent, width: int = tables.WIDTH) -> Run:
    """Simulate one run: ``simulate({"policy.name": "bullet", "workload.trace": "azure-code", "workload.rate_req_per_s": 5})``.

    ``out``: a fresh folder to keep it in, as ``bullet-sim run`` does, with plots and a page unless ``report`` is false; without
    one nothing is written. Whatever stops it, the rows in a folder are kept. ``say`` hears what was read of the trace, and the
    table, when the files are written and nothing is drawn yet. A :class:`~bullet.errors.BulletError` says in one
    line what is wrong, before anything is written.
    """
    asked = configuration(config)
    if isinstance(config, str | Path):
        known_policies.check_trusted(asked.policy.name, [], str(config), "{'policy.name': ...} in place of the file, with")
    read: list[str] = []
    (whole,), workload, device = prepare([asked], read.append)
    run = _simulate(whole, workload, device, None if out is None else Path(out), watch)
    say("\n".join([*read, table([run], width)]))
    if report:
        _draw_all([run])
    return run


def compare(config: Config, policies: str | Sequence[str], *, out: str | Path | None = None, report: bool = True,
            watch: Watch = unwatched, say: Say = silent, width: int = tables.WIDTH,
            measured: str | Path | None = None, bound: bool | None = None) -> list[Run]:
    """The same requests under each of ``policies`` (names, or "A,B,.."), one run each, in order; otherwise as :func:`simulate`.

    An option goes to the policies that have it; one that none has is refused. ``out``: a folder with one a run in it and the
    comparison's own files, as ``bullet-sim compare`` makes it; a comparison that was stopped there goes on after the runs that
    are whole, if they are of the same configuration. ``measured``: the result file of a benchmark (vLLM's, SGLang's), a row
    of its own beside them. ``width``: columns of what ``say`` hears. ``bound``: a line with the share of the fluid bound that
    each reached (``None``: where it is known; true: and why not, where it is not).
    """
    return _compare(config, policies, out, report, watch, say, width, measured, bound)[0]


def _compare(config: Config, policies: str | Sequence[str], out: str | Path | None, report: bool, watch: Watch, say: Say,
             width: int, measured: str | Path | None, bound: bool | None) -> tuple[list[Run], Limit | None]:
    """:func:`compare`, and the fluid bound."""
    given = policies if isinstance(policies, str) else ",".join(policies)
    policies = split_names(given)
    names = [safe_name(name) for name in policies]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policies {given!r}: must name each policy once, separated by commas")
    base, read = configuration(config), list[str]()
    bench = None if measured is None else _measured(Path(measured))
    configs, workload, device = prepare([
        dataclasses.replace(base, policy=dataclasses.replace(base.policy, name=name)) for name in policies],
        read.append)
    limit = None if bound is False else _limit(next((c for c in configs if c.layout), configs[0]), workload, device)
    if out is None:
        return [_simulate(one, workload, device, None, watch) for one in configs], limit
    with Claim(Path(out), resumes=COMPARING) as claim:
        folder = claim.folder
        kept = _resumed(folder, claim.found, configs, names, workload, device)
        write_text(folder / COMPARING, f"{', '.join(policies)}\n")
        runs: list[Run] = []
        for one, name in zip(configs, names, strict=True):
            run = kept.get(name)
            if run is None:
                if (folder / name).is_dir():
                    folders.discard(folder / name)
                run = _simulate(one, workload, device, folder / name, watch)
                # The steps, ten times as many as the requests, need not wait in memory.
                run = dataclasses.replace(run, steps_kept=None)
            runs.append(run)
            tables.write_comparison(folder, [*(_figures(run) for run in runs), *([] if bench is None else [bench])])
        notes = [] if limit is None or not (limit.known or bound) else [limit.text(
            {tables.label(run.summary): run.summary["request_throughput"] for run in runs})]
        write_text(folder / "comparison.txt", "\n".join([table(runs, measured=bench), *(
            tables.wrapped(note, tables.WIDTH) for note in notes)]) + "\n")
        (folder / COMPARING).unlink()
        say("\n".join([*read, table(runs, width, bench), *(tables.wrapped(note, width) for note in notes)]))
        if report:
            _draw_all(runs, folder, notes)
    return runs, limit


def _limit(config: RunConfig, workload: Workload, device: Device) -> Limit:
    from bullet.sweeps.bound import limit_of

    return limit_of(config, workload, device)


def over_seeds(config: Config, seeds: int, policies: str | Sequence[str] | None = None, *, out: str | Path | None = None,
               report: bool = True, watch: Watch = unwatched, say: Say = silent, width: int = tables.WIDTH,
               bound: bool | None = None) -> list[list[Run]]:
    """:func:`simulate`, or :func:`compare` where there are ``policies``, under ``seeds`` seeds from the configuration's on: a
    list of runs a seed.

    ``out``: a fresh folder with one a seed in it, and the means of all figures with their 95 % intervals (``seeds.txt``,
    ``seeds.json``); of several policies also the differences from the first, which had the same requests. ``say`` hears that
    table. ``bound``: as of :func:`compare`.
    """
    if not isinstance(seeds, int) or not 2 <= seeds <= 10_000:
        raise ConfigError(f"--seeds {seeds}: must be 2 to 10,000: an interval needs two runs")
    from bullet.sweeps import seeds as seeds_of

    base, read = configuration(config), list[str]()
    found: list[list[Run]] = []
    limits: list[Limit | None] = []

    def all_of(folder: Path | None) -> None:
        for seed in range(base.seed, base.seed + seeds):
            one, at = dataclasses.replace(base, seed=seed), None if folder is None else folder / f"seed-{seed}"
            hear = read.append if not found else silent
            if policies is None:
                found.append([simulate(one, out=at, report=report, watch=watch, say=hear)])
            else:
                runs, limit = _compare(one, policies, at, report, watch, hear, width, None, bound)
                found.append(runs)
                limits.append(limit)

    def lines_in(columns: int) -> str:
        summaries = [[_figures(run) for run in runs] for runs in found]
        known = [limit for limit in limits if limit is not None and (limit.known or bound)]
        notes = [seeds_of.shares_line(known, summaries)] if known and len(known) == len(found) else []
        return "\n".join([seeds_of.seeds_table(summaries, columns), *(tables.wrapped(note, columns) for note in notes)])

    if out is None:
        all_of(None)
    else:
        with Claim(Path(out)) as claim:
            all_of(claim.folder)
            summaries = [[_figures(run) for run in runs] for runs in found]
            write_text(claim.folder / "seeds.txt", lines_in(tables.WIDTH) + "\n")
            write_json(claim.folder / "seeds.json", seeds_of.record(summaries))
    lines = read[0].partition("\n\n")[0]  # what was read of the trace; the table is one seed's
    say(f"{lines}\n\n{lines_in(width)}")
    return found


COMPARING = "comparing.txt"
"""In the folder of a comparison that has not come to its end."""


def _resumed(folder: Path, found: frozenset[str], configs: Sequence[RunConfig], names: Sequence[str], workload: Workload,
             device: Device) -> dict[str, Run]:
    """The whole runs of a comparison that was stopped in ``folder``; :class:`ResultsError` if they are of another."""
    from bullet.sim.run import resolved as as_run

    kept: dict[str, Run] = {}
    strangers = sorted(found - {COMPARING, *names, "comparison.json", "comparison.csv", "comparison.txt"})
    if strangers:
        raise ResultsError(f"{folder}: holds a comparison that was stopped, and {strangers[0]}, which is none of --policies: "
                           "choose another --out")
    for config, name in zip(configs, names, strict=True):
        if not (folder / name / "config.toml").is_file():
            continue
        run = load_run(folder / name)
        asked = to_toml(as_run(config, workload, device))
        if to_toml(run.config) != asked:
            lines = [line for line in asked.splitlines() if line not in to_toml(run.config).splitlines()]
            raise ResultsError(f"{folder / name}: is of another configuration ({'; '.join(lines)[:200]} is asked for now): "
                               "choose another --out")
        if not run.summary["complete"]:
            continue
        order = np.argsort(run.request_table["id"])
        for column in ("arrival_s", "prompt_tokens", "output_tokens"):
            if not np.array_equal(run.request_table[column][order], getattr(workload, column)):
                raise ResultsError(f"{folder / name}: is of other requests ({column}): choose another --out")
        kept[name] = dataclasses.replace(run, steps_kept=None)
    return kept


def figures(run: Run) -> dict[str, Any]:
    """A whole run's summary, as its file's figures."""
    return {name: value for name, value in _figures(run).items() if name != "complete"}


def _measured(path: Path) -> dict[str, Any]:
    from bullet.workload.formats.bench import measured_figures

    return tables.measured_row(measured_figures(path), path)


def _draw_all(runs: Sequence[Run], folder: Path | None = None, notes: Sequence[str] = ()) -> None:
    """Each run's plots and page, where it has a folder, and the comparison's in ``folder``, with ``notes`` below its table."""
    from bullet.results import page

    def draw(run: Run, at: Path) -> None:
        steps = run.steps_kept
        if steps is None:
            steps = folders.StoredSteps([at / "steps.parquet"], rows=run.summary["steps"])
        page.write_run_report(at, Rows(steps, run.request_table), figures(run), to_toml(run.config))

    places = [run.folder for run in runs if run.folder is not None]
    for run, place in zip(runs, places, strict=False):
        page.drawn(partial(draw, run, place))
    if folder is not None:
        page.drawn(lambda: page.write_comparison_report(folder, [run.request_table for run in runs],
                                                        [_figures(run) for run in runs], places, to_toml(runs[0].config), notes))


def split_names(text: str) -> list[str]:
    """``A,B,..`` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def load_run(folder: str | Path) -> Run:
    """A run's folder read back, simulated or measured, of this version or an earlier one; of a stopped run, what there is."""
    stored = folders.load_run(Path(folder))
    return Run(stored.config, stored.summary, Path(folder), stored.requests, stored.steps)


def _simulate(config: RunConfig, workload: Workload, device: Device, folder: Path | None, watch: Watch) -> Run:
    """One run, into one folder if there is one; whatever stops it, its rows are kept."""
    from bullet.sim.run import simulate as run_simulation

    def go(writer: folders.RunWriter | None) -> RunOutcome:
        with watch(writer, len(workload), config.policy.name) as progress:
            return run_simulation(config, workload=workload, device=device, writer=writer, progress=progress)

    if folder is None:
        outcome = go(None)
        summary = metrics.summarise(outcome)
    else:
        with folders.RunWriter(folder) as writer:
            started = time.perf_counter()
            outcome = go(writer)
            wall_s = time.perf_counter() - started
            summary = metrics.summarise(outcome)
            writer.close(outcome, summary, metrics.timing(outcome, wall_s))
        folder = writer.folder
    return Run(outcome.config, {"complete": True, **summary}, folder, outcome.requests, outcome.steps)


def prepare(configs: Sequence[RunConfig],
            say: Callable[[str], None] | None = None) -> tuple[list[RunConfig], Workload, Device]:
    """Everything that can be wrong, found before anything is written. ``configs`` differ in their policies alone; ``say`` is told
    what was read."""
    from bullet.sim.run import shares_blocks
    from bullet.sim.run import simulate as run_simulation

    for config in configs:
        known_policies.check_name(config.policy.name)
    workload = load_workload(configs[0].workload, configs[0].seed)
    configs = [dataclasses.replace(c, workload=resolved(c.workload, workload)) for c in configs]
    device = load_device(configs[0].device)
    # A wrong option shows when the policy is built: try all of them on no request before the first of several long runs.
    nothing = dataclasses.replace(workload, arrival_s=workload.arrival_s[:0], prompt_tokens=workload.prompt_tokens[:0],
                                  output_tokens=workload.output_tokens[:0], shared_prefix=None, closed=None)
    if len(configs) > 1:
        configs = share_options(configs, lambda config: run_simulation(config, workload=nothing, device=device))
    if say is not None:
        from bullet.sweeps.bound import load_share

        shares = any(shares_blocks(config, workload, device) for config in configs)
        say("\n".join(run_lines(workload, configs[0].workload, shares_prefixes=shares,
                                load=load_share(next((c for c in configs if c.layout), configs[0]), workload, device))) + "\n")
    return list(configs), workload, device


def option_notes(configs: Sequence[RunConfig]) -> list[str]:
    """Which options went to some of the policies only."""
    names = sorted({name for config in configs for name in config.policy.options})
    takers = {name: [c.policy.name for c in configs if name in c.policy.options] for name in names}
    return [f"policy.options.{name} is an option of {', '.join(found)} only" for name, found in takers.items()
            if len(found) < len(configs)]


# ------------------------------------------------------------------------------------------- a device, a GPU


def step_times(config: Config, *, prompts: Sequence[int] = (2048,), decode_seqs: int = 64,
               context_tokens: int = 1024) -> DataFrame:
    """How long a prefill of ``prompts`` (tokens of each) and a decode iteration of ``decode_seqs`` requests, ``context_tokens``
    each, take on the device of ``config`` at each split of the SMs; a row a split. Needs pandas.

    ``prefill_s``, ``decode_s``: beside each other; ``*_alone_s``: the other lane idle; ``prefill_flops_per_s``,
    ``decode_bytes_per_s``: operations, and the least bytes that must move (docs/model.md), over the seconds beside each other.
    All layers and the LM head. :class:`~bullet.errors.ConfigError` where the device knows no splits (``device.timing = table``).
    """
    for name, given in (("prompts", prompts), ("decode_seqs", decode_seqs), ("context_tokens", context_tokens)):
        values = given if isinstance(given, list | tuple) else [given]
        if not values or not all(isinstance(v, int) and 1 <= v <= 10**7 for v in values):
            raise ConfigError(f"{name} = {short(given)}: must be whole numbers from 1 to 10^7")
    device_config = configuration(config).device
    device = load_device(device_config)
    splits = SplitTable.every(device.num_sms, device_config.partition_step_sms)
    prefill = device.prefill_work([(tokens, 0) for tokens in prompts], device.model.num_layers, logits_seqs=len(prompts))
    decode = device.decode_work(decode_seqs, decode_seqs * context_tokens)
    flops = _total([(tokens, 0) for tokens in prompts], 0, 0, device)[0]
    moved = _total([], decode_seqs, decode_seqs * context_tokens, device)[1]
    prefill_s = device.prefill_seconds_all(prefill, splits, decode)[:-1]
    decode_s = device.decode_seconds_all(decode, splits, prefill)[:-1]
    return _frame({"prefill_sms": splits.prefill_sms, "decode_sms": splits.decode_sms,
                   "prefill_s": prefill_s, "decode_s": decode_s,
                   "prefill_alone_s": device.prefill_seconds_all(prefill, splits, None)[:-1],
                   "decode_alone_s": device.decode_seconds_all(decode, splits, None)[:-1],
                   "prefill_flops_per_s": flops / prefill_s, "decode_bytes_per_s": moved / decode_s})


def _total(pieces: list[tuple[int, int]], num_seqs: int, context_tokens: int, device: Device) -> tuple[float, float]:
    """Operations and least bytes of a whole step, on one GPU of the group."""
    model, tp = device.model, device.tensor_parallel
    layer = work.layer_kernels(model, pieces, num_seqs, context_tokens, tp)
    head = work.head_kernels(model, len(pieces) + num_seqs, tp)
    flops, moved = (model.num_layers * sum(getattr(k, what) for k in layer) + sum(getattr(k, what) for k in head)
                    for what in ("flops", "bytes"))
    return flops, moved


def measure_gpu(out: str | Path, *, device: str = "cuda", gpu: str = "h200", model: str | None = None,
                budget_s: float | None = None, splits: Sequence[tuple[int, int]] = (), say: Say = silent) -> str:
    """``bullet-profile sweep``: prove the partitions, then time layers and kernels alone and beside each other into ``out``; a
    folder that holds a part of it is continued. Returns the table that the command prints.

    ``device``: ``cuda`` (the first card; needs the gpu extra), ``cpu``, or ``simulated``: in a card's place the device model of
    ``gpu``, with 3 % noise. ``budget_s``: seconds for everything, and what is measured is planned for that. ``splits``: only
    these of (prefill SMs, decode SMs).
    """
    from bullet.gpu.splits import Split
    from bullet.profiler.session import Target, sweep

    chosen = [Split(*split) for split in splits]
    target = Target(device, splits=chosen) if device != "simulated" else Target(device, splits=chosen, gpu=gpu)
    return "\n".join(sweep(target, Path(out), model=model, budget_s=budget_s, say=say).lines)


def fit_gpu(folder: str | Path, *, out: str | Path | None = None, model: str | None = None) -> Fitted:
    """``bullet-profile fit``: the device that a sweep's rows describe. ``out``: a fresh folder for it, which
    ``{"device.timing": folder}`` simulates on. Its ``lines()`` are what the command prints: errors on rows left out, coefficients
    with their intervals, what is not of these rows; ``rows`` is the table, a dictionary a row."""
    from bullet.profiles.fit import fit_table
    from bullet.profiles.sweeps import model_of, named_table

    path, rows = named_table(Path(folder), None, model)
    spec, rows = model_of(rows, model, str(path))
    if out is None:
        return fit_table(rows, spec)
    with Claim(Path(out)) as claim:  # before a fit of some seconds, not after
        fitted = fit_table(rows, spec)
        fitted.write(claim.folder)
    return fitted


def plot_gpu(folder: str | Path, *, model: str | None = None) -> dict[str, Figure]:
    """The figures of ``bullet-profile plot`` by their titles: what co-running costs, layers against SMs, what the fit leaves, and
    of a real card clocks and controls."""
    from bullet.profiles.page import figures_of

    return figures_of(Path(folder), model)
