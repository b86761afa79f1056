"""Small inputs that once gave wrong answers, each with the right one and its arithmetic (the READMEs beside them).

The files stand beside a checkout, in ``../shared/cases``; where they are not, these tests skip.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bullet.cli.profile import main as profile
from bullet.cli.sim import main as sim

CASES = Path(__file__).parents[2] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not beside this checkout")


class Run:
    """One command into a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys, self.number = folder, capsys, 0

    def __call__(self, case: str, *words: str, policy: str = "vllm-2048", arrivals: tuple[str, ...] = ("--arrivals", "recorded"),
                 ) -> tuple[int, dict[str, float], str]:
        """Exit status, summary (empty where there is none) and everything printed."""
        self.number += 1
        out = self.folder / str(self.number)
        told = [str(CASES / case / word) if (CASES / case / word).is_file() else word for word in words]
        code = sim(["run", *told, *arrivals, "--policy", policy, "--no-report", "--quiet", "--out", str(out)])
        captured = self.capsys.readouterr()
        summary = out / "summary.json"
        return code, json.loads(summary.read_text()) if summary.is_file() else {}, captured.out + captured.err


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capsys)


def refused(result: tuple[int, dict[str, float], str], words: str) -> None:
    code, summary, text = result
    assert code == 2
    assert not summary
    assert text.count("\n") == 1
    assert re.search(words, text), text


def kv_tokens(summary: dict[str, float]) -> float:
    return summary["kv_blocks"] * 16


def test_float32_is_served_in_16_bits(run: Run) -> None:
    """13.6 GiB, 115,520 tokens. (TPOT 12.83 ms in the README was of a reader that dropped the two norms of queries and keys: two
    more kernels a layer.)"""
    code, summary, text = run("float32-checkpoint", "--model", "olmo2-7b-float32.json", "--trace", "trace.csv")
    assert code == 0
    assert kv_tokens(summary) == 115_520
    assert summary["mean_tpot_ms"] == pytest.approx(12.83, rel=0.01)
    assert summary["mean_ttft_ms"] == pytest.approx(122.3, rel=0.01)
    assert "float32 checkpoint, served in 16 bits" in text
    assert re.search(r"7\.298? B parameters, 13\.\d+ GiB", text)


def test_linear_attention_is_refused(run: Run) -> None:
    refused(run("hybrid-linear-layers", "--model", "qwen3.8-27b.json", "--trace", "trace.csv"), "linear_attention.*not modelled")


def test_routed_experts_are_counted(run: Run) -> None:
    code, summary, text = run("moe-routed-experts", "--model", "deepseek-moe-16b.json", "--trace", "trace.csv")
    assert (code, kv_tokens(summary)) == (0, 184_896)
    assert re.search(r"16\.[34]\d* B parameters, 30\.5 GiB of weights, 224 KiB", text)
    for cards in ("1", "2"):
        refused(run("moe-routed-experts", "--model", "glm-4.5-air.json", "--trace", "trace.csv", "--set",
                    f"device.tensor_parallel={cards}"), "199.0 GiB of weights.*leave no room")
    code, _, text = run("moe-routed-experts", "--model", "glm-4.5-air.json", "--trace", "trace.csv", "--set",
                        "device.tensor_parallel=4")
    assert code == 0
    assert re.search(r"106\.\d+ B parameters|107 B parameters", text)


def test_a_plain_mlp_has_two_matrices(run: Run) -> None:
    code, summary, text = run("nongated-mlp", "--model", "pythia-6.9b.json", "--trace", "trace.csv")
    assert (code, kv_tokens(summary)) == (0, 117_200)
    assert re.search(r"6\.8[56]\d* B parameters", text)
    assert summary["mean_tpot_ms"] < 0.8 * 15.28


def test_embeddings_are_tied_where_the_architecture_ties_them(run: Run) -> None:
    code, summary, _ = run("tied-by-default", "--model", "gemma-7b.json", "--gpu", "rtx4090", "--trace", "trace.csv")
    assert (code, kv_tokens(summary)) == (0, 8_640)
    assert summary["mean_ttft_ms"] == pytest.approx(183, rel=0.01)


def test_yarn_widens_the_context(run: Run) -> None:
    code, summary, _ = run("yarn-context", "--model", "qwen2.5-7b-yarn.json", "--trace", "trace.csv")
    assert (code, summary["completed"], summary["rejected"]) == (0, 2, 0)
    code, summary, _ = run("yarn-context", "--model", "qwen2.5-7b-yarn.json", "--trace", "trace.csv", "--max-model-len", "32768")
    assert (code, summary["completed"], summary["rejected"]) == (0, 1, 1)


def test_small_models_are_warned_about_and_host_time_can_be_set(run: Run) -> None:
    model = ("--model", "qwen3-0.6b.json", "--trace", "short.csv")
    code, summary, text = run("small-model-host-floor", *model, policy="vllm-8192")
    assert code == 0
    assert re.search(r"host time.*0|host_step_s", text)
    code, slower, text = run("small-model-host-floor", *model, "--set", "device.host_step_s=0.0017", policy="vllm-8192")
    assert code == 0
    assert slower["mean_tpot_ms"] - summary["mean_tpot_ms"] == pytest.approx(1.7, abs=0.05)
    assert "host" in text


def test_a_fit_of_another_gpu_is_refused_and_of_another_model_labelled(tmp_path: Path, run: Run,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    fitted = tmp_path / "refit"
    assert profile(["fit", "--gpu", "a100-80gb", "--out", str(fitted)]) == 0
    capsys.readouterr()
    trace = ("--trace", "azure-code", "--rate", "5", "--num-requests", "20")
    refused(run("fit-of-another", "--gpu", "h100", "--device-model", str(fitted), *trace, arrivals=()),
            "a100-80gb.*h100|h100.*a100-80gb")
    small = str(CASES / "small-model-host-floor" / "qwen3-0.6b.json")
    code, _, text = run("fit-of-another", "--model", small, "--device-model", str(fitted), *trace, arrivals=())
    assert code == 0
    assert "on llama-3.1-8b's shapes" in text
    raw = json.loads((fitted / "fit.json").read_text())
    for name in ("gpu", "model"):
        raw["notes"].pop(name)
    (fitted / "fit.json").write_text(json.dumps(raw))
    code, _, text = run("fit-of-another", "--device-model", str(fitted), *trace, arrivals=())
    assert code == 2 or "unknown" in text


def test_the_head_of_a_trace_can_be_left_out(run: Run) -> None:
    burst = ("--trace", "burst.csv", "--num-requests", "150", "--window", "151:300")
    head = run("rampup-head", *burst[:4])[2]
    assert re.search(r"offered load: 0\.0\d of capacity: policies will hardly differ", head), head
    # The README's figures are of bullet's earlier defaults, and 140 of a device that chose a GEMM's tile for the whole card.
    earlier = ("--set", f"policy.options.decode_floor={1 / 9}", "--set", "policy.options.hand_over=batch")
    found = {policy: run("rampup-head", *burst, *(earlier if policy == "bullet" else ()), policy=policy)[1]["mean_ttft_ms"]
             for policy in ("bullet", "vllm-1024", "naive")}
    assert found == {policy: pytest.approx(ms, abs=1) for policy, ms in (("bullet", 138), ("vllm-1024", 169), ("naive", 369))}


def test_failed_rows_are_left_out_when_asked(run: Run) -> None:
    refused(run("rampup-head", "--trace", "with_fails.csv"), "--skip-failed")
    code, summary, text = run("rampup-head", "--trace", "with_fails.csv", "--skip-failed")
    assert (code, summary["offered"]) == (0, 3)
    assert "1 failed" in text or "failed: 1" in text or re.search(r"\b1\b.*failed", text)


def test_a_unit_that_nothing_states_is_asked_about(run: Run) -> None:
    refused(run("trace-ms-hash-ids", "--trace", "mooncake.jsonl"), "arrival_unit")
    code, _, text = run("trace-ms-hash-ids", "--trace", "mooncake.jsonl", "--format", "mooncake")
    assert code == 0
    assert "15" in text
    assert "0.42" in text or "0.53" in text
    code, _, _ = run("trace-ms-hash-ids", "--trace", "bailian.jsonl")
    assert code == 0


def test_the_engines_own_count_stands_for_the_prompt(run: Run) -> None:
    """``input_tokens`` is what follows the shared prefix: server_input_tokens, the engine's count, sums to 52,428. Said,
    not silent."""
    code, summary, text = run("trace-prefix-column", "--trace", "trace.csv")
    assert code == 0
    assert "server_input_tokens stands for the prompt in 12 of 12 rows" in text
    assert summary["total_input_tokens"] == 52_428
    assert summary["mean_ttft_ms"] == pytest.approx(353, abs=1)
    assert summary["mean_tpot_ms"] == pytest.approx(28.4, abs=0.1)
    code, chosen, _ = run("trace-prefix-column", "--trace", "trace.csv", "--set",
                          "workload.prompt_column=prefix_length+input_tokens")
    assert code == 0
    assert chosen["total_input_tokens"] == 12 * 4096 + 3_060


def test_objectives_are_printed_in_seconds_and_can_be_absolute(run: Run) -> None:
    trace = ("--trace", "trace.jsonl", "--set", "workload.arrival_unit=ms")
    code, _, text = run("user-trace-slo", *trace, policy="bullet")
    assert code == 0
    assert re.search(r"12\.9|12\.87", text)
    assert re.search("default|ShareGPT", text)
    code, _, text = run("user-trace-slo", *trace, "--ttft", "500ms", "--tpot", "30ms", policy="bullet")
    assert code == 0
    assert re.search(r"0\.5 s|500 ms", text)
