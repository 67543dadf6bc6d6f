"""Triton's interpreter, repaired and watched: what the tests of the Triton kernels stand on where there is no GPU.

Importing this module repairs the interpreter for the process; ``TRITON_INTERPRET=1`` must be set. The stock one
truncates float32 to bfloat16, computes bfloat16 as integers, keeps a Python float in float64, gives zeros for masked
lanes without ``other`` and never looks at an address. :class:`Watch` checks every access of the kernels inside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.runtime.jit import _normalize_ty

_watch: Watch | None = None


class AccessError(AssertionError):
    """A kernel did what a GPU punishes: it left its tensors, raced with another program, or lied about alignment."""


# ---- repairs ---------------------------------------------------------------------------------------------------------


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == tl.bfloat16 and target == tl.bfloat16:
        return src
    if source == tl.bfloat16:
        wide = stock.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return wide if target == tl.float32 else _cast(self, wide, dst_type)
    if target == tl.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(src.data, dtype=np.float32))
        if source == tl.float64:
            raise NotImplementedError("float64 -> bfloat16 rounds once on a GPU; cast to float32 in the kernel")
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return stock.TensorHandle(bits.reshape(src.data.shape), target)
    return stock.TensorHandle(src.data.astype(stock._get_np_dtype(dst_type)), target)


def _cast_rounding(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
    if rounding not in (None, stock._ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError(f"rounding mode {rounding}; round to nearest even is repaired, no other")
    return _cast(self, src, dst_type)


_stock_binary = stock.InterpreterBuilder.binary_op


def _binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
        raise NotImplementedError("bfloat16 arithmetic is that of its bits here; cast to float32 in the kernel")
    result = _stock_binary(self, lhs, rhs, op)
    if result.data.dtype == np.bool_:  # a comparison; the stock one gives it the type of what it compared
        result.dtype = tl.int1
    return result


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if z.data.dtype != np.float32:
        raise NotImplementedError(f"fma of {z.data.dtype}; float32 is repaired, no other")
    # The product is exact in float64. Its sum is rounded to odd there, so that rounding it to float32 is right.
    product, addend = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
    total = product + addend
    added = total - product
    error = (product - (total - added)) + (addend - added)
    is_even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    exact = np.where(is_even & (error != 0) & np.isfinite(total), odd, total)
    return stock.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


_stock_masked_load = stock.InterpreterBuilder.create_masked_load


def _masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    if other is None:  # anything, on a GPU: all bits set, which is NaN or -1
        dtype = stock._get_np_dtype(ptrs.get_element_ty())
        poison = np.frombuffer(b"\xff" * dtype.itemsize, dtype=np.uint8 if dtype == np.bool_ else dtype)[0]
        other = stock.TensorHandle(np.full(ptrs.data.shape, poison, dtype), ptrs.get_element_ty())
    return _stock_masked_load(self, ptrs, mask, other, *args, **kwargs)


def _argument(name: str, value: Any, annotation: Any) -> Any:
    """A Python number as a compiled kernel receives it: float32 unless annotated otherwise."""
    if not isinstance(value, float):
        return value
    kind = "fp32" if annotation is inspect.Parameter.empty else _normalize_ty(annotation)
    if kind == "constexpr":
        return value
    dtype, np_dtype = {"fp32": (tl.float32, np.float32), "fp64": (tl.float64, np.float64)}[kind]
    return tl.tensor(stock.TensorHandle(np.array([value], np_dtype), dtype), dtype)


class _Executor(stock.GridExecutor):  # type: ignore[misc]
    """A launch: arguments typed as a compiled kernel's, and the watch told."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        parameters = inspect.signature(self.fn).parameters
        given = dict(zip(parameters, args, strict=False)) | {k: v for k, v in kwargs.items() if k in parameters}
        given = {name: _argument(name, value, parameters[name].annotation) for name, value in given.items()}
        if _watch is not None:
            _watch._launch(self.fn.__name__, [value for value in given.values() if isinstance(value, Tensor)])
        _patched.clear()
        _patched.add(self.fn.__module__)
        with np.errstate(all="ignore"):
            super().__call__(**given)


# Modules whose view of triton.language has been patched for this launch.
_patched: set[str] = set()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A jitted function called by a kernel. The stock one patches the language again at each call: most of the time."""
    if self.fn.__module__ not in _patched:
        _patched.add(self.fn.__module__)
        stock._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


_stock_grid_idx = stock.InterpreterBuilder.set_grid_idx


def _grid_idx(self: Any, x: int, y: int, z: int) -> None:
    _stock_grid_idx(self, x if _watch is None else _watch._program(x, self.grid_dim[0]), y, z)


class _Memory:
    """The interpreter's load and store, with each address shown to the watch first."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if _watch is not None:
            _watch._access(pointers, mask, np.dtype(dtype).itemsize, False)
        return self._inner.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        if _watch is not None:
            _watch._access(pointers, mask, values.dtype.itemsize, True)
        return self._inner.store(pointers, values, mask)


_stock_set_attr = stock.TensorHandle.set_attr


def _set_attr(self: Any, key: str, value: Any) -> None:
    if key == "tt.divisibility" and (self.data % self.data.dtype.type(np.ravel(value)[0])).any():
        raise AccessError(f"multiple_of claims {np.ravel(value)[0]} for {int(self.data.ravel()[0]):#x}")
    _stock_set_attr(self, key, value)


def _repair() -> None:
    builder = stock.InterpreterBuilder
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _cast_rounding
    builder.binary_op = _binary
    builder.create_fma = _fma
    builder.create_masked_load = _masked_load
    builder.set_grid_idx = _grid_idx
    stock.TensorHandle.set_attr = _set_attr
    stock.GridExecutor = _Executor
    stock.InterpretedFunction.__call__ = _call
    stock._interpreter = _Memory(stock._interpreter)
    # Overflow checks of integers, which a GPU has not, take a third of the time.
    stock.interpreter_builder.options = stock.InterpreterOptions(sanitize_overflow=False)


_repair()


# ---- the watch -------------------------------------------------------------------------------------------------------


class _Region:
    """One tensor, with the program that stored each element and the one that loaded it in the current launch."""

    def __init__(self, tensor: Tensor, writable: bool, counted: bool) -> None:
        self.itemsize = tensor.element_size()
        self.start = tensor.data_ptr()
        self.end = self.start + tensor.numel() * self.itemsize
        self.writable = writable
        self.counted = counted
        self.storer = np.full(tensor.numel(), -1, np.int32)
        self.loader = np.full(tensor.numel(), -1, np.int32)  # -2: several programs


class Watch:
    """Checks and counts the accesses of kernels launched inside.

    An access must lie in a tensor named here or given to the kernel as an argument, be aligned, and store only where
    allowed. No byte may be stored by one program of a launch and stored or loaded by another.

    Args:
        reads: dense tensors that kernels may read.
        writes: dense tensors that kernels may read and write.
        seed: runs the programs of each launch in a random order; None: in order.

    Attributes:
        loaded, stored: bytes of the tensors named here.
        launches: names of the kernels launched.
        order: programs of the last launch, as they ran.
    """

    def __init__(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), *, seed: int | None = None) -> None:
        self.loaded = self.stored = 0
        self.launches: list[str] = []
        self._random = None if seed is None else np.random.default_rng(seed)
        self.order: list[int] = []
        self._tensors = [*((t, False) for t in reads), *((t, True) for t in writes)]
        self._regions: list[_Region] = []

    def __enter__(self) -> Watch:
        global _watch
        assert _watch is None, "watches do not nest"
        _watch = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _watch
        _watch = None

    def _launch(self, name: str, arguments: Sequence[Tensor]) -> None:
        self.launches.append(name)
        self.order = []
        self._permutation: Any = None
        named = [_Region(tensor, writable, True) for tensor, writable in self._tensors if tensor.numel()]
        inside = [any(r.start <= t.data_ptr() < r.end for r in named) for t in arguments]
        extra = {t.data_ptr(): t for t, known in zip(arguments, inside, strict=True) if t.numel() and not known}
        self._regions = sorted([*named, *(_Region(t, True, False) for t in extra.values())], key=lambda r: r.start)
        for lower, upper in zip(self._regions, self._regions[1:], strict=False):
            assert lower.end <= upper.start, "tensors of a watch overlap; name each byte once"
        self._starts = np.array([region.start for region in self._regions], np.int64)

    def _program(self, x: int, count: int) -> int:
        if self._random is not None:
            self._permutation = self._random.permutation(count) if self._permutation is None else self._permutation
            x = int(self._permutation[x])
        self._current = x
        self.order.append(x)
        return x

    def _access(self, pointers: Any, mask: Any, itemsize: int, is_store: bool) -> None:
        what = f"{'store' if is_store else 'load'} of program {self._current} of {self.launches[-1]}"
        addresses = np.broadcast_to(pointers, mask.shape)[mask].astype(np.int64)
        if not addresses.size:
            return
        owners = np.searchsorted(self._starts, addresses, "right") - 1
        for owner in np.unique(owners):
            region = self._regions[owner]
            own = addresses if len(owners) == 1 else addresses[owners == owner]
            if owner < 0 or int(own.max()) >= region.end:
                raise AccessError(f"out of bounds: {what} at {int(own.max()):#x}")
            elements, beside = np.divmod(own - region.start, region.itemsize)
            if beside.any() or itemsize != region.itemsize:
                raise AccessError(f"misaligned: {what}, {itemsize} bytes among elements of {region.itemsize}")
            self._access_region(region, elements, is_store, what)

    def _access_region(self, region: _Region, elements: Any, is_store: bool, what: str) -> None:
        def foreign(programs: Any) -> bool:
            return bool(((programs != -1) & (programs != self._current)).any())

        if foreign(region.storer[elements]):
            raise AccessError(f"race: {what} where another program stores")
        if is_store:
            if not region.writable:
                raise AccessError(f"read-only: {what}")
            if foreign(region.loader[elements]):
                raise AccessError(f"race: {what} where another program loads")
            if len(np.unique(elements)) != len(elements):
                raise AccessError(f"race: {what} stores twice to one address")
            region.storer[elements] = self._current
        else:
            known = region.loader[elements]
            region.loader[elements] = np.where((known == -1) | (known == self._current), self._current, -2)
        if region.counted:
            if is_store:
                self.stored += elements.size * region.itemsize
            else:
                self.loaded += elements.size * region.itemsize


def assert_same(actual: Tensor, expected: Tensor, *, exact: bool = False) -> None:
    """Asserts equal bits; any NaN equals any NaN, unless ``exact``."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.contiguous().view(kind) == expected.contiguous().view(kind)
    if not exact:
        same |= actual.isnan() & expected.isnan()
    if not same.all():
        first = int((~same).ravel().nonzero()[0])
        pair = actual.ravel()[first].item(), expected.ravel()[first].item()
        raise AssertionError(
            f"{int((~same).sum())} of {same.numel()} differ; element {first}: {pair[0]!r}, not {pair[1]!r}"
        )


def float_values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits with every kind of number: normal, denormal, infinite, NaN with payloads, ties of a narrower type."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    bits = torch.randint(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1), (numel,), generator=generator)
    if dtype == torch.float32:
        ends = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0xFFFF])  # around ties of bf16 and fp16
        bits[::2] = (bits[::2] & ~0xFFFF) | ends[torch.randint(0, 8, bits[::2].shape, generator=generator)]
        exponent = torch.randint(95, 145, bits[::3].shape, generator=generator)  # what fp16 can hold, and a little more
        bits[::3] = (bits[::3] & ~0x7F800000) | exponent << 23
        special = [0x7F800001, -1, 0x7FC12345, 0x7F800000, -0x800000, -(2**31), 0x7F7FFFFF, 1, 0x477FEFFF, 0x477FF000]
        bits[: min(numel, len(special))] = torch.tensor(special[:numel])
    return bits.to(kind).view(dtype)
