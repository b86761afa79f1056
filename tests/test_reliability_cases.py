"""Small inputs that once broke a command, as a user gives them: what no other test has of its kind.

The rest stand where they belong: signals, output, folders and users' policies in tests/test_lifecycle.py, code in data in
tests/test_untrusted.py, archives and odd values in the two fuzz tests, a long queue in tests/policies/test_bullet_long_queue.py.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bullet.api import simulate
from bullet.cli.profile import main as profile
from bullet.cli.run import main as real
from bullet.cli.sim import main as sim
from bullet.results.folder import load_run

ROOT = str(Path(__file__).parents[1])
DEEP = "[" * 100_000
HUGE = "9" * 6000


def told(capsys: pytest.CaptureFixture[str], status: int) -> str:
    """The one line of a command that was refused."""
    err = capsys.readouterr().err
    assert status == 2
    assert err.count("\n") == 1, err
    assert err[:-1].isprintable()
    assert len(err) < 600
    return err


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of a sweep of the simulated card, its header first."""
    out = tmp_path_factory.mktemp("sweep") / "s"
    assert profile(["sweep", "--device", "simulated", "--splits", "112+20", "--budget-s", "30", "--out", str(out)]) == 0
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def written(folder: Path, lines: list[str]) -> str:
    folder.mkdir()
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.parametrize("kind", ["anchor", "solo"])
@pytest.mark.parametrize("value", [0.0, -0.0, -1e-3, 1e300])
def test_a_median_that_no_kernel_takes_is_refused(kind: str, value: float, sweep: list[dict[str, Any]], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A zero anchor was divided by."""
    rows = [{**row, "median_s": value} if row.get("kind") == kind else row for row in sweep]
    assert rows != sweep
    folder = written(tmp_path / "s", [json.dumps(row) for row in rows])
    capsys.readouterr()
    for command in (["table", folder], ["fit", folder, "--out", str(tmp_path / "f")]):
        assert "samples.jsonl: line " in told(capsys, profile(command))
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("value", [DEEP, HUGE, "1e999", "-" * 5000, '{"a": ' * 500])
@pytest.mark.parametrize("where", ["table", "fit", "recheck", "--device-model", "--model", "--config", "--set", "sweep",
                                   "--from"])
def test_a_deep_or_huge_value_is_one_line(where: str, value: str, sweep: list[dict[str, Any]], tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "o")]
    capsys.readouterr()
    if where in ("table", "fit"):
        lines = [json.dumps(row) for row in sweep]
        folder = written(tmp_path / "s", [*lines[:3], value, *lines[3:]])
        status = profile([where, folder, *(out if where == "fit" else [])])
    elif where == "recheck":
        (tmp_path / "r.jsonl").write_text(value + "\n")
        status = real(["recheck", str(tmp_path / "r.jsonl")])
    elif where == "sweep":
        (tmp_path / "a.toml").write_text(f"[axes]\nseed = {value}\n")
        status = sim(["sweep", str(tmp_path / "a.toml"), *out])
    elif where == "--from":
        (tmp_path / "x" / "real" / "mine").mkdir(parents=True)
        (tmp_path / "x" / "real" / "mine" / "config.toml").write_text(f"seed = {value}\n")
        (tmp_path / "x" / "steps.json").write_text(value)
        status = real(["validate", "--from", str(tmp_path / "x")])
    else:
        names = {"--device-model": "fit.json", "--model": "config.json", "--config": "c.toml"}
        path = tmp_path / names.get(where, "none")
        path.write_text(f"seed = {value}\n" if where == "--config" else value)
        given = {"--device-model": str(tmp_path), "--set": f"seed={value}"}.get(where, str(path))
        status = sim(["run", "--num-requests", "3", "--policy", "vllm-512", where, given, *out])
    told(capsys, status)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("key", ["slo.tpot_s", "slo.ttft_s", "slo.ttft_s_per_token", "policy.estimator_error", "device.noise_std",
                                 "device.publish_delay_s", "device.reconfigure_s", "device.host_step_s", "workload.cv",
                                 "workload.time_scale", "workload.rate_req_per_s", "device.contention_scale",
                                 "device.kv_tokens", "workload.num_requests", "seed", "max_model_len"])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e-320", "nan", "inf", "0", "-1", "9223372036854775807"])
def test_a_number_beyond_all_use_is_refused_or_runs(key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                    ) -> None:
    """1e308 seconds of SLO were an error after the whole run. What is taken gives finite figures."""
    status = sim(["run", "--num-requests", "3", "--policy", "bullet", "--quiet", "--no-report", "--out", str(tmp_path / "o"),
                  "--set", f"{key}={value}"])
    if status == 0:
        assert load_run(tmp_path / "o").summary["complete"] is True
        return
    told(capsys, status)
    assert not (tmp_path / "o").exists()


def limited(bytes_: int, tmp_path: Path, *command: str) -> tuple[int, str]:
    """A command of its own in so much address space; killed where it spins."""
    run = subprocess.run([sys.executable, "-c", "import sys; from bullet.cli.sim import main; sys.exit(main())", *command],
                         env={**{k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}, "PYTHONPATH": ROOT},
                         cwd=tmp_path, text=True,
                         capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_)))
    return run.returncode, run.stderr


@pytest.mark.parametrize("megabytes", [330, 400, 700])
def test_little_address_space_ends_or_works(megabytes: int, tmp_path: Path) -> None:
    """OpenBLAS asked for ever where its threads had no memory."""
    limited(megabytes << 20, tmp_path, "run", "--quiet", "--policy", "vllm-1024", "--num-requests", "5", "--out", "o")


def test_a_table_that_unpacks_to_a_thousand_times_its_size_costs_no_memory(tmp_path: Path) -> None:
    """400 MB of blank lines in 388 kB took 2.4 GB; here they are refused, within an address space that has no room for them."""
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b"arrival_s,prompt_tokens,output_tokens\n0,10,10\n")
        for _ in range(400):
            file.write((b" " * 1000 + b"\n") * 1000)
    status, err = limited(900 << 20, tmp_path, "run", "--trace", "bomb.csv.gz", "--num-requests", "3", "--policy", "vllm-1024",
                          "--out", "o")
    assert status == 2, err
    assert err.count("\n") == 1
    assert "unpacks to more than" in err
    assert not (tmp_path / "o").exists()


def test_a_row_with_cells_too_many_is_told_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After good ones, in a trace; a table of kernels has the same door."""
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,10,10\n2,10,10,7,7,7\n")
    status = sim(["run", "--trace", str(tmp_path / "t.csv"), "--arrivals", "recorded", "--out", str(tmp_path / "o")])
    assert "t.csv:4: 6 cells where the header has 3" in told(capsys, status)


def test_a_burst_costs_no_more_a_request_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: requests that are looked at in the order of service, of 1,000 and of 4,000 at one instant."""
    from bullet.policies.bullet.queue import ServiceOrder

    looked = [0]
    plain = ServiceOrder._sort

    def counted(self: ServiceOrder, state: Any, now_s: float, index: int) -> Any:
        looked[0] += len(state.queue)
        return plain(self, state, now_s, index)

    monkeypatch.setattr(ServiceOrder, "_sort", counted)
    seen = []
    for count in (1000, 4000):
        looked[0] = 0
        path = tmp_path / f"{count}.csv"
        path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"0,{20 + i * 7 % 300},2\n" for i in range(count)))
        simulate({"workload.trace": str(path), "workload.arrivals": "recorded", "policy.name": "bullet"})
        seen.append(looked[0])
    # The last 512 are sorted each time, by either length: nothing grows with the rest.
    assert seen[1] < 1.1 * seen[0] + 4000


def test_a_decision_on_named_blocks_costs_no_memory_of_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans on what it changes: a copy of the names and the free list of 62,500 blocks takes megabytes a decision."""
    import tracemalloc

    from bullet.policies.vllm import Vllm

    asked, peaks = Vllm.next_step, []

    def measured(self: Vllm, *given: Any) -> Any:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        answer = asked(self, *given)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return answer

    monkeypatch.setattr(Vllm, "next_step", measured)
    tracemalloc.start()
    try:
        simulate({"workload.trace": "azure-conv", "workload.num_requests": 40, "workload.rate_req_per_s": 20,
                  "policy.name": "vllm-512", "policy.options.prefix_cache": True, "device.kv_tokens": 1_000_000})
    finally:
        tracemalloc.stop()
    assert len(peaks) > 50
    assert max(peaks) < 100_000
