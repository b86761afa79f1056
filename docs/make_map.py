"""The map of docs/interfaces.md, from the imports themselves: ``python docs/make_map.py`` writes it anew.

tests/test_structure.py reads the same list and the same imports, so that text, picture and code cannot drift apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "interfaces.md"
LIST, MAP = "<!-- list -->", "<!-- map: python docs/make_map.py -->"
"""Each stands on the line before its block of code."""
PACKAGE = "bullet"
FACADE = "api"
"""The name that the package's own ``__init__`` belongs to: what a notebook imports."""

Imports = Mapping[str, set[str]]
"""Module -> modules of the package that it imports anywhere: at its top, inside functions, for types alone."""


def _block(text: str, marker: str) -> tuple[int, int]:
    """Where the lines of the block of code after ``marker`` begin and end."""
    begin = text.index("\n", text.index(f"{marker}\n```") + len(marker) + 1) + 1
    return begin, text.index("```", begin)


def ranks(text: str) -> list[tuple[str, ...]]:
    """The list: a line is a rank, top first; names that stand beside each other are separated by `` | ``."""
    begin, end = _block(text, LIST)
    rows = (line.split("  ")[0] for line in text[begin:end].splitlines())
    return [tuple(name.strip() for name in row.split("|")) for row in rows]


def read_imports(package: Path) -> dict[str, set[str]]:
    """Every module below ``package`` (a folder) with what it imports of it. A name that no module has is its package's own."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def module(name: str) -> str:
        while name not in files:
            name = name.rpartition(".")[0]
        return name

    found: dict[str, set[str]] = {}
    for importer, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import, which is not read here"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[importer] = {module(name) for name in names if name.partition(".")[0] == package.name}
    return found


def wing(module: str) -> str:
    """The name of the list that a module belongs to: the folder or file right below the package."""
    return module.split(".")[1] if "." in module else FACADE


def picture(order: Iterable[str], imports: Imports) -> str:
    """A staircase: from each name a column hangs down, with a mark at each name further down that it imports."""
    names = list(order)
    used = {(wing(a), wing(b)) for a, bs in imports.items() for b in bs}
    rows = ["".join("●  " if (above, name) in used else "·  " for above in names[:i]) + name for i, name in enumerate(names)]
    return "\n".join(rows) + "\n"


def with_map(text: str, imports: Imports) -> str:
    """The page with its map as the imports are."""
    begin, end = _block(text, MAP)
    return text[:begin] + picture((name for rank in ranks(text) for name in rank), imports) + text[end:]


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8"), read_imports(ROOT / PACKAGE)), encoding="utf-8")
