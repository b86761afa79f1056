"""A user's own policy, ``path/to/file.py:Class``: loaded once, asked inside a wrapper that tells whose mistake it is.

Whatever the class does wrong is a :class:`~bullet.errors.PolicyError` of one line with its file and line and the time in the run:
an exception, ``SystemExit``, another signature, an answer of another kind, a state that it changed (:func:`guarded`: the line
itself, where it sets an attribute; :func:`_seen`: the step, where it writes to a list or a counter). A loop inside it ends by a
second Ctrl-C (:mod:`bullet.signals`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from bullet.errors import ConfigError, PolicyError, UnknownOptionError, one_line
from bullet.policies.base import Policy, PolicyContext, check_decision
from bullet.signals import users_code
from bullet.state import DECODE, HYBRID, PREFILL, Decision, Request, Step, SystemState

_loaded: dict[str, tuple[Path, tuple[int, int], ModuleType]] = {}
"""Files that were executed, by the path that named them; again when they have changed (a notebook's user edits them)."""


def is_custom(name: str) -> bool:
    """Whether a name is a user's ``path/to/file.py:Class``."""
    return ".py:" in name or name.endswith(".py")


def load(name: str) -> Callable[[PolicyContext], Any]:
    """The class behind ``path/to/file.py:Class``; :class:`ConfigError`. The file is executed once."""
    path_text, _, class_name = name.rpartition(":")
    if not path_text.endswith(".py") or not class_name:
        raise ConfigError(f"policy {name!r}: must read path/to/file.py:Class")
    path, module = _module(name, path_text)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = sorted(k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
        raise ConfigError(f"{path}: no class {class_name!r}; it defines: {', '.join(classes) or 'none'}")
    missing = [method for method in ("next_step", "observe") if not callable(getattr(found, method, None))]
    if missing:  # lanes may well be set when it is built: build looks at those
        raise ConfigError(f"{path}: class {class_name!r} is not a policy: it lacks {' and '.join(missing)}")
    return found


def _module(name: str, path_text: str) -> tuple[Path, ModuleType]:
    path = Path(os.path.abspath(path_text))
    if not path.is_file():
        if path_text in _loaded:  # the policy itself went to another folder
            return _loaded[path_text][0], _loaded[path_text][2]
        raise ConfigError(f"policy {name!r}: no file {path_text}")
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size)
    known = _loaded.get(path_text)
    if known is not None and known[:2] == (path, stamp):
        return path, known[2]
    module_name = f"bullet_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the user's file look themselves up here
    try:
        with users_code(name):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:  # a script without a main guard may well call sys.exit
        del sys.modules[module_name]
        line = exc.lineno if isinstance(exc, SyntaxError) and exc.filename == str(path) else _line(exc, path)
        where = path if line is None else f"{path}:{line}"
        raise ConfigError(f"{where}: {type(exc).__name__} while loading: {one_line(exc)}") from exc
    _loaded[path_text] = path, stamp, module
    return path, module


def build(name: str, context: PolicyContext) -> Policy:
    """An instance in its wrapper; :class:`ConfigError` or :class:`PolicyError`."""
    cls = load(name)
    path = _module(name, name.rpartition(":")[0])[0]
    try:
        with users_code(name):
            policy = cls(context)
            lanes = getattr(policy, "lanes", None)
    except UnknownOptionError:
        raise  # a comparison leaves the option out
    except (Exception, SystemExit) as exc:
        raise PolicyError(f"{_where(path, exc, cls.__init__)}: policy {name!r} could not be built: {_told(exc)}") from exc
    if lanes is None or not isinstance(policy, Policy):
        raise ConfigError(f"{name}: is not a policy: it needs lanes, next_step(lane, state, now_s) and observe(step, elapsed_s)")
    if not isinstance(lanes, tuple | list) or tuple(lanes) not in ((PREFILL, DECODE), (HYBRID,)):
        raise ConfigError(f"policy {name!r}: lanes = {lanes!r}: must be ('prefill', 'decode') or ('hybrid',)")
    return Custom(name, path, policy)


class Custom:
    """A user's policy, asked with care."""

    def __init__(self, name: str, path: Path, policy: Policy) -> None:
        self.name, self.path, self.policy = name, path, policy
        self.lanes = tuple(policy.lanes)
        self.now_s, self.asked = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        if name == "policy":
            raise AttributeError(name)
        return getattr(self.policy, name)

    @property
    def where(self) -> str:
        """File and line of what answers."""
        return _where(self.path, None, type(self.policy).next_step)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Its answer, of the right kind."""
        self.now_s, self.asked = now_s, self.asked + 1
        before = _seen(state, self.asked)
        try:
            with users_code(self.name), guarded():
                decision = self.policy.next_step(lane, state, now_s)
        except (Exception, SystemExit) as exc:
            self._failed(exc, "next_step")
        after = _seen(state, self.asked)
        if after != before:
            changed = [what for what, a, b in zip(_SEEN, before, after, strict=True) if a != b]
            raise PolicyError(f"{self.where}: policy {self.name!r}: at t = {now_s:.6f} s its next_step changed the state "
                              f"({', '.join(dict.fromkeys(changed))}): it may only read it")
        try:
            check_decision(self.name, lane, now_s, decision, state.splits.num_sms)
        except ConfigError as exc:
            raise PolicyError(f"{self.where}: {exc}") from None
        return decision

    def observe(self, step: Step, elapsed_s: float) -> None:
        """It hears of a step."""
        try:
            with users_code(self.name), guarded():
                self.policy.observe(step, elapsed_s)
        except (Exception, SystemExit) as exc:
            self._failed(exc, "observe")

    def _failed(self, exc: BaseException, method: str) -> NoReturn:
        did = (f"changed the state ({exc}): it may only read it" if isinstance(exc, _ChangedError) else f"failed: {_told(exc)}")
        raise PolicyError(f"{_where(self.path, exc, getattr(type(self.policy), method))}: policy {self.name!r}: at t = "
                          f"{self.now_s:.6f} s its {method} {did}") from exc


class _ChangedError(Exception):
    """A user's policy set an attribute of the state."""


GUARDED = (SystemState, Request)
"""Whose attributes nobody sets while a user's policy is asked: there are too many requests to look at each before and after."""
_asking: dict[int, int] = {}
"""Threads in which a user's policy is being asked, and how often."""
_guard = threading.Lock()


def _refuse(self: Any, name: str, value: Any) -> None:
    if threading.get_ident() in _asking:
        of = f"request {self.id}" if isinstance(self, Request) else type(self).__name__
        raise _ChangedError(f"{of}: {name} = {value!r}"[:200])
    object.__setattr__(self, name, value)


@contextmanager
def guarded() -> Iterator[None]:
    """Within the block this thread sets no attribute of a state: the line that tries raises. The classes themselves are as ever
    outside of it, so that a run under a built-in policy pays nothing."""
    me = threading.get_ident()
    with _guard:
        if not _asking:
            for kind in GUARDED:
                kind.__setattr__ = _refuse  # type: ignore[method-assign]
        _asking[me] = _asking.get(me, 0) + 1
    try:
        yield
    finally:
        with _guard:
            _asking[me] -= 1
            if not _asking[me]:
                del _asking[me]
            if not _asking:
                for kind in GUARDED:
                    del kind.__setattr__


_SEEN = ("queue",) * 5 + ("prefill batch", "ready", "chunked") + ("decode batch",) * 7 + (
    "KV blocks", "in flight", "target", "published", "published")
LONGEST = 4096
"""Of a longer list so many entries are looked at, others at each step: what a step costs is bounded."""


def _seen(state: SystemState, asked: int) -> tuple[Any, ...]:
    """What shows that a state was changed: its lists, arrays and counters; of named blocks only the counts."""
    queue, decode, prefill = state.queue, state.decode, state.prefill
    part = slice(None)
    if len(queue) > LONGEST:
        at = asked * LONGEST % len(queue)
        part = slice(at, at + LONGEST)
    return ((queue.version, len(queue)), tuple(queue.requests[part]), tuple(queue.arrival_s[part]),
            tuple(queue.ttft_slo_s[part]), tuple(queue.known_tokens[part]),
            prefill and (prefill, prefill.requests, prefill.tokens, prefill.deadline_s, prefill.layers_done, prefill.layers_left),
            tuple(state.ready), tuple(state.chunked), (decode, decode.size, decode.version), tuple(decode.requests.values()),
            decode.iteration, decode.context_tokens, tuple(decode.residues), decode.first_token_s.tobytes(),
            decode.generated_offset.tobytes(), (state.kv, state.kv.free_blocks, state.kv.total_blocks),
            [(lane, flight, flight and (flight.step, flight.start_s)) for lane, flight in state.in_flight.items()],
            state.target, state.prefill_published, state.decode_published)


def _line(exc: BaseException | None, path: Path) -> int | None:
    """The last line of the file that an exception went through."""
    line, trace = None, None if exc is None else exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _where(path: Path, exc: BaseException | None, method: Any) -> str:
    """File and line; of another signature, which fails before a line of the file runs, the method's first."""
    code = getattr(method, "__code__", None)
    line = _line(exc, path)
    if line is None and code is not None and code.co_filename == str(path):
        line = code.co_firstlineno
    return str(path) if line is None else f"{path}:{line}"


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {one_line(exc, 300)}" if str(exc) else type(exc).__name__
