"""cast_gather: many shards -> one contiguous low-precision buffer, the input of an all-gather.

Bit-equal to ``torch.cat([shard.flatten().to(dtype) for shard in shards])`` without its temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks, _geometry, _library, _registry

_library.define(
    "cast_gather",
    "(Tensor(a!) out, Tensor[] shards) -> ()",
    lambda out, shards: None,
    _registry.deferred("cast_gather", lambda out, *_: out.device),
)

# Contiguous shards, and a result if there is one, that fit: their elements.
_SEEN: _geometry.Seen[int] = _geometry.Seen()


def cast_gather(
    shards: Sequence[Tensor], dtype: torch.dtype, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:  # ND -> 1D
    """Casts shards into one contiguous buffer, back to back, rounding to nearest even; NaN stays NaN.

    Args:
        shards: float32, bfloat16 or float16, any shapes, one device. At least one, unless ``out`` is given.
        dtype: of the result: float32, bfloat16 or float16.
        out: contiguous ``[total numel]`` of that dtype to write into.
        backend: None takes the best one available; a name never falls back.

    Returns:
        ``[total numel]``, 1D.

    Raises:
        ValueError: no shards, several devices, or an unfit ``out``.
        TypeError: something that is not a dense float tensor, or an unsupported dtype.
    """
    shards = list(shards)
    key = _SEEN.key(shards if out is None else [*shards, out], dtype, out is None)
    numel = seen = _SEEN.get(key)
    if numel is None:
        numel = _check(shards, dtype, out)
    if out is None:
        out = torch.empty(numel, dtype=dtype, device=shards[0].device)
    run = _registry.resolve("cast_gather", out.device.type, backend)
    if seen is not None:
        with torch.no_grad():
            run(out, shards)
    else:
        run(out.detach(), [shard.detach().contiguous() for shard in shards])
        if all(shard.is_contiguous() for shard in shards):
            _SEEN.put(key, numel)
    _library.mark_written([out])
    return out


def _check(shards: list[Tensor], dtype: torch.dtype, out: Tensor | None) -> int:
    """Raises what :func:`cast_gather` says, or returns the number of elements."""
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; float32, bfloat16 and float16 are supported")
    if not shards and out is None:
        raise ValueError("shards is empty and out is None; the device of the result is unknown: pass out")
    _checks.check_tensors(shards, "shards")
    numel = sum(shard.numel() for shard in shards)
    if out is not None:
        _checks.check_out(out, (numel,), dtype, shards[0].device if shards else out.device)
    return numel
