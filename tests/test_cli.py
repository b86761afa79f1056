"""The command as a user meets it: what it writes, and one clear line for every mistake."""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bullet import files
from bullet.cli import common, lifecycle, sim
from bullet.results.folder import load_run

FAST = ["--num-requests", "40", "--quiet"]


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs, expects status 2 and exactly one line of error; returns it."""
    try:
        code = sim.main(list(arguments))
    except SystemExit as exc:
        code = exc.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("bullet-sim")
    return lines[0]


def test_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert sim.main(["run", "--policy", "bullet", "--trace", "azure-code", "--rate", "5", *FAST, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trace azure-code: 8,819 rows, built in (Azure/AzurePublicDataset, CC-BY-4.0)\n  requests: 40")
    assert ("simulated on A100-80GB (device model: fitted), llama-3.1-8b; azure-code, 5 req/s, 40 requests"
            ) in " ".join(text.split())
    assert max(map(len, text[:text.index("written to")].splitlines())) <= 80
    assert str(out) in text
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert names == {"config.toml", "requests.parquet", "steps.parquet", "summary.json", "timing.json", "trace.json",
                     "report.html", "plots/latency_cdf.png", "plots/sm_share.png"}
    _, summary, steps, requests = load_run(out)
    assert summary["complete"] is True
    assert summary["offered"] == summary["completed"] == len(requests) == 40
    assert len(steps) == summary["steps"]
    json.loads((out / "trace.json").read_text())
    # The stored configuration runs again to the same rows.
    again = tmp_path / "again"
    assert sim.main(["run", "--config", str(out / "config.toml"), "--quiet", "--no-report", "--out", str(again)]) == 0
    assert (again / "requests.parquet").read_bytes() == (out / "requests.parquet").read_bytes()
    assert (again / "steps.parquet").read_bytes() == (out / "steps.parquet").read_bytes()
    assert not (again / "report.html").exists()


def test_compare_gives_every_policy_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cmp"
    assert sim.main(["compare", "--policies", "vllm-1024,static-96", "--trace", "sharegpt", "--rate", "9", *FAST, "--out",
                    str(out)]) == 0
    text = capsys.readouterr().out
    table = text[text.index("simulated on"):text.index("written to")]
    blocks = table.count("\nsystem ")
    systems = table[:table.index("share of the fluid bound")]
    assert systems.count("vllm-1024") == systems.count("static-96") == blocks == 2
    assert (out / "comparison.txt").read_text().strip() == table.strip()
    tables = [load_run(out / name)[3] for name in ("vllm-1024", "static-96")]
    keys = [sorted(zip(t["id"].tolist(), t["arrival_s"].tolist(), t["prompt_tokens"].tolist(), strict=True)) for t in tables]
    assert keys[0] == keys[1]
    assert {s["system"] for s in json.loads((out / "comparison.json").read_text())} == {"vllm-1024", "static-96"}
    assert (out / "report.html").read_text().count("data:image/png;base64") == 4  # bars, CDFs, SMs of each


def test_a_comparison_hands_an_option_to_the_policies_that_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"  # takes whatever it is handed
    mine.write_text("from bullet.policies.vllm import Vllm\nclass Mine(Vllm):\n    def __init__(self, context):\n"
                    "        assert set(context.options) == {'max_num_seqs', 'layers_per_step'}\n"
                    "        super().__init__(type(context)(context.model, context.gpu, context.splits, 1.0), 1024)\n")
    out = tmp_path / "cmp"
    assert sim.main(["compare", "--policies", f"sglang-512,vllm-512,static-96,{mine}:Mine", *FAST, "--no-report", "--out",
                    str(out), "--set", "policy.options.max_num_seqs=3", "--set", "policy.options.layers_per_step=8"]) == 0
    given = {name: load_run(out / name).config.policy.options for name in ("sglang-512", "vllm-512", "static-96")}
    assert given == {"sglang-512": {}, "vllm-512": {"max_num_seqs": 3}, "static-96": {"layers_per_step": 8}}
    assert load_run(out / "vllm-512").steps["decode_seqs"].max() == 3
    told = " ".join(capsys.readouterr().out.split())  # lines are filled to the width
    assert f"policy.options.max_num_seqs is an option of vllm-512, {mine}:Mine only" in told


def test_list_shows_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main(["list"]) == 0
    text = capsys.readouterr().out
    for word in ("azure-code", "2048/1469/5188/7437", "bullet-literal", "sglang-N-mixed", "qwen3-32b", "h20", "srm-blind"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_shows_the_common_options_first(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                             ) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        sim.main([command, "--help"])
    text = capsys.readouterr().out
    places = [text.index(words) for words in ("common options:", "--trace", "--ttft TIME", "--gpu", "arrivals and objectives:",
                                              "reading a trace:", "--set", "--help", "examples:")]
    assert places == sorted(places)
    assert text[text.index("examples:"):].count(f"bullet-sim {command} ") == 3


@pytest.mark.parametrize(("arguments", "words"), [
    (["--rate", "0"], ["--rate", "0.0", "positive"]), (["--num-requests", "0"], ["--num-requests", "positive"]),
    (["--rate", "fast"], ["'fast' is not a number"]), (["--rate", "1_0"], ["'1_0' is not a number"]),
    (["--num-requests", "1_0"], ["'1_0' is not a whole number"]), (["--rate", "1e-300"], ["--rate", "too small"]),
    (["--set", "policy.options=3"], ["must be a table"]), (["--seed", str(2**63)], ["seed", "0 to 2^63 - 1"]),
    (["--policy", "bulet"], ["unknown policy 'bulet'", "vllm-N"]),
    (["--model", "gpt-9"], ["unknown model 'gpt-9'", "llama-3.1-8b"]), (["--gpu", "b300"], ["unknown gpu 'b300'", "h100"]),
    (["--trace", "azure"], ["unknown trace 'azure'", "azure-code"]),
    (["--set", "device.colour=1"], ["unknown key 'device.colour'"]),
    (["--set", "nonsense"], ["must read key.subkey=value"]), (["--set", "seed=1.5"], ["seed = 1.5", "a whole number"]),
    (["--set", "policy.options.knob=1"], ["no such option"]), (["--policy", "static-95"], ["static-95", "steps of 2"]),
    (["--set", "device.partition_step_sms=7"], ["partition step of 7"]), (["--config", "absent.toml"], ["absent.toml"]),
    (["--cv", "2"], ["--cv 2 has no effect on poisson"]), (["--time-scale", "2"], ["--time-scale 2 has no effect"]),
    (["--policy", "vllm-512", "--estimator", "oracle"], ["--estimator oracle has no effect", "vllm-512"]),
    (["--policies", "bullet"], ["--policies"]), (["--set", "device.kv_tokens=3"], ["device.kv_tokens = 3"]),
    (["--model", "llama-3.1-70b"], ["leave no room for KV"]), (["--arrivals", "recorded", "--rate", "3"], ["--time-scale"]),
    (["--trace", "sharegpt", "--arrivals", "recorded"], ["no arrival times"]), (["--frobnicate"], ["--frobnicate"]),
    (["--trace", "missing.csv"], ["missing.csv"])])
def test_a_users_mistake_is_one_clear_line(arguments: list[str], words: list[str], tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    line = failing(capsys, "run", *arguments, "--quiet", "--out", str(tmp_path / "o"))
    for word in words:
        assert word in line
    assert not (tmp_path / "o").exists()  # the same command, repaired, can use the folder


@pytest.mark.parametrize(("arguments", "words"), [
    (["--policies", "vllm-512,vllm-512"], ["each policy once"]), (["--policies", ","], ["each policy once"]),
    (["--policies", "vllm-512,nope"], ["unknown policy 'nope'"]), (["--policy", "vllm-512"], ["--policy"]),
    (["--set", "policy.name=bullet"], ["--policies"]),
    (["--policies", "bullet,vllm-512", "--set", "policy.options.knob=0.2"],
     ["policy.options.knob: bullet has no such option; it has: ", "policy.options.knob: vllm-512 has no such option"]),
    (["--policies", "bullet,vllm-512", "--set", "policy.options.max_num_seqs=8", "--set", "policy.options.knob=1"], ["knob"]),
    (["--policies", "bullet,vllm-512", "--set", "policy.options.max_num_seqs=many"], ["max_num_seqs = 'many'", "vllm-512"])])
def test_a_comparison_is_checked_whole_before_it_starts(arguments: list[str], words: list[str], tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    line = failing(capsys, "compare", *arguments, *FAST, "--out", str(tmp_path / "o"))
    for word in words:
        assert word in line
    assert not (tmp_path / "o").exists()


def test_recorded_arrivals_take_the_whole_trace_and_store_its_length(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(HEADER + "".join(f"{i},{50 + i},3\n" for i in range(7)))
    out, again = tmp_path / "o", tmp_path / "again"
    assert sim.main(["run", "--trace", str(trace), "--arrivals", "recorded", "--time-scale", "2", "--policy", "static-96",
                    "--quiet", "--no-report", "--out", str(out)]) == 0
    run = load_run(out)
    assert run.config.workload.num_requests == 7
    assert sorted(run.requests["arrival_s"].tolist()) == [i / 2 for i in range(7)]
    assert sim.main(["run", "--config", str(out / "config.toml"), "--quiet", "--no-report", "--out", str(again)]) == 0
    assert (again / "steps.parquet").read_bytes() == (out / "steps.parquet").read_bytes()


def test_default_folders_are_fresh_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.time, "strftime", lambda form: "then")
    for _ in range(2):
        assert sim.main(["run", "--policy", "vllm-512", "--num-requests", "3", "--quiet", "--no-report"]) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["vllm-512-azure-code-then", "vllm-512-azure-code-then-2"]


HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("t.csv", b"arrival_s,prompt_tokens\n0,1\n", ["output tokens"]),
    ("t.csv", (HEADER + "0,10,5\n1,ten,5\n").encode(), ["t.csv:3", "prompt_tokens", "'ten'"]),
    ("t.csv", (HEADER + "0,-4,5\n").encode(), ["t.csv:2", "-4", "1 to 10^9"]),
    ("t.csv", (HEADER + "0,4,0\n").encode(), ["t.csv:2", "1 to 10^9"]),
    ("t.csv", (HEADER + "5,4,5\n4,4,5\n").encode(), ["t.csv:3", "decrease"]),
    ("t.csv", b"", ["t.csv", "empty"]), ("t.csv", HEADER.encode(), ["no requests"]),
    ("t.csv.gz", gzip.compress((HEADER + "0,4,5\n").encode(), mtime=0)[:-9], ["t.csv.gz", "truncated"]),
    ("t.csv", HEADER.encode() + b"0,4,\xff\n", ["t.csv:2", "UTF-8"])])
def test_a_broken_trace_names_file_and_line(name: str, content: bytes, words: list[str], tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    line = failing(capsys, "run", "--trace", str(path), "--arrivals", "recorded", "--quiet", "--out", str(tmp_path / "o"))
    for word in words:
        assert word in line
    assert not (tmp_path / "o").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    assert "not an empty folder" in failing(capsys, "run", *FAST, "--out", str(out))
    assert [p.name for p in out.iterdir()] == ["precious.txt"]
    file = tmp_path / "file"
    file.write_text("x")
    assert "file" in failing(capsys, "run", *FAST, "--out", str(file / "below"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in failing(capsys, "run", *FAST, "--out", str(tmp_path / "o"))


STOPPING = """
from bullet.policies.vllm import Vllm
class Stop(Vllm):
    def __init__(self, context):
        super().__init__(context, 1024)
        self.asked = 0
    def next_step(self, lane, state, now_s):
        self.asked += 1
        if self.asked == 300:
            raise {error}
        return super().next_step(lane, state, now_s)
"""


def test_ctrl_c_keeps_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "stop.py"
    policy.write_text(STOPPING.format(error="KeyboardInterrupt"))
    out = tmp_path / "run"
    load = ["--rate", "5", "--num-requests", "100", "--quiet"]
    assert sim.main(["run", "--policy", f"{policy}:Stop", *load, "--out", str(out)]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"interrupted; rows so far are kept in {out}" in lines[0]
    _, summary, steps, requests = load_run(out)
    assert summary["complete"] is False
    assert summary["why"] == "interrupted"
    assert len(requests) == summary["offered"] == 100 == summary["finished"] + summary["rejected"] + summary["unfinished"]
    assert summary["unfinished"] > 0
    assert len(steps) >= 290
    assert not (out / "parts").exists()


@pytest.mark.parametrize(("number", "words"), [("SIGINT", "interrupted; rows so far"), ("SIGTERM", "stopped by SIGTERM; rows")])
def test_a_signal_stops_between_steps(number: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real signal, in the middle of a decision: the run ends at its next step, no request lost, no row twice."""
    policy = tmp_path / "stop.py"
    policy.write_text("import signal\n" + STOPPING.format(error="SystemExit").replace("raise SystemExit",
                                                                                     f"signal.raise_signal(signal.{number})"))
    out = tmp_path / "cmp"
    assert sim.main(["compare", "--policies", f"vllm-512,{policy}:Stop,vllm-1024", "--rate", "5", "--num-requests", "100",
                    "--quiet", "--no-report", "--out", str(out)]) == 128 + getattr(signal, number)
    assert words in capsys.readouterr().err
    stopped = next(p for p in out.iterdir() if p.name.endswith("Stop"))
    run = load_run(stopped)
    assert run.summary["why"] == "interrupted"
    assert len(run.steps) == 300  # the step that was being decided is the last
    assert sorted(run.requests["id"].tolist()) == list(range(100))
    assert load_run(out / "vllm-512").summary["complete"] is True
    assert not (out / "vllm-1024").exists()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_a_step_at_once_with_the_rows_there_are(number: str, tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Both in one decision, as if it never ended."""
    policy = tmp_path / "stop.py"
    twice = f"[signal.raise_signal(signal.{number}) for _ in range(2)]"
    policy.write_text("import signal\n" + STOPPING.format(error="SystemExit").replace("raise SystemExit", twice))
    assert sim.main(["run", "--policy", f"{policy}:Stop", "--rate", "5", "--num-requests", "100", "--quiet", "--no-report",
                    "--out", str(tmp_path / "run")]) == 128 + getattr(signal, number)
    assert "rows so far are kept" in capsys.readouterr().err
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 299
    assert run.summary["offered"] == 100


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_second_signal_does_not_break_the_line_about_the_first(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """The first comes while nothing runs (the report is drawn), the second while it is told what is kept."""
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def kept(args: argparse.Namespace, tell: Callable[[argparse.Namespace], str] = lifecycle.kept_text) -> str:
        signal.raise_signal(getattr(signal, number))
        return tell(args)

    monkeypatch.setattr("bullet.results.page.write_run_report", interrupted)
    monkeypatch.setattr(lifecycle, "kept_text", kept)
    before = signal.getsignal(signal.SIGINT)
    assert sim.main(["run", "--num-requests", "5", "--quiet", "--out", str(tmp_path / "o")]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_a_users_policy_is_theirs_to_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "stop.py"
    policy.write_text(STOPPING.format(error="ZeroDivisionError('mine')"))
    out = tmp_path / "run"
    line = failing(capsys, "run", "--policy", f"{policy}:Stop", "--num-requests", "100", "--quiet", "--out", str(out))
    assert f"{policy}:10: policy '{policy}:Stop': at t = 11.465377 s its next_step failed: ZeroDivisionError: mine" in line
    assert f"rows so far are kept in {out}/ (54 of 100 requests finished)" in line
    assert load_run(out).summary["why"].endswith("its next_step failed: ZeroDivisionError: mine")


def test_progress_counts_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(common, "progress_bar", lambda total, label, quiet: (seen.append, lambda: seen.append(-total)))
    assert sim.main(["run", "--policy", "vllm-512", "--num-requests", "9", "--set", "device.kv_tokens=3200", "--no-report",
                    "--out", str(tmp_path / "o")]) == 0
    assert seen == [1] * 9 + [-9]


def test_a_closed_pipe_is_no_error() -> None:
    code = "import sys; from bullet.cli.sim import main; sys.exit(main(['list']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
        assert child.wait() == 0


def test_a_stuck_policy_stops_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "lazy.py"
    policy.write_text("from bullet.state import Wait\nclass Lazy:\n    lanes = ('hybrid',)\n"
                      "    def __init__(self, context): pass\n    def next_step(self, lane, state, now_s): return Wait()\n"
                      "    def observe(self, step, elapsed_s): pass\n")
    line = failing(capsys, "run", "--policy", f"{policy}:Lazy", *FAST, "--out", str(tmp_path / "o"))
    assert "makes no progress" in line
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["complete"] is False


def test_help_teaches_by_example_without_heavy_imports() -> None:
    code = ("import sys; from bullet.cli.sim import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
            "print([m for m in ('numpy', 'pyarrow', 'matplotlib') if m in sys.modules])")
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text.strip().endswith("[]")
    assert text.count("\n  bullet-sim ") >= 5


@pytest.mark.parametrize(("answer", "words"), [
    ("None", "was answered None: must be a HybridStep or a Wait"), ("DecodeStep(108)", "must be a HybridStep or a Wait"),
    ("HybridStep(108, (Chunk(999, 5, 0),), False)", "cannot be carried out: KeyError"),
    ("HybridStep(108, (Chunk(head.id, 0, 0),), False)", "a chunk is empty"), ("HybridStep(108, (), False)", "an empty batch"),
    ("HybridStep(108, (Chunk(head.id, 10**6, 0),), False)", "runs over its prompt"),
    ("HybridStep(108.0, (Chunk(head.id, 10, 0),), False)", "HybridStep with sms = 108.0: must be a whole number"),
    ("HybridStep(108, (Chunk(head.id, 10.0, 0),), False)", "must be a tuple of Chunks of whole numbers"),
    ("HybridStep(108, (Chunk(head.id, 10, 0),), False, reason=None)", "reason = None: must be text"),
    ("HybridStep(108, (Chunk(head.id, 10, 0),), False, predicted_s=float('nan'))", "must be None or seconds, finite"),
    ("HybridStep(108, (Chunk(head.id, 10, 0),), False, target=(54.5, 'x'))", "must be None or a Partition of whole numbers"),
    ("HybridStep(108, (Chunk(head.id, 10, 0),), False, target=(2**40, 0))", "must be 0 to 108 SMs for each lane"),
    ("Wait('soon')", "a Wait with until_s = 'soon': must be None or a time in seconds"),
    ("Wait(published=0.1)", "must be None or a Published of numbers")])
def test_a_users_policy_that_answers_nonsense_is_told_what(answer: str, words: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "odd.py"
    policy.write_text("from bullet.state import Chunk, DecodeStep, HybridStep, Wait\nclass Odd:\n    lanes = ('hybrid',)\n"
                      "    def __init__(self, context): pass\n    def observe(self, step, elapsed_s): pass\n"
                      f"    def next_step(self, lane, state, now_s):\n        head = state.queue[0]\n        return {answer}\n")
    line = failing(capsys, "run", "--policy", f"{policy}:Odd", *FAST, "--out", str(tmp_path / "o"))
    assert words in line


@pytest.mark.parametrize(("prefill", "decode", "words"), [
    ("None", "Wait()", "prefill was answered None: must be a PrefillStep or a Wait"),
    ("PrefillStep(55, 32, (head.id,))", "Wait()", "asked for 55 SMs: the device has 108, and a partition 2 to 106 in steps of 2"),
    ("PrefillStep(54, 32, (head.id,))", "DecodeStep(53)", "asked for 53 SMs"),
    ("PrefillStep(54, 32.0, (head.id,))", "Wait()", "a PrefillStep with layers = 32.0: must be a whole number"),
    ("PrefillStep(54, 32, (head.id,))", "DecodeStep(54, preempt=(7, 7))", "must be a tuple of request ids, none twice")])
def test_a_users_two_lanes_hold_what_the_mechanism_grants(prefill: str, decode: str, words: str, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "odd.py"
    policy.write_text("from bullet.state import DecodeStep, PrefillStep, Wait\nclass Odd:\n    lanes = ('prefill', 'decode')\n"
                      "    def __init__(self, context): pass\n    def observe(self, step, elapsed_s): pass\n"
                      "    def next_step(self, lane, state, now_s):\n"
                      "        head = state.queue[0] if len(state.queue) else None\n"
                      f"        return {prefill} if lane == 'prefill' else {decode}\n")
    line = failing(capsys, "run", "--policy", f"{policy}:Odd", *FAST, "--out", str(tmp_path / "o"))
    assert words in line


@pytest.mark.parametrize(("before", "after"), [("", "1"), ("import numpy", None),
                                               ("os.environ['OPENBLAS_NUM_THREADS'] = '3'", "3")])
@pytest.mark.parametrize("command", ["sim", "run", "profile"])
def test_a_command_loads_numpy_with_one_blas_thread(command: str, before: str, after: str | None) -> None:
    """Set where it still has an effect and the user has not; never by the library."""
    program = (f"import os; os.environ.pop('OPENBLAS_NUM_THREADS', None); {before or 'pass'}\n"
               f"import bullet\nassert os.environ.get('OPENBLAS_NUM_THREADS') in (None, '3')\n"
               f"from bullet.cli.{command} import main\n"
               f"try: main(['--help'])\nexcept SystemExit: print(os.environ.get('OPENBLAS_NUM_THREADS'))")
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[-1] == str(after)


@pytest.mark.parametrize(("flags", "words"), [
    (["--ttft", "500"], "'500' is not a time with its unit (500ms, 0.5s"),
    (["--concurrency", "4", "--rate", "3"], "--rate 3 has no effect on closed arrivals"),
    (["--concurrency", "0"], "workload.concurrency (--concurrency) = 0: must be a number of clients"),
    (["--concurrency", "4", "--arrivals", "poisson"], "must be none with poisson arrivals"),
    (["--ttft", "500ms", "--ttft-per-token", "3ms"], "must be the only TTFT objective"),
    (["--seeds", "1"], "--seeds 1: must be 2 to 10,000")])
def test_objectives_loops_and_seeds_that_cannot_be(flags: list[str], words: str, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = sim.main(["run", *flags, *FAST, "--out", str(tmp_path / "x")])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_absolute_objectives_and_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy is shown the absolute TTFT; both readings are one."""
    out = tmp_path / "run"
    assert sim.main(["run", "--ttft", "500ms", "--tpot", "30ms", "--concurrency", "4", "--think-time", "1s", *FAST, "--out",
                     str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "closed loop of 4 clients that think 1 s" in text
    assert "TTFT <= 0.5 s and TPOT <= 0.03 s" in text
    config, summary, _, requests = load_run(out)
    assert (config.slo.ttft_s, config.slo.tpot_s, config.slo.ttft_s_per_token, config.slo.by_default) == (0.5, 0.03, None, None)
    assert set(requests["ttft_slo_per_request_s"].tolist()) == set(requests["ttft_slo_mean_length_s"].tolist()) == {0.5}
    assert (summary["ttft_slo_s"], summary["tpot_slo_s"], summary["max_concurrency"]) == (0.5, 0.03, 4)
    met = summary["slo_attainment_mean_length"]
    assert summary["request_goodput"] == pytest.approx(met * summary["offered"] / summary["duration"])
    again = tmp_path / "again"
    assert sim.main(["run", "--config", str(out / "config.toml"), "--quiet", "--no-report", "--out", str(again)]) == 0
    assert (again / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
