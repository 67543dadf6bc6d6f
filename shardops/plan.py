"""Binds parameters, gradients and states to launches: one bucket for each (group, device, dtypes).

Below here there are local tensors only. Buckets are cached between steps and rebuilt when something that they hold was
replaced: a parameter, a state, a gradient's dtype, or which parameters have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .collectives import NormLayout, local_tensor
from .gradients import local_gradient
from .ops import _checks
from .ops._geometry import geometry_hash
from .shadow import Shadow, shadow_of


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
        rounding: the op's, of a low-precision parameter without a master; else 0.
        dither: the parameter's row of the op's ``dither``; None: nothing of it is dithered.
    """

    param: Tensor
    group_index: int
    state: dict[str, Any]
    master_key: str | None
    steps: Tensor
    step_position: int
    rounding: int = 0
    dither: tuple[int, int, int, int] | None = None


@dataclass
class Bucket:
    """The lists of one launch: local tensors (ND), same position for the same parameter.

    Attributes:
        members: positions of the parameters among the plan's entries.
        regular: every tensor is row-major: the kernel may take the lists as they are.
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
    block_words: list[Tensor] = field(default_factory=list)
    dither: Tensor | None = None  # int64, [len(params), 4], CPU
    rounding: int = 0
    shadows: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    regular: bool = False


class StalePlanError(Exception):
    """The parameters have other dtypes or devices than the plan, and so than their states, was made for."""


class UpdatePlan:
    """The buckets of a fixed list of entries, refreshed with each step's gradients.

    Attributes:
        entries: as given.
        shadows: of the parameters in the buckets, those that have one, with it.

    Args:
        entries: one for each parameter.
        before_build: called before buckets are built for the first time or of new local tensors: integrations attach
            shadows to these.
    """

    def __init__(self, entries: Sequence[Entry], before_build: Callable[[], None] = lambda: None) -> None:
        self.entries = list(entries)
        self.shadows: list[tuple[Tensor, Shadow]] = []
        self._before_build = before_build
        self._is_attached = False  # before_build was called for the local tensors as they are
        self._params = [entry.param for entry in self.entries]
        # DTensors' local tensors are replaced by to_empty, .to() and resharding; a plain parameter is its own.
        self._is_sharded = any(hasattr(param, "_local_tensor") for param in self._params)
        self._locals = list(map(local_tensor, self._params))
        self._formats = _formats(self._params)
        self._buckets: list[Bucket] = []
        self._norm_layout: NormLayout | None = None
        self._local_grads: Sequence[Tensor | None] = []
        # What the buckets were built for; see _is_as_built.
        self._built_for: tuple[list[bool], list[Any], int | None] | None = None

    def is_stale(self) -> bool:
        """Whether ``module.to()`` cast or moved parameters since; it keeps the parameter objects."""
        return _formats(self._params) != self._formats

    def is_attached(self) -> bool:
        """Whether integrations have looked at the parameters as they are, so that a refresh makes no tensors."""
        return self._is_attached and all(map(is_, map(local_tensor, self._params), self._locals))

    def attach(self) -> None:
        """Has integrations look at the parameters now, as the next refresh would."""
        if not self.is_attached():
            self._built_for, self._is_attached = None, False
            self._before_build()
            self._locals, self._is_attached = list(map(local_tensor, self._params)), True

    def refresh(self, grads: Sequence[Tensor | None]) -> list[Bucket]:
        """The buckets with these gradients in place; a parameter whose gradient is None is in none of them.

        Args:
            grads: one for each entry, plain or DTensor.

        Raises:
            StalePlanError: parameters were cast or moved; make a plan with states to match.
            TypeError: a gradient is sparse or of an unsupported dtype.
            ValueError: a gradient's shape, device or placements are not its parameter's.
        """
        params = list(map(local_tensor, self._params)) if self._is_sharded else self._params
        local_grads = list(map(_local_or_none, grads)) if self._is_sharded else grads
        # Loops in C where they can be: each step of a model of small tensors goes through here.
        missing = list(map(is_, grads, repeat(None)))
        present = [grad for grad in local_grads if grad is not None] if True in missing else local_grads
        built_for = (
            missing,
            [getattr(grad, "placements", None) for grad in grads] if self._is_sharded else [],
            geometry_hash([*params, *present]),  # type: ignore[list-item]
        )
        if built_for != self._built_for or built_for[2] is None or not all(map(is_, params, self._locals)):
            # The first time, after a failure, or on new local tensors; not if only other parameters have gradients.
            is_attached = self._is_attached and all(map(is_, params, self._locals))
            self._built_for, self._is_attached = None, False
            if self.is_stale():
                raise StalePlanError
            self._check_grads(grads)
            if not is_attached:
                self._before_build()
            self._locals, self._is_attached = params, True
            self._buckets = self._build(grads, local_grads)
            self._norm_layout = None
            self._built_for = built_for
        self._local_grads = local_grads
        for bucket in self._buckets:
            # All of them, in order, or some.
            is_whole = len(bucket.members) == len(local_grads)
            bucket.grads = list(local_grads) if is_whole else [local_grads[i] for i in bucket.members]  # type: ignore[arg-type, misc]
        return self._buckets

    def gradients(self) -> list[Tensor | None]:
        """The ``.grad`` of each entry's parameter."""
        return [param.grad for param in self._params]

    def updated(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The parameters that the step of the last refresh, with these gradients, writes."""
        assert self._built_for is not None
        if True not in self._built_for[0]:
            return self._params
        return [param for param, grad in zip(self._params, grads, strict=True) if grad is not None]

    def release_grads(self) -> None:
        """Lets go of the gradients of the last refresh: whoever clears them after the step wants their memory back."""
        self._local_grads = []
        for bucket in self._buckets:
            bucket.grads = []

    def grad_norm(
        self,
        settings: tuple[Any, ...],
        make_layout: Callable[[Sequence[Tensor], tuple[Any, ...]], NormLayout],
        backend: str | None,
    ) -> Tensor:
        """The global 2-norm of the gradients of the last refresh.

        Args:
            settings: what the layout depends on beside the parameters; other ones make a new layout.
            make_layout: of the parameters and these settings.
            backend: of the local sums.
        """
        if self._norm_layout is None or self._norm_layout.settings != settings:
            self._norm_layout = make_layout(self._params, settings)
        are_checked = all(bucket.regular for bucket in self._buckets)
        return self._norm_layout.norm(self._local_grads, are_checked=are_checked, backend=backend)

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

    def _build(self, grads: Sequence[Tensor | None], local_grads: Sequence[Tensor | None]) -> list[Bucket]:
        members: dict[Any, list[int]] = {}
        self.shadows = []
        seen: dict[int, int] = {}  # a parameter listed twice is stepped twice, as in torch: one launch after another
        for index, (entry, grad) in enumerate(zip(self.entries, grads, strict=True)):
            if grad is None:
                continue
            param = entry.param
            master = entry.state[entry.master_key].dtype if entry.master_key else None
            moments = [entry.state[key].dtype for key in _moment_keys(entry)]
            storage = (*moments, "max_exp_avg_sq" in entry.state, entry.rounding, entry.dither is None)
            seen[id(param)] = occurrence = seen.get(id(param), -1) + 1
            shadow = shadow_of(self._locals[index])
            if shadow is not None:
                self.shadows.append((param, shadow))
            grad_dtype = local_grads[index].dtype  # type: ignore[union-attr]
            dtypes = (param.dtype, grad_dtype, master, shadow and shadow.values.dtype)
            key = (entry.group_index, occurrence, param.device, *dtypes, *storage, entry.steps.device)
            members.setdefault(key, []).append(index)
        return [self._bucket(indices, local_grads) for indices in members.values()]

    def _bucket(self, indices: list[int], local_grads: Sequence[Tensor | None]) -> Bucket:
        entries = [self.entries[i] for i in indices]

        def states(key: str) -> list[Tensor]:
            return [local_tensor(entry.state[key]) for entry in entries if key in entry.state]

        exp_avg, exp_avg_sq = _moment_keys(entries[0])
        dither = [entry.dither for entry in entries if entry.dither is not None]
        bucket = Bucket(
            group_index=entries[0].group_index,
            device=entries[0].param.device,
            members=indices,
            params=[self._locals[i] for i in indices],
            exp_avgs=states(exp_avg),
            exp_avg_sqs=states(exp_avg_sq),
            max_exp_avg_sqs=states("max_exp_avg_sq"),
            masters=[local_tensor(entry.state[entry.master_key]) for entry in entries if entry.master_key],
            steps=entries[0].steps,
            step_index=torch.tensor([entry.step_position for entry in entries], dtype=torch.int64),
            block_words=states("block_words"),
            dither=torch.tensor(dither, dtype=torch.int64) if dither else None,
            rounding=entries[0].rounding,
            shadows=[shadow.values for i in indices if (shadow := shadow_of(self._locals[i])) is not None],
        )
        lists = (bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.masters)
        grads = [local_grads[i] for i in indices]
        bucket.regular = all(tensor.is_contiguous() for tensors in (*lists, grads) for tensor in tensors)  # type: ignore[union-attr]
        return bucket


def _moment_keys(entry: Entry) -> tuple[str, str]:
    """The state's keys of what the op takes as exp_avgs and exp_avg_sqs."""
    return ("exp_avg_codes", "exp_avg_sq_codes") if "exp_avg_codes" in entry.state else ("exp_avg", "exp_avg_sq")


def _formats(params: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device]]:
    return [(param.dtype, param.device) for param in params]


def _local_or_none(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else local_gradient(grad)


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
