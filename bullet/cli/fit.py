"""``bullet-profile import | fit | plot | show``: public tables to samples, samples to a device, and a look at either."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import model_label
from bullet.cli.common import out_folder
from bullet.errors import ConfigError, ProfileError
from bullet.files import Claim
from bullet.profiles.agreement import compare_rows, pooled
from bullet.profiles.fit import fit_table
from bullet.profiles.importers import import_samples
from bullet.profiles.importers.folder import import_folder
from bullet.profiles.rows import Row
from bullet.profiles.show import listing, shipped_lines, table_lines
from bullet.profiles.sweeps import DEFAULT_GPU, DEFAULT_MODEL, model_of, named_table

ASKED = {
    "tokens": "new tokens over the batch", "batch": "sequences",
    "context_tokens": "of each sequence: past tokens (prefill) or attended ones (decode)",
    "decode_seqs": "mixed_attention: decodes in the same kernel", "decode_context_tokens": "and what each attends",
    "columns": "GEMM of no name: columns of the result", "inner": "and its inner size",
    "num_gpus": "all_reduce: GPUs", "message_bytes": "and bytes of each"}
"""What a look-up may be asked at, with its help."""
IMPORT_EXAMPLES = """\
examples:
  bullet-profile import perf/RTXPRO6000/Qwen/Qwen3-32B/bf16 --out mine    LLMServingSim's profile of one card and model; then
                                                            bullet-sim run --gpu rtxpro6000 --model qwen3-32b
                                                            --device-model mine --policy vllm-2048 --set device.tensor_parallel=2
  bullet-profile import data/h100_sxm --model my/config.json --out mine   AIConfigurator's single kernels; then
                                                            bullet-profile fit mine/samples.parquet --model my/config.json
"""
FIT_EXAMPLES = """\
examples:
  bullet-profile fit --gpu h100                             fit the shipped table again, print the errors
  bullet-profile fit runs/gpu --out mine                    a sweep of your own: mine/fit.json, mine/SOURCE.md; then
                                                            bullet-sim run --gpu h200 --device-model mine
  bullet-profile fit runs/gpu runs/again --out mine         two sweeps of one card: refused where they do not agree
  bullet-profile fit --gpu a100-80gb --fit-on "gemm=sglang 0.5.10"
"""
PLOT_EXAMPLES = """\
examples:
  bullet-profile plot runs/gpu                              runs/gpu/sweep.html
  bullet-profile plot runs/gpu/samples.parquet --out page.html
"""
SHOW_EXAMPLES = """\
examples:
  bullet-profile show --gpu h100                            coefficients, what is assumed, errors by family
  bullet-profile show runs/gpu/samples.parquet              what a table holds
  bullet-profile show --gpu h100 --op gemm_qkv --tokens 777 --version "vllm 0.19.0"
  bullet-profile show --gpu rtx4090 --op decode_attention --batch 12 --context-tokens 700
"""


def add_commands(commands: Any) -> None:
    """The commands of this module, each with its handler."""
    get = commands.add_parser("import", help="a publisher's kernel tables, of any card and model, checked",
                              formatter_class=argparse.RawDescriptionHelpFormatter, epilog=IMPORT_EXAMPLES)
    get.add_argument("folder", type=Path, nargs="?", help="a folder as LLMServingSim, AIConfigurator or Vidur lay it out")
    get.add_argument("--gpu", help="the tables' card: a name or a data sheet CARD.toml (default: as the folder says)")
    get.add_argument("--model", help="the tables' model: a name or a config.json (default: as the folder says)")
    get.add_argument("--data", type=Path, help="instead of a folder: one with kernels/, of which the shipped profiles are made")
    get.add_argument("--out", type=out_folder, help="folder to write to; with --data a file (default "
                     "profiles/<gpu>/llama-3.1-8b/samples.parquet)")
    get.add_argument("--replace", action="store_true", help="write over files that are there")
    get.set_defaults(handler=import_)
    fitter = commands.add_parser("fit", help="samples to a device: coefficients, and errors on what was left out",
                                 formatter_class=argparse.RawDescriptionHelpFormatter, epilog=FIT_EXAMPLES)
    fitter.add_argument("samples", type=Path, nargs="*", help="a sweep's folder, or a samples.parquet (default: the shipped one "
                        "of --gpu); two sweeps of one card are fitted together if they agree (bullet-profile compare), else "
                        "refused")
    fitter.add_argument("--gpu", help=f"whose shipped table (default {DEFAULT_GPU}); of a table of one's own, its card: a name "
                        "or CARD.toml")
    fitter.add_argument("--model", help="whose rows (default: the one that the sweep has; llama-3.1-8b)")
    fitter.add_argument("--implementation", choices=("engine", "torch"), help="of a sweep: fit the project's own kernels or "
                        "torch's (default: the engine's where they were measured); GEMMs are torch's in both")
    fitter.add_argument("--sm-data", type=Path, help="folder with published sweeps over SMs; without it the SM axis is the "
                        "samples' own, else what fit.json has, else the nearest card's")
    fitter.add_argument("--fit-on", action="append", default=[], metavar="FAMILY=VERSION",
                        help="fit a family on this source; may be repeated")
    fitter.add_argument("--borrow", action="append", default=[], metavar="FAMILY",
                        help="take a family of which the table has too few rows from another card's fit (a sweep's: the nearest "
                             "silicon; else A100); may be repeated")
    fitter.add_argument("--out", type=out_folder, help="folder for fit.json and SOURCE.md; without it nothing is written")
    fitter.add_argument("--replace", action="store_true", help="write over a fit in --out that differs")
    fitter.set_defaults(handler=fit_)
    plot = commands.add_parser("plot", help="a sweep as one HTML page: co-running, SM axis, residuals, clocks, controls",
                               formatter_class=argparse.RawDescriptionHelpFormatter, epilog=PLOT_EXAMPLES)
    plot.add_argument("folder", type=Path, help="a sweep's folder, or a samples.parquet")
    plot.add_argument("--model", help="whose rows (default: the one that the sweep has)")
    plot.add_argument("--out", type=Path, help="the page (default FOLDER/sweep.html)")
    plot.add_argument("--replace", action="store_true", help="write over a page that is there")
    plot.set_defaults(handler=plot_)
    show = commands.add_parser("show", help="coefficients and errors of a profile, or what a table holds",
                               formatter_class=argparse.RawDescriptionHelpFormatter, epilog=SHOW_EXAMPLES)
    show.add_argument("samples", type=Path, nargs="?", help="a samples.parquet: list it, or look --op up in it")
    show.add_argument("--gpu", help=f"whose shipped profile (default {DEFAULT_GPU})")
    show.add_argument("--model", default=DEFAULT_MODEL)
    show.add_argument("--op", help="operation to look up, between measured points")
    show.add_argument("--version", help="whose rows, where the table has several")
    show.add_argument("--sms", type=int, help="SMs (default all)")
    for name, text in ASKED.items():
        show.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    show.set_defaults(handler=show_)


def say(lines: Iterable[str]) -> None:
    """To standard output."""
    sys.stdout.writelines(line + "\n" for line in lines)


def import_(args: argparse.Namespace) -> int:
    """Write ``samples.parquet``, and the engine tables of a folder that has them."""
    if args.folder is not None:
        if args.data is not None or args.out is None:
            raise ConfigError("import FOLDER: writes to a folder that --out names" if args.out is None else
                              "--data: has no effect beside a FOLDER")
        found = import_folder(args.folder, args.out, gpu=args.gpu, model=args.model, replace=args.replace)
        say([f"{found.gpu.name}, {model_label(found.model)}", *listing(found.rows), *found.notes,
             *(f"wrote {path}: {path.stat().st_size / 1000:.0f} kB" for path in found.written)])
        return 0
    if args.data is None:
        raise ConfigError("import: needs a publisher's FOLDER, or --data DIR")
    if args.model is not None:
        raise ConfigError("--model: the shipped profiles are llama-3.1-8b's; give a publisher's FOLDER")
    path, rows = import_samples(get_gpu(args.gpu or DEFAULT_GPU).name, args.data, args.out, args.replace)
    say([*listing(rows), f"wrote {path}: {len(rows)} rows, {path.stat().st_size / 1000:.0f} kB"])
    return 0


def fit_(args: argparse.Namespace) -> int:
    """Fit, print the errors, write if asked."""
    if len(args.samples) > 2:
        raise ConfigError(f"fit: {len(args.samples)} tables: give one, or two sweeps of one card")
    path, table = named_table(next(iter(args.samples), None), args.gpu, args.model)
    model, rows = model_of(table, args.model, str(path))
    agreed = None
    if len(args.samples) == 2:
        rows, agreed = agreeing(path, rows, *named_table(args.samples[1], args.gpu, args.model), args.model)
    asked = {}
    for text in args.fit_on:
        family, equals, asked[family] = text.partition("=")
        if not equals:
            raise ConfigError(f"--fit-on {text}: must read FAMILY=VERSION, as in gemm=sglang 0.5.10")
    with nullcontext() if args.out is None else Claim(args.out, shared=True):  # before a fit of some seconds, not after
        fitted = fit_table(rows, model, sm_data=args.sm_data, asked=asked, borrow=args.borrow, implementation=args.implementation,
                           card=None if args.gpu is None else get_gpu(args.gpu), agreed=agreed)
        written = None if args.out is None else fitted.write(args.out, args.replace)
    say(fitted.lines())
    if written is not None:
        say([f"wrote {written} and SOURCE.md"])
    return 0


def agreeing(path: Path, rows: Sequence[Row], second: Path, table: Sequence[Row], asked: str | None
             ) -> tuple[list[Row], list[str]]:
    """Both sweeps' rows, and what was compared; :class:`ProfileError` where they do not agree: no profile comes of them."""
    others = model_of(table, asked, str(second))[1]
    found = compare_rows(rows, others, str(path), str(second))
    if not found.agree:
        raise ProfileError(f"{path}, {second}: no profile is made of them: {found.verdict}")
    say([*found.lines, found.verdict])
    return pooled(rows, others), found.lines


def plot_(args: argparse.Namespace) -> int:
    """The page of a sweep."""
    from bullet.profiles.page import page

    folder = args.folder if args.folder.is_dir() else args.folder.parent
    say(page(args.folder, args.out or folder / "sweep.html", model=args.model, replace=args.replace))
    return 0


def show_(args: argparse.Namespace) -> int:
    """A profile's coefficients; a table's rows; a value between measured points."""
    point = {name: value for name in ASKED if (value := getattr(args, name)) is not None}
    if args.op is None and (point or args.sms is not None):
        name = next(iter(point), "sms")
        raise ConfigError(f"--{name.replace('_', '-')}: looks an operation up, and --op names none")
    if args.samples is None and args.op is None and args.version is None:
        say(shipped_lines(args.gpu or DEFAULT_GPU, args.model))
        return 0
    path, rows = named_table(args.samples, args.gpu, args.model)
    say(table_lines(path, rows, version=args.version, op=args.op, point=point, sms=args.sms))
    return 0
