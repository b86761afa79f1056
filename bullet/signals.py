"""A stop that has been heard is carried out before the next one is."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


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
