"""notebooks/: each runs to its end and shows what its text says; is stored without outputs; uses what docs/api.md names."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bullet

ROOT = Path(__file__).parent.parent
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
POLICY_MODULES = {"bullet.policies.base", "bullet.policies.twolane", "bullet.state", "bullet.errors"}
"""What a policy of one's own is written with, and the errors that all calls raise (docs/api.md)."""
SHOWN = {  # pictures, and words of what is printed
    "1_quick_start": (4, ["bullet (srm)", "SLO attainment", "ttft_s"]),
    "2_your_own_policy": (1, ["shortest.py:Shortest", "'policy.options.share': 0.25", "greedy.py:"]),
    "3_sweep": (2, ["(36, ", "'policy.name': 'bullet', 'workload.rate_req_per_s': 6", "stationary"]),
    "4_partitions": (3, ["prefill_sms", "78 + 30 SMs: prefill ", "interactive(children="]),
    "5_read_a_run": (2, ["behind_prefills_s", "reduce-decode", "trace.json"]),
    "6_from_a_sweep_to_a_profile": (3, ["simulated, not measured", "contention_loss", "99 % interval", "mean_ttft_ms"]),
}


def cells(book: Path, kind: str) -> Iterator[dict[str, Any]]:
    yield from (cell for cell in json.loads(book.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind)


@pytest.mark.slow
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_runs_and_shows_what_it_says(book: Path, tmp_path: Path) -> None:
    pictures, words = SHOWN[book.stem]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython"), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "execute_notebook.py"), str(book)], cwd=tmp_path,
                          capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("<picture>") == pictures
    assert [text for text in words if text not in done.stdout] == []


def test_every_notebook_is_run_and_named_on_the_reading_page() -> None:
    assert [book.stem for book in BOOKS] == sorted(SHOWN)
    page = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [book.name for book in BOOKS if f"../notebooks/{book.name}" not in page] == []


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_is_stored_without_outputs(book: Path) -> None:
    assert [cell for cell in cells(book, "code") if cell["outputs"] or cell["execution_count"]] == []
    assert "simulated" in "".join("".join(cell["source"]) for cell in cells(book, "markdown")).casefold()


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_uses_the_public_names_alone(book: Path) -> None:
    for cell in cells(book, "code"):
        source = re.sub(r"^%%writefile .*\n", "", "".join(cell["source"]))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bullet"):
                if node.module == "bullet":
                    assert {alias.name for alias in node.names} <= set(bullet.__all__)
                else:
                    assert node.module in POLICY_MODULES
            assert not (isinstance(node, ast.Import) and any(a.name.startswith("bullet.") for a in node.names))
