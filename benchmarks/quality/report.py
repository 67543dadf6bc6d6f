"""Tables and plots of the training runs that ``train_modes.py`` has measured: losses, and differences to fp32 states.

    python benchmarks/quality/report.py runs/quality/training.jsonl --out runs/quality

Differences are paired by seed: the same weights, batches and held-out windows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

REFERENCE = "fp32"
Record = dict[str, Any]
Runs = dict[str, dict[int, Record]]  # mode -> seed -> record


def load(path: Path) -> Runs:
    """The runs in a file, which have the same settings.

    Raises:
        ValueError: no run, or runs of several settings.
    """
    runs: Runs = {}
    settings = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["settings"] not in settings:
            settings.append(record["settings"])
        runs.setdefault(record["mode"], {})[record["seed"]] = record
    if len(settings) != 1:
        raise ValueError(f"{path} holds runs of {len(settings)} settings; a table is of one: make the runs anew")
    return runs


@dataclass(frozen=True)
class Spread:
    """A few numbers, as a mean.

    Attributes:
        mean: of the numbers.
        deviation: standard deviation of one of them, NaN of a single one.
        count: how many there are.
    """

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), deviation, len(values))

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.count)


def differences(runs: Runs, mode: str) -> dict[int, float]:
    """Held-out loss minus that of fp32 with the same seed, for the seeds that both have."""
    reference = runs.get(REFERENCE, {})
    return {
        seed: record["held_out_loss"] - reference[seed]["held_out_loss"]
        for seed, record in sorted(runs[mode].items())
        if seed in reference
    }


def verdict(difference: Spread, loss: float) -> str:
    """Whether the mean difference is within one standard error of 0, or below 0.2 % of the loss."""
    share = 100 * difference.mean / loss
    within = abs(difference.mean) <= difference.error
    return f"{share:+.2f} %, " + ("within one" if within else "beyond one") + " standard error of 0"


def summarise(runs: Runs) -> dict[str, Any]:
    """The table's numbers, by mode."""
    summary = {}
    for mode, by_seed in runs.items():
        losses = Spread.of([record["held_out_loss"] for _, record in sorted(by_seed.items())])
        found: dict[str, Any] = {
            "seeds": sorted(by_seed),
            "held_out_loss": {"mean": losses.mean, "deviation": losses.deviation},
            "state_bytes_per_parameter": next(iter(by_seed.values()))["state_bytes_per_parameter"],
        }
        paired = differences(runs, mode)
        if mode != REFERENCE and paired:
            difference = Spread.of(list(paired.values()))
            reference = statistics.fmean(runs[REFERENCE][seed]["held_out_loss"] for seed in paired)
            found["difference"] = {
                "by_seed": paired,
                "mean": difference.mean,
                "standard_error": difference.error,
                "percent": 100 * difference.mean / reference,
                "verdict": verdict(difference, reference),
            }
        summary[mode] = found
    return summary


def table(runs: Runs) -> str:
    """The summary as Markdown."""
    rows = [
        ["states + master", "bytes a parameter", "seeds", "held-out loss", "difference to fp32, by seed", "mean", ""],
        ["---"] * 7,
    ]
    for mode, found in summarise(runs).items():
        loss, difference = found["held_out_loss"], found.get("difference")
        row = [mode, f"{found['state_bytes_per_parameter']:.2f}", str(len(found["seeds"]))]
        row.append(f"{loss['mean']:.4f} ± {loss['deviation']:.4f}")
        if difference is None:
            row += ["", "", ""]
        else:
            row.append(", ".join(f"{value:+.4f}" for value in difference["by_seed"].values()))
            row.append(f"{difference['mean']:+.4f} ± {difference['standard_error']:.4f}")
            row.append(difference["verdict"])
        rows.append(row)
    record = next(iter(next(iter(runs.values())).values()))
    settings = record["settings"]
    text = (
        f"{record['parameters']:,} bfloat16 parameters, {settings['steps']:,} steps of {settings['batch']} windows of "
        f"{settings['sequence']} bytes, beta2 {settings['beta2']:g}; {settings['last_windows']:,} held-out windows, "
        "nats a byte. Losses: mean ± standard deviation over seeds; differences: mean ± standard error. Bytes: "
        "moments, block words and master, without the parameter."
    )
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", text, ""])


def curve(record: Record, key: str = "held_out_curve") -> tuple[list[int], list[float]]:
    steps, losses = zip(*record[key], strict=True)
    return list(steps), list(losses)


def plot_losses(runs: Runs, path: Path) -> None:
    """Held-out losses over steps, a thin line a run."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for index, (mode, by_seed) in enumerate(runs.items()):
        for seed, record in sorted(by_seed.items()):
            label = mode if seed == min(by_seed) else None
            axes.plot(*curve(record), color=f"C{index}", linewidth=1, alpha=0.8, label=label)
    axes.set(xlabel="step", ylabel="held-out loss, nats a byte", title="One line a seed")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_differences(runs: Runs, path: Path) -> None:
    """Differences to fp32 by seed over steps; and after the last one, with mean and standard error."""
    modes = [mode for mode in runs if mode != REFERENCE and differences(runs, mode)]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), width_ratios=(2, 1), sharey=False, layout="constrained"
    )
    for index, mode in enumerate(modes):
        color = f"C{index + 1}"
        for number, (seed, record) in enumerate(sorted(runs[mode].items())):
            if seed in runs[REFERENCE]:
                steps, losses = curve(record)
                _, reference = curve(runs[REFERENCE][seed])
                gaps = [a - b for a, b in zip(losses, reference, strict=True)]
                left.plot(steps, gaps, color=color, linewidth=1, alpha=0.8, label=None if number else mode)
        values = list(differences(runs, mode).values())
        spread = Spread.of(values)
        right.plot([index] * len(values), values, ".", color=color, alpha=0.5)
        error = 0.0 if math.isnan(spread.error) else spread.error
        right.errorbar([index + 0.2], [spread.mean], yerr=[error], fmt="o", color=color, capsize=4)
    left.set(xlabel="step", ylabel="held-out loss minus fp32's, nats a byte", title="On the way, one line a seed")
    right.set(title="At the end: seeds,\nmean ± standard error")
    right.set_xticks(range(len(modes)), modes, rotation=30, ha="right")
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
    if modes:
        left.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", type=Path, help="what train_modes.py has written")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="folder of the table and the plots")
    arguments = parser.parse_args()
    if not arguments.runs.exists():
        sys.exit(
            f"{arguments.runs} does not exist: make it with benchmarks/quality/train_modes.py --out {arguments.runs}"
        )
    runs = load(arguments.runs)
    order = [REFERENCE, *(mode for mode in runs if mode != REFERENCE)]
    runs = {mode: runs[mode] for mode in order if mode in runs}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = table(runs)
    (arguments.out / "training.md").write_text(text)
    (arguments.out / "training.json").write_text(json.dumps(summarise(runs), indent=2) + "\n")
    plot_losses(runs, arguments.out / "training_losses.png")
    plot_differences(runs, arguments.out / "training_differences.png")
    print(text)


if __name__ == "__main__":
    main()
