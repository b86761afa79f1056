"""Schedulers by name. Adding one: one file here, one line in ``POLICIES``; a user's own is ``path/to/file.py:Class``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from bullet.errors import ConfigError, short
from bullet.layout import layout_of, split_layout
from bullet.policies import custom
from bullet.policies.base import Policy, PolicyContext
from bullet.policies.custom import is_custom

if TYPE_CHECKING:
    from bullet.catalog.gpus import GpuSpec
    from bullet.catalog.models import ModelSpec
    from bullet.config import RunConfig
    from bullet.devices.base import Device
    from bullet.state import SplitTable

__all__ = ["POLICIES", "Policy", "PolicyContext", "build_policy", "check_name", "check_trusted", "describe", "is_custom",
           "make_policy", "needs_estimator"]


class Entry(NamedTuple):
    """One family: what it is, whether it asks an estimator, and ``module:Class``, which is given a name's numbers."""

    description: str
    estimator: bool
    place: str

    def build(self, context: PolicyContext, numbers: list[int]) -> Policy:
        """A policy. Its module is imported only now: what a run does not use costs it nothing."""
        module, _, name = self.place.partition(":")
        policy: Policy = getattr(importlib.import_module(f"{__name__}.{module}"), name)(context, *numbers)
        return policy


POLICIES: dict[str, Entry] = {
    "bullet": Entry("Algorithm 1: dynamic SM split under a performance model", True, "bullet:Bullet"),
    "bullet-literal": Entry("Algorithm 1 to the letter: no cap on a step, late first", True,
                            "bullet:BulletLiteral"),
    "bullet-partition": Entry("an ablation (Fig. 23): bullet's splits, prompts in order of arrival", True,
                              "bullet:BulletPartition"),
    "bullet-scheduler": Entry("an ablation (Fig. 23): bullet's queue, both lanes on all SMs", True, "bullet:BulletScheduler"),
    "bullet-plus": Entry("ours: Algorithm 1 with other splits under KV pressure, stricter TPOT, a share for the overdue", True,
                         "plus:BulletPlus"),
    "muxwise": Entry("Drift (MuxWise): best-fit splits of 16 SMs under worst contention, layers in step with decode", True,
                     "muxwise:Muxwise"),
    "static-P": Entry("fixed split, prefill on P SMs, decode on the rest; free tails (MuxServe-like)", False, "static:Static"),
    "naive": Entry("prefill and decode both on all SMs, no scheduler (Fig. 23)", False, "static:Naive"),
    "sglang-N": Entry("SGLang 0.4.6 default: chunks of N tokens ahead of decodes", False, "chunked:Sglang"),
    "sglang-N-mixed": Entry("the paper's hybrid batch: decodes and chunks in one step of N tokens", False, "chunked:SglangMixed"),
    "sglang": Entry("SGLang with chunking off: whole prompts ahead of decodes", False, "chunked:SglangWhole"),
    "sglang-pdmux": Entry("SGLang's PD multiplexing: splits by the decode batch, layers a pass by a token budget", False,
                          "pdmux:SglangPdmux"),
    "vllm-N": Entry("vLLM 0.8.5 (V1): running first, token budget N, preemption to the front", False, "vllm:Vllm"),
}


MOST_DIGITS = 9


def _find(name: str) -> tuple[Entry, list[int]]:
    for pattern, entry in POLICIES.items():
        expression = re.sub(r"\b[NP]\b", r"([0-9]+)", pattern)
        match = re.fullmatch(expression, name)
        if match:
            if any(len(digits) > MOST_DIGITS or not int(digits) for digits in match.groups()):
                shown = name if len(name) <= 40 else f"{name[:37]}..."
                raise ConfigError(f"policy {shown!r}: the number must be 1 to {10**MOST_DIGITS - 1}")
            return entry, [int(digits) for digits in match.groups()]
    raise ConfigError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)} (N, P: whole numbers), or give "
                      "path/to/file.py:Class")


def check_trusted(name: str, named: Collection[str], where: str, flag: str) -> None:
    """Refuse a user's file that only data name: a record, a stored run or a configuration runs no code until whoever calls the
    command says the same name. ``named``: what the command line says; ``where`` the data are, ``flag``: how to say it."""
    if is_custom(name) and name not in named:
        raise ConfigError(f"{where}: policy {short(name, 200)} is a file of code, which is not run because data name it: say "
                          f"{flag} {short(name, 200)} as well if you trust it")


def describe() -> list[tuple[str, str]]:
    """Names (N, P stand for whole numbers) and what they are."""
    return [(name, entry.description) for name, entry in POLICIES.items()]


def check_name(name: str) -> None:
    """Refuse an unknown name early, before anything is built."""
    name, layout = split_layout(name)
    if layout is not None:
        layout_of(layout)
    if is_custom(name):
        custom.load(name)
    else:
        _find(name)


def needs_estimator(name: str) -> bool:
    """Whether the policy asks predictions; a user's own always may."""
    name = split_layout(name)[0]
    return is_custom(name) or _find(name)[0].estimator


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Build a policy; :class:`ConfigError` says what is allowed."""
    if not is_custom(name):
        entry, numbers = _find(name)
        return entry.build(context, numbers)
    return custom.build(name, context)


def build_policy(config: RunConfig, model: ModelSpec, gpu: GpuSpec, splits: SplitTable, device: Device | None, *,
                 prefix_cache: bool = False) -> Policy:
    """The policy that a configuration names; its estimator, where it asks one, starts from ``device``."""
    chosen, estimator = config.policy, None
    assert config.slo.tpot_s is not None
    if needs_estimator(chosen.name):
        from bullet.estimators.make import make_estimator

        assert device is not None
        estimator = make_estimator(chosen.estimator, device=device.sampled(), model=model, gpu=gpu, splits=splits,
                                   seed=config.seed, recalibrate=chosen.recalibrate, error=chosen.estimator_error)
    return make_policy(chosen.name, PolicyContext(model, gpu, splits, config.slo.tpot_s, estimator, chosen.options, prefix_cache))
