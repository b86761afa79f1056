"""A CPU's sweep to step times: by hand from made-up rows, through the files, into a simulation."""

import json
from pathlib import Path

import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.cli.profile import main as profile
from bullet.cli.sim import main as sim
from bullet.devices.measured import MeasuredDevice, StepProfile
from bullet.errors import ProfileError
from bullet.profiles import step_times as fit_steps
from bullet.profiles.journal import Journal, read_journal
from bullet.results.folder import load_run

TINY = get_model("tiny")  # 4 layers
WHOLE, BY_LAYER, ITERATION = fit_steps.ENGINE_PHASES


def row(op: str, tokens: int, batch: int, context: int, seconds: float, number: int = 0, sms: int = 1) -> dict[str, object]:
    return {"id": f"{op}|{tokens}|{batch}|{context}|{number}", "kind": "solo", "op": op, "tokens": tokens, "batch": batch,
            "context_tokens": context, "backend": "cpu", "partition": "none", "lane": "full", "sms": sms, "device_sms": 1,
            "corunner": "idle", "median_s": seconds, "p20_s": 0.9 * seconds, "p80_s": 1.1 * seconds, "samples": 7,
            "measured_at": "2026-11-30", "source": "measured", "gpu": "CPU, no partition", "model": "tiny", "dtype": "float32",
            "torch": "2.13.0", "order": number, "run": 0}


def made_rows() -> list[dict[str, object]]:
    """A prefill of n tokens takes 1 ms + n x 0.1 ms and 2 us a query-key pair of its past; a launch 0.5 ms, the head 0.2 ms; an
    iteration of b over c 2 ms + b x 0.3 ms + b c x 1 us."""
    rows = [row(WHOLE, n, 1, 0, 1e-3 + n * 1e-4) for n in (1, 16, 64, 256)]
    rows += [row(WHOLE, 64, 1, past, 1e-3 + 64 * 1e-4 + 64 * past * 2e-6) for past in (128, 256)]
    rows += [row(BY_LAYER, n, 1, 0, 1e-3 + n * 1e-4 + 3 * 5e-4) for n in (16, 64)]
    rows += [row(ITERATION, b, b, c, 2e-3 + b * 3e-4 + b * c * 1e-6) for b in (1, 4, 16) for c in (16, 64, 192)]
    return [*rows, row("gemm_lm_head", 1, 1, 0, 2e-4), row("engine_prefill_layer", 64, 1, 0, 1.5e-3),
            row("engine_decode_layer", 4, 4, 64, 7e-4)]


def written(folder: Path, rows: list[dict[str, object]]) -> Path:
    with Journal(folder / "samples.jsonl", {"gpu": "CPU, no partition", "source": "measured"}) as journal:
        for number, one in enumerate(rows):
            journal.append({**one, "order": number, "id": f"{one['id']}|{number}"})
    return folder


def test_step_times_come_back_from_rows(tmp_path: Path) -> None:
    _, rows, _ = read_journal(written(tmp_path, made_rows()) / "samples.jsonl")
    found = fit_steps.profile_of(rows, TINY)
    assert (found.hardware, found.partition, found.model) == ("CPU, no partition", "none: lanes take turns", "tiny")
    assert found.prefill_s == pytest.approx([1.1e-3, 2.6e-3, 7.4e-3, 26.6e-3])
    assert found.launch_s == pytest.approx(5e-4)
    assert found.head_s == pytest.approx(2e-4)
    assert found.pair_s == pytest.approx(2e-6)
    device = MeasuredDevice(found.shown(get_gpu("a100-80gb")), TINY, get_gpu("a100-80gb"))
    for batch, context in ((1, 16), (4, 100), (10, 192)):
        assert device.solo_seconds(device.decode_work(batch, batch * context), 12) == pytest.approx(
            2e-3 + batch * 3e-4 + batch * context * 1e-6)
    # 2 of 4 layers of 40 tokens: a launch, half of what is neither launch nor head; then the other half with the head.
    half = [device.solo_seconds(device.prefill_work([(40, 0)], 2, logits_seqs=last), 108) for last in (0, 1)]
    assert half == pytest.approx([5e-4 + (5e-3 - 7e-4) / 2, 5e-4 + (5e-3 - 7e-4) / 2 + 2e-4])
    past = device.prefill_work([(40, 100)], 4, logits_seqs=1)
    assert device.solo_seconds(past, 108) == pytest.approx(5e-3 + 40 * 100 * 2e-6)


def test_the_median_of_several_rows_counts_and_threads_fewer_than_all_do_not(tmp_path: Path) -> None:
    rows = [*made_rows(), row(WHOLE, 16, 1, 0, 9e-3, 1), row(WHOLE, 16, 1, 0, 3e-3, 2), row(WHOLE, 1, 1, 0, 9.0, 3, sms=2)]
    assert fit_steps.profile_of(rows, TINY).prefill_s[:2] == pytest.approx([1.1e-3, 3e-3])


def test_layers_explain_their_share_of_a_step() -> None:
    rows = made_rows()
    found = {(op, shape): (parts, whole) for op, shape, parts, whole in
             fit_steps.explained(rows, fit_steps.profile_of(rows, TINY), TINY)}
    assert found[WHOLE, (64, 1, 0)] == pytest.approx((4 * 1.5e-3 + 2e-4, 7.4e-3))
    assert found[ITERATION, (4, 4, 64)] == pytest.approx((4 * 7e-4 + 2e-4, 2e-3 + 4 * 3e-4 + 256e-6))


def test_from_a_sweeps_folder_to_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile"
    assert profile(["fit", str(written(tmp_path / "sweep", made_rows())), "--out", str(out)]) == 0
    assert "4 prefills and 3 x 3 decode iterations of the engine, interpolated; nothing is fitted" in capsys.readouterr().out
    assert StepProfile.from_json(out / "steps.json").turns
    page = (out / "SOURCE.md").read_text()
    assert "A CPU has no SMs and no partition, so no coefficients" in page
    assert "| engine_prefill | 64x1@0 | 6.20 | 7.40 | 84 % |" in page
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.0,64,3\n1.0,16,1\n")
    run = ["run", "--trace", str(tmp_path / "t.csv"), "--arrivals", "recorded", "--no-report", "--quiet",
           "--device-model", str(out)]
    assert sim([*run, "--model", "tiny", "--policy", "vllm-256", "--out", str(tmp_path / "run")]) == 0
    assert "device model: measured on CPU, no partition" in capsys.readouterr().out
    # One request at a time, and times to first token are the prefills' own: 7.4 and 2.6 ms.
    found = load_run(tmp_path / "run").requests
    assert (found["first_token_s"] - found["arrival_s"]).tolist() == pytest.approx([7.4e-3, 2.6e-3])
    assert sim([*run, "--model", "tiny", "--policy", "bullet", "--out", str(tmp_path / "both")]) == 0
    assert sim([*run, "--policy", "vllm-256", "--out", str(tmp_path / "no")]) == 2
    assert "step times of model tiny, not of llama-3.1-8b" in capsys.readouterr().err
    assert sim([*run, "--model", "tiny", "--set", "device.tensor_parallel=2", "--out", str(tmp_path / "no")]) == 2
    assert "step times of one device" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [
    ({"launch_s": -1.0}, "launch_s: must be a number, 0 or more"), ({"pair_s": "x"}, "pair_s = 'x': must be a number"),
    ({"head_s": float("inf")}, "Infinity is no number"), ({"turns": "no"}, "turns = 'no': must be true or false"),
    ({"prefill_tokens": [64, 16, 1, 256]}, "prefill_tokens: must be two or more whole numbers, ascending"),
    ({"prefill_tokens": [1, 1, 1, 1]}, "prefill_tokens: must be"),
    ({"contexts": ["a", "b", "c"]}, "contexts[0] = 'a': must be a whole number"),
    ({"prefill_s": [1.0, 2.0]}, "prefill_s: must be a positive time for each"),
    ({"decode_s": [[1.0] * 3, [1.0] * 3, [1.0, 1.0, 0.0]]}, "decode_s: must be a positive time for each"),
    ({"prefill_sms": []}, "prefill_sms: must be"),
    ({"decode_sms": [[1]]}, "decode_sms[0] = [1]: must be a list of length 2"),
    ({"decode_sms": [[1, -3.0]]}, "decode_sms: must be"), ({"prefill_sms": [[7, 1.0]]}, "the last of num_sms"),
    ({"corun": [[1]]}, "corun[0] = [1]: must be a list of length 4"),
    ({"model": 3}, "model = 3: must be text"), (None, "must hold one JSON object")])
def test_step_times_that_cannot_be_are_one_line_with_the_file(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object] | None, message: str) -> None:
    good = json.loads(fit_steps.profile_of(made_rows(), TINY).to_json())
    (tmp_path / "steps.json").write_text(json.dumps([] if change is None else {**good, **change}))
    run = ["run", "--trace", "azure-code", "--num-requests", "2", "--model", "tiny", "--policy", "vllm-256", "--no-report"]
    assert sim([*run, "--quiet", "--device-model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{tmp_path / 'steps.json'}: " in err
    assert message in err


@pytest.mark.parametrize(("op", "message"), [
    (WHOLE, "0 sizes of engine_prefill without a past, at least 2 needed"),
    (ITERATION, "0 batches of engine_decode"), (BY_LAYER, "0 sizes of engine_prefill_by_layer that engine_prefill has too"),
    ("gemm_lm_head", "0 rows of gemm_lm_head of one token")])
def test_too_few_rows_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, message: str) -> None:
    rows = [r for r in made_rows() if r["op"] != op]
    with pytest.raises(ProfileError, match=message):
        fit_steps.profile_of(rows, TINY)
    assert profile(["fit", str(written(tmp_path / "few", rows)), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "sweep the CPU again, with more --budget-s" in err


def test_what_makes_no_sense_of_a_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, made_rows())
    for flags in (["--implementation", "torch"], ["--borrow", "gemm"], ["--sm-data", str(tmp_path)], ["--fit-on", "gemm=x"]):
        assert profile(["fit", str(folder), *flags]) == 2
        assert "a CPU's rows are not fitted but interpolated" in capsys.readouterr().err
