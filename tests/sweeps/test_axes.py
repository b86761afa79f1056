"""Axes: ranges, lists, grids, what goes in step; and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bullet.config import RunConfig, load_run_config
from bullet.errors import ConfigError
from bullet.sweeps.axes import cells, read_file, values_of, varying, with_values

RATE = "workload.rate_req_per_s"


@pytest.mark.parametrize(("text", "values"), [
    ("2:4", [2, 3, 4]), ("2:3:0.5", [2.0, 2.5, 3.0]), ("0:7:2", [0, 2, 4, 6]), ("3:1:-1", [3, 2, 1]),
    ("0.1:0.3:0.1", [0.1, 0.2, 0.3]), ("5:5", [5]), ("1e1:2e1:5", [10.0, 15.0, 20.0])])
def test_ranges_hold_both_ends(text: str, values: list[float]) -> None:
    assert values_of("k", text) == values
    assert all(type(a) is type(b) for a, b in zip(values_of("k", text), values, strict=True))


@pytest.mark.parametrize(("given", "values"), [(["a", "b"], ["a", "b"]), (3, [3]), ("bullet", ["bullet"]),
                                               ("a.csv:1", ["a.csv:1"]), (range(2), [0, 1]), ([True, 1], [True, 1])])
def test_lists_and_single_values(given: Any, values: list[Any]) -> None:
    assert values_of("k", given) == values


@pytest.mark.parametrize(("given", "says"), [
    ("8:2:0.5", "axis k = '8:2:0.5': goes nowhere: must read from:to or from:to:step with a step towards the end"),
    ("2:8:0", "goes nowhere"), ("2:8:-1", "goes nowhere"), ("0:1:1e-9", "has over 10,000 values"), ("1:1e999", "goes nowhere"),
    ([], "has no value"), ([1, 2, 1], "1 stands there twice"), ([[1]], "must be a number, a string, true or false")])
def test_what_is_no_axis_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as exc:
        values_of("k", given)
    assert says in str(exc.value)


def test_a_grid_varies_its_first_axis_slowest() -> None:
    found = cells(RunConfig(), {"policy.name": ["naive", "vllm-64"], RATE: "1:2"})
    assert [(c.config.policy.name, c.config.workload.rate_req_per_s) for c in found] == [
        ("naive", 1.0), ("naive", 2.0), ("vllm-64", 1.0), ("vllm-64", 2.0)]
    assert found[1].place == {"policy.name": "naive", RATE: 2}


def test_zipped_axes_go_in_step_beside_a_grid() -> None:
    found = cells(RunConfig(), {"seed": [0, 1]}, [{RATE: [1, 2], "slo.tpot_s": [0.1, 0.2]}])
    assert [(c.config.seed, c.config.workload.rate_req_per_s, c.config.slo.tpot_s) for c in found] == [
        (0, 1.0, 0.1), (0, 2.0, 0.2), (1, 1.0, 0.1), (1, 2.0, 0.2)]


def test_any_key_is_an_axis_and_the_base_stays() -> None:
    base = load_run_config(None, {"policy.options.knob": 1, "device.kv_tokens": 1600, "workload.num_requests": 5})
    (one,) = cells(base, {"policy.options.other": [0.5]})
    assert one.config.policy.options == {"knob": 1, "other": 0.5}
    assert (one.config.device.kv_tokens, one.config.workload.num_requests) == (1600, 5)
    assert base.policy.options == {"knob": 1}
    assert with_values(base, {"device.kv_tokens": None}).device.kv_tokens is None


@pytest.mark.parametrize(("axes", "zipped", "says"), [
    ({"workload.rat": [1]}, [], "axis: unknown key 'workload.rat': allowed are"),
    ({"workload": [1]}, [], "axis workload: is a table: name one of its keys"),
    ({"seed.deep": [1]}, [], "axis seed.deep: 'seed' is not a table"),
    ({RATE: ["fast"]}, [], f"{RATE} = 'fast': must be a number"),
    ({RATE: [-1]}, [], "must be a positive number"),
    ({RATE: [1]}, [{RATE: [2]}], f"axis {RATE}: is there twice"),
    ({}, [{RATE: [1, 2], "seed": [1]}], f"zipped axes differ in length: {RATE} has 2, seed has 1"),
    ({"seed": "0:9999", RATE: "1:9999"}, [], "a million is the most")])
def test_cells_that_cannot_be(axes: dict[str, Any], zipped: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError) as exc:
        cells(RunConfig(), axes, zipped)
    assert says in str(exc.value)
    assert "\n" not in str(exc.value)


def test_a_file_holds_a_configuration_and_axes(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('seed = 3\n[workload]\ntrace = "arxiv"\n[axes]\npolicy.name = ["naive"]\n"workload.cv" = "1:2"\n'
                    '[[zip]]\nslo.tpot_s = [0.1]\nworkload.time_scale = [2]\n')
    assert read_file(path) == ({"seed": 3, "workload.trace": "arxiv"}, {"policy.name": ["naive"], "workload.cv": "1:2"},
                               [{"slo.tpot_s": [0.1], "workload.time_scale": [2]}])


@pytest.mark.parametrize(("text", "says"), [("[workload]\nrat = 1\n", "unknown key 'workload.rat'"), ("axes = 3\n", "be a table"),
                                            ("a = = 1\n", "cannot be read as TOML")])
def test_a_file_that_is_wrong_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as exc:
        read_file(path)
    assert str(exc.value).startswith(f"{path}: ")
    assert says in str(exc.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "none.toml")


def test_what_varies() -> None:
    assert varying([{"a": 1, "b": 2, "c": 0}, {"a": 1, "b": 3, "c": 0}]) == ["b"]
