"""Nothing runs code because data name it, and nothing is found by what a file calls itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bullet.api import simulate
from bullet.catalog.models import get_model
from bullet.cli.run import main as real
from bullet.cli.sim import main as sim
from bullet.config import DeviceConfig
from bullet.devices.load import load_fitted
from bullet.errors import ConfigError, ResultsError
from bullet.profiles.sweeps import read_rows

SMALL = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A policy's file that leaves a mark where it is run."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'OWNED')!r}, 'w').close()\nclass P:\n    pass\n")
    return tmp_path


def refuses(evil: Path, capsys: pytest.CaptureFixture[str], status: int, flag: str) -> None:
    text = capsys.readouterr().err
    assert status == 2
    assert text.count("\n") == 1
    assert f"evil.py:P is a file of code, which is not run because data name it: say {flag} " in text
    assert not (evil / "OWNED").exists()


def test_a_configuration_runs_no_code(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{evil}/evil.py:P"
    (evil / "c.toml").write_text(f'[policy]\nname = "{name}"\n')
    run = ["run", "--config", str(evil / "c.toml"), "--out", str(evil / "o"), "--quiet", "--no-report"]
    refuses(evil, capsys, sim(run), "--policy")
    with pytest.raises(ConfigError, match="file of code"):
        simulate(evil / "c.toml")
    assert not (evil / "OWNED").exists()
    assert sim([*run, "--policy", name]) == 2  # run now: it is no policy
    assert (evil / "OWNED").exists()


def test_the_file_of_a_sweep_runs_no_code(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (evil / "s.toml").write_text(f'[axes]\n"policy.name" = ["vllm-1024", "{evil}/evil.py:P"]\n')
    refuses(evil, capsys, sim(["sweep", str(evil / "s.toml"), "--out", str(evil / "o")]), "--policies")


def test_a_record_runs_no_code(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"schema": "bullet-record", "version": 1, "config": {"policy": {"name": f"{evil}/evil.py:P"}}, "num_sms": 8,
              "decode_sms": [2, 4], "kv_blocks": 60, "num_layers": 4, "arrival_s": [], "prompt_tokens": [], "ttft_slo_s": []}
    (evil / "r.jsonl").write_text(json.dumps(header) + "\n")
    refuses(evil, capsys, real(["recheck", str(evil / "r.jsonl")]), "--policy")


def test_a_stored_validation_runs_no_code(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.test_fuzz_readers import STEPS

    run = evil / "x" / "real" / "mine"
    simulate({"workload.num_requests": 3, "policy.name": "vllm-1024"}, out=run, report=False)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "vllm-1024"', f'name = "{evil}/evil.py:P"'))
    (evil / "x" / "steps.json").write_text(json.dumps(STEPS))
    refuses(evil, capsys, real(["validate", "--from", str(evil / "x")]), "--policies")


def test_a_profile_is_found_by_who_the_model_is(tmp_path: Path) -> None:
    """Another model in a folder of that name, or whose config.json names a folder with a fit, finds neither as its own."""
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    assert load_fitted(DeviceConfig(model=str(folder / "config.json"))).coefficients.source == "fitted on llama-3.1-8b's shapes"
    (folder / "fit.json").write_text(json.dumps({"source": "\x1b[31mforeign"}))
    (folder / "config.json").write_text(json.dumps(SMALL | {"_name_or_path": str(folder)}))
    assert load_fitted(DeviceConfig(model=str(folder / "config.json"))).coefficients.source == "fitted on llama-3.1-8b's shapes"
    (folder / "config.json").write_text(json.dumps(SMALL | {"_name_or_path": "\x1b[31m"}))
    with pytest.raises(ConfigError, match=r"'\\x1b\[31m' holds a control character"):
        get_model(str(folder / "config.json"))


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(Exception, match=r"cannot be looked at \(Permission denied\)") as caught:
        read_rows(tmp_path)
    assert isinstance(caught.value, Exception)
    assert not isinstance(caught.value, ResultsError | OSError)
