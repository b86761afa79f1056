"""A table of samples (:mod:`bullet.profiles.rows`) to a device's coefficients, with the error on what each fit has not seen.

:func:`fit_profile` is ``bullet-profile fit``. Each kernel family is fitted on one source; other sources in the table are
compared, not mixed in, for they differ by more than a fit errs. Coefficients that ship are fitted on all rows of the source;
errors come from fits on every other token count (context, message size), and on all GEMM shapes but one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.devices.coefficients import ANALYTIC_FROM, CALLED, ROWWISE, DeviceCoefficients, lent
from bullet.errors import ProfileError
from bullet.profiles import forms
from bullet.profiles.check import check_samples
from bullet.profiles.forms import Array, FitError
from bullet.profiles.rows import Row
from bullet.work import gemm_shapes

GEMM_OPS = ("gemm_qkv", "gemm_o", "gemm_gate_up", "gemm_down", "gemm_lm_head", "gemm")
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "gemm": GEMM_OPS, "rowwise": ("norm", "rope", "act", "embedding"), "prefill_attention": ("prefill_attention",),
    "decode_attention": ("decode_attention",), "all_reduce": ("all_reduce",)}
PARAMETERS = {"gemm": 7, "rowwise": 5, "prefill_attention": 3, "decode_attention": 3, "all_reduce": 2}
PREFERRED: Mapping[str, tuple[str, ...]] = {
    # Vidur has the model's exact shapes; of the others SGLang's GEMM rows are the more realistic: vLLM's collector leaves
    # weights at their initial values, which keeps clocks high. vLLM's attention has a twin on every GPU.
    "gemm": ("vidur", "sglang", "vllm"), "rowwise": ("vidur", "vllm"), "prefill_attention": ("vllm", "sglang"),
    "decode_attention": ("vllm", "sglang"), "all_reduce": ("vllm", "sglang", "vidur")}
OWN = "this project"
LARGEST_ALL_REDUCE_BYTES = 64 * 2**20
VIDUR_NORMS = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "emb")


@dataclass
class Fit:
    """Coefficients as they come together, errors by name, and what nothing was measured for."""

    gpu: GpuSpec
    model: ModelSpec
    measured: bool = True
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    lender: str = ANALYTIC_FROM

    def whose(self, what: str, borrowed: DeviceCoefficients) -> str:
        """Whose ``what`` of ``borrowed`` is, in words: the lender's, or whoever's the lender has it of."""
        return lent(borrowed.notes.get("assumed", ())).get(what, f"{CALLED[self.lender]}'s")

    def error(self, name: str, rows: Sequence[Row], predict: Callable[..., Array], *parameters: Any) -> None:
        """Keep the error of ``predict(rows, *parameters)``, if there is a row to make one of."""
        if rows:
            self.errors[name] = FitError.of(predict(rows, *parameters), column(rows, "median_s")).as_dict()

    def family(self, name: str, found: Mapping[str, list[Row]], rows: Sequence[Row], use: np.ndarray,
               solve: Callable[[Sequence[Row]], Array], predict: Callable[[Sequence[Row], Array], Array],
               parts: Mapping[str, Callable[[Row], bool]] = MappingProxyType({"": lambda row: True})) -> Array:
        """Parameters of all ``rows``. Errors: of a fit where ``use`` is true on the rest, by ``parts`` (a label's ending -> which
        rows), and of the whole fit on the other sources found."""
        trial, unseen = solve(take(rows, use)), take(rows, ~use)
        for label, wanted in parts.items():
            self.error(f"{name}_left_out{label}", [r for r in unseen if wanted(r)], predict, trial)
        parameters = solve(rows)
        self.against(name, found, predict, parameters)
        return parameters

    def against(self, name: str, found: Mapping[str, list[Row]], predict: Callable[..., Array], *parameters: Any) -> None:
        """Errors on the sources that the family was not fitted on."""
        for other in sorted(set(found) - {self.sources.get(name)}):
            self.error(f"{name}_against_{other}", found[other], predict, *parameters)


def version_of(row: Mapping[str, Any]) -> str:
    """Whose measurement a row is."""
    return row["origin_version"] or OWN


def of_family(rows: Sequence[Row], family: str) -> dict[str, list[Row]]:
    """Rows alone on the whole device, by source; in an order that does not depend on the file's."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["op"] in FAMILIES[family] and row["kind"] == "solo" and row["sms"] == row["device_sms"] and (
                row["drift_ok"] is not False and row["corunner"] == "idle"):
            found.setdefault(version_of(row), []).append(row)
    ops = {op: i for i, op in enumerate(FAMILIES[family])}
    for own in found.values():
        own.sort(key=lambda r: (ops[r["op"]], r["order"] or 0, r["id"]))
    return found


def choose(found: Mapping[str, list[Row]], family: str, asked: Mapping[str, str]) -> str | None:
    """The source to fit a family on: asked for, else ours, else by ``PREFERRED``, else that of most rows; None without rows."""
    if family in asked:
        if asked[family] not in found:
            raise ProfileError(f"{family}: no rows of {asked[family]!r}: the table has {', '.join(sorted(found)) or 'none'}")
        return asked[family]
    order = (OWN, *PREFERRED[family])
    chosen = [name for wanted in order for name in sorted(found) if name.startswith(wanted)]
    return next(iter([*chosen, *sorted(found, key=lambda name: (-len(found[name]), name))]), None)


def enough(rows: Sequence[Row], family: str, source: str) -> None:
    """Twice as many rows as parameters, or one line that says so."""
    need = 2 * PARAMETERS[family]
    if len(rows) < need:
        raise ProfileError(f"{family}: {len(rows)} rows of {source}, at least {need} are needed to fit {PARAMETERS[family]} "
                           f"parameters and test them: measure more, or take another card's: --borrow {family}")


def column(rows: Sequence[Row], name: str) -> Array:
    """A column as an array."""
    return np.array([float(row[name]) for row in rows])


def every_other(values: Array) -> np.ndarray:
    """True for rows to fit on: every other distinct value."""
    return np.searchsorted(np.unique(values), values) % 2 == 0


def take(rows: Sequence[Row], use: np.ndarray) -> list[Row]:
    """Rows where ``use`` is true."""
    return [row for row, wanted in zip(rows, use, strict=True) if wanted]


# -------------------------------------------------------------------------------------------- the families


def _gemms(rows: Sequence[Row]) -> list[forms.Gemm]:
    return [forms.Gemm(row["tokens"], row["columns"], row["inner"], row["median_s"]) for row in rows]


def with_shapes(rows: Sequence[Row], model: ModelSpec) -> list[Row]:
    """GEMM rows of a sweep name the model's kernel: their columns and inner size follow."""
    shapes = {f"gemm_{name}": shape for name, shape in gemm_shapes(model).items()}
    return [row if row["columns"] is not None or row["op"] not in shapes
            else {**row, "columns": shapes[row["op"]][0], "inner": shapes[row["op"]][1]} for row in rows]


def _require_both_sides(rows: Sequence[Row], source: str, gpu: GpuSpec) -> None:
    """Refuse GEMMs that are all bound by bytes, or all by operations: they fix no rate, or no bandwidth."""
    excess = np.array([2.0 * r.m * r.n * r.k / gpu.peak_flops
                       - 2.0 * (r.m * r.k + r.k * r.n + r.m * r.n) / gpu.mem_bytes_per_s for r in _gemms(rows)])
    tokens = column(rows, "tokens")
    for what, count, least, fewer in (("operations", (excess > 0).sum(), len(forms.TILES), "more"),
                                      ("bytes", (excess < 0).sum(), 1, "fewer")):
        if count < least:
            raise ProfileError(f"gemm: {count} rows of {source} are bound by {what}, of {tokens.min():g} to {tokens.max():g} "
                               f"tokens; at least {least} are needed to tell rates from bandwidth: measure {fewer} tokens, or "
                               "take another card's: --borrow gemm")


def fit_gemms(out: Fit, found: Mapping[str, list[Row]], source: str) -> None:
    """Tiles, bandwidth, overheads; waves on and off on the same left-out rows."""
    rows, gpu = found[source], out.gpu
    enough(rows, "gemm", source)
    _require_both_sides(rows, source, gpu)
    # Vidur's dense token counts fix every tile: gradients get there, and the figures in docs/ rest on what they found.
    searched = not source.startswith("vidur")

    def predict(rows: Sequence[Row], parameters: Array, waves: bool = True) -> Array:
        return forms.gemm_seconds(_gemms(rows), parameters, gpu, waves)

    use = every_other(column(rows, "tokens"))
    seen, unseen = take(rows, use), take(rows, ~use)
    for label, waves in (("gemm_left_out", True), ("gemm_left_out_without_waves", False)):
        trial = forms.fit_gemm(_gemms(seen), gpu, waves, searched=searched)
        for op in (*GEMM_OPS, "all"):
            out.error(f"{label}:{op.removeprefix('gemm_')}", [r for r in unseen if op in (r["op"], "all")], predict, trial, waves)
    shapes = sorted({(r["columns"], r["inner"]) for r in rows})
    for n, k in shapes if len(shapes) > 1 else ():
        rest = [r for r in rows if (r["columns"], r["inner"]) == (n, k)]
        others = [r for r in rows if (r["columns"], r["inner"]) != (n, k)]
        if len(others) >= 2 * PARAMETERS["gemm"]:
            out.error(f"gemm_shape_left_out:{n}x{k}", rest, predict, forms.fit_gemm(_gemms(others), gpu, searched=True))
    whole = forms.fit_gemm(_gemms(rows), gpu, searched=searched)
    out.against("gemm", found, predict, whole)
    out.values |= {"gemm_tiles": tuple((r, c, round(float(whole[i]), 6)) for i, (r, c) in enumerate(forms.TILES)),
                   "gemm_bandwidth": round(float(whole[4]), 6), "gemm_overhead_s": round(float(whole[5]), 10),
                   "gemm_block_overhead_s": round(float(whole[6]), 10)}


def fit_rows(out: Fit, found: Mapping[str, list[Row]], source: str, borrowed: DeviceCoefficients | None) -> None:
    """Share of bandwidth of each elementwise kernel, and one overhead."""
    rows, gpu = found[source], out.gpu
    enough(rows, "rowwise", source)
    rows = sorted(rows, key=lambda r: (r["op"], _norm_order(r), r["order"] or 0))
    use = every_other(column(rows, "tokens"))

    def families(rows: Sequence[Row]) -> dict[str, list[Row]]:
        return {name: [r for r in rows if r["op"] == name] for name in sorted({r["op"] for r in rows})}

    def solve(rows: Sequence[Row]) -> tuple[dict[str, float], float]:
        return forms.fit_rowwise({name: (column(own, "bytes"), column(own, "median_s")) for name, own in families(rows).items()},
                                 gpu)

    def predict(rows: Sequence[Row], share: float, overhead_s: float) -> Array:
        return forms.rowwise_seconds(column(rows, "bytes"), share, overhead_s, gpu)

    shares, overhead_s = solve(take(rows, use))
    for name, own in families(take(rows, ~use)).items():
        for label, least_s in (("", 0.0), ("_from_20_us", 20e-6)):
            out.error(f"rowwise_left_out{label}:{name}", [r for r in own if r["median_s"] >= least_s], predict, shares[name],
                      overhead_s)
    shares, overhead_s = solve(rows)
    for name in ROWWISE:
        if name not in shares:
            known = "norm" if name == "qk_norm" and "norm" in shares else None
            of = shares if known else _borrow(out, borrowed, "rowwise", f"{name} bandwidth").rowwise_bandwidth
            shares[name] = of[known or name]
    out.assumed.append("qk_norm bandwidth (as norm)")
    out.values |= {"rowwise_bandwidth": {name: round(shares[name], 6) for name in sorted(shares)},
                   "rowwise_overhead_s": round(overhead_s, 10)}


def _norm_order(row: Row) -> int:
    name = row["id"].split("|repeat")[0].rsplit("|", 1)[-1]
    return VIDUR_NORMS.index(name) if name in VIDUR_NORMS else 0


def fit_prefill(out: Fit, found: Mapping[str, list[Row]], source: str) -> None:
    """Efficiency, extra keys, overhead. After the others: with a past its bytes move at the device's bandwidth."""
    gpu, model = out.gpu, out.model
    share = max(out.values["gemm_bandwidth"], out.values["decode_attention_bandwidth"], *out.values["rowwise_bandwidth"].values())

    def arguments(rows: Sequence[Row]) -> dict[str, Any]:
        past, batch = column(rows, "context_tokens"), column(rows, "batch")
        moved_s = np.where(past > 0, column(rows, "bytes") / (gpu.mem_bytes_per_s * share), 0.0)
        # A sweep's rows are the model's, and do not say its heads.
        return {"batch": batch, "tokens": column(rows, "tokens") / batch, "gpu": gpu, "past": past, "moved_s": moved_s,
                "heads": np.array([float(r["heads"] or model.num_heads) for r in rows]),
                "head_dim": np.array([float(r["head_dim"] if r["heads"] else model.head_dim) for r in rows])}

    def solve(rows: Sequence[Row]) -> Array:
        return forms.fit_prefill_attention(seconds=column(rows, "median_s"), **arguments(rows))

    def predict(rows: Sequence[Row], parameters: Array) -> Array:
        return forms.prefill_attention_seconds(parameters=parameters, **arguments(rows))

    rows = _ordered(found[source])
    enough(rows, "prefill_attention", source)
    past, length = column(rows, "context_tokens"), column(rows, "tokens") / column(rows, "batch")
    use = every_other(past) if len(set(past)) > len(set(length)) else every_other(length)
    efficiency, extra_keys, overhead_s = out.family("prefill_attention", found, rows, use, solve, predict, {
        "_from_128_tokens": lambda r: bool(r["tokens"] / r["batch"] >= 128), "": lambda r: True})
    out.values |= {"prefill_attention_efficiency": round(float(efficiency), 6),
                   "prefill_attention_extra_keys": round(float(extra_keys), 6),
                   "prefill_attention_overhead_s": round(float(overhead_s), 10)}


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (r["batch"], r["tokens"] / r["batch"], r["context_tokens"], r["id"]))


def fit_decode(out: Fit, found: Mapping[str, list[Row]], source: str) -> None:
    """Share of bandwidth, overhead, SM time a sequence."""
    def solve(rows: Sequence[Row]) -> Array:
        return forms.fit_decode_attention(column(rows, "batch"), column(rows, "bytes"), column(rows, "median_s"), out.gpu)

    def predict(rows: Sequence[Row], parameters: Array) -> Array:
        return forms.decode_attention_seconds(column(rows, "batch"), column(rows, "bytes"), parameters, out.gpu)

    rows = _ordered(found[source])
    enough(rows, "decode_attention", source)
    share, overhead_s, seq_s = out.family("decode_attention", found, rows, every_other(column(rows, "context_tokens")), solve,
                                          predict)
    out.values |= {"decode_attention_bandwidth": round(float(share), 6),
                   "decode_attention_overhead_s": round(float(overhead_s), 10), "decode_attention_seq_s": round(float(seq_s), 12)}


def fit_links(out: Fit, found: Mapping[str, list[Row]], source: str, borrowed: DeviceCoefficients | None) -> None:
    """Link efficiency and overhead of an all-reduce. Vidur's rows are eager launches: of them the slope alone is used."""
    def solve(rows: Sequence[Row]) -> Array:
        return forms.fit_all_reduce(column(rows, "bytes"), column(rows, "median_s"), out.gpu)

    def predict(rows: Sequence[Row], parameters: Array) -> Array:
        return forms.all_reduce_seconds(column(rows, "bytes"), *parameters, out.gpu)

    rows = [r for r in found[source] if r["message_bytes"] <= LARGEST_ALL_REDUCE_BYTES]
    rows.sort(key=lambda r: (r["bytes"], r["median_s"], r["num_gpus"]))
    enough(rows, "all_reduce", source)
    efficiency, overhead_s = out.family("all_reduce", found, rows, every_other(column(rows, "bytes")), solve, predict)
    out.values["link_efficiency"] = round(float(efficiency), 6)
    if source.startswith("vidur") and borrowed is not None:
        out.values["all_reduce_overhead_s"] = borrowed.all_reduce_overhead_s
        out.assumed.append(f"all_reduce_overhead_s: A100's under CUDA graphs; the rows here hold eager launches "
                           f"({overhead_s * 1e6:.0f} us)")
    else:
        out.values["all_reduce_overhead_s"] = round(float(overhead_s), 10)


def _borrow(out: Fit, borrowed: DeviceCoefficients | None, family: str, what: str = "",
            reason: str = "no measured row") -> DeviceCoefficients:
    what = what or family
    if borrowed is None:
        raise ProfileError(f"{what}: the table has no rows for it, and there is no other profile to borrow from")
    out.assumed.append(f"{what}: {reason}, {out.whose(family, borrowed)}")
    return borrowed


# ------------------------------------------------------------------------------------------------ the whole


def check_model(rows: Sequence[Row], model: ModelSpec) -> None:
    """Refuse rows that say they have another model's shapes."""
    label = model_label(model)
    other = next((r for r in rows if r["model"] not in (None, label)), None)
    if other is not None:
        raise ProfileError(f"row {other['id']}: has the shapes of {other['model']}, not of {label}: give its --model")


def fit_profile(rows: Sequence[Row], model: ModelSpec, *, borrowed: DeviceCoefficients | None = None,
                asked: Mapping[str, str] | None = None, borrow: Sequence[str] = (), card: GpuSpec | None = None,
                lender: str = ANALYTIC_FROM) -> Fit:
    """All kernel families of a table on the whole device; the SM axis and contention come after (:mod:`bullet.profiles.sm_axis`).

    ``borrowed``: coefficients, ``lender``'s, for families that the table has no row of, each named in ``assumed``. ``asked``:
    family -> ``origin_version`` to fit on. ``borrow``: families to borrow although the table has rows, too few to fit. ``card``:
    one that is not built in.
    """
    gpu = check_samples(rows, card=card)
    check_model(rows, model)
    rows = with_shapes(rows, model)
    out, asked = Fit(gpu, model, rows[0]["source"] == "measured", lender=lender), asked or {}
    unknown = sorted({*asked, *borrow} - set(FAMILIES))
    if unknown:
        raise ProfileError(f"unknown family {unknown[0]!r}: choose one of {', '.join(FAMILIES)}")
    found = {family: of_family(rows, family) for family in FAMILIES}
    fields = {"gemm": ("gemm_tiles", "gemm_bandwidth", "gemm_overhead_s", "gemm_block_overhead_s"),
              "rowwise": ("rowwise_bandwidth", "rowwise_overhead_s"),
              "prefill_attention": tuple(f"prefill_attention_{x}" for x in ("efficiency", "extra_keys", "overhead_s")),
              "decode_attention": tuple(f"decode_attention_{x}" for x in ("bandwidth", "overhead_s", "seq_s")),
              "all_reduce": ("link_efficiency", "all_reduce_overhead_s")}
    # Prefill attention last: it needs the best bandwidth of the others.
    for family in ("gemm", "rowwise", "decode_attention", "all_reduce", "prefill_attention"):
        source = None if family in borrow else choose(found[family], family, asked)
        if source is None:
            coefficients = _borrow(out, borrowed, family, reason="as asked" if found[family] else "no measured row")
            out.values |= {name: getattr(coefficients, name) for name in fields[family]}
            continue
        out.sources[family] = source
        out.parameters[family] = PARAMETERS[family]
        if family == "gemm":
            fit_gemms(out, found[family], source)
        elif family == "rowwise":
            out.parameters[family] = 1 + len({r["op"] for r in found[family][source]})
            fit_rows(out, found[family], source, borrowed)
        elif family == "decode_attention":
            fit_decode(out, found[family], source)
        elif family == "all_reduce":
            fit_links(out, found[family], source, borrowed)
        else:
            fit_prefill(out, found[family], source)
    lm_head = [r for r in found["gemm"].get(out.sources.get("gemm", ""), []) if r["op"] == "gemm_lm_head"]
    if not lm_head:
        out.assumed.append(f"lm_head extrapolates the GEMM family ({model.vocab_size} columns: no measured row)")
    return out


def coefficients_of(out: Fit, axis: Mapping[str, float]) -> DeviceCoefficients:
    """The fit as the device reads it. ``axis``: rate and bandwidth against SMs, contention."""
    return DeviceCoefficients(source="fitted" if out.measured else "fitted to simulated samples", **out.values, **axis)


def with_notes(coefficients: DeviceCoefficients, out: Fit, rows: Sequence[Row]) -> DeviceCoefficients:
    """Errors, sources, row counts and assumptions go into ``fit.json`` with the numbers."""
    counts = Counter(f"{version_of(r)}: {r['op']}" for r in rows)
    notes = {"errors": out.errors, "parameters": sum(out.parameters.values()), "parameters_by_family": out.parameters,
             "fitted_on": out.sources, "rows": dict(sorted(counts.items())), "assumed": out.assumed}
    return dataclasses.replace(coefficients, notes=notes)
