"""FSDP2's copies around its collectives, stock and fused: ``python -m pytest benchmarks/bench_fsdp_copies.py -s``.

Both alternate in one process, behind the dispatcher; a ratio above 1 says that fused is faster. GB/s count the bytes
that a copy must read and write. CPU time (one thread) is a second look that other processes disturb less.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from _harness import machine, show
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from shardops.integrations.fsdp.copies import use_fused_copies

HIDDEN = 1024
SHAPES = {
    # A decoder's block, with its attention, gated MLP and norms.
    "block": [(HIDDEN, HIDDEN)] * 4 + [(4 * HIDDEN, HIDDEN)] * 2 + [(HIDDEN, 4 * HIDDEN)] + [(HIDDEN,)] * 2,
    "100 small": [(1000,)] * 100,
}
CALLS = {"block": 1, "100 small": 20}  # of one timed round
ROUNDS, WARMUP = 21, 3
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SHORT = {FLOAT32: "fp32", BFLOAT16: "bf16"}

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": lambda: time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID),
}


@pytest.fixture(scope="module")
def stock() -> Iterator[Any]:
    """Torch's own functions as ops of another name, so that both sides go through the dispatcher."""
    library = torch.library.Library("shardops_bench", "DEF")
    for name in ("chunk_cat", "split_with_sizes_copy"):
        schema = str(getattr(torch.ops.fsdp, name).default._schema).removeprefix("fsdp::")
        library.define(schema)
        library.impl(name, getattr(_fsdp_collectives, name), "CPU")
    yield torch.ops.shardops_bench
    library._destroy()


def alternate(functions: dict[str, Callable[[], Any]], calls: int) -> dict[tuple[str, str], list[float]]:
    """(function, clock) -> seconds a call, by round."""
    times: dict[tuple[str, str], list[float]] = {(name, clock): [] for name in functions for clock in CLOCKS}
    for round_ in range(WARMUP + ROUNDS):
        for name, function in functions.items():
            starts = [now() for now in CLOCKS.values()]
            for _ in range(calls):
                function()
            if round_ >= WARMUP:
                for clock, start in zip(CLOCKS, starts, strict=True):
                    times[name, clock].append((CLOCKS[clock]() - start) / calls)
    return times


def cat_call(shapes: list[tuple[int, ...]], world: int, source: torch.dtype, target: torch.dtype) -> Any:
    tensors = [torch.randn(shape).to(source) for shape in shapes]
    numel = sum(math.ceil(t.shape[0] / world) * t[0].numel() for t in tensors)
    out = torch.zeros(world, numel, dtype=target)

    def call(ops: Any) -> None:
        ops.chunk_cat(tensors, dim=0, num_chunks=world, out=out)

    return call, out, sum(t.numel() for t in tensors) * source.itemsize + out.numel() * target.itemsize


def split_call(shapes: list[tuple[int, ...]], world: int, dtype: torch.dtype, _: torch.dtype) -> Any:
    sizes = [math.ceil(shape[0] / world) * math.prod(shape[1:]) for shape in shapes]
    buffer = torch.randn(world, sum(sizes)).to(dtype)
    out = [torch.zeros(world, size, dtype=dtype) for size in sizes]

    def call(ops: Any) -> None:
        ops.split_with_sizes_copy(buffer, sizes, dim=1, out=out)

    return call, out, 2 * buffer.numel() * dtype.itemsize


CASES = [
    ("chunk_cat", cat_call, FLOAT32, FLOAT32),
    ("chunk_cat", cat_call, BFLOAT16, FLOAT32),
    ("chunk_cat", cat_call, BFLOAT16, BFLOAT16),
    ("split_with_sizes_copy", split_call, FLOAT32, FLOAT32),
    ("split_with_sizes_copy", split_call, BFLOAT16, BFLOAT16),
]


def written(result: Tensor | list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in (result if isinstance(result, list) else [result])]).clone()


@pytest.mark.parametrize("threads", [1, 2])
def test_copies(benchmark: Any, stock: Any, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows, ratios = [], {}
    with use_fused_copies() as copies:
        for name, shapes in SHAPES.items():
            for world in (2, 4, 8):
                for op, make, source, target in CASES:
                    call, result, nbytes = make(shapes, world, source, target)
                    functions = {"stock": partial(call, stock), "fused": partial(call, torch.ops.fsdp)}
                    functions["stock"]()
                    expected = written(result)
                    for tensor in result if isinstance(result, list) else [result]:
                        tensor.fill_(77.0)
                    functions["fused"]()
                    assert torch.equal(written(result), expected)
                    times = alternate(functions, CALLS[name])
                    median = {key: statistics.median(values) for key, values in times.items()}
                    ratio = {
                        clock: statistics.median(
                            a / b for a, b in zip(times["stock", clock], times["fused", clock], strict=True)
                        )
                        for clock in CLOCKS
                    }
                    label = f"{op.split('_')[0]} {name} {SHORT[source]}->{SHORT[target]} / {world}"
                    ratios[label] = ratio["wall"]
                    rows.append(
                        [
                            label,
                            *(f"{median[side, 'wall'] * 1e6:.0f}" for side in functions),
                            f"{nbytes / median['fused', 'wall'] / 1e9:.1f}",
                            f"{ratio['wall']:.2f}",
                            f"{ratio['cpu']:.2f}" if threads == 1 else "",
                        ]
                    )
    torch.set_num_threads(before)
    assert copies.calls["chunk_cat", "stock"] == copies.calls["split_with_sizes_copy", "stock"] == 0
    show(
        f"FSDP2's copies, {threads} thread(s): {machine()}",
        ["copy / ranks", "stock us", "fused us", "GB/s", "stock / fused", "cpu time"],
        rows,
    )
    print(f"least ratio: {min(ratios.values()):.2f}, {min(ratios, key=ratios.__getitem__)}")
    benchmark.extra_info.update(machine=machine(), stock_over_fused=ratios)
    benchmark.pedantic(lambda: None, rounds=1)
