"""Why the RTX 4090 run replayed on the tables alone misses where it does (`bullet-sim validate rtx4090`), in figures.

The command's line in full has what was found here, from other sources (bullet/devices/table_skew.py); nothing is set from
these figures.

    python -m experiments.findings.rtx4090_causes

1. Times between first and last token of requests that nobody preempts, by stretch of the run: error beside how far the
   longest context of a decode batch exceeds the mean; the same in full, as the command has it.
2. Which property of the decode batches explains those errors (least squares over these requests).
3. The 15 statistics with what was found, on the jitters of the command.
   Then what the line in full leaves out of it.
4. What the statistic itself can tell: its spread over jitters of 2 and 20 ms, and over requests drawn anew.

The publisher's `skew.csv` (casys-kaist/LLMServingSim, commit a09fa560f737, profiler/perf/RTX4090/.../tp1, MIT) times the same
kernel on unequal contexts. Its values are three times those of attention.csv where both hold the same batch (sums over the
three runs of a measurement). Of 32 decodes, 1 or 2 with four times the others' context: SKEW below.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.devices.table import TableDevice, TableWork
from bullet.state import HybridStep
from bullet.units import MICRO, MILLI
from bullet.validation.calibration import LEFT_OUT, calibrate
from bullet.validation.comparison import average, errors, mean_absolute, request_errors, worst
from bullet.validation.recorded import Recorded, load_recorded
from bullet.validation.replay import JITTER_SEEDS, Replay, Scenario, replay

Array = NDArray[np.float64]
SMALL_JITTER_S = 2 * MILLI
SEEDS_OF_SPREAD = 64
MIXED_S = 36e-9
"""Seconds a layer for a token of the longest context beside a prompt: the middle of skew.csv's rows with 16 and 32 sequences and
prompts of 16 to 1,024 tokens, 33 to 40 ns. To size what is left out, only."""
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts that vLLM 0.19 captures graphs for, by default with 256 sequences; smaller steps are padded to the next."""
SKEW = ((1120, 4096, 584.542, 826.941), (2240, 8192, 1046.925, 1524.513), (560, 2048, 337.754, 457.178),
        (1216, 4096, 622.624, 830.277), (2432, 8192, 1135.590, 1531.458))
"""Mean and longest context, us (three runs) with all at the mean, and as they are."""


class Skewed(TableDevice):
    """The table device with a decode batch's longest context, and other things, in its steps' seconds."""

    per_token_s = 0.0  # of the longest context beyond the mean, a layer
    factor = 1.0  # on steps without a prompt
    pads = False
    beyond_tokens = 0.0

    def look(self, step: HybridStep) -> None:
        """See the contexts of the step that comes next."""
        contexts = [past for _, new, past in step.chunks if new == 1]
        self.beyond_tokens = max(contexts) - sum(contexts) / len(contexts) if contexts else 0.0

    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, **options: Any) -> Any:
        """As the tables', with the longest context's own time."""
        seconds = super().hybrid_work(pieces, num_seqs, context_tokens, **options).seconds
        if not pieces:
            seconds = self.factor * seconds + self.model.num_layers * self.per_token_s * self.beyond_tokens
        return TableWork(seconds)

    def _dense_seconds(self, tokens: int) -> float:
        if self.pads and tokens <= GRAPH_SIZES[-1]:
            tokens = GRAPH_SIZES[bisect.bisect_left(GRAPH_SIZES, tokens)]
        return super()._dense_seconds(tokens)


def device(recorded: Recorded, **changes: Any) -> Skewed:
    """A fresh one."""
    made = Skewed(get_model(recorded.model), get_gpu(recorded.gpu), recorded.tables)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def undisturbed(recorded: Recorded, scenario: Scenario | None = None) -> tuple[Replay, list[int], dict[str, Array]]:
    """The run as sent; requests that no replay preempts; for each, the sums of a few properties over its steps.

    The recording does not say who was preempted: taken are those whom neither the run as sent nor 8 moved by 2 ms preempt.
    """
    steps: list[tuple[float, ...]] = []

    def look(step: HybridStep) -> None:
        contexts = sorted(past for _, new, past in step.chunks if new == 1)
        alone = len(contexts) == len(step.chunks)
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        tail = (contexts[-1] - mean, contexts[-2] - mean if len(contexts) > 1 else 0.0,
                float(np.percentile(contexts, 90)) - mean, float(np.std(contexts))) if contexts else (0.0,) * 4
        steps.append((alone, *(alone * x for x in (*tail, len(contexts)))))

    one = replay(recorded, scenario, watch=look)
    moved = [replay(recorded, scenario, seed=seed, jitter_s=SMALL_JITTER_S) for seed in JITTER_SEEDS]
    calm = ~np.any([r.preempted for r in (one, *moved)], axis=0) & (recorded.output_tokens > 100)
    ends = one.step_ends_s
    names = ("alone", "longest", "second longest", "P90", "standard deviation", "sequences")
    columns = {name: np.array([row[i] for row in steps]) for i, name in enumerate(names)}
    columns["seconds"] = columns["alone"] * np.diff(ends, prepend=0.0)
    ids = [int(i) for i in np.flatnonzero(calm)]
    at = [(int(np.searchsorted(ends, one.first_s[i] - 1e-9)), int(np.searchsorted(ends, one.last_s[i] - 1e-9))) for i in ids]
    return one, ids, {name: np.array([column[a + 1:b + 1].sum() for a, b in at]) for name, column in columns.items()}


def by_stretch(recorded: Recorded, one: Replay, ids: Sequence[int], sums: Mapping[str, Array]) -> str:
    """Errors of undisturbed requests by the middle of their decoding."""
    off = request_errors(recorded, one)["tpot"][ids]
    middle = (recorded.first_s[ids] + recorded.last_s[ids]) / 2
    beyond = sums["longest"] / sums["alone"]
    lines = [f"TPOT of {len(ids)} requests that no replay preempts, one run",
             f"{'decoding around, s':>20}{'requests':>10}{'error %: median':>17}{'P10':>7}{'P90':>7}"
             f"{'longest - mean, tokens':>24}"]
    for start in range(0, int(middle.max()) + 1, 20):
        here = (middle >= start) & (middle < start + 20)
        if here.any():
            p10, p50, p90 = np.percentile(off[here], (10, 50, 90)) * 100
            lines.append(f"{start:>13} to {start + 20:>3}{here.sum():>10}{p50:>+17.1f}{p10:>+7.1f}{p90:>+7.1f}"
                         f"{beyond[here].mean():>24,.0f}")
    return "\n".join(lines)


def explained(recorded: Recorded, one: Replay, ids: Sequence[int], sums: Mapping[str, Array], layers: int) -> tuple[str, float]:
    """Least squares of measured less simulated seconds; the factor on steps without a prompt that is left."""
    lacking = (recorded.last_s - recorded.first_s - one.last_s + one.first_s)[ids]
    spread = float(((lacking - lacking.mean()) ** 2).sum())
    lines = ["", "measured less simulated seconds = a x seconds of steps without a prompt + b x layers x property, least squares"]
    for name in ("longest", "second longest", "P90", "standard deviation", "sequences"):
        x = np.stack([sums["seconds"], layers * sums[name]], axis=1)
        (a, b), *_ = np.linalg.lstsq(x, lacking, rcond=None)
        share = 1 - float(((lacking - x @ (a, b)) ** 2).sum()) / spread
        lines.append(f"  {name:<20} explains {share:>5.0%}: a = {a:+.3f}, b = {b / 1e-9:+.1f} ns")
    slopes = published_slopes_s()
    slope_s = float(np.mean(slopes))
    left = lacking - layers * slope_s * sums["longest"]
    a = float(left @ sums["seconds"] / (sums["seconds"] @ sums["seconds"]))
    share = 1 - float(((left - a * sums["seconds"]) ** 2).sum()) / spread
    published = ", ".join(f"{s / 1e-9:.1f}" for s in slopes)
    lines.append(f"  the publisher's table has b = {published} ns (32 decodes); with their mean, {slope_s / 1e-9:.1f} ns, "
                 f"a = {a:+.3f} explains {share:.0%}")
    return "\n".join(lines), a


def published_slopes_s() -> list[float]:
    """Seconds a layer that a token of the longest context beyond the mean costs, in the publisher's table."""
    return [(unequal - equal) * MICRO / 3 / (longest - mean) for mean, longest, equal, unequal in SKEW]


def effect(recorded: Recorded, name: str, changes: Mapping[str, Any]) -> str:
    """The statistics of a device over the command's jitters."""
    def run(seed: int | None) -> Replay:
        made = device(recorded, **changes)
        return replay(recorded, seed=seed, device=made, watch=made.look)

    runs, one = [run(seed) for seed in JITTER_SEEDS], run(None)
    text = f"  {name:<50}"
    for first in (0, LEFT_OUT):
        off = errors(average(runs, first), _measured(recorded, first))
        text += (f"{off['tpot_mean'] * 100:>+8.2f}{off['tpot_p90'] * 100:>+7.2f}{worst(off)[1] * 100:>+8.2f}"
                 f"{mean_absolute(off) * 100:>7.2f}")
    return text + f"{np.median(np.abs(request_errors(recorded, one)['tpot'])) * 100:>9.2f}"


def left_over(recorded: Recorded, full: Scenario) -> str:
    """How much of the run in full the longest contexts are, and what the command still does not price."""
    layers = get_model(recorded.model).num_layers
    rows: list[tuple[float, ...]] = []

    def look(step: HybridStep) -> None:
        contexts = sorted(past for _, new, past in step.chunks if new == 1)
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        beyond, second = (contexts[-1] - mean if contexts else 0.0, contexts[-2] - mean if len(contexts) > 1 else 0.0)
        alone = len(contexts) == len(step.chunks)
        tail_s = layers * recorded.skew.seconds(len(contexts), beyond) if alone else 0.0
        rows.append((alone, beyond, second, tail_s, sum(new for _, new, _ in step.chunks)))

    one = replay(recorded, full, watch=look)
    alone, beyond, second, tail_s, tokens = np.array(rows).T
    mixed = alone == 0
    share = 100 / one.step_ends_s[-1]
    lacking, most = share * layers * MIXED_S * beyond[mixed].sum(), GRAPH_SIZES[-1]
    return (f"\nin full: the longest contexts take {share * tail_s.sum():.1f} % of the time; mean excess of the longest "
            f"{beyond[~mixed].mean():,.0f} tokens, of the second longest {second[~mixed].mean():,.0f}\n"
            f"steps with a prompt: {mixed.sum()} of {len(rows):,}, {(mixed & (tokens <= most)).sum()} of {most} tokens or fewer; "
            f"at {MIXED_S * 1e9:.0f} ns a token and layer their longest contexts would take {lacking:.1f} % of the time")


def statistic(recorded: Recorded) -> str:
    """Spread of TPOT P90: over arrivals, and over requests."""
    lines = ["", f"TPOT P90, {SEEDS_OF_SPREAD} replays: error of the mean, sd, of blocks of 8 seeds, %"]
    for jitter_s in (SMALL_JITTER_S, 20 * MILLI):
        runs = [replay(recorded, seed=seed, jitter_s=jitter_s) for seed in range(SEEDS_OF_SPREAD)]
        for first in (0, LEFT_OUT):
            real = _measured(recorded, first)["tpot_p90"]
            off = np.array([r.statistics(first)["tpot_p90"] for r in runs]) / real - 1
            blocks = off.reshape(-1, 8).mean(axis=1)
            whose = f"moved by {jitter_s * 1e3:.0f} ms, " + (f"last {len(recorded) - first}" if first else "all")
            lines.append(f"  {whose:<26}{off.mean() * 100:>+6.2f}{off.std(ddof=1) * 100:>6.2f}   "
                         + " ".join(f"{b * 100:+.2f}" for b in blocks))
    tpot = (recorded.last_s - recorded.first_s) / np.maximum(1, recorded.output_tokens - 1)
    generator = np.random.default_rng(0)
    for first in (0, LEFT_OUT):
        these = tpot[first:]
        drawn = np.percentile(generator.choice(these, (10_000, len(these))), 90, axis=1)
        low, high = np.percentile(drawn, (2.5, 97.5)) / np.percentile(these, 90) - 1
        lines.append(f"  measured, {len(these)} requests drawn anew: 95 % within {low * 100:+.1f} to {high * 100:+.1f} %")
    return "\n".join(lines)


def _measured(recorded: Recorded, first: int) -> dict[str, float]:
    return recorded.statistics(first)


def main() -> None:
    recorded = load_recorded("rtx4090")
    layers = get_model(recorded.model).num_layers
    one, ids, sums = undisturbed(recorded)
    print(by_stretch(recorded, one, ids, sums))
    full = Scenario("in full", skew=True, graph_factor=calibrate(recorded).factor)
    print(f"\nin full, graph factor {full.graph_factor:.4f}:\n{by_stretch(recorded, *undisturbed(recorded, full))}")
    text, a = explained(recorded, one, ids, sums, layers)
    print(text)
    slope_s = float(np.mean(published_slopes_s()))
    print(f"\n{'error of the mean over 8 jitters, %':<52}{'all: TPOT mean, P90, largest, mean abs.':>30}{'the last 270':>30}"
          f"{'one run, a request':>20}")
    for name, changes in (("tables alone", {}), ("padded to graph sizes", {"pads": True}),
                          (f"longest context, {slope_s * 1e9:.1f} ns a token (publisher)", {"per_token_s": slope_s}),
                          (f"and decode steps x {1 + a:.3f} (from this run: circular)",
                           {"per_token_s": slope_s, "factor": 1 + a})):
        print(effect(recorded, name, changes))
    print(statistic(recorded))
    print(left_over(recorded, full))


if __name__ == "__main__":
    main()
