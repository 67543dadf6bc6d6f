"""Dither by counter, and the storages that round with it: bfloat16, and bfloat16 with an 8-bit remainder.

A dither word is a function of (salt of the parameter, its step, index of the element) alone, so that it is the same for
every sharding and after a resume: ``index * 0x85EBCA77 + step * 0x9E3779B9 + salt`` modulo 2^32. Both multipliers step
through the circle almost evenly, over elements and over steps, which averages better than random numbers do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANONICAL_NAN = 0x7FC00000
ELEMENT_MULTIPLIER = 0x85EBCA77
STEP_MULTIPLIER = 0x9E3779B9
HALF = 0x8000  # in the place of a word's upper half: round to nearest, ties away from zero
_MASK = 0xFFFFFFFF
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class Dither:
    """One tensor's dither in one step.

    Attributes:
        base: ``step * 0x9E3779B9 + salt`` modulo 2^32, int64 of no dimension.
        first, columns, stride: the element ``i`` of the local tensor has the global index
            ``first + (i // columns) * stride + i % columns``.
    """

    base: Tensor
    first: int
    columns: int
    stride: int

    @classmethod
    def of(cls, row: Tensor, step: Tensor) -> Dither:
        """From a row ``(salt, first, columns, stride)`` and the step being made (int64 scalar on the device)."""
        salt, first, columns, stride = row.tolist()
        return cls((step * STEP_MULTIPLIER + salt) & _MASK, first, columns, stride)

    def words(self, shape: torch.Size) -> Tensor:
        """The dither words of a local tensor's elements, int64 in [0, 2^32), of its shape."""
        local = torch.arange(shape.numel(), dtype=torch.int64, device=self.base.device)
        columns = max(self.columns, 1)
        index = (self.first + local // columns * self.stride + local % columns) & _MASK
        return ((index * ELEMENT_MULTIPLIER + self.base) & _MASK).view(shape)


def upper_halves(dither: Dither | None, like: Tensor) -> Tensor:
    """What is added below the last bit kept of 16: int64 in [0, 2^16), of the shape of ``like``."""
    if dither is None:
        return torch.full(like.shape, HALF, dtype=torch.int64, device=like.device)
    return dither.words(like.shape) >> 16


def block_halves(dither: Dither | None, block: int, device: torch.device) -> Tensor:
    """The same by position in a block, not by global index, int64 ``[block]``: all blocks of a tensor share it."""
    if dither is None:
        return torch.full((block,), HALF, dtype=torch.int64, device=device)
    positions = torch.arange(block, dtype=torch.int64, device=device)
    return ((positions * ELEMENT_MULTIPLIER + dither.base) & _MASK) >> 16


def round_dithered(values: Tensor, dither: Dither | None) -> Tensor:
    """float32 -> bfloat16, up or down by dither: the mean over steps is the value. Finite values stay finite."""
    bits = values.contiguous().view(torch.int32).long() & _MASK
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + upper_halves(dither, values)) >> 16
    rounded = torch.where(magnitude < _INFINITY, rounded.clamp(max=0x7F7F), rounded)
    rounded = torch.where(magnitude > _INFINITY, CANONICAL_NAN >> 16, rounded | (bits >> 16 & 0x8000))
    return _int16(rounded).view(torch.bfloat16)


def join_fp24(high: Tensor, remainder: Tensor) -> Tensor:
    """bfloat16 and its int8 remainder -> float32: ``bits = (high << 16) + remainder * 256``."""
    bits = (high.contiguous().view(torch.int16).int() << 16) + remainder.contiguous().int() * 256
    return bits.view(torch.float32)


def split_fp24(values: Tensor, dither: Dither | None) -> tuple[Tensor, Tensor]:
    """float32 -> bfloat16 rounded with ties away from zero, and an 8-bit remainder: 24 bits, the last one dithered.

    Idempotent: what has 24 bits already is kept. Infinities and NaN, made canonical, have the remainder 0.
    """
    bits = values.contiguous().view(torch.int32).long() & _MASK
    magnitude = bits & 0x7FFFFFFF
    kept = ((magnitude + (upper_halves(dither, values) >> 8)) & ~0xFF).clamp(max=0x7F7FFF00)
    kept = torch.where(magnitude < _INFINITY, kept, _INFINITY)
    kept = torch.where(magnitude > _INFINITY, CANONICAL_NAN, kept | (bits & 0x80000000))
    high = ((kept + 0x8000) >> 16) & 0xFFFF
    remainder = (kept - (high << 16)) >> 8
    return _int16(high).view(torch.bfloat16), remainder.to(torch.int8)


def _int16(patterns: Tensor) -> Tensor:
    return torch.where(patterns >= 1 << 15, patterns - (1 << 16), patterns).to(torch.int16)
