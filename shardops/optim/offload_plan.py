"""Cuts the states of a step's buckets into pieces that fit a part of the staging memory. Integers only.

A piece is one launch: whole parameters, or a part of one that alone is too large. ``offload.py`` streams them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Bytes that each staged tensor begins at a multiple of: the widest access of a kernel, and a line of a DMA engine.
ALIGNMENT = 256


@dataclass(frozen=True)
class Extent:
    """One parameter of a bucket, as the planner sees it.

    Attributes:
        numel: its elements.
        grain: it may be cut at multiples of so many elements; ``numel``: nowhere.
        sizes: of each of its staged tensors, (bytes, elements): it has so many bytes for so many elements, or a part of
            that many at the end of a row. Plain ones: (itemsize, 1); words of blocks: (8, 128).
        home: what its states are known by: two extents with one home share their host memory.
    """

    numel: int
    grain: int
    sizes: tuple[tuple[int, int], ...]
    home: Hashable


@dataclass(frozen=True)
class Cut:
    """The elements ``[first, last)`` of a parameter.

    Attributes:
        member: the parameter's position in its bucket.
        is_whole: it is the whole parameter.
        is_last: the parameter's step counts with this cut; the kernel advances a copy of its counter with others.
    """

    member: int
    first: int
    last: int
    is_whole: bool
    is_last: bool


@dataclass(frozen=True)
class Piece:
    """What one launch updates.

    Attributes:
        bucket: position of its bucket among the step's.
        cuts: of parameters of that bucket; a cut that is not a whole parameter is alone.
        nbytes: staging memory that it takes.
        after: the last piece before it that writes host memory which it reads; None: there is none.
    """

    bucket: int
    cuts: tuple[Cut, ...]
    nbytes: int
    after: int | None


def aligned(nbytes: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def staged_nbytes(extent: Extent, numel: int) -> int:
    """Staging memory of so many elements (whole grains, or all) of a parameter."""
    return sum(aligned(-(-numel // elements) * nbytes) for nbytes, elements in extent.sizes)


def plan_pieces(buckets: Sequence[Sequence[Extent]], limit: int) -> list[Piece]:
    """Pieces of at most ``limit`` bytes, in the buckets' order; together they have every element once.

    A grain that is larger by itself becomes a piece all the same: whoever allocates looks at ``nbytes``.

    Example: with ``limit`` 1024 and one staged tensor each, parameters of 256, 512, 2048 and 256 bytes, all to be cut
    anywhere, become the pieces (256 + 512), 1024, 1024, 256.
    """
    pieces: list[Piece] = []
    latest: dict[Hashable, int] = {}  # home -> the piece that wrote it last, of those in earlier buckets
    for bucket, extents in enumerate(buckets):
        written: dict[Hashable, int] = {}
        for cuts in _cut(extents, limit):
            nbytes = sum(staged_nbytes(extents[cut.member], cut.last - cut.first) for cut in cuts)
            homes = [extents[cut.member].home for cut in cuts]
            after = max((latest[home] for home in homes if home in latest), default=None)
            written |= dict.fromkeys(homes, len(pieces))
            pieces.append(Piece(bucket, cuts, nbytes, after))
        latest |= written
    return pieces


def _cut(extents: Sequence[Extent], limit: int) -> list[tuple[Cut, ...]]:
    result: list[tuple[Cut, ...]] = []
    pending: list[Cut] = []
    used = 0
    for member, extent in enumerate(extents):
        nbytes = staged_nbytes(extent, extent.numel)
        if pending and used + nbytes > limit:
            result.append(tuple(pending))
            pending, used = [], 0
        if nbytes > limit and extent.grain < extent.numel:
            result += [(cut,) for cut in _parts(member, extent, limit)]
        else:
            pending.append(Cut(member, 0, extent.numel, True, True))
            used += nbytes
    if pending:
        result.append(tuple(pending))
    return result


def _parts(member: int, extent: Extent, limit: int) -> list[Cut]:
    """Parts of nearly equal size: a short last one would leave the copies nothing to overlap with."""
    grains = -(-extent.numel // extent.grain)
    most = 1
    low, high = 1, grains
    while low <= high:  # alignment makes the size a staircase, which still never falls
        middle = (low + high) // 2
        if staged_nbytes(extent, min(middle * extent.grain, extent.numel)) <= limit:
            most, low = middle, middle + 1
        else:
            high = middle - 1
    count = -(-grains // most)
    bounds = [min(extent.grain * (grains * part // count), extent.numel) for part in range(count + 1)]
    return [Cut(member, first, last, False, last == extent.numel) for first, last in pairwise(bounds)]
