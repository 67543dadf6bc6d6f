"""Casting a model's parameters in place, with exceptions by name, before it is sharded and an optimizer is made."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from .ops._checks import FLOAT_DTYPES
from .optim.like import is_fsdp1

Model = TypeVar("Model", bound=nn.Module)

# Not the 8-bit formats: they are quantised, and their values need scales.
_CASTABLE = (*FLOAT_DTYPES, torch.float64)


@torch.no_grad()
def cast_model(model: Model, dtype: torch.dtype, keep_fp32: Iterable[str] = ()) -> Model:
    """Casts a model's floating-point parameters in place, all but those that are to keep their precision.

    Modules and parameters stay the objects they are, so that tied parameters stay tied; ``requires_grad`` stays, and
    gradients are cast along. Buffers are left as they are: running statistics lose precision that they do not get
    back. So are complex, integer and 8-bit parameters. One parameter at a time exists twice. Models on the meta device
    can be cast.

    Under FSDP2 cast before ``fully_shard``, which wants one dtype in each of its groups: keep all parameters of a
    module or none, and give those that are kept a ``fully_shard`` of their own.

    Args:
        model: whose parameters are cast; plain ones, before DDP or ``fully_shard``.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.
        keep_fp32: patterns as in ``fnmatch`` (case matters), such as ``"*norm.*"``, over the names of
            ``model.named_parameters()``. A parameter that matches under any of its names is left as it is.

    Returns:
        The model itself.

    Raises:
        ValueError: another dtype, or a pattern that matches no parameter; nothing is cast then.
        TypeError: a parameter that is sharded already, by FSDP1 or as a DTensor; nothing is cast then.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"dtype is {dtype}; the optimizer steps float32, bfloat16 and float16 parameters: pass one of them"
        )
    patterns = [keep_fp32] if isinstance(keep_fp32, str) else list(keep_fp32)
    named = list(model.named_parameters(remove_duplicate=False))
    kept: set[int] = set()
    for pattern in patterns:
        matches = {id(param) for name, param in named if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(
                f"keep_fp32 has the pattern {pattern!r}, which matches none of the {len(named)} parameters "
                f"({', '.join(name for name, _ in named[:3])}, ...); a pattern covers the whole name: '*norm.*'"
            )
        kept |= matches
    for name, param in named:
        is_sharded = hasattr(param, "_local_tensor")
        if is_sharded or is_fsdp1(param):
            raise TypeError(
                f"parameter {name!r} is {'a DTensor' if is_sharded else 'a slice of an FSDP1 flat parameter'}: its "
                "group was sharded for the dtype it has; call cast_model before fully_shard, FSDP or parallelize_module"
            )
    for _, param in named:
        if id(param) in kept or param.dtype not in _CASTABLE:
            continue
        param.data = param.data.to(dtype)  # a tied one has it already when its second name comes
        if param.grad is not None:
            param.grad.data = param.grad.data.to(dtype)
    return model
