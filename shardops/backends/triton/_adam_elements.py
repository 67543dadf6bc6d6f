"""The kernel of sharded_adam for moments stored element by element: float32, or bfloat16 rounded by dither."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from ._adam_formats import load_dither, load_row, pointer, step_elements, store_master
from ._adam_scalars import COLUMNS, SCALARS
from ._math import dither_words, load_block, round_dithered, store_block, widen


@triton.jit
def _update_block(
    addresses,
    offset,
    remaining,
    scalars,
    dither,
    grad_scale,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    DITHERED: tl.constexpr,
    STRIDED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of one tensor; the arithmetic is the same with and without masks."""
    lanes = tl.arange(0, BLOCK)
    exp_avg_block = pointer(addresses[2], offset, MOMENT, VECTOR, MASKED)
    exp_avg_sq_block = pointer(addresses[3], offset, MOMENT, VECTOR, MASKED)
    exp_avg = load_block(exp_avg_block, lanes, remaining, MASKED)
    exp_avg_sq = load_block(exp_avg_sq_block, lanes, remaining, MASKED)
    if MOMENT == tl.int16:  # noqa: SIM300
        exp_avg = widen(exp_avg)
        exp_avg_sq = widen(exp_avg_sq)

    master, exp_avg, exp_avg_sq = step_elements(
        addresses, offset, lanes, remaining, scalars, grad_scale, exp_avg, exp_avg_sq,
        PARAM, GRAD, MASTER, COUPLED, FROM_GRAD, AMSGRAD, VECTOR, MASKED,
    )  # fmt: skip

    words = None
    if DITHERED:
        words = dither_words(dither, offset, lanes, STRIDED)
    if MOMENT == tl.int16:  # noqa: SIM300
        exp_avg = round_dithered(exp_avg, words)
        exp_avg_sq = round_dithered(exp_avg_sq, words)
    store_block(exp_avg_block, lanes, remaining, exp_avg, MASKED)
    store_block(exp_avg_sq_block, lanes, remaining, exp_avg_sq, MASKED)
    store_master(addresses, offset, lanes, remaining, master, words, PARAM, MASTER, SHADOW, VECTOR, MASKED)


@triton.jit(do_not_specialize=["rows", "chunks", "scalars", "grad_scale", "found_inf"])
def update_kernel(
    rows,
    chunks,
    scalars,
    grad_scale,
    found_inf,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    DITHERED: tl.constexpr,
    STRIDED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chunk of BLOCK elements of one tensor: load, :func:`adam_update`, store.

    Types as in ``_adam_formats``; MOMENT int16: the bits of bfloat16. DITHERED: something is rounded by dither.
    """
    entry = tl.load(chunks + tl.program_id(0).to(tl.int64))
    tensor = entry >> 32
    row = rows + tensor * COLUMNS
    offset = (entry & 0xFFFFFFFF) * BLOCK
    remaining = tl.load(row + (COLUMNS - 1)) - offset
    if found_inf is not None:
        # With nothing remaining, every access is masked off.
        remaining = tl.where(tl.load(found_inf) == 0.0, remaining, 0)

    scalars = scalars + tensor * SCALARS
    addresses, unaligned, values = load_row(row, scalars, PARAM, GRAD, MOMENT, MASTER, SHADOW, AMSGRAD, VECTOR)
    dither = ()
    if DITHERED:
        dither = load_dither(row, scalars)
    if grad_scale is not None:
        grad_scale = tl.load(grad_scale)

    if (unaligned == 0) & (remaining >= BLOCK):
        _update_block(
            addresses, offset, remaining, values, dither, grad_scale,
            PARAM, GRAD, MOMENT, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, DITHERED, STRIDED, VECTOR, BLOCK, False,
        )  # fmt: skip
    else:
        # One element a thread: neighbours in a warp are neighbours in memory whatever the alignment.
        for start in tl.range(0, tl.minimum(remaining, BLOCK), BLOCK // VECTOR):
            _update_block(
                addresses, offset + start, remaining - start, values, dither, grad_scale,
                PARAM, GRAD, MOMENT, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, DITHERED, STRIDED, VECTOR,
                BLOCK // VECTOR, True,
            )  # fmt: skip
