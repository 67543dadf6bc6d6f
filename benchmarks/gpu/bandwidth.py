"""The part that measures speed: each primitive and the whole update path, beside a device copy of the same bytes,
torch's own ways, and other libraries where they import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import shardops
from gpu import contenders
from gpu.contenders import BF16, COPIES, FORMATS, Update, build_update, nbytes_of, parameters, shapes_of, torch_steps
from gpu.measure import Contender, copy_of, measure
from gpu.units import Context, Log, Skip, Unit
from shardops import ops

# Those first that the targets speak of most, should the time be short.
SIZES = (10**8, 10**9, 10**3, 10**5, 10**7, 10**6)
QUICK_SIZES = (10**8, 10**3, 10**5)
DRY_SIZES = (10**3, 10**4)
_PEER_ELEMENTS = 10**8
# Of all contenders of an update together, an element: ours, torch's moments and temporaries, the copy's two buffers.
_UPDATE_BYTES = 76

PATH = "clip, step, cast"
TORCH_PATH = "torch: clip_grad_norm_, fused, _foreach_copy_"


def _room(context: Context, elements: int, bytes_each: int = _UPDATE_BYTES) -> None:
    context.device.release()
    free = context.device.free_bytes()
    if elements * bytes_each > 0.92 * free:
        raise Skip(f"{elements * bytes_each / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free")


def _update(context: Context, name: str, elements: int, log: Log) -> None:
    _room(context, elements)
    shapes, device = shapes_of(elements), context.device.torch_device
    update = build_update(FORMATS[name], shapes, device)
    ours = [Contender(b, partial(update.run, b), "ours", update.nbytes, b) for b in context.backends]
    theirs = torch_steps(update)
    numel = sum(rows * columns for rows, columns in shapes)
    measure(
        context,
        log,
        f"sharded_adam, {name}",
        [copy_of(update.nbytes, device), *ours, *theirs],
        elements=numel,
        tensors=len(shapes),
        nbytes=update.nbytes,
        against=["torch fused"] if name == "fp32" else [],
    )


def _copy(context: Context, name: str, elements: int, log: Log) -> None:
    _room(context, elements, 24)
    shapes, device = shapes_of(elements), context.device.torch_device
    copy = COPIES[name](shapes, device)
    ours = [Contender(b, partial(copy.ours, b), "ours", copy.nbytes, b) for b in context.backends]
    theirs = [Contender(label, run, "torch", copy.nbytes) for label, run in copy.torchs.items()]
    numel = sum(rows * columns for rows, columns in shapes)
    rest: dict[str, Any] = {"elements": numel, "tensors": len(shapes), "nbytes": copy.nbytes, "against": copy.against}
    measure(context, log, name, [copy_of(copy.nbytes, device), *ours, *theirs], **rest)


def _fused_path(update: Update, backend: str) -> None:
    """What the optimizer launches under FSDP2: the norm, its coefficient, and a step that writes the shadow too."""
    total, _ = ops.grad_norm(update.grads, 2.0, backend=backend)
    coefficient = torch.clamp(1.0 / (total.sqrt().float() + 1e-6), max=1.0)
    update.run(backend, clip_coef=coefficient)


def _path(context: Context, elements: int, log: Log) -> None:
    _room(context, elements)
    shapes, device = shapes_of(elements), context.device.torch_device
    update = build_update(FORMATS["fp32, bf16 shadow"], shapes, device)
    shadows: list[torch.Tensor] = update.more["shadows"]
    params = parameters(update.params, update.grads)
    fused = torch.optim.AdamW(params, lr=1e-6, fused=True)

    def three_passes() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        fused.step()
        with torch.no_grad():
            torch._foreach_copy_(shadows, list[torch.Tensor](params))

    nbytes = update.nbytes + nbytes_of(update.grads)  # the gradients once more, for the norm
    ours = [Contender(b, partial(_fused_path, update, b), "ours", nbytes, b) for b in context.backends]
    # Gradients: read for the norm, then scaled in place. Parameters: read again, and the copies written.
    passes = 3 * nbytes_of(update.grads) + 28 * nbytes_of(params) // 4 + nbytes_of(params, shadows)
    for backend in context.backends:  # the optimizer as anybody has it, and a gather's cast
        optimizer = shardops.FusedShardedAdamW(params, lr=1e-6, max_grad_norm=1.0, backend=backend)
        name, run = f"{backend}, optimizer and cast_gather", partial(_separate, optimizer, params, backend)
        ours.append(Contender(name, run, "ours", None, backend))
    numel = sum(rows * columns for rows, columns in shapes)
    rest: dict[str, Any] = {"elements": numel, "tensors": len(shapes), "nbytes": nbytes, "against": [TORCH_PATH]}
    theirs = Contender(TORCH_PATH, three_passes, "torch", passes)
    measure(context, log, PATH, [copy_of(nbytes, device), *ours, theirs], **rest)


def _separate(optimizer: Any, params: list[torch.nn.Parameter], backend: str) -> None:
    optimizer.step()
    ops.cast_gather(params, BF16, backend=backend)


def _peak(context: Context, elements: int, log: Log) -> None:
    """The most memory that a step holds beside what is there before it."""
    _room(context, elements, 40)
    device = context.device.torch_device
    modes: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "fp32": (torch.float32, {}),
        "bf16, split32": (BF16, {}),
        "bf16, split24, int8 moments": (BF16, {"master_weights": "split24", "state_dtype": "int8"}),
    }
    found = []
    for backend in context.backends:
        for name, (dtype, options) in modes.items():
            log.backend = backend
            shapes = shapes_of(elements)
            params = parameters(contenders.randn(shapes, dtype, device), contenders.randn(shapes, dtype, device, 1e-2))
            optimizer = shardops.FusedShardedAdamW(params, lr=1e-6, max_grad_norm=1.0, backend=backend, **options)
            for _ in range(2):
                optimizer.step()
            resident, peak = context.device.peak_of(optimizer.step)
            found.append({"case": name, "backend": backend, "elements": elements, "resident": resident, "peak": peak})
            log.info["peak"] = found
            del params, optimizer
            context.device.release()


# ---- peers -----------------------------------------------------------------------------------------------------------

# name -> (module, attribute, dtype of the parameters, options)
PEERS: dict[str, tuple[str, str, torch.dtype, dict[str, Any]]] = {
    "apex FusedAdam": ("apex.optimizers", "FusedAdam", torch.float32, {"adam_w_mode": True}),
    "transformer_engine FusedAdam": ("transformer_engine.pytorch.optimizers", "FusedAdam", torch.float32, {}),
    "bitsandbytes AdamW": ("bitsandbytes.optim", "AdamW", torch.float32, {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", BF16, {}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", BF16, {}),
    "flashoptim FlashAdamW": ("flashoptim", "FlashAdamW", BF16, {}),
    "deepspeed FusedAdam": ("deepspeed.ops.adam", "FusedAdam", torch.float32, {"adam_w_mode": True}),
}


def _peer(context: Context, name: str, elements: int, log: Log) -> None:
    module, attribute, dtype, options = PEERS[name]
    try:
        peer = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise Skip(f"{module} cannot be imported ({type(error).__name__}: {error})") from error
    _room(context, elements)
    device, shapes = context.device.torch_device, shapes_of(elements)
    storage = "fp32" if dtype == torch.float32 else "bf16, split24, int8 moments"
    update = build_update(FORMATS[storage], shapes, device)
    theirs = peer(parameters(update.params, update.grads), lr=1e-6, **options)
    ours = [Contender(b, partial(update.run, b), "ours", update.nbytes, b) for b in context.backends]
    numel = sum(rows * columns for rows, columns in shapes)
    rest: dict[str, Any] = {"elements": numel, "tensors": len(shapes), "nbytes": update.nbytes}
    measure(context, log, f"beside {name}", [*ours, Contender(name, theirs.step, "peer")], **rest)


def units(context: Context) -> list[Unit]:
    sizes = DRY_SIZES if context.is_dry else QUICK_SIZES if context.quick else SIZES
    made = []
    for elements in sizes:
        parts: list[tuple[str, Callable[[Log], None]]] = [
            *((f"sharded_adam, {name}", partial(_update, context, name, elements)) for name in FORMATS),
            (PATH, partial(_path, context, elements)),
            *((name, partial(_copy, context, name, elements)) for name in COPIES),
        ]
        made += [Unit(f"{name}, {elements:.0e} elements", run, limit=60.0) for name, run in parts]
        if elements == sizes[0]:
            made.append(Unit("peak memory of a step", partial(_peak, context, elements)))
    peers_at = DRY_SIZES[-1] if context.is_dry else _PEER_ELEMENTS
    # Last: they may compile for a long time.
    made += [Unit(name, partial(_peer, context, name, peers_at), limit=40.0) for name in PEERS]
    return made
