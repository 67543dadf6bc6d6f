"""The report's pictures, drawn by matplotlib and returned as SVG for the inside of a page.

Colours are those that ``svg`` names; whoever sees few of them, or prints in grey, has markers and dashes beside them.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from .records import Measurement, Spread, spread_of
from .svg import INK, SERIES, SOFT, inline
from .tables import count

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_DASHES: dict[str, Any] = {"ours": "-", "torch": (0, (5, 2)), "peer": (0, (5, 1.5, 1, 1.5)), "limit": (0, (1, 1.5))}
_LEGEND = 25  # characters of a name, two of which have room beside each other
_LABEL = 30  # characters of a line left of a plot
_WIDTH = 4.7  # inches: a phone shows them all without scaling its letters down much
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: the page's own font, found by a search
    "svg.hashsalt": "shardops",  # the same figures give the same file
    "text.parse_math": False,  # names are texts, whatever signs they hold
    "font.size": 9.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": SOFT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Style:
    """How a contender looks in every plot of a report."""

    color: str
    marker: str
    dash: Any  # as matplotlib takes it
    width: float = 1.4
    shift: float = 0.0  # in plots of ratios: of a row's height, so that points do not hide each other


# Of what became of a figure between two runs.
CHANGES = {
    "slower": Style(SERIES[1], "v", "-", shift=0.12),
    "faster": Style(SERIES[0], "^", "-", shift=-0.12),
    "same": Style(SOFT, "o", "-"),
    "too few rounds": Style(SOFT, "x", "-"),
}


def styles_of(kinds: Mapping[str, str]) -> dict[str, Style]:
    """Contender -> style, within one plot.

    Args:
        kinds: contender -> kind, in the order of the legend: ours first, which look the same wherever they are alike.
    """
    found: dict[str, Style] = {}
    limits = 0
    for name, kind in kinds.items():
        if kind == "limit":
            found[name] = Style(INK, ("", "|", "_")[limits % 3], _DASHES[kind], 1.3)
            limits += 1
            continue
        index = len(found) - limits
        width = 2.0 if kind == "ours" else 1.4
        found[name] = Style(SERIES[index % len(SERIES)], _MARKERS[index % len(_MARKERS)], _DASHES[kind], width)
    return found


def _finish(drawing: Figure, name: str, alternative: str) -> str:
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", transparent=True)
    return inline(buffer.getvalue(), name, alternative)


def _figure(height: float) -> Figure:
    drawing = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasSVG(drawing)
    return drawing


# ---- plots -----------------------------------------------------------------------------------------------------------


def bandwidth(measurements: Sequence[Measurement], styles: Mapping[str, Style], name: str, alternative: str) -> str:
    """GB/s against elements, one line per contender, with quartiles; the limit is one of them."""
    lines: dict[str, list[Measurement]] = {contender: [] for contender in styles}
    for m in measurements:
        if m.gb_s is not None and m.nbytes:
            lines[m.contender].append(m)
    shown = {contender: sorted(points, key=lambda m: m.numel) for contender, points in lines.items() if points}
    with matplotlib.rc_context(_SETTINGS):
        columns = _legend_columns(shown)
        drawing = _figure(2.75 + 0.19 * math.ceil(len(shown) / columns))
        axes = drawing.add_subplot()
        for contender, points in shown.items():
            style = styles[contender]
            rates = [m.gb_s or 0.0 for m in points]
            sizes = [m.numel for m in points]
            look: dict[str, Any] = {"linestyle": style.dash, "linewidth": style.width, "label": contender}
            axes.plot(sizes, rates, color=style.color, marker=style.marker, markersize=4.5, **look)
            whiskers = _whiskers([(rate, _rates(m)) for rate, m in zip(rates, points, strict=True)])
            axes.errorbar(sizes, rates, yerr=whiskers, fmt="none", ecolor=style.color, elinewidth=0.9)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("elements")
        axes.set_ylabel("GB/s")
        axes.grid(True)
        drawing.legend(loc="outside lower center", ncols=columns, handlelength=3.2, columnspacing=1.2)
        return _finish(drawing, name, alternative)


def _rates(m: Measurement) -> Spread | None:
    return spread_of([(m.nbytes or 0) / value / 1e9 for value in m.seconds])


def _legend_columns(names: Iterable[str]) -> int:
    """Two where two fit beside each other."""
    return 2 if max(map(len, names)) <= _LEGEND else 1


def _whiskers(points: Iterable[tuple[float, Spread | None]]) -> list[list[float]]:
    """Lengths below and above each point; none where there is no spread, or the spread lies aside."""
    ends = [(value, spread or Spread(value, value, value)) for value, spread in points]
    return [[max(v - s.low, 0.0) for v, s in ends], [max(s.high - v, 0.0) for v, s in ends]]


@dataclass(frozen=True)
class Dot:
    """One point of a plot of ratios; ``look`` is a key of its styles and a line of its legend."""

    look: str
    value: float
    spread: Spread | None = None


def ends_of(rows: Mapping[str, Sequence[Dot]]) -> list[float]:
    """Values and quartiles of all points, and 1."""
    return [1.0] + [end for dots in rows.values() for dot in dots for end in (dot.value, *(dot.spread or ()))]


def ratios(
    rows: Mapping[str, Sequence[Dot]],
    styles: Mapping[str, Style],
    axis: str,
    name: str,
    alternative: str,
    *,
    reach: Sequence[float] = (),
) -> str:
    """Ratios, one row for each case, on a logarithmic axis whose line at 1 says "no difference".

    Args:
        rows: label, of one line or several -> points; first at the top.
        styles: of the points' looks.
        axis: what is drawn.
        name: that ids begin with.
        alternative: what the picture says.
        reach: values that the axis has to hold besides, so that several pictures have the same.
    """
    used = [look for look in styles if any(dot.look == look for dots in rows.values() for dot in dots)]
    labels = ["\n".join(textwrap.fill(line, _LABEL) for line in label.splitlines()) for label in rows]
    values = [*ends_of(rows), *reach]
    with matplotlib.rc_context(_SETTINGS):
        columns = _legend_columns(used)
        lines = sum(label.count("\n") + 1.6 for label in labels)
        drawing = _figure(0.8 + 0.165 * lines + 0.19 * math.ceil(len(used) / columns))
        axes = drawing.add_subplot()
        axes.axvline(1.0, color=INK, linewidth=1.0, zorder=1)
        for look in used:
            style = styles[look]
            places = [(row, dot) for row, dots in enumerate(rows.values()) for dot in dots if dot.look == look]
            axes.errorbar(
                [dot.value for _, dot in places],
                [row + style.shift for row, _ in places],
                xerr=_whiskers([(dot.value, dot.spread) for _, dot in places]),
                color=style.color,
                marker=style.marker,
                markersize=5.5,
                linestyle="none",
                elinewidth=1.2,
                label=look,
            )
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 1.1, max(values) * 1.1)
        axes.xaxis.set_major_locator(LogLocator(subs=_ticks(max(values) / min(values)), numticks=20))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", labelsize=9, length=0)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel(axis)
        axes.grid(True, axis="both")
        drawing.legend(loc="outside lower center", ncols=columns)
        return _finish(drawing, name, alternative)


def _ticks(reach: float) -> tuple[float, ...]:
    """Where a logarithmic axis has its ticks within a decade: about five for the whole."""
    if reach < 1.6:
        return (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 7.0)
    if reach < 4:
        return (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 7.0)
    return (1.0, 2.0, 5.0) if reach < 60 else (1.0,)
