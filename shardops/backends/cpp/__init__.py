"""The C++ backend: forwards to the op library, whose implementations the dispatcher finds by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops import _library

PRIMITIVES = ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam")


def unavailable_reason(device_type: str) -> str | None:
    """Why the library cannot run on a device type, with the remedy; None if it can."""
    path = _library.library_path()
    if not path.exists():
        return (
            "the op library is not built (no C++ compiler when the package was installed?); "
            "install g++ and run: pip install --no-build-isolation --force-reinstall --no-deps shardops"
        )
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key("shardops::sharded_adam", key):
        return f"the op library has no kernels for device type {device_type!r}; name another backend"
    return None


KERNELS: dict[str, Callable[..., Any]] = {name: getattr(torch.ops.shardops, name).default for name in PRIMITIVES}
