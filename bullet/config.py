"""Frozen, validated configuration: models, GPUs, objectives and one run.

Defaults are written once, here. Everything is immutable after construction; a partial TOML file or ``--set``
yields a new object through :func:`load_run_config`, which refuses unknown keys.

Sources of the built-in specifications stand beside the numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
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

from bullet.errors import ConfigError
from bullet.units import GIB, GIGA, MIB, MILLI, TERA

_T = typing.TypeVar("_T")

KV_BLOCK_TOKENS = 16
"""Tokens in a KV block: vLLM's default block size."""


def _require(ok: bool, what: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{what} = {value!r}: must be {allowed}")


# --------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: what is needed to count operations and bytes.

    ``num_experts = 0`` means a dense MLP; otherwise ``intermediate_size`` is that of one expert and each token
    visits ``experts_per_token`` of them.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    dtype_bytes: int = 2
    tie_embeddings: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "context_tokens", "dtype_bytes"):
            _require(getattr(self, name) > 0, f"model {self.name}: {name}", getattr(self, name), "positive")
        _require(self.num_heads % self.num_kv_heads == 0, f"model {self.name}: num_heads", self.num_heads,
                 f"a multiple of num_kv_heads = {self.num_kv_heads}")
        _require((self.num_experts > 0) == (self.experts_per_token > 0)
                 and 0 <= self.experts_per_token <= max(self.num_experts, 0),
                 f"model {self.name}: experts_per_token", self.experts_per_token,
                 f"between 1 and num_experts = {self.num_experts}, or both 0")

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key, value projection's output."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights (norms are left out: under 0.01 %)."""
        attention = self.hidden_size * self.qkv_size + self.num_heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        router = self.hidden_size * self.num_experts
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return (self.num_layers * (attention + mlp + router) + embeddings) * self.dtype_bytes

    @classmethod
    def from_hf(cls, path: str | Path) -> ModelSpec:
        """Read a Hugging Face ``config.json`` (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE field names)."""
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}: cannot be read as a JSON model config ({exc})") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: must hold one JSON object, found {type(raw).__name__}")

        def integer(*names: str, default: int | None = None) -> int:
            for name in names:
                value = raw.get(name)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ConfigError(f"{path}: {name} = {value!r}: must be a whole number, 0 or more")
                return value
            if default is None:
                raise ConfigError(f"{path}: {names[0]!r} is missing")
            return default

        heads = integer("num_attention_heads")
        hidden = integer("hidden_size")
        experts = integer("num_experts", "num_local_experts", default=0)
        dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16")
        widths = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
        if dtype not in widths:
            raise ConfigError(f"{path}: torch_dtype = {dtype!r}: must be one of {', '.join(widths)}")
        model_type = str(raw.get("model_type", ""))
        if "q_lora_rank" in raw or "kv_lora_rank" in raw:
            raise ConfigError(f"{path}: latent attention (MLA) is not modelled; use a GQA or MHA model")
        if raw.get("quantization_config") is not None:
            raise ConfigError(f"{path}: quantization_config: quantised weights are not modelled; without that key they are "
                              f"counted as {dtype}")
        window = raw.get("sliding_window")
        if (isinstance(window, int) and raw.get("use_sliding_window", True)
                and window < integer("max_position_embeddings")):
            raise ConfigError(f"{path}: sliding_window = {window}: sliding-window attention is not modelled; without that key "
                              "every token attends to all before it")
        if heads == 0:
            raise ConfigError(f"{path}: num_attention_heads = 0: must be positive")
        return cls(
            name=str(raw.get("_name_or_path") or path.parent.name or path.stem),
            num_layers=integer("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=integer("moe_intermediate_size", "intermediate_size") if experts
            else integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=integer("num_key_value_heads", default=heads),
            head_dim=integer("head_dim", default=hidden // heads),
            vocab_size=integer("vocab_size"),
            context_tokens=integer("max_position_embeddings"),
            dtype_bytes=widths[dtype],
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type.startswith("qwen3"),
            num_experts=experts,
            experts_per_token=integer("num_experts_per_tok", default=0) if experts else 0,
        )


# Values of the public config.json of meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, Qwen/Qwen3-32B.
MODELS: Mapping[str, ModelSpec] = types.MappingProxyType({m.name: m for m in (
    ModelSpec("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ModelSpec("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ModelSpec("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960, qk_norm=True),
    ModelSpec("tiny", 4, 256, 512, 4, 2, 64, 1024, 4096),
)})


# ----------------------------------------------------------------------------------------------- GPUs


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU as its data sheet states it, and the partition rules of its compute capability.

    ``peak_flops``: dense bf16 tensor-core operations per second, no sparsity. ``bandwidth_knee_sms``: the
    inflection ``N_d`` of eq. 1, SMs at which memory bandwidth saturates; ``None`` where nobody published one.
    ``mem_bytes``: the sheets' GB of memory are GiB (an 80 GB A100 reports 81,920 MiB), their GB/s are 10^9.
    """

    name: str
    num_sms: int
    peak_flops: float
    mem_bytes_per_s: float
    mem_bytes: int
    l2_bytes: int
    compute_capability: tuple[int, int]
    link_bytes_per_s: float
    bandwidth_knee_sms: int | None
    source: str

    def __post_init__(self) -> None:
        for name in ("num_sms", "peak_flops", "mem_bytes_per_s", "mem_bytes"):
            _require(getattr(self, name) > 0, f"gpu {self.name}: {name}", getattr(self, name), "positive")

    @property
    def knee_sms(self) -> int:
        """``N_d``; where unpublished, A100's share of the device (30 of 108, Fig. 8): *assumed*."""
        if self.bandwidth_knee_sms is not None:
            return self.bandwidth_knee_sms
        return max(1, round(self.num_sms * 30 / 108))


GPUS: Mapping[str, GpuSpec] = types.MappingProxyType({g.name: g for g in (
    # NVIDIA A100 Tensor Core GPU data sheet (80GB SXM): 312 TFLOPS bf16, 2039 GB/s, NVLink 600 GB/s both ways;
    # 108 SMs and 40 MB L2: A100 architecture whitepaper. N_d = 30: the paper's Fig. 8.
    GpuSpec("a100-80gb", 108, 312 * TERA, 2039 * GIGA, 80 * GIB, 40 * MIB, (8, 0), 300 * GIGA, 30,
            "NVIDIA A100 80GB SXM data sheet; GA100 whitepaper; N_d from the paper, Fig. 8"),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOPS bf16 with sparsity = 989.4 dense, 3.35 TB/s,
    # NVLink 900 GB/s both ways; 132 SMs and 50 MB L2: Hopper architecture whitepaper.
    GpuSpec("h100", 132, 989.4 * TERA, 3350 * GIGA, 80 * GIB, 50 * MIB, (9, 0), 450 * GIGA, None,
            "NVIDIA H100 SXM data sheet; GH100 whitepaper"),
    # NVIDIA H200 data sheet (SXM): same GH100 compute, 141 GB, 4.8 TB/s.
    GpuSpec("h200", 132, 989.4 * TERA, 4800 * GIGA, 141 * GIB, 50 * MIB, (9, 0), 450 * GIGA, None,
            "NVIDIA H200 SXM data sheet; GH100 whitepaper"),
    # H20: 148 TFLOPS bf16 dense, 4.0 TB/s, 96 GB, 78 SMs (the paper's Table 3; public H20 specification sheets).
    GpuSpec("h20", 78, 148 * TERA, 4000 * GIGA, 96 * GIB, 60 * MIB, (9, 0), 450 * GIGA, None,
            "public H20 specification sheets; SM count as in the paper, Table 3"),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 128 SMs, 165.2 TFLOPS bf16 with fp32 accumulate,
    # 1008 GB/s, 24 GB, 72 MB L2; no NVLink: PCIe 4.0 x16, 32 GB/s each way.
    GpuSpec("rtx4090", 128, 165.2 * TERA, 1008 * GIGA, 24 * GIB, 72 * MIB, (8, 9), 32 * GIGA, None,
            "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
)})


def get_model(name: str) -> ModelSpec:
    """A built-in model by name, or a path to a ``config.json``."""
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return ModelSpec.from_hf(name)
    raise ConfigError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}, or give a path to a config.json")


def model_label(model: ModelSpec) -> str:
    """A built-in model's name. A config.json is known by what it says as well: another one of the same name is another
    model, and neither resumes nor is divided by the other's rows.
    """
    if MODELS.get(model.name) == model:
        return model.name
    return f"{model.name}#{hashlib.sha256(repr(model).encode()).hexdigest()[:8]}"


def get_gpu(name: str) -> GpuSpec:
    """A built-in GPU by name."""
    if name not in GPUS:
        raise ConfigError(f"unknown gpu {name!r}: choose one of {', '.join(GPUS)}")
    return GPUS[name]


# ----------------------------------------------------------------------------------------- run config


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Which requests arrive when.

    ``arrivals``: ``recorded`` (the trace's own times, divided by ``time_scale``), ``poisson``, ``constant`` or
    ``gamma`` (inter-arrival CV ``cv``) at ``rate_req_per_s``. ``sample``: draw lengths at random with replacement
    (seeded); otherwise rows are taken in order. Lengths are never clipped: what does not fit is
    rejected by name and counted. ``num_requests = None``: as many as the trace has, which is also what
    :func:`load_run_config` takes for recorded arrivals if nobody gives a number.
    """

    trace: str = "azure-code"
    arrivals: str = "poisson"
    rate_req_per_s: float | None = 5.0
    time_scale: float = 1.0
    cv: float = 1.0
    num_requests: int | None = 1000
    sample: bool = True
    format: str = "auto"
    arrival_column: str | None = None
    prompt_column: str | None = None
    output_column: str | None = None
    arrival_unit: str = "s"

    def __post_init__(self) -> None:
        _require(self.arrivals in ("recorded", "poisson", "constant", "gamma"), "workload.arrivals", self.arrivals,
                 "recorded, poisson, constant or gamma")
        if self.arrivals != "recorded":
            _require(self.rate_req_per_s is not None and math.isfinite(self.rate_req_per_s)
                     and self.rate_req_per_s > 0, "workload.rate_req_per_s (--rate)", self.rate_req_per_s,
                     "a positive number of requests per second")
        _require(math.isfinite(self.time_scale) and self.time_scale > 0, "workload.time_scale", self.time_scale,
                 "positive (2 = twice as fast)")
        _require(math.isfinite(self.cv) and self.cv > 0, "workload.cv", self.cv, "positive")
        _require(self.num_requests is None or self.num_requests > 0, "workload.num_requests (--num-requests)",
                 self.num_requests, "a positive whole number")
        _require(self.format in ("auto", "azure", "csv", "jsonl"), "workload.format", self.format,
                 "auto, azure, csv or jsonl")
        _require(self.arrival_unit in ("s", "ms", "us", "ns"), "workload.arrival_unit", self.arrival_unit,
                 "s, ms, us or ns")


# Table 4: normalised TTFT per prompt token, TPOT. Traces not in the table take ShareGPT's TPOT and the looser TTFT.
TABLE_4_SLOS: Mapping[str, tuple[float, float]] = types.MappingProxyType({
    "sharegpt": (3.0 * MILLI, 150 * MILLI),
    "azure-code": (1.5 * MILLI, 200 * MILLI),
    "arxiv": (1.5 * MILLI, 175 * MILLI),
})


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Service-level objectives. ``None`` takes Table 4's value for the trace (ShareGPT's for traces not in it).

    ``ttft_slo_policy``: the reading that the policy is given: ``mean_length`` (the rate x the workload's mean prompt
    ``mean_prompt_tokens``, which :func:`resolve_slo` fills in before the run) or ``per_request`` (x its own prompt).
    """

    ttft_s_per_token: float | None = None
    tpot_s: float | None = None
    ttft_slo_policy: str = "mean_length"
    mean_prompt_tokens: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s_per_token", "tpot_s", "mean_prompt_tokens"):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and value > 0), f"slo.{name}", value, "positive")
        _require(self.ttft_slo_policy in ("mean_length", "per_request"), "slo.ttft_slo_policy", self.ttft_slo_policy,
                 "mean_length or per_request")


def resolve_slo(slo: SloConfig, trace: str, mean_prompt_tokens: float) -> SloConfig:
    """Every ``None`` replaced by what it stands for, so that the stored configuration is whole."""
    ttft_s_per_token, tpot_s = TABLE_4_SLOS.get(trace, TABLE_4_SLOS["sharegpt"])
    return dataclasses.replace(
        slo,
        ttft_s_per_token=slo.ttft_s_per_token if slo.ttft_s_per_token is not None else ttft_s_per_token,
        tpot_s=slo.tpot_s if slo.tpot_s is not None else tpot_s,
        mean_prompt_tokens=slo.mean_prompt_tokens if slo.mean_prompt_tokens is not None else mean_prompt_tokens,
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The simulated device. ``None`` takes the profile's value.

    ``kv_tokens``: KV capacity; ``None`` derives it from the specs: memory x ``memory_utilization`` less weights
    and ``reserve_bytes`` for activations. ``contention_scale`` multiplies the contention loss,
    ``shared_prefill_share`` is the fraction of shared SMs' time that prefill gets (*assumed* 0.5),
    ``publish_delay_s`` and ``reconfigure_s`` are the paper's Table 5 means. ``timing``: ``fit`` (coefficients),
    ``table`` (measured kernel tables, interpolated: bullet/table_device.py), or a folder of ``bullet-profile fit``.
    """

    model: str = "llama-3.1-8b"
    gpu: str = "a100-80gb"
    tensor_parallel: int = 1
    kv_tokens: int | None = None
    memory_utilization: float = 0.9
    reserve_bytes: int = 2 * GIB
    contention_scale: float = 1.0
    shared_prefill_share: float = 0.5
    publish_delay_s: float = 0.21 * MILLI
    reconfigure_s: float = 4.1e-6
    noise_std: float = 0.0
    partition_step_sms: int = 2
    timing: str = "fit"

    def __post_init__(self) -> None:
        _require(self.tensor_parallel >= 1, "device.tensor_parallel", self.tensor_parallel, "1 or more")
        _require(self.kv_tokens is None or self.kv_tokens > 0, "device.kv_tokens", self.kv_tokens, "positive")
        _require(0 < self.memory_utilization <= 1, "device.memory_utilization", self.memory_utilization,
                 "more than 0, and 1 or less")
        _require(self.reserve_bytes >= 0, "device.reserve_bytes", self.reserve_bytes, "0 or more")
        _require(0 <= self.contention_scale <= 1e6, "device.contention_scale", self.contention_scale, "0 to 1e6")
        _require(0 < self.shared_prefill_share < 1, "device.shared_prefill_share", self.shared_prefill_share,
                 "between 0 and 1, exclusive")
        _require(0 <= self.publish_delay_s <= 1, "device.publish_delay_s", self.publish_delay_s, "0 to 1 s")
        _require(0 <= self.reconfigure_s <= 1, "device.reconfigure_s", self.reconfigure_s, "0 to 1 s")
        _require(0 <= self.noise_std <= 1, "device.noise_std", self.noise_std, "0 to 1 (relative)")
        _require(self.partition_step_sms >= 1, "device.partition_step_sms", self.partition_step_sms, "1 or more")
        _require(bool(self.timing), "device.timing (--device-model)", self.timing, "fit, table or a folder of bullet-profile fit")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which scheduler. ``options`` go to the policy, which refuses those it does not know; one that is ``None`` is not given.

    ``estimator``: ``srm``, ``srm-blind`` or ``oracle``. ``recalibrate``: learn from measured step times online.
    ``estimator_error``: multiplies every first prediction (1.3 = starts 30 % too slow); for studies.
    """

    name: str = "bullet"
    estimator: str = "srm"
    recalibrate: bool = True
    estimator_error: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.estimator in ("srm", "srm-blind", "oracle"), "policy.estimator", self.estimator,
                 "srm, srm-blind or oracle")
        _require(math.isfinite(self.estimator_error) and self.estimator_error > 0, "policy.estimator_error",
                 self.estimator_error, "positive")
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

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")


PLAIN_NAMES: Mapping[Any, str] = types.MappingProxyType({
    str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "none"})
"""How messages call the types that a value may have."""

NONE = "none"
"""Stands for ``None`` in TOML, which has no null, where a number is expected."""


def from_mapping(cls: type[_T], raw: Mapping[str, Any], where: str) -> _T:
    """Build a frozen config dataclass from nested plain data; unknown keys and wrong types are refused.

    ``where`` names the file or flag in the message.
    """
    return _build(cls, raw, where, "")


def _build(cls: type[_T], raw: Mapping[str, Any], where: str, prefix: str) -> _T:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {}
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"{where}: unknown key {path!r}: allowed are {', '.join(sorted(known))}")
        kwargs[key] = _coerce(hints[key], value, where, path)
    try:
        return cls(**kwargs)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from None


def _coerce(hint: Any, value: Any, where: str, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {path} = {value!r}: must be a table")
        return _build(typing.cast("type[Any]", hint), value, where, f"{path}.")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value == NONE and type(None) in options and str not in options:
        return None
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option in (str, bool) and isinstance(value, option):
            return value
        if typing.get_origin(option) is not None and isinstance(value, Mapping):
            return dict(value)
    names = " or ".join(PLAIN_NAMES.get(o, "a table") for o in options)
    raise ConfigError(f"{where}: {path} = {value!r}: must be {names}")


def load_run_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Defaults, then a TOML file, then overrides (dotted keys, as of ``--set a.b=c``), checked once at the end."""
    raw: dict[str, Any] = {}
    where = "configuration"
    if path is not None:
        where = str(path)
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read ({exc.strerror})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: not valid TOML ({exc})") from None
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
    return from_mapping(RunConfig, raw, "configuration" if overrides else where)


def parse_set(text: str) -> tuple[str, Any]:
    """``a.b=c`` of ``--set``: the value is TOML if it parses as such (numbers, booleans, lists), else a string."""
    key, sep, value = text.partition("=")
    if not sep or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"--set {text!r}: must read key.subkey=value")
    if value in ("none", "None"):
        return key, None
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value


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
                     for f in dataclasses.fields(node)}
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
