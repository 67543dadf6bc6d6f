"""Steps that a CUDA graph records: what has to be there before, and what must stay where it is for the replays.

A graph holds addresses and numbers. What a recorded step makes, it makes again at each replay; what is replaced after
it, the replays do not see, and write where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import local_tensor
from ..gradients import ATTRIBUTE as FP32_GRADIENT
from ..plan import UpdatePlan
from ..shadow import shadow_of, versions

logger = logging.getLogger("shardops")

# Where a graph can be captured.
DEVICE_TYPES = ("cuda",)
# Numbers among a group's options that a launch is made with; lr may be a tensor.
_NUMBERS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize", "amsgrad")
_GRADIENT = "gradient"


def is_capturing() -> bool:
    """Whether what is launched now is recorded, not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class GraphCapture:
    """What the optimizer offers to those who capture its step."""

    param_groups: list[dict[str, Any]]
    _captured: CapturedStep | None
    _skipped: Tensor | None

    @torch.no_grad()
    def prepare_capture(self) -> None:
        """Makes what a step would make on its way, so that the next one can be captured in a CUDA graph.

        States, counters, shadows, and masters that follow what was written to parameters since the last step. A warm-up
        step does the same, and compiles kernels (Triton's cannot be compiled during a capture); call this after it if
        parameters or states were loaded since.

        Raises:
            RuntimeError: a group is not capturable; states are in host memory; parameters are not on one GPU; the
                capture has begun.
        """
        optimizer: Any = self
        if is_capturing():
            raise RuntimeError("prepare_capture() is called in a capture, which would record it; call it before")
        _check_capturable(optimizer)
        tracker = optimizer._tracker
        if tracker._plan is not None and tracker._plan.is_stale():
            tracker.forget_plan()
        plan = tracker.plan(optimizer, use_device_steps=True)
        _check_devices(plan)
        plan.attach()
        tracker.refresh_masters()
        tracker.record_writes([], may_be_skipped=True)
        optimizer._skip_count()

    def check_captured(self, grads: bool = True) -> None:
        """Raises if a replay of the captured step would not do what a step does now; call it before ``replay()``.

        Looks at the step that was captured last: addresses of parameters, gradients, states, shadows, and the numbers
        that are part of the graph. A look at each tensor, no sync: for when something may have changed, not for each
        replay.

        Args:
            grads: whether gradients must be where they were. False: backward is in the same graph, which has memory of
                its own for them, whatever ``.grad`` is now.

        Raises:
            RuntimeError: no step was captured; something was replaced: the text names it.
        """
        if self._captured is None:
            raise RuntimeError(
                "no step of this optimizer was captured; call check_captured() after optimizer.step() in a CUDA graph"
            )
        found = self._captured.difference(self, grads) or self._captured.other_number(self)
        if found is not None:
            raise RuntimeError(found)


def uses_device_steps(optimizer: Any, may_be_skipped: bool) -> bool:
    """Whether all counters are beside the parameters: for a capture they are, whoever makes the plan."""
    return may_be_skipped or all(group["capturable"] for group in optimizer.param_groups)


# ---- before a captured step ------------------------------------------------------------------------------------------


def check_ready(optimizer: Any) -> None:
    """Raises unless a step that is being captured finds all that it needs made, and the masters in step.

    Raises:
        RuntimeError: the step would make, convert or move something, or cannot be in a graph. Nothing is touched then.
    """
    _check_capturable(optimizer)
    reason = _unprepared(optimizer)
    if reason is not None:
        raise RuntimeError(
            f"optimizer.step() is captured in a CUDA graph and {reason}; the graph would do that again at each replay, "
            "and undo the steps before. Call optimizer.prepare_capture() before the capture, or step once outside of it"
        )
    _check_devices(optimizer._tracker._plan)


def _check_capturable(optimizer: Any) -> None:
    if optimizer._offload is not None:
        raise RuntimeError(
            "offload_state is 'cpu': the step streams states from host memory and waits for earlier steps' copies, "
            "which a CUDA graph cannot hold; keep states on the device (offload_state=None), or step outside of the "
            "capture"
        )
    for index, group in enumerate(optimizer.param_groups):
        if not group["capturable"]:
            raise RuntimeError(
                f"param group {index} has capturable={group['capturable']!r}: its step counters are on the CPU, where "
                "replays do not count; build the optimizer with capturable=True"
            )


def _check_devices(plan: UpdatePlan) -> None:
    devices = dict.fromkeys(entry.param.device for entry in plan.entries)
    if len(devices) > 1 or not all(device.type in DEVICE_TYPES for device in devices):
        raise RuntimeError(
            f"the optimizer has parameters on {', '.join(map(str, devices))}; a CUDA graph records what runs on one "
            "GPU, and its replays do nothing elsewhere: move the others there, or give them an optimizer of their own"
        )


def _unprepared(optimizer: Any) -> str | None:
    tracker = optimizer._tracker
    plan: UpdatePlan | None = tracker._plan
    for label, param in _labelled(optimizer):
        if not param.is_meta and (param.requires_grad or param.grad is not None) and not optimizer.state.get(param):
            return f"{label} has no states yet"
    if plan is None or not tracker._is_current(optimizer, True):
        return "states or parameters were loaded or replaced since the last step"
    if plan.is_stale():
        return "parameters were cast or moved since the last step"
    if not plan.is_attached() or optimizer._skipped is None:
        return "no step was made yet with the parameters as they are"
    for entry, position in tracker._members(None):
        if entry.master_key is not None and _is_written(tracker, entry, position):
            return (
                f"a parameter of shape {tuple(entry.param.shape)} was written or exposed by a state dict since the "
                "last step, which its master weights are yet to follow"
            )
    return None


def _is_written(tracker: Any, entry: Any, position: int) -> bool:
    """Whether ``refresh_masters`` would have to look at numbers, or write."""
    return (
        tracker.versions.get(position) != versions(entry.param)
        or position in tracker._exposed
        or any(counted._version != count for _, counted, count in tracker._aliases.get(position, ()))
    )


# ---- after it --------------------------------------------------------------------------------------------------------


class CapturedStep:
    """What a captured step reads and writes: addresses by name, and numbers. It keeps no tensor alive.

    Args:
        optimizer: whose step was recorded.
        plan: the optimizer's.
        grads: of the plan's entries; None: the parameter was not stepped.
    """

    def __init__(self, optimizer: Any, plan: UpdatePlan, grads: Sequence[Tensor | None]) -> None:
        stepped = {id(entry.param) for entry, grad in zip(plan.entries, grads, strict=True) if grad is not None}
        self._addresses = [
            _addresses(optimizer, param) if id(param) in stepped else None for _, param in _labelled(optimizer)
        ]
        self._numbers = _numbers(optimizer)
        self.is_said = False

    def difference(self, optimizer: Any, grads: bool) -> str | None:
        """The first tensor that is not where it was, with the remedy; None: there is none."""
        params = list(_labelled(optimizer))
        for index, addresses in enumerate(self._addresses):
            if addresses is None:
                continue
            if index >= len(params):
                return f"{len(self._addresses)} parameters were captured, the optimizer has {len(params)}; {_AGAIN}"
            label, param = params[index]
            now = _addresses(optimizer, param)
            for name, address in addresses.items():
                if now.get(name) == address or (name == _GRADIENT and not grads):
                    continue
                how = "is gone" if name not in now else "is another tensor, or has other memory"
                if name == _GRADIENT:
                    return f"{label}: its .grad {how}. The captured step reads the old one; {_KEEP_GRADIENTS}"
                which = "it" if not name else f"its {name}"
                return f"{label}: {which} {how}. Replays of the captured step write the old one; {_AGAIN}"
        return None

    def other_number(self, optimizer: Any) -> str | None:
        """The first option that is not what it was; None: there is none."""
        for where, numbers in _numbers(optimizer).items():
            for name, value in numbers.items():
                before = self._numbers.get(where, {}).get(name)
                if value != before:
                    remedy = (
                        "give lr as a tensor on the GPU and write it in place: replays read that"
                        if name == "lr"
                        else _AGAIN
                    )
                    return f"{where}: {name} is {value}, and was {before} when the step was captured; {remedy}"
        return None


_AGAIN = (
    "capture the step again, after optimizer.prepare_capture(). load_state_dict, casts and moves replace tensors; "
    "load_fp32_state_dict and copy_ write them in place"
)
_KEEP_GRADIENTS = (
    "keep it with zero_grad(set_to_none=False), or capture backward together with the step, which needs no .grad kept: "
    "check_captured(grads=False)"
)


def after_step(optimizer: Any, plan: UpdatePlan, grads: Sequence[Tensor | None], is_captured: bool) -> None:
    """Notes what a captured step used; after another one says, once a capture, that replays would miss something."""
    if is_captured:
        optimizer._captured = CapturedStep(optimizer, plan, grads)
        return
    captured: CapturedStep | None = optimizer._captured
    if captured is None or captured.is_said:
        return
    found = captured.difference(optimizer, grads=False)
    if found is not None:
        captured.is_said = True
        logger.warning("since optimizer.step() was captured in a CUDA graph: %s", found)


def address_of(tensor: Tensor) -> int:
    """Where a local tensor lies."""
    return tensor.data_ptr()


def _addresses(optimizer: Any, param: Tensor) -> dict[str, int]:
    """Of the parameter itself (no name) and all that its step reads and writes."""
    local = local_tensor(param)
    found = {"": address_of(local)}
    grad = param.grad
    if grad is not None:
        found[_GRADIENT] = address_of(getattr(grad, FP32_GRADIENT, local_tensor(grad)))
    shadow = shadow_of(local)
    if shadow is not None:
        found["shadow"] = address_of(shadow.values)
    for name, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and name != "salt":  # a number on the CPU
            found[f"state {name!r}"] = address_of(local_tensor(value))
    return found


def _numbers(optimizer: Any) -> dict[str, dict[str, Any]]:
    """What a launch is made with, beside tensors; a tensor lr as where it lies, unless it is read on the CPU."""
    found: dict[str, dict[str, Any]] = {"the optimizer": {"max_grad_norm": optimizer.max_grad_norm}}
    for index, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = float(lr) if lr.device.type == "cpu" else f"a tensor at {address_of(lr):#x}"
        found[f"param group {index}"] = {"lr": lr, **{name: group[name] for name in _NUMBERS}}
    return found


def _labelled(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """All parameters, with what to call them; names where they were given."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for index, (param, name) in enumerate(zip(group["params"], names, strict=True)):
            called = f"parameter {index} of group {group_index}" if name is None else f"parameter {name!r}"
            yield f"{called} of shape {tuple(param.shape)}", param
