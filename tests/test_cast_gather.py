"""cast_gather: the bits of ``.to(dtype)``, over every exponent and every tie. exhaustive_casts.py does every value."""

from __future__ import annotations

import exhaustive_casts
import pytest
import torch
from reference import (
    DTYPES,
    assert_bits_equal,
    awkward,
    channels_last,
    from_patterns,
    strided,
    transposed,
    unaligned,
)
from torch import Tensor

from shardops import ops


def dense_sample() -> Tensor:
    """Every sign and exponent with mantissas at and beside each place where bf16 or fp16 rounds another way."""
    mantissas = {0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF}
    for kept in (0, 1, 2, 3, 0x40, 0x7E, 0x7F):  # bf16 keeps 7 bits
        mantissas |= {((kept << 16) + low) & 0x7FFFFF for low in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001)}
    for kept in (0, 1, 2, 3, 0x200, 0x3FE, 0x3FF):  # fp16 keeps 10
        mantissas |= {((kept << 13) + low) & 0x7FFFFF for low in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)}
    for bit in range(23):  # fp16's subnormals round at a place that depends on the exponent
        mantissas |= {(1 << bit) + low for low in (-1, 0, 1)} | {(3 << bit) & 0x7FFFFF}
    upper = torch.arange(512) << 23
    return from_patterns((upper[:, None] + torch.tensor(sorted(mantissas))).view(-1))


def test_sample_holds_ties_and_their_neighbours() -> None:
    patterns = set((dense_sample().view(torch.int32).long() & 0xFFFFFFFF).tolist())
    for exponent in range(256):
        for low in (0x7FFF, 0x8000, 0x8001, 0x18000):
            assert (exponent << 23) + low in patterns
    assert len(patterns) > 60_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_at_every_exponent(backend: str, dtype: torch.dtype) -> None:
    values = dense_sample()
    got = ops.cast_gather([values], dtype, backend=backend)
    assert_bits_equal(got, values.to(dtype))
    assert torch.equal(got.isnan(), values.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(backend: str, source: torch.dtype, dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(source)
    got = ops.cast_gather([values], dtype, backend=backend)
    assert_bits_equal(got, values.to(dtype), exact=source == dtype)
    assert torch.equal(got.isnan(), values.isnan())


@pytest.mark.parametrize(
    ("start", "ties"),
    [(0x3F800000, 8), (0x00000000, 8), (0x7F700000, 8), (0x7F800000, 0), (0xBF800000, 8), (0xFFF00000, 0)],
)
def test_a_stretch_of_the_exhaustive_check(start: int, ties: int) -> None:
    """A bf16 half differs from ``.bfloat16()`` at the tie above each even value, of 16 values in 2^20 patterns."""
    counts = exhaustive_casts.run(start, start + exhaustive_casts.CHUNK)
    assert (counts.done, set(counts.wrong.values())) == (1 << 20, {0})
    assert (counts.ties, counts.off_ties) == (ties, 0)


@pytest.mark.slow
def test_all_32_bit_patterns() -> None:
    """One thread: with more, the many small steps wait for each other longer than they work."""
    counts = exhaustive_casts.run()
    assert (counts.done, set(counts.wrong.values())) == (1 << 32, {0}), counts
    assert (counts.ties, counts.off_ties) == (exhaustive_casts.TIES, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_keeps_every_pattern(backend: str, dtype: torch.dtype) -> None:
    values = awkward(5000, 1, dtype)
    assert_bits_equal(ops.cast_gather([values], dtype, backend=backend), values, exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_lie_back_to_back(backend: str, dtype: torch.dtype) -> None:
    """Mixed dtypes, shapes and memory orders, empty ones between."""
    shards = [
        awkward(12, 1).view(3, 4),
        torch.empty(0, 8),
        awkward(33, 2, torch.bfloat16),
        awkward(1, 3, torch.float16).view(()),
        transposed(awkward(35, 4).view(5, 7)),
        strided(awkward(24, 5).view(4, 6)),
        channels_last(awkward(120, 6).view(2, 3, 4, 5)),
        unaligned(awkward(11, 7), 5),
        awkward(7, 8).requires_grad_(),
    ]
    expected = torch.cat([shard.detach().flatten().to(dtype) for shard in shards])
    got = ops.cast_gather(shards, dtype, backend=backend)
    assert_bits_equal(got, expected)
    assert not got.requires_grad
    out = torch.full_like(expected, 9.0)
    assert ops.cast_gather(shards, dtype, out=out, backend=backend) is out
    assert_bits_equal(out, expected)


@pytest.mark.parametrize("numel", range(1, 71))
def test_tails(backend: str, numel: int) -> None:
    for source in DTYPES:
        shards = [unaligned(awkward(numel, numel, source)), unaligned(awkward(numel, 100 + numel, source), 3)]
        for dtype in DTYPES:
            out = unaligned(torch.zeros(2 * numel, dtype=dtype))
            ops.cast_gather(shards, dtype, out=out, backend=backend)
            assert_bits_equal(out, torch.cat(shards).to(dtype))
            guards = out.as_strided((2 * numel + 4,), (1,), 0)[[0, -3, -2, -1]]
            assert (guards == 77).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    shards = [awkward(100_003, 1), awkward(40_000, 2), awkward(3, 3)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_bits_equal(ops.cast_gather(shards, dtype, backend="cpp"), torch.cat(shards).to(dtype))


def test_empty(backend: str) -> None:
    assert ops.cast_gather([torch.empty(0, 3)], torch.bfloat16, backend=backend).shape == (0,)
    out = torch.empty(0, dtype=torch.bfloat16)
    assert ops.cast_gather([], torch.bfloat16, out=out, backend=backend) is out


def test_writes_are_seen_by_autograd(backend: str) -> None:
    x = torch.ones(4, requires_grad=True)
    out = torch.ones(4)
    y = (x * out).sum()
    ops.cast_gather([torch.zeros(4)], torch.float32, out=out, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("shards", "error", "message"),
    [
        ([], ValueError, "shards is empty and out is None; the device of the result is unknown: pass out"),
        ([3.0], TypeError, r"shards\[0\] is a float; ops take torch tensors"),
        ([ONES, ONES.to_sparse()], TypeError, r"shards\[1\] has layout torch.sparse_coo"),
        ([ONES.long()], TypeError, r"shards\[0\] has dtype torch.int64"),
        ([ONES.cfloat()], TypeError, r"shards\[0\] has dtype torch.complex64"),
        ([ONES.double()], TypeError, r"shards\[0\] has dtype torch.float64"),
        ([ONES, torch.ones(4, device="meta")], ValueError, r"shards\[1\] is on meta, .* are on cpu"),
    ],
)
def test_bad_shards(backend: str, shards: list[Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.cast_gather(shards, torch.bfloat16, backend=backend)


def test_dtensor_is_refused(backend: str, dtensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"shards\[0\] is a DTensor; ops take local tensors"):
        ops.cast_gather([dtensor], torch.bfloat16, backend=backend)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"out has shape \(3,\), the result has \(4,\)"),
        (torch.zeros(2, 2), ValueError, r"out has shape \(2, 2\), the result has \(4,\)"),
        (
            torch.zeros(4, dtype=torch.half),
            ValueError,
            "out has dtype torch.float16, but dtype=torch.float32 was asked",
        ),
        (torch.zeros(4, device="meta"), ValueError, "out is on meta, the tensors are on cpu"),
        (torch.zeros(8)[::2], ValueError, r"out has strides \(2,\); a flat buffer is contiguous"),
    ],
)
def test_bad_out(backend: str, out: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.cast_gather([ONES], torch.float32, out=out, backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_bad_dtype(backend: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}; float32, bfloat16 and float16 are supported"):
        ops.cast_gather([ONES], dtype, backend=backend)


def test_the_op_itself_refuses_an_unfit_out() -> None:
    out = torch.zeros(3)
    with pytest.raises(RuntimeError, match="out has 3 elements, the shards have 4"):
        torch.ops.shardops.cast_gather(out, [ONES])
    assert (out == 0).all()
