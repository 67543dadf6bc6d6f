"""The part about many tensors: what a step costs the host and the device, and how many launches it makes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import shardops
from gpu.contenders import parameters, randn
from gpu.measure import Contender, measure
from gpu.units import Context, Log, Skip, Unit

DECODER = 291  # tensors of a decoder of 7 to 8 billion parameters
COUNTS = (DECODER, 1, 100, 640, 5000)
QUICK_COUNTS = (DECODER, 1, 5000)
DRY_COUNTS = (DECODER, 1, 3)
CASE = "step of {count} tensors"


def decoder_shapes(divisor: int) -> list[tuple[int, ...]]:
    """32 layers of grouped-query attention and a gated MLP, and both ends; every width divided."""
    hidden, keys, inner, words = (size // divisor for size in (4096, 1024, 14336, 128256))
    layer: list[tuple[int, ...]] = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return [(words, hidden), *(layer * 32), (hidden,), (words, hidden)]


def shapes_of(count: int, is_dry: bool) -> list[tuple[int, ...]]:
    """So many tensors; those of a model where it has as many."""
    if count == DECODER:
        return decoder_shapes(256 if is_dry else 4)
    if is_dry:
        return [(4, 8)] * count
    known: dict[int, list[tuple[int, ...]]] = {1: [(4096, 4096)], 100: [(1024, 1024)] * 100, 640: [(256, 1024)] * 640}
    return known.get(count, [(16, 1024)] * count)


def _count(context: Context, name: str, run: Any, log: Log) -> None:
    try:
        log.info[f"launches, {name}"] = context.device.count_launches(run)
    except Exception as error:
        log.info[f"launches, {name}"] = f"not counted: {type(error).__name__}: {error}"


def _steps(context: Context, count: int, log: Log) -> None:
    device, shapes = context.device.torch_device, shapes_of(count, context.is_dry)
    context.device.release()
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    needed = elements * 16 * (2 * len(context.backends) + 3)
    if needed > 0.9 * context.device.free_bytes():
        raise Skip(f"{needed / 1e9:.0f} GB are needed, {context.device.free_bytes() / 1e9:.0f} GB are free")

    def own() -> list[torch.nn.Parameter]:
        """Each contender's: ours look after writes of others, which costs time that no training run has."""
        return parameters(randn(shapes, torch.float32, device), randn(shapes, torch.float32, device, 1e-2))

    made = []
    is_slow = context.is_dry and count == DECODER  # the reference, on a CPU, over many tensors
    for backend in context.backends[: 1 if is_slow else None]:
        for name, norm in ((backend, None), (f"{backend}, clipped", 1.0)):
            optimizer = shardops.FusedShardedAdamW(own(), lr=1e-6, max_grad_norm=norm, backend=backend)
            made.append(Contender(name, optimizer.step, "ours", 28 * elements, backend))
    fused, foreach = (torch.optim.AdamW(own(), lr=1e-6, **{kind: True}) for kind in ("fused", "foreach"))  # type: ignore[arg-type]
    clipped_params = own()
    clipped = torch.optim.AdamW(clipped_params, lr=1e-6, fused=True)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(clipped_params, 1.0, foreach=True)
        clipped.step()

    made += [Contender("torch fused", fused.step, "torch", 28 * elements)]
    made += [Contender("torch fused, clipped", clip_and_step, "torch")]
    made += [Contender("torch foreach", foreach.step, "torch", 28 * elements)]
    case = CASE.format(count=count)
    # Without a lead: what a step takes from an idle device, gaps between launches included.
    rest: dict[str, Any] = {"elements": elements, "tensors": count, "nbytes": 28 * elements, "with_lead": False}
    found = measure(context, log, case, made, against=["torch fused"], **rest)
    for contender in made:
        if not found["contenders"][contender.name]["error"] and context.left() > 0:
            log.backend = contender.backend
            _count(context, contender.name, contender.run, log)


def units(context: Context) -> list[Unit]:
    counts = DRY_COUNTS if context.is_dry else QUICK_COUNTS if context.quick else COUNTS
    return [Unit(CASE.format(count=count), partial(_steps, context, count), limit=60.0) for count in counts]
