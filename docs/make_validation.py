"""The table at the top of docs/validation.md: ``python docs/make_validation.py [--data DIR]`` (3 min) runs every validation
and writes it anew; ``--data`` as in ``bullet-sim validate``.

tests/test_validate_everything.py holds the page to some of the points, simulated again, and to what was measured of all.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bullet.validation import everything
from bullet.validation.replay import JITTER_SEEDS

PAGE = Path(__file__).parent / "validation.md"
MARKS = ("<!-- table: python docs/make_validation.py -->\n", "<!-- end of table -->\n")


def parts() -> tuple[str, str, str]:
    """The page before its table, the table, the page after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    table, mark, after = rest.partition(MARKS[1])
    assert mark, f"{PAGE}: has no {MARKS}"
    return before, table, after


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    wanted = everything.entries(len(JITTER_SEEDS), parser.parse_args().data)
    parts()  # its marks, before minutes are spent
    with tempfile.TemporaryDirectory() as folder:
        found = everything.validate(wanted, Path(folder), lambda _: None)
    before, _, after = parts()
    PAGE.write_text(MARKS[0].join([before, everything.markdown(found) + MARKS[1] + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
