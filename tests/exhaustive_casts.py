"""All 2^32 float32 patterns through the C++ kernels, as a script; four minutes on one core.

The casts are compared with torch's, and the split of a float32 into a bfloat16 and a remainder goes there and back.

The split is reached through ``ops.sharded_adam`` with lr, moments and gradients of 0: such an update changes no master
weight, but it decodes each (seen in a float32 shadow) and encodes it again (seen in the parameter and the remainder).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from reference import bits, differing, split
from torch import Tensor

from shardops import ops

PATTERNS = 1 << 32
CHUNK = 1 << 20  # so that it all stays in a cache
# Of the patterns that are no NaN, those whose bfloat16 half is not torch's `.bfloat16()`: ties to an even value.
TIES = 32_640


@dataclass
class Counts:
    """What was counted over the patterns done so far. ``wrong`` must end at 0, ``ties`` at TIES."""

    done: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    ties: int = 0  # halves that differ from `.bfloat16()`
    off_ties: int = 0  # of these, patterns that are no tie

    def add(self, name: str, wrong: Tensor) -> None:
        self.wrong[name] = self.wrong.get(name, 0) + int(wrong.sum())


class SplitBuffers:
    """The other tensors of an update that changes nothing."""

    def __init__(self, numel: int) -> None:
        self.grad = torch.zeros(numel, dtype=torch.bfloat16)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.shadow = torch.empty(numel)

    def update(self, high: Tensor, remainder: Tensor) -> Tensor:
        """Decodes and encodes in place; returns what was decoded."""
        ops.sharded_adam(
            [high],
            [self.grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            torch.zeros(1),
            lr=0.0,
            masters=[remainder],
            shadows=[self.shadow],
            backend="cpp",
        )
        return self.shadow


def check_casts(values: Tensor, counts: Counts) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        counts.add(f"fp32 -> {dtype}", differing(ops.cast_gather([values], dtype, backend="cpp"), values.to(dtype)))


def check_split(values: Tensor, buffers: SplitBuffers, counts: Counts) -> None:
    high, remainder = split(values)
    new_high, new_remainder = high.clone(), remainder.clone()
    decoded = buffers.update(new_high, new_remainder)
    nan = values.isnan()
    counts.add("decoded master", differing(decoded, values))
    # Integers: neither half of a number may be taken for a NaN.
    counts.add("bf16 after the round trip", ~nan & (bits(new_high) != bits(high)))
    counts.add("remainder after the round trip", ~nan & (bits(new_remainder) != bits(remainder)))
    counts.add("canonical NaN", nan & ((bits(new_high) != 0x7FC0) | (bits(new_remainder) != 0)))
    differs = ~nan & (bits(new_high) != bits(values.bfloat16()))
    counts.ties += int(differs.sum())
    counts.off_ties += int((differs & ((bits(values) & 0xFFFF) != 0x8000)).sum())


def run(start: int = 0, stop: int = PATTERNS, progress: Callable[[Counts], None] = lambda counts: None) -> Counts:
    """Checks the patterns of a range whose ends are multiples of CHUNK."""
    counts, buffers = Counts(), SplitBuffers(CHUNK)
    offsets = torch.arange(CHUNK, dtype=torch.int32)
    for first in range(start, stop, CHUNK):
        base = first - PATTERNS if first >= PATTERNS // 2 else first  # as a signed int32
        values = (offsets + base).view(torch.float32)
        check_casts(values, counts)
        check_split(values, buffers, counts)
        counts.done += CHUNK
        progress(counts)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    began = time.perf_counter()

    def progress(counts: Counts) -> None:
        if counts.done % (1 << 28) == 0:
            print(f"{counts.done / PATTERNS:6.1%}  {time.perf_counter() - began:6.1f} s  {counts.wrong}", flush=True)

    counts = run(progress=progress)
    seconds = time.perf_counter() - began
    print(f"{counts.done} patterns in {seconds:.1f} s with {torch.get_num_threads()} threads")
    for name, wrong in counts.wrong.items():
        print(f"  {name}: {wrong} wrong")
    print(f"  bf16 halves that differ from .bfloat16(): {counts.ties}, of which {counts.off_ties} are no ties")
    good = counts.done == PATTERNS and not any(counts.wrong.values())
    return 0 if good and counts.ties == TIES and counts.off_ties == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
