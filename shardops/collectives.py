"""Collectives of the update path: the cast all-gather and the gradient norm's all-reduce.

Beside the plan and above the ops; outside ``integrations/`` this is the only place that uses process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .ops import _registry
from .ops.grad_norm import check_norm_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, any pending collective waited for; another tensor as it is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(local, "wait", None)  # AsyncCollectiveTensor
    return local if wait is None else wait()


def all_gather_cast(
    shards: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    backend: str | None = None,
) -> list[Tensor] | tuple[list[Tensor], Work]:
    """Casts this rank's shards into one buffer and gathers all ranks' buffers in one collective.

    Args:
        shards: float32, bfloat16 or float16, any shapes, at least one; every rank passes the same shapes.
        dtype: of the gathered values, rounded to nearest even.
        group: process group; None: the default one.
        async_op: do not wait; the views are valid after ``work.wait()``.
        backend: of the cast.

    Returns:
        For each shard a view ``[world_size, *shard.shape]`` of one buffer; with ``async_op``, that list and the work.

    Raises:
        ValueError, TypeError: as :func:`shardops.ops.cast_gather`.
    """
    gather_input = ops.cast_gather(shards, dtype, backend=backend)
    world_size = dist.get_world_size(group)
    gathered = gather_input.new_empty(world_size, gather_input.numel())
    # torch 2.13 renamed the collective; the old name warns there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(gathered.view(-1), gather_input, group=group, async_op=async_op)
    views = []
    offset = 0
    for shard in shards:
        views.append(gathered[:, offset : offset + shard.numel()].view(world_size, *shard.shape))
        offset += shard.numel()
    if not async_op:
        return views
    assert work is not None
    return views, work


def grad_norm(
    grads: Iterable[Tensor],
    *,
    group: ProcessGroup | None = None,
    norm_type: float = 2.0,
    backend: str | None = None,
) -> Tensor:
    """The norm of all gradients together, equal on all ranks that share them, as a device scalar without a host sync.

    Each local tensor is summed once in the fixed tree of ``backends/reference/grad_norm.py``; DTensors are reduced over
    the mesh dimensions that shard them, so replicas count once.

    Args:
        grads: tensors or DTensors, any shapes and devices.
        group: the group over which plain (non-DTensor) gradients are sharded; None: they are whole on every rank.
        norm_type: 1, 2 or inf.
        backend: of the local sums.

    Returns:
        float32 scalar on the first gradient's device; 0 for none. NaN or inf if an element is.

    Raises:
        ValueError: another norm_type, or a gradient that is a pending sum (``Partial``).
    """
    norm_type = check_norm_type(norm_type)
    grads = list(grads)
    layout = NormLayout(grads, group)
    return layout.norm(list(map(local_tensor, grads)), norm_type, backend=backend)


@dataclass(frozen=True)
class _Part:
    """Parameters that are sharded over the same groups.

    Attributes:
        groups: the all-reduces that complete their sum, one after the other.
        members: for each number of replicas among these groups' ranks, and each device, positions of parameters.
    """

    groups: list[ProcessGroup]
    members: list[tuple[int, list[int]]]


class NormLayout:
    """How the norm over a fixed list of parameters is made: worked out once, used each step.

    The parameters say which collectives there are, not the gradients, so that a rank without any takes part in them.

    Args:
        params: parameters (or gradients that stand for them), plain or DTensors.
        group: shards the plain parameters that ``in_group`` names; the others are whole on every rank, and count once.
        in_group: all, unless given.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group: ProcessGroup | None = None,
        in_group: Callable[[Tensor], bool] = lambda param: True,
    ) -> None:
        self.group = group
        self.device = params[0].device if params else _group_device(group)
        # By what shards them: a mesh, the group, or nothing. The group first: a rank may hold none of its shards.
        sharders: dict[Any, list[int]] = {} if group is None else {group: []}
        for index, param in enumerate(params):
            mesh = getattr(param, "device_mesh", None)
            if mesh is None and group is not None and in_group(param):
                mesh = group
            sharders.setdefault(mesh, []).append(index)
        self._parts = []
        for sharder, indices in sharders.items():
            is_mesh = sharder is not None and sharder is not group
            dims = _sharded_dims(params[i] for i in indices) if is_mesh else []
            members: dict[tuple[int, torch.device], list[int]] = {}
            for i in indices:
                replicas = math.prod(sharder.size(dim) for dim in dims if not _is_sharded(params[i], dim))
                members.setdefault((replicas, params[i].device), []).append(i)
            groups = [sharder.get_group(dim) for dim in dims]
            if sharder is not None and not is_mesh:
                groups = [sharder]
            self._parts.append(_Part(groups, [(replicas, found) for (replicas, _), found in members.items()]))

    def norm(
        self,
        grads: Sequence[Tensor | None],
        norm_type: float = 2.0,
        *,
        are_checked: bool = False,
        backend: str | None = None,
    ) -> Tensor:
        """The norm of these local gradients, one for each parameter or None; as :func:`grad_norm`.

        Args:
            are_checked: they are known to be fit and gapless in memory: the kernel takes them as they are.
        """
        reduce = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        # The sum of powers (or the largest magnitude), and whether a NaN was met: a collective's maximum may lose one.
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in self._parts:
            value = torch.zeros(2, dtype=torch.float64, device=self.device)
            for replicas, indices in part.members:
                present = [grad for grad in map(grads.__getitem__, indices) if grad is not None]
                if not present:
                    continue
                if are_checked:
                    kernel = _registry.resolve("grad_norm", present[0].device.type, backend)
                    power, _ = kernel(present, norm_type)
                else:
                    power, _ = ops.grad_norm(present, norm_type, backend=backend)
                is_nan = power.isnan()
                share = torch.where(is_nan, 0.0, power) if norm_type == math.inf else power / replicas
                value = _combined(value, torch.stack((share, is_nan.double())).to(self.device), norm_type)
            for group in part.groups:
                dist.all_reduce(value, reduce, group=group)
            total = _combined(total, value, norm_type)
        norm = total[0].sqrt() if norm_type == 2.0 else total[0]
        return torch.where(total[1] > 0, math.nan, norm).float()


def _combined(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(a, b) if norm_type == math.inf else a + b


def _group_device(group: ProcessGroup | None) -> torch.device:
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_sharded(param: Any, mesh_dim: int) -> bool:
    placement = param.placements[mesh_dim]
    if placement.is_partial():
        raise ValueError(
            f"a gradient has placements {param.placements}: a sum that is still pending has no norm; "
            "redistribute it to Shard or Replicate first"
        )
    return not placement.is_replicate()


def _sharded_dims(params: Iterable[Any]) -> list[int]:
    """Mesh dimensions over which at least one of the parameters (of one mesh) is sharded."""
    sharded: set[int] = set()
    for param in params:
        sharded.update(dim for dim in range(param.device_mesh.ndim) if _is_sharded(param, dim))
    return sorted(sharded)
