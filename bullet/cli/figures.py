"""``bullet-sim figures``: the paper's figures and tables, ours beside its own, and the fidelity page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.cli.common import out_folder, whole
from bullet.files import Claim, fresh_folder

if TYPE_CHECKING:
    from bullet.paper.make import Made

EXAMPLES = """examples:
  bullet-sim figures
      all of them and the fidelity page: fidelity.html; about ten minutes on two cores, cached
  bullet-sim figures fig05 table2 --out figures
      two of them
  bullet-sim figures --list
"""


def add_figures(commands: Any) -> None:
    """Its parser."""
    parser = commands.add_parser(
        "figures",
        help="the paper's figures, ours beside its own",
        description="Make the paper's figures and "
        "tables: PNG, PDF and CSV each, and fidelity.html, which says what is met, near and off.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="fig05, table2, .. (default, and fidelity: all)")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--seeds", type=whole, metavar="N", help="of the simulated ones (default 5)")
    parser.add_argument(
        "--num-requests", type=whole, metavar="N", help="of each run (default 1000, as the paper's artifact sends)"
    )
    parser.add_argument("--dpi", type=whole, default=300, metavar="N", help="of the PNGs (default %(default)s)")
    parser.add_argument("--out", type=out_folder, metavar="DIR", help="a fresh folder (default runs/figures-<time>)")
    parser.add_argument("--jobs", type=whole, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where results are kept and found again (default runs/cache)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(handler=_figures)


def _figures(args: argparse.Namespace) -> int:
    from bullet.cli.sweep import Told
    from bullet.errors import require
    from bullet.paper import base, fidelity, make
    from bullet.sweeps.sweep import make_pool

    if args.list:
        for name in base.names():
            figure = base.load(name)
            print(f"{name:<9} {figure.title} ({figure.source}; the paper's: {figure.paper})")
        return 0
    figures = make.wanted(args.names)
    seeds = make.SEEDS if args.seeds is None else args.seeds
    require(seeds >= 1, "--seeds", seeds, "1 or more")
    require(args.num_requests is None or args.num_requests >= 1, "--num-requests", args.num_requests, "1 or more")
    require(30 <= args.dpi <= 1200, "--dpi", args.dpi, "30 to 1200")
    folder = fresh_folder(args.out, "figures")
    with Claim(folder), Told(args) as told:

        def done(one: Made) -> None:
            told.say(f"{one.figure.name}: {one.error}" if one.drawn is None else f"{one.figure.name}: {one.figure.title}")
            if one.drawn is not None:
                args.kept = told.folder = folder

        pool = make_pool(args.cache, args.jobs, None, told.progress, told.say)
        made = make.make(figures, folder, pool, seeds=seeds, requests=args.num_requests, dpi=args.dpi, told=done)
        fidelity.write(made, seeds, folder)
    failed = [one for one in made if one.drawn is None]
    for one in failed:
        print(f"bullet-sim: error: {one.figure.name}: {one.error}", file=sys.stderr)
    print(
        f"{len(made) - len(failed)} of {len(made)} figures; relations of the paper: {fidelity.summary(made)}\n"
        f"written to {folder}/:\n  fidelity.html, fidelity.md; NAME.png, NAME.pdf, NAME.csv"
    )
    return 2 if failed else 0
