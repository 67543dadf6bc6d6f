"""flatten_shard and unflatten_shard: a list of tensors <-> one flat, padded buffer laid out by rank.

Cast and scale happen on the way, in the one pass over memory. Neither is differentiable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import layout as layouts
from . import _checks, _geometry, _library, _registry

_DEFAULT_ALIGN_NBYTES = 128
# Shape and dtype of a flat result, and the segments.
_Plan = tuple[tuple[int, ...], torch.dtype, Tensor]
# For contiguous tensors only.
_FLATTEN_SEEN: _geometry.Seen[_Plan] = _geometry.Seen()
_UNFLATTEN_SEEN: _geometry.Seen[Tensor] = _geometry.Seen()


def _fake(*args: object, **kwargs: object) -> None:
    return None


_library.define(
    "flatten_shard",
    "(Tensor(a!) out, Tensor[] tensors, Tensor segments, float? scale=None) -> ()",
    _fake,
    _registry.deferred("flatten_shard", lambda out, *_: out.device),
)
_library.define(
    "unflatten_shard",
    "(Tensor buffer, Tensor(a!)[] out_tensors, Tensor segments, float? scale=None) -> ()",
    _fake,
    _registry.deferred("unflatten_shard", lambda buffer, *_: buffer.device),
)
# The C++ library's copies, if ``geometry_hash([buffer, *tensors])`` is ``geometry``: whether it is, and all was copied.
# One call where the hash and the copy would be two, each of which costs as much as the copy of a small tensor.
_library.define_host(
    "copy_as_planned(Tensor(a!) buffer, Tensor(b!)[] tensors, Tensor segments, int geometry, bool into_buffer) -> bool"
)


def _build(
    shapes: tuple[tuple[int, ...], ...], world_size: int, rank: int | None, layout: str, align: int
) -> tuple[layouts.BufferLayout, Tensor]:
    built = layouts.LAYOUTS[layout](shapes, world_size, align, rank)
    # int64 [segments, 4]; the reshape keeps an empty table two-dimensional.
    return built, torch.tensor(built.segments, dtype=torch.int64, device="cpu").reshape(-1, 4)


_build_cached = functools.lru_cache(maxsize=64)(_build)


def buffer_layout(
    shapes: Sequence[Sequence[int]], world_size: int, rank: int | None, layout: str, align: int
) -> tuple[layouts.BufferLayout, Tensor]:
    """The layout of a buffer and its segments as an int64 tensor ``[segments, 4]`` on the CPU; both are cached."""
    key = tuple(tuple(shape) for shape in shapes)
    build = _build if _library.is_traced() else _build_cached
    return build(key, world_size, rank, layout, align)


def _check_layout(layout: str, align: int | None, dtype: torch.dtype) -> int:
    if layout not in layouts.LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it is one of {', '.join(map(repr, layouts.LAYOUTS))}")
    if align is None:
        # chunk_cat, whose buffers "per_param" equals, pads no shard.
        return _DEFAULT_ALIGN_NBYTES // dtype.itemsize if layout == "flat" else 1
    if isinstance(align, bool) or not isinstance(align, int) or align < 1:
        raise ValueError(f"align is {align!r}; it counts elements and is an int of at least 1")
    return align


def flatten_shard(
    tensors: Sequence[Tensor],
    world_size: int,
    *,
    rank: int | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    layout: str = "flat",
    align: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Tensors -> one flat buffer of ``world_size`` equal shards, cast and scaled on the way.

    ``out = cast(float32(tensor) * scale)``, one multiplication and one rounding to nearest even; without ``scale`` the
    result has the bits of ``tensor.to(dtype)``. Padding is zero.

    Args:
        tensors: float32, bfloat16 or float16, any shapes (ND), one device. At least one, unless ``out`` is given.
        world_size: number of shards.
        rank: make this rank's shard only; None: all shards.
        dtype: of the result; None: that of ``out``, else the tensors' own, which must then be one.
        scale: multiplies, in float32.
        layout: ``"flat"``: concatenated, padded at the end and cut (FSDP1, ZeRO). ``"per_param"``: each tensor padded
            on dim 0 and chunked, chunks laid out by rank (FSDP2's ``chunk_cat``).
        align: a shard's size is a multiple of this many elements; None: 128 bytes' worth for ``"flat"``, 1 for
            ``"per_param"``.
        out: contiguous tensor of the result's shape to write into.
        backend: None takes the best one available; a name never falls back.

    Returns:
        ``[world_size, shard_numel]``, or ``[shard_numel]`` for one rank.

    Raises:
        ValueError: world_size, rank, layout, align or out is unfit; no tensors; several dtypes or devices.
        TypeError: something that is not a dense float tensor.
    """
    tensors = list(tensors)
    given = tensors if out is None else [*tensors, out]
    key = _FLATTEN_SEEN.key(given, world_size, rank, dtype, layout, align, out is None)
    seen = _FLATTEN_SEEN.get(key)
    plan = seen or _plan_flatten(tensors, world_size, rank, dtype, layout, align, out)
    shape, out_dtype, segments = plan
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=tensors[0].device)
    run = _registry.resolve("flatten_shard", out.device.type, backend)
    if seen is not None:
        with torch.no_grad():
            run(out, tensors, segments, scale)
    else:
        # A tensor that is not row-major is copied first, alone: its rows are not one range of memory.
        run(out.detach(), [tensor.detach().contiguous() for tensor in tensors], segments, scale)
        if all(tensor.is_contiguous() for tensor in tensors):
            _FLATTEN_SEEN.put(key, plan)
    _library.mark_written([out])
    return out


def _plan_flatten(
    tensors: list[Tensor],
    world_size: int,
    rank: int | None,
    dtype: torch.dtype | None,
    layout: str,
    align: int | None,
    out: Tensor | None,
) -> _Plan:
    """Raises what :func:`flatten_shard` says, or returns the result's shape, its dtype and the segments."""
    _checks.check_world(world_size, rank)
    if not tensors and out is None:
        raise ValueError("tensors is empty and out is None; dtype and device of the result are unknown: pass out")
    _checks.check_tensors(tensors, "tensors")
    if dtype is None:
        dtype = out.dtype if out is not None else tensors[0].dtype
        if out is None and any(tensor.dtype != dtype for tensor in tensors):
            names = sorted({str(tensor.dtype) for tensor in tensors})
            raise ValueError(f"tensors have dtypes {', '.join(names)}; say which the result has: dtype=...")
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; float32, bfloat16 and float16 are supported")
    align = _check_layout(layout, align, dtype)
    built, segments = buffer_layout([t.shape for t in tensors], world_size, rank, layout, align)
    if out is not None:
        _checks.check_out(out, built.shape, dtype, tensors[0].device if tensors else out.device)
    return built.shape, dtype, segments


def unflatten_shard(
    buffer: Tensor,
    out_tensors: Sequence[Tensor],
    *,
    layout: str = "flat",
    scale: float | None = None,
    backend: str | None = None,
) -> Sequence[Tensor]:
    """The inverse of :func:`flatten_shard`: writes the tensors of a whole buffer, cast and scaled on the way.

    Args:
        buffer: contiguous ``[world_size, shard_numel]``; ``[shard_numel]`` is one shard of a world of one.
        out_tensors: tensors or views of the shapes that were flattened, written in place; dtypes are theirs.
        layout: as given to :func:`flatten_shard`.
        scale: multiplies, in float32.
        backend: None takes the best one available; a name never falls back.

    Returns:
        ``out_tensors``.

    Raises:
        ValueError: the buffer's size is not what these tensors and this layout give; not contiguous; other device.
        TypeError: something that is not a dense float tensor.
    """
    targets = list(out_tensors)
    key = _UNFLATTEN_SEEN.key([buffer, *targets], layout)
    seen = _UNFLATTEN_SEEN.get(key)
    segments = _plan_unflatten(buffer, targets, layout) if seen is None else seen
    run = _registry.resolve("unflatten_shard", buffer.device.type, backend)
    if seen is not None:
        with torch.no_grad():
            run(buffer, targets, segments, scale)
    else:
        detached = [tensor.detach() for tensor in targets]
        dense = [target if target.is_contiguous() else target.contiguous() for target in detached]
        run(buffer.detach(), dense, segments, scale)
        for target, written in zip(detached, dense, strict=True):
            if written is not target:
                target.copy_(written)
        if all(tensor.is_contiguous() for tensor in targets):
            _UNFLATTEN_SEEN.put(key, segments)
    _library.mark_written(targets)
    return out_tensors


def _plan_unflatten(buffer: Tensor, out_tensors: list[Tensor], layout: str) -> Tensor:
    """Raises what :func:`unflatten_shard` says, or returns the segments."""
    _checks.check_tensors([buffer], "buffer")
    _checks.check_tensors(out_tensors, "out_tensors", buffer.device)
    _check_layout(layout, 1, buffer.dtype)
    if buffer.dim() not in (1, 2) or not buffer.is_contiguous():
        raise ValueError(
            f"buffer has shape {tuple(buffer.shape)} and strides {buffer.stride()}; "
            "it is contiguous, [world_size, shard_numel] or [shard_numel]"
        )
    world_size, shard_numel = (1, buffer.shape[0]) if buffer.dim() == 1 else buffer.shape
    _checks.check_world(world_size, None)
    shapes = [tuple(t.shape) for t in out_tensors]
    # Aligning to the size at hand reproduces the padding, whatever made it.
    built, segments = buffer_layout(shapes, world_size, None, layout, max(shard_numel, 1))
    if built.shard_numel > shard_numel:
        least = layouts.LAYOUTS[layout](shapes, world_size, 1).shard_numel
        raise ValueError(
            f"buffer has shards of {shard_numel} elements, these {len(shapes)} tensors over {world_size} ranks with "
            f"layout {layout!r} need at least {least}; pass the tensors and the layout that were flattened"
        )
    return segments
