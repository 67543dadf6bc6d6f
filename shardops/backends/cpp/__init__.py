"""The C++ backend: forwards to the op library, whose CPU and CUDA implementations the dispatcher finds by device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from ...ops import _library

PRIMITIVES = ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam")

# The oldest GPU that the CUDA kernels are built for (csrc/cuda; tools/native.py names all).
OLDEST_CAPABILITY = (8, 0)

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps shardops"


@functools.cache
def _cuda_reason() -> str | None:
    """Why the CUDA kernels cannot run on the GPUs of this machine; None if they can, or there are none to look at."""
    if torch.version.hip:
        return "the op library's kernels are for NVIDIA GPUs, and this torch is for AMD's; name 'triton'"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("shardops::sharded_adam", "CUDA"):
        return (
            "the op library was built without CUDA kernels (no nvcc of 12.1 or later when the package was installed?); "
            f"install the CUDA toolkit, set CUDA_HOME and run: {_REBUILD}"
        )
    count = torch.cuda.device_count() if torch.version.cuda else 0
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST_CAPABILITY:
            major, minor = OLDEST_CAPABILITY
            return (
                f"GPU {index} has compute capability {capability[0]}.{capability[1]}, the CUDA kernels are built for "
                f"{major}.{minor} and later; name another backend, or hide that GPU by CUDA_VISIBLE_DEVICES"
            )
    return None


def unavailable_reason(device_type: str) -> str | None:
    """Why the library cannot run on a device type, with the remedy; None if it can."""
    path = _library.library_path()
    if os.environ.get("SHARDOPS_LIBRARY") and not _library.load():
        why = _library.load_error() if path.exists() else "there is no such file"
        return f"SHARDOPS_LIBRARY names {path}, which cannot be loaded ({why}); name another library, or unset it"
    if not path.exists():
        return (
            f"the op library {path} is not built (no C++ compiler when the package was installed?); "
            f"install g++ and run: {_REBUILD}"
        )
    if not _library.load():
        return f"the op library {path} cannot be loaded ({_library.load_error()}); run: {_REBUILD}"
    if device_type == "cuda":
        return _cuda_reason()
    if device_type != "cpu":
        return f"the op library has no kernels for device type {device_type!r}; name another backend"
    return None


KERNELS: dict[str, Callable[..., Any]] = {name: getattr(torch.ops.shardops, name).default for name in PRIMITIVES}
