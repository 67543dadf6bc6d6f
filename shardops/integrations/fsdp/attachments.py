"""Plugs an optimizer into FSDP: which parameters send shadows, by themselves or as asked, and a report of it.

Path A: fp32 sharded parameters under a MixedPrecisionPolicy with a bf16 or fp16 ``param_dtype``. The step writes the
rounded copy that the next all-gathers send. Path B: parameters that are bf16 or fp16 themselves; the optimizer holds
their exact masters, and there is nothing to attach.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...optim import FusedShardedAdam
from ...optim.like import is_fsdp1
from ...shadow import Shadow, shadow_of
from . import elision, fp32_gradients, fsdp1, hooks, torch_fsdp
from .exposure import Exposures
from .fp32_gradients import GroupGradients
from .report import ELIDED, MASTER, MASTER_FP32, SHADOW, STOCK, Attachment, table
from .torch_fsdp import Owner

logger = logging.getLogger("shardops")


class PlugIn:
    """What an optimizer has attached to FSDP's parameters. ``print`` it to see what, and why not more.

    It follows the parameters: those that are swapped, moved, cast, materialised or loaded anew are looked at again at
    the optimizer's next step.

    Attributes:
        attachments: one for each parameter, as of the last look.
    """

    def __init__(self, optimizer: FusedShardedAdam) -> None:
        self.attachments: list[Attachment] = []
        self._optimizer = weakref.ref(optimizer)
        self._elide_copy_in = False
        self._fp32_gradients = False
        self._gradients: list[GroupGradients] = []
        weakref.finalize(optimizer, fp32_gradients.release_all, self._gradients)
        self._exposures = Exposures(optimizer)
        self._is_removed = False

    def __str__(self) -> str:
        return table(self.attachments)

    __repr__ = __str__

    def attached(self) -> list[Attachment]:
        """Those whose all-gathers send a shadow."""
        return [attachment for attachment in self.attachments if attachment.path in (SHADOW, ELIDED)]

    def refresh_shadows(self) -> None:
        """Has every shadow rounded anew from its parameter at the next all-gather.

        Needed in training mode, after writes that move no version counter: through ``.data``, by ``torch._foreach``
        functions on DTensors, by collectives and others' kernels on local tensors. All ranks that write, call.
        """
        for members in torch_fsdp.groups_with(self._params().values()):
            for owner in members:
                shadow = shadow_of(owner.local)
                if shadow is not None:
                    shadow.written = None

    def remove(self) -> None:
        """Gives FSDP its own gathers back, and attaches nothing for this optimizer again; ``plug_in`` does.

        ``attachments`` is empty afterwards.
        """
        self._is_removed = True
        params = self._params()
        for members in torch_fsdp.groups_with(params.values()):
            for owner in members:
                if id(owner.param) in params or (not owner.param.requires_grad and elision.is_of_a_buffer(owner.local)):
                    hooks.detach(owner.fsdp_param)
        self._release_gradients()
        self.attachments = []
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._shard_group_of = None
        for each in _plug_ins:  # of other optimizers some may step the same parameters: they attach again
            each._tracker.forget_plan()
        elision.release()

    def _release_gradients(self) -> None:
        for gradients in self._gradients:
            gradients.release(self._optimizer())
        self._gradients.clear()

    # ---- attaching ---------------------------------------------------------------------------------------------------

    def _params(self) -> dict[int, Any]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return {id(param): param for group in groups for param in group["params"]}

    def _look(self, model: nn.Module | None = None) -> None:
        """Attaches what can be attached now.

        Raises:
            ValueError: the optimizer holds unsharded parameters, which FSDP frees and overwrites; nothing is attached.
        """
        params = self._params()
        _check_sharded(params)
        names = {id(param): name for name, param in model.named_parameters()} if model is not None else {}
        attachments = {}
        if not (self._fp32_gradients and all(found.is_in_place() for found in self._gradients)):
            self._release_gradients()
        for members in torch_fsdp.groups_with(params.values()):
            for member, (path, why) in zip(members, self._look_at_group(members, params), strict=True):
                if id(member.param) in params or path == ELIDED:
                    name = names.get(id(member.param), member.label)
                    attachments[id(member.param)] = Attachment(name, tuple(member.param.shape), path, why)
        for index, param in enumerate(params.values()):
            if id(param) not in attachments:
                name = names.get(id(param), f"parameter {index}")
                attachments[id(param)] = Attachment(name, tuple(param.shape), *_not_of_fsdp2(param))
        self.attachments = list(attachments.values())

    def _follow_state_dicts(self) -> None:
        """Has the optimizer know of state dicts, whether or not anything is attached: masters may be exposed too."""
        params = self._params()
        self._exposures.follow([owner for members in torch_fsdp.groups_with(params.values()) for owner in members])

    def _look_at_group(self, members: Sequence[Owner], params: dict[int, Any]) -> list[tuple[str, str]]:
        if elision.is_elided(members):  # by an optimizer before this one, it may be
            return [(ELIDED, "")] * len(members)
        why_copied = ""
        if self._elide_copy_in:
            found = _why_copied(members, params)
            if found is None:
                elision.elide(members)
                return [(ELIDED, "")] * len(members)
            why_copied = found
        results = []
        for member in members:
            why = _why_stock(member, params)
            if why is None:
                if shadow_of(member.local) is None:
                    hooks.attach(member.fsdp_param, _shadow(member))
                results.append((SHADOW, why_copied))
            elif member.param.dtype in torch_fsdp.GATHERED_DTYPES and member.param.requires_grad:
                results.append(self._look_at_gradients(member, members))
            else:
                results.append((STOCK, why))
        return results

    def _look_at_gradients(self, member: Owner, members: Sequence[Owner]) -> tuple[str, str]:
        if not self._fp32_gradients:
            return MASTER, ""
        why = fp32_gradients.why_not(member)
        if why is not None:
            return MASTER, why
        if not any(found.is_of(members) for found in self._gradients):
            self._gradients.append(fp32_gradients.gradients_of(members, self._optimizer()))
        return MASTER_FP32, ""


def _shadow(owner: Owner) -> Shadow:
    size, dtype = owner.fsdp_param.padded_sharded_param_size, owner.fsdp_param.mp_policy.param_dtype
    padded = torch.zeros(size, dtype=dtype, device=owner.local.device)
    return Shadow(padded, owner.local.shape[0])


def _why_stock(owner: Owner, params: dict[int, Any]) -> str | None:
    why = torch_fsdp.why_stock(owner)
    if why is not None:
        return why
    if not owner.param.requires_grad and shadow_of(owner.local) is None:
        return "frozen: the step never writes it"
    if shadow_of(owner.local) is None and torch_fsdp.is_gather_pending(owner.group):
        return "an all-gather of it is under way: looked at again when the plan is made anew"
    return None if id(owner.param) in params else "not a parameter of this optimizer"


def _why_copied(members: Sequence[Owner], params: dict[int, Any]) -> str | None:
    """Why a group's copy-in stays; None if it can be elided."""
    if members[0].fsdp_param.shard_mesh.size() == 1:
        return "copy-in stays: a world of one copies nothing in"
    for member in members:
        why = torch_fsdp.why_stock(member)
        if why is not None:
            return f"copy-in stays: {member.label} is in the same group, and {why}"
        if member.param.requires_grad and id(member.param) not in params:
            return f"copy-in stays: {member.label} is in the same group, and another optimizer's"
    if torch_fsdp.is_gather_pending(members[0].group):
        return "copy-in stays: an all-gather of the group is under way; plug in between steps"
    return None


def _not_of_fsdp2(param: Any) -> tuple[str, str]:
    is_low = param.dtype in torch_fsdp.GATHERED_DTYPES
    if is_fsdp1(param):
        return (MASTER, "") if is_low else (STOCK, "FSDP1 gathers its flat parameter, which has no hooks: use FSDP2")
    return MASTER if is_low else STOCK, "not sharded by FSDP"


def _check_sharded(params: dict[int, Any]) -> None:
    if all(hasattr(param, "_local_tensor") for param in params.values()):
        return  # sharded ones, as they should be
    for owner in torch_fsdp.owners():
        unsharded = getattr(owner.fsdp_param, "_unsharded_param", None)
        if unsharded is not None and id(unsharded) in params:
            raise ValueError(
                f"the optimizer was given the unsharded parameter {owner.label} of shape {tuple(unsharded.shape)}: "
                "after a forward FSDP2 leaves the root's parameters gathered (with reshard_after_forward=False all of "
                "them), and it frees and overwrites them; call reshard() on each such module first, as "
                "model.reshard(), then pass model.parameters()"
            )


# ---- by itself, and as asked -----------------------------------------------------------------------------------------

_plug_ins: weakref.WeakKeyDictionary[FusedShardedAdam, PlugIn] = weakref.WeakKeyDictionary()
_disabled = 0


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within it no optimizer attaches anything by itself, so that one can compare with torch's own gathers.

    What is attached already stays, and :func:`plug_in` attaches all the same. An optimizer made within it attaches once
    its plan is made anew outside; ``plug_in_of(optimizer).remove()`` keeps it from that for good.
    """
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def plug_in_of(optimizer: FusedShardedAdam) -> PlugIn:
    """What an optimizer has attached, by itself or by :func:`plug_in`; changes nothing.

    Raises:
        TypeError: the optimizer is not a FusedShardedAdam.
    """
    _check_optimizer(optimizer)
    if optimizer not in _plug_ins:
        _plug_ins[optimizer] = PlugIn(optimizer)
    return _plug_ins[optimizer]


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, FusedShardedAdam):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}; FusedShardedAdam and FusedShardedAdamW plug into FSDP: "
            "if it wraps one, pass that, as wrapper.optimizer"
        )


def attach_by_itself(optimizer: FusedShardedAdam) -> None:
    """Registered with the optimizer: called when it is made and before its plan is built anew."""
    if not torch_fsdp.is_loaded():
        return
    plugged = plug_in_of(optimizer)
    plugged._follow_state_dicts()
    if _disabled or plugged._is_removed:
        _check_sharded(plugged._params())
    else:
        had = len(plugged.attached())
        plugged._look()
        if len(plugged.attached()) > had:
            logger.info("attached to FSDP2's all-gathers:\n%s", plugged)


def plug_in(
    model: nn.Module, optimizer: FusedShardedAdam, *, elide_copy_in: bool = False, fp32_gradients: bool = False
) -> PlugIn:
    """Plugs an optimizer into a model's FSDP, and says what could be attached to which parameter, and why not more.

    Shadows (path A) are attached without this call too, when the optimizer is made or at its next step; it is for the
    report and for what has to be asked for. Under FSDP1 it tells the optimizer which group each parameter is sharded
    over, so that ``max_grad_norm`` is right under HYBRID_SHARD and NO_SHARD as well.

    Each call states the whole wish: an option that it does not name is off from then on. To look only, use
    :func:`plug_in_of`.

    Args:
        model: its root module, sharded already.
        optimizer: built over the model's sharded parameters.
        elide_copy_in: lay the shadows of each FSDP group back to back and hand that buffer to the all-gather, so that
            nothing copies them once more. Replaces torch's ``fsdp::all_gather_copy_in`` in this process, which goes on
            as before for everything else. Groups with frozen parameters hold shadows of these too (2 bytes an element).
            The gather reads what the step writes: do not step between ``unshard(async_op=True)`` and its ``wait()``.
        fp32_gradients: step bf16 and fp16 parameters by their gradients as they were reduced in float32, before FSDP2
            rounds them to the parameter's dtype. The fp32 values stay until ``zero_grad()``, 4 bytes an element beside
            the 2 of ``.grad``. Needs ``reduce_dtype=torch.float32``.

    Returns:
        The attachments; print them.

    Raises:
        TypeError: the optimizer is not a FusedShardedAdam.
        ValueError: the optimizer holds none of the model's parameters, or unsharded ones; nothing is attached then.
    """
    _check_optimizer(optimizer)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    theirs = {id(param) for param in model.parameters()} | {id(owner.param) for owner in torch_fsdp.owners(model)}
    if held.isdisjoint(theirs):
        raise ValueError(
            f"the optimizer's {len(held)} parameters are none of the model's {len(theirs)}: shard the model first, "
            "then build the optimizer over model.parameters()"
        )
    plugged = plug_in_of(optimizer)
    _check_sharded(plugged._params())
    if plugged._elide_copy_in and not elide_copy_in:
        plugged.remove()  # the shadows' places are given up; new ones follow
    plugged._elide_copy_in, plugged._fp32_gradients, plugged._is_removed = elide_copy_in, fp32_gradients, False
    plugged._look(model)
    if any(map(is_fsdp1, plugged._params().values())):
        optimizer._shard_group_of = fsdp1.shard_group_of(model)
    optimizer._tracker.forget_plan()
    return plugged
