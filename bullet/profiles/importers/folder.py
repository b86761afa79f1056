"""A publisher's folder as it lies on a user's disk, of any card and model: which publishers', whose rows, and what is written.

Told apart by what they hold: LLMServingSim's by ``meta.yaml`` beside ``tpN/``, AIConfigurator's and Vidur's by the names of their
tables. The card and the model are given, or those that the folder names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import MODELS, ModelSpec, get_model
from bullet.devices.table import (
    COLUMNS,
    EXPERTS,
    check_tables,
    layer_sizes,
    table_path,
    tables_from_rows,
)
from bullet.devices.table_skew import COLUMNS as SKEW_COLUMNS
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.errors import ProfileError, ResultsError
from bullet.files import Claim
from bullet.parquet import write_table
from bullet.profiles.check import check_samples, gpu_of, is_card
from bullet.profiles.importers import aiconfigurator, llmservingsim, vidur
from bullet.profiles.importers.reading import number_repeats
from bullet.profiles.rows import Row, write_parquet

SPREAD = 4.0
"""Of one measurement that several shards or files repeat."""


@dataclass(frozen=True)
class Imported:
    """What was read, of which card and model, and the files written."""

    gpu: GpuSpec
    model: ModelSpec
    rows: Sequence[Row]
    written: Sequence[Path]
    notes: Sequence[str]


def named_gpu(asked: str | None, found: Sequence[str], where: Path) -> GpuSpec:
    """The card that is asked for, else the one that the folder names; :class:`ProfileError` names both if they are not one."""
    names = sorted(set(found))
    if asked is not None and asked.endswith(".toml"):
        return get_gpu(asked)  # a data sheet of one's own says what the tables' card is
    card = get_gpu(asked) if asked is not None else None
    known = {name: gpu_of(name, str(where)) for name in names}
    if card is None:
        cards = {gpu.name: gpu for gpu in known.values()}
        if len(cards) != 1:
            raise ProfileError(f"{where}: tables of {', '.join(cards) or 'no card that it names'}: choose one with --gpu")
        return next(iter(cards.values()))
    if names and card not in known.values():
        raise ProfileError(f"{where}: measured on {', '.join(names)}, not on --gpu {asked}")
    return card


def named_model(asked: str | None, found: str | None, where: Path) -> ModelSpec:
    """The model that is asked for, else the built-in one that the folder names."""
    if asked is not None:
        return get_model(asked)
    if found is None:
        raise ProfileError(f"{where}: does not say which model: give it with --model (a built-in name or a config.json)")
    name = re.sub("-(instruct|chat|hf)$", "", found.rpartition("/")[2].lower())
    if name not in MODELS:
        raise ProfileError(f"{where}: of model {found}, which is not built in: give its config.json with --model")
    return get_model(name)


def import_folder(folder: Path, out: Path, *, gpu: str | None = None, model: str | None = None, replace: bool = False,
                  commit: str | None = None, licence: str | None = None) -> Imported:
    """Read and check a publisher's folder, and write what a device and a fit read of it into ``out``: ``samples.parquet``, and of
    LLMServingSim's each shard's engine tables and the rows of unequal contexts. All is checked before anything is written.

    ``commit``, ``licence``: of the publisher's repository, where they are known.
    """
    if not folder.is_dir():
        raise ProfileError(f"{folder}: no such folder")
    found = llmservingsim.folders(folder)
    if found:
        return _llmservingsim(folder, found, out, gpu, model, replace, commit, licence)
    rows: list[Row] = []
    tables = [publisher.found(folder) for publisher in (aiconfigurator, vidur)]
    if not any(tables):
        raise ProfileError(f"{folder}: no tables that are known: LLMServingSim's (meta.yaml beside tpN/dense.csv), "
                           "AIConfigurator's (gemm_perf, context_attention_perf, ..) or Vidur's (mlp, all_reduce)")
    named = [name for publisher, own in zip((aiconfigurator, vidur), tables, strict=True) for name in publisher.cards(own)]
    if gpu is not None and not gpu.endswith(".toml"):
        wanted = get_gpu(gpu)
        named = [name for name in named if is_card(name, wanted)] or named
    card = named_gpu(gpu, named, folder)
    models = {name for own in tables[1:] for name in vidur.models(own)}
    spec = named_model(model, next(iter(models)) if len(models) == 1 else None, folder)
    for publisher, own in zip((aiconfigurator, vidur), tables, strict=True):
        rows += publisher.read_found(own, card, spec, commit, licence)
    if not rows:
        raise ProfileError(f"{folder}: no row of {spec.name}'s shapes on {card.name}")
    rows = number_repeats(rows, spread=SPREAD)
    check_samples(rows, card=card)
    return Imported(card, spec, rows, _write(out, rows, card, [], replace),
                    ["single kernels: bullet-profile fit makes a device of them"])


def _llmservingsim(folder: Path, found: Sequence[Path], out: Path, gpu: str | None, model: str | None, replace: bool,
                   commit: str | None, licence: str | None) -> Imported:
    if len(found) > 1 and (gpu, model) != (None, None):
        found = [path for path in found if _fits(llmservingsim.read_meta(path), gpu, model)] or found
    if len(found) > 1:
        raise ProfileError(f"{folder}: holds {len(found)} profiles: give one of them: {', '.join(map(str, found[:6]))}")
    meta = llmservingsim.read_meta(found[0])
    card, spec = named_gpu(gpu, [meta.gpu], folder), named_model(model, meta.model, folder)
    llmservingsim.check_model(meta, spec)
    named = meta.gpu if gpu is None or not gpu.endswith(".toml") else card
    rows = number_repeats(llmservingsim.read_folder(meta, named, spec, commit, licence), spread=SPREAD)
    check_samples(rows, card=card)
    text = {"source": meta.source, "gpu": meta.gpu, "card": card.name, "layer_sizes": layer_sizes(spec), "model": meta.model,
            "engine": f"vLLM {meta.version}, {meta.variant}, " + ("eager" if meta.eager else "compiled"),
            "repository": llmservingsim.REPOSITORY, "commit": commit or "not in the folder",
            "licence": licence or "not in the folder"}
    files, notes = [], []
    # The publisher measures experts on one GPU alone and spreads them whole: other shards' tables lack them.
    without = [n for n in meta.degrees if spec.num_experts and not (meta.path / f"tp{n}" / llmservingsim.EXPERTS_FILE).is_file()]
    if without and len(without) == len(meta.degrees):
        raise ProfileError(f"{meta.path}: no {llmservingsim.EXPERTS_FILE} in any of its tp folders: a step of {spec.name} has "
                           "experts")
    notes = [f"tp{n}: no {llmservingsim.EXPERTS_FILE}, so no engine table: a step of {spec.name} has experts" for n in without]
    for degree in (n for n in meta.degrees if n not in without):
        shard = llmservingsim.shard_rows(meta, degree)
        path = table_path(out, degree)
        tables = tables_from_rows(shard, meta.source, str(meta.path / f"tp{degree}"))
        check_tables(dataclasses.replace(tables, tensor_parallel=degree), spec, card, str(meta.path / f"tp{degree}"))
        names = (*COLUMNS[:-1], *(("experts",) if any(row["kernel"] == EXPERTS for row in shard) else ()), COLUMNS[-1])
        files.append((path, llmservingsim.as_table(shard, names, text | {"tensor_parallel": str(degree)})))
        notes.append(f"{path.name}: {len(shard)} points of tensor parallelism {degree}")
    skew = meta.path / "tp1" / "skew.csv"
    if skew.is_file():
        unequal = llmservingsim.skew_rows(skew, meta.runs)
        if unequal:
            files.append((out / SKEW_FILE, llmservingsim.as_table(unequal, SKEW_COLUMNS, text | {
                "source": f"LLMServingSim's skew.csv, one longer context of n, {meta.gpu}"})))
            notes.append(f"{SKEW_FILE}: {len(unequal)} batches of unequal contexts")
    return Imported(card, spec, rows, _write(out, rows, card, files, replace), notes)


def _fits(meta: llmservingsim.Folder, gpu: str | None, model: str | None) -> bool:
    """Whether a profile may be the one that is asked for."""
    try:
        if gpu is not None and not gpu.endswith(".toml") and gpu_of(meta.gpu, str(meta.path)) is not get_gpu(gpu):
            return False
        if model is not None:
            llmservingsim.check_model(meta, get_model(model))
    except ProfileError:
        return False
    return True


def _write(out: Path, rows: Sequence[Row], card: GpuSpec, files: Sequence[tuple[Path, Any]], replace: bool) -> list[Path]:
    """The samples, then the other tables; nothing if one of them is there and is not to be replaced."""
    samples = out / "samples.parquet"
    with Claim(out, shared=True):
        for path in (samples, *(path for path, _ in files)):
            if path.exists() and not replace:
                raise ResultsError(f"{path}: is there: choose another --out, or say --replace")
        write_parquet(samples, rows, {"gpu": card.name, "source": "measured"})
        for path, table in files:
            write_table(path, table)
    return [samples, *(path for path, _ in files)]
