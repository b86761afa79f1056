"""``bullet-sim inspect``: what a trace holds and how it would be read."""

from __future__ import annotations

import argparse
from typing import Any

from bullet.cli.common import add_trace_arguments


def add_inspect(commands: Any) -> None:
    """The sub-command."""
    parser = commands.add_parser("inspect", help="what a trace holds and how it is read",
                                 description="Say how a trace is read: columns, unit of its times, span, rate, lengths, and what "
                                 "is not read.")
    parser.add_argument("trace", metavar="TRACE", help="a built-in name or a file")
    add_trace_arguments(parser)
    parser.add_argument("--set", action="append", default=[], metavar="workload.a=b", dest="sets",
                        help="any workload key of the configuration, repeatable")
    parser.set_defaults(handler=run_inspect, config=None)


def run_inspect(args: argparse.Namespace) -> int:
    from bullet.cli.common import build_config
    from bullet.workload.report import inspect_lines

    args.rate = args.time_scale = args.cv = None  # flags of a run
    print("\n".join(inspect_lines(build_config(args).workload)))
    return 0
