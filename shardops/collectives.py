"""Collectives of the update path: the cast all-gather and the gradient norm's all-reduce.

Beside the plan and above the ops; with ``reductions``, and outside ``integrations/``, the only user of process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .ops import _registry
from .ops.grad_norm import check_norm_type
from .reductions import all_reduced

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
        shards: local tensors, float32, bfloat16 or float16, any shapes, at least one; all ranks pass the same shapes.
        dtype: of the gathered values, rounded to nearest even.
        group: process group; None: the default one.
        async_op: do not wait; the views are valid after ``work.wait()``.
        backend: of the cast.

    Returns:
        For each shard a view ``[world_size, *shard.shape]`` of one buffer; with ``async_op``, that list and the work.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`shardops.ops.cast_gather`; no process group.
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
    grads: Tensor | Iterable[Tensor],
    *,
    group: ProcessGroup | None = None,
    norm_type: float = 2.0,
    backend: str | None = None,
) -> Tensor:
    """The norm of all gradients together, equal on all ranks that share them, as a device scalar without a host sync.

    Each local tensor is summed once in the fixed tree of ``backends/reference/grad_norm.py``; DTensors are then summed
    over the ranks that they are sharded over. Replicas count once. One all-reduce does it under FSDP, HSDP, tensor
    parallelism under FSDP, and for parameters on several meshes of one job (``NormLayout`` says how).

    Args:
        grads: tensors or DTensors, any shapes and devices.
        group: ranks that hold different parameters, as pipeline stages and experts, or different parts of plain ones,
            as FSDP1's and hand-made shards: everything is summed over it. A plain (non-DTensor) gradient then counts
            on each of its ranks; a DTensor once, however many of them are on its mesh. None: plain gradients are whole
            on every rank, and no rank has DTensors that another lacks.
        norm_type: 1, 2 or inf.
        backend: of the local sums.

    Returns:
        float32 scalar on the first gradient's device; for none 0, on the CPU or the group's device. NaN or inf if an
        element is.

    Raises:
        ValueError: another norm_type, a gradient that is a pending sum (``Partial``), a group without this rank.
        TypeError: a gradient that is not a dense tensor of float32, bfloat16 or float16.
    """
    norm_type = check_norm_type(norm_type)
    grads = [grads] if isinstance(grads, Tensor) else list(grads)
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"grads[{index}] is {grad!r}; it is a tensor: leave out parameters without a gradient")
    layout = NormLayout(grads, [] if group is None else [group])
    return layout.norm(list(map(local_tensor, grads)), norm_type, backend=backend)


@dataclass(frozen=True)
class _Part:
    """Parameters whose local sums are completed by the same all-reduces.

    Attributes:
        groups: these all-reduces, one after the other.
        members: for each device, and each number of copies that all reductions together meet: that number, and the
            positions of the parameters.
    """

    groups: list[ProcessGroup]
    members: list[tuple[int, list[int]]]


class NormLayout:
    """How the norm over a fixed list of parameters is made: worked out once, used each step.

    The parameters say which collectives there are, not the gradients, so that a rank without any takes part in them.

    Each rank sums what it holds, and divides a parameter's sum by the number of its copies among the ranks that are
    reduced over. So one all-reduce serves parameters that are sharded differently. On a mesh of 2 x 4 ranks (dp, tp)
    all 8 are summed over: a weight sharded over both counts as it is, a bias that only dp shards is divided by 4.

    Args:
        params: parameters (or gradients that stand for them), plain or DTensors.
        groups: groups of ranks that hold different parameters, or different parts of plain ones. Each has its
            all-reduce, after the DTensors' own, whether or not a parameter here is in it.
        group_of: which group a parameter belongs to; None: a plain one is whole on every rank, a DTensor on every rank
            of its mesh. Unless given, all belong to the first of ``groups``.
        settings: kept for whoever keeps the layout: what it was made for.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[ProcessGroup] = (),
        group_of: Callable[[Tensor], ProcessGroup | None] | None = None,
        settings: tuple[Any, ...] = (),
    ) -> None:
        self.settings = settings
        self.device = next((param.device for param in params if not param.is_meta), None) or _group_device(groups)
        members: dict[ProcessGroup | None, list[int]] = {group: [] for group in groups}
        for index, param in enumerate(params):
            group = group_of(param) if group_of is not None else groups[0] if groups else None
            members.setdefault(group, []).append(index)
        # The group that is reduced over last (None: none is) -> what is added up before.
        self._sums = {group: _parts(params, indices, group, self.device) for group, indices in members.items()}
        for part in list(self._sums.get(None, ())):  # an all-reduce that two of them have in common is made once
            if len(part.groups) == 1 and part.groups[0] in self._sums:
                self._sums[None].remove(part)
                self._sums[part.groups[0]].append(_Part([], part.members))

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

        def power_of(indices: list[int]) -> Tensor | None:
            present = [grad for grad in map(grads.__getitem__, indices) if grad is not None]
            return local_power(present, norm_type, are_checked, backend)[0] if present else None

        return self.completed(power_of, norm_type)

    def completed(self, power_of: Callable[[list[int]], Tensor | None], norm_type: float) -> Tensor:
        """The norm, of local sums of powers.

        Args:
            power_of: the sum over the gradients of parameters at these positions, one of :attr:`sets`, float64 scalar;
                None: there are none.
            norm_type: of the powers.
        """
        is_max = norm_type == math.inf
        reduce = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        totals = []
        for last_group, parts in self._sums.items():
            values = []
            for part in parts:
                shares = []
                for copies, indices in part.members:
                    power = power_of(indices)
                    if power is not None:
                        shares.append(_share(power, copies, is_max).to(self.device))
                values.append(self._combined(shares, is_max))
                for group in part.groups:
                    values[-1] = all_reduced(values[-1], reduce, group)
            totals.append(self._combined(values, is_max))
            if last_group is not None:
                totals[-1] = all_reduced(totals[-1], reduce, last_group)
        total = self._combined(totals, is_max)
        if is_max:
            return torch.where(total[1] > 0, math.nan, total[0]).float()
        return (total.sqrt() if norm_type == 2.0 else total).float()

    @property
    def sets(self) -> list[list[int]]:
        """Positions of the parameters whose local sums are taken together, each in one of them."""
        return [indices for parts in self._sums.values() for part in parts for _, indices in part.members]

    def _combined(self, shares: Sequence[Tensor], is_max: bool) -> Tensor:
        """Their sum or maximum, as :func:`_share`; 0 of none."""
        if not shares:
            return torch.zeros(2 if is_max else (), dtype=torch.float64, device=self.device)
        total = shares[0]
        for share in shares[1:]:
            total = torch.maximum(total, share) if is_max else total + share
        return total


def local_power(
    grads: Sequence[Tensor], norm_type: float, are_checked: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    """As :func:`shardops.ops.grad_norm`, of gradients on one device; ``are_checked`` as :meth:`NormLayout.norm`."""
    if are_checked:
        kernel = _registry.resolve("grad_norm", grads[0].device.type, backend)
        result: tuple[Tensor, Tensor] = kernel(grads, norm_type)
        return result
    return ops.grad_norm(grads, norm_type, backend=backend)


def _share(power: Tensor, copies: int, is_max: bool) -> Tensor:
    """What a local sum of powers adds to a sum that meets ``copies`` of it, float64; or what a maximum takes of it, 1D.

    A collective's maximum may lose a NaN, its sum does not: beside the magnitude (0 for NaN) goes whether it was one.
    """
    if not is_max:
        return power if copies == 1 else power / copies
    is_nan = power.isnan()
    return torch.stack((torch.where(is_nan, 0.0, power), is_nan.double()))


def _group_device(groups: Sequence[ProcessGroup]) -> torch.device:
    if groups and "nccl" in dist.get_backend(groups[0]):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shard_groups(params: Sequence[Any]) -> list[ProcessGroup]:
    """The groups over which parts of these parameters lie, in an order that all their ranks have in common."""
    groups: dict[ProcessGroup, None] = {}
    for param in params:
        mesh = getattr(param, "device_mesh", None)
        if mesh is not None and mesh.get_coordinate() is not None:
            groups.update((mesh.get_group(dim), None) for dim in range(mesh.ndim) if _is_sharded(param, dim))
    return list(groups)


# ---- which all-reduces complete the sums of DTensors -----------------------------------------------------------------


def _parts(
    params: Sequence[Any], indices: Sequence[int], last_group: ProcessGroup | None, device: torch.device
) -> list[_Part]:
    """What is added up before an all-reduce over ``last_group`` (None: before none).

    Raises:
        ValueError: a DTensor that is a pending sum; a group without this rank.
    """
    last_ranks = None if last_group is None else _ranks_of_group(last_group)
    plain: dict[int, int] = {}
    meshes: dict[Any, dict[int, list[int]]] = {}  # mesh -> position of a parameter -> dimensions that shard it
    for i in indices:
        mesh = getattr(params[i], "device_mesh", None)
        if mesh is None:
            plain[i] = 1
        elif mesh.get_coordinate() is not None:  # else this rank is not on the mesh, and holds nothing
            meshes.setdefault(mesh, {})[i] = [dim for dim in range(mesh.ndim) if _is_sharded(params[i], dim)]
    parts = [_part(params, [], plain)] if plain else []
    for family in _families(meshes, device):
        groups: list[ProcessGroup] = []
        for mesh in family.meshes:
            groups += [mesh.get_group(dim) for dim in sorted(set(chain.from_iterable(meshes[mesh].values())))]
        groups = list(dict.fromkeys(groups))
        if len(groups) > 1 and family.group is not None:
            groups = [family.group]
        copies = 1
        if last_ranks is not None:  # each of its ranks that is on the mesh brings a sum of its own
            ranks = _ranks(family.meshes[0])
            copies = len(ranks & last_ranks)
            summed = set(dist.get_process_group_ranks(groups[0])) if len(groups) == 1 else ranks if groups else set()
            if summed <= last_ranks:
                groups = []
        copies *= math.prod(group.size() for group in groups)
        counts = {
            i: copies // math.prod(map(mesh.size, dims)) for mesh in family.meshes for i, dims in meshes[mesh].items()
        }
        parts.append(_part(params, groups, counts))
    return parts


def _part(params: Sequence[Tensor], groups: list[ProcessGroup], copies: dict[int, int]) -> _Part:
    members: dict[tuple[int, torch.device], list[int]] = {}
    for index, count in copies.items():
        members.setdefault((count, params[index].device), []).append(index)
    return _Part(groups, [(count, found) for (count, _), found in members.items()])


@dataclass
class _Family:
    """A mesh, first, and meshes that are parts of it, so that a parameter on one of these has copies along the rest.

    Attributes:
        group: of exactly the first mesh's ranks, if there is one.
        dims: groups of all meshes' dimensions that a part of them may have.
    """

    meshes: list[Any]
    group: ProcessGroup | None
    dims: set[ProcessGroup]


def _families(meshes: Iterable[Any], device: torch.device) -> list[_Family]:
    """Meshes that can share their all-reduces. Every rank comes to the same result, each with its own part of a mesh.

    A part of a mesh is known by its groups: slicing a mesh makes no new ones.
    """
    families: list[_Family] = []
    for mesh in sorted(meshes, key=lambda mesh: (-mesh.size(), mesh.ndim)):
        dims = {mesh.get_group(dim) for dim in range(mesh.ndim)}
        for family in families:
            is_part = dims <= family.dims
            if is_part or (family.group is not None and _ranks(mesh) == _ranks(family.meshes[0])):
                family.meshes.append(mesh)
                family.dims |= dims
                break
        else:
            group = mesh.get_group(0) if mesh.ndim == 1 else _default_group(mesh.size(), device)
            families.append(_Family([mesh], group, dims))
    return families


def _default_group(size: int, device: torch.device) -> ProcessGroup | None:
    """The default group, if it has so many ranks and reduces tensors on the device."""
    group = dist.group.WORLD
    if group is None or group.size() != size:
        return None
    try:
        group._get_backend(device)
    except RuntimeError:
        return None
    return group


def _ranks(mesh: Any) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _ranks_of_group(group: ProcessGroup) -> set[int]:
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"this rank, {dist.get_rank()}, is not in the group to sum over; give each rank the group that it is in"
        )
    return set(dist.get_process_group_ranks(group))


def _is_sharded(param: Any, mesh_dim: int) -> bool:
    """Whether another rank along the dimension holds another part."""
    placement = param.placements[mesh_dim]
    if placement.is_partial():
        raise ValueError(
            f"a gradient has placements {param.placements}: a sum that is still pending has no norm; "
            "redistribute it to Shard or Replicate first"
        )
    return not placement.is_replicate() and param.device_mesh.size(mesh_dim) > 1
