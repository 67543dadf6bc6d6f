"""What lies between host memory and a device for streamed states: streams, events, pinned memory.

``offload.py`` says what is enqueued and what waits for what. The tests put a device of their own in the place of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..collectives import local_tensor

Stream = Literal["copy in", "compute", "copy out"]


class Boundary(Protocol):
    """What lies between the host and one device: streams, each in order, and events between them."""

    def check(self) -> None:
        """Raises RuntimeError if nothing can be streamed now."""

    def allocate(self, nbytes: int) -> Tensor:
        """Staging memory, uint8 1D. The compute stream may use it at once, others once they have waited for it."""

    def copy(self, stream: Stream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Enqueues copies between host and device."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Enqueues kernels on the compute stream."""

    def record(self, stream: Stream) -> Any:
        """An event: what has been enqueued on the stream so far is done."""

    def wait(self, stream: Stream, event: Any) -> None:
        """Has all that is enqueued on the stream from now on wait for the event."""

    def synchronize(self, event: Any) -> None:
        """Has the host wait for the event."""


class CudaBoundary:
    """The way to a CUDA device. The compute stream is whichever is current there when the step is called.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        names: tuple[Stream, ...] = ("copy in", "copy out")
        self._sides = {name: torch.cuda.Stream(device) for name in names}  # type: ignore[no-untyped-call]

    def check(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "offload_state is 'cpu' and a CUDA graph is being captured; the step streams states from host memory "
                "and waits for earlier steps' copies, which a graph cannot hold: keep states on the device "
                "(offload_state=None), or step outside of the capture"
            )

    def allocate(self, nbytes: int) -> Tensor:
        staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for stream in self._sides.values():  # freed, it is not given to others before these streams are done with it
            staging.record_stream(stream)
        return staging

    def copy(self, stream: Stream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        # Pinned memory that is freed meanwhile stays until the copy is done: torch's host allocator records its use.
        with torch.cuda.stream(self._stream(stream)):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def launch(self, kernel: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            kernel()

    def record(self, stream: Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._sides[stream] if stream in self._sides else torch.cuda.current_stream(self._device)


def boundary_of(device: torch.device) -> Boundary | None:
    """The way from host memory to a device; None: its memory is host memory, nothing is streamed.

    Raises:
        ValueError: a device that states cannot be streamed to.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise ValueError(
            f"offload_state is 'cpu' and a parameter is on {device}; states are streamed to CUDA devices only: "
            "leave offload_state None"
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    return CudaBoundary(torch.device("cuda", index))


def is_on_host(tensor: Tensor) -> bool:
    """Whether a state is where copies to and from a device overlap with anything else."""
    return tensor.device.type == "cpu" and (not torch.cuda.is_available() or local_tensor(tensor).is_pinned())


def host_copy(tensor: Tensor) -> Tensor:
    """A state's values in host memory, pinned where CUDA is, of its shape and strides; of a DTensor, such a DTensor.

    By a factory of the DTensor: ``DTensor.from_local`` would move a local tensor to the device of the mesh.
    """
    is_pinned = torch.cuda.is_available()
    values = tensor.detach()
    copy = torch.empty_like(values, device="cpu", pin_memory=is_pinned, memory_format=torch.preserve_format)
    local_tensor(copy).copy_(local_tensor(values))
    return copy
