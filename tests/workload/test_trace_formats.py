"""Published formats, packed files and questions: a small file of each, read to figures worked out by hand."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bullet.config import TRACE_FORMATS, WorkloadConfig
from bullet.errors import BulletError, ConfigError, TraceError
from bullet.workload import load_workload, resolved
from bullet.workload.formats import CONTAINERS, FORMATS
from bullet.workload.formats.bench import measured_figures
from bullet.workload.read import read_trace
from bullet.workload.report import inspect_lines, run_lines
from bullet.workload.table import BlockIds, Table, duration, shared_prefixes

MOONCAKE = [{"timestamp": t, "input_length": n, "output_length": o, "hash_ids": ids} for t, n, o, ids in (
    (0, 1300, 500, [0, 1, 2]), (3000, 1024, 316, [0, 1]), (3000, 600, 7, [9, 3]), (5999, 1500, 14, [0, 1, 4]))]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
185,ChatGPT,0,0,0,Conversation log
200,ChatGPT,10,20,30,Conversation log
"""
BLIS_HEAD = ("request_id,prefix_group,prefix_length,input_tokens,output_tokens,server_input_tokens,arrival_time_us,status,"
             "error_message\n")


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "t.jsonl") -> Path:
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows), name)


def read(path: Path, **options: Any) -> Table:
    return read_trace(WorkloadConfig(trace=str(path), **options))


def recorded(path: Path, **options: Any) -> WorkloadConfig:
    return WorkloadConfig(trace=str(path), arrivals="recorded", num_requests=None, **options)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(BulletError) as caught:
        load_workload(recorded(path, **options), 0)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def columns(table: Table) -> tuple[list[float] | None, list[int], list[int]]:
    times = None if table.arrival_s is None else table.arrival_s.tolist()
    return times, table.prompt_tokens.tolist(), table.output_tokens.tolist()


def test_names_of_formats_are_those_of_the_configuration() -> None:
    assert set(TRACE_FORMATS) == {"auto", *CONTAINERS, *FORMATS}
    with pytest.raises(ConfigError, match=r"workload\.format \(--format\) = 'xml': must be one of auto, csv,"):
        WorkloadConfig(format="xml")


# --------------------------------------------------------------------------------------- a unit that nothing states


def test_mooncake_keys_do_not_state_their_unit(tmp_path: Path) -> None:
    """Its own files are in ms, others write the same keys in s: 5,999 s or 6 s."""
    path = jsonl(tmp_path, MOONCAKE)
    message = refusal(path)
    assert "timestamp has no unit: its 4 times from 0 to 5999 span 5,999 s (100 minutes) as seconds, 5.999 s as milli" in message
    assert "workload.arrival_unit=s, =ms, =us or =ns; Mooncake's own files are in ms (--format mooncake)" in message
    for options in ({"format": "mooncake"}, {"arrival_unit": "ms"}):
        workload = load_workload(recorded(path, **options), 0)
        assert workload.arrival_s.tolist() == [0.0, 3.0, 3.0, 5.999]
        assert resolved(recorded(path, **options), workload).arrival_unit == "ms"
    assert load_workload(recorded(path, arrival_unit="s"), 0).arrival_s.tolist() == [0.0, 3000.0, 3000.0, 5999.0]
    assert load_workload(recorded(path, format="mooncake", arrival_unit="s"), 0).arrival_s[-1] == 5999.0


def test_drawn_arrivals_need_no_unit_and_store_none(tmp_path: Path) -> None:
    config = WorkloadConfig(trace=str(jsonl(tmp_path, MOONCAKE)))
    workload = load_workload(config, 0)
    assert set(workload.prompt_tokens.tolist()) == {1300, 1024, 600, 1500}
    assert resolved(config, workload).arrival_unit is None  # or a later run with recorded arrivals would not be asked
    assert any("times of an unknown unit" in line for line in inspect_lines(config))


@pytest.mark.parametrize("name", ["timestamp", "arrival", "Arrival Time", "arrived_at"])
@pytest.mark.parametrize("values", ["0 3000 6000", "0.5 1.5 2.5", "1700000000000 1700000003000 1700000009000"])
def test_any_column_without_a_unit_is_asked_about(tmp_path: Path, name: str, values: str) -> None:
    path = write(tmp_path, f"{name},input_len,output_len\n" + "".join(f"{t},1,2\n" for t in values.split()))
    assert f"{name} has no unit" in refusal(path)
    unit = "s" if "." in values else "ms"
    assert load_workload(recorded(path, arrival_unit=unit), 0).arrival_s[-1] == pytest.approx(
        {"0": 6.0, "0.5": 2.0, "1700000000000": 9.0}[values.split(maxsplit=1)[0]])


@pytest.mark.parametrize(("name", "per_second"), [
    ("arrival_s", 1), ("timestamp_ms", 1000), ("Timestamp (ms)", 1000), ("Arrival time [us]", 10**6), ("arrival_seconds", 1),
    ("arrival_time_ns", 10**9), ("timestamp milliseconds", 1000)])
def test_units_in_names(tmp_path: Path, name: str, per_second: int) -> None:
    path = write(tmp_path, f"{name},input_len,output_len\n{per_second},1,2\n{3 * per_second},1,2\n")
    assert load_workload(recorded(path), 0).arrival_s.tolist() == [0.0, 2.0]


def test_dates_need_no_unit(tmp_path: Path) -> None:
    path = write(tmp_path, "timestamp,input_len,output_len\n2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 00:00:02+00:00,1,2\n")
    assert load_workload(recorded(path), 0).arrival_s.tolist() == [0.0, 1.5]


# ---------------------------------------------------------------------------------------------- published formats


def test_bailian_is_in_seconds_with_the_same_ids(tmp_path: Path) -> None:
    rows = [{"chat_id": i, "parent_chat_id": -1, "timestamp": t, "input_length": n, "output_length": 3, "type": "text", "turn": 1,
             "hash_ids": ids} for i, (t, n, ids) in enumerate([(61.114, 40, [1, 2, 3]), (62.5, 50, [1, 2, 7, 8])])]
    workload = load_workload(recorded(jsonl(tmp_path, rows)), 0)
    assert workload.arrival_s.tolist() == pytest.approx([0.0, 1.386])
    assert workload.shared_prefix == {1: (0, 2)}  # two blocks of 16
    # Ids that fit no block size of the format are said to be left.
    short = jsonl(tmp_path, [{**row, "hash_ids": [1]} for row in rows])
    assert load_workload(recorded(short), 0).shared_prefix is None
    assert any("hash_ids not used" in line for line in inspect_lines(WorkloadConfig(trace=str(short))))


def test_burstgpt_with_failures(tmp_path: Path) -> None:
    path = write(tmp_path, BURSTGPT)
    message = refusal(path)
    assert ":4: Response tokens = '0': must be a whole number of tokens, 1 to 10^9 (a failed request? --skip-failed" in message
    assert message.endswith("; 2 such rows")
    table = read(path, skip_failed=True)
    assert columns(table) == ([0.0, 40.0, 195.0], [472, 1087, 10], [18, 230, 20])
    assert table.reading is not None
    assert (table.reading.rows, table.reading.failed) == (5, 2)
    assert load_workload(recorded(path, window="1:2"), 0).arrival_s.tolist() == [0.0, 40.0]  # failures outside do not matter
    text = "\n".join(run_lines(load_workload(recorded(path, skip_failed=True), 0), recorded(path, skip_failed=True)))
    assert "failed: 2 left out (first line 4: Response tokens = '0'" in text
    assert "--skip-failed" in "\n".join(inspect_lines(WorkloadConfig(trace=str(path))))
    wrong = write(tmp_path, BURSTGPT.replace("18,490", "18,491"))
    assert ":2: Total tokens = 491, but Request tokens = 472 and Response tokens = 18" in refusal(wrong)
    assert "not the BurstGPT format: column Model is missing" in refusal(write(tmp_path, "Timestamp,a\n1,2\n"), format="burstgpt")
    assert "no request is left: 1 failed rows" in refusal(write(tmp_path, "".join(BURSTGPT.splitlines(True)[i] for i in (0, 3))),
                                                          skip_failed=True)


def test_blis_prompts_hold_their_prefix(tmp_path: Path) -> None:
    rows = "0,sys,4096,200,60,4314,0,ok,\n1,sys,4096,210,60,4324,500000,ok,\n2,sys,4096,220,60,0,1000000,ok,\n"
    table = read(write(tmp_path, BLIS_HEAD + rows))
    assert columns(table) == ([0.0, 0.5, 1.0], [4314, 4324, 4316], [60, 60, 60])  # nobody asked the engine: 4096 + 220
    assert table.reading is not None
    assert "prefix_group not used" in table.reading.notes[-1]
    assert ":2: input_tokens = '200' beside server_input_tokens = '4000' and prefix_length = '4096'" in refusal(
        write(tmp_path, BLIS_HEAD + rows.replace("4314", "4000")))
    failed = write(tmp_path, BLIS_HEAD + rows.replace(",ok,", ",timeout,gone", 1))
    assert ":2: status = 'timeout': a failed request" in refusal(failed)
    assert read(failed, skip_failed=True).prompt_tokens.tolist() == [4324, 4316]


@pytest.mark.parametrize("prefix", ["prefix_length", "prefix_tokens", "History Length"])
def test_a_prefix_beside_any_prompt_column_is_asked_about(tmp_path: Path, prefix: str) -> None:
    head = f"arrival_s,{prefix},input_tokens,output_tokens\n"
    path = write(tmp_path, head + "0,0,10,5\n1,4096,20,5\n")
    assert f":3: input_tokens = '20' beside {prefix} = '4096': which are the whole prompt's tokens? --set" in refusal(path)
    assert f"workload.prompt_column={prefix}+input_tokens, or =input_tokens" in refusal(path)
    assert read(path, prompt_column=f"{prefix}+input_tokens").prompt_tokens.tolist() == [10, 4116]
    assert read(path, prompt_column="input_tokens").prompt_tokens.tolist() == [10, 20]
    assert read(write(tmp_path, head + "0,0,10,5\n")).prompt_tokens.tolist() == [10]
    engine = write(tmp_path, "arrival_s,input_tokens,server_input_tokens,output_tokens\n0,10,4314,5\n")
    assert "workload.prompt_column=server_input_tokens, or =input_tokens" in refusal(engine)
    azure = write(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens,{prefix}\n2023-11-16 18:17:03,10,5,7\n")
    assert f"ContextTokens = '10' beside {prefix} = '7'" in refusal(azure)


def test_splitwise(tmp_path: Path) -> None:
    head = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    path = write(tmp_path, head + "0,2,0,0.018,1,126,20\n1,2,0,0.034,1,384,14\n")
    assert columns(read(path)) == ([0.0, pytest.approx(0.016)], [126, 384], [20, 14])
    assert ":2: batch_size = 4: must be 1" in refusal(write(tmp_path, head + "0,2,0,0.018,4,126,20\n"))


def test_vidur_and_llmservingsim(tmp_path: Path) -> None:
    vidur = write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,5,7\n2.5,6,8\n")
    assert columns(read(vidur)) == ([0.0, 2.5], [5, 6], [7, 8])
    path = jsonl(tmp_path, [{"input_toks": 5, "output_toks": 7, "arrival_time_ns": 10**9, "input_tok_ids": [1, 2]}])
    assert columns(read(path)) == ([0.0], [5], [7])


def test_two_clocks_must_agree(tmp_path: Path) -> None:
    head = "arrival_s,timestamp_ms,input_len,output_len\n"
    assert read(write(tmp_path, head + "5,1000,1,1\n6,2000,1,1\n")).arrival_s.tolist() == [0.0, 1.0]  # type: ignore[union-attr]
    path = write(tmp_path, head + "5,1000,1,1\n6,3000,1,1\n")
    assert "two clocks: row 2 is 1 s after the first by arrival_s, and 2 s by timestamp_ms" in refusal(path)
    assert load_workload(recorded(path, arrival_column="timestamp_ms"), 0).arrival_s.tolist() == [0.0, 2.0]
    # One without a unit agrees in whichever it is in.
    same = write(tmp_path, "arrival_s,timestamp,input_len,output_len\n5,7000,1,1\n6,8000,1,1\n")
    assert load_workload(recorded(same), 0).arrival_s.tolist() == [0.0, 1.0]


def test_a_runs_own_requests(tmp_path: Path) -> None:
    """In order of arrival, ties by id, whatever became of them."""
    path = tmp_path / "requests.parquet"
    pq.write_table(pa.table({
        "id": [2, 0, 1], "arrival_s": [4.0, 1.0, 1.0], "prompt_tokens": [30, 10, 20], "output_tokens": [3, 1, 2],
        "status": ["rejected", "finished", "finished"], "admitted_s": [None, 1.0, 1.5], "generated_tokens": [0, 1, 2]}), path)
    assert columns(read(path)) == ([0.0, 0.0, 3.0], [10, 20, 30], [1, 2, 3])
    other = tmp_path / "t.parquet"
    pq.write_table(pa.table({"timestamp": pa.array([10**18, 10**18 + 5 * 10**8], pa.timestamp("ns")), "input_len": [1, 2],
                             "output_len": [3.0, 4.0]}), other)
    assert columns(read(other)) == ([0.0, 0.5], [1, 2], [3, 4])
    assert "cannot be read as Parquet" in refusal(write(tmp_path, "x", "bad.parquet"))
    assert "no such trace file" in refusal(tmp_path / "none.parquet")


def bench(**more: Any) -> dict[str, Any]:
    return {"date": "20260101-000000", "backend": "vllm", "request_rate": 4.0, "duration": 9.0, "completed": 2, "failed": 1,
            "request_throughput": 0.22, "mean_ttft_ms": 12.5, "input_lens": [10, 20, 30], "output_lens": [1, 0, 3],
            "ttfts": [0.1, 0.0, 0.2], "errors": ["", "Traceback: x", ""], **more}


def test_benchmark_results_as_a_workload(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(bench(start_times=[7.5, 7.0, 6.0]), indent=1), "r.json")
    assert "errors = 'Traceback: x': a failed request" in refusal(path)
    table = read(path, skip_failed=True)
    assert columns(table) == ([0.0, 1.5], [30, 10], [3, 1])  # in order of their start
    untimed = write(tmp_path, json.dumps(bench()) + "\n", "sglang.jsonl")
    assert "has no start_times, so when requests were sent is not known: draw arrivals (--arrivals poisson --rate 4.0" in refusal(
        untimed, skip_failed=True)
    assert read(untimed, skip_failed=True).prompt_tokens.tolist() == [10, 30]
    assert "holds the results of 2 runs" in refusal(write(tmp_path, 2 * (json.dumps(bench()) + "\n"), "two.jsonl"))
    summary = bench()
    del summary["input_lens"]
    assert "has no input_lens" in refusal(write(tmp_path, json.dumps(summary), "s.json"))
    assert "output_lens = [1]: must be a list of 3" in refusal(write(tmp_path, json.dumps(bench(output_lens=[1])), "s.json"))


def test_measured_figures_have_the_names_of_a_summary(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(bench(mean_e2e_latency_ms=99.0, total_throughput=7.0, server_info={"a": 1})), "r.json")
    found = measured_figures(path)
    names = ("mean_ttft_ms", "mean_e2el_ms", "total_token_throughput", "completed")
    assert [found[name] for name in names] == [12.5, 99.0, 7.0, 2]
    assert "server_info" not in found
    assert "ttfts" not in found
    with pytest.raises(TraceError, match="not a vLLM or SGLang benchmark result"):
        measured_figures(write(tmp_path, "{}", "x.json"))


SHAREGPT = [{"id": "a", "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]},
            {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
            {"id": "c", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "a b c"}, {"from": "human",
                                                                                                             "value": "x"}]}]


def test_sharegpt_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(SHAREGPT), "sg.json")
    assert "name the model's tokenizer by --tokenizer tokenizer.json" in refusal(path)


def test_sharegpt_counts_the_first_two_turns(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, json.dumps(SHAREGPT), "sg.json")
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        assert columns(read(path, tokenizer=str(tokenizer))) == (None, [3, 1], [2, 3])
    with pytest.raises(TraceError, match=r"none\.json: not a tokenizer\.json"):
        read(path, tokenizer=str(tmp_path / "none.json"))


def test_conversations_of_one_turn_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        @classmethod
        def from_file(cls, name: str) -> Words:
            return cls()

        def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
            return types.SimpleNamespace(ids=text.split())

    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Words))
    path = write(tmp_path, json.dumps(SHAREGPT), "sg.json")
    table = read(path, tokenizer="tokenizer.json")
    assert columns(table) == (None, [3, 1], [2, 3])
    assert table.reading is not None
    assert table.reading.notes == ("conversations of fewer than two turns: 1 left out",)


def test_totals_that_are_not_the_sums_are_asked_about(tmp_path: Path) -> None:
    whole = bench(errors=["", "", ""], completed=3, output_lens=[1, 2, 3], total_input_tokens=60, total_output_tokens=6)
    assert columns(read(write(tmp_path, json.dumps(whole), "r.json"))) == (None, [10, 20, 30], [1, 2, 3])
    wrong = write(tmp_path, json.dumps(whole | {"total_input_tokens": 61}), "r.json")
    assert "total_input_tokens = 61, but input_lens add up to 60" in refusal(wrong)
    assert read(write(tmp_path, json.dumps(bench(total_input_tokens=40)), "r.json"), skip_failed=True).prompt_tokens.size == 2


def test_a_json_array_of_requests(tmp_path: Path) -> None:
    rows = [{"arrival_s": i, "input_len": 10 + i, "output_len": 1} for i in range(5000)]  # more than is read at once
    for text in (json.dumps(rows), json.dumps(rows, indent=2)):
        table = read(write(tmp_path, text, "t.json"))
        assert table.prompt_tokens.tolist() == list(range(10, 5010))
    assert "item 5001: not JSON" in refusal(write(tmp_path, json.dumps(rows)[:-1], "t.json"))
    assert ":2: each item must be a JSON object, found int" in refusal(write(tmp_path, json.dumps([rows[0], 3]), "t.json"))


@pytest.mark.parametrize("status", ["error", "timeout", "500", "False", "aborted"])
def test_a_status_tells_a_failed_request_in_any_file(tmp_path: Path, status: str) -> None:
    path = write(tmp_path, f"arrival_s,input_len,output_len,status\n0,1,2,ok\n1,3,4,{status}\n2,5,6,OK\n")
    assert f":3: status = '{status}': a failed request" in refusal(path)
    assert columns(read(path, skip_failed=True)) == ([0.0, 2.0], [1, 5], [2, 6])
    assert columns(read(write(tmp_path, "input_len,output_len,success,error\n1,2,True,\n"))) == (None, [1], [2])


# ------------------------------------------------------------------------------------------- packed, large, broken

PLAIN = "arrival_s,input_len,output_len\n" + "".join(f"{i},{i + 1},{i + 2}\n" for i in range(3000))


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_files(tmp_path: Path, ending: str) -> None:
    packed = PACKERS[ending](PLAIN.encode())
    want = columns(read(write(tmp_path, PLAIN)))
    for name in (f"t.csv{ending}", "t"):  # by name or by content
        assert columns(read(write(tmp_path, packed, name))) == want
    for length in (1, 3, len(packed) // 2, len(packed) - 1):
        assert any(word in refusal(write(tmp_path, packed[:length], f"t.csv{ending}")) for word in ("truncated", "not a sound"))
    assert "not a sound" in refusal(write(tmp_path, PLAIN, f"t.csv{ending}"))


@pytest.mark.parametrize("ending", PACKERS)
def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bullet.workload.text.SMALL_BYTES", 2**20)
    monkeypatch.setattr("bullet.workload.text.MOST_RATIO", 50)
    bomb = write(tmp_path, PACKERS[ending](PLAIN.encode() + b"\n" * 2**22), f"t.csv{ending}")
    tracemalloc.start()
    try:
        assert ", 50 times its size as " in refusal(bomb)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Text of 8 MB, of which 1.2 MB of numbers are kept."""
    rows = "".join(f"{i},{i + 1},2,{'x' * 140}\n" for i in range(50_000))
    path = write(tmp_path, "arrival_s,input_len,output_len,note\n" + rows)
    tracemalloc.start()
    try:
        read(path)
        assert tracemalloc.get_traced_memory()[1] < 12e6 + 8192 * 600
    finally:
        tracemalloc.stop()


# -------------------------------------------------------------------------------------------- window and warm-up


@pytest.mark.parametrize(("window", "prompts", "times"), [
    ("2:3", [20, 30], [0.0, 0.0]), (":2", [10, 20], [0.0, 0.5]), ("4:", [40], [0.0]), ("1:99", [10, 20, 30, 40], None),
    ("0s:500ms", [10], [0.0]), ("0.5s:", [20, 30, 40], [0.0, 0.0, 3.5]), (":1min", [10, 20, 30, 40], None),
    ("1s:5s", [40], [0.0])])
def test_window(tmp_path: Path, window: str, prompts: list[int], times: list[float] | None) -> None:
    path = write(tmp_path, "arrival_ms,prompt_tokens,output_tokens\n1000,10,1\n1500,20,2\n1500,30,3\n5000,40,4\n")
    workload = load_workload(recorded(path, window=window), 0)
    assert workload.prompt_tokens.tolist() == prompts
    assert workload.arrival_s.tolist() == (times or [0.0, 0.5, 0.5, 4.0])
    assert workload.mean_prompt_tokens == sum(prompts) / len(prompts)


@pytest.mark.parametrize("window", ["", ":", "3", "3:2", "0:5", "2s:1s", "1s:1s", "1:2s", "a:b", "-1:3", "1:2:3", ":0", "1.5:3"])
def test_bad_windows(tmp_path: Path, window: str) -> None:
    with pytest.raises(ConfigError, match=r"workload\.window \(--window\) = .*: must be FROM:TO"):
        load_workload(recorded(write(tmp_path, PLAIN), window=window), 0)


def test_windows_that_hold_nothing(tmp_path: Path) -> None:
    assert "no request in workload.window (--window) = '4000:': the trace is 3,000 rows long" in refusal(
        write(tmp_path, PLAIN), window="4000:")
    assert "no request in workload.window (--window) = '2h:': the trace is 2999 s long" in refusal(
        write(tmp_path, PLAIN), window="2h:")
    assert "has no times of a known unit" in refusal(jsonl(tmp_path, MOONCAKE), window="1s:2s")


def test_window_of_a_built_in_trace() -> None:
    whole = load_workload(WorkloadConfig(trace="azure-conv", arrivals="recorded", num_requests=None), 0)
    part = load_workload(WorkloadConfig(trace="azure-conv", arrivals="recorded", num_requests=None, window="101:150"), 0)
    assert (part.prompt_tokens == whole.prompt_tokens[100:150]).all()
    assert part.arrival_s == pytest.approx(whole.arrival_s[100:150] - whole.arrival_s[100])


def test_bad_warmups(tmp_path: Path) -> None:
    for warmup in ("x", "-3", "1.5", "5 minutes"):
        with pytest.raises(ConfigError, match=r"workload\.warmup \(--warmup\) = "):
            WorkloadConfig(warmup=warmup)
    with pytest.raises(ConfigError, match="leaves none of the 3000 requests, which arrive within 2999 s"):
        load_workload(recorded(write(tmp_path, PLAIN), warmup="1h"), 0)


# ------------------------------------------------------------------------------------------------ shared prefixes


def test_shared_prefixes_by_hand(tmp_path: Path) -> None:
    """Row 1 begins as row 0 for 1,024 tokens, row 3 for 1,024 of its 1,500, row 2 as none."""
    workload = load_workload(recorded(jsonl(tmp_path, MOONCAKE), format="mooncake"), 0)
    assert workload.shared_prefix == {1: (0, 64), 3: (0, 64)}
    text = " ".join(" ".join(run_lines(workload, recorded(tmp_path, format="mooncake"))).split())
    assert "shared prefixes: 2 prompts begin as an earlier one does, 46.3% of all prompt tokens; not used" in text  # 2048 / 4424
    drawn = WorkloadConfig(trace=str(jsonl(tmp_path, MOONCAKE)))
    assert load_workload(drawn, 0).shared_prefix is None


def test_shared_prefixes_against_brute_force() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        rows = [rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(12)]
        prompts = [len(row) * 32 if row else 5 for row in rows]
        ends = np.cumsum([len(row) for row in rows])
        found = shared_prefixes(BlockIds(np.array([i for row in rows for i in row], dtype=np.int64), ends, 32), prompts, 16)
        for i, row in enumerate(rows):
            longest = 0
            for j in range(i):
                pairs = enumerate(zip(row, rows[j], strict=False))
                same = next((k for k, (a, b) in pairs if a != b), min(len(row), len(rows[j])))
                longest = max(longest, min(same * 32, prompts[i], prompts[j]) // 16 if same else 0)
            donor, blocks = found.get(i, (-1, 0))
            assert blocks == longest
            assert donor < i
            assert blocks == 0 or rows[donor][: blocks // 2] == row[: blocks // 2]


@pytest.mark.parametrize(("ids", "says"), [([[1, "a"]], "must be a list of whole numbers"), ([[2**63 + 5]], None)])
def test_odd_ids(tmp_path: Path, ids: list[list[Any]], says: str | None) -> None:
    path = jsonl(tmp_path, [{"timestamp": 0, "input_length": 512 * len(ids[0]), "output_length": 1, "hash_ids": ids[0]}])
    if says is None:
        assert load_workload(recorded(path, format="mooncake"), 0).shared_prefix == {}
    else:
        assert says in refusal(path, format="mooncake")


# ---------------------------------------------------------------------------------------------- what is said


def test_inspect_says_what_is_read_and_what_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_ms,prompt_tokens,output_tokens,user\n1000,10,1,a\n1500,20,2,b\n1500,30,3,c\n5000,40,4,d\n")
    lines = inspect_lines(WorkloadConfig(trace=str(path)))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "trace t.csv: 4 rows, read by the names of its columns" in text
    assert "columns: prompt = prompt_tokens, output = output_tokens, arrival = arrival_ms (ms, by its name)" in text
    assert "not read: user" in text
    assert "requests: 4, 4 s long, 1 req/s (CV of the gaps 1.16)" in text
    assert "prompts 25 tokens (p50 25, p90 37, most 40); outputs 2 tokens (p50 2, p90 4, most 4)" in text


def test_load_is_said_where_it_leaves_nothing_to_compare(tmp_path: Path) -> None:
    config = recorded(write(tmp_path, PLAIN))
    workload = load_workload(config, 0)
    for load, says in ((0.02, "offered load: 0.02 of capacity: policies will hardly differ"), (0.7, None),
                       (1.4, "offered load: 1.40 of capacity: queues grow as long as it lasts")):
        lines = [line.strip() for line in run_lines(workload, config, load=load) if "offered load" in line]
        assert lines == ([] if says is None else [says])


def test_durations() -> None:
    assert [duration(s) for s in (0.5, 15, 119, 3501.7, 15000, 200000)] == [
        "0.5 s", "15 s", "119 s", "3,502 s (58.4 minutes)", "15,000 s (4.17 hours)", "200,000 s (2.31 days)"]
