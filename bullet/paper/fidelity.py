"""The fidelity page: ours beside the paper's, first in one table, then figure by figure with pictures and causes.

A check is *met* within the tolerance that it states, *near* within twice that (relations: by a weaker form, stated in
the figure's module), *off* beyond. Nothing is fitted to the paper.
"""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bullet.files import write_text
from bullet.paper.base import MET, NEAR, OFF, Check
from bullet.paper.make import Made
from bullet.results.page import html_table
from bullet.version import VERSION

ORDER = (MET, NEAR, OFF)
SIGNS = {MET: "●", NEAR: "◐", OFF: "○"}
ABOUT = (
    "Ours is *simulated* on devices fitted to kernel times that others published, *analytic*, or *measured*, as each figure "
    "says; the "
    "paper's is stated in its text or digitised from its plots. Nothing is fitted to the paper. **met**: within the tolerance of "
    "the last column; **near**: within twice that; **off**: beyond."
)
HEAD = ("", "relation", "paper", "ours", "asked")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2.2em;border-top:1px solid #ddd;padding-top:1em}
.table{overflow-x:auto}table{border-collapse:collapse;font-size:13px}td,th{padding:.25em .6em;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}td:first-child{min-width:3.4em}img{max-width:100%}.note{color:#555}"""


def summary(made: Sequence[Made]) -> str:
    """One line: how many relations are met."""
    counts = Counter(check.verdict for one in made if one.drawn for check in one.drawn.checks)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER)


FIRST = ("figure", "met", "near", "off", "")


def overview(made: Sequence[Made]) -> list[list[str]]:
    """A row a figure: how many of its relations are met, near and off, and each as a sign, in their order."""
    rows = []
    for one in made:
        checks = one.drawn.checks if one.drawn else ()
        counts = Counter(check.verdict for check in checks)
        signs = "".join(SIGNS[check.verdict] for check in checks) or ("no relation" if one.drawn else "not made")
        rows.append([one.figure.title, *(str(counts[verdict]) for verdict in ORDER), signs])
    return rows


def _row(check: Check) -> list[str]:
    return [f"{SIGNS[check.verdict]} {check.verdict}", check.what, check.paper, check.ours, check.how]


def _sorted(made: Sequence[Made]) -> list[Check]:
    """All checks as the figures come: a reader looks for a figure."""
    return [check for one in made if one.drawn for check in one.drawn.checks]


def _about(made: Sequence[Made], seeds: int) -> str:
    return f"bullet-llm {VERSION}, {seeds} seeds: {summary(made)}."


def markdown(made: Sequence[Made], seeds: int, title: str = "# Fidelity: ours beside the paper") -> str:
    lines = [title, "", _about(made, seeds) + " " + ABOUT, "", *_table(FIRST, overview(made)), "", "## Each relation", ""]
    lines += _table(HEAD, [_row(check) for check in _sorted(made)])
    for one in made:
        lines += ["", f"## {one.figure.title}", ""]
        if one.drawn is None:
            lines.append(f"Not made: {one.error}")
            continue
        lines += [
            f"Ours: {one.figure.source}. The paper's: {one.figure.paper}. {one.drawn.note}".strip(),
            "",
            f"![{one.figure.title}]({one.figure.name}.png)",
            "",
            f"[{one.figure.name}.csv]({one.figure.name}.csv), [{one.figure.name}.pdf]({one.figure.name}.pdf)",
        ]
        lines += [
            f"- {SIGNS[check.verdict]} {check.what}: {check.ours} (paper: {check.paper}). {check.cause}"
            for check in one.drawn.checks
            if check.verdict != MET
        ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, ["---"] * len(head), *rows]]


def page(made: Sequence[Made], seeds: int, folder: Path) -> str:
    """One HTML file that holds its pictures, which lie in ``folder``."""

    def text(words: str) -> str:
        return (
            html.escape(words)
            .replace("**met**", "<b>met</b>")
            .replace("**near**", "<b>near</b>")
            .replace("**off**", "<b>off</b>")
        )

    parts = [
        f"<p>{html.escape(_about(made, seeds))}</p><p>{text(ABOUT).replace('*', '')}</p>",
        f"<div class=table>{html_table(FIRST, overview(made))}</div><h2>Each relation</h2>",
        f"<div class=table>{html_table(HEAD, [_row(check) for check in _sorted(made)])}</div>",
    ]
    for one in made:
        parts.append(f"<h2>{html.escape(one.figure.title)}</h2>")
        if one.drawn is None:
            parts.append(f"<p>Not made: {html.escape(one.error)}</p>")
            continue
        data = base64.b64encode((folder / f"{one.figure.name}.png").read_bytes()).decode()
        said = f"Ours: {one.figure.source}. The paper's: {one.figure.paper}. {one.drawn.note}"
        parts.append(
            f'<p class=note>{html.escape(said)}</p><img alt="{html.escape(one.figure.title)}" src="data:image/png;base64,{data}">'
        )
        missed = [
            f"<li>{SIGNS[c.verdict]} {html.escape(f'{c.what}: {c.ours} (paper: {c.paper}). {c.cause}')}</li>"
            for c in one.drawn.checks
            if c.verdict != MET
        ]
        parts.append(f"<ul>{''.join(missed)}</ul>" if missed else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Fidelity</title><style>{STYLE}</style></head><body><h1>Fidelity: ours beside the "
        f"paper</h1>{''.join(parts)}</body></html>\n"
    )


def write(made: Sequence[Made], seeds: int, folder: Path) -> None:
    """``fidelity.md`` and ``fidelity.html``."""
    write_text(folder / "fidelity.md", markdown(made, seeds))
    write_text(folder / "fidelity.html", page(made, seeds, folder))
