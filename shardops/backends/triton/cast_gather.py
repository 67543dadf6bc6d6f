"""cast_gather in Triton: the copy kernel over shards laid back to back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ._copy import copy_segments


def cast_gather(out: Tensor, shards: Sequence[Tensor]) -> None:
    """``out = concatenation of cast(shard)``; out is 1D."""
    numels = np.array([shard.numel() for shard in shards], dtype=np.int64)
    if numels.sum() != out.numel():
        raise ValueError(f"out has {out.numel()} elements, the shards have {numels.sum()}; they must be equal")
    index = np.arange(len(shards), dtype=np.int64)
    segments = np.stack([index, np.zeros_like(index), np.cumsum(numels) - numels, numels], axis=1)
    copy_segments(out, shards, segments, None, into_buffer=True)
