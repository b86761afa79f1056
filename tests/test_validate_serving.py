"""Points measured elsewhere and their simulation: small cases with answers by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bullet.cli.sim import main as sim
from bullet.errors import ConfigError, ProfileError
from bullet.validation import serving as validate_serving
from bullet.validation import serving_points
from bullet.validation.serving import build_device, build_workload, run_config, simulate_point, tilt
from bullet.validation.serving_points import Point, read_points

HEAD = "# here: a source, commit x, MIT\n" + ",".join(serving_points.COLUMNS) + "\n"
STATIC = "one,static,vLLM 2024,a100-80gb,,,2,32,5,batch,0.5,here\n"
SERVED = "two,sharegpt,SGLang 0.3.0,a100-80gb,4,20,,,,tpot_p50,0.013,here\n"


def points_in(tmp_path: Path, text: str) -> list[Point]:
    path = tmp_path / "serving_points.csv"
    path.write_text(text)
    return read_points(path)


def test_points_are_read(tmp_path: Path) -> None:
    one, two = points_in(tmp_path, HEAD + STATIC + SERVED + SERVED.replace("tpot_p50,0.013", "ttft_p50,0.032"))
    assert one == Point("one", "static", "vLLM 2024", "a100-80gb", "a source, commit x, MIT", {"batch": 0.5}, batch=2,
                        prompt_tokens=32, output_tokens=5)
    assert two.measured == {"tpot_p50": 0.013, "ttft_p50": 0.032}
    assert (two.rate_req_per_s, two.requests) == (4.0, 20)


@pytest.mark.parametrize(("text", "said"), [
    (HEAD + STATIC.replace("0.5", "500000"), "milliseconds"),
    (HEAD + STATIC.replace("0.5", "-1"), "positive number"),
    (HEAD + STATIC.replace(",2,32", ",2.5,32"), "positive whole number"),
    (HEAD + STATIC.replace(",,,2", ",4,,2"), "must be empty"),
    (HEAD + STATIC.replace("batch,0.5", "tpot_p50,0.5"), "allowed are"),
    (HEAD + STATIC.replace("here", "nowhere"), "'# nowhere: ..'"),
    (HEAD + STATIC + STATIC, "twice"),
    (HEAD + SERVED + SERVED.replace("tpot_p50", "ttft_p50").replace(",20,", ",30,"), "differs"),
    (HEAD + STATIC.replace(",here", ""), "11 cells where the header has 12"),
    (STATIC, "no column 'point'"),
])
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ProfileError, match=r"serving_points\.csv") as caught:
        points_in(tmp_path, text)
    assert said in str(caught.value)


def test_shipped_points_are_the_published_ones_and_licensed() -> None:
    points = {p.name: p for p in serving_points.shipped()}
    assert points["sharegpt SGLang 0.3.0 8 req/s"].measured == {
        "ttft_p50": 0.03568, "tpot_p50": 0.01785, "itl_p50": 0.01441, "latency_p50": 2.17502}
    assert points["vLLM CI a100-80gb 8 x 32+128"].measured["batch"] / 128 == pytest.approx(0.0123, abs=5e-5)
    for point in points.values():
        assert point.licensed
        assert any(name in point.source for name in ("Apache-2.0", "BSD-3-Clause")), point.name
        validate_serving.get_engine(point)


def test_a_static_batch_is_its_prefill_and_its_decode_steps(tmp_path: Path) -> None:
    """Two prompts of 32, five tokens each: one step over both prompts, then four decode steps at 33 .. 36 tokens."""
    (point,) = points_in(tmp_path, HEAD + STATIC)
    device = build_device(point)
    works = [device.prefill_work([(32, 0)] * 2, 32, logits_seqs=2), *(device.decode_work(2, 2 * c) for c in (33, 34, 35, 36))]
    by_hand = sum(device.solo_seconds(work, device.num_sms) for work in works)
    found = simulate_point(point)
    assert found["batch"] == pytest.approx(by_hand, rel=1e-12)
    assert found["batch_mean"] == 2
    slower = simulate_point(point, host_gap_s=0.001)
    assert slower["batch"] - found["batch"] == pytest.approx(5 * 0.001, rel=1e-9)
    row = validate_serving.compare(point, lambda _: None)
    assert row["diagnosis"]["gap_s"] == pytest.approx((0.5 - by_hand) / 5, rel=1e-12)
    assert row["workloads"]["equal"]["error"]["batch"] == pytest.approx(by_hand / 0.5 - 1, rel=1e-12)


def test_the_40_gb_card_has_its_own_bandwidth_and_memory(tmp_path: Path) -> None:
    (big,) = points_in(tmp_path, HEAD + STATIC)
    small = dataclasses.replace(big, gpu="a100-40gb")
    a, b = (build_device(p) for p in (big, small))
    assert (a.source, b.source) == ("fitted", "analytic, a100-80gb's efficiencies")
    assert a.coefficients == dataclasses.replace(b.coefficients, source="fitted", notes=a.coefficients.notes)
    # A decode step of one sequence is all bytes: the part that moves them stretches by the data sheets' ratio, overheads do not.
    stretch = b.solo_seconds(b.decode_work(1, 1), 108) / a.solo_seconds(a.decode_work(1, 1), 108)
    assert 1.2 < stretch < 2039 / 1555
    tokens = [run_config(p).device.kv_tokens for p in (big, small)]
    assert tokens[0] - tokens[1] == pytest.approx(0.9 * 40 * 2**30 / 131072, abs=16)  # 128 KiB of KV a token


def test_the_lightest_reweighting_has_the_asked_means() -> None:
    """Three rows, of which symmetry leaves one answer: the middle row's weight and two equal ones."""
    rows = np.array([[1, 3], [2, 2], [3, 1]])
    assert tilt(rows, (2.0, 2.0)) == pytest.approx([1 / 3] * 3)
    with pytest.raises(ConfigError, match="inside"):
        tilt(rows, (4.0, 2.0))
    # Four corners of a square are independent in x and y: weights are products, e.g. 0.75 x 0.25.
    square = np.array([[1, 1], [1, 2], [2, 1], [2, 2]])
    assert tilt(square, (1.25, 1.75)) == pytest.approx([0.75 * 0.25, 0.75 * 0.75, 0.25 * 0.25, 0.25 * 0.75])


def test_sharegpt_requests_pass_the_filter_and_have_the_senders_means() -> None:
    rows = validate_serving.sharegpt_rows()
    assert rows.min() >= 4
    assert rows[:, 0].max() <= 1024
    assert rows.sum(axis=1).max() <= 2048
    assert tilt(rows, validate_serving.SENT_MEANS) @ rows == pytest.approx(validate_serving.SENT_MEANS, rel=1e-9)
    point = next(p for p in serving_points.shipped() if p.kind == "sharegpt")
    many = dataclasses.replace(point, requests=20000)
    sent, shipped = (build_workload(many, variant) for variant in ("as sent", "as shipped"))
    assert sent.output_tokens.mean() == pytest.approx(194.3, rel=0.03)
    assert shipped.output_tokens.mean() == pytest.approx(rows[:, 1].mean(), rel=0.03)
    assert len(sent) / sent.arrival_s[-1] == pytest.approx(4, rel=0.03)


def test_constant_rate_requests_share_what_their_variant_says() -> None:
    point = Point("x", "constant", "vLLM 0.15.1", "h100", "s", {}, 10.0, 8, 0, 100, 4, 2048, 0.9, 3)
    shared, repeat = (build_workload(point, variant) for variant in ("system prompt shared", "prompts repeat"))
    assert shared.shared_prefix == dict.fromkeys(range(1, 8), (0, 6))
    assert repeat.shared_prefix == {i: (i - 3, 6) for i in range(3, 8)}
    assert np.allclose(np.diff(shared.arrival_s), 0.1)


def test_the_explaining_gap_is_the_one_put_in() -> None:
    """A "measured" run that is the simulation with 0.5 ms more a step: 0.5 ms is found, and nothing of TTFT is left."""
    point = Point("x", "constant", "vLLM 0.15.1", "a100-80gb", "s", {}, 2.0, 12, 0, 112, 20, 2048, 0.9, 3)
    true = simulate_point(point, host_gap_s=0.0005)
    known = dataclasses.replace(point, measured={m: true[m] for m in ("ttft_mean", "tpot_mean")})
    found = validate_serving.compare(known, lambda _: None)["diagnosis"]
    assert found["gap_s"] == pytest.approx(0.0005, rel=0.05)
    assert abs(found["ttft_left_s"]) < 1e-4


BLIS = ("exp,model,tp,dp,workload,nominal_stage_rates_req_s,max_num_batched_tokens,gpu_mem_util,stage_index,ttft_mean_ms,"
        "e2e_mean_ms\n"
        "7-a,meta-llama/Llama-3.1-8B-Instruct,1,,general,8;20,2048,0.9,-1,1,2\n"
        "7-a,meta-llama/Llama-3.1-8B-Instruct,1,,general,8;20,2048,0.9,1,30,2500\n"
        "8-b,meta-llama/Llama-3.1-8B-Instruct,2,,general,8;20,2048,,1,30,2500\n"
        "9-c,mistralai/Mixtral-8x7B-v0.1,2,1.0,reasoning,4,1024,0.9,0,70000,100000\n"
        "10-d,mistralai/Mixtral-8x7B-v0.1,2,1.0,general,8;20,2048,0.9,0,60,5000\n"
        "11-e,mistralai/Mixtral-8x7B-v0.1,2,2.0,general,8;20,2048,0.9,0,60,5000\n"
        "12-f,some/other,1,,general,8;20,2048,0.9,0,60,5000\n"
        "13-g,Qwen/Qwen3-14B,1,,general-lite,2;6,2048,0.9,0,60,5000\n")
"""Made up, in the form of the real file."""


def test_unlicensed_runs_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "unlicensed").mkdir()
    (tmp_path / "unlicensed" / serving_points.UNLICENSED_FILE).write_text(BLIS)
    point, *others = serving_points.unlicensed(tmp_path)
    assert point.measured["tpot_mean"] == pytest.approx((2.5 - 0.03) / 247)
    assert (point.rate_req_per_s, point.prompt_tokens, point.distinct_prompts, point.licensed) == (20.0, 547, 45, False)
    assert run_config(point).policy.name == "vllm-2048"
    # Not: two replicas, a model or a workload that is not known.
    assert [p.name for p in others] == ["8 TP2 general 20 req/s", "9 mixtral-8x7b TP2 reasoning 4 req/s",
                                        "10 mixtral-8x7b TP2 general 8 req/s"]
    assert [serving_points.group_of(p) for p in [point, *others]] == [
        "dense, one GPU", "dense, tensor parallel", "waiting for more than half of the latency", "mixture of experts"]
    # What waits for 70 of 100 s is sent as long as it was: 1,200 s at 4 req/s; the others in a shorter run.
    assert [p.requests for p in others] == [1240, 4800, 600]
    # Mixtral in 16 bits: 46.7e9 x 2 / 2 bytes a GPU; 8 KV heads x 2 x 128 x 2 bytes x 32 layers / 2 = 64 KiB a token.
    device, config = build_device(others[2]), run_config(others[2])
    assert (device.tensor_parallel, device.model.num_experts) == (2, 8)
    assert config.device.kv_tokens == pytest.approx((0.9 * 80 * 2**30 - 46.7e9 - 2 * 2**30) / 65536, rel=2e-3)


def test_groups_sum_up_each_workload_apart() -> None:
    """Two points of 100 ms, TTFT 10 ms short and 30 ms long, TPOT +1 and -3 %; of the other workload 20 ms short, exact."""
    def row(ttft: float, tpot: float, group: str = "g") -> dict[str, object]:
        return {"group": group, "measured_s": {"ttft_mean": 0.1}, "workloads": {
            "a": {"error": {"ttft_mean": ttft, "tpot_mean": tpot}}, "b": {"error": {"ttft_mean": -0.2, "tpot_mean": 0.0}}}}

    found = validate_serving.groups([row(-0.1, 0.01), row(0.3, -0.03), row(9.0, 9.0, "")])
    assert found == {"g": {"a": pytest.approx({"points": 2, "ttft": 0.2, "tpot": 0.02, "ttft_lacks_s": -0.01}),
                           "b": pytest.approx({"points": 2, "ttft": 0.2, "tpot": 0.0, "ttft_lacks_s": 0.02})}}


def test_the_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = points_in(tmp_path, HEAD + STATIC + SERVED + SERVED.replace("tpot_p50,0.013", "ttft_p50,0.032"))
    monkeypatch.setattr(serving_points, "shipped", lambda: small)
    out = tmp_path / "v"
    assert sim(["validate", "serving", "--out", str(out), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert (out / "validate.txt").read_text() in text
    assert "measured 1: a source, commit x, MIT" in text
    assert "simulated: device a100-80gb: fitted" in text
    found = json.loads((out / "validate.json").read_text())
    assert found["fitted"] == "nothing"
    assert [p["point"] for p in found["points"]] == ["one", "two"]
    assert len((out / "points.csv").read_text().splitlines()) == 1 + 1 + 2 * 2
    assert (out / "validate.png").stat().st_size > 10_000
    assert validate_serving.runs_of(small) == 1 + 2 * 4 + 2


@pytest.mark.parametrize(("arguments", "said"), [
    (["--data", "{tmp}"], "has no blis_vllm_ground_truth_h100.csv"),
    (["--jitters", "3"], "--jitters: has no effect"),
    (["--ingredients"], "--ingredients: has no effect"),
])
def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                                       said: str) -> None:
    arguments = [a.format(tmp=tmp_path) for a in arguments]
    assert sim(["validate", "serving", *arguments, "--out", str(tmp_path / "never"), "--quiet"]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1
    assert not (tmp_path / "never").exists()
