"""Goodput by bisection on worlds whose crossing is known; capacity of a device whose seconds are given."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullet import capacity, goodput
from bullet.config import RunConfig, configuration
from bullet.errors import ConfigError
from bullet.sweeps import goodput as module
from bullet.sweeps import pool as pools
from bullet.sweeps.goodput import Search
from bullet.sweeps.pool import Progress

SMALL = {"workload.num_requests": 20}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RunConfig], float]], list[RunConfig]]:
    """Runs whose attainment is given by hand instead of simulated; what was run."""
    def build(attainment: Callable[[RunConfig], float]) -> list[RunConfig]:
        ran: list[RunConfig] = []

        def measure(config: RunConfig) -> tuple[dict[str, Any], float]:
            ran.append(config)
            value = attainment(config)
            return {"slo_attainment_mean_length": value, "slo_attainment_per_request": value / 2}, 0.5

        monkeypatch.setattr(pools, "measure", measure)
        monkeypatch.setattr(module, "estimated_capacity", lambda base: 5.0)
        return ran

    return build


def search(attainment: Callable[[float], float], start: int = 100, step: int = 8) -> Search:
    one = Search(0.02, 0.9, start, step)
    while (k := one.next()) is not None:
        assert k not in one.tried
        one.tried[k] = attainment(one.rate(k))
    return one


@pytest.mark.parametrize("crossing", [2.0, 7.2, 7.3, 9.0, 40.0])
def test_a_step_is_found_to_one_rate_of_the_grid(crossing: float) -> None:
    found = search(lambda rate: float(rate < crossing))
    assert found.low is not None
    assert found.rate(found.low) < crossing <= found.rate(found.low + 1)
    assert found.rate(found.low + 1) / found.rate(found.low) == pytest.approx(1.02, rel=1e-5)
    assert found.value == pytest.approx(crossing, rel=0.02)
    assert len(found.tried) < 20


def test_near_the_start_few_runs_are_enough() -> None:
    start = Search(0.02, 0.9, 100, 2).rate(100)
    assert len(search(lambda rate: float(rate < start * 1.001), step=2).tried) == 3


def test_between_two_rates_the_crossing_is_interpolated() -> None:
    # Attainment is 1 - rate / 100: 0.9 at 10 exactly.
    assert search(lambda rate: 1 - rate / 100).value == pytest.approx(10, rel=1e-9)


def test_an_attainment_that_rises_again_is_searched_above() -> None:
    # Met below 3 and between 5 and 8: the highest rate that meets it is wanted; from 7.24 it is seen.
    assert search(lambda rate: float(rate < 3 or 5 <= rate < 8)).value == pytest.approx(8, rel=0.02)


def test_a_goal_that_no_rate_meets_ends_the_search() -> None:
    found = search(lambda rate: 0.5)
    assert found.value is None
    assert len(found.tried) < 10


def test_a_goal_that_every_rate_meets_gives_a_lower_bound() -> None:
    found = search(lambda rate: 1.0)
    assert found.high is None
    assert found.value == found.rate(max(found.tried)) > 64 * found.rate(100)


def test_policies_are_paired_by_seed(world: Any, tmp_path: Path) -> None:
    """Seeds cross at 4, 5, 6; the second policy 0.5 later: the difference is known better than either."""
    world(lambda c: float(c.workload.rate_req_per_s < 4 + c.seed + 0.5 * (c.policy.name == "static-96")))
    found = goodput(SMALL, ["vllm-1024", "static-96"], seeds=3, tolerance=0.01, cache=tmp_path / "cache", jobs=1,
                    out=tmp_path / "out")
    first, second = found.found
    assert [value for value in first.values if value] == [pytest.approx(4 + seed, rel=0.01) for seed in range(3)]
    gap = found.difference(second, first)
    assert gap is not None
    assert gap.mean == pytest.approx(0.5, abs=0.06)
    assert gap.half_width is not None
    assert first.mean is not None
    assert first.mean.half_width == pytest.approx(4.303 / 3**0.5, abs=0.1)
    assert gap.half_width < 0.15
    lines = found.text().splitlines()
    assert lines[1] == ("goodput: highest rate with attainment (mean_length) >= 0.9, to 0.01; mean of 3 seeds ± half of the 95 % "
                        "interval")
    assert lines[5].split()[0] == "vllm-1024"
    assert lines[6].split()[-4].startswith("+0.")
    kept = json.loads((tmp_path / "out" / "goodput.json").read_text())
    assert [one["by_seed"] for one in kept] == [list(one.values) for one in found.found]
    with open(tmp_path / "out" / "probes.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found.probes) == first.runs + second.runs


def test_the_second_time_all_is_in_the_cache(world: Any, tmp_path: Path) -> None:
    ran = world(lambda c: float(c.workload.rate_req_per_s < 6))
    first = goodput(SMALL, seeds=2, cache=tmp_path, jobs=1)
    count = len(ran)
    again = goodput(SMALL, seeds=2, cache=tmp_path, jobs=1)
    assert (again, len(ran)) == (first, count)
    # Other seeds begin where the first ended.
    assert [one.seed for one in ran].count(1) < [one.seed for one in ran].count(0)


def test_an_objective_that_no_rate_meets_is_told_with_the_best_there_is(world: Any, tmp_path: Path) -> None:
    world(lambda c: 0.95 if (c.policy.name, c.workload.rate_req_per_s < 6) == ("naive", True)
          else 0.8 - c.workload.rate_req_per_s / 1000)
    found = goodput(SMALL, ["naive", "static-96"], seeds=2, cache=tmp_path, jobs=1)
    assert found.found[1].mean is None
    assert found.found[1].best[1] == max(row["attainment"] for row in found.probes if row["policy.name"] == "static-96")
    assert "no rate: best is 0.800 at 0.0" in found.text()
    assert found.found[0].mean is not None
    assert found.difference(*found.found) is None


def test_an_objective_that_every_rate_meets_is_a_lower_bound(world: Any, tmp_path: Path) -> None:
    world(lambda c: 1.0)
    found = goodput(SMALL, seeds=3, cache=tmp_path, jobs=1)
    assert found.found[0].at_least
    assert ">= " in found.text()


def test_a_policy_that_fails_leaves_the_others(world: Any, tmp_path: Path) -> None:
    def attainment(c: RunConfig) -> float:
        if c.policy.name == "naive":
            raise ConfigError("stuck")
        return float(c.workload.rate_req_per_s < 6)

    world(attainment)
    found = goodput(SMALL, ["static-96", "naive"], seeds=2, cache=tmp_path, jobs=1)
    assert (found.found[1].error, found.found[1].mean) == ("stuck", None)
    assert found.found[0].mean is not None
    assert found.found[0].mean.mean == pytest.approx(6, rel=0.02)
    assert "stuck" in found.text()


def test_recorded_arrivals_are_sped_up(world: Any, tmp_path: Path) -> None:
    ran = world(lambda c: float(c.workload.time_scale < 3))
    found = goodput({"workload.arrivals": "recorded", "workload.num_requests": 50}, seeds=1, cache=tmp_path, jobs=1)
    assert found.found[0].values[0] == pytest.approx(3, rel=0.02)
    assert {one.workload.num_requests for one in ran} == {50}
    assert "x recorded speed" in found.text()


def test_progress_ends_at_what_was_run(world: Any, tmp_path: Path) -> None:
    world(lambda c: float(c.workload.rate_req_per_s < 6))
    seen: list[Progress] = []
    found = goodput(SMALL, seeds=3, cache=tmp_path, jobs=1, progress=seen.append)
    assert seen[-1] == Progress(len(found.probes), len(found.probes), 0.0)
    assert all(one.total > one.done for one in seen[:-1])


@pytest.mark.parametrize(("options", "says"), [
    ({"goal": 0}, "goal = 0: must be more than 0"), ({"goal": 1.1}, "goal"), ({"tolerance": 0}, "tolerance"),
    ({"seeds": 0}, "seeds"), ({"policies": ["naive", "naive"]}, "each policy once"),
    ({"policies": ["none-such"]}, "unknown policy")])
def test_what_cannot_be_asked(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        goodput(SMALL, cache=tmp_path / "cache", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_real_one_is_where_runs_beside_it_say(tmp_path: Path) -> None:
    """Simulated: a crossing whose neighbours are runs on either side of the goal."""
    found = goodput({"workload.num_requests": 60}, ["vllm-1024"], seeds=1, tolerance=0.05, cache=tmp_path, jobs=1)
    (value,) = found.found[0].values
    assert value is not None
    met = max(row["workload.rate_req_per_s"] for row in found.probes if row["attainment"] >= 0.9)
    missed = min(row["workload.rate_req_per_s"] for row in found.probes if row["attainment"] < 0.9 and
                 row["workload.rate_req_per_s"] > met)
    assert met <= value <= missed <= met * 1.0501


def test_capacity_is_what_an_overloaded_lane_serves(tmp_path: Path) -> None:
    """Below the fluid bound, above half of it, and the same whichever the configuration's rate."""
    config = {"workload.num_requests": 400, "workload.trace": "azure-code"}
    (one,) = capacity(config, ["vllm-1024"], seeds=1, cache=tmp_path, jobs=1).values()
    assert one.whole
    assert one.mix == pytest.approx(1, abs=0.15)
    assert 3.5 < one.req_per_s.mean < 6.55
    (other,) = capacity({**config, "workload.rate_req_per_s": 1}, ["vllm-1024"], seeds=1, cache=tmp_path, jobs=1).values()
    assert other == one
    with pytest.raises(ConfigError, match="recorded"):
        capacity({"workload.arrivals": "recorded"}, cache=tmp_path)
    with pytest.raises(ConfigError, match="closed loop"):
        goodput({"workload.arrivals": "closed", "workload.concurrency": 4, "workload.rate_req_per_s": None}, cache=tmp_path)




def test_rates_that_change_are_moved_by_their_scale(tmp_path: Path) -> None:
    """4.75 req/s on average: 9.5 are twice as many, whatever the phases say."""
    config = {"workload.trace": "azure-code@2.5/2s,sharegpt@7/2s", "workload.num_requests": 60,
              "workload.max_prompt_tokens": 4000}
    whole = configuration(config)
    assert module.rate_axis(whole) == "workload.rate_scale"
    assert module.at_rate(whole, 9.5) == 2.0
    twice = configuration({**config, "workload.rate_scale": 2.0})
    assert module.at_rate(twice, 9.5) == pytest.approx(2.0)
    found = goodput(config, ["static-96"], seeds=1, tolerance=0.3, cache=tmp_path, jobs=1)
    assert found.axis == "workload.rate_scale"
    assert found.found[0].runs > 1
    assert "x its rates" in found.text()
    assert module.rate_axis(configuration({})) == "workload.rate_req_per_s"
