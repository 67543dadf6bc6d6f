"""Gradient release under FSDP2: a group is stepped as a whole once its reduce-scatter (HSDP: all-reduce) has delivered.

FSDP2 hands a group's gradients out one by one, as views of one flat buffer, each followed by its parameter's
post-accumulate-grad hooks, in the stream of the reduction. With the last of them all are there; stepped and cleared at
once, nobody holds the buffer when FSDP2 returns from the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...gradients import ATTRIBUTE
from ...optim.deliveries import Delivery, release_of
from ...optim.like import is_fsdp1
from ...optim.release import GradientRelease
from . import torch_fsdp
from .fp32_gradients import GroupGradients
from .torch_fsdp import Owner


class _Reductions:
    """What a model's groups share: which of them reduced last. FSDP2 keeps its flat buffer, under HSDP, until the end
    of backward.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def done(self, group: Any) -> None:
        """After a group was stepped, in the stream of its reduction."""
        if group.device.type != "cpu":
            # The buffer comes from the reduce-scatter stream and would be given out there again while the step,
            # in the all-reduce stream, still reads it: parameters do not hold it until the end of backward any more.
            stream = group.device_handle.current_stream()
            if stream != group.comm_ctx.reduce_scatter_stream:
                group.comm_ctx.reduce_scatter_stream.wait_stream(stream)
        last, self._last = self._last, group
        if last is not None and last is not group and getattr(last, "_all_reduce_state", None) is not None:
            last._all_reduce_state = None  # kept from being given out before its all-reduce is over: it is


class GroupDelivery(Delivery):
    """The hooks of one FSDP group."""

    def __init__(
        self, release: GradientRelease, members: Sequence[Owner], params: Sequence[Tensor], reductions: _Reductions
    ) -> None:
        super().__init__(release, params)
        self._members = {id(member.param): member for member in members}
        ours = set(map(id, params))
        self._others = [member for member in members if id(member.param) not in ours]
        self._group = members[0].group
        self._reductions = reductions
        # Of the reduction under way: its flat buffer, how much of that was handed out, and whose gradients have come.
        self._buffer: Tensor | None = None
        self._offset = 0
        self._arrived: list[Tensor] = []

    def hooked(self) -> list[Tensor]:
        """All of the group's: with the last of them it is complete, whoever steps that one."""
        return [member.param for member in self._members.values()]

    def check(self) -> None:
        """Raises RuntimeError if the gradient of one of the group's parameters would keep all of them in memory."""
        for member in self._others:
            if member.param.requires_grad and release_of(member.param) is None:
                raise RuntimeError(
                    f"{member.label} is in one FSDP2 group with parameters that are stepped in backward, and is not: "
                    "its gradient would keep those of all of them in memory. Put it in a group of its own, or enable "
                    "gradient release for its optimizer too"
                )

    def arrived(self, param: Any) -> None:
        release, grad = self.release, param.grad
        if release is None or (grad is None and self._buffer is None):
            return
        member = self._members[id(param)]
        if grad is not None:  # else another release has stepped by it
            try:
                self._take(release, member, grad._local_tensor)
            except BaseException:
                self._forget()
                raise
        self._offset += member.fsdp_param.padded_sharded_param_size.numel()
        assert self._buffer is not None
        if self._offset == self._buffer.numel():
            params = self._arrived
            self._forget()
            if params:
                release.step_by(params, self)
            self._reductions.done(self._group)

    def _forget(self) -> None:
        self._buffer, self._offset, self._arrived = None, 0, []

    def _take(self, release: GradientRelease, member: Owner, local: Tensor) -> None:
        """Notes that a gradient has come.

        Raises:
            RuntimeError: it is not the first one, or its float32 values are still missing.
        """
        param = member.param
        is_ours = any(param is other for other in self.params)
        if is_ours:
            release.check_unstepped([param])
        if local._base is not None and local._base is not self._buffer:
            self._buffer, self._offset, self._arrived = local._base, 0, []
        if local._base is None or local.storage_offset() != self._offset:
            raise RuntimeError(
                f"{member.label} had a gradient before this backward, to which FSDP2 has added: under gradient release "
                "a parameter is stepped by one gradient; call optimizer.zero_grad() before backward"
            )
        found = getattr(self._group._all_reduce_hook, "__self__", None)
        if isinstance(found, GroupGradients) and found.is_pending() and not hasattr(param.grad, ATTRIBUTE):
            raise RuntimeError(
                "plug_in(fp32_gradients=True) came after enable_gradient_release, so that a parameter would be stepped "
                "before it has its float32 gradient: call remove() on the handle, plug_in, then enable_gradient_release"
            )
        if is_ours:
            self._arrived.append(param)


def deliveries(release: GradientRelease, model: nn.Module, params: Sequence[Tensor]) -> list[Delivery]:
    """What delivers the gradients of these parameters of a model.

    Where FSDP2 shards a part of a model, parameters that it does not shard are in none: whoever reduces their gradients
    does so after backward, and ``optimizer.step()`` steps them.
    """
    groups = torch_fsdp.groups_with(params)
    if not groups and not any(True for _ in torch_fsdp.owners(model)):
        return [Delivery(release, [param]) for param in params]
    wanted = set(map(id, params))
    reductions = _Reductions()
    found: list[Delivery] = []
    for members in groups:
        ours = [member.param for member in members if id(member.param) in wanted]
        if members[0].fsdp_param.offload_to_cpu:  # each gradient arrives as a copy of its own
            found += [Delivery(release, [param]) for param in ours]
        else:
            found.append(GroupDelivery(release, members, ours, reductions))
    return found


def check_model(model: nn.Module, params: Sequence[Tensor]) -> None:
    """Raises ValueError unless all parameters are the model's, and none of them FSDP1's."""
    theirs = {id(param) for param in model.parameters()} | {id(owner.param) for owner in torch_fsdp.owners(model)}
    strangers = [param for param in params if id(param) not in theirs]
    if strangers:
        raise ValueError(
            f"{len(strangers)} of the optimizer's {len(params)} parameters are not the model's, one of shape "
            f"{tuple(strangers[0].shape)}: pass the whole model, sharded before the optimizer was built over "
            "model.parameters()"
        )
    if any(map(is_fsdp1, params)):
        raise ValueError(
            "the model is sharded by FSDP1, which reduces gradients after they were accumulated, and uses the flat "
            "parameters again before its backward is over: shard it by fully_shard (FSDP2)"
        )
