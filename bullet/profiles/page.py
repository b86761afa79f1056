"""``bullet-profile plot``: a sweep on one HTML page, its rows and the fit over them.

    page(Path("runs/gpu"), Path("sweep.html"))

What is drawn is the rows'; the lines over them are a fit of the same rows, in the notes of which stand its intervals and errors.
"""

from __future__ import annotations

import dataclasses
import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.models import MODELS, ModelSpec
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_fitted
from bullet.errors import ProfileError, ResultsError
from bullet.files import write_text
from bullet.profiles.check import gpu_of
from bullet.profiles.contention import LAYERS, LOSSES, CorunRows, combination, corun_rows, fit_contention
from bullet.profiles.fit import borrowed_kernels, fit_samples
from bullet.profiles.layer_axis import LayersOnSms, axis_of_layers, layer_rows
from bullet.profiles.rows import Row
from bullet.profiles.sm_axis import AXIS
from bullet.profiles.sweeps import model_of, of_implementation, read_rows
from bullet.results.page import html_table
from bullet.results.sweep_plots import png_text

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}}
h1{{font-size:1.4em}}h2{{font-size:1.1em;margin-top:2em}}table{{border-collapse:collapse;font-size:13px}}
td,th{{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}}
td:first-child,th:first-child{{text-align:left}}.wide{{overflow-x:auto}}img{{max-width:100%}}
.source{{color:#a33}}@media(max-width:700px){{.wide img{{max-width:none;width:820px}}}}</style></head><body>
<h1>{title}</h1><p class="source">{headline}</p>{body}</body></html>
"""
SHARED = {"plain": "all SMs, plain", "priority": "all SMs, decode first", "bounded": "all SMs, bounded grids"}
CONTROLS = ("idle", "alu_spin", "tensor_spin", "l2_stream", "memory_stream")
SIDES = {"prefill_layer": "prefill", "decode_layer": "decode"}
MOST_SIZES = 7
"""Curves on one panel that a reader still tells apart."""


@dataclass
class _Drawn:
    """A fit of the rows to draw over them, and how it is called."""

    device: DeviceModel
    said: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def page(folder: Path, out: Path, *, model: str | None = None, replace: bool = False) -> list[str]:
    """Write the page; returns what to say. :class:`ProfileError`: no rows, damaged ones, those of two cards or of no partition;
    :class:`ResultsError` if ``out`` is there and not to be replaced."""
    if out.exists() and not replace:
        raise ResultsError(f"{out}: is there: choose another --out, or say --replace")
    card, on, spec, rows = _read(folder, model)
    drawn, own = _fit(rows, spec), of_implementation(rows, None).rows
    parts = [html_table(["", ""], _facts(rows, drawn))]
    for title, words, figure in _figures(own, drawn, on):
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p>")
        if figure is not None:
            data = png_text(figure)
            parts.append(_wide(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'))
    told = html.escape(borrowed_kernels(drawn.device.coefficients))
    parts.append(f"<h2>Coefficients, with 99 % intervals</h2><p>{told}</p>" + _wide(html_table(["", "value", "from", "to"], [
        [name, f"{getattr(drawn.device.coefficients, name):.4g}", f"{low:.4g}", f"{high:.4g}"]
        for name, (low, high) in drawn.intervals.items()])) if drawn.intervals else "")
    parts.append("<h2>Errors on rows that a fit has not seen, %</h2>" + _wide(html_table(["", "rows", "median", "P90", "worst"], [
        [name.replace("_", " ").replace(":", ", "), f"{e['rows']}", *(f"{100 * e[k]:.1f}" for k in ("median", "p90", "worst"))]
        for name, e in drawn.errors.items() if "slowdown" in name or "sm_axis" in name])))
    headline = f"{on}; {len(rows)} rows. {drawn.said}"
    write_text(out, _PAGE.format(title=html.escape(f"Co-running on {card}"), headline=html.escape(headline),
                                 body="".join(parts)))
    return [headline, f"wrote {out}"]


def figures_of(folder: Path, model: str | None = None) -> dict[str, Any]:
    """The page's figures by their titles, for a notebook; errors as of :func:`page`."""
    _, on, spec, rows = _read(folder, model)
    found = _figures(of_implementation(rows, None).rows, _fit(rows, spec), on)
    return {title: figure for title, _, figure in found if figure is not None}


def _read(folder: Path, model: str | None) -> tuple[str, str, ModelSpec, list[Row]]:
    """The card, all that the rows are of in words, the model, the rows."""
    if not folder.exists():
        raise ProfileError(f"{folder}: no such folder: give that of bullet-profile sweep")
    table = read_rows(folder)
    cards = sorted({str(r["gpu"]) for r in table})
    if len(cards) > 1:
        raise ProfileError(f"{folder}: rows of {', '.join(cards)}: one card a page")
    if not table:
        raise ProfileError(f"{folder}: holds no rows")
    spec, rows = model_of(table, model, str(folder))
    if not any(r["split_prefill_sms"] for r in rows):
        raise ProfileError(f"{folder}: no row of a partition (all ran on the whole of {cards[0]}): there is no co-running or SM "
                           "axis to draw")
    return cards[0], f"{cards[0]}, {spec.name}, {'simulated' if rows[0]['source'] == 'simulated' else 'measured'}", spec, rows


def _wide(text: str) -> str:
    return f'<div class="wide">{text}</div>'


def _fit(rows: Sequence[Row], model: ModelSpec) -> _Drawn:
    """Of all rows where they suffice; else of layers alone and at once, over kernels that are another table's."""
    try:
        c = fit_samples(rows, model)
        return _Drawn(DeviceModel(model, gpu_of(str(rows[0]["gpu"]), "rows"), c), "Lines: the fit of these rows.", c.intervals,
                      c.notes["errors"])
    except ProfileError as exc:
        why = " ".join(str(exc).split())[:160]
    gpu = gpu_of(str(rows[0]["gpu"]), "rows")
    if MODELS.get(model.name) != model:
        raise ProfileError(f"{model.name}: the rows are too few to fit ({why}), and no other kernels of this model are known")
    device, own = load_fitted(DeviceConfig(gpu=gpu.name, model=model.name)), of_implementation(rows, None).rows
    intervals: dict[str, tuple[float, float]] = {}
    errors: dict[str, Mapping[str, float]] = {}
    coefficients = device.coefficients
    if (layers := axis_of_layers(own, device)) is not None:
        coefficients = dataclasses.replace(coefficients, **layers[0])
        intervals, errors = dict(layers[1]), dict(layers[2])
    try:
        found = fit_contention(own, DeviceModel(model, gpu, coefficients))
        coefficients = dataclasses.replace(coefficients, **found.coefficients)
        intervals, errors = intervals | found.intervals, errors | found.errors
    except ProfileError:  # too few rows beside another: the shipped losses are drawn
        pass
    return _Drawn(DeviceModel(model, gpu, coefficients), f"Lines: layers of these rows over kernels of {device.source} ({why}).",
                  intervals, errors)


def _facts(rows: Sequence[Row], drawn: _Drawn) -> list[list[str]]:
    first, times = rows[0], [str(r["measured_at"]) for r in rows]
    split = [r["partition"] for r in rows if r["split_prefill_sms"]]
    proven = {kind: split.count(kind) for kind in ("proven", "unproven", "none")}
    drifts = [abs(r["drift"]) for r in rows if r["drift"] is not None]
    cells = {r["cell"] for r in rows if r["cell"]}
    facts = [["card", f"{first['gpu']}, {first['device_sms']} SMs"], ["model", str(first["model"])],
             ["rows taken", " to ".join(sorted({min(times), max(times)}))],
             ["software", ", ".join(f"{k} {first[k]}" for k in ("driver", "cuda", "torch", "triton") if first[k]) or "-"],
             ["rows on a partition", ", ".join(f"{n} {kind}" for kind, n in proven.items() if n)],
             ["cells, rows in all", f"{len(cells)}, {len(rows)}"],
             ["largest drift of the anchors", f"{100 * max(drifts):.1f} %" if drifts else "no anchors"],
             ["rows beside other processes", str(sum(r["busy"] is True for r in rows))]]
    if drawn.device.coefficients.shared_prefill_share is not None:
        facts.append(["prefill's share of shared SMs", f"{drawn.device.coefficients.shared_prefill_share:.3g}"])
    return facts


def _figures(rows: Sequence[Row], drawn: _Drawn, on: str) -> list[tuple[str, str, Any]]:
    """Title, a sentence for who reads it first, and the picture, or none where no row tells."""
    from bullet.results import sweep_plots as plots

    out: list[tuple[str, str, Any]] = []
    sides, splits, pairs = _heat(rows)
    unproven = " ? marks a partition that was not proven." if any("?" in split for split in splits) else ""
    out.append(("What co-running costs", (
        "How many times longer a layer of one phase takes while the other runs beside it, by how the SMs are split and by "
        "sizes; mean over visits. Colours end at the largest of the splits." + unproven) if pairs
        else "No layers ran beside each other.", plots.plot_heat(sides, splits, pairs, on) if pairs else None))
    alone = layer_rows(rows)
    data = LayersOnSms(alone, drawn.device) if alone else None
    if data is not None:
        out.append(("Layers alone against SMs", "Time of one layer, and the least bytes that it must move over that time. A "
                    "size's curve is the fit, moved to the height of its own points.",
                    plots.plot_along_sms(_panels(data, drawn.device), on)))
    own = [*corun_rows(rows, split=True), *corun_rows(rows, split=False)]
    measured, predicted = _beside(own, rows, drawn.device)
    along = _along(data, drawn.device) if data is not None else {}
    if measured or along:
        out.append(("What the fit leaves", "Each point is a row: how far the fit is from it.",
                    plots.plot_residuals(measured, predicted, along, on)))
    clocks = _clocks(rows)
    out.append(("Clocks alone and beside the other", (
        "The SM clock inside each window, in the same cell: points under the line ran slower for what the other lane drew "
        "of the card's power.") if clocks else "No clock was read inside these windows.",
        plots.plot_clocks(clocks, on) if clocks else None))
    controls = _controls(rows)
    out.append(("What each control costs", (
        "A layer beside a load of one kind: nothing, arithmetic of little power, tensor cores, a stream that stays in L2, a "
        "stream from memory.") if controls else "No control was taken.",
        plots.plot_controls(controls, on) if controls else None))
    return out


def _split_label(row: Row) -> str:
    if row["split_prefill_sms"] is None:
        return SHARED.get(row["sharing"] or "plain", "all SMs").replace(", ", ",\n")
    return f"{row['split_prefill_sms']}+{row['split_decode_sms']}{'?' if row['partition'] == 'unproven' else ''}"


def _heat(rows: Sequence[Row]) -> tuple[dict[str, dict[tuple[str, str], float]], list[str], list[str]]:
    found: dict[str, dict[tuple[str, str], list[float]]] = {"prefill": {}, "decode": {}}
    order: dict[str, tuple[Any, ...]] = {}
    pairs: dict[str, tuple[Any, ...]] = {}
    for row in rows:
        if row["kind"] != "corun" or not row["slowdown"] or {row["op"], row["corunner"]} != set(LAYERS):
            continue
        _, _, prefill, decode, _ = combination(row)  # type: ignore[misc]
        pair = f"{prefill[0]:,} | {decode[1]} x {decode[2]:,}"
        label = _split_label(row)
        order[label] = (row["split_prefill_sms"] is None, -(row["split_prefill_sms"] or 0), label)
        pairs[pair] = (*prefill, *decode)
        found[SIDES[row["op"]]].setdefault((pair, label), []).append(row["slowdown"])
    means = {side: {key: statistics.fmean(values) for key, values in cells.items()} for side, cells in found.items()}
    return means, sorted(order, key=lambda k: order[k]), sorted(pairs, key=lambda k: pairs[k])


def _axis(device: DeviceModel) -> Any:
    return np.array([getattr(device.coefficients, name) for name in AXIS])


def _size(row: Row) -> str:
    if row["op"] == "decode_layer":
        return f"{row['batch']} x {row['context_tokens']:,}"
    past = f" after {row['context_tokens']:,}" if row["context_tokens"] else ""
    return f"{row['tokens']:,}{past}" + (f" in {row['batch']}" if row["batch"] > 1 else "")


def _panels(data: LayersOnSms, device: DeviceModel) -> list[tuple[str, str, dict[str, Any]]]:
    from bullet.results.sweep_plots import Line

    axis, every = _axis(device), np.ones(len(data.rows), dtype=bool)
    factors, count = data.factors(axis, every), device.num_sms
    grid = np.unique(np.linspace(min(16, int(data.sms.min())), count, 60).astype(int))
    panels: list[tuple[str, str, dict[str, Any]]] = []
    for op, side, rest in (("prefill_layer", "Prefill", "prompt tokens"), ("decode_layer", "Decode", "sequences x context")):
        seconds: dict[str, Any] = {}
        rates: dict[str, Any] = {}
        sizes = [int(s) for s in dict.fromkeys(data.size[data.op == op].tolist())]
        widest = sorted(sizes, key=lambda s: -len(set(data.sms[data.size == s].tolist())))[:MOST_SIZES]
        for size in sorted(widest, key=lambda s: (data.rows[int(np.argmax(data.size == s))]["tokens"], s)):
            own = data.size == size
            row = data.rows[int(np.argmax(own))]
            curve = LayersOnSms([{**row, "sms": int(sms), "drift": None, "clock_window_hz": None} for sms in grid], device)
            fitted = curve.seconds(axis) * factors[size]
            places = sorted(set(data.sms[own].tolist()))
            points = np.array([statistics.fmean(data.measured[own & (data.sms == sms)].tolist()) for sms in places])
            moved = float(row["bytes"] or data.terms.bytes[own][0])
            name = _size(row)
            seconds[name] = Line(places, (1e3 * points).tolist(), grid.tolist(), (1e3 * fitted).tolist())
            rates[name] = Line(places, (moved / points / 1e12).tolist(), grid.tolist(), (moved / fitted / 1e12).tolist())
        if seconds:
            panels += [(f"{side}, by {rest}", "ms a layer (log scale)", seconds),
                       (f"{side}: least bytes over time", "TB/s", rates)]
    return panels


def _along(data: LayersOnSms, device: DeviceModel) -> dict[str, dict[str, list[float]]]:
    axis, every = _axis(device), np.ones(len(data.rows), dtype=bool)
    predicted = data.seconds(axis) * data.factors(axis, every)[data.size]
    return {SIDES[op]: {"sms": data.sms[data.op == op].tolist(), "measured": data.measured[data.op == op].tolist(),
                        "predicted": predicted[data.op == op].tolist()} for op in LAYERS if (data.op == op).any()}


def _beside(own: Sequence[Row], rows: Sequence[Row], device: DeviceModel
            ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    if not own:
        return {}, {}
    data, c = CorunRows(own, rows, device), device.coefficients
    told = {name: getattr(c, name) for name in LOSSES}
    losses = [loss if loss is not None else 0.0 if "l2" in name else c.contention_loss for name, loss in told.items()]
    ratio = data.slowdowns(losses, device.shared_prefill_share)
    pick = {"prefill": data.prefill, "decode": ~data.prefill}
    return ({side: data.measured[of].tolist() for side, of in pick.items() if of.any()},
            {side: ratio[of].tolist() for side, of in pick.items() if of.any()})


def _clocks(rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float]]]:
    alone: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        if row["kind"] == "solo" and row["cell"] and row["clock_window_hz"]:
            alone.setdefault((row["cell"], row["lane"]), []).append(row["clock_window_hz"])
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["kind"] == "corun" and row["clock_window_hz"] and (row["cell"], row["lane"]) in alone:
            pair = found.setdefault(str(row["lane"]), ([], []))
            pair[0].append(statistics.fmean(alone[row["cell"], row["lane"]]) / 1e9)
            pair[1].append(row["clock_window_hz"] / 1e9)
    return found


def _controls(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float, float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["kind"] == "control" and row["slowdown"]:
            found.setdefault(str(row["corunner"]), {}).setdefault(str(row["lane"]), []).append(row["slowdown"])
    order = [name for name in CONTROLS if name in found] + sorted(set(found) - set(CONTROLS))
    return {name.replace("_", " "): {side: (statistics.fmean(found[name][side]), min(found[name][side]), max(found[name][side]))
                                     for side in ("prefill", "decode") if side in found[name]} for name in order}
