"""Runs over all cores, or over a Ray cluster, through joblib: what is in the cache is not run, what comes back goes there.

A worker that dies (killed, out of memory) takes down the whole pool: what had come back is kept, the rest is run in a new pool.
Pools that die again and again without one result between them are the end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bullet.config import RunConfig
from bullet.errors import BulletError, ConfigError, ResultsError, one_line
from bullet.signals import Say, silent
from bullet.sweeps.cache import Cache, code_digest, read_entry
from bullet.sweeps.measure import measure

RETRIES = 5
"""Of a run whose worker died, by Ray itself."""
DEATHS = 3
"""Of pools in a row without one result between them."""
_joined: list[str] = []
"""The address of the cluster that this process joined here; empty where it did not, or a notebook did so itself."""
ANSWER_S = 5.0
"""How long a Ray address may take to answer."""


@dataclass(frozen=True)
class Progress:
    """How far a batch of runs is; ``left_s``: from what runs of the same policy took, ``None`` before the first has ended."""

    done: int
    total: int
    left_s: float | None


@dataclass(frozen=True)
class Pool:
    """Where runs go and where results stay. ``jobs``: processes (``None``: a core each). ``ray``: the address of a cluster
    (``HOST:PORT``, ``auto``: the one this machine belongs to, ``local``: one of ``jobs`` workers, started for this); then the
    package must be installed there, of the same sources. Trace files and profiles of one's own must be at the same paths."""

    cache: Cache
    jobs: int | None = None
    ray: str | None = None
    progress: Callable[[Progress], None] | None = None
    say: Say = silent

    @property
    def workers(self) -> int:
        from joblib import cpu_count

        return self.jobs or int(cpu_count())

    def run(self, wanted: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
        """Records by key: ``figures`` or ``error`` (one line), and ``seconds``. Errors are not cached: another try may go
        well."""
        records: dict[str, dict[str, Any]] = {}
        spoilt = len(self.cache.damaged)
        for key in wanted:
            record = self.cache.get(key)
            if record is not None:
                records[key] = record
        for path in self.cache.damaged[spoilt:]:
            self.say(f"{path}: damaged: this run is made anew")
        left = {key: config for key, config in wanted.items() if key not in records}
        tell, deaths = _Estimate(self, len(wanted), records, left), 0
        while left:
            before = len(left)
            try:
                with self._parallel(len(left)) as go:
                    for key, record in go(left.items(), self.cache):
                        if record["code"] != code_digest():
                            raise ConfigError("a worker has another package, python or numpy than this machine: install the same")
                        if "figures" in record:
                            self.cache.put(key, record)
                        records[key] = record
                        tell.ended(left.pop(key), record)
            except (BulletError, KeyboardInterrupt):
                raise
            except Exception as exc:
                deaths = deaths + 1 if len(left) == before else 1
                if deaths >= DEATHS:
                    raise ResultsError(f"workers died {deaths} times in a row ({type(exc).__name__}: {one_line(exc, 200)}): "
                                       f"{len(records)} of {len(wanted)} results are kept in {self.cache.folder}/; fewer --jobs "
                                       "take less memory") from None
                self.say(f"a worker died ({type(exc).__name__}): {len(records)} of {len(wanted)} results are kept, the rest goes "
                         "on")
        return records

    def over_cores(self, do: Callable[..., Any], items: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """``do(*item)`` of each on all cores of this machine, as they end; what it raises ends them all."""
        if self.workers == 1 or len(items) == 1:
            yield from (do(*item) for item in items)
            return
        from joblib import Parallel, delayed

        yield from Parallel(n_jobs=self.workers, backend="loky", batch_size=1, return_as="generator_unordered")(
            delayed(do)(*item) for item in items)

    @contextmanager
    def _parallel(self, tasks: int) -> Iterator[Callable[[Iterable[tuple[str, RunConfig]], Cache], Iterable[tuple[str, Any]]]]:
        """What runs tasks and gives back records as they come."""
        if self.ray is None and (self.workers == 1 or tasks == 1):
            yield lambda work, cache: (run_one(key, config, cache.path(key)) for key, config in list(work))
            return
        if self.ray is not None:
            yield _on_ray(self.ray, self.workers)
            return
        from joblib import Parallel, delayed

        def go(work: Iterable[tuple[str, RunConfig]], cache: Cache) -> Iterable[tuple[str, Any]]:
            # Batches of one: a run takes long enough, and what a batch had done would be lost with its worker.
            run = Parallel(n_jobs=self.workers, backend="loky", batch_size=1, return_as="generator_unordered")
            parent = os.getpid()
            results: Iterable[tuple[str, Any]] = run(delayed(_run_below)(parent, key, config, cache.path(key))
                                                     for key, config in list(work))
            return results

        with warnings.catch_warnings():
            # loky says that it replaced a worker; so do we, with what is kept.
            warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given to the executor")
            yield go


def run_one(key: str, config: RunConfig, entry: Path) -> tuple[str, dict[str, Any]]:
    """One run in a worker. A mistake of the user's, or of ours, is a record like another and stops nobody else's run."""
    with suppress(ResultsError):  # damaged: it will be written over
        record = read_entry(entry)  # another sweep may have been here meanwhile
        if record is not None:
            return key, record
    about: dict[str, Any] = {"code": code_digest(), "policy": config.policy.name}
    try:
        figures, seconds = measure(config)
    except BulletError as exc:
        return key, {**about, "error": one_line(exc), "seconds": 0.0}
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)[-1]
        return key, {**about, "error": f"{type(exc).__name__}: {one_line(exc)} ({Path(where.filename).name}:{where.lineno})",
                     "seconds": 0.0}
    return key, {**about, "figures": figures, "seconds": seconds}


@cache
def _end_with(parent: int) -> None:
    """This worker goes when its parent does, even by a kill: loky's would wait for work for minutes."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_below(parent: int, key: str, config: RunConfig, entry: Path) -> tuple[str, dict[str, Any]]:
    _end_with(parent)
    return run_one(key, config, entry)


class _Estimate:
    """Tells how far it is: what is left by what each policy's runs took so far, over the workers."""

    def __init__(self, pool: Pool, total: int, records: Mapping[str, Any], left: Mapping[str, RunConfig]) -> None:
        self.pool, self.total, self.done = pool, total, len(records)
        self.left: dict[str, int] = {}
        self.took: dict[str, list[float]] = {}
        for config in left.values():
            self.left[config.policy.name] = self.left.get(config.policy.name, 0) + 1
        for record in records.values():
            self.took.setdefault(record["policy"], []).append(record["seconds"])
        self.workers = min(pool.workers, max(1, len(left)))
        if pool.progress is not None:
            pool.progress(Progress(self.done, self.total, None if left else 0.0))

    def ended(self, config: RunConfig, record: Mapping[str, Any]) -> None:
        name = config.policy.name
        self.left[name] -= 1
        self.took.setdefault(name, []).append(record["seconds"])
        self.done += 1
        if self.pool.progress is None:
            return
        means = {policy: sum(seconds) / len(seconds) for policy, seconds in self.took.items()}
        usual = sum(means.values()) / len(means)
        left_s = sum(count * means.get(policy, usual) for policy, count in self.left.items()) / self.workers
        self.pool.progress(Progress(self.done, self.total, left_s))


def _on_ray(address: str, workers: int) -> Callable[[Iterable[tuple[str, RunConfig]], Cache], Iterable[tuple[str, Any]]]:
    """Runs as tasks of a Ray cluster, joined or started here: Ray itself repeats a task whose worker died. (joblib's backend for
    Ray gives nothing back before all is done, and all of it is lost with one worker.)

    :class:`ConfigError` where ray is not installed, or nothing answers.
    """
    try:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning at every task without a GPU
        import ray
    except ImportError as exc:
        raise ConfigError(f"ray is not installed ({one_line(exc)}): pip install 'bullet-llm[cluster]'") from None
    if ray.is_initialized() and _joined not in ([], [address]):
        ray.shutdown()
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            options |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
        else:
            _answers(address)
            options["address"] = address
        try:
            ray.init(**options)
        except Exception as exc:
            raise ConfigError(f"--ray {address}: no Ray cluster there ({type(exc).__name__}: {one_line(exc, 200)})") from None
        _joined[:] = [address]
    remote = ray.remote(max_retries=RETRIES)(run_one)

    def go(work: Iterable[tuple[str, RunConfig]], cache: Cache) -> Iterator[tuple[str, Any]]:
        left = list(work)[::-1]
        flying: list[Any] = []
        while left or flying:
            most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # as workers come and go
            while left and len(flying) < most:
                key, config = left.pop()
                flying.append(remote.remote(key, config, cache.path(key)))
            done, flying = ray.wait(flying)
            yield from ray.get(done)

    return go


def _answers(address: str) -> None:
    """Whether anybody listens at HOST:PORT: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, sep, port = address.removeprefix("ray://").rpartition(":")
    if not sep or not host or not port.isdigit():
        raise ConfigError(f"--ray {address!r}: must be HOST:PORT, auto or local")
    started = time.monotonic()
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"--ray {address}: does not answer after {time.monotonic() - started:.1f} s "
                          f"({getattr(exc, 'strerror', None) or exc}); results so far are in the cache") from None
