"""The 8-bit state format, jitted: a tile of blocks as codes and words, to and from float32 moments.

Unsigned 32-bit integers and IEEE operations, in the order that ``backends/reference/block_quant.py`` states.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

# Elements of a block, and its words.
BLOCK = tl.constexpr(128)
WORDS = tl.constexpr(2)
# 2^-123: smaller second moments become 0.
SMALLEST = tl.constexpr(0x02000000)
STEP_BITS = tl.constexpr(13)
SMALLEST_STEP = tl.constexpr(9)
ZERO_CODE = tl.constexpr(255)
RECIPROCAL_127 = tl.constexpr(1.0 / 127.0)
# An integer below 2^22 added to it is the lower bits of the sum, rounded to nearest even; negative ones too.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_blocks(exp_avg_codes, exp_avg_sq_codes, highest, packed):
    """float32 moments of ``[blocks, 128]`` codes and ``[blocks, 1]`` words (uint32); zeros decode to zero."""
    code = exp_avg_sq_codes.to(tl.uint32)
    raw = highest - code * ((packed & 0xFFFF) << STEP_BITS)
    exp_avg_sq = tl.where(code == ZERO_CODE, 0.0, _float(raw))
    scale = _float(packed & 0xFFFF0000) * RECIPROCAL_127
    exp_avg = (exp_avg_codes.to(tl.float32) * _float(((raw & 0x7F000000) >> 1) + 0x20000000)) * scale
    return exp_avg, exp_avg_sq


@triton.jit
def encode_blocks(exp_avg, exp_avg_sq, words, present, MASKED: tl.constexpr):
    """Codes ``[blocks, 128]`` (int8, uint8) and words ``[blocks, 1]`` (uint32) of float32 moments.

    ``words`` holds the dither by position in the block; ``present``, where MASKED, which elements a block has.
    """
    patterns = tl.minimum(exp_avg_sq.to(tl.uint32, bitcast=True), 0x7FC00000)
    above = patterns - SMALLEST
    if MASKED:
        patterns = tl.where(present, patterns, 0)
        above = tl.where(present, above, 0xFFFFFFFF)
    highest = tl.max(patterns, axis=1, keep_dims=True)
    above = tl.min(above, axis=1, keep_dims=True)
    highest = tl.where(highest < SMALLEST, 0, highest)
    lowest = tl.where(above >= 0xFE000000, highest, above + SMALLEST)
    factor = tl.maximum(tl.umulhi(highest - lowest, tl.full(highest.shape, 2065, tl.uint32)) + 1, SMALLEST_STEP)
    step = factor << STEP_BITS
    steps_a_unit = tl.div_rn(281474976710656.0, step.to(tl.float32)).to(tl.uint32)  # 2^48 / step
    code = tl.minimum(tl.umulhi(highest - patterns, steps_a_unit) + (words >> 16), 0xFFFFFF) >> 16

    raw = highest - code * step
    ratio = exp_avg * _float(0x5F000000 - ((raw & 0x7F000000) >> 1))
    magnitudes = ratio.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    if MASKED:
        magnitudes = tl.where(present, magnitudes, 0)
    largest = tl.max(magnitudes, axis=1, keep_dims=True)
    scale = tl.where(largest < 0x0D800000, 0, (largest + 0xFFFF) & 0xFFFF0000)
    scale = tl.where(largest >= 0x7E000000, 0x7FC00000, scale)
    # A block with something that is not finite has a scale of NaN; its codes are zero, as those of a scale of zero.
    is_scaled = (largest >= 0x0D800000) & (largest < 0x7E000000)
    codes_a_unit = tl.where(is_scaled, tl.div_rn(127.0, _float(scale)), 0.0)
    rounded = (ratio * codes_a_unit + ROUNDER).to(tl.uint32, bitcast=True)
    rounded = rounded & tl.where(is_scaled, 0xFF, 0).to(tl.uint32)
    return rounded.to(tl.int8), code.to(tl.uint8), highest, scale | factor
