"""The sharded Adam step in plain torch: the specification of its arithmetic, operation by operation.

Everything an element sees is float32 and rounded after each operation. A tensor's scalars are made in float64 from its
step and rounded to float32 once. The form with one division is the usual one multiplied through by sqrt(1 - beta2^t).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_quant import decode_blocks, encode_blocks
from .dither import CANONICAL_NAN, Dither, join_fp24, round_dithered, split_fp24

# The op's ``rounding`` of low-precision parameters that have no master; 0: there are none.
NEAREST, STOCHASTIC = 1, 2


@dataclass(frozen=True)
class AdamScalars:
    """One tensor's scalars for one step: float32 tensors of no dimension, on the tensor's device."""

    exp_avg_weight: Tensor  # 1 - beta1, or -beta1 if from_grad
    from_grad: bool
    beta2: Tensor
    grad_weight: Tensor  # 1 - beta2
    step_size: Tensor  # lr / (1 - beta1^t) * sqrt(1 - beta2^t)
    eps: Tensor  # eps * sqrt(1 - beta2^t)
    decay: Tensor  # 1 - lr * weight_decay


def power(base: float, exponent: Tensor) -> Tensor:
    """``base ** exponent`` in float64 by squaring, a stated sequence of multiplications.

    ``exponent`` is an int64 scalar tensor of at least 1; 31 rounds cover every step a float32 counter can hold.
    """
    result = torch.ones((), dtype=torch.float64, device=exponent.device)
    square = torch.full((), base, dtype=torch.float64, device=exponent.device)
    for _ in range(31):
        result = torch.where(exponent & 1 == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


def adam_scalars(
    step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool
) -> AdamScalars:
    """Scalars of the update that makes ``step`` (an int64 scalar tensor, starting at 1) complete; ``lr`` is float64."""

    def rounded(value: Tensor | float) -> Tensor:
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=torch.float64, device=step.device)
        return value.float()

    bias_correction1 = 1.0 - power(beta1, step)
    bias_correction2_sqrt = torch.sqrt(1.0 - power(beta2, step))
    weight = 1.0 - beta1
    from_grad = not weight < 0.5  # torch's lerp: the sum starts from the nearer end
    return AdamScalars(
        exp_avg_weight=rounded(-beta1 if from_grad else weight),
        from_grad=from_grad,
        beta2=rounded(beta2),
        grad_weight=rounded(1.0 - beta2),
        step_size=rounded(lr / bias_correction1 * bias_correction2_sqrt),
        eps=rounded(eps * bias_correction2_sqrt),
        decay=rounded(1.0 - lr * weight_decay if decoupled else 1.0),
    )


def sqrt_rn(values: Tensor) -> Tensor:
    """Correctly rounded float32 square root; torch.sqrt on CPU float32 is not."""
    return values.double().sqrt().float()


def join_fp32(high: Tensor, remainder: Tensor) -> Tensor:
    """bfloat16 and its remainder (typed bfloat16) -> float32: ``bits = (high << 16) + sign_extend(remainder)``."""
    bits = (high.view(torch.int16).int() << 16) + remainder.view(torch.int16).int()
    return bits.view(torch.float32)


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> bfloat16 rounded with ties away from zero, and the 16-bit remainder (typed bfloat16).

    Ties away because under ties-to-even some bfloat16 values own 65,537 float32 patterns. NaN is made canonical first:
    the integer rule would turn 0x7FFFFFFF into -0.0.
    """
    bits = torch.where(values.isnan(), CANONICAL_NAN, values.contiguous().view(torch.int32))
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16).view(torch.bfloat16)


def adam_update(
    scalars: AdamScalars,
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    coupled_decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new master, exp_avg, exp_avg_sq and max_exp_avg_sq of float32 tensors; ``grad`` is unscaled and clipped."""
    if coupled_decay != 0.0:
        grad = grad + torch.full((), coupled_decay, dtype=torch.float64, device=grad.device).float() * master
    master = master * scalars.decay

    difference = grad - exp_avg
    exp_avg = (grad if scalars.from_grad else exp_avg) + scalars.exp_avg_weight * difference
    exp_avg_sq = scalars.beta2 * exp_avg_sq + (scalars.grad_weight * grad) * grad

    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        second = max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    denominator = sqrt_rn(second) + scalars.eps
    master = master - scalars.step_size * (exp_avg / denominator)
    return master, exp_avg, exp_avg_sq, max_exp_avg_sq


def load_moments(exp_avg: Tensor, exp_avg_sq: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both moments in float32 from their storage."""
    if words is not None:
        return decode_blocks(exp_avg, exp_avg_sq, words)
    return exp_avg.float(), exp_avg_sq.float()


def load_master(param: Tensor, master: Tensor | None) -> Tensor:
    """The float32 master from its storage."""
    if master is None:
        return param.float()
    if master.dtype == torch.bfloat16:
        return join_fp32(param, master)
    return join_fp24(param, master) if master.dtype == torch.int8 else master


def sharded_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    block_words: Sequence[Tensor],
    steps: Tensor,
    step_index: Tensor | None,
    dither: Tensor | None,
    rounding: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    maximize: bool,
    lr_tensor: Tensor | None,
    clip_coef: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step over lists of tensors, in place; arguments as the op's. No host sync."""
    if not params:
        return
    device = params[0].device
    lr64 = torch.full((), lr, dtype=torch.float64, device=device)
    if lr_tensor is not None:
        lr64 = lr_tensor.double().reshape(())
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    coupled_decay = 0.0 if decoupled_weight_decay else weight_decay

    def store(target: Tensor, value: Tensor) -> None:
        target.copy_(value if skip is None else torch.where(skip, target, value))

    for index, param in enumerate(params):
        counter = steps[index if step_index is None else int(step_index[index])]
        step = (counter.long() + 1).to(device, non_blocking=True)  # counters may be on the CPU
        scalars = adam_scalars(step, lr64, beta1, beta2, eps, weight_decay, decoupled_weight_decay)
        noise = None if dither is None else Dither.of(dither[index], step)
        stored_master = masters[index] if masters else None
        words = block_words[index] if block_words else None
        exp_avg, exp_avg_sq = load_moments(exp_avgs[index], exp_avg_sqs[index], words)

        grad = grads[index].float()
        if grad_scale is not None:
            grad = grad / grad_scale.reshape(())
        if clip_coef is not None:
            grad = grad * clip_coef.reshape(())
        if maximize:
            grad = -grad
        master, exp_avg, exp_avg_sq, max_exp_avg_sq = adam_update(
            scalars,
            grad,
            load_master(param, stored_master),
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sqs[index] if max_exp_avg_sqs else None,
            coupled_decay,
        )

        if words is not None:
            for target, value in zip(
                (exp_avgs[index], exp_avg_sqs[index], words),
                encode_blocks(exp_avg, exp_avg_sq, words.shape[0], noise),
                strict=True,
            ):
                store(target, value)
        else:
            for target, value in ((exp_avgs[index], exp_avg), (exp_avg_sqs[index], exp_avg_sq)):
                store(target, round_dithered(value, noise) if target.dtype == torch.bfloat16 else value)
        if max_exp_avg_sq is not None:
            store(max_exp_avg_sqs[index], max_exp_avg_sq)
        if stored_master is None:
            store(param, round_dithered(master, noise) if rounding == STOCHASTIC else master.to(param.dtype))
        elif stored_master.dtype == torch.float32:
            store(stored_master, master)
            store(param, master.to(param.dtype))
        else:
            is_24_bits = stored_master.dtype == torch.int8
            high, remainder = split_fp24(master, noise) if is_24_bits else split_fp32(master)
            store(param, high)
            store(stored_master, remainder)
        if shadows:
            store(shadows[index], master.to(shadows[index].dtype))
        store(counter, counter + 1.0)
