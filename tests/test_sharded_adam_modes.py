"""sharded_adam's storages of moments and masters in few bits: codecs, dither, and the same bits from every backend.

A step is decode, the fp32 step, encode; the codecs are compared with those of ``adam_modes``, written independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import twin
from adam_modes import (
    FP32,
    MASTERS,
    MOMENTS,
    SPLIT24,
    SPLIT32,
    STOCHASTIC,
    Master,
    decode_24,
    decode_blocks,
    dither_table,
    dither_words,
    encode_24,
    encode_blocks,
    global_index,
    mode_lists,
    round_bf16,
    rows_of,
)
from reference import (
    DTYPES,
    AdamLists,
    assert_bits_equal,
    awkward,
    from_patterns,
    ordinary,
    strided,
    transposed,
    unaligned,
    whole_storage,
)
from torch import Tensor

from shardops.backends.reference import block_quant, dither

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
ADAM: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.4, "beta2": 0.95, "maximize": True}
WITH_SCALARS: dict[str, Any] = {"grad_scale": torch.tensor(3.0), "clip_coef": torch.tensor(0.3)}
SHAPES = [(3, 129), (2, 37), (0, 128), (300,)]

each_moments = pytest.mark.parametrize("moments", MOMENTS)
each_master = pytest.mark.parametrize("master", MASTERS, ids=str)
some_modes = pytest.mark.parametrize(
    ("moments", "master"),
    [("int8", SPLIT24), ("int8", FP32), ("bf16", STOCHASTIC), ("bf16", SPLIT32), ("fp32", SPLIT24)],
    ids=str,
)


def options_of(lists: AdamLists, master: Master, dithered: bool = True) -> dict[str, Any]:
    table = dither_table(lists, 5) if dithered or master.rounding == "stochastic" else None
    return {"dither": table, "rounding": master.rounding}


def assert_backends_agree(lists: AdamLists, steps: int = 2, **options: Any) -> AdamLists:
    """Some steps with each backend; returns the lists that cpp updated."""
    twin.register()
    reference = lists.clone()
    others = {name: lists.clone() for name in ("cpp", "cuda_twin")}
    for step in range(steps):
        reference.update("reference", **options)
        for name, updated in others.items():
            updated.update(name, **options)
            updated.assert_same(reference, f"{name}, step {step}: ")
    return others["cpp"]


# ---- codecs ----------------------------------------------------------------------------------------------------------


def second_moments(numel: int, seed: int) -> dict[str, Tensor]:
    small = ordinary(numel, seed=seed, scale=1e-4).square()
    holes = torch.where(ordinary(numel, seed=seed + 1) > 0, small, 0.0)
    return {
        "usual": small,
        "with zeros": holes,
        "one in a million": torch.where(torch.arange(numel) % 97 == 3, 1.0, small * 1e-20),
        "equal": torch.full((numel,), 3e-7),
        "zero": torch.zeros(numel),
        "around 2^-123": from_patterns(torch.arange(numel) % 9 + 0x01FFFFFC),
        "tiny": from_patterns(torch.arange(numel) * 1000),
        "not finite": torch.where(torch.arange(numel) % 130 == 5, torch.inf, small),
        "awkward": awkward(numel, seed).abs(),
        "any bits": awkward(numel, seed),
    }


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 200, 640])
@pytest.mark.parametrize("salt", [None, 0, 0xFFFFFFFF, 123_456_789])
def test_blocks_are_the_specified_ones(columns: int, salt: int | None) -> None:
    rows, step = 3, 7
    noise = None if salt is None else dither.Dither(torch.tensor((step * 0x9E3779B9 + salt) % 2**32), 0, 1, 1)
    for name, exp_avg_sq in second_moments(rows * columns, columns).items():
        firsts = (ordinary(rows * columns, seed=1) * exp_avg_sq.abs().sqrt(), awkward(rows * columns, columns + 1))
        for exp_avg in firsts:
            ours = block_quant.encode_blocks(exp_avg, exp_avg_sq, rows, noise)
            theirs = encode_blocks(exp_avg, exp_avg_sq, rows, salt, step)
            for mine, other in zip(ours, theirs, strict=True):
                assert_bits_equal(mine.view(other.shape), other, name)
            for mine, other in zip(block_quant.decode_blocks(*ours), decode_blocks(*theirs), strict=True):
                assert_bits_equal(mine, other, name)


def test_what_blocks_promise() -> None:
    """Zero stays zero, the largest is exact, what is not tiny does not vanish, and nothing is far off."""
    exp_avg_sq = second_moments(1280, 3)["with zeros"]
    exp_avg = ordinary(1280, seed=4) * exp_avg_sq.sqrt()
    first, second = decode_blocks(*encode_blocks(exp_avg, exp_avg_sq, 1, salt=None))
    assert ((exp_avg_sq == 0) == (second == 0)).all()
    assert_bits_equal(second.view(-1, 128).amax(1), exp_avg_sq.view(-1, 128).amax(1))
    present = exp_avg_sq > 0
    assert ((second / exp_avg_sq)[present].log2().abs() < 0.08).all()
    ratio = exp_avg[present] / exp_avg_sq[present].sqrt()
    assert ((first[present] / exp_avg_sq[present].sqrt() - ratio).abs() < 0.05).all()
    zeros = torch.zeros(2, 128)
    for tensor in decode_blocks(zeros.to(torch.int8), zeros.to(torch.uint8), torch.zeros(2, 1, 2, dtype=torch.int32)):
        assert_bits_equal(tensor, zeros)


@pytest.mark.parametrize("salt", [None, 1, 0xFFFFFFFF])
def test_dithered_numbers_are_the_specified_ones(salt: int | None) -> None:
    values = torch.cat((awkward(4000, 1), ordinary(500, seed=2), from_patterns([0x7F7FFF80, 0xFF7FFFFF, 0x7F7F8000])))
    row = (salt or 0, 4_000_000_000, 100, 999_999_937)
    noise = None if salt is None else dither.Dither.of(torch.tensor(row), torch.tensor(9))
    words = dither_words(salt, 9, global_index(row, values.numel()))
    assert_bits_equal(dither.round_dithered(values, noise), round_bf16(values, words), exact=True)
    for mine, other in zip(dither.split_fp24(values, noise), encode_24(values, words), strict=True):
        assert_bits_equal(mine, other, exact=True)
    finite = values[values.isfinite()]
    high, low = encode_24(finite, words[values.isfinite().numpy()])
    assert_bits_equal(dither.join_fp24(high, low), decode_24(high, low))
    assert decode_24(high, low).isfinite().all(), "a finite master stays finite"
    again = encode_24(decode_24(high, low), dither_words(None, 0, np.arange(finite.numel())))
    assert_bits_equal(again[0], high)
    assert_bits_equal(again[1], low)


def test_dither_is_unbiased() -> None:
    """Over many steps the mean of what is stored is the value: the word of each step is another one."""
    value = torch.tensor([1.0 + 2.0**-9])
    mean = sum(round_bf16(value, dither_words(3, t, np.array([17]))).double() for t in range(1, 2001)) / 2000
    assert abs(float(mean) - float(value)) < 2.0**-16
    assert float(round_bf16(value, dither_words(None, 1, np.array([17])))) == 1.0


# ---- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dithered", [False, True], ids=["nearest", "dithered"])
@pytest.mark.parametrize("values", [None, awkward], ids=["ordinary", "awkward"])
@each_master
@each_moments
def test_a_step_is_decode_update_encode(
    backend: str, moments: str, master: Master, values: Callable[..., Tensor] | None, dithered: bool
) -> None:
    """The fp32 step between the codecs of ``adam_modes``, for every tensor, over two steps."""
    kinds: dict[str, Any] = {"grad_dtype": torch.bfloat16, "shadow_dtype": torch.float16, "amsgrad": True}
    lists = mode_lists(SHAPES, 1, moments, master, values=values, first_step=4, **kinds)
    options = options_of(lists, master, dithered)
    for _ in range(2):
        wide = decoded(lists, moments, master).update(backend, **ADAMW)
        lists.update(backend, **ADAMW, **options)
        for index, param in enumerate(lists.params):
            row = None if options["dither"] is None else options["dither"][index].tolist()
            salt, step = (None if row is None else row[0]), int(lists.steps[index])
            words = dither_words(salt, step, global_index(row or (0, 0, 1, 1), param.numel())).reshape(param.shape)
            full = wide.params[index]
            assert_encoded(lists, index, wide.exp_avgs[index], wide.exp_avg_sqs[index], words, salt, step)
            assert_bits_equal(lists.max_exp_avg_sqs[index], wide.max_exp_avg_sqs[index], "max_exp_avg_sq")
            assert_bits_equal(lists.shadows[index], full.half(), "shadow")
            if master.masters == "split24":
                for mine, other in zip((param, lists.masters[index]), encode_24(full, words), strict=True):
                    assert_bits_equal(mine, other, "master", exact=True)
            else:
                stochastic = master.rounding == "stochastic"
                expected = round_bf16(full, words) if stochastic else full.to(param.dtype)
                if master.masters == "split":  # rounds ties away from zero
                    expected = encode_24(full, np.zeros_like(words))[0]
                assert_bits_equal(param, expected, "param")


def decoded(lists: AdamLists, moments: str, master: Master) -> AdamLists:
    """The fp32 lists that the stored ones stand for."""
    result = lists.clone()
    if moments == "int8":
        pairs = [decode_blocks(*x) for x in zip(lists.exp_avgs, lists.exp_avg_sqs, lists.block_words, strict=True)]
        result.exp_avgs, result.exp_avg_sqs = (list(x) for x in zip(*pairs, strict=True))
    result.exp_avgs = [t.float() for t in result.exp_avgs]
    result.exp_avg_sqs = [t.float() for t in result.exp_avg_sqs]
    result.params = [t.float() for t in lists.params]
    if master.masters == "fp32":
        result.params = [t.clone() for t in lists.masters]
    if master.masters == "split24":
        result.params = [decode_24(*x) for x in zip(lists.params, lists.masters, strict=True)]
    if master.masters == "split":
        joined = zip(lists.params, lists.masters, strict=True)
        result.params = [
            ((h.view(torch.int16).int() << 16) + r.view(torch.int16).int()).view(torch.float32) for h, r in joined
        ]
    result.masters, result.block_words, result.shadows = [], [], []
    return result


def assert_encoded(
    lists: AdamLists, index: int, exp_avg: Tensor, exp_avg_sq: Tensor, words: Any, salt: int | None, step: int
) -> None:
    stored: list[Tensor] = [lists.exp_avgs[index], lists.exp_avg_sqs[index]]
    expected: tuple[Tensor, ...] = (exp_avg, exp_avg_sq)
    if stored[0].dtype == torch.bfloat16:
        expected = round_bf16(exp_avg, words), round_bf16(exp_avg_sq, words)
    if stored[0].dtype == torch.int8:
        stored.append(lists.block_words[index])
        expected = encode_blocks(exp_avg, exp_avg_sq, stored[2].shape[0], salt, step)
    for name, mine, other in zip(("exp_avg", "exp_avg_sq", "block_words"), stored, expected, strict=False):
        assert_bits_equal(mine, other.view(mine.shape), name)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@each_master
@each_moments
def test_every_combination_of_storages(moments: str, master: Master, grad_dtype: torch.dtype) -> None:
    for index, values in enumerate((None, awkward)):
        kinds: dict[str, Any] = {"grad_dtype": grad_dtype, "shadow_dtype": (*DTYPES, None)[index + 1]}
        for amsgrad, options in ((False, ADAMW), (True, ADAM), (True, {**ADAMW, **WITH_SCALARS})):
            lists = mode_lists(SHAPES[:3], 2 + index, moments, master, values=values, amsgrad=amsgrad, **kinds)
            updated = assert_backends_agree(lists, **options, **options_of(lists, master, amsgrad))
            assert (updated.exp_avg_sqs[0].float() != lists.exp_avg_sqs[0].float()).any()


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 200, 640, 1000])
@some_modes
def test_rows_of_any_length(moments: str, master: Master, columns: int) -> None:
    for values in (None, awkward):
        lists = mode_lists([(7, columns), (columns,)], 3, moments, master, values=values, grad_dtype=torch.bfloat16)
        assert_backends_agree(lists, steps=3, **ADAMW, **options_of(lists, master))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", [SPLIT24, SPLIT32, FP32], ids=str)
def test_runs_of_whole_blocks(master: Master, grad_dtype: torch.dtype) -> None:
    """What vector registers take several of: rows of one block to more than a run, cut and strided, by any scalars."""
    for columns in (128, 384, 1152, 1300):
        for values in (None, awkward):
            lists = mode_lists([(3, columns), (2, columns)], 11, "int8", master, values=values, grad_dtype=grad_dtype)
            strided = [[7, 1000, columns, 5 * columns + 3], [9, 0, 2 * columns, 2 * columns]]
            for options in (
                {"lr": 3e-2, "beta1": 0.4, "beta2": 0.95, "maximize": True},
                {**ADAMW, "clip_coef": torch.tensor(0.3)},
            ):
                for table in (None, torch.tensor(strided)):
                    assert_backends_agree(lists, dither=table, **options)


@pytest.mark.parametrize("offset", [1, 2, 3, 17])
@some_modes
def test_unaligned_starts(backend: str, moments: str, master: Master, offset: int) -> None:
    """The bits of an aligned run, and guards on both sides left alone (they are part of the storages compared)."""
    plain = mode_lists([(3, 200), (129,)], 4, moments, master, amsgrad=True, shadow_dtype=torch.float16)
    options = {**ADAMW, **options_of(plain, master)}
    moved = plain.mapped(lambda t: unaligned(t, offset))
    before = moved.clone()
    plain.update(backend, **options)
    moved.update(backend, **options)
    for (name, mine), (_, theirs), (_, was) in zip(moved.named(), plain.named(), before.named(), strict=True):
        assert_bits_equal(mine, theirs, name)
        if mine is not moved.steps:
            for ends in (slice(0, offset), slice(offset + mine.numel(), None)):
                assert_bits_equal(whole_storage(mine)[ends], whole_storage(was)[ends], "guard", exact=True)
    assert_backends_agree(before, **options)


@some_modes
def test_any_memory_order(backend: str, moments: str, master: Master) -> None:
    """Blocks and indices are counted in row-major order, however the tensors lie."""
    plain = mode_lists([(5, 130)], 5, moments, master)
    options = {**ADAMW, **options_of(plain, master)}
    words = plain.block_words
    for order in (transposed, strided):
        mixed = plain.mapped(order)
        mixed.block_words = [t.clone() for t in words]
        expected = plain.clone().update(backend, **options)
        mixed.update(backend, **options)
        for (name, mine), (_, theirs) in zip(mixed.named(), expected.named(), strict=True):
            assert_bits_equal(mine, theirs, name)


@pytest.mark.parametrize("found", [0.0, 1.0])
@some_modes
def test_found_inf_decides_what_is_written(backend: str, moments: str, master: Master, found: float) -> None:
    lists = mode_lists([(2, 200), (40,)], 6, moments, master, amsgrad=True, shadow_dtype=torch.bfloat16)
    lists = lists.mapped(lambda t: unaligned(t, 3))
    before = lists.clone()
    lists.update(backend, found_inf=torch.tensor(found), **ADAMW, **options_of(lists, master))
    if found:
        lists.assert_same(before)
    else:
        assert lists.steps.tolist() == [1.0, 2.0]
        assert_backends_agree(before, found_inf=torch.tensor(found), **ADAMW, **options_of(lists, master))


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moments", "master"), [("bf16", STOCHASTIC), ("bf16", SPLIT24), ("fp32", SPLIT24)], ids=str)
@pytest.mark.parametrize("cut", ["rows", "columns", "flat"])
def test_shards_are_the_whole(backend: str, moments: str, master: Master, cut: str) -> None:
    """Each shard says where it lies in the global tensor, and gets the dither that the whole has there."""
    rows, columns, salt, first = 9, 50, 0xDEADBEEF, 0xFFFFFFF0
    whole = mode_lists([(rows, columns)], 7, moments, master, amsgrad=True)
    parts = {
        "rows": [(slice(0, 4), slice(None)), (slice(4, 9), slice(None))],
        "columns": [(slice(None), slice(0, 13)), (slice(None), slice(13, 50))],
        "flat": [slice(0, 101), slice(101, 102), slice(102, 450)],
    }[cut]
    place = torch.arange(rows * columns).view(rows, columns)
    shards = []
    for part in parts:
        take = (lambda t, part=part: t.view(-1)[part].clone()) if cut == "flat" else lambda t, p=part: t[p].contiguous()
        start, shape = int(take(place).view(-1)[0]), take(place).shape
        local = [salt, first + start, shape[-1], columns if cut == "columns" else shape[-1]]
        shard = whole.mapped(take)
        shard.update(backend, dither=torch.tensor([local]), rounding=master.rounding, **ADAMW)
        shards.append((take, shard))
    table = torch.tensor([[salt, first, rows * columns, 0]])
    whole.update(backend, dither=table, rounding=master.rounding, **ADAMW)
    for take, shard in shards:
        expected = whole.mapped(take)
        for (name, mine), (_, theirs) in zip(shard.named(), expected.named(), strict=True):
            assert_bits_equal(mine, theirs, name)


@pytest.mark.parametrize("columns", [128, 200])
def test_row_shards_of_blocks_are_the_whole(backend: str, columns: int) -> None:
    whole = mode_lists([(9, columns)], 8, "int8", SPLIT24)
    cut = whole.clone()
    whole.update(backend, dither=torch.tensor([[77, 0, 9 * columns, 0]]), **ADAMW)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
        shard = cut.mapped(lambda t, rows=rows: t[rows])
        numel = shard.params[0].numel()
        shard.update(backend, dither=torch.tensor([[77, rows.start * columns, numel, 0]]), **ADAMW)
    cut.steps += 1
    cut.assert_same(whole)


@some_modes
def test_threads_give_the_same_bits(moments: str, master: Master) -> None:
    shapes = [(400, 200), (3,), (130, 517), (33_000,)]
    lists = mode_lists(shapes, 9, moments, master, grad_dtype=torch.bfloat16, shadow_dtype=torch.float16)
    options = {**ADAMW, **WITH_SCALARS, **options_of(lists, master)}
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(lists.clone().update("cpp", **options))
    results[1].assert_same(results[0])
    results[2].assert_same(results[0])
    lists.update("reference", **options).assert_same(results[0])


@some_modes
def test_gradients_are_left_as_they_came(backend: str, moments: str, master: Master) -> None:
    lists = mode_lists([(3, 130)], 10, moments, master)
    before = lists.clone()
    lists.update(backend, **ADAMW, **WITH_SCALARS, **options_of(lists, master))
    assert_bits_equal(lists.grads[0], before.grads[0], exact=True)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "masters", "block_words"):
        for mine, was in zip(getattr(lists, name), getattr(before, name), strict=True):
            assert bool((mine.float() != was.float()).any()), name


def test_rows_of_nothing() -> None:
    assert [rows_of(s) for s in SHAPES] == [3, 2, 0, 1]
