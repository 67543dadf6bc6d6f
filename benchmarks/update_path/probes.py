"""Where each part of the update path begins and ends in FSDP2's own gathers and reductions, during real training.

The functions that FSDP2 calls are wrapped, and its all-gather comes by ``set_custom_all_gather``, torch's default one
inside; nothing that is measured is done in another way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

import shardops
from shardops.optim import clipping

from . import parts

# Sets the part that runs from now on (None: none of them) and returns the one before.
Switch = Callable[[str | None], str | None]


class Stopwatch:
    """Seconds of each part, by the clock and of this thread's processor time; a switch ends one and begins the next.

    Processor time leaves out waiting: for other ranks, and for processes that this machine runs besides.
    """

    def __init__(self) -> None:
        self._part: str | None = None
        self._since = _clocks()
        self._wall, self._cpu = _zeros(), _zeros()

    def switch(self, part: str | None) -> str | None:
        """Another part runs from now on; returns the one before."""
        before, now = self._part, _clocks()
        if before is not None:
            self._wall[before] += now[0] - self._since[0]
            self._cpu[before] += now[1] - self._since[1]
        self._part, self._since = part, _clocks()
        return before

    def take(self) -> dict[str, dict[str, float]]:
        """The seconds so far by clock ("wall", "cpu") and part; they start again at 0."""
        taken = {"wall": self._wall, "cpu": self._cpu}
        self._wall, self._cpu = _zeros(), _zeros()
        return taken


def _zeros() -> dict[str, float]:
    return dict.fromkeys(parts.PARTS, 0.0)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


class _AllGather(_fsdp_collectives.DefaultAllGather):
    """Torch's own; copy-in is what FSDP2 does between its two calls."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._switch(parts.ALL_GATHER)
        output = super().allocate(size, dtype=dtype, device=device)
        self._switch(parts.COPY_IN)
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._switch(parts.ALL_GATHER)
        return super().__call__(*args, **kwargs)


def _within(part: str, function: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The function, with all that it does counted for a part unless it switches itself."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = switch(part)
        try:
            return function(*args, **kwargs)
        finally:
            switch(before)

    return run


@contextlib.contextmanager
def watching(model: torch.nn.Module, optimizer: Any, switch: Switch) -> Iterator[None]:
    """Within it every gather, reduction and step of the model's tells ``switch`` which part runs."""
    wrapped: list[tuple[Any, str, str]] = [
        # What precedes copy-in is the cast, or the hooks that take its place.
        (_fsdp_param_group, "foreach_all_gather", parts.CAST),
        (_fsdp_param_group, "foreach_all_gather_copy_out", parts.COPY_OUT),
        (_fsdp_param_group, "foreach_reduce", parts.REDUCE_SCATTER),
        (_fsdp_collectives, "foreach_reduce_scatter_copy_in", parts.CHUNK_CAT),
        (_fsdp_collectives, "_to_dtype_if_needed", parts.GRADIENT_CAST),
    ]
    if isinstance(optimizer, shardops.FusedShardedAdam):
        wrapped.append((clipping, "clip", parts.CLIP))
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with contextlib.ExitStack() as stack:
        for place, name, part in wrapped:
            stack.enter_context(patch.object(place, name, _within(part, getattr(place, name), switch)))
        for module in modules:
            module.set_custom_all_gather(_AllGather(switch))
            stack.callback(module.set_custom_all_gather, _fsdp_collectives.DefaultAllGather())
        yield
