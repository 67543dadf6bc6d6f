"""flatten_shard and unflatten_shard in plain torch: one slice copy for each segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _converted(values: Tensor, dtype: torch.dtype, scale: float | None) -> Tensor:
    # The scale is a float32 tensor: a Python number would be applied in float64 by some of torch's kernels.
    if scale is not None:
        values = values.float() * torch.full((), scale, dtype=torch.float64, device=values.device).float()
    return values.to(dtype)


def flatten_shard(out: Tensor, tensors: Sequence[Tensor], segments: Tensor, scale: float | None = None) -> None:
    """``out[buffer range] = cast(tensor[range] * scale)`` for each segment; zero for padding (tensor -1)."""
    flat = out.view(-1)
    for tensor, tensor_offset, buffer_offset, numel in segments.tolist():
        target = flat[buffer_offset : buffer_offset + numel]
        if tensor < 0:
            target.zero_()
        else:
            source = tensors[tensor].view(-1)[tensor_offset : tensor_offset + numel]
            target.copy_(_converted(source, out.dtype, scale))


def unflatten_shard(
    buffer: Tensor, out_tensors: Sequence[Tensor], segments: Tensor, scale: float | None = None
) -> None:
    """``tensor[range] = cast(buffer[range] * scale)`` for each segment; padding is passed over."""
    flat = buffer.view(-1)
    for tensor, tensor_offset, buffer_offset, numel in segments.tolist():
        if tensor >= 0:
            target = out_tensors[tensor].view(-1)[tensor_offset : tensor_offset + numel]
            target.copy_(_converted(flat[buffer_offset : buffer_offset + numel], target.dtype, scale))
