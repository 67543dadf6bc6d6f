"""cast_gather in plain torch: ``.to(dtype)`` of each shard, back to back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def cast_gather(out: Tensor, shards: Sequence[Tensor]) -> None:
    """``out = concatenation of cast(shard)``; out is 1D."""
    offset = 0
    for shard in shards:
        out[offset : offset + shard.numel()].copy_(shard.view(-1))
        offset += shard.numel()
