"""flatten_shard and unflatten_shard: bit for bit against torch.cat and torch._chunk_cat, there and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from properties import given, st
from reference import (
    DTYPES,
    assert_bits_equal,
    awkward,
    channels_last,
    strided,
    transposed,
    unaligned,
    whole_storage,
)
from torch import Tensor

from shardops import ops

LAYOUTS = ("flat", "per_param")
# Uneven rows, fewer rows than ranks, scalars, empty tensors, and sizes on both sides of a vector's width.
SHAPES = [(3, 5), (), (0, 8), (7,), (1, 1, 13), (17, 2), (8, 16), (1,), (2, 0, 3), (33,)]


def make(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [awkward(math.prod(shape), seed + i, dtype).view(shape) for i, shape in enumerate(shapes)]


def expected_flat(tensors: list[Tensor], world_size: int, align: int, dtype: torch.dtype) -> Tensor:
    whole = torch.cat([torch.zeros(0, dtype=dtype), *(t.reshape(-1).to(dtype) for t in tensors)])
    shard = math.ceil(math.ceil(whole.numel() / world_size) / align) * align
    return torch.nn.functional.pad(whole, (0, world_size * shard - whole.numel())).view(world_size, shard)


def expected_per_param(tensors: list[Tensor], world_size: int, align: int, dtype: torch.dtype) -> Tensor:
    parts = []
    for tensor in tensors:
        rows = tensor.view(1) if tensor.dim() == 0 else tensor
        missing = -rows.shape[0] % world_size
        padded = torch.cat([rows.to(dtype), torch.zeros(missing, *rows.shape[1:], dtype=dtype)])
        parts.append(padded.reshape(world_size, -1) if padded.numel() else torch.zeros(world_size, 0, dtype=dtype))
    joined = torch.cat([torch.zeros(world_size, 0, dtype=dtype), *parts], dim=1)
    return torch.nn.functional.pad(joined, (0, -joined.shape[1] % align))


EXPECTED = {"flat": expected_flat, "per_param": expected_per_param}


def restored(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(t, 99.0) for t in tensors]


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_cast_is_torchs(backend: str, source: torch.dtype, target: torch.dtype, layout: str) -> None:
    tensors = make([*SHAPES, (700, 3)], source)
    for world_size, align in ((1, 1), (4, 1), (5, 8)):
        got = ops.flatten_shard(tensors, world_size, dtype=target, layout=layout, align=align, backend=backend)
        expected = EXPECTED[layout](tensors, world_size, align, target)
        # Without a cast it is a copy, and keeps a NaN's payload.
        assert_bits_equal(got, expected, f"world_size {world_size}", exact=source == target)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_per_param_is_chunk_cat(backend: str, source: torch.dtype, world_size: int) -> None:
    """What FSDP2's reduce-scatter is fed, also with its cast to fp32. torch's chunk_cat crashes on empty and 0-dim."""
    tensors = make([(16, 5), (3, 4), (1, 7), (13,), (9, 2, 3)], source)
    expected = torch._chunk_cat(tensors, 0, world_size)
    assert_bits_equal(ops.flatten_shard(tensors, world_size, layout="per_param", backend=backend), expected, exact=True)
    expected = torch.empty(expected.shape, dtype=torch.float32)
    torch._chunk_cat(tensors, 0, world_size, out=expected)
    got = ops.flatten_shard(tensors, world_size, layout="per_param", dtype=torch.float32, backend=backend)
    assert_bits_equal(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [0.125, 1.0 / 3.0, -1.0, 3e38, 1e-40, 0.0])
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_scale_is_one_fp32_multiplication(backend: str, target: torch.dtype, scale: float, layout: str) -> None:
    for source in DTYPES:
        tensors = make([(33, 7), (5,)], source)
        factor = torch.tensor(scale, dtype=torch.float32)
        scaled = [(t.float() * factor).to(target) for t in tensors]
        got = ops.flatten_shard(tensors, 3, dtype=target, scale=scale, layout=layout, align=4, backend=backend)
        assert_bits_equal(got, EXPECTED[layout](scaled, 3, 4, target))
        outs = restored(tensors)
        buffer = EXPECTED[layout](tensors, 3, 4, source)
        ops.unflatten_shard(buffer, outs, layout=layout, scale=scale, backend=backend)
        for out, tensor in zip(outs, tensors, strict=True):
            assert_bits_equal(out, (tensor.float() * factor).to(source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_is_its_row(backend: str, layout: str) -> None:
    tensors = make(SHAPES)
    for world_size in (1, 2, 5, 40):
        whole = ops.flatten_shard(tensors, world_size, layout=layout, backend=backend)
        for rank in range(world_size):
            one = ops.flatten_shard(tensors, world_size, rank=rank, layout=layout, backend=backend)
            assert_bits_equal(one, whole[rank], f"rank {rank} of {world_size}", exact=True)


@pytest.mark.parametrize(("dtype", "numel"), [(torch.float32, 32), (torch.bfloat16, 64), (torch.float16, 64)])
def test_default_align(backend: str, dtype: torch.dtype, numel: int) -> None:
    """128 bytes a shard for "flat"; nothing for "per_param", as chunk_cat."""
    tensors = [torch.ones(3, 2, dtype=dtype)]
    assert ops.flatten_shard(tensors, 2, backend=backend).shape == (2, numel)
    assert ops.flatten_shard(tensors, 2, layout="per_param", backend=backend).shape == (2, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_zero_in_a_dirty_out(backend: str, layout: str) -> None:
    tensors = [torch.ones(3, 3), torch.ones(5)]
    out = torch.full((4, 32), math.nan)
    result = ops.flatten_shard(tensors, 4, layout=layout, align=32, out=out, backend=backend)
    assert result is out
    assert out.sum() == 14
    assert not out.isnan().any()


def test_out_gives_the_dtype(backend: str) -> None:
    tensors = [awkward(50, 1), awkward(20, 2, torch.bfloat16)]
    out = torch.empty(2, 40, dtype=torch.float16)
    ops.flatten_shard(tensors, 2, align=8, out=out, backend=backend)
    assert_bits_equal(out, expected_flat(tensors, 2, 8, torch.float16))


@pytest.mark.parametrize("numel", range(1, 71))
def test_tails(backend: str, numel: int) -> None:
    """Every length around the vector widths, at an odd address, into the middle of a buffer."""
    for source in DTYPES:
        tensors = [unaligned(awkward(3, 1, source)), unaligned(awkward(numel, numel, source), 3)]
        for target in DTYPES:
            got = ops.flatten_shard(tensors, 1, dtype=target, align=1, scale=0.7, backend=backend)[0]
            scaled = [(t.float() * torch.tensor(0.7)).to(target) for t in tensors]
            assert_bits_equal(got, torch.cat(scaled))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_read_as_what_they_are(backend: str, layout: str) -> None:
    tensors = [
        transposed(awkward(35, 1).view(5, 7)),
        strided(awkward(24, 2).view(4, 6)),
        channels_last(awkward(120, 3).view(2, 3, 4, 5)),
        unaligned(awkward(11, 4), 5),
        awkward(1, 5).expand(6),
        awkward(9, 6).requires_grad_(),
    ]
    got = ops.flatten_shard(tensors, 3, layout=layout, align=1, backend=backend)
    plain = [t.detach().contiguous() for t in tensors]
    assert_bits_equal(got, EXPECTED[layout](plain, 3, 1, torch.float32), exact=True)
    assert not got.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_written_in_place_and_only_they(backend: str, layout: str) -> None:
    plain = [awkward(35, 1).view(5, 7), awkward(24, 2).view(4, 6), awkward(120, 3).view(2, 3, 4, 5), awkward(11, 4)]
    views = [
        transposed(torch.zeros(5, 7)),
        strided(torch.zeros(4, 6)),
        channels_last(torch.zeros(2, 3, 4, 5)),
        unaligned(torch.zeros(11), 5),
    ]
    buffer = ops.flatten_shard(plain, 3, layout=layout, backend=backend)
    before = buffer.clone()
    result = ops.unflatten_shard(buffer, views, layout=layout, backend=backend)
    assert result is views
    for view, tensor in zip(views, plain, strict=True):
        assert_bits_equal(view, tensor, exact=True)
    assert (whole_storage(views[1])[1::2] == 77).all()
    assert (whole_storage(views[3])[:5] == 77).all()
    assert (whole_storage(views[3])[16:] == 77).all()
    assert_bits_equal(buffer, before, "buffer", exact=True)


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6),
    world_size=st.integers(1, 5),
    align=st.integers(1, 40),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(("reference", "cpp")),
)
def test_there_and_back(
    shapes: list[tuple[int, ...]], world_size: int, align: int, layout: str, dtype: torch.dtype, name: str
) -> None:
    tensors = make(shapes, dtype)
    buffer = ops.flatten_shard(tensors, world_size, layout=layout, align=align, backend=name)
    assert_bits_equal(buffer, EXPECTED[layout](tensors, world_size, align, dtype), exact=True)
    outs = restored(tensors)
    ops.unflatten_shard(buffer, outs, layout=layout, backend=name)
    for out, tensor in zip(outs, tensors, strict=True):
        assert_bits_equal(out, tensor, exact=True)


def test_unflatten_casts_to_each_targets_dtype(backend: str) -> None:
    tensors = make([(9, 4), (31,), (8,)])
    outs = [torch.zeros(t.shape, dtype=d) for t, d in zip(tensors, DTYPES, strict=True)]
    ops.unflatten_shard(ops.flatten_shard(tensors, 2, backend=backend), outs, backend=backend)
    for out, tensor in zip(outs, tensors, strict=True):
        assert_bits_equal(out, tensor.to(out.dtype))


def test_one_shard_of_a_world_of_one(backend: str) -> None:
    tensors = make([(3, 4), (5,)])
    buffer = ops.flatten_shard(tensors, 1, rank=0, backend=backend)
    assert buffer.shape == (32,)
    outs = restored(tensors)
    ops.unflatten_shard(buffer, outs, backend=backend)
    for out, tensor in zip(outs, tensors, strict=True):
        assert_bits_equal(out, tensor, exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_but_empty_tensors(backend: str, layout: str) -> None:
    tensors = [torch.empty(0, 8), torch.empty(3, 0)]
    buffer = ops.flatten_shard(tensors, 4, layout=layout, backend=backend)
    assert buffer.shape == (4, 0)
    assert ops.unflatten_shard(buffer, tensors, layout=layout, backend=backend) is tensors
    out = torch.empty(4, 0)
    assert ops.flatten_shard([], 4, layout=layout, out=out, backend=backend) is out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_give_the_same_bits(layout: str) -> None:
    tensors = make([(70_001,), (513, 301), (2,)], torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        buffer = ops.flatten_shard(tensors, 3, dtype=torch.bfloat16, scale=0.3, layout=layout, align=1, backend="cpp")
        outs = restored(tensors)
        ops.unflatten_shard(buffer, outs, layout=layout, backend="cpp")
        results.append([buffer, *outs])
    scaled = [(t * torch.tensor(0.3)).bfloat16() for t in tensors]
    assert_bits_equal(results[0][0], EXPECTED[layout](scaled, 3, 1, torch.bfloat16))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert_bits_equal(mine, theirs, exact=True)


def test_writes_are_seen_by_autograd(backend: str) -> None:
    """An overwritten tensor that backward needs is an error, not a wrong gradient."""
    x = torch.ones(4, requires_grad=True)
    target = torch.ones(4)
    y = (x * target).sum()
    ops.unflatten_shard(torch.zeros(4), [target], backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    out = torch.ones(1, 4)
    y = (x * out).sum()
    ops.flatten_shard([torch.zeros(4)], 1, align=1, out=out, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [2**31 + 100, 2_359_332_864, 2**32 + 1])
def test_offsets_past_31_bits(numel: int) -> None:
    """Memory that is reserved and never touched but at its end: the kernel's own offsets, at no cost."""
    huge = torch.empty(numel, dtype=torch.bfloat16)
    values = awkward(70, 3, torch.bfloat16)
    huge[-70:] = values
    out = torch.zeros(100, dtype=torch.bfloat16)
    segments = torch.tensor([[0, numel - 70, 5, 70], [-1, 0, 75, 25]])
    torch.ops.shardops.flatten_shard(out, [huge], segments)
    assert_bits_equal(out[5:75], values, exact=True)

    huge[-70:] = 0
    torch.ops.shardops.flatten_shard(huge, [values], torch.tensor([[0, 0, numel - 70, 70]]))
    assert_bits_equal(huge[-70:], values, exact=True)
    back = torch.zeros(70, dtype=torch.float32)
    torch.ops.shardops.unflatten_shard(huge, [back], torch.tensor([[0, 0, numel - 70, 70]]))
    assert_bits_equal(back, values.float())
    huge[-70:] = 0
    torch.ops.shardops.unflatten_shard(values, [huge], torch.tensor([[0, numel - 70, 0, 70]]))
    assert_bits_equal(huge[-70:], values, exact=True)


def test_shapes_past_31_bits() -> None:
    huge = torch.empty(2**32 + 1, device="meta")
    assert ops.flatten_shard([huge, huge], 2, align=1).shape == (2, 2**32 + 1)
    assert ops.flatten_shard([huge], 2, layout="per_param").shape == (2, 2**31 + 1)
