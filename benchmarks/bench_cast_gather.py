"""cast_gather beside torch's ways to the same buffer: ``python -m pytest benchmarks/bench_cast_gather.py -s``.

Every shard is read once and its rounded copy written once; results are compared bit for bit before they are timed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _records import Case
from _suite import Suite, random_tensors, reading, shapes_of, writing
from gpu.contenders import nbytes_of
from gpu.measure import Contender

from shardops import ops

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    "fp32 to bf16": (FLOAT32, BFLOAT16),
    "fp32 to fp16": (FLOAT32, FLOAT16),
    "bf16": (BFLOAT16, BFLOAT16),
}


@pytest.mark.parametrize("case", CASES)
def test_cast_gather(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    source, target = CASES[case]
    shapes = shapes_of(*grid)
    # Shards, two results, a temporary of torch.cat's, and the limit's arrays.
    suite.room(f"cast_gather, {case}, {grid}", grid[0] * 2 * (source.itemsize + 2 * target.itemsize))
    shards = random_tensors(shapes, source, suite.torch_device)
    numels = [shard.numel() for shard in shards]
    out, theirs = (torch.empty(sum(numels), dtype=target, device=suite.torch_device) for _ in range(2))
    views = [view.view(shard.shape) for view, shard in zip(theirs.split(numels), shards, strict=True)]

    def ours(backend: str) -> None:
        ops.cast_gather(shards, target, out=out, backend=backend)

    def copy() -> None:
        torch._foreach_copy_(views, shards)

    def cat() -> None:
        torch.cat([shard.view(-1).to(target) for shard in shards], out=theirs)

    copy()
    for backend in suite.backends:
        out.zero_()
        ours(backend)
        assert torch.equal(out.view(torch.uint8), theirs.view(torch.uint8)), backend
    nbytes = nbytes_of(shards, [out])
    torchs = {"torch._foreach_copy_": copy, "torch.cat of .to": cat}
    contenders = suite.ours(ours, nbytes)
    contenders += [Contender(name, run, "torch", nbytes) for name, run in torchs.items()]
    streams = [*reading(shards), *writing([out])]
    suite.measure(benchmark, Case("cast_gather", case, source, shapes, contenders, "torch._foreach_copy_", streams))
