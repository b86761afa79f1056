"""The two-sample claim (section 3.2.2, Fig. 9): ``python -m experiments.findings.fig09 [--sm-data DIR] [--plot FILE]``.

SRM says ``T = alpha T'`` with ``T'`` of eq. 1, and that alpha sampled at two SM counts, interpolated and extended linearly,
gives the rest. Here two measured SM counts of a shape give its alpha and every other measured count of it is predicted:
whole steps of llama-7b and 13b on an A100 (MuxServe, MPS shares), Llama-3-8B's kernels on an H100 (green contexts). With
one sample alpha is constant: what eq. 1 knows by itself. Measured by others; nothing is simulated or fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bullet import work
from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model
from bullet.errors import BulletError, ProfileError
from bullet.estimators.srm import along_sms
from bullet.profiles.forms import FitError
from bullet.profiles.sm_axis import MUXSERVE, SWEPT, Sweep, greenctx, muxserve

A100, H100, LLAMA = get_gpu("a100-80gb"), get_gpu("h100"), get_model("llama-3.1-8b")
Theory = Callable[[tuple[int, ...], int], float]
"""(shape, SMs) -> T' of eq. 1."""


def eq1_seconds(kernels: Sequence[work.KernelWork], sms: int, gpu: GpuSpec) -> float:
    """Eq. 1 summed over kernels."""
    compute = gpu.peak_flops * sms / gpu.num_sms
    bandwidth = gpu.mem_bytes_per_s * min(1.0, sms / gpu.knee_sms)
    return sum(max(k.flops / compute, k.bytes / bandwidth) for k in kernels)


def step_theory(model: ModelSpec, phase: str) -> Theory:
    """A whole step of MuxServe's: (batch, sequence length)."""
    def seconds(shape: tuple[int, ...], sms: int) -> float:
        batch, length = shape
        if phase == "prefill":
            layer = work.layer_kernels(model, [(length, 0)] * batch, 0, 0)
        else:
            layer = work.layer_kernels(model, (), batch, batch * (length + 1))
        return model.num_layers * eq1_seconds(layer, sms, A100) + eq1_seconds(work.head_kernels(model, batch), sms, A100)
    return seconds


def kernel_theory(op: str) -> Theory:
    """One kernel of Llama-3-8B; greenctx's prefill attention is not causal (twice the pairs: alpha takes it up)."""
    def seconds(shape: tuple[int, ...], sms: int) -> float:
        if op == "gemm":
            kernel = work.gemm("gemm", *shape, LLAMA.dtype_bytes)
        elif op == "decode_attention":
            kernel = work.decode_attention(LLAMA, shape[0], shape[0] * shape[1])
        else:
            kernel = work.prefill_attention(LLAMA, [(shape[0], 0)])
        return eq1_seconds([kernel], sms, H100)
    return seconds


def predict(times: dict[int, float], theory: Callable[[int], float], sampled: Sequence[int]) -> dict[int, float]:
    """Seconds at every SM count that was not sampled."""
    alpha = {p: times[p] / theory(p) for p in sampled}
    rest = [p for p in sorted(times) if p not in sampled]
    along = along_sms(np.array(rest), alpha)
    return {p: float(a) * theory(p) for p, a in zip(rest, along, strict=True)}


def families(folder: Path) -> list[tuple[str, str, Sweep, Theory]]:
    """(GPU, what, sweep in SMs, theory). MuxServe's shares become SMs."""
    found: list[tuple[str, str, Sweep, Theory]] = []
    for size, model in SWEPT.items():
        for phase in ("prefill", "decode"):
            sweep = {s: {round(A100.num_sms * p / 100): t for p, t in times.items()}
                     for s, times in muxserve(folder, size, phase).items()}
            theory = step_theory(model, phase)
            if phase == "prefill":
                for label, keep in (("2,048 tokens and more", lambda s: s[0] * s[1] >= 2048),
                                    ("fewer (host's floor)", lambda s: s[0] * s[1] < 2048)):
                    found.append(("A100", f"{size} prefill, {label}", {s: t for s, t in sweep.items() if keep(s)}, theory))
            else:
                for label, low, high in (("batch 1-8", 1, 8), ("batch 16-64", 16, 64), ("batch 128-256", 128, 256)):
                    found.append(("A100", f"{size} decode, {label}",
                                  {s: t for s, t in sweep.items() if low <= s[0] <= high}, theory))
    for op, sweep in greenctx(folder).items():
        sweep = {s: t for s, t in sweep.items() if len(t) == 8}
        cuts = {"gemm": (("GEMM, 1-128 tokens", 1, 128), ("GEMM, 512 tokens and more", 512, 10**9)),
                "decode_attention": (("decode attention, batch 1-16", 1, 16), ("decode attention, batch 32-128", 32, 128)),
                "prefill_attention": (("prefill attention, 1,024 tokens and more", 1024, 10**9),)}[op]
        for label, low, high in cuts:
            found.append(("H100", label, {s: t for s, t in sweep.items() if low <= s[0] <= high}, kernel_theory(op)))
    return found


PAIRS = {"A100": ((108,), (54, 108), (32, 108), (32, 54)), "H100": ((132,), (64, 132), (16, 132), (8, 132), (8, 16))}
"""SM counts sampled: one; then two. The last pair of each leaves the larger counts to extrapolation."""


def main() -> int:
    """Print the errors; draw one panel a GPU if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sm-data", type=Path, default=Path("../shared/data/unlicensed"))
    parser.add_argument("--plot", type=Path, help="file for a figure like the paper's")
    args = parser.parse_args()
    if not (args.sm_data / MUXSERVE).is_file():
        raise ProfileError(f"{args.sm_data}: no {MUXSERVE} there; give the folder by --sm-data")
    found = families(args.sm_data)
    print("source: measured by others (MuxServe: A100, MPS shares; greenctx: H100, green contexts); T = alpha T'\n"
          "Relative error at SM counts that were not sampled: median / P90 / worst, %\n")
    for gpu in ("A100", "H100"):
        pairs = PAIRS[gpu]
        print(f"{gpu:<44}{'shapes':>7}" + "".join(f"{'SMs ' + '+'.join(map(str, p)):>20}" for p in pairs))
        every: dict[tuple[int, ...], list[tuple[float, float]]] = {p: [] for p in pairs}
        for where, label, sweep, theory in found:
            if where != gpu:
                continue
            cells = []
            for sampled in pairs:
                points = [(guess, times[p]) for shape, times in sweep.items()
                          for p, guess in predict(times, lambda n, s=shape, t=theory: t(s, n), sampled).items()]
                every[sampled] += points if "floor" not in label else []
                cells.append(_cell(points))
            print(f"{label:<44}{len(sweep):>7}" + "".join(f"{c:>20}" for c in cells))
        print(f"{'all but the floor':<44}{'':>7}" + "".join(f"{_cell(every[p]):>20}" for p in pairs) + "\n")
    if args.plot:
        _plot(found, args.plot)
    return 0


def _cell(points: Sequence[tuple[float, float]]) -> str:
    error = FitError.of(*(np.array(x) for x in zip(*points, strict=True)))
    return f"{100 * error.median:.1f} / {100 * error.p90:.0f} / {100 * error.worst:.0f}"


def _plot(found: Sequence[tuple[str, str, Sweep, Theory]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for panel, gpu, sampled in zip(axes, ("A100", "H100"), ((54, 108), (16, 132)), strict=True):
        for where, label, sweep, theory in found:
            if where != gpu or "floor" in label or "13b" in label or not sweep:
                continue
            shape = list(sweep)[len(sweep) // 2]
            times = sweep[shape]
            whole = times[max(times)]
            line = panel.plot(sorted(times), [times[p] / whole for p in sorted(times)], "o", ms=4)[0]
            guess = predict(times, lambda n, s=shape, t=theory: t(s, n), sampled) | {p: times[p] for p in sampled}
            panel.plot(sorted(guess), [guess[p] / whole for p in sorted(guess)], "-", color=line.get_color(),
                       label=f"{label}: {' x '.join(map(str, shape))}")
        panel.set(xlabel="SMs", ylabel="time relative to all SMs", yscale="log",
                  title=f"{gpu}: measured (points), from {sampled[0]} and {sampled[1]} SMs (lines)")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        print(f"fig09: error: {exc}", file=sys.stderr)
        sys.exit(2)
