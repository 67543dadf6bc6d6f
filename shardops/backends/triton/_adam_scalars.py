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
# A tensor's row: seven addresses (0: absent), the address of its counter, numel.
COLUMNS = tl.constexpr(9)
# A tensor's scalars, in the order of AdamScalars in csrc/common/adam_math.h.
SCALARS = tl.constexpr(8)


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
    ``decay = 1 - lr * weight_decay``.
    """
    index = tl.program_id(0).to(tl.int64) * TENSORS + tl.arange(0, TENSORS)
    mask = index < count
    counter = tl.load(rows + index * COLUMNS + 7, mask=mask, other=0).to(tl.pointer_type(tl.float32))
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

    if found_inf is not None:
        count = tl.where(tl.load(found_inf) == 0.0, count, 0)
    tl.store(counter, step.to(tl.float32), mask=index < count)
