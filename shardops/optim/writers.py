"""Writers of parameters whom no version counter betrays, and how they are found all the same.

torch's ``_foreach`` and fused functions move no version counter of a DTensor, nor do writes into what
``model.state_dict()`` returns (``torch.distributed.checkpoint.load`` fills it in place). Other optimizers are seen by a
hook on their steps. What a state dict exposed is compared with itself later, by fingerprints.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# Elements whose patterns are summed together; what is computed on the way stays in a cache.
_CHUNK = 1 << 18


@functools.cache
def follow_other_optimizers() -> None:
    """From now on a step of an optimizer that is not ours moves the version counters of its DTensors."""
    register_optimizer_step_pre_hook(_note)
    register_optimizer_step_post_hook(_bump)


# Optimizer whose step is under way -> id of a DTensor -> its version before.
_before: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def _sharded(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "_local_tensor")]


def _is_ours(optimizer: Any) -> bool:
    return hasattr(optimizer, "_tracker")  # it moves the versions of what it has written itself


def _note(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _is_ours(optimizer):
        _before[optimizer] = {id(p): p._version for p in _sharded(optimizer)}


def _bump(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _is_ours(optimizer):
        return
    # Versions that moved need no help: they were written openly, or by one of ours inside a container of optimizers.
    # Such a container may have begun its step before the hooks were there, and has noted nothing.
    before = _before.pop(optimizer, {})
    torch.autograd.graph.increment_version(
        [p for p in _sharded(optimizer) if p.grad is not None and before.get(id(p)) == p._version]
    )


@torch.no_grad()
def fingerprint(local: Tensor) -> Tensor:
    """Two sums over the 16-bit (8-bit) patterns of a tensor, one weighted by position; int64 ``[2]``.

    Made and compared on the tensor's device, without a sync.
    """
    patterns = local.contiguous().view(-1)
    patterns = patterns if patterns.dtype.itemsize == 1 else patterns.view(torch.int16)
    weights = torch.arange(1, min(_CHUNK, patterns.numel()) + 1, dtype=torch.int64, device=local.device)
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    for index, chunk in enumerate(patterns.split(_CHUNK)):  # type: ignore[no-untyped-call]
        wide = chunk.long()
        plain = wide.sum()
        weighted = (wide * weights[: wide.numel()]).sum()
        sums += torch.stack((plain * (2 * index + 1), weighted))
    return sums
