"""Sensitivity: leads, crossings and points worked out by hand on a made-up world, then the command on short runs."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bullet.cli.sim import main
from bullet.config import RunConfig
from bullet.errors import ConfigError
from bullet.sweeps import sensitivity as module
from bullet.sweeps.cache import key_of
from bullet.sweeps.pool import Pool
from bullet.sweeps.sensitivity import UNKNOWNS, Unknown, latin, less_is_better, read_unknown, sensitivity, with_changes

CONTENTION, HOST = Unknown("device.contention_scale", 0, 4), Unknown("device.host_step_s", 0, 0.01)
ABOUT = {"gpu": "g", "device_source": "made up", "model": "m"}


def world(monkeypatch: pytest.MonkeyPatch, figures: Any) -> None:
    """Every run gives what ``figures(policy, contention, host time, seed)`` says."""

    def run(self: Pool, wanted: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
        return {
            key: {"figures": {**ABOUT, "att": figures(c.policy.name, c.device.contention_scale, c.device.host_step_s, c.seed)}}
            for key, c in wanted.items()
        }

    monkeypatch.setattr(Pool, "run", run)


def test_leads_and_crossings_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vllm 0.5; static-96 0.9 - 0.2 x contention: 0.7 by default (1), 0.9 and 0.1 at the ends, so that it loses from 2 on. Host
    time takes from both alike."""
    world(
        monkeypatch, lambda name, contention, host, seed: (0.5 if name == "vllm-1024" else 0.9 - 0.2 * contention) - host + seed
    )
    found = sensitivity(
        {}, ["vllm-1024", "static-96"], figure="att", unknowns=[CONTENTION, HOST], seeds=2, together=3, cache=tmp_path
    )
    assert (found.winner, found.at.rival) == ("static-96", "vllm-1024")
    assert found.at.lead.mean == pytest.approx(0.2)
    first, second = found.swings
    assert first.unknown is CONTENTION
    assert [end.lead.mean for end in first.ends] == pytest.approx([0.4, -0.4])
    assert [end.wins for end in first.ends] == [True, False]
    # Bisection from 1 to 4, five halvings: within 3 / 32 of 2.
    assert first.crossing == (pytest.approx(2.0, abs=3 / 32),)
    assert [end.lead.mean for end in second.ends] == pytest.approx([0.2, 0.2])
    assert second.crossing == ()
    assert second.width == pytest.approx(0)
    for place in found.together:
        assert place.lead.mean == pytest.approx(0.4 - 0.2 * place.values[CONTENTION.key])
    text = found.text()
    assert "alone, the winner changes by device.contention_scale" in text
    wins = sum(place.values[CONTENTION.key] <= 2 for place in found.together)
    assert f"together (3 points over all ranges): static-96 wins at {wins};" in text


def test_of_times_less_is_better(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world(monkeypatch, lambda name, contention, host, seed: 10.0 if name == "vllm-1024" else 30.0 * contention)
    monkeypatch.setattr(module, "less_is_better", lambda figure: True)
    found = sensitivity({}, ["static-96", "vllm-1024"], figure="att", unknowns=[CONTENTION], seeds=1, together=0, cache=tmp_path)
    assert found.winner == "vllm-1024"
    assert found.at.lead.mean == 20
    assert found.at.means == {"static-96": 30.0, "vllm-1024": 10.0}
    assert [end.lead.mean for end in found.swings[0].ends] == [-10, 110]
    assert found.swings[0].crossing == (pytest.approx(1 / 3, abs=1 / 32),)


def test_a_tie_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for level, tied in ((1.0, True), (0.9, False)):
        world(monkeypatch, lambda name, contention, host, seed, level=level: level if name == "vllm-1024" else 1.0)
        found = sensitivity({}, ["bullet", "vllm-1024"], figure="att", unknowns=[HOST], seeds=1, together=0, cache=tmp_path)
        assert found.winner == "bullet"
        assert ("a tie, the first named is taken for the winner" in found.text()) == tied


@pytest.mark.parametrize(
    ("figure", "less"),
    [
        ("mean_ttft_ms", True),
        ("ttft_slo_s", True),
        ("slo_attainment_mean_length", False),
        ("request_throughput", False),
        ("steady.mean_tpot_ms", True),
        ("rejected", True),
    ],
)
def test_which_way_a_figure_goes(figure: str, less: bool) -> None:
    assert less_is_better(figure) == less


def test_a_latin_hypercube_has_a_point_in_each_part() -> None:
    points = latin(5, [CONTENTION, HOST])
    for unknown in (CONTENTION, HOST):
        parts = sorted(int((point[unknown.key] - unknown.low) / (unknown.high - unknown.low) * 5) for point in points)
        assert parts == [0, 1, 2, 3, 4]
    assert points == latin(5, [CONTENTION, HOST])


def test_defaults_are_keys_with_reasons() -> None:
    for unknown in UNKNOWNS:
        assert unknown.low < unknown.high
        assert len(unknown.why) > 20
    assert [u.key for u in with_changes([], only=False)] == [u.key for u in UNKNOWNS]
    changed = with_changes(["device.host_step_s=0:0.5", "device.host_launch_s=0:1e-4"], only=False)
    assert [(u.key, u.high) for u in changed if "host" in u.key] == [("device.host_step_s", 0.5), ("device.host_launch_s", 1e-4)]
    assert [u.key for u in with_changes(["device.host_launch_s=0:1e-4"], only=True)] == ["device.host_launch_s"]


@pytest.mark.parametrize(
    "text", ["device.contention_scale", "device.contention_scale=1", "device.contention_scale=a:b", "=0:1:2"]
)
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="must read KEY=LOW:HIGH"):
        read_unknown(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vary", "device.contention_scale=2:1"], "goes nowhere"),
        (["--vary", "device.nothing=0:1"], "device.nothing"),
        (["--vary", "device.contention_scale=-1:1"], "0 to 1e6"),
        (["--vary", "device.gpu=0:1"], "device.gpu"),
        (["--only"], "nothing is varied"),
        (["--policies", "bullet"], "two systems or more"),
        (["--policies", "bullet,nobody"], "nobody"),
        (
            ["--figure", "ttft", "--num-requests", "5", "--seeds", "1", "--policies", "vllm-1024,static-96", "--together", "0"],
            "mean_ttft_ms",
        ),
        (["--together", "-1"], "0 to 1000"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["sensitivity", *words, "--quiet", "--cache", str(tmp_path / "cache"), "--jobs", "1", "--out", str(tmp_path / "o")])
        == 2
    )
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "o").exists()


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "sensitivity",
        "--num-requests",
        "20",
        "--seeds",
        "2",
        "--policies",
        "vllm-1024,static-96",
        "--together",
        "2",
        "--only",
        "--vary",
        "device.bandwidth_scale=0.5:1.5",
        "--cache",
        str(tmp_path / "cache"),
        "--jobs",
        "1",
        "--quiet",
    ]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "a" / "sensitivity.txt").read_text().strip() in printed
    with open(tmp_path / "a" / "sensitivity.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["place"] for row in rows] == [
        "base",
        "device.bandwidth_scale low",
        "device.bandwidth_scale high",
        "together 0",
        "together 1",
    ]
    assert [float(row["device.bandwidth_scale"]) for row in rows[:3]] == [1, 0.5, 1.5]
    stored = json.loads((tmp_path / "a" / "sensitivity.json").read_text())
    assert stored["unknowns"][0]["key"] == "device.bandwidth_scale"
    assert (tmp_path / "a" / "tornado.png").stat().st_size > 5000
    page = html.unescape((tmp_path / "a" / "sensitivity.html").read_text())
    assert (tmp_path / "a" / "sensitivity.txt").read_text().rstrip("\n") in page
    assert "data:image/png;base64," in page
    # From the cache, to the byte.
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    for name in ("sensitivity.txt", "sensitivity.csv", "sensitivity.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_bandwidth_is_what_is_scaled() -> None:
    """A decode step is bound by memory: at half the bandwidth nearly twice as long, and its label says so."""
    from bullet.config import DeviceConfig
    from bullet.devices.load import load_device

    plain, half = (load_device(DeviceConfig(bandwidth_scale=scale)) for scale in (1.0, 0.5))
    assert half.decode_seconds(64, 64 * 2048, 108) / plain.decode_seconds(64, 64 * 2048, 108) == pytest.approx(2, rel=0.05)
    assert half.source == "fitted; bandwidth x 0.5"
    assert key_of(RunConfig(device=DeviceConfig(bandwidth_scale=0.5))) != key_of(RunConfig())
    with pytest.raises(ConfigError, match=r"device.bandwidth_scale = 0.5: must be 1 where step times"):
        load_device(DeviceConfig(gpu="rtx4090", timing="table", bandwidth_scale=0.5))
