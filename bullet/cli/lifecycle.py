"""What every command passes through, from its first byte to its last file: signals, output, and the end of whatever goes wrong.

``files, then the table, then plots and page``. Output that closes early stops no work. A signal ends the command by
:mod:`bullet.signals`. A mistake of the user's is one line and status 2; what nobody foresaw is one line that names the file with
its traceback, and status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bullet import signals
from bullet.errors import BulletError, one_line


def command(program: str, parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    """Parse and do; returns the exit status: 0 done, 1 as the command says or not foreseen, 2 the user's to repair, 130 Ctrl-C,
    143 SIGTERM, 129 SIGHUP. ``argv`` None: of the process, which ends afterwards."""
    one_blas_thread()
    with signals.listening(program, for_good=argv is None), outputs(program):
        args = argparse.Namespace()
        debug = "--debug" in (sys.argv if argv is None else argv)
        try:
            args = parser().parse_args(argv)
            args.kept = None
            status: int = args.handler(args)
        except BulletError as exc:
            _flush()
            if debug:
                signals.warn(_traceback())
            kept = kept_text(args) if getattr(args, "kept", None) is not None else ""
            signals.warn(f"{program}: error: {one_line(exc)}" + (f"; {kept}" if kept and kept != NOTHING else ""))
            status = 2 if signals.heard() is None else 128 + int(signals.heard() or 0)  # what it left was too little to go on
        except KeyboardInterrupt as exc:
            with signals.held():
                _flush()
                if debug:
                    signals.warn(_traceback())
                said = signals.stop_words(getattr(exc, "number", signals.HEARD[0]))
                signals.warn(f"{program}: {said}; {kept_text(args)}")
            status = signals.exit_status(exc)
        except Exception as exc:  # nobody foresaw it
            with signals.held():
                _flush()
                told = one_line(f"{type(exc).__name__}: {exc}", 300)
                signals.warn(f"{program}: failed, which is a mistake of ours: {told}; {_keep_traceback(program, debug)}; "
                             f"{kept_text(args)}")
            status = 1
        _flush()
        return status


NOTHING = "nothing was written"


def kept_text(args: argparse.Namespace) -> str:
    """What a command that was stopped left behind, for the one line that says so."""
    from bullet import door

    folder: Path | None = getattr(args, "kept", None)
    try:
        if folder is None or not folder.is_dir() or not any(folder.iterdir()):
            return NOTHING
        if not (folder / "summary.json").exists():
            return f"what was written is in {folder}/"
        summary = door.read_object(folder / "summary.json", BulletError)
        if summary["complete"]:
            return f"finished runs are kept in {folder if args.command in ('run', 'replay') else folder.parent}/"
        return f"rows so far are kept in {folder}/ ({summary['finished']} of {summary['offered']} requests finished)"
    except (BulletError, OSError, KeyError, TypeError):
        return f"what was written is in {folder}/"


def _traceback() -> str:
    import traceback

    return traceback.format_exc().rstrip()


def _keep_traceback(program: str, debug: bool) -> str:
    import tempfile

    text = _traceback()
    if debug:
        signals.warn(text)
        return "traceback above"
    try:
        number, name = tempfile.mkstemp(prefix=f"{program}-", suffix="-traceback.txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
        return f"traceback in {name}"
    except OSError:
        return "with --debug it prints the traceback"


# ------------------------------------------------------------------------------------------------ surroundings


def one_blas_thread() -> None:
    """Before a command loads numpy: no product here is worth OpenBLAS's threads. Joining them is the one wait at exit that no
    signal ends, and where they cannot have memory OpenBLAS asks for it for ever. What the user has set stands."""
    if "numpy" not in sys.modules:  # later it would only reach the children of whose process this is
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class Output:
    """Standard output or error that never stops the work: what cannot be written is dropped, and said once."""

    def __init__(self, stream: Any, say: Callable[[str], None]) -> None:
        self.stream, self.say, self.lost = stream, say, False
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # a path that the locale cannot spell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                self.stream.write(text)
            except (OSError, ValueError) as exc:
                self.lose(exc)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self.lost:
            try:
                self.stream.flush()
            except (OSError, ValueError) as exc:
                self.lose(exc)

    def lose(self, exc: Exception) -> None:
        """Nobody reads any more; what Python flushes as it ends must not fail again."""
        self.lost = True
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        if getattr(exc, "errno", errno.EPIPE) != errno.EPIPE:  # head and true are no mistake
            self.say(f"standard output cannot be written ({one_line(getattr(exc, 'strerror', None) or exc)}): the work goes on")


@contextlib.contextmanager
def outputs(program: str) -> Iterator[None]:
    """Both outputs are there and never raise; a notebook's MPLBACKEND, which may not be installed here, is not heard."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (>&-): the next file that is opened must not become standard output
            os.open(os.devnull, os.O_RDWR)
    os.environ.pop("MPLBACKEND", None)
    before = sys.stdout, sys.stderr
    out, err = (stream or open(os.devnull, "w", encoding="utf-8") for stream in before)  # noqa: SIM115
    sys.stderr = Output(err, signals.silent)  # type: ignore[assignment]
    sys.stdout = Output(out, lambda line: signals.warn(f"{program}: {line}"))  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
