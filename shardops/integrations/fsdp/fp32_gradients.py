"""fp32 gradients for bf16 and fp16 parameters: what FSDP2 reduced, before it rounds that to the parameter's dtype.

FSDP2 refuses an fp32 ``.grad`` on a low-precision parameter. Its all-reduce hook sees the group's flat fp32 buffer, and
each parameter's post-accumulate-grad hook runs when ``.grad`` is a rounded view of it: there the fp32 view is hung on
``.grad``. The buffer, 4 bytes an element, lives as long as the gradients do, beside their 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...gradients import ATTRIBUTE, accumulate_fp32, attach_fp32
from . import torch_fsdp
from .torch_fsdp import Owner


class GroupGradients:
    """The hooks of one FSDP group, for all optimizers that step its parameters by fp32 gradients.

    Attributes:
        members: the group's parameters, in its order.
        users: these optimizers.
    """

    def __init__(self, members: Sequence[Owner]) -> None:
        self.members = list(members)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._group = members[0].group
        self._theirs: Callable[[Tensor], None] | None = self._group._all_reduce_hook
        self._hook = self._all_reduced
        self._group._all_reduce_hook = self._hook
        self._handles = [
            member.param.register_post_accumulate_grad_hook(self._accumulated(member.fsdp_param))
            for member in members
            if member.param.requires_grad
        ]
        # Of the reduction under way: its buffer, and how much of that was handed out.
        self._reduced: Tensor | None = None
        self._offset = 0

    def is_of(self, members: Sequence[Owner]) -> bool:
        """Whether these are the group's parameters."""
        return self._group is members[0].group

    def is_in_place(self) -> bool:
        """Whether the hooks are still those of the group and of its parameters."""
        hooks = [getattr(member.param, "_post_accumulate_grad_hooks", None) or {} for member in self.members]
        trainable = [found for member, found in zip(self.members, hooks, strict=True) if member.param.requires_grad]
        return (
            self._group._all_reduce_hook is self._hook
            and len(trainable) == len(self._handles)
            and all(handle.id in found for handle, found in zip(self._handles, trainable, strict=True))
        )

    def is_pending(self) -> bool:
        """Whether a reduction's fp32 values have not all been handed out."""
        return self._reduced is not None

    def release(self, user: Any = None) -> None:
        """Takes the hooks away if no optimizer but this one uses them."""
        if user is not None:
            self.users.discard(user)
        if not list(self.users):  # a length would count those that are just going
            self.remove()

    def remove(self) -> None:
        """Takes the hooks away; a hook of the user's is put back."""
        if self._group._all_reduce_hook is self._hook:
            self._group._all_reduce_hook = self._theirs
        for handle in self._handles:
            handle.remove()

    def _all_reduced(self, reduce_output: Tensor) -> None:
        if self._theirs is not None:
            self._theirs(reduce_output)
        self._reduced = reduce_output if reduce_output.dtype == torch.float32 else None
        self._offset = 0

    def _accumulated(self, fsdp_param: Any) -> Callable[[Any], None]:
        @torch.no_grad()
        def hook(param: Any) -> None:
            reduced, grad = self._reduced, param.grad
            if reduced is None:
                return
            # The parameters that got a gradient come in the group's order, each with its padded shard.
            size, stride = fsdp_param.sharded_size, fsdp_param.contiguous_sharded_stride
            values = reduced.as_strided(size, stride, self._offset)
            self._offset += fsdp_param.padded_sharded_param_size.numel()
            if self._offset == reduced.numel():
                self._reduced = None  # all handed out
            if grad is None:  # a hook before ours has stepped by it and cleared it
                return
            if hasattr(grad, ATTRIBUTE):
                accumulate_fp32(grad, values)
            elif grad._local_tensor._version == 0:  # else an earlier backward's, from before we were plugged in
                attach_fp32(grad, values)

        return hook


def gradients_of(members: Sequence[Owner], user: Any) -> GroupGradients:
    """The hooks of a group, hung there for an optimizer unless another one has them there already.

    Two sets of hooks would take one gradient for two.
    """
    found = getattr(members[0].group._all_reduce_hook, "__self__", None)
    if not isinstance(found, GroupGradients) or not found.is_in_place():
        if isinstance(found, GroupGradients):  # some of the parameters were replaced since
            found.remove()
        found = GroupGradients(members)
    found.users.add(user)
    return found


def release_all(gradients: Sequence[GroupGradients]) -> None:
    """When an optimizer that used these has gone."""
    for each in gradients:
        each.release()


def why_not(owner: Owner) -> str | None:
    """Why a low-precision parameter's gradients cannot be had in fp32; None if they can."""
    policy = owner.fsdp_param.mp_policy
    if policy.reduce_dtype != torch.float32:
        reduced = policy.reduce_dtype or policy.param_dtype or owner.param.dtype
        return f"gradients are reduced in {torch_fsdp.name_of(reduced)}: set MixedPrecisionPolicy(reduce_dtype=float32)"
    if owner.fsdp_param.offload_to_cpu:
        return "CPU offload: gradients arrive on the CPU rounded"
    if owner.group._all_reduce_hook_stream is not None:
        return "the group's all-reduce hook runs in a stream of the user's"
    return None
