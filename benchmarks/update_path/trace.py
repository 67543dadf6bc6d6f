"""Counts the bytes that operators read and write, and the memory they allocate, part by part, as they are called.

Every call passes the dispatcher under a dispatch mode, shardops' kernels included; what is counted are the arguments
and results of the operators that did the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that are Python over other operators: those are counted.
_COMPOSED = "fsdp"
# Collectives move bytes between ranks, not within one; the profiler's marks move none.
_NOT_COUNTED = ("c10d", "_c10d_functional", "profiler")
# Arguments that are written without being read first; all others that are written are read too.
_ONLY_WRITTEN = {
    "aten::copy_": ("self",),
    "aten::_foreach_copy_": ("self",),
    "aten::fill_": ("self",),
    "aten::zero_": ("self",),
    "shardops::sharded_adam": ("shadows",),
}
# Written by schema only: torch's fused AdamW unscales gradients in place, if it is given a scale.
_NOT_WRITTEN = {"aten::_fused_adamw_": ("grads",)}
# They allocate, or look at shapes and addresses, and touch no data.
_ALLOCATE = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_TOUCH_NOTHING = (*_ALLOCATE, "shardops::geometry_hash")


@dataclass
class Traffic:
    """Of one part.

    Attributes:
        read, written: bytes.
        largest_new: bytes of the largest tensor that was allocated.
        calls: of each operator that moved bytes.
    """

    read: int = 0
    written: int = 0
    largest_new: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class ByteTrace(TorchDispatchMode):
    """Counts while it is entered and a part is set.

    Attributes:
        part: what operators count for now; None: for nothing.
        traffic: by part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part: str | None = None
        self.traffic: dict[str, Traffic] = {}

    def switch(self, part: str | None) -> str | None:
        """Operators count for another part from now on; returns the one before."""
        self.part, before = part, self.part
        return before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own dispatch comes back with local tensors
        if func.namespace == _COMPOSED:
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        before = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        if self.part is not None and func.namespace not in _NOT_COUNTED and not func.is_view:
            self._count(func, args, kwargs, result, before)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, before: set[int]) -> None:
        assert self.part is not None
        name = func._schema.name
        traffic = self.traffic.setdefault(self.part, Traffic())
        new = [tensor for tensor in _tensors(result) if _address(tensor) not in before]
        traffic.largest_new = max([traffic.largest_new, *map(_nbytes, new)])
        if name in _TOUCH_NOTHING:
            return
        for argument, value in _bound(func, args, kwargs):
            nbytes = sum(map(_nbytes, _tensors(value)))
            marked = argument.alias_info is not None and argument.alias_info.is_write
            is_out = marked and argument.kwarg_only
            if marked and argument.name not in _NOT_WRITTEN.get(name, ()):
                traffic.written += nbytes
            if not is_out and argument.name not in _ONLY_WRITTEN.get(name, ()):
                traffic.read += nbytes
        traffic.written += sum(map(_nbytes, new))
        traffic.calls[name] += 1


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument of the schema that was given, with its value."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
