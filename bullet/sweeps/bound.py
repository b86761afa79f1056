"""The fluid bound: how many requests per second the device could serve at most, were every moment spent as well as can be.

A state is prefill alone on all SMs, decode alone on all SMs, or both on a split. In state s the device finishes the prefill of
``P_s`` requests a second and the decode of ``D_s``. Shares of time ``x`` are chosen so that both keep pace:

    maximise r   with   sum x_s P_s = r,   sum x_s D_s = r,   sum x_s = 1,   x_s >= 0

A linear programme with two conditions besides the sum: an optimum needs two states at most, so all pairs are tried.

Rates are the device's own seconds, alone and beside each other: prefills of the workload's prompts in batches of
``BATCH_TOKENS``, and the decode batch that fills the KV cache with requests of mean context. What a scheduler loses to queues,
objectives, boundaries of steps and the drain is not in it, nor what lock-step batches gain by reading weights once for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS, Config, RunConfig, configuration
from bullet.devices.base import Device
from bullet.devices.load import kv_capacity_tokens, load_device
from bullet.errors import ConfigError
from bullet.state import SplitTable
from bullet.workload import Workload, load_workload

Array = NDArray[np.float64]
BATCH_TOKENS = 8192
"""Of a prefill batch; a longer prompt is one of its own. More changes rates by under a percent."""
MOST_REQUESTS = 2000
"""Of the workload, the first ones: lengths are drawn independently."""


LOAD_REQUESTS = 100
"""Enough to tell a tenth of the capacity from half of it."""


class State(NamedTuple):
    """Requests per second whose prefill, and whose decode, are done on these SMs (0: the phase stands still)."""

    prefill_sms: int
    decode_sms: int
    prefill_req_per_s: float
    decode_req_per_s: float

    @property
    def name(self) -> str:
        if not self.decode_sms:
            return "prefill alone"
        return f"{self.prefill_sms} + {self.decode_sms}" if self.prefill_sms else "decode alone"


class Mix(NamedTuple):
    """A rate, and the states with their shares of time that reach it."""

    req_per_s: float
    shares: tuple[tuple[State, float], ...]


@dataclass(frozen=True)
class Bound:
    """``slicing``: one phase at a time. ``fixed``: by split, its own co-run with the tail of either alone. ``fluid``: all states.

    ``decode_seqs``, ``context_tokens``: the decode batch that the rates are of.
    """

    slicing: Mix
    fixed: tuple[tuple[State, Mix], ...]
    fluid: Mix
    decode_seqs: int
    context_tokens: float

    @property
    def best_fixed(self) -> tuple[State, Mix]:
        return max(self.fixed, key=lambda pair: pair[1].req_per_s)

    def text(self) -> str:
        """Four lines, aligned."""
        split, best = self.best_fixed
        rows = [("time-slicing", self.slicing, ""), (f"best fixed split ({split.name})", best, "tails alone"),
                ("fluid bound", self.fluid, "")]
        lines = [f"{name:<32} {mix.req_per_s:7.3f} req/s  x{mix.req_per_s / self.slicing.req_per_s:.3f}  "
                 + ", ".join(f"{state.name} {share:.0%}" for state, share in mix.shares) for name, mix, _ in rows]
        batch = f"decode batch of {self.decode_seqs} requests, {self.context_tokens:.0f} tokens of context each"
        return "\n".join([*lines, batch])


def best_mix(states: list[State]) -> Mix:
    """The linear programme above, for these states alone."""
    p, d = (np.array([getattr(state, name) for state in states]) for name in ("prefill_req_per_s", "decode_req_per_s"))
    ahead, behind = np.flatnonzero(p >= d), np.flatnonzero(p < d)
    alone = [Mix(float(min(a, b)), ((state, 1.0),)) for a, b, state in zip(p, d, states, strict=True)]
    best = max(alone, key=lambda mix: mix.req_per_s)
    if len(ahead) and len(behind):
        over, under = (p - d)[ahead, None], (d - p)[None, behind]
        share = under / (over + under)
        rate = share * p[ahead, None] + (1 - share) * p[None, behind]
        i, j = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[i, j] > best.req_per_s:
            shares = ((states[ahead[i]], float(share[i, j])), (states[behind[j]], float(1 - share[i, j])))
            best = Mix(float(rate[i, j]), tuple(pair for pair in shares if pair[1] > 0))
    return best


def batches(prompts: NDArray[np.int64]) -> list[list[int]]:
    """Prompts in their order, ``BATCH_TOKENS`` to a batch, and at least one."""
    found: list[list[int]] = []
    room = 0
    for tokens in prompts.tolist():
        if not found or tokens > room:
            found.append([])
            room = BATCH_TOKENS
        found[-1].append(tokens)
        room -= tokens
    return found


def states(device: Device, workload: Workload, splits: SplitTable | None, kv_tokens: int) -> tuple[list[State], int, float]:
    """The two alone and, where ``splits`` are given, each of them; the decode batch, and its mean context.

    Requests that do not fit the cache or the context are left out: they are rejected. A request is in the batch as long as its
    output; its context, averaged over that time, is prompt + half of the output.
    """
    prompt, output = (tokens[:MOST_REQUESTS].astype(float) for tokens in (workload.prompt_tokens, workload.output_tokens))
    fits = prompt + output <= min(kv_tokens, device.model.context_tokens)
    if not fits.any():
        raise ConfigError(f"{workload.name}: no request fits {kv_tokens} tokens of KV: there is nothing to bound")
    prompt, output = prompt[fits], output[fits]
    context = float((output * (prompt + output / 2)).sum() / output.sum())
    seqs = max(1, int(kv_tokens // (context + KV_BLOCK_TOKENS / 2)))
    decode_tokens = float((output - 1).mean())
    decode = device.decode_work(seqs, round(seqs * context))
    works = [device.prefill_work([(tokens, 0) for tokens in batch], device.model.num_layers, logits_seqs=len(batch))
             for batch in batches(prompt.astype(np.int64))]
    n = device.num_sms

    def requests(decode_steps_per_s: float) -> float:
        return decode_steps_per_s * seqs / decode_tokens if decode_tokens else np.inf

    found = [State(n, 0, len(prompt) / sum(device.solo_seconds(work, n) for work in works), 0.0 if decode_tokens else np.inf),
             State(0, n, 0.0, requests(1 / device.solo_seconds(decode, n)))]
    if splits is not None:
        prefill_s, step_s = device.coruns_all(works, decode, splits)
        seconds = prefill_s.sum(axis=0)
        # Decode's steps meanwhile: each batch for as long as it lasts.
        steps = (prefill_s / step_s).sum(axis=0)
        found += [State(p, d, len(prompt) / s, requests(of / s)) for p, d, s, of in zip(
            *(column.tolist() for column in (splits.prefill_sms, splits.decode_sms, seconds, steps)), strict=True)]
    return found, seqs, context


def bound(config: Config) -> Bound:
    """The fluid bound of a configuration's workload on its device, whatever its policy and rate."""
    whole = configuration(config)
    return bound_of(whole, load_workload(whole.workload, whole.seed), load_device(whole.device))


def bound_of(config: RunConfig, workload: Workload, device: Device) -> Bound:
    """:func:`bound`, of what is loaded already."""
    kv_tokens = config.device.kv_tokens or kv_capacity_tokens(device.model, device.gpu, config.device)
    splits = SplitTable.every(device.num_sms, config.device.partition_step_sms)
    found, seqs, context = states(device, workload, splits, kv_tokens)
    alone, shared = found[:2], found[2:]
    return Bound(best_mix(alone), tuple((state, best_mix([*alone, state])) for state in shared), best_mix(found), seqs, context)


CAVEAT = "Short of saturation that is the load; lock-step systems may exceed it."


@dataclass(frozen=True)
class Limit:
    """What the systems of a comparison are measured by: the bound, or why it is not known; and the rate of arrivals."""

    bound: Bound | None
    why: str = ""
    offered_req_per_s: float | None = None

    @property
    def known(self) -> bool:
        return self.bound is not None

    def share(self, req_per_s: float | None) -> float | None:
        """Of the bound."""
        return None if self.bound is None or req_per_s is None else req_per_s / self.bound.fluid.req_per_s

    def text(self, throughputs: Mapping[str, float | None]) -> str:
        """One line: the bound, what share of it came, and what each system finished a second, drain included."""
        if self.bound is None:
            return f"share of the fluid bound: not known: {self.why}"
        shares = {"offered": self.share(self.offered_req_per_s)} if self.offered_req_per_s is not None else {}
        shares |= {name: self.share(value) for name, value in throughputs.items()}
        said = ", ".join(f"{name} {'-' if value is None else format(value, '.1%')}" for name, value in shares.items())
        return (f"share of the fluid bound, {self.bound.fluid.req_per_s:.3g} req/s (one phase at a time "
                f"{self.bound.slicing.req_per_s:.3g}): {said}. {CAVEAT}")


def limit_of(config: RunConfig, workload: Workload, device: Device) -> Limit:
    """The bound of a comparison's requests, where it holds and costs milliseconds."""
    why = _unknown(workload, device) if config.layout is None else "it is one device's, and several stand behind a router"
    if why:
        return Limit(None, why)
    try:
        return Limit(bound_of(config, workload, device), offered_req_per_s=workload.describe().rate_req_per_s)
    except ConfigError:  # the run itself will say so
        return Limit(None, "no request fits the KV cache")


def _unknown(workload: Workload, device: Device) -> str:
    """Why a share of what the device can serve means nothing here; empty where it does."""
    from bullet.devices.fitted import DeviceModel

    if workload.closed is not None:
        return "a closed loop sends as fast as it is served"
    if workload.shared_prefix:
        return "prompts share their beginnings"
    if not len(workload):
        return "no requests"
    return "" if isinstance(device, DeviceModel) else "step times are measured, or in tables"


def estimated_capacity(config: Config) -> float:
    """Requests per second when one phase runs at a time: where a search for a rate begins. From the device's seconds alone."""
    whole = configuration(config)
    few = dataclasses.replace(whole.workload, num_requests=None if whole.workload.arrivals == "recorded" else 200)
    model, gpu = get_model(whole.device.model), get_gpu(whole.device.gpu)
    kv_tokens = whole.device.kv_tokens or kv_capacity_tokens(model, gpu, whole.device)
    found, _, _ = states(load_device(whole.device), load_workload(few, whole.seed), None, kv_tokens)
    return best_mix(found).req_per_s


def load_share(config: Config, workload: Workload, device: Device) -> float | None:
    """Offered rate as a share of what the device serves one phase at a time, by ``LOAD_REQUESTS`` of the requests, evenly taken.

    ``None`` where it is not known: a closed loop, a single moment, prompts that may share their beginnings, step times measured
    or in tables, and where nothing fits.
    """
    if _unknown(workload, device):
        return None
    rate = workload.describe().rate_req_per_s
    if rate is None:
        return None
    whole = configuration(config)
    if whole.layout is not None:
        return None
    every = -(-len(workload) // LOAD_REQUESTS)
    few = dataclasses.replace(workload, prompt_tokens=workload.prompt_tokens[::every],
                              output_tokens=workload.output_tokens[::every])
    try:
        kv_tokens = whole.device.kv_tokens or kv_capacity_tokens(device.model, device.gpu, whole.device)
        return rate / best_mix(states(device, few, None, kv_tokens)[0]).req_per_s
    except ConfigError:  # the run itself will say so
        return None
