"""The same run, or comparison, under several seeds: means with their intervals, and paired differences between policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bullet.results import tables
from bullet.results.student import CONFIDENCE
from bullet.sweeps.bound import CAVEAT, Limit
from bullet.sweeps.intervals import Estimate, interval, paired

Summaries = Sequence[Sequence[Mapping[str, Any]]]
"""A list a seed, of one summary a system, in the same order."""


def estimates(summaries: Summaries) -> list[dict[str, Estimate]]:
    """Of each system, every figure that all seeds have: its mean over the seeds."""
    return [{key: interval([float(s[key]) for s in runs]) for key in _numbers(runs)} for runs in zip(*summaries, strict=True)]


def differences(summaries: Summaries) -> list[dict[str, Estimate]]:
    """Of each system but the first, figures less the first's, seed by seed: both had the same requests."""
    first, *others = zip(*summaries, strict=True)
    return [{key: paired([float(s[key]) for s in runs], [float(s[key]) for s in first])
             for key in _numbers(runs) if key in _numbers(first)} for runs in others]


def _numbers(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of figures, in their order; not those that are the same by the configuration's word."""
    return [key for key in runs[0] if key != "seed" and all(
        isinstance(s.get(key), int | float) and not isinstance(s[key], bool) for s in runs)]


def seeds_table(summaries: Summaries, width: int = tables.WIDTH) -> str:
    """As the table of one seed, each figure with its interval; below it the differences from the first system."""
    first = summaries[0]
    seeds = [runs[0]["seed"] for runs in summaries]
    head = tables.headline(first[0]).rpartition(", seed ")[0]
    names = [tables.label(s) for s in first]
    lines = (f"{head}, seeds {seeds[0]} to {seeds[-1]}", *tables.model_line(first[0]))
    parts = [*(tables.wrapped(line, width) for line in lines),
             "", _grid(names, estimates(summaries), first, width)]
    if len(first) > 1:
        parts += ["", tables.wrapped(f"less {names[0]}, of the same requests:", width), "",
                  _grid(names[1:], differences(summaries), first, width, "+")]
    said = f"mean ± half the {CONFIDENCE:.0%} interval over {len(seeds)} seeds (Student's t)"
    notes = [note for note in tables.notes_on(first) if not note.startswith("rejected")]
    return "\n".join([*parts, "", *(tables.wrapped(note, width) for note in (said + ".", *notes))])


def _grid(names: Sequence[str], found: Sequence[Mapping[str, Estimate]], first: Sequence[Mapping[str, Any]], width: int,
          sign: str = "") -> str:
    columns = []
    for group, title, key, form in tables.columns_of(first):
        cells = [one[key].text(sign + (".0f" if form == "d" else form)) if key in one else "-" for one in found]
        columns.append((group, title, cells))
    return tables.grid(names, columns, width)


def shares_line(limits: Sequence[Limit], summaries: Summaries) -> str:
    """:meth:`~bullet.sweeps.bound.Limit.text` with the mean over seeds, each by the bound of its own requests."""
    if limits[0].bound is None:
        return limits[0].text({})
    shares: dict[str, list[float | None]] = {"offered": [limit.share(limit.offered_req_per_s) for limit in limits]}
    for runs in zip(*summaries, strict=True):
        shares[tables.label(runs[0])] = [limit.share(s["request_throughput"]) for limit, s in zip(limits, runs, strict=True)]
    texts = {}
    for name, values in shares.items():
        known = [100 * value for value in values if value is not None]
        texts[name] = f"{name} {interval(known).text('.1f')} %" if len(known) == len(values) else f"{name} -"
    bounds = interval([limit.bound.fluid.req_per_s for limit in limits if limit.bound is not None])
    return f"share of the fluid bound, {bounds.text('.3g')} req/s: {', '.join(texts.values())}. {CAVEAT}"


def record(summaries: Summaries) -> list[dict[str, Any]]:
    """``seeds.json``: a system each, its figures' means, half widths and differences."""
    none: dict[str, Estimate] = {}
    return [{"system": s["system"], "estimator": s["estimator"], "seeds": len(summaries),
             "figures": {key: {"mean": e.mean, "half_width": e.half_width} for key, e in own.items()},
             "less_first": {key: {"mean": e.mean, "half_width": e.half_width} for key, e in other.items()}}
            for s, own, other in zip(summaries[0], estimates(summaries), [none, *differences(summaries)], strict=True)]
