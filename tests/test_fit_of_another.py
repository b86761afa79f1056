"""Whose numbers a device is made of: a fit says its GPU, model and origin, and a group of GPUs the link that it reduces over."""

import dataclasses
import json
from pathlib import Path

import pytest

from bullet.catalog.gpus import GPUS, get_gpu
from bullet.cli.profile import main as profile
from bullet.cli.sim import main as sim
from bullet.config import DeviceConfig
from bullet.devices import PROFILES
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.load import load_device
from bullet.errors import ConfigError, ProfileError
from tests.test_served_model import model_file


@pytest.fixture(scope="module")
def refit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped table of A100, fitted again."""
    out = tmp_path_factory.mktemp("fits") / "refit"
    assert profile(["fit", "--gpu", "a100-80gb", "--out", str(out)]) == 0
    return out


def changed(refit: Path, tmp_path: Path, **changes: object) -> str:
    """The fit with other numbers, or (None) without a note."""
    raw = json.loads((refit / "fit.json").read_text())
    for name, value in changes.items():
        if value is None:
            del raw["notes"][name]
        else:
            raw[name] = value
    (tmp_path / "fit.json").write_text(json.dumps(raw))
    return str(tmp_path)


def test_every_shipped_fit_says_whose_it_is() -> None:
    for path in PROFILES.glob("*/*/fit.json"):
        fit = DeviceCoefficients.from_json(path)
        assert (fit.notes["gpu"], fit.notes["model"]) == (path.parent.parent.name, path.parent.name)
        assert fit.notes["origin"]
        assert fit.notes["digest"] == fit.digest


def test_another_gpu_s_is_refused_and_another_model_s_labelled(refit: Path, tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--device-model", str(refit), "--num-requests", "5", "--policy", "vllm-2048", "--no-report", "--quiet"]
    assert sim([*run, "--gpu", "h100", "--out", str(tmp_path / "no")]) == 2
    assert "fitted on gpu a100-80gb, not h100: give it as --gpu" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert sim([*run, "--model", model_file(tmp_path), "--out", str(tmp_path / "run")]) == 0
    assert "(device model: fitted on llama-3.1-8b's shapes)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("changes", "label"), [
    ({}, "fitted"), ({"host_gap_s": 0.0017}, "fitted on a100-80gb, changed since"),
    *(({name: None}, "fitted, of unknown origin: no gpu, model and origin in its notes") for name in ("gpu", "model", "origin"))])
def test_what_a_fit_does_not_say_is_unknown(refit: Path, tmp_path: Path, changes: dict[str, object], label: str) -> None:
    assert load_device(DeviceConfig(timing=changed(refit, tmp_path, **changes))).source == label


def test_a_note_that_is_no_text_is_refused(refit: Path, tmp_path: Path) -> None:
    raw = json.loads((refit / "fit.json").read_text())
    raw["notes"]["gpu"] = ["a100-80gb"]
    (tmp_path / "fit.json").write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match="must be text"):
        load_device(DeviceConfig(timing=str(tmp_path)))


@pytest.mark.parametrize(("gpu", "tp", "said"), [
    ("a100-80gb", 1, ""), ("a100-80gb", 8, ""), ("l40s", 2, "; all-reduce over PCIe 4.0 x16, 32 GB/s"),
    ("a100-80gb-pcie", 4, "; all-reduce over PCIe 4.0 x16, 32 GB/s"),
    ("a100-80gb", 16, "; all-reduce past a node of 8: over the host link of 32 GB/s"),
    ("h100-nvl", 4, "; all-reduce past a node of 2: over the host link of 64 GB/s")])
def test_the_link_that_a_group_reduces_over(gpu: str, tp: int, said: str) -> None:
    assert load_device(DeviceConfig(gpu=gpu, tensor_parallel=tp)).source.partition("; all-reduce")[1:] == (
        said.partition("; all-reduce")[1:])


def test_past_the_node_the_slow_link_costs_its_share() -> None:
    """Two H100 NVL reduce over their bridge of 300 GB/s; were a node one card, over PCIe at 64: 300 / 64 times the transfer."""
    pair = get_gpu("h100-nvl")
    from bullet.devices.fitted import reduced_over

    assert reduced_over(pair, 2)[0] == 300e9
    assert reduced_over(dataclasses.replace(pair, gpus_per_node=1), 2)[0] == 64e9
    assert reduced_over(GPUS["a100-80gb"], 1) == (300e9, "")


def test_tensor_parallel_that_divides_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="must divide"):
        load_device(DeviceConfig(tensor_parallel=5))
