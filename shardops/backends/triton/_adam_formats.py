"""What the two kernels of sharded_adam share: a tensor's row, its master in every storage, one step of its elements.

An element's storage is told by the types: a low-precision parameter typed int16 is the upper part of a split master
(MASTER int16 or int8: the remainder), or rounded by dither (MASTER None). Other ones are rounded to nearest even.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from ._adam_scalars import BASE, FIRST, INDEX_COLUMNS, INDEX_STRIDE, MULTIPLIER
from ._math import (
    adam_update,
    aligned_pointer,
    join_fp24,
    join_fp32,
    load_block,
    misaligned,
    round_dithered,
    split_fp24,
    split_fp32,
    store_block,
    widen,
)


@triton.jit
def pointer(address, offset, DTYPE: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return address.to(tl.pointer_type(DTYPE)) + offset
    else:
        return aligned_pointer(address, DTYPE, VECTOR) + offset


@triton.jit
def load_row(
    row,
    scalars,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    AMSGRAD: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The tensor's seven addresses, zero if all are aligned, and its scalars."""
    addresses = ()
    for column in tl.static_range(7):
        addresses = addresses + (tl.load(row + column),)  # noqa: RUF005
    unaligned = misaligned(addresses[0], PARAM, VECTOR) | misaligned(addresses[1], GRAD, VECTOR)
    unaligned = unaligned | misaligned(addresses[2], MOMENT, VECTOR) | misaligned(addresses[3], MOMENT, VECTOR)
    if AMSGRAD:
        unaligned = unaligned | misaligned(addresses[4], tl.float32, VECTOR)
    if MASTER is not None:
        unaligned = unaligned | misaligned(addresses[5], MASTER, VECTOR)
    if SHADOW is not None:
        unaligned = unaligned | misaligned(addresses[6], SHADOW, VECTOR)
    values = ()
    for column in tl.static_range(8):
        values = values + (tl.load(scalars + column),)  # noqa: RUF005
    return addresses, unaligned, values


@triton.jit
def load_dither(row, scalars):
    """What makes a tensor's dither words: base and multiplier (uint32), first, columns and stride (int64)."""
    words = scalars.to(tl.pointer_type(tl.uint32), bitcast=True)
    base, multiplier = tl.load(words + BASE), tl.load(words + MULTIPLIER)
    return base, multiplier, tl.load(row + FIRST), tl.load(row + INDEX_COLUMNS), tl.load(row + INDEX_STRIDE)


@triton.jit
def load_master(
    addresses,
    offset,
    lanes,
    remaining,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The master in float32."""
    if MASTER == tl.float32:  # noqa: SIM300
        master = load_block(pointer(addresses[5], offset, MASTER, VECTOR, MASKED), lanes, remaining, MASKED)
    else:
        master = load_block(pointer(addresses[0], offset, PARAM, VECTOR, MASKED), lanes, remaining, MASKED)
        if MASTER is not None:
            rest = load_block(pointer(addresses[5], offset, MASTER, VECTOR, MASKED), lanes, remaining, MASKED)
            master = join_fp24(master, rest) if MASTER == tl.int8 else join_fp32(master, rest)  # noqa: SIM300
        elif PARAM == tl.int16:  # noqa: SIM300
            master = widen(master)
        else:
            master = master.to(tl.float32)
    return master


@triton.jit
def store_master(
    addresses,
    offset,
    lanes,
    remaining,
    master,
    words,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores the parameter, its master and its shadow; ``words`` is the dither, for storages that have one."""
    if SHADOW is not None:
        shadow = pointer(addresses[6], offset, SHADOW, VECTOR, MASKED)
        store_block(shadow, lanes, remaining, master, MASKED)
    rest = master
    if PARAM == tl.int16:  # noqa: SIM300
        if MASTER == tl.int8:  # noqa: SIM300
            master, rest = split_fp24(master, words)
        elif MASTER == tl.int16:  # noqa: SIM300
            master, rest = split_fp32(master)
        else:
            master = round_dithered(master, words)
    store_block(pointer(addresses[0], offset, PARAM, VECTOR, MASKED), lanes, remaining, master, MASKED)
    if MASTER is not None:
        store_block(pointer(addresses[5], offset, MASTER, VECTOR, MASKED), lanes, remaining, rest, MASKED)


@triton.jit
def step_elements(
    addresses,
    offset,
    lanes,
    remaining,
    scalars,
    grad_scale,
    exp_avg,
    exp_avg_sq,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The new master, exp_avg and exp_avg_sq in float32; max_exp_avg_sq is stored here, being float32 always."""
    grad = load_block(pointer(addresses[1], offset, GRAD, VECTOR, MASKED), lanes, remaining, MASKED).to(tl.float32)
    max_exp_avg_sq = exp_avg_sq
    if AMSGRAD:
        max_block = pointer(addresses[4], offset, tl.float32, VECTOR, MASKED)
        max_exp_avg_sq = load_block(max_block, lanes, remaining, MASKED)
    master = load_master(addresses, offset, lanes, remaining, PARAM, MASTER, VECTOR, MASKED)

    if grad_scale is not None:
        grad = tl.div_rn(grad, grad_scale)
    grad = grad * scalars[7]
    master, exp_avg, exp_avg_sq, max_exp_avg_sq = adam_update(
        grad,
        master,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        scalars[0],
        scalars[1],
        scalars[2],
        scalars[3],
        scalars[4],
        scalars[5],
        scalars[6],
        COUPLED,
        FROM_GRAD,
        AMSGRAD,
    )
    if AMSGRAD:
        store_block(max_block, lanes, remaining, max_exp_avg_sq, MASKED)
    return master, exp_avg, exp_avg_sq
