"""Compares two runs, thing by thing: what became slower, beyond the spread of both.

Machines drift by more than kernels change, so a thing is judged by its speed over stock torch, which took turns with
it in each run, wherever both runs have that; by its time only where they have not. Two processes differ by more than
the rounds of one do, for their memory lies elsewhere and neighbours come and go: only passes show by how much. A change
also has to be larger than a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

from .records import FEWEST_PASSES, Measurement, Run, Spread, plural
from .tables import Cell, Table, case_of, count, figure, primitive_rank, seconds

SLOWER, SAME, FASTER, UNKNOWN = "slower", "same", "faster", "too few rounds"
TOLERANCE = 0.05


@dataclass(frozen=True)
class Change:
    """One thing in both runs; ratios are above 1 where it became faster.

    Attributes:
        before: the other run's.
        now: this run's.
        time_ratio: time before over time now.
        stock_ratio: speed over stock now over that before; None if a run has none.
        verdict: "slower" or "faster" if the two runs' ranges of passes (of fewer than three: the quartiles of their
            rounds) are disjoint and the medians differ by more than the tolerance, "same" if not, "too few rounds" if
            there are no quartiles.
    """

    before: Measurement
    now: Measurement
    time_ratio: float
    stock_ratio: float | None
    verdict: str

    @property
    def ratio(self) -> float:
        """What is judged."""
        return self.time_ratio if self.stock_ratio is None else self.stock_ratio


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        name: of the other run's directory.
        changes: all, in the order of the report.
        summary: in sentences.
        machine: what differs between the machines: name, before, now.
        is_comparable: whether both ran on hardware of the same name.
        few_passes: how many of the changes are of fewer than three passes in one of the runs.
    """

    name: str
    changes: list[Change]
    summary: str
    machine: Table | None
    is_comparable: bool
    few_passes: int = 0

    @property
    def slower(self) -> list[Change]:
        """What became slower beyond the spread, the worst first."""
        return sorted((c for c in self.changes if c.verdict == SLOWER), key=lambda change: change.ratio)

    @property
    def faster(self) -> list[Change]:
        """What became faster beyond the spread, the best first."""
        return sorted((c for c in self.changes if c.verdict == FASTER), key=lambda change: -change.ratio)


def judge(before: Spread | None, now: Spread | None, tolerance: float = TOLERANCE) -> str:
    """The verdict on two spreads of something that is better when larger."""
    if before is None or now is None:
        return UNKNOWN
    if now.high < before.low and now.median * (1 + tolerance) < before.median:
        return SLOWER
    return FASTER if now.low > before.high and now.median > before.median * (1 + tolerance) else SAME


def _change(before: Measurement, now: Measurement, tolerance: float) -> Change:
    stock_ratio = None
    if before.speed_over_stock and now.speed_over_stock and before.stock == now.stock:
        stock_ratio = now.speed_over_stock / before.speed_over_stock
        verdict = judge(before.speed_range, now.speed_range, tolerance)
    else:
        verdict = judge(_inverse(before.time_range), _inverse(now.time_range), tolerance)
    return Change(before, now, before.median_s / now.median_s, stock_ratio, verdict)


def _inverse(spread: Spread | None) -> Spread | None:
    return spread and Spread(1 / spread.high, 1 / spread.median, 1 / spread.low)


def compare(run: Run, other: Run, tolerance: float = TOLERANCE) -> Comparison:
    """This run beside another, earlier one.

    Args:
        run: of now.
        other: of before.
        tolerance: that a median has to change by, as a share, beside leaving the spread.
    """
    before = {m.key: m for m in other.measurements}
    now = {m.key: m for m in run.measurements}
    changes = [_change(before[key], now[key], tolerance) for key in now if key in before]
    changes.sort(key=lambda c: (primitive_rank(c.now.primitive), c.now.case, c.now.tensors, c.now.numel))
    places = [{m.source.labels.get(m.device, m.device) for m in each.measurements} for each in (other, run)]
    few = sum(min(len(c.before.passes), len(c.now.passes)) < FEWEST_PASSES for c in changes)
    summary = _summary(changes, len(now), len(before))
    return Comparison(other.name, changes, summary, _machines(run, other), places[0] == places[1], few)


def _summary(changes: list[Change], now: int, before: int) -> str:
    ours = [change for change in changes if change.now.kind == "ours"]
    said = []
    for what, members in (("of shardops", ours), ("of others", [c for c in changes if c.now.kind != "ours"])):
        if members:
            few = sum(c.verdict == UNKNOWN for c in members)
            tally = [f"{sum(c.verdict == v for c in members)} {v}" for v in (SLOWER, FASTER, SAME)]
            tally += [f"{few} of too few rounds"] * bool(few)
            said.append(f"{plural(len(members), 'figure')} {what}: {', '.join(tally)}")
    lone = ((now - len(changes), "only now"), (before - len(changes), "only before"))
    alone = [f"{number} {text}" for number, text in lone if number]
    rest = f" Measured {' and '.join(alone)}." if alone else ""
    return f"{'; '.join(said) or 'The two runs have no figure in common'}.{rest}"


def _machines(run: Run, other: Run) -> Table | None:
    texts: list[dict[str, str]] = []
    for each in (other, run):
        found: dict[str, list[str]] = {}
        for source in each.sources:
            for name, text in source.machine.items():
                if text not in found.setdefault(name, []):
                    found[name].append(text)
        texts.append({name: "; ".join(values) for name, values in found.items()})
    before, now = texts
    names = [name for name in {**now, **before} if name != "date" and now.get(name) != before.get(name)]
    rows: list[tuple[str | Cell | None, ...]] = [(n, before.get(n, ""), now.get(n, "")) for n in names]
    return Table(("", "before", "now"), 3, rows, is_grouped=False) if rows else None


def changes_table(changes: list[Change]) -> Table:
    """Changes, in their order; the verdict first of the figures, for a narrow screen shows those at the left."""
    rows: list[tuple[str | Cell | None, ...]] = []
    for change in changes:
        m = change.now
        case = f"{case_of(m)}, {plural(m.tensors, 'tensor')}"
        verdict = Cell(change.verdict, mark=change.verdict if change.verdict in (SLOWER, FASTER) else "")
        over = Cell(figure(change.stock_ratio)) if change.stock_ratio is not None else None
        times = (Cell(seconds(change.before.median_s)), Cell(seconds(m.median_s)))
        ratio = Cell(figure(change.time_ratio))
        rows.append((m.primitive, case, m.contender, Cell(count(m.numel)), verdict, over, ratio, *times))
    header = ("primitive", "case", "contender", "elements", "verdict", "speed over stock", "speed", "before", "now")
    return Table(header, 3, rows)
