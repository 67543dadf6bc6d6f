"""sharded_adam's narrow storages in triton's interpreter, against the reference. Run by test_triton.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from adam_state import ADAMW, BF16, F16, F32, INT8, Form, State, compare, make_state, moved
from torch import Tensor
from triton_interpreter import Watch, assert_same

from shardops import ops
from shardops.backends.triton import _adam_scalars
from shardops.backends.triton._adam_blocks import update_blocks_kernel

FORMS: tuple[Form, ...] = (
    (F32, None), (F32, "fp32"), (BF16, "fp32"), (BF16, "split"), (BF16, "split24"), (BF16, "nearest"),
    (BF16, "stochastic"), (F16, "fp32"), (F16, "nearest"),
)  # fmt: skip
# Storages of which each takes a way of its own through a kernel.
WAYS: tuple[tuple[torch.dtype, Form], ...] = (
    (INT8, (F32, None)), (INT8, (BF16, "split24")), (INT8, (BF16, "stochastic")), (BF16, (BF16, "split24")),
    (BF16, (BF16, "stochastic")), (BF16, (F16, "nearest")), (F32, (BF16, "split24")),
)  # fmt: skip
each_way = pytest.mark.parametrize(("moment", "form"), WAYS, ids=str)
# Rows of one block, of one element more, of five blocks, of a block and a half; more than one program of the first.
SHAPES = ((17, 128), (2, 129), (1, 640), (0, 128), (4, 200))


def table(state: State, kind: str, seed: int = 0) -> Tensor | None:
    """No dither; dither by position in a shard; or by columns of rows that lie in a wider tensor."""
    if kind == "none" and state.rounding != "stochastic":
        return None
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for param in state.params:
        columns = max(param.numel(), 1) if kind != "strided" else max(param.shape[-1], 1)
        salt, first = (int(torch.randint(0, 1 << bits, (), generator=generator)) for bits in (32, 40))
        rows.append((salt, first, columns, columns + 3 if kind == "strided" else columns))
    return torch.tensor(rows)


@pytest.mark.parametrize("moment", [F32, BF16, INT8], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["none", "dense", "strided"])
def test_every_storage(form: Form, moment: torch.dtype, kind: str) -> None:
    number = FORMS.index(form) + ("none", "dense", "strided").index(kind)
    grad, shadow = (F32, BF16, F16)[number % 3], (None, F32, BF16, F16)[number % 4]
    shapes = SHAPES if kind == "dense" else SHAPES[number % 2 :: 2]
    state = make_state(shapes, form, grad, shadow, amsgrad=number % 2 == 1, moment=moment)
    watch = compare(state, dither=table(state, kind), **ADAMW | {"decoupled_weight_decay": number % 3 != 0})
    assert watch.launches == ["scalars_kernel", "update_blocks_kernel" if moment == INT8 else "update_kernel"]


@each_way
@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"beta1": 0.3, "eps": 0.0}], ids=str)
def test_any_bits(moment: torch.dtype, form: Form, options: dict[str, Any]) -> None:
    """NaN, infinities, denormals and huge values, in gradients, masters and moments; twice."""
    amsgrad = "eps" in options
    state = make_state([(17, 128), (2, 200)], form, form[0], BF16, amsgrad, moment=moment, extreme=True)
    for _ in range(2):
        compare(state, dither=table(state, "dense"), lr=0.1, **options)


@pytest.mark.parametrize("form", [(BF16, "split24"), (BF16, "stochastic")], ids=str)
def test_the_largest_values_stay_finite(form: Form) -> None:
    """Masters between the largest storable value and the end of float32, which dither would make infinite."""
    state = make_state([(16, 128)], form, F32)
    largest, rest = (0x7F80, -1) if form[1] == "split24" else (0x7F7F, 0)
    bits = torch.tensor([largest, largest - 0x8000], dtype=torch.int16)
    state.params[0].view(torch.int16).view(-1, 2).copy_(bits)
    for tensor, value in ((state.grads[0], 0.0), (state.exp_avgs[0], 0.0), *((t, rest) for t in state.masters)):
        tensor.fill_(value)
    growth = 100 * 2.0**-23  # 200 patterns
    compare(state, lr=1.0, weight_decay=-growth, decoupled_weight_decay=True, dither=table(state, "dense"))
    if not state.masters:
        assert state.params[0].isfinite().all()


def test_any_codes_and_words() -> None:
    """Words that no encoder writes: bits of a damaged state do the same in every backend."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((16, 128), (2, 300)):
        state = make_state([shape], (BF16, "split24"), BF16, moment=INT8)
        for tensor in (state.exp_avgs[0], state.exp_avg_sqs[0], state.block_words[0], state.masters[0]):
            bits = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), generator=generator)
            tensor.view(torch.uint8).view(-1).copy_(bits)
        compare(state, **ADAMW)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e-6, 1e6, 1e18, 1e25])
def test_blocks_of_one_kind(scale: float) -> None:
    """All zero, so small that squares vanish, so large that they overflow; a block with one element that is not."""
    state = make_state([(16, 128), (4, 128)], (BF16, "split24"), F32, moment=INT8)
    for step in range(2):
        for grad in state.grads:
            grad.copy_(torch.randn(grad.shape, generator=torch.Generator().manual_seed(step)) * scale)
            grad[::2, 5] = 1.0
            grad[3:] = 0.0
        if not step:  # a new state
            for tensor in (*state.exp_avgs, *state.exp_avg_sqs, *state.block_words):
                tensor.zero_()
        compare(state, dither=table(state, "dense"), lr=1e-2)


@each_way
def test_found_inf_stores_nothing(moment: torch.dtype, form: Form) -> None:
    state = make_state([(17, 128), (2, 200)], form, form[0], BF16, amsgrad=True, moment=moment)
    options = {"dither": table(state, "dense"), "grad_scale": torch.tensor(3.0), **ADAMW}
    before = state.clone()
    watch = state.step("triton", found_inf=torch.ones(1), **options)
    assert watch.stored == 0
    for one, other in zip(state.written(), before.written(), strict=True):
        assert_same(one, other, exact=True)
    compare(state, found_inf=torch.zeros(1), clip_coef=torch.tensor(0.3), **options)


@each_way
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_unaligned(moment: torch.dtype, form: Form, offset: int) -> None:
    state = make_state([(17, 128), (1, 130)], form, BF16, F16, offset=offset, moment=moment)
    compare(state, dither=table(state, "dense"), **ADAMW)


@pytest.mark.parametrize(("moment", "form"), [(INT8, (BF16, "split24")), (BF16, (BF16, "split"))], ids=str)
def test_one_unaligned_tensor_among_aligned(moment: torch.dtype, form: Form) -> None:
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "shadows", "block_words"):
        state = make_state([(16, 128)], form, BF16, BF16, moment=moment)
        tensors = getattr(state, name)
        if tensors:
            setattr(state, name, [moved(tensors[0], 1)])
            compare(state, **ADAMW)


@each_way
def test_every_tail(moment: torch.dtype, form: Form) -> None:
    shapes = [*((1, n) for n in (1, 2, 3, 127, 128, 129, 255, 257)), (2, 100), (3, 100)]
    state = make_state(shapes, form, form[0], moment=moment)
    compare(state, dither=table(state, "dense"), **ADAMW)


# Bytes of an element, besides the words: gradient, parameter, moments, master, max_exp_avg_sq; then those stored.
@pytest.mark.parametrize(
    ("moment", "form", "grad", "amsgrad", "loaded", "stored"),
    [
        (INT8, (BF16, "split24"), BF16, False, 7, 5),
        (INT8, (BF16, "split"), BF16, False, 8, 6),
        (INT8, (BF16, "stochastic"), BF16, False, 6, 4),
        (INT8, (F32, None), F32, True, 14, 10),
        (BF16, (BF16, "split24"), BF16, False, 9, 7),
        (BF16, (BF16, "stochastic"), F32, False, 10, 6),
        (BF16, (BF16, "fp32"), BF16, False, 10, 10),
        (F32, (BF16, "split24"), BF16, False, 13, 11),
        (F32, (F16, "nearest"), F16, False, 12, 10),
    ],
    ids=str,
)
def test_bytes_are_the_minimum(
    moment: torch.dtype, form: Form, grad: torch.dtype, amsgrad: bool, loaded: int, stored: int
) -> None:
    state = make_state([(16, 128), (8, 256), (2, 333)], form, grad, None, amsgrad, moment=moment)
    numel = 16 * 128 + 8 * 256 + 2 * 333
    watch = state.step("triton", dither=table(state, "dense"), **ADAMW)
    # Both words of a block are read and written once: 0.06 bytes an element in whole blocks.
    words = 8 * (16 + 8 * 2 + 2 * 3) if moment == INT8 else 0
    counters = 3 * 4
    assert (watch.loaded, watch.stored) == (numel * loaded + words + counters, numel * stored + words + counters)


def test_offsets_past_32_bits() -> None:
    """The last tile of 2^26 + 8 rows of one block, of which only that tile exists."""
    rows, beyond, state = 2**26 + 8, 2**33, make_state([(8, 128)], (BF16, "split24"), BF16, moment=INT8)
    expected = state.clone()
    expected.step("reference", lr=1e-3, dither=torch.tensor([(5, beyond, 8 * 128, 0)]))
    row = torch.zeros(_adam_scalars.COLUMNS.value, dtype=torch.int64)
    for column, name in ((0, "params"), (1, "grads"), (2, "exp_avgs"), (3, "exp_avg_sqs"), (5, "masters")):
        tensor = getattr(state, name)[0]
        row[column] = tensor.data_ptr() - beyond * tensor.element_size()
    row[_adam_scalars.WORDS.value] = state.block_words[0].data_ptr() - 8 * 2**26
    row[_adam_scalars.COUNTER.value] = state.steps.data_ptr()
    row[_adam_scalars.SALT.value], row[_adam_scalars.BLOCK_COLUMNS.value], row[-1] = 5, 128, rows
    scalars = torch.empty(_adam_scalars.SCALARS.value)
    with Watch(state.grads, state.written()):
        _adam_scalars.scalars_kernel[(1,)](
            row, scalars, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, None, None, None,
            DECOUPLED=False, FROM_GRAD=False, MAXIMIZE=False, TENSORS=1,
        )  # fmt: skip
        update_blocks_kernel[(1,)](
            row, torch.tensor([2**26 // 8]), scalars, None, None, PARAM=tl.int16, GRAD=tl.bfloat16, MASTER=tl.int8,
            SHADOW=None, COUPLED=False, FROM_GRAD=False, AMSGRAD=False, STRIDED=False, VECTOR=8, BLOCKS=8,
        )  # fmt: skip
    for one, other in zip(state.written(), expected.written(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("moment", "form"), [(INT8, (BF16, "split24")), (BF16, (BF16, "stochastic"))], ids=str)
def test_results_do_not_depend_on_the_sharding(moment: torch.dtype, form: Form) -> None:
    """A tensor updated whole, by rows, and, where its storage is not in blocks of a row, by columns: the same bits."""
    before = make_state([(24, 256)], form, BF16, moment=moment)
    whole = before.clone()
    whole.step("triton", seed=1, dither=torch.tensor([(7, 0, 24 * 256, 0)]), **ADAMW)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "block_words")
    cuts = [(0, [5, 11, 8], (0, 5 * 256, 16 * 256)), (1, [100, 156], (0, 100))]
    for dim, lengths, firsts in cuts if moment == BF16 else cuts[:1]:
        pieces = {
            name: [
                part.clone(memory_format=torch.contiguous_format)
                for tensor in getattr(before.clone(), name)
                for part in tensor.split(lengths, dim)
            ]
            for name in names
        }
        rows = [(7, first, part.shape[1], 256) for first, part in zip(firsts, pieces["params"], strict=True)]
        shards = State(**pieces, max_exp_avg_sqs=[], shadows=[], steps=torch.zeros(len(rows)), rounding=before.rounding)
        shards.step("triton", seed=2, dither=torch.tensor(rows), **ADAMW)
        for name in names:
            if getattr(whole, name):
                assert_same(torch.cat(getattr(shards, name), dim), getattr(whole, name)[0])


def test_direct_checks() -> None:
    state = make_state([(2, 128)], (BF16, "split24"), BF16, moment=INT8)
    op = torch.ops.shardops.sharded_adam.triton
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "shadows", "block_words")
    tail = (1e-3, 0.9, 0.999, 1e-8, 0.0, False, False, None, None, None, None)

    def call(dither: Tensor | None = None, rounding: int = 0, **changed: list[Tensor]) -> None:
        lists = [changed.get(name, getattr(state, name)) for name in names]
        op(*lists, state.steps, None, dither, rounding, *tail)

    before = state.clone()
    code = torch.zeros(2, 128, dtype=torch.uint8)
    for changed, message in [
        ({"exp_avg_sqs": [code.to(INT8)]}, r"exp_avg_sqs\[0\] is torch.int8"),
        ({"exp_avgs": [code]}, "exp_avgs have dtype torch.uint8"),
        ({"block_words": []}, "block_words has 0 tensors"),
        ({"block_words": [torch.zeros(2, 2, 2, dtype=torch.int32)]}, "with a block for every 128"),
        ({"block_words": [torch.zeros(2, 1, 2)]}, r"block_words\[0\] is torch.float32"),
        ({"block_words": [torch.zeros(2, 2, 2, dtype=torch.int32)[:, ::2]]}, "strides"),
        ({"rounding": 2}, "rounding is 2"),
        ({"masters": []}, "rounding is 0"),
        ({"dither": torch.tensor([[-1, 0, 1, 1]])}, "a row .salt in"),
        ({"dither": torch.zeros(2, 4, dtype=torch.int64)}, "for 1 params"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**changed)  # type: ignore[arg-type]
    for one, other in zip(state.written(), before.written(), strict=True):
        assert_same(one, other, exact=True)
    call(torch.tensor([[0, 0, 256, 0]]))
    assert not torch.equal(state.params[0], before.params[0])
    ops.sharded_adam([], [], [], [], torch.zeros(0), lr=1.0, backend="triton")
