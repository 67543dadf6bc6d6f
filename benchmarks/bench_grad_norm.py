"""grad_norm and clipping beside torch's: ``python -m pytest benchmarks/bench_grad_norm.py -s``.

A norm reads every gradient once; clipping reads them for the norm, and reads and writes them for the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _records import Case
from _suite import Suite, random_tensors, reading, shapes_of, updating
from gpu.contenders import nbytes_of
from gpu.measure import Contender

import shardops
from shardops import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_NORM = 1.0
PIECE = 1 << 22  # elements that are squared in float64 at a time


@pytest.mark.parametrize("case", DTYPES)
def test_grad_norm(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    dtype, shapes = DTYPES[case], shapes_of(*grid)
    suite.room(f"grad_norm, {case}, {grid}", grid[0] * 2 * dtype.itemsize)
    grads = random_tensors(shapes, dtype, suite.torch_device)
    nbytes = nbytes_of(grads)
    torchs: dict[str, Callable[[], Any]] = {
        "torch get_total_norm": lambda: torch.nn.utils.get_total_norm(grads, 2.0),
        # The norm of each tensor only.
        "torch._foreach_norm": lambda: torch._foreach_norm(grads, 2.0),
    }

    def ours(backend: str) -> Any:
        return ops.grad_norm(grads, 2.0, backend=backend)

    # Not beside torch's own, which is off by more than 1e-4 over one float32 tensor of 10^7 elements.
    expected = sum(float(part.double().square().sum()) for grad in grads for part in grad.view(-1).split(PIECE))
    for backend in suite.backends:
        assert float(ours(backend)[0]) == pytest.approx(expected, rel=1e-6), backend
    contenders = suite.ours(ours, nbytes)
    contenders += [Contender(name, run, "torch", nbytes) for name, run in torchs.items()]
    stock = "torch get_total_norm"
    suite.measure(benchmark, Case("grad_norm", case, dtype, shapes, contenders, stock, reading(grads)))


@pytest.mark.parametrize("case", DTYPES)
def test_clip_grad_norm(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    """Each contender clips gradients of its own; after the first call their norm stays where it is."""
    dtype, shapes = DTYPES[case], shapes_of(*grid)
    suite.room(f"clip_grad_norm_, {case}, {grid}", grid[0] * 8 * dtype.itemsize)
    stock = "torch clip_grad_norm_, foreach"

    def parameters() -> list[torch.nn.Parameter]:
        made = []
        for grad in random_tensors(shapes, dtype, suite.torch_device):
            made.append(torch.nn.Parameter(torch.zeros((), dtype=dtype, device=grad.device).expand(grad.shape)))
            made[-1].grad = grad
        return made

    mine, foreach = parameters(), parameters()
    nbytes = 3 * nbytes_of([param.grad for param in mine])
    call = shardops.clip_grad_norm_
    contenders = [Contender("shardops", lambda: call(mine, MAX_NORM), "ours", nbytes, suite.backends[0])]
    clip = torch.nn.utils.clip_grad_norm_
    contenders += [Contender(stock, lambda: clip(foreach, MAX_NORM, foreach=True), "torch", nbytes)]
    grads = [param.grad for param in mine]
    streams = [*reading(grads), *updating(grads)]
    suite.measure(benchmark, Case("grad_norm", f"clip_grad_norm_, {case}", dtype, shapes, contenders, stock, streams))
