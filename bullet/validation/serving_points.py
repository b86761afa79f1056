"""Serving figures that others measured: what ``bullet-sim validate serving`` compares with. Nothing is fitted on them.

Licensed points are shipped in profiles/<gpu>/<model>/serving_points.csv: ``# name: source, commit, licence`` lines, then one
row a figure, in seconds. Points whose source states no licence are read from a folder of the user's and never shipped.

Kinds of point:
- ``sharegpt``: Poisson arrivals at a rate, ShareGPT lengths with the benchmark's filter; medians over requests.
- ``static``: a batch of equal requests, all there at 0; ``batch`` is the time until the last token of the last one.
- ``constant``: equal requests at a constant rate that begin with a shared system prompt; means over requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bullet import door
from bullet.catalog.models import MODELS, get_model
from bullet.catalog.published import PUBLISHED
from bullet.devices import PROFILES
from bullet.errors import ProfileError, short

FILE = "serving_points.csv"
COLUMNS = ("point", "kind", "engine", "gpu", "rate_req_per_s", "requests", "batch", "prompt_tokens", "output_tokens", "metric",
           "measured_s", "source")
NEEDS = {"sharegpt": ("rate_req_per_s", "requests"), "static": ("batch", "prompt_tokens", "output_tokens"),
         "constant": ("rate_req_per_s", "requests", "prompt_tokens", "output_tokens")}
"""Kind of point -> the numbers that it must give; the others stay empty."""
METRICS = {"sharegpt": ("ttft_p50", "tpot_p50", "itl_p50", "latency_p50"), "static": ("batch",),
           "constant": ("ttft_mean", "tpot_mean", "latency_mean")}
UNLICENSED_FILE = "blis_vllm_ground_truth_h100.csv"
UNLICENSED_SOURCE = ("inference-sim/sim-to-real-accuracy-validation, no licence stated: not shipped, compared with only "
                     "(vLLM 0.15.1)")
TOKENS = {"general": (547, 248), "codegen": (566, 247), "roleplay": (750, 251), "reasoning": (1034, 1448)}
"""Prompt and output tokens of these runs' workloads, means, as their README and configuration give them."""
DISTINCT = {"general": 45, "codegen": 44, "roleplay": 50, "reasoning": 23}
"""Different conversations of these workloads: system prompts x users of each, in the same authors' configurations."""


STAGE_S, ALONE_S = 600.0, 1200.0
"""Seconds that a load lasts, of several stages and alone, in the same configurations."""


@dataclass(frozen=True)
class Point:
    """One configuration with what was measured of it. ``measured``: metric -> seconds. Numbers that its kind lacks are 0."""

    name: str
    kind: str
    engine: str
    gpu: str
    source: str
    measured: Mapping[str, float]
    rate_req_per_s: float = 0.0
    requests: int = 0
    batch: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    budget_tokens: int = 0
    kv_share: float = 0.0
    distinct_prompts: int = 0
    licensed: bool = True
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    whole: bool = False
    """Requests waited for more than half of their latency: a queue that grows depends on how long it does, so that all of the
    run are sent and counted. The client gives up after some minutes, and the measured means are of those that were answered."""


def shipped() -> list[Point]:
    """All licensed points."""
    return [point for path in sorted(PROFILES.glob(f"*/*/{FILE}")) for point in read_points(path)]


def read_points(path: Path) -> list[Point]:
    """The points of one file; :class:`ProfileError` names the line and what is wrong with it."""
    named = (line[1:].strip().partition(": ") for _, line in door.lines(path, ProfileError) if line.startswith("#"))
    sources = {name: text for name, colon, text in named if colon}
    found: dict[str, Point] = {}
    figures: dict[str, dict[str, float]] = {}
    for number, row in door.read_csv(path, COLUMNS, ProfileError, comment="#"):
        where = f"{path}:{number}"
        kind, metric = row["kind"], row["metric"]
        if kind not in NEEDS or metric not in METRICS[kind]:
            allowed = "; ".join(f"{k}: {', '.join(m)}" for k, m in METRICS.items())
            raise ProfileError(f"{where}: kind {short(kind)} with metric {short(metric)}: allowed are {allowed}")
        if row["source"] not in sources:
            raise ProfileError(f"{where}: source {short(row['source'])} has no '# {row['source'][:60]}: ..' line above")
        rate, *counts = (_number(where, name, row[name], name in NEEDS[kind]) for name in COLUMNS[4:9])
        requests, batch, prompt, output = map(int, counts)
        point = Point(row["point"], kind, row["engine"], row["gpu"], sources[row["source"]], {}, rate, requests, batch, prompt,
                      output)
        if found.setdefault(point.name, point) != point:
            raise ProfileError(f"{where}: point {short(point.name)} differs from an earlier row of it in more than the metric")
        measured = figures.setdefault(point.name, {})
        if metric in measured:
            raise ProfileError(f"{where}: {metric} of {short(point.name)} is there twice")
        measured[metric] = _number(where, "measured_s", row["measured_s"], True)
    return [dataclasses.replace(point, measured=figures[name]) for name, point in found.items()]


def _number(where: str, column: str, text: str, needed: bool) -> float:
    if not needed:
        if text:
            raise ProfileError(f"{where}: {column} = {text!r}: must be empty for this kind of point")
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = column in ("requests", "batch", "prompt_tokens", "output_tokens", "max_num_batched_tokens")
    if not 0 < value < 1e9 or (whole and value != int(value)):
        raise ProfileError(f"{where}: {column} = {short(text)}: must be a positive {'whole ' if whole else ''}number")
    if column == "measured_s" and value > 1000:
        raise ProfileError(f"{where}: measured_s = {text!r}: over 1,000 s; are these milliseconds?")
    return value


# ------------------------------------------------------------------------------------------- points that are not shipped


def unlicensed(folder: Path) -> list[Point]:
    """The runs on H100s in a folder of the user's, one point a load stage: those whose workload and rate are told, of models of
    16 bits without data parallelism. Of the others nothing is simulated."""
    places = [folder / UNLICENSED_FILE, folder / "unlicensed" / UNLICENSED_FILE]
    path = next((place for place in places if door.is_file(place, ProfileError)), None)
    if path is None:
        raise ProfileError(f"{folder}: has no {UNLICENSED_FILE} (nor has its folder unlicensed/): give the folder that holds it")
    return list(_blis(path))


_BLIS_COLUMNS = ("model", "tp", "dp", "stage_index", "workload", "nominal_stage_rates_req_s", "ttft_mean_ms", "e2e_mean_ms",
                 "exp", "max_num_batched_tokens", "gpu_mem_util")


def _blis(path: Path) -> Iterable[Point]:
    """Stage -1 sums up the others. TPOT = (latency - TTFT) / (output - 1), all of means."""
    found = 0
    for number, row in door.read_csv(path, _BLIS_COLUMNS, ProfileError):
        where, workload = f"{path}:{number}", row["workload"]
        if (row["stage_index"] == "-1" or row["model"] not in PUBLISHED or workload not in TOKENS
                or not row["nominal_stage_rates_req_s"] or row["dp"] not in ("", "1", "1.0")):
            continue
        found += 1
        prompt, output = TOKENS[workload]
        stages = dict(enumerate(row["nominal_stage_rates_req_s"].split(";")))
        stage = int(row["stage_index"]) if row["stage_index"].isdecimal() and len(row["stage_index"]) < 5 else -1
        rate = _number(where, "rate_req_per_s", stages.get(stage, ""), True)
        ttft_s, latency_s = (_number(where, name, row[name], True) / 1e3 for name in ("ttft_mean_ms", "e2e_mean_ms"))
        if not ttft_s < latency_s:
            raise ProfileError(f"{where}: ttft_mean_ms = {row['ttft_mean_ms']}: must be less than e2e_mean_ms")
        budget = _number(where, "max_num_batched_tokens", row["max_num_batched_tokens"], True)
        kv_share = _number(where, "gpu_mem_util", row["gpu_mem_util"], True) if row["gpu_mem_util"] else 0.0
        model, tp = PUBLISHED[row["model"]], int(_number(where, "tp", row["tp"], True))
        waiting = ttft_s > latency_s / 2
        name = "" if model.name == "llama-3.1-8b" else f"{model.name} "
        if tp > 1:
            name += f"TP{tp} "
        requests = round((STAGE_S if len(stages) > 1 else ALONE_S) * rate) if waiting else max(600, round(0.25 * rate * output))
        yield Point(f"{row['exp'].split('-')[0]} {name}{workload} {rate:g} req/s", "constant", "vLLM 0.15.1", "h100",
                    UNLICENSED_SOURCE, {"ttft_mean": ttft_s, "tpot_mean": (latency_s - ttft_s) / (output - 1),
                                        "latency_mean": latency_s},
                    rate, requests, 0, prompt, output, int(budget), kv_share, DISTINCT[workload], False,
                    model.name if model.name in MODELS else row["model"], tp, waiting)
    if not found:
        raise ProfileError(f"{path}: has no run of a known model and workload with its rate")


def group_of(point: Point) -> str:
    """What the errors of a point that is not shipped are summed up with."""
    if point.whole:
        return "waiting for more than half of the latency"
    if get_model(point.model).num_experts:
        return "mixture of experts"
    return "dense, one GPU" if point.tensor_parallel == 1 else "dense, tensor parallel"
