"""State dicts: loading without torch's casts, states from other modes, and what FSDP1 can gather.

``Optimizer.load_state_dict`` casts every state but ``step`` to the parameter's dtype, through a function that it calls
by class name. So states pass it inside opaque holders, and are placed here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .elements import is_dithered, salt_of
from .like import is_fsdp1, zeros_like
from .masters import KEYS, Group, State, convert_master, is_stored_as, join_master, master_storage
from .moments import (
    CODE_KEYS,
    convert_moments,
    decode,
    found_storage,
    fp32_moments,
    is_cut_by_rows,
    moment_storage,
    placed_words,
    words_shape,
)
from .options import check_group
from .state import create_state

logger = logging.getLogger("shardops")

# Dtypes that states are kept in when they are placed on load; others become the first one. Another mode's storage is
# converted at the next step.
_STATE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "exp_avg": (torch.float32, torch.bfloat16),
    "exp_avg_sq": (torch.float32, torch.bfloat16),
    "max_exp_avg_sq": (torch.float32,),
    "master_param": (torch.float32,),
    "remainder": (torch.bfloat16, torch.int8),
    "exp_avg_codes": (torch.int8,),
    "exp_avg_sq_codes": (torch.uint8,),
    "block_words": (torch.int32,),
}
# Bits of other things than a number: another dtype would be cast through a float.
_PATTERNS = ("remainder", *CODE_KEYS)
PRECISIONS = ("stored", "float32")
# Two ways each of storing the same thing.
_ALTERNATIVES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("exp_avg", "exp_avg_sq"), CODE_KEYS),
    (("master_param",), ("remainder",)),
)
# These say how this optimizer stores; a loaded group does not change them.
_OWN_OPTIONS = ("master_weights", "state_dtype")


class _Holder:
    """Carries a value through ``Optimizer.load_state_dict``, which returns what it does not know untouched."""

    def __init__(self, value: Any) -> None:
        self.value = value


@contextlib.contextmanager
def uncast_loading(optimizer: Any) -> Iterator[None]:
    """Around ``Optimizer.load_state_dict``: states arrive in their saved dtypes, on the parameter's device."""
    if optimizer._offload is not None:
        optimizer._offload.synchronize()
    own = [{name: group[name] for name in _OWN_OPTIONS} for group in optimizer.param_groups]
    current = {(id(p), name): id(value) for p, state in optimizer.state.items() for name, value in state.items()}

    def wrap(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        _check_loadable(optimizer, state_dict)
        _check_broadcast(state_dict)
        state = {
            key: {name: _Holder(value) for name, value in value.items()} if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    frame = _torch_frame("_load_optim_state_dict")
    is_full = frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False)

    def unwrap(_: Any) -> None:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)
            for param in group["params"]:
                if param in optimizer.state:
                    held = {name: h.value for name, h in optimizer.state[param].items()}
                    live = {name for name, value in held.items() if current.get((id(param), name)) == id(value)}
                    if is_full:
                        held = _without_leftovers(held, live)
                        if not is_dithered(param, group):
                            held.pop("salt", None)
                    # Copied, so that no two optimizers train on one state, unless it is this one's own already.
                    optimizer.state[param] = {
                        name: _placed(param, name, value, copy=name not in live)
                        for name, value in _in_own_blocks(param, held).items()
                    }
                    if optimizer._offload is not None:  # one parameter's at a time were on its device
                        optimizer._offload.keep(param, optimizer.state[param])
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
            state = state_dict["state"].get(key, {})
            missing = [name for name in CODE_KEYS if name not in state]
            if 0 < len(missing) < len(CODE_KEYS):
                raise ValueError(
                    f"the state of parameter {key!r} has no {' and no '.join(map(repr, missing))}, without which its "
                    "other codes cannot be read; load the whole state"
                )
            for name, value in state.items():
                if name in _STATE_DTYPES and not _fits(param, name, value):
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


def _check_broadcast(state_dict: dict[str, Any]) -> None:
    """Raises, on rank 0, where torch's ``broadcast_from_rank0`` has left the ranks with different states.

    It fills what each rank holds already, by name and in the dtype found there; the rest stays on rank 0.
    """
    frame = _torch_frame("_load_optim_state_dict")
    if frame is None or not getattr(frame.f_locals.get("info"), "broadcast_from_rank0", False):
        return
    saved = frame.f_locals.get("flatten_osd", {})  # rank 0's, empty elsewhere
    for key, state in state_dict["state"].items():
        for name, value in state.items():
            was = saved.get(f"state.{key}.{name}", value)
            is_recast = name in _PATTERNS and was.dtype != value.dtype
            if is_recast or any(name in a and any(n in state for n in b) for a, b in _ALTERNATIVES):
                raise ValueError(
                    f"the state of parameter {key!r} was saved in another mode than this optimizer's ({name!r}); "
                    "broadcast_from_rank0 hands over only what ranks already hold: load the full state dict on every "
                    "rank without it, or with the master_weights and state_dtype that it was saved with"
                )


def _without_leftovers(held: State, live: set[str]) -> State:
    """A loaded full state without what this optimizer held itself, where the saved one had nothing of that name.

    torch starts from the states of the optimizer that loads (``live``) and replaces those that were saved.
    """
    tensors = [name for name in held if name in _STATE_DTYPES]
    if live.issuperset(tensors):
        return held  # nothing was saved of this parameter; or all was written in place
    return {name: value for name, value in held.items() if name not in tensors or name not in live}


def _fits(param: Tensor, name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) in _shapes(param, name)


def _shapes(param: Tensor, name: str) -> list[tuple[int, ...]]:
    """A state's shape for the whole parameter and for this rank's part of it."""
    if name == "block_words":
        return [words_shape(param, local=False) if param.dim() else (), words_shape(param, local=True)]
    return [tuple(param.shape), tuple(getattr(param, "_local_tensor", param).shape)]


def _is_readable(name: str, value: Any) -> bool:
    if name == "step":
        return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if name == "salt":
        is_tensor = isinstance(value, Tensor)
        return value.numel() == 1 and not value.is_floating_point() if is_tensor else isinstance(value, int)
    if name in _PATTERNS:
        return value.dtype in _STATE_DTYPES[name]
    return name not in _STATE_DTYPES or bool(value.is_floating_point())


def _in_own_blocks(param: Tensor, held: State) -> State:
    """A saved state, with fp32 moments where its blocks are not those that this parameter's codes would have.

    So it is for codes of whole rows under a parameter whose rows are cut.
    """
    if "exp_avg_codes" not in held or is_cut_by_rows(param):
        return held
    values = [held[key] for key in CODE_KEYS]
    codes = [value.full_tensor() if hasattr(value, "_local_tensor") else value for value in values]
    kept = {name: value for name, value in held.items() if name not in CODE_KEYS}
    return {**kept, **dict(zip(("exp_avg", "exp_avg_sq"), decode(*(c.contiguous() for c in codes)), strict=True))}


def _placed(param: Tensor, name: str, value: Any, copy: bool) -> Any:
    """A saved state as this parameter's: its device, memory order and sharding; dtypes as ``_STATE_DTYPES``."""
    if name not in _STATE_DTYPES:
        if name in ("step", "salt"):  # copied: the counter moves into the flat buffer
            dtype = torch.float32 if name == "step" else torch.int64
            return torch.as_tensor(value, dtype=dtype).detach().clone().reshape(())
        return value
    dtypes = _STATE_DTYPES[name]
    dtype = value.dtype if value.dtype in dtypes else dtypes[0]
    is_sharded = hasattr(param, "_local_tensor")
    if is_sharded and not hasattr(value, "_local_tensor"):
        value = _distributed(param, value, name)
    elif not is_sharded and hasattr(value, "_local_tensor"):
        value = value.full_tensor()
    local, local_value = getattr(param, "_local_tensor", param), getattr(value, "_local_tensor", value)
    if name == "block_words":
        return value.detach().to(device=param.device, copy=copy, memory_format=torch.contiguous_format)
    if local.stride() == local_value.stride():
        return value.detach().to(device=param.device, dtype=dtype, copy=copy)
    ordered = zeros_like(param, dtype)
    ordered.copy_(value.detach())
    return ordered


def _distributed(param: Any, value: Tensor, name: str = "") -> Tensor:
    """A plain tensor, the whole or this rank's part, as a DTensor of the parameter's placements."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    whole, part = _shapes(param, name)
    value = value.to(param.device)
    if value.shape == part and part != whole:
        if name == "block_words":
            return placed_words(param, value)
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def complete_state(param: Tensor, state: State, group: Group, salt: int, is_offloaded: bool) -> None:
    """Brings a loaded state to this group's mode: what is missing is made, another mode's storage is converted.

    Only now, before a step: the parameter's own values take part, and may be loaded after the optimizer's.
    """
    storage = master_storage(param, group)
    found, wanted = found_storage(state), moment_storage(param, group)
    is_as_wanted = is_stored_as(state, storage) and found in (None, wanted)
    for key, value in state.items():
        # The model was moved after its states were made; or offloaded ones are converted beside it.
        if key in _STATE_DTYPES and value.device != param.device and not (is_offloaded and is_as_wanted):
            state[key] = value.to(param.device)
    if not is_stored_as(state, storage):
        found_key = next((key for key in ("remainder", "master_param") if key in state), None)
        if found_key is not None:
            wanted_key = KEYS[storage] or "the parameter itself"
            _say_once(f"states keep master weights as {found_key!r}; converting to {wanted_key!r} ({storage})")
        convert_master(param, state, storage)
    if found is not None and found != wanted:
        _say_once(f"states keep moments as {found}; converting to {wanted}")
        convert_moments(param, state, wanted)
    if not group["amsgrad"]:
        state.pop("max_exp_avg_sq", None)
    if not is_dithered(param, group):
        state.pop("salt", None)
    made = create_state(param, group, salt) if found is None or not _is_complete(param, state, group) else {}
    for key, value in made.items():
        state.setdefault(key, value)


def _is_complete(param: Tensor, state: State, group: Group) -> bool:
    return (
        "step" in state
        and ("max_exp_avg_sq" in state or not group["amsgrad"])
        and ("salt" in state or not is_dithered(param, group))
    )


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def is_state_initialisation(optimizer: Any) -> bool:
    """Whether torch.distributed.checkpoint runs a step only to have states made (get_optimizer_state_dict).

    It sets zero gradients and lr 0 and calls ``step``; a real step would count as one and move the moments under weight
    decay. Values alone cannot tell it from a warm-up's first step, and ranks must agree: hence the caller.
    """
    if optimizer.state or not all(_is_zero(group["lr"]) for group in optimizer.param_groups):
        return False
    return _torch_frame("_init_optim_state") is not None


def _torch_frame(function: str) -> FrameType | None:
    """The call of this function of torch.distributed.checkpoint that we are in."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function:
            is_theirs = str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint")
            return frame if is_theirs else None
        frame = frame.f_back
    return None


def _is_zero(lr: float | Tensor) -> bool:
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.device.type == "cpu" else False


def exported(optimizer: Any, state_dict: dict[str, Any], precision: str) -> dict[str, Any]:
    """The state dict with states in fp32 where they cannot be had as they are stored, or are not wanted so.

    FSDP1 gathers the states of a parameter into one buffer and wants one dtype for all of them; a remainder beside fp32
    moments is refused. Codes of blocks that are not the global tensor's mean nothing elsewhere. Loading converts again:
    masters, and codes in the same blocks, bit for bit.
    """
    # torch asks for what a full state dict is to be loaded over, and fails on a saved scalar that is not in there.
    is_for_loading = _torch_frame("_load_optim_state_dict") is not None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for packed in state_dict["param_groups"] for key in packed["params"]]
    for position, (param, key) in enumerate(zip(params, keys, strict=True)):
        state = state_dict["state"].get(key, {})
        is_plain = precision == "float32" or is_fsdp1(param)
        if is_plain or not is_cut_by_rows(param):
            state_dict["state"][key] = state = _in_fp32(param, state, is_plain)
            if optimizer._offload is not None:
                optimizer._offload.keep(param, state)
        if is_for_loading and state and not is_plain:
            salt = torch.tensor(salt_of(optimizer.seed, position), dtype=torch.int64)
            state_dict["state"][key] = {"salt": salt, **state}
    return state_dict


def _in_fp32(param: Tensor, state: State, is_plain: bool) -> State:
    """A state with fp32 moments in place of codes; plain: no bfloat16 moments, remainders and salts either."""
    storage = found_storage(state)
    result = dict(state)
    if storage == "int8" or (storage == "bfloat16" and is_plain):
        moments = fp32_moments(param, state)
        result = {name: value for name, value in result.items() if name not in CODE_KEYS} | moments
    if is_plain:
        result.pop("salt", None)
        if "remainder" in result:
            result["master_param"] = join_master(param, result.pop("remainder"))
    return result
