"""What the engine tables leave out: unequal contexts, and CUDA graphs with compilation.

**Unequal contexts.** The tables time decode attention on batches whose contexts are all equal. Where sequences alone fill the
SMs the kernel gives each one block per KV head, so the longest ends last, alone. The publisher timed that: n sequences, one of
which has four times the context of the others, beside n with the mean context each. The difference, seconds of one layer, is
kept over n and the tokens by which the longest context exceeds the mean, and is read linearly between measured points::

    layer = tables at (n, mean) + [one long - all at the mean](n, longest - mean)

No tokens beyond the mean cost nothing, nor does a single sequence; beyond the measured points a query is refused. A batch with
a prompt is priced as the tables have it. The rest of a batch counts by its mean alone: whether one sequence or two are long
is not told apart.

**Graphs.** One factor on what the tables say of a step of up to ``graph_tokens`` tokens, the largest that the engine captures
a CUDA graph for. It is given from outside (:mod:`bullet.validation.calibration` finds it); the longest context's time is
not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.table import KernelTables, TableDevice, TableWork
from bullet.errors import ConfigError, ProfileError
from bullet.parquet import read_table
from bullet.piecewise import between

FILE = "decode_skew.parquet"
COLUMNS = ("sequences", "mean_context_tokens", "longest_context_tokens", "even_seconds", "seconds")
LEAST, MOST = 0.5, 1.5
"""Bounds of a factor that can be what graphs do."""


@dataclass(frozen=True)
class DecodeSkew:
    """Seconds of a layer that one longer context adds, over tokens beyond the mean, ascending from 0, for each batch size.

    ``sequences``: ascending from 1, where nothing can exceed the mean.
    """

    source: str
    sequences: tuple[int, ...]
    curves: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]

    def seconds(self, num_seqs: int, beyond_tokens: float) -> float:
        """One layer's additional seconds; :class:`ProfileError` outside what was measured."""
        if beyond_tokens == 0 or num_seqs == 1:
            return 0.0
        sizes = self.sequences
        if num_seqs > sizes[-1]:
            self._refuse(num_seqs, beyond_tokens, f"up to {sizes[-1]} sequences")
        at, right = between(num_seqs, sizes)
        before_s = self._along(at, num_seqs, beyond_tokens) if right < 1 else 0.0  # a size of its own is asked alone
        return (1 - right) * before_s + right * self._along(at + 1, num_seqs, beyond_tokens)

    def _along(self, at: int, num_seqs: int, beyond_tokens: float) -> float:
        if self.sequences[at] == 1:
            return 0.0
        tokens, seconds = self.curves[at]
        if beyond_tokens > tokens[-1]:
            self._refuse(num_seqs, beyond_tokens, f"up to {tokens[-1]:g} at {self.sequences[at]} sequences")
        i, right = between(beyond_tokens, tokens)
        return (1 - right) * seconds[i] + right * seconds[i + 1]

    def _refuse(self, num_seqs: int, beyond_tokens: float, measured: str) -> NoReturn:
        raise ProfileError(f"{self.source}: {num_seqs} decodes of which the longest is {beyond_tokens:g} tokens beyond the mean "
                           f"lie outside what was measured ({measured}): nothing is extrapolated")


class SkewedTableDevice(TableDevice):
    """The table device with what its tables leave out. ``skew=None``, ``graph_factor=1``: the tables' own seconds."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tables: KernelTables, *, skew: DecodeSkew | None = None,
                 graph_factor: float = 1.0, graph_tokens: int = 0, host_gap_s: float = 0.0) -> None:
        if not LEAST <= graph_factor <= MOST:
            raise ConfigError(f"graph factor {graph_factor:g}: must be {LEAST} to {MOST}")
        super().__init__(model, gpu, tables)
        self.asks_longest = skew is not None
        self.skew = skew
        self.graph_factor = graph_factor
        self.graph_tokens = graph_tokens
        self.exposed_s = host_gap_s

    def prefill_work(self, pieces: Sequence[tuple[int, int]], layers: int, *, logits_seqs: int) -> TableWork:
        """As the tables have it, times the factor."""
        seconds = super().prefill_work(pieces, layers, logits_seqs=logits_seqs).seconds
        return self._finished(seconds, sum(new for new, _ in pieces), layers, 0.0)

    def decode_work(self, num_seqs: int, context_tokens: int) -> TableWork:
        """One sequence is its own longest; of more, somebody must say it."""
        return self.hybrid_work((), num_seqs, context_tokens, logits_seqs=num_seqs,
                                longest_tokens=context_tokens if num_seqs == 1 else None)

    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, *, logits_seqs: int,
                    layers: int | None = None, longest_tokens: int | None = None) -> TableWork:
        """``longest_tokens``: the longest context of the ``num_seqs`` decodes, its new token included like theirs."""
        seconds = super().hybrid_work(pieces, num_seqs, context_tokens, logits_seqs=logits_seqs, layers=layers).seconds
        tokens = num_seqs + sum(new for new, _ in pieces)
        layers = self.model.num_layers if layers is None else layers
        tail_s = 0.0
        if self.skew is not None and tokens and all(new == 1 for new, _ in pieces):
            singles = [past + 1 for _, past in pieces]  # to the kernel, decodes
            if num_seqs and longest_tokens is None:
                raise ConfigError(f"{self.skew.source}: a batch of {num_seqs} decodes is priced by its longest context, which "
                                  "was not told: use a policy that names its blocks (vllm-N)")
            mean = (context_tokens + sum(singles)) / tokens
            longest = max(*singles, longest_tokens or 0, 0)
            assert longest >= mean, f"longest context {longest} of {tokens}, mean {mean:g}"
            tail_s = layers * self.skew.seconds(tokens, longest - mean)
        return self._finished(seconds, tokens, layers, tail_s)

    def _finished(self, seconds: float, tokens: int, layers: int, tail_s: float) -> TableWork:
        factor = self.graph_factor if tokens <= self.graph_tokens else 1.0
        return TableWork(factor * seconds + tail_s + self.exposed_s * layers / self.model.num_layers)

    @property
    def source(self) -> str:
        """With what was added to the tables."""
        text = super().source
        if self.skew is not None:
            text += f"; longest context: {self.skew.source}"
        if self.graph_factor != 1.0:
            text += f"; steps of up to {self.graph_tokens} tokens x {self.graph_factor:.4f}"
        return text


# ------------------------------------------------------------------------------------------- files


def read_skew(path: Path, device: TableDevice) -> DecodeSkew:
    """Read a profile's skew rows; :class:`ProfileError` names the file and what is wrong with it.

    ``device``: of the tables that the rows belong to; they must agree on batches of equal contexts.
    """
    table, metadata = read_table(path, "skew rows", COLUMNS)
    rows = table.to_pylist()
    skew = skew_from_rows(rows, metadata.get("source", str(path)), str(path))
    check_skew(rows, device, str(path))
    return skew


def skew_from_rows(rows: Sequence[Mapping[str, Any]], source: str, where: str) -> DecodeSkew:
    """Rows (sequences, mean and longest context, seconds with all at the mean, seconds as they are) as curves."""
    points: dict[int, dict[float, float]] = {}
    for number, row in enumerate(rows, 1):
        sequences, mean, longest = (row[name] for name in COLUMNS[:3])
        if any(not isinstance(x, int) for x in (sequences, mean, longest)) or not (sequences > 1 and 0 < mean < longest):
            raise ProfileError(f"{where}: row {number}: {sequences!r} sequences of mean context {mean!r}, longest {longest!r}: "
                               "must be whole, 2 or more sequences and a longest beyond the mean")
        even, seconds = row["even_seconds"], row["seconds"]
        for name, value in (("even_seconds", even), ("seconds", seconds)):
            if not isinstance(value, float) or not 0 < value < 1:
                raise ProfileError(f"{where}: row {number}: {name} = {value!r}: must be between 0 and 1 s")
        if not 1 / 10 < seconds / even < 10:
            raise ProfileError(f"{where}: row {number}: {seconds:g} s unequal but {even:g} s equal: ten times apart, are both in "
                               "seconds?")
        found = points.setdefault(sequences, {})
        if longest - mean in found:
            raise ProfileError(f"{where}: row {number}: {sequences} sequences, longest {longest - mean} beyond the mean, are "
                               "there twice")
        found[longest - mean] = seconds - even
    if not points:
        raise ProfileError(f"{where}: needs rows")
    sizes = sorted(points)
    curves: list[tuple[tuple[float, ...], tuple[float, ...]]] = [((0.0,), (0.0,))]
    for size in sizes:
        tokens = sorted(points[size])
        curves.append(((0.0, *map(float, tokens)), (0.0, *(points[size][t] for t in tokens))))
    return DecodeSkew(source, (1, *sizes), tuple(curves))


def check_skew(rows: Sequence[Mapping[str, Any]], device: TableDevice, where: str) -> None:
    """Refuse rows whose equal batches are not those of the tables: other units, or another GPU."""
    for number, row in enumerate(rows, 1):
        tables_s = device.attention_seconds(0.0, 0.0, row["sequences"], float(row["mean_context_tokens"]))
        if not math.isclose(row["even_seconds"], tables_s, rel_tol=0.25):
            raise ProfileError(f"{where}: row {number}: {row['even_seconds']:g} s for {row['sequences']} equal contexts of "
                               f"{row['mean_context_tokens']}, the tables have {tables_s:g} s: are all values in seconds of "
                               "one run?")
