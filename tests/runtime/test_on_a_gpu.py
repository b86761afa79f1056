"""What only a GPU can show. Skipped without one; `make gpu` is the longer run. Not yet run on a GPU."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from bullet.cli import measure as profile_cli  # noqa: E402
from bullet.kernels import probe  # noqa: E402
from bullet.profiles.journal import read_journal  # noqa: E402


def test_every_pair_is_proven(tmp_path):
    assert profile_cli.main(["check", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["proven"]
    assert not report["refused"]
    for pair in report["pairs"]:
        assert not set(pair["prefill_smids"]) & set(pair["decode_smids"])


def test_a_short_sweep_has_proven_coruns_and_resumes(tmp_path):
    command = ["sweep", "--budget-s", "40", "--out", str(tmp_path)]
    assert profile_cli.main(command) == 0
    _, rows, _ = read_journal(tmp_path / "samples.jsonl")
    corun = [r for r in rows if r["kind"] == "corun"]
    assert {r["lane"] for r in corun} == {"prefill", "decode"}
    assert {r["partition"] for r in corun if r["split_decode_sms"] is not None} == {"proven"}
    assert all(r["samples"] >= 5 for r in corun)
    assert profile_cli.main(command) == 0
    ids = [r["id"] for r in read_journal(tmp_path / "samples.jsonl")[1]]
    assert len(ids) == len(set(ids))


def test_two_runs_agree(tmp_path):
    for name in ("a", "b"):
        assert profile_cli.main(["sweep", "--budget-s", "40", "--out", str(tmp_path / name)]) == 0
    assert profile_cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@pytest.mark.parametrize("size", [1, 4096, 3 * 4096 + 7, 1 << 22])
def test_memory_stream_copies(size):
    source = torch.rand(size, device="cuda")
    target = torch.full_like(source, float("nan"))
    probe.launch_memory_stream(source, target, 8)
    assert torch.equal(source, target)
