"""The norm of gradients that come one after the other, each gone before the next: local sums are kept, not gradients.

The sums are completed by one call of the layout's collectives, once all gradients of an iteration have come.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..collectives import NormLayout, local_power


class RunningNorm:
    """The 2-norm over a layout's parameters.

    Args:
        layout: of these parameters.
        backend: of the local sums.
    """

    def __init__(self, layout: NormLayout, backend: str | None) -> None:
        self._layout = layout
        self._backend = backend
        self._sets = layout.sets
        self._set_of = {index: number for number, indices in enumerate(self._sets) for index in indices}
        self._powers: dict[int, Tensor] = {}  # number of the set -> sum of squares so far

    def add(self, grads: Mapping[int, Tensor], are_checked: bool) -> Tensor | None:
        """Adds gradients; no collective.

        Args:
            grads: position of a parameter in the layout -> its local gradient.
            are_checked: as :meth:`NormLayout.norm`.

        Returns:
            float32 scalar, 1 if one of their elements, or the sum of their squares in float32, is not finite, else 0;
            None if there are none.
        """
        parts: dict[int, list[Tensor]] = {}
        for index, grad in grads.items():
            if index in self._set_of:
                parts.setdefault(self._set_of[index], []).append(grad)
        found: Tensor | None = None
        for number, part in parts.items():
            power, is_bad = local_power(part, 2.0, are_checked, self._backend)
            self._powers[number] = self._powers[number] + power if number in self._powers else power
            is_bad = torch.maximum(is_bad, (~power.float().isfinite()).to(is_bad))  # exp_avg_sq takes squares
            found = is_bad if found is None else torch.maximum(found, is_bad.to(found.device))
        return found

    def take_over(self, other: RunningNorm, positions: Mapping[int, int]) -> None:
        """Adds what was added to another one, over a layout that had the parameters at other positions.

        Args:
            other: it is not used any more.
            positions: there -> here. Parameters that shared a sum there do so here.
        """
        for number, power in other._powers.items():
            found = (self._set_of.get(positions.get(index, -1)) for index in other._sets[number])
            ours = next((number for number in found if number is not None), None)
            if ours is not None:
                self._powers[ours] = self._powers[ours] + power if ours in self._powers else power

    def forget(self) -> None:
        """Nothing has been added."""
        self._powers = {}

    def norm(self) -> Tensor:
        """The norm of all that was added since the last call, as :meth:`NormLayout.norm`: a collective."""
        powers = {id(self._sets[number]): power for number, power in self._powers.items()}
        self._powers = {}
        return self._layout.completed(lambda indices: powers.get(id(indices)), 2.0)
