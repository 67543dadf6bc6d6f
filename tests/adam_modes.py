"""Lists of tensors in every storage that sharded_adam knows, and those storages once more in numpy.

The codecs here are written from their description, not from the package's code, which is compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference import AdamLists, adam_lists, generator
from torch import Tensor

BLOCK = 128
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]

MOMENTS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Master:
    """A storage of masters: the parameters' dtype, what ``masters`` holds, and the op's rounding."""

    param_dtype: torch.dtype
    masters: str | None = None
    rounding: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (str(self.param_dtype)[6:], self.masters, self.rounding)))


FP32, SPLIT32, SPLIT24 = Master(torch.float32), Master(torch.bfloat16, "split"), Master(torch.bfloat16, "split24")
STOCHASTIC = Master(torch.bfloat16, None, "stochastic")
MASTERS = (
    *(FP32, SPLIT32, SPLIT24, STOCHASTIC, Master(torch.bfloat16, "fp32"), Master(torch.float16, "fp32")),
    *(Master(torch.bfloat16, None, "nearest"), Master(torch.float16, None, "nearest")),
)

# ---- lists -----------------------------------------------------------------------------------------------------------


def rows_of(shape: Sequence[int]) -> int:
    """Rows as the optimizer makes them: the first dimension's; a vector is one row."""
    return shape[0] if len(shape) > 1 else 1


def mode_lists(
    shapes: Sequence[Sequence[int]], seed: int, moments: str, master: Master, *, values: Any = None, **kinds: Any
) -> AdamLists:
    """As ``reference.adam_lists``; awkward ``values`` also make codes, words and remainders of random bits."""
    masters = {"split24": "split"}.get(master.masters or "", master.masters)
    lists = adam_lists(shapes, seed, param_dtype=master.param_dtype, master=masters, values=values, **kinds)
    rng = generator(seed)

    def random(like: Tensor, dtype: torch.dtype) -> Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, like.shape, generator=rng).to(dtype)

    if master.masters == "split24":
        lists.masters = [random(t, torch.int8) for t in lists.masters]
    if moments == "bf16":
        lists.exp_avgs = [t.bfloat16() for t in lists.exp_avgs]
        lists.exp_avg_sqs = [t.bfloat16() for t in lists.exp_avg_sqs]
    if moments == "int8":
        stored = [
            encode_blocks(avg, sq, rows_of(shape), salt=None)
            for avg, sq, shape in zip(lists.exp_avgs, lists.exp_avg_sqs, shapes, strict=True)
        ]
        lists.exp_avgs, lists.exp_avg_sqs, lists.block_words = (list(x) for x in zip(*stored, strict=True))
        if values is not None:
            lists.exp_avgs = [random(t, torch.int8) for t in lists.exp_avgs]
            lists.exp_avg_sqs = [random(t, torch.uint8) for t in lists.exp_avg_sqs]
            lists.block_words = [
                torch.where(torch.rand(t.shape, generator=rng) < 0.5, random(t, torch.int32), t)
                for t in lists.block_words
            ]
    return lists


def dither_table(lists: AdamLists, seed: int) -> Tensor:
    """Random salts; the first tensor is whole, the second one lies in rows of 37 elements, 1,000 apart, and so on."""
    salts = torch.randint(1 << 32, (len(lists.params),), generator=generator(seed))
    table = []
    for index, (salt, param) in enumerate(zip(salts.tolist(), lists.params, strict=True)):
        numel = param.numel()
        table.append([salt, 0, numel, numel] if index % 2 == 0 else [salt, (1 << 32) - 5, 37, 1000 + index])
    return torch.tensor(table, dtype=torch.int64)


# ---- numpy -----------------------------------------------------------------------------------------------------------


def patterns(values: Tensor) -> U32:
    return values.detach().contiguous().numpy().view(np.uint32)


def dither_words(salt: int | None, step: int, index: NDArray[np.int64]) -> U32:
    """``U32`` of the global indices; half of everything without a salt."""
    if salt is None:
        return np.full(index.shape, 0x80000000, dtype=np.uint32)
    return (
        np.array([(k * 0x85EBCA77 + step * 0x9E3779B9 + salt) % 2**32 for k in index.reshape(-1).tolist()])
        .astype(np.uint32)
        .reshape(index.shape)
    )


def global_index(row: Sequence[int], numel: int) -> NDArray[np.int64]:
    _, first, columns, stride = row
    return np.array([first + i // columns * stride + i % columns for i in range(numel)], dtype=np.int64)


def round_bf16(values: Tensor, words: U32) -> Tensor:
    """The upper halves of the words are added below bf16's last bit, and the sum is cut off."""
    result = []
    for pattern, noise in zip(patterns(values).reshape(-1).tolist(), (words >> 16).reshape(-1).tolist(), strict=True):
        sign, magnitude = pattern & 0x80000000, pattern & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            result.append(0x7FC0)
        elif magnitude == 0x7F800000:
            result.append(pattern >> 16)
        else:
            result.append(sign >> 16 | min((magnitude + noise) >> 16, 0x7F7F))
    return torch.from_numpy(np.array(result, dtype=np.uint16).view(np.int16)).view(torch.bfloat16).view(values.shape)


def encode_24(values: Tensor, words: U32) -> tuple[Tensor, Tensor]:
    """bf16 and an int8 remainder; the words' upper 8 bits are added below the last bit kept."""
    high, low = [], []
    for pattern, noise in zip(patterns(values).reshape(-1).tolist(), (words >> 24).reshape(-1).tolist(), strict=True):
        sign, magnitude = pattern & 0x80000000, pattern & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            kept = 0x7FC00000
        elif magnitude == 0x7F800000:
            kept = pattern
        else:
            kept = sign | min((magnitude + noise) & ~255, 0x7F7FFF00)
        upper = (kept + 0x8000) >> 16
        high.append(upper & 0xFFFF)
        low.append((kept - (upper << 16)) // 256)
    bf16 = torch.from_numpy(np.array(high, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    return bf16.view(values.shape), torch.tensor(low, dtype=torch.int8).view(values.shape)


def decode_24(high: Tensor, low: Tensor) -> Tensor:
    pattern = (high.contiguous().view(torch.int16).numpy().astype(np.int64) << 16) + low.numpy().astype(np.int64) * 256
    return torch.from_numpy((pattern % 2**32).astype(np.uint32).view(np.float32))


def _float(pattern: U32) -> F32:
    return pattern.view(np.float32)


def _blocks(rows: int, numel: int) -> list[tuple[int, int, slice]]:
    """(row, block, elements) of every block."""
    columns = numel // rows if rows else 0
    return [
        (row, start // BLOCK, slice(row * columns + start, row * columns + min(start + BLOCK, columns)))
        for row in range(rows)
        for start in range(0, columns, BLOCK)
    ]


def encode_blocks(
    exp_avg: Tensor, exp_avg_sq: Tensor, rows: int, salt: int | None, step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of both moments and the words of their blocks."""
    columns = exp_avg.numel() // rows if rows else 0
    first = np.zeros(exp_avg.numel(), dtype=np.int8)
    second = np.zeros(exp_avg.numel(), dtype=np.uint8)
    words = np.zeros((rows, math.ceil(columns / BLOCK), 2), dtype=np.uint32)
    half_words = dither_words(salt, step, np.arange(BLOCK)) >> 16
    with np.errstate(all="ignore"):
        for row, block, place in _blocks(rows, exp_avg.numel()):
            m = exp_avg.detach().contiguous().numpy().reshape(-1)[place]
            b = np.minimum(patterns(exp_avg_sq).reshape(-1)[place], 0x7FC00000).tolist()
            z = 0x02000000
            highest, lowest = max(b), min((x - z) % 2**32 for x in b)
            highest = 0 if highest < z else highest
            lowest = highest if lowest >= 0xFE000000 else lowest + z
            factor = max(9, ((highest - lowest) % 2**32 * 2065 >> 32) + 1)
            stride = factor << 13
            reciprocal = int(np.float32(2.0**48) / np.float32(stride))
            below = [(highest - x) % 2**32 * reciprocal >> 32 for x in b]
            codes = np.array([min(q + int(u), 0xFFFFFF) >> 16 for q, u in zip(below, half_words, strict=False)])
            raw = ((highest - codes * stride) % 2**32).astype(np.uint32)
            ratio = m * _float(((~raw & np.uint32(0x7F000000)) >> np.uint32(1)) + np.uint32(0x1F800000))
            largest = int(np.abs(ratio).view(np.uint32).max())
            scale = 0x7FC00000 if largest >= 0x7E000000 else 0
            if 0x0D800000 <= largest < 0x7E000000:
                scale = (largest + 0xFFFF) & 0xFFFF0000
            s = _float(np.array([scale], dtype=np.uint32))[0]
            n = np.float32(127) / s if s > 0 else np.float32(0)
            first[place] = np.nan_to_num(np.rint(ratio * n), nan=0.0).astype(np.int8)
            second[place] = codes.astype(np.uint8)
            words[row, block] = (highest, scale | factor)
    shape = exp_avg.shape
    return (
        torch.from_numpy(first).view(shape),
        torch.from_numpy(second).view(shape),
        torch.from_numpy(words.view(np.int32)),
    )


def decode_blocks(first: Tensor, second: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """float32 moments of codes and words."""
    exp_avg = np.zeros(first.numel(), dtype=np.float32)
    exp_avg_sq = np.zeros(first.numel(), dtype=np.float32)
    q, codes = first.contiguous().numpy().reshape(-1), second.contiguous().numpy().reshape(-1)
    with np.errstate(all="ignore"):
        for row, block, place in _blocks(words.shape[0], first.numel()):
            highest, packed = (int(x) for x in words[row, block].numpy().view(np.uint32))
            raw = ((highest - codes[place].astype(np.int64) * ((packed & 0xFFFF) << 13)) % 2**32).astype(np.uint32)
            exp_avg_sq[place] = np.where(codes[place] == 255, np.float32(0), _float(raw))
            scale = _float(np.array([packed & 0xFFFF0000], dtype=np.uint32)) * np.float32(1.0 / 127.0)
            power = _float(((raw & np.uint32(0x7F000000)) >> np.uint32(1)) + np.uint32(0x20000000))
            exp_avg[place] = (q[place].astype(np.float32) * power) * scale
    return torch.from_numpy(exp_avg).view(first.shape), torch.from_numpy(exp_avg_sq).view(first.shape)
