"""clip_grad_norm_, a drop-in for torch's over every kind of sharding; and one clipping norm over several optimizers."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .collectives import NormLayout, local_tensor
from .gradients import local_gradient, scale_fp32
from .ops._checks import FLOAT_DTYPES
from .ops.grad_norm import check_norm_type
from .optim import FusedShardedAdam
from .optim.clipping import SharedNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: ProcessGroup | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scales gradients in place so that their norm together is at most ``max_norm``; as torch's of this name.

    The norm is :func:`shardops.grad_norm`'s: one pass over the gradients, one all-reduce, no host sync; parameters may
    be on several meshes. Each gradient is multiplied by ``clamp(max_norm / (norm + 1e-6), max=1)``, a float32 device
    scalar, with the bits of ``torch.nn.utils.clip_grads_with_norm_``. (torch's ``clip_grad_norm_`` rounds norm and
    coefficient to bfloat16 or float16 if all gradients are of that dtype.)

    Args:
        parameters: whose ``.grad`` is clipped, plain or DTensors; those without one take part in the collectives. For
            none at all the norm is 0; an empty generator warns, it may have been read before.
        max_norm: largest norm that is left as it is.
        norm_type: 1, 2 or inf.
        error_if_nonfinite: raise if the norm is NaN or inf. It costs a host sync, as in torch.
        foreach: accepted for drop-in use, without effect.
        group: ranks that hold different parameters (pipeline stages, experts), or different parts of plain ones; as
            in :func:`shardops.grad_norm`. The whole parameters that FSDP1 was told to ignore would count on each rank:
            under FSDP1 the optimizer's ``max_grad_norm`` tells them apart.
        backend: of the local sums.

    Returns:
        The norm before clipping, reduced, as a plain float32 scalar on the first parameter's device, also for DTensors
        (for which torch returns a DTensor that is still to be reduced). Errors come before anything is written.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
        ValueError: another norm_type, a gradient that is a pending sum (``Partial``), a group without this rank.
        TypeError: a gradient that is not a dense tensor of float32, bfloat16 or float16.
    """
    norm_type = check_norm_type(norm_type)
    max_norm = float(max_norm)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            warnings.warn("parameters is an empty generator: nothing is clipped; was it read before?", stacklevel=3)
    all_grads = [param.grad for param in parameters]
    grads = [grad for grad in all_grads if grad is not None]
    layout = NormLayout(
        [param if grad is None else grad for param, grad in zip(parameters, all_grads, strict=True)],
        [] if group is None else [group],
    )
    read = [None if grad is None else local_gradient(grad) for grad in all_grads]
    are_fit = all(
        grad.layout == torch.strided and grad.dtype in FLOAT_DTYPES and grad.is_contiguous()
        for grad in read
        if grad is not None
    )  # else the op orders them first, or says which is not
    norm = layout.norm(read, norm_type, are_checked=are_fit, backend=backend)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients together is {float(norm)}, by which they cannot be "
            "clipped; look for the gradient that is not finite, or scale by it anyway with error_if_nonfinite=False"
        )
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(local_tensor, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), tensors in by_kind.items():
        torch._foreach_mul_(tensors, coefficient.to(device))
    # A DTensor's own count of writes does not move with its local tensor's.
    torch.autograd.graph.increment_version([grad for grad in grads if hasattr(grad, "_local_tensor")])
    scale_fp32(grads, coefficient)
    return norm


def share_grad_norm(optimizers: Sequence[FusedShardedAdam]) -> SharedNorm:
    """Has several optimizers, as one for each part of a model, clip by one norm: that over the gradients of all.

    The first that steps after a backward takes the norm, with one pass and one all-reduce, and the others use it. One
    that steps again, or whose gradients are not those that the norm was taken of, takes it anew; so all ranks step
    their optimizers in the same order, and whoever changes gradients between two steps does it on all ranks. Gradients
    of optimizers without ``max_grad_norm`` count, but are not clipped. The norm covers what the optimizers' parameters
    are when it is taken. ``last_grad_norm`` of those that do not clip stays as it is.

    Under a GradScaler, unscale the gradients of all the optimizers before the first step, or of none. If the norm is
    not finite, all that clip by it skip their step, not only the one whose gradients were not.

    Args:
        optimizers: at least one; each clips by its own ``max_grad_norm``. A copy of one does not share.

    Returns:
        A handle: ``remove()``, or the end of a ``with`` block, makes each clip by its own norm again.

    Raises:
        TypeError: not a FusedShardedAdam.
        ValueError: none at all, one twice, or one that shares a norm already.
    """
    optimizers = list(optimizers)
    if not optimizers:
        raise ValueError("optimizers is empty; pass the optimizers that are to clip by one norm")
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, FusedShardedAdam):
            raise TypeError(
                f"optimizers[{index}] is of type {type(optimizer).__name__}; a norm is shared by FusedShardedAdam(W): "
                "if it wraps one, pass that, as wrapper.optimizer"
            )
        if any(optimizer is other for other in optimizers[:index]):
            raise ValueError(f"optimizers[{index}] is listed twice; list each once")
        if optimizer._shared_norm is not None:
            raise ValueError(
                f"optimizers[{index}] shares a norm already; call remove() on the handle of share_grad_norm first"
            )
    return SharedNorm(optimizers)
