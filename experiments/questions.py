"""What experiments/conclusions.py asks: workloads by name, arms as configuration keys, and which of them form a race.

A workload is ``TRACE RATE`` (``sharegpt<=8192 18``: prompts of 8,192 tokens at most), a name of bullet/workload/named.py, or
``sine TRACE LOW HIGH`` (six minutes a period); ``@0.1`` behind it is another TPOT objective, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bullet.config import RunConfig, load_run_config
from bullet.errors import ConfigError
from bullet.workload.named import NAMED, named

Keys = Mapping[str, Any]
POINTS = tuple(f"{trace} {rate:g}" for trace, rates in (
    ("sharegpt", (10, 15, 20, 25)), ("azure-code", (4, 4.5, 5, 5.5)), ("arxiv", (0.5, 0.6, 0.7, 0.8, 0.9))) for rate in rates)
CAPPED = tuple(f"sharegpt<=8192 {rate}" for rate in (10, 15, 20, 25))
NEAR = ("sharegpt 15", "sharegpt<=8192 18", "azure-code 5.5", "arxiv 0.7")
"""Near what ``bullet`` serves at most; with and without ShareGPT's rarest prompts."""
OVERLOADS = ("sharegpt 24", "sharegpt<=8192 24", "azure-code 10", "arxiv 1.3")
"""One and a half times what the device can serve, or more."""
LADDER_S = (0.15, 0.1, 0.075, 0.05)
LADDER_WORKLOADS = ("azure-code 5", "sharegpt<=8192 16", "turns-calm", "turns", "day-chat")
SWINGS = (0, 4, 8, 11.5)


def workload_keys(text: str) -> dict[str, Any]:
    """The configuration's keys; :class:`ConfigError` where it is none."""
    about, _, tpot = text.partition(" @")
    first, *rates = about.split()
    keys: dict[str, Any]
    if first == "sine" and len(rates) == 3:
        first, *rates = rates
        trace, _, most = first.partition("<=")
        low, high = map(float, rates)
        keys = {"workload.trace": trace} | ({"workload.rate_profile": f"sine:{low:g}:{high:g}:360s"} if high > low else {
            "workload.rate_req_per_s": low})
    elif not rates:
        return named(first) | ({"slo.tpot_s": float(tpot)} if tpot else {})
    elif len(rates) == 1:
        trace, _, most = first.partition("<=")
        keys = {"workload.trace": trace, "workload.rate_req_per_s": float(rates[0])}
    else:
        raise ConfigError(f"workload {text!r}: must read TRACE RATE, sine TRACE LOW HIGH or a name")
    if most:
        keys["workload.max_prompt_tokens"] = int(most)
    return keys | ({"slo.tpot_s": float(tpot)} if tpot else {})


def config_of(workload: str, arm: Keys, seed: int, requests: int) -> RunConfig:
    """One run."""
    return load_run_config(None, workload_keys(workload) | dict(arm) | {"seed": seed, "workload.num_requests": requests})


def policy(name: str, **options: Any) -> dict[str, Any]:
    return {"policy.name": name, **{f"policy.options.{key}": value for key, value in options.items()}}


def fixed(*decode_sms: int) -> dict[str, Keys]:
    """``bullet`` with one split throughout: its queue, batches and hand-over, decode always on these SMs."""
    return {f"d={d}": policy("bullet", fixed_decode_sms=d) for d in decode_sms}


BULLET: Keys = policy("bullet")
PLUS: Keys = policy("bullet-plus")
SYSTEMS: Mapping[str, Keys] = {name: policy(name) for name in (
    "bullet", "vllm-1024", "sglang-1024-mixed", "sglang-2048-mixed", "sglang-1024", "sglang-2048", "static-96")}
LAUNCH: Keys = {"device.host_launch_s": 20e-6, "device.device_launch_s": 5e-6}


@dataclass(frozen=True)
class Question:
    """``race``: arms of which each workload's best counts: all run on seed 0, two on seed 1, the winner on the others;
    ``entrants``: fewer by workload, by the beginning of its name. ``figures``: what its tables show, with ``absolute`` as they
    are, else as differences from ``baseline``."""

    title: str
    workloads: tuple[str, ...]
    arms: Mapping[str, Keys]
    baseline: str = "bullet"
    race: tuple[str, ...] = ()
    figures: tuple[str, ...] = ("att",)
    seeds: int = 8
    absolute: bool = False
    entrants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def racers(self, workload: str) -> tuple[str, ...]:
        """Who starts in a workload's race."""
        return next((arms for start, arms in self.entrants.items() if workload.startswith(start)), self.race)


def _race(arms: Mapping[str, Keys]) -> tuple[str, ...]:
    return tuple(name for name in arms if name.startswith("d="))


TRAIN = ("azure-code 5", "azure-code 5.5", "sharegpt 15", "sharegpt 20", "arxiv 0.6", "arxiv 0.8", "arxiv 0.9",
         "turns-calm", "turns-fast", "turns-azure", "day-chat", "bursts-code", "bursts-long")
"""On which bullet-plus's parameters were chosen. The rest of its workloads judged them, and has been seen since: whoever chooses
anew needs others."""
SPLITS = fixed(4, 12, 24, 36, 48)
ENTRANTS = {"azure": ("d=4", "d=12", "d=24"), "sharegpt": ("d=12", "d=24", "d=48"), "arxiv": ("d=12", "d=24", "d=36"),
            "turns-fast": ("d=24", "d=36", "d=48"), "turns-": ("d=12", "d=24", "d=36"), "turns": ("d=24", "d=36", "d=48"),
            "": ("d=12", "d=24", "d=36")}
"""Elsewhere a first look at one seed saw nothing to win."""
FEW = fixed(12, 24, 36, 48, 60, 72)
L_STEPS = (1, 8, 32)
QUESTIONS: Mapping[str, Question] = {
    "adaptive": Question("Adaptive against the best fixed split", (*POINTS, *NAMED), {"bullet": BULLET, **SPLITS},
                         race=_race(SPLITS), entrants=ENTRANTS),
    "fig15": Question("Fig. 15", (*POINTS, *CAPPED), SYSTEMS, absolute=True, figures=("att", "latency")),
    "ladder": Question("Does adapting pay: over the TPOT objective",
                       tuple(f"{name} @{tpot:g}" for name in LADDER_WORKLOADS for tpot in LADDER_S), {"bullet": BULLET, **FEW},
                       race=_race(FEW)),
    "drift": Question("Does adapting pay: over drift", tuple(
        f"sine sharegpt<=8192 {12 - swing:g} {12 + swing:g} @{tpot:g}" for tpot in (0.1, 0.05) for swing in SWINGS),
        {"bullet": BULLET, **FEW}, race=_race(FEW)),
    "parts": Question("Parts of Algorithm 1", NEAR, {
        "bullet": BULLET, **{f"hand-over {how}": policy("bullet", hand_over=how) for how in ("batch", "off")},
        "no delayed decode": policy("bullet", delayed_decode=False), "order fcfs": policy("bullet", order="fcfs"),
        "decode floor 12": policy("bullet", decode_floor=1 / 9)}, figures=("att", "TTFT", "TPOT")),
    "literal": Question("The letter of the text", ("sharegpt 10", "azure-code 5", "arxiv 0.6"), {
        "bullet": BULLET, "bullet-literal": policy("bullet-literal")}, absolute=True, figures=("att", "latency", "step")),
    "fig22": Question("Fig. 22: fixed prefill SMs, decode may use all", ("azure-code 4.5", "azure-code 5", "azure-code 5.5"), {
        "bullet": BULLET, "vllm-1024": policy("vllm-1024"), "sglang-1024-mixed": policy("sglang-1024-mixed"),
        **{f"static-{p}": policy(f"static-{p}", decode_sms=108) for p in (84, 96, 108)}},
        figures=("att", "latency"), absolute=True),
    "fig23": Question("Fig. 23: partition and scheduler", ("azure-code 5", "azure-code 5.5", "arxiv 0.7"), {
        "bullet": BULLET, "partition only": policy("bullet", order="fcfs", delayed_decode=False),
        **{f"{name}, share {share:g}": {**keys, "device.shared_prefill_share": share}
           for name, keys in (("scheduler only", policy("bullet", partition=False)), ("naive", policy("naive")))
           for share in (0.5, 0.75, 0.95)}}, figures=("att", "latency"), absolute=True),
    "l_step": Question("L_step, and what a launch costs", NEAR, {
        "bullet": BULLET, **{f"L_step {n}": policy("bullet", layers_per_step=n) for n in L_STEPS},
        "4, launches cost": {**BULLET, **LAUNCH},
        **{f"{n}, launches cost": {**policy("bullet", layers_per_step=n), **LAUNCH} for n in L_STEPS}}),
    "estimator": Question("Estimators and their errors", NEAR, {
        "bullet": BULLET, "srm-blind": {**BULLET, "policy.estimator": "srm-blind"},
        "oracle": {**BULLET, "policy.estimator": "oracle"},
        **{f"{word}, uncorrected": {**BULLET, "policy.estimator_error": error, "policy.recalibrate": False}
           for word, error in (("20 % slow", 1.2), ("20 % fast", 0.8))}}),
    "contention": Question("Contention loss", tuple(NEAR), {
        "bullet": BULLET, **{f"{name}, loss {loss:g}": {**keys, "device.contention_scale": loss / 0.2}
                             for loss in (0.0, 0.4) for name, keys in (("bullet", BULLET), *fixed(24).items(),
                                                                       ("static-96", policy("static-96")))},
        **fixed(24), "static-96": policy("static-96")}, absolute=True),
    "capacity": Question("Throughput at saturation", OVERLOADS, {**SYSTEMS, "plus": PLUS}, absolute=True, figures=("sat", "mix")),
    "plus": Question("bullet-plus", (*POINTS, *NAMED), {"bullet": BULLET, "plus": PLUS, **SPLITS}, race=_race(SPLITS),
                     entrants=ENTRANTS),
    "plus_parts": Question("Parts of bullet-plus", ("sharegpt 20", "azure-code 5.5", "arxiv 0.8", "turns"), {
        "plus": PLUS, "no throughput split": policy("bullet-plus", throughput_split=False),
        "TPOT by P90": policy("bullet-plus", tpot_one_in=10), "batches to the ridge": policy("bullet-plus", batch_tokens=0),
        "late by arrival": policy("bullet-plus", late="arrival"),
        "overdue strictly first": policy("bullet-plus", overdue_every=1)}, baseline="plus", figures=("att", "TTFT", "P99")),
}
