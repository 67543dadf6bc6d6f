"""The norm that an optimizer clips by: of its own gradients, or one that several optimizers share.

Which groups it is summed over is decided here; ``collectives.NormLayout`` makes all-reduces of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdRef

from ..collectives import NormLayout
from ..gradients import local_gradient
from ..plan import UpdatePlan
from ..shadow import Versions, versions
from .graphs import is_capturing
from .like import is_fsdp1

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GroupOf = Callable[[Tensor], "ProcessGroup | None"]


def norm_groups(optimizer: Any) -> tuple[list[ProcessGroup], GroupOf]:
    """``groups`` and ``group_of`` of a :class:`NormLayout` over the optimizer's parameters.

    With FSDP1 parameters they are what these are sharded over, and all other parameters count once. Without, all
    parameters are in the optimizer's ``process_group``.
    """
    sharded = list(filter(is_fsdp1, _params(optimizer)))
    group: ProcessGroup | None = optimizer.process_group
    own: GroupOf | None = optimizer._shard_group_of
    if not sharded:
        return [] if group is None else [group], lambda param: group
    if own is not None:
        groups = [found for found in map(own, sharded) if found is not None]
        return list(dict.fromkeys(groups)), lambda param: own(param) if is_fsdp1(param) else None
    group = group or dist.group.WORLD
    assert group is not None  # FSDP1 has initialised it
    return [group], lambda param: group if is_fsdp1(param) else None


def grad_norm(optimizer: Any, plan: UpdatePlan, is_scaled: bool) -> Tensor:
    """The norm to clip by, float32 scalar, of gradients as they are.

    Args:
        optimizer: whose step it is.
        plan: the optimizer's, refreshed with this step's gradients.
        is_scaled: a GradScaler's factor is on them still.

    Raises:
        RuntimeError: as :meth:`SharedNorm.norm`.
    """
    shared: SharedNorm | None = optimizer._shared_norm
    if shared is not None:
        return shared.norm(optimizer, is_scaled)
    return plan.grad_norm(
        _settings(optimizer),
        lambda params, settings: NormLayout(params, *norm_groups(optimizer), settings),
        optimizer.backend,
    )


def clip(
    optimizer: Any, plan: UpdatePlan, grad_scale: Tensor | None, found_inf: Tensor | None, is_guarded: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Takes ``optimizer.last_grad_norm``, of the unscaled gradients.

    Args:
        optimizer: whose step it is; it clips, or is guarded.
        plan: as :func:`grad_norm`.
        grad_scale: divides gradients; None: they are unscaled.
        found_inf: what is known of gradients that are not finite.
        is_guarded: the step is to be skipped if the norm is not finite.

    Returns:
        The factor for gradients, ``clamp(max_grad_norm / (norm + 1e-6), max=1)`` as in torch, None without clipping;
        and ``found_inf`` with what the norm tells. Device scalars.
    """
    norm = grad_norm(optimizer, plan, is_scaled=grad_scale is not None)
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm.device).reshape(())
    optimizer.last_grad_norm = norm
    limit = optimizer.max_grad_norm
    coefficient = None if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)
    # A shared norm: others' gradients reach us through it.
    if is_guarded or (found_inf is not None and optimizer._shared_norm is not None):
        largest = norm  # that an element can be
        if is_guarded:  # exp_avg_sq takes its square
            largest = (norm if coefficient is None else norm * coefficient).square()
        is_infinite = (~largest.isfinite()).float()
        found_inf = is_infinite if found_inf is None else found_inf + is_infinite.to(found_inf)
    return coefficient, found_inf


def _settings(optimizer: Any) -> tuple[Any, ...]:
    """What the groups depend on beside the parameters."""
    return optimizer.process_group, optimizer._shard_group_of


def _params(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _Taken:
    """The gradients of one optimizer as a norm was taken of them. It does not keep them: cleared ones go at once."""

    def __init__(self, optimizer: Any) -> None:
        self._grads = _grads_as_they_are(optimizer)

    def are_of(self, optimizer: Any) -> bool:
        """Whether they still are the optimizer's gradients, unwritten."""
        # References to tensors that are gone equal no other.
        return _grads_as_they_are(optimizer) == self._grads


def _grads_as_they_are(optimizer: Any) -> list[tuple[WeakIdRef, Versions] | None]:
    grads = [param.grad for param in _params(optimizer)]
    return [None if grad is None else (WeakIdRef(grad), versions(grad)) for grad in grads]


class SharedNorm:
    """One norm over the gradients of several optimizers, which each of them clips by.

    The first to step takes it, with one pass over all gradients; the others use it, each once, as long as their own
    gradients are those that it was taken of. Otherwise it is taken anew: so each step clips by the norm of what all
    gradients are at the time, or were at the first step since.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = list(optimizers)
        self._norm: Tensor | None = None
        self._is_scaled = False
        self._is_captured = False
        self._unused: dict[int, _Taken] = {}  # by id of the optimizers that have not used the norm
        self._layout: NormLayout | None = None
        self._layout_params: list[Tensor] = []  # what stands for them has these placements
        self._layout_placements: list[Any] = []
        for optimizer in self._optimizers:
            optimizer._shared_norm = self

    def remove(self) -> None:
        """Each optimizer clips by the norm of its own gradients again."""
        for optimizer in self._optimizers:
            optimizer._shared_norm = None
        self._optimizers = []
        self._unused = {}
        self._norm = self._layout = None
        self._layout_params = []

    def __enter__(self) -> SharedNorm:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def norm(self, optimizer: Any, is_scaled: bool) -> Tensor:
        """The norm that this optimizer's step clips by.

        Args:
            optimizer: one of those that share.
            is_scaled: its gradients have a GradScaler's factor on them still.

        Raises:
            RuntimeError: the norm was taken for an optimizer whose gradients are scaled otherwise.
            ValueError, TypeError: a gradient has no norm, as :func:`shardops.grad_norm`.
        """
        taken = self._unused.pop(id(optimizer), None)
        # What a CUDA graph records has a value at replays only, and what is outside of it is gone by then.
        is_captured = is_capturing()
        if taken is None or is_captured != self._is_captured or not taken.are_of(optimizer):
            self._unused = {}
            self._norm = self._take()
            self._is_scaled, self._is_captured = is_scaled, is_captured
            self._unused = {
                id(other): _Taken(other)
                for other in self._optimizers
                if other is not optimizer and other.max_grad_norm is not None
            }
        elif is_scaled != self._is_scaled:
            states = ("unscaled", "scaled")
            raise RuntimeError(
                f"the gradients of this optimizer are {states[is_scaled]}, those of an optimizer that shares its norm "
                f"are {states[self._is_scaled]}; call GradScaler.unscale_ for all of them before the first step, or "
                "for none"
            )
        norm = self._norm
        assert norm is not None
        if not self._unused:
            self._norm = None
        return norm

    def _take(self) -> Tensor:
        owners = {id(param): optimizer for optimizer in self._optimizers for param in _params(optimizer)}
        params = list({id(param): param for optimizer in self._optimizers for param in _params(optimizer)}.values())
        grads = [param.grad for param in params]
        # A gradient says how it is sharded; which FSDP1 group a plain one belongs to, its parameter says.
        stands: list[Any] = [
            grad if grad is not None and hasattr(param, "_local_tensor") else param
            for param, grad in zip(params, grads, strict=True)
        ]
        placements = [(getattr(x, "device_mesh", None), getattr(x, "placements", None)) for x in stands]
        settings = tuple(map(_settings, self._optimizers))
        if (
            self._layout is None
            or self._layout.settings != settings
            or len(params) != len(self._layout_params)
            or not all(map(is_, params, self._layout_params))
            or placements != self._layout_placements
        ):
            all_groups = {id(optimizer): norm_groups(optimizer) for optimizer in self._optimizers}
            group_of = {
                id(stand): all_groups[id(owners[id(param)])][1](param)
                for param, stand in zip(params, stands, strict=True)
            }
            groups = dict.fromkeys(group for found, _ in all_groups.values() for group in found)
            self._layout = NormLayout(stands, list(groups), lambda stand: group_of[id(stand)], settings)
            self._layout_params, self._layout_placements = params, placements
        backends = {optimizer.backend for optimizer in self._optimizers}
        return self._layout.norm(
            [None if grad is None else local_gradient(grad) for grad in grads],
            # Backends have the same bits; a name that only some of the optimizers ask for is not the others'.
            backend=backends.pop() if len(backends) == 1 else None,
        )
