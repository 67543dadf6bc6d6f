"""Lists for the tests of what is particular to the CUDA kernels' twins: cheap ones, and neighbours in memory.

Also one step of the twins beside the CPU kernel's, with what was moved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import twin
from adam_modes import Master, dither_table
from reference import AdamLists, assert_bits_equal, ordinary, whole_storage
from torch import Tensor

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
MOMENT_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}
BLOCK = 128


def zero_lists(
    shapes: Sequence[Sequence[int]],
    moments: str,
    master: Master,
    *,
    grad_dtype: torch.dtype = torch.float32,
    shadow_dtype: torch.dtype | None = None,
    amsgrad: bool = False,
) -> AdamLists:
    """Parameters and states of zeros: for what does not depend on values."""

    def zeros(dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]

    first, second = MOMENT_DTYPES[moments]
    masters = {None: None, "fp32": torch.float32, "split": torch.bfloat16, "split24": torch.int8}[master.masters]
    rows = [(shape[0] if len(shape) > 1 else 1, -(-shape[-1] // BLOCK), 2) for shape in shapes]
    return AdamLists(
        zeros(master.param_dtype),
        zeros(grad_dtype),
        zeros(first),
        zeros(second),
        max_exp_avg_sqs=zeros(torch.float32) if amsgrad else [],
        masters=[] if masters is None else zeros(masters),
        shadows=[] if shadow_dtype is None else zeros(shadow_dtype),
        block_words=[torch.zeros(shape, dtype=torch.int32) for shape in rows] if moments == "int8" else [],
        steps=torch.zeros(len(shapes)),
    )


def lists_in_training(
    shapes: Sequence[Sequence[int]], moments: str, master: Master, seed: int, **kinds: Any
) -> AdamLists:
    """What two steps of the CPU kernel make of zeros, with gradients for the next one."""
    lists = zero_lists(shapes, moments, master, **kinds)
    for step in range(3):
        for index, grad in enumerate(lists.grads):
            grad.copy_(ordinary(*grad.shape, seed=seed + 1000 * step + index))
        if step < 2:
            lists.update("cpp", **ADAMW, **options_of(lists, master))
    return lists


def options_of(lists: AdamLists, master: Master, dithered: bool = True) -> dict[str, Any]:
    table = dither_table(lists, 5) if dithered or master.rounding == "stochastic" else None
    return {"dither": table, "rounding": master.rounding}


def cut_from_buffers(lists: AdamLists, gap: int = 0, only: str | None = None) -> AdamLists:
    """The lists once more, each cut from one buffer in which its tensors follow each other.

    gap: elements between two tensors of the list named ``only``, or of all lists.
    """

    def cut(name: str, tensors: list[Tensor]) -> list[Tensor]:
        space = gap if only in (None, name) else 0
        buffer = torch.full((sum(t.numel() + space for t in tensors),), 77, dtype=tensors[0].dtype)
        views, start = [], 0
        for tensor in tensors:
            views.append(buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor))
            start += tensor.numel() + space
        return views

    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "shadows", "block_words")
    kept = {name: getattr(lists, name) for name in names}
    return AdamLists(**{k: cut(k, v) if v else [] for k, v in kept.items()}, steps=lists.steps.clone())


def traffic_of(lists: AdamLists, **options: Any) -> twin.Traffic:
    with twin.Traffic() as traffic:
        lists.update("cuda_twin", **{**ADAMW, **options})
    return traffic


def assert_as_cpp(lists: AdamLists, **options: Any) -> twin.Traffic:
    """One step of the twins with the bits of the CPU kernel's, in copies with the same neighbours in memory.

    Whole storages are compared, each once: also where nothing should have been written.
    """
    expected, updated = cut_like(lists), cut_like(lists)
    expected.update("cpp", **{**ADAMW, **options})
    traffic = traffic_of(updated, **options)
    compared = set()
    for (name, mine), (_, theirs) in zip(updated.named(), expected.named(), strict=True):
        if mine.untyped_storage().data_ptr() not in compared:
            compared.add(mine.untyped_storage().data_ptr())
            assert_bits_equal(whole_storage(mine), whole_storage(theirs), name, exact=True)
    return traffic


def cut_like(lists: AdamLists) -> AdamLists:
    """A copy in which tensors that share a storage share one again."""
    storages: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        old = tensor.untyped_storage()
        if old.data_ptr() not in storages:
            storages[old.data_ptr()] = torch.empty(0, dtype=tensor.dtype).set_(old.clone())
        whole = storages[old.data_ptr()]
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return lists.mapped(copied)


def capacities() -> tuple[int, int]:
    """Words of one launch for its tensors; steps whose scalars it carries."""
    found = (ctypes.c_int64 * 4)()
    twin.load().shardops_twin_capacities(found)
    return found[0], found[1]
