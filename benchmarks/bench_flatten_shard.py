"""flatten_shard and unflatten_shard beside torch's ways: ``python -m pytest benchmarks/bench_flatten_shard.py -s``.

Over 8 ranks, in both layouts; results are compared bit for bit before they are timed. Bytes count padding where it is
read or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _records import Case
from _suite import Suite, random_tensors, reading, shapes_of, writing
from gpu.contenders import nbytes_of
from gpu.measure import Contender
from torch import Tensor

from shardops import ops

WORLD_SIZE = 8
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
FLATTEN = {
    "per_param, fp32": ("per_param", FLOAT32, FLOAT32),
    "per_param, bf16": ("per_param", BFLOAT16, BFLOAT16),
    "per_param, bf16 to fp32": ("per_param", BFLOAT16, FLOAT32),
    "flat, fp32": ("flat", FLOAT32, FLOAT32),
    "flat, bf16": ("flat", BFLOAT16, BFLOAT16),
}
UNFLATTEN = {
    "per_param, fp32": ("per_param", FLOAT32),
    "per_param, bf16": ("per_param", BFLOAT16),
    "flat, bf16": ("flat", BFLOAT16),
}


def pad_and_cat(tensors: list[Tensor], out: Tensor) -> None:
    """What chunk_cat does, by itself: rows padded to the ranks, a chunk of each tensor for each rank."""
    chunks = []
    for tensor in tensors:
        missing = -tensor.shape[0] % WORLD_SIZE
        rows = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
        chunks.append(rows.view(WORLD_SIZE, -1))
    torch.cat(chunks, dim=1, out=out)


def cat_flat(tensors: list[Tensor], out: Tensor) -> None:
    """Back to back, with the padding at the end, as FSDP1 does it."""
    padding = out.numel() - sum(tensor.numel() for tensor in tensors)
    torch.cat([*(tensor.view(-1) for tensor in tensors), tensors[0].new_zeros(padding)], out=out.view(-1))


@pytest.mark.parametrize("case", FLATTEN)
def test_flatten_shard(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    layout, source, target = FLATTEN[case]
    shapes = shapes_of(*grid)
    # Tensors, two results, a temporary of the padded rows, and the limit's arrays.
    suite.room(f"flatten_shard, {case}, {grid}", grid[0] * (3 * source.itemsize + 3 * target.itemsize))
    tensors = random_tensors(shapes, source, suite.torch_device)
    rest: dict[str, Any] = {"layout": layout, "dtype": target, "align": 1}
    out, theirs = (ops.flatten_shard(tensors, WORLD_SIZE, **rest) for _ in range(2))

    def ours(backend: str) -> None:
        ops.flatten_shard(tensors, WORLD_SIZE, out=out, backend=backend, **rest)

    torchs: dict[str, Callable[[], Any]] = {"torch.cat": lambda: cat_flat(tensors, theirs)}
    if layout == "per_param":
        torchs = {
            "torch._chunk_cat": lambda: torch._chunk_cat(tensors, 0, WORLD_SIZE, out=theirs),
            "pad and torch.cat": lambda: pad_and_cat(tensors, theirs),
        }
    for name, run in torchs.items():
        theirs.fill_(77.0)
        run()
        for backend in suite.backends:
            out.fill_(99.0)
            ours(backend)
            assert torch.equal(out.view(torch.uint8), theirs.view(torch.uint8)), (name, backend)
    nbytes = nbytes_of(tensors, [out])
    contenders = suite.ours(ours, nbytes)
    contenders += [Contender(name, run, "torch", nbytes) for name, run in torchs.items()]
    streams = [*reading(tensors), *writing([out])]
    suite.measure(benchmark, Case("flatten_shard", case, source, shapes, contenders, next(iter(torchs)), streams))


@pytest.mark.parametrize("case", UNFLATTEN)
def test_unflatten_shard(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    layout, dtype = UNFLATTEN[case]
    shapes = shapes_of(*grid)
    # Tensors, the buffer, torch's results, ours, and the limit's arrays.
    suite.room(f"unflatten_shard, {case}, {grid}", grid[0] * 6 * dtype.itemsize)
    tensors = random_tensors(shapes, dtype, suite.torch_device)
    outs = [torch.empty_like(tensor) for tensor in tensors]
    buffer = ops.flatten_shard(tensors, WORLD_SIZE, layout=layout, align=1)
    numels = [tensor.numel() for tensor in tensors]
    if layout == "flat":
        source, sizes, dim = buffer.view(-1)[: sum(numels)], numels, 0
        theirs = [torch.empty(size, dtype=dtype, device=suite.torch_device) for size in sizes]
    else:  # torch's results hold the padded rows, which views leave out
        sizes = [math.ceil(t.shape[0] / WORLD_SIZE) * math.prod(t.shape[1:]) for t in tensors]
        source, dim = buffer, 1
        theirs = [torch.empty(WORLD_SIZE, size, dtype=dtype, device=suite.torch_device) for size in sizes]

    def ours(backend: str) -> None:
        ops.unflatten_shard(buffer, outs, layout=layout, backend=backend)

    def split() -> None:
        torch.split_with_sizes_copy(source, sizes, dim, out=theirs)

    split()
    for backend in suite.backends:
        for out in outs:
            out.fill_(99.0)
        ours(backend)
        for out, tensor, their in zip(outs, tensors, theirs, strict=True):
            assert torch.equal(out, tensor), backend
            assert torch.equal(their.view(-1)[: out.numel()].view(out.shape), tensor)
    nbytes = nbytes_of(outs) + sum(numels) * dtype.itemsize  # padding is not read
    name = "torch.split_with_sizes_copy"
    contenders = [*suite.ours(ours, nbytes), Contender(name, split, "torch", nbytes_of([source], theirs))]
    streams = [*reading(tensors), *writing(outs)]
    suite.measure(benchmark, Case("unflatten_shard", case, dtype, shapes, contenders, name, streams))
