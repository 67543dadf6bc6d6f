"""The copies in triton's interpreter, against the reference: flatten_shard, unflatten_shard, cast_gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton_interpreter import Watch, assert_same, float_values

from shardops import ops
from shardops.backends.triton import _copy, _launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (None, 0.3, -1.0, 1e30, float("inf"))
each_pair = pytest.mark.parametrize("target", DTYPES, ids=str)
each_source = pytest.mark.parametrize("source", DTYPES, ids=str)


def tails(dtype: torch.dtype) -> list[Tensor]:
    """Tensors of 1 to 70 elements, back to back in one allocation: nearly all of them unaligned."""
    flat = float_values(70 * 71 // 2, dtype, seed=1)
    return list(flat.split(list(range(1, 71))))


def both_ways(tensors: Sequence[Tensor], world_size: int, **options: object) -> None:
    """flatten_shard and then unflatten_shard of its buffer, each compared with the reference's."""
    scale = options.get("scale")
    expected = ops.flatten_shard(tensors, world_size, backend="reference", **options)
    actual = torch.full_like(expected, 7.0)
    with Watch(tensors, [actual], seed=world_size):
        ops.flatten_shard(tensors, world_size, backend="triton", **options | {"out": actual, "dtype": None})
    exact = scale is None and all(tensor.dtype == actual.dtype for tensor in tensors)
    assert_same(actual, expected, exact=exact)

    back = [torch.full_like(tensor, 7.0) for tensor in tensors]
    expected_back = [tensor.clone() for tensor in back]
    layout = str(options.get("layout", "flat"))
    ops.unflatten_shard(expected, expected_back, layout=layout, scale=scale, backend="reference")  # type: ignore[arg-type]
    with Watch([expected], back, seed=world_size):
        ops.unflatten_shard(expected, back, layout=layout, scale=scale, backend="triton")  # type: ignore[arg-type]
    for one, other in zip(back, expected_back, strict=True):
        assert_same(one, other, exact=exact)


@each_source
@each_pair
@pytest.mark.parametrize("scale", SCALES)
def test_full_chunks_and_a_tail(source: torch.dtype, target: torch.dtype, scale: float | None) -> None:
    both_ways([float_values(9_000, source, seed=2)], 2, dtype=target, scale=scale)


@each_source
@each_pair
def test_every_tail_at_every_alignment(source: torch.dtype, target: torch.dtype) -> None:
    both_ways(tails(source), 3, dtype=target)


@pytest.mark.parametrize("source", DTYPES[1:], ids=str)
@each_pair
def test_every_16_bit_pattern(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.arange(2**16).to(torch.int16).view(source)
    out = torch.empty(2**16, dtype=target)
    with Watch([values], [out]):
        ops.cast_gather([values], target, out=out, backend="triton")
    assert_same(out, ops.cast_gather([values], target, backend="reference"), exact=source == target)


@pytest.mark.parametrize("scale", [None, float("inf"), -1.0])
def test_padding_is_zero(scale: float | None) -> None:
    tensors = [torch.ones(5), torch.ones(3, 3)]
    out = ops.flatten_shard(tensors, 4, align=64, scale=scale, backend="triton")
    assert (out.view(torch.int32).ravel()[14:] == 0).all()


@pytest.mark.parametrize("layout", ["flat", "per_param"])
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_layouts_ranks_and_mixed_dtypes(layout: str, rank: int | None) -> None:
    shapes = [(7, 5), (2, 3), (), (0, 4), (9, 33), (1, 300)]
    tensors = [float_values(int(np.prod(s)), DTYPES[i % 3], seed=i).reshape(s) for i, s in enumerate(shapes)]
    options = {"rank": rank, "dtype": torch.bfloat16, "layout": layout}
    expected = ops.flatten_shard(tensors, 3, backend="reference", **options)  # type: ignore[arg-type]
    actual = torch.full_like(expected, 7.0)
    with Watch(tensors, [actual]) as watch:
        ops.flatten_shard(tensors, 3, backend="triton", out=actual, **options | {"dtype": None})  # type: ignore[arg-type]
    assert_same(actual, expected)
    assert len(watch.launches) <= 3  # one for each dtype


@pytest.mark.parametrize("layout", ["flat", "per_param"])
def test_unflatten_several_dtypes(layout: str) -> None:
    tensors = [torch.randn(7, 5), torch.randn(2, 3).bfloat16(), torch.randn(()).half(), torch.empty(0, 4)]
    both_ways(tensors, 3, dtype=torch.float32, layout=layout)


def test_only_empty_tensors() -> None:
    tensors = [torch.empty(0), torch.empty(0, 8)]
    assert ops.cast_gather(tensors, torch.bfloat16, backend="triton").numel() == 0
    assert ops.flatten_shard(tensors, 2, backend="triton").shape == (2, 0)
    ops.unflatten_shard(torch.empty(2, 0), tensors, backend="triton")
    assert torch.ops.shardops.flatten_shard.triton(torch.empty(0), [], torch.empty(0, 4, dtype=torch.int64)) is None


def test_one_launch_for_many_tensors() -> None:
    tensors = tails(torch.float32) + [torch.empty(0)] * 5
    out = torch.empty(70 * 71 // 2, dtype=torch.bfloat16)
    with Watch(tensors, [out]) as watch:
        ops.cast_gather(tensors, torch.bfloat16, out=out, backend="triton")
    assert watch.launches == ["copy_kernel"]
    assert_same(out, ops.cast_gather(tensors, torch.bfloat16, backend="reference"))


@each_source
@each_pair
def test_bytes_are_the_minimum(source: torch.dtype, target: torch.dtype) -> None:
    shards = [torch.ones(8192, dtype=source), torch.ones(8192, dtype=source)]
    out = torch.empty(2 * 8192, dtype=target)
    with Watch(shards, [out]) as watch:
        ops.cast_gather(shards, target, out=out, backend="triton")
    assert (watch.loaded, watch.stored) == (16384 * source.itemsize, 16384 * target.itemsize)


def test_offsets_past_32_bits() -> None:
    """The last chunk of 2^33 + 5 elements, of which only that chunk exists."""
    numel, chunk_numel = 2**33 + 5, _copy.ROUNDS * 4 * _launch.THREADS
    entries = _launch.chunk_entries(np.array([3, numel]), 2**20)
    assert entries[[0, 1, -1]].tolist() == [0, 1 << 32, 1 << 32 | 2**13]
    chunk = numel // chunk_numel
    values, out = float_values(5, torch.float32, seed=3), torch.zeros(5, dtype=torch.bfloat16)
    before = chunk * chunk_numel
    rows = torch.tensor([values.data_ptr() - 4 * before, out.data_ptr() - 2 * before, numel])
    with Watch([values], [out]):
        _copy.copy_kernel[(1,)](
            rows, torch.tensor([chunk]), 1.0, SOURCE=tl.float32, TARGET=tl.bfloat16, SCALED=False, VECTOR=4,
            BLOCK=4 * _launch.THREADS, ROUNDS=_copy.ROUNDS,
        )  # fmt: skip
    assert_same(out, values.to(torch.bfloat16))


def test_direct_calls_are_checked() -> None:
    flatten, out = torch.ops.shardops.flatten_shard.triton, torch.zeros(8)
    for segment in ([0, 0, 5, 4], [0, 2, 0, 3], [1, 0, 0, 1], [-2, 0, 0, 1], [0, -1, 0, 1], [0, 0, 0, -1]):
        with pytest.raises(ValueError, match="reaches outside"):
            flatten(out, [torch.zeros(4)], torch.tensor([segment]))
    with pytest.raises(ValueError, match="contiguous float tensors"):
        flatten(out, [torch.zeros(4, 2).t()], torch.tensor([[0, 0, 0, 8]]))
    with pytest.raises(ValueError, match="the shards have 4"):
        torch.ops.shardops.cast_gather.triton(out, [torch.zeros(4)])
    assert (out == 0).all()
