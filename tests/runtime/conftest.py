"""The stub driver lies beside the tests; they import it by name."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def planned_points_only(monkeypatch):
    """A fake GPU takes no time, so everything that a plan had to cut would be measured too."""
    from bullet.profiler import plan as planning

    make_plan = planning.make_plan
    monkeypatch.setattr(planning, "make_plan", lambda *args, **kwargs: dataclasses.replace(make_plan(*args, **kwargs), spare=()))
