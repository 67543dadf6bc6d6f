"""A low-precision copy of an fp32 parameter that the step keeps beside it, so that nobody casts the parameter again.

An integration makes shadows and hangs them on local tensors; the plan finds them there and the step's kernel writes
them. Whoever reads one compares versions first: other writers of the parameter do not know of it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

# Of a local tensor: its Shadow. It goes with the tensor: .to(), to_empty() and load_state_dict(assign=True) drop it.
ATTRIBUTE = "_shardops_shadow"

Versions = tuple[int, int]


def versions(param: Tensor) -> Versions:
    """Counts of in-place writes: an operation on a DTensor moves its own count, not its local tensor's."""
    return param._version, getattr(param, "_local_tensor", param)._version


class Shadow:
    """The rounded values of one local tensor, and which version of the parameter they are of.

    Attributes:
        padded: what an all-gather sends: ``values`` and, on ranks with fewer rows, rows of zeros, ND.
        values: the part of ``padded`` that has the local tensor's shape, ND, contiguous.
        owner: keeps the memory that ``padded`` is a part of registered, if it is part of a larger buffer.
        written: the parameter's versions when ``values`` were last equal to it, rounded; None: they never were.
    """

    def __init__(self, padded: Tensor, rows: int, owner: Any = None) -> None:
        self.padded = padded
        self.values = padded.narrow(0, 0, rows)
        self.owner = owner
        self.written: Versions | None = None
        # Tensors with the parameter's memory and version counters of their own, and these when values were written.
        self._aliases: list[tuple[weakref.ref[Tensor], int]] = []

    def is_current(self, param: Tensor) -> bool:
        """Whether nobody has written the parameter since ``values`` were."""
        if self.written != versions(param):
            return False
        # An alias that is gone may have been written before.
        return all((alias := ref()) is not None and alias._version == version for ref, version in self._aliases)

    def follow(self, alias: Tensor) -> None:
        """Takes notice of a tensor through which the parameter can be written, as a state dict's local tensors are."""
        if alias.is_inference():  # it counts no writes
            self.written = None
        else:
            self._aliases.append((weakref.ref(alias), alias._version))

    def refresh(self, param: Any, is_training: bool = True) -> None:
        """Rounds the parameter (a DTensor) to nearest even again if somebody else has written it.

        Args:
            param: whose shadow this is.
            is_training: in evaluation, always: averaged weights are swapped in and out through ``.data``, unseen.
        """
        if is_training and self.is_current(param):
            return
        with torch.no_grad():  # here only: entering it costs more than looking at versions
            self.values.copy_(param._local_tensor)
        self.written = versions(param) if is_training else None
        alive = [alias for ref, _ in self._aliases if (alias := ref()) is not None]
        self._aliases = [(weakref.ref(alias), alias._version) for alias in alive]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied tensor is gathered by nobody


def shadow_of(local: Tensor) -> Shadow | None:
    """The shadow that hangs on a local tensor."""
    shadow: Shadow | None = getattr(local, ATTRIBUTE, None)
    return shadow
