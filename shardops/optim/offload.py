"""States in host memory, streamed through the step: copied to the device piece by piece, updated there, copied back.

Copies in, kernels and copies out run on a stream each, in this order of events::

    copy in   |in 0|in 1|in 2|    |in 3|    ...      waits until its slot was copied out, and its host memory written
    compute        |step 0|step 1|step 2|step 3|     waits for the copy in
    copy out              |out 0 |out 1 |out 2 |     waits for the kernel

There are three slots of staging memory, so that a copy in, a kernel and a copy out of three pieces overlap; with two,
the copies of one direction would wait for those of the other. The host waits for nothing: whoever reads or writes
states there calls :meth:`StateOffload.synchronize` first.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops._checks import is_dense
from ..plan import Bucket
from .offload_boundary import Boundary, boundary_of, host_copy, is_on_host
from .offload_plan import ALIGNMENT, Cut, Extent, Piece, aligned, plan_pieces

SLOTS = 3
BUCKET_BYTES = 256 << 20
# Lists of a bucket that live on the host, and those that stay on the device.
_STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "block_words")
_BESIDE = ("params", "grads", "shadows")
# Parts of a row begin at multiples of so many elements: blocks of quantised moments stay whole, and kernels keep their
# widest accesses.
_GRAIN = 128

Launch = Callable[[Bucket], None]


@dataclass
class _Staged:
    """A piece, ready to be launched: only what does not hold the bucket's tensors.

    Attributes:
        names: of the lists that are staged.
        lists: for each of them the staging tensors, in the order of ``piece.cuts``.
        step_index: of the bucket's counters; of a part's copied counter.
        dither: of the parameters' cuts.
    """

    piece: Piece
    slot: int
    names: list[str]
    lists: list[list[Tensor]]
    step_index: Tensor
    dither: Tensor | None


class _DeviceStream:
    """Streams the buckets of one device through its staging memory."""

    def __init__(self, boundary: Boundary, nbytes: int) -> None:
        self._boundary = boundary
        self._limit = max(nbytes // SLOTS // ALIGNMENT, 1) * ALIGNMENT
        self._staging: Tensor | None = None
        self._slot_nbytes = 0
        self._free: list[Any] = []  # slot -> event after which it may be written
        self._end: Any = None  # event of the latest copy out
        # What the pieces were made for, and they. References would keep replaced states alive.
        self._buckets: list[weakref.ref[Bucket]] = []
        self._pieces: list[_Staged] = []

    def run(self, buckets: Sequence[Bucket], launch: Launch) -> None:
        boundary = self._boundary
        boundary.check()
        if len(self._buckets) != len(buckets) or not all(map(_refers, self._buckets, buckets)):
            self._prepare(buckets)
        if self._end is not None:  # host memory that this step reads may still be on its way from the last one
            boundary.wait("copy in", self._end)
        written: list[Any] = []
        for staged in self._pieces:
            piece, slot = staged.piece, staged.slot
            bucket = buckets[piece.bucket]
            host = [_cut_list(bucket, name, piece.cuts) for name in staged.names]
            if self._free[slot] is not None:
                boundary.wait("copy in", self._free[slot])
            if piece.after is not None:
                boundary.wait("copy in", written[piece.after])
            for targets, sources in zip(staged.lists, host, strict=True):
                boundary.copy("copy in", targets, sources)
            boundary.wait("compute", boundary.record("copy in"))
            boundary.launch(_kernel(bucket, staged, launch))
            boundary.wait("copy out", boundary.record("compute"))
            for targets, sources in zip(host, staged.lists, strict=True):
                boundary.copy("copy out", targets, sources)
            self._end = self._free[slot] = boundary.record("copy out")
            written.append(self._end)

    def synchronize(self) -> None:
        if self._end is not None:
            self._boundary.synchronize(self._end)
            self._end = None

    def release(self) -> None:
        self._buckets, self._pieces, self._free, self._staging, self._slot_nbytes = [], [], [], None, 0

    # ---- preparing ---------------------------------------------------------------------------------------------------

    def _prepare(self, buckets: Sequence[Bucket]) -> None:
        pieces = plan_pieces([_extents(bucket) for bucket in buckets], self._limit)
        slots = min(len(pieces), SLOTS)
        slot_nbytes = max((piece.nbytes for piece in pieces), default=0)
        if slots > len(self._free) or slot_nbytes > self._slot_nbytes:
            self.release()
            self._slot_nbytes = slot_nbytes
            self._staging = self._boundary.allocate(slots * slot_nbytes)
            self._free = [self._boundary.record("compute")] * slots  # its memory's last user may be under way there
        self._pieces = [
            self._stage(piece, index % len(self._free), buckets[piece.bucket]) for index, piece in enumerate(pieces)
        ]
        self._buckets = [weakref.ref(bucket) for bucket in buckets]

    def _stage(self, piece: Piece, slot: int, bucket: Bucket) -> _Staged:
        assert self._staging is not None
        offset = slot * self._slot_nbytes
        names = [name for name in _STATES if getattr(bucket, name)]
        lists: dict[str, list[Tensor]] = {name: [] for name in names}
        for cut in piece.cuts:
            for name in names:
                (host,) = _cut_list(bucket, name, (cut,))
                lists[name].append(_staging_tensor(self._staging, offset, host))
                offset += aligned(host.numel() * host.itemsize)
        positions = [int(bucket.step_index[cut.member]) for cut in piece.cuts if cut.is_last]
        return _Staged(
            piece=piece,
            slot=slot,
            names=names,
            lists=list(lists.values()),
            step_index=torch.tensor(positions or [0], dtype=torch.int64),
            dither=_cut_dither(bucket.dither, piece.cuts),
        )


class StateOffload:
    """Runs an optimizer's step with its states on the host. One for each optimizer.

    Args:
        nbytes: staging memory on each device, kept between steps. Parameters are cut between rows if their moments are
            block-quantised, and not at all if they are not row-major: one whose states alone are larger than a third of
            this makes it larger.
    """

    def __init__(self, nbytes: int = BUCKET_BYTES) -> None:
        self.nbytes = nbytes
        self._streams: dict[torch.device, _DeviceStream | None] = {}

    def run(self, buckets: Sequence[Bucket], launch: Launch) -> None:
        """Updates the buckets, and returns before it is done.

        Args:
            buckets: with states on the host, all else on the parameters' device. Those of parameters that are on the
                CPU are launched as they are.
            launch: makes one kernel launch of a bucket. It is called with parts of buckets, whose states are in staging
                memory.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ValueError: a device that states cannot be streamed to.
        """
        members: dict[torch.device, list[Bucket]] = {}
        for bucket in buckets:
            members.setdefault(bucket.device, []).append(bucket)
        for device in members.keys() - self._streams.keys():
            boundary = boundary_of(device)
            self._streams[device] = None if boundary is None else _DeviceStream(boundary, self.nbytes)
        for device, found in members.items():
            stream = self._streams[device]
            if stream is not None:
                stream.run(found, launch)
                continue
            for bucket in found:
                launch(bucket)

    def keep(self, param: Tensor, state: dict[str, Any]) -> None:
        """Moves a parameter's states to the host, all but its counter, and salt; nothing of a parameter on the CPU.

        After they were made, loaded or converted beside the parameter: that takes as much memory there as one
        parameter's states.
        """
        if param.device.type == "cpu":
            return
        for name, value in state.items():
            if name not in ("step", "salt") and not is_on_host(value):
                state[name] = host_copy(value)

    def synchronize(self) -> None:
        """Waits until host memory holds what the steps so far have made of the states.

        Before anybody reads, writes, replaces or saves a state on the host. It costs nothing if no step was made since.
        """
        for stream in self._streams.values():
            if stream is not None:
                stream.synchronize()

    def release(self) -> None:
        """Gives the staging memory back; the next step allocates it again."""
        self.synchronize()
        for stream in self._streams.values():
            if stream is not None:
                stream.release()


# ---- parts of buckets ------------------------------------------------------------------------------------------------


def _refers(ref: weakref.ref[Bucket], bucket: Bucket) -> bool:
    return ref() is bucket


def _extents(bucket: Bucket) -> list[Extent]:
    extents = []
    for member, param in enumerate(bucket.params):
        sizes = [(getattr(bucket, name)[member].itemsize, 1) for name in _STATES[:-1] if getattr(bucket, name)]
        if bucket.block_words:
            words = bucket.block_words[member]
            rows, blocks, _ = words.shape
            row = param.numel() // rows if rows else 0
            sizes.append((8, _GRAIN) if rows == 1 else (8 * blocks, max(row, 1)))
        home = bucket.exp_avgs[member].data_ptr() or id(bucket.exp_avgs[member])  # empty tensors have no address
        extents.append(Extent(param.numel(), _grain(bucket, member), tuple(sizes), home))
    return extents


def _grain(bucket: Bucket, member: int) -> int:
    """Where a parameter may be cut: between rows of its blocks and of its dither; where it is one row, inside of it."""
    numel = bucket.params[member].numel()
    if not bucket.regular or not numel:
        return numel
    rows = bucket.block_words[member].shape[0] if bucket.block_words else 1
    grain = _GRAIN if rows == 1 else numel // rows
    if bucket.dither is not None and (columns := int(bucket.dither[member, 2])) < numel:
        grain = columns if not bucket.block_words else math.lcm(grain, columns)
    return min(grain, numel)


def _cut_list(bucket: Bucket, name: str, cuts: Sequence[Cut]) -> list[Tensor]:
    """The cuts' parts of a list, as views; none of an empty one."""
    tensors: list[Tensor] = getattr(bucket, name)
    if not tensors:
        return []
    parts = []
    for cut in cuts:
        tensor = tensors[cut.member]
        if not cut.is_whole and name == "block_words":
            rows = tensor.shape[0]
            if rows == 1:
                tensor = tensor[:, cut.first // _GRAIN : -(-cut.last // _GRAIN)]
            else:
                row = bucket.params[cut.member].numel() // rows
                tensor = tensor[cut.first // row : cut.last // row]
        elif not cut.is_whole:
            tensor = tensor.detach().view(-1)[cut.first : cut.last]
        parts.append(tensor)
    return parts


def _cut_dither(dither: Tensor | None, cuts: Sequence[Cut]) -> Tensor | None:
    """The rows (salt, first, columns, stride) of the cuts: element ``first`` of a cut keeps its global index."""
    if dither is None:
        return None
    rows = []
    for cut in cuts:
        salt, first, columns, stride = dither[cut.member].tolist()
        if not cut.is_whole:
            first += cut.first // columns * stride + cut.first % columns
            columns = min(columns, cut.last - cut.first)
        rows.append((salt, first, columns, stride))
    return torch.tensor(rows, dtype=torch.int64)


def _staging_tensor(staging: Tensor, offset: int, host: Tensor) -> Tensor:
    """Staging memory for a tensor, in its order of memory; in row-major order if that has gaps."""
    flat = staging[offset : offset + host.numel() * host.itemsize].view(host.dtype)
    return flat.as_strided(host.shape, host.stride()) if is_dense(host) else flat.view(host.shape)


def _kernel(bucket: Bucket, staged: _Staged, launch: Launch) -> Callable[[], None]:
    """Launches a piece. The gradients are looked up now: the plan lets go of them after the step."""
    cuts = staged.piece.cuts
    part = copy.copy(bucket)
    part.members = [bucket.members[cut.member] for cut in cuts]
    part.step_index, part.dither = staged.step_index, staged.dither
    lists = {name: _cut_list(bucket, name, cuts) for name in _BESIDE}
    for name, tensors in (lists | dict(zip(staged.names, staged.lists, strict=True))).items():
        setattr(part, name, tensors)
    position = int(bucket.step_index[cuts[0].member])

    def kernel() -> None:
        # All parts of a parameter make the same step; only the last one counts it.
        part.steps = bucket.steps if cuts[-1].is_last else bucket.steps[position : position + 1].clone()
        launch(part)

    return kernel
