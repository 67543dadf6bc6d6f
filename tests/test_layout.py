"""Layouts of flat buffers against a model made of Python lists, and their numbers past 2^31."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from properties import given, st

from shardops import layout

Element = tuple[int, int] | None  # (tensor, offset in it), or padding

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=5)
WORLD = st.integers(1, 6)
ALIGN = st.integers(1, 9)
KINDS = sorted(layout.LAYOUTS)


def flat_model(shapes: Sequence[Sequence[int]], world_size: int, align: int) -> list[list[Element]]:
    elements: list[Element] = [(t, i) for t, shape in enumerate(shapes) for i in range(math.prod(shape))]
    shard = math.ceil(len(elements) / world_size)
    while shard % align:
        shard += 1
    elements += [None] * (world_size * shard - len(elements))
    return [elements[rank * shard : (rank + 1) * shard] for rank in range(world_size)]


def per_param_model(shapes: Sequence[Sequence[int]], world_size: int, align: int) -> list[list[Element]]:
    shards: list[list[Element]] = [[] for _ in range(world_size)]
    for tensor, shape in enumerate(shapes):
        rows = shape[0] if shape else 1
        width = math.prod(shape[1:])
        elements: list[Element] = [(tensor, i) for i in range(rows * width)]
        while rows % world_size:
            rows += 1
            elements += [None] * width
        for rank, shard in enumerate(shards):
            shard += elements[rank * rows // world_size * width : (rank + 1) * rows // world_size * width]
    for shard in shards:
        shard += [None] * (-len(shard) % align)
    return shards


MODELS = {"flat": flat_model, "per_param": per_param_model}


def expand(built: layout.BufferLayout) -> list[Element]:
    """The buffer element by element; fails where segments leave a hole or overlap."""
    elements: list[Element] = []
    for tensor, tensor_offset, buffer_offset, numel in built.segments:
        assert buffer_offset == len(elements), "segments are in the order of the buffer, without holes or overlaps"
        assert numel > 0
        if tensor == layout.PADDING:
            elements += [None] * numel
        else:
            elements += [(tensor, tensor_offset + i) for i in range(numel)]
    return elements


@pytest.mark.parametrize("kind", KINDS)
@given(shapes=SHAPES, world_size=WORLD, align=ALIGN)
def test_layout_is_the_model(kind: str, shapes: list[tuple[int, ...]], world_size: int, align: int) -> None:
    expected = MODELS[kind](shapes, world_size, align)
    whole = layout.LAYOUTS[kind](shapes, world_size, align)
    assert whole.shard_numel == len(expected[0])
    assert whole.shape == (world_size, len(expected[0]))
    assert expand(whole) == list(itertools.chain(*expected))
    for rank in range(world_size):
        one = layout.LAYOUTS[kind](shapes, world_size, align, rank)
        assert one.shape == (whole.shard_numel,)
        assert expand(one) == expected[rank]


@pytest.mark.parametrize("kind", KINDS)
@given(shapes=SHAPES, world_size=WORLD, align=ALIGN)
def test_every_element_of_every_tensor_once(
    kind: str, shapes: list[tuple[int, ...]], world_size: int, align: int
) -> None:
    found = [element for element in expand(layout.LAYOUTS[kind](shapes, world_size, align)) if element is not None]
    assert sorted(found) == [(t, i) for t, shape in enumerate(shapes) for i in range(math.prod(shape))]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensors(kind: str) -> None:
    built = layout.LAYOUTS[kind]([], 4, 32)
    assert (built.shape, built.segments) == ((4, 0), ())


def test_docstring_examples() -> None:
    flat = layout.flat_layout([(3,), (4,)], 2, 1)
    assert flat.segments == ((0, 0, 0, 3), (1, 0, 3, 4), (layout.PADDING, 0, 7, 1))
    rows = layout.per_param_layout([(3,), (2,)], 2, 1)
    assert rows.segments == ((0, 0, 0, 2), (1, 0, 2, 1), (0, 2, 3, 1), (layout.PADDING, 0, 4, 1), (1, 1, 5, 1))


def test_uneven_rows_as_fsdp_cuts_them() -> None:
    """(1601, 1280) over 4 ranks: 401, 401, 401 and 398 rows."""
    present = []
    for rank in range(4):
        built = layout.per_param_layout([(1601, 1280)], 4, 1, rank)
        assert built.shard_numel == 401 * 1280
        present.append(sum(numel for tensor, _, _, numel in built.segments if tensor == 0) // 1280)
    assert present == [401, 401, 401, 398]


@pytest.mark.parametrize(("numel", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (7, 1, 7)])
def test_align_up(numel: int, multiple: int, expected: int) -> None:
    assert layout.align_up(numel, multiple) == expected


def test_numel_of() -> None:
    assert [layout.numel_of(shape) for shape in [(), (3,), (3, 4), (3, 0, 4)]] == [1, 3, 12, 0]


@pytest.mark.parametrize("numel", [2_359_332_864, 2**31, 2**32 + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_past_31_bits(kind: str, numel: int) -> None:
    """Three tensors, the second huge: every offset behind it stays exact."""
    shapes = [(5,), (numel,), (7,)]
    whole = layout.LAYOUTS[kind](shapes, 2, 32)
    assert whole.shard_numel >= (numel + 12) // 2
    assert whole.shard_numel - (numel + 12) / 2 < 64
    end = 0
    taken = [0, 0, 0]
    for tensor, tensor_offset, buffer_offset, count in whole.segments:
        assert buffer_offset == end
        end += count
        if tensor != layout.PADDING:
            assert tensor_offset == taken[tensor]
            taken[tensor] += count
    assert end == 2 * whole.shard_numel
    assert taken == [5, numel, 7]
