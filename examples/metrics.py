"""What a run shows and leaves behind: progress, metrics.jsonl, summary.json, loss.png, a table.

`rich` and matplotlib are used where they are installed; without them there are plain lines, and
one line says that the picture is left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

try:
    import rich.console
    import rich.progress
    import rich.table

    HAVE_RICH = True
except ImportError:
    HAVE_RICH = False

LINES_PER_RUN = 20  # of plain progress
FINAL_STEPS = 20  # averaged into the final training loss, as one batch's loss is noisy


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. `step` counts from 1: the steps done with this one."""

    optimizer: str
    step: int
    loss: float  # nats a byte, the mean over the global batch
    tokens_per_s: float  # of all ranks together
    update_ms: float  # clip and optimizer step, on the first rank
    grad_norm: float  # before clipping
    lr: float


@dataclass(frozen=True)
class RunSummary:
    """What the final table says of one optimizer."""

    final_train_loss: float
    held_out_loss: float
    update_ms_median: float
    update_s_total: float  # without the first step, which pays for what is used the first time
    tokens_per_s_median: float
    state_bytes_per_param: float


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with None for what is not finite, as JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def to_line(record: StepRecord) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(finite(asdict(record))) + "\n"


def from_line(line: str) -> StepRecord:
    """The record that `to_line` wrote, with null read back as NaN."""
    values = json.loads(line)
    return StepRecord(**{n: math.nan if value is None else value for n, value in values.items()})


class MetricsLog:
    """Appends step records to `path`, and holds all of them for the picture and the table."""

    def __init__(self, path: Path, keep_existing: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[StepRecord] = []
        if keep_existing and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            # A killed run may have left half a line at the end.
            self.records = [from_line(line) for line in lines if line.endswith("\n")]
        self._path = path
        self._file = path.open("a")

    def start_at(self, optimizer: str, step: int) -> None:
        """Drop what an interrupted run wrote after its checkpoint: it is about to be repeated."""
        self.records = [r for r in self.records if r.optimizer != optimizer or r.step <= step]
        self._file.close()
        self._file = self._path.open("w")
        self._file.writelines(to_line(record) for record in self.records)
        self._file.flush()

    def write(self, record: StepRecord) -> None:
        self.records.append(record)
        self._file.write(to_line(record))
        self._file.flush()  # a killed run keeps its lines

    def of(self, optimizer: str) -> list[StepRecord]:
        return [record for record in self.records if record.optimizer == optimizer]


def summarise(records: list[StepRecord], held_out_loss: float, state_bytes_per_param: float) -> RunSummary:
    """Fold one optimizer's records into its column of the table."""
    last = [record.loss for record in records[-FINAL_STEPS:]]
    return RunSummary(
        final_train_loss=sum(last) / len(last),
        held_out_loss=held_out_loss,
        update_ms_median=median(record.update_ms for record in records),
        update_s_total=sum(record.update_ms for record in records[1:]) / 1e3,
        tokens_per_s_median=median(record.tokens_per_s for record in records),
        state_bytes_per_param=state_bytes_per_param,
    )


def largest_loss_difference(log: MetricsLog, optimizers: list[str]) -> float:
    """The largest |difference| of two optimizers' losses over the steps that both have done.

    Infinite where only one of them diverged; a step in which both did says nothing.
    """
    first, second = ({r.step: r.loss for r in log.of(optimizer)} for optimizer in optimizers)
    pairs = [(loss, second[step]) for step, loss in first.items() if step in second]
    compared = [pair for pair in pairs if any(map(math.isfinite, pair))]
    return max((abs(a - b) if math.isfinite(a - b) else math.inf for a, b in compared), default=math.nan)


class Progress(Protocol):
    """Shows a training run on the first rank."""

    def update(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """Some twenty lines a run: what a log file or a pipe wants, and what works without `rich`."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // LINES_PER_RUN)

    def update(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step == self._steps:
            print(
                f"{record.optimizer} {record.step:>5}/{self._steps}  {_describe(record)}",
                flush=True,
            )

    def close(self) -> None:
        pass


class RichProgress:
    """A bar with the time left and the newest numbers behind it."""

    def __init__(self, optimizer: str, steps: int, done: int) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[numbers]}"),
        )
        self._task = self._bar.add_task(optimizer, total=steps, completed=done, numbers="")
        self._bar.start()

    def update(self, record: StepRecord) -> None:
        self._bar.update(self._task, completed=record.step, numbers=_describe(record))

    def close(self) -> None:
        self._bar.stop()


def _describe(record: StepRecord) -> str:
    return f"loss {record.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  update {record.update_ms:.1f} ms"


def open_progress(optimizer: str, steps: int, done: int) -> Progress:
    """A bar on a terminal with `rich`, plain lines anywhere else."""
    if HAVE_RICH and sys.stdout.isatty():
        return RichProgress(optimizer, steps, done)
    return PlainProgress(steps)


def print_table(summaries: dict[str, RunSummary]) -> None:
    """One column an optimizer."""
    rows = (
        ("final training loss (nats/byte)", "final_train_loss", "{:.4f}"),
        ("held-out loss (nats/byte)", "held_out_loss", "{:.4f}"),
        ("update path, median of a step (ms)", "update_ms_median", "{:.2f}"),
        ("update path, all steps but one (s)", "update_s_total", "{:.2f}"),
        ("tokens/s, median", "tokens_per_s_median", "{:,.0f}"),
        ("optimizer state (bytes/parameter)", "state_bytes_per_param", "{:.2f}"),
    )
    cells = [
        [label, *(form.format(getattr(summary, field)) for summary in summaries.values())]
        for label, field, form in rows
    ]
    header = ["", *summaries]
    if HAVE_RICH:
        table = rich.table.Table(header[0])
        for optimizer in header[1:]:
            table.add_column(optimizer, justify="right")
        for row in cells:
            table.add_row(*row)
        rich.console.Console().print(table)
        return
    for row in (header, *cells):
        print(f"{row[0]:<36}" + "".join(f"{cell:>14}" for cell in row[1:]))


def write_summary(path: Path, settings: dict[str, Any], summaries: dict[str, RunSummary], difference: float) -> None:
    """The table and the settings behind it as JSON; `difference` is NaN for one optimizer."""
    content = {
        "settings": settings,
        "optimizers": {name: finite(asdict(summary)) for name, summary in summaries.items()},
        **finite({"largest_loss_difference": difference}),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def plot_losses(path: Path, log: MetricsLog, optimizers: Iterable[str]) -> str:
    """Draw the loss curves to `path`; returns a line saying whether it was drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{path.name} is left out, as matplotlib is missing: pip install matplotlib"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for optimizer, style in zip(optimizers, ("-", "--"), strict=False):
        records = log.of(optimizer)
        axes.plot([r.step for r in records], [r.loss for r in records], style, label=optimizer)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats/byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return f"loss curves: {path}"
