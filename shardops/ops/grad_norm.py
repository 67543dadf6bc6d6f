"""grad_norm, the local part: a sum of powers over a list of tensors in a fixed, compensated tree, and a finite flag.

``collectives.grad_norm`` adds the all-reduce and takes the root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks, _geometry, _library, _registry

NORM_TYPES = (1.0, 2.0, math.inf)


def _fake(grads: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    return grads[0].new_empty((), dtype=torch.float64), grads[0].new_empty((), dtype=torch.float32)


_library.define(
    "grad_norm",
    "(Tensor[] grads, float norm_type) -> (Tensor, Tensor)",
    _fake,
    _registry.deferred("grad_norm", lambda grads, *_: grads[0].device),
)

# Gradients without gaps.
_SEEN: _geometry.Seen[bool] = _geometry.Seen()


def check_norm_type(norm_type: float) -> float:
    """Returns it as a float; raises ValueError unless it is 1, 2 or inf."""
    value = float(norm_type)
    if value not in NORM_TYPES:
        raise ValueError(
            f"norm_type is {norm_type!r}; 1, 2 and inf are supported: other powers differ from backend to backend"
        )
    return value


def grad_norm(grads: Sequence[Tensor], norm_type: float = 2.0, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """``sum(|g| ** norm_type)`` over all elements, or ``max(|g|)`` for inf, in one pass and without a host sync.

    The order of summation is fixed (backends/reference/grad_norm.py), so the result does not depend on threads or on
    the shape of a launch. Values are scaled by powers of two on the way: no overflow below float32's own limits.

    Args:
        grads: float32, bfloat16 or float16, any shapes, one device, at least one.
        norm_type: 1, 2 or inf.
        backend: None takes the best one available; a name never falls back.

    Returns:
        The sum (or maximum) as a float64 scalar, NaN or inf if an element is; and a float32 scalar that is 1 if any
        element is not finite, else 0. Both on the tensors' device.

    Raises:
        ValueError: no gradients, several devices, another norm_type.
        TypeError: something that is not a dense float tensor.
    """
    if not grads:
        raise ValueError("grads is empty; the device of the result is unknown: pass at least one tensor")
    norm_type = check_norm_type(norm_type)
    grads = list(grads)
    key = _SEEN.key(grads)
    result: tuple[Tensor, Tensor]
    if _SEEN.get(key) is not None:
        with torch.no_grad():
            result = _registry.resolve("grad_norm", grads[0].device.type, backend)(grads, norm_type)
        return result
    _checks.check_tensors(grads, "grads")
    are_dense = [_checks.is_dense(g) for g in grads]
    dense = [g.detach() if is_dense else g.detach().contiguous() for g, is_dense in zip(grads, are_dense, strict=True)]
    result = _registry.resolve("grad_norm", grads[0].device.type, backend)(dense, norm_type)
    if all(are_dense):
        _SEEN.put(key, True)
    return result
