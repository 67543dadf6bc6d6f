"""``shardops report DIR [OTHER_DIR]``: an HTML and a Markdown report of the measurements in a directory.

Exit code 0; 2 if there is no file with measurements, or what draws the report is not installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import report
from ..report.compare import TOLERANCE

_SKIPPED_SHOWN = 3


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "report",
        help="make a report from JSON files of measurements",
        description="Writes report.html, which needs no network, and report.md from every JSON file below DIR that "
        "`shardops bench` or benchmarks/gpu_session.py wrote. With OTHER_DIR, says what changed since then.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="of JSON files, or one such file")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER_DIR", help="an earlier run to compare with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes; DIR itself if not given")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=TOLERANCE,
        metavar="SHARE",
        help=f"what became slower or faster by less counts as the same, {TOLERANCE} if not given",
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}; a share lies between 0 and 1: 0.05 stands for 5 %")
    return value


def run(options: argparse.Namespace) -> int:
    """Reads, writes, and says where."""
    try:
        runs = [_read(path) for path in (options.directory, options.other) if path is not None]
        default = options.directory if options.directory.is_dir() else options.directory.parent
        other = runs[1] if len(runs) > 1 else None
        paths = report.write(runs[0], options.out or default, other, tolerance=options.tolerance)
    except (OSError, ValueError, ImportError) as error:
        print(f"shardops report: error: {error}", file=sys.stderr)
        return 2
    for each in runs:
        print(f"{each.name}: {len(each.measurements)} figures from {', '.join(s.name for s in each.sources)}")
        for name, reason in each.skipped.items():
            print(f"skipped {name}: {reason}")
        for note in each.notes:
            print(note)
    if other is not None:
        print(report.compare(runs[0], other, options.tolerance).summary)
    for path in paths:
        print(path)
    return 0


def _read(path: Path) -> report.Run:
    """The run in a directory.

    Raises:
        OSError: there is no such directory.
        ValueError: no file in it has measurements.
    """
    found = report.read(path)
    if not found.measurements:
        reasons = [f"{name}: {reason}" for name, reason in list(found.skipped.items())[:_SKIPPED_SHOWN]]
        more = "; .." if len(found.skipped) > _SKIPPED_SHOWN else ""
        why = f"skipped {'; '.join(reasons)}{more}" if reasons else "no JSON file in it"
        raise ValueError(f"{path} has no measurements ({why}); `shardops bench --out {path}` makes some")
    return found
