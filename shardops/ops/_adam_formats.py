"""The lists that sharded_adam takes, checked: which storages of moments and masters there are, and what each needs.

Shapes and dtypes only; the kernels check the same before they write, and say less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..backends.reference.block_quant import BLOCK, blocks_of
from . import _checks, _library

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")  # the op takes a position here, from 1
_MOMENTS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.int8: torch.uint8}
_OPTIONAL = ("max_exp_avg_sqs", "masters", "shadows", "block_words")
_DTYPES = {
    "exp_avgs": tuple(_MOMENTS),
    "exp_avg_sqs": tuple(_MOMENTS.values()),
    "masters": (torch.float32, torch.bfloat16, torch.int8),
    "block_words": (torch.int32,),
}


def check_lists(lists: dict[str, list[Tensor]], rounding: str | None) -> None:
    """Checks lists against each other and against ``rounding``.

    Raises:
        ValueError: lists of different lengths, shapes that differ, several devices or dtypes in a list, storages that
            do not go together.
        TypeError: something that is not a dense tensor of a supported dtype.
    """
    params = lists["params"]
    for name, tensors in lists.items():
        if len(tensors) != len(params) and not (name in _OPTIONAL and not tensors):
            raise ValueError(f"{name} has {len(tensors)} tensors, params has {len(params)}; give one for each")
        _checks.check_tensors(tensors, name, params[0].device, _DTYPES.get(name, _checks.FLOAT_DTYPES))
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        if len(dtypes) > 1:
            raise ValueError(f"{name} has dtypes {', '.join(dtypes)}; make one call for each combination of dtypes")
        for index, (tensor, param) in enumerate(zip(tensors, params, strict=bool(tensors))):
            if name != "block_words" and tensor.shape != param.shape:
                raise ValueError(
                    f"{name}[{index}] has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}; "
                    "each tensor of an update has the parameter's shape"
                )
    _check_moments(lists)
    _check_masters(lists, rounding)


def _check_moments(lists: dict[str, list[Tensor]]) -> None:
    exp_avg, exp_avg_sq = lists["exp_avgs"][0].dtype, lists["exp_avg_sqs"][0].dtype
    if _MOMENTS[exp_avg] != exp_avg_sq:
        raise ValueError(
            f"exp_avgs have dtype {exp_avg}, exp_avg_sqs {exp_avg_sq}; moments are both float32, both bfloat16, or "
            "int8 and uint8 codes"
        )
    if lists["max_exp_avg_sqs"] and lists["max_exp_avg_sqs"][0].dtype != torch.float32:
        raise ValueError(f"max_exp_avg_sqs have dtype {lists['max_exp_avg_sqs'][0].dtype}; they are float32")
    is_quantised = exp_avg == torch.int8
    if is_quantised != bool(lists["block_words"]):
        raise ValueError(
            f"exp_avgs have dtype {exp_avg} and block_words has {len(lists['block_words'])} tensors; "
            "quantised moments have the words of their blocks, and others have none"
        )
    for index, (words, param) in enumerate(zip(lists["block_words"], lists["params"], strict=is_quantised)):
        rows, numel = words.shape[0] if words.dim() == 3 else 0, param.numel()
        columns = numel // rows if rows else 0
        if words.dim() != 3 or columns * rows != numel or (numel and words.shape[1:] != (blocks_of(columns), 2)):
            raise ValueError(
                f"block_words[{index}] has shape {tuple(words.shape)} for a parameter of {numel} elements; it is "
                f"[rows, blocks, 2] with a block for every {BLOCK} elements of a row"
            )
        if not words.is_contiguous():
            raise ValueError(f"block_words[{index}] has strides {words.stride()}; it is contiguous")


def _check_masters(lists: dict[str, list[Tensor]], rounding: str | None) -> None:
    param_dtype = lists["params"][0].dtype
    master_dtype = lists["masters"][0].dtype if lists["masters"] else None
    if rounding is not None:
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {rounding!r}; it is one of {', '.join(map(repr, ROUNDINGS))}, or None")
        if master_dtype is not None or param_dtype == torch.float32:
            raise ValueError(
                f"rounding is {rounding!r}, params have dtype {param_dtype} and masters {master_dtype}; it is for "
                "low-precision parameters that have no masters: leave it out"
            )
        if rounding == "stochastic" and param_dtype != torch.bfloat16:
            raise ValueError(f"rounding is 'stochastic' and params have dtype {param_dtype}; only bfloat16 has it")
        return
    if master_dtype is None and param_dtype != torch.float32:
        raise ValueError(
            f"params have dtype {param_dtype} and masters is empty; give float32 masters or remainders, or a rounding"
        )
    if master_dtype in (torch.bfloat16, torch.int8) and param_dtype != torch.bfloat16:
        raise ValueError(
            f"masters have dtype {master_dtype} under params of {param_dtype}; they are float32 masters, or remainders "
            "typed bfloat16 or int8 under bfloat16 params"
        )


def check_dither(dither: Tensor | None, rounding: str | None, params: Sequence[Tensor]) -> None:
    """Checks the table of salts and indices.

    Raises:
        ValueError: of another shape, dtype or device, with values outside their ranges, or missing where it is needed.
    """
    if dither is None:
        if rounding == "stochastic":
            raise ValueError("rounding is 'stochastic' and dither is None; it is what rounds: give a salt for each")
        return
    if (
        dither.shape != (len(params), 4)
        or dither.dtype != torch.int64
        or dither.device.type != "cpu"
        or not dither.is_contiguous()
    ):
        raise ValueError(
            f"dither has shape {tuple(dither.shape)}, dtype {dither.dtype}, device {dither.device}, strides "
            f"{dither.stride()}; it is contiguous int64 of shape ({len(params)}, 4) on the CPU"
        )
    if _library.is_traced():  # there are no values to look at
        return
    low, high = (bound.tolist() for bound in torch.aminmax(dither, dim=0))
    if min(low) >= 0 and low[2] >= 1 and high[0] < 1 << 32:
        return
    for index, ((salt, first, columns, stride), param) in enumerate(zip(dither.tolist(), params, strict=True)):
        if not 0 <= salt < 1 << 32 or first < 0 or stride < 0 or columns < (param.numel() > 0):
            raise ValueError(
                f"dither[{index}] is {(salt, first, columns, stride)}; it is a salt in [0, 2^32), the first "
                "element's index, the elements of a row (at least 1), and the indices from one row to the next"
            )
