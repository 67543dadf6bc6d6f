"""The ops' schemas: defined here so that they exist without a compiler; the C++ library only adds implementations.

Each primitive is one op with three overloads of the same schema: the default one is the best backend for the tensors'
device, ``reference`` and ``triton`` are those backends by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LIBRARY = torch.library.Library("shardops", "DEF")
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


def overload(name: str, backend: str | None) -> Any:
    """The ``torch.ops`` overload of a primitive; ``backend`` None or ``"cpp"``: the default one."""
    packet = getattr(torch.ops.shardops, name)
    return getattr(packet, backend if backend in NAMED_OVERLOADS else "default")


def library_path() -> Path:
    """Where the built op library lies, whether or not it is there."""
    return Path(__file__).resolve().parent.parent / "_ops.so"
