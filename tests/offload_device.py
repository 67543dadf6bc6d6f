"""A device that is not there: streams whose work is done as late, as early or as oddly as their events allow.

It stands for a GPU in the tests of streamed states. Memory that the engine may not rely on holds garbage, so that a
missing wait, or memory that is used again too early, changes the result.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

GARBAGE = 0xC7  # -102,287.56 as float32, so that no sum passes over it
STREAMS = ("copy in", "compute", "copy out")


class Event:
    """Done once its stream has come to the point where it was recorded."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.is_done = False


class FakeDevice:
    """A ``shardops.optim.offload.Boundary`` on the CPU.

    Args:
        eager: streams that do their work as soon as no wait is in the way; others only when somebody waits for it.
        seed: of a random order instead: after each call a few streams do some of their work.
        deaf: pairs (stream, stream of the event) whose waits are passed over.
    """

    def __init__(
        self, eager: Collection[str] = (), seed: int | None = None, deaf: Collection[tuple[str, str]] = ()
    ) -> None:
        self._queues: dict[str, deque[Event | Callable[[], None]]] = {stream: deque() for stream in STREAMS}
        self._eager = eager
        self._deaf = deaf
        self._random = None if seed is None else random.Random(seed)
        self._staging: list[Tensor] = []  # never freed: nothing else is taken for it
        self.allocated: list[int] = []  # bytes
        self.launches = 0

    # ---- the boundary ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        pass

    def allocate(self, nbytes: int) -> Tensor:
        staging = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocated.append(nbytes)
        self._staging.append(staging)
        # Whoever had the memory before is under way on the compute stream.
        self._enqueue("compute", lambda: _spoil(staging))
        return staging

    def copy(self, stream: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            if target.numel():
                assert self._is_staging(target) == (stream == "copy in")
                assert self._is_staging(source) == (stream == "copy out")
            assert target.shape == source.shape
            assert target.dtype == source.dtype

        def work() -> None:
            for target, source in pairs:
                target.copy_(source)
                if stream == "copy out":  # the slot is anybody's now
                    _spoil(source)

        self._enqueue(stream, work)

    def launch(self, kernel: Callable[[], None]) -> None:
        self.launches += 1
        self._enqueue("compute", kernel)

    def record(self, stream: str) -> Event:
        event = Event(stream)

        def work() -> None:
            event.is_done = True

        self._enqueue(stream, work)
        return event

    def wait(self, stream: str, event: Event) -> None:
        if (stream, event.stream) not in self._deaf:
            self._enqueue(stream, event)

    def synchronize(self, event: Event) -> None:
        if ("host", event.stream) not in self._deaf:
            self._force(event)

    # ---- doing the work ----------------------------------------------------------------------------------------------

    def finish(self, stream: str) -> None:
        """Has the host wait for all that a stream has to do."""
        self._force(self.record(stream))

    def _is_staging(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(staging.untyped_storage().data_ptr() == address for staging in self._staging)

    def _enqueue(self, stream: str, work: Event | Callable[[], None]) -> None:
        self._queues[stream].append(work)
        if self._random is None:
            while any(map(self._advance, self._eager)):
                pass
            return
        for _ in range(self._random.randrange(4)):
            self._advance(self._random.choice(STREAMS))

    def _advance(self, stream: str) -> bool:
        """Does a stream's next piece of work, unless there is none or it has to wait."""
        queue = self._queues[stream]
        if not queue or (isinstance(queue[0], Event) and not queue[0].is_done):
            return False
        work = queue.popleft()
        if not isinstance(work, Event):
            with torch.no_grad():  # whenever it is done, it was enqueued in a step
                work()
        return True

    def _force(self, event: Event) -> None:
        """Does what the event needs, and nothing else."""
        while not event.is_done:
            head = self._queues[event.stream][0]
            if isinstance(head, Event):
                self._force(head)
            self._advance(event.stream)


def schedules() -> Iterator[dict[str, Any]]:
    """Arguments of devices that go wrong in different ways where a wait is missing."""
    for chosen in range(1 << len(STREAMS)):
        yield {"eager": [stream for i, stream in enumerate(STREAMS) if chosen >> i & 1]}
    for seed in range(6):
        yield {"seed": seed}


def _spoil(tensor: Tensor) -> None:
    tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).fill_(GARBAGE)
