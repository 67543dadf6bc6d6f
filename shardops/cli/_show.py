"""What the commands print with: tables and lines, by rich where it is installed, and JSON.

Nothing here knows what is shown. Markup is off: texts such as ``[rows, blocks, 2]`` are printed as they are.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

PIPE_WIDTH = 120  # characters, where the output is no terminal that could tell its own


def has_rich() -> bool:
    """Whether tables are drawn by rich; without it they are plain columns."""
    return importlib.util.find_spec("rich") is not None


def console() -> Any:
    """A rich console on the standard output of this moment, which takes texts literally; only where rich is."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    is_last_total: bool = False,
) -> None:
    """Prints a table.

    Args:
        title: above it.
        header: of the columns.
        rows: as long as the header each.
        numbers: positions of the columns that stand to the right.
        is_last_total: a line is drawn above the last row.
    """
    cells = [list(row) for row in rows]
    if not has_rich():
        print(f"\n{title}")
        for line in _plain([list(header), *cells], numbers, is_last_total):
            print(line)
        return
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title, style="bold"), title_justify="left")
    for index, name in enumerate(header):
        is_number = index in numbers
        drawn.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for index, row in enumerate(cells):
        drawn.add_row(*row, end_section=is_last_total and index == len(cells) - 2)
    print()
    console().print(drawn)


def _plain(rows: list[list[str]], numbers: Collection[int], is_last_total: bool) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        padded = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [line(rows[0]), rule, *(line(row) for row in rows[1:])]
    if is_last_total:
        lines.insert(-1, rule)
    return lines


def say(text: str = "") -> None:
    """Prints a line; a long one is broken between words where the terminal ends."""
    if has_rich() and sys.stdout.isatty():
        console().print(text)
    else:
        print(text)


def print_json(value: Any) -> None:
    """Prints JSON with the keys in the order that they come in; nothing else may be on the standard output then."""
    print(json.dumps(value, indent=2, allow_nan=False))
