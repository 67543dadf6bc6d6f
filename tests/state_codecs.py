"""Adam's moments kept in the product's formats and in two published 8-bit ones, each as a closed loop, and its errors.

A loop decodes its moments, takes a step with a given gradient and encodes them again; beside the loop in float32 that
saw the same gradients, its updates tell what the format costs. The published formats are written from their formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from shardops.backends.reference.block_quant import blocks_of, decode_blocks, encode_blocks
from shardops.backends.reference.dither import Dither, round_dithered
from shardops.backends.reference.sharded_adam import adam_scalars, adam_update
from shardops.ops.sharded_adam import sharded_adam


@dataclass(frozen=True)
class Hyper:
    """What Adam is given; the learning rate is 1, so that updates are in its unit, and there is no decay."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


class ProductLoop:
    """The op itself, in one of its formats of moments.

    Args:
        kind: "float32", "bfloat16" or "int8".
        dithered: else to nearest; of no meaning for float32.
        backend: of the op.
    """

    def __init__(self, kind: str, hyper: Hyper, *, dithered: bool = True, backend: str | None = None) -> None:
        self.kind, self.hyper, self.backend = kind, hyper, backend
        self.dithered = dithered and kind != "float32"

    def start(self, exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], step: int) -> None:
        """Takes over float32 moments as they are after some steps."""
        self.params = [torch.zeros_like(exp_avg) for exp_avg in exp_avgs]
        self.steps = torch.full((len(self.params),), float(step))
        # Salt, first index, columns, stride: salts as unlike as those of an optimizer's parameters are.
        rows = [[(index * 0x9E3779B1 + 12345) % 2**32, 0, param.numel(), 0] for index, param in enumerate(self.params)]
        self.dither = torch.tensor(rows) if self.dithered else None
        self.words: list[Tensor] = []
        self.exp_avgs, self.exp_avg_sqs = [], []
        for index, (exp_avg, exp_avg_sq) in enumerate(zip(exp_avgs, exp_avg_sqs, strict=True)):
            dither = None if self.dither is None else Dither.of(self.dither[index], torch.tensor(step))
            if self.kind == "int8":
                exp_avg, exp_avg_sq, words = encode_blocks(exp_avg, exp_avg_sq, exp_avg.shape[0], dither)
                assert words.shape == (exp_avg.shape[0], blocks_of(exp_avg[0].numel()), 2)
                self.words.append(words)
            elif self.kind == "bfloat16":
                exp_avg, exp_avg_sq = round_dithered(exp_avg, dither), round_dithered(exp_avg_sq, dither)
            else:
                exp_avg, exp_avg_sq = exp_avg.clone(), exp_avg_sq.clone()
            self.exp_avgs.append(exp_avg)
            self.exp_avg_sqs.append(exp_avg_sq)

    def step(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The updates of a step, in units of the learning rate."""
        for param in self.params:
            param.zero_()
        sharded_adam(
            self.params,
            grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            block_words=self.words,
            dither=self.dither,
            lr=1.0,
            beta1=self.hyper.beta1,
            beta2=self.hyper.beta2,
            eps=self.hyper.eps,
            backend=self.backend,
        )
        return [-param for param in self.params]

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """exp_avg and exp_avg_sq of each tensor in float32, as the next step will read them."""
        if self.kind == "int8":
            return [decode_blocks(*stored) for stored in zip(self.exp_avgs, self.exp_avg_sqs, self.words, strict=True)]
        return [(a.float(), s.float()) for a, s in zip(self.exp_avgs, self.exp_avg_sqs, strict=True)]


class PublishedLoop:
    """The product's arithmetic around a format of somebody else: ``store`` is what a tensor becomes by being stored."""

    def __init__(
        self, store_exp_avg: Callable[[Tensor], Tensor], store_exp_avg_sq: Callable[[Tensor], Tensor], hyper: Hyper
    ) -> None:
        self.store = store_exp_avg, store_exp_avg_sq
        self.hyper = hyper

    def start(self, exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], step: int) -> None:
        self.stored = [self._stored(*pair) for pair in zip(exp_avgs, exp_avg_sqs, strict=True)]
        self.done = step

    def _stored(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
        return self.store[0](exp_avg), self.store[1](exp_avg_sq)

    def step(self, grads: Sequence[Tensor]) -> list[Tensor]:
        self.done += 1
        one = torch.ones((), dtype=torch.float64)
        hyper = self.hyper
        scalars = adam_scalars(torch.tensor(self.done), one, hyper.beta1, hyper.beta2, hyper.eps, 0.0, True)
        updates = []
        for index, grad in enumerate(grads):
            master, exp_avg, exp_avg_sq, _ = adam_update(
                scalars, grad, torch.zeros_like(grad), *self.stored[index], None, 0.0
            )
            self.stored[index] = self._stored(exp_avg, exp_avg_sq)
            updates.append(-master)
        return updates

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        return self.stored


def _grouped(values: Tensor, size: int) -> Tensor:
    """``[groups, size]`` of the flat tensor, the last group filled up with zeros."""
    flat = values.flatten()
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _ungrouped(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten()[: like.numel()].view_as(like)


FLASH_GROUP = 32
FLASH_SMALLEST = 1e-12


def flash_exp_avg(exp_avg: Tensor) -> Tensor:
    """FlashOptim (Databricks 2026), momentum: int8 of softsign ``2 x / (1 + |x|)`` of x over its group's largest.

    Groups of 32 elements of the flat tensor; codes are made with the float32 scale, read with its float16.
    """
    groups = _grouped(exp_avg, FLASH_GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=FLASH_SMALLEST)
    x = groups / scale
    codes = torch.floor(127.0 * (2.0 * x / (1.0 + x.abs())) + 0.5)
    y = codes / 127.0
    return _ungrouped(y / (2.0 - y.abs()) * scale.half().float(), exp_avg)


def flash_exp_avg_sq(exp_avg_sq: Tensor) -> Tensor:
    """FlashOptim, variance: uint8 of the square root over its group's largest, linear."""
    groups = _grouped(exp_avg_sq.sqrt(), FLASH_GROUP)
    scale = groups.amax(1, keepdim=True).clamp(min=FLASH_SMALLEST)
    codes = torch.floor(255.0 * (groups / scale) + 0.5)
    return _ungrouped((codes / 255.0 * scale.half().float()).square(), exp_avg_sq)


BNB_BLOCK = 256


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of dynamic tree quantization (Dettmers et al. 2022), sorted.

    The number of leading zeros is a decimal exponent, and the bits that it leaves are a linear fraction from 0.1 to 1:
    the middles of ``2 ** bits`` equal intervals. Without a sign, the sign's bit goes to the fraction. And 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        intervals = 2 ** (exponent if signed else exponent + 1)
        edges = torch.linspace(0.1, 1.0, intervals + 1)
        middles = (10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-middle for middle in middles if signed]
    assert len(values) == 256
    return torch.tensor(sorted(values))


@functools.cache
def _nearest(signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The map; and by the upper half of a number's pattern, the lowest code of such numbers and the next one's limit.

    No two limits share an upper half. A search, ``torch.bucketize(x, limits)``, takes almost three times as long.
    """
    quantiles = dynamic_map(signed)
    limits = (quantiles[:-1] + quantiles[1:]) / 2
    halves = torch.arange(1 << 16) << 16
    ends = torch.stack((halves, halves + 0xFFFF)).int().view(torch.float32)
    first, last = torch.bucketize(ends, limits).sort(0).values
    assert ((last - first <= 1) | ~(ends[0].abs() <= 1)).all()
    return quantiles, first, torch.cat((limits, torch.tensor([math.inf])))[first.clamp(max=255)]


def _to_map(values: Tensor, signed: bool) -> Tensor:
    quantiles, first, limits = _nearest(signed)
    blocks = _grouped(values, BNB_BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    x = torch.where(scale > 0, blocks / scale, 0.0)
    half = (x.view(torch.int32) >> 16) & 0xFFFF
    codes = first[half] + (x > limits[half])
    return _ungrouped(quantiles[codes] * scale, values)


def bnb_exp_avg(exp_avg: Tensor) -> Tensor:
    """bitsandbytes: the nearest value of the signed dynamic map, times the largest of 256 elements in float32."""
    return _to_map(exp_avg, signed=True)


def bnb_exp_avg_sq(exp_avg_sq: Tensor) -> Tensor:
    """The same with the unsigned map."""
    return _to_map(exp_avg_sq, signed=False)


Loop = ProductLoop | PublishedLoop

FLOAT32 = "fp32"
OURS = "int8 (ours)"
OURS_NEAREST = "int8 (ours) to nearest"
FLASH = "FlashOptim-style"
BNB = "bitsandbytes-style"
BF16 = "bf16 dithered"
BF16_NEAREST = "bf16 to nearest"


def make_loops(hyper: Hyper, names: Sequence[str], backend: str | None = None) -> dict[str, Loop]:
    """Loops by name."""
    makers: dict[str, Callable[[], Loop]] = {
        FLOAT32: lambda: ProductLoop("float32", hyper, backend=backend),
        OURS: lambda: ProductLoop("int8", hyper, backend=backend),
        OURS_NEAREST: lambda: ProductLoop("int8", hyper, dithered=False, backend=backend),
        FLASH: lambda: PublishedLoop(flash_exp_avg, flash_exp_avg_sq, hyper),
        BNB: lambda: PublishedLoop(bnb_exp_avg, bnb_exp_avg_sq, hyper),
        BF16: lambda: ProductLoop("bfloat16", hyper, backend=backend),
        BF16_NEAREST: lambda: ProductLoop("bfloat16", hyper, dithered=False, backend=backend),
    }
    return {name: makers[name]() for name in names}


@dataclass
class Errors:
    """What a loop's updates and moments differ in from the float32 loop's, over the steps that are counted."""

    error: float = 0.0  # sum of squares
    power: float = 0.0  # of the float32 updates
    largest_error: float = 0.0  # of one update, in units of the learning rate
    largest_update: float = 0.0
    largest_reference: float = 0.0
    zeroed: int = 0  # elements and steps in which a non-zero exp_avg has a zero exp_avg_sq
    drift: float = math.nan  # mean of log sqrt(exp_avg_sq) minus the float32 loop's, at the end
    spread: float = math.nan  # and its root mean square
    nmse_by_tensor: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums: list[tuple[float, float]] = []

    @property
    def nmse(self) -> float:
        return self.error / self.power

    def add(self, updates: Sequence[Tensor], references: Sequence[Tensor]) -> None:
        """Counts one step."""
        self._sums = self._sums or [(0.0, 0.0)] * len(updates)
        for index, (update, reference) in enumerate(zip(updates, references, strict=True)):
            difference = (update - reference).double()
            error, power = difference.square().sum().item(), reference.double().square().sum().item()
            self._sums[index] = self._sums[index][0] + error, self._sums[index][1] + power
            self.error += error
            self.power += power
            self.largest_error = max(self.largest_error, difference.abs().amax().item())
            self.largest_update = max(self.largest_update, update.abs().amax().item())
            self.largest_reference = max(self.largest_reference, reference.abs().amax().item())
        self.nmse_by_tensor = [error / power for error, power in self._sums]

    def add_moments(self, loop: Loop) -> None:
        """Counts the elements that a zero exp_avg_sq makes explode."""
        self.zeroed += sum(int(((exp_avg != 0) & (exp_avg_sq == 0)).sum()) for exp_avg, exp_avg_sq in loop.moments())

    def end(self, loop: Loop, reference: Loop) -> None:
        """Compares the last second moments, where both are positive."""
        pairs = zip(loop.moments(), reference.moments(), strict=True)
        logs = [(stored / exact)[(stored > 0) & (exact > 0)].double().log() / 2 for (_, stored), (_, exact) in pairs]
        log = torch.cat([part.flatten() for part in logs])
        self.drift, self.spread = log.mean().item(), log.square().mean().sqrt().item()
