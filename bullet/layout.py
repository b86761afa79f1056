"""Several devices behind a router: how a configuration, and a policy's name, say what stands where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from bullet.errors import require

_LAYOUT = r"(?P<replicas>[0-9]{1,6})|(?P<prefill>[0-9]{1,6})p(?P<decode>[0-9]{1,6})d"


class Layout(NamedTuple):
    """What stands in a cluster: ``replicas`` alike, or devices that prefill and devices that decode."""

    replicas: int
    prefill: int = 0
    decode: int = 0


def split_layout(policy: str) -> tuple[str, str | None]:
    """A policy's name without its layout, and that: ``vllm-1024@3p1d`` is vllm-1024 on three devices that prefill, one that
    decodes."""
    name, at, layout = policy.rpartition("@")
    return (name, layout) if at and name and re.fullmatch(_LAYOUT, layout) else (policy, None)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Several devices (tensor-parallel groups, each as ``[device]`` says) behind one router: docs/cluster.md.

    ``layout``: ``4``, replicas; ``3p1d``, devices that prefill and devices that decode; ``None``: one device, no router. A
    policy's name may end in a layout of its own, ``bullet@4``, which goes before this. ``router``: ``round-robin``,
    ``least-loaded`` (fewest prompt tokens of unfinished requests), ``shortest-queue`` (fewest requests that wait) or
    ``prefix-aware`` (where the prompt's beginning was served, else least-loaded). ``prefill_policy``, ``decode_policy``: on those
    devices in place of ``policy.name``.

    A request's KV bytes leave over its device's link when its prompt is complete and blocks for it are reserved where it will
    decode: ``link_latency_s`` + bytes / ``link_bytes_per_s``, *assumed* 10 us and 25e9 (a 200 Gb/s port). ``overlap``: blocks are
    reserved at arrival, and each layer's KV leaves when that layer is computed.
    """

    layout: str | None = None
    router: str = "round-robin"
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 10e-6
    overlap: bool = False
    prefill_policy: str | None = None
    decode_policy: str | None = None

    def __post_init__(self) -> None:
        if self.layout is not None:
            layout_of(self.layout)
        require(self.router in ROUTERS, "cluster.router (--router)", self.router, "one of " + ", ".join(ROUTERS))
        require(0 < self.link_bytes_per_s <= 1e15, "cluster.link_bytes_per_s", self.link_bytes_per_s, "more than 0, up to 1e15")
        require(0 <= self.link_latency_s <= 10, "cluster.link_latency_s", self.link_latency_s, "0 to 10 s")


ROUTERS = ("round-robin", "least-loaded", "shortest-queue", "prefix-aware")
MOST_DEVICES = 1024


def layout_of(text: str) -> Layout:
    """``N`` or ``xPyD``, read; :class:`ConfigError` if it is neither, or empty."""
    match = re.fullmatch(_LAYOUT, text)
    counts = [int(digits) for digits in match.groups() if digits] if match else [0]
    require(match is not None and min(counts) > 0 and sum(counts) <= MOST_DEVICES, "cluster.layout (--cluster, POLICY@LAYOUT)",
            text, f"N replicas, as 4, or prefill and decode devices, as 3p1d: each at least 1, {MOST_DEVICES} in all")
    return Layout(counts[0]) if len(counts) == 1 else Layout(0, *counts)
