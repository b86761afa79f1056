"""One look for all of the paper's figures: a colour and a dash a system, a palette of its own for phases, the legend off the
data.

Colours are Okabe and Ito's (systems) and Tol's muted ones (phases): told apart by colour-blind readers and, with the dashes,
on a grey print. Sizes are inches of a page: one column is 3.4, two are 7."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bullet.errors import ResultsError
from bullet.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, COLUMN = 7.0, 3.4
DPI = 300
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "savefig.dpi": DPI,
    "figure.dpi": DPI,
}


def applied() -> AbstractContextManager[None]:
    """In which figures are made and saved."""
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(RC)
    return context


class Look(NamedTuple):
    """How a system is drawn, ours; the paper's own points are its open marker."""

    name: str
    colour: str
    dash: Any
    marker: str


SYSTEMS: Mapping[str, Look] = {
    "bullet": Look("Bullet", "#D55E00", "-", "o"),
    "bullet-plus": Look("bullet-plus (ours)", "#000000", (0, (1, 1)), "*"),
    "vllm-1024": Look("vLLM-1024", "#0072B2", (0, (5, 1.5)), "s"),
    "vllm-2048": Look("vLLM-2048", "#0072B2", (0, (5, 1.5)), "s"),
    "sglang-1024-mixed": Look("SGLang-1024", "#009E73", (0, (3, 1, 1, 1)), "^"),
    "sglang-2048-mixed": Look("SGLang-2048", "#CC79A7", (0, (1.5, 1.5)), "v"),
    "nanoflow-1024": Look("NanoFlow-1024", "#E69F00", (0, (6, 1, 1, 1, 1, 1)), "D"),
    "static-84": Look("84 SMs fixed", "#56B4E9", (0, (3, 1.5)), "P"),
    "static-96": Look("96 SMs fixed", "#0072B2", (0, (4, 1, 1, 1)), "X"),
    "static-108": Look("108 SMs fixed", "#009E73", (0, (1, 1.5)), "d"),
    "naive": Look("naive", "#56B4E9", (0, (3, 1.5)), "P"),
    "bullet-partition": Look("with partition", "#0072B2", (0, (4, 1, 1, 1)), "X"),
    "bullet-scheduler": Look("with scheduler", "#009E73", (0, (1, 1.5)), "d"),
}
PHASES: Mapping[str, str] = {
    "prefill": "#332288",
    "decode": "#88CCEE",
    "hybrid": "#AA4499",
    "shared": "#44AA99",
    "idle": "#DDDDDD",
    "bound": "#DDCC77",
}
SIZES = ("#332288", "#117733", "#CC6677", "#DDAA33")
"""Of curves that differ by a size, from small to large."""


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes (always an array of two dimensions)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def log(axes: Any) -> None:
    """The values on a logarithmic scale, its ticks written out: 0.2, 5, 300."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def below(figure: Figure, columns: int = 4) -> None:
    """One legend for all panels, under them."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside lower center",
            ncols=min(columns, len(found)),
            fontsize=7.5,
            frameon=False,
        )


def curve(axes: Any, system: str, x: Sequence[float], y: Sequence[float], half: Sequence[float | None] = ()) -> None:
    """Ours: a line with its markers, and the 95 % interval as a band."""
    look = SYSTEMS[system]
    axes.plot(x, y, color=look.colour, linestyle=look.dash, marker=look.marker, label=f"{look.name}, ours")
    if half and any(half):
        low, high = zip(*((m - (h or 0.0), m + (h or 0.0)) for m, h in zip(y, half, strict=True)), strict=True)
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)


def points(axes: Any, system: str, x: Sequence[float], y: Sequence[float]) -> None:
    """The paper's: open markers without a line."""
    look = SYSTEMS[system]
    axes.plot(
        x, y, color=look.colour, linestyle="none", marker=look.marker, fillstyle="none", markersize=5, label=f"{look.name}, paper"
    )


def save(figure: Figure, stem: Path, dpi: int = DPI) -> None:
    """``stem.png`` and ``stem.pdf``; equal figures, equal bytes."""
    for suffix, options in (
        (".png", {"metadata": {"Software": None}}),
        (".pdf", {"metadata": {"CreationDate": None, "Producer": None, "Creator": None}}),
    ):
        with whole_file(stem.with_suffix(suffix)) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=dpi, **options)
        figure.set_layout_engine("none")  # what the first has laid out stands for the other: half of the time


def needs(extra: str, module: str, load: Callable[[], object]) -> None:
    """:class:`ResultsError` in one line where an extra is missing."""
    try:
        load()
    except ImportError:
        raise ResultsError(f"{module} is not installed: pip install 'bullet-llm[{extra}]' brings it") from None
