"""Every float32 pattern through the kernels: casts, and the split of a float32 into a bfloat16 and a remainder.

What they must equal is computed here from integers. The split is reached through an update with a learning rate of 0,
which changes no master, but decodes each (seen in a float32 shadow) and encodes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reference import bits, differing, split
from torch import Tensor

from gpu.device import Device
from gpu.units import Context, Skip
from shardops import ops

PATTERNS = 1 << 32
# Of the patterns that are no NaN, those whose bfloat16 half is not torch's `.bfloat16()`: ties to an even value.
TIES = 32_640
_CUDA_CHUNK, _CPU_CHUNK = 1 << 28, 1 << 17  # the smaller one has ties of both kinds


def ranges(context: Context) -> list[tuple[int, int]]:
    """(first pattern, count) of each chunk: all of them, or in a dry run those around every sign and the extremes."""
    if context.is_dry:
        step, chosen = _CPU_CHUNK, (0, 0x00800000, 0x33000000, 0x3F800000, 0x477F0000, 0x7F7F0000, 0x7F800000)
        return [(sign + first, step) for sign in (0, 1 << 31) for first in chosen] + [(PATTERNS - step, step)]
    return [(first, _CUDA_CHUNK) for first in range(0, PATTERNS, _CUDA_CHUNK)]


def values_of(first: int, count: int, device: Device) -> Tensor:
    """float32 values of successive patterns."""
    base = first - PATTERNS if first >= PATTERNS // 2 else first  # as a signed int32
    offsets = torch.arange(count, dtype=torch.int32, device=device.torch_device)
    return (offsets + base).view(torch.float32)


def bf16_by_integers(values: Tensor) -> Tensor:
    """Round to nearest even from the pattern alone; NaN stays NaN."""
    pattern = values.view(torch.int32)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    return torch.where(values.isnan(), 0x7FC0, rounded).to(torch.int16).view(torch.bfloat16)


def fp16_by_doubles(values: Tensor) -> Tensor:
    """Round to nearest even at fp16's own spacing: an exact addition and subtraction in float64."""
    magnitude = values.double().abs()
    exponent = ((magnitude.view(torch.int64) >> 52) - 1023).clamp(min=-14, max=20)
    spacing = ((exponent - 10 + 1023) << 52).view(torch.float64)
    shift = spacing * 2.0**52  # beside it float64's own spacing is that
    rounded = (magnitude + shift) - shift
    rounded = torch.where(rounded >= 65520.0, torch.inf, rounded)
    return torch.where(values.signbit(), -rounded, rounded).half()  # exact by now


CASTS: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: bf16_by_integers,
    torch.float16: fp16_by_doubles,
}


def _none(wrong: Tensor, values: Tensor, what: str) -> None:
    count = int(wrong.sum())
    if count:
        first = int(bits(values)[wrong][0]) & 0xFFFFFFFF
        raise AssertionError(f"{what}: {count} patterns are wrong, the first is {first:#010x}")


def check_casts(context: Context, backend: str, dtype: torch.dtype) -> int:
    """cast_gather of all patterns against integers and against torch's own cast on the device."""
    done = 0
    for first, count in ranges(context):
        _in_time(context, done)
        values = values_of(first, count, context.device)
        found = ops.cast_gather([values], dtype, backend=backend)
        step = 1 << 25  # temporaries of float64 and int64 are large
        for start in range(0, count, step):
            part = values[start : start + step]
            _none(differing(found[start : start + step], CASTS[dtype](part)), part, "beside integers")
        _none(differing(found, values.to(dtype)), values, "beside torch")
        done += count
    return done


def check_split32(context: Context, backend: str) -> int:
    """All patterns there and back; halves are torch's ``.bfloat16()`` except at ties, whose number is known."""
    done = ties = 0
    for first, count in ranges(context):
        _in_time(context, done)
        values = values_of(first, count, context.device)
        high, remainder = split(values)
        new_high, new_remainder = high.clone(), remainder.clone()
        _none(differing(_decoded(new_high, new_remainder, backend), values), values, "decoded master")
        nan = values.isnan()
        _none(~nan & (bits(new_high) != bits(high)), values, "bf16 after the round trip")
        _none(~nan & (bits(new_remainder) != bits(remainder)), values, "remainder after the round trip")
        _none(nan & ((bits(new_high) != 0x7FC0) | (bits(new_remainder) != 0)), values, "canonical NaN")
        differs = ~nan & (bits(new_high) != bits(bf16_by_integers(values)))
        _none(differs & ((bits(values) & 0xFFFF) != 0x8000), values, "a half that is not torch's, and no tie")
        ties += int(differs.sum())
        done += count
    if done == PATTERNS and ties != TIES:
        raise AssertionError(f"{ties} halves differ from torch's `.bfloat16()`, the ties to an even value are {TIES}")
    return done


def check_split24(context: Context, backend: str) -> int:
    """All float32 values of 24 bits there and back, without dither."""
    numel = 1 << (16 if context.is_dry else 24)
    device = context.device.torch_device
    index, apart = torch.arange(numel, device=device), (1 << 24) // numel
    upper = index * apart + index % apart  # in a dry run too, all remainders
    values = (upper << 8).to(torch.int32).view(torch.float32)
    pattern = bits(values)
    high = ((pattern + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    low = ((pattern - (bits(high).int() << 16)) >> 8).to(torch.int8)
    new_high, new_low = high.clone(), low.clone()
    _none(differing(_decoded(new_high, new_low, backend), values), values, "decoded master")
    nan = values.isnan()
    _none(~nan & (bits(new_high) != bits(high)), values, "bf16 after the round trip")
    _none(~nan & (new_low != low), values, "remainder after the round trip")
    return numel


def _decoded(high: Tensor, remainder: Tensor, backend: str) -> Tensor:
    """Decodes and encodes in place, by an update that changes nothing; returns what was decoded."""
    zeros = [torch.zeros(high.shape, device=high.device) for _ in range(2)]
    shadow = torch.empty(high.shape, device=high.device)
    grads = torch.zeros_like(high)
    steps = torch.zeros(1, device=high.device)
    lists: dict[str, Any] = {"masters": [remainder], "shadows": [shadow]}
    ops.sharded_adam([high], [grads], [zeros[0]], [zeros[1]], steps, lr=0.0, backend=backend, **lists)
    return shadow


def _in_time(context: Context, done: int) -> None:
    if context.left() < 0:
        raise Skip(f"no time left after {done} of {PATTERNS} patterns, which were right")
