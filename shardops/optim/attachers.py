"""What integrations do to an optimizer's parameters without being asked: they register here, since they lie above.

Called when an optimizer is made, and again when its plan is made anew or finds other local tensors: parameters may have
been swapped, moved or materialised since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_attachers: list[Callable[[Any], None]] = []


def register(attacher: Callable[[Any], None]) -> None:
    """Has ``attacher(optimizer)`` called from now on; it must be idempotent, and cheap where it has nothing to do."""
    _attachers.append(attacher)


def attach(optimizer: Any) -> None:
    """Lets every registered integration look at an optimizer's parameters."""
    for attacher in _attachers:
        attacher(optimizer)
