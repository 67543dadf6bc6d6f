"""The arithmetic of the kernels, jitted: Adam's formula, narrow storage of a float32, exact sums, block access.

Every operation rounds as ``backends/reference`` says: ``tl.div_rn`` and ``tl.sqrt_rn`` because ``/`` and ``tl.sqrt`` of
float32 are approximate on a GPU, and launchers pass ``enable_fp_fusion=False`` because a fused multiply-add rounds
once.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def misaligned(address, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Zero if ``address`` is a multiple of VECTOR elements, or of the widest access if less; also for address 0."""
    BITS: tl.constexpr = VECTOR * DTYPE.primitive_bitwidth
    return address & (15 if BITS > 128 else BITS // 8 - 1)


@triton.jit
def aligned_pointer(address, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """``address`` as a pointer that the compiler may take to be as :func:`misaligned` found it."""
    BITS: tl.constexpr = VECTOR * DTYPE.primitive_bitwidth
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16 if BITS > 128 else BITS // 8)


@triton.jit
def load_block(pointer, lanes, remaining, MASKED: tl.constexpr):
    """``pointer[lanes]``, where MASKED with zeros from ``remaining`` on. Only unmasked accesses are 128 bits wide."""
    if MASKED:
        return tl.load(pointer + lanes, mask=lanes < remaining, other=0)
    else:
        return tl.load(pointer + lanes)


@triton.jit
def store_block(pointer, lanes, remaining, value, MASKED: tl.constexpr):
    """``pointer[lanes] = value``, rounded to the pointer's type (nearest even), where MASKED up to ``remaining``."""
    value = value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + lanes, value, mask=lanes < remaining)
    else:
        tl.store(pointer + lanes, value)


@triton.jit
def join_fp32(high, remainder):
    """bfloat16 and remainder, as int16 bits -> float32: ``bits = (high << 16) + remainder``."""
    bits = (high.to(tl.int32) << 16) + remainder.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split_fp32(value):
    """float32 -> bfloat16 rounded with ties away from zero, and the remainder, as int16 bits; NaN is made canonical.

    0x3F808000 -> 0x3F81, -0x8000.
    """
    bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    return high.to(tl.int16), remainder.to(tl.int16)


@triton.jit
def widen(high):
    """bfloat16, as int16 bits -> float32."""
    return (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def dither_words(dither, start, lanes, STRIDED: tl.constexpr):
    """The dither words, uint32, of the local elements ``start + lanes``: ``index * multiplier + base``.

    ``dither`` is (base, multiplier, first, columns, stride); the global index of an element is ``first`` + its local
    one, or where STRIDED: rows of ``columns`` elements lie ``stride`` apart.
    """
    base, multiplier, first, columns, stride = dither
    if STRIDED:
        row = (start + lanes) // columns
        return (first + row * (stride - columns) + start + lanes).to(tl.uint32) * multiplier + base
    else:
        # Summed in this order, all but the last product and sum is common to a block.
        return ((first + start).to(tl.uint32) * multiplier + base) + lanes.to(tl.uint32) * multiplier


@triton.jit
def round_dithered(value, words):
    """float32 -> bfloat16, as int16 bits, up or down by dither; a finite value stays finite, NaN is made canonical."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The largest pattern allowed: a finite one below infinity, infinity above.
    rounded = tl.minimum(magnitude + (words >> 16), tl.maximum(magnitude, 0x7F7FFFFF)) >> 16
    return tl.where(value != value, 0x7FC0, rounded | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def join_fp24(high, remainder):
    """bfloat16, as int16 bits, and int8 remainder -> float32: ``bits = (high << 16) + remainder * 256``."""
    bits = (high.to(tl.int32) << 16) + (remainder.to(tl.int32) << 8)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def split_fp24(value, words):
    """float32 -> bfloat16 rounded with ties away from zero, as int16 bits, and int8 remainder; the rest is dithered.

    0x3F8080C0 with a word below 0x40000000 -> 0x3F81, -0x80; with others, -0x7F.
    """
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    kept = tl.minimum(magnitude + (words >> 24), tl.maximum(magnitude, 0x7F7FFFFF)) & 0xFFFFFF00
    kept = tl.where(value != value, 0x7FC00000, kept | (bits & 0x80000000))
    # What the remainder adds to the 16 upper bits has no lower ones: its byte is the one of the sum.
    return ((kept + 0x8000) >> 16).to(tl.int16), (kept >> 8).to(tl.int8)


@triton.jit
def two_sum(a, b):
    """The rounded sum and its exact rounding error (Knuth)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


@triton.jit
def other_half(values, WIDTH: tl.constexpr):
    """Lane ``l`` gets the value of lane ``l + WIDTH`` (of ``l - WIDTH`` in the upper halves, which nobody uses).

    A gather, because reshaping and splitting makes every thread hold, and add up, all lanes.
    """
    return tl.gather(values, tl.arange(0, values.shape[0]) ^ WIDTH, 0)


@triton.jit
def power(base, exponent):
    """``base ** exponent`` in float64 by squaring; ``exponent`` is int64, at least 1, below 2**31."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = tl.full(exponent.shape, 1.0, tl.float64) * base
    for _ in range(31):
        result = tl.where(exponent & 1 == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


@triton.jit
def adam_update(
    grad,
    master,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    exp_avg_weight,
    beta2,
    grad_weight,
    step_size,
    eps,
    decay,
    coupled_decay,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
):
    """The new master, exp_avg, exp_avg_sq and max_exp_avg_sq of one block in float32; ``grad`` is unscaled and clipped.

    ``master - step_size * exp_avg / (sqrt(exp_avg_sq) + eps)``, with the corrections for bias in step_size and eps.
    """
    if COUPLED:
        grad = grad + coupled_decay * master
    master = master * decay

    difference = grad - exp_avg
    if FROM_GRAD:
        exp_avg = grad + exp_avg_weight * difference
    else:
        exp_avg = exp_avg + exp_avg_weight * difference
    exp_avg_sq = beta2 * exp_avg_sq + (grad_weight * grad) * grad

    second = exp_avg_sq
    if AMSGRAD:
        # The larger one, NaN if either is; tl.maximum drops NaN by default.
        larger = (exp_avg_sq > max_exp_avg_sq) | (exp_avg_sq != exp_avg_sq)
        second = tl.where(larger, exp_avg_sq, max_exp_avg_sq)
    denominator = tl.sqrt_rn(second) + eps
    master = master - step_size * tl.div_rn(exp_avg, denominator)
    return master, exp_avg, exp_avg_sq, second


# triton.jit decides which kind of function it makes, by TRITON_INTERPRET at this moment.
INTERPRETING = not isinstance(adam_update, triton.runtime.JITFunction)
