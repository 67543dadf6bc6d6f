"""sharded_adam in Triton: a small launch makes each tensor's scalars, a second one updates all tensors' elements."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._adam_scalars import COLUMNS, SCALARS, TENSORS, scalars_kernel
from ._math import adam_update, aligned_pointer, join_fp32, load_block, misaligned, split_fp32, store_block

# 4 elements a thread: 128 bits of float32, 64 of bfloat16. With 8, types of two widths would meet in shared memory.
VECTOR = 4
BLOCK = VECTOR * _launch.THREADS


@triton.jit
def _pointer(address, offset, DTYPE: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return address.to(tl.pointer_type(DTYPE)) + offset
    else:
        return aligned_pointer(address, DTYPE, VECTOR) + offset


@triton.jit
def _update_block(
    addresses,
    offset,
    remaining,
    scalars,
    grad_scale,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of one tensor; the arithmetic is the same with and without masks."""
    lanes = tl.arange(0, BLOCK)
    param_block = _pointer(addresses[0], offset, PARAM, VECTOR, MASKED)
    grad_block = _pointer(addresses[1], offset, GRAD, VECTOR, MASKED)
    exp_avg_block = _pointer(addresses[2], offset, tl.float32, VECTOR, MASKED)
    exp_avg_sq_block = _pointer(addresses[3], offset, tl.float32, VECTOR, MASKED)

    grad = load_block(grad_block, lanes, remaining, MASKED).to(tl.float32)
    exp_avg = load_block(exp_avg_block, lanes, remaining, MASKED)
    exp_avg_sq = load_block(exp_avg_sq_block, lanes, remaining, MASKED)
    max_exp_avg_sq = exp_avg_sq
    if AMSGRAD:
        max_exp_avg_sq_block = _pointer(addresses[4], offset, tl.float32, VECTOR, MASKED)
        max_exp_avg_sq = load_block(max_exp_avg_sq_block, lanes, remaining, MASKED)
    if MASTER is None:
        master = load_block(param_block, lanes, remaining, MASKED)
    else:
        master_block = _pointer(addresses[5], offset, MASTER, VECTOR, MASKED)
        master = load_block(master_block, lanes, remaining, MASKED)
        if MASTER == tl.int16:  # noqa: SIM300
            master = join_fp32(load_block(param_block, lanes, remaining, MASKED), master)

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

    store_block(exp_avg_block, lanes, remaining, exp_avg, MASKED)
    store_block(exp_avg_sq_block, lanes, remaining, exp_avg_sq, MASKED)
    if AMSGRAD:
        store_block(max_exp_avg_sq_block, lanes, remaining, max_exp_avg_sq, MASKED)
    if MASTER == tl.int16:  # noqa: SIM300
        high, remainder = split_fp32(master)
        store_block(param_block, lanes, remaining, high, MASKED)
        store_block(master_block, lanes, remaining, remainder, MASKED)
    else:
        store_block(param_block, lanes, remaining, master, MASKED)
        if MASTER is not None:
            store_block(master_block, lanes, remaining, master, MASKED)
    if SHADOW is not None:
        shadow_block = _pointer(addresses[6], offset, SHADOW, VECTOR, MASKED)
        store_block(shadow_block, lanes, remaining, master, MASKED)


@triton.jit(do_not_specialize=["rows", "chunks", "scalars", "grad_scale", "found_inf"])
def update_kernel(
    rows,
    chunks,
    scalars,
    grad_scale,
    found_inf,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A chunk of BLOCK elements of one tensor: load, :func:`adam_update`, store.

    Split masters: PARAM and MASTER are int16, the bits of the bfloat16 parameter and of its remainder.
    """
    entry = tl.load(chunks + tl.program_id(0).to(tl.int64))
    tensor = entry >> 32
    row = rows + tensor * COLUMNS
    offset = (entry & 0xFFFFFFFF) * BLOCK
    remaining = tl.load(row + 8) - offset
    if found_inf is not None:
        # With nothing remaining, every access is masked off.
        remaining = tl.where(tl.load(found_inf) == 0.0, remaining, 0)

    addresses = ()
    for column in tl.static_range(7):
        addresses = addresses + (tl.load(row + column),)  # noqa: RUF005
    unaligned = misaligned(addresses[0], PARAM, VECTOR) | misaligned(addresses[1], GRAD, VECTOR)
    for column in tl.static_range(2, 5):
        unaligned = unaligned | misaligned(addresses[column], tl.float32, VECTOR)
    if MASTER is not None:
        unaligned = unaligned | misaligned(addresses[5], MASTER, VECTOR)
    if SHADOW is not None:
        unaligned = unaligned | misaligned(addresses[6], SHADOW, VECTOR)

    values = ()
    for column in tl.static_range(8):
        values = values + (tl.load(scalars + tensor * SCALARS + column),)  # noqa: RUF005
    if grad_scale is not None:
        grad_scale = tl.load(grad_scale)

    if (unaligned == 0) & (remaining >= BLOCK):
        _update_block(
            addresses, offset, remaining, values, grad_scale,
            PARAM, GRAD, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, VECTOR, BLOCK, False,
        )  # fmt: skip
    else:
        # One element a thread: neighbours in a warp are neighbours in memory whatever the alignment.
        for start in tl.range(0, tl.minimum(remaining, BLOCK), BLOCK // VECTOR):
            _update_block(
                addresses, offset + start, remaining - start, values, grad_scale,
                PARAM, GRAD, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, VECTOR, BLOCK // VECTOR, True,
            )  # fmt: skip


def _counters(steps: Tensor, step_index: Tensor | None, count: int) -> _launch.Table:
    """Addresses of the tensors' counters."""
    index = np.arange(count, dtype=np.int64) if step_index is None else step_index.numpy()
    if len(index) != count or index.min() < 0 or index.max() >= steps.numel() or len(np.unique(index)) != count:
        raise ValueError(
            f"step_index is {index.tolist()} for {count} params and {steps.numel()} counters; "
            "each of params has a counter of its own in steps"
        )
    counters: _launch.Table = steps.data_ptr() + index * steps.dtype.itemsize
    return counters


def sharded_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    steps: Tensor,
    step_index: Tensor | None,
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
    """One step over lists of tensors, in place; arguments as ``ops.sharded_adam``. No host sync."""
    if not params:
        return
    device, count = params[0].device, len(params)
    lists = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "masters": masters,
        "shadows": shadows,
    }
    moments = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    rows = np.zeros((count, COLUMNS.value), dtype=np.int64)
    for column, (name, tensors) in enumerate(lists.items()):
        if tensors or column < 4:
            dtype = torch.float32 if name in moments else tensors[0].dtype
            rows[:, column] = _launch.addresses(tensors, name, params, dtype)
    # Counters on the CPU (then there is no found_inf) are read from a copy, and counted here.
    device_steps = steps.to(device, non_blocking=True)
    rows[:, 7] = _counters(device_steps, step_index, count)
    rows[:, 8] = [param.numel() for param in params]

    master_dtype = masters[0].dtype if masters else None
    split = master_dtype == torch.bfloat16
    if (params[0].dtype if master_dtype is None else master_dtype) != torch.float32 and (
        not split or params[0].dtype != torch.bfloat16
    ):
        raise ValueError(
            f"params have dtype {params[0].dtype}, masters {master_dtype}; masters are float32, or remainders typed "
            "bfloat16 under bfloat16 params, or absent under float32 params"
        )
    from_grad = not 1.0 - beta1 < 0.5
    with _launch.on_device(params[0]):
        table, chunks = _launch.tables(rows, BLOCK, device)
        scalars = torch.empty(count * SCALARS.value, dtype=torch.float32, device=device)
        scalars_kernel[(-(-count // TENSORS),)](
            table,
            scalars,
            count,
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            lr_tensor,
            clip_coef,
            found_inf,
            DECOUPLED=decoupled_weight_decay,
            FROM_GRAD=from_grad,
            MAXIMIZE=maximize,
            TENSORS=TENSORS,
            num_warps=_launch.NUM_WARPS // 2,
            enable_fp_fusion=False,
        )
        if device_steps is not steps:
            steps[slice(count) if step_index is None else step_index] += 1
        if not chunks.numel():
            return
        update_kernel[(chunks.numel(),)](
            table,
            chunks,
            scalars,
            grad_scale,
            found_inf,
            PARAM=tl.int16 if split else _launch.DTYPES[params[0].dtype],
            GRAD=_launch.DTYPES[grads[0].dtype],
            MASTER=None if master_dtype is None else tl.int16 if split else tl.float32,
            SHADOW=_launch.DTYPES[shadows[0].dtype] if shadows else None,
            COUPLED=not decoupled_weight_decay and weight_decay != 0.0,
            FROM_GRAD=from_grad,
            AMSGRAD=bool(max_exp_avg_sqs),
            VECTOR=VECTOR,
            BLOCK=BLOCK,
            num_warps=_launch.NUM_WARPS,
            enable_fp_fusion=False,
        )
