"""Rates that change: phases in turns, profiles, named workloads. Times and lengths worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bullet.config import RunConfig, WorkloadConfig, configuration, is_phased, load_run_config, to_toml, trace_name
from bullet.errors import BulletError, ConfigError, TraceError
from bullet.workload import Workload, load_builtin, load_workload
from bullet.workload.named import NAMED, named
from bullet.workload.report import run_lines
from bullet.workload.schedule import Sine, Steps, mean_rate, parse_phases, parse_profile


def load(seed: int = 0, **options: Any) -> Workload:
    return load_workload(WorkloadConfig(**options), seed)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Two traces whose rows tell where they are from."""
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text("prompt_tokens,output_tokens\n" + "".join(f"{100 + i},{i}\n" for i in range(1, 10)))
    second.write_text("prompt_tokens,output_tokens\n" + "".join(f"{200 + i},{i}\n" for i in range(1, 5)))
    return str(first), str(second)


# A cycle: 3 s at 2 req/s, 2 s at 1 req/s: 8 requests in 5 s. The n-th request comes when the rates have made up n.
PHASES = ("{0}@2/3s,{1}@1/2s", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 5.5], [0, 0, 0, 0, 0, 1, 1, 0, 0])


def test_constant_arrivals_in_phases(two: tuple[str, str]) -> None:
    text, times, phases = PHASES
    found = load(trace=text.format(*two), arrivals="constant", num_requests=9, sample=False)
    assert found.arrival_s.tolist() == times
    # In order: rows 1-5 of the first trace, 1-2 of the second, then the first goes on where it ended.
    assert found.prompt_tokens.tolist() == [101, 102, 103, 104, 105, 201, 202, 106, 107]
    assert [int(tokens >= 200) for tokens in found.prompt_tokens] == phases
    # 6 of 8 requests of a cycle are of the first trace (mean prompt 105), 2 of the second (202.5).
    assert found.mean_prompt_tokens == pytest.approx((6 * 105 + 2 * 202.5) / 8)


def test_a_scale_moves_rates_and_not_the_length_of_phases(two: tuple[str, str]) -> None:
    found = load(trace=PHASES[0].format(*two), arrivals="constant", num_requests=6, rate_scale=0.5)
    # 3 s at 1 req/s, 2 s at 1/2: the third request is made up when the phase ends, and is of the next one.
    assert found.arrival_s.tolist() == [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    assert [int(tokens >= 200) for tokens in found.prompt_tokens] == [0, 0, 1, 0, 0, 0]


def test_a_pause_has_no_requests(two: tuple[str, str]) -> None:
    found = load(trace=f"{two[0]}@1/2s,{two[1]}@0/10s", arrivals="constant", num_requests=4)
    assert found.arrival_s.tolist() == [1.0, 12.0, 13.0, 24.0]
    assert (found.prompt_tokens < 200).all()


def test_steps_by_hand() -> None:
    found = load(trace="sharegpt", arrivals="constant", rate_profile="steps:2/3s,1/2s", num_requests=9)
    assert found.arrival_s.tolist() == PHASES[1]


def test_a_sine_by_hand() -> None:
    """2 to 6 req/s in 10 s: 40 requests a cycle. Λ(t) = 4 t + (20 / 2 pi) (1 - cos(2 pi t / 10)): 20 + 20 / pi at half time."""
    rates = parse_profile("sine:2:6:10s")
    assert (rates.mean_req_per_s, rates.cycle_s) == (4.0, 10.0)
    half = 20 + 20 / math.pi
    quarter = 10 + 10 / math.pi
    times, _ = rates.at(np.array([0.0, quarter, half, 40.0, 40.0 + half]))
    assert times == pytest.approx([0.0, 2.5, 5.0, 10.0, 15.0], abs=1e-9)
    found = load(trace="sharegpt", rate_profile="sine:2:6:10s", num_requests=40_000)
    place = found.arrival_s % 10.0
    # The first half of a cycle holds half / 40 = 66 % of the requests: within four standard deviations of 40,000 draws.
    assert (place < 5).mean() == pytest.approx(half / 40, abs=4 * math.sqrt(0.25 / 40_000))


def test_poisson_in_phases_has_their_rates() -> None:
    found = load(trace="azure-code@5/60s,sharegpt@14/60s", num_requests=11_400)  # ten cycles of 1,140
    place = found.arrival_s % 120.0
    first = place < 60
    cycles = found.arrival_s[-1] / 120.0
    assert first.sum() / (60 * cycles) == pytest.approx(5, abs=4 * math.sqrt(5 / 600))
    assert (~first).sum() / (60 * cycles) == pytest.approx(14, abs=4 * math.sqrt(14 / 600))
    code = load_builtin("azure-code").prompt_tokens
    assert found.prompt_tokens[first].mean() == pytest.approx(code.mean(), abs=4 * code.std() / math.sqrt(first.sum()))
    means = [load_builtin(name).prompt_tokens.mean() for name in ("azure-code", "sharegpt")]
    assert found.mean_prompt_tokens == pytest.approx((5 * means[0] + 14 * means[1]) / 19)


def test_gamma_gaps_keep_their_burstiness_under_a_profile() -> None:
    plain = load(trace="azure-code", arrivals="gamma", cv=3.0, rate_req_per_s=1.0, num_requests=500)
    stretched = load(trace="azure-code", arrivals="gamma", cv=3.0, rate_profile="steps:4/10s,1/10s", num_requests=500)
    rates = Steps([4, 1], [10, 10])
    assert stretched.arrival_s.tolist() == rates.at(plain.arrival_s)[0].tolist()
    assert stretched.prompt_tokens.tolist() == plain.prompt_tokens.tolist()  # lengths are not the arrivals' business


def test_same_seed_same_requests_and_another_scale_the_same_lengths_in_the_same_phase() -> None:
    trace = "azure-code@5/60s,sharegpt@14/60s"
    one, again, other = load(3, trace=trace), load(3, trace=trace), load(4, trace=trace)
    assert one.arrival_s.tobytes() == again.arrival_s.tobytes()
    assert one.prompt_tokens.tobytes() == again.prompt_tokens.tobytes()
    assert one.arrival_s.tobytes() != other.arrival_s.tobytes()
    faster = load(3, trace=trace, rate_scale=1.01)
    same = ((one.arrival_s % 120) < 60) == ((faster.arrival_s % 120) < 60)
    assert same.mean() > 0.9
    assert (one.prompt_tokens == faster.prompt_tokens)[same].all()


def test_times_never_decrease_even_where_rounding_might() -> None:
    rates = Steps([0.1, 0.7, 1 / 3], [0.3, 0.1, 0.7])
    times, which = rates.at(np.arange(1, 50_000) * 0.01)
    assert (np.diff(times) >= 0).all()
    assert set(which.tolist()) == {0, 1, 2}
    times, _ = Sine(0.0, 0.3, 0.7).at(np.arange(1, 5_000) * 0.01)
    assert (np.diff(times) >= 0).all()


def test_prompts_over_a_cap_are_left_out_and_counted(two: tuple[str, str]) -> None:
    found = load(trace=two[0], max_prompt_tokens=104, num_requests=300)
    assert set(found.prompt_tokens.tolist()) == {101, 102, 103, 104}
    assert found.mean_prompt_tokens == 102.5
    assert found.reading is not None
    assert "5 rows left out" in found.reading.notes[-1]
    with pytest.raises(TraceError, match="no prompt has 100 tokens or less"):
        load(trace=two[0], max_prompt_tokens=100)


def test_a_cap_keeps_shared_prefixes_to_the_rows_that_stay(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [(600, [1, 2]), (1100, [1, 9, 10]), (700, [1, 3])]
    path.write_text("".join(f'{{"timestamp": {i * 1000}, "input_length": {n}, "output_length": 5, "hash_ids": {ids}}}\n'
                            for i, (n, ids) in enumerate(rows)))
    found = load(trace=str(path), format="mooncake", arrivals="recorded", num_requests=None, max_prompt_tokens=1000)
    assert found.prompt_tokens.tolist() == [600, 700]
    assert found.arrival_s.tolist() == [0.0, 2.0]
    assert found.shared_prefix == {1: (0, 512 // 16)}


# ------------------------------------------------------------------------------------------------- configuration

def test_a_stored_configuration_runs_the_same() -> None:
    config = configuration({"workload.trace": "azure-code@5/60s,sharegpt@14/60s", "workload.rate_scale": 2})
    assert config.workload.rate_req_per_s is None
    text = to_toml(config)
    import tomllib

    from bullet.config import from_mapping
    assert from_mapping(RunConfig, tomllib.loads(text), "stored") == config
    assert mean_rate(config.workload) == 19.0


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads_load(name: str) -> None:
    config = load_run_config(None, {**named(name), "workload.num_requests": 200}).workload
    found = load_workload(config, 0)
    assert len(found) == 200
    assert found.prompt_tokens.max() <= (config.max_prompt_tokens or 10**9)
    assert (mean_rate(config) or 0) > 0
    assert run_lines(found, config)[0].startswith("phases" if "@" in config.trace else "trace")


@pytest.mark.parametrize(("options", "words"), [
    ({"trace": "azure-code@5/0s,sharegpt@14/60s"}, "phase 'azure-code@5/0s': lasts 0s"),
    ({"trace": "azure-code@5/60,sharegpt@14/60s"}, "'60' must be a time with its unit"),
    ({"trace": "azure-code@5/60s,sharegpt"}, "'sharegpt' is no phase"),
    ({"trace": "azure-code@5"}, "is no phase"),
    ({"trace": "azure-code@-5/60s"}, "'-5' must be a rate"),
    ({"trace": "azure-code@1e9/60s"}, "no such trace file|must be a rate"),
    ({"trace": "azure-code@9999999/60s"}, "must be a rate"),
    ({"trace": "azure-code@0/60s,sharegpt@0/5s"}, "all rates are 0"),
    ({"trace": "nonsuch@5/60s"}, "unknown trace 'nonsuch'"),
    ({"trace": "azure-code@5/60s", "rate_req_per_s": 7.0}, "rate_req_per_s.*none with phases"),
    ({"trace": "azure-code@5/60s", "arrivals": "recorded"}, "workload.arrivals = 'recorded'"),
    ({"trace": "azure-code@5/60s", "arrivals": "closed", "concurrency": 3}, "workload.arrivals = 'closed'"),
    ({"trace": "azure-code@5/60s", "rate_profile": "sine:1:2:60s"}, "rate_profile.*none with phases"),
    ({"trace": "azure-code@5/60s", "rate_scale": 0.0}, "rate_scale"),
    ({"rate_scale": 2.0}, "rate_scale .*use --rate"),
    ({"rate_profile": "saw:1:2:60s"}, "must be sine:LOW:HIGH:PERIOD"),
    ({"rate_profile": "sine:2:1:60s"}, "lowest rate 2 must be less"),
    ({"rate_profile": "sine:1:2:0s"}, "lasts 0s"),
    ({"rate_profile": "sine:1:x:60s"}, "'x' must be a rate"),
    ({"rate_profile": "sine:1:2"}, "must be sine:LOW:HIGH:PERIOD"),
    ({"rate_profile": "steps:0/60s"}, "all rates are 0"),
    ({"rate_profile": "steps:"}, "must be sine"),
    ({"rate_profile": "sine:1:2:60s", "rate_scale": 1e-6, "num_requests": 100_000}, "too small: the last of 100000"),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
    ({"trace": "azure-code@5/60s", "sample": False, "num_requests": 9000}, "8819 requests, 9000 of 9000 fall into its phases"),
])
def test_mistakes_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BulletError, match=words) as caught:
        load(**options)
    assert "\n" not in str(caught.value)


def test_an_unknown_named_workload_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown: choose one of turns-calm, turns,"):
        named("nonsuch")


@pytest.mark.parametrize(("text", "phased"), [
    ("azure-code", False), ("azure-code@5/60s", True), ("a@5/60s,b@3/1min", True), ("me@host/file.csv", False),
    ("trace@2024.csv", False), ("a@5/0s", True), ("a@5", True)])
def test_what_is_a_row_of_phases(text: str, phased: bool) -> None:
    assert is_phased(text) is phased


def test_short_names() -> None:
    assert trace_name("azure-code@5/60s,some/where/b.csv@14/60s,azure-code@1/5s") == "azure-code+b.csv"
    assert trace_name("some/where/b.csv") == "b.csv"


def test_phases_are_parsed_in_order() -> None:
    assert parse_phases("a@5/60s, dir/b.csv@0.5/1.5min") == (("a", 5.0, 60.0), ("dir/b.csv", 0.5, 90.0))
