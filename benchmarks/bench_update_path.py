"""The whole update path under FSDP2, part by part: ``python benchmarks/bench_update_path.py --ranks 2 4``.

Stock (clip_grad_norm_, fused AdamW, cast and copy-in of the next gathers) beside shardops' path A, A with copy-in
elided, and B. All four train a model of their own in the same processes, in turn, with gloo; each part is timed where
FSDP2 runs it, and its bytes are counted from the operators that are called (``update_path/``). Times are medians over
steps of means over ranks, ratios medians of each round's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from _harness import HERE, machine, show

sys.path.insert(0, str(HERE.parent / "tests"))

from distributed import run
from update_path import parts, training

ELEMENTS = 30_000_000  # of a rank
RANKS = (2, 4)
REPEATS = 9
DEADLINE = 1800.0
# At most these shares of stock's time: what each path is to stay below.
TARGETS = {parts.SHADOW: 0.75, parts.ELIDED: 0.65}
# Bytes that a step may move for each parameter beside its elements: counters, norms, and scalars made of them.
SLACK = 64


def measure(
    folder: Path, world_size: int, elements: int, repeats: int, warmup: int = training.WARMUP
) -> list[dict[str, Any]]:
    """Each rank's measurements, as :func:`update_path.training.measure` returns them."""
    return run(folder, world_size, training.measure, elements, repeats, warmup, deadline=DEADLINE)


def ranks_machine() -> dict[str, Any]:
    """The machine as the ranks use it: each of them has one thread."""
    return {**machine(), "threads": 1}


def check_bytes(ranks: list[dict[str, Any]]) -> None:
    """Raises AssertionError unless every part of every variant moved the bytes that the formula gives, on all ranks."""
    for rank, found in enumerate(ranks):
        for name, variant in found.items():
            for part, expected in parts.expected_bytes(name, variant["sizes"]).items():
                counted = variant["bytes"].get(part, 0)
                slack = SLACK * variant["sizes"].tensors
                assert 0 <= counted - expected <= slack, f"rank {rank}, {name}, {part}: {counted}, formula {expected}"


def milliseconds(ranks: list[dict[str, Any]], name: str, clock: str, chosen: tuple[str, ...]) -> list[float]:
    """Of some parts together in each repetition, the mean over ranks."""
    repetitions = zip(*(found[name]["seconds"] for found in ranks), strict=True)
    return [statistics.mean(sum(at[clock][part] for part in chosen) for at in step) * 1e3 for step in repetitions]


def ratio(ranks: list[dict[str, Any]], name: str, clock: str) -> float:
    """The update's time over stock's: the median over repetitions, each with stock's of the same round."""
    ours, stock = (milliseconds(ranks, variant, clock, parts.UPDATE) for variant in (name, parts.STOCK))
    return statistics.median(a / b for a, b in zip(ours, stock, strict=True))


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, ratios and bytes an element of one number of ranks, for the record and for the tables."""
    result: dict[str, Any] = {}
    for name in parts.VARIANTS:
        found = ranks[0][name]
        sizes = found["sizes"]
        expected = parts.expected_bytes(name, sizes)
        result[name] = {
            "sizes": asdict(sizes),
            "ms": {
                clock: {
                    label: statistics.median(milliseconds(ranks, name, clock, chosen))
                    for label, chosen in [*((part, (part,)) for part in parts.PARTS), ("update", parts.UPDATE)]
                }
                for clock in ("wall", "cpu")
            },
            "ratio": {clock: ratio(ranks, name, clock) for clock in ("wall", "cpu")},
            "bytes_per_element": {part: found["bytes"].get(part, 0) / sizes.padded for part in expected},
            "formula_per_element": {part: value / sizes.padded for part, value in expected.items()},
            "largest_new": max(found["largest_new"].get(part, 0) for part in parts.UPDATE),
            "update_peak": found["update_peak"],
            "operators": found["calls"],
        }
    return result


def show_tables(found: dict[str, Any]) -> None:
    """Prints one number of ranks: times, then bytes."""
    variants = list(found.items())
    sizes = variants[0][1]["sizes"]
    cores = os.cpu_count() or 1
    title = (
        f"{sizes['world_size']} ranks of 1 thread on {cores} cores, {sizes['padded'] / 1e6:.2f} M elements a rank, "
        f"{sizes['tensors']} tensors"
    )
    labels = {part: f"{part}, {parts.GATHERS} gathers" for part in (parts.CAST, parts.COPY_IN, parts.COPY_OUT)}

    def times(label: str, key: str) -> list[str]:
        return [label, *(f"{of['ms']['wall'][key]:.1f} / {of['ms']['cpu'][key]:.1f}" for _, of in variants)]

    def ratios(clock: str) -> list[str]:
        return [f"over stock's, {clock}", *(f"{of['ratio'][clock]:.2f}" for _, of in variants)]

    rows = [times(labels.get(part, part), part) for part in parts.UPDATE]
    rows += [times("clip + step + gather preparation", "update"), ratios("wall"), ratios("cpu")]
    rows += [["at most", *(str(TARGETS.get(name, "")) for name, _ in variants)]]
    rows += [times(labels.get(part, part), part) for part in (*parts.BESIDE, *parts.NETWORK)]
    show(f"{title}: milliseconds by the clock / of processor time", ["", *parts.VARIANTS], rows)
    if sizes["world_size"] > cores:
        print("Ranks share cores: times by the clock include waiting for one another.")

    def counted(label: str, chosen: tuple[str, ...]) -> list[str]:
        cells = []
        for _, of in variants:
            count, formula = (
                sum(of[key][part] for part in chosen) for key in ("bytes_per_element", "formula_per_element")
            )
            cells.append(f"{count:.2f} / {formula:.2f}")
        return [label, *cells]

    rows = [counted(labels.get(part, part), (part,)) for part in parts.UPDATE]
    rows += [counted("clip + step + gather preparation", parts.UPDATE)]
    rows += [counted(labels.get(part, part), (part,)) for part in parts.BESIDE]
    rows += [["largest tensor allocated, bytes", *(f"{of['largest_new']:,}" for _, of in variants)]]
    rows += [["peak of clip and step, bytes", *(f"{of['update_peak']:,}" for _, of in variants)]]
    show(f"{title}: bytes an element that is sent, counted / by formula", ["", *parts.VARIANTS], rows)


@pytest.mark.parametrize("world_size", RANKS)
def test_update_path(benchmark: Any, tmp_path: Path, world_size: int) -> None:
    ranks = benchmark.pedantic(measure, args=(tmp_path, world_size, ELEMENTS, REPEATS), rounds=1)
    found = summary(ranks)
    benchmark.extra_info.update(machine=ranks_machine(), variants=found)
    show_tables(found)
    check_bytes(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of a rank, about (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: 2 4)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed steps of each variant (default: 9)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    record: dict[str, Any] = {"machine": ranks_machine(), "repeats": args.repeats, "ranks": {}}
    for world_size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            ranks = measure(Path(folder), world_size, args.elements, args.repeats)
        found = record["ranks"][world_size] = summary(ranks)
        show_tables(found)
        check_bytes(ranks)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
