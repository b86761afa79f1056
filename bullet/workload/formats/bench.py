"""Result files of ``vllm bench serve`` and ``sglang.bench_serving``: the requests that were sent, and what was measured of them.

vLLM writes one JSON object (vllm/benchmarks/serve.py), SGLang appends one a line (python/sglang/bench_serving.py). Both hold
``input_lens``, ``output_lens`` and ``errors``, a list each, only where asked for (``--save-detailed``, ``--output-details``);
``start_times`` are seconds of a clock without meaning, absent from older files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bullet.config import WorkloadConfig
from bullet.errors import TraceError
from bullet.units import MIB
from bullet.workload.layout import Layout
from bullet.workload.rows import BATCH_ROWS, Batch, Rows
from bullet.workload.text import MOST_DOCUMENT_BYTES, text_of
from bullet.workload.values import shown

TITLE = "vLLM or SGLang benchmark result"
LISTS = ("input_lens", "output_lens", "start_times", "errors")
TOTALS = ("duration", "completed", "request_throughput")
OLD_NAMES: Mapping[str, str] = {
    "mean_e2e_latency_ms": "mean_e2el_ms", "median_e2e_latency_ms": "median_e2el_ms", "std_e2e_latency_ms": "std_e2el_ms",
    "p90_e2e_latency_ms": "p90_e2el_ms", "p99_e2e_latency_ms": "p99_e2el_ms",  # SGLang
    "total_throughput": "total_token_throughput", "input_throughput": "input_token_throughput",
}
"""SGLang's names of figures that vLLM has too."""


def found(path: Path) -> bool:
    """Whether the file's beginning is that of such a result."""
    with text_of(path, "", MOST_DOCUMENT_BYTES) as text:
        head = text.read(MIB)
    return head.lstrip().startswith("{") and all(f'"{key}"' in head for key in TOTALS)


def load_result(path: Path) -> dict[str, Any]:
    """The one result in the file; :class:`TraceError` if there is none or several."""
    with text_of(path, "", MOST_DOCUMENT_BYTES) as text:
        content = text.read(MOST_DOCUMENT_BYTES + 1)
    if len(content) > MOST_DOCUMENT_BYTES:
        raise TraceError(f"{path}: a result of more than {MOST_DOCUMENT_BYTES:,} characters: save it without generated_texts")
    try:
        result = json.loads(content)
    except RecursionError as exc:
        raise TraceError(f"{path}: not a {TITLE} ({exc})") from None
    except ValueError as exc:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) > 1 and all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines):
            raise TraceError(f"{path}: holds the results of {len(lines)} runs, one a line: give a file with one") from None
        raise TraceError(f"{path}: not a {TITLE} ({exc})") from None
    if not isinstance(result, dict) or any(key not in result for key in TOTALS):
        raise TraceError(f"{path}: not a {TITLE}: must be one JSON object with {', '.join(TOTALS)}")
    return result


@contextmanager
def open_document(path: Path, config: WorkloadConfig) -> Iterator[tuple[Rows, Layout]]:
    """The requests in it, in the order of their lists."""
    result = load_result(path)
    lists = {name: result[name] for name in LISTS if result.get(name)}
    for name in LISTS[:2]:
        if name not in lists:
            raise TraceError(f"{path}: has no {name}, the requests' own lengths: run the benchmark again with --save-detailed "
                             "(vllm bench serve) or --output-details (sglang.bench_serving)")
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(lists["input_lens"]):
            raise TraceError(f"{path}: {name} = {shown(values)}: must be a list of {len(lists['input_lens'])} values, as "
                             "input_lens")
    _check_totals(path, result, lists)
    lists["request"] = list(range(len(lists["input_lens"])))

    def batches(columns: Sequence[str]) -> Iterator[Batch]:
        for start in range(0, len(lists["request"]), BATCH_ROWS):
            stop = min(start + BATCH_ROWS, len(lists["request"]))
            yield Batch(range(start + 1, stop + 1), {name: lists[name][start:stop] for name in columns})

    timed = "start_times" in lists
    rate = result.get("request_rate")
    hint = "" if timed else (f"{path}: has no start_times, so when requests were sent is not known: draw arrivals "
                             f"(--arrivals poisson --rate {rate if isinstance(rate, int | float) else 'R'})")
    yield Rows(str(path), list(lists), batches), Layout(
        "bench", ("input_lens",), "output_lens", "start_times" if timed else None, "s",
        status=("errors",) if "errors" in lists else (), order="request", hint=hint)


def _check_totals(path: Path, result: Mapping[str, Any], lists: Mapping[str, list[Any]]) -> None:
    """The totals are of the requests that ended well: where all did, they are the lists' sums."""
    if result.get("completed") != len(lists["input_lens"]) or any(lists.get("errors", ())):
        return
    for total, name in (("total_input_tokens", "input_lens"), ("total_output_tokens", "output_lens")):
        values, said = lists[name], result.get(total)
        if isinstance(said, int) and all(type(value) is int for value in values) and sum(values) != said:
            raise TraceError(f"{path}: {total} = {said}, but {name} add up to {sum(values)} and all {len(values)} requests were "
                             "completed: which is right?")


def measured_figures(path: Path) -> dict[str, Any]:
    """What the benchmark measured, under the names of a run's summary.json (vLLM's): ms, per second; lists left out.

    For a column of measured figures beside simulated ones. Raises :class:`TraceError` as :func:`load_result`.
    """
    return {OLD_NAMES.get(key, key): value for key, value in load_result(path).items()
            if isinstance(value, int | float | str) or value is None}
