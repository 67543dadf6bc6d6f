"""Calls of the op itself, past the typed function, with storages that its C++ kernels cannot run.

Everything is checked before a byte is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adam_modes import SPLIT24, STOCHASTIC, Master, mode_lists
from reference import AdamLists, clone_storage, strided, transposed, whole_storage
from torch import Tensor

ROUNDINGS = {None: 0, "nearest": 1, "stochastic": 2}
Change = Callable[[AdamLists, dict[str, Any]], None]


def valid_call(moments: str, master: Master) -> tuple[AdamLists, dict[str, Any]]:
    lists = mode_lists([(3, 130), (2, 3)], 1, moments, master, amsgrad=True)
    table = torch.tensor([[7, 0, 390, 0], [2**32 - 1, 3, 2, 5]])
    return lists, {"dither": table, "rounding": ROUNDINGS[master.rounding]}


def call(lists: AdamLists, options: dict[str, Any]) -> None:
    scalars = [1e-2, 0.9, 0.999, 1e-8, 0.0, False, False, None, None, None, None]
    torch.ops.shardops.sharded_adam(
        *(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, lists.masters),
        *(lists.shadows, lists.block_words, lists.steps, None, options["dither"], options["rounding"], *scalars),
    )


def option(name: str, value: Any) -> Change:
    return lambda lists, options: options.update({name: value})


def second(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    """Replaces the second tensor of a list."""
    return lambda lists, options: setattr(lists, name, [getattr(lists, name)[0], function(getattr(lists, name)[1])])


def each(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    return lambda lists, options: setattr(lists, name, [function(t) for t in getattr(lists, name)])


def dropped(name: str) -> Change:
    return lambda lists, options: setattr(lists, name, [])


def table(*second_row: int) -> Change:
    return option("dither", torch.tensor([[7, 0, 390, 0], list(second_row)]))


def everywhere(function: Callable[[Tensor], Tensor]) -> Change:
    """Another memory order of the second parameter and all that belongs to it but its words."""

    def change(lists: AdamLists, options: dict[str, Any]) -> None:
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"):
            if getattr(lists, name):
                second(name, function)(lists, options)

    return change


def no_table_and_transposed(lists: AdamLists, options: dict[str, Any]) -> None:
    options["dither"] = None
    everywhere(transposed)(lists, options)


INT8, BF16 = ("int8", SPLIT24), ("bf16", STOCHASTIC)
REFUSALS: list[tuple[tuple[str, Master], Change, str]] = [
    (INT8, dropped("block_words"), "block_words has 0 tensors; quantised moments have one for each of params"),
    (INT8, lambda lists, options: lists.block_words.pop(), "block_words has 1 tensors, params has 2"),
    (INT8, each("exp_avg_sqs", lambda t: t.to(torch.int8)), "exp_avgs have dtype Char, exp_avg_sqs Char; moments are"),
    (INT8, each("exp_avgs", lambda t: t.to(torch.uint8)), "exp_avgs have dtype Byte, exp_avg_sqs Byte"),
    (INT8, each("exp_avgs", lambda t: t.float()), "exp_avgs have dtype Float, exp_avg_sqs Byte; moments are both"),
    (INT8, second("exp_avgs", lambda t: t.float()), r"exp_avgs\[1\] has dtype Float; each list has one dtype"),
    (INT8, second("exp_avg_sqs", lambda t: t[:1]), r"exp_avg_sqs\[1\] differs from params\[1\] in shape or memory"),
    (INT8, second("block_words", lambda t: t.long()), r"block_words\[1\] must be contiguous int32 of shape"),
    (INT8, second("block_words", lambda t: t[..., 0]), r"block_words\[1\] must be contiguous int32 of shape"),
    (INT8, second("block_words", lambda t: strided(t)), r"block_words\[1\] must be contiguous int32 of shape"),
    (
        INT8,
        second("block_words", lambda t: t[:0]),
        r"block_words\[1\] has 0 rows of 1 blocks of 2 words for 6 elements",
    ),
    (INT8, second("block_words", lambda t: t.repeat(2, 1, 1)), r"block_words\[1\] has 4 rows"),
    (INT8, second("block_words", lambda t: t.repeat(1, 2, 1)), r"block_words\[1\] has 2 rows of 2 blocks of 2 words"),
    (INT8, second("block_words", lambda t: t.repeat(1, 1, 2)), r"block_words\[1\] has 2 rows of 1 blocks of 4 words"),
    (INT8, lambda lists, options: lists.block_words.reverse(), r"block_words\[0\] has 2 rows of 1 blocks"),
    (INT8, no_table_and_transposed, r"params\[1\] is not row-major, which dither and quantised moments need"),
    (BF16, everywhere(transposed), r"params\[1\] is not row-major, which dither and quantised moments need"),
    (BF16, each("exp_avgs", lambda t: t.half()), "exp_avgs have dtype Half, exp_avg_sqs BFloat16"),
    (BF16, each("max_exp_avg_sqs", lambda t: t.bfloat16()), r"max_exp_avg_sqs\[0\] has dtype BFloat16"),
    (
        INT8,
        each("masters", lambda t: t.to(torch.uint8)),
        "masters must be float32, or remainders .typed bfloat16 or int8",
    ),
    (INT8, second("masters", lambda t: t.to(torch.uint8)), r"masters\[1\] has dtype Byte; each list has one dtype"),
    (INT8, each("params", lambda t: t.float()), "masters must be float32, or remainders .* of bfloat16 params"),
    (INT8, option("rounding", 1), "rounding is 1; it is for params of a low-precision dtype without masters"),
    (BF16, option("rounding", 0), "params of a low-precision dtype need masters, or a rounding"),
    (BF16, option("rounding", 3), "rounding is 3; 0 .none., 1 .to nearest. and 2 .stochastic. are supported"),
    (BF16, option("rounding", -1), "rounding is -1; 0"),
    (BF16, option("dither", None), "rounding is 2, stochastic; it needs bfloat16 params and dither"),
    (BF16, each("params", lambda t: t.half()), "rounding is 2, stochastic; it needs bfloat16 params and dither"),
    (BF16, each("params", lambda t: t.float()), "rounding is 2; it is for params of a low-precision dtype"),
    (BF16, option("dither", torch.zeros(2, 4)), r"dither must be a contiguous int64 tensor of shape \[2, 4\] on the"),
    (BF16, option("dither", torch.zeros(1, 4).long()), r"dither must be a contiguous int64 tensor of shape \[2, 4\]"),
    (BF16, option("dither", torch.ones(4, 2).long().t()), r"dither must be a contiguous int64 tensor of shape"),
    (BF16, option("dither", torch.ones(8).long()), r"dither must be a contiguous int64 tensor of shape"),
    (BF16, table(1, 0, 0, 0), r"dither\[1\] has rows of 0 elements; they have at least one"),
    (BF16, table(1, 0, -3, 0), r"dither\[1\] has rows of -3 elements; they have at least one"),
    (BF16, table(1 << 32, 0, 6, 0), r"dither\[1\] has the salt 4294967296; it lies in \[0, 2\^32\)"),
    (BF16, table(-1, 0, 6, 0), r"dither\[1\] has the salt -1; it lies in \[0, 2\^32\)"),
]


@pytest.mark.parametrize(("mode", "change", "message"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))])
def test_the_op_itself_refuses_what_it_cannot_run(mode: tuple[str, Master], change: Change, message: str) -> None:
    lists, options = valid_call(*mode)
    change(lists, options)
    tensors = [tensor for _, tensor in lists.named()]
    before = [whole_storage(clone_storage(tensor)) for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        call(lists, options)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(whole_storage(tensor).view(torch.uint8), was.view(torch.uint8))


@pytest.mark.parametrize("mode", [INT8, BF16], ids=str)
def test_the_calls_that_the_refusals_start_from_are_fine(mode: tuple[str, Master]) -> None:
    lists, options = valid_call(*mode)
    before = lists.clone()
    call(lists, options)
    assert (lists.exp_avg_sqs[1].float() != before.exp_avg_sqs[1].float()).any()
    assert (lists.steps == before.steps + 1).all()


def test_an_empty_tensor_needs_no_rows() -> None:
    """A rank without elements of a parameter: its words have no rows, and its index has no columns."""
    lists = mode_lists([(0, 130), (0,), (2, 3)], 1, "int8", SPLIT24)
    options = {"dither": torch.tensor([[7, 0, 0, 0], [7, 0, 0, 0], [7, 0, 3, 3]]), "rounding": 0}
    call(lists, options)
    assert lists.steps.tolist() == [1.0, 2.0, 3.0]
