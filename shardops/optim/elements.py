"""Which elements of the global tensor a local one holds, and each parameter's salt: what dither is chosen by.

So that it is the same for every world size, every sharding and after a resume. FSDP1's parameters do not tell which
slice of the original they are: theirs is by the local index, and so depends on the sharding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .masters import Group, master_storage
from .moments import moment_storage

Row = tuple[int, int, int, int]  # of the op's ``dither``: salt, first, columns, stride
_MASK64 = (1 << 64) - 1


def is_dithered(param: Tensor, group: Group) -> bool:
    """Whether anything of the parameter is stored in fewer bits than it is computed in, other than by ``none``."""
    storage = master_storage(param, group)
    is_stochastic = storage == "none" and group["master_weights"] == "stochastic"
    return is_stochastic or storage == "split24" or moment_storage(param, group) != "float32"


def salt_of(seed: int, index: int) -> int:
    """A 32-bit hash of the optimizer's seed and a parameter's index in it (splitmix64, Steele et al. 2014)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index + 1) & _MASK64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK64
    return (mixed ^ mixed >> 31) >> 32


def dither_row(param: Tensor, state: dict[str, Any]) -> Row | None:
    """The parameter's row of the op's ``dither``; None if its state has no salt.

    Raises:
        ValueError: sharded along two dimensions beyond the first, or in strides, so that elements have no simple order;
            on every rank, whatever it holds.
    """
    if "salt" not in state:
        return None
    return (int(state["salt"]), *_local_range(param))


def _local_range(param: Any) -> tuple[int, int, int]:
    """``(first, columns, stride)``: local element i is global element ``first + i // columns * stride + i % columns``.

    Rows 2 and 3 of a ``[4, 6]`` tensor -> (12, 12, 12); columns 2 to 4 of it -> (2, 3, 6).
    """
    if not hasattr(param, "_local_tensor"):
        return 0, max(param.numel(), 1), max(param.numel(), 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(param.shape)
    cut = _cut_dims(param)
    if len(cut) > 1 or not _is_in_one_piece(param):
        where = f"along the dimensions {cut} at once" if len(cut) > 1 else "in strides"
        raise ValueError(
            f"a parameter of shape {shape} has placements {param.placements}, sharded {where}; 8-bit and bfloat16 "
            "states, 'split24' and 'stochastic' are dithered by an element's place in the global tensor, which takes "
            "one range of one dimension beyond the first: use float32 states and an exact master"
        )
    local_shape, offsets = compute_local_shape_and_global_offset(shape, param.device_mesh, param.placements)
    if 0 in local_shape or not shape:
        return 0, 1, 1
    inner = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
    first = sum(offset * size for offset, size in zip(offsets, inner, strict=True))
    if not cut:
        numel = torch.Size(local_shape).numel()
        return first, numel, numel
    return first, local_shape[cut[0]] * inner[cut[0]], shape[cut[0]] * inner[cut[0]]


def _cut_dims(param: Any) -> list[int]:
    """The dimensions beyond the first that ranks hold parts of."""
    sizes = param.device_mesh.shape
    found = {
        placement.dim
        for size, placement in zip(sizes, param.placements, strict=True)
        if hasattr(placement, "dim") and size > 1
    }
    return sorted(dim for dim in found if dim > 0 and param.shape[dim] > 1)


def _is_in_one_piece(param: Any) -> bool:
    """Whether a rank's part of each dimension is a range of it.

    Strides, where there are any, then only say in which order mesh dimensions cut it, as FSDP2 does after tensor
    parallelism.
    """
    sizes, placements = param.device_mesh.shape, param.placements
    for position, placement in enumerate(placements):
        later = [
            size
            for size, other in zip(sizes[position + 1 :], placements[position + 1 :], strict=True)
            if getattr(other, "dim", None) == getattr(placement, "dim", None)
        ]
        if sizes[position] > 1 and getattr(placement, "split_factor", math.prod(later)) != math.prod(later):
            return False
    return True
