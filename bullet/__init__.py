"""Bullet: how should one GPU be shared between prefill and decode?

``simulate``, ``compare``, ``load_run``, ``table``, ``plot_latency``, ``plot_comparison`` and ``Run`` (docs/api.md) are those of
:mod:`bullet.api`, which is loaded when the first of them is asked for: commands start without it.
"""

from typing import TYPE_CHECKING, Any

from bullet.version import VERSION as __version__

if TYPE_CHECKING:
    from bullet.api import Run, compare, load_run, plot_comparison, plot_latency, simulate, table

__all__ = ["Run", "__version__", "compare", "load_run", "plot_comparison", "plot_latency", "simulate", "table"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bullet import api

    return getattr(api, name)
