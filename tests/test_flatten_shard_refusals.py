"""Calls of flatten_shard and unflatten_shard that are refused, and the messages that say why."""

from __future__ import annotations

import pytest
import torch
from reference import ordinary
from torch import Tensor

from shardops import ops

ONES = torch.ones(4)
META = torch.ones(4, device="meta")


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None])
def test_bad_world_size(backend: str, world_size: object) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size!r}; it is the number of shards"):
        ops.flatten_shard([ONES], world_size, backend=backend)


@pytest.mark.parametrize("rank", [-1, 2, 1.0, False])
def test_bad_rank(backend: str, rank: object) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank!r} with world_size 2; ranks run from 0 to 1"):
        ops.flatten_shard([ONES], 2, rank=rank, backend=backend)


@pytest.mark.parametrize("align", [0, -4, 1.5, True])
def test_bad_align(backend: str, align: object) -> None:
    with pytest.raises(ValueError, match=f"align is {align!r}; it counts elements"):
        ops.flatten_shard([ONES], 2, align=align, backend=backend)


def test_bad_layout(backend: str) -> None:
    with pytest.raises(ValueError, match="layout is 'rows'; it is one of 'flat', 'per_param'"):
        ops.flatten_shard([ONES], 2, layout="rows", backend=backend)
    with pytest.raises(ValueError, match="layout is 'rows'; it is one of 'flat', 'per_param'"):
        ops.unflatten_shard(torch.zeros(2, 2), [ONES], layout="rows", backend=backend)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([ONES, 3.0], TypeError, r"tensors\[1\] is a float; ops take torch tensors"),
        ([3.0], TypeError, r"tensors\[0\] is a float; ops take torch tensors"),
        ([ONES, ONES.to_sparse()], TypeError, r"tensors\[1\] has layout torch.sparse_coo; dense tensors only"),
        ([ONES.int()], TypeError, r"tensors\[0\] has dtype torch.int32; float32, bfloat16 and float16 are supported"),
        ([ONES.cfloat()], TypeError, r"tensors\[0\] has dtype torch.complex64"),
        ([ONES.double()], TypeError, r"tensors\[0\] has dtype torch.float64"),
        ([ONES, META], ValueError, r"tensors\[1\] is on meta, other tensors of the call are on cpu; move them"),
        ([ONES, ONES.half()], ValueError, r"tensors have dtypes torch.float16, torch.float32; say which"),
        ([], ValueError, "tensors is empty and out is None"),
    ],
)
def test_bad_tensors(backend: str, tensors: list[Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.flatten_shard(tensors, 2, backend=backend)


def test_dtensor_is_refused(backend: str, dtensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"tensors\[1\] is a DTensor; ops take local tensors: pass .*to_local\(\)"):
        ops.flatten_shard([ONES, dtensor], 2, backend=backend)
    with pytest.raises(TypeError, match=r"out_tensors\[0\] is a DTensor"):
        ops.unflatten_shard(torch.zeros(1, 4), [dtensor], backend=backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_bad_dtype(backend: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}; float32, bfloat16 and float16 are supported"):
        ops.flatten_shard([ONES], 2, dtype=dtype, backend=backend)


@pytest.mark.parametrize(
    ("out", "dtype", "error", "message"),
    [
        (torch.zeros(2, 3), None, ValueError, r"out has shape \(2, 3\), the result has \(2, 2\)"),
        (torch.zeros(4), None, ValueError, r"out has shape \(4,\), the result has \(2, 2\)"),
        (torch.zeros(2, 2), torch.half, ValueError, "out has dtype torch.float32, but dtype=torch.float16 was asked"),
        (torch.zeros(2, 2, device="meta"), None, ValueError, "out is on meta, the tensors are on cpu"),
        (torch.zeros(2, 2).t(), None, ValueError, r"out has strides \(1, 2\); a flat buffer is contiguous"),
        (torch.zeros(2, 2, dtype=torch.int32), None, TypeError, "dtype is torch.int32"),
        (torch.zeros(2, 2).to_sparse(), None, TypeError, r"out\[0\] has layout torch.sparse_coo"),
    ],
)
def test_bad_out(backend: str, out: Tensor, dtype: torch.dtype, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.flatten_shard([ONES], 2, align=1, dtype=dtype, out=out, backend=backend)


@pytest.mark.parametrize(
    ("buffer", "outs", "error", "message"),
    [
        (torch.zeros(2, 1), [ONES], ValueError, "buffer has shards of 1 elements, .* need at least 2"),
        (torch.zeros(3), [ONES], ValueError, "buffer has shards of 3 elements, .* need at least 4"),
        (torch.zeros(2, 2, 2), [ONES], ValueError, r"buffer has shape \(2, 2, 2\) and strides"),
        (
            torch.zeros(4, 2).t(),
            [ONES],
            ValueError,
            r"buffer has shape \(2, 4\) and strides \(1, 2\); it is contiguous",
        ),
        (torch.zeros(0, 4), [ONES], ValueError, "world_size is 0"),
        (torch.zeros(2, 2, device="meta"), [ONES], ValueError, r"out_tensors\[0\] is on cpu, .* are on meta"),
        (torch.zeros(2, 2, dtype=torch.int32), [ONES], TypeError, r"buffer\[0\] has dtype torch.int32"),
        (torch.zeros(2, 2), [ONES.int()], TypeError, r"out_tensors\[0\] has dtype torch.int32"),
    ],
)
def test_bad_unflatten(backend: str, buffer: Tensor, outs: list[Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.unflatten_shard(buffer, outs, backend=backend)
    assert (ONES == 1).all()


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'best', which is none of 'cpp', 'triton', 'reference'"):
        ops.flatten_shard([ONES], 2, backend="best")


@pytest.mark.parametrize(
    ("segment", "tensor"),
    [
        ([0, 0, 0, 5], 4),
        ([0, 2, 0, 3], 4),
        ([0, 0, 6, 3], 4),
        ([1, 0, 0, 1], 4),
        ([-2, 0, 0, 1], 4),
        ([0, -1, 0, 1], 4),
        ([0, 0, -1, 1], 4),
        ([-1, 0, 0, 9], 4),
        ([0, 2**62, 0, 2**62], 4),
        ([0, 0, 2**62, 2**62], 4),
        ([0, 1, 1, 2**63 - 1], 4),
        ([-1, 0, 1, 2**63 - 1], 4),
    ],
)
def test_the_op_itself_refuses_segments_out_of_range(segment: list[int], tensor: int) -> None:
    """Calls that pass by the typed function never reach outside a tensor."""
    out = torch.full((8,), 3.0)
    source = ordinary(tensor, seed=1)
    for call in (
        lambda: torch.ops.shardops.flatten_shard(out, [source], torch.tensor([segment])),
        lambda: torch.ops.shardops.unflatten_shard(out, [source], torch.tensor([segment])),
    ):
        with pytest.raises(RuntimeError, match="a segment reaches outside its tensor or the buffer"):
            call()
    assert (out == 3.0).all()
