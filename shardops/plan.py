"""Binds parameters, gradients and states to launches: one bucket for each (group, device, dtypes).

Below here there are local tensors only. Buckets are cached between steps and rebuilt when something that they hold was
replaced: a parameter, a state, a gradient's dtype, or which parameters have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .collectives import local_tensor
from .ops import _checks


@dataclass
class Entry:
    """One parameter with its states, as the optimizer hands it to the plan.

    Attributes:
        param: parameter, plain or DTensor (ND).
        group_index: of its param group.
        state: its state dict; the plan reads the tensors, never replaces them.
        master_key: the state's key of the master or remainder; None: the parameter is its own master.
        steps: the flat buffer that ``state["step"]`` is a view into, 1D.
        step_position: which element of it.
    """

    param: Tensor
    group_index: int
    state: dict[str, Any]
    master_key: str | None
    steps: Tensor
    step_position: int


@dataclass
class Bucket:
    """The lists of one launch: local tensors (ND), same position for the same parameter.

    Attributes:
        members: positions of the parameters among the plan's entries.
        dense: every tensor but the gradients is row-major.
        regular: the gradients of this step are, too: the kernel may take the lists as they are.
    """

    group_index: int
    device: torch.device
    members: list[int]
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]
    steps: Tensor  # 1D
    step_index: Tensor  # int64, 1D, CPU
    dense: bool
    shadows: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    regular: bool = False


class UpdatePlan:
    """The buckets of a fixed list of entries, refreshed with each step's gradients."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self._buckets: list[Bucket] = []
        self._signature: list[Any] | None = None
        # DTensors' local tensors are replaced by to_empty, .to() and resharding; a plain parameter is its own.
        self._sharded = [e.param for e in self.entries if hasattr(e.param, "_local_tensor")]
        self._sharded_locals: list[Tensor] = []

    def refresh(self, grads: Sequence[Tensor | None]) -> list[Bucket]:
        """The buckets with these gradients in place; a parameter whose gradient is None is in none of them.

        Args:
            grads: one for each entry, plain or DTensor.

        Raises:
            TypeError: a gradient is sparse or of an unsupported dtype.
            ValueError: a gradient's shape, device or placements are not its parameter's.
        """
        signature = [None if grad is None else grad.dtype for grad in grads]
        locals_now = [param._local_tensor for param in self._sharded]  # type: ignore[attr-defined]
        if signature != self._signature or not all(map(is_, locals_now, self._sharded_locals)):
            self._signature = None
            self._check_grads(grads)
            self._buckets = self._build(grads)
            self._signature, self._sharded_locals = signature, locals_now
        for bucket in self._buckets:
            self._place_grads(bucket, grads)
        return self._buckets

    def _place_grads(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> None:
        bucket.grads = [local_tensor(grads[i]) for i in bucket.members]  # type: ignore[arg-type]
        bucket.regular = bucket.dense
        for index, (grad, param) in enumerate(zip(bucket.grads, bucket.params, strict=True)):
            if grad.shape != param.shape or grad.device != param.device:
                self._check_grads(grads)
                _check_match(f"parameter {bucket.members[index]}", param, grad)
            if not grad.is_contiguous():
                bucket.regular = False

    def _check_grads(self, grads: Sequence[Tensor | None]) -> None:
        for index, (entry, grad) in enumerate(zip(self.entries, grads, strict=True)):
            if grad is None:
                continue
            label = f"parameter {index} of shape {tuple(entry.param.shape)}"
            if grad.layout != torch.strided:
                raise TypeError(
                    f"{label} has a gradient with layout {grad.layout}; only dense gradients can be stepped: "
                    "build the module with sparse=False"
                )
            if grad.dtype not in _checks.FLOAT_DTYPES:
                raise TypeError(
                    f"{label} has a gradient of dtype {grad.dtype}; float32, bfloat16 and float16 are supported"
                )
            is_sharded = hasattr(entry.param, "_local_tensor")
            if is_sharded != hasattr(grad, "_local_tensor"):
                raise ValueError(
                    f"{label} is a {type(entry.param).__name__}, its gradient a {type(grad).__name__}; "
                    "both are DTensors or neither is"
                )
            if is_sharded and entry.param.placements != grad.placements:  # type: ignore[attr-defined]
                raise ValueError(
                    f"{label} has placements {entry.param.placements}, "  # type: ignore[attr-defined]
                    f"its gradient {grad.placements}; "  # type: ignore[attr-defined]
                    "redistribute the gradient to the parameter's placements first"
                )
            _check_match(label, entry.param, grad)

    def _build(self, grads: Sequence[Tensor | None]) -> list[Bucket]:
        members: dict[Any, list[int]] = {}
        for index, (entry, grad) in enumerate(zip(self.entries, grads, strict=True)):
            if grad is None:
                continue
            param = entry.param
            master = entry.state[entry.master_key].dtype if entry.master_key else None
            amsgrad = "max_exp_avg_sq" in entry.state
            key = (entry.group_index, param.device, param.dtype, grad.dtype, master, amsgrad, entry.steps.device)
            members.setdefault(key, []).append(index)
        return [self._bucket(indices) for indices in members.values()]

    def _bucket(self, indices: list[int]) -> Bucket:
        entries = [self.entries[i] for i in indices]

        def states(key: str) -> list[Tensor]:
            return [local_tensor(e.state[key]) for e in entries if key in e.state]

        params = [local_tensor(e.param.detach()) if not e.param.is_leaf else local_tensor(e.param) for e in entries]
        lists = {
            "exp_avgs": states("exp_avg"),
            "exp_avg_sqs": states("exp_avg_sq"),
            "max_exp_avg_sqs": states("max_exp_avg_sq"),
            "masters": [local_tensor(e.state[e.master_key]) for e in entries if e.master_key],
        }
        return Bucket(
            group_index=entries[0].group_index,
            device=params[0].device,
            members=indices,
            params=params,
            **lists,
            steps=entries[0].steps,
            step_index=torch.tensor([e.step_position for e in entries], dtype=torch.int64),
            dense=all(t.is_contiguous() for tensors in (params, *lists.values()) for t in tensors),
        )


def _check_match(label: str, param: Tensor, grad: Tensor) -> None:
    if grad.shape != param.shape:
        raise ValueError(
            f"{label}: its gradient has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}; "
            "the parameter was resized or replaced after backward: run backward again"
        )
    if grad.device != param.device:
        raise ValueError(
            f"{label}: its gradient is on {grad.device}, the parameter on {param.device}; "
            "the parameter was moved after backward: move the model before the forward"
        )
