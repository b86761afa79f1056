"""Cards: the built-in files, names as people and drivers write them, and a card of one's own."""

from pathlib import Path

import pytest

from bullet.catalog.gpus import FITTED, GPUS, GpuSpec, get_gpu
from bullet.config import DeviceConfig
from bullet.devices.load import load_device
from bullet.errors import ConfigError
from tests.worlds import run

CARD = '''name = "mine"
num_sms = 100
peak_bf16_tflops = 200
mem_gb_per_s = 1000
mem_gib = 48
compute_capability = [9, 0]
source = "made up"
'''


def test_the_cards_that_people_have_are_built_in() -> None:
    assert set(GPUS) == {"a100-40gb", "a100-80gb", "a100-40gb-pcie", "a100-80gb-pcie", "h100", "h100-pcie", "h100-nvl", "h200",
                         "h20",
                         "b200", "l4", "l40s", "a10g", "rtx3090", "rtx4090", "rtx5090", "rtxpro6000"}
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.source
        assert gpu.silicon in FITTED


@pytest.mark.parametrize(("name", "sms", "tflops", "gb_per_s", "gib"), [
    # data sheets: dense bf16
    ("a100-80gb", 108, 312, 2039, 80), ("h100", 132, 989.4, 3350, 80), ("h200", 132, 989.4, 4800, 141), ("h20", 78, 148, 4000,
                                                                                                         96),
    ("rtx4090", 128, 165.2, 1008, 24), ("h100-pcie", 114, 756.5, 2000, 80), ("l40s", 142, 362, 864, 48)])
def test_data_sheets(name: str, sms: int, tflops: float, gb_per_s: float, gib: int) -> None:
    gpu = GPUS[name]
    assert (gpu.num_sms, gpu.peak_flops / 1e12, gpu.mem_bytes_per_s / 1e9, gpu.mem_bytes / 2**30) == pytest.approx(
        (sms, tflops, gb_per_s, gib))


@pytest.mark.parametrize(("written", "name"), [
    ("H100", "h100"), ("h100-sxm", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("A100", "a100-80gb"), ("a100_80gb_pcie",
                                                                                                       "a100-80gb-pcie"),
    ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("RTX 4090", "rtx4090"), ("rtx-pro-6000", "rtxpro6000"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
    ("NVIDIA H200", "h200"), ("NVIDIA A10G", "a10g"), ("Tesla L4", "l4"),
    ("h100_sxm5_80gb", "h100"), ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("H20 96GB", "h20"),
    ("RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000")])
def test_names_are_forgiving(written: str, name: str) -> None:
    assert get_gpu(written).name == name


@pytest.mark.parametrize("written", ["", "h", "100", "v100", "h1000", "h100 96gb", "rtx 4090 d", "rtx 3090 ti"])
def test_but_not_guessed(written: str) -> None:
    with pytest.raises(ConfigError, match="unknown gpu"):
        get_gpu(written)


@pytest.mark.parametrize(("written", "near"), [("GH200", "h200"), ("L40", "l40s or l4"), ("A10", "a10g"),
                                             ("RTX 4090 D", "rtx4090")])
def test_the_nearest_names_are_told(written: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown gpu '{written}': did you mean {near}"):
        get_gpu(written)


@pytest.mark.parametrize(("name", "silicon"), [
    ("h200", "h100"), ("h20", "h100"), ("b200", "h100"), ("a100-40gb-pcie", "a100-80gb"), ("rtx5090", "rtx4090"), ("l4",
                                                                                                                   "rtx4090"),
    ("a10g", "rtx4090")])
def test_a_card_without_a_fit_takes_the_nearest_silicons(name: str, silicon: str) -> None:
    assert GPUS[name].silicon == silicon


def card(folder: Path, text: str) -> GpuSpec:
    path = folder / "card.toml"
    path.write_text(text, encoding="utf-8")
    return get_gpu(str(path))


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    gpu = card(tmp_path, CARD)
    assert (gpu.name, gpu.num_sms, gpu.peak_flops, gpu.mem_bytes_per_s, gpu.mem_bytes) == ("mine", 100, 200e12, 1e12, 48 * 2**30)
    assert (gpu.silicon, gpu.peak_fp8_flops, gpu.link_bytes_per_s) == ("h100", 0, 32e9)
    assert card(tmp_path, CARD + 'like = "a100-80gb"\nhost_link_gb_per_s = 64\n').silicon == "a100-80gb"
    assert card(tmp_path, CARD + "host_link_gb_per_s = 64\n").link_bytes_per_s == 64e9
    assert card(tmp_path, CARD.replace("[9, 0]", "[7, 5]")).silicon == "a100-80gb"


def test_one_card_has_one_name_in_a_configuration(tmp_path: Path) -> None:
    assert DeviceConfig(gpu="NVIDIA H100 80GB HBM3").gpu == DeviceConfig(gpu="H100").gpu == "h100"
    path = tmp_path / "card.toml"
    path.write_text(CARD, encoding="utf-8")
    assert DeviceConfig(gpu=str(path)).gpu == str(path)
    assert run("vllm-1024", [(0.0, 100, 2)], device=load_device(DeviceConfig(gpu=str(path)))).device["gpu"] == "mine"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("num_sms = 100\n", "", "'num_sms' is missing"), ("num_sms = 100", "num_sms = 0", "num_sms = 0: must be 1 to 4,096"),
    ("num_sms = 100", "num_sms = 1.5", "num_sms = 1.5: must be a whole number"), ("num_sms = 100", "num_sms = true",
                                                                                  "num_sms = True"),
    ("mem_gib = 48", "mem_gib = nan", "nan is no finite number"), ("mem_gib = 48", 'mem_gib = "48"', "mem_gib = '48'"),
    ("mem_gib = 48", "mem_gb = 48", "unknown key 'mem_gb'"),
    ("[9, 0]", "9", "compute_capability = 9: must be a list"), ("[9, 0]", "[9]", r"must be a list of length 2"),
    ('"made up"', '"a\\u001b[2J"', "holds a control character"), ("num_sms = 100", "num_sms = ", "cannot be read as a TOML card"),
    ("= 1000", "= 0", "mem_gb_per_s = 0.0: must be 10 to 100,000"), ("= 1000", "= 2.04", "mem_gb_per_s = 2.04: must be 10"),
    ("= 200", "= 200e12", "peak_bf16_tflops = 2"), ("= 48", "= 49152", "mem_gib = 49152.0: must be 1 to 4,096"),
    ("= 48", "= 48\nlink_gb_per_s = 0", "link_gb_per_s = 0.0"), ("= 48", "= 48\ngpus_per_node = 0", "gpus_per_node = 0"),
    ("= 48", "= 48\npeak_fp8_tflops = 100", "peak_fp8_tflops = 100.0: must be peak_bf16_tflops = 200.0 or more"),
    ("[9, 0]", "[90, 0]", "compute_capability"), ('"mine"', '"../mine"', "name = '../mine': must be letters"),
    ('"made up"', '""', "source = '': must say where"), ('"mine"', '"h100"', "name = 'h100': is a built-in card's"),
    ('name = "mine"', 'name = "mine"\nlike = "v100"', "like = 'v100': must be one of a100-80gb")])
def test_a_card_that_cannot_be_is_told_why(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in CARD
    with pytest.raises(ConfigError, match=words):
        card(tmp_path, CARD.replace(old, new))


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read .No such file"):
        get_gpu(str(tmp_path / "none.toml"))
