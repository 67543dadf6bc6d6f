"""What the optimizer keeps for one parameter, and how it is made: moments, master weights, step counters.

States of a parameter ``p`` (all of its shape; DTensors with its mesh and placements if it is one):

- ``exp_avg``, ``exp_avg_sq``, with amsgrad ``max_exp_avg_sq``: float32.
- ``step``: float32 scalar, updates done; a view into one flat buffer of all parameters' counters.
- master weights, by storage (``master_storage``):

  ========== ==================== ===========================================================
  ``param``  fp32 parameter        none: the parameter is its own master
  ``split``  bf16 parameter        ``remainder``: 16 bits that complete it to fp32, typed bf16
  ``fp32``   bf16, fp16 parameter  ``master_param``: fp32
  ========== ==================== ===========================================================

The remainder is typed bfloat16 because gloo's full state dicts and NCCL take no int16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..collectives import local_tensor

MASTER_WEIGHTS = ("auto", "split32", "fp32")
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MasterStorage = Literal["param", "split", "fp32"]
State = dict[str, Any]
Group = Mapping[str, Any]


def master_storage(param: Tensor, group: Group) -> MasterStorage:
    """Where the parameter's fp32 master lives under its group's ``master_weights``."""
    if param.dtype == torch.float32:
        return "param"
    if group["master_weights"] == "split32" or (group["master_weights"] == "auto" and param.dtype == torch.bfloat16):
        return "split"
    return "fp32"


def master_key(storage: MasterStorage) -> str | None:
    """The state's key that holds the master or its remainder."""
    return {"param": None, "split": "remainder", "fp32": "master_param"}[storage]


def is_fsdp1(param: Tensor) -> bool:
    """Whether the parameter is (a slice of) an FSDP1 flat parameter; FSDP1 marks it so."""
    return bool(getattr(param, "_fsdp_flattened", False))


def zeros_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the parameter's shape, strides, device and sharding in another dtype."""
    return torch.zeros_like(param.detach(), dtype=dtype, memory_format=torch.preserve_format)


def create_state(param: Tensor, group: Group) -> State:
    """States of a parameter that has made no step: moments zero, the master equal to the parameter."""
    state: State = {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": zeros_like(param, torch.float32),
        "exp_avg_sq": zeros_like(param, torch.float32),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = zeros_like(param, torch.float32)
    storage = master_storage(param, group)
    if storage == "split":
        state["remainder"] = zeros_like(param, torch.bfloat16)
    elif storage == "fp32":
        state["master_param"] = fp32_copy(param)
    return state


def fp32_copy(param: Tensor) -> Tensor:
    """The parameter's values in a new float32 tensor of its layout."""
    copy = zeros_like(param, torch.float32)
    copy.copy_(param.detach())
    return copy


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
        remainder.copy_(torch.where(is_written, torch.zeros_like(remainder), remainder))
    elif "master_param" in state:
        master = local_tensor(state["master_param"])
        master.copy_(torch.where(is_written, local_tensor(param.detach()).float(), master))


def adopt_master(param: Tensor, state: State) -> None:
    """Keeps a loaded fp32 master where it rounds to the parameter; elsewhere other weights were loaded, and count."""
    if "master_param" not in state:
        return
    master, values = local_tensor(state["master_param"]), local_tensor(param.detach())
    rounded = master.to(values.dtype)
    belongs = (rounded == values) | (rounded.isnan() & values.isnan())
    if values.dtype == torch.bfloat16:  # split32 had rounded ties away from zero
        belongs |= _split_bits(master)[0] == values.contiguous().view(torch.int16)
    master.copy_(torch.where(belongs, master, values.float()))


def _split_bits(master: Tensor) -> tuple[Tensor, Tensor]:
    """The int16 patterns that split storage keeps of an fp32 master: its bf16, ties away from zero, and remainder."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.contiguous().view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The exact fp32 master of a bf16 parameter: ``bits = (high << 16) + sign_extend(remainder)``."""
    master = zeros_like(param, torch.float32)
    high = local_tensor(param.detach()).contiguous().view(torch.int16).int()
    low = local_tensor(remainder).contiguous().view(torch.int16).int()
    local_tensor(master).copy_(((high << 16) + low).view(torch.float32))
    return master


def split_master(param: Tensor, master: Tensor) -> Tensor:
    """The remainder that completes a bf16 parameter to an fp32 master; 0 where the two do not belong together.

    A remainder belongs to the bf16 value that is the master rounded with ties away from zero. Where the parameter
    holds another value it was written later, and counts.
    """
    remainder = zeros_like(param, torch.bfloat16)
    high, low = _split_bits(local_tensor(master))
    low = low.view(torch.bfloat16)
    belongs = local_tensor(param.detach()).contiguous().view(torch.int16) == high
    local_tensor(remainder).copy_(torch.where(belongs, low, torch.zeros_like(low)))
    return remainder


class StepCounters:
    """The parameters' step counters in one flat float32 buffer for each device that holds some.

    Attributes:
        buffers: device -> counters, 1D. The states' ``step`` are views of their elements.
    """

    def __init__(self) -> None:
        self.buffers: dict[torch.device, Tensor] = {}
        self._views: list[Tensor] = []

    def bind(self, homes: Iterable[tuple[State, torch.device]]) -> None:
        """Moves every state's ``step`` into the buffer of its device, keeping its value.

        Nothing is done if all are there already, so that a captured CUDA graph's addresses stay.
        """
        pairs = list(homes)
        steps = [state["step"] for state, _ in pairs]
        devices = [device for _, device in pairs]
        if (
            len(steps) == len(self._views)
            and all(a is b for a, b in zip(steps, self._views, strict=True))
            and all(step.device == device for step, device in zip(steps, devices, strict=True))
        ):
            return
        self.buffers = {
            device: torch.zeros(devices.count(device), dtype=torch.float32, device=device)
            for device in dict.fromkeys(devices)
        }
        used = dict.fromkeys(self.buffers, 0)
        self._views = []
        for (state, device), step in zip(pairs, steps, strict=True):
            view = self.buffers[device][used[device]]
            used[device] += 1
            view.copy_(torch.as_tensor(step).reshape(()))
            state["step"] = view
            self._views.append(view)

    def position(self, step: Tensor) -> int:
        """The element of its buffer that a bound ``step`` is."""
        return int(step.storage_offset())
