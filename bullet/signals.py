"""The life of a command: who hears of a run, and how a signal stops it.

One handler for SIGINT, SIGTERM and SIGHUP stands from a command's first byte to its last file (:func:`listening`). What it does
depends on where the signal strikes:

==============================  ================================================================================
a run writes its rows           the run ends at its next step, every request accounted for (:class:`Listener`)
.. and the step does not come   after a second a line says so; another signal ends a user's policy where it is
files are being written         nothing until they are whole (:func:`held`), then as elsewhere
elsewhere                       :class:`Stopped` is raised there
==============================  ================================================================================

Without a handler (a notebook, a test) only :func:`held` acts: a signal that comes meanwhile is carried out afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

Say = Callable[[str], None]
"""Who hears lines as they come."""
Watch = Callable[[Any, int, str], AbstractContextManager[Callable[[int], None] | None]]
"""Who watches runs: given a run's :class:`~bullet.results.folder.RunWriter`, its requests and its policy's name, a block that the
run goes on in; it gives what is told how many requests have ended (None: nobody)."""

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 1.0
"""How long a stop may be on its way before it is said. Signals that come closer than this are one: a key that is held down."""


def silent(line: str) -> None:
    """Nobody hears."""


def warn(line: str) -> None:
    """One line to standard error, if there is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


@contextlib.contextmanager
def unwatched(writer: Any, requests: int, name: str) -> Iterator[None]:
    """Nobody."""
    yield


class Stopped(KeyboardInterrupt):
    """A signal, on its way out. ``number``: which."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(stop_words(number))
        self.number = int(number)


def stop_words(number: int) -> str:
    """What a line says of it."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def exit_status(exc: KeyboardInterrupt) -> int:
    """As a shell has it: 130, 143, 129."""
    return 128 + int(getattr(exc, "number", signal.SIGINT))


class Listener(Protocol):
    """Who is asked to stop, and does so where nothing is lost."""

    def request_stop(self) -> None:
        """Called from the handler, once."""


class _Life:
    """What is known of the command that runs; one a process."""

    def __init__(self) -> None:
        self.program = ""  # empty: no handler stands
        self.heard: int | None = None  # the first signal
        self.pending = False  # heard, and not yet carried out
        self.held = 0
        self.listeners: list[Listener] = []
        self.users_code = ""  # the user's policy that is being asked
        self.raised_s = -PATIENCE_S
        self.timed = False

    def hear(self, number: int, frame: object) -> None:
        first, self.heard = self.heard is None, self.heard or number
        if self.held:
            self.pending = True
            for listener in self.listeners:
                listener.request_stop()
        elif self.listeners and not (self.users_code and not first):
            self.pending = True
            for listener in self.listeners:
                listener.request_stop()
            if first:
                self.timed = True
                signal.signal(signal.SIGALRM, self.still_going)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        elif self.users_code or time.monotonic() - self.raised_s >= PATIENCE_S:
            raise self.stopped()

    def still_going(self, number: int, frame: object) -> None:
        if self.pending and self.listeners:
            by = stop_words(self.heard or signal.SIGINT)
            of = f"policy {self.users_code!r} has not answered" if self.users_code else "it has not ended"
            again = ": again stops it there" if self.users_code else ""
            warn(f"{self.program}: {by}, stops after the present step: {of} for {PATIENCE_S:g} s{again}")

    def stopped(self) -> Stopped:
        self.pending, self.raised_s = False, time.monotonic()
        self.untimed()
        return Stopped(self.heard or signal.SIGINT)

    def untimed(self) -> None:
        if self.timed:
            self.timed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


_life = _Life()


def stopped() -> KeyboardInterrupt:
    """What to raise where a stop is carried out."""
    return _life.stopped() if _life.program else Stopped()


def check() -> None:
    """Carry out a stop that was heard and not yet carried out."""
    if _life.pending and not _life.held and not _life.listeners:
        raise _life.stopped()


def heard() -> int | None:
    """The first signal that this command heard."""
    return _life.heard


@contextlib.contextmanager
def listening(program: str, *, for_good: bool = False) -> Iterator[None]:
    """The handler stands within the block; a signal that was ignored before (nohup) still is. Not in the main thread, or inside
    another such block: nothing happens. ``for_good``: nothing comes after it, so what is heard later is heard too late."""
    if threading.current_thread() is not threading.main_thread() or _life.program:
        yield
        return
    before = {number: signal.getsignal(number) for number in (*HEARD, signal.SIGALRM)}
    _life.__init__()  # type: ignore[misc]
    _life.program = program
    for number in HEARD:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, _life.hear)
    try:
        yield
    finally:
        _life.untimed()
        for number, handler in before.items():
            if for_good:
                signal.signal(number, signal.SIG_IGN)
            elif handler is not None:  # None: not set from Python
                signal.signal(number, handler)
        _life.program = ""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Nothing is stopped within the block: what it writes is whole. A signal that came meanwhile is carried out at its end,
    unless an exception, the first signal's mostly, is on its way already."""
    if threading.current_thread() is not threading.main_thread():
        yield
    elif _life.program:
        _life.held += 1
        try:
            yield
        finally:
            _life.held -= 1
        if sys.exception() is None:
            check()
    else:
        came: list[int] = []
        before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in HEARD
                  if callable(signal.getsignal(number)) or signal.getsignal(number) == signal.SIG_DFL}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if came and sys.exception() is None:
            signal.raise_signal(came[0])


def listen(listener: Listener) -> None:
    """Ask ``listener`` to stop when a signal comes, instead of raising. After one that was heard no run begins: whatever caught
    it on its way, it is raised again."""
    if _life.program:
        if _life.heard is not None:
            raise _life.stopped()
        _life.listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """No more; not to be asked twice."""
    if listener in _life.listeners:
        _life.listeners.remove(listener)
    _life.untimed()


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """A user's policy is asked: it may never answer."""
    before, _life.users_code = _life.users_code, name
    try:
        yield
    finally:
        _life.users_code = before
