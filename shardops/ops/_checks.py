"""Argument checks that several ops share. An error names the value received, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(
    tensors: Sequence[Any],
    name: str,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> None:
    """Checks that all are dense tensors of a supported dtype on one device.

    Raises:
        TypeError: not a tensor, a DTensor, sparse, or of an unsupported dtype.
        ValueError: tensors on several devices.
    """
    for index, tensor in enumerate(tensors):
        label = f"{name}[{index}]"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{label} is a {type(tensor).__name__}; ops take torch tensors")
        if hasattr(tensor, "_local_tensor"):
            raise TypeError(f"{label} is a DTensor; ops take local tensors: pass {label}.to_local()")
        if tensor.layout != torch.strided:
            raise TypeError(f"{label} has layout {tensor.layout}; dense tensors only: pass {label}.to_dense()")
        if tensor.dtype not in dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            supported = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
            raise TypeError(f"{label} has dtype {tensor.dtype}; {supported} are supported")
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(
                f"{label} is on {tensor.device}, other tensors of the call are on {device}; "
                "move them to one device, or make one call for each device"
            )


def check_world(world_size: int, rank: int | None) -> None:
    """Raises ValueError unless ``world_size >= 1`` and ``0 <= rank < world_size`` (or rank is None)."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it is the number of shards, an int of at least 1")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
        raise ValueError(
            f"rank is {rank!r} with world_size {world_size}; ranks run from 0 to {world_size - 1}, None takes all"
        )


def check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> None:
    """Checks a result tensor that the caller brought.

    Raises:
        ValueError: of another shape, dtype (unless None) or device, or not contiguous.
    """
    check_tensors([out], "out")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(
            f"out has shape {tuple(out.shape)}, the result has {tuple(shape)}; allocate it so, or pass none"
        )
    if dtype is not None and out.dtype != dtype:
        raise ValueError(
            f"out has dtype {out.dtype}, but dtype={dtype} was asked for; give one of the two, or equal ones"
        )
    if out.device != device:
        raise ValueError(f"out is on {out.device}, the tensors are on {device}; allocate it there")
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; a flat buffer is contiguous")


def is_dense(tensor: Tensor) -> bool:
    """Whether a walk over memory meets every element exactly once (any order of dimensions)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def memory_order(tensor: Tensor) -> Tensor:  # ND -> 1D
    """A dense tensor's elements in the order of memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))
