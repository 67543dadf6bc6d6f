"""What is particular to the CUDA kernels of copies and norm, shown by their twins: bytes moved, launches, grids.

Also where any kernel finds its work and its dither, in tensors too large to be had. Bits: the primitives' own tests.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import twin
from reference import DTYPES, assert_bits_equal, ordinary
from torch import Tensor

NORM_TYPES = (1.0, 2.0, math.inf)
NORM_BLOCK = 4096

each_cast = pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)), ids=str)


@pytest.fixture(autouse=True)
def _registered() -> None:
    twin.register()


def placed(numel: int, dtype: torch.dtype, offset: int = 0, seed: int | None = None) -> Tensor:
    """A tensor that begins ``offset`` elements after an address where any access is allowed."""
    whole = torch.full((numel + offset + 64,), 77.0, dtype=dtype)
    start = -whole.data_ptr() % 64 // dtype.itemsize + offset
    view = whole[start : start + numel]
    return view if seed is None else view.copy_(ordinary(numel, seed=seed, dtype=dtype))


def c_array(kind: Any, values: Sequence[float]) -> Any:
    return (kind * len(values))(*values)


def flatten(out: Tensor, tensors: list[Tensor], rows: Sequence[Sequence[int]], scale: float | None = None) -> None:
    segments = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    torch.ops.shardops_twin.flatten_shard(out, tensors, segments, scale)


def unflatten(buffer: Tensor, outs: list[Tensor], rows: Sequence[Sequence[int]], scale: float | None = None) -> None:
    segments = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    torch.ops.shardops_twin.unflatten_shard(buffer, outs, segments, scale)


def cast(tensor: Tensor, dtype: torch.dtype, scale: float | None) -> Tensor:
    return tensor.to(dtype) if scale is None else (tensor.float() * scale).to(dtype)


def at_once(source: torch.dtype, target: torch.dtype) -> int:
    """Elements of an access: 16 bytes of the wider type."""
    return 16 // max(source.itemsize, target.itemsize)


# ---- copies: bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.3])
@each_cast
def test_copies_move_each_element_once(source: torch.dtype, target: torch.dtype, scale: float | None) -> None:
    """Wide wherever source and target are misaligned alike; else one by one. Padding is written and not read."""
    numel, padding = 3 * 4096, 4096
    wide = at_once(source, target)
    for shift, other in itertools.product((0, 1, 3, 7), (0, 1, 3, 7)):
        tensor, out = placed(numel, source, other, seed=1), placed(numel + padding, target, shift)
        alike = shift % wide == other % wide
        with twin.Traffic() as traffic:
            flatten(out, [tensor], [(0, 0, 0, numel), (-1, 0, numel, padding)], scale)
        assert_bits_equal(out, torch.cat((cast(tensor, target, scale), torch.zeros(padding, dtype=target))), exact=True)
        assert (traffic.loaded, traffic.stored) == (numel * source.itemsize, (numel + padding) * target.itemsize)
        # All but the elements before the first aligned address and after the last one, twice.
        least, most = ((numel if alike else 0) / wide - 2, (numel if alike else 0) / wide)
        assert least <= traffic.wide_loads <= most, (shift, other)
        assert least + padding / wide - 2 <= traffic.wide_stores <= most + padding / wide, (shift, other)
        if alike:
            assert traffic.wide_loads * wide >= 0.99 * numel
        assert traffic.launches == 1


@each_cast
def test_unflatten_moves_each_element_once(source: torch.dtype, target: torch.dtype) -> None:
    """To tensors that begin anywhere, from where the buffer begins as they do."""
    wide, sizes, shifts = at_once(source, target), (4096, 2 * 4096, 4096), (1, 3, 7)
    buffer = placed(40_000, source, seed=2)
    outs = [placed(n, target, shift) for n, shift in zip(sizes, shifts, strict=True)]
    rows = [(i, 0, 10_000 * i + wide * 3 + shifts[i], sizes[i]) for i in range(3)]
    with twin.Traffic() as traffic:
        unflatten(buffer, outs, rows)
    for out, (_, _, start, numel) in zip(outs, rows, strict=True):
        assert_bits_equal(out, buffer[start : start + numel].to(target), exact=True)
    assert (traffic.loaded, traffic.stored) == (sum(sizes) * source.itemsize, sum(sizes) * target.itemsize)
    assert traffic.wide_loads * wide >= 0.99 * sum(sizes)
    assert traffic.wide_stores == traffic.wide_loads
    assert traffic.launches == 1


# ---- copies: launches ------------------------------------------------------------------------------------------------


def capacities() -> tuple[int, int]:
    """Segments of one copy's launch, and tensors of one of the norm's."""
    found = (ctypes.c_int64 * 4)()
    twin.load().shardops_twin_capacities(found)
    return found[2], found[3]


def every_other(count: int) -> list[tuple[int, int, int, int]]:
    """Segments of one element each in one tensor and a buffer, with a gap after each."""
    return [(0, 2 * i, 2 * i, 1) for i in range(count)]


def test_one_launch_copies_hundreds_of_segments() -> None:
    most, _ = capacities()
    assert most >= 1000
    for count, launches in ((most, 1), (most + 1, 2), (2 * most + 1, 3)):
        tensor, out = ordinary(2 * count, seed=3), torch.full((2 * count,), 55.0)
        with twin.Traffic() as traffic:
            flatten(out, [tensor], every_other(count))
        assert traffic.launches == launches
        assert torch.equal(out[::2], tensor[::2])
        assert (out[1::2] == 55).all()


def test_neighbours_are_one_segment() -> None:
    """Adjacent in tensor and buffer, whatever their lengths: one launch, wide; the same for padding; gather alike."""
    most, _ = capacities()
    pieces = [1 + i % 5 for i in range(2 * most)]
    total = sum(pieces)
    starts = list(itertools.accumulate(pieces, initial=0))
    tensor, out = placed(total, torch.float32, 1, seed=4), placed(2 * total, torch.float32, 1)
    rows = [(0, s, s, n) for s, n in zip(starts, pieces, strict=False)]
    rows += [(-1, 0, total + s, n) for s, n in zip(starts, pieces, strict=False)]
    with twin.Traffic() as traffic:
        flatten(out, [tensor], rows)
    assert_bits_equal(out, torch.cat((tensor, torch.zeros(total))), exact=True)
    assert traffic.launches == 1
    assert traffic.wide_loads >= total / 4 - 2
    assert traffic.wide_stores >= total / 2 - 4
    gathered = placed(total, torch.bfloat16, 1)
    with twin.Traffic() as traffic:
        torch.ops.shardops_twin.cast_gather(gathered, list(tensor.split(pieces)))
    assert_bits_equal(gathered, tensor.bfloat16())
    assert traffic.launches == 1
    assert traffic.wide_loads >= total / 4 - 2


@pytest.mark.parametrize(("tensor_step", "buffer_step"), [(4, 3), (3, 4), (2, 3)])
def test_neighbours_on_one_side_are_not(tensor_step: int, buffer_step: int) -> None:
    """Segments of three elements: a wide access, of four, would show that two were taken as one."""
    tensor, out = ordinary(200, seed=5), torch.full((200,), 55.0)
    rows = [(0, tensor_step * i, buffer_step * i, 3) for i in range(30)]
    expected = out.clone()
    for _, source, target, numel in rows:
        expected[target : target + numel] = tensor[source : source + numel]
    with twin.Traffic() as traffic:
        flatten(out, [tensor], rows)
    assert_bits_equal(out, expected, exact=True)
    assert (traffic.wide_loads, traffic.wide_stores) == (0, 0)


def test_a_launch_for_each_dtype_and_none_for_nothing() -> None:
    tensors = [ordinary(5, seed=i, dtype=dtype) for i, dtype in enumerate((*DTYPES, *DTYPES))]
    out = torch.zeros(32)
    for count, launches in ((1, 1), (2, 2), (3, 3), (6, 3)):
        with twin.Traffic() as traffic:
            flatten(out, tensors, [(i, 0, 5 * i, 5) for i in range(count)])
        assert traffic.launches == launches
    most, _ = capacities()
    rows = list(itertools.chain(*(((0, i % 2 * 3, 2 * i, 1), (0, 0, 0, 0)) for i in range(most))))
    for table, launches in (([], 0), ([(0, 0, 0, 0)] * 9, 0), (rows, 1)):
        with twin.Traffic() as traffic:
            flatten(torch.zeros(2 * most), tensors[:1], table)
        assert traffic.launches == launches


# ---- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_reads_each_element_once(dtype: torch.dtype, norm_type: float) -> None:
    """And a tensor's last block, where it is not whole, twice. Four elements an access where they may be."""
    for shift, tail in itertools.product((0, 1, 2, 3, 4), (0, 1, 259)):
        blocks = 2 + (tail > 0)
        grad = placed(2 * NORM_BLOCK + tail, dtype, shift, seed=6)
        with twin.Traffic() as traffic:
            torch.ops.shardops_twin.grad_norm([grad], norm_type)
        passes = 1 if norm_type == math.inf else 2
        assert traffic.loaded == (2 * NORM_BLOCK + passes * tail) * dtype.itemsize + 8 * blocks, (shift, tail)
        assert traffic.stored == 8 * blocks + 8 + 4
        assert traffic.wide_loads == (2 * NORM_BLOCK // 4 if shift % 4 == 0 else 0) + blocks, (shift, tail)
        assert traffic.launches == 2


def test_one_launch_for_hundreds_of_gradients() -> None:
    """And one more for the other dtypes each, and one that combines; none for empty ones."""
    _, most = capacities()
    assert most >= 1000
    for count, launches in ((most, 2), (most + 1, 3)):
        grads = [torch.ones(n) for _ in range(count) for n in (1, 0)]
        with twin.Traffic() as traffic:
            total, _ = torch.ops.shardops_twin.grad_norm(grads, 1.0)
        assert (traffic.launches, float(total)) == (launches, count)
    with twin.Traffic() as traffic:
        torch.ops.shardops_twin.grad_norm([torch.ones(2, dtype=dtype) for dtype in (*DTYPES, *DTYPES)], 2.0)
    assert traffic.launches == 3 + 1
    with twin.Traffic() as traffic:
        torch.ops.shardops_twin.grad_norm([torch.empty(0)], 2.0)
    assert traffic.launches == 1


def combined(blocks: Sequence[float], norm_type: float) -> float:
    """Lane l of 256 takes blocks l, l + 256, .., then lane l takes lane l + width for width = 128, 64, .. 1."""

    def both(a: float, b: float) -> float:
        if norm_type != math.inf:
            return a + b
        return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)

    lanes = [0.0] * 256
    for index, block in enumerate(blocks):
        lanes[index % 256] = both(lanes[index % 256], block)
    while len(lanes) > 1:
        lanes = [both(a, b) for a, b in zip(lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :], strict=True)]
    return lanes[0]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 256, 257, 4095, 4096, 4097, 5000])
def test_blocks_are_combined_in_the_stated_order(count: int, norm_type: float) -> None:
    """Of magnitudes far apart, where another order has other bits; and none of them is lost that is not finite."""
    rng = random.Random(count)
    spread = [rng.random() * 2.0 ** rng.randrange(-30, 31) for _ in range(count)]
    cases = [(spread, 0.0), (([1.0, 2.0**53, 2.0**60] * 2000)[:count], 0.0)]
    for position in {0, 31, 32, 255, 256, 4095, 4096, count - 1} & set(range(count)):
        for bad in (math.inf, math.nan):
            cases.append(([*spread[:position], bad, *spread[position + 1 :]], 1.0))
    for blocks, flag in cases:
        total, nonfinite = ctypes.c_double(), ctypes.c_float()
        arguments = (c_array(ctypes.c_double, blocks), ctypes.c_int64(count), ctypes.c_bool(norm_type == math.inf))
        twin.load().shardops_twin_norm_combine(*arguments, ctypes.byref(total), ctypes.byref(nonfinite))
        assert nonfinite.value == flag
        expected = combined(blocks, norm_type)
        assert total.value == expected or (math.isnan(total.value) and math.isnan(expected))


# ---- grids -----------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 3, 4, 7, 8, 255, 1023, 1024, 1025, 4095, 4096, 4097, 16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1, 600_003)


@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
@each_cast
def test_any_grid_copies_everything(
    source: torch.dtype, target: torch.dtype, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around the borders of accesses, rounds and chunks, from and to any address; and nothing beside."""
    monkeypatch.setenv("SHARDOPS_TWIN_MULTIPROCESSORS", str(multiprocessors))
    values = ordinary(sum(SIZES), seed=7, dtype=source)
    for shift in range(3):
        tensors = []
        for index, part in enumerate(values.split(SIZES)):
            tensors.append(placed(part.numel(), source, (shift + index) % 5).copy_(part))
        rows, start = [], 0
        for index, size in enumerate(SIZES):
            rows.append((index, 0, start, size))
            start += size + index % 4
        out = torch.full((start,), 55.0, dtype=target)
        expected = out.clone()
        for index, _, place, size in rows:
            expected[place : place + size] = tensors[index].to(target)
        flatten(out, tensors, rows)
        assert_bits_equal(out, expected, exact=True)


# ---- where the work is -----------------------------------------------------------------------------------------------


def tables(rows: int, most_chunks: int, seed: int) -> tuple[list[int], list[int]]:
    """Chunks of each row, as uneven as they come, and the first ones; together ``most_chunks``."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, min(most_chunks, 1 << 12)), rows // 2))
    cuts += sorted(rng.sample(range(1 << 12, most_chunks), rows - 1 - len(cuts)))
    first = [0, *cuts]
    return [b - a for a, b in itertools.pairwise([*first, most_chunks])], first


def asked(chunks: list[int], first: list[int], seed: int) -> list[tuple[int, int]]:
    """(row, chunk) at both ends of each row, and anywhere in it."""
    rng = random.Random(seed)
    return [(row, chunk) for row, n in enumerate(chunks) for chunk in {0, n - 1, n // 2, rng.randrange(n)}]


@pytest.mark.parametrize("rows", [1, 2, 3, 333, 667])
@pytest.mark.parametrize("chunk_items", [8, 1024, 16 * 2048])
def test_work_in_tensors_of_any_size(rows: int, chunk_items: int) -> None:
    """Up to the 2^31 - 1 blocks that a grid has: 7 * 10^13 elements."""
    most = (1 << 31) - 1
    chunks, first = ([most], [0]) if rows == 1 else tables(rows, most, rows)
    items = [n * chunk_items - (row * 7) % chunk_items for row, n in enumerate(chunks)]
    wanted = asked(chunks, first, rows)
    blocks = c_array(ctypes.c_uint32, [first[row] + chunk for row, chunk in wanted])
    found = (ctypes.c_int64 * (3 * len(wanted)))()
    arguments = (c_array(ctypes.c_uint32, first), c_array(ctypes.c_int64, items), rows, chunk_items)
    twin.load().shardops_twin_find_work(*arguments, blocks, ctypes.c_int64(len(wanted)), found)
    expected = [(row, chunk * chunk_items, min(chunk_items, items[row] - chunk * chunk_items)) for row, chunk in wanted]
    assert list(found) == list(itertools.chain(*expected))


@pytest.mark.parametrize("rows", [1, 2, 3, 333, 1000])
def test_places_in_tables_of_any_size(rows: int) -> None:
    most = (1 << 31) - 1
    chunks, first = ([most], [0]) if rows == 1 else tables(rows, most, rows)
    wanted = asked(chunks, first, rows)
    blocks = c_array(ctypes.c_uint32, [first[row] + chunk for row, chunk in wanted])
    found = (ctypes.c_int64 * (2 * len(wanted)))()
    arguments = (c_array(ctypes.c_uint32, first), rows, blocks, ctypes.c_int64(len(wanted)), found)
    twin.load().shardops_twin_find_place(*arguments)
    assert list(found) == list(itertools.chain(*wanted))


OFFSETS = [base + near for base in (0, 1 << 31, 1 << 32, 1 << 33, 5 << 40) for near in (-2, -1, 0, 1, 2)]
COLUMNS = (1, 2, 37, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 5, 1 << 41)


@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3])
def test_dither_of_any_element(first: int) -> None:
    """The word of the element's global index, of which 32 bits count: beyond 2^31, 2^32, and rows of any length."""
    rng = random.Random(first)
    offsets = [n for n in (*OFFSETS, *(rng.randrange(1 << 43) for _ in range(50))) if n >= 0]
    for columns, stride, step in itertools.product(COLUMNS, (0, 1000, (1 << 32) - 1), (1, 16_777_216)):
        for strided in (True, False):
            words = (ctypes.c_uint32 * len(offsets))()
            salt = rng.randrange(1 << 32)
            place = (ctypes.c_uint32(first), ctypes.c_uint32(stride), ctypes.c_int64(columns))
            twin.load().shardops_twin_dither_words(
                *(ctypes.c_uint32(salt), ctypes.c_uint32(step), *place, ctypes.c_bool(strided)),
                *(c_array(ctypes.c_int64, offsets), ctypes.c_int64(len(offsets)), words),
            )
            for word, n in zip(words, offsets, strict=True):
                index = first + (n // columns * stride + n % columns if strided else n)
                assert word == (index * 0x85EBCA77 + step * 0x9E3779B9 + salt) % 2**32, (n, columns, stride)
