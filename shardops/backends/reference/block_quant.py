"""The 8-bit state format in plain torch: blocks of 128 in a row, two 32-bit words a block for both moments.

The second moment is stored as steps below the block's maximum on a logarithmic scale (of float patterns), dithered, so
that a slow average never freezes; the first as a ratio to a power of two near its square root. Unsigned 32-bit
arithmetic is done in int64, modulo 2^32; there is no rounded product that feeds a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dither import CANONICAL_NAN, Dither, block_halves

BLOCK = 128  # elements; part of the format
ZERO_CODE = 255
_MASK = 0xFFFFFFFF
_SMALLEST = 0x02000000  # 2^-123: smaller second moments become 0
STEP_BITS = 13  # a step is a multiple of 2^13 patterns: on finer grids, which move with each step, dither has no effect
SMALLEST_STEP = 9
_LARGEST_CODE = 0xFFFFFF  # code << 16
# Of no dimension, so that it may stay on the CPU.
_RECIPROCAL_127 = torch.tensor(1.0 / 127.0, dtype=torch.float32)


def blocks_of(columns: int) -> int:
    """Blocks of a row; the last one may be shorter."""
    return -(-columns // BLOCK)


def patterns_of(values: Tensor) -> Tensor:
    """The float32 patterns as unsigned numbers, in int64."""
    return values.contiguous().view(torch.int32).long() & _MASK


def floats(patterns: Tensor) -> Tensor:
    """float32 of unsigned patterns (int64, below 2^32)."""
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).int().view(torch.float32)


def words_of(patterns: Tensor) -> Tensor:
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).int()


def _mulhi(a: Tensor, b: Tensor) -> Tensor:
    """The upper half of the 64-bit product of unsigned 32-bit numbers, without a 64-bit overflow."""
    return ((a >> 16) * b + ((a & 0xFFFF) * b >> 16)) >> 16


def in_blocks(values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``[rows, blocks, BLOCK]`` of a row-major tensor, zeros filling up short blocks; which elements are real."""
    columns = values.numel() // rows
    padded = torch.zeros(rows, blocks_of(columns) * BLOCK, dtype=values.dtype, device=values.device)
    padded[:, :columns] = values.reshape(rows, columns)
    present = torch.arange(padded.shape[1], device=values.device) < columns
    return padded.view(rows, -1, BLOCK), present.view(1, -1, BLOCK)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    rows = blocks.shape[0]
    columns = shape.numel() // rows
    return blocks.reshape(rows, -1)[:, :columns].reshape(shape)


def raw_patterns(codes: Tensor, highest: Tensor, step: Tensor) -> Tensor:
    """The pattern that a code of exp_avg_sq stands for: ``highest - code * step``, also for the code of zero."""
    return (highest - codes.long() * step) & _MASK


def ratio_to_exp_avg(raw: Tensor) -> Tensor:
    """The power of two that exp_avg's code is a multiple of, near the square root of the value of ``raw``."""
    return floats(((raw & 0x7F000000) >> 1) + 0x20000000)


def exp_avg_to_ratio(raw: Tensor) -> Tensor:
    """Its reciprocal, exact."""
    return floats(((~raw & 0x7F000000) >> 1) + 0x1F800000)


def encode_blocks(
    exp_avg: Tensor, exp_avg_sq: Tensor, rows: int, dither: Dither | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and words of float32 moments.

    Args:
        exp_avg: float32, row-major, ND.
        exp_avg_sq: float32, not negative, of the same shape.
        rows: that the elements make; a block does not cross a row.
        dither: of exp_avg_sq, by position in the block; None: to nearest.

    Returns:
        exp_avg's codes (int8) and exp_avg_sq's (uint8), of the moments' shape; words, int32 ``[rows, blocks, 2]``.
    """
    shape = exp_avg.shape
    if not shape.numel():
        words = torch.zeros(rows, blocks_of(shape[1:].numel()) if shape else 0, 2, dtype=torch.int32)
        return exp_avg.to(torch.int8), exp_avg_sq.to(torch.uint8), words.to(exp_avg.device)
    values, present = in_blocks(exp_avg, rows)
    squares, _ = in_blocks(exp_avg_sq, rows)

    patterns = patterns_of(squares).clamp(max=CANONICAL_NAN)
    highest = patterns.amax(-1, keepdim=True)
    above = torch.where(present, (patterns - _SMALLEST) & _MASK, _MASK).amin(-1, keepdim=True)
    highest = torch.where(highest < _SMALLEST, 0, highest)
    lowest = torch.where(above >= 0xFE000000, highest, above + _SMALLEST)
    factor = ((((highest - lowest) & _MASK) * 2065 >> 32) + 1).clamp(min=SMALLEST_STEP)
    step = factor << STEP_BITS
    steps_a_unit = (torch.full((), 2.0**48, dtype=torch.float32, device=exp_avg.device) / step.float()).long()
    below = _mulhi((highest - patterns) & _MASK, steps_a_unit)
    codes = (below + block_halves(dither, BLOCK, exp_avg.device)).clamp(max=_LARGEST_CODE) >> 16

    ratio = values * exp_avg_to_ratio(raw_patterns(codes, highest, step))
    largest = torch.where(present, patterns_of(ratio.abs()), 0).amax(-1, keepdim=True)
    scale_pattern = (largest + 0xFFFF) & 0xFFFF0000
    scale_pattern = torch.where(largest < 0x0D800000, 0, scale_pattern)
    scale_pattern = torch.where(largest >= 0x7E000000, CANONICAL_NAN, scale_pattern)
    scale = floats(scale_pattern)
    most = torch.full((), 127.0, dtype=torch.float32, device=exp_avg.device)
    codes_a_unit = torch.where(scale > 0, most / scale, 0.0)
    rounded = torch.round(ratio * codes_a_unit)
    avg_codes = torch.where(rounded.isnan(), 0.0, rounded)

    words = torch.cat((highest, scale_pattern | factor), dim=-1)
    return (
        from_blocks(avg_codes.to(torch.int8), shape),
        from_blocks(codes.to(torch.uint8), shape),
        words_of(words),
    )


def decode_blocks(exp_avg_codes: Tensor, exp_avg_sq_codes: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """float32 moments of codes and words, of the codes' shape; zeros decode to zero."""
    shape = exp_avg_codes.shape
    if not shape.numel():
        return exp_avg_codes.float(), exp_avg_sq_codes.float()
    avg_codes, _ = in_blocks(exp_avg_codes, words.shape[0])
    codes, _ = in_blocks(exp_avg_sq_codes, words.shape[0])
    highest, packed = (words.long() & _MASK).chunk(2, dim=-1)
    raw = raw_patterns(codes, highest, (packed & 0xFFFF) << STEP_BITS)
    exp_avg_sq = torch.where(codes == ZERO_CODE, 0.0, floats(raw))
    scale = floats(packed & 0xFFFF0000) * _RECIPROCAL_127
    exp_avg = (avg_codes.float() * ratio_to_exp_avg(raw)) * scale
    return from_blocks(exp_avg, shape), from_blocks(exp_avg_sq, shape)
