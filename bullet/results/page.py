"""The HTML page of a run and of a comparison."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.config import trace_name
from bullet.errors import one_line
from bullet.files import write_text
from bullet.results.columns import RequestTable, Rows, RunOutcome
from bullet.results.folder import read_ways
from bullet.results.plots import plot_cdfs, plot_comparison, plot_sm_share, save
from bullet.results.tables import cell_text, columns_of, headline, label, notes_on
from bullet.results.timeline import way_events, write_perfetto
from bullet.signals import warn

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}}
h1{{font-size:1.4em}}h2{{font-size:1.1em;margin-top:2em}}table{{border-collapse:collapse;font-size:13px}}
td,th{{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}}td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}pre{{background:#f6f6f6;padding:1em;overflow:auto;font-size:12px}}.source{{color:#a33}}</style></head><body>
<h1>{title}</h1><p class="source">{headline}</p>{body}</body></html>
"""


def _rows_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """Every figure of a summary as text, nested ones by dotted name."""
    rows: dict[str, str] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            rows |= {f"{key}.{inner}": text for inner, text in _rows_of(value).items()}
        else:
            # Four digits, but never as 1.4e+04: a reader compares rows.
            digits = ",.0f" if isinstance(value, float) and abs(value) >= 1000 else ".4g"
            rows[key] = format(value, digits) if isinstance(value, float) else "-" if value is None else str(value)
    return rows


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts as a table, escaped."""
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table><thead>{row(head, 'th')}</thead><tbody>{''.join(row(r, 'td') for r in rows)}</tbody></table>"


def write_html(path: Path, title: str, summaries: Sequence[Mapping[str, Any]], pictures: Sequence[tuple[str, Path]],
               config_toml: str, notes: Sequence[str] = ()) -> None:
    """One self-contained file: table, plots with their captions, every figure, configuration."""
    columns = columns_of(summaries)
    head = ["system", *(f"{group} {name}".strip() for group, name, _, _ in columns)]
    parts = [html_table(head, [[label(s), *(cell_text(s.get(key), form) for _, _, key, form in columns)] for s in summaries]),
             f"<p>{html.escape(' '.join(notes_on(summaries)))}</p>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    for caption, picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        text = html.escape(caption)
        parts.append(f'<h2>{text}</h2><img alt="{text}" src="data:image/png;base64,{data}">')
    figures = [_rows_of(s) for s in summaries]
    keys = dict.fromkeys(key for rows in figures for key in rows)
    parts.append("<h2>Every figure</h2>" + html_table(["", *map(label, summaries)],
                                                       [[key, *(rows.get(key, "-") for rows in figures)] for key in keys]))
    whose = "" if len(summaries) == 1 else f" of {label(summaries[0])} (the others' policies: config.toml in their folders)"
    parts.append(f"<h2>Configuration{html.escape(whose)}</h2><pre>{html.escape(config_toml)}</pre>")
    write_text(path, _PAGE.format(title=html.escape(title), headline=html.escape(headline(summaries[0])), body="".join(parts)))


def write_text_page(path: Path, title: str, lead: str, text: str, caption: str, picture: Path, config_toml: str) -> None:
    """One self-contained file: a picture, a text as it is printed, configuration."""
    data, caption = base64.b64encode(picture.read_bytes()).decode(), html.escape(caption)
    body = (f'<img alt="{caption}" src="data:image/png;base64,{data}"><pre>{html.escape(text)}</pre>'
            f"<h2>Configuration</h2><pre>{html.escape(config_toml)}</pre>")
    write_text(path, _PAGE.format(title=html.escape(title), headline=html.escape(lead), body=body))


def drawn(draw: Callable[[], object]) -> bool:
    """Whether a picture or page could be made: it comes last, and costs files and table nothing; one line says why not."""
    try:
        draw()
    except Exception as exc:  # matplotlib's are of every kind
        warn(f"bullet: no plots or page: {type(exc).__name__}: {one_line(exc, 300)}")
        return False
    return True


def write_run_report(folder: Path, outcome: RunOutcome | Rows, summary: Mapping[str, Any], config_toml: str) -> None:
    """Plots, Perfetto trace and HTML of one run."""
    cdf, share = folder / "plots" / "latency_cdf.png", folder / "plots" / "sm_share.png"
    save(plot_cdfs([outcome.requests], [summary]), cdf)
    save(plot_sm_share(outcome.steps, summary), share)
    ways = read_ways(folder)
    write_perfetto(outcome.steps, f"{str(summary['gpu']).upper()} ({summary['source']})", folder / "trace.json",
                   () if ways is None else way_events(outcome.requests.data, ways))
    write_html(folder / "report.html", f"{label(summary)} on {trace_name(str(summary['trace']))}", [summary],
               [("TTFT and TPOT", cdf), ("SMs over time", share)], config_toml)


def write_comparison_report(folder: Path, requests: Sequence[RequestTable], summaries: Sequence[Mapping[str, Any]],
                            run_folders: Sequence[Path], config_toml: str, notes: Sequence[str] = ()) -> None:
    """Plots and HTML of a comparison; ``run_folders``: the runs', each with its own report already written; ``notes``: paragraphs
    below the table."""
    bars, cdf = folder / "plots" / "comparison.png", folder / "plots" / "latency_cdf.png"
    save(plot_comparison(summaries), bars)
    save(plot_cdfs(requests, summaries), cdf)
    shares = [(f"SMs over time: {label(summary)}", run / "plots" / "sm_share.png")
              for summary, run in zip(summaries, run_folders, strict=True)]
    write_html(folder / "report.html", f"{len(summaries)} systems on {trace_name(str(summaries[0]['trace']))}", summaries,
               [("Comparison", bars), ("TTFT and TPOT", cdf), *shares], config_toml, notes)
