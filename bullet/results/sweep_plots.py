"""A sweep of a card drawn: what co-running costs, layers against SMs, what the fit leaves, clocks, controls.

Each function takes plain numbers and returns a matplotlib ``Figure``; none reads a row or fits anything
(:mod:`bullet.profiles.page` does). Colours are Okabe and Ito's; heat maps run from white to one blue, which a grey print keeps.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bullet.results.plots import COLOURS, figure_of, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP"


class Line(NamedTuple):
    """One size along SMs: what was measured at each, and the fit's curve."""

    sms: Sequence[float]
    measured: Sequence[float]
    fit_sms: Sequence[float]
    fitted: Sequence[float]


def png_text(figure: Figure) -> str:
    """As PNG in base 64, for a page that holds its pictures."""
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return base64.b64encode(data.getvalue()).decode()


def plain_ticks(value: float, position: int | None = None) -> str:
    """1, 2 and 5 of a decade, written out."""
    first = f"{value:e}"[0]
    return f"{value:g}" if first in "25" else ""


def _below(figure: Figure, axes: Any, columns: int) -> None:
    """The legend under all panels: never on the data."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)), fontsize=8.5, frameon=False)


def plot_heat(sides: Mapping[str, Mapping[tuple[str, str], float]], splits: Sequence[str], pairs: Sequence[str], on: str
              ) -> Figure:
    """Slow-downs by side: a column a split, a row a pair of sizes; what was not measured is grey, with a dash."""
    figure = figure_of(11, 1.9 + 0.3 * len(pairs))
    panels = figure.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    # Shared SMs cost several times what a split does: they would leave one colour for all else, and are the darkest instead.
    values = [value for cells in sides.values() for (_, split), value in cells.items() if "+" in split] or [
        value for cells in sides.values() for value in cells.values()]
    top = max((*values, 1.1))
    for axes, (side, cells) in zip(panels, sides.items(), strict=True):
        grid = np.array([[cells.get((pair, split), np.nan) for split in splits] for pair in pairs])
        # What is not a number stays as the panel behind it.
        image = axes.pcolormesh(np.arange(len(splits) + 1), np.arange(len(pairs) + 1), grid, cmap="Blues", vmin=1.0, vmax=top,
                                edgecolor="white", linewidth=1.0)
        axes.set_facecolor("0.88")
        for row in range(len(pairs)):
            for column in range(len(splits)):
                value = grid[row, column]
                dark = np.isfinite(value) and value > 1 + 0.6 * (top - 1)
                axes.text(column + 0.5, row + 0.5, "-" if np.isnan(value) else f"{value:.2f}", ha="center", va="center",
                          fontsize=8, color="white" if dark else "black")
        axes.set_xticks(np.arange(len(splits)) + 0.5, splits, fontsize=8, rotation=90 if len(splits) > 8 else 0)
        axes.set_yticks(np.arange(len(pairs)) + 0.5, pairs, fontsize=8)
        axes.set_ylim(len(pairs), 0)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("SMs of prefill + decode")
        axes.set_title(f"{side}: seconds beside the other / alone", fontsize=9.5)
    panels[0].set_ylabel("prompt tokens | decode sequences")
    figure.colorbar(image, ax=list(panels), label="slow-down (1: none)", shrink=0.9, pad=0.02, extend="max")
    figure.suptitle(on, fontsize=9)
    return figure


def plot_along_sms(panels: Sequence[tuple[str, str, Mapping[str, Line]]], on: str) -> Figure:
    """Two panels a phase, (title, unit, size -> points and curve): points are rows, lines the fit."""
    figure = figure_of(11, 3.7 * ((len(panels) + 1) // 2))
    grid = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False).ravel()
    for axes, (title, unit, lines) in zip(grid, panels, strict=False):
        for i, (name, line) in enumerate(lines.items()):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(line.fit_sms, line.fitted, color=colour, linewidth=1.3, zorder=1)
            axes.scatter(line.sms, line.measured, s=16, color=colour, marker=MARKERS[i % len(MARKERS)], label=name, zorder=2,
                         edgecolor="white", linewidth=0.3)
        tidy(axes, "SMs of the lane", unit)
        if unit.startswith("ms"):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(plain_ticks)
            axes.grid(which="minor", alpha=0.12, linewidth=0.5)
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_title(title, fontsize=9.5)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for axes in grid[len(panels):]:
        axes.remove()
    figure.suptitle(f"{on}: points are rows, lines the fit", fontsize=9)
    return figure


def plot_residuals(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]],
                   along: Mapping[str, Mapping[str, Sequence[float]]], on: str) -> Figure:
    """Left: the fit's slow-down over the measured one, by side. Right: its seconds against SMs likewise."""
    figure = figure_of(11, 4.0)
    left, right = figure.subplots(1, 2)
    for i, side in enumerate(measured):
        ratio = 100 * (np.array(predicted[side]) / np.array(measured[side]) - 1)
        left.scatter(measured[side], ratio, s=14, color=COLOURS[i], marker=MARKERS[i], alpha=0.8, label=side)
    for i, (side, columns) in enumerate(along.items()):
        ratio = 100 * (np.array(columns["predicted"]) / np.array(columns["measured"]) - 1)
        right.scatter(np.array(columns["sms"]) + (i - 0.5) * 0.8, ratio, s=14, color=COLOURS[i], marker=MARKERS[i], alpha=0.8,
                      label=side)
    for axes, x, title in ((left, "slow-down of the row", "slow-downs"),
                           (right, "SMs of the lane", "seconds alone against SMs")):
        axes.axhspan(-5, 5, color="0.93", zorder=0)
        axes.axhline(0, color="0.5", linewidth=0.8)
        tidy(axes, x, "fit over row, %")
        axes.set_title(f"{title} (band: 5 %)", fontsize=9.5)
    _below(figure, left if measured else right, 2)
    figure.suptitle(on, fontsize=9)
    return figure


def plot_clocks(pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]], on: str) -> Figure:
    """SM clock alone against beside the other, GHz, in the same cell."""
    figure = figure_of(7.5, 4.6)
    axes = figure.add_subplot()
    values = [v for alone, beside in pairs.values() for v in (*alone, *beside)]
    low, high = min(values) - 0.02, max(values) + 0.02
    axes.plot([low, high], [low, high], color="0.5", linewidth=0.8, linestyle="--", label="as fast as alone")
    for i, (side, (alone, beside)) in enumerate(pairs.items()):
        axes.scatter(alone, beside, s=16, color=COLOURS[i], marker=MARKERS[i], alpha=0.8, label=side)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    tidy(axes, "clock alone, GHz", "clock beside the other, GHz")
    _below(figure, axes, 3)
    figure.suptitle(on, fontsize=9)
    return figure


def plot_controls(costs: Mapping[str, Mapping[str, tuple[float, float, float]]], on: str) -> Figure:
    """What each load on the other lane costs: control -> side -> mean slow-down, least, most (over splits); % more seconds."""
    names = list(costs)
    sides = list(dict.fromkeys(side for cells in costs.values() for side in cells))
    figure = figure_of(9, 1.6 + 0.5 * len(names))
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        places = [row + (i - (len(sides) - 1) / 2) * height for row, name in enumerate(names) if side in costs[name]]
        means, lows, highs = (np.array(column) for column in zip(*(costs[name][side] for name in names if side in costs[name]),
                                                                 strict=True))
        axes.barh(places, 100 * (means - 1), height=0.9 * height, color=COLOURS[i], label=side, hatch=("", "///")[i % 2],
                  edgecolor="white")
        axes.errorbar(100 * (means - 1), places, xerr=(100 * (means - lows), 100 * (highs - means)), fmt="none", ecolor="black",
                      elinewidth=1.0, capsize=2)
        for place, mean, high in zip(places, means, highs, strict=True):
            axes.annotate(f"{100 * (mean - 1):.1f}", (100 * max(high - 1, 0.0), place), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=8)
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    tidy(axes, "seconds more than alone, % (bar: mean over splits; whisker: least and most)", "")
    _below(figure, axes, 2)
    figure.suptitle(on, fontsize=9)
    return figure
