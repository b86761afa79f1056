"""The page of a sweep, two sweeps held against each other, and what is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.cli.profile import main as profile
from bullet.config import DeviceConfig
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.load import load_device
from bullet.errors import ProfileError
from bullet.profiles.agreement import compare_rows, pooled
from bullet.profiles.check import check_samples
from bullet.profiles.rows import Row, write_parquet
from tests.dry_card import DryCard

TRUTH = {"prefill_contention_loss": 0.2, "decode_contention_loss": 0.3, "decode_l2_loss": 0.1, "shared_prefill_share": 0.7,
         "rate_slope": 0.3, "rate_cap": 1.12, "bandwidth_knee": 0.4, "bandwidth_sharpness": 3.0}


def same_ids(rows: list[Row]) -> list[Row]:
    """As two sweeps of one plan have them: an id says what was measured."""
    names = ("kind", "cell", "step", "lane", "op", "tokens", "sms", "split_prefill_sms")
    return [{**r, "id": "|".join(str(r[k]) for k in names) + ("" if r["kind"] != "anchor" else f"|{r['order']}")}
            for r in rows]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return same_ids(DryCard(1, **TRUTH).sweep())


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert profile(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_the_page_has_all_pictures_with_titles_and_the_intervals(rows, tmp_path, capsys):
    write_parquet(tmp_path / "samples.parquet", rows, {})
    assert profile(["plot", str(tmp_path)]) == 0
    assert "sweep.html" in capsys.readouterr().out
    text = (tmp_path / "sweep.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", text)[:5] == [
        "What co-running costs", "Layers alone against SMs", "What the fit leaves", "Clocks alone and beside the other",
        "What each control costs"]
    assert len(re.findall('src="data:image/png;base64,[A-Za-z0-9+/=]{9000,}"', text)) == 5
    assert re.search(r"<td>decode_contention_loss</td>(<td>0\.\d+</td>){3}", text)
    assert "simulated h200, llama-3.1-8b, simulated" in text
    assert "http" not in text  # all of it is here
    assert "is there: choose another --out, or say --replace" in one_line(capsys, "plot", str(tmp_path))
    assert profile(["plot", str(tmp_path), "--replace"]) == 0
    assert (tmp_path / "sweep.html").read_text() == text


def test_what_was_not_measured_is_said_in_words(rows, tmp_path):
    own = [{**r, "clock_window_hz": None} for r in rows if r["kind"] != "control"]
    write_parquet(tmp_path / "samples.parquet", own, {})
    assert profile(["plot", str(tmp_path)]) == 0
    text = (tmp_path / "sweep.html").read_text()
    assert "No clock was read inside these windows." in text
    assert "No control was taken." in text
    assert text.count("<img") == 3


def test_folders_that_no_page_comes_of(rows, tmp_path, capsys):
    assert "no such folder" in one_line(capsys, "plot", str(tmp_path / "none"))
    assert "holds neither samples.jsonl nor samples.parquet" in one_line(capsys, "plot", str(tmp_path))
    (tmp_path / "samples.jsonl").write_text('{"schema": "bullet-samples", "version": 1}\n{"id": 3\n')
    assert "line 2 is not a JSON object" in one_line(capsys, "plot", str(tmp_path))
    (tmp_path / "samples.jsonl").unlink()
    for name, table, message in (
            ("none", [], "holds no rows"),
            ("mixed", [*rows[:30], {**rows[30], "gpu": "simulated h100"}], "rows of simulated h100, simulated h200: one card"),
            ("whole", [r for r in rows if not r["split_prefill_sms"]], "no row of a partition")):
        write_parquet(tmp_path / f"{name}.parquet", table, {})
        assert message in one_line(capsys, "plot", str(tmp_path / f"{name}.parquet"), "--out", str(tmp_path / "p.html"))
    assert not (tmp_path / "p.html").exists()


def test_two_sweeps_of_one_card_agree_and_those_of_two_do_not(rows, tmp_path, capsys):
    again = same_ids(DryCard(2, **TRUTH).sweep())
    found = compare_rows(rows, again, "a", "b")
    assert found.agree, found.against
    assert any(line.startswith("decode_contention_loss: ") for line in found.lines)
    other = same_ids(DryCard(2, **(TRUTH | {"decode_contention_loss": 0.5})).sweep())
    found = compare_rows(rows, other, "a", "b")
    assert not found.agree
    assert "contention_loss" in found.verdict
    assert not any("prefill" in line for line in found.against)  # which was not changed
    for name, table in (("a", rows), ("b", other)):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "samples.parquet", table, {})
    assert profile(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "the two sweeps do not agree: " in capsys.readouterr().out.splitlines()[-1]
    error = one_line(capsys, "fit", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out"))
    assert "no profile is made of them: the two sweeps do not agree" in error
    assert not (tmp_path / "out" / "fit.json").exists()


def test_two_sweeps_are_one_table_that_a_fit_takes(rows):
    both = pooled(rows, rows)
    assert check_samples(both).name == "h200"
    assert len({r["id"] for r in both}) == len(both)
    with pytest.raises(ProfileError, match="only tables of one device are compared"):
        compare_rows(rows, [{**r, "gpu": "simulated h100"} for r in rows], "a", "b")


def test_a_fit_of_a_sweep_drives_the_simulator_with_its_intervals(rows, tmp_path, capsys):
    """Contention by lane, L2 and the share of shared SMs, written, read back and used; what a run is given goes before."""
    pytest.importorskip("scipy")
    write_parquet(tmp_path / "samples.parquet", rows, {})
    assert profile(["fit", str(tmp_path), "--out", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"decode_contention_loss +0\.\d+  99 % interval 0\.\d+ to 0\.\d+", out)
    assert "one sweep: none other was compared with it" in out
    # An H200's kernels are those of H100's silicon, which is the nearest measured.
    assert "gemm: no measured row, H100's" in out
    assert re.search("These intervals take kernels as they stand, and gemm, .* are H100's", out)
    assert "rowwise: no measured row, A100's" in out  # H100's own fit has them of A100
    assert "; rowwise are A100's: what is true" in out
    fit = DeviceCoefficients.from_json(tmp_path / "mine" / "fit.json")
    assert fit.intervals["shared_prefill_share"][0] < fit.shared_prefill_share < fit.intervals["shared_prefill_share"][1]
    device = load_device(DeviceConfig(gpu="h200", timing=str(tmp_path / "mine")))
    assert device.losses == (fit.prefill_contention_loss, fit.decode_contention_loss)
    assert device.l2_losses == (0.0, fit.decode_l2_loss)
    assert device.shared_prefill_share == fit.shared_prefill_share
    given = load_device(DeviceConfig(gpu="h200", timing=str(tmp_path / "mine"), shared_prefill_share=0.9))
    assert given.shared_prefill_share == 0.9
    old = load_device(DeviceConfig(gpu="h100"))
    assert (old.losses, old.l2_losses, old.shared_prefill_share) == ((0.2, 0.2), (0.0, 0.0), 0.5)
    work = [device.prefill_work([(2048, 0)], 1, logits_seqs=0), device.hybrid_work((), 64, 65536, logits_seqs=0, layers=1)]
    assert device.corun_seconds(work[0], 96, work[1], 36)[1] > device.solo_seconds(work[1], 36)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("decode_contention_loss", 1.5, "must be 0 to 1"), ("shared_prefill_share", 0.0, "must be 0.001 to 0.999")])
def test_wrong_numbers_of_a_fit_are_one_line(tmp_path: Path, name: str, value: float, message: str) -> None:
    from tests.known_device import made_up

    path = tmp_path / "fit.json"
    path.write_text(made_up(get_gpu("h200"), **{name: value}).to_json())
    with pytest.raises(ProfileError, match=message):
        DeviceCoefficients.from_json(path)
    assert get_model("llama-3.1-8b").num_layers == 32
    path.write_text(made_up(get_gpu("h200"), contention_loss=0.3, notes={"intervals": {"contention_loss": [0.4, 0.5]}}).to_json())
    with pytest.raises(ProfileError, match=r"notes.intervals.contention_loss = \[0.4, 0.5\]: must be \[low, high\] around"):
        DeviceCoefficients.from_json(path)
