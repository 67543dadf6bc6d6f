"""fp32 moments back into codes: the very ones they came from, where they did come from codes, else the nearest.

Encoding what was decoded does not give the same codes: the largest value of a block may round up, and a step of the
scale is chosen with room to spare. So the block's step and scale are first recovered from the values themselves, and
kept if they reproduce every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.reference import block_quant
from ..backends.reference.block_quant import BLOCK, decode_blocks, encode_blocks

_GRID = 1 << block_quant.STEP_BITS
_LARGEST_FACTOR = 0xFFFF
_LARGEST_CODE = 254


def requantise(exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and words, undithered, of float32 moments ``[rows, columns]`` with blocks within rows.

    Returns:
        exp_avg's codes (int8), exp_avg_sq's (uint8), words (int32 ``[rows, blocks, 2]``).
    """
    rows, columns = exp_avg.shape
    codes, square_codes, words = encode_blocks(exp_avg, exp_avg_sq, rows, None)
    highest, factor = _recovered_step(exp_avg_sq)
    for code in (127, 126):  # a block's largest ratio has one of these codes
        candidate = _with_step(exp_avg, exp_avg_sq, highest, factor, code)
        is_exact = _is_exact(candidate, exp_avg, exp_avg_sq)
        words = torch.where(is_exact[..., None], candidate[2], words)
        of_elements = is_exact.repeat_interleave(BLOCK, dim=1)[:, :columns]
        codes = torch.where(of_elements, candidate[0], codes)
        square_codes = torch.where(of_elements, candidate[1], square_codes)
    return codes, square_codes, words


def _is_exact(candidate: tuple[Tensor, Tensor, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Which blocks decode to the moments' bits, bool ``[rows, blocks]``; zeros of either sign are one."""
    decoded = decode_blocks(*candidate)
    differs = (decoded[0] != exp_avg) | (decoded[1] != exp_avg_sq)
    return ~block_quant.in_blocks(differs, exp_avg.shape[0])[0].any(-1)


def _recovered_step(exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
    """The block's highest pattern and the largest step factor that all its patterns lie on; ``[rows, blocks, 1]``."""
    patterns = block_quant.patterns_of(block_quant.in_blocks(exp_avg_sq, exp_avg_sq.shape[0])[0])
    highest = patterns.amax(-1, keepdim=True)
    below = torch.where(patterns == 0, 0, highest - patterns)
    divisor = below
    while divisor.shape[-1] > 1:
        divisor = torch.gcd(*divisor.chunk(2, dim=-1))
    factor = divisor // _GRID
    least = block_quant.SMALLEST_STEP
    factor = torch.where(divisor == 0, least, torch.where(divisor % _GRID == 0, factor, 0))
    fits = (factor > 0) & (factor <= _LARGEST_FACTOR)
    fits &= below.amax(-1, keepdim=True) <= factor.clamp(min=1) * _GRID * _LARGEST_CODE
    return highest, torch.where(fits, factor, 1)


def _with_step(
    exp_avg: Tensor, exp_avg_sq: Tensor, highest: Tensor, factor: Tensor, code: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The encoding with these steps, and with the scale under which the largest ratio has this code."""
    rows, shape = exp_avg.shape[0], exp_avg.shape
    values, _ = block_quant.in_blocks(exp_avg, rows)
    patterns = block_quant.patterns_of(block_quant.in_blocks(exp_avg_sq, rows)[0])
    step = factor * _GRID
    square_codes = torch.where(
        (patterns == 0) & (highest > 0), block_quant.ZERO_CODE, ((highest - patterns) // step).clamp(0, _LARGEST_CODE)
    )
    ratio = values * block_quant.exp_avg_to_ratio(block_quant.raw_patterns(square_codes, highest, step))
    largest = ratio.abs().amax(-1, keepdim=True).double()
    scale = (largest * 127.0 / code).bfloat16().float()
    codes = torch.where(scale > 0, (ratio.double() * 127.0 / scale.double()).round(), 0.0).nan_to_num()
    words = torch.cat((highest, block_quant.patterns_of(scale) | factor), dim=-1)
    return (
        block_quant.from_blocks(codes.clamp(-127, 127).to(torch.int8), shape),
        block_quant.from_blocks(square_codes.to(torch.uint8), shape),
        block_quant.words_of(words),
    )
