"""sharded_adam in triton's interpreter, against the reference. Run by test_triton.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from adam_state import ADAMW, BF16, BLOCK, F16, F32, State, compare, make_state
from torch import Tensor
from triton_interpreter import Watch, assert_same

from shardops import ops
from shardops.backends.triton import _adam_scalars
from shardops.backends.triton._adam_elements import update_kernel

# Parameters and their masters: (dtype, None), (dtype, "fp32"), (bfloat16, "split").
FORMATS = ((F32, None), (F32, "fp32"), (BF16, "split"), (BF16, "fp32"), (F16, "fp32"))
each_format = pytest.mark.parametrize("form", FORMATS, ids=str)


@each_format
@pytest.mark.parametrize("shadow", [None, F32, BF16, F16], ids=str)
def test_dtypes(form: tuple[torch.dtype, str | None], shadow: torch.dtype | None) -> None:
    # Every gradient dtype in each format, and in each shadow dtype.
    grad = (F32, BF16, F16)[(FORMATS.index(form) + (None, F32, BF16, F16).index(shadow)) % 3]
    state = make_state([2 * BLOCK, 0, 70], form, grad, shadow, amsgrad=shadow == BF16)
    compare(state, **ADAMW)


@each_format
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_any_bits(form: tuple[torch.dtype, str | None], amsgrad: bool, coupled: bool) -> None:
    state = make_state([BLOCK + 3, BLOCK], form, form[0], BF16, amsgrad, extreme=True)
    options = {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": not coupled}
    compare(state, **options)
    compare(state, **options)


@pytest.mark.parametrize("form", FORMATS[::2], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True, "decoupled_weight_decay": True},
        {"maximize": True, "clip_coef": torch.tensor(0.37)},
        {"beta1": 0.5},  # lerp from the gradient's end
        {"beta1": 0.3, "beta2": 0.95, "eps": 1e-3},
        {"beta1": 0.0, "beta2": 0.0},
        {"lr": torch.tensor(3e-3)},
        {"lr": torch.tensor(3e-3, dtype=torch.float64), "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"grad_scale": torch.tensor(65536.0), "clip_coef": torch.tensor([0.1]), "found_inf": torch.zeros(1)},
        {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(0.0), "lr": 1e-45},
        {"eps": 0.0, "beta2": 0.999999, "lr": 1e3},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(form: tuple[torch.dtype, str | None], options: dict[str, Any]) -> None:
    state = make_state([BLOCK, 9], form, form[0])
    compare(state, **{"lr": 1e-2} | options)


@each_format
@pytest.mark.parametrize("value", [1.0, float("nan"), -2.0])
def test_found_inf_stores_nothing(form: tuple[torch.dtype, str | None], value: float) -> None:
    state = make_state([BLOCK + 1, BLOCK], form, form[0], BF16, amsgrad=True)
    before = state.clone()
    watch = state.step("triton", found_inf=torch.tensor(value), grad_scale=torch.tensor(2.0), **ADAMW)
    assert watch.stored == 0
    for one, other in zip(state.written(), before.written(), strict=True):
        assert_same(one, other, exact=True)


@each_format
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned(form: tuple[torch.dtype, str | None], offset: int) -> None:
    state = make_state([BLOCK + 5, 2 * BLOCK], form, BF16, F16, amsgrad=True, offset=offset)
    assert {tensor.data_ptr() % 16 for tensor in state.exp_avgs} == {4 * offset % 16}
    compare(state, **ADAMW)


def test_one_unaligned_tensor_among_aligned() -> None:
    """Each list in turn holds the tensor that rules the wide path out, and no other does."""
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "shadows")
    for name in names:
        state = make_state([BLOCK], (BF16, "split"), BF16, BF16, amsgrad=True)
        aligned = getattr(state, name)[0]
        setattr(state, name, [torch.cat([aligned.new_zeros(1), aligned])[1:]])
        compare(state, **ADAMW)


@each_format
def test_every_tail(form: tuple[torch.dtype, str | None]) -> None:
    """Tensors of 1 to 70 elements, each with its counter."""
    # All of them for the two formats that differ most; a spread for the others, which share their code.
    sizes = range(1, 71) if form in ((F32, None), (BF16, "split")) else range(1 + FORMATS.index(form), 71, 5)
    state = make_state(list(sizes), form, form[0])
    watch = compare(state, lr=1e-3)
    assert watch.launches == ["scalars_kernel", "update_kernel"]


def test_more_tensors_than_one_program_takes() -> None:
    state = make_state(([1] + [0] * 19) * 12)
    state.steps = torch.arange(300.0)
    index = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:240]
    compare(state, step_index=index, **ADAMW)


def test_empty_tensors() -> None:
    state = make_state([0, 0])
    watch = compare(state, **ADAMW)
    assert state.steps.tolist() == [1.0, 2.0]
    assert watch.launches == ["scalars_kernel"]
    ops.sharded_adam([], [], [], [], torch.zeros(0), lr=1.0, backend="triton")


def test_counters_to_the_end_of_float32() -> None:
    state = make_state([3] * 6)
    state.steps = torch.tensor([0.0, 1.0, 999.0, 123456.0, 2.0**24 - 1, 2.0**24])
    compare(state, lr=1e-3, beta2=1 - 1e-9)


def test_shapes_and_orders_of_dimensions() -> None:
    def made() -> list[Tensor]:
        return [torch.randn(3, 4, 2).permute(2, 0, 1), torch.randn(()), torch.randn(5, 7).t()]

    torch.manual_seed(0)
    state = State(made(), made(), made(), [t.abs() for t in made()], [], [], [], [], torch.zeros(3))
    watched = [*state.grads, *state.written()]
    expected = State(*([t.clone() for t in ts] for ts in (state.params, state.grads, state.exp_avgs)),
                     [t.clone() for t in state.exp_avg_sqs], [], [], [], [], state.steps.clone())  # fmt: skip
    expected.step("reference", **ADAMW)
    state.step("triton", **ADAMW)
    for one, other in zip(watched, [*expected.grads, *expected.written()], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("form", "grad", "shadow", "amsgrad", "loaded", "stored"),
    [
        ((F32, None), F32, None, False, 16, 12),
        ((F32, None), F32, BF16, True, 20, 18),
        ((F32, None), BF16, None, False, 14, 12),
        ((BF16, "split"), BF16, None, False, 14, 12),
        ((BF16, "split"), BF16, BF16, False, 14, 14),
        ((BF16, "split"), F32, None, True, 20, 16),
        ((F16, "fp32"), F16, None, False, 14, 14),
        ((BF16, "fp32"), F32, None, False, 16, 14),
    ],
    ids=str,
)
def test_bytes_are_the_minimum(
    form: tuple[torch.dtype, str | None],
    grad: torch.dtype,
    shadow: torch.dtype | None,
    amsgrad: bool,
    loaded: int,
    stored: int,
) -> None:
    state = make_state([2 * BLOCK, BLOCK], form, grad, shadow, amsgrad)
    watch = state.step("triton", **ADAMW)
    counters = 2 * 4
    assert (watch.loaded, watch.stored) == (3 * BLOCK * loaded + counters, 3 * BLOCK * stored + counters)


def test_offsets_past_32_bits() -> None:
    """The last chunk of 2^33 + 5 elements, of which only that chunk exists."""
    numel, state = 2**33 + 5, make_state([5])
    expected = state.clone()
    expected.step("reference", lr=1e-3)
    lists = (state.params, state.grads, state.exp_avgs, state.exp_avg_sqs)
    rows = torch.zeros(_adam_scalars.COLUMNS.value, dtype=torch.int64)
    rows[:4] = torch.tensor([t[0].data_ptr() - 4 * 2**33 for t in lists])
    rows[_adam_scalars.COUNTER.value] = state.steps.data_ptr()
    rows[-1] = numel
    scalars = torch.empty(_adam_scalars.SCALARS.value)
    with Watch(state.grads, state.written()):
        _adam_scalars.scalars_kernel[(1,)](
            rows, scalars, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, None, None, None,
            DECOUPLED=False, FROM_GRAD=False, MAXIMIZE=False, TENSORS=1,
        )  # fmt: skip
        update_kernel[(1,)](
            rows, torch.tensor([2**33 // BLOCK]), scalars, None, None, PARAM=tl.float32, GRAD=tl.float32,
            MOMENT=tl.float32, MASTER=None, SHADOW=None, COUPLED=False, FROM_GRAD=False, AMSGRAD=False, DITHERED=False,
            STRIDED=False, VECTOR=4, BLOCK=BLOCK,
        )  # fmt: skip
    for one, other in zip(state.written(), expected.written(), strict=True):
        assert_same(one, other)


def test_results_do_not_depend_on_where_a_shard_begins() -> None:
    whole = make_state([3 * BLOCK], (BF16, "split"), BF16)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")
    cut = whole.clone()
    parts = {
        name: list(getattr(cut, name)[0].split([777, 1, 2 * BLOCK, 3 * BLOCK - 778 - 2 * BLOCK])) for name in names
    }
    shards = dataclasses.replace(cut, **parts, steps=torch.zeros(4))
    whole.step("triton", seed=1, **ADAMW)
    shards.step("triton", seed=2, **ADAMW)
    for name in names:
        assert_same(getattr(cut, name)[0], getattr(whole, name)[0])


def test_torch_op_and_direct_checks() -> None:
    state, expected = make_state([BLOCK]), make_state([BLOCK])
    expected.step("reference", lr=1e-3)
    op = torch.ops.shardops.sharded_adam.triton
    tail = (None, 0, 1e-3, 0.9, 0.999, 1e-8, 0.0, False, False, None, None, None, None)
    lists = [state.params, state.grads, state.exp_avgs, state.exp_avg_sqs, [], [], [], []]
    op(*lists, state.steps, None, *tail)
    assert_same(state.params[0], expected.params[0])
    for column, wrong, message in [
        (1, [torch.zeros(BLOCK - 1)], r"grads\[0\] is torch.float32 .* with 1023 elements"),
        (2, [torch.zeros(BLOCK).half()], r"exp_avgs have dtype torch.float16"),
        (3, [torch.zeros(BLOCK).half()], r"exp_avg_sqs\[0\] is torch.float16"),
        (3, [], "exp_avg_sqs has 0 tensors"),
        (5, [torch.zeros(BLOCK).bfloat16()], "masters are float32, or remainders"),
    ]:
        with pytest.raises(ValueError, match=message):
            op(*lists[:column], wrong, *lists[column + 1 :], state.steps, None, *tail)
    for index in ([1], [-1], [0, 0]):
        with pytest.raises(ValueError, match="a counter of its own"):
            op(*lists, state.steps, torch.tensor(index), *tail)
    assert np.isclose(state.steps.item(), 1.0)
