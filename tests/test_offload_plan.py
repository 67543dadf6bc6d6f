"""How the states of a step are cut into pieces that fit the staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from reference import generator

from shardops.optim.offload_plan import Cut, Extent, Piece, plan_pieces, staged_nbytes


def extents(*numels: int, grain: int = 1, itemsize: int = 1, home: int = 0) -> list[Extent]:
    return [Extent(n, min(grain, n), ((itemsize, 1),), (home, i)) for i, n in enumerate(numels)]


def ranges(pieces: Sequence[Piece]) -> list[list[tuple[int, int, int]]]:
    return [[(cut.member, cut.first, cut.last) for cut in piece.cuts] for piece in pieces]


def test_pieces_of_the_example() -> None:
    pieces = plan_pieces([extents(256, 512, 2048, 256)], 1024)
    assert ranges(pieces) == [[(0, 0, 256), (1, 0, 512)], [(2, 0, 1024)], [(2, 1024, 2048)], [(3, 0, 256)]]
    assert [piece.nbytes for piece in pieces] == [768, 1024, 1024, 256]
    assert pieces[1].cuts[0] == Cut(2, 0, 1024, is_whole=False, is_last=False)
    assert pieces[2].cuts[0] == Cut(2, 1024, 2048, is_whole=False, is_last=True)


def test_pieces_have_every_element_once_and_fit() -> None:
    rng = generator(0)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=rng))

    for _ in range(200):
        limit = 256 * (4 + below(20))
        buckets = []
        for bucket in range(1 + below(3)):
            found = []
            for member in range(below(6)):
                grain, grains = 1 + below(300), below(40)
                numel = grain * grains
                sizes = ((1, 1), (2, 1), (8, 128), (4, 1))[: 1 + below(4)]
                found.append(Extent(numel, grain if numel else 0, sizes, (bucket, member)))
            buckets.append(found)
        pieces = plan_pieces(buckets, limit)
        covered: dict[tuple[int, int], int] = {}
        for piece in pieces:
            whole = [cut.is_whole for cut in piece.cuts]
            assert all(whole) or len(whole) == 1
            assert piece.after is None
            for cut in piece.cuts:
                extent = buckets[piece.bucket][cut.member]
                assert covered.pop((piece.bucket, cut.member), 0) == cut.first
                assert cut.last > cut.first or extent.numel == 0
                assert cut.is_whole == ((cut.first, cut.last) == (0, extent.numel))
                assert cut.is_last == (cut.last == extent.numel)
                assert cut.last == extent.numel or cut.last % extent.grain == 0
                covered[piece.bucket, cut.member] = cut.last
                one = staged_nbytes(extent, extent.grain)
                assert piece.nbytes <= max(limit, one)
            assert piece.nbytes == sum(
                staged_nbytes(buckets[piece.bucket][cut.member], cut.last - cut.first) for cut in piece.cuts
            )
        assert covered == {(b, m): extent.numel for b, found in enumerate(buckets) for m, extent in enumerate(found)}
        for before, piece in pairwise(pieces):
            if before.bucket == piece.bucket and before.cuts[-1].is_whole and piece.cuts[0].is_whole:
                first = buckets[piece.bucket][piece.cuts[0].member]
                assert before.nbytes + staged_nbytes(first, first.numel) > limit  # none is shorter than it need be


def test_a_piece_waits_for_the_last_one_that_wrote_its_memory() -> None:
    one, other = extents(2048, 256), extents(2048, 256, home=1)
    pieces = plan_pieces([one, other, one, one], 1024)
    assert [piece.after for piece in pieces] == [None] * 6 + [1, 1, 2, 7, 7, 8]
