"""Validation of the optimizer's options: each error names the value received, the reason and the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .masters import BFLOAT16_ONLY, MASTER_WEIGHTS
from .moments import STATE_DTYPES
from .state import PARAM_DTYPES


def state_dtype_name(state_dtype: Any) -> Any:
    """A dtype by its name, as param groups keep it: torch's full state dicts refuse a ``torch.dtype`` among options."""
    return str(state_dtype).removeprefix("torch.") if isinstance(state_dtype, torch.dtype) else state_dtype


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's scalars too


def check_group(group: Mapping[str, Any], params: Sequence[Any] = ()) -> None:
    """Checks a param group's options (defaults filled in) and parameters.

    Raises:
        ValueError: a value outside its range.
        TypeError: a value or parameter of the wrong kind.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it has one element")
        if lr.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"lr is a tensor of dtype {lr.dtype}; use float32 or float64")
        if lr.device.type == "cpu" and not float(lr) >= 0.0:  # on a device it would cost a sync
            raise ValueError(f"lr is {lr}; a learning rate is at least 0: maximize=True ascends")
    elif not _is_number(lr):
        raise TypeError(f"lr is {lr!r}; it is a number or a tensor of one element")
    elif not lr >= 0.0:
        raise ValueError(f"lr is {lr}; a learning rate is at least 0: maximize=True ascends")
    for name in ("eps", "weight_decay"):
        if not _is_number(group[name]):
            raise TypeError(f"{name} is {group[name]!r}; it is a number")
        if not group[name] >= 0.0:
            raise ValueError(f"{name} is {group[name]}; it is at least 0")
    _check_betas(group["betas"])
    if group["differentiable"]:
        raise ValueError(
            "differentiable is True; the step is a fused in-place kernel that autograd cannot follow: "
            "use torch.optim.Adam(differentiable=True)"
        )
    if group["master_weights"] not in MASTER_WEIGHTS:
        raise ValueError(
            f"master_weights is {group['master_weights']!r}; it is one of {', '.join(map(repr, MASTER_WEIGHTS))}"
        )
    if state_dtype_name(group["state_dtype"]) not in STATE_DTYPES:
        raise ValueError(
            f"state_dtype is {group['state_dtype']!r}; it is torch.float32, torch.bfloat16, or 'int8' for "
            "block-quantised moments"
        )
    for index, param in enumerate(params):
        _check_param(f"parameter {index}", param, group)


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise TypeError(f"betas is {betas!r}; it is a pair of numbers, as (0.9, 0.999)")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] is {beta}; a decay rate is at least 0 and below 1")


def _check_param(label: str, param: Any, group: Mapping[str, Any]) -> None:
    if not isinstance(param, Tensor):
        return  # torch's own error says it
    label = f"{label} of shape {tuple(param.shape)}"
    if param.layout != torch.strided:
        raise TypeError(f"{label} has layout {param.layout}; only dense parameters can be stepped: use .to_dense()")
    if param.dtype not in PARAM_DTYPES:
        has_torch = param.dtype.is_floating_point or param.is_complex()
        remedy = "use torch.optim.Adam for it" if has_torch else "leave it out"
        raise TypeError(f"{label} has dtype {param.dtype}; float32, bfloat16 and float16 can be stepped: {remedy}")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(
            f"{label} has strides {param.stride()}: several of its elements are one (an expanded tensor); "
            "make it a tensor of its own with .clone()"
        )
    if group["master_weights"] in BFLOAT16_ONLY and param.dtype == torch.float16:
        raise ValueError(
            f"master_weights is {group['master_weights']!r} and {label} is float16; remainders complete, and "
            "stochastic rounding rounds to, bfloat16 only: use 'auto' or 'fp32'"
        )
    if any(placement.is_partial() for placement in getattr(param, "placements", ())):
        raise ValueError(
            f"{label} has placements {param.placements}; a pending sum cannot be stepped: "  # type: ignore[attr-defined]
            "redistribute it to Shard or Replicate"
        )


def check_seed(seed: Any) -> None:
    """Raises unless it is an integer."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):  # numpy's integers too
        raise TypeError(f"seed is {seed!r}; it is an integer, from which each parameter's dither follows")


def check_offload(offload_state: Any, offload_bucket_bytes: Any) -> None:
    """Raises unless these are None or "cpu", and a positive number of bytes."""
    if offload_state not in (None, "cpu"):
        raise ValueError(f"offload_state is {offload_state!r}; it is 'cpu', or None for states beside the parameters")
    if isinstance(offload_bucket_bytes, bool) or not hasattr(offload_bucket_bytes, "__index__"):
        raise TypeError(f"offload_bucket_bytes is {offload_bucket_bytes!r}; it is a number of bytes, as 256 << 20")
    if offload_bucket_bytes < 1:
        raise ValueError(f"offload_bucket_bytes is {offload_bucket_bytes}; it is at least 1")


def check_max_grad_norm(max_grad_norm: Any) -> None:
    """Raises unless it is None or a number of at least 0."""
    if max_grad_norm is None:
        return
    if not _is_number(max_grad_norm):
        raise TypeError(f"max_grad_norm is {max_grad_norm!r}; it is a number, or None for no clipping")
    if math.isnan(max_grad_norm) or max_grad_norm < 0.0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}; it is at least 0, or None for no clipping")
