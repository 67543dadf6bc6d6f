"""The whole update path under FSDP2, part by part: ``python benchmarks/bench_update_path.py --ranks 2 4``.

Stock (clip_grad_norm_, fused AdamW, cast and copy-in of the next gathers) beside shardops' path A, A with copy-in
elided, and B. All four train a model of their own in the same processes, in turn, with gloo; each part is timed where
FSDP2 runs it, and its bytes are counted from the operators that are called (``update_path/``). Times are medians over
steps of means over ranks, ratios medians of each round's. ``python -m pytest benchmarks/bench_update_path.py -s`` runs
a smaller one, and clip, step and cast in one process over the sizes of the suite.
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

import torch
from _harness import HERE, machine, paired_ratio, show
from _records import Case, Record
from _suite import OURS, Suite, reading, shapes_of, updating, writing
from gpu.contenders import FORMATS, build_update, nbytes_of, parameters
from gpu.measure import Contender

sys.path.insert(0, str(HERE.parent / "tests"))

from distributed import run
from update_path import parts, training

from shardops import ops

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


# ---- in the suite ----------------------------------------------------------------------------------------------------

STOCK_PATH = "torch: clip_grad_norm_, fused, FSDP2's casts"
STOCK_PASSES = "torch: clip_grad_norm_, fused, _foreach_copy_"
# Of an element: ours 18, torch's moments 8 and the norm's temporaries, the limit's arrays 22.
PASSES_BYTES = 60


def records_of(ranks: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    """As the suite keeps them: clip, step and gather preparation together, bytes as rank 0 counted them."""
    labels = {name: STOCK_PATH if name == parts.STOCK else f"{OURS}, path {name}" for name in parts.VARIANTS}
    times = {labels[name]: [ms / 1e3 for ms in milliseconds(ranks, name, "wall", parts.UPDATE)] for name in labels}
    records = []
    for name, label in labels.items():
        found, median = ranks[0][name], statistics.median(times[label])
        nbytes = sum(found["bytes"].get(part, 0) for part in parts.UPDATE)
        is_stock = name == parts.STOCK
        record = Record(
            primitive="update_path",
            case=f"FSDP2, {len(ranks)} ranks: clip, step, gather preparation",
            dtype="float32",
            numel=found["sizes"].padded,
            tensors=found["sizes"].tensors,
            contender=label,
            kind="torch" if is_stock else "ours",
            backend=None if is_stock else backend,
            device="cpu",
            nbytes=nbytes,
            seconds=times[label],
            median_s=median,
            gb_s=nbytes / median / 1e9,
            limit_share=None,
            speed_over_stock=None if is_stock else paired_ratio(times, STOCK_PATH, label),
            threads=1,
            stock=STOCK_PATH,
        )
        records.append(asdict(record))
    return records


def test_update_path(benchmark: Any, suite: Suite, tmp_path: Path, ranks: tuple[int, int, int]) -> None:
    world_size, elements, repeats = ranks
    what = f"update_path, FSDP2, {world_size} ranks"
    if suite.device.kind != "cpu":
        suite.skip(what, "the ranks are processes on CPUs, with gloo: --device cpu")
    # Of four variants: parameters, gradients and states, 16 to 18 bytes, and gathered blocks.
    suite.room(what, world_size * elements * 100)
    found = benchmark.pedantic(measure, args=(tmp_path, world_size, elements, repeats), rounds=1)
    summed = summary(found)
    benchmark.extra_info.update(machine=ranks_machine(), variants=summed)
    suite.keep(benchmark, records_of(found, suite.backends[0]))
    show_tables(summed)
    check_bytes(found)


def test_passes(benchmark: Any, suite: Suite, grid: tuple[int, int]) -> None:
    """In one process, without collectives: the norm, and a step that clips and writes the bf16 copy, beside torch's."""
    shapes = shapes_of(*grid)
    suite.room(f"update_path, one process, {grid}", grid[0] * PASSES_BYTES)
    update = build_update(FORMATS["fp32, bf16 shadow"], shapes, suite.torch_device)
    shadows = update.more["shadows"]
    params = parameters(update.params, update.grads)
    fused = torch.optim.AdamW(params, lr=1e-6, fused=True)

    def ours(backend: str) -> None:
        total, _ = ops.grad_norm(update.grads, 2.0, backend=backend)
        coefficient = torch.clamp(1.0 / (total.sqrt().float() + 1e-6), max=1.0)
        update.run(backend, clip_coef=coefficient)

    def three_passes() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        fused.step()
        with torch.no_grad():
            torch._foreach_copy_(shadows, list[torch.Tensor](params))

    grads, moments = update.grads, (update.exp_avgs, update.exp_avg_sqs)
    # Gradients: read for the norm, then scaled in place. Parameters: read again, and the copies written.
    passes = 3 * nbytes_of(grads) + 7 * nbytes_of(params) + nbytes_of(params, shadows)
    contenders = suite.ours(ours, update.nbytes + nbytes_of(grads))
    contenders += [Contender(STOCK_PASSES, three_passes, "torch", passes)]
    streams = [*reading(grads, grads), *updating(update.params, *moments), *writing(shadows)]
    case = Case(
        "update_path", "one process: clip, step, cast", torch.float32, shapes, contenders, STOCK_PASSES, streams
    )
    suite.measure(benchmark, case)


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
