"""The scalars of sharded_adam: one small launch makes each tensor's from its step, which it then counts.

They take float64 and a loop of 31 rounds: in each program of the update they would cost more than its arithmetic.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ._math import power

# Tensors in one program.
TENSORS = 128
# A tensor's row: seven addresses (0: absent), then these columns, then how much of it there is: elements, or blocks.
WORDS = tl.constexpr(7)  # the address of its blocks' words
COUNTER = tl.constexpr(8)  # the address of its counter
SALT = tl.constexpr(9)  # of the dither; -1: none, all is rounded to nearest
FIRST = tl.constexpr(10)  # these three: the global index of an element, as in ``ops.sharded_adam``
INDEX_COLUMNS = tl.constexpr(11)
INDEX_STRIDE = tl.constexpr(12)
BLOCK_COLUMNS = tl.constexpr(13)  # elements in a row of blocks
COLUMNS = tl.constexpr(15)
# A tensor's scalars, in the order of AdamScalars in csrc/common/adam_math.h, then two patterns of 32 bits: a dither
# word is the element's index times the second one plus the first one.
BASE = tl.constexpr(8)
MULTIPLIER = tl.constexpr(9)
SCALARS = tl.constexpr(10)


@triton.jit(
    do_not_specialize=["rows", "scalars", "count", "lr_tensor", "clip_coef", "found_inf"],
)
def scalars_kernel(
    rows,
    scalars,
    count,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    lr_tensor,
    clip_coef,
    found_inf,
    DECOUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    TENSORS: tl.constexpr,
):
    """For each tensor, with ``t = counter + 1``: its scalars in float64, rounded once; ``counter = t``.

    ``step_size = lr / (1 - beta1^t) * sqrt(1 - beta2^t)``, ``eps * sqrt(1 - beta2^t)``,
    ``decay = 1 - lr * weight_decay``; of the dither, ``t * 0x9E3779B9 + salt`` modulo 2^32.
    """
    index = tl.program_id(0).to(tl.int64) * TENSORS + tl.arange(0, TENSORS)
    mask = index < count
    counter = tl.load(rows + index * COLUMNS + COUNTER, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counter, mask=mask, other=0.0).to(tl.int64) + 1
    if lr_tensor is not None:
        lr = tl.load(lr_tensor).to(tl.float64)

    bias_correction1 = 1.0 - power(beta1, step)
    bias_correction2_sqrt = tl.sqrt(1.0 - power(beta2, step))
    grad_coef = 1.0
    if clip_coef is not None:
        grad_coef = tl.load(clip_coef)
    decay = 1.0
    coupled_decay = weight_decay
    if DECOUPLED:
        decay = 1.0 - lr * weight_decay
        coupled_decay = 0.0

    row = scalars + index * SCALARS
    # Torch's lerp: the sum starts from the nearer end.
    tl.store(row, (-beta1 if FROM_GRAD else 1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(row + 1, beta2.to(tl.float32), mask=mask)
    tl.store(row + 2, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(row + 3, (lr / bias_correction1 * bias_correction2_sqrt).to(tl.float32), mask=mask)
    tl.store(row + 4, (eps * bias_correction2_sqrt).to(tl.float32), mask=mask)
    tl.store(row + 5, tl.cast(decay, tl.float32), mask=mask)
    tl.store(row + 6, tl.cast(coupled_decay, tl.float32), mask=mask)
    tl.store(row + 7, -grad_coef if MAXIMIZE else grad_coef, mask=mask)

    salt = tl.load(rows + index * COLUMNS + SALT, mask=mask, other=0)
    base = step.to(tl.uint32) * 0x9E3779B9 + salt.to(tl.uint32)
    row = row.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.store(row + BASE, tl.where(salt < 0, 0x80000000, base).to(tl.uint32), mask=mask)
    tl.store(row + MULTIPLIER, tl.where(salt < 0, 0, 0x85EBCA77).to(tl.uint32), mask=mask)

    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 0.0, count, 0)
    tl.store(counter, step.to(tl.float32), mask=index < count)
