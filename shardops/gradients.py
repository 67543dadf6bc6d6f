"""The gradient that a step reads: a parameter's ``.grad``, or the fp32 values that it was rounded from.

A ``.grad`` has its parameter's dtype. An integration that sees a low-precision parameter's gradient before that
rounding hangs the fp32 values on ``.grad``; they live and die with it.

Other people write ``.grad``: they clip, unscale and clear it, and not all of that moves a version counter (torch's
``_foreach`` functions do not move a DTensor's). So one rule holds between calls, and is restored by looking at the
numbers: where ``.grad`` is the fp32 value rounded, the fp32 value counts; elsewhere ``.grad`` was written, and counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .collectives import local_tensor

# Of a DTensor gradient: its fp32 values, a local tensor.
ATTRIBUTE = "_shardops_fp32_gradient"
# Elements that are looked at together: what is computed of them on the way stays in a cache.
_CHUNK = 1 << 18


def attach_fp32(grad: Any, values: Tensor) -> None:
    """Hangs fp32 values, of the local gradient's shape, on the ``.grad`` that was rounded from them."""
    setattr(grad, ATTRIBUTE, values)


@torch.no_grad()
def accumulate_fp32(grad: Any, added: Tensor) -> None:
    """Adds to the fp32 values what has been added, rounded, to ``.grad``; ``.grad`` becomes their sum, rounded.

    Args:
        grad: DTensor that has fp32 values.
        added: float32, of the local gradient's shape.
    """
    values: Tensor = getattr(grad, ATTRIBUTE)
    for rounded, exact, new in _chunks(grad._local_tensor, values, added):
        # What .grad would hold now if it had been the fp32 value rounded.
        unwritten = rounded == exact.to(rounded.dtype) + new.to(rounded.dtype)
        exact.copy_(torch.where(unwritten, exact + new, rounded.float()))
        rounded.copy_(exact)


def local_gradient(grad: Any) -> Tensor:
    """The local tensor that a step reads: that of ``.grad``, or its fp32 values where there are some."""
    values: Tensor | None = getattr(grad, ATTRIBUTE, None)
    return local_tensor(grad) if values is None else _reconciled(grad, values)


@torch.no_grad()
def _reconciled(grad: Any, values: Tensor) -> Tensor:
    for rounded, exact in _chunks(grad._local_tensor, values):
        exact.copy_(torch.where(rounded == exact.to(rounded.dtype), exact, rounded.float()))
    return values


@torch.no_grad()
def scale_fp32(grads: Iterable[Any], coefficient: Tensor) -> None:
    """Multiplies the fp32 values of those gradients that have some, and makes ``.grad`` these, rounded.

    For a ``.grad`` whose fp32 values have just been read through :func:`local_gradient`.
    """
    for grad in grads:
        values: Tensor | None = getattr(grad, ATTRIBUTE, None)
        if values is not None:
            values.mul_(coefficient.to(values.device))
            grad._local_tensor.copy_(values)


def _chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The tensors' elements, all in the same order, in ranges that are worked on one after the other."""
    return zip(*(tensor.view(-1).split(_CHUNK) for tensor in tensors), strict=True)  # type: ignore[no-untyped-call]
