"""geometry_hash: one number for the shapes, strides, dtypes and devices of a list of tensors.

Plans and checks are kept between calls; this says in one call whether the tensors still look as they did then.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _library

Value = TypeVar("Value")

_library.define_host("geometry_hash(Tensor[] tensors) -> int")


def geometry_hash(tensors: Sequence[Tensor]) -> int | None:
    """A 64-bit hash of all layouts, sizes, strides, dtypes and devices, in order; None without the op library."""
    if not tensors:
        return 0
    if not _library.load():
        return None
    value: int = torch.ops.shardops.geometry_hash.default(tensors)
    return value


class Seen(Generic[Value]):
    """What checks found out about lists of tensors, for the next call with lists of the same geometry.

    Looking at thousands of tensors in Python takes several times as long as updating them.
    """

    _FEWEST = 4  # fewer are looked at sooner than told apart
    _MOST = 64  # the oldest goes; a table of segments takes 32 bytes a tensor and rank

    def __init__(self) -> None:
        self._found: dict[Hashable, Value] = {}
        self._lock = threading.Lock()

    def key(self, tensors: Sequence[Tensor], *rest: Hashable) -> Hashable | None:
        """What :meth:`get` and :meth:`put` want.

        Args:
            tensors: of all lists of a call, one after the other.
            rest: whatever else the checks depend on, the lists' lengths among them.

        Returns:
            None if they are too few to be worth it, or there is nothing to know them by: under a trace or forward-mode
            AD, without the op library, or if these are no plain tensors, or ``rest`` nothing that can be compared; the
            checks then have to say what is wrong.
        """
        if len(tensors) < self._FEWEST or _is_transformed():
            return None
        try:
            # The dispatcher would give the hash a plain copy of a view that negates, which is not what the op gets.
            if any(map(Tensor.is_neg, tensors)):
                return None
            geometry = geometry_hash(tensors)
            # With their types: True is 1, which a check may tell apart.
            key = geometry, *rest, *map(type, rest)
            hash(key)
        except (TypeError, RuntimeError):
            return None
        return None if geometry is None else key

    def get(self, key: Hashable | None) -> Value | None:
        """What was kept; None if nothing was."""
        return None if key is None else self._found.get(key)

    def put(self, key: Hashable | None, value: Value) -> None:
        """Keeps a value that is not None."""
        if key is None:
            return
        with self._lock:
            if len(self._found) >= self._MOST and key not in self._found:
                del self._found[next(iter(self._found))]
            self._found[key] = value


def _is_transformed() -> bool:
    """Whether tensors are not what they look like: traced, or with a tangent (torch.func.jvp's, too)."""
    return _library.is_traced() or forward_ad._current_level >= 0
