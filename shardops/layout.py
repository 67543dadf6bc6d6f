"""Where elements lie in flat buffers: segments, padding and shards, as pure integers.

No tensors and no devices here. A buffer holds ``world_size`` shards of ``shard_numel`` elements each, back to back;
a segment is one tensor's range (or a range of padding) in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# (tensor, tensor_offset, buffer_offset, numel), all in elements; tensor -1 is padding, which holds zeros.
Segment = tuple[int, int, int, int]
PADDING = -1


@dataclass(frozen=True)
class BufferLayout:
    """The segments of a flat buffer, in the order of the buffer.

    Attributes:
        world_size: number of shards the buffer is cut into.
        shard_numel: elements of one shard, padding included.
        rank: the shard that ``segments`` describes, its offsets counted from the shard's start; None: all of them.
        segments: covers every element of the buffer exactly once.
    """

    world_size: int
    shard_numel: int
    rank: int | None
    segments: tuple[Segment, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(world_size, shard_numel)``, or ``(shard_numel,)`` for one rank."""
        if self.rank is None:
            return (self.world_size, self.shard_numel)
        return (self.shard_numel,)


def align_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``."""
    return -(-numel // multiple) * multiple


def numel_of(shape: Sequence[int]) -> int:
    """Elements of a tensor of that shape; 1 for a scalar."""
    numel = 1
    for size in shape:
        numel *= size
    return numel


def flat_layout(shapes: Sequence[Sequence[int]], world_size: int, align: int, rank: int | None = None) -> BufferLayout:
    """Tensors concatenated, padded at the end to ``world_size * align``, and cut into equal shards.

    Two tensors of 3 and 4 elements over 2 ranks, ``align`` 1::

        a0 a1 a2 b0 | b1 b2 b3 0
    """
    numels = [numel_of(shape) for shape in shapes]
    shard_numel = align_up(-(-sum(numels) // world_size), align)
    begin, end = (0, world_size * shard_numel) if rank is None else (rank * shard_numel, (rank + 1) * shard_numel)
    segments: list[Segment] = []
    start = 0
    for tensor, numel in enumerate(numels):
        low, high = max(start, begin), min(start + numel, end)
        if low < high:
            segments.append((tensor, low - start, low - begin, high - low))
        start += numel
    if max(start, begin) < end:
        segments.append((PADDING, 0, max(start, begin) - begin, end - max(start, begin)))
    return BufferLayout(world_size, shard_numel, rank, tuple(segments))


def per_param_layout(
    shapes: Sequence[Sequence[int]], world_size: int, align: int, rank: int | None = None
) -> BufferLayout:
    """Each tensor padded on dim 0 to a multiple of ``world_size`` rows and chunked; chunks laid out by rank.

    What FSDP2's ``fsdp::chunk_cat`` makes (``align`` 1). A scalar is one row. Tensors of 3 and 2 rows over 2 ranks::

        a[0] a[1] b[0] | a[2] 0 b[1]
    """
    rows = [shape[0] if len(shape) else 1 for shape in shapes]
    row_numels = [numel_of(shape[1:]) for shape in shapes]
    chunk_rows = [-(-count // world_size) for count in rows]
    used = sum(chunk * row_numel for chunk, row_numel in zip(chunk_rows, row_numels, strict=True))
    shard_numel = align_up(used, align)
    segments: list[Segment] = []
    for shard in range(world_size) if rank is None else (rank,):
        offset = shard * shard_numel if rank is None else 0
        for tensor, count in enumerate(rows):
            first = min(shard * chunk_rows[tensor], count)
            present = min(chunk_rows[tensor], count - first) * row_numels[tensor]
            padding = chunk_rows[tensor] * row_numels[tensor] - present
            if present:
                segments.append((tensor, first * row_numels[tensor], offset, present))
            if padding:
                segments.append((PADDING, 0, offset + present, padding))
            offset += present + padding
        if used < shard_numel:
            segments.append((PADDING, 0, offset, shard_numel - used))
    return BufferLayout(world_size, shard_numel, rank, tuple(segments))


LAYOUTS = {"flat": flat_layout, "per_param": per_param_layout}
