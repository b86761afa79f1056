"""A run's decisions on file, and the check that a fresh policy would decide the same.

One JSON line an event, in order: requests as they arrive, what each lane asked and was answered (with a digest of the
state it saw), launches, ends, observations. That is all a policy ever learns, so replaying the events through
:class:`bullet.state.SystemState` and a fresh policy must give the recorded answers; the digest tells a state that went
astray from a policy that did.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bullet import door
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.spec import ModelSpec
from bullet.config import RunConfig
from bullet.devices.measured import StepProfile
from bullet.errors import BulletError, ResultsError, one_line
from bullet.policies.base import Policy
from bullet.runtime.driver import finish_lane, publish
from bullet.state import (
    DECODE,
    PREFILL,
    Chunk,
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    PrefillStep,
    Published,
    Request,
    SplitTable,
    Step,
    SystemState,
    Wait,
)

SCHEMA = "bullet-record"
VERSION = 1
MOST_SMS, MOST_LAYERS = 4096, 10_000
"""More has no device and no model: what is computed for each would have no end."""
ANSWERS: Mapping[str, Any] = {kind.__name__: kind for kind in (
    PrefillStep, DecodeStep, HybridStep, Wait, Chunk, Partition, Published)}
"""What a decision is made of: nothing else that a file names is made."""


def plain(value: Any) -> Any:
    """A decision as JSON has it: its type and fields."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"is": type(value).__name__, **{name: plain(getattr(value, name)) for name in value._fields}}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def digest(state: SystemState) -> str:
    """Short hash of all that a policy may read."""
    prefill, decode = state.prefill, state.decode
    seen = (
        [(r.id, r.known_tokens, r.queued_s) for r in state.queue],
        None if prefill is None else ([r.id for r in prefill.requests], prefill.layers_done),
        [r.id for r in state.ready], [(r.id, r.computed_tokens) for r in state.chunked],
        [(i, decode.generated(r), r.first_token_s) for i, r in decode.requests.items()], decode.context_tokens,
        state.kv.free_blocks, {lane: flight.start_s for lane, flight in state.in_flight.items()},
        plain(state.target), plain(state.prefill_published), plain(state.decode_published))
    return hashlib.sha1(repr(seen).encode()).hexdigest()[:12]


class RecordWriter:
    """Writes a record; call it as the driver's ``record``. A context manager."""

    def __init__(self, path: Path, config: RunConfig, splits: SplitTable, kv_blocks: int, num_layers: int,
                 ttft_slo_s: list[float], workload: Any, extra: Mapping[str, Any]) -> None:
        try:
            self._file = path.open("x", encoding="utf-8")
        except OSError as exc:
            raise ResultsError(f"{path}: cannot be written ({exc.strerror}): choose another --record") from None
        self.path = path
        try:
            self._write({"schema": SCHEMA, "version": VERSION, "config": dataclasses.asdict(config), "num_sms": splits.num_sms,
                         "decode_sms": splits.decode_sms.tolist(), "kv_blocks": kv_blocks, "num_layers": num_layers,
                         "arrival_s": workload.arrival_s.tolist(), "prompt_tokens": workload.prompt_tokens.tolist(),
                         "ttft_slo_s": ttft_slo_s, **extra})
        except ResultsError:
            with suppress(OSError):
                self._file.close()
            raise

    def __call__(self, kind: str, what: tuple[Any, ...]) -> None:
        if kind == "next_step":
            lane, state, now, decision = what
            self._write([kind, lane, now, digest(state), plain(decision)])
        elif kind == "observe":
            step, elapsed = what
            self._write([kind, type(step).__name__, elapsed])
        else:
            self._write([kind, *plain(what)])

    def _write(self, record: Any) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as exc:
            raise self._refused(exc) from None

    def _refused(self, exc: OSError) -> ResultsError:
        return ResultsError(f"{self.path}: cannot be written ({exc.strerror}): choose another --record")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._file.close()  # writes what is still in its buffer
        except OSError as error:
            if exc is None:  # else the first error is the one to tell
                raise self._refused(error) from None


@dataclass
class Header:
    """The first line: what the run was, and all that its policy could know beforehand. Seconds and tokens by request."""

    config: dict[str, Any]
    num_sms: int
    decode_sms: list[int]
    kv_blocks: int
    num_layers: int
    arrival_s: list[float]
    prompt_tokens: list[int]
    ttft_slo_s: list[float]
    gpu: GpuSpec | None = None
    model: ModelSpec | None = None
    steps: StepProfile | None = None


def read_record(path: Path) -> tuple[Header, RunConfig, Iterator[Any]]:
    """Header, configuration and events; a last line cut short is left out. :class:`ResultsError` names the line."""
    values = (value for _, value in door.json_lines(path, ResultsError, ": record the run again"))
    raw = next(values, None)
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA or raw.get("version") != VERSION:
        raise ResultsError(f"{path}: not a {SCHEMA} of version {VERSION}: record the run again")
    header = door.typed(raw, Header, path, ResultsError, others=True)
    if not len(header.arrival_s) == len(header.prompt_tokens) == len(header.ttft_slo_s):
        raise ResultsError(f"{path}: arrival_s, prompt_tokens and ttft_slo_s must be as long as each other")
    if header.num_layers < 1 or min(header.prompt_tokens, default=1) < 1:
        raise ResultsError(f"{path}: num_layers and prompt_tokens must be 1 or more")
    if not 2 <= header.num_sms <= MOST_SMS or header.num_layers > MOST_LAYERS:
        raise ResultsError(f"{path}: num_sms = {header.num_sms}, num_layers = {header.num_layers}: must be 2 to {MOST_SMS} and "
                           f"up to {MOST_LAYERS}")
    return header, door.typed(header.config, RunConfig, path, ResultsError, "config."), values


def replay(path: Path, make_policy: Callable[[Header, RunConfig, SplitTable], Policy]) -> tuple[int, list[str]]:
    """Run the events again. Returns how many decisions there were, and those that differ, one line each (first 20).

    The recorded answer, not the fresh one, is carried out: one difference does not bring on the others.
    """
    header, config, events = read_record(path)
    answers: dict[str, Any] = {}
    flights: dict[str, Step] = {}
    ended: Step | None = None
    decisions, differences = 0, []
    try:
        splits = SplitTable(header.num_sms, np.array(header.decode_sms, dtype=np.int64))
        n = splits.num_sms
        state = SystemState(splits, KvCache(header.kv_blocks), header.num_layers, Partition(n, n))
        policy = make_policy(header, config, splits)
        for kind, *what in events:
            if kind == "arrive":
                i, _ = what
                state.arrive(Request(i, header.arrival_s[i], header.prompt_tokens[i], header.ttft_slo_s[i]))
            elif kind == "next_step":
                lane, now, seen, recorded = what
                decisions += 1
                found = digest(state)
                answer = policy.next_step(lane, state, now)
                if len(differences) < 20:
                    if found != seen:
                        differences.append(f"decision {decisions} ({lane}, t = {now:.6f} s): the state is {found}, was {seen}")
                    if plain(answer) != recorded:
                        differences.append(f"decision {decisions} ({lane}, t = {now:.6f} s): {plain(answer)}, was {recorded}")
                answers[lane] = rebuilt(recorded)
                if len(policy.lanes) == 2:
                    publish(state, lane, answers[lane])
            elif kind == "begin":
                lane, now = what
                step = flights[lane] = answers[lane]
                begin = {PREFILL: state.begin_prefill, DECODE: state.begin_decode}.get(lane, state.begin_hybrid)
                begin(step, now)
            elif kind == "finish":
                lane, now, last = what
                ended = flights.pop(lane)
                _, gone = finish_lane(state, lane, ended, now, lambda request, _, last=last: request.id in last)
                assert [r.id for r in gone] == last, f"{last} end, of which {gone} run"
            elif kind == "observe":
                assert ended is not None
                policy.observe(ended, what[1])
            else:
                raise ValueError(f"unknown event {kind!r}")
    except BulletError:
        raise
    except Exception as exc:  # events in an order, or of a kind, that no run has: anything may come of them
        raise ResultsError(f"{path}: the events cannot be replayed ({type(exc).__name__}: {one_line(exc, 200)}): record the run "
                           "again") from exc
    return decisions, differences


def rebuilt(value: Any) -> Any:
    """:func:`plain` undone."""
    if isinstance(value, dict):
        return ANSWERS[value["is"]](**{name: rebuilt(v) for name, v in value.items() if name != "is"})
    return tuple(rebuilt(v) for v in value) if isinstance(value, list) else value
