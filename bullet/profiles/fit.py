"""A table of samples to a device: what ``bullet-profile fit`` does, for a notebook too.

    path, rows = named_table(Path("runs/gpu"))
    model, rows = model_of(rows, None, str(path))
    fitted = fit_table(rows, model)
    print("\\n".join(fitted.lines()))
    fitted.write(Path("mine"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.devices import PROFILES, profile_folder
from bullet.devices.coefficients import ANALYTIC_FROM, DeviceCoefficients, lent
from bullet.devices.fitted import DeviceModel
from bullet.devices.measured import StepProfile
from bullet.errors import ConfigError, ProfileError
from bullet.files import make_folder, write_text
from bullet.profiles import step_times
from bullet.profiles.check import check_samples
from bullet.profiles.contention import Contention, fit_contention
from bullet.profiles.forms import FitError
from bullet.profiles.kernels import Fit, coefficients_of, fit_profile, with_notes, with_shapes
from bullet.profiles.layer_axis import axis_of_layers
from bullet.profiles.rows import Row
from bullet.profiles.show import error_lines
from bullet.profiles.sm_axis import AXIS, FLAT, KernelsOnSms, axis_of_kernels, axis_of_steps, greenctx, sweeps_of
from bullet.profiles.source_page import WHOSE, source_page, write_page
from bullet.profiles.sweeps import layer_errors, of_implementation, torchs_on_sms

NOT_OF_THESE_ROWS = ("no measured row", "not measured", "needed", "tells bandwidth")
"""What an assumption says that a fit prints; SOURCE.md has them all."""


@dataclass(frozen=True)
class Fitted:
    """A table's device, which ``--device-model`` takes once written: coefficients, or a CPU's step times."""

    device: DeviceCoefficients | StepProfile
    rows: Sequence[Row]
    model: ModelSpec
    card: GpuSpec | None = None

    def lines(self) -> list[str]:
        """What was fitted, how wrong it is on rows that it has not seen, and what is not of these rows."""
        device = self.device
        if isinstance(device, StepProfile):
            return [f"{device.hardware}, {device.model}: {len(device.prefill_tokens)} prefills and {len(device.batches)} x "
                    f"{len(device.contexts)} decode iterations of the engine, interpolated; nothing is fitted to a CPU"]
        notes = device.notes
        lines = error_lines(notes["errors"])
        if "implementation" in notes:
            lines.insert(0, f"{notes['gpu']}, {notes['model']}: fitted on the rows of {WHOSE[notes['implementation']]}")
        for name, (low, high) in device.intervals.items():
            lines.append(f"{name:<28}{getattr(device, name):>9.4g}  99 % interval {low:.4g} to {high:.4g}")
        if device.intervals and "agreement_of_two_sweeps" not in notes:
            lines.append("one sweep: none other was compared with it (bullet-profile fit FIRST SECOND)")
        if device.intervals and (told := borrowed_kernels(device)):
            lines.append(told)
        for line in notes["assumed"]:
            if any(words in line for words in NOT_OF_THESE_ROWS):
                lines.append(f"not of these rows: {line}")
            elif "beside other processes" in line:
                lines.append(line)
        return lines

    def write(self, folder: Path, replace: bool = False) -> Path:
        """``fit.json`` or ``steps.json``, and ``SOURCE.md``. :class:`ResultsError` if another fit is there, or it cannot be."""
        make_folder(folder)
        if isinstance(self.device, StepProfile):
            path, page = folder / "steps.json", step_times.page(self.rows, self.device, self.model)
        else:
            path, page = folder / "fit.json", source_page(self.device, self.rows, self.model, self.card)
        write_text(path, self.device.to_json(), replace=replace)
        write_page(folder / "SOURCE.md", page)
        return path


def fit_table(rows: Sequence[Row], model: ModelSpec, *, sm_data: Path | None = None, asked: Mapping[str, str] | None = None,
              borrow: Sequence[str] = (), implementation: str | None = None, card: GpuSpec | None = None,
              agreed: Sequence[str] | None = None) -> Fitted:
    """One model's rows as a device. Of a CPU, the engine's steps as measured; else :func:`fit_samples`, which has the options.
    ``agreed``: of two sweeps' rows, what of both was compared (:mod:`bullet.profiles.agreement`); kept in the notes."""
    if not step_times.is_cpu(rows):
        device = fit_samples(rows, model, sm_data=sm_data, asked=asked, borrow=borrow, implementation=implementation, card=card)
        if agreed is not None:
            device = dataclasses.replace(device, notes={**device.notes, "agreement_of_two_sweeps": list(agreed)})
        return Fitted(device, rows, model, card)
    for flag, given in (("--implementation torch", implementation == "torch"), ("--fit-on", asked), ("--borrow", borrow),
                        ("--sm-data", sm_data)):
        if given:
            raise ConfigError(f"{flag}: a CPU's rows are not fitted but interpolated, the engine's steps as they are")
    return Fitted(step_times.profile_of(rows, model), rows, model)


def borrowed_kernels(device: DeviceCoefficients) -> str:
    """What a fit's intervals do not cover, in words; empty where all kernels are of its own rows."""
    lenders = lent(line for line in device.notes["assumed"] if "no measured row, " in line)
    parts = "; ".join(f"{', '.join(what for what, of in lenders.items() if of == who)} are {who}"
                      for who in dict.fromkeys(lenders.values()))
    return f"These intervals take kernels as they stand, and {parts}: what is true may lie outside." if lenders else ""


def fit_samples(rows: Sequence[Row], model: ModelSpec, *, sm_data: Path | None = None, asked: Mapping[str, str] | None = None,
                borrow: Sequence[str] = (), implementation: str | None = None, card: GpuSpec | None = None) -> DeviceCoefficients:
    """Kernel families, SM axis and contention of a table: all that ``fit.json`` holds.

    ``sm_data``: folder with the published sweeps over SMs. ``asked``: family -> the source to fit it on. ``borrow``: families
    to take from another card's fit: of a sweep the nearest silicon's, else A100's. ``implementation``: of a sweep, ``engine`` or
    ``torch``. :class:`ProfileError` says what is missing.
    """
    if sm_data is not None and not sm_data.is_dir():
        raise ProfileError(f"{sm_data}: no such folder (--sm-data)")
    chosen = of_implementation(rows, implementation)
    # A shipped fit is made of public tables: what is near it may be made of the same ones.
    lender = ANALYTIC_FROM if chosen.implementation is None else check_samples(chosen.rows, card=card).silicon
    borrowed = DeviceCoefficients.from_json(PROFILES / lender / "llama-3.1-8b" / "fit.json")
    out = fit_profile(chosen.rows, model, borrowed=borrowed, asked=asked, borrow=borrow, card=card, lender=lender)
    out.assumed += chosen.notes
    if busy := sum(r["busy"] is True for r in chosen.rows):
        out.assumed.append(f"{busy} of {len(chosen.rows)} rows were measured beside other processes (--allow-busy), taken as "
                           "they are")
    axis, spans = _sm_axis(out, rows, chosen.rows, sm_data, borrowed)
    found = fit_contention(chosen.rows, DeviceModel(model, out.gpu, coefficients_of(out, axis)))
    out.errors |= found.errors
    extra: dict[str, Any] = {}
    if not out.sources and not found.coefficients:
        raise ProfileError("the table has no rows to fit: kernels alone on the whole device, or layers beside each other")
    _with_contention(out, found, axis, spans, extra)
    out.assumed += ["host_gap_s 0", "every family follows one curve of bandwidth against SMs",
                    "norm with fused residual lasts as long as the norm that was measured",
                    "the sampler costs nothing: the device has no term for it"]
    extra["waves"] = waves_by_evidence(out.errors)
    coefficients = coefficients_of(out, axis)
    if chosen.implementation is not None:
        out.errors |= layer_errors(chosen.rows, DeviceModel(model, out.gpu, coefficients))
        extra |= {"implementation": chosen.implementation, "operations": chosen.taken}
    noted = with_notes(coefficients, out, rows)
    whose = {"gpu": out.gpu.name, "model": model_label(model), "origin": ", ".join(sorted(set(out.sources.values()))),
             "digest": coefficients.digest}
    return dataclasses.replace(noted, notes={**noted.notes, **extra, **whose})


Spans = dict[str, tuple[float, float]]
"""Coefficient -> its 99 % interval."""


def _with_contention(out: Fit, found: Contention, axis: dict[str, float], spans: Spans, extra: dict[str, Any]) -> None:
    """Losses, the share of shared SMs and all intervals, to where ``fit.json`` has them."""
    if found.coefficients:
        axis |= found.coefficients
        out.parameters["contention"] = max(1, len(found.coefficients) - 1)  # one loss for both is not one more
        out.sources["contention"] = "the table's own co-run rows"
        extra |= found.notes
        out.assumed += found.assumed
    else:
        out.assumed.append("contention_loss 0.2")
    if spans or found.intervals:
        extra["intervals"] = {name: list(span) for name, span in (spans | found.intervals).items()}


def _sm_axis(out: Fit, table: Sequence[Row], rows: Sequence[Row], sm_data: Path | None,
             borrowed: DeviceCoefficients) -> tuple[dict[str, Any], Spans]:
    """Rate and bandwidth against SMs: the table's own layers, else its kernels, else published sweeps, else what the shipped fit
    holds, else what was borrowed."""
    gpu, model, alone = out.gpu, out.model, coefficients_of(out, FLAT)
    shipped = profile_folder(gpu, model) / "fit.json"
    own, swept_on, spans = sweeps_of(with_shapes(rows, model)), DeviceModel(model, gpu, alone), Spans()
    layers = axis_of_layers(rows, swept_on)
    if layers is None and any(own.values()) and not own["decode_attention"]:
        own, swept_on, said = torchs_on_sms(table, own, out, FLAT)
        out.assumed += said
    source: str | None
    if layers is not None:
        (axis, spans, errors), source = layers, "the table's own layers"
        if any(own.values()):
            kernels = KernelsOnSms(own, swept_on)
            stretch = kernels.stretch(np.array([*axis.values(), 0.0]))
            errors |= {f"sm_axis_of_kernels_unfitted:{op}": FitError.of(stretch[kernels.op == op],
                                                                        kernels.measured[kernels.op == op]).as_dict()
                       for op in dict.fromkeys(kernels.op.tolist())}
    elif any(own.values()):
        (axis, errors), source = axis_of_kernels(own, swept_on), "the table's own rows"
    elif sm_data is not None and gpu.name == "a100-80gb":
        (axis, errors), source = axis_of_steps(sm_data, gpu, alone), "muxserve"
    elif sm_data is not None and gpu.name == "h100":
        (axis, errors), source = axis_of_kernels(greenctx(sm_data), DeviceModel(model, gpu, alone)), "greenctx"
    elif shipped.is_file() and "sm_axis" in (kept := DeviceCoefficients.from_json(shipped)).notes.get("fitted_on", {}):
        axis, source = {name: getattr(kept, name) for name in AXIS}, kept.notes["fitted_on"]["sm_axis"]
        errors = {k: v for k, v in kept.notes["errors"].items() if "sms" in k or "stretch" in k or "sm_axis" in k}
    else:
        axis, errors, source = {name: getattr(borrowed, name) for name in AXIS}, {}, None
        what = "rate and bandwidth against SMs"
        out.assumed.append(f"{what}: no measured row, {out.whose(what, borrowed)}")
    if source is not None:
        out.sources["sm_axis"] = source
        out.parameters |= {"bandwidth_against_sms": 2, "rate_against_sms": 2}
    out.errors |= dict(sorted(errors.items()))  # in one order, wherever they come from
    return axis, spans


def waves_by_evidence(errors: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Waves stay on (the SM axis needs block counts) unless rows left out speak against them: a tenth less error without
    them both in the median and at P90, wherever both were tried."""
    pairs = [(errors[a], errors[b]) for a, b in (("gemm_left_out:all", "gemm_left_out_without_waves:all"),
                                                ("sm_axis_left_out:all", "sm_axis_left_out_without_waves:all"))
             if a in errors and b in errors]
    against = bool(pairs) and all(off[k] < 0.9 * on[k] for on, off in pairs for k in ("median", "p90"))
    return {"on": True, "evidence": "against" if against else "not against",
            "left_out": [{"with": [on["median"], on["p90"]], "without": [off["median"], off["p90"]]} for on, off in pairs]}
