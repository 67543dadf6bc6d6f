"""grad_norm in plain torch: the fixed tree of sums that every backend follows.

A tensor is cut into blocks of 4,096 elements in memory order, and a block into rows of 256; the last row of the last
block is filled with zeros. Within a block:

1. ``M`` = the largest magnitude. If it is inf or NaN, or 0, the block's value is ``M``.
2. Each value is multiplied by a power of two that brings ``M`` into [1, 4) (exact); its power is taken in float32.
3. Lane ``l`` of 256 sums elements ``l, l + 256, ..`` in this order, as a float32 sum and a float32 compensation
   (Kahan 1965, "Further remarks on reducing truncation errors").
4. Lane ``l`` takes lane ``l + width`` for width = 128, 64, .. 1, keeping the rounding errors (two-sum, Knuth, The Art
   of Computer Programming 2, 4.2.2).
5. The block's value is ``float64(sum) + float64(errors)``, scaled back (exact).

Blocks of all tensors, in order, are then summed in float64: lane ``l`` of 256 takes blocks ``l, l + 256, ..``, and
lanes are combined as in step 4. For the inf-norm a block's value is ``M`` and the combination is the maximum, NaN
first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096
LANES = 256
# Blocks worked on together, so that temporaries stay small beside the tensor.
_SLICE_BLOCKS = 1024


def kahan_add(total: Tensor, compensation: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """The running sum with ``term`` added, and what this and earlier additions added too much."""
    corrected = term - compensation
    raised = total + corrected
    return raised, (raised - total) - corrected


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its exact rounding error."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


def power_of_two(exponent: Tensor) -> Tensor:
    """float64 ``2 ** exponent`` for an int64 exponent within float64's normal range, made from bits: exact."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _block_values(values: Tensor, norm_type: float) -> Tensor:  # float32 [blocks, rows * 256] -> float64 [blocks]
    magnitudes = values.contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = magnitudes.amax(dim=1)
    extreme = largest.view(torch.float32).double()
    if norm_type == math.inf:
        return extreme
    # 253: the power of two below would otherwise be a denormal.
    exponent = (largest >> 23).clamp(max=253)
    scale = ((254 - exponent) << 23).view(torch.float32)
    values = values * scale[:, None]
    terms = (values * values if norm_type == 2.0 else values.abs()).view(len(values), -1, LANES)

    sums = torch.zeros_like(terms[:, 0])
    compensations = torch.zeros_like(sums)
    for row in range(terms.shape[1]):
        sums, compensations = kahan_add(sums, compensations, terms[:, row])
    errors = -compensations
    while sums.shape[1] > 1:
        width = sums.shape[1] // 2
        sums, error = two_sum(sums[:, :width], sums[:, width:])
        errors = (errors[:, :width] + errors[:, width:]) + error
    total = sums[:, 0].double() + errors[:, 0].double()
    total = total * power_of_two((exponent.long() - 127) * int(norm_type))
    return torch.where((largest >= 0x7F800000) | (largest == 0), extreme, total)


def _tensor_blocks(grad: Tensor, norm_type: float) -> list[Tensor]:
    flat = grad.as_strided((grad.numel(),), (1,))  # memory order
    whole = grad.numel() // BLOCK * BLOCK
    blocks = []
    for start in range(0, whole, BLOCK * _SLICE_BLOCKS):
        part = flat[start : min(start + BLOCK * _SLICE_BLOCKS, whole)].float()
        blocks.append(_block_values(part.view(-1, BLOCK), norm_type))
    if whole < grad.numel():
        last = flat[whole:].float()
        blocks.append(_block_values(torch.nn.functional.pad(last, (0, -last.numel() % LANES))[None], norm_type))
    return blocks


def _combine_blocks(blocks: Tensor, norm_type: float) -> Tensor:  # float64 [blocks] -> float64 []
    combine = torch.maximum if norm_type == math.inf else torch.add  # maximum lets NaN through
    rows = torch.nn.functional.pad(blocks, (0, -blocks.numel() % LANES)).view(-1, LANES)
    lanes = blocks.new_zeros(LANES)
    for row in rows:
        lanes = combine(lanes, row)
    while lanes.numel() > 1:
        width = lanes.numel() // 2
        lanes = combine(lanes[:width], lanes[width:])
    return lanes[0].clone()


def grad_norm(grads: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Sum of powers (float64 scalar) and non-finite flag (float32 scalar), as ``ops.grad_norm`` says."""
    none = torch.zeros(0, dtype=torch.float64, device=grads[0].device)
    blocks = torch.cat([none, *(block for grad in grads for block in _tensor_blocks(grad, norm_type))])
    nonfinite = (~torch.isfinite(blocks)).any().float()
    return _combine_blocks(blocks, norm_type), nonfinite
