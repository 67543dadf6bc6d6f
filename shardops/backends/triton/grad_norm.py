"""grad_norm in Triton: one program for each block of the fixed tree, then one program that combines the blocks.

The tree is that of ``backends/reference/grad_norm.py``. No atomics: an order of arrival would change the last bits.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._math import aligned_pointer, load_block, misaligned, other_half, two_sum

# As the reference has them; a block is ROWS rows of LANES.
BLOCK = 4096
LANES = 256
ROWS = BLOCK // LANES
VECTOR = 4
# A thread for every 4 lanes keeps a block's 16 rows in 64 registers: read once, for the largest magnitude and the sum.
_NUM_WARPS = LANES // VECTOR // _launch.WARP_SIZE
# Lanes are combined by one program; this many rows of blocks are on their way to it at a time.
_UNROLL = 16
LEVELS = tl.constexpr(8)  # LANES = 2 ** LEVELS


@triton.jit
def _exponent(largest):
    """A block's exponent, biased; 254 is left out, whose inverse would be a denormal."""
    return tl.minimum(tl.max(largest, axis=0) >> 23, 253)


@triton.jit
def _power_of_two(exponent):
    """float64 ``2 ** exponent``, made from bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _magnitude(values):
    """Bits of ``|x|``. As integers they have an order with NaN on top, so that a maximum is the same in any order."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _add_powers(sums, compensations, values, exponent, P: tl.constexpr):
    """Lane by lane ``sums - compensations + |x / 2^exponent| ** P``, as such a pair again (Kahan)."""
    values = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if P == 2:
        values = values * values
    else:
        values = tl.abs(values)
    corrected = values - compensations
    raised = sums + corrected
    return raised, (raised - sums) - corrected


@triton.jit
def _lane_sums(pointer, remaining, P: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """The largest magnitude of each lane of a block, and its sum and errors (zero for P 0)."""
    lanes = tl.arange(0, LANES)
    largest = tl.zeros([LANES], tl.int32)
    sums = tl.zeros([LANES], tl.float32)
    compensations = tl.zeros([LANES], tl.float32)
    if MASKED:
        # Read twice, the second time from the cache: unrolled as below, this rare path would double the kernel.
        for row in tl.range(0, tl.minimum(tl.cdiv(remaining, LANES), ROWS)):
            values = load_block(pointer + row * LANES, lanes, remaining - row * LANES, True).to(tl.float32)
            largest = tl.maximum(largest, _magnitude(values))
        if P != 0:
            exponent = _exponent(largest)
            for row in tl.range(0, tl.minimum(tl.cdiv(remaining, LANES), ROWS)):
                values = load_block(pointer + row * LANES, lanes, remaining - row * LANES, True).to(tl.float32)
                sums, compensations = _add_powers(sums, compensations, values, exponent, P)
    else:
        rows = ()
        for row in tl.static_range(ROWS):
            values = load_block(pointer + row * LANES, lanes, remaining, False).to(tl.float32)
            largest = tl.maximum(largest, _magnitude(values))
            rows = rows + (values,)  # noqa: RUF005
        if P != 0:
            exponent = _exponent(largest)
            for row in tl.static_range(ROWS):
                sums, compensations = _add_powers(sums, compensations, rows[row], exponent, P)
    return largest, sums, -compensations


@triton.jit(do_not_specialize=["rows", "chunks", "blocks"])
def block_kernel(
    rows,
    chunks,
    blocks,
    DTYPE: tl.constexpr,
    P: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``blocks[first + chunk] = sum(|x| ** P)`` of the chunk's elements; for P 0 the largest magnitude.

    Inf or NaN if it holds one. A row is (address, first, numel).
    """
    entry = tl.load(chunks + tl.program_id(0).to(tl.int64))
    row = rows + (entry >> 32) * 3
    chunk = entry & 0xFFFFFFFF
    offset = chunk * (ROWS * LANES)

    address = tl.load(row)
    result = blocks + tl.load(row + 1) + chunk
    remaining = tl.load(row + 2) - offset

    if (misaligned(address, DTYPE, VECTOR) == 0) & (remaining >= ROWS * LANES):
        pointer = aligned_pointer(address, DTYPE, VECTOR) + offset
        largest, sums, errors = _lane_sums(pointer, remaining, P, LANES, ROWS, False)
    else:
        pointer = address.to(tl.pointer_type(DTYPE)) + offset
        largest, sums, errors = _lane_sums(pointer, remaining, P, LANES, ROWS, True)

    extreme = tl.max(largest, axis=0)
    value = extreme.to(tl.float32, bitcast=True).to(tl.float64)
    if P != 0:
        for level in tl.static_range(LEVELS):
            upper = other_half(errors, LANES >> (level + 1))
            sums, error = two_sum(sums, other_half(sums, LANES >> (level + 1)))
            errors = (errors + upper) + error
        total = sums.to(tl.float64) + errors.to(tl.float64)
        total = total * _power_of_two((_exponent(largest) - 127) * P)
        value = tl.where((extreme >= 0x7F800000) | (extreme == 0), value, total)
    lanes = tl.arange(0, LANES)
    tl.store(result + lanes, value, mask=lanes == 0)


@triton.jit(do_not_specialize=["blocks", "count", "total", "nonfinite"])
def combine_kernel(blocks, count, total, nonfinite, P: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr):
    """Blocks ``l, l + LANES, ..`` to lane l, then lanes by halving; P 0: the largest. One program."""
    lanes = tl.arange(0, LANES)
    is_bad = tl.zeros([LANES], tl.int32)
    sums = tl.zeros([LANES], tl.float64)
    largest = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, count, LANES, loop_unroll_factor=UNROLL):
        values = tl.load(blocks + start + lanes, mask=start + lanes < count, other=0.0)
        # No value is negative, and as integers such numbers have the same order, with inf and then NaN on top.
        bits = values.to(tl.int64, bitcast=True)
        is_bad = is_bad | (bits >= 0x7FF0000000000000).to(tl.int32)
        if P == 0:
            largest = tl.maximum(largest, bits)
        else:
            sums = sums + values
    tl.store(nonfinite, tl.max(is_bad, axis=0).to(tl.float32))
    if P == 0:
        tl.store(total, tl.max(largest, axis=0).to(tl.float64, bitcast=True))
    else:
        for level in tl.static_range(LEVELS):
            sums = sums + other_half(sums, LANES >> (level + 1))
        tl.store(total + lanes, sums, mask=lanes == 0)


def grad_norm(grads: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Sum of powers (float64 scalar) and non-finite flag (float32 scalar), as ``ops.grad_norm`` says."""
    p = 0 if norm_type == math.inf else int(norm_type)
    numels = np.array([grad.numel() for grad in grads], dtype=np.int64)
    counts = -(-numels // BLOCK)
    first = np.cumsum(counts) - counts
    with _launch.on_device(grads[0]):
        blocks = grads[0].new_empty(int(counts.sum()), dtype=torch.float64)
        total = grads[0].new_empty((), dtype=torch.float64)
        nonfinite = grads[0].new_empty((), dtype=torch.float32)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            chosen = [index for index, grad in enumerate(grads) if grad.dtype == dtype]
            same = [grads[index] for index in chosen]
            starts = np.array(_launch.addresses(same, "grads", same, dtype), dtype=np.int64)
            rows = np.stack([starts, first[chosen], numels[chosen]], axis=1)
            table, chunks = _launch.tables(rows, BLOCK, blocks.device)
            if not chunks.numel():
                continue
            block_kernel[(chunks.numel(),)](
                table,
                chunks,
                blocks,
                DTYPE=_launch.DTYPES[dtype],
                P=p,
                VECTOR=VECTOR,
                LANES=LANES,
                ROWS=ROWS,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
        combine_kernel[(1,)](
            blocks,
            blocks.numel(),
            total,
            nonfinite,
            P=p,
            LANES=LANES,
            UNROLL=_UNROLL,
            num_warps=_launch.NUM_WARPS,
            enable_fp_fusion=False,
        )
    return total, nonfinite
