"""Frozen, validated configuration of one run: requests, objectives, device, policy.

Defaults are written once, here. Everything is immutable after construction; a partial TOML file or ``--set``
yields a new object through :func:`load_run_config`, which refuses unknown keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullet import door
from bullet.errors import ConfigError, require, short
from bullet.layout import ClusterConfig, split_layout
from bullet.units import GIB, MILLI

_T = typing.TypeVar("_T")

KV_BLOCK_TOKENS = 16
"""Tokens in a KV block: vLLM's default block size."""


TRACE_FORMATS = ("auto", "csv", "jsonl", "parquet", "azure", "bailian", "mooncake", "burstgpt", "splitwise", "blis", "vidur",
                 "llmservingsim", "run", "sharegpt", "bench")
"""Names of bullet/workload/formats, and files with a row a request under any names."""
_DEFAULT_RATE = 5.0
_TIME = r"[0-9]+(\.[0-9]+)?(ns|us|ms|s|min|h)"


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Which requests arrive when.

    ``arrivals``: ``recorded`` (the trace's own times, divided by ``time_scale``), ``poisson``, ``constant`` or
    ``gamma`` (inter-arrival CV ``cv``) at ``rate_req_per_s``. ``sample``: draw lengths at random with replacement
    (seeded); otherwise rows are taken in order. Lengths are never clipped: what does not fit is
    rejected by name and counted. ``num_requests = None``: as many as the trace has, which is also what
    :func:`load_run_config` takes for recorded arrivals if nobody gives a number.

    ``arrivals = closed``: ``concurrency`` clients, each of which sends its next request when its last one has ended and it has
    thought for ``think_time_s`` (the mean, ``think = exponential``, or always, ``constant``); it thinks before its first as well.

    Of a trace file: ``format`` (one of ``TRACE_FORMATS``), the columns to read (``prompt_column`` may add several up: ``a+b``),
    the unit of its times (``None``: as the file states it, and asked about where it states none), the ``window`` of it that is
    used (bullet/workload/cuts.py: rows ``151:300`` or times ``10min:20min``), whether failed requests are left out (``None``: a
    file that has any is refused), and the ``tokenizer`` that counts where it holds text. ``warmup``: the start of the run that
    its statistics leave out, requests (``100``) or time (``30s``). ``max_prompt_tokens``: rows with a longer prompt are left out
    of each trace, and counted.

    Rates that change (bullet/workload/schedule.py): ``trace`` may name phases in turns, ``azure-code@5/60s,sharegpt@14/60s``, or
    ``rate_profile`` what the rate does over time, ``sine:4.8:19:360s``. Both state their rates, so that ``rate_req_per_s`` is
    ``None``; ``rate_scale`` multiplies them all.
    """

    trace: str = "azure-code"
    arrivals: str = "poisson"
    rate_req_per_s: float | None = _DEFAULT_RATE
    time_scale: float = 1.0
    cv: float = 1.0
    num_requests: int | None = 1000
    sample: bool = True
    format: str = "auto"
    arrival_column: str | None = None
    prompt_column: str | None = None
    output_column: str | None = None
    arrival_unit: str | None = None
    window: str | None = None
    warmup: str | None = None
    skip_failed: bool | None = None
    tokenizer: str | None = None
    concurrency: int | None = None
    think_time_s: float = 0.0
    think: str = "exponential"
    max_prompt_tokens: int | None = None
    rate_profile: str | None = None
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        require(self.arrivals in ("recorded", "poisson", "constant", "gamma", "closed"), "workload.arrivals", self.arrivals,
                "recorded, poisson, constant, gamma or closed")
        if self.arrivals == "closed":
            require(self.concurrency is not None and 1 <= self.concurrency <= 10**6, "workload.concurrency (--concurrency)",
                    self.concurrency, "a number of clients, 1 to 10^6")
        else:
            require(self.concurrency is None, "workload.concurrency (--concurrency)", self.concurrency,
                    f"none with {self.arrivals} arrivals: use workload.arrivals = closed (--arrivals closed)")
            require(self.think_time_s == 0, "workload.think_time_s (--think-time)", self.think_time_s,
                    f"0 with {self.arrivals} arrivals: clients think in a closed loop (--concurrency N)")
        require(0 <= self.think_time_s <= 1e6, "workload.think_time_s (--think-time)", self.think_time_s, "0 to 10^6 s")
        require(self.think in ("exponential", "constant"), "workload.think (--think)", self.think, "exponential or constant")
        scheduled = self.rate_profile is not None or is_phased(self.trace)
        if scheduled:
            self._check_schedule()
        require(self.rate_scale == 1 or scheduled, "workload.rate_scale (--rate-scale)", self.rate_scale,
                "1 where no phases (--trace A@RATE/TIME,..) and no --rate-profile state the rates: use --rate")
        require(self.max_prompt_tokens is None or self.max_prompt_tokens > 0, "workload.max_prompt_tokens (--max-prompt)",
                self.max_prompt_tokens, "a positive number of tokens")
        if self.arrivals not in ("recorded", "closed") and not scheduled:
            require(self.rate_req_per_s is not None and math.isfinite(self.rate_req_per_s)
                    and self.rate_req_per_s > 0, "workload.rate_req_per_s (--rate)", self.rate_req_per_s,
                    "a positive number of requests per second")
        require(math.isfinite(self.time_scale) and self.time_scale > 0, "workload.time_scale", self.time_scale,
                "positive (2 = twice as fast)")
        require(math.isfinite(self.cv) and self.cv > 0, "workload.cv", self.cv, "positive")
        require(self.num_requests is None or self.num_requests > 0, "workload.num_requests (--num-requests)",
                self.num_requests, "a positive whole number")
        require(self.format in TRACE_FORMATS, "workload.format (--format)", self.format, "one of " + ", ".join(TRACE_FORMATS))
        require(self.arrival_unit in (None, "s", "ms", "us", "ns"), "workload.arrival_unit", self.arrival_unit,
                "s, ms, us or ns")
        rows_or_times = rf"(?!:$)([0-9]*:[0-9]*|({_TIME})?:({_TIME})?)"
        require(self.window is None or re.fullmatch(rows_or_times, self.window) is not None, "workload.window (--window)",
                self.window, "FROM:TO, rows (151:300) or times with their unit (10min:20min)")
        require(self.warmup is None or re.fullmatch(rf"[0-9]+|{_TIME}", self.warmup) is not None, "workload.warmup (--warmup)",
                self.warmup, "a number of requests (100) or a time with its unit (30s)")

    def _check_schedule(self) -> None:
        """What does not go with rates that change; and they have no one rate."""
        what = "phases (--trace)" if self.rate_profile is None else "workload.rate_profile (--rate-profile)"
        require(self.arrivals not in ("recorded", "closed"), "workload.arrivals", self.arrivals,
                f"poisson, constant or gamma with {what}, which state rates")
        require(self.rate_profile is None or not is_phased(self.trace), "workload.rate_profile (--rate-profile)",
                self.rate_profile, "none with phases (--trace), which state their rates")
        require(self.rate_req_per_s in (None, _DEFAULT_RATE), "workload.rate_req_per_s (--rate)", self.rate_req_per_s,
                f"none with {what}: use workload.rate_scale (--rate-scale), which multiplies all rates")
        object.__setattr__(self, "rate_req_per_s", None)  # the default for traces that state none
        require(1e-6 <= self.rate_scale <= 1e6, "workload.rate_scale (--rate-scale)", self.rate_scale, "1e-6 to 1e6")


def is_phased(trace: str) -> bool:
    """Whether a trace's name is a row of phases, ``TRACE@RATE/TIME,..``: something follows an ``@`` as numbers would."""
    return "@" in trace and any(re.fullmatch(r".*@[0-9.+-]*(/[0-9.+-]*[a-zA-Z]*)?\s*", part) for part in trace.split(","))


def trace_name(trace: str) -> str:
    """Short, as for a heading or a folder: the last part of a path; of phases, the traces that take turns."""
    parts = [part.rpartition("@")[0] for part in trace.split(",")] if is_phased(trace) else [trace]
    return "+".join(dict.fromkeys(Path(part.strip()).name for part in parts))


# Table 4: normalised TTFT per prompt token, TPOT. Traces not in the table take ShareGPT's TPOT and the looser TTFT.
TABLE_4_SLOS: Mapping[str, tuple[float, float]] = types.MappingProxyType({
    "sharegpt": (3.0 * MILLI, 150 * MILLI),
    "azure-code": (1.5 * MILLI, 200 * MILLI),
    "arxiv": (1.5 * MILLI, 175 * MILLI),
})


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Service-level objectives. ``None`` takes Table 4's value for the trace (ShareGPT's for traces not in it).

    TTFT is ``ttft_s`` for every request, or ``ttft_s_per_token`` x a prompt, of which there are two readings.
    ``ttft_slo_policy``: the reading that the policy is given: ``mean_length`` (the rate x the workload's mean prompt
    ``mean_prompt_tokens``, which :func:`resolve_slo` fills in before the run) or ``per_request`` (x its own prompt).
    ``by_default``: which of them nobody gave, filled in likewise.
    """

    ttft_s_per_token: float | None = None
    tpot_s: float | None = None
    ttft_slo_policy: str = "mean_length"
    mean_prompt_tokens: float | None = None
    ttft_s: float | None = None
    by_default: str | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s_per_token", "tpot_s", "mean_prompt_tokens", "ttft_s"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1e9, f"slo.{name}", value, "positive, up to 1e9")
        require(self.ttft_s is None or self.ttft_s_per_token is None, "slo.ttft_s (--ttft)", self.ttft_s,
                "the only TTFT objective: slo.ttft_s_per_token (--ttft-per-token) is given too")
        require(self.by_default in (None, "ttft", "tpot", "ttft tpot"), "slo.by_default", self.by_default,
                "ttft, tpot or ttft tpot")
        require(self.ttft_slo_policy in ("mean_length", "per_request"), "slo.ttft_slo_policy", self.ttft_slo_policy,
                "mean_length or per_request")


def resolve_slo(slo: SloConfig, trace: str, mean_prompt_tokens: float) -> SloConfig:
    """Every ``None`` replaced by what it stands for, so that the stored configuration is whole."""
    ttft_s_per_token, tpot_s = TABLE_4_SLOS.get(trace, TABLE_4_SLOS["sharegpt"])
    no_ttft = slo.ttft_s is None and slo.ttft_s_per_token is None
    ours = " ".join(name for name, missing in (("ttft", no_ttft), ("tpot", slo.tpot_s is None)) if missing)
    return dataclasses.replace(
        slo,
        ttft_s_per_token=ttft_s_per_token if no_ttft else slo.ttft_s_per_token,
        tpot_s=slo.tpot_s if slo.tpot_s is not None else tpot_s,
        by_default=ours or slo.by_default,
        mean_prompt_tokens=slo.mean_prompt_tokens if slo.mean_prompt_tokens is not None else mean_prompt_tokens,
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The simulated device. ``None`` takes the profile's value.

    ``kv_tokens``: KV capacity; ``None`` derives it from the specs: memory x ``memory_utilization`` less weights
    and ``reserve_bytes`` for activations. Where layers have a window: tokens if all layers kept them. ``kv_dtype``: ``auto`` (as
    the checkpoint says, else 16 bits), ``fp8`` or ``16``. ``max_model_len``: a context shorter than the model's.
    ``contention_scale`` multiplies the contention loss, ``bandwidth_scale`` a fitted device's memory bandwidth,
    ``shared_prefill_share`` is the fraction of shared SMs' time that prefill gets (``None`` where the profile has none: *assumed*
    0.5),
    ``publish_delay_s`` and ``reconfigure_s`` are the paper's Table 5 means. ``timing``: ``fit`` (coefficients),
    ``table`` (measured kernel tables, interpolated: bullet/devices/table.py), a folder of ``bullet-profile fit``, or one of
    ``bullet-profile import`` (``table:FOLDER`` where it holds a fit too). ``table_outside``: beyond what its family's points
    enclose, a query is refused (``refuse``) or answered by the fit, counted and labelled (``fit``).

    Host time that no kernel hides, *assumed* 0: ``host_step_s`` in every step (a prefill cut by layers carries its share),
    ``host_prefill_step_s`` more in one with a prompt, ``host_request_s`` from a request's arrival until the scheduler sees it.
    Each launch costs ``host_launch_s`` (deciding, submitting) and ``device_launch_s`` (until its first block runs), however few
    layers it has: *assumed* 0. The paper's Table 5 has 10.2e-6 for a prediction, one part of the former.
    """

    model: str = "llama-3.1-8b"
    gpu: str = "a100-80gb"
    tensor_parallel: int = 1
    kv_tokens: int | None = None
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    memory_utilization: float = 0.9
    reserve_bytes: int = 2 * GIB
    contention_scale: float = 1.0
    bandwidth_scale: float = 1.0
    shared_prefill_share: float | None = None
    publish_delay_s: float = 0.21 * MILLI
    reconfigure_s: float = 4.1e-6
    host_step_s: float = 0.0
    host_launch_s: float = 0.0
    device_launch_s: float = 0.0
    host_prefill_step_s: float = 0.0
    host_request_s: float = 0.0
    noise_std: float = 0.0
    partition_step_sms: int = 2
    timing: str = "fit"
    table_outside: str = "refuse"

    def __post_init__(self) -> None:
        from bullet.catalog.gpus import canonical

        object.__setattr__(self, "gpu", canonical(self.gpu))  # one name for one card, in files and keys as well
        require(self.tensor_parallel >= 1, "device.tensor_parallel", self.tensor_parallel, "1 or more")
        require(self.kv_tokens is None or self.kv_tokens > 0, "device.kv_tokens", self.kv_tokens, "positive")
        require(0 < self.memory_utilization <= 1, "device.memory_utilization", self.memory_utilization,
                "more than 0, and 1 or less")
        require(self.reserve_bytes >= 0, "device.reserve_bytes", self.reserve_bytes, "0 or more")
        require(0 <= self.contention_scale <= 1e6, "device.contention_scale", self.contention_scale, "0 to 1e6")
        require(0.1 <= self.bandwidth_scale <= 10, "device.bandwidth_scale", self.bandwidth_scale, "0.1 to 10")
        require(self.shared_prefill_share is None or 0 < self.shared_prefill_share < 1, "device.shared_prefill_share",
                self.shared_prefill_share, "between 0 and 1, exclusive")
        require(self.kv_dtype in ("auto", "fp8", "16"), "device.kv_dtype (--kv-dtype)", self.kv_dtype, "auto, fp8 or 16")
        require(self.max_model_len is None or self.max_model_len > 0, "device.max_model_len (--max-model-len)",
                self.max_model_len, "a positive number of tokens")
        for name in ("publish_delay_s", "reconfigure_s", "host_step_s", "host_prefill_step_s",
                     "host_request_s", "host_launch_s", "device_launch_s"):
            require(0 <= getattr(self, name) <= 1, f"device.{name}", getattr(self, name), "0 to 1 s")
        require(0 <= self.noise_std <= 1, "device.noise_std", self.noise_std, "0 to 1 (relative)")
        require(self.partition_step_sms >= 1, "device.partition_step_sms", self.partition_step_sms, "1 or more")
        require(bool(self.timing), "device.timing (--device-model)", self.timing, "fit, table or a folder of bullet-profile fit")
        require(self.table_outside in ("refuse", "fit"), "device.table_outside", self.table_outside, "refuse or fit")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which scheduler. ``options`` go to the policy, which refuses those it does not know; one that is ``None`` is not given.

    ``estimator``: ``srm``, ``srm-blind`` or ``oracle``. ``recalibrate``: learn from measured step times online.
    ``estimator_error``: multiplies every first prediction (1.3 = starts 30 % too slow); for studies. ``prefix_cache``: prompts
    share the KV blocks of common beginnings: ``on``, ``off``, or ``auto``, where the trace says what they share.
    """

    name: str = "bullet"
    estimator: str = "srm"
    recalibrate: bool = True
    estimator_error: float = 1.0
    prefix_cache: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.estimator in ("srm", "srm-blind", "oracle"), "policy.estimator", self.estimator,
                "srm, srm-blind or oracle")
        require(1e-6 <= self.estimator_error <= 1e6, "policy.estimator_error", self.estimator_error, "positive, 1e-6 to 1e6")
        require(self.prefix_cache in ("auto", "on", "off"), "policy.prefix_cache", self.prefix_cache, "auto, on or off")
        if None in self.options.values():
            object.__setattr__(self, "options", {k: v for k, v in self.options.items() if v is not None})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One simulated run, whole. ``debug`` checks the invariants at every boundary (slow)."""

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    seed: int = 0
    debug: bool = False
    cluster: ClusterConfig = field(default_factory=ClusterConfig, metadata={"silent": True})

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")

    @property
    def layout(self) -> str | None:
        """Of the cluster; ``None``: one device."""
        return split_layout(self.policy.name)[1] or self.cluster.layout

    @property
    def system(self) -> str:
        """The policy's name, with the layout it stands in."""
        name, own = split_layout(self.policy.name)
        layout = own or self.cluster.layout
        return name if layout is None else f"{name}@{layout}"


NONE = "none"
"""Stands for ``None`` in TOML, which has no null, where a number is expected."""


def from_mapping(cls: type[_T], raw: Mapping[str, Any], where: str) -> _T:
    """A frozen config dataclass of nested plain data; unknown keys and wrong types are refused.

    The message names the file or flag ``where``, and the key.
    """
    return door.typed(_plain(raw, cls), cls, where, ConfigError)


def _plain(value: Any, hint: Any) -> Any:
    """With ``None`` where a text stands for it, and without numpy's numbers, which a notebook may give."""
    if isinstance(value, Mapping):
        hints = door.type_hints(hint)
        return {key: _plain(inner, hints.get(key)) for key, inner in value.items()}
    if value == NONE and (options := typing.get_args(hint)):
        return None if type(None) in options and str not in options else value
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") and value.ndim == 0 else value


def load_run_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Defaults, then a TOML file, then overrides (dotted keys, as of ``--set a.b=c``), checked once at the end."""
    raw: dict[str, Any] = {}
    where = door.FLAGS
    if path is not None:
        where = str(path)
        raw = door.read_toml(Path(path), ConfigError, controls=True)
        from_mapping(RunConfig, raw, where)  # blame the file for the file's mistakes, before any override
    for dotted, value in (overrides or {}).items():
        node = raw
        *parents, leaf = dotted.split(".")
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"--set {dotted}: {parent!r} is not a table")
            node = child
        node[leaf] = value
    workload = raw.get("workload")
    if isinstance(workload, dict) and workload.get("arrivals") == "recorded":
        workload.setdefault("num_requests", None)
    if isinstance(workload, dict) and workload.get("concurrency") is not None:
        workload.setdefault("arrivals", "closed")
    _displace_slo(raw.get("slo"), [key.removeprefix("slo.") for key, value in (overrides or {}).items() if value is not None])
    return from_mapping(RunConfig, raw, door.FLAGS if overrides else where)


Config = RunConfig | Mapping[str, Any] | str | Path
"""A configuration: whole, or keys over the defaults (dotted as of ``--set``, or nested as in a file), or a TOML file."""


def configuration(config: Config) -> RunConfig:
    """A whole configuration of what :data:`Config` may be; :class:`ConfigError` names the key that is wrong."""
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Mapping):
        return load_run_config(None, dotted(config))
    return load_run_config(config)


def dotted(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; an empty table is a value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def _displace_slo(slo: Any, given: list[str]) -> None:
    """An objective given on top of a file takes the place of the file's, in whichever form that is."""
    if not isinstance(slo, dict):
        return
    for key, other in (("ttft_s", "ttft_s_per_token"), ("ttft_s_per_token", "ttft_s")):
        if key in given and other not in given:
            slo.pop(other, None)
    if isinstance(slo.get("by_default"), str):
        displaced = {key.partition("_s")[0] for key in given if key in ("ttft_s", "ttft_s_per_token", "tpot_s")}
        slo["by_default"] = " ".join(name for name in slo["by_default"].split() if name not in displaced) or None


def parse_set(text: str) -> tuple[str, Any]:
    """``a.b=c`` of ``--set``: the value is TOML if it parses as such (numbers, booleans, lists), else a string."""
    key, sep, value = text.partition("=")
    if not sep or not key or any(not part for part in key.split(".")) or key.count(".") > door.MOST_DEPTH // 2:
        raise ConfigError(f"--set {short(text)}: must read key.subkey=value")
    if value in ("none", "None"):
        return key, None
    try:
        found = tomllib.loads(f"v = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    except (ValueError, RecursionError) as exc:  # more digits, or deeper, than Python reads
        raise ConfigError(f"--set {key} = {short(value)}: cannot be read ({door.reason(exc)})") from None
    if len(found) > 1:  # lines below the first are text as well
        return key, value
    door.sound(found, f"--set {key} = {short(value)}", ConfigError, controls=True)
    return key, found["v"]


def to_toml(config: Any) -> str:
    """A config dataclass as TOML that :func:`from_mapping` reads back to the same; ``None`` is left out where it is the
    default."""
    lines: list[str] = []

    def text(value: str) -> str:
        # A JSON string is a TOML one, but for DEL and for surrogates, which only undecodable file names have.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f").encode("utf-8", "backslashreplace").decode()

    def key(name: str) -> str:
        return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else text(name)

    def scalar(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(scalar(v) for v in value) + "]"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key(k)} = {scalar(v)}" for k, v in value.items()) + "}"
        return text(str(value))

    def table(node: Any, prefix: str) -> None:
        nested: list[tuple[str, Any]] = []
        if dataclasses.is_dataclass(node):
            items = {f.name: NONE if getattr(node, f.name) is None and f.default is not None else getattr(node, f.name)
                     for f in dataclasses.fields(node)
                     if not (f.metadata.get("silent") and getattr(node, f.name) == type(getattr(node, f.name))())}
        else:
            items = dict(node)
        for name, value in items.items():
            if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
                nested.append((key(name), value))
            elif value is not None:
                lines.append(f"{key(name)} = {scalar(value)}")
        for name, value in nested:
            if value != {} or prefix.count(".") > 1:  # an empty [policy.options] says nothing
                lines.extend(["", f"[{prefix}{name}]"])
                table(value, f"{prefix}{name}.")

    table(config, "")
    return "\n".join(lines).strip() + "\n"
