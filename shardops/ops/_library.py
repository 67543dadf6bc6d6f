"""The ops' schemas: defined here so that they exist without a compiler; the C++ library only adds implementations.

Each primitive is one op with three overloads of the same schema: the default one is the best backend for the tensors'
device, ``reference`` and ``triton`` are those backends by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_LIBRARY: Any = torch.library.Library("shardops", "DEF")  # type: ignore[no-untyped-call]
NAMED_OVERLOADS = ("reference", "triton")


def define(name: str, signature: str, fake: Callable[..., Any], implementation: Callable[[str | None], Any]) -> None:
    """Defines a primitive's overloads.

    Args:
        name: the primitive's basename, as ``"sharded_adam"``.
        signature: arguments and results in torch's schema language; mutated arguments carry ``(a!)``.
        fake: shapes and dtypes of the results for FakeTensors; None for an op that only mutates.
        implementation: maps a backend's name (None: the best for the device) to a function of the same arguments that
            finds the backend at its first call.
    """
    for overload in ("", *NAMED_OVERLOADS):
        qualified = f"{name}.{overload}" if overload else name
        _LIBRARY.define(qualified + signature, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"shardops::{qualified}", fake, lib=_LIBRARY)
        # The C++ library registers under "CPU", which wins over this key.
        _LIBRARY.impl(qualified, implementation(overload or None), "CompositeExplicitAutograd")


def define_host(schema: str) -> None:
    """Defines an op that looks at tensors without reading them; the C++ library implements it for all devices."""
    _LIBRARY.define(schema)


def overload(name: str, backend: str | None) -> Any:
    """The ``torch.ops`` overload of a primitive; ``backend`` None or ``"cpp"``: the default one."""
    packet = getattr(torch.ops.shardops, name)
    return getattr(packet, backend if backend in NAMED_OVERLOADS else "default")


def is_traced() -> bool:
    """Whether torch watches calls: torch.compile, or a dispatch mode (FakeTensors, make_fx).

    An op must then go through the dispatcher, and nothing made meanwhile may be cached: it can be a FakeTensor.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Bumps the version counters of tensors that an op wrote, which the C++ and Triton kernels do not do.

    Autograd finds a saved tensor that was overwritten by it, and the optimizer a parameter that someone else wrote.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


@functools.cache
def load() -> bool:
    """Loads the op library if it was built; call it when all schemas are defined. Whether it is there and works."""
    return library_path().exists() and load_error() is None


@functools.cache
def load_error() -> str | None:
    """Why the op library, which is there, cannot be loaded; None if it was."""
    try:
        torch.ops.load_library(library_path())  # type: ignore[no-untyped-call]
    except OSError as error:  # not a library, or one for another torch
        return str(error)
    return None


def library_path() -> Path:
    """Where the built op library lies, whether or not it is there; SHARDOPS_LIBRARY names another build."""
    return Path(os.environ.get("SHARDOPS_LIBRARY") or Path(__file__).resolve().parent.parent / "_ops.so")
