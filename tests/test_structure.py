"""No circle, no import against the list of docs/interfaces.md, nothing dear or private where it does not belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.make_map import LIST, PACKAGE, PAGE, ROOT, Imports, ranks, read_imports, wing, with_map

LIMIT = 500
REASON = f"Longer than {LIMIT} lines: "
"""Begins the line of a module's docstring that says why it is."""

TEXT = PAGE.read_text(encoding="utf-8")
SIMULATOR = {"sim"}
REAL = {"engine", "profiler", "runtime", "kernels", "gpu"}
HOMES = {"torch": {"engine", "profiler", "runtime", "kernels", "gpu"}, "triton": {"kernels"},
         "matplotlib": {"results", "api", "paper"}, "scipy": {"profiles"}, "sklearn": {"profiles", "paper"}, "pandas": {"api"},
         "joblib": {"sweeps"}, "ray": {"sweeps"}}
"""Which wings may import what is dear to load, at the top or anywhere."""

def circles(imports: Imports) -> list[str]:
    """Modules that reach themselves, each with the way back."""
    found = []
    for start in imports:
        way: dict[str, str] = {}
        front = [start]
        while front and start not in way:
            here = front.pop(0)
            for there in sorted(imports[here] - way.keys()):
                way[there] = here
                front.append(there)
        if start in way:
            steps = [start]
            while len(steps) == 1 or steps[-1] != start:
                steps.append(way[steps[-1]])
            found.append(" <- ".join(steps))
    return found


def against(imports: Imports, order: list[tuple[str, ...]]) -> list[str]:
    """Imports upwards or sideways, and modules that the list does not name."""
    rank = {name: i for i, names in enumerate(order) for name in names}
    found = [f"{module} belongs to no name of the list" for module in imports if wing(module) not in rank]
    return found + [f"{a} imports {b}" for a, bs in imports.items() for b in sorted(bs)
                    if wing(a) != wing(b) and rank.get(wing(a), -1) >= rank.get(wing(b), -1)]


def reached(imports: Imports, wings: set[str]) -> dict[str, str]:
    """All modules that these wings load, directly or not, each with one that imports it."""
    way = {module: "" for module in imports if wing(module) in wings}
    front = list(way)
    while front:
        here = front.pop()
        for there in imports[here] - way.keys():
            way[there] = here
            front.append(there)
    return way


def strangers(package: Path) -> Iterator[str]:
    """Imports of what a wing may not load."""
    for path in sorted(package.rglob("*.py")):
        mine = (*path.relative_to(package).with_suffix("").parts, "")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                     else [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            for name in {name.partition(".")[0] for name in names} & HOMES.keys():
                if mine not in HOMES[name]:
                    yield f"{path.relative_to(package)} imports {name}"


def borrowed(package: Path) -> Iterator[str]:
    """Names with an underscore that another file's are."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package.name:
                yield from (f"{path.relative_to(package)} imports {alias.name} of {node.module}" for alias in node.names
                            if alias.name.startswith("_"))


def too_long(package: Path) -> list[str]:
    """Files over the limit whose docstring does not say why."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        said = any(line.startswith(REASON) and len(line) > len(REASON)
                   for line in (ast.get_docstring(ast.parse(text)) or "").splitlines())
        if text.count("\n") > LIMIT and not said:
            found.append(f"{path.relative_to(package)}: {text.count(chr(10))} lines")
    return found


# ------------------------------------------------------------------------------------------- the package


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return read_imports(ROOT / PACKAGE)


def test_no_circle(imports: Imports) -> None:
    assert set(circles(imports)) == set()


def test_imports_go_down_the_list(imports: Imports) -> None:
    assert set(against(imports, ranks(TEXT))) == set()


def test_every_name_of_the_list_is_there(imports: Imports) -> None:
    assert {name for rank in ranks(TEXT) for name in rank} == {wing(module) for module in imports}


def test_simulator_and_real_engine_do_not_load_each_other(imports: Imports) -> None:
    assert {m: by for m, by in reached(imports, SIMULATOR).items() if wing(m) in REAL} == {}
    assert {m: by for m, by in reached(imports, REAL).items() if wing(m) in SIMULATOR} == {}


def test_what_is_dear_to_load_stays_in_its_wings() -> None:
    assert list(strangers(ROOT / PACKAGE)) == []


def test_private_names_stay_in_their_files() -> None:
    assert list(borrowed(ROOT / PACKAGE)) == []


def test_long_files_say_why() -> None:
    assert {line.partition(":")[0] for line in too_long(ROOT / PACKAGE)} == set()


def test_the_map_is_what_the_imports_are(imports: Imports) -> None:
    assert with_map(TEXT, imports) == TEXT, "python docs/make_map.py writes it anew"


def test_what_a_scheduler_is_made_of_loads_neither_torch_nor_pandas(imports: Imports) -> None:
    modules = sorted(m for m in imports if wing(m) in {"policies", "state", "estimators"})
    assert {"bullet.policies.vllm", "bullet.state.prefix", "bullet.estimators.srm"} < set(modules)
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; " \
           "print([m for m in ('torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------- each can fail


def package(folder: Path, **files: str) -> Path:
    """A package: ``a__b = "text"`` is the file a/b.py."""
    root = folder / "bullet"
    for name, text in {"__init__": "", **files}.items():
        path = root / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ORDER = [("cli",), ("api",), ("sim", "engine"), ("state",), ("errors",)]


def test_the_list_is_read_from_the_page() -> None:
    text = f"# Map\n{LIST}\n```\ncli        parse | call\nsim | engine   two\nerrors\n```\nmore\n"
    assert ranks(text) == [("cli",), ("sim", "engine"), ("errors",)]


@pytest.mark.parametrize("text", ["from bullet.state.kv import B", "from bullet.state import kv", "import bullet.state.kv",
                                  "def f():\n    from bullet.state import kv",
                                  "if TYPE_CHECKING:\n    import bullet.state.kv as k"])
def test_every_kind_of_import_is_seen(text: str, tmp_path: Path) -> None:
    found = read_imports(package(tmp_path, sim=text, state__kv=""))
    assert found["bullet.sim"] == {"bullet.state.kv"}


def test_a_circle_is_told_with_its_way(tmp_path: Path) -> None:
    found = read_imports(package(tmp_path, state__a="from bullet.state import b", state__b="from bullet.state import c",
                                 state__c="def f():\n    from bullet.state.a import X", state__d="import bullet.state.a"))
    assert circles(found) == ["bullet.state.a <- bullet.state.c <- bullet.state.b <- bullet.state.a",
                              "bullet.state.b <- bullet.state.a <- bullet.state.c <- bullet.state.b",
                              "bullet.state.c <- bullet.state.b <- bullet.state.a <- bullet.state.c"]
    itself = read_imports(package(tmp_path / "itself", state__a="import bullet.state.a"))
    assert circles(itself) == ["bullet.state.a <- bullet.state.a"]


@pytest.mark.parametrize(("files", "offence"), [
    ({"state": "from bullet.sim.run import x", "sim__run": ""}, "bullet.state imports bullet.sim.run"),
    ({"sim": "def f():\n    import bullet.engine", "engine": ""}, "bullet.sim imports bullet.engine"),
    ({"sim": "", "engine": "from bullet import sim"}, "bullet.engine imports bullet.sim"),
    ({"api": "if True:\n    from bullet.cli.main import main", "cli__main": ""}, "bullet.api imports bullet.cli.main"),
    ({"state": "from bullet import simulate"}, "bullet.state imports bullet"),
    ({"odd": ""}, "bullet.odd belongs to no name of the list"),
    ({"cli": "from bullet import api, sim\nfrom bullet.state import kv", "api": "", "sim": "import bullet.errors",
      "state__kv": "", "errors": ""}, None)])
def test_an_import_against_the_list_is_named(files: dict[str, str], offence: str | None, tmp_path: Path) -> None:
    assert against(read_imports(package(tmp_path, **files)), ORDER) == ([offence] if offence else [])


def test_the_engine_is_found_behind_others(tmp_path: Path) -> None:
    found = reached(read_imports(package(tmp_path, sim="import bullet.state", state="from bullet.gpu import x", gpu="")), {"sim"})
    assert found == {"bullet.sim": "", "bullet.state": "bullet.sim", "bullet.gpu": "bullet.state"}


def test_what_is_dear_is_named_where_it_does_not_belong(tmp_path: Path) -> None:
    root = package(tmp_path, sim="import heapq\ndef f():\n    import torch.nn as nn", state="import numpy, pandas",
                   results__plots="from matplotlib.figure import Figure")
    assert sorted(strangers(root)) == ["sim.py imports torch", "state.py imports pandas"]


def test_a_borrowed_private_name_is_named(tmp_path: Path) -> None:
    root = package(tmp_path, sim="from bullet.state import A, _b\nfrom os import _exit", state="A = _b = 1")
    assert list(borrowed(root)) == ["sim.py imports _b of bullet.state"]


@pytest.mark.parametrize(("docstring", "lines", "told"), [
    ("A.", LIMIT, False), ("A.", LIMIT + 1, True), (f"A.\n\n{REASON}b.\n", LIMIT + 1, False),
    (f"A.\n\n{REASON}\n", LIMIT + 1, True)])
def test_a_long_file_must_say_why(docstring: str, lines: int, told: bool, tmp_path: Path) -> None:
    text = f'"""{docstring}"""\n'
    root = package(tmp_path, sim=text + "x = 1\n" * (lines - text.count("\n")))
    assert too_long(root) == ([f"sim.py: {lines} lines"] if told else [])


def test_the_map_marks_who_imports_whom(tmp_path: Path) -> None:
    found = read_imports(package(tmp_path, cli="import bullet.errors, bullet.state", state="import bullet.errors", errors=""))
    page = f"{LIST}\n```\ncli\nstate | errors\n```\n<!-- map: python docs/make_map.py -->\n```\nold\n```\nend\n"
    assert with_map(page, found) == page.replace("old\n", "cli\n●  state\n●  ●  errors\n")
