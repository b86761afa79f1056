"""``bullet-profile import | fit | show``: public tables to samples, samples to a device, and a look at either."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import ModelSpec, model_label
from bullet.config import DeviceConfig
from bullet.devices.coefficients import ANALYTIC_FROM, PROFILES, DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_device
from bullet.devices.measured import StepProfile
from bullet.errors import ConfigError, ProfileError, ResultsError
from bullet.files import write_text
from bullet.profiles.rows import Row
from bullet.profiles.sm_axis import AXIS, FLAT

DEFAULT_GPU = "a100-80gb"
ASKED = {
    "tokens": "new tokens over the batch", "batch": "sequences",
    "context_tokens": "of each sequence: past tokens (prefill) or attended ones (decode)",
    "decode_seqs": "mixed_attention: decodes in the same kernel", "decode_context_tokens": "and what each attends",
    "columns": "GEMM of no name: columns of the result", "inner": "and its inner size",
    "num_gpus": "all_reduce: GPUs", "message_bytes": "and bytes of each"}
"""What a look-up may be asked at, with its help."""
FIT_EXAMPLES = """\
examples:
  bullet-profile fit --gpu h100                             fit the shipped table again, print the errors
  bullet-profile fit runs/gpu --out mine                    a sweep of your own: mine/fit.json, mine/SOURCE.md; then
                                                            bullet-sim run --gpu h200 --device-model mine
  bullet-profile fit --gpu a100-80gb --fit-on "gemm=sglang 0.5.10"
"""
SHOW_EXAMPLES = """\
examples:
  bullet-profile show --gpu h100                            coefficients, what is assumed, errors by family
  bullet-profile show runs/gpu/samples.parquet              what a table holds
  bullet-profile show --gpu h100 --op gemm_qkv --tokens 777 --version "vllm 0.19.0"
  bullet-profile show --gpu rtx4090 --op decode_attention --batch 12 --context-tokens 700
"""
IMPORTABLE = ("a100-80gb", "h100", "rtx4090")


def add_commands(commands: Any) -> None:
    """The three commands of this module, each with its handler."""
    get = commands.add_parser("import", help="public kernel tables to one table of samples, checked")
    get.add_argument("--gpu", choices=IMPORTABLE, default="a100-80gb")
    get.add_argument("--data", type=Path, required=True, help="folder that holds kernels/")
    get.add_argument("--out", type=Path, help="file to write (default profiles/<gpu>/llama-3.1-8b/samples.parquet)")
    get.add_argument("--replace", action="store_true", help="write over a file that is there")
    get.set_defaults(handler=import_)
    fitter = commands.add_parser("fit", help="samples to a device: coefficients, and errors on what was left out",
                                 formatter_class=argparse.RawDescriptionHelpFormatter, epilog=FIT_EXAMPLES)
    fitter.add_argument("samples", type=Path, nargs="?", help="a sweep's folder, or a samples.parquet (default: the shipped one "
                        "of --gpu)")
    fitter.add_argument("--gpu", choices=sorted(GPUS), help=f"whose shipped table (default {DEFAULT_GPU})")
    fitter.add_argument("--model", help="whose rows (default: the one that the sweep has; llama-3.1-8b)")
    fitter.add_argument("--implementation", choices=("engine", "torch"), help="of a sweep: fit the project's own kernels or "
                        "torch's (default: the engine's where they were measured); GEMMs are torch's in both")
    fitter.add_argument("--sm-data", type=Path, help="folder with published sweeps over SMs; without it the SM axis is the "
                        "samples' own, else what fit.json has, else A100's")
    fitter.add_argument("--fit-on", action="append", default=[], metavar="FAMILY=VERSION",
                        help="fit a family on this source; may be repeated")
    fitter.add_argument("--borrow", action="append", default=[], metavar="FAMILY",
                        help="take a family of which the table has too few rows from A100's fit; may be repeated")
    fitter.add_argument("--out", type=Path, help="folder for fit.json and SOURCE.md; without it nothing is written")
    fitter.add_argument("--replace", action="store_true", help="write over a fit in --out that differs")
    fitter.set_defaults(handler=fit_)
    show = commands.add_parser("show", help="coefficients and errors of a profile, or what a table holds",
                               formatter_class=argparse.RawDescriptionHelpFormatter, epilog=SHOW_EXAMPLES)
    show.add_argument("samples", type=Path, nargs="?", help="a samples.parquet: list it, or look --op up in it")
    show.add_argument("--gpu", help=f"whose shipped profile (default {DEFAULT_GPU})")
    show.add_argument("--model", default="llama-3.1-8b")
    show.add_argument("--op", help="operation to look up, between measured points")
    show.add_argument("--version", help="whose rows, where the table has several")
    show.add_argument("--sms", type=int, help="SMs (default all)")
    for name, text in ASKED.items():
        show.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    show.set_defaults(handler=show_)


def say(text: str) -> None:
    """One line to standard output."""
    sys.stdout.write(text + "\n")


# -------------------------------------------------------------------------------------------------- import


def import_(args: argparse.Namespace) -> int:
    """Write ``samples.parquet``."""
    from bullet.profiles.importers import import_public
    from bullet.profiles.rows import write_parquet

    out: Path = args.out or PROFILES / args.gpu / "llama-3.1-8b" / "samples.parquet"
    if out.exists() and not args.replace:
        raise ResultsError(f"{out}: is there: choose another --out, or say --replace")
    rows = import_public(args.gpu, args.data)
    _folder(out.parent)
    write_parquet(out, rows, {"gpu": args.gpu, "source": "measured"})
    say("\n".join(listing(rows)))
    say(f"wrote {out}: {len(rows)} rows, {out.stat().st_size / 1000:.0f} kB")
    return 0


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ResultsError(f"{path}: cannot be made ({exc.strerror}): choose another --out") from None


def _write(path: Path, text: str, replace: bool) -> None:
    """The same bytes again are no loss; others are refused unless asked for."""
    try:
        kept = path.read_bytes() if path.exists() else None
    except OSError as exc:
        raise ResultsError(f"{path}: cannot be read ({exc.strerror}): choose another --out") from None
    if not replace and kept not in (None, text.encode()):
        raise ResultsError(f"{path}: is there and differs: choose another --out, or say --replace")
    write_text(path, text)


def listing(rows: Sequence[Row]) -> list[str]:
    """Rows by version and operation, with their range of tokens."""
    counts = Counter((r["origin_version"] or r["source"], r["op"], r["kind"]) for r in rows)
    lines = [f"{'from':<24} {'operation':<20} {'kind':<8} {'rows':>6}  tokens"]
    for (version, op, kind), number in sorted(counts.items()):
        tokens = [r["tokens"] for r in rows if (r["origin_version"] or r["source"], r["op"]) == (version, op)
                  and r["tokens"] is not None]
        lines.append(f"{version:<24} {op:<20} {kind:<8} {number:>6}  {f'{min(tokens)} to {max(tokens)}' if tokens else '-'}")
    return lines


# ----------------------------------------------------------------------------------------------------- fit


def fit_(args: argparse.Namespace) -> int:
    """Fit, print the errors, write if asked."""
    from bullet.profiles.show import error_lines
    from bullet.profiles.source_page import WHOSE, source_page, write_page
    from bullet.profiles.step_times import is_cpu
    from bullet.profiles.sweeps import model_of

    path, table = _table(args)
    model, rows = model_of(table, args.model, str(path))
    if is_cpu(rows):
        return _fit_steps(args, rows, model)
    if args.out is not None:  # before a fit of some seconds, not after
        _folder(args.out)
    asked = {}
    for text in args.fit_on:
        family, equals, version = text.partition("=")
        if not equals:
            raise ConfigError(f"--fit-on {text}: must read FAMILY=VERSION, as in gemm=sglang 0.5.10")
        asked[family] = version
    coefficients = fit_samples(rows, model, sm_data=args.sm_data, asked=asked, borrow=args.borrow,
                               implementation=args.implementation)
    if "implementation" in coefficients.notes:
        say(f"{coefficients.notes['gpu']}, {coefficients.notes['model']}: fitted on the rows of "
            f"{WHOSE[coefficients.notes['implementation']]}")
    say("\n".join(error_lines(coefficients.notes["errors"])))
    for line in coefficients.notes["assumed"]:
        if any(word in line for word in ("no measured row", "not measured", "needed", "tells bandwidth")):
            say(f"not of these rows: {line}")
        elif "beside other processes" in line:
            say(line)
    if args.out is not None:
        _write(args.out / "fit.json", coefficients.to_json(), args.replace)
        write_page(args.out / "SOURCE.md", source_page(coefficients, rows, model))
        say(f"wrote {args.out / 'fit.json'} and SOURCE.md")
    return 0


def _fit_steps(args: argparse.Namespace, rows: Sequence[Row], model: ModelSpec) -> int:
    """Of a CPU: the engine's steps as measured."""
    for flag, value in (("--implementation torch", args.implementation == "torch"), ("--fit-on", args.fit_on),
                        ("--borrow", args.borrow), ("--sm-data", args.sm_data)):
        if value:
            raise ConfigError(f"{flag}: a CPU's rows are not fitted but interpolated, the engine's steps as they are")
    profile = write_steps(rows, model, args.out, args.replace)
    say(f"{profile.hardware}, {profile.model}: {len(profile.prefill_tokens)} prefills and {len(profile.batches)} x "
        f"{len(profile.contexts)} decode iterations of the engine, interpolated; nothing is fitted to a CPU")
    if args.out is not None:
        say(f"wrote {args.out / 'steps.json'} and SOURCE.md")
    return 0


def write_steps(rows: Sequence[Row], model: ModelSpec, out: Path | None, replace: bool = False) -> StepProfile:
    """``steps.json`` and ``SOURCE.md`` into a folder, from a CPU's rows."""
    from bullet.profiles import step_times as fit_steps
    from bullet.profiles.source_page import write_page

    profile = fit_steps.profile_of(rows, model)
    if out is not None:
        _folder(out)
        _write(out / "steps.json", profile.to_json(), replace)
        write_page(out / "SOURCE.md", fit_steps.page(rows, profile, model))
    return profile


def fit_samples(rows: Sequence[Row], model: ModelSpec, *, sm_data: Path | None = None,
                asked: dict[str, str] | None = None, borrow: Sequence[str] = (),
                implementation: str | None = None) -> DeviceCoefficients:
    """Kernel families, SM axis and contention of a table: all that ``fit.json`` holds."""
    from bullet.profiles import kernels as profile
    from bullet.profiles import sm_axis as fit_sms
    from bullet.profiles import sweeps as fit_sweep

    if sm_data is not None and not sm_data.is_dir():
        raise ProfileError(f"{sm_data}: no such folder (--sm-data)")
    borrowed = DeviceCoefficients.from_json(PROFILES / ANALYTIC_FROM / "llama-3.1-8b" / "fit.json")
    table = rows
    chosen = fit_sweep.of_implementation(table, implementation)
    rows = chosen.rows
    out = profile.fit_profile(rows, model, borrowed=borrowed, asked=asked, borrow=borrow)
    out.assumed += chosen.notes
    if busy := sum(r["busy"] is True for r in rows):
        out.assumed.append(f"{busy} of {len(rows)} rows were measured beside other processes (--allow-busy), taken as they are")
    alone = profile.coefficients_of(out, FLAT)
    shipped = PROFILES / out.gpu.name / model.name / "fit.json"
    own = fit_sms.sweeps_of(profile.with_shapes(rows, model))
    errors: dict[str, dict[str, float]] = {}
    swept_on = DeviceModel(model, out.gpu, alone)
    if any(own.values()) and not own["decode_attention"]:
        own, swept_on, said = fit_sweep.torchs_on_sms(table, own, out, FLAT)
        out.assumed += said
    if any(own.values()):
        axis, errors = fit_sms.axis_of_kernels(own, swept_on)
        out.sources["sm_axis"] = "the table's own rows"
    elif sm_data is not None and out.gpu.name == "a100-80gb":
        axis, errors = fit_sms.axis_of_steps(sm_data, out.gpu, alone)
        out.sources["sm_axis"] = "muxserve"
    elif sm_data is not None and out.gpu.name == "h100":
        axis, errors = fit_sms.axis_of_kernels(fit_sms.greenctx(sm_data), DeviceModel(model, out.gpu, alone))
        out.sources["sm_axis"] = "greenctx"
    elif shipped.is_file() and "sm_axis" in (kept := DeviceCoefficients.from_json(shipped)).notes.get("fitted_on", {}):
        axis = {name: getattr(kept, name) for name in AXIS}
        errors = {k: v for k, v in kept.notes["errors"].items() if "sms" in k or "stretch" in k or "sm_axis" in k}
        out.sources["sm_axis"] = kept.notes["fitted_on"]["sm_axis"]
    else:
        axis = {name: getattr(borrowed, name) for name in AXIS}
        out.assumed.append("rate and bandwidth against SMs: no measured row, A100's")
    if "sm_axis" in out.sources:
        out.parameters |= {"bandwidth_against_sms": 2, "rate_against_sms": 2}
    out.errors |= dict(sorted(errors.items()))  # in one order, wherever they come from
    found, corun_errors = fit_sms.contention(rows, DeviceModel(model, out.gpu, profile.coefficients_of(out, axis)))
    out.errors |= corun_errors
    extra: dict[str, Any] = {}
    if not out.sources and not found:
        raise ProfileError("the table has no rows to fit: kernels alone on the whole device, or layers beside each other")
    if found:
        axis["contention_loss"] = found["contention_loss"]
        out.parameters["contention"] = 1
        out.sources["contention"] = "the table's own co-run rows"
        extra["attained_bandwidth_share"] = found["attained_bandwidth_share"]
    else:
        out.assumed.append("contention_loss 0.2")
    out.assumed += ["host_gap_s 0", "every family follows one curve of bandwidth against SMs",
                    "norm with fused residual lasts as long as the norm that was measured",
                    "the sampler costs nothing: the device has no term for it"]
    extra["waves"] = waves_by_evidence(out.errors)
    if chosen.implementation is not None:
        final = DeviceModel(model, out.gpu, profile.coefficients_of(out, axis))
        out.errors |= fit_sweep.layer_errors(rows, final)
        extra |= {"implementation": chosen.implementation, "operations": chosen.taken, "gpu": out.gpu.name,
                  "model": model_label(model)}
    noted = profile.with_notes(profile.coefficients_of(out, axis), out, table)
    return dataclasses.replace(noted, notes={**noted.notes, **extra})


def waves_by_evidence(errors: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Waves stay on (the SM axis needs block counts) unless rows left out speak against them: a tenth less error without
    them both in the median and at P90, wherever both were tried."""
    pairs = [(errors[a], errors[b]) for a, b in (("gemm_left_out:all", "gemm_left_out_without_waves:all"),
                                                ("sm_axis_left_out:all", "sm_axis_left_out_without_waves:all"))
             if a in errors and b in errors]
    against = bool(pairs) and all(off[k] < 0.9 * on[k] for on, off in pairs for k in ("median", "p90"))
    return {"on": True, "evidence": "against" if against else "not against",
            "left_out": [{"with": [on["median"], on["p90"]], "without": [off["median"], off["p90"]]} for on, off in pairs]}


# ---------------------------------------------------------------------------------------------------- show


def show_(args: argparse.Namespace) -> int:
    """A profile's coefficients; a table's rows; a value between measured points."""
    counts = {name: value for name in ASKED if (value := getattr(args, name)) is not None}
    if args.op is None and (counts or args.sms is not None):
        name = next(iter(counts), "sms")
        raise ConfigError(f"--{name.replace('_', '-')}: looks an operation up, and --op names none")
    if args.samples is None and args.op is None and args.version is None:
        from bullet.profiles.show import profile_lines

        device = load_device(DeviceConfig(gpu=args.gpu or DEFAULT_GPU, model=args.model))
        say("\n".join(profile_lines(device)))
        folder = PROFILES / device.gpu.name / device.model.name
        if folder.is_dir():
            say(f"\n{folder}: fit.json holds these numbers, SOURCE.md their sources, samples.parquet the rows")
        return 0
    from bullet.devices.lookup import lookup
    from bullet.profiles.importers import DEVICES, check_samples

    path, rows = _table(args)
    if args.version is not None:
        versions = sorted({str(r["origin_version"]) for r in rows})
        if args.version not in versions:
            raise ProfileError(f"{path}: no rows of {args.version!r}: it has {', '.join(versions)}")
        rows = [r for r in rows if r["origin_version"] == args.version]
    if args.op is None:
        say("\n".join(listing(rows)))
        return 0
    names = sorted({r["gpu"] for r in rows})
    if all(name in DEVICES or name.removeprefix("simulated ") in GPUS for name in names):
        check_samples(rows)  # what a fit refuses answers no question either
    elif len(names) > 1:
        raise ProfileError(f"{path}: measured on {', '.join(names)}: one device a table")
    seconds = lookup(rows, args.op, counts, sms=args.sms)
    say(f"{args.op} at {', '.join(f'{k} {v}' for k, v in counts.items())}: {seconds * 1e6:.2f} us, {rows[0]['source']}, "
        "linear between measured points")
    return 0


def _table(args: argparse.Namespace) -> tuple[Path, list[Row]]:
    """The table that a command names, else that of ``--gpu``; a table of another GPU than ``--gpu`` is refused."""
    from bullet.profiles.importers import gpu_of
    from bullet.profiles.sweeps import read_rows

    path: Path = args.samples or PROFILES / (args.gpu or DEFAULT_GPU) / (args.model or "llama-3.1-8b") / "samples.parquet"
    if not path.exists():
        raise ProfileError(f"{path}: no such table: give one, or make it with bullet-profile import or sweep")
    rows = read_rows(path)
    if not rows:
        raise ProfileError(f"{path}: holds no rows")
    if args.gpu is not None and (found := gpu_of(str(rows[0]["gpu"]), str(path)).name) != args.gpu:
        raise ProfileError(f"{path}: measured on {found}, not on --gpu {args.gpu}: leave --gpu out or give another table")
    return path, rows
