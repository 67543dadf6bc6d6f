"""flatten_shard and unflatten_shard in Triton: the copy kernel over the segments of a layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._copy import copy_segments


def flatten_shard(out: Tensor, tensors: Sequence[Tensor], segments: Tensor, scale: float | None = None) -> None:
    """``out[buffer range] = cast(tensor[range] * scale)`` for each segment; zero for padding (tensor -1)."""
    copy_segments(out, tensors, segments.numpy(), scale, into_buffer=True)


def unflatten_shard(
    buffer: Tensor, out_tensors: Sequence[Tensor], segments: Tensor, scale: float | None = None
) -> None:
    """``tensor[range] = cast(buffer[range] * scale)`` for each segment; padding is passed over."""
    copy_segments(buffer, out_tensors, segments.numpy(), scale, into_buffer=False)
