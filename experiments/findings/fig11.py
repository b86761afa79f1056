"""Estimators side by side (Fig. 11): ``python -m experiments.findings.fig11 [--sm-data DIR] [--states-only | --tables-only]``.

Mean absolute relative error of seconds, by estimator, for several sample counts and ranges, inside the sampled range and
outside it:

* 7,360 co-running states of the simulated A100: *circular*, the device is our own.
* Every measured table at hand (profiles/*/samples.parquet, and the sweeps over SMs with ``--sm-data``). They hold no
  co-running state: there ``srm`` and ``srm-blind`` are one, eq. 1 and an alpha interpolated and linearly extended.

``linear`` is least squares on the state's variables with the prefill length squared as well; ``forest`` a random forest as
Vidur's (scikit-learn; depth chosen by 3-fold cross-validation among 8, 16, 32). All learn from the same samples.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bullet import work
from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import get_model
from bullet.config import DeviceConfig
from bullet.devices import PROFILES
from bullet.devices.load import load_fitted
from bullet.errors import BulletError
from bullet.estimators.sampling import calibration_states, sample_device
from bullet.estimators.srm import MIN_ALPHA, Srm
from bullet.paper.fig11 import NAMES, Array, compare_states, error, features_of, forest, linear, states
from bullet.piecewise import between
from bullet.profiles.rows import read_parquet
from bullet.profiles.sm_axis import MUXSERVE, SWEPT, greenctx, muxserve
from bullet.state import SplitTable
from experiments.findings.fig09 import eq1_seconds

LEAST_THEORY_S = 5e-6
"""Rows of measured tables below this by eq. 1 are launches, of which no estimator here knows: left out, for all alike."""
LLAMA = get_model("llama-3.1-8b")


def print_states(trees: int, seeds: int) -> None:
    """The circular column: every estimator on the simulated device's states."""
    print(f"{len(states())} co-running states, source = simulated (fitted A100), CIRCULAR; 3 % noise on samples; mean of "
          f"{seeds} seeds\n"
          "mean absolute relative error, %: inside / outside the sampled range")
    print(f"{'samples':<38}{'phase':<9}" + "".join(f"{name:>18}" for name in NAMES))
    found = compare_states(seeds, trees)
    for label, phase in dict.fromkeys(key[:2] for key in found):
        cells = "".join(f"{_cell(*found[label, phase, name]):>18}" for name in NAMES)
        print(f"{label if phase == 'prefill' else '':<38}{phase:<9}{cells}")


def _cell(inside: float, outside: float) -> str:
    return " / ".join("-" if math.isnan(v) else f"{100 * v:.1f}" for v in (inside, outside))


# ----------------------------------------------------------------------------------------- measured tables


@dataclass(frozen=True)
class Table:
    """Measured seconds at points of a few axes, with eq. 1 at each. ``logs``: axes whose alpha runs over the logarithm."""

    name: str
    axes: tuple[str, ...]
    points: Array
    theory_s: Array
    seconds: Array

    def without_launches(self) -> Table:
        """Rows of ``LEAST_THEORY_S`` and more."""
        keep = self.theory_s >= LEAST_THEORY_S
        return Table(self.name, self.axes, self.points[keep], self.theory_s[keep], self.seconds[keep])

    def scaled(self) -> Array:
        """Axes as alpha sees them: SMs as they are, counts by logarithm."""
        return np.column_stack([self.points[:, i] if a == "SMs" else np.log2(np.maximum(self.points[:, i], 1))
                                for i, a in enumerate(self.axes)])


def interpolate_alpha(nodes: Sequence[tuple[float, ...]], alpha: Sequence[float], x: Sequence[float]) -> float:
    """Linear along one axis after the other, extended linearly beyond the outermost nodes."""
    if not x:
        return alpha[0]
    groups: dict[float, tuple[list[tuple[float, ...]], list[float]]] = {}
    for node, value in zip(nodes, alpha, strict=True):
        rest, values = groups.setdefault(node[0], ([], []))
        rest.append(node[1:])
        values.append(value)
    marks = sorted(groups)

    def at(mark: float) -> float:
        return interpolate_alpha(*groups[mark], x[1:])

    if len(marks) == 1:
        return at(marks[0])
    i, share = between(x[0], marks)
    return at(marks[i]) + share * (at(marks[i + 1]) - at(marks[i]))


def sampled(table: Table, count: int, whole: bool) -> Array:
    """True at the rows of a grid of ``count`` nodes an axis, evenly over the axis (by value as alpha sees it), from its whole
    range or the lower half of its distinct values. SMs are taken from the upper half and all: few SMs are extrapolated to."""
    scaled = table.scaled()
    keep = np.ones(len(scaled), dtype=bool)
    for i, axis in enumerate(table.axes):
        values = np.unique(scaled[:, i])
        if not whole and len(values) > 2:
            half = (len(values) + 1) // 2
            values = values[-half:] if axis == "SMs" else values[:half]
        wanted = np.linspace(values[0], values[-1], min(count, len(values)))
        nodes = values[np.unique([int(np.abs(values - w).argmin()) for w in wanted])]
        keep &= np.isin(scaled[:, i], nodes)
    return keep


def compare_tables(tables: Sequence[Table], trees: int) -> None:
    """Each table, by samples an axis and range."""
    tables = [big for t in tables if len((big := t.without_launches()).seconds) >= 12]
    print("\nmeasured tables (source = measured; srm and srm-blind are one here), rows of 5 us and more by eq. 1;\n"
          "mean absolute relative error, %: inside / outside the sampled range")
    names = ("srm", "linear", "forest")
    print(f"{'table':<50}{'rows':>6}{'samples':>9}  {'range':<6}" + "".join(f"{name:>18}" for name in names))
    everything: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for table in tables:
        scaled = table.scaled()
        alpha = table.seconds / table.theory_s
        for count, whole in ((2, True), (4, True), (2, False), (4, False)):
            use = sampled(table, count, whole)
            rest = ~use
            if use.sum() < 2 or not rest.any():
                continue
            box = np.all((scaled >= scaled[use].min(axis=0)) & (scaled <= scaled[use].max(axis=0)), axis=1)
            nodes, values = [tuple(row) for row in scaled[use]], alpha[use].tolist()
            merged = {node: statistics.median(v for n, v in zip(nodes, values, strict=True) if n == node) for node in nodes}
            guess = {"srm": np.array([max(MIN_ALPHA, interpolate_alpha(list(merged), list(merged.values()), tuple(row)))
                                      for row in scaled]) * table.theory_s,
                     "linear": linear(table.points[use], table.seconds[use], (0,))(table.points),
                     "forest": forest(table.points[use], table.seconds[use], trees)(table.points)}
            cells = []
            for name, predicted in guess.items():
                pair = tuple(error(predicted[rest & where], table.seconds[rest & where]) for where in (box, ~box))
                everything.setdefault((name, whole), []).append(pair)
                cells.append(_cell(*pair))
            print(f"{table.name if (count, whole) == (2, True) else '':<50}{len(scaled):>6}{int(use.sum()):>9}  "
                  f"{'whole' if whole else 'half':<6}" + "".join(f"{c:>18}" for c in cells))
    for whole in (True, False):
        cells = [_cell(*(statistics.median(v for p in everything[name, whole] if not math.isnan(v := p[i])) if any(
            not math.isnan(p[i]) for p in everything[name, whole]) else math.nan for i in (0, 1)))
            for name in ("srm", "linear", "forest")]
        print(f"{'median over tables':<50}{'':>6}{'':>9}  {'whole' if whole else 'half':<6}" + "".join(f"{c:>18}" for c in cells))


def profile_tables() -> list[Table]:
    """Kernels alone on a whole device: each GPU, source and operation of the shipped samples."""
    found = []
    for path in sorted(PROFILES.glob("*/llama-3.1-8b/samples.parquet")):
        gpu, rows = get_gpu(path.parts[-3]), read_parquet(path)[0]
        for version in sorted({r["origin_version"] for r in rows}):
            for op, axes in (("gemm_qkv", ("tokens",)), ("gemm_o", ("tokens",)), ("gemm_gate_up", ("tokens",)),
                             ("gemm_down", ("tokens",)), ("gemm_lm_head", ("tokens",)),
                             ("prefill_attention", ("tokens", "batch", "context_tokens")),
                             ("decode_attention", ("batch", "context_tokens")),
                             ("mixed_attention", ("tokens", "context_tokens", "decode_seqs", "decode_context_tokens"))):
                own = [r for r in rows if r["op"] == op and r["origin_version"] == version]
                if len(own) >= 20:
                    found.append(_table(f"{gpu.name} {version} {op}", gpu, axes, own))
    return found


def _table(name: str, gpu: GpuSpec, axes: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    points = np.array([[float(r[a]) / (r["batch"] if (a, r["op"]) == ("tokens", "prefill_attention") else 1) for a in axes]
                       for r in rows])
    varied = [i for i in range(len(axes)) if len(np.unique(points[:, i])) > 1]
    theory = np.array([max(r["flops"] / gpu.peak_flops, r["bytes"] / gpu.mem_bytes_per_s) for r in rows])
    return Table(name, tuple(axes[i] for i in varied), points[:, varied], theory, np.array([r["median_s"] for r in rows]))


def sm_tables(folder: Path) -> list[Table]:
    """Published sweeps over SMs: whole steps on A100, kernels on H100."""
    from experiments.findings.fig09 import A100, H100, kernel_theory, step_theory

    found = []

    def add(name: str, axes: tuple[str, ...], sweep: dict[tuple[int, ...], dict[int, float]], theory: Any) -> None:
        rows = [((*shape, p), theory(shape, p), s) for shape, times in sweep.items() for p, s in sorted(times.items())]
        found.append(Table(name, (*axes, "SMs"), np.array([r[0] for r in rows], dtype=float), np.array([r[1] for r in rows]),
                           np.array([r[2] for r in rows])))

    for size, model in SWEPT.items():
        for phase in ("prefill", "decode"):
            sweep = {s: {round(A100.num_sms * p / 100): t for p, t in times.items()}
                     for s, times in muxserve(folder, size, phase).items()}
            add(f"A100 MuxServe {size} {phase} step", ("batch", "length"), sweep, step_theory(model, phase))
    kernels = greenctx(folder)
    for n, k in sorted({shape[1:] for shape in kernels["gemm"]}):
        own = {(shape[0],): t for shape, t in kernels["gemm"].items() if shape[1:] == (n, k)}
        add(f"H100 greenctx gemm {n}x{k}", ("tokens",), own,
            lambda s, p, n=n, k=k: eq1_seconds([work.gemm("g", s[0], n, k, 2)], p, H100))
    add("H100 greenctx decode_attention", ("batch", "context"), kernels["decode_attention"], kernel_theory("decode_attention"))
    add("H100 greenctx prefill_attention", ("tokens",), kernels["prefill_attention"], kernel_theory("prefill_attention"))
    return found


# --------------------------------------------------------------------------------------------- their cost


def print_cost(trees: int) -> None:
    """CPU time of a prediction, beside the paper's."""
    device = load_fitted(DeviceConfig())
    splits = SplitTable.every(device.num_sms)
    samples = sample_device(device, calibration_states(device, splits), seed=0)
    model = Srm(LLAMA, device.gpu, splits, samples, recalibrate=False)
    x, seconds = features_of(samples, "decode")
    learners = {"linear": linear(x, seconds, (0,)), "forest": forest(x, seconds, trees)}
    print("\nCPU time of one prediction, us "
          "(the paper's predictor: 10.2, Table 5, its machine); see benchmarks/prediction.py")
    rng = np.random.default_rng(0)
    asked = [(int(b), int(b) * 500 + i, 1024, int(rng.integers(splits.full))) for i, b in enumerate(rng.integers(30, 60, 5000))]
    started = time.process_time()
    for state in asked:
        model.decode_at(*state)
    print(f"  srm     {1e6 * (time.process_time() - started) / len(asked):10.1f}")
    for name, learner in learners.items():
        started = time.process_time()
        for i in range(20):
            learner(x[i:i + 1])
        print(f"  {name:<7} {1e6 * (time.process_time() - started) / 20:10.1f}")


def main() -> int:
    """Print all three parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sm-data", type=Path, default=Path("../shared/data/unlicensed"), help="left out where it is not there")
    parser.add_argument("--trees", type=int, default=50, help="of the forest")
    parser.add_argument("--seeds", type=int, default=3, help="of the samples' noise")
    parser.add_argument("--states-only", action="store_true")
    parser.add_argument("--tables-only", action="store_true")
    args = parser.parse_args()
    if not args.tables_only:
        print_states(args.trees, args.seeds)
    if not args.states_only:
        tables = profile_tables()
        if (args.sm_data / MUXSERVE).is_file():
            tables += sm_tables(args.sm_data)
        else:
            print(f"\n{args.sm_data} is not there: tables over SMs are left out", file=sys.stderr)
        compare_tables(tables, args.trees)
    print_cost(args.trees)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        print(f"fig11: error: {exc}", file=sys.stderr)
        sys.exit(2)
