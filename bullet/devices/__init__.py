"""How long a step takes: devices."""

from pathlib import Path

PROFILES = Path(__file__).parents[1] / "profiles" / "data"
"""The shipped profiles: a folder ``<gpu>/<model>`` each, with what was measured (``samples.parquet``), fitted (``fit.json``) or
recorded there."""
