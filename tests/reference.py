"""What the tests of the primitives compare with and feed in.

A float64 oracle of Adam, comparisons bit for bit, awkward values, awkward views. No arithmetic of shardops is used.
"""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from shardops import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; the second lacks a name before Python 3.13
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# ---- comparisons -----------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, as integers of the same size."""
    return tensor.detach().contiguous().view(_INT_OF_SIZE[tensor.dtype.itemsize])


def differing(a: Tensor, b: Tensor, *, exact: bool = False) -> Tensor:
    """Where the bits differ; unless ``exact``, any NaN equals any NaN."""
    different = bits(a) != bits(b)
    return different if exact else different & ~(a.isnan() & b.isnan())


def bits_equal(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Same dtype, shape and bits; unless ``exact``, any NaN equals any NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and not bool(differing(a, b, exact=exact).any())


def assert_bits_equal(actual: Tensor, expected: Tensor, label: str = "result", *, exact: bool = False) -> None:
    """As :func:`bits_equal`, with a message that names the first difference."""
    assert actual.dtype == expected.dtype, f"{label}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{label}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    where = differing(actual, expected, exact=exact).reshape(-1).nonzero()
    if not where.numel():
        return
    first = int(where[0])
    mask = (1 << (8 * actual.dtype.itemsize)) - 1
    pair = [(t.reshape(-1)[first].item(), hex(bits(t).reshape(-1)[first].item() & mask)) for t in (actual, expected)]
    raise AssertionError(
        f"{label}: {where.numel()} of {actual.numel()} elements differ; the first, {first}: {pair[0]} is not {pair[1]}"
    )


def ulps(a: float, b: float) -> int:
    """How many float32 values apart two finite, non-negative numbers are, after rounding to float32."""
    patterns = [int(torch.tensor(x, dtype=torch.float64).float().view(torch.int32)) for x in (a, b)]
    return abs(patterns[0] - patterns[1])


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


# ---- values ----------------------------------------------------------------------------------------------------------

# fp32 patterns where conversions go wrong: zeros, denormals, ties and limits of bf16 and fp16, infinities, NaNs.
SPECIAL_PATTERNS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00008000, 0x00018000, 0x00008001),
    *(0x3F800000, 0xBF800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3F801000, 0x3F803000, 0x3F801001),
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x33800000, 0x33000000, 0x33000001, 0x387FC000, 0x38800000),
    *(0x387FE000, 0x387FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000),
    *(0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7F808000, 0xFF800001),
)


def signed32(patterns: Tensor) -> Tensor:
    """int64 patterns in [0, 2^32) -> int32 with the same bits."""
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).int()


def from_patterns(patterns: Sequence[int] | Tensor) -> Tensor:
    """fp32 values of unsigned 32-bit patterns."""
    return signed32(torch.as_tensor(patterns, dtype=torch.int64)).view(torch.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awkward(numel: int, seed: int, dtype: torch.dtype = torch.float32, *, finite: bool = False) -> Tensor:
    """Random bit patterns (every exponent alike, so denormal and huge ones, infinities, NaNs) among special ones.

    finite: infinities and NaNs become 1.
    """
    rng = generator(seed)
    if dtype == torch.float32:
        values = from_patterns(torch.randint(1 << 32, (numel,), generator=rng, dtype=torch.int64))
    else:
        values = torch.randint(-(1 << 15), 1 << 15, (numel,), generator=rng).to(torch.int16).view(dtype)
    special = from_patterns(SPECIAL_PATTERNS)[torch.randint(len(SPECIAL_PATTERNS), (numel,), generator=rng)]
    values = torch.where(torch.rand(numel, generator=rng) < 0.25, special.to(dtype), values)
    return torch.where(values.isfinite(), values, 1.0).to(dtype) if finite else values


def ordinary(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=generator(seed)) * scale).to(dtype)


# ---- views -----------------------------------------------------------------------------------------------------------


def unaligned(tensor: Tensor, offset: int = 1) -> Tensor:
    """An equal tensor that starts ``offset`` elements into a storage, with guard elements on both sides."""
    storage = torch.full((offset + tensor.numel() + 3,), 77.0, dtype=tensor.dtype)
    view = storage[offset : offset + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """An equal 1D or 2D tensor whose elements lie two apart in memory."""
    storage = torch.full((*tensor.shape, 2), 77.0, dtype=tensor.dtype)
    return storage[..., 0].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """An equal tensor with its last two dimensions swapped in memory: dense, not row-major."""
    return tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.channels_last)


def clone_storage(tensor: Tensor) -> Tensor:
    """A copy with the same strides and offset in a copy of the whole storage, guard elements included."""
    storage = tensor.detach().untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def whole_storage(tensor: Tensor) -> Tensor:
    """Everything in a tensor's storage, 1D: what a stray write would change."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


# ---- Adam ------------------------------------------------------------------------------------------------------------


@dataclass
class AdamLists:
    """The tensors of one call of ``ops.sharded_adam``."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    shadows: list[Tensor] = field(default_factory=list)
    block_words: list[Tensor] = field(default_factory=list)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for item in fields(self):
            value = getattr(self, item.name)
            for index, tensor in enumerate([value] if isinstance(value, Tensor) else value):
                yield f"{item.name}[{index}]", tensor

    def clone(self) -> AdamLists:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return AdamLists(
            **{
                k: clone_storage(v) if isinstance(v, Tensor) else [clone_storage(t) for t in v]
                for k, v in values.items()
            }
        )

    def mapped(self, function: Any) -> AdamLists:
        """Every tensor but ``steps`` replaced by ``function(tensor)``."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "steps"}
        return AdamLists(**{k: [function(t) for t in v] for k, v in values.items()}, steps=self.steps.clone())

    def update(self, backend: str | None = None, **options: Any) -> AdamLists:
        ops.sharded_adam(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            max_exp_avg_sqs=self.max_exp_avg_sqs,
            masters=self.masters,
            shadows=self.shadows,
            block_words=self.block_words,
            backend=backend,
            **options,
        )
        return self

    def assert_same(self, other: AdamLists, label: str = "") -> None:
        """Bit for bit, over the whole storages: also where nothing should have been written."""
        remainders = bool(self.masters) and self.masters[0].dtype == torch.bfloat16
        for (name, mine), (_, theirs) in zip(self.named(), other.named(), strict=True):
            exact = remainders and name.startswith("masters")  # integers, whose patterns may look like NaN
            assert mine.stride() == theirs.stride()
            assert_bits_equal(whole_storage(mine), whole_storage(theirs), f"{label}{name}", exact=exact)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> bf16 rounded with ties away from zero, and the 16-bit remainder typed bf16; NaNs keep their pattern."""
    pattern = values.contiguous().view(torch.int32)
    high = (pattern >> 16) + ((pattern >> 15) & 1)
    # The remainder is pattern - (high << 16): its low 16 bits are the pattern's.
    return high.to(torch.int16).view(torch.bfloat16), pattern.to(torch.int16).view(torch.bfloat16)


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that :func:`split` took apart."""
    pattern = (high.contiguous().view(torch.int16).long() << 16) + remainder.contiguous().view(torch.int16).long()
    return pattern.int().view(torch.float32)


def adam_lists(
    shapes: Sequence[Sequence[int]],
    seed: int,
    *,
    param_dtype: torch.dtype = torch.float32,
    master: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    shadow_dtype: torch.dtype | None = None,
    amsgrad: bool = False,
    values: Any = None,
    first_step: int = 0,
) -> AdamLists:
    """Lists in the middle of a training run, or of awkward values.

    Args:
        shapes: of the parameters.
        seed: of all values.
        param_dtype: of ``params``.
        master: None: fp32 parameters are their own; ``"fp32"``; or ``"split"``: bf16 parameters and remainders.
        grad_dtype: of ``grads``.
        shadow_dtype: None for no shadows.
        amsgrad: with ``max_exp_avg_sqs``.
        values: ``values(numel, seed, dtype=)`` makes one tensor's; None: normally distributed ones.
        first_step: counter of the first parameter; the next one's is one more.
    """
    make = values or (lambda numel, seed, dtype: ordinary(numel, seed=seed, dtype=dtype))
    lists = AdamLists([], [], [], [], steps=torch.arange(len(shapes)).float() + first_step)
    for index, shape in enumerate(shapes):
        base = seed * 10_000 + index * 10
        numel = math.prod(shape)
        full = make(numel, base, dtype=torch.float32).view(shape)
        if master == "split":
            high, remainder = split(full)
            lists.params.append(high)
            lists.masters.append(remainder)
        else:
            lists.params.append(full.to(param_dtype))
            if master == "fp32":
                lists.masters.append(full.clone())
        lists.grads.append(make(numel, base + 1, dtype=grad_dtype).view(shape))
        lists.exp_avgs.append(make(numel, base + 2, dtype=torch.float32).view(shape) * 0.1)
        lists.exp_avg_sqs.append(make(numel, base + 3, dtype=torch.float32).view(shape).square() * 0.01)
        if amsgrad:
            lists.max_exp_avg_sqs.append(make(numel, base + 4, dtype=torch.float32).view(shape).square() * 0.01)
        if shadow_dtype is not None:
            lists.shadows.append(torch.full(shape, 55.0, dtype=shadow_dtype))
    return lists


def fresh(*params: Any, grads: Any, dtype: torch.dtype = torch.float32, **lists: Any) -> AdamLists:
    """Lists before the first step, from values."""
    params = [p if isinstance(p, Tensor) else torch.tensor(p, dtype=dtype) for p in params]
    grads = [g if isinstance(g, Tensor) else torch.tensor(g) for g in grads]
    zeros = [[torch.zeros(p.shape) for p in params] for _ in range(2)]
    return AdamLists(params, grads, *zeros, steps=torch.zeros(len(params)), **lists)


def fresh_format(
    values: Tensor, grads: Tensor, param_dtype: torch.dtype, master: str | None, **lists: Any
) -> AdamLists:
    """One parameter in one of the storages of master weights."""
    if master == "split":
        high, remainder = split(values)
        return fresh(high, grads=[grads], masters=[remainder], **lists)
    masters = [values.clone()] if master == "fp32" else []
    return fresh(values.to(param_dtype), grads=[grads], masters=masters, **lists)


@dataclass
class AdamOracle:
    """Adam and AdamW on one parameter in float64, as the papers and torch's documentation state them."""

    param: Tensor
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    amsgrad: bool = False
    maximize: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        self.param = self.param.double().clone()
        self.exp_avg = torch.zeros_like(self.param)
        self.exp_avg_sq = torch.zeros_like(self.param)
        self.max_exp_avg_sq = torch.zeros_like(self.param)

    def step(
        self,
        grad: Tensor,
        *,
        grad_scale: float | None = None,
        clip_coef: float | None = None,
        found_inf: bool = False,
    ) -> None:
        if found_inf:
            return
        self.steps += 1
        grad = grad.double() / (1.0 if grad_scale is None else grad_scale)
        grad = grad * (1.0 if clip_coef is None else clip_coef)
        grad = -grad if self.maximize else grad
        if self.decoupled_weight_decay:
            self.param = self.param - self.lr * self.weight_decay * self.param
        else:
            grad = grad + self.weight_decay * self.param
        self.exp_avg = self.beta1 * self.exp_avg + (1 - self.beta1) * grad
        self.exp_avg_sq = self.beta2 * self.exp_avg_sq + (1 - self.beta2) * grad * grad
        self.max_exp_avg_sq = torch.maximum(self.max_exp_avg_sq, self.exp_avg_sq)
        second = self.max_exp_avg_sq if self.amsgrad else self.exp_avg_sq
        first = self.exp_avg / (1 - self.beta1**self.steps)
        second = second / (1 - self.beta2**self.steps)
        self.param = self.param - self.lr * first / (second.sqrt() + self.eps)

    def clone(self) -> AdamOracle:
        return copy.deepcopy(self)


# ---- size ------------------------------------------------------------------------------------------------------------


class RepeatedMemory:
    """A flat tensor of any size whose memory is one small window, mapped again and again, and an end of its own.

    Elements in the repeated part alias each other, so a test has them all equal and leaves them so; the last
    ``window`` bytes and more are ordinary memory. Use as a context manager; the tensor dies with it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, window: int = 4 << 20) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        nbytes = numel * dtype.itemsize
        repeats = max(nbytes // window - 1, 0)
        self._nbytes = nbytes
        self._address = self._map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        handle = os.memfd_create("repeated")
        try:
            os.ftruncate(handle, window)
            for index in range(repeats):
                self._map(self._address + index * window, window, mmap.MAP_SHARED | _MAP_FIXED, handle)
        finally:
            os.close(handle)
        buffer = (ctypes.c_char * nbytes).from_address(self._address)
        self.tensor = torch.frombuffer(buffer, dtype=dtype)

    def _map(self, address: int | None, length: int, flags: int, handle: int) -> int:
        result = self._libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        if result in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap failed")
        return int(result)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *exception: object) -> None:
        del self.tensor
        self._libc.munmap(self._address, self._nbytes)
