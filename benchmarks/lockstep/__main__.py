"""``make lockstep``: our vllm-N and sglang-N beside the published schedulers in random worlds, step by step.

Each engine in a process of its own, as their stubs are not each other's. Same tokens for the same requests, the same preempted,
in every step, and (vLLM) as many free blocks: identical, or the first step that differs is printed. Status 1 if one does.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lockstep import worlds
from benchmarks.lockstep.fetch import fetch
from benchmarks.lockstep.worlds import Outcome, World
from bullet.errors import BulletError

ANNOUNCED = 100
"""Tokens of output that SGLang's clients say they take; the worlds' outputs are below."""


class Kind(NamedTuple):
    """Worlds of one kind, and our policy's options in them."""

    title: str
    draw: Mapping[str, Any]
    policy: str
    options: Callable[[World], dict[str, Any]]


def _seqs(world: World) -> dict[str, Any]:
    return {"max_num_seqs": world.seqs}


def _cached(world: World) -> dict[str, Any]:
    return {"max_num_seqs": world.seqs, "prefix_cache": True}


def _running(world: World) -> dict[str, Any]:
    return {"max_running_requests": world.seqs, "assumed_new_tokens": ANNOUNCED}


VLLM = (Kind("ample KV", {"tight": False}, "vllm-{}", _seqs), Kind("tight KV", {"tight": True}, "vllm-{}", _seqs),
        Kind("ample KV, prefix cache", {"tight": False, "caching": True}, "vllm-{}", _cached),
        Kind("tight KV, prefix cache", {"tight": True, "caching": True}, "vllm-{}", _cached))
SINCE = {"admission": "check", "freed_uncached": "front"}
VLLM_NEW = tuple(kind._replace(options=lambda world, own=kind.options: own(world) | SINCE)  # type: ignore[misc]
                 for kind in VLLM)
SGLANG = tuple(Kind(f"{words}, {kv} KV", {"tight": kv == "tight", "announced": ANNOUNCED, "least_budget": least},
                    "sglang-{}" + suffix, _running)
               for words, suffix, least in (("chunks first", "", 0), ("mixed", "-mixed", 13)) for kv in ("ample", "tight"))
SGLANG += tuple(Kind(f"whole prompts, {kv} KV", {"tight": kv == "tight", "announced": ANNOUNCED}, "sglang",
                     lambda world: _running(world) | {"max_prefill_tokens": world.budget}) for kv in ("ample", "tight"))
# A page more for each newcomer: worlds have room for it, or the head of the queue would wait for ever with nobody running.
SGLANG_NEW = tuple(kind._replace(draw={**kind.draw, "announced": ANNOUNCED + 1},
                                 options=lambda world, own=kind.options: own(world) | {"release": "0.5"})  # type: ignore[misc]
                   for kind in SGLANG)
ENGINES = {"vllm-0.8.5": ("vllm", "0.8.5", "vllm_085", VLLM, 16),
           "vllm-0.33.0": ("vllm", "0.33.0", "vllm_033", VLLM_NEW, 16),
           "sglang-0.4.6": ("sglang", "0.4.6", "sglang_046", SGLANG, 1),
           "sglang-0.5.23": ("sglang", "0.5.23", "sglang_05", SGLANG_NEW, 1)}
WHEELS = ("sglang-0.5.23",)
"""Of which no sdist is published."""


def run(engine: str, folder: Path, count: int) -> int:
    """One engine's worlds; how many of them differ."""
    name, version, module, kinds, block_tokens = ENGINES[engine]
    theirs = importlib.import_module(f"benchmarks.lockstep.{module}")
    modules = theirs.load(fetch(name, version, folder, wheel=engine in WHEELS))
    differ = 0

    def same(a: Outcome, b: Outcome) -> bool:
        # SGLang takes a prompt's tokens chunk by chunk, ours (0.4.6) the whole of it: free tokens differ while one is in part.
        return a.tokens == b.tokens and a.preempted == b.preempted and (engine == "sglang-0.4.6" or a.free == b.free)

    for kind in kinds:
        found = []
        for seed in range(count):
            world = worlds.draw(seed, **kind.draw)
            ours = worlds.Ours(world, worlds.make(kind.policy.format(world.budget), kind.options(world)), block_tokens)
            other = theirs.Theirs(modules, world, **({"mixed": kind.policy.endswith("mixed"), "announced": ANNOUNCED,
                                                      "whole": kind.policy == "sglang"} if name == "sglang" else {}))
            line = worlds.compare(world, ours, other, same)
            if line is not None:
                found.append(line)
        print(f"{engine:<14} {kind.title:<26} {count - len(found)} of {count} worlds identical"
              + (f"; first: {found[0][:300]}" if found else ""), flush=True)
        differ += len(found)
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(prog="lockstep", description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000, help="of each kind (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(".lockstep"), help="for what is downloaded (default %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, help="one alone, in this process")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    if args.engine is not None:
        return int(run(args.engine, args.folder, args.worlds) > 0)
    command = [sys.executable, "-m", "benchmarks.lockstep", "--worlds", str(args.worlds), "--folder", str(args.folder)]
    ended = [subprocess.run([*command, "--engine", engine], check=False).returncode for engine in ENGINES]
    return int(any(ended))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BulletError as exc:
        sys.exit(f"lockstep: {exc}")
