"""Reports that people can read, from JSON files of measurements: ``shardops report``.

``read`` collects the measurements of any set of files, ``write`` makes an HTML and a Markdown file from them. Drawing
takes jinja2 and matplotlib (the extra ``reports``); reading and comparing take none.
"""

from __future__ import annotations

from pathlib import Path

from .compare import TOLERANCE, Change, Comparison, compare
from .reading import read
from .records import Measurement, Memory, Run, Source, Spread

__all__ = [
    "Change",
    "Comparison",
    "Measurement",
    "Memory",
    "Run",
    "Source",
    "Spread",
    "compare",
    "read",
    "write",
]


def write(
    run: Run, directory: Path | str, other: Run | None = None, *, tolerance: float = TOLERANCE
) -> tuple[Path, Path]:
    """Writes ``report.html``, which needs no network and no other file, and ``report.md``.

    Args:
        run: what is reported.
        directory: made if it is not there.
        other: an earlier run that this one is compared with.
        tolerance: the share that a median has to change by, beside leaving the spread, to be called slower or faster.

    Returns:
        The two paths.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: the run has no measurement.
    """
    try:
        from . import render
    except ImportError as error:
        raise ImportError(
            f"reports are made with jinja2 and matplotlib, and {error.name} cannot be imported ({error}); "
            "`pip install jinja2 matplotlib` installs both"
        ) from error
    return render.write(run, Path(directory), other, tolerance=tolerance)
