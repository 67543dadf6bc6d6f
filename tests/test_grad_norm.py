"""grad_norm, the local part: within one ulp of an exact sum; the same bits from every backend and thread count."""

from __future__ import annotations

import math

import pytest
import torch
import twin
from reference import DTYPES, awkward, generator, ordinary, strided, transposed, ulps, unaligned
from torch import Tensor

from shardops import ops

NORM_TYPES = (1.0, 2.0, math.inf)
BLOCK = 4096  # elements of a block of the fixed tree


def exact_norm(grads: list[Tensor], norm_type: float) -> float:
    """The norm with an exact sum: squares of float32 numbers are exact in float64, and fsum rounds once."""
    values = torch.cat([g.detach().reshape(-1).double() for g in grads]).abs()
    if norm_type == math.inf:
        return float(values.max()) if values.numel() else 0.0
    if norm_type == 1.0:
        return math.fsum(values.tolist())
    return math.sqrt(math.fsum(values.square().tolist()))


def norm(grads: list[Tensor], norm_type: float, backend: str | None = None) -> float:
    total, nonfinite = ops.grad_norm(grads, norm_type, backend=backend)
    assert (total.dtype, total.shape, nonfinite.dtype, nonfinite.shape) == (torch.float64, (), torch.float32, ())
    assert nonfinite == 0
    return math.sqrt(total) if norm_type == 2.0 else float(total)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_within_one_ulp_of_exact(backend: str, dtype: torch.dtype, norm_type: float) -> None:
    for seed, numels in enumerate([(1,), (4096,), (4097, 1), (5, 0, 70), (30_000, 257, 4095), (100_000,)]):
        grads = [ordinary(n, seed=100 * seed + i, scale=10.0 ** (seed - 3), dtype=dtype) for i, n in enumerate(numels)]
        assert ulps(norm(grads, norm_type, backend), exact_norm(grads, norm_type)) <= 1, (seed, numels)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_many_random_vectors(backend: str, norm_type: float) -> None:
    """Heavy-tailed values: a few large ones and many that a plain float32 sum would lose."""
    for seed in range(60):
        values = ordinary(3000 + 37 * seed, seed=seed)
        grads = [values * (values.abs() * 3).exp() * 10.0 ** (seed % 9 - 4)]
        assert ulps(norm(grads, norm_type, backend), exact_norm(grads, norm_type)) <= 1, seed


@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-30, 1e-38, 1e-44, 2.0**-149])
def test_where_float32_squares_leave_the_range(backend: str, magnitude: float) -> None:
    grads = [torch.full((7000,), magnitude), torch.full((3,), -magnitude), torch.zeros(9)]
    naive = float(torch.cat(grads).square().sum().sqrt())
    assert naive in (0.0, math.inf), "the case shows nothing"
    for norm_type in NORM_TYPES:
        # Relative, since the norm itself may lie outside float32: 2^-24 is at most an ulp.
        assert math.isclose(norm(grads, norm_type, backend), exact_norm(grads, norm_type), rel_tol=2.0**-24)


def test_huge_and_tiny_in_one_call(backend: str) -> None:
    grads = [torch.full((5000,), 1e-30), torch.full((5000,), 1e30), torch.full((5000,), 1e-44)]
    for norm_type in NORM_TYPES:
        assert math.isclose(norm(grads, norm_type, backend), exact_norm(grads, norm_type), rel_tol=2.0**-24)


def test_small_values_beside_a_large_one_count(backend: str) -> None:
    """4,095 ones after 2^12: each is below half an ulp of the running sum of squares in float32."""
    grads = [torch.cat([torch.tensor([4096.0]), torch.ones(4095)])]
    total, _ = ops.grad_norm(grads, 2.0, backend=backend)
    assert total == 4096.0**2 + 4095


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_sharded_within_one_ulp(backend: str, norm_type: float) -> None:
    grads = [ordinary(50_000, seed=1), ordinary(333, 7, seed=2, scale=1e-3).view(-1)]
    whole = norm(grads, norm_type, backend)
    for world_size in (2, 3, 4, 7):
        totals = []
        for rank in range(world_size):
            shard = [torch.tensor_split(g, world_size)[rank] for g in grads]
            totals.append(float(ops.grad_norm(shard, norm_type, backend=backend)[0]))
        combined = max(totals) if norm_type == math.inf else sum(totals)
        assert ulps(math.sqrt(combined) if norm_type == 2.0 else combined, whole) <= 1


def test_three_and_four_make_five(backend: str) -> None:
    totals = [ops.grad_norm([torch.tensor([g])], 2.0, backend=backend)[0] for g in (3.0, 4.0)]
    assert math.sqrt(sum(totals)) == 5.0
    assert norm([torch.tensor([3.0, -4.0])], math.inf, backend) == 4.0
    assert norm([torch.tensor([3.0, -4.0])], 1.0, backend) == 7.0


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 4095, 4096, 9999])
def test_nonfinite_is_flagged_and_propagates(
    backend: str, position: int, bad: float, dtype: torch.dtype, norm_type: float
) -> None:
    grad = ordinary(10_000, seed=1, dtype=dtype)
    assert ops.grad_norm([grad], norm_type, backend=backend)[1] == 0
    grad[position] = bad
    total, nonfinite = ops.grad_norm([torch.ones(3, dtype=dtype), grad], norm_type, backend=backend)
    assert nonfinite == 1
    assert total.isnan() if math.isnan(bad) else total == math.inf


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_in_a_later_block(backend: str, bad: float, norm_type: float) -> None:
    """Also where a block's value is no longer one that the first threads of the last kernel take."""
    for dtype in DTYPES:
        for block in (31, 32, 33, 47, 48):
            grad = ordinary(48 * BLOCK + 17, seed=1, dtype=dtype)
            grad[block * BLOCK + block % 17] = bad
            total, nonfinite = ops.grad_norm([grad], norm_type, backend=backend)
            assert nonfinite == 1, (dtype, block)
            assert total.isnan() if math.isnan(bad) else total == math.inf, (dtype, block)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_nan_wins_over_infinity(backend: str, norm_type: float) -> None:
    """In one block, and in two; in either order."""
    for distance in (1, 5000):
        for first, second in ((math.nan, math.inf), (math.inf, math.nan)):
            grad = torch.ones(6000)
            grad[0], grad[distance] = first, second
            total, nonfinite = ops.grad_norm([grad], norm_type, backend=backend)
            assert nonfinite == 1
            assert total.isnan()


def assert_backends_agree(grads: list[Tensor], norm_type: float, flag: float = 0.0) -> None:
    """The same bits, or NaN."""
    twin.register()
    expected, expected_flag = ops.grad_norm(grads, norm_type, backend="reference")
    assert expected_flag == flag
    for name in ("cpp", "cuda_twin"):
        got, got_flag = ops.grad_norm(grads, norm_type, backend=name)
        assert got_flag == flag, name
        assert torch.equal(got.view(torch.int64), expected.view(torch.int64)) or (got.isnan() and expected.isnan()), (
            name
        )


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_give_the_same_bits(dtype: torch.dtype, norm_type: float) -> None:
    for seed in range(25):
        finite = seed % 5 > 0
        numels = (seed * 997, 4096, 3, 0, 12_289)
        grads = [awkward(n, 10 * seed + i, dtype, finite=finite) for i, n in enumerate(numels)]
        assert_backends_agree(grads, norm_type, 0.0 if finite else 1.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_add_in_one_order(dtype: torch.dtype, norm_type: float) -> None:
    """Magnitudes far apart, by element, by lane and by block: another order of additions then has other bits.

    Of ordinary values, many orders have the same sum.
    """
    most = 10 if dtype == torch.float16 else 30
    for seed in range(5):
        values = ordinary(70, 16, 256, seed=seed)
        for shape in ((70, 16, 256), (256,), (70, 1, 1)):
            powers = torch.randint(-most, most + 1, shape, generator=generator(seed))
            spread = (values * torch.exp2(powers.float())).view(-1)
            assert_backends_agree([spread[: spread.numel() - 100 * seed].to(dtype)], norm_type)


@pytest.mark.parametrize("numel", range(1, 71))
def test_tails(numel: int) -> None:
    for base in (0, 4096):
        for dtype in DTYPES:
            grads = [unaligned(ordinary(base + numel, seed=numel, dtype=dtype))]
            assert_backends_agree(grads, 2.0)
            assert ulps(norm(grads, 2.0, "cpp"), exact_norm(grads, 2.0)) <= 1


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_threads_give_the_same_bits(norm_type: float) -> None:
    grads = [ordinary(200_001, seed=1), ordinary(17, seed=2), ordinary(150_000, seed=3)]
    totals = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        totals.add(float(ops.grad_norm(grads, norm_type, backend="cpp")[0]))
    assert len(totals) == 1


def test_memory_order(backend: str) -> None:
    """A dense tensor is walked in memory order; one with gaps as its copy; an expanded one counts every element."""
    values = ordinary(90, 70, seed=4)
    expected = ops.grad_norm([values.t().contiguous()], backend=backend)[0]
    assert torch.equal(ops.grad_norm([values.t().contiguous().t()], backend=backend)[0], expected)
    plain = ops.grad_norm([values], backend=backend)[0]
    for view in (strided(values), unaligned(values), values.clone().requires_grad_()):
        assert torch.equal(ops.grad_norm([view], backend=backend)[0], plain)
    assert ulps(norm([transposed(values)], 2.0, backend), exact_norm([values], 2.0)) <= 1
    assert norm([torch.full((1, 1), 2.0).expand(5, 5)], 1.0, backend) == 50.0


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_empty_tensors(backend: str, norm_type: float) -> None:
    assert norm([torch.empty(0, 8)], norm_type, backend) == 0.0
    assert norm([torch.empty(0), torch.tensor([-3.0]), torch.empty(2, 0)], norm_type, backend) == 3.0
    assert norm([torch.zeros(5000)], norm_type, backend) == 0.0


def test_gradients_are_left_as_they_came(backend: str) -> None:
    grads = [ordinary(5000, seed=1), transposed(ordinary(30, 40, seed=2))]
    before = [g.clone() for g in grads]
    ops.grad_norm(grads, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("numel", [2**31, 2_359_332_864, 2**32 + 1])
def test_past_31_bits(numel: int) -> None:
    """Zeros that the system never materialises, and a last element that counts."""
    torch.set_num_threads(2)
    grad = torch.zeros(numel, dtype=torch.bfloat16)
    grad[-1] = 3.0
    assert norm([grad], 2.0, "cpp") == 3.0


@pytest.mark.parametrize("norm_type", [0.0, 3.0, -1.0, -math.inf, math.nan])
def test_bad_norm_type(backend: str, norm_type: float) -> None:
    with pytest.raises(ValueError, match=f"norm_type is {norm_type!r}; 1, 2 and inf are supported"):
        ops.grad_norm([torch.ones(3)], norm_type, backend=backend)


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        ([], ValueError, "grads is empty; the device of the result is unknown"),
        ([3.0], TypeError, r"grads\[0\] is a float; ops take torch tensors"),
        ([torch.ones(3), torch.ones(3).to_sparse()], TypeError, r"grads\[1\] has layout torch.sparse_coo"),
        ([torch.ones(3).int()], TypeError, r"grads\[0\] has dtype torch.int32"),
        ([torch.ones(3).cfloat()], TypeError, r"grads\[0\] has dtype torch.complex64"),
        ([torch.ones(3), torch.ones(3, device="meta")], ValueError, r"grads\[1\] is on meta, .* are on cpu"),
    ],
)
def test_bad_grads(backend: str, grads: list[Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.grad_norm(grads, backend=backend)


def test_dtensor_is_refused(backend: str, dtensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"grads\[0\] is a DTensor; ops take local tensors"):
        ops.grad_norm([dtensor], backend=backend)
