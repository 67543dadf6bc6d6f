"""All-reduces of single values, wherever these are.

States and gradients may be on the CPU while the ranks' group reduces on GPUs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduced(value: Tensor, reduce: Any, group: ProcessGroup) -> Tensor:
    """The value after an all-reduce, on its device; it is written, unless the group reduces on another one only."""
    moved = value.to(reducing_device(group, value.device))
    dist.all_reduce(moved, reduce, group=group)
    return moved.to(value.device)


def reducing_device(group: Any, device: torch.device) -> torch.device:
    """Where the group reduces a value of a device: there, if it can. NCCL alone has nothing for the CPU."""
    types = [found.type for found in group._device_types]
    if device.type in types or not types:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if "cuda" in types else torch.device(types[0])


def found_on_any_rank(found: Tensor | None, device: torch.device, groups: Sequence[ProcessGroup]) -> Tensor:
    """float32 scalar on a device, 1 if it is on some rank of the groups; None counts as 0. One all-reduce a group."""
    flag = torch.zeros((), device=device) if found is None else found.to(device, torch.float32, copy=True)
    for group in groups:
        flag = all_reduced(flag, dist.ReduceOp.MAX, group)
    return flag
