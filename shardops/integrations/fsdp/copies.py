"""FSDP2's two copies between tensors and flat buffers, done by the fused kernels: ``fsdp::chunk_cat`` before a
reduce-scatter and ``fsdp::split_with_sizes_copy`` after an all-gather.

Both are ``flatten_shard(layout="per_param")``, there and back, and give stock's bits. Opt-in, process-wide, restorable.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import _checks, _geometry, _library, _registry
from ...ops.flatten_shard import buffer_layout
from .overrides import override

_OPS = ("chunk_cat", "split_with_sizes_copy")
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
# A model has as many as it has different FSDP groups, times the dtypes; each holds 32 bytes a tensor and rank.
_PLANS = 256

# Segments of the copy, and whether a tensor has to be made row-major first. None: stock's call to make.
_Plan = tuple[Tensor, bool] | None

# Overrides live until removed, whether or not the caller keeps what use_fused_copies returned.
_live: list[FusedCopies] = []


def _is_refused(written: Sequence[Tensor]) -> bool:
    """Whether torch would not write these in place: stock then raises, and says why."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in written):
        return True
    # map: at a hundred tensors a generator's frames would cost as much as the copy.
    return not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, written))


def _are_plain(tensors: Sequence[Tensor], like: Tensor) -> bool:
    """Whether all have elements, ``like``'s device, and one dtype of those that the kernels copy."""
    return all(
        tensor.device == like.device
        and tensor.dtype == tensors[0].dtype
        and tensor.dtype in _checks.FLOAT_DTYPES
        and tensor.dim() > 0
        and tensor.numel() > 0
        for tensor in tensors
    )


def _plan_chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> _Plan:
    # Stock crashes on scalars and empty tensors, and resizes an out of another shape: all that stays as it is.
    if num_chunks < 1 or not _are_plain(tensors, out) or not _are_plain([out], out):
        return None
    layout, segments = buffer_layout([tensor.shape for tensor in tensors], num_chunks, None, "per_param", 1)
    if out.shape != layout.shape or not out.is_contiguous():
        return None
    return segments, not all(tensor.is_contiguous() for tensor in tensors)


def _plan_split(buffer: Tensor, split_sizes: Sequence[int], out: Sequence[Tensor]) -> _Plan:
    if not _are_plain([buffer, *out], buffer):
        return None
    rows = buffer.shape[0]
    if [tuple(tensor.shape) for tensor in out] != [(rows, size) for size in split_sizes]:
        return None
    # Each row of an output is one rank's chunk of it.
    layout, segments = buffer_layout([tensor.shape for tensor in out], rows, None, "per_param", 1)
    if buffer.shape != layout.shape or not all(tensor.is_contiguous() for tensor in (buffer, *out)):
        return None
    return segments, False


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if key not in memory and len(memory) >= _PLANS:
        del memory[next(iter(memory))]
    memory[key] = value


class _DeviceCopies:
    """The two ops on one type of device: which backend runs them, and how each list of tensors is to be copied."""

    def __init__(self, device_type: str, backend: str, stock: Any, calls: Counter[tuple[str, str]]) -> None:
        self._flatten = _registry.resolve("flatten_shard", device_type, backend)
        self._unflatten = _registry.resolve("unflatten_shard", device_type, backend)
        # On a CPU the host's time is the copy's; on a GPU it passes while earlier kernels run.
        self._copy_as_planned = None
        if (device_type, backend) == ("cpu", "cpp"):
            self._copy_as_planned = torch.ops.shardops.copy_as_planned.default
        self._stock = stock
        self._calls = calls
        self._plans: dict[Any, _Plan] = {}
        # hint (count and sizes, cheap to look at) -> geometry and segments of the last such list, mostly also the next.
        self._last: dict[Any, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()  # of changes to these: autograd has a thread for each GPU

    def _is_copied(self, hint: Any, buffer: Tensor, tensors: list[Tensor], into_buffer: bool) -> bool:
        """Copies if the tensors are those that the hint promises; whether it did."""
        last = self._last.get(hint)
        if last is None or self._copy_as_planned is None:
            return False
        geometry, segments = last
        copied: bool = self._copy_as_planned(buffer, tensors, segments, geometry, into_buffer)
        return copied

    def _plan(self, hint: Any, tensors: list[Tensor], make: Callable[[], _Plan]) -> _Plan:
        """How to copy tensors of this geometry, remembered; ``hint`` holds whatever else the plan depends on."""
        geometry = _geometry_of(tensors)
        try:
            plan = self._plans[hint, geometry]
        except KeyError:
            plan = make()
        with self._lock:
            _remember(self._plans, (hint, geometry), plan)
            if plan is not None and not plan[1]:
                _remember(self._last, hint, (geometry, plan[0]))
        return plan

    def chunk_cat(self, tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
        """Each tensor padded to ``num_chunks`` equal parts of dim 0; row i of ``out``: part i of all, cast."""
        plan, is_copied = None, False
        if dim == 0 and not _is_refused([out]):
            hint = "chunk_cat", num_chunks, len(tensors), out.shape
            is_copied = self._is_copied(hint, out, tensors, True)
            if not is_copied:
                plan = self._plan(hint, [out, *tensors], lambda: _plan_chunk_cat(tensors, num_chunks, out))
        if plan is not None:
            segments, is_strided = plan
            self._flatten(out, [tensor.contiguous() for tensor in tensors] if is_strided else tensors, segments, None)
        elif not is_copied:
            self._calls["chunk_cat", "stock"] += 1
            self._stock.chunk_cat(tensors, dim, num_chunks, out=out)
            return
        self._calls["chunk_cat", "fused"] += 1
        _library.mark_written([out])  # as stock's op does

    def split_with_sizes_copy(
        self, all_gather_output: Tensor, all_gather_input_split_sizes: list[int], dim: int = 0, *, out: list[Tensor]
    ) -> None:
        """The inverse: columns of ``[ranks, numel]``, split, into one ``[ranks, size]`` each."""
        buffer, sizes = all_gather_output, all_gather_input_split_sizes
        plan, is_copied = None, False
        if dim == 1 and not _is_refused(out):
            hint = "split", tuple(sizes)
            is_copied = self._is_copied(hint, buffer, out, False)
            if not is_copied:
                plan = self._plan(hint, [buffer, *out], lambda: _plan_split(buffer, sizes, out))
        if plan is not None:
            self._unflatten(buffer, out, plan[0], None)
        elif not is_copied:
            self._calls["split_with_sizes_copy", "stock"] += 1
            self._stock.split_with_sizes_copy(buffer, sizes, dim, out=out)
            return
        self._calls["split_with_sizes_copy", "fused"] += 1
        _library.mark_written(out)


def _geometry_of(tensors: list[Tensor]) -> Any:
    """What a plan depends on: the op library's hash where it is built, since Python's takes as long as small copies.

    The kernels check every range of a plan against the tensors at hand.
    """
    value = _geometry.geometry_hash(tensors)
    if value is not None:
        return value
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)


class FusedCopies:
    """An override made by :func:`use_fused_copies`; printed, it says what it replaces where, and how often it ran.

    Attributes:
        backends: device type -> backend that runs both ops there.
        left_to_stock: device type -> why its ops were not replaced.
        calls: ``(op, "fused" or "stock") -> number of calls``; stock's own code gets what the kernels do not cover.
    """

    def __init__(self, backend: str | None) -> None:
        self.backends: dict[str, str] = {}
        self.left_to_stock: dict[str, str] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        for device_type in _DISPATCH_KEYS:
            chosen, reason = _choose(device_type, backend)
            if chosen is None:
                self.left_to_stock[device_type] = reason
            else:
                self.backends[device_type] = chosen
        if not self.backends:
            reasons = "; ".join(f"{device}: {reason}" for device, reason in self.left_to_stock.items())
            raise RuntimeError(f"backend is {backend!r} and no device has fused copies: {reasons}")
        # Defines the ops that are overridden. Not at the top: a long import, which nobody else needs.
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

        copies = {device: _DeviceCopies(device, chosen, stock, self.calls) for device, chosen in self.backends.items()}
        self._library = override(
            {(op, _DISPATCH_KEYS[device]): getattr(of, op) for device, of in copies.items() for op in _OPS}
        )
        _live.append(self)

    def remove(self) -> None:
        """Takes this override back; does nothing the second time. Whatever was in force before it is again.

        The dispatcher keeps a pile of kernels for each op and device: removing one uncovers the one below, and
        overrides may be removed in any order.
        """
        if self._library is not None:
            self._library._destroy()
            self._library = None
            _live.remove(self)

    def __enter__(self) -> FusedCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        lines = ["fused copies" if self._library is not None else "fused copies, removed"]
        for op in _OPS:
            where = ", ".join(f"{device} ({backend})" for device, backend in self.backends.items())
            fused, stock = (self.calls[op, kind] for kind in ("fused", "stock"))
            lines.append(f"  fsdp::{op}: on {where}; {fused} calls fused, {stock} left to stock")
        lines += [f"  stock on {device}: {reason}" for device, reason in self.left_to_stock.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _choose(device_type: str, backend: str | None) -> tuple[str | None, str]:
    """The backend for a device type, or None and why stock's ops stay there."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return None, "no GPU is available"
    if backend is None and not os.environ.get("SHARDOPS_BACKEND"):
        chosen = _registry.default_backend(device_type)
        if chosen != "reference":
            return chosen, ""
        reasons = [_registry.unavailable_reason(name, device_type) for name in ("cpp", "triton")]
        return None, f"only the reference could run, which is slower than stock: {' / '.join(filter(None, reasons))}"
    chosen = backend or _registry.default_backend(device_type)
    _registry.check_backend(chosen)
    reason = _registry.unavailable_reason(chosen, device_type)
    return (chosen, "") if reason is None else (None, reason)


def use_fused_copies(*, backend: str | None = None) -> FusedCopies:
    """Lets shardops' kernels do FSDP2's copies around its collectives, in the whole process, until removed.

    ``fsdp::chunk_cat`` lays the gradients of a group out by rank (and casts them to the reduce dtype),
    ``fsdp::split_with_sizes_copy`` writes gathered parameters back. Results have stock's bits (any NaN is a NaN: which
    one a cast makes differs between the CPUs that torch runs on), and version counters move alike. Calls that the
    kernels do not cover (another dim, uint8 or float64, empty tensors, an ``out`` to be resized) reach stock's code.
    On a GPU the kernels are Triton's; their speed beside stock's was not measured.

        with shardops.fsdp.use_fused_copies():
            train()

    Args:
        backend: None takes the best one for each device, and leaves a device to stock where that would be the
            reference; a name never falls back.

    Returns:
        The override. It works until its ``remove()``, or the end of its ``with`` block; of several the newest works,
        and stock's kernels are back when the last one is gone.

    Raises:
        ValueError: backend is not one.
        RuntimeError: it runs on none of this machine's devices.
    """
    return FusedCopies(backend)
