"""What a report is made of: measurements, the files they came from, and what a directory of such files gave.

Times are in seconds, sizes in bytes or elements as their names say; nothing here reads, draws or formats.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# Below these, quartiles of rounds, and a range of passes, say nothing about spread.
FEWEST_ROUNDS = FEWEST_PASSES = 3


class Spread(NamedTuple):
    """A median and what lies around it: quartiles of rounds, or the range of passes."""

    low: float
    median: float
    high: float


def spread_of(values: Sequence[float]) -> Spread | None:
    """Quartiles of a few numbers; None of fewer than three."""
    if len(values) < FEWEST_ROUNDS:
        return None
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Memory:
    """Memory around one optimizer step.

    Attributes:
        case: storage of parameters and states.
        contender: whose step.
        numel: parameters.
        resident: bytes held before the step: parameters, gradients, states.
        peak: the most bytes held within it, those included.
    """

    case: str
    contender: str
    numel: int
    resident: int
    peak: int


@dataclass(frozen=True)
class Source:
    """One file that was read.

    Attributes:
        name: the file, relative to the directory.
        kind: "pytest-benchmark" or "GPU session".
        date: ISO 8601, as the file has it; empty if it has none.
        machine: hardware and versions, name -> text.
        labels: device ("cpu", "cuda") -> its name.
        missing: what was not measured -> why not.
        warnings: what a reader has to know before the figures.
        memory: where it was recorded.
        number: of the pass of a run that measured everything several times.
    """

    name: str
    kind: str
    date: str
    machine: dict[str, str]
    labels: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    memory: tuple[Memory, ...] = ()
    number: int = 1


@dataclass(frozen=True)
class Measurement:
    """One contender in one case at one size.

    Attributes:
        source: the file.
        primitive: "sharded_adam", "cast_gather", ..
        case: storage, layout and the like, such as "bf16 + split32".
        dtype: of the parameters; empty if the case tells.
        numel: elements of all tensors together.
        tensors: their number.
        contender: who ran, with its backend where it is ours.
        kind: "ours", "torch", "peer" or "limit".
        backend: of ours.
        device: "cpu" or "cuda".
        threads: of a CPU; None if not recorded.
        nbytes: that this contender must move, counted; None if not counted.
        seconds: every round.
        median_s: their median.
        gb_s: ``nbytes / median_s / 1e9``.
        limit_share: bandwidth over that of the same streams in the same run, paired; None if there is none.
        speed_over_stock: median over rounds of stock's time over this one's; None of stock itself.
        speeds: those ratios round by round; empty where rounds are not paired.
        stock: whom ``speed_over_stock`` compares with.
        passes: the same thing in each pass of the run, of which this one holds all rounds; empty: one pass.
    """

    source: Source
    primitive: str
    case: str
    dtype: str
    numel: int
    tensors: int
    contender: str
    kind: str
    backend: str | None
    device: str
    threads: int | None
    nbytes: int | None
    seconds: tuple[float, ...]
    median_s: float
    gb_s: float | None
    limit_share: float | None
    speed_over_stock: float | None
    speeds: tuple[float, ...] = ()
    stock: str | None = None
    passes: tuple[Measurement, ...] = ()

    @property
    def time_spread(self) -> Spread | None:
        """Of the rounds, in seconds."""
        return spread_of(self.seconds)

    @property
    def speed_spread(self) -> Spread | None:
        """Of the paired ratios."""
        return spread_of(self.speeds)

    @property
    def time_range(self) -> Spread | None:
        """Seconds that another run's are judged by: from pass to pass, or :attr:`time_spread` of too few passes."""
        return _range_of([each.median_s for each in self.passes]) or self.time_spread

    @property
    def speed_range(self) -> Spread | None:
        """Likewise of the speed over stock."""
        speeds = [each.speed_over_stock for each in self.passes if each.stock == self.stock]
        return _range_of(speeds) or self.speed_spread

    @property
    def where(self) -> str:
        """Hardware and threads: figures of two of them are never put into one plot."""
        threads = "" if self.device != "cpu" or self.threads is None else f", {plural(self.threads, 'thread')}"
        return f"{self.source.labels.get(self.device, self.device)}{threads}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same thing measured in two runs, whatever the machine."""
        what = (self.primitive, self.case, self.dtype, self.numel, self.tensors)
        return (*what, self.contender, self.backend, self.device, self.threads if self.device == "cpu" else None)


def _range_of(values: Sequence[float | None]) -> Spread | None:
    """The least, the median and the most; None of fewer than three, or of one that is not known."""
    known = [value for value in values if value is not None]
    if len(known) < FEWEST_PASSES or len(known) < len(values):
        return None
    return Spread(min(known), statistics.median(known), max(known))


def pooled(passes: Sequence[Measurement]) -> Measurement:
    """One measurement of several passes of the same thing, in their order: all their rounds, and the median pass.

    Speeds over another stock than the last pass's, because its own was not measured, are left out.
    """
    if len(passes) == 1:
        return passes[0]
    last = passes[-1]
    seconds = tuple(value for each in passes for value in each.seconds)
    alike = [each for each in passes if each.stock == last.stock]
    speeds = tuple(value for each in alike for value in each.speeds)
    shares = [each.limit_share for each in passes if each.limit_share is not None]
    whole = [each.speed_over_stock for each in alike if each.speed_over_stock is not None]
    median = statistics.median(each.median_s for each in passes)
    return replace(
        last,
        seconds=seconds,
        median_s=median,
        gb_s=last.nbytes / median / 1e9 if last.nbytes else None,
        limit_share=statistics.median(shares) if shares else None,
        speed_over_stock=statistics.median(whole) if whole else None,
        speeds=speeds,
        passes=tuple(passes),
    )


@dataclass
class Run:
    """What a directory of files gave.

    Attributes:
        name: the directory.
        sources: the files that were read.
        measurements: of all of them. Passes of one thing are one; else, measured twice on one machine, the newest.
        skipped: files that were not read -> why not.
        notes: what was left out of files that were.
    """

    name: str
    sources: list[Source] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plural(count: int, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ratios_of(over: Iterable[float], under: Iterable[float]) -> tuple[float, ...]:
    """Round by round; none if the two did not run the same number of rounds."""
    tops, bottoms = list(over), list(under)
    return tuple(a / b for a, b in zip(tops, bottoms, strict=True)) if len(tops) == len(bottoms) else ()


def machine_of(info: dict[str, Any], but: Iterable[str] = ()) -> dict[str, str]:
    """A machine's description as one level of texts: ``{"versions": {"torch": "2"}}`` -> ``{"torch": "2"}``.

    Args:
        info: nested as a file has it; what is None or empty is left out.
        but: keys that are left out.
    """
    flat: dict[str, str] = {}
    left_out = set(but)
    for key, value in info.items():
        if key in left_out or value in (None, "", [], {}):
            continue
        if isinstance(value, dict):
            inner = machine_of(value)
            is_clear = key != "backends" and not any(name in info or name in flat for name in inner)
            flat |= inner if is_clear else {f"{key}: {name}": text for name, text in inner.items()}
        else:
            items = value if isinstance(value, list) else [value]
            flat[str(key)] = "; ".join(
                ", ".join(machine_of(i).values()) if isinstance(i, dict) else str(i) for i in items
            )
    return flat
