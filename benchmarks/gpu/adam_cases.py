"""Calls of sharded_adam in every storage and with every option, run on a device and compared bit for bit.

A case is built on the CPU by the tests' builders, and moved: each backend on the device against the reference there,
against the C++ kernels on the CPU, and against itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from adam_modes import FP32, MASTERS, MOMENTS, SPLIT24, SPLIT32, STOCHASTIC, Master, dither_table, mode_lists
from reference import (
    DTYPES,
    AdamLists,
    assert_bits_equal,
    awkward,
    bits_equal,
    generator,
    transposed,
    unaligned,
    whole_storage,
)
from torch import Tensor

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
ADAM: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.4, "beta2": 0.95, "maximize": True}
SCALARS: dict[str, Any] = {"grad_scale": torch.tensor(3.0), "clip_coef": torch.tensor(0.3)}
SHAPES: list[tuple[int, ...]] = [(3, 129), (2, 37), (0, 128), (300,), (5, 640)]
# Longer than any block of a kernel, with a tail; and rows of which blocks are whole.
LARGE: list[tuple[int, ...]] = [(70_001,), (9, 4096), (130, 517)]
FORMATS = [(moments, master) for moments in MOMENTS for master in MASTERS]
_ON_HOST = ("dither", "step_index")
# Formats that the options are tried with: one of each way of storing.
SOME = (("fp32", FP32), ("fp32", SPLIT32), ("int8", SPLIT24), ("bf16", STOCHASTIC), ("int8", FP32))


@dataclass
class Case:
    """One call, repeated for some steps."""

    name: str
    lists: AdamLists
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    host_steps: bool = False  # the counters stay on the CPU


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor and of all its storage, on a device: the same strides, and as far from alignment."""
    storage = whole_storage(tensor).to(device, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(lists: AdamLists, device: torch.device, host_steps: bool = False) -> AdamLists:
    """The lists on a device."""
    values = {item.name: getattr(lists, item.name) for item in fields(lists) if item.name != "steps"}
    tensors = {name: [placed(tensor, device) for tensor in found] for name, found in values.items()}
    return AdamLists(**tensors, steps=placed(lists.steps, torch.device("cpu") if host_steps else device))


def run(case: Case, backend: str, device: torch.device) -> list[AdamLists]:
    """The lists after each step, back on the CPU."""
    lists = moved(case.lists, device, case.host_steps)
    options = {
        name: value.to(device) if isinstance(value, Tensor) and name not in _ON_HOST else value
        for name, value in case.options.items()
    }
    found = []
    for _ in range(case.steps):
        lists.update(backend, **options)
        found.append(moved(lists, torch.device("cpu")))
    return found


def same(found: list[AdamLists], expected: list[AdamLists], label: str, exact: bool = False) -> int:
    """Raises where bits differ; returns the number of elements compared."""
    count = 0
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        mine.assert_same(theirs, f"{label}, step {step}: ")
        for (name, tensor), (_, other) in zip(mine.named(), theirs.named(), strict=True):
            count += tensor.numel()
            if exact:
                assert_bits_equal(tensor, other, f"{label}, step {step}: {name}", exact=True)
    return count


def compare(case: Case, backend: str, device: torch.device, host: list[AdamLists] | None) -> int:
    """The backend on the device against all that it must equal; ``host``: what the C++ kernels on the CPU made."""
    found = run(case, backend, device)
    count = same(found, run(case, "reference", device), "the reference on the device")
    if host is not None:
        count += same(found, host, "cpp on the CPU")
    count += same(found, run(case, backend, device), "a second run", exact=True)
    changed = any(
        not bits_equal(mine, was, exact=True) for mine, was in zip(found[-1].params, case.lists.params, strict=True)
    )
    is_skipped = bool(case.options.get("found_inf", torch.zeros(())))
    if changed == is_skipped and any(param.numel() for param in found[-1].params):
        raise AssertionError("parameters changed under found_inf, or none did without: the comparison shows nothing")
    return count


def _options(lists: AdamLists, master: Master, dithered: bool) -> dict[str, Any]:
    table = dither_table(lists, 5) if dithered or master.rounding == "stochastic" else None
    return {"dither": table, "rounding": master.rounding}


def _from_zero(moments: str, master: Master) -> Case:
    """Twenty steps from step 0, as at the start of a training run."""
    lists = mode_lists([(8, 256), (129,)], 21, moments, master)
    rng = generator(3)
    lists.steps = torch.zeros(2)
    for name in ("exp_avgs", "exp_avg_sqs", "block_words"):
        setattr(lists, name, [torch.zeros_like(t) for t in getattr(lists, name)])
    lists.grads = [torch.randn(t.shape, generator=rng).mul(1e-2).to(t.dtype) for t in lists.grads]
    return Case("twenty steps from 0", lists, {**ADAMW, **_options(lists, master, True)}, steps=20)


def format_cases(moments: str, master: Master, seed: int, with_large: bool = True) -> Iterator[Case]:
    """One storage: usual and awkward values, both sets of options; the dtypes around it by turns."""
    for index, values in enumerate((None, awkward)):
        kind = ("usual", "awkward")[index]
        lists = mode_lists(SHAPES, 2 + index, moments, master, values=values)
        yield Case(f"AdamW, dithered, {kind} values", lists, {**ADAMW, **_options(lists, master, True)})
        grad, shadow = DTYPES[1 + seed % 2], DTYPES[seed % 3]
        kinds: dict[str, Any] = {"grad_dtype": grad, "shadow_dtype": shadow, "amsgrad": True}
        lists = mode_lists(SHAPES, 4 + index, moments, master, values=values, **kinds)
        name = f"Adam, amsgrad, {str(grad)[6:]} gradients, {str(shadow)[6:]} shadows, {kind} values"
        yield Case(name, lists, {**ADAM, **SCALARS, **_options(lists, master, False)})
    if with_large:
        lists = mode_lists(LARGE, 6, moments, master)
        yield Case("AdamW, dithered, large tensors", lists, {**ADAMW, **_options(lists, master, True)})
        yield _from_zero(moments, master)


def option_cases(moments: str, master: Master, count: int) -> Iterator[Case]:
    """One storage, and what else a call may come with; ``count``: more tensors than the arguments of a launch hold."""

    def case(name: str, options: dict[str, Any], shapes: Sequence[Sequence[int]] = SHAPES, **rest: Any) -> Case:
        change: Callable[[AdamLists], AdamLists] = rest.pop("change", lambda lists: lists)
        lists = change(mode_lists(shapes, 8, moments, master, shadow_dtype=torch.bfloat16))
        return Case(name, lists, {**ADAMW, **_options(lists, master, True), **options}, **rest)

    for offset in (1, 2, 3, 8):
        yield case(
            f"addresses {offset} elements off",
            {},
            [(3, 200), (129,), (2, 1024)],
            change=partial(AdamLists.mapped, function=partial(unaligned, offset=offset)),
        )
    for found in (0.0, 1.0):
        yield case(f"found_inf {found:.0f}", {"found_inf": torch.tensor(found), **SCALARS})
    for dtype in (torch.float32, torch.float64):
        yield case(f"lr tensor, {str(dtype)[6:]}", {"lr": torch.tensor(3e-3, dtype=dtype)})
    yield case("counters on the host", {}, host_steps=True)
    index = torch.tensor([4, 2, 0, 3, 1])
    yield case("counters by index", {"step_index": index})
    yield case("counters by index, on the host", {"step_index": index}, host_steps=True)
    yield case("no dither", {"dither": None} if master.rounding != "stochastic" else {})
    yield case("columns before rows", {}, [(5, 130), (300, 7)], change=_transposed)
    many = [(1 + index % 3, 128 + index % 5) for index in range(count)]
    yield case(f"{count} tensors", {}, many, steps=1)
    yield case("tensors of one element", {}, [(1,)] * 40)
    yield case("empty tensors only", {}, [(0,), (0, 128)])


def _transposed(lists: AdamLists) -> AdamLists:
    changed = lists.mapped(transposed)
    changed.block_words = [words.clone() for words in lists.block_words]  # of row-major elements, as they are
    return changed
