"""What each format of Adam's moments costs the update, in closed loop on the gradients of a real run: a table.

    python benchmarks/quality/state_error.py --out runs/quality/states.jsonl

A line of the file is a run with one beta2; beside it stands a table of all lines. Every format takes each gradient as
the run makes it, decodes its moments, steps, and encodes them; nothing is stored but the moments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))

from recording import EPS, Recording, Run
from state_codecs import (
    BF16,
    BF16_NEAREST,
    BNB,
    FLASH,
    FLOAT32,
    OURS,
    OURS_NEAREST,
    Errors,
    Hyper,
    make_loops,
)

NAMES = [OURS, OURS_NEAREST, FLASH, BNB, BF16, BF16_NEAREST]
BITS = {OURS: 16.5, OURS_NEAREST: 16.5, FLASH: 17.0, BNB: 16.25, BF16: 32.0, BF16_NEAREST: 32.0}  # of both, an element
SCALED = [OURS, FLASH, BNB]  # also with gradients and eps that are smaller by a factor
SCALES = [1.0, 1e-3, 1e-6]


def measure(
    run: Run, warm_up: int, counted: int, scales: Sequence[float], scaled: Sequence[str], backend: str | None
) -> dict[str, Any]:
    """One run with all formats beside it.

    Args:
        run: that gradients are recorded from.
        warm_up: its steps before the formats take over its moments.
        counted: its last steps, in which updates are compared.
        scales: of gradients and eps, 1 among them.
        scaled: formats that are measured at the others of these too.
        backend: of the op that the product's formats run in.
    """
    began = time.perf_counter()
    recording = Recording(run)
    names = {scale: [FLOAT32, *(NAMES if scale == 1.0 else scaled)] for scale in scales}
    loops = {scale: make_loops(Hyper(beta2=run.beta2, eps=EPS * scale), names[scale], backend) for scale in scales}
    errors = {scale: {name: Errors() for name in names[scale]} for scale in scales}

    def start(step: int) -> None:
        for scale in scales:
            for loop in loops[scale].values():
                loop.start(
                    [exp_avg * scale for exp_avg in recording.exp_avgs],
                    [exp_avg_sq * scale * scale for exp_avg_sq in recording.exp_avg_sqs],
                    step,
                )

    if warm_up == 0:
        start(0)
    for done, grads in enumerate(recording, 1):
        if done > warm_up:
            for scale in scales:
                smaller = [grad * scale for grad in grads]
                reference = loops[scale][FLOAT32].step(smaller)
                for name, loop in loops[scale].items():
                    updates = reference if name == FLOAT32 else loop.step(smaller)
                    if done > run.steps - counted:
                        errors[scale][name].add(updates, reference)
                        errors[scale][name].add_moments(loop)
        if done == warm_up:
            start(done)
        if done % 20 == 0:
            seconds = time.perf_counter() - began
            print(f"beta2 {run.beta2}: {done} steps in {seconds:.0f} s, loss {recording.losses[-1]:.3f}", flush=True)
    for scale in scales:
        for name, loop in loops[scale].items():
            errors[scale][name].end(loop, loops[scale][FLOAT32])
    return {
        "run": asdict(run),
        "warm_up": warm_up,
        "counted": counted,
        "elements": recording.parameters,
        "tensors": recording.names,
        "last_loss": sum(recording.losses[-counted:]) / counted,
        "seconds": time.perf_counter() - began,
        "torch": torch.__version__,
        "backend": backend,
        "errors": {
            str(scale): {name: asdict(found) | {"nmse": found.nmse} for name, found in errors[scale].items()}
            for scale in scales
        },
    }


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row a format; two values in a cell are for two records, in their order."""
    betas = " / ".join(f"{record['run']['beta2']:g}" for record in records)
    scales = [scale for scale in records[0]["errors"] if float(scale) != 1.0]
    head = [
        "moments",
        "bits an element",
        f"NMSE of the update, beta2 {betas}",
        *(f"NMSE, gradients times {float(scale):g}" for scale in scales),
        "largest error of one update, in lr",
        "largest update over fp32's",
        "log sqrt(exp_avg_sq): drift",
        "exp_avg_sq lost under an exp_avg",
    ]
    rows = [head, ["---"] * len(head)]
    for name in NAMES:
        found = [record["errors"]["1.0"][name] for record in records]
        scaled = [[record["errors"][scale].get(name) for record in records] for scale in scales]
        cells = [
            [f"{value['nmse']:.1e}" for value in found],
            *([f"{value['nmse']:.1e}" if value else "" for value in values] for values in scaled),
            [f"{value['largest_error']:.2g}" for value in found],
            [f"{value['largest_update'] / value['largest_reference']:.3g}" for value in found],
            [f"{100 * value['drift']:+.2f} %" for value in found],
            [str(value["zeroed"]) for value in found],
        ]
        rows.append([name, f"{BITS[name]:g}", *(" / ".join(cell) if any(cell) else "-" for cell in cells)])
    last = records[0]
    run = Run(**last["run"])
    text = (
        f"{last['elements']:,} elements, requantised {run.steps - last['warm_up']} times after {last['warm_up']} steps "
        f"of fp32, the last {last['counted']} counted. Largest fp32 update: "
        + " / ".join(f"{record['errors']['1.0'][FLOAT32]['largest_update']:.3g}" for record in records)
        + " lr."
    )
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", text, ""])


def main() -> None:
    defaults = Run()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality/states.jsonl"), help="one line a run")
    parser.add_argument(
        "--beta2", type=float, nargs="*", default=[0.999, 0.95], help="a run each; none: only the table"
    )
    parser.add_argument("--warm-up", type=int, default=200, help="steps of fp32 before the formats take over")
    parser.add_argument("--counted", type=int, default=40, help="last steps, in which updates are compared")
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES, help="of gradients and eps; 1 among them")
    parser.add_argument("--backend", help="of the op; by default the best there is")
    for name, value in asdict(defaults).items():
        if name != "beta2":
            parser.add_argument("--" + name, type=type(value), default=value)
    arguments = parser.parse_args()
    if 1.0 not in arguments.scales:
        parser.error(f"--scales is {arguments.scales}, without 1: the table compares with it")
    run = Run(**{name: getattr(arguments, name) for name in asdict(defaults) if name != "beta2"})
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for beta2 in arguments.beta2:
        record = measure(
            replace(run, beta2=beta2),
            arguments.warm_up,
            arguments.counted,
            arguments.scales,
            SCALED,
            arguments.backend,
        )
        with arguments.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    text = table([json.loads(line) for line in arguments.out.read_text().splitlines()])
    arguments.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
