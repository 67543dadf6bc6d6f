"""The command ``shardops``: a parser for each subcommand, which is the module of its name in this folder.

``add_parser(subparsers)`` adds its options, ``run(options)`` returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .. import __version__

COMMANDS = ("plan", "doctor", "bench", "report")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="shardops",
        description="Plans the memory of sharded training, examines this machine, measures, and reports.",
        epilog="`shardops COMMAND --help` says more about a command.",
    )
    whole.add_argument("--version", action="version", version=f"shardops {__version__}")
    subparsers = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f".{name}", __name__).add_parser(subparsers)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: without the program's name; None: those of this process.

    Returns:
        The exit code; 2 for options that make no sense, 130 after an interrupt.

    Raises:
        SystemExit: argparse's, of code 2 for a usage error and 0 for ``--help``.
    """
    options = parser().parse_args(arguments)
    try:
        code: int = importlib.import_module(f".{options.command}", __name__).run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, as `head`, has seen enough. Python would flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"shardops {options.command}: interrupted", file=sys.stderr)
        return 130  # as shells say it: 128 and the signal's number
    return code
