"""Calls of sharded_adam that are refused: with a message that says why, and with every tensor left as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import AdamLists, adam_lists, assert_bits_equal, strided
from torch import Tensor

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}


def valid_call() -> tuple[AdamLists, dict[str, Any]]:
    lists = adam_lists([(6,), (2, 3)], 16, shadow_dtype=torch.bfloat16, amsgrad=True)
    return lists, {**ADAMW, "step_index": torch.tensor([1, 0])}


def replaced(name: str, value: Any) -> Callable[[AdamLists, dict[str, Any]], None]:
    """Replaces the second tensor of a list, ``steps``, or an option."""

    def change(lists: AdamLists, options: dict[str, Any]) -> None:
        if name == "steps":
            lists.steps = value
        elif name in {item.name for item in dataclasses.fields(lists)}:
            getattr(lists, name)[-1:] = [value]
        else:
            options[name] = value

    return change


def dropped(name: str) -> Callable[[AdamLists, dict[str, Any]], None]:
    return lambda lists, options: getattr(lists, name).pop()


def bf16_without_masters(lists: AdamLists, options: dict[str, Any]) -> None:
    lists.params = [p.bfloat16() for p in lists.params]


def remainders_of_fp32(lists: AdamLists, options: dict[str, Any]) -> None:
    lists.masters = [p.bfloat16() for p in lists.params]


def fp16_masters(lists: AdamLists, options: dict[str, Any]) -> None:
    lists.masters = [p.half() for p in lists.params]
    lists.params = [p.half() for p in lists.params]


def bf16_moments(lists: AdamLists, options: dict[str, Any]) -> None:
    lists.exp_avg_sqs = [p.bfloat16() for p in lists.exp_avg_sqs]


REFUSALS: list[tuple[Callable[[AdamLists, dict[str, Any]], None], type[Exception], str]] = [
    *((dropped(n), ValueError, f"{n} has 1 tensors, params has 2") for n in ("grads", "exp_avgs", "exp_avg_sqs")),
    *((dropped(n), ValueError, f"{n} has 1 tensors, params has 2") for n in ("max_exp_avg_sqs", "shadows")),
    (replaced("grads", torch.ones(3, 2)), ValueError, r"grads\[1\] has shape \(3, 2\), its parameter \(2, 3\)"),
    (replaced("exp_avgs", torch.ones(6)), ValueError, r"exp_avgs\[1\] has shape \(6,\), its parameter \(2, 3\)"),
    (replaced("shadows", torch.ones(7).bfloat16()), ValueError, r"shadows\[1\] has shape \(7,\)"),
    (replaced("grads", torch.ones(2, 3).half()), ValueError, "grads has dtypes torch.float16, torch.float32; make one"),
    (replaced("params", torch.ones(2, 3).half()), ValueError, "params has dtypes torch.float16, torch.float32"),
    (bf16_moments, ValueError, "exp_avgs have dtype torch.float32, exp_avg_sqs torch.bfloat16; moments are both"),
    (bf16_without_masters, ValueError, "params have dtype torch.bfloat16 and masters is empty"),
    (remainders_of_fp32, ValueError, "masters have dtype torch.bfloat16 under params of torch.float32"),
    (fp16_masters, TypeError, r"masters\[0\] has dtype torch.float16; float32, bfloat16 and int8 are supported"),
    (replaced("params", 3.0), TypeError, r"params\[1\] is a float; ops take torch tensors"),
    (replaced("grads", None), TypeError, r"grads\[1\] is a NoneType; ops take torch tensors"),
    (replaced("grads", torch.ones(2, 3).to_sparse()), TypeError, r"grads\[1\] has layout torch.sparse_coo"),
    (replaced("exp_avgs", torch.ones(2, 3).int()), TypeError, r"exp_avgs\[1\] has dtype torch.int32"),
    (replaced("grads", torch.ones(2, 3).cfloat()), TypeError, r"grads\[1\] has dtype torch.complex64"),
    (replaced("grads", torch.ones(2, 3, device="meta")), ValueError, r"grads\[1\] is on meta, .* are on cpu"),
    (replaced("params", torch.ones(2, 3, device="meta")), ValueError, r"params\[1\] is on meta, .* are on cpu"),
    (
        replaced("exp_avgs", torch.zeros(()).expand(2, 3)),
        ValueError,
        r"exp_avgs\[1\] .*: several of its elements are one",
    ),
    (replaced("params", torch.zeros(3).expand(2, 3)), ValueError, r"params\[1\] .*: several of its elements are one"),
    (replaced("steps", torch.zeros(1)), ValueError, r"step_index is \[1, 0\], steps has 1 counters"),
    (replaced("steps", torch.zeros(2, 1)), ValueError, r"steps has shape \(2, 1\)"),
    (replaced("steps", torch.zeros(2).double()), ValueError, "steps has .* dtype torch.float64"),
    (replaced("steps", torch.zeros(4)[::2]), ValueError, r"steps has shape \(2,\)"),
    (
        replaced("steps", torch.zeros(2, device="meta")),
        ValueError,
        "steps is on meta, the parameters on cpu; move it there",
    ),
    (replaced("step_index", torch.tensor([0, 2])), ValueError, r"step_index is \[0, 2\], steps has 2 counters"),
    (replaced("step_index", torch.tensor([0, -1])), ValueError, r"step_index is \[0, -1\], steps has 2 counters"),
    (replaced("step_index", torch.tensor([1, 1])), ValueError, r"step_index is \[1, 1\], .* each parameter's own"),
    (replaced("step_index", torch.tensor([0])), ValueError, r"step_index has shape \(1,\)"),
    (replaced("step_index", torch.tensor([0, 1]).int()), ValueError, "step_index has .* dtype torch.int32"),
    (replaced("lr", torch.ones(2)), ValueError, r"lr is tensor\(\[1., 1.\]\); it is a tensor of one element"),
    (replaced("lr", torch.tensor(1).half()), ValueError, "lr is .*; it is a tensor of one element, torch.float32 or"),
    (replaced("lr", torch.ones((), device="meta")), ValueError, "lr is on meta, the parameters on cpu; move it there"),
    (replaced("clip_coef", torch.ones(2)), ValueError, "clip_coef is .*; it is a tensor of one element, torch.float32"),
    (replaced("clip_coef", 0.5), ValueError, "clip_coef is 0.5; it is a tensor of one element, torch.float32"),
    (replaced("grad_scale", torch.ones(1).double()), ValueError, "grad_scale is .*; it is a tensor of one element"),
    (replaced("found_inf", torch.ones((), device="meta")), ValueError, "found_inf is on meta, the parameters on cpu"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))])
def test_a_refused_call_changes_nothing(
    backend: str, change: Callable[[AdamLists, dict[str, Any]], None], error: type[Exception], message: str
) -> None:
    lists, options = valid_call()
    originals = [t for _, t in lists.named()]
    change(lists, options)
    before = [t.clone() for t in originals]
    with pytest.raises(error, match=message):
        lists.update(backend, **options)
    for tensor, was in zip(originals, before, strict=True):
        assert_bits_equal(tensor, was, exact=True)


def test_the_call_that_the_refusals_start_from_is_fine(backend: str) -> None:
    lists, options = valid_call()
    before = lists.clone()
    lists.update(backend, **options)
    assert (lists.params[1] != before.params[1]).all()
    assert (lists.steps == before.steps + 1).all()


def test_few_steps_without_an_index(backend: str) -> None:
    lists = adam_lists([(2,), (2,)], 1)
    lists.steps = torch.zeros(1)
    with pytest.raises(ValueError, match="steps has 1 counters for 2 parameters; give one for each"):
        lists.update(backend, lr=0.1)
    with pytest.raises(ValueError, match="params is empty, grads has 1 tensors"):
        AdamLists([], [torch.ones(1)], [], [], steps=torch.zeros(1)).update(backend, lr=0.1)


def test_dtensor_is_refused(backend: str, dtensor: Tensor) -> None:
    plain = [torch.ones(4)]
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        arguments = dict.fromkeys(("params", "grads", "exp_avgs", "exp_avg_sqs"), plain) | {name: [dtensor]}
        with pytest.raises(TypeError, match=rf"{name}\[0\] is a DTensor; ops take local tensors"):
            AdamLists(**arguments, steps=torch.zeros(1)).update(backend, lr=0.1)
    assert (plain[0] == 1).all()


def raw_arguments() -> list[Any]:
    lists = adam_lists([(6,), (2, 3)], 17, amsgrad=True)
    scalars = [1e-2, 0.9, 0.999, 1e-8, 0.0, False, False, None, None, None, None]
    return [
        *(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, [], [], []),
        *(lists.steps, None, None, 0, *scalars),
    ]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, [torch.ones(6)], "grads has 1 tensors, params has 2"),
        (1, [torch.ones(6), torch.ones(5)], r"grads\[1\] differs from params\[1\] in shape or memory order"),
        (2, [torch.ones(6), torch.ones(3, 2).t()], r"exp_avgs\[1\] differs from params\[1\] in shape or memory order"),
        (2, [torch.ones(6), torch.ones(2, 3).half()], r"exp_avgs\[1\] has dtype .*Half"),
        (0, [torch.ones(6), strided(torch.ones(2, 3))], r"params\[1\] has gaps or overlaps in memory"),
        (0, [torch.ones(6).int(), torch.ones(2, 3).int()], "params has dtype Int; float32, bfloat16 and float16"),
        (0, [torch.ones(6).half(), torch.ones(2, 3).half()], "params of a low-precision dtype need masters"),
        (5, [torch.ones(6).bfloat16(), torch.ones(2, 3).bfloat16()], "masters must be float32, or remainders"),
        (8, torch.zeros(1), "step_index holds 1, steps has 1 elements"),
        (8, torch.zeros(2).double(), "steps must be a contiguous float32 tensor"),
        (9, torch.tensor([0, 7]), "step_index holds 7, steps has 2 elements"),
        (9, torch.tensor([0, -1]), "step_index holds -1, steps has 2 elements"),
        (9, torch.tensor([1, 1]), "step_index holds 1 twice"),
        (9, torch.tensor([0]), "step_index must be a contiguous int64 tensor .* for each of the 2"),
        (19, torch.ones(2), "lr must be one element on the CPU"),
        (19, torch.ones(1).half(), "lr must be float32 or float64"),
        (20, torch.ones(2), "clip_coef must be one float32 on the CPU"),
        (21, torch.ones(1).double(), "grad_scale must be one float32 on the CPU"),
        (22, torch.ones(1).int(), "found_inf must be one float32 on the CPU"),
    ],
)
def test_the_op_itself_refuses_what_it_cannot_run(position: int, value: Any, message: str) -> None:
    """Calls that pass by the typed function: nothing is written before everything is checked."""
    arguments = raw_arguments()
    torch.ops.shardops.sharded_adam(*arguments)
    arguments[position] = value
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.shardops.sharded_adam(*arguments)
    for tensor, was in zip(tensors, before, strict=True):
        assert_bits_equal(tensor, was, exact=True) if tensor.is_floating_point() else None
