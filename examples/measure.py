"""What is measured of a run: losses over all ranks, the update path's time, the state's bytes.

Times come from the device's own clock and bytes from live tensors; nothing here is computed from
sizes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import data
import torch
import torch.distributed as dist
from launch import World
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer


class Stopwatch:
    """Times the update path with the device's own clock: events on CUDA, the host's on a CPU.

    A host clock around CUDA calls would measure their launch, not their work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._started = self._mark()

    def stop(self) -> None:
        self._stopped = self._mark()

    def milliseconds(self) -> float:
        """Waits for the device; call it once the step's other work has been waited for."""
        if not self._on_cuda:
            return (self._stopped - self._started) * 1e3
        self._stopped.synchronize()
        return self._started.elapsed_time(self._stopped)


def next_byte_loss(model: nn.Module, batch: Tensor, world: World) -> Tensor:
    """Mean loss over this rank's rows of a global batch [batch, length + 1], in nats a byte."""
    inputs, targets = data.rank_slice(batch, world.rank, world.world_size)
    logits = model(inputs.to(world.device))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(world.device).flatten())


def mean_over_ranks(value: Tensor, world: World) -> float:
    """The mean of one scalar a rank; the slices are equal, so it is the global batch's mean."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / world.world_size


@torch.no_grad()
def mean_loss(model: nn.Module, batches: list[Tensor], world: World) -> float:
    """Mean loss over several global batches of one size, without training on them."""
    losses = [mean_over_ranks(next_byte_loss(model, batch, world), world) for batch in batches]
    return sum(losses) / len(losses)


def state_bytes_per_param(model: nn.Module, optimizer: Optimizer, world: World) -> float:
    """Bytes of the optimizer's live tensors over all ranks, per parameter of the whole model.

    Storages are counted, each once: several states may be views of one buffer.
    """

    values = (value for state in optimizer.state.values() for value in state.values())
    storages = _storage_bytes(value for value in values if isinstance(value, Tensor))
    for parameter_storage in _storage_bytes(model.parameters()):
        storages.pop(parameter_storage, None)
    nbytes = torch.tensor(sum(storages.values()), dtype=torch.int64, device=world.device)
    dist.all_reduce(nbytes)
    return nbytes.item() / sum(parameter.numel() for parameter in model.parameters())


def _storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages on this rank behind `tensors`."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
