"""sharded_adam's bits: the same from every backend, memory order, shard boundary, tail and thread count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import twin
from reference import (
    DTYPES,
    AdamLists,
    adam_lists,
    assert_bits_equal,
    awkward,
    channels_last,
    ordinary,
    strided,
    transposed,
    unaligned,
    whole_storage,
)
from torch import Tensor

FORMATS = [
    pytest.param(torch.float32, None, id="fp32"),
    pytest.param(torch.float32, "fp32", id="fp32-fp32"),
    pytest.param(torch.bfloat16, "split", id="bf16-split"),
    pytest.param(torch.bfloat16, "fp32", id="bf16-fp32"),
    pytest.param(torch.float16, "fp32", id="fp16-fp32"),
]
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}
WITH_SCALARS: dict[str, Any] = {"grad_scale": torch.tensor(3.0), "clip_coef": torch.tensor(0.3)}


def assert_backends_agree(lists: AdamLists, steps: int = 3, **options: Any) -> AdamLists:
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


# ---- storages and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [None, awkward], ids=["ordinary", "awkward"])
@pytest.mark.parametrize("shadow_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_every_combination_of_dtypes(
    param_dtype: torch.dtype,
    master: str | None,
    grad_dtype: torch.dtype,
    shadow_dtype: torch.dtype | None,
    values: Callable[..., Tensor] | None,
) -> None:
    lists = adam_lists(
        [(3, 5), (0, 8), (), (1100,)],
        1,
        param_dtype=param_dtype,
        master=master,
        grad_dtype=grad_dtype,
        shadow_dtype=shadow_dtype,
        values=values,
    )
    updated = assert_backends_agree(lists, steps=2, **ADAMW)
    assert (updated.params[-1] != lists.params[-1]).any()
    assert_backends_agree(lists, steps=1, **ADAMW, **WITH_SCALARS)


@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.4, 0.0])
@pytest.mark.parametrize("scalars", [{}, WITH_SCALARS], ids=["plain", "scalars"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("decay", [(0.0, False), (0.1, False), (0.1, True)], ids=["none", "coupled", "decoupled"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize(("param_dtype", "master"), [FORMATS[0], FORMATS[2], FORMATS[4]])
def test_every_combination_of_options(
    param_dtype: torch.dtype,
    master: str | None,
    amsgrad: bool,
    decay: tuple[float, bool],
    maximize: bool,
    scalars: dict[str, Tensor],
    beta1: float,
) -> None:
    options = {"weight_decay": decay[0], "decoupled_weight_decay": decay[1], "maximize": maximize, "beta1": beta1}
    for values in (None, awkward):
        lists = adam_lists(
            [(600,), (7,)], 2, param_dtype=param_dtype, master=master, amsgrad=amsgrad, values=values, first_step=3
        )
        assert_backends_agree(lists, steps=2, lr=3e-3, **options, **scalars)


@pytest.mark.parametrize("lr", [0.0, -1e-3, 1e-45, 1e30, torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0), (1.0 - 2.0**-25, 1.0 - 2.0**-26)], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-45, 1.0])
def test_scalars_at_their_ends(lr: float | Tensor, betas: tuple[float, float], eps: float) -> None:
    lists = adam_lists([(300,), (200,)], 3, values=awkward)
    lists.steps = torch.tensor([0.0, 16_777_216.0])
    hyper: dict[str, Any] = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": 1e-2}
    for decoupled in (False, True):
        assert_backends_agree(lists, **hyper, decoupled_weight_decay=decoupled)


@pytest.mark.parametrize("step", [0, 1, 2, 9, 99, 12_345, 999_999, 16_777_214])
def test_bias_corrections_at_many_steps(step: int) -> None:
    lists = adam_lists([(64,)] * 5, 4, first_step=step)
    for betas in ((0.9, 0.999), (0.95, 0.99999)):
        assert_backends_agree(lists, beta1=betas[0], beta2=betas[1], **ADAMW)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan"), 1e-40])
@pytest.mark.parametrize("name", ["grad_scale", "clip_coef"])
def test_scalars_that_are_not_ordinary(name: str, bad: float) -> None:
    assert_backends_agree(adam_lists([(300,)], 5, values=awkward), **ADAMW, **{name: torch.tensor(bad)})


def test_step_index(backend: str) -> None:
    lists = adam_lists([(40,), (3, 4), (7,)], 6)
    lists.steps = torch.tensor([5.0, 1.0, 0.0, 77.0])
    assert_backends_agree(lists, step_index=torch.tensor([3, 0, 2]), **ADAMW)
    sorted_steps = lists.clone()
    sorted_steps.steps = lists.steps[[3, 0, 2]]
    lists.update(backend, step_index=torch.tensor([3, 0, 2]), **ADAMW)
    sorted_steps.update(backend, **ADAMW)
    for mine, theirs in zip(lists.params, sorted_steps.params, strict=True):
        assert_bits_equal(mine, theirs)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 49])
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_unaligned_starts(backend: str, param_dtype: torch.dtype, master: str | None, offset: int) -> None:
    """The bits of an aligned run, and guards on both sides left alone (they are part of the storages compared)."""
    plain = adam_lists(
        [(1, 100), (7, 11), (513,)],
        7,
        param_dtype=param_dtype,
        master=master,
        grad_dtype=torch.bfloat16,
        shadow_dtype=torch.float16,
        amsgrad=True,
    )
    moved = plain.mapped(lambda t: unaligned(t, offset))
    guarded = moved.clone()
    plain.update(backend, **ADAMW)
    moved.update(backend, **ADAMW)
    assert_values_same(moved, plain)
    for (_, tensor), (_, before) in zip(moved.named(), guarded.named(), strict=True):
        if tensor is moved.steps:
            continue
        stop = offset + tensor.numel()
        for ends in (slice(0, offset), slice(stop, None)):
            assert_bits_equal(whole_storage(tensor)[ends], whole_storage(before)[ends], "guard", exact=True)
    assert_backends_agree(guarded, **ADAMW)


def assert_values_same(a: AdamLists, b: AdamLists) -> None:
    """Bit for bit, whatever the strides."""
    remainders = bool(a.masters) and a.masters[0].dtype == torch.bfloat16
    for (name, mine), (_, theirs) in zip(a.named(), b.named(), strict=True):
        assert_bits_equal(mine, theirs, name, exact=remainders and name.startswith("masters"))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "transposed": transposed,
    "channels_last": channels_last,
    "plain": lambda t: t.clone(),
}


@pytest.mark.parametrize("others", sorted(ORDERS))
@pytest.mark.parametrize("grads", sorted(ORDERS))
@pytest.mark.parametrize("params", sorted(ORDERS))
@pytest.mark.parametrize(("param_dtype", "master"), [FORMATS[0], FORMATS[2]])
def test_any_memory_order(
    backend: str, param_dtype: torch.dtype, master: str | None, params: str, grads: str, others: str
) -> None:
    """Parameters, gradients and states in any orders: the values of a row-major run, written where they belong."""
    plain = adam_lists(
        [(2, 3, 4, 5), (3, 1, 2, 2)], 8, param_dtype=param_dtype, master=master, shadow_dtype=torch.float16
    )
    mixed = plain.mapped(ORDERS[others])
    mixed.params = [ORDERS[params](t) for t in plain.params]
    mixed.grads = [ORDERS[grads](t) for t in plain.grads]
    gaps = {name: t.clone() for name, t in mixed.named() if t.is_contiguous()}
    for _ in range(2):
        plain.update(backend, **ADAMW)
        mixed.update(backend, **ADAMW)
    assert_values_same(mixed, plain)
    assert gaps.keys() == {name for name, t in mixed.named() if t.is_contiguous()}
    for _, tensor in mixed.named():
        whole = whole_storage(tensor)
        if tensor.dim() == 4 and whole.numel() == 2 * tensor.numel():  # strided(): every other element is a guard
            assert (whole[1::2] == 77).all()


def test_channels_last_is_updated_in_place() -> None:
    """The usual orders of a convolution: parameter and states alike, the gradient plain. No copy of the parameter."""
    lists = adam_lists([(8, 3, 5, 5)], 9).mapped(channels_last)
    pointers = [t.data_ptr() for _, t in lists.named()]
    lists.grads = [lists.grads[0].contiguous()]
    assert_backends_agree(lists, **ADAMW)
    assert pointers[0] == lists.params[0].data_ptr()


@pytest.mark.parametrize("numel", range(1, 71))
def test_tails(numel: int) -> None:
    """Every length around the vector widths; each element as in a longer tensor, whatever its place."""
    for (param_dtype, master), grad_dtype in (
        ((torch.float32, None), torch.float32),
        ((torch.bfloat16, "split"), torch.bfloat16),
        ((torch.float16, "fp32"), torch.float16),
    ):
        kinds: dict[str, Any] = {"param_dtype": param_dtype, "master": master, "grad_dtype": grad_dtype}
        whole = adam_lists([(200,)], 10, amsgrad=True, **kinds)
        for start in (0, 1, 64 + numel % 7):
            part = whole.mapped(lambda t, start=start: t[start : start + numel].clone())
            part.update("cpp", **ADAMW)
            full = whole.clone().update("cpp", **ADAMW)
            assert_values_same(part, full.mapped(lambda t, start=start: t[start : start + numel]))
        assert_backends_agree(whole.mapped(lambda t: unaligned(t[:numel])), **ADAMW)


@pytest.mark.parametrize(
    "pieces", [(1, 999), (333, 333, 334), (1, 2, 3, 5, 8, 981), (512, 488), (500, 0, 500)], ids=str
)
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_pieces_are_the_whole(
    backend: str, param_dtype: torch.dtype, master: str | None, pieces: tuple[int, ...]
) -> None:
    """Any shard boundaries: a world of any size ends with the same bits."""
    kinds: dict[str, Any] = {"param_dtype": param_dtype, "master": master, "shadow_dtype": torch.bfloat16}
    whole = adam_lists([(1000,)], 11, values=awkward, amsgrad=True, **kinds)
    cut = whole.clone()
    whole.update(backend, **ADAMW, **WITH_SCALARS)
    for rank in range(len(pieces)):
        shard = cut.mapped(lambda t, rank=rank: t.split(pieces)[rank])
        shard.update(backend, **ADAMW, **WITH_SCALARS)
    cut.steps += 1
    cut.assert_same(whole)


@pytest.mark.parametrize(("rows", "columns", "world_size"), [(1601, 1280, 4), (3, 50, 8), (1, 7, 2)])
def test_uneven_rows(rows: int, columns: int, world_size: int) -> None:
    whole = adam_lists([(rows, columns)], 12)
    cut = whole.clone()
    whole.update("cpp", **ADAMW)
    counts = []
    per_rank = -(-rows // world_size)
    for rank in range(world_size):
        part = slice(min(rank * per_rank, rows), min((rank + 1) * per_rank, rows))
        counts.append(part.stop - part.start)
        shard = AdamLists(
            *([t[part] for t in getattr(cut, name)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")),
            steps=torch.zeros(1),
        )
        shard.update("cpp", **ADAMW)
        assert shard.steps == 1, "ranks without rows count as well"
    cut.steps += 1
    cut.assert_same(whole)
    if rows == 1601:
        assert counts == [401, 401, 401, 398]


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_threads_give_the_same_bits(param_dtype: torch.dtype, master: str | None, amsgrad: bool) -> None:
    lists = adam_lists(
        [(70_001,), (3,), (130, 517), (40_000,)],
        13,
        param_dtype=param_dtype,
        master=master,
        grad_dtype=torch.bfloat16,
        shadow_dtype=torch.float16,
        amsgrad=amsgrad,
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(lists.clone().update("cpp", **ADAMW, **WITH_SCALARS))
    results[1].assert_same(results[0])
    results[2].assert_same(results[0])
    assert_backends_agree(lists, steps=1, **ADAMW, **WITH_SCALARS)


def test_gradients_are_left_as_they_came(backend: str) -> None:
    lists = adam_lists([(50,), (6, 7)], 14)
    before = [g.clone() for g in lists.grads]
    lists.update(backend, lr=1e-2, maximize=True, weight_decay=0.1, **WITH_SCALARS)
    for grad, was in zip(lists.grads, before, strict=True):
        assert_bits_equal(grad, was, exact=True)


def test_parameters_that_require_grad(backend: str) -> None:
    """Leaf parameters are updated with gradients enabled, and what autograd saved of them is known to be stale."""
    lists = adam_lists([(5,)], 15)
    plain = lists.clone().update(backend, **ADAMW)
    lists.params[0].requires_grad_()
    loss = (lists.params[0] * lists.params[0]).sum()
    versions = [t._version for _, t in lists.named()]
    lists.update(backend, **ADAMW)
    assert lists.params[0].requires_grad
    assert lists.params[0].is_leaf
    assert_bits_equal(lists.params[0], plain.params[0])
    for (name, tensor), version in zip(lists.named(), versions, strict=True):
        assert (tensor._version > version) == (not name.startswith("grads")), name
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ordinary_runs_are_ordinary() -> None:
    """The generators give what they say: a test over awkward values that were all NaN would prove little."""
    values = awkward(20_000, 1)
    assert 0.02 < float(values.isnan().float().mean()) < 0.2
    assert bool(((values != 0) & (values.abs() < 2.0**-126)).any())
    assert ordinary(1000, seed=1).isfinite().all()
    updated = adam_lists([(20_000,)], 1, values=awkward).update("cpp", **ADAMW)
    assert float(updated.params[0].isfinite().float().mean()) > 0.3
