"""What a fit reads of a sweep's folder: its rows, those of one model, and whose implementation of each operation.

A sweep holds operations twice: torch's, and the project's own kernels and layers (:data:`bullet.profiles.rows.ENGINE_OPS`). A fit
takes one of the two, or the coefficients would be of neither. The engine's GEMMs are torch's, so those rows are of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import ModelSpec, get_model, model_label
from bullet.devices import PROFILES
from bullet.devices.fitted import DeviceModel
from bullet.door import exists, is_file, is_folder
from bullet.errors import ProfileError
from bullet.files import safe_name
from bullet.profiles import kernels
from bullet.profiles.check import gpu_of
from bullet.profiles.contention import layer_work
from bullet.profiles.forms import FitError
from bullet.profiles.journal import read_journal
from bullet.profiles.rows import ENGINE_OPS, Row, finalise, read_parquet
from bullet.profiles.sm_axis import on_unknown_sms, sweeps_of

DEFAULT_GPU, DEFAULT_MODEL = "a100-80gb", "llama-3.1-8b"
"""Whose shipped table is meant where nothing else is said."""
NOT_THE_ENGINES = ("own_gemm_gate_up", "own_copy")
"""Own kernels that the engine does not run where a green context bounds torch's."""
LEAST_CORUN = 4
"""Co-run rows of the engine's layers, of each lane one a pair; fewer, and torch's layers tell of contention."""


@dataclass(frozen=True)
class Chosen:
    """Rows under the operations' common names. ``implementation``: None for a public table, which has but one."""

    rows: list[Row]
    implementation: str | None = None
    taken: dict[str, str] = field(default_factory=dict)
    """Operation -> the one whose rows stand for it, where that has another name."""
    notes: tuple[str, ...] = ()


def read_rows(path: Path) -> list[Row]:
    """Of a sweep's folder (its journal, which is never behind its table), or of a table."""
    if not is_folder(path, ProfileError):
        return read_parquet(path)[0]
    journal, table = path / "samples.jsonl", path / "samples.parquet"
    if is_file(journal, ProfileError):
        rows = finalise(read_journal(journal)[1])
        if not rows:
            raise ProfileError(f"{journal}: holds no row yet: run the sweep again, the same command resumes")
        return rows
    if is_file(table, ProfileError):
        return read_parquet(table)[0]
    raise ProfileError(f"{path}: holds neither samples.jsonl nor samples.parquet: is it the folder of bullet-profile sweep?")


def named_table(samples: Path | None = None, gpu: str | None = None, model: str | None = None) -> tuple[Path, list[Row]]:
    """A sweep's folder or a table, else the shipped one of a GPU (A100) and model; :class:`ProfileError` if it is of another
    GPU than ``gpu``, holds no rows, or is not there."""
    card = None if gpu is None else get_gpu(gpu)
    shipped = PROFILES / safe_name(DEFAULT_GPU if card is None else card.name)
    path = samples or shipped / safe_name(model or DEFAULT_MODEL) / "samples.parquet"
    if not exists(path, ProfileError):
        raise ProfileError(f"{path}: no such table: give one, or make it with bullet-profile import or sweep")
    rows = read_rows(path)
    if not rows:
        raise ProfileError(f"{path}: holds no rows")
    if card is not None and (found := gpu_of(str(rows[0]["gpu"]), str(path), card)) != card:
        raise ProfileError(f"{path}: measured on {found.name}, not on --gpu {gpu}: leave --gpu out or give another table")
    return path, rows


def model_of(rows: Sequence[Row], asked: str | None, where: str) -> tuple[ModelSpec, list[Row]]:
    """The model that is fitted, and its rows; public tables are llama-3.1-8b's unless said."""
    labels = sorted({str(r["model"]) for r in rows if r["origin"] is None and r["model"] is not None})
    if not labels:
        return get_model(asked or DEFAULT_MODEL), list(rows)
    if asked is None:
        if len(labels) > 1:
            raise ProfileError(f"{where}: rows of {', '.join(labels)}: choose one with --model")
        if "#" in labels[0]:
            raise ProfileError(f"{where}: rows of {labels[0]}, a config.json's model: give that file as --model FILE.json")
    model = get_model(asked or labels[0])
    if model_label(model) not in labels:
        raise ProfileError(f"{where}: no rows of {model_label(model)}: it has {', '.join(labels)}")
    return model, [r for r in rows if r["model"] == model_label(model)]


def of_implementation(rows: Sequence[Row], asked: str | None) -> Chosen:
    """``asked``, else the engine where one of its kernels was measured alone on the whole device, else torch: then still with the
    engine's layers where they were measured beside each other, since those are what a sweep's matrix is of."""
    if all(r["origin"] is not None for r in rows):
        if asked is not None:
            raise ProfileError(f"--implementation {asked}: a public table has one of its own; it is for a sweep's rows")
        return Chosen(list(rows))
    measured = {r["op"] for r in rows if r["op"] in ENGINE_OPS and r["kind"] == "solo" and r["sms"] == r["device_sms"]
               and not r["op"].endswith("_layer")} - set(NOT_THE_ENGINES)
    if asked == "engine" and not measured:
        raise ProfileError("--implementation engine: none of its kernels was measured alone on the whole device: sweep on a GPU "
                           "with triton, or take --implementation torch")
    pairs = [r for r in rows if r["kind"] == "corun" and r["slowdown"] and r["split_prefill_sms"] and {
        r["op"], r["corunner"]} == {"engine_prefill_layer", "engine_decode_layer"}]
    if asked == "torch" or (not measured and len(pairs) < LEAST_CORUN):
        return Chosen([r for r in rows if r["op"] not in ENGINE_OPS and r["corunner"] not in ENGINE_OPS], "torch")
    notes = [] if measured else ["single operations: none of the engine's was measured alone on the whole device, torch's"]
    layers = {op for op in ENGINE_OPS if op.endswith("_layer")}
    own = measured | layers
    if len(pairs) < LEAST_CORUN:
        own -= layers
        notes.append(f"contention: {len(pairs)} co-run rows of the engine's layers, {LEAST_CORUN} needed: torch's layers")
    taken = {ENGINE_OPS[op]: op for op in sorted(own)}
    for op in ("norm", "rope", "act", "prefill_attention", "decode_attention"):
        if measured and op not in taken and any(r["op"] == op for r in rows):
            notes.append(f"{op}: no row of the engine's, torch's")

    def keep(row: Row) -> bool:
        # Mixed pairs (a torch GEMM beside our attention) are of neither, and no fit reads them.
        return all(op in own or (op not in taken and op not in ENGINE_OPS) for op in (row["op"], row["corunner"]))

    renamed = [{**r, "op": ENGINE_OPS.get(r["op"], r["op"]), "corunner": ENGINE_OPS.get(r["corunner"], r["corunner"])}
               for r in rows if keep(r)]
    return Chosen(renamed, "engine" if measured else "torch", taken, tuple(notes))


def torchs_on_sms(table: Sequence[Row], own: dict[str, Any], fitted: kernels.Fit, flat: Mapping[str, float]
                  ) -> tuple[dict[str, Any], DeviceModel, tuple[str, ...]]:
    """The SM axis where the engine's decode attention was not measured on fewer SMs than all: torch's attention instead, under
    coefficients of its own. GEMMs alone hardly tell bandwidth against SMs: few of them are bound by bytes, and a fit of those
    few may give all bandwidth to a few SMs. The curve is the device's, whoever asks for it.

    Returns what was swept, the device that it is held against, and what to say. Without torch's either nothing is swept.
    """
    theirs = kernels.with_shapes(of_implementation(table, "torch").rows, fitted.model)
    there = sweeps_of(theirs)
    trial = kernels.Fit(fitted.gpu, fitted.model, fitted.measured, values=dict(fitted.values))
    swept, taken = {"gemm": own["gemm"], "decode_attention": {}, "prefill_attention": {}}, []
    for op, solve in (("decode_attention", kernels.fit_decode), ("prefill_attention", kernels.fit_prefill)):
        rows = kernels.of_family(theirs, op).get(kernels.OWN, [])
        if there[op] and len(rows) >= 2 * kernels.PARAMETERS[op]:
            trial.sources[op] = kernels.OWN
            solve(trial, {kernels.OWN: rows}, kernels.OWN)
            swept[op] = there[op]
            taken.append(op)
    device = DeviceModel(fitted.model, fitted.gpu, kernels.coefficients_of(trial, flat))
    if "decode_attention" not in taken:
        return {}, device, ("no decode attention on fewer SMs than all tells bandwidth against SMs",)
    return swept, device, (f"rate and bandwidth against SMs: torch's {' and '.join(taken)}, the engine's not measured there",)


def layer_errors(rows: Sequence[Row], device: DeviceModel) -> dict[str, dict[str, float]]:
    """Whole layers alone, which no fit has seen: the sum of a layer's kernels against the layer measured, on any SMs."""
    errors = {}
    for op in ("prefill_layer", "decode_layer"):
        own = [r for r in rows if r["op"] == op and r["kind"] == "solo" and r["origin"] is None and r["drift_ok"] is not False
               and not on_unknown_sms(r)]
        if own:
            predicted = np.array([device.solo_seconds(layer_work(device, r, ""), r["sms"]) for r in own])
            errors[f"{op}_unfitted"] = FitError.of(predicted, np.array([r["median_s"] for r in own])).as_dict()
    return errors
