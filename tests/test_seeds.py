"""Means over seeds and paired differences by hand; their folder; a measured row beside the simulated ones."""

import json
from pathlib import Path

import pytest

from bullet import api
from bullet.cli import sim
from bullet.errors import ConfigError, TraceError
from bullet.results.folder import load_run
from bullet.sweeps import seeds

FAST = ["--num-requests", "20", "--quiet", "--no-report"]


def test_means_and_differences_by_hand() -> None:
    """Three seeds: a's 1, 2, 3 (mean 2, s = 1), b's 2, 4, 6 (mean 4, s = 2); b - a is 1, 2, 3. t(2, 95 %) = 4.3027."""
    summaries = [[{"seed": i, "x": float(i + 1), "y": None, "name": "a"}, {"seed": i, "x": 2.0 * (i + 1), "y": 1.0, "name": "b"}]
                 for i in range(3)]
    a, b = seeds.estimates(summaries)
    assert (a["x"].mean, b["x"].mean) == (2, 4)
    assert a["x"].half_width == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert b["x"].half_width == pytest.approx(2 * 4.3027 / 3**0.5, rel=1e-4)
    (difference,) = seeds.differences(summaries)
    assert list(difference) == ["x"]  # what one of them lacks has no difference
    assert difference["x"].mean == 2
    assert difference["x"].half_width == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert set(a) == {"x"}


def test_seeds_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "many"
    assert sim.main(["compare", "--policies", "bullet,vllm-1024", "--seed", "3", "--seeds", "2", *FAST, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    table = (out / "seeds.txt").read_text()
    assert table.strip() in text
    assert max(map(len, table.splitlines())) <= 80
    assert "seeds 3 to 4" in table
    assert "less bullet (srm), of the same requests:" in table
    assert sorted(p.name for p in out.iterdir()) == ["seed-3", "seed-4", "seeds.json", "seeds.txt"]
    stored = [load_run(out / f"seed-{seed}" / "vllm-1024").summary for seed in (3, 4)]
    assert [s["seed"] for s in stored] == [3, 4]
    bullet_, vllm = json.loads((out / "seeds.json").read_text())
    mean = sum(s["mean_ttft_ms"] for s in stored) / 2
    assert vllm["figures"]["mean_ttft_ms"]["mean"] == pytest.approx(mean)
    assert vllm["less_first"]["mean_ttft_ms"]["mean"] == pytest.approx(mean - bullet_["figures"]["mean_ttft_ms"]["mean"])
    assert bullet_["less_first"] == {}
    one = api.over_seeds({"seed": 3, "policy.name": "vllm-1024", "workload.num_requests": 20}, 2)
    assert [runs[0].summary["mean_ttft_ms"] for runs in one] == [s["mean_ttft_ms"] for s in stored]


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds 1: must be 2 to 10,000"):
        api.over_seeds({}, 1, out=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def result(folder: Path, **figures: object) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps({"duration": 10.0, "completed": 5, "request_throughput": 0.5, "mean_ttft_ms": 100.0, **figures}))
    return path


def test_a_measured_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the simulated figures: multiples of 2; what the file lacks is a dash."""
    out, policy = tmp_path / "cmp", ["--policies", "vllm-1024"]
    assert sim.main(["compare", *policy, *FAST, "--out", str(tmp_path / "plain")]) == 0
    plain = load_run(tmp_path / "plain" / "vllm-1024").summary
    file = result(tmp_path, mean_ttft_ms=plain["mean_ttft_ms"] / 2, mean_tpot_ms=plain["mean_tpot_ms"] * 4)
    capsys.readouterr()
    assert sim.main(["compare", *policy, *FAST, "--out", str(out), "--measured", str(file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "simulated / measured, vllm-1024: mean TTFT 2.00, mean TPOT 0.25, req/s" in text
    lines = (out / "comparison.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line.startswith("measured: result.json ")]
    assert rows[0][2:5] == [f"{plain['mean_ttft_ms'] / 2:.0f}", "-", "-"]
    kept = json.loads((out / "comparison.json").read_text())
    assert [row["source"] for row in kept] == ["simulated", "measured"]


def test_a_file_that_is_no_result_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text("{}")
    with pytest.raises(TraceError, match="not a vLLM or SGLang benchmark result"):
        api.compare({"workload.num_requests": 5}, "naive", out=tmp_path / "out", measured=file)
    assert not (tmp_path / "out").exists()
