"""Which backend runs a primitive on a device: ``(primitive, device, name) -> callable``.

A new backend is one folder under ``backends/`` and one line here. A backend asked for by name never falls back.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from . import _library

# Device type -> backends, best first. "triton" on a CPU is the interpreter: for tests, never chosen by itself.
_PREFERENCE = {"cpu": ("cpp", "reference"), "cuda": ("cpp", "triton", "reference")}
_BY_NAME_ONLY = {"cpu": ("triton",)}
BACKENDS = ("cpp", "triton", "reference")


def _module(backend: str) -> Any:
    return importlib.import_module(f"shardops.backends.{backend}")


def unavailable_reason(backend: str, device_type: str) -> str | None:
    """Why a backend cannot run on a device type, with the remedy; None if it can."""
    reason: str | None = _module(backend).unavailable_reason(device_type)
    return reason


def default_backend(device_type: str) -> str:
    """The backend that runs when none is named: ``SHARDOPS_BACKEND`` if set, else the best available one."""
    wanted = os.environ.get("SHARDOPS_BACKEND")
    if wanted:
        return wanted
    candidates = _PREFERENCE.get(device_type, ("reference",))
    for backend in candidates:
        if unavailable_reason(backend, device_type) is None:
            return backend
    raise RuntimeError(f"no backend runs on device type {device_type!r}: {backends(device_type)}")


def backends(device_type: str | None = None) -> dict[str, str]:
    """Backends and whether they can be used: ``"available"``, or the reason why not and the remedy.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; None: the best device of this machine.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: unavailable_reason(name, device_type) or "available" for name in BACKENDS}


# Cached with None too: finding the best backend asks the file system, each step and each launch.
@functools.cache
def _resolve(primitive: str, device_type: str, backend: str | None) -> Callable[..., Any]:
    check_backend(backend)
    if backend is None:
        backend = default_backend(device_type)
    reason = unavailable_reason(backend, device_type)
    if reason is not None:
        others = [name for name in BACKENDS if unavailable_reason(name, device_type) is None]
        raise RuntimeError(
            f"backend {backend!r} cannot run {primitive} on {device_type!r}: {reason}. "
            f"Available for {device_type!r}: {', '.join(map(repr, others)) or 'none'}"
        )
    kernel: Callable[..., Any] = _module(backend).KERNELS[primitive]
    return kernel


def resolve(primitive: str, device_type: str, backend: str | None = None) -> Callable[..., Any]:
    """The callable that runs a primitive.

    Args:
        primitive: basename, as ``"sharded_adam"``.
        device_type: of the tensors it will be given.
        backend: ``"cpp"``, ``"triton"``, ``"reference"``, or None for :func:`default_backend`.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the backend cannot run here; the text says why, and what can.
    """
    named = backend or os.environ.get("SHARDOPS_BACKEND") or None
    if _library.is_traced():
        check_backend(named)
        return _library.overload(primitive, named)  # type: ignore[no-any-return]
    return _resolve(primitive, device_type, named)


def check_backend(backend: str | None) -> None:
    """Raises ValueError unless ``backend`` is None or the name of one, available or not."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend is {backend!r}, which is none of {', '.join(map(repr, BACKENDS))}; "
            "None takes the best one available"
        )


def deferred(primitive: str, device_of: Callable[..., torch.device]) -> Callable[[str | None], Callable[..., Any]]:
    """For ``_library.define``: an implementation that resolves its backend when it is called."""

    def implementation(backend: str | None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Not resolve(): under a trace that would lead back to the overload that this is.
            device_type = device_of(*args).type
            named = backend or os.environ.get("SHARDOPS_BACKEND") or None
            return _resolve(primitive, device_type, named)(*args, **kwargs)

        return run

    return implementation
