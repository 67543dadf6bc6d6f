"""What the tests of the optimizer share: parameters and gradients from a seed, training loops, and comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from reference import assert_bits_equal, generator
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW

# Ours and torch's for-loop implementation of the same.
PAIRS = {
    "Adam": (FusedShardedAdam, torch.optim.Adam),
    "AdamW": (FusedShardedAdamW, torch.optim.AdamW),
}
# A matrix, vectors, a scalar, an empty tensor, and more elements than one vector register holds.
SHAPES = ((7, 5), (7,), (), (0, 4), (3, 67))


def make_params(
    shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.05
) -> list[nn.Parameter]:
    rng = generator(seed)
    return [nn.Parameter((torch.randn(tuple(shape), generator=rng) * scale).to(dtype)) for shape in shapes]


def one(value: Any, grad: Any, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with its gradient."""
    param = nn.Parameter(torch.tensor(value, dtype=dtype))
    param.grad = torch.tensor(grad, dtype=dtype)
    return param


def set_grads(params: Iterable[Tensor], step: int, *, dtype: torch.dtype | None = None, scale: float = 1.0) -> None:
    """Gradients that depend on the step only: of the parameter's dtype after rounding to ``dtype``."""
    rng = generator(1000 + step)
    for param in params:
        values = torch.randn(tuple(param.shape), generator=rng) * scale
        param.grad = values.to(dtype or param.dtype).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0, **options: Any) -> None:
    """Steps ``first`` to ``first + steps - 1``."""
    for step in range(first, first + steps):
        set_grads(parameters(optimizer), step, **options)
        optimizer.step()


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters and states, by name."""
    result = {}
    for index, param in enumerate(parameters(optimizer)):
        result[f"parameter {index}"] = param.detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            result[f"{name} of parameter {index}"] = value.detach().clone()
    return result


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two snapshots have the same tensors, bit for bit."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        # A remainder is 16 bits of an integer in a tensor typed bfloat16: some of its patterns look like NaN.
        assert_bits_equal(actual[name], tensor, name, exact=name.startswith("remainder"))


def assert_close_to_torch(
    actual: Iterable[Tensor], expected: Iterable[Tensor], start: Iterable[Tensor], steps: int, slack: float = 1.0
) -> None:
    """Two fp32 trajectories of one Adam, computed in different orders.

    Each step rounds the new parameter once on each side, by up to half an ulp of the largest value met: that they go
    apart by half an ulp in every step, always the same way, is allowed for. So are half ulps of the update itself,
    which is the result of about ten roundings on each side: 4 of them. Moments forget their errors.
    """
    for index, (mine, theirs, first) in enumerate(zip(actual, expected, start, strict=True)):
        if not mine.numel():
            continue
        mine, theirs, first = mine.detach().float(), theirs.detach().float(), first.detach().float()
        size = torch.maximum(first.abs(), theirs.abs()).max()
        update = (theirs - first).abs().max() / steps
        bound = slack * steps * 2**-24 * (size + 4 * update)
        error = (mine - theirs).abs().max()
        assert error <= bound, f"parameter {index}: off by {float(error):.3g}, at most {float(bound):.3g} is rounding"


def twins(
    make_ours: Callable[[Any], Any], make_torch: Callable[[Any], Any], **options: Any
) -> tuple[Any, Any, list[Tensor]]:
    """Our optimizer and torch's over equal fp32 parameters, and the parameters' first values."""
    params = make_params(**options)
    start = clones(params)
    return make_ours(params), make_torch(copy.deepcopy(params)), start
