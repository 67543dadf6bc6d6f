"""State dicts: loading without torch's casts, states from other modes, and what FSDP1 can gather.

``Optimizer.load_state_dict`` casts every state but ``step`` to the parameter's dtype, through a function that it calls
by class name. So states pass it inside opaque holders, and are placed here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .options import check_group
from .state import (
    MOMENT_KEYS,
    Group,
    State,
    create_state,
    fp32_copy,
    is_fsdp1,
    join_master,
    master_key,
    master_storage,
    split_master,
    zeros_like,
)

logger = logging.getLogger("shardops")

# Dtypes of the states that are placed on load; the two master forms are converted, if need be, at the next step.
_STATE_DTYPES = dict.fromkeys((*MOMENT_KEYS, "master_param"), torch.float32) | {"remainder": torch.bfloat16}
# These say how this optimizer stores; a loaded group does not change them.
_OWN_OPTIONS = ("master_weights", "state_dtype")


class _Holder:
    """Carries a value through ``Optimizer.load_state_dict``, which returns what it does not know untouched."""

    def __init__(self, value: Any) -> None:
        self.value = value


@contextlib.contextmanager
def uncast_loading(optimizer: Any) -> Iterator[None]:
    """Around ``Optimizer.load_state_dict``: states arrive in their saved dtypes, on the parameter's device."""
    own = [{name: group[name] for name in _OWN_OPTIONS} for group in optimizer.param_groups]
    current = {(id(p), name): id(value) for p, state in optimizer.state.items() for name, value in state.items()}

    def wrap(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        _check_loadable(optimizer, state_dict)
        state = {
            key: {name: _Holder(value) for name, value in value.items()} if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def unwrap(_: Any) -> None:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)
            for param in group["params"]:
                if param in optimizer.state:
                    held = optimizer.state[param]
                    # Copied, so that no two optimizers train on one state, unless it is this one's own already.
                    optimizer.state[param] = {
                        name: _placed(param, name, h.value, copy=current.get((id(param), name)) != id(h.value))
                        for name, h in held.items()
                    }
        optimizer._tracker.versions.clear()  # weights and states were saved together, whichever is loaded first

    # Ours is the last pre-hook and the first post-hook, so that the user's hooks see plain states.
    handles = [
        optimizer.register_load_state_dict_pre_hook(wrap),
        optimizer.register_load_state_dict_post_hook(unwrap, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_loadable(optimizer: Any, state_dict: dict[str, Any]) -> None:
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state dict has param groups of {saved_sizes} parameters, this optimizer of {sizes}; "
            "build the optimizer over the same parameters in the same groups as the saved one"
        )
    for group, saved_group in zip(groups, saved_groups, strict=True):
        check_group({**group, **saved_group, **{name: group[name] for name in _OWN_OPTIONS}})
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name in _STATE_DTYPES and not _fits(param, value):
                    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise ValueError(
                        f"state {name!r} of parameter {key!r} is {shape}, the parameter has shape "
                        f"{tuple(param.shape)}; load the state of the same model, sharded alike or through "
                        "torch.distributed.checkpoint"
                    )
                if not _is_readable(name, value):
                    found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                    raise ValueError(
                        f"state {name!r} of parameter {key!r} is {found}, which this optimizer cannot read; "
                        "load a state of its own, or of torch.optim.Adam or AdamW"
                    )


def _fits(param: Tensor, value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    local = getattr(param, "_local_tensor", param)
    return value.shape == param.shape or value.shape == local.shape


def _is_readable(name: str, value: Any) -> bool:
    if name == "step":
        return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if name == "remainder":  # 16 bits: another dtype would be cast through a float
        return bool(value.dtype == torch.bfloat16)
    return name not in _STATE_DTYPES or bool(value.is_floating_point())


def _placed(param: Tensor, name: str, value: Any, copy: bool) -> Any:
    """A saved state as this parameter's: its device, memory order and sharding; dtypes as ``_STATE_DTYPES``."""
    if name not in _STATE_DTYPES:
        if name == "step":  # copied: the counter moves into the flat buffer
            return torch.as_tensor(value, dtype=torch.float32).detach().clone().reshape(())
        return value
    dtype = _STATE_DTYPES[name]
    is_sharded = hasattr(param, "_local_tensor")
    if is_sharded and not hasattr(value, "_local_tensor"):
        value = _distributed(param, value)
    elif not is_sharded and hasattr(value, "_local_tensor"):
        value = value.full_tensor()
    local, local_value = getattr(param, "_local_tensor", param), getattr(value, "_local_tensor", value)
    if local.stride() == local_value.stride():
        return value.detach().to(device=param.device, dtype=dtype, copy=copy)
    ordered = zeros_like(param, dtype)
    ordered.copy_(value.detach())
    return ordered


def _distributed(param: Any, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    if value.shape == param._local_tensor.shape and value.shape != param.shape:
        return DTensor.from_local(
            value.to(param.device), mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)


def complete_state(param: Tensor, state: State, group: Group) -> None:
    """Brings a loaded state to this group's mode: what is missing is made, another mode's master is converted.

    Only now, before a step: the parameter's own values take part, and may be loaded after the optimizer's.
    """
    for key, value in state.items():
        if key in _STATE_DTYPES and value.device != param.device:  # the model was moved after its states were made
            state[key] = value.to(param.device)
    storage = master_storage(param, group)
    wanted = master_key(storage)
    found = next((key for key in ("remainder", "master_param") if key in state), None)
    if wanted != found and found is not None:
        _say_once(f"states keep master weights as {found!r}; converting to {wanted or 'the parameter itself'!r}")
    if wanted == "remainder" and "remainder" not in state:
        master = state.get("master_param")
        state["remainder"] = zeros_like(param, torch.bfloat16) if master is None else split_master(param, master)
    elif wanted == "master_param" and "master_param" not in state:
        remainder = state.get("remainder")
        exact = remainder is not None and param.dtype == torch.bfloat16
        state["master_param"] = join_master(param, remainder) if exact else fp32_copy(param)  # type: ignore[arg-type]
    for key in ("remainder", "master_param"):
        if key != wanted:
            state.pop(key, None)
    if not group["amsgrad"]:
        state.pop("max_exp_avg_sq", None)
    if all(key in state for key in ("step", "exp_avg", "exp_avg_sq")) and (
        "max_exp_avg_sq" in state or not group["amsgrad"]
    ):
        return
    for key, value in create_state(param, group).items():
        state.setdefault(key, value)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def exported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with remainders of FSDP1 parameters given as fp32 masters.

    FSDP1 gathers the states of a parameter into one buffer and wants one dtype for all of them; a remainder beside fp32
    moments is refused. Loading splits the master again, bit for bit.
    """
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], packed["params"], strict=True):
            state = state_dict["state"].get(key, {})
            if "remainder" in state and is_fsdp1(param):
                master = join_master(param, state["remainder"])
                kept = {name: value for name, value in state.items() if name != "remainder"}
                state_dict["state"][key] = {**kept, "master_param": master}
    return state_dict
