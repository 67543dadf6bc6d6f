"""What examples/fit_big.py shows: losses and memory by component while it runs, and the table at its end.

With `rich` on a terminal the memory is drawn live, also inside of a step; anywhere else there is a line a step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from big_update import STOCK_BYTES
from memory_use import COMPONENTS, Sample
from metrics import HAVE_RICH

if HAVE_RICH:
    import rich.console
    import rich.live
    import rich.progress
    import rich.table

REST = "activations, other"
BAR_WIDTH = 40  # characters


def gb(nbytes: float) -> str:
    """Bytes in units of 10**9, readable for small models too."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def parts(sample: Sample) -> dict[str, float]:
    """Component -> bytes, without those that hold next to nothing."""
    shown = {name: sample.components[name] for name in COMPONENTS if name != "counters"}
    return {**shown, REST: sample.rest}


class PlainDisplay:
    """A line a step, with the memory at the step's fullest moment."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._fullest: Sample | None = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, sample: Sample) -> None:
        if self._fullest is None or sample.resident > self._fullest.resident:
            self._fullest = sample

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        line = f"step {step:>3}/{self._steps}  loss {loss:.4f}  {seconds:.2f} s"
        if self._fullest is not None:
            memory = " + ".join(f"{name} {gb(nbytes)}" for name, nbytes in parts(self._fullest).items())
            line += f"  {gb(self._fullest.resident)} = {memory}"
        self.say(line)
        self._fullest = None

    def close(self) -> None:
        pass


class RichDisplay:
    """The newest steps, a bar with the time left, and a bar a component that moves during a step."""

    def __init__(self, steps: int) -> None:
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("steps"),
            rich.progress.BarColumn(bar_width=BAR_WIDTH),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._sample: Sample | None = None
        self._largest = 1.0
        self._live = rich.live.Live(get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def _render(self) -> Any:
        if self._sample is None:
            return self._progress
        table = rich.table.Table(box=None, show_header=False)
        table.add_column(width=18)
        table.add_column(justify="right", width=10)
        table.add_column(width=BAR_WIDTH)
        for name, nbytes in parts(self._sample).items():
            table.add_row(name, gb(nbytes), "█" * round(BAR_WIDTH * min(1.0, nbytes / self._largest)))
        table.add_row("resident", gb(self._sample.resident))
        return rich.console.Group(self._progress, table)

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False)

    def show(self, sample: Sample) -> None:
        self._sample = sample
        self._largest = max(self._largest, *parts(sample).values())

    def step_done(self, step: int, loss: float, seconds: float) -> None:
        self._progress.update(self._task, completed=step)
        self.say(f"step {step:>3}  loss {loss:.4f}  {seconds:.2f} s")

    def close(self) -> None:
        self._live.stop()


def open_display(steps: int) -> PlainDisplay | RichDisplay:
    """A live picture on a terminal with `rich`, plain lines anywhere else."""
    return RichDisplay(steps) if HAVE_RICH and sys.stdout.isatty() else PlainDisplay(steps)


def print_table(bytes_per_parameter: Mapping[str, float], numel: int) -> None:
    """Bytes per parameter by component: stock AdamW's as they follow from its formats, and this run's as measured."""
    header = ("bytes per parameter", "stock AdamW, planned", "this run, measured", "this run")
    rows = [
        (name, f"{STOCK_BYTES.get(name, 0.0):.2f}", f"{measured:.4f}", gb(measured * numel))
        for name, measured in bytes_per_parameter.items()
        if name != "total"
    ]
    stock, measured = sum(STOCK_BYTES.values()), bytes_per_parameter["total"]
    rows.append(("total", f"{stock:.2f} ({gb(stock * numel)})", f"{measured:.4f}", gb(measured * numel)))
    if HAVE_RICH:
        table = rich.table.Table(header[0])
        for title in header[1:]:
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(*row)
        rich.console.Console().print(table)
        return
    for row in (header, *rows):
        print(f"{row[0]:<20}" + "".join(f"{cell:>24}" for cell in row[1:]))
