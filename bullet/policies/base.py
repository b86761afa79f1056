"""What a scheduler is: values in, values out.

A policy is asked at each phase boundary of each of its lanes and answers with a step or :class:`~bullet.state.Wait`.
It never mutates the state, reads no clock (time is an argument) and no random generator; whatever it remembers is
derived from the states and observations it was given, so a recorded run replays into a fresh policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from bullet.config import PLAIN_NAMES, GpuSpec, ModelSpec
from bullet.errors import ConfigError, UnknownOptionError
from bullet.perf import Estimator
from bullet.state import Decision, SplitTable, Step, SystemState


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is built from. ``estimator`` predicts step times; ``options`` come from ``[policy.options]``."""

    model: ModelSpec
    gpu: GpuSpec
    splits: SplitTable
    tpot_slo_s: float
    estimator: Estimator | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


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
            raise ConfigError(f"policy.options.{name} = {value!r}: {owner} takes {PLAIN_NAMES[type(default)]}")
        values[name] = value
    return values
