"""All of ``make gpu`` in one call: each part of the measurement in a process of its own, one after the other, within one budget.

    corun   proof, co-run matrix, controls, checks, SM axis         until half of the budget
    own     the project's own kernels, more sizes (resumes)         until :data:`SHARES` of it
    engine  step times and real runs (``bullet-run validate``)      the rest

A part that crashes, hangs, or loses the CUDA context ends only its process: rows are on disk as they were taken, the part goes on
in a fresh process without the point that was lost, and the next part comes after it. All lies under ``out``, in at most eight
files: the engine's folder is one archive there, written anew while the engine runs, so that a command that is cut has what was
there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bullet.door import is_file, read_text
from bullet.errors import BulletError, ConfigError, ResultsError
from bullet.profiler import session, summary
from bullet.profiler.progress import NAME as PROGRESS
from bullet.profiler.progress import Progress
from bullet.profiler.session import Target
from bullet.signals import Say, silent

SHARES = {"corun": 0.5, "own": 0.64, "engine": 1.0}
"""When each part ends, of the budget."""
CLOSING_S = 6.0
"""Kept for the last archive and for what is printed."""
LAST_GRACE_S = 4.0
"""How long the last part may take to close its device after it was interrupted: the budget is that of one command."""
LEAST_BUDGET_S = 60.0
LEAST_S = {"corun": 20.0, "own": 25.0, "engine": 60.0}
"""A part that has less is left out."""
ATTEMPTS = 6
ARCHIVE_S = 5.0
ENGINE = "engine.tar.gz"
ENGINE_LOG, STATUS = "engine.txt", "status.txt"
MAX_ARCHIVE_BYTES = 14 << 20
"""Larger files do not come back from where cards are lent: run folders then go without their traces and plots."""
LEFT_OUT = (".png", "trace.json", "report.html")


@dataclass
class Outcome:
    """``statuses``: exit status of every process, by part. ``lines``: what is printed last."""

    statuses: dict[str, list[int]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Of the measurement: that of its last process; the engine's failures cost nothing of it."""
        codes = self.statuses.get("corun", []) + self.statuses.get("own", [])
        return abs(codes[-1]) if codes else 2


class Run(Protocol):
    """Runs a process; :func:`run_process`, or a test's."""

    def __call__(self, command: Sequence[str], limit_s: float, tick: Callable[[], None], *, log: Path | None = None,
                 grace_s: float = 20.0) -> int:
        """Its exit status. ``tick``: called every few seconds meanwhile."""
        ...


def _end_with_parent() -> Callable[[], None] | None:
    """What a child calls first, on Linux: SIGTERM when its parent has gone, however that was killed. None measures on beside the
    next command."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def run_process(command: Sequence[str], limit_s: float, tick: Callable[[], None], *, log: Path | None = None,
                grace_s: float = 20.0) -> int:
    """Its exit status. After ``limit_s`` it is interrupted, as by Ctrl-C, and closes the device; killed ``grace_s`` later."""
    with (log.open("ab") if log is not None else open(os.devnull, "rb")) as stream, subprocess.Popen(
            list(command), stdout=stream if log is not None else None, stderr=stream if log is not None else None,
            preexec_fn=_end_with_parent()) as process:  # noqa: PLW1509 - it only calls the kernel
        deadline, asked, killed = time.monotonic() + limit_s, False, False
        try:
            while True:
                left_s = deadline + (grace_s if asked else 0.0) - time.monotonic()
                try:
                    return process.wait(timeout=min(ARCHIVE_S, left_s) if left_s > 0 else ARCHIVE_S)
                except subprocess.TimeoutExpired:
                    tick()
                if time.monotonic() >= deadline + grace_s and not killed:
                    killed = True
                    process.kill()
                elif time.monotonic() >= deadline and not asked:  # once: another would strike in the midst of its closing
                    asked = True
                    process.send_signal(signal.SIGINT)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def stages(target: Target, out: Path, *, budget_s: float, arguments: Sequence[str] = (), engine_arguments: Sequence[str] = (),
           engine: bool = True, say: Say = silent, started_s: float | None = None, run: Run = run_process) -> Outcome:
    """``arguments``: of ``bullet-profile sweep``, for every process of it. Raises where ``out`` cannot be written."""
    if budget_s < LEAST_BUDGET_S:
        raise ConfigError(f"--budget-s {budget_s:g}: all parts need at least {LEAST_BUDGET_S:.0f} s")
    started_s = time.monotonic() if started_s is None else started_s
    session.claimed(out).release(undo=True)
    outcome = Outcome()
    engine = engine and target.device == "cuda"
    last = "engine" if engine else "own"

    def left_s(part: str) -> float:
        share = 1.0 if part == last else SHARES[part]
        return started_s + share * budget_s - (CLOSING_S if part == last else 0.0) - time.monotonic()

    def sweep_part(part: str) -> None:
        codes = outcome.statuses.setdefault(part, [])
        for _ in range(ATTEMPTS):
            seconds = left_s(part)
            if seconds < LEAST_S[part]:
                say(f"no {'further ' * bool(codes)}process for part {part}: {max(0.0, seconds):.0f} s are left, "
                    f"{LEAST_S[part]:.0f} needed")
                break
            command = [sys.executable, "-m", "bullet.cli.profile", "sweep", "--part", part, "--budget-s", f"{seconds:.0f}",
                       "--out", str(out), *arguments]
            codes.append(run(command, seconds, lambda: None, grace_s=LAST_GRACE_S if part == last else 20.0))
            if codes[-1] in (130, 143) and left_s(part) > 0:  # before its time: somebody's signal
                raise KeyboardInterrupt
            if codes[-1] == 130:
                say(f"part {part} was interrupted at the end of its time")
            if codes[-1] in (0, 2, 130) or codes[-2:] == [1, 1]:  # 1: what nobody foresaw, and not by chance
                break
            _settle(out)
            say(f"part {part} ended with status {codes[-1]}: rows until there are kept; once more in a fresh process")

    sweep_part("corun")
    if outcome.statuses["corun"][-1:] != [2]:  # 2: something to repair, which the next process would find again
        sweep_part("own")
        if engine and left_s("engine") >= LEAST_S["engine"]:
            _engine(out, left_s("engine"), engine_arguments, outcome, say, run)
        elif engine:
            say(f"no engine: {left_s('engine'):.0f} s are left, {LEAST_S['engine']:.0f} needed")
    outcome.lines = _last_lines(out)
    return outcome


def _settle(out: Path) -> None:
    """After a process that ended without a word: what was under way is lost, and the rows get their table."""
    with contextlib.suppress(BulletError):
        if (out / PROGRESS).exists() and Progress(out / PROGRESS).settle():
            summary.table(out, say=silent)


def _engine(out: Path, seconds: float, arguments: Sequence[str], outcome: Outcome, say: Say, run: Run) -> None:
    archive = out / ENGINE
    if _finished(archive):
        say(f"engine: it was done before, {archive} stays as it is")
        return
    work = Path(tempfile.mkdtemp(prefix="bullet-engine-"))
    folder, log = work / "engine", work / ENGINE_LOG
    command = [sys.executable, "-m", "bullet.cli.run", "validate", "--device", "cuda", "--budget-s", f"{seconds:.0f}", *arguments,
               "--out", str(folder)]
    try:
        if archive.exists():  # of a command that was cut: in the new archive as it was
            shutil.copyfile(archive, work / "before.tar.gz")

        def keep() -> None:
            pack(work, archive)

        code = run(command, seconds, keep, log=log, grace_s=LAST_GRACE_S)
        outcome.statuses["engine"] = [code]
        (work / STATUS).write_text(f"{code}\n")
        keep()
        # What our own process said, whatever bytes are in it: not a file that somebody gave.
        tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
        say("\n".join([f"engine: exit status {code}; its folder and what it said: {archive}",
                       *(f"  {line[:160]}" for line in tail)]))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _finished(archive: Path) -> bool:
    """Whether the engine that it is of came to its end without a fault."""
    try:
        with tarfile.open(archive) as tar:
            found = tar.extractfile(STATUS)
            return found is not None and found.read().strip() == b"0"
    except (OSError, tarfile.TarError, KeyError, EOFError):
        return False


def pack(folder: Path, archive: Path, limit_bytes: int = MAX_ARCHIVE_BYTES) -> None:
    """All of ``folder`` into ``archive``, replaced as a whole; above the limit without what can be made again."""
    beside = archive.with_suffix(".tmp")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        for left_out in ((), LEFT_OUT):
            with tarfile.open(beside, "w:gz", compresslevel=4) as tar:
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and not path.is_symlink() and not path.name.endswith(left_out or ("\0",)):
                        try:
                            tar.add(path, arcname=str(path.relative_to(folder)), recursive=False)
                        except FileNotFoundError:
                            continue  # a part file that was merged meanwhile
            if beside.stat().st_size <= limit_bytes:
                break
        beside.replace(archive)
    except OSError as exc:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ResultsError(f"{archive}: cannot be written ({exc.strerror}); rows until here are kept") from None


def _last_lines(out: Path) -> list[str]:
    path = out / "summary.txt"
    return read_text(path, ResultsError).splitlines() if is_file(path, ResultsError) else []


def plan_lines(target: Target, *, budget_s: float, model: str | None = None, seed: int = 0, skip: Sequence[str] = (),
               engine: bool = True) -> list[str]:
    """The plan of all parts, by the data sheet of ``target.gpu``; needs no device."""
    ends = {part: share * budget_s for part, share in SHARES.items()}
    if not engine:
        ends["own"] = budget_s
    lines = []
    began = 0.0
    for part in ("corun", "own"):
        lines.append(f"Part {part}, a process of its own from {began:.0f} s, until {ends[part]:.0f} s at the latest:")
        lines += session.plan_lines(target, model=model, budget_s=ends[part] - began, seed=seed, skip=skip, parts=(part,),
                                    began_s=began)[0 if part == "corun" else 1:]
        began = ends[part]
    if engine:
        lines.append(f"Part engine, from {began:.0f} s: step times and real runs (bullet-run validate), done by "
                     f"{budget_s - CLOSING_S:.0f} s; its folder as one archive by {budget_s:.0f} s")
    return lines
