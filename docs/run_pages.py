"""The worked examples of README.md and the pages in docs/: ``python docs/run_pages.py [PAGE.md ..]`` runs them and writes what
they print anew.

A page is run from its top in an empty folder that links to the repository's ``experiments`` and ``Makefile``. On the line before
a block of code stands what it is, in a comment that readers do not see:

``<!-- file: mine.py -->``       a file to write
``<!-- run -->``                 commands for bash, or Python; any line that fails ends the page
``<!-- fails -->``               commands of which the last must fail; what it says is its output
``<!-- shows -->``               what the block before printed
``<!-- shows: A .. B -->``       of that, from the first line that holds A to the next one that holds B
``<!-- of `CMD` shows: A .. B -->``  of a command that the reader does not see
``<!-- not run: why -->``        left alone

tests/test_pages.py runs them all and compares: words to the letter, numbers to 2 % or their last digit, since another processor
may round otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^<!-- (file: (?P<file>\S+)|(?P<run>run)|(?P<fails>fails)|"
                   r"(of `(?P<of>[^`]+)` )?(?P<shows>shows)(: (?P<first>.+?) \.\. (?P<last>.+?))?|"
                   r"not run: [^>]+) -->\n```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
WIDTH = "100"


def pages() -> list[Path]:
    """Those with anything to run."""
    return [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
            if re.search(r"^<!-- (run|fails|of `.*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)]


def environment() -> dict[str, str]:
    """This Python's commands first, this repository's package, one width."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "COLUMNS": WIDTH,
            "PYTHONPATH": str(ROOT)}


def execute(text: str, kind: str, folder: Path, fails: bool) -> str:
    """What a block prints; ``AssertionError`` with all that it printed where it ends otherwise than it should."""
    command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == fails, f"status {done.returncode} of\n{text}\n{done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if fails else "")


def part(output: str, first: str | None, last: str | None) -> str:
    """Its lines from one that holds ``first`` to the next that holds ``last``, without blank space at their ends."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if first is None or last is None:
        return "\n".join(lines) + "\n"
    begin = next((i for i, line in enumerate(lines) if first in line), None)
    assert begin is not None, f"no line holds {first!r}:\n{output}"
    end = next((i for i, line in enumerate(lines) if i >= begin and last in line), None)
    assert end is not None, f"no line after that holds {last!r}:\n{output}"
    return "\n".join(lines[begin:end + 1]) + "\n"


def run(page: Path, folder: Path) -> Iterator[tuple[int, int, str, str]]:
    """Each ``shows`` of a page: where its text begins and ends, the text, and what it should be."""
    for name in ("experiments", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    output = ""
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        text = match["text"]
        if match["file"]:
            assert not re.search(r"^/|\.\.", match["file"]), match["file"]
            (folder / match["file"]).write_text(text, encoding="utf-8")
        elif match["run"] or match["fails"]:
            output = execute(text, match["kind"], folder, bool(match["fails"])).replace(f"{folder}/", "")
        elif match["shows"]:
            if match["of"]:
                output = execute(match["of"], "sh", folder, False)
            yield *match.span("text"), text, part(output, match["first"], match["last"])


def differs(written: str, found: str) -> str | None:
    """The first line that is not what was printed, or none."""
    ours, theirs = written.splitlines(), found.splitlines()
    for one, other in zip(ours, theirs, strict=False):
        words = [re.sub(r"\s+|-{3,}", " ", NUMBER.sub("0", line)).strip() for line in (one, other)]
        if words[0] != words[1]:
            return f"{one!r} is now {other!r}"
        for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
            x, y = (float(text.replace(",", "")) for text in (a, b))
            digits = min(len(text.partition(".")[2].partition("e")[0]) for text in (a, b))
            if abs(x - y) > max(0.02 * abs(x), 1.01 * 10.0 ** -digits):
                return f"{one!r} is now {other!r}"
    return None if len(ours) == len(theirs) else f"{len(ours)} lines are now {len(theirs)}"


def rewrite(page: Path) -> None:
    """Put what the examples print where the page says that they do."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(run(page, Path(folder)))
    text = page.read_text(encoding="utf-8")
    for begin, end, _, now in reversed(found):
        text = text[:begin] + now + text[end:]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or pages():
        rewrite(path)
