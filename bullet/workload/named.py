"""Workloads by name, in which the share that each phase of a request needs keeps changing: data only, keys of the configuration.

Turns: code completion (long prompts, short answers) and chat (the reverse) one after the other. Days: one trace whose rate goes
up and down. Bursts: gamma gaps with a coefficient of variation of 3. Rates are near what one A100-80GB serves of Llama-3.1-8B; on
another card, or for another load, ``workload.rate_scale`` (bursts: ``workload.rate_req_per_s``) moves them. Prompts are capped
where ShareGPT has a part, whose longest, of 241,402 tokens, decide a short run by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from bullet.errors import ConfigError


class Named(NamedTuple):
    """One line, and the ``workload`` keys that it stands for."""

    description: str
    keys: Mapping[str, Any]


def _turns(what: str, first: str, second: str, most: int | None = 8192) -> Named:
    return Named(f"{what}: {first} and {second} in turns", {"trace": f"{first},{second}", "max_prompt_tokens": most})


def _day(trace: str, low: float, high: float, period: str, most: int | None = None) -> Named:
    return Named(f"{trace}, {low:g} to {high:g} req/s and back in {period}",
                 {"trace": trace, "rate_profile": f"sine:{low:g}:{high:g}:{period}", "max_prompt_tokens": most})


def _bursts(trace: str, rate: float, most: int | None = None) -> Named:
    return Named(f"{trace}, {rate:g} req/s in bursts (gamma gaps, CV 3)",
                 {"trace": trace, "arrivals": "gamma", "cv": 3.0, "rate_req_per_s": rate, "max_prompt_tokens": most})


NAMED: Mapping[str, Named] = MappingProxyType({
    "turns-calm": _turns("drift below capacity", "azure-code@5/60s", "sharegpt@14/60s"),
    "turns": _turns("drift at capacity", "azure-code@5.5/60s", "sharegpt@18/60s"),
    "turns-fast": _turns("drift in seconds", "azure-code@5.5/10s", "sharegpt@18/10s"),
    "turns-slow": _turns("drift in minutes", "azure-code@5.5/300s", "sharegpt@18/300s"),
    "turns-long": _turns("long documents and chat", "arxiv@0.7/120s", "sharegpt@14/120s", 32768),
    "turns-azure": _turns("code and conversation", "azure-code@5/60s", "azure-conv@8/60s", None),
    "day-chat": _day("sharegpt", 4.8, 19, "360s", 8192),
    "day-code": _day("azure-code", 1.6, 6.4, "360s"),
    "day-long": _day("arxiv", 0.25, 1.0, "1200s"),
    "bursts-code": _bursts("azure-code", 4),
    "bursts-chat": _bursts("sharegpt", 14, 8192),
    "bursts-long": _bursts("arxiv", 0.6),
})


def named(name: str) -> dict[str, Any]:
    """Dotted keys of a named workload, as of ``--set``; :class:`ConfigError` lists the names."""
    if name not in NAMED:
        raise ConfigError(f"--workload {name}: unknown: choose one of {', '.join(NAMED)}")
    return {f"workload.{key}": value for key, value in NAMED[name].keys.items() if value is not None}
