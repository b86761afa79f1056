"""Configurations: what a file leaves out, and TOML that reads back to the same."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet.config import (
    DeviceConfig,
    PolicyConfig,
    RunConfig,
    SloConfig,
    WorkloadConfig,
    load_run_config,
    resolve_slo,
    to_toml,
)
from bullet.errors import ConfigError
from bullet.results.folder import RunWriter, load_run
from bullet.sim.run import simulate
from bullet.workload import load_workload


def stored(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return load_run_config(path)


def from_text(text: str, folder: Path, **overrides: Any) -> RunConfig:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_run_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


def test_recorded_arrivals_in_a_file_take_the_whole_trace_unless_it_says_how_many(tmp_path: Path) -> None:
    recorded = '[workload]\ntrace = "azure-conv"\narrivals = "recorded"\n'
    config = from_text(recorded, tmp_path)
    assert config.workload.num_requests is None
    assert len(load_workload(config.workload, 0)) == 19_366  # rows of the public file
    assert from_text(recorded + "num_requests = 1000\n", tmp_path).workload.num_requests == 1000
    assert from_text(recorded, tmp_path, workload__num_requests=7).workload.num_requests == 7
    assert from_text("[workload]\nnum_requests = 9\n", tmp_path, workload__arrivals="recorded").workload.num_requests == 9
    assert load_run_config(None, {"workload.arrivals": "recorded"}).workload.num_requests is None
    assert from_text('[workload]\narrivals = "constant"\n', tmp_path).workload.num_requests == 1000
    assert from_text(recorded, tmp_path, workload__arrivals="poisson").workload.num_requests == 1000


def test_none_is_written_where_it_is_not_the_default(tmp_path: Path) -> None:
    config = RunConfig(workload=WorkloadConfig(arrivals="recorded", rate_req_per_s=None, num_requests=None))
    lines = to_toml(config).splitlines()
    assert 'rate_req_per_s = "none"' in lines
    assert 'num_requests = "none"' in lines
    assert not any(line.startswith(("kv_tokens", "arrival_column", "tpot_s")) for line in lines)
    assert stored(config, tmp_path) == config
    # A column of that name is a name; a length is not.
    assert from_text('[workload]\nprompt_column = "none"\n', tmp_path).workload.prompt_column == "none"
    with pytest.raises(ConfigError, match=r"workload\.cv = 'none': must be a number"):
        from_text('[workload]\ncv = "none"\n', tmp_path)


def test_an_option_that_is_none_is_not_given(tmp_path: Path) -> None:
    config = from_text("[policy.options]\nmax_num_seqs = 8\n", tmp_path, policy__options__max_num_seqs=None)
    assert config.policy == PolicyConfig()
    assert stored(config, tmp_path) == config


VALUES: Any = st.recursive(st.integers(-2**63, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
                           | st.booleans() | st.text(),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))
POSITIVE = st.floats(1e-300, 1e9)


@given(slo=st.builds(SloConfig, st.none() | POSITIVE, st.none() | POSITIVE, st.just("per_request"), st.none() | POSITIVE),
       work=st.builds(WorkloadConfig, trace=st.text(), arrivals=st.sampled_from(["recorded", "poisson"]), rate_req_per_s=POSITIVE,
                      num_requests=st.none() | st.integers(1, 10**9), arrival_column=st.none() | st.text()),
       kv_tokens=st.none() | st.integers(1, 2**63 - 1), options=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
       seed=st.integers(0, 2**62))
def test_any_configuration_reads_back_to_the_same(tmp_path_factory: pytest.TempPathFactory, slo: SloConfig, work: WorkloadConfig,
                                                  kv_tokens: int | None, options: dict[str, Any], seed: int) -> None:
    plain = RunConfig()
    config = RunConfig(work, slo, dataclasses.replace(plain.device, kv_tokens=kv_tokens), PolicyConfig(options=options), seed)
    assert stored(config, tmp_path_factory.getbasetemp()) == config


def test_a_run_stores_the_configuration_that_it_ran(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n1,20,3\n")
    workload = WorkloadConfig(trace=str(trace), arrivals="recorded", rate_req_per_s=None, num_requests=None)
    config = RunConfig(workload=workload, policy=PolicyConfig("vllm-512"))
    with RunWriter(tmp_path / "run") as writer:
        outcome = simulate(config, writer=writer)
        writer.close(outcome, {}, {})
    assert load_run(tmp_path / "run").config == outcome.config
    assert outcome.config.workload == workload


@pytest.mark.parametrize(("key", "most", "beyond"), [
    ("publish_delay_s", 1.0, 1.0001), ("reconfigure_s", 1.0, 2.0), ("noise_std", 1.0, 1.5), ("contention_scale", 1e6, 2e6),
    ("memory_utilization", 1.0, 1.01)])
def test_a_bound_that_a_message_names_is_itself_allowed(key: str, most: float, beyond: float) -> None:
    assert getattr(DeviceConfig(**{key: most}), key) == most
    with pytest.raises(ConfigError, match=rf"device.{key} = {beyond}: must be .*1"):
        DeviceConfig(**{key: beyond})
    for value in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match=f"device.{key}"):
            DeviceConfig(**{key: value})


def test_an_objective_takes_the_place_of_the_files(tmp_path: Path) -> None:
    """In whichever form the file has it; what nobody gave is remembered through a stored configuration."""
    whole = resolve_slo(SloConfig(), "mine.csv", 1000.0)
    assert (whole.ttft_s_per_token, whole.tpot_s, whole.by_default) == (0.003, 0.15, "ttft tpot")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(RunConfig(slo=whole)))
    assert load_run_config(file).slo == whole
    changed = load_run_config(file, {"slo.ttft_s": 0.5}).slo
    assert (changed.ttft_s, changed.ttft_s_per_token, changed.by_default) == (0.5, None, "tpot")
    assert resolve_slo(changed, "mine.csv", 1000.0) == changed
    assert load_run_config(file, {"slo.tpot_s": 0.03}).slo.by_default == "ttft"
    assert load_run_config(file, {"slo.ttft_slo_policy": "per_request"}).slo.by_default == "ttft tpot"
    with pytest.raises(ConfigError, match=r"slo.ttft_s \(--ttft\) = 0.5: must be the only TTFT objective"):
        load_run_config(file, {"slo.ttft_s": 0.5, "slo.ttft_s_per_token": 0.001})
    with pytest.raises(ConfigError, match=r"slo.ttft_s = -1.0: must be positive"):
        load_run_config(None, {"slo.ttft_s": -1.0})
