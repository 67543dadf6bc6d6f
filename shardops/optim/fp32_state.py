"""A model's state dict with the exact fp32 masters in place of the parameters, and loading it.

It is the same whatever the parameters' dtype and the masters' storage, and so carries weights between them. The
parameters are found in the model by identity, under the keys that the model's own state dict has for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import local_tensor
from ..ops._checks import FLOAT_DTYPES
from ..plan import Entry
from ..shadow import versions
from .checkpoint import _distributed
from .like import is_fsdp1
from .masters import master_of, write_master
from .tracking import _wants_state


@torch.no_grad()
def fp32_state_dict(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """See ``FusedShardedAdam.fp32_state_dict``."""
    trained = _trained_by_key(optimizer, model)
    result: dict[str, Any] = model.state_dict()
    optimizer._tracker.follow_writes(optimizer)
    copies: dict[int, Tensor] = {}  # tied weights share one, as in the model's own state dict
    for key, param in trained.items():
        if id(param) not in copies:
            state = optimizer.state.get(param, {})
            master = master_of(param, state)
            is_own = param.dtype == torch.float32 or master is state.get("master_param")
            copies[id(param)] = master.clone() if is_own else master
        result[key] = copies[id(param)]
    return result


@torch.no_grad()
def load_fp32_state_dict(optimizer: Any, model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """See ``FusedShardedAdam.load_fp32_state_dict``."""
    trained = _trained_by_key(optimizer, model)
    targets = model.state_dict(keep_vars=True)
    _check_keys(targets, state_dict, strict)
    for key, target in targets.items():
        if key in state_dict and isinstance(target, Tensor):
            _check_value(key, target, state_dict[key], is_trained=key in trained)

    _load_others(model, state_dict, {key: targets[key] for key in targets if key in state_dict and key not in trained})
    tracker = optimizer._tracker
    tracker.plan(optimizer, tracker._device_steps)
    tracker.follow_writes(optimizer)  # finds casts and moves, which the plan alone does not
    entries = {id(entry.param): entry for entry in tracker.plan(optimizer, tracker._device_steps).entries}
    # A tied weight is written once, with the value of its last name, as torch's load leaves it.
    values = {id(param): state_dict[key] for key, param in trained.items() if key in state_dict}
    for identity, value in values.items():
        _write(entries[identity], value)
    _record(tracker, [entries[identity].param for identity in values])


def _trained_by_key(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """Key of the model's state dict -> parameter with a master; a tied one under all of its keys."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(map(is_fsdp1, [*params, *model.parameters()])):
        raise TypeError(
            f"{type(model).__name__} has FSDP1 modules, whose parameters are slices of flat ones with state dicts "
            "of FSDP's own; use FSDP.state_dict(model) and FSDP.optim_state_dict(model, optimizer), which has the "
            "masters, or shard with fully_shard (FSDP2)"
        )
    if any(param.is_meta for param in params):
        raise ValueError(
            "the optimizer has parameters on the meta device, which hold no values; "
            "materialise the model first, with model.to_empty(device=...)"
        )
    trained = {id(param): param for param in params if _wants_state(optimizer, param)}
    targets = model.state_dict(keep_vars=True)  # the very parameters; FSDP2 reshards them first
    found = {key: trained[id(target)] for key, target in targets.items() if id(target) in trained}
    missing = trained.keys() - {id(param) for param in found.values()}
    if missing:
        shapes = [tuple(param.shape) for identity, param in trained.items() if identity in missing]
        raise ValueError(
            f"{len(shapes)} parameters of this optimizer, of shapes {shapes[:5]}, are not in the state dict of the "
            f"{type(model).__name__}; pass the model that the optimizer was built over, and several ones as "
            "torch.nn.ModuleList([...])"
        )
    return found


def _check_keys(targets: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> None:
    missing = [key for key in targets if key not in state_dict]
    unexpected = [key for key in state_dict if key not in targets]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the state dict lacks {len(missing)} keys of the model, {missing[:5]}, and has {len(unexpected)} that the "
            f"model has not, {unexpected[:5]}; give both the same prefixes (DDP's 'module.', torch.compile's "
            "'_orig_mod.'), or pass strict=False to load what they share"
        )


def _check_value(key: str, target: Any, value: Any, is_trained: bool) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{key!r} is {value!r}, a {type(value).__name__}; the model has a tensor there: load a tensor")
    if is_trained and value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{key!r} is {value.dtype}, which does not convert to a float32 master exactly; "
            "give float32, bfloat16 or float16, for instance value.float()"
        )
    if not nn.parameter.is_lazy(target) and value.shape != target.shape:
        raise ValueError(
            f"{key!r} has shape {tuple(value.shape)}, the model's {tuple(target.shape)}; load the state dict of the "
            "same model, for a sharded parameter its full tensor or a DTensor of its placements"
        )
    if not hasattr(value, "_local_tensor"):
        return
    if not hasattr(target, "_local_tensor"):
        raise ValueError(
            f"{key!r} is a DTensor, the model's is a plain tensor; gather it on all ranks with value.full_tensor()"
        )
    sharded: Any = value
    ours, theirs = (target.placements, target.device_mesh), (sharded.placements, sharded.device_mesh)
    if ours != theirs:
        raise ValueError(
            f"{key!r} has placements {theirs[0]} on {theirs[1]}, the model's {ours[0]} on {ours[1]}; "
            "pass value.redistribute(...) to the model's, or value.full_tensor()"
        )


def _load_others(model: nn.Module, state_dict: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """Buffers, extra states and parameters that the optimizer does not train, through torch's own load."""
    others: dict[str, Any] = OrderedDict()
    for key, target in targets.items():
        value = state_dict[key]
        if hasattr(target, "_local_tensor") and not hasattr(value, "_local_tensor"):
            value = _distributed(target, value)
        # Another optimizer may train it: one write, even of the same values, and that one's master is lost.
        if not isinstance(target, nn.Parameter) or not _is_equal(target, value):
            others[key] = value
    if hasattr(state_dict, "_metadata"):
        others._metadata = state_dict._metadata  # type: ignore[attr-defined]
    model.load_state_dict(others, strict=False)


def _is_equal(target: Tensor, value: Tensor) -> bool:
    """Whether the parameter has these values already, bit for bit."""
    if nn.parameter.is_lazy(target) or target.is_meta:
        return False
    ours = local_tensor(target.detach()).reshape(-1)
    theirs = local_tensor(value.detach()).to(ours.device, ours.dtype).reshape(-1)
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def _write(entry: Entry, value: Tensor) -> None:
    """Parameter and master become an fp32 value, the parameter rounded as the step rounds it."""
    if hasattr(entry.param, "_local_tensor") and not hasattr(value, "_local_tensor"):
        value = _distributed(entry.param, value)
    # In place: FSDP2's gathers and captured CUDA graphs hold these addresses.
    write_master(
        entry.param, entry.state, local_tensor(value.detach()).to(local_tensor(entry.param).device, torch.float32)
    )


def _record(tracker: Any, params: list[Tensor]) -> None:
    """What was written is the optimizer's own write, with its master: the next step takes it for nobody else's."""
    torch.autograd.graph.increment_version([param for param in params if hasattr(param, "_local_tensor")])
    exposed = []
    for param in params:
        for _, position in tracker._with_master.get(id(param), ()):
            tracker.versions[position] = versions(param)
            if tracker._exposed.pop(position, None) is not None or position in tracker._aliases:
                exposed.append(param)
    tracker.expose(exposed)  # a state dict that was handed out before still reaches them: compared from now on
