"""sharded_adam in Triton: a small launch makes each tensor's scalars, a second one updates all tensors' elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from . import _adam_scalars as columns
from . import _launch
from ._adam_blocks import update_blocks_kernel
from ._adam_elements import update_kernel
from ._adam_scalars import COLUMNS, SCALARS, TENSORS, scalars_kernel
from ._block_quant import BLOCK as QUANTISED

# Elements a thread: 128 bits of float32. With more, types of two widths would meet in shared memory.
VECTOR = 4
# Where nothing wider than 16 bits is stored: 128 bits of bfloat16.
NARROW_VECTOR = 8
# A program of quantised blocks is smaller: with twice the threads, the assembler of triton 3.6 spilled two registers
# to have more programs at a time.
BLOCK_THREADS = _launch.THREADS // 2
MOMENTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.int8: torch.uint8}


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


def _check_formats(params: Sequence[Tensor], moment: torch.dtype, master: torch.dtype | None, rounding: int) -> None:
    """The storages that the kernels have; typed functions of ``ops`` explain more."""
    param = params[0].dtype
    if moment not in MOMENTS:
        raise ValueError(f"exp_avgs have dtype {moment}; moments are float32, bfloat16, or int8 and uint8 codes")
    if master is None:
        own = {0: (torch.float32,), 1: (torch.bfloat16, torch.float16), 2: (torch.bfloat16,)}
        known = param in own.get(rounding, ())
    else:
        remainders = (torch.bfloat16, torch.int8) if param == torch.bfloat16 else ()
        known = rounding == 0 and master in (torch.float32, *remainders)
    if not known:
        raise ValueError(
            f"params have dtype {param}, masters {master}, rounding is {rounding}; masters are float32, or remainders "
            "typed bfloat16 or int8 under bfloat16 params, or absent under float32 params, or absent where rounding is "
            "1 (to nearest) or 2 (by dither, bfloat16 params only)"
        )


def _dither_columns(dither: Tensor | None, count: int) -> _launch.Table:
    """Salt (-1: no dither), first, columns and stride of each tensor."""
    if dither is None:
        return np.array([[-1, 0, 1, 1]], dtype=np.int64).repeat(count, 0)
    table: _launch.Table = dither.numpy()
    if table.shape != (count, 4) or (table[:, 0] < 0).any() or (table[:, 0] >= 1 << 32).any():
        raise ValueError(
            f"dither is {table.tolist()} for {count} params; it has a row (salt in [0, 2^32), first, columns, stride) "
            "for each"
        )
    return np.maximum(table, [[0, 0, 1, 0]])  # an empty tensor may have no columns


def _block_columns(block_words: Sequence[Tensor], params: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Elements in a row of each tensor and its blocks, after the checks that keep a kernel inside its words."""
    if len(block_words) != len(params):
        raise ValueError(f"block_words has {len(block_words)} tensors, the call needs {len(params)}; give one for each")
    row_numels, blocks = [], []
    for index, (words, param) in enumerate(zip(block_words, params, strict=True)):
        rows = words.shape[0] if words.dim() == 3 else 0
        row_numel = param.numel() // rows if rows else 0
        row_blocks = -(-row_numel // QUANTISED.value)
        if (
            rows * row_numel != param.numel()
            or (param.numel() and words.shape[1:] != (row_blocks, 2))
            or words.dtype != torch.int32
            or words.device != params[0].device
            or not words.is_contiguous()
        ):
            raise ValueError(
                f"block_words[{index}] is {words.dtype} on {words.device} of shape {tuple(words.shape)}, strides "
                f"{words.stride()}; the call needs contiguous torch.int32 on {params[0].device}, [rows, blocks, 2] "
                f"with a block for every {QUANTISED.value} of a row's elements, {param.numel()} in all"
            )
        row_numels.append(max(row_numel, 1))
        blocks.append(rows * row_blocks)
    return row_numels, blocks


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
    moment = exp_avgs[0].dtype if exp_avgs else torch.float32
    master = masters[0].dtype if masters else None
    _check_formats(params, moment, master, rounding)
    known = {"exp_avgs": moment, "exp_avg_sqs": MOMENTS[moment], "max_exp_avg_sqs": torch.float32}
    rows = np.zeros((count, COLUMNS.value), dtype=np.int64)
    for column, (name, tensors) in enumerate(lists.items()):
        if tensors or column < 4:
            dtype = known[name] if name in known else tensors[0].dtype
            rows[:, column] = _launch.addresses(tensors, name, params, dtype)
    # Counters on the CPU (then there is no found_inf) are read from a copy, and counted here.
    device_steps = steps.to(device, non_blocking=True)
    rows[:, columns.COUNTER.value] = _counters(device_steps, step_index, count)
    rows[:, columns.SALT.value : columns.INDEX_STRIDE.value + 1] = _dither_columns(dither, count)
    numels = rows[:, -1] = [param.numel() for param in params]
    quantised = moment == torch.int8
    if quantised:
        rows[:, columns.BLOCK_COLUMNS.value], rows[:, -1] = _block_columns(block_words, params)
        rows[:, columns.WORDS.value] = [words.data_ptr() for words in block_words]

    # By dither and by index: what a block's own dither does not cover.
    indexed = moment == torch.bfloat16 or master == torch.int8 or rounding == 2
    strided = bool(indexed and dither is not None and (rows[:, columns.INDEX_COLUMNS.value] < numels).any())
    stored = {tensors[0].dtype for name, tensors in lists.items() if tensors and name != "grads"}
    vector = VECTOR if torch.float32 in stored else NARROW_VECTOR
    split = params[0].dtype == torch.bfloat16 and (master in (torch.bfloat16, torch.int8) or rounding == 2)
    from_grad = not 1.0 - beta1 < 0.5
    options = {
        "PARAM": tl.int16 if split else _launch.DTYPES[params[0].dtype],
        "GRAD": _launch.DTYPES[grads[0].dtype],
        "MASTER": {None: None, torch.bfloat16: tl.int16, torch.int8: tl.int8, torch.float32: tl.float32}[master],
        "SHADOW": _launch.DTYPES[shadows[0].dtype] if shadows else None,
        "COUPLED": not decoupled_weight_decay and weight_decay != 0.0,
        "FROM_GRAD": from_grad,
        "AMSGRAD": bool(max_exp_avg_sqs),
        "STRIDED": strided,
        "VECTOR": vector,
    }
    block = vector * (BLOCK_THREADS if quantised else _launch.THREADS)
    with _launch.on_device(params[0]):
        table, chunks = _launch.tables(rows, block // QUANTISED.value if quantised else block, device)
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
        arguments = (table, chunks, scalars, grad_scale, found_inf)
        if quantised:
            update_blocks_kernel[(chunks.numel(),)](
                *arguments,
                **options,
                BLOCKS=block // QUANTISED.value,
                num_warps=BLOCK_THREADS // _launch.WARP_SIZE,
                enable_fp_fusion=False,
            )
        else:
            update_kernel[(chunks.numel(),)](
                *arguments,
                **options,
                MOMENT=tl.int16 if moment == torch.bfloat16 else tl.float32,
                DITHERED=indexed,
                BLOCK=block,
                num_warps=_launch.NUM_WARPS,
                enable_fp_fusion=False,
            )
