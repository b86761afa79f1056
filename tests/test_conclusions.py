"""The harness of docs/findings.md: races, pairs, crossings and marks by hand, and one small world from end to end."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from bullet.errors import BulletError, ConfigError
from bullet.sweeps.cache import Cache
from bullet.sweeps.pool import Pool
from experiments import conclusions
from experiments.conclusions import (
    best,
    collect,
    count,
    crossing,
    difference,
    growth,
    ladder_table,
    mark,
    racing,
    report,
    wanted,
    written,
)
from experiments.questions import QUESTIONS, Question, config_of, policy, workload_keys

ATT, GROWTH = "steady.slo_attainment_mean_length", "steady.growth"


def runs(*attainments: float, growth: str = "stationary") -> dict[int, dict[str, Any]]:
    return {seed: {ATT: met, GROWTH: growth} for seed, met in enumerate(attainments)}


def test_a_race_keeps_two_after_the_first_seed_and_one_after_the_second() -> None:
    race = ("d=12", "d=24", "d=36")
    assert racing(race, {}, 0) == list(race)
    first = {"d=12": runs(0.9), "d=24": runs(0.7), "d=36": runs(0.8)}
    assert racing(race, first, 1) == ["d=12", "d=36"]
    # Seed 1 turns it round: .9 and .3 make .6, .8 and .7 make .75.
    both = {**first, "d=12": runs(0.9, 0.3), "d=36": runs(0.8, 0.7)}
    assert racing(race, both, 2) == racing(race, both, 7) == ["d=36"]
    # Of equals the first stays; without the runs that decide there is no answer.
    assert racing(race, {arm: runs(0.5) for arm in race}, 1) == ["d=12", "d=24"]
    assert racing(race, {"d=12": runs(0.9)}, 1) is None
    assert racing(race, first, 2) is None


def test_the_best_is_of_those_that_ran_longest() -> None:
    # d=12 has the higher mean, on the one seed that it ran on.
    assert best(("d=12", "d=24"), {"d=12": runs(0.99), "d=24": runs(0.9, 0.5)}) == "d=24"
    assert best(("d=12", "d=24"), {"d=12": runs(0.5, 0.6), "d=24": runs(0.9, 0.5)}) == "d=24"
    assert best(("d=12",), {}) is None


def test_a_question_asks_each_seed_of_who_is_left() -> None:
    question = Question("?", ("azure-code 5", "arxiv 0.6"), {"bullet": {}, "d=4": {}, "d=12": {}}, race=("d=4", "d=12"),
                        entrants={"arxiv": ("d=12",)})
    assert list(wanted(question, {}, 0)) == [("azure-code 5", "bullet"), ("azure-code 5", "d=4"), ("azure-code 5", "d=12"),
                                             ("arxiv 0.6", "bullet"), ("arxiv 0.6", "d=12")]


def test_differences_are_of_the_seeds_that_both_have() -> None:
    less = difference(runs(0.9, 0.8, 0.1), runs(0.7, 0.7), "att")
    assert less.mean == pytest.approx(0.15)
    assert less.seeds == 2
    # Of .2 and .1: Student's t of one degree of freedom, 12.706, x .0707 / root of 2.
    assert less.half_width == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert count({"a": runs(1, 1), "b": runs(1)}, ["a", "b"]) == "1-2"


def test_most_runs_decide_whether_a_figure_is_marked() -> None:
    grows = {**runs(1, 1, 1, growth="growing"), 0: runs(1)[0]}
    assert mark(grows) == conclusions.GROWS
    assert growth(grows) == "2 growing, 1 stationary"
    assert mark({0: runs(1)[0], 1: runs(1, 1, growth="growing")[1]}) == ""


def test_goodput_is_where_each_seed_crosses() -> None:
    question = Question("?", ("arxiv 0.5", "arxiv 0.7"), {"bullet": {}})
    found = {"arxiv 0.5": {"bullet": runs(1.0, 1.0)}, "arxiv 0.7": {"bullet": runs(0.8, 0.6)}}
    rate = crossing(question, found, "arxiv", "bullet")
    assert not isinstance(rate, str)
    # From 1 down to .9: half of the way to .8, a quarter of that to .6.
    assert rate.mean == pytest.approx((0.6 + 0.55) / 2)
    found["arxiv 0.7"]["bullet"] = runs(0.95, 0.6)
    assert crossing(question, found, "arxiv", "bullet") == "0.7 or more on 1 of 2 seeds"
    assert crossing(question, found, "sharegpt", "bullet") == "-"


def test_the_ladder_has_an_objective_a_column() -> None:
    question = Question("?", ("turns @0.15", "turns @0.05"), {"bullet": {}, "d=12": {}}, race=("d=12",))
    text = ladder_table(question, {"turns @0.05": {"bullet": runs(0.9, 0.7), "d=12": runs(0.5, 0.3)}})
    assert text.splitlines()[0] == "| workload | TPOT 150 ms | TPOT 50 ms |"
    assert text.splitlines()[2] == "| turns | - | 0.800, 0.400 (d=12): **+0.400 ± 0.000** |"


def test_tables_go_between_their_marks_and_nowhere_else() -> None:
    page = "a\n<!-- conclusions: one -->\nold\n<!-- end -->\nb\n<!-- conclusions: two -->\n<!-- end -->\n"
    assert written(page, "one", "new") == page.replace("old", "new")
    assert written(written(page, "two", "x"), "two", "") == written(page, "two", "")
    with pytest.raises(BulletError, match="three"):
        written(page, "three", "")


def test_workloads_by_name() -> None:
    assert workload_keys("sharegpt<=8192 18") == {"workload.trace": "sharegpt", "workload.rate_req_per_s": 18.0,
                                                  "workload.max_prompt_tokens": 8192}
    assert workload_keys("turns @0.05")["slo.tpot_s"] == 0.05
    assert workload_keys("sine arxiv 0.2 0.8 @0.1")["workload.rate_profile"] == "sine:0.2:0.8:360s"
    assert workload_keys("sine arxiv 0.5 0.5") == {"workload.trace": "arxiv", "workload.rate_req_per_s": 0.5}
    with pytest.raises(ConfigError):
        workload_keys("arxiv 1 2")


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_is_made_of_configurations(name: str) -> None:
    question = QUESTIONS[name]
    assert question.baseline in question.arms
    assert set(question.race) <= set(question.arms)
    for workload in question.workloads:
        assert set(question.racers(workload)) <= set(question.race)
        config_of(workload, question.arms[question.baseline], 0, 100)
    for arm in question.arms.values():
        config_of(question.workloads[0], arm, 0, 100)


def test_a_small_world_is_run_read_and_written(tmp_path: Path) -> None:
    small = Question("?", ("azure-code 5",), {"vllm-1024": policy("vllm-1024"), "d=24": policy("static-84"),
                                              "d=12": policy("static-96")}, baseline="vllm-1024", race=("d=24", "d=12"))
    plain = dataclasses.replace(small, race=())
    pool = Pool(Cache(tmp_path / "cache"), 1)
    found = collect({"race": small, "plain": plain}, 2, 30, pool, read=False)
    assert found == collect({"race": small, "plain": plain}, 2, 30, pool, read=True)
    assert {arm: sorted(by_seed) for arm, by_seed in found["plain"]["azure-code 5"].items()} == {
        "vllm-1024": [0, 1], "d=24": [0, 1], "d=12": [0, 1]}
    assert not any(math.isnan(run[ATT]) for by_seed in found["plain"]["azure-code 5"].values() for run in by_seed.values())
    # Nothing more is kept: a third seed cannot be read.
    assert collect({"plain": plain}, 3, 30, pool, read=True)["plain"] == found["plain"]

    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- conclusions: {name} -->\n<!-- end -->\n" for name in ("race", "plain", "workloads")))
    report({"race": small, "plain": plain}, found, 30, 2, page, None)
    lines = page.read_text().splitlines()
    assert lines[1].startswith("| workload | seeds | best fixed |")
    assert sum(line.startswith("| azure-code 5 | 2 |") for line in lines) == 2
