"""What the optimizer keeps for one parameter, and how it is made: moments, master weights, salt, step counters.

States of a parameter ``p`` (DTensors with its mesh and placements if it is one):

- moments (``moments``): ``exp_avg``, ``exp_avg_sq`` or their codes; with amsgrad ``max_exp_avg_sq``, always float32.
- master weights (``masters``): ``remainder`` or ``master_param``, or none.
- ``step``: float32 scalar, updates done; a view into one flat buffer of all parameters' counters.
- ``salt``: int64 scalar, where something is dithered: which dither is the parameter's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .elements import is_dithered
from .like import zeros_like
from .masters import Group, State, create_master, master_storage
from .moments import create_moments, moment_storage

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def create_state(param: Tensor, group: Group, salt: int) -> State:
    """States of a parameter that has made no step: moments zero, the master equal to the parameter."""
    state: State = {
        "step": torch.zeros((), dtype=torch.float32),
        **create_moments(param, moment_storage(param, group)),
        **create_master(param, master_storage(param, group)),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = zeros_like(param, torch.float32)
    if is_dithered(param, group):
        state["salt"] = torch.tensor(salt, dtype=torch.int64)
    return state


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
