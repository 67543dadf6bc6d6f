"""grad_norm in triton's interpreter, against the reference. Run by test_triton.py."""

from __future__ import annotations

import math

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton_interpreter import Watch, assert_same, float_values

from shardops import ops
from shardops.backends.reference.grad_norm import _combine_blocks
from shardops.backends.triton.grad_norm import block_kernel, combine_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (1.0, 2.0, math.inf)
each_norm = pytest.mark.parametrize("norm_type", NORMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compare(grads: list[Tensor], norm_type: float, seed: int = 0) -> Watch:
    """Triton against the reference; returns the watch."""
    with Watch(grads, seed=seed) as watch:
        actual = ops.grad_norm(grads, norm_type, backend="triton")
    for one, other in zip(actual, ops.grad_norm(grads, norm_type, backend="reference"), strict=True):
        assert_same(one, other)
    return watch


def finite(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values over the whole range of a dtype, denormals included, none infinite."""
    return torch.nan_to_num(float_values(numel, dtype, seed), nan=1.0, posinf=2.0, neginf=-2.0)


@each_dtype
@each_norm
@pytest.mark.parametrize("seed", range(2))
def test_full_range(dtype: torch.dtype, norm_type: float, seed: int) -> None:
    compare([finite(2 * 4096 + 70, dtype, seed), finite(300, dtype, seed + 10)], norm_type, seed)


@each_dtype
@each_norm
def test_gradients_as_they_are(dtype: torch.dtype, norm_type: float) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3 * 4096, generator=generator) * torch.logspace(-4, 1, 3 * 4096)
    compare([values.to(dtype)], norm_type)


@each_norm
@pytest.mark.parametrize(
    "value", [0.0, 1e-45, -1e-40, 3e-39, 1e-20, 3e38, -3.4028234e38, math.inf, -math.inf, math.nan]
)
def test_extreme_values(norm_type: float, value: float) -> None:
    compare([torch.full((4096 + 70,), value)], norm_type)


@each_norm
def test_inf_and_nan_together(norm_type: float) -> None:
    for values in ([math.inf, -math.inf], [math.inf, math.nan], [math.nan, math.inf], [1.0, math.nan]):
        compare([torch.tensor(values[:1]), torch.tensor(values[1:])], norm_type)
        compare([torch.tensor(values)], norm_type)


@each_dtype
@each_norm
def test_unaligned_and_mixed_dtypes(dtype: torch.dtype, norm_type: float) -> None:
    base = finite(4096 + 9, dtype, seed=7)
    grads = [base[1:2], base[3:8], torch.randn(20).bfloat16(), base[9:], torch.randn(5), torch.randn(3).half()]
    compare(grads, norm_type)


@each_norm
def test_many_small_and_empty_tensors(norm_type: float) -> None:
    grads = [float_values(n % 5, torch.float16, seed=n).clamp(-9, 9).nan_to_num() for n in range(20)]
    watch = compare(grads, norm_type)
    assert watch.launches == ["block_kernel", "combine_kernel"]


@each_norm
def test_only_empty_tensors(norm_type: float) -> None:
    total, nonfinite = ops.grad_norm([torch.empty(0), torch.empty(3, 0)], norm_type, backend="triton")
    assert (total.item(), nonfinite.item()) == (0.0, 0.0)
    assert (total.dtype, nonfinite.dtype) == (torch.float64, torch.float32)


@each_norm
@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_combination_of_blocks(norm_type: float, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    blocks = torch.rand(count, dtype=torch.float64, generator=generator) ** 20 * 1e300
    for poison in (None, math.inf, math.nan):
        if poison is not None:
            blocks[count // 2] = poison
        total, nonfinite = torch.empty((), dtype=torch.float64), torch.empty(())
        with Watch([blocks]):
            combine_kernel[(1,)](
                blocks, count, total, nonfinite, P=0 if norm_type == math.inf else 2, LANES=256, UNROLL=16
            )
        assert_same(total, _combine_blocks(blocks, norm_type))
        assert nonfinite.item() == (poison is not None)


@each_dtype
@each_norm
def test_bytes_are_the_minimum(dtype: torch.dtype, norm_type: float) -> None:
    watch = compare([torch.ones(2 * 4096, dtype=dtype), torch.ones(4096, dtype=dtype)], norm_type)
    assert (watch.loaded, watch.stored) == (3 * 4096 * dtype.itemsize, 0)


@each_norm
def test_offsets_past_32_bits(norm_type: float) -> None:
    """The last block of 2^33 + 5 elements, of which only that block exists."""
    values, numel = torch.randn(5), 2**33 + 5
    blocks = torch.zeros(1, dtype=torch.float64)
    rows = torch.tensor([values.data_ptr() - 4 * 2**33, -(numel // 4096), numel])
    with Watch([values], [blocks]):
        block_kernel[(1,)](
            rows, torch.tensor([numel // 4096]), blocks, DTYPE=tl.float32,
            P=0 if norm_type == math.inf else int(norm_type), VECTOR=4, LANES=256, ROWS=16,
        )  # fmt: skip
    assert_same(blocks[0], ops.grad_norm([values], norm_type, backend="reference")[0])


def test_torch_op() -> None:
    total, nonfinite = torch.ops.shardops.grad_norm.triton([torch.tensor([3.0, -4.0])], 2.0)
    assert (total.item(), nonfinite.item()) == (25.0, 0.0)
