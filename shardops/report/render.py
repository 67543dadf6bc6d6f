"""Makes the two files of a report from a run, and from another one to compare it with: HTML and Markdown.

The HTML needs nothing but itself, and no script. Names in the measurements are foreign text: both formats escape them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from . import plots, tables
from .compare import SLOWER, TOLERANCE, Change, Comparison, changes_table, compare
from .plots import Dot
from .records import Run, Source, plural
from .tables import Panel, figure

_VERSIONS = ("shardops", "torch", "triton", "python", "revision")
HTML_NAME, MARKDOWN_NAME = "report.html", "report.md"


@dataclass(frozen=True)
class Picture:
    """A plot in the page.

    Attributes:
        title: above it.
        message: below it; what it says.
        svg: the picture.
    """

    title: str
    message: str
    svg: Markup


@dataclass(frozen=True)
class Machine:
    """What files of one machine have in common.

    Attributes:
        headline: the hardware and what matters most of the versions.
        files: their names.
        dates: when they were made, first and last.
        facts: hardware and versions.
    """

    headline: str
    files: list[str]
    dates: str
    facts: dict[str, str]


def write(run: Run, directory: Path, other: Run | None = None, *, tolerance: float = TOLERANCE) -> tuple[Path, Path]:
    """Writes ``report.html`` and ``report.md``.

    Args:
        run: what is reported.
        directory: made if it is not there.
        other: an earlier run that this one is compared with.
        tolerance: of the comparison, see ``compare.compare``.

    Returns:
        The two paths.

    Raises:
        ValueError: the run has no measurement.
    """
    if not run.measurements:
        raise ValueError(f"{run.name} has no measurement; a report is made of at least one")
    context = _context(run, compare(run, other, tolerance) if other else None, tolerance)
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / HTML_NAME, directory / MARKDOWN_NAME
    for path, environment in zip(paths, (_html_environment(), _markdown_environment()), strict=True):
        path.write_text(environment.get_template(f"{path.name}.j2").render(context), encoding="utf-8")
    return paths


def _context(run: Run, comparison: Comparison | None, tolerance: float) -> dict[str, Any]:
    sections = tables.sections(run)
    return {
        "run": run,
        "machines": _machines(run),
        "warnings": [warning for source in run.sources for warning in source.warnings],
        "missing": _missing(run.sources),
        "overviews": _overviews(sections),
        "sections": sections,
        "pictures_of": {section.anchor: _plots(section) for section in sections},
        "bytes": tables.bytes_table(run),
        "memory": tables.memory_table(run),
        "comparison": comparison,
        "changed": comparison and changes_table([*comparison.slower, *comparison.faster]),
        "changes": comparison and changes_table(comparison.changes),
        "change_pictures": _changes(comparison.changes) if comparison else [],
        "tolerance": f"{100 * tolerance:g}",
        "plural": plural,
    }


# ---- pictures --------------------------------------------------------------------------------------------------------


def _plots(section: tables.Section) -> list[Picture]:
    return [_plot(panel, f"{section.anchor}-plot-{index}") for index, panel in enumerate(section.panels)]


def _plot(panel: Panel, name: str) -> Picture:
    kinds = {m.contender: m.kind for m in panel.measurements}
    styles = plots.styles_of({contender: kinds[contender] for contender in tables.contenders(panel.measurements)})
    primitive = panel.measurements[0].primitive
    alternative = (
        f"{primitive}, {panel.title}: GB/s against the number of elements, of {', '.join(styles)}. {panel.message}"
    )
    svg = plots.bandwidth(panel.measurements, styles, name, alternative)
    return Picture(panel.title, panel.message, Markup(svg))


def _overviews(sections: list[tables.Section]) -> list[Picture]:
    """Ours over stock at the largest size of every case, one picture for each section that compares."""
    found: dict[str, tuple[str, dict[str, list[Dot]]]] = {}
    for section in sections:
        rows: dict[str, list[Dot]] = {}
        for case, members in section.groups.items():
            mine = [m for m in members if m.kind == "ours" and m.speed_over_stock]
            largest = max((m.numel for m in mine), default=0)
            dots = [Dot(m.contender, m.speed_over_stock or 0, m.speed_spread) for m in mine if m.numel == largest]
            if dots:
                rows[f"{case.label}\n{case.tensors}, {tables.count(largest)} elements"] = dots
        if rows:
            found[section.anchor] = section.title, rows
    reach = [end for _, rows in found.values() for end in plots.ends_of(rows)]
    pictures = []
    for anchor, (title, rows) in found.items():
        message = _overview_message(rows)
        styles = plots.styles_of({dot.look: "ours" for dots in rows.values() for dot in dots})
        alternative = f"{title}: speed over stock torch, a row for each case. {message}"
        svg = plots.ratios(
            rows, styles, "speed over stock (1: as fast)", f"overview-{anchor}", alternative, reach=reach
        )
        pictures.append(Picture(title, message, Markup(svg)))
    return pictures


def _overview_message(rows: dict[str, list[Dot]]) -> str:
    best = {label.replace("\n", ", "): max(dots, key=lambda dot: dot.value) for label, dots in rows.items()}
    high, low = (end(best, key=lambda label: best[label].value) for end in (max, min))
    text = f"{best[high].look} runs at {figure(best[high].value)} times stock's speed ({high})"
    return f"{text}; the least of all cases is {figure(best[low].value)} ({low})." if low != high else f"{text}."


def _changes(changes: list[Change]) -> list[Picture]:
    """What changed in ours, one picture for each primitive, a point for each size."""
    found: dict[str, dict[str, list[Change]]] = {}
    for change in changes:
        m = change.now
        if m.kind == "ours":
            label = f"{tables.case_of(m)}\n{plural(m.tensors, 'tensor')}, {m.contender}"
            found.setdefault(m.primitive, {}).setdefault(label, []).append(change)
    reach = [change.ratio for change in changes if change.now.kind == "ours"]
    pictures = []
    for primitive, groups in found.items():
        rows = {label: [Dot(change.verdict, change.ratio) for change in group] for label, group in groups.items()}
        message = _change_message([change for group in groups.values() for change in group])
        alternative = f"{primitive}: speed now over speed before, a row for each case, a point for each size. {message}"
        axis, name = "now over before (1: no change)", f"change-{primitive}".replace(" ", "-")
        svg = plots.ratios(rows, plots.CHANGES, axis, name, alternative, reach=reach)
        pictures.append(Picture(primitive, message, Markup(svg)))
    return pictures


def _change_message(changes: list[Change]) -> str:
    slower = [change for change in changes if change.verdict == SLOWER]
    if not slower:
        return f"None of {plural(len(changes), 'figure')} became slower beyond the spread."
    worst = min(slower, key=lambda change: change.ratio)
    m = worst.now
    at = f"{tables.case_of(m)}, {plural(m.tensors, 'tensor')}, {tables.count(m.numel)} elements"
    return (
        f"{len(slower)} of {plural(len(changes), 'figure')} became slower beyond the spread, "
        f"the most {m.contender} at {figure(worst.ratio)} ({at})."
    )


# ---- the rest --------------------------------------------------------------------------------------------------------


def _machines(run: Run) -> list[Machine]:
    """Files with the same machine and versions, together."""
    found: list[tuple[dict[str, str], list[Source]]] = []
    for source in run.sources:
        facts = {name: text for name, text in source.machine.items() if name != "date"}
        for known, members in found:
            if known == facts:
                members.append(source)
                break
        else:
            found.append((facts, [source]))
    return [
        Machine(_headline(facts, members, run), [source.name for source in members], _dates(members), facts)
        for facts, members in found
    ]


def _headline(facts: dict[str, str], sources: list[Source], run: Run) -> str:
    places = list(dict.fromkeys(m.where for m in run.measurements if m.source in sources))
    versions = [f"{name} {facts[name]}" for name in _VERSIONS if name in facts]
    return "; ".join([*places, ", ".join(versions)] if versions else places)


def _dates(sources: list[Source]) -> str:
    days = sorted({source.date[:10] for source in sources if source.date})
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))


def _missing(sources: Iterable[Source]) -> dict[str, list[str]]:
    """What was not measured -> the reasons, each once."""
    found: dict[str, list[str]] = {}
    for source in sources:
        for name, reason in source.missing.items():
            reasons = found.setdefault(name, [])
            if reason not in reasons:
                reasons.append(reason)
    return found


def _environment(**options: Any) -> jinja2.Environment:
    loader = jinja2.PackageLoader("shardops.report", "templates")
    rest: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(loader=loader, autoescape=True, keep_trailing_newline=True, **rest, **options)


def _html_environment() -> jinja2.Environment:
    return _environment()


def _markdown_environment() -> jinja2.Environment:
    # Safe text goes through autoescaping as it is, so that what `finalize` has escaped is not escaped again.
    return _environment(finalize=lambda value: value if isinstance(value, Markup) else Markup(markdown(str(value))))


def markdown(text: str) -> str:
    """A text that Markdown shows as it is, in a table too: in one line, with no sign that means something."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # sharded_adam has none to escape
