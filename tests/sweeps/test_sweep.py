"""Sweeps from end to end on small runs: cache, resuming, killed workers, errors of single runs, tables, differences."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bullet import bound, simulate, sweep
from bullet.config import RunConfig
from bullet.errors import ConfigError, ResultsError
from bullet.sweeps import pool as pools
from bullet.sweeps.cache import Cache
from bullet.sweeps.pool import Pool, Progress
from bullet.sweeps.sweep import Sweep

RATE = "workload.rate_req_per_s"
SMALL = {"workload.num_requests": 15}
AXES = {"policy.name": ["vllm-1024", "static-96"], RATE: "4:5"}

KILLS = """
import os
from pathlib import Path
from bullet.policies.static import Static

class Kills(Static):
    '''Ends the process that builds it, once, where that is not the one that began the test.'''
    def __init__(self, context):
        super().__init__(context, 96)
        here = Path(__file__).parent
        if os.getpid() != int((here / "parent").read_text()) and not (here / "killed").exists():
            (here / "killed").touch()
            os.kill(os.getpid(), 9)

class Never(Static):
    '''Ends every process but the first.'''
    def __init__(self, context):
        super().__init__(context, 96)
        if os.getpid() != int((Path(__file__).parent / "parent").read_text()):
            os.kill(os.getpid(), 9)

class Fails(Static):
    def __init__(self, context):
        super().__init__(context, 96)

    def next_step(self, lane, state, now_s):
        raise ZeroDivisionError("on purpose")
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(KILLS)
    (tmp_path / "parent").write_text(str(os.getpid()))
    return str(tmp_path / "mine.py")


def lines() -> tuple[list[str], Callable[[str], None]]:
    said: list[str] = []
    return said, said.append


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(SMALL, AXES, seeds=2, cache=tmp_path_factory.mktemp("cache"), jobs=1)


def test_a_row_is_what_a_run_alone_says(found: Sweep) -> None:
    assert [(row["policy.name"], row[RATE], row["seed"]) for row in found.rows] == [
        (p, r, s) for p in ("vllm-1024", "static-96") for r in (4, 5) for s in (0, 1)]
    row = found.rows[7]
    alone = simulate({**SMALL, "policy.name": "static-96", RATE: 5, "seed": 1}).summary
    for name, value in alone.items():
        if isinstance(value, dict) and not name.endswith("_by_reason"):
            assert {row[f"{name}.{key}"] for key in value} == set(value.values())
        elif name not in ("complete", "rejected_by_reason"):
            assert row[name] == value, name
    assert row["rejected_by_reason"] == "{}"
    assert row["error"] is None
    assert row["steady.offered"] <= 15


def test_each_run_says_what_share_of_the_fluid_bound_it_finished(found: Sweep) -> None:
    """The bound is of the requests, whatever their rate and the policy."""
    for row in found.rows:
        limit = bound({**SMALL, RATE: 9, "seed": row["seed"]}).fluid.req_per_s
        assert row["fluid_bound_req_per_s"] == limit
        assert row["fluid_bound_share"] == row["request_throughput"] / limit


def test_no_share_is_told_where_the_bound_means_nothing(tmp_path: Path) -> None:
    closed = sweep({**SMALL, "workload.arrivals": "closed", "workload.concurrency": 4, "policy.name": "vllm-1024"}, {},
                   cache=tmp_path, jobs=1)
    assert "fluid_bound_share" not in closed.rows[0]
    assert "fluid_bound_share" not in closed.text()


def test_the_second_time_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sweep(SMALL, AXES, cache=tmp_path, jobs=1)
    seen: list[Progress] = []
    monkeypatch.setattr(pools, "measure", lambda config: pytest.fail("run again"))
    again = sweep(SMALL, {RATE: [5, 4], "policy.name": "static-96"}, cache=tmp_path, jobs=1, progress=seen.append)
    assert seen == [Progress(2, 2, 0.0)]
    assert [row for row in again.rows if row[RATE] == 4] == [
        row for row in first.rows if row[RATE] == 4 and row["policy.name"] == "static-96"]
    whole = sweep(SMALL, AXES, cache=tmp_path, jobs=1)
    for number, one in enumerate((first, whole)):
        (tmp_path / str(number)).mkdir()
        one.write(tmp_path / str(number), report=False)
    for name in ("runs.parquet", "runs.csv", "points.csv", "sweep.txt"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), name


def test_processes_give_the_same_rows_as_one(found: Sweep, tmp_path: Path) -> None:
    seen: list[Progress] = []
    other = sweep(SMALL, AXES, seeds=2, cache=tmp_path, jobs=2, progress=seen.append)
    assert list(other.rows) == list(found.rows)
    assert [p.done for p in seen] == list(range(9))
    assert seen[0].left_s is None
    assert seen[-1].left_s == 0


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(at: Progress) -> None:
        if at.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(SMALL, AXES, cache=tmp_path / "cache", out=tmp_path / "out", jobs=1, progress=stop)
    assert not (tmp_path / "out").exists()
    ran: list[str] = []
    plain = pools.measure
    monkeypatch.setattr(pools, "measure", lambda config: (ran.append(config.policy.name), plain(config))[1])
    assert len(sweep(SMALL, AXES, cache=tmp_path / "cache", jobs=1).rows) == 4
    assert ran == ["static-96", "static-96"]


def test_a_kill_without_warning_loses_no_result(tmp_path: Path) -> None:
    code = f"""
import os
from bullet import sweep
sweep({SMALL!r}, {AXES!r}, cache={str(tmp_path)!r}, jobs=1, progress=lambda at: at.done == 3 and os.kill(os.getpid(), 9))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert done.returncode == -9
    seen: list[Progress] = []
    assert not sweep(SMALL, AXES, cache=tmp_path, jobs=1, progress=seen.append).errors
    assert (seen[0].done, seen[0].total) == (3, 4)


def test_a_damaged_entry_is_made_anew_and_said(found: Sweep, tmp_path: Path) -> None:
    first = sweep(SMALL, AXES, seeds=2, cache=tmp_path, jobs=1)
    path = Cache(tmp_path).path(first.rows[0]["key"])
    path.write_bytes(path.read_bytes()[:100])
    said, say = lines()
    assert list(sweep(SMALL, AXES, seeds=2, cache=tmp_path, jobs=1, say=say).rows) == list(found.rows)
    assert said == [f"{path}: damaged: this run is made anew"]
    assert list(sweep(SMALL, AXES, seeds=2, cache=tmp_path, jobs=1, say=say).rows) == list(found.rows)
    assert len(said) == 1


@pytest.mark.parametrize("ray", [None, "local"])
def test_a_worker_that_is_killed_loses_no_result(ray: str | None, mine: str, tmp_path: Path) -> None:
    if ray:
        pytest.importorskip("ray")
    said, say = lines()
    result = sweep(SMALL, {"policy.name": ["static-96", f"{mine}:Kills"], "seed": "0:3"}, cache=tmp_path / "cache", jobs=2,
                   ray=ray, say=say)
    assert (tmp_path / "killed").exists()
    assert not result.errors
    half = len(result.rows) // 2
    assert [row["mean_ttft_ms"] for row in result.rows[:half]] == [row["mean_ttft_ms"] for row in result.rows[half:]]
    # Ray repeats the one run itself; loky's pool is made anew.
    assert [line.partition(":")[0] for line in said] == ([] if ray else ["a worker died (TerminatedWorkerError)"])


def test_workers_that_always_die_are_an_end_and_keep_the_rest(mine: str, tmp_path: Path) -> None:
    said, say = lines()
    with pytest.raises(ResultsError, match=r"workers died 3 times in a row .* results are kept in .*; fewer --jobs") as exc:
        sweep(SMALL, {"policy.name": [f"{mine}:Never"], "seed": "0:1"}, cache=tmp_path / "cache", jobs=2, say=say)
    assert "\n" not in str(exc.value)
    assert len(said) == 2


def test_a_run_that_fails_is_a_row_and_is_tried_again(mine: str, tmp_path: Path) -> None:
    axes = {"policy.name": ["static-96", f"{mine}:Fails"]}
    result = sweep(SMALL, axes, cache=tmp_path / "cache", out=tmp_path / "out", jobs=1)
    assert [row["policy.name"] for row in result.errors] == [f"{mine}:Fails"]
    assert result.rows[0]["error"] is None
    assert result.rows[1]["error"].startswith(f"{mine}:27: ")
    assert result.rows[1]["error"].endswith("ZeroDivisionError: on purpose")
    assert pq.read_table(tmp_path / "out" / "runs.parquet")["mean_ttft_ms"].null_count == 1
    seen: list[Progress] = []
    sweep(SMALL, axes, cache=tmp_path / "cache", jobs=1, progress=seen.append)
    assert (seen[0].done, seen[0].total) == (1, 2)


def test_workers_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "run_one", lambda key, config, entry: (key, {"code": "older", "policy": "naive", "figures": {},
                                                                            "seconds": 0.0}))
    with pytest.raises(ConfigError, match="a worker has another package"):
        Pool(Cache(tmp_path), jobs=1).run({"ab": RunConfig()})
    assert Cache(tmp_path).get("ab") is None


def test_an_option_goes_to_the_policies_that_have_it(tmp_path: Path) -> None:
    config = {**SMALL, "policy.options.decode_floor": 0.2}
    result = sweep(config, {"policy.name": ["bullet", "vllm-1024"]}, cache=tmp_path, jobs=1)
    assert not result.errors
    with pytest.raises(ConfigError, match="knob"):
        sweep({**SMALL, "policy.options.knob": 1}, {"policy.name": ["bullet", "vllm-1024"]}, cache=tmp_path, jobs=1)


@pytest.mark.parametrize(("config", "axes", "says"), [
    ({}, {"workload.rat": "1:2"}, "unknown key 'workload.rat'"),
    ({}, {"policy.name": ["none-such"]}, "unknown policy 'none-such'"),
    ({}, {"workload.trace": ["azure-code", "none-such"]}, "unknown trace 'none-such'"), ({}, {RATE: "5:4"}, "goes nowhere"),
    ({}, {"device.gpu": ["none-such"]}, "none-such"), ({"seed": -1}, {RATE: [1]}, "seed")])
def test_mistakes_are_found_before_anything_is_written(config: dict[str, object], axes: dict[str, object], says: str,
                                                       tmp_path: Path) -> None:
    with pytest.raises(ConfigError.__base__, match=says) as exc:
        sweep(config, axes, cache=tmp_path / "cache", out=tmp_path / "out", jobs=1)
    assert "\n" not in str(exc.value)
    assert list(tmp_path.iterdir()) == []


def test_a_ray_address_that_does_not_answer_is_told_and_results_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    sweep(SMALL, {RATE: [4]}, cache=tmp_path, jobs=1)
    with pytest.raises(ConfigError, match=r"--ray 127.0.0.1:1: does not answer after .* s \(Connection refused\)"):
        sweep(SMALL, {RATE: [4, 5]}, cache=tmp_path, ray="127.0.0.1:1")
    with pytest.raises(ConfigError, match="must be HOST:PORT, auto or local"):
        sweep(SMALL, {RATE: [4, 5]}, cache=tmp_path, ray="nowhere")
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert not sweep(SMALL, {RATE: [4]}, cache=tmp_path, ray="127.0.0.1:1").errors  # nothing to run, nobody to ask


def test_without_ray_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed .*pip install 'bullet-llm\[cluster\]'"):
        sweep(SMALL, {RATE: [4, 5]}, cache=tmp_path, ray="local")


# ------------------------------------------------------------------------------------------- what is made of rows


def by_hand() -> Sweep:
    """Two policies at two rates, three seeds: a's figure is 10 x rate + seed, b's one more, and 3 more at the last seed."""
    rows = [{"policy.name": p, RATE: r, "seed": s, "error": None, "whole": 8 if s else 8.5,
             "x": 10.0 * r + s + (p == "b") * (1 + 3 * (s == 2))}
            for p in "ab" for r in (1, 2) for s in range(3)]
    return Sweep(RunConfig(), ("policy.name", RATE, "seed"), rows)


def test_points_are_means_over_seeds() -> None:
    points = by_hand().points("x")
    assert [place for place, _ in points] == [{"policy.name": p, RATE: r} for p in "ab" for r in (1, 2)]
    assert points[1][1].mean == 21.0
    assert points[1][1].half_width == pytest.approx(4.302653 / 3**0.5, abs=1e-6)


def test_differences_are_paired_by_seed() -> None:
    (place, gap), _ = by_hand().differences("x", "a")
    assert place == {"policy.name": "b", RATE: 1}
    assert gap.mean == 2.0  # 1, 1, 4
    assert gap.half_width == pytest.approx(4.302653 * 3**0.5 / 3**0.5, abs=1e-6)
    rates = by_hand().differences("x", 1, RATE)
    assert [(place[RATE], gap) for place, gap in rates] == [(2, (10.0, 0.0, 3))] * 2
    with pytest.raises(ConfigError, match=r"no run has policy.name = 'c'"):
        by_hand().differences("x", "c")
    with pytest.raises(ConfigError, match="no figure 'y'"):
        by_hand().points("y")


def test_a_seed_that_failed_is_left_out_of_its_place() -> None:
    whole = by_hand()
    rows = [dict(row) for row in whole.rows]
    rows[5] |= {"x": None, "error": "why"}
    found = Sweep(whole.base, whole.axes, rows)
    assert found.points("x")[1][1].mean == 20.5
    assert found.differences("x", "a")[1][1] == (1.0, 0.0, 2)


def test_what_is_written_is_the_rows(found: Sweep, tmp_path: Path) -> None:
    found.write(tmp_path)
    table = pq.read_table(tmp_path / "runs.parquet")
    assert table.num_rows == 8
    assert [dict(row) for row in found.rows] == table.to_pylist()
    assert table.schema.metadata[b"source"] == b"simulated"
    with open(tmp_path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean_ttft_ms"]) for row in rows] == [row["mean_ttft_ms"] for row in found.rows]
    with open(tmp_path / "points.csv", newline="") as file:
        points = [row for row in csv.DictReader(file) if row["figure"] == "mean_ttft_ms"]
    assert [float(row["mean"]) for row in points] == [one.mean for _, one in found.points("mean_ttft_ms")]
    assert (tmp_path / "plots" / "rate_req_per_s.png").stat().st_size > 10_000
    text = (tmp_path / "sweep.txt").read_text()
    assert text.startswith("simulated on a100-80gb")
    assert len(text.splitlines()) == 10
    assert text.splitlines()[-1].startswith("fluid_bound_share: of what the device could finish a second")


def test_whole_numbers_among_others_are_numbers() -> None:
    assert by_hand().table["whole"].to_pylist()[:3] == [8.5, 8.0, 8.0]
