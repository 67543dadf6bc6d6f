"""enable_gradient_release: parameters are stepped in backward, so that never all gradients are in memory together."""

from __future__ import annotations

import gc
import math
import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .integrations.fsdp import release as fsdp_release
from .optim import FusedShardedAdam
from .optim.deliveries import Delivery
from .optim.options import check_max_grad_norm
from .optim.release import GradientRelease

__all__ = ["GradientRelease", "enable_gradient_release"]


def enable_gradient_release(
    model: nn.Module,
    optimizer: FusedShardedAdam,
    *,
    clip_grad_value: float | None = None,
    max_grad_norm: float | None = None,
) -> GradientRelease:
    """Has backward step each parameter as soon as its gradient is there, and free that gradient at once.

    A plain parameter is stepped by itself; under FSDP2 (HSDP, also with tensor parallelism) a whole group, once its
    reduction has delivered, and the flat buffer of its gradients goes too. So of the sharded gradients those of one
    group exist at a time (HSDP: of two), of plain ones those that one node of autograd makes. FSDP2 itself keeps
    unsharded gradients of one group as before; a model that was compiled as a whole hands over all of a graph's
    gradients together: compile block by block.

    Parameters and states become what ordinary steps make of them, bit for bit. What changes:

    - ``optimizer.step()`` ends an iteration and is called as before, once after each backward; gradients that are still
      there (set by hand, of parameters unfrozen since, or that FSDP2 does not shard in a model it does) are stepped by
      then. Step hooks run around it, after the updates, and see no ``.grad``; nor does anyone else who looks, clips or
      reduces between backward and ``step``: ``clip_grad_norm_`` there clips nothing.
    - Options count as they are in backward. A learning rate that changes between backward and ``step`` raises.
    - Gradients cannot be accumulated: the second one of a parameter raises before anything is written by it. FSDP2's
      own accumulation (``set_requires_gradient_sync(False)``) works: it holds unsharded gradients, and reduces once.
    - A parameter that is read in the forward past autograd (``.data``, a custom function that does not save it through
      ``save_for_backward``) and used in backward after its gradient is complete is found changed.
    - With ``state_dtype="int8"`` gradients that are not finite skip their parameter or group only, on all its ranks
      (one all-reduce of a scalar each); ``skipped_steps`` counts iterations in which any was skipped.

    States are made here, for parameters that have none and are not on the meta device; for others in backward.

    Args:
        model: the root module, with all of the optimizer's parameters.
        optimizer: steps them; it must not clip by a norm itself. Several optimizers may each be enabled for a model.
        clip_grad_value: gradients are clamped to ``[-clip_grad_value, clip_grad_value]`` in place before they are
            stepped by, as ``torch.nn.utils.clip_grad_value_``.
        max_grad_norm: gradients are multiplied by ``clamp(max_grad_norm / (norm + 1e-6), max=1)`` with the global norm
            of the iteration BEFORE: that of this one is known only when all have been stepped. The first iteration is
            not clipped, and a sudden large gradient is clipped one iteration late. A norm of 0, or one that is not
            finite, is passed over: the last one that was neither counts. One all-reduce in ``step``, where all ranks
            take part; ``process_group`` as for the optimizer's own. ``float("inf")`` measures only.

    Returns:
        The handle: ``remove()``, or the end of a ``with`` block, puts everything back as it was;
        ``last_grad_norm`` is the norm of the last iteration. The optimizer's own attribute of that name stays as it is.

    Raises:
        TypeError: the optimizer is not a FusedShardedAdam; a limit that is not a number.
        ValueError: DistributedDataParallel (at the first backward too) or FSDP1; an optimizer with ``max_grad_norm``, a
            shared norm, or enabled already; parameters that are not the model's or have a gradient; both limits, or one
            outside its range.
        RuntimeError: in backward: a second gradient; a CUDA graph is captured; FSDP2 groups that another optimizer
            shares without gradient release; ``plug_in(fp32_gradients=True)`` after this call. In ``step``: a GradScaler
            calls it (found only then: backward has stepped by scaled gradients).
    """
    if not isinstance(optimizer, FusedShardedAdam):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; gradients are released by FusedShardedAdam(W): if it "
            "wraps one, pass that, as wrapper.optimizer"
        )
    _check_limits(clip_grad_value, max_grad_norm)
    if optimizer._release is not None:
        raise ValueError("the optimizer releases gradients already; call remove() on its handle first")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _check_not_ddp(params)
    fsdp_release.check_model(model, params)
    for param in params:
        if param.grad is not None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has a gradient, to which the next one would be added; call "
                "optimizer.step() and zero_grad() first"
            )

    def deliver(release: GradientRelease, new: list[Tensor]) -> list[Delivery]:
        return fsdp_release.deliveries(release, model, new)

    def confirm() -> None:  # it may have been wrapped since
        _check_not_ddp(params)

    release = GradientRelease(optimizer, deliver, confirm, clip_grad_value, max_grad_norm)
    optimizer._release = release
    return release


def _check_limits(clip_grad_value: Any, max_grad_norm: Any) -> None:
    check_max_grad_norm(max_grad_norm)
    if clip_grad_value is None:
        return
    if isinstance(clip_grad_value, bool) or not isinstance(clip_grad_value, numbers.Real):
        raise TypeError(f"clip_grad_value is {clip_grad_value!r}; it is a number, or None for no clipping")
    if math.isnan(clip_grad_value) or clip_grad_value < 0.0:
        raise ValueError(f"clip_grad_value is {clip_grad_value}; it is at least 0, or None for no clipping")
    if max_grad_norm is not None:
        raise ValueError(
            f"clip_grad_value is {clip_grad_value} and max_grad_norm is {max_grad_norm}; which norm would be meant is "
            "not clear: give one of them"
        )


def _check_not_ddp(params: Sequence[Tensor]) -> None:
    """Raises ValueError if a DistributedDataParallel reduces gradients of these parameters, which do not tell."""
    held = set(map(id, params))
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    if any(id(param) in held for each in found for param in each.parameters()):
        raise ValueError(
            "the model is under DistributedDataParallel, which reduces gradients after they were accumulated, when "
            "they would have been stepped by and freed: each rank would go its own way. Use fully_shard (FSDP2), or "
            "the replicate that is built on it, in place of DistributedDataParallel"
        )
