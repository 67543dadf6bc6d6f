"""Where a parameter's fp32 master weight lives, and the ways between these places.

========== ==================== =========================================================================
``param``   fp32 parameter       none: the parameter is its own master
``split32`` bf16 parameter       ``remainder``: 16 bits that complete it to fp32, typed bfloat16
``split24`` bf16 parameter       ``remainder``: int8, which completes it to the upper 24 bits of an fp32
``fp32``    bf16, fp16 parameter ``master_param``: fp32
``none``    bf16, fp16 parameter none: the updated value is rounded, to nearest or stochastically
========== ==================== =========================================================================

The 16-bit remainder is typed bfloat16 because gloo's full state dicts and NCCL take no int16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..backends.reference.dither import join_fp24, split_fp24
from ..backends.reference.sharded_adam import NEAREST, STOCHASTIC, join_fp32, split_fp32
from ..collectives import local_tensor
from .like import fp32_copy, zeros_like

MASTER_WEIGHTS = ("auto", "split32", "split24", "fp32", "stochastic", "none")
BFLOAT16_ONLY = ("split32", "split24", "stochastic")
MasterStorage = Literal["param", "split32", "split24", "fp32", "none"]
State = dict[str, Any]
Group = Mapping[str, Any]

KEYS: dict[MasterStorage, str | None] = {
    "param": None,
    "split32": "remainder",
    "split24": "remainder",
    "fp32": "master_param",
    "none": None,
}
REMAINDER_DTYPES = {"split32": torch.bfloat16, "split24": torch.int8}


def master_storage(param: Tensor, group: Group) -> MasterStorage:
    """Where the parameter's fp32 master lives under its group's ``master_weights``.

    Raises:
        ValueError: a float16 parameter, cast to it since the optimizer was built, under what only bfloat16 has.
    """
    asked: str = group["master_weights"]
    if param.dtype == torch.float32:
        return "param"
    if param.dtype == torch.float16 and asked in BFLOAT16_ONLY:
        raise ValueError(
            f"master_weights is {asked!r} and a parameter of shape {tuple(param.shape)} has become float16; remainders "
            "complete, and stochastic rounding rounds to, bfloat16 only: cast it back, or set the param group's "
            "master_weights to 'auto' or 'fp32'"
        )
    if asked == "auto":
        return "split32" if param.dtype == torch.bfloat16 else "fp32"
    return "none" if asked == "stochastic" else asked  # type: ignore[return-value]


def rounding(param: Tensor, group: Group) -> int:
    """The op's ``rounding`` of the parameter: 0 where there is a master."""
    if master_storage(param, group) != "none":
        return 0
    return STOCHASTIC if group["master_weights"] == "stochastic" else NEAREST


def create_master(param: Tensor, storage: MasterStorage) -> State:
    """The states that hold the master of a parameter, equal to it."""
    if storage in REMAINDER_DTYPES:
        return {"remainder": zeros_like(param, REMAINDER_DTYPES[storage])}
    return {"master_param": fp32_copy(param)} if storage == "fp32" else {}


def master_of(param: Tensor, state: State) -> Tensor:
    """The fp32 master of a parameter with this state (empty: none yet); maybe the state's tensor or the parameter."""
    if param.dtype == torch.float32:
        return param.detach()
    if "master_param" in state:
        master: Tensor = state["master_param"]
        return master
    is_split = "remainder" in state and param.dtype == torch.bfloat16
    return join_master(param, state["remainder"]) if is_split else fp32_copy(param)


def is_stored_as(state: State, storage: MasterStorage) -> bool:
    """Whether the state holds a master in this storage, and in no other."""
    found = [key for key in ("remainder", "master_param") if key in state]
    if found != [key for key in (KEYS[storage],) if key]:
        return False
    return storage not in REMAINDER_DTYPES or state["remainder"].dtype == REMAINDER_DTYPES[storage]


def convert_master(param: Tensor, state: State, storage: MasterStorage) -> None:
    """Replaces a state's master by one in another storage, through fp32; where there is none, by the parameter."""
    master = master_of(param, state) if "remainder" in state or "master_param" in state else None
    for key in ("remainder", "master_param"):
        state.pop(key, None)
    created = create_master(param, storage)
    if master is not None and "remainder" in created:
        created["remainder"] = split_master(param, master, created["remainder"].dtype)
    elif master is not None and "master_param" in created:
        created["master_param"] = master
    state.update(created)


def refresh_master(param: Tensor, state: State) -> None:
    """Makes the master equal to a parameter that somebody else has written."""
    if "remainder" in state:
        state["remainder"].zero_()
    elif "master_param" in state:
        state["master_param"].copy_(param.detach())


def refresh_master_if(is_written: Tensor, param: Tensor, state: State) -> None:
    """:func:`refresh_master` where the bool scalar on the parameter's device is true, without a sync."""
    if "remainder" in state:
        remainder = local_tensor(state["remainder"])
        is_written = is_written.to(remainder.device)  # offloaded states are on the host
        remainder.copy_(torch.where(is_written, torch.zeros_like(remainder), remainder))
    elif "master_param" in state:
        master = local_tensor(state["master_param"])
        values = local_tensor(param.detach()).to(master)
        master.copy_(torch.where(is_written.to(master.device), values, master))


def adopt_master(param: Tensor, state: State) -> None:
    """Keeps a loaded fp32 master where it rounds to the parameter; elsewhere other weights were loaded, and count."""
    if "master_param" not in state:
        return
    master = local_tensor(state["master_param"])
    values = local_tensor(param.detach()).to(master.device)
    rounded = master.to(values.dtype)
    belongs = (rounded == values) | (rounded.isnan() & values.isnan())
    if values.dtype == torch.bfloat16:  # the splits round ties away from zero
        belongs |= _bits(split_fp32(master)[0]) == _bits(values)
    master.copy_(torch.where(belongs, master, values.float()))


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its remainder, 16 bits or 8."""
    master = zeros_like(param, torch.float32)
    join = join_fp24 if remainder.dtype == torch.int8 else join_fp32
    low = local_tensor(remainder).to(param.device)
    local_tensor(master).copy_(join(local_tensor(param.detach()).contiguous(), low.contiguous()))
    return master


def split_master(param: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """The remainder that completes a bf16 parameter to an fp32 master; 0 where the two do not belong together.

    They do where the parameter is the master rounded, however ties are. Where it holds another value it was written
    later, and counts. The nearest master under the parameter as it is: exact in 16 bits, but for a tie that was rounded
    towards zero, whose remainder is one too large for them.
    """
    remainder = zeros_like(param, dtype)
    values = local_tensor(master).contiguous()
    off = values.view(torch.int32).long() - (_bits(local_tensor(param.detach())).long() << 16)
    belongs = (off.abs() <= 1 << 15) & ~values.isnan()
    low = torch.where(belongs, off, 0)
    if dtype == torch.int8:
        local_tensor(remainder).copy_((low + 128 >> 8).clamp(max=127).to(torch.int8))
    else:
        local_tensor(remainder).copy_(low.clamp(max=0x7FFF).to(torch.int16).view(torch.bfloat16))
    return remainder


def write_master(param: Tensor, state: State, values: Tensor) -> None:
    """Makes a parameter and its master fp32 values, the parameter rounded as a step without dither rounds it.

    Args:
        param: in place, through the local tensor itself, whose version counter shadows look at; an alias below
            autograd has its own.
        values: float32, of the local tensor's shape and device.
    """
    local = local_tensor(param)
    if "remainder" in state:
        remainder = local_tensor(state["remainder"])
        high, low = split_fp24(values, None) if remainder.dtype == torch.int8 else split_fp32(values)
        local.copy_(high)
        remainder.copy_(low)
        return
    local.copy_(values)
    if "master_param" in state:
        local_tensor(state["master_param"]).copy_(values)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16)
