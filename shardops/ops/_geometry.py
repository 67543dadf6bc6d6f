"""geometry_hash: one number for the shapes, strides, dtypes and devices of a list of tensors.

Plans are cached between steps; this says in one call whether the tensors still look as they did when the plan was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _library

_library.define_host("geometry_hash(Tensor[] tensors) -> int")


def geometry_hash(tensors: Sequence[Tensor]) -> int | None:
    """A 64-bit hash of all layouts, sizes, strides, dtypes and devices, in order; None without the op library."""
    if not tensors:
        return 0
    if not _library.load():
        return None
    value: int = torch.ops.shardops.geometry_hash.default(tensors)
    return value
