"""Calls of flatten_shard, unflatten_shard, cast_gather and grad_norm, run on a device and compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from reference import DTYPES, assert_bits_equal, awkward, ordinary, strided, unaligned
from torch import Tensor

from gpu.adam_cases import placed
from shardops import ops

LAYOUTS = ("flat", "per_param")
# Uneven rows, fewer rows than ranks, scalars, empty tensors, sizes on both sides of a vector's width, several blocks.
SHAPES = [(3, 5), (), (0, 8), (7,), (1, 1, 13), (17, 2), (8, 16), (1,), (2, 0, 3), (33,), (700, 3), (40_001,)]
SCALES = (None, 1.0 / 3.0, 3e38)
# A call: tensors on a device and a backend -> what it wrote.
Call = Callable[[list[Tensor], str], list[Tensor]]
Case = tuple[str, list[Tensor], Call, bool]  # its name, tensors on the CPU, the call, whether it only moves bits


def tensors_of(dtype: torch.dtype, seed: int, shapes: Any = SHAPES) -> list[Tensor]:
    """Awkward values of every shape; every third tensor lies off its alignment."""
    made = [awkward(math.prod(shape), seed + i, dtype).view(shape) for i, shape in enumerate(shapes)]
    return [unaligned(t, 1 + i % 5) if i % 3 == 1 else t for i, t in enumerate(made)]


def _flatten(tensors: list[Tensor], backend: str, world_size: int, **options: Any) -> list[Tensor]:
    return [ops.flatten_shard(tensors, world_size, backend=backend, **options)]


def _unflatten(tensors: list[Tensor], backend: str, targets: torch.dtype, **options: Any) -> list[Tensor]:
    buffer, shaped = tensors[0], tensors[1:]
    outs = [unaligned(torch.full(t.shape, 99.0, dtype=targets), 1 + i % 4) for i, t in enumerate(shaped)]
    outs = [placed(out, buffer.device) for out in outs]
    return list(ops.unflatten_shard(buffer, outs, backend=backend, **options))


def _gather(tensors: list[Tensor], backend: str, dtype: torch.dtype) -> list[Tensor]:
    return [ops.cast_gather(tensors, dtype, backend=backend)]


def _norm(tensors: list[Tensor], backend: str, norm_type: float) -> list[Tensor]:
    return list(ops.grad_norm(tensors, norm_type, backend=backend))


def flatten_cases(layout: str, source: torch.dtype) -> Iterator[Case]:
    """All ranks and one, every target, with and without a scale, there and back."""
    short = str(source)[6:]
    tensors = tensors_of(source, 11)
    for target in DTYPES:
        for scale in SCALES:
            options: dict[str, Any] = {"dtype": target, "scale": scale, "layout": layout}
            name = f"{layout}, {short} to {str(target)[6:]}, scale {scale}"
            bits_only = source == target and scale is None
            yield f"flatten {name}", tensors, partial(_flatten, world_size=4, **options), bits_only
            one = {**options, "rank": 2, "align": 8}
            yield f"flatten {name}, rank 2 of 3", tensors, partial(_flatten, world_size=3, **one), bits_only
            buffer = ops.flatten_shard(tensors, 5, layout=layout, align=8, backend="reference")
            call = partial(_unflatten, targets=target, scale=scale, layout=layout)
            yield f"unflatten {name}", [buffer, *tensors], call, bits_only
    many = tensors_of(source, 12, [(1 + i % 9, 5) for i in range(777)])
    yield f"flatten {layout}, {short}, 777 tensors", many, partial(_flatten, world_size=8, layout=layout), True


def gather_cases() -> Iterator[Case]:
    """Every pair of dtypes; shards of mixed dtypes; strided ones."""
    for source in DTYPES:
        for target in DTYPES:
            name = f"{str(source)[6:]} to {str(target)[6:]}"
            yield name, tensors_of(source, 13), partial(_gather, dtype=target), source == target
    mixed = [t for dtype in DTYPES for t in tensors_of(dtype, 14)]
    yield "mixed dtypes", mixed, partial(_gather, dtype=torch.bfloat16), False
    yield "every second element", [strided(awkward(999, 15))], partial(_gather, dtype=torch.float16), False
    many = tensors_of(torch.float32, 16, [(i % 40,) for i in range(777)])
    yield "777 shards", many, partial(_gather, dtype=torch.bfloat16), False
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for source in DTYPES[1:]:
        for target in DTYPES:
            name = f"every {str(source)[6:]} to {str(target)[6:]}"
            yield name, [every.view(source)], partial(_gather, dtype=target), source == target


def norm_cases(norm_type: float, largest: int = 3_000_001) -> Iterator[Case]:
    """Usual, huge, tiny and not finite values in every dtype; many tensors, and a large one."""
    call = partial(_norm, norm_type=norm_type)
    huge = {torch.float32: 3e38, torch.bfloat16: 3e38, torch.float16: 6e4}
    for dtype in DTYPES:
        short = str(dtype)[6:]
        numels = (1, 4096, 4097, 5, 0, 70, 30_000, 257)
        usual = [ordinary(n, seed=i, scale=10.0 ** (i % 5 - 2), dtype=dtype) for i, n in enumerate(numels)]
        yield f"{short}, usual", [unaligned(t, 1 + i) if i % 2 else t for i, t in enumerate(usual)], call, False
        for finite in (True, False):
            values = [awkward(n, 40 + n, dtype, finite=finite) for n in numels]
            yield f"{short}, awkward, {'' if finite else 'not '}finite", values, call, False
        yield f"{short}, huge", [torch.full((7000,), huge[dtype], dtype=dtype), *usual], call, False
        tiny = torch.tensor(1, dtype=torch.int32).view(torch.float32) if dtype == torch.float32 else 6e-8
        yield f"{short}, denormal", [torch.full((7000,), float(tiny), dtype=torch.float32).to(dtype)], call, False
        for name, value in (("inf", math.inf), ("NaN", math.nan), ("-inf", -math.inf)):
            spoilt = [t.clone() for t in usual]
            spoilt[6][12_345] = value
            yield f"{short}, one {name}", spoilt, call, False
    yield f"{largest} elements", [ordinary(largest, seed=1)], call, False
    yield "777 tensors", [ordinary(1 + i * 7, seed=i) for i in range(777)], call, False
    yield "mixed dtypes", [ordinary(5000, seed=i, dtype=dtype) for i, dtype in enumerate(DTYPES)], call, False
    yield "nothing", [torch.zeros(0)], call, False


def run(case: Case, backend: str, device: torch.device) -> list[Tensor]:
    """What a call wrote, back on the CPU."""
    _, tensors, call, _ = case
    return [placed(tensor, torch.device("cpu")) for tensor in call([placed(t, device) for t in tensors], backend)]


def compare(case: Case, backend: str, device: torch.device, host: list[Tensor] | None) -> int:
    """The backend on the device against all that it must equal; ``host``: what the C++ kernels on the CPU made."""
    found = run(case, backend, device)
    others = [("the reference on the device", run(case, "reference", device), case[3])]
    others += [("cpp on the CPU", host, case[3])] if host is not None else []
    others += [("a second run", run(case, backend, device), True)]
    count = 0
    for label, expected, exact in others:
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_bits_equal(mine, theirs, f"result {index} against {label}", exact=exact)
            count += mine.numel()
    return count
