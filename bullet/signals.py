"""Who hears of a run and may stop it; a stop that has been heard is carried out before the next one is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

Say = Callable[[str], None]
"""Who hears lines as they come."""
Watch = Callable[[Any, int, str], AbstractContextManager[Callable[[int], None] | None]]
"""Who watches runs: given a run's :class:`~bullet.results.folder.RunWriter`, its requests and its policy's name, a block that the
run goes on in; it gives what is told how many requests have ended (None: nobody), and may ask the writer to stop the run."""


def silent(line: str) -> None:
    """Nobody hears."""


@contextlib.contextmanager
def unwatched(writer: Any, requests: int, name: str) -> Iterator[None]:
    """Nobody."""
    yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM is not heard while a stopped run's rows are saved and it is said where they are: a moment,
    and without it they are lost, or the line drowns in a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)
