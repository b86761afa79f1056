"""Trace files: what is read equals what was written, and what is wrong is refused with file, line and value."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.workload.read import read_trace
from bullet.workload.table import Table

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:00,110,27
"""


def read(path: Path, **options: object) -> Table:
    return read_trace(WorkloadConfig(trace=str(path), **options))  # type: ignore[arg-type]


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, **options: object) -> str:
    """The message, which must be one line that names the file."""
    with pytest.raises(TraceError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert str(path) in message
    return message.removeprefix(str(path))


# ------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t"])
@pytest.mark.parametrize("style", ["as published", "crlf", "bom", "no last line end", "blank lines"])
@pytest.mark.parametrize("kind", ["auto", "azure", "csv"])
def test_azure_as_published(tmp_path: Path, name: str, style: str, kind: str) -> None:
    text = AZURE
    text = {"crlf": text.replace("\n", "\r\n"), "bom": "\ufeff" + text, "no last line end": text.rstrip("\n"),
            "blank lines": text.replace("\n", "\n\n")}.get(style, text)
    data = text.encode()
    table = read(write(tmp_path, gzip.compress(data) if name.endswith(".gz") else data, name), format=kind)
    assert table.arrival_s is not None
    assert table.arrival_s.tolist() == [0.0, 0.052, 56.02004]  # exact: seven digits survive
    assert table.prompt_tokens.tolist() == [4808, 3180, 110]
    assert table.output_tokens.tolist() == [10, 8, 27]
    assert table.prompt_tokens.dtype == table.output_tokens.dtype == np.int64


def test_azure_keeps_100_ns(tmp_path: Path) -> None:
    path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                           "2023-11-16 23:59:59.9999999,1,1\n2023-11-17 00:00:00.0000001,1,1\n")
    assert read(path).arrival_s.tolist() == [0.0, 2e-7]  # type: ignore[union-attr]


@pytest.mark.parametrize(("a", "b"), [("2024-05-10 00:00:00.009930+00:00", "2024-05-10T02:00:01.00993+02:00"),
                                      ("2024-05-10T00:00:00Z", "2024-05-10 00:00:01Z"),
                                      ("2024-02-28 23:59:59", "2024-02-29 00:00:00")])
def test_dates(tmp_path: Path, a: str, b: str) -> None:
    assert read(write(tmp_path, f"timestamp,input_len,output_len\n{a},1,1\n{b},1,1\n")
                ).arrival_s.tolist() == [0.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(("columns", "scale"), [
    ("num_prefill_tokens,num_decode_tokens,arrived_at", 1),  # Vidur
    ("input_toks,output_toks,arrival_time_ns", 10**9),  # LLMServingSim
    ("prompt_tokens,output_tokens,arrival_ms", 1000),
])
def test_known_columns(tmp_path: Path, columns: str, scale: int) -> None:
    p, o, a = columns.split(",")
    rows = [(5, 7, 100 * scale), (6, 8, 102 * scale)]
    for name, text in (("t.csv", "".join(f"{x},{y},{z},x\n" for x, y, z in [(p, o, a), *rows])),
                       ("t.jsonl", "".join(json.dumps({"id": 1, p: x, o: y, a: z}) + "\n" for x, y, z in rows))):
        table = read(write(tmp_path, text, name))
        assert table.arrival_s is not None
        assert (table.arrival_s.tolist(), table.prompt_tokens.tolist(), table.output_tokens.tolist()) == (
            [0.0, 2.0], [5, 6], [7, 8])


def test_configured_columns_and_unit(tmp_path: Path) -> None:
    """Mooncake's layout: milliseconds, which no name tells."""
    path = write(tmp_path, '{"timestamp": 27482, "input_length": 6955, "n": 52}\n'
                           '{"timestamp": 30535, "input_length": 6472, "n": 26}\n', "t.jsonl")
    table = read(path, output_column="n", arrival_unit="ms")
    assert table.arrival_s.tolist() == [0.0, 3.053]  # type: ignore[union-attr]
    assert table.output_tokens.tolist() == [52, 26]
    path = write(tmp_path, "arrival_s,due,prompt_tokens,output_tokens\n0,10,1,1\n1,30,1,1\n")
    table = read(path, arrival_column="due", arrival_unit="s")
    assert table.arrival_s.tolist() == [0.0, 20.0]  # type: ignore[union-attr]


def test_equal_columns_are_one_and_others_are_asked_about(tmp_path: Path) -> None:
    table = read(write(tmp_path, "input_len,Prompt_Tokens,prompt tokens,output_len\n2,2,2,4\n3,3,3,4\n"))
    assert table.prompt_tokens.tolist() == [2, 3]
    path = write(tmp_path, "input_len,prompt_tokens,output_len\n2,2,4\n1,3,4\n")
    assert refusal(path) == (":3: prompt_tokens = '3' beside input_len = '1': which are the whole prompt's tokens? "
                             "--set workload.prompt_column=input_len, or =prompt_tokens")
    assert read(path, prompt_column="input_len").prompt_tokens.tolist() == [2, 1]
    path = write(tmp_path, "input_len,output_len,completion_tokens\n2,4,5\n")
    assert "which is the whole output? workload.output_column=output_len or =completion_tokens" in refusal(path)


def test_no_times(tmp_path: Path) -> None:
    assert read(write(tmp_path, "ContextTokens,GeneratedTokens\n42,285\n")).arrival_s is None
    # A time column that means nothing can be left out.
    path = write(tmp_path, "timestamp,input_len,output_len\nnever,1,1\n")
    assert read(path, arrival_column="").arrival_s is None
    assert 'arrival_column = ""' in refusal(path)


def test_epoch_nanoseconds_keep_every_digit(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_ns,input_len,output_len\n1700000000123456789,1,1\n1700000000123456790,1,1\n")
    assert read(path).arrival_s.tolist() == [0.0, 1e-9]  # type: ignore[union-attr]


def test_content_decides_without_a_name(tmp_path: Path) -> None:
    line = '{"input_len": 3, "output_len": 4}\n'
    assert read(write(tmp_path, line, "t.txt")).prompt_tokens.tolist() == [3]
    assert read(write(tmp_path, gzip.compress(line.encode()), "t.jsonl")).prompt_tokens.tolist() == [3]
    assert read(write(tmp_path, line, "t.csv"), format="jsonl").prompt_tokens.tolist() == [3]


def test_whole_numbers_written_as_decimals(tmp_path: Path) -> None:
    assert read(write(tmp_path, "input_len,output_len\n12.0, 1e3\n")).output_tokens.tolist() == [1000]


def test_longest_rows_are_kept(tmp_path: Path) -> None:
    """What no model can hold is the driver's to reject."""
    assert read(write(tmp_path, "input_len,output_len\n241402,1\n1,37622\n")).prompt_tokens.max() == 241402


ROWS = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 10**15)), min_size=1,
                max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=ROWS, style=st.sampled_from(["csv", "quoted", "jsonl", "azure"]), packed=st.booleans(),
       origin=st.integers(0, 10**15))
def test_round_trip(tmp_path: Path, rows: list[tuple[int, int, int]], style: str, packed: bool, origin: int) -> None:
    """Any trace that is written is read back equal, times to the last digit."""
    ticks = sorted(t for _, _, t in rows)
    unit = 10**9
    prompts, outputs = [p for p, _, _ in rows], [o for _, o, _ in rows]
    if len(rows) >= 10 and 0 < ticks[-1] - ticks[0] < 10**6:
        ticks = [0] * len(rows)  # else refused as implausible
    if style == "jsonl":
        text = "".join(json.dumps({"arrival_ns": origin + t, "prompt_tokens": p, "output_tokens": o}) + "\n"
                       for t, p, o in zip(ticks, prompts, outputs, strict=True))
    elif style == "azure":
        unit, ticks = 10**7, [t // 10**5 for t in ticks]  # 100 ns digits within hours
        if len(rows) >= 10 and 0 < ticks[-1] - ticks[0] < 10**4:
            ticks = [0] * len(rows)
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        for t, p, o in zip(ticks, prompts, outputs, strict=True):
            clock = f"{18 + t // (3600 * unit):02d}:{t // (60 * unit) % 60:02d}:{t // unit % 60:02d}"
            text += f"2023-11-16 {clock}.{t % unit:07d},{p},{o}\n"
    else:
        file = io.StringIO()
        writer = csv.writer(file, quoting=csv.QUOTE_ALL if style == "quoted" else csv.QUOTE_MINIMAL)
        writer.writerow(["arrival_time_ns", "note", "input_tokens", "output_tokens"])
        writer.writerows((origin + t, 'a "b",\nc', p, o) for t, p, o in zip(ticks, prompts, outputs, strict=True))
        text = file.getvalue()
    data = text.encode()
    name = ("t.jsonl" if style == "jsonl" else "t.csv") + (".gz" if packed else "")
    table = read(write(tmp_path, gzip.compress(data) if packed else data, name))
    assert table.arrival_s is not None
    assert table.arrival_s.tolist() == [(t - ticks[0]) / unit for t in ticks]
    assert table.prompt_tokens.tolist() == prompts
    assert table.output_tokens.tolist() == outputs


# ---------------------------------------------------------------------------------------- what is refused

HEAD = "arrival_s,prompt_tokens,output_tokens\n0,10,20\n"


@pytest.mark.parametrize(("row", "says"), [
    ("1,ten,20", "prompt_tokens = 'ten': must be a whole number of tokens, 1 to 10^9"),
    ("1,-3,20", "prompt_tokens = '-3': must be"),
    ("1,0,20", "prompt_tokens = '0': must be"),
    ("1,10,0", "output_tokens = '0': must be"),
    ("1,10,2.5", "output_tokens = '2.5': must be"),
    ("1,nan,20", "prompt_tokens = 'nan': must be"),
    ("1,10,inf", "output_tokens = 'inf': must be"),
    ("1,10,", "output_tokens = empty: must be"),
    ("1,1_000,20", "prompt_tokens = '1_000': must be"),
    ("1,٣,20", "prompt_tokens = '٣': must be"),
    ("1,1000000001,20", "prompt_tokens = '1000000001': must be"),
    ("1," + "9" * 5000 + ",20", "prompt_tokens = '999"),
    ("1,True,20", "prompt_tokens = 'True': must be"),
    ("nan,10,20", "arrival_s = 'nan': must be a number"),
    ("inf,10,20", "arrival_s = 'inf': must be a number"),
    ("-1,10,20", "arrival_s = '-1': must be a number, 0 or more"),
    (",10,20", "arrival_s = empty: must be a number"),
    ("soon,10,20", "arrival_s = 'soon': must be a number"),
    ("9" * 400 + ",10,20", "after the year 5000"),
    ("1700000000,10,20", "arrival_s = '1700000000' lies more than a year from the rows above: epoch and relative"),
    ("2023-11-16 18:17:03.9799600,10,20", "is a date, the first row's a number: times must be of one kind"),
    ("2023-02-30 18:17:03,10,20", "not a date"),
    ("1,10", "2 cells where the header has 3"),
    ("1,10,20,30", "4 cells where the header has 3"),
    ('1,"10,20', "not CSV"),
    ('1,"10"x,20', "not CSV"),
    ("1,10,20\n0.5,10,20", None),
])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_bad_row(tmp_path: Path, row: str, says: str | None, ending: str) -> None:
    text = (HEAD + "\n" + row + "\n1,1,1\n").replace("\n", ending)
    message = refusal(write(tmp_path, text))
    line = 4
    if says is None:
        line, says = 5, "arrival_s = '0.5' is before the row above: times must not decrease"
    assert message.startswith(f":{line}: ")
    assert says in message


def test_line_of_a_record_after_quoted_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path, 'note,input_len,output_len\n"a\nb\nc",1,1\n"d\ne",x,1\n')
    assert refusal(path).startswith(":5: input_len = 'x'")


@pytest.mark.parametrize(("line", "says"), [
    ("[1, 2]", "each line must be one JSON object, found list"),
    ("7", "each line must be one JSON object, found int"),
    ("{bad", "not one JSON object a line"),
    ('{"a": 1} {"a": 2}', "not one JSON object a line"),
    ("[" * 100_000, "not one JSON object a line"),
    ('{"prompt_tokens": 1, "prompt_tokens": 2, "output_tokens": 1}', "a key stands twice"),
    ('{"prompt_tokens": 1}', "output_tokens = missing: must be"),
    ('{"prompt_tokens": null, "output_tokens": 1}', "prompt_tokens = missing: must be"),
    ('{"prompt_tokens": true, "output_tokens": 1}', "prompt_tokens = True: must be"),
    ('{"prompt_tokens": [1], "output_tokens": 1}', "prompt_tokens = [1]: must be"),
    ('{"prompt_tokens": NaN, "output_tokens": 1}', "prompt_tokens = nan: must be"),
    ('{"prompt_tokens": 1e999, "output_tokens": 1}', "prompt_tokens = inf: must be"),
    ('{"prompt_tokens": "a\\nb", "output_tokens": 1}', r"prompt_tokens = 'a\nb': must be"),
    ('{"prompt_tokens": 1' + "0" * 5000 + ', "output_tokens": 1}', "not one JSON object a line"),
])
def test_bad_json(tmp_path: Path, line: str, says: str) -> None:
    good = '{"prompt_tokens": 1, "output_tokens": 1}\n'
    message = refusal(write(tmp_path, good + "\n" + line + "\n" + good, "t.jsonl"))
    assert message.startswith(":3: ")
    assert says in message


@pytest.mark.parametrize(("content", "says"), [
    ("", ": empty: must hold"),
    ("\n\r\n \n", ": empty: must hold"),
    ("\ufeff", ": empty: must hold"),
    ("prompt_tokens,output_tokens\n", ": has a header but no requests"),
    ("prompt_tokens,foo\n1,1\n", ": no column of output tokens: name it by workload.output_column"),
    ("foo,output_tokens\n1,1\n", ": no column of prompt tokens: name it by workload.prompt_column"),
    ("prompt_tokens;output_tokens\n1;1\n", ":1: header 'prompt_tokens;output_tokens': columns must be separated by"),
    ("prompt_tokens,prompt_tokens,output_tokens\n1,1,1\n", ":1: column 'prompt_tokens' stands twice"),
    ("\n0,10,20\n", ":2: the first line must name the columns, found numbers (0, 10, 20)"),
    ("prompt_tokens,output_tokens\n1,1\n\xe9,1\n".encode("latin-1"), ":3: byte 0xe9 is not UTF-8"),
    (b"\xef\xbb\xbfprompt_tokens,output_tokens\n\xe9,1\n", ":2: byte 0xe9 is not UTF-8"),
    ("prompt_tokens,output_tokens\n1,1\n".encode("utf-16"), ":1: byte 0xff is not UTF-8"),
    ("prompt_tokens,output_tokens\n1,1\n".encode("utf-16-le"), ":1: holds a NUL character"),
    ('"a\nb",c\n1,1\n', r"the file has a\nb, c"),
])
def test_bad_file(tmp_path: Path, content: str | bytes, says: str) -> None:
    assert says in refusal(write(tmp_path, content))


def test_bad_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(AZURE.encode())
    for length in range(1, len(whole)):
        message = refusal(write(tmp_path, whole[:length], "t.csv.gz"))
        assert "gzip" in message, length
    assert "truncated gzip file" in refusal(write(tmp_path, whole[:-1], "t.csv.gz"))
    assert "not a sound gzip file" in refusal(write(tmp_path, AZURE, "t.csv.gz"))
    assert "not a sound gzip file" in refusal(write(tmp_path, whole + b"rest", "t.csv.gz"))
    middle = len(whole) // 2
    broken = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1:]
    assert "gzip" in refusal(write(tmp_path, broken, "t.csv.gz"))


def test_no_file(tmp_path: Path) -> None:
    assert "no such trace file" in refusal(tmp_path / "none.csv")
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read" in refusal(write(tmp_path, "x") / "t.csv")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
    with pytest.raises(TraceError, match="not a file name"):
        read(Path("a\0b.csv"))


def test_bad_columns(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    assert "no column 'x' (workload.prompt_column): the file has TIMESTAMP, " in refusal(path, prompt_column="x")
    assert "no column 'x' (workload.arrival_column)" in refusal(path, arrival_column="x")
    assert "must be three columns" in refusal(path, prompt_column="GeneratedTokens")
    assert "column TIMESTAMP is missing" in refusal(write(tmp_path, HEAD), format="azure")
    assert "arrival_unit = 'ns': column 'arrival_s' says s" in refusal(write(tmp_path, HEAD), arrival_unit="ns")
    assert "not one JSON object" in refusal(write(tmp_path, HEAD), format="jsonl")


def test_units_that_cannot_be(tmp_path: Path) -> None:
    def trace(times: list[int]) -> Path:
        return write(tmp_path, "arrival,input_len,output_len\n" + "".join(f"{t},1,1\n" for t in times))

    epoch_ms = [1_700_000_000_000 + 100 * i for i in range(20)]
    assert "after the year 5000" in refusal(trace(epoch_ms), arrival_unit="s")
    read(trace(epoch_ms), arrival_unit="ms")
    assert "over 100,000 a second" in refusal(trace(epoch_ms), arrival_unit="ns")
    assert "more than a year" in refusal(trace([0, 10**8]), arrival_unit="s")  # nanoseconds taken as seconds
    assert ":4: " in refusal(trace([0, 2 * 10**7, 4 * 10**7]), arrival_unit="s")  # and so little by little
    # From epoch back to relative is a decrease too, but the reason is the mixture.
    assert "epoch and relative times are mixed" in refusal(trace([1_700_000_000, 5]), arrival_unit="s")
    read(trace([0] * 20), arrival_unit="s")  # all at once is a workload


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(data=st.binary(max_size=60) | st.text(alphabet='0123456789.,-"\n\r{}[]:eE_ abc\0', max_size=60).map(str.encode),
       name=st.sampled_from(["t.csv", "t.jsonl", "t.csv.gz", "t"]), head=st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes, name: str, head: bool) -> None:
    """No content ends in another exception than ours."""
    message = ""
    try:
        table = read(write(tmp_path, (HEAD.encode() if head else b"") + data, name))
    except TraceError as exc:
        message = str(exc)
    else:
        assert len(table.prompt_tokens) == len(table.output_tokens) > 0
        assert min(table.prompt_tokens.min(), table.output_tokens.min()) >= 1
    assert len(message.splitlines()) <= 1
