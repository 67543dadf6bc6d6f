"""Tensors that are like a parameter: of its shape, memory order, device and sharding, in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def zeros_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the parameter's shape, strides, device and sharding in another dtype."""
    return torch.zeros_like(param.detach(), dtype=dtype, memory_format=torch.preserve_format)


def fp32_copy(param: Tensor) -> Tensor:
    """The parameter's values in a new float32 tensor of its layout."""
    copy = zeros_like(param, torch.float32)
    copy.copy_(param.detach())
    return copy


def is_fsdp1(param: Tensor) -> bool:
    """Whether the parameter is (a slice of) an FSDP1 flat parameter; FSDP1 marks it so."""
    return bool(getattr(param, "_fsdp_flattened", False))
