"""Bullet: how should one GPU be shared between prefill and decode?

``simulate``, ``compare``, ``load_run``, ``table``, ``plot_latency``, ``plot_comparison``, ``Run``, and ``step_times``,
``measure_gpu``, ``fit_gpu``, ``plot_gpu`` (docs/api.md) are those of :mod:`bullet.api`, which is loaded when the first of them is
asked for: commands start without it. ``sweep``, ``goodput``,
``capacity`` and ``bound`` are those of :mod:`bullet.sweeps`.
"""

from typing import TYPE_CHECKING, Any

from bullet.version import VERSION as __version__

if TYPE_CHECKING:
    from bullet.api import (
        Run,
        compare,
        fit_gpu,
        load_run,
        measure_gpu,
        plot_comparison,
        plot_gpu,
        plot_latency,
        simulate,
        step_times,
        table,
    )
    from bullet.sweeps.bound import bound
    from bullet.sweeps.goodput import capacity, goodput
    from bullet.sweeps.sweep import sweep

__all__ = ["Run", "__version__", "bound", "capacity", "compare", "fit_gpu", "goodput", "load_run", "measure_gpu",
           "plot_comparison", "plot_gpu", "plot_latency", "simulate", "step_times", "sweep", "table"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("bound", "capacity", "goodput", "sweep"):
        from bullet.sweeps import bound, goodput, sweep

        return getattr({"bound": bound, "sweep": sweep}.get(name, goodput), name)
    from bullet import api

    return getattr(api, name)
