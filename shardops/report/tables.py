"""Measurements put in order for a reader: sections by primitive, panels that one plot shows, rows of tables.

Everything here is finished text or plain numbers, so that the HTML and the Markdown report say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .records import Measurement, Memory, Run, Source, Spread, plural

ORDER = (
    "sharded_adam",
    "update_path",
    "optimizer_step",
    "grad_norm",
    "cast_gather",
    "flatten_shard",
    "unflatten_shard",
)
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_KIND_ORDER = ("ours", "torch", "peer", "limit")
# Sizes this close are one column: 291 tensors of a model do not come to exactly as many elements as one.
_SAME_SIZE = 1.25
_FEW = 96  # tensors, as of a model that is cut into a few matrices


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Attributes:
        text: the figure.
        spread: its quartiles, or empty.
        mark: "slower" or "faster" where the spread does not reach 1, else empty.
    """

    text: str
    spread: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table; a row is texts first, then cells, and None where nothing was measured.

    Attributes:
        header: of all columns.
        texts: how many columns at the left are texts.
        rows: as long as the header.
        is_grouped: rows that begin with the same text stand together below it.
    """

    header: tuple[str, ...]
    texts: int
    rows: list[tuple[str | Cell | None, ...]]
    is_grouped: bool = True


class Case(NamedTuple):
    """What one plot and a group of rows are about: the case in words, and its number of tensors."""

    label: str
    tensors: str

    @property
    def title(self) -> str:
        return f"{self.label}, {self.tensors}"


@dataclass(frozen=True)
class Panel:
    """What one plot shows: one case on one machine, over sizes.

    Attributes:
        title: the case.
        message: what the plot says, in a sentence or two.
        measurements: of all contenders.
    """

    title: str
    message: str
    measurements: list[Measurement]


@dataclass(frozen=True)
class Section:
    """One primitive on one machine.

    Attributes:
        anchor: an id.
        title: primitive, and the machine if there are several.
        groups: measurements by case and number of tensors.
        panels: to be plotted.
        speeds: over stock, by case and size; None if nothing was compared.
        figures: every measurement.
    """

    anchor: str
    title: str
    groups: dict[Case, list[Measurement]]
    panels: list[Panel]
    speeds: Table | None
    figures: Table


# ---- texts -----------------------------------------------------------------------------------------------------------


def count(number: int) -> str:
    """1000 -> ``1k``, 16384 -> ``16.4k``, 10**8 -> ``100M``."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return str(number)


def seconds(value: float) -> str:
    """Three digits with a unit that suits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.9995 * unit:
            return f"{figure(value / unit)} {name}"
    return f"{figure(value / 1e-9)} ns"


def figure(value: float) -> str:
    """Three digits, two of what is below a tenth; never as a power: 0.012, 0.12, 1.23, 12.3, 123, 1230."""
    if value >= 9.995:
        return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"
    decimals = 2 if value >= 0.0995 or value <= 0 else 1 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"


def ratio_cell(value: float, spread: Spread | None) -> Cell:
    """A ratio above 1 where it is good, with its quartiles."""
    if spread is None:
        return Cell(figure(value))
    mark = "slower" if spread.high < 1 else "faster" if spread.low > 1 else ""
    return Cell(figure(value), f"{figure(spread.low)}–{figure(spread.high)}", mark)


def case_of(m: Measurement) -> str:
    """The case in words, with the dtype if it does not tell."""
    short = _SHORT.get(m.dtype, m.dtype)
    return ", ".join(text for text in (m.case, "" if short in m.case else short) if text) or m.primitive


# ---- order -----------------------------------------------------------------------------------------------------------


def primitive_rank(name: str) -> tuple[int, str]:
    """Known ones in the order of the update, others after them."""
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def contenders(measurements: Iterable[Measurement]) -> list[str]:
    """All contenders: ours, torch's ways, peers, limits; each in the order in which they came."""
    kinds = {m.contender: _KIND_ORDER.index(m.kind) for m in measurements}
    return sorted(kinds, key=lambda name: kinds[name])


def columns(sizes: Iterable[int]) -> list[list[int]]:
    """Sizes as columns, each of sizes that are nearly the same."""
    found: list[list[int]] = []
    for size in sorted(set(sizes)):
        if found and size <= _SAME_SIZE * found[-1][0]:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def column_name(sizes: Sequence[int]) -> str:
    """Of a column of nearly the same sizes."""
    return count(sizes[-1]) if len(sizes) == 1 else f"~{count(sizes[-1])}"


def _tensors_text(measurements: Iterable[Measurement]) -> str:
    counts = sorted({m.tensors for m in measurements})
    return plural(counts[0], "tensor") if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} tensors"


def _groups(measurements: list[Measurement]) -> dict[Case, list[Measurement]]:
    """The cases of a section.

    By number of tensors as well: many small ones are another case. A few, whose number grows with the size, are one.
    """
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(case_of(m), []).append(m)
    found: dict[Case, list[Measurement]] = {}
    for case, members in groups.items():
        sizes: dict[int, set[int]] = {}
        for m in members:
            sizes.setdefault(m.tensors, set()).add(m.numel)
        if max(sizes) > _FEW or any(len(several) > 1 for several in sizes.values()):
            for tensors in sorted(sizes):
                found[Case(case, plural(tensors, "tensor"))] = [m for m in members if m.tensors == tensors]
        else:
            found[Case(case, _tensors_text(members))] = members
    return found


# ---- sections --------------------------------------------------------------------------------------------------------


def sections(run: Run) -> list[Section]:
    """All of a run, by primitive and machine."""
    places = list(dict.fromkeys(m.where for m in run.measurements))
    found = []
    for primitive in sorted({m.primitive for m in run.measurements}, key=primitive_rank):
        for index, where in enumerate(places):
            members = [m for m in run.measurements if m.primitive == primitive and m.where == where]
            if members:
                title = primitive if len(places) == 1 else f"{primitive}: {where}"
                anchor = f"{primitive}-{index}".replace(" ", "-").replace(",", "")
                found.append(_section(anchor, title, _groups(members)))
    return found


def _section(anchor: str, title: str, groups: dict[Case, list[Measurement]]) -> Section:
    panels = [Panel(case.title, message(members), members) for case, members in groups.items() if _has_line(members)]
    return Section(anchor, title, groups, panels, speeds_table(groups), figures_table(groups))


def _has_line(members: list[Measurement]) -> bool:
    """Whether some contender has a rate at two sizes."""
    points = {(m.contender, m.numel) for m in members if m.gb_s is not None}
    names = [name for name, _ in points]
    return any(names.count(name) > 1 for name in names)


def message(members: list[Measurement]) -> str:
    """What a plot of these says: ours at the largest size, beside the limit and stock."""
    ours = [m for m in members if m.kind == "ours" and m.gb_s is not None]
    if not ours:
        return "No kernel of shardops was measured here."
    largest = max(m.numel for m in ours)
    best = max((m for m in ours if m.numel == largest), key=lambda m: m.gb_s or 0.0)
    text = f"At {count(largest)} elements {best.contender} moves {figure(best.gb_s or 0.0)} GB/s"
    limits = [m for m in members if m.kind == "limit" and m.numel == largest and m.gb_s]
    if best.limit_share is not None:
        beside = f" ({figure(limits[0].gb_s or 0.0)} GB/s)" if limits else ""
        text += f", {figure(best.limit_share)} of the limit{beside}"
    if best.speed_over_stock is not None:
        text += f", at {figure(best.speed_over_stock)} times the speed of {best.stock or 'stock torch'}"
    return f"{text}."


def speeds_table(groups: dict[Case, list[Measurement]]) -> Table | None:
    """Speed over stock: a row for each case and contender, a column for each size."""
    compared = {case: [m for m in members if m.speed_over_stock is not None] for case, members in groups.items()}
    sizes = columns(m.numel for members in compared.values() for m in members)
    if not sizes:
        return None
    rows: list[tuple[str | Cell | None, ...]] = []
    for case, members in compared.items():
        stocks = dict.fromkeys(m.stock or "stock torch" for m in members)
        for name in contenders(members):
            mine = {m.numel: m for m in members if m.contender == name}
            cells = [next((_speed(mine[n]) for n in reversed(several) if n in mine), None) for several in sizes]
            rows.append((f"{case.title}, over {', '.join(stocks)}", name, *cells))
    return Table(("case", "contender", *map(column_name, sizes)), 2, rows)


def _speed(m: Measurement) -> Cell:
    cell = ratio_cell(m.speed_over_stock or 0.0, m.speed_spread)
    return cell if m.kind == "ours" else replace(cell, mark="")  # how others do is not what is asked


def figures_table(groups: dict[Case, list[Measurement]]) -> Table:
    """Every measurement with its time, rate and share of the limit."""
    rows: list[tuple[str | Cell | None, ...]] = []
    for case, members in groups.items():
        for name in contenders(members):
            for m in sorted((m for m in members if m.contender == name), key=lambda m: m.numel):
                spread = m.time_spread
                quartiles = f"{seconds(spread.low)}–{seconds(spread.high)}" if spread else ""
                rows.append(
                    (
                        case.title,
                        name,
                        Cell(count(m.numel)),
                        Cell(seconds(m.median_s), quartiles),
                        Cell(figure(m.gb_s)) if m.gb_s is not None else None,
                        Cell(figure(m.limit_share)) if m.limit_share is not None else None,
                        Cell(str(len(m.seconds))),
                    )
                )
    return Table(("case", "contender", "elements", "time", "GB/s", "share of limit", "rounds"), 2, rows)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_table(run: Run) -> Table | None:
    """Bytes that a call reads and writes for each element, counted, at the largest size measured."""
    largest: dict[tuple[str, str, str], Measurement] = {}
    cases = list(dict.fromkeys(case_of(m) for m in run.measurements))
    for m in run.measurements:
        key = (m.primitive, case_of(m), m.contender)
        if m.nbytes and m.kind != "limit" and (key not in largest or m.numel > largest[key].numel):
            largest[key] = m
    rows: list[tuple[str | Cell | None, ...]] = []
    for key in sorted(largest, key=lambda key: (primitive_rank(key[0]), cases.index(key[1]))):
        m = largest[key]
        rows.append((*key, Cell(f"{(m.nbytes or 0) / m.numel:.3f}"), Cell(count(m.numel))))
    return Table(("primitive", "case", "contender", "bytes an element", "elements"), 3, rows) if rows else None


def _kept_sources(run: Run) -> list[tuple[Source, str]]:
    """The files whose measurements are shown, and the hardware that these ran on."""
    found: dict[str, tuple[Source, str]] = {}
    for measurement in run.measurements:
        for each in measurement.passes or (measurement,):
            found.setdefault(each.source.name, (each.source, each.source.labels.get(each.device, each.device)))
    return list(found.values())


def memory_table(run: Run) -> Table | None:
    """Memory that a step holds, where it was recorded."""
    newest: dict[tuple[str, str, str, int], Memory] = {}
    for source, place in sorted(_kept_sources(run), key=lambda pair: pair[0].date):
        newest |= {(place, row.case, row.contender, row.numel): row for row in source.memory}
    is_one_place = len({place for place, *_ in newest}) == 1
    rows: list[tuple[str | Cell | None, ...]] = [
        (
            row.case if is_one_place else f"{row.case}; {place}",
            row.contender,
            Cell(count(row.numel)),
            Cell(f"{row.resident / row.numel:.2f}"),
            Cell(f"{row.peak / 1e9:.3g} GB"),
            Cell(f"{row.peak / row.resident:.3f}"),
        )
        for (place, *_), row in newest.items()
    ]
    header = ("case", "contender", "parameters", "bytes a parameter", "peak", "peak over resident")
    return Table(header, 2, rows) if rows else None
