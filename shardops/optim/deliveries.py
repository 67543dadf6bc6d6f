"""Hooks that tell when a parameter's gradient is there: of a plain parameter, once autograd has accumulated it.

Integrations have deliveries of their own, of several parameters at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .release import GradientRelease


class Delivery:
    """Hooks that tell a :class:`GradientRelease` that the gradients of some parameters are there: here, of one.

    They hold the parameters, but are held by these alone and by the release.

    Attributes:
        params: what is stepped together.
    """

    def __init__(self, release: GradientRelease, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._release = weakref.ref(release)
        self._handles: dict[int, Any] = {}  # by id of the parameter

    @property
    def release(self) -> GradientRelease | None:
        """Whose delivery it is; None: nobody's any more."""
        return self._release()

    def hooked(self) -> list[Tensor]:
        """The parameters that must have a hook."""
        return self.params

    def ensure(self) -> None:
        """Puts hooks where they are missing: parameters may have been unfrozen, moved or materialised."""
        for param in self.hooked():
            handle = self._handles.get(id(param))
            if param.requires_grad and (handle is None or handle.id not in _hooks(param)):
                hook = Hook(self, param)
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raises RuntimeError if there is a reason not to begin an iteration."""

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def arrived(self, param: Any) -> None:
        """Called by the hooks."""
        release = self.release
        if release is not None and param.grad is not None:
            release.step_by([param], self)


class Hook:
    """One parameter's hook of a delivery."""

    def __init__(self, delivery: Delivery, param: Tensor) -> None:
        self.delivery = delivery
        self.is_stepped = any(param is other for other in delivery.params)

    def __call__(self, param: Tensor) -> None:
        self.delivery.arrived(param)


def _hooks(param: Any) -> dict[int, Any]:
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}


def release_of(param: Tensor) -> GradientRelease | None:
    """Who steps the parameter in backward."""
    # Told by its hooks: with weak references in a table to a sharded parameter, .to() could not swap it.
    for hook in _hooks(param).values():
        if isinstance(hook, Hook) and hook.is_stepped and hook.delivery.release is not None:
            return hook.delivery.release
    return None
