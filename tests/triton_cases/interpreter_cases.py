"""That the repaired interpreter computes as a GPU does, and that its watch can fail. Run by test_triton.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton_interpreter import Watch, assert_same, float_values

from shardops import ops
from shardops.backends import triton as backend
from shardops.backends.triton import _launch
from shardops.backends.triton._copy import copy_kernel


@triton.jit
def cast_kernel(source, target, numel, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(source + lanes, mask=lanes < numel)
    tl.store(target + lanes, values.to(tl.float32).to(target.dtype.element_ty))


@triton.jit
def scalar_kernel(out, single, double: tl.float64):
    tl.store(out, single.to(tl.float64))
    tl.store(out + 1, double)


@triton.jit
def fma_kernel(a, b, c, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.fma(tl.load(a + lanes), tl.load(b + lanes), tl.load(c + lanes)))


@triton.jit
def low_precision_sum_kernel(a, out, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(a + lanes)
    tl.store(out + lanes, values + values)


@triton.jit
def shift_kernel(data, distance, HINT: tl.constexpr):
    """``data[p] = data[p + distance]`` for program p."""
    program = tl.program_id(0)
    tl.store(data + program, tl.load(tl.multiple_of(data, HINT) + program + distance))


@triton.jit
def spread_kernel(out, DIVISOR: tl.constexpr):
    """``out[l // DIVISOR] = l`` for 4 lanes."""
    lanes = tl.arange(0, 4)
    tl.store(out + lanes // DIVISOR, lanes)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_casts_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    values = float_values(65536, source, seed=4)
    out = torch.empty(65536, dtype=target)
    cast_kernel[(1,)](values, out, 65536, BLOCK=65536)
    assert_same(out, values.float().to(target))


def test_floats_are_float32_unless_annotated() -> None:
    out = torch.empty(2, dtype=torch.float64)
    scalar_kernel[(1,)](out, 0.1, 0.1)
    assert out.tolist() == [float(np.float32(0.1)), 0.1]


def test_fma_rounds_once() -> None:
    # 1 + 2^-23 squared is 1 + 2^-22 + 2^-46: the last term decides which way the addend's half unit rounds.
    a = torch.tensor([1 + 2.0**-23, 1 + 2.0**-12, 3e38, float("nan")])
    c = torch.tensor([2.0**-24, -(2.0**-11) - 1.0, -float("inf"), 1.0])
    out = torch.empty(4)
    fma_kernel[(1,)](a, a, c, out, BLOCK=4)
    assert_same(out, torch.tensor([1 + 3 * 2.0**-23, 2.0**-24, -float("inf"), float("nan")]))


def test_bfloat16_arithmetic_is_refused() -> None:
    with pytest.raises(InterpreterError, match="cast to float32"):
        low_precision_sum_kernel[(1,)](torch.ones(4).bfloat16(), torch.empty(4).bfloat16(), BLOCK=4)


def test_masked_lanes_without_other_are_poison() -> None:
    out = torch.empty(8)
    cast_kernel[(1,)](torch.ones(8), out, 5, BLOCK=8)
    assert out.isnan().tolist() == [False] * 5 + [True] * 3


def copy_with(
    rows: list[list[Any]], chunks: list[int], reads: list[Tensor], writes: list[Tensor], **claim: int
) -> None:
    """The copy kernel over a table of our own, float32 to float32."""
    table, entries = torch.tensor(rows).ravel(), torch.tensor(chunks)
    options = {"VECTOR": 4, "BLOCK": 1024, "ROUNDS": 4} | claim
    with Watch(reads, writes):
        copy_kernel[(len(chunks),)](table, entries, 1.0, SOURCE=tl.float32, TARGET=tl.float32, SCALED=False, **options)


@pytest.mark.parametrize("numel", [5, 4096])
def test_out_of_bounds_is_caught(numel: int) -> None:
    room = torch.zeros(2, 8192)
    source, target = room[0, :numel], room[1, :numel]
    ends = [source.data_ptr(), target.data_ptr()]
    copy_with([[*ends, numel]], [0], [source], [target])
    with pytest.raises(InterpreterError, match="out of bounds: load"):
        copy_with([[*ends, numel + 1]], [0, 1], [source], [target])
    with pytest.raises(InterpreterError, match="out of bounds: store"):
        copy_with([[*ends, numel + 1]], [0, 1], [room[0, : numel + 1]], [target])
    with pytest.raises(InterpreterError, match="out of bounds"):
        copy_with([[ends[0] - 4, ends[1], numel]], [0], [source], [target])


def test_overlapping_stores_are_caught() -> None:
    source, target = torch.ones(6000), torch.zeros(6000)
    row = [source.data_ptr(), target.data_ptr(), 6000]
    with pytest.raises(InterpreterError, match=r"race: store of program 1 .* another program stores"):
        copy_with([row], [0, 0], [source], [target])
    shifted = [source.data_ptr(), target.data_ptr() + 4 * 100, 200]
    with pytest.raises(InterpreterError, match=r"race: store of program 2 .* another program stores"):
        copy_with([row, shifted], [0, 1, 1 << 32], [source], [target])


def test_a_false_claim_of_alignment_is_caught() -> None:
    source, target = torch.ones(4100)[1:], torch.zeros(4096)
    row = [source.data_ptr(), target.data_ptr(), 4096]
    copy_with([row], [0], [source], [target])
    data = torch.zeros(8)[1:]
    with pytest.raises(InterpreterError, match="multiple_of claims 16"), Watch((), [data]):
        shift_kernel[(1,)](data, 0, HINT=16)


@pytest.mark.parametrize(("distance", "seed"), [(1, None), (-1, None), (1, 0), (2, 1)])
def test_reading_what_another_program_stores_is_caught(distance: int, seed: int | None) -> None:
    data = torch.zeros(12)
    shifted = data[2:10]
    with pytest.raises(InterpreterError, match="race"), Watch((), [data], seed=seed):
        shift_kernel[(8,)](shifted, distance, HINT=4)


def test_one_store_that_writes_twice_is_caught() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    with Watch((), [out]):
        spread_kernel[(1,)](out, DIVISOR=1)
    with pytest.raises(InterpreterError, match="stores twice"), Watch((), [out]):
        spread_kernel[(1,)](out, DIVISOR=2)


def test_access_by_another_size_and_stores_to_inputs_are_caught() -> None:
    values, out = torch.ones(16), torch.empty(16)
    with pytest.raises(InterpreterError, match="read-only: store"):
        copy_with([[values.data_ptr(), out.data_ptr(), 16]], [0], [values, out], [])
    with pytest.raises(InterpreterError, match="4 bytes among elements of 2"):
        copy_with([[values.data_ptr(), out.data_ptr(), 8]], [0], [values], [out.bfloat16()[:0], out.view(torch.int16)])


def test_order_of_programs_is_shuffled_and_repeatable() -> None:
    def order(seed: int | None) -> list[int]:
        source, target = torch.ones(16 * 4096), torch.zeros(16 * 4096)
        with Watch([source], [target], seed=seed) as watch:
            ops.cast_gather([source], torch.float32, out=target, backend="triton")
        return watch.order

    assert order(None) == list(range(16))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(16)) != order(1)


def test_this_process_interprets() -> None:
    assert backend.unavailable_reason("cpu") is None
    assert "unset it" in str(backend.unavailable_reason("cuda"))
    assert "another backend" in str(backend.unavailable_reason("mps"))


def test_tables_are_kept_by_content() -> None:
    rows = np.array([[1, 2, 5000], [3, 4, 70]], dtype=np.int64)
    cpu = torch.device("cpu")
    first, second = _launch.tables(rows, 4096, cpu), _launch.tables(rows.copy(), 4096, cpu)
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert first[1].tolist() == [0, 1, 1 << 32]
    rows[0, 0] = 9
    moved = _launch.tables(rows, 4096, cpu)
    assert moved[0].tolist() == rows.ravel().tolist()
    assert moved[1].data_ptr() == first[1].data_ptr()
