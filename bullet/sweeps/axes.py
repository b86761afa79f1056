"""What a sweep goes through: axes of the configuration, as a grid or in step, and the cells that they make."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet.config import RunConfig, dotted, from_mapping, load_run_config
from bullet.door import read_toml
from bullet.errors import ConfigError

Axes = Mapping[str, Any]
"""Dotted key -> its values: a list; one value; a range ``"from:to"`` or ``"from:to:step"``, both ends included."""

MOST_VALUES = 10_000
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*:\s*({_NUMBER})\s*(?::\s*({_NUMBER})\s*)?")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its place on the axes, and its configuration."""

    place: Mapping[str, Any]
    config: RunConfig


def read_range(key: str, text: str) -> list[int] | list[float] | None:
    """The numbers of ``from:to:step`` (step 1 if it is not said); ``None`` where the text is no range."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    parts = [part for part in match.groups() if part is not None]
    first, last, step = (*map(float, parts), 1.0)[:3]
    if not all(map(math.isfinite, (first, last, step))) or not step or (last - first) * step < 0:
        raise ConfigError(f"axis {key} = {text!r}: goes nowhere: must read from:to or from:to:step with a step towards the end")
    if (last - first) / step >= MOST_VALUES:
        raise ConfigError(f"axis {key} = {text!r}: has over {MOST_VALUES:,} values")
    count = int((last - first) / step + 1e-9) + 1
    if all(re.fullmatch(r"[+-]?\d+", part) for part in parts):
        return [int(first) + i * int(step) for i in range(count)]
    return [float(f"{first + i * step:.12g}") for i in range(count)]  # 2.3, not 2.3000000000000003


def values_of(key: str, given: Any) -> list[Any]:
    """The values of an axis as it is given; each once, at least one."""
    if isinstance(given, str) and (numbers := read_range(key, given)) is not None:
        return list(numbers)
    values = list(given) if isinstance(given, list | tuple | range) else [given]
    if not values:
        raise ConfigError(f"axis {key} = {given!r}: has no value")
    for i, value in enumerate(values):
        if isinstance(value, Mapping | list | tuple):
            raise ConfigError(f"axis {key}: {value!r}: a value must be a number, a string, true or false")
        if any(value == other and type(value) is type(other) for other in values[:i]):
            raise ConfigError(f"axis {key}: {value!r} stands there twice")
    return values


def with_values(config: RunConfig, changes: Mapping[str, Any], where: str = "axis") -> RunConfig:
    """``config`` with other values at dotted keys; :class:`ConfigError` names a key that is unknown, or what a value may be."""
    raw = dataclasses.asdict(config)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node: Any = raw
        for i, parent in enumerate(parents):
            if not isinstance(node.setdefault(parent, {}), dict):
                raise ConfigError(f"{where} {key}: {'.'.join(parents[:i + 1])!r} is not a table")
            node = node[parent]
        if isinstance(node.get(leaf), dict):
            raise ConfigError(f"{where} {key}: is a table: name one of its keys")
        node[leaf] = value
    return from_mapping(RunConfig, raw, where)


def cells(base: RunConfig, axes: Axes, zipped: Sequence[Axes] = ()) -> list[Cell]:
    """All combinations of ``axes`` (the first varies slowest) and of each group of ``zipped``, whose axes go in step."""
    groups: list[list[dict[str, Any]]] = [[{key: value} for value in values_of(key, given)] for key, given in axes.items()]
    for group in filter(None, zipped):
        columns = {key: values_of(key, given) for key, given in group.items()}
        lengths = {key: len(values) for key, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"zipped axes differ in length: {', '.join(f'{key} has {n}' for key, n in lengths.items())}")
        groups.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    keys = [key for group in groups for key in group[0]]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"axis {twice[0]}: is there twice")
    if math.prod(map(len, groups)) > 10**6:
        raise ConfigError(f"the axes make {math.prod(map(len, groups)):,} runs: a million is the most")
    places = [{key: value for part in parts for key, value in part.items()} for parts in itertools.product(*groups)]
    return [Cell(place, with_values(base, place)) for place in places]


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A sweep's TOML: a configuration (as dotted keys), ``[axes]``, and any number of ``[[zip]]``.

    Keys of axes may be dotted in quotes (``"policy.name" = [..]``) or without (``policy.name = [..]``).
    """
    raw = read_toml(path, ConfigError, controls=True)
    axes, zipped = raw.pop("axes", {}), raw.pop("zip", [])
    if not isinstance(axes, dict) or not isinstance(zipped, list) or not all(isinstance(group, dict) for group in zipped):
        raise ConfigError(f"{path}: axes must be a table, [axes], and zip tables, [[zip]]")
    base = dotted(raw)
    try:
        load_run_config(None, base)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from None
    return base, dotted(axes), [dotted(group) for group in zipped]


def varying(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys with more than one value, in the order of the axes."""
    seen: dict[str, list[Any]] = {}
    for place in places:
        for key, value in place.items():
            if value not in (values := seen.setdefault(key, [])):
                values.append(value)
    return [key for key, values in seen.items() if len(values) > 1]
