"""What a scheduler is: values in, values out.

A policy is asked at each phase boundary of each of its lanes and answers with a step or :class:`~bullet.state.Wait`.
It never mutates the state, reads no clock (time is an argument) and no random generator; whatever it remembers is
derived from the states and observations it was given, so a recorded run replays into a fresh policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.door import PLAIN_NAMES
from bullet.errors import ConfigError, UnknownOptionError, short
from bullet.estimators.base import Estimator
from bullet.state import Chunk, Decision, Published, SplitTable, Step, SystemState


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is built from. ``estimator`` predicts step times; ``options`` come from ``[policy.options]``;
    ``prefix_cache``: whether prompts share the KV blocks of common beginnings, for policies whose ``shares_prefixes`` is true."""

    model: ModelSpec
    gpu: GpuSpec
    splits: SplitTable
    tpot_slo_s: float
    estimator: Estimator | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prefix_cache: bool = False


@runtime_checkable
class Policy(Protocol):
    """A scheduler. ``lanes``: ``("prefill", "decode")`` or ``("hybrid",)``."""

    lanes: tuple[str, ...]

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """What ``lane``, idle now and with work in the state, should do."""

    def observe(self, step: Step, elapsed_s: float) -> None:
        """A step that this policy asked for took ``elapsed_s``."""


def read_options(owner: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options over defaults; unknown names and other types are refused (a whole number may stand for a float)."""
    values = dict(defaults)
    for name, value in options.items():
        if name not in defaults:
            allowed = ", ".join(sorted(defaults)) or "none"
            raise UnknownOptionError(f"policy.options.{name}: {owner} has no such option; it has: {allowed}", name)
        default = defaults[name]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise ConfigError(f"policy.options.{name} = {short(value)}: {owner} takes "
                              f"{PLAIN_NAMES[type(default).__name__]}")
        values[name] = value
    return values


def require(options: Mapping[str, Any], name: str, fits: bool, allowed: str) -> None:
    """Refuse an option's value unless it ``fits``."""
    if not fits:
        raise ConfigError(f"policy.options.{name} = {options[name]!r}: must be {allowed}")


def _whole(value: object) -> bool:
    return hasattr(value, "__index__")  # numpy's too, no floats


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)  # numpy's floats are floats


def _ids(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_whole, value)) and len(set(value)) == len(value)


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType({
    "sms": (_whole, "a whole number"),
    "layers": (_whole, "a whole number"),
    "admit": (_ids, "a tuple of request ids, none twice"),
    "preempt": (_ids, "a tuple of request ids, none twice"),
    "chunks": (lambda v: isinstance(v, tuple) and all(isinstance(c, Chunk) and all(map(_whole, c)) for c in v),
               "a tuple of Chunks of whole numbers"),
    "predicted_s": (lambda v: v is None or (_number(v) and 0 <= v < math.inf), "None or seconds, finite and not negative"),
    "until_s": (lambda v: v is None or _number(v), "None or a time in seconds"),
    "published": (lambda v: v is None or (isinstance(v, Published) and all(x is None or _number(x) for x in v)),
                  "None or a Published of numbers"),
    "target": (lambda v: v is None or (isinstance(v, tuple) and len(v) == 2 and all(map(_whole, v))),
               "None or a Partition of whole numbers"),
    "reason": (lambda v: isinstance(v, str), "text"),
})
"""What a decision's fields take; those that are not named take anything that is true or false."""


def check_decision(owner: str, lane: str, now_s: float, decision: Decision, num_sms: int) -> None:
    """Refuse a user's decision with a field of another kind, before it reaches the state or the rows.

    Whether what it asks for can be carried out, the state knows. ``num_sms``: the device's.
    """
    for name, value in decision._asdict().items() if isinstance(decision, tuple) and hasattr(decision, "_asdict") else ():
        check, allowed = _FIELDS.get(name, (bool, ""))
        if name == "target" and value is not None and check(value) and not 0 <= min(value) <= max(value) <= num_sms:
            allowed = f"0 to {num_sms} SMs for each lane"
        elif not allowed or check(value):
            continue
        kind = type(decision).__name__
        raise ConfigError(f"policy {owner!r}: at t = {now_s:.6f} s {lane} was answered a {kind} with {name} = {value!r}: must be "
                          f"{allowed}")
