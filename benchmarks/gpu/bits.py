"""The part that compares bits: every primitive and mode of every backend, all float32 patterns, very long tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from reference import DTYPES, assert_bits_equal

import shardops
from gpu import adam_cases, copy_cases, patterns
from gpu.units import Context, Log, Skip, Unit
from shardops import ops


def _has_host_kernels() -> bool:
    return shardops.backends("cpu")["cpp"] == "available"


def _compared(context: Context) -> tuple[str, ...]:
    return tuple(name for name in context.backends if name != "reference")  # all are compared with that one


def _compare_all(context: Context, cases: Callable[[], Iterator], module: object, log: Log) -> None:  # type: ignore[type-arg]
    """All backends through all cases, until the time is over."""
    device = context.device.torch_device
    backends = _compared(context)
    for case in cases():
        name = case.name if isinstance(case, adam_cases.Case) else case[0]
        if context.left() <= 0:
            log.skip(name, None, "no time left")
            continue
        host = module.run(case, "cpp", torch.device("cpu")) if _has_host_kernels() else None  # type: ignore[attr-defined]
        for backend in backends:
            log.check(name, backend, partial(module.compare, case, backend, device, host))  # type: ignore[attr-defined]


def _patterns(context: Context, log: Log) -> None:
    for backend in _compared(context):
        for dtype in patterns.CASTS:
            log.check(f"float32 to {str(dtype)[6:]}", backend, partial(patterns.check_casts, context, backend, dtype))
        log.check("split32", backend, partial(patterns.check_split32, context, backend))
        log.check("split24", backend, partial(patterns.check_split24, context, backend))


def _long_update(context: Context, backend: str, numel: int, piece: int) -> int:
    """An update of one very long tensor: its first and last elements are those of short tensors."""
    device = context.device.torch_device
    if context.device.free_bytes() < 9 * numel:
        raise Skip(f"{9 * numel / 1e9:.0f} GB are needed, {context.device.free_bytes() / 1e9:.0f} GB are free")
    dtypes = (torch.bfloat16, torch.bfloat16, torch.int8, torch.uint8, torch.int8)
    whole = [torch.empty(numel, dtype=dtype, device=device) for dtype in dtypes]
    for tensor in whole:
        if tensor.dtype == torch.bfloat16:
            tensor.view(torch.int16).random_(0x3C00, 0x3F00)  # 2^-7 to 0.5
        else:
            tensor.random_(0, 120)
    words = torch.zeros(1, math.ceil(numel / 128), 2, dtype=torch.int32, device=device)
    blocks_first, blocks_last = piece // 128, (numel - piece) // 128  # the last elements begin with a block
    ends = {
        "first": (slice(0, 128 * blocks_first), slice(0, blocks_first)),
        "last": (slice(128 * blocks_last, None), slice(blocks_last, None)),
    }
    shorts = {
        name: ([t[elements].clone() for t in whole], words[:, blocks].clone())
        for name, (elements, blocks) in ends.items()
    }

    def update(tensors: list[torch.Tensor], block_words: torch.Tensor, by: str) -> None:
        params, grads, exp_avgs, exp_avg_sqs, masters = ([t] for t in tensors)
        steps = torch.full((1,), 3.0, device=device)
        lists: dict[str, Any] = {"masters": masters, "block_words": [block_words]}
        ops.sharded_adam(params, grads, exp_avgs, exp_avg_sqs, steps, lr=1e-2, backend=by, **lists)

    update(whole, words, backend)
    for name, (elements, blocks) in ends.items():
        short, short_words = shorts[name]
        update(short, short_words, "reference")
        for index, (mine, theirs) in enumerate(zip(whole, short, strict=True)):
            assert_bits_equal(mine[elements], theirs, f"{name} elements of tensor {index}")
        assert_bits_equal(words[:, blocks], short_words, f"{name} words")
    return 2 * piece


def _long_copy(context: Context, backend: str, numel: int, piece: int) -> int:
    device = context.device.torch_device
    if context.device.free_bytes() < 9 * numel:
        raise Skip(f"{9 * numel / 1e9:.0f} GB are needed, {context.device.free_bytes() / 1e9:.0f} GB are free")
    source = torch.empty(numel, dtype=torch.bfloat16, device=device)
    source.view(torch.int16).random_(-(1 << 15), 1 << 15)
    for name, found in (
        ("cast_gather", ops.cast_gather([source], torch.float16, backend=backend)),
        ("flatten_shard", ops.flatten_shard([source], 1, dtype=torch.float16, align=1, backend=backend).view(-1)),
    ):
        for start in range(0, numel, 1 << 28):  # `.half()` of all at once would be another copy
            part = slice(start, min(start + (1 << 28), numel))
            assert_bits_equal(found[part], source[part].half(), f"{name} from {start} on")
    found_norm = ops.grad_norm(
        [source[:-piece].nan_to_num_(0.0, 1.0, -1.0), source[-piece:]], math.inf, backend=backend
    )
    if bool(source[-piece:].isnan().any()) != bool(found_norm[0].isnan()):
        raise AssertionError("grad_norm passed over a NaN at the end")
    return 2 * numel


def _long(context: Context, log: Log) -> None:
    # Past 2^31 elements, where 32-bit offsets end; a multiple of 128 and a rest.
    numel, piece = ((1 << 14) + 40, (1 << 7) + 40) if context.is_dry else ((1 << 31) + (1 << 20) + 40, (1 << 20) + 40)
    for backend in _compared(context):
        log.check(f"sharded_adam, {numel} elements", backend, partial(_long_update, context, backend, numel, piece))
        log.check(f"copies, {numel} elements", backend, partial(_long_copy, context, backend, numel, piece))


def units(context: Context) -> list[Unit]:
    """Ordered so that what matters most comes first, should the time be short."""

    def unit(name: str, cases: Callable[[], Iterator], module: object) -> Unit:  # type: ignore[type-arg]
        return Unit(name, partial(_compare_all, context, cases, module), limit=120.0)

    made = [Unit("all float32 patterns", partial(_patterns, context), limit=150.0)]
    made += [Unit("very long tensors", partial(_long, context), limit=120.0)]
    for seed, (moments, master) in enumerate(adam_cases.FORMATS):
        name = f"sharded_adam, {moments} moments, {master}"
        with_large = not context.is_dry or seed % 5 == 0
        made.append(unit(name, partial(adam_cases.format_cases, moments, master, seed, with_large), adam_cases))
    for moments, master in adam_cases.SOME[2:3] if context.is_dry else adam_cases.SOME:
        name = f"sharded_adam, options, {moments} moments, {master}"
        many = 40 if context.is_dry else 777
        made.append(unit(name, partial(adam_cases.option_cases, moments, master, many), adam_cases))
    for layout in copy_cases.LAYOUTS:
        for dtype in DTYPES:
            name = f"flatten and unflatten, {layout}, {str(dtype)[6:]}"
            made.append(unit(name, partial(copy_cases.flatten_cases, layout, dtype), copy_cases))
    made.append(unit("cast_gather", copy_cases.gather_cases, copy_cases))
    largest = 300_001 if context.is_dry else 3_000_001
    for norm_type in (1.0, 2.0, math.inf):
        made.append(unit(f"grad_norm {norm_type:g}", partial(copy_cases.norm_cases, norm_type, largest), copy_cases))
    return made
