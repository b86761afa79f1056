"""Which columns of a trace mean what: names that publishers use, and what must agree before one of them is believed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.workload.values import listed

# Column names tried in this order where neither the configuration nor a format names one, compared by `plain`.
# In brackets: who publishes traces with them.
PROMPT_NAMES = ("prompt_tokens", "contexttokens",  # (Azure, Nanoflow)
                "num_prefill_tokens",  # (Vidur, Sarathi-Serve, POD-Attention)
                "input_tokens", "input_toks",  # (LLMServingSim)
                "input_length",  # (Mooncake, Qwen-Bailian)
                "request_tokens",  # (BurstGPT)
                "input_len", "prompt_length", "prompt_len")
OUTPUT_NAMES = ("output_tokens", "generatedtokens", "num_decode_tokens", "output_toks", "output_length",
                "response_tokens", "output_len", "generated_tokens", "completion_tokens")
ARRIVAL_NAMES = tuple(stem + suffix for suffix in ("_s", "_ms", "_us", "_ns", "")
                      for stem in ("arrival", "arrival_time", "arrived_at", "timestamp"))
PREFIX_NAMES = ("prefix_length", "prefix_len", "prefix_tokens", "shared_prefix_length", "shared_prefix_len",
                "shared_prefix_tokens", "system_prompt_tokens", "history_tokens", "history_length")
"""Columns whose tokens may come on top of a prompt column's."""
ENGINE_NAMES = ("server_input_tokens", "server_prompt_tokens", "engine_input_tokens")
"""What an engine counted as the prompt; 0: it was not asked."""
TOTAL_NAMES = ("total_tokens", "num_total_tokens")
STATUS_NAMES = ("status", "success", "error", "errors", "error_message")
"""Columns that tell a failed request."""
NO_ERROR_WORDS = frozenset({"", "none", "null", "nan", "false", "0", "[]", "{}"})
GOOD_WORDS = frozenset({"", "none", "ok", "success", "successful", "succeeded", "finished", "completed", "complete", "done",
                        "true", "1", "200"})
"""What such a column may say of a request that was served: nothing of an error, one of these of a status."""
ID_NAMES = ("hash_ids",)

_UNIT_WORDS = {"sec": "s", "secs": "s", "second": "s", "seconds": "s", "msec": "ms", "millis": "ms", "milliseconds": "ms",
               "usec": "us", "micros": "us", "microseconds": "us", "nanos": "ns", "nanoseconds": "ns"}


@dataclass(frozen=True)
class Layout:
    """What is read from which column of a file.

    ``prompt``: columns that add up to the prompt; ``engine``: the engine's own count, which stands where it is above 0.
    ``unit``: of a numeric ``arrival`` column, ``None`` where nothing states it; ``unit_from`` says what does. ``prefixes`` must
    be 0, ``same_prompt`` and ``same_output`` equal to what is read, ``totals`` their sum and ``clocks`` (name, unit) tell the
    same times: else a file contradicts itself, and is asked about. ``ones`` must be 1. ``ids``: block ids of the prompt,
    ``block_tokens`` long (``None``: found by the lengths). ``whole``: the format says what every column is, no other has a say.
    ``order``: rows may stand in any order, and are put in that of their arrival, then of this column. ``hint``: what else to say
    when the unit is asked about.
    """

    format: str
    prompt: tuple[str, ...]
    output: str
    arrival: str | None = None
    unit: str | None = None
    unit_from: str = ""
    engine: str | None = None
    status: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    same_prompt: tuple[str, ...] = ()
    same_output: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()
    clocks: tuple[tuple[str, str | None], ...] = ()
    ids: str | None = None
    block_tokens: int | None = None
    ones: tuple[str, ...] = ()
    whole: bool = False
    order: str | None = None
    hint: str = ""

    def columns(self) -> list[str]:
        """Every column that is looked at, each once."""
        single = (self.output, self.arrival, self.engine, self.ids, self.order)
        names = [*self.prompt, *(n for n in single if n is not None), *self.status, *self.prefixes, *self.ones,
                 *self.same_prompt, *self.same_output, *self.totals, *(name for name, _ in self.clocks)]
        return list(dict.fromkeys(names))


def plain(name: str) -> str:
    """A column's name for comparing: lower case, ``_`` for blanks, a unit in brackets or spelled out as a suffix."""
    text = re.sub(r"[\s_]+", "_", re.sub(r"[()\[\]]", " ", name.strip().lower()).strip())
    stem, _, last = text.rpartition("_")
    return f"{stem}_{_UNIT_WORDS[last]}" if last in _UNIT_WORDS and stem else text


def by_plain_name(header: Sequence[str]) -> dict[str, str]:
    """Plain name -> the first column of it."""
    return {plain(name): name for name in reversed(header)}


def unit_in(name: str) -> str | None:
    """The unit that a column's name states."""
    match = re.search(r"_(s|ms|us|ns)$", plain(name))
    return match[1] if match else None


def generic(where: str, header: Sequence[str], config: WorkloadConfig, name: str) -> Layout:
    """By known names, whoever wrote the file."""
    known = by_plain_name(header)

    def first(names: Sequence[str]) -> str | None:
        return next((known[n] for n in names if n in known), None)

    prompt, output, arrival = first(PROMPT_NAMES), first(OUTPUT_NAMES), first(ARRIVAL_NAMES)
    layout = Layout(name, (prompt,) if prompt else (), output or "", arrival, unit_in(arrival) if arrival else None, "its name",
                    ids=first(ID_NAMES))
    return as_configured(where, header, _beside(header, layout), config)


def _beside(header: Sequence[str], layout: Layout) -> Layout:
    """The layout with the other columns that have a say: they must agree with those that are read."""
    read = set(layout.columns())

    def others(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(column for column in header if plain(column) in names and column not in read)

    return dataclasses.replace(
        layout, status=layout.status or others(STATUS_NAMES), prefixes=others(PREFIX_NAMES),
        same_prompt=others((*PROMPT_NAMES, *ENGINE_NAMES)), same_output=others(OUTPUT_NAMES),
        totals=layout.totals or others(TOTAL_NAMES), clocks=tuple((c, unit_in(c)) for c in others(ARRIVAL_NAMES)))


def as_configured(where: str, header: Sequence[str], layout: Layout, config: WorkloadConfig) -> Layout:
    """The layout with the columns and the unit that the configuration names; what it names is not checked against others."""
    prompt = layout.prompt
    if config.prompt_column is not None:
        prompt = _named(where, header, config.prompt_column, "prompt", sums=True)
        layout = dataclasses.replace(layout, prompt=prompt, engine=None, prefixes=(), same_prompt=(), totals=())
    if config.output_column is not None:
        (output,) = _named(where, header, config.output_column, "output")
        layout = dataclasses.replace(layout, output=output, same_output=(), totals=())
    if config.arrival_column == "":
        layout = dataclasses.replace(layout, arrival=None, clocks=())
    elif config.arrival_column is not None:
        (arrival,) = _named(where, header, config.arrival_column, "arrival")
        if arrival != layout.arrival:
            layout = dataclasses.replace(layout, unit=unit_in(arrival), unit_from="its name")
        layout = dataclasses.replace(layout, arrival=arrival, clocks=())
    for what, columns, names in (("prompt", layout.prompt, PROMPT_NAMES), ("output", layout.output, OUTPUT_NAMES)):
        if not columns:
            raise TraceError(f"{where}: no column of {what} tokens: name it by workload.{what}_column, or call it one of "
                             f"{', '.join(names)}; the file has {listed(header)}")
    roles = [*layout.prompt, layout.output, layout.arrival]
    if len(set(roles)) < len(roles):
        raise TraceError(f"{where}: prompt tokens, output tokens and arrival times must be three columns, not "
                         f"{listed([c or '' for c in roles])}")
    if layout.arrival is not None:
        layout = _with_unit(where, layout, config.arrival_unit)
    return layout


def _with_unit(where: str, layout: Layout, wanted: str | None) -> Layout:
    """A unit that is asked for stands where the file states none, and may not contradict one that its name states.

    ``s`` beside another unit in the name gives way: configurations of before held it whether or not anybody had said so.
    """
    assert layout.arrival is not None
    stated = unit_in(layout.arrival)
    if wanted is None or (wanted == "s" and stated is not None):
        return layout
    if stated not in (None, wanted):
        raise TraceError(f"{where}: workload.arrival_unit = {wanted!r}: column {layout.arrival!r} says {stated}")
    return dataclasses.replace(layout, unit=wanted, unit_from="workload.arrival_unit")


def _named(where: str, header: Sequence[str], wanted: str, what: str, sums: bool = False) -> tuple[str, ...]:
    """The column of that name; with ``sums`` also several joined by +."""
    names = [wanted] if wanted in header or not sums else [part.strip() for part in wanted.split("+")]
    for name in names:
        if name not in header:
            raise TraceError(f"{where}: no column {name!r} (workload.{what}_column): the file has {listed(header)}")
    return tuple(names)


def published(where: str, header: Sequence[str], config: WorkloadConfig, layout: Layout, columns: Mapping[str, str],
              title: str) -> Layout:
    """``layout`` in the file's own spelling of a publisher's ``columns`` (plain names: what is there), all of which must be
    there."""
    known = by_plain_name(header)
    missing = next((shown for name, shown in columns.items() if name not in known), None)
    if missing is not None:
        raise TraceError(f"{where}: not the {title} format: column {missing} is missing; must have "
                         f"{', '.join(columns.values())}, has {listed(header)}")

    def own(name: str | None) -> str | None:
        return None if name is None else known.get(name)

    def all_own(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(known[name] for name in names if name in known)

    layout = dataclasses.replace(
        layout, prompt=all_own(layout.prompt), output=known[layout.output], arrival=own(layout.arrival), ids=own(layout.ids),
        engine=own(layout.engine), order=own(layout.order), status=all_own(layout.status), totals=all_own(layout.totals),
        ones=all_own(layout.ones))
    return as_configured(where, header, layout if layout.whole else _beside(header, layout), config)
