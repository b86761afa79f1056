"""``bullet-profile``: measuring (cli/measure.py, which runs without the simulator), tables and fits (cli/fit.py).

Runs alone as ``python -m bullet.cli.profile``, which needs no installation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bullet.cli.common import Parser
from bullet.cli.lifecycle import command

MEASURING = (("check", "prove each pair of SM partitions"), ("sweep", "measure alone and side by side"),
             ("gpu", "check, then sweep"), ("stages", "all of make gpu"), ("table", "a sweep's table from its rows"),
             ("compare", "do two sweeps agree?"))


def main(argv: Sequence[str] | None = None) -> int:
    """``bullet-profile``; returns the exit status."""
    return command("bullet-profile", lambda: _parser(sys.argv[1:] if argv is None else argv), argv)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    if arguments and arguments[0] in dict(MEASURING):
        from bullet.cli import measure

        return measure.build_parser()
    from bullet.cli import fit

    parser = Parser(prog="bullet-profile", description="Measure kernels against SMs, fit devices to tables, show either. Each "
                    "command has its own --help.")
    commands = parser.add_subparsers(dest="command", required=True,
                                     metavar="check | sweep | gpu | stages | table | compare | import | fit | plot | show")
    for name, text in MEASURING:
        commands.add_parser(name, help=text, add_help=False)
    fit.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
