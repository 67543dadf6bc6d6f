"""The parameters an optimizer may be given: dtypes, layouts, frozen, unused, shared and moved ones, odd gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from optim_helpers import (
    assert_close_to_torch,
    assert_same,
    clones,
    make_params,
    one,
    parameters,
    set_grads,
    snapshot,
    train,
)
from reference import assert_bits_equal, channels_last, clone_storage, ordinary, strided, transposed, unaligned
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.optim import attachers, checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def test_several_dtypes_in_one_group_train_as_if_alone(backend: str) -> None:
    mixed = [p for dtype in DTYPES for p in make_params(dtype=dtype)]
    optimizer = FusedShardedAdamW(mixed, backend=backend)
    alone = [FusedShardedAdamW([copy.deepcopy(p)], backend=backend) for p in mixed]
    for step in range(3):
        set_grads(mixed, step)
        for param, single in zip(mixed, alone, strict=True):
            parameters(single)[0].grad = param.grad.clone()
            single.step()
        optimizer.step()
    for param, single in zip(mixed, alone, strict=True):
        theirs = parameters(single)[0]
        assert_bits_equal(param, theirs)
        assert_bits_equal(optimizer.master_param(param), single.master_param(theirs))


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_another_dtype(dtype: torch.dtype, grad_dtype: torch.dtype, backend: str) -> None:
    """A gradient is widened to fp32, whatever its dtype: the master goes where an fp32 parameter goes."""
    params = make_params(dtype=dtype)
    wide = [nn.Parameter(p.detach().float().clone()) for p in params]
    optimizer, expected = FusedShardedAdam(params, backend=backend), FusedShardedAdam(wide, backend=backend)
    for param in params:
        param.grad_dtype = None  # type: ignore[attr-defined]
    for step in range(3):
        set_grads(wide, step, dtype=grad_dtype)
        for param, other in zip(params, wide, strict=True):
            param.grad = other.grad.to(grad_dtype)
        optimizer.step()
        expected.step()
    for param, other in zip(params, wide, strict=True):
        assert_bits_equal(optimizer.master_param(param), other)


@pytest.mark.parametrize("after", DTYPES)
@pytest.mark.parametrize("before", DTYPES)
def test_a_model_cast_in_mid_training(before: torch.dtype, after: torch.dtype, backend: str) -> None:
    """``module.to(dtype)`` replaces the data of the same parameter objects."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2).to(before)
    optimizer = FusedShardedAdam(module.parameters(), lr=0.1, backend=backend)
    train(optimizer, 2)
    module.to(after)
    start = clones(optimizer.master_param(p) for p in module.parameters())
    optimizer.zero_grad()
    set_grads(module.parameters(), 2)
    optimizer.step()
    for param, first in zip(module.parameters(), start, strict=True):
        state = optimizer.state[param]
        assert float(state["step"]) == 3.0
        update = state["exp_avg"] / (1 - 0.9**3) / ((state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
        # The update of 0.1 at most is rounded by a handful of operations, the master below 1 once.
        assert torch.allclose(optimizer.master_param(param), first - 0.1 * update, rtol=0, atol=2**-24 + 0.1 * 2**-20)
        assert param.dtype == after


# ---- memory layouts --------------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": transposed,
    "strided": strided,  # with gaps that nobody may write
    "unaligned": unaligned,
    "channels last": lambda t: channels_last(t.view(1, *t.shape, 1)).view(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_layout", ["contiguous", "transposed", "strided", "unaligned", "expanded"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "unaligned"])
def test_layouts_of_parameters_and_gradients(layout: str, grad_layout: str, dtype: torch.dtype, backend: str) -> None:
    values = [ordinary(6, 5, seed=1, dtype=dtype), ordinary(9, seed=2, dtype=dtype)]
    plain = FusedShardedAdamW([nn.Parameter(v.clone()) for v in values], amsgrad=True, backend=backend)

    def laid_out(tensor: Tensor, name: str) -> Tensor:
        if name == "contiguous" or (name == "transposed" and tensor.dim() < 2):
            return tensor.clone()
        if name == "expanded":
            return tensor[:1].clone().expand_as(tensor)
        return LAYOUTS[name](tensor)

    params = [nn.Parameter(laid_out(v, layout)) for v in values]
    optimizer = FusedShardedAdamW(params, amsgrad=True, max_grad_norm=1e3, backend=backend)
    for step in range(3):
        for index, (param, other) in enumerate(zip(params, parameters(plain), strict=True)):
            grad = laid_out(ordinary(*param.shape, seed=10 * step + index, dtype=dtype), grad_layout)
            param.grad, other.grad = grad, grad.clone(memory_format=torch.contiguous_format)
        storages = [clone_storage(p.grad) for p in params]
        optimizer.step()
        plain.step()
        assert all(torch.equal(p.grad, s) for p, s in zip(params, storages, strict=True))
    assert_same(snapshot(optimizer), snapshot(plain))
    for param in params:
        storage = torch.empty(0, dtype=dtype).set_(param.detach().untyped_storage())
        if storage.numel() > param.numel():
            assert (storage == 77.0).sum() == storage.numel() - param.numel()


@pytest.mark.parametrize("grad_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_convolution(grad_format: torch.memory_format, backend: str) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 3)
    other = copy.deepcopy(module)
    module.to(memory_format=torch.channels_last)
    optimizer = FusedShardedAdam(module.parameters(), backend=backend)
    plain = FusedShardedAdam(other.parameters(), backend=backend)
    for step in range(3):
        set_grads(other.parameters(), step)
        module.weight.grad = other.weight.grad.clone(memory_format=grad_format)
        module.bias.grad = other.bias.grad.clone()
        optimizer.step()
        plain.step()
    assert module.weight.stride() == optimizer.state[module.weight]["exp_avg"].stride() == (27, 1, 9, 3)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_a_model_made_channels_last_in_mid_training(backend: str) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 2).to(torch.bfloat16)
    other = copy.deepcopy(module)
    optimizer = FusedShardedAdam(module.parameters(), backend=backend)
    plain = FusedShardedAdam(other.parameters(), backend=backend)
    for step in range(4):
        for each in (optimizer, plain):
            train(each, 1, first=step)
        if step == 1:
            masters = clones(map(optimizer.master_param, module.parameters()))
            module.to(memory_format=torch.channels_last)
            for mine, kept in zip(map(optimizer.master_param, module.parameters()), masters, strict=True):
                assert_bits_equal(mine, kept)
    assert module.weight.stride() != other.weight.stride()
    assert_same(snapshot(optimizer), snapshot(plain))


def test_data_replaced_under_the_same_parameter(backend: str) -> None:
    params = make_params(((5,), (3,)))
    optimizer = FusedShardedAdam(params, lr=0.1, backend=backend)
    set_grads(params, 0)
    optimizer.step()
    old = params[0].data
    kept = old.clone()
    params[0].data = torch.full((5,), 8.0)
    optimizer.step()
    assert torch.equal(old, kept)
    assert torch.all((params[0] < 8.0) == (params[0].grad > 0))


def test_states_follow_a_parameter_that_was_moved() -> None:
    """There is one real device here: the meta device stands for the other."""
    state: dict[str, Any] = {"step": torch.zeros(()), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    group = {"master_weights": "auto", "state_dtype": "float32", "amsgrad": False}
    checkpoint.complete_state(torch.ones(2, device="meta"), state, group, 0, is_offloaded=False)
    assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "meta"
    assert state["step"].device.type == "cpu"


# ---- empty, missing, frozen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["last", "first", "all"])
def test_empty_parameters(order: str, dtype: torch.dtype, backend: str) -> None:
    full, empty = one([1.0] * 4, [1.0] * 4, dtype), nn.Parameter(torch.empty(0, 8, dtype=dtype))
    empty.grad = torch.empty_like(empty)
    params = {"last": [full, empty], "first": [empty, full], "all": [empty]}[order]
    optimizer = FusedShardedAdamW(params, weight_decay=0.01, max_grad_norm=10.0, backend=backend)
    optimizer.step()
    assert optimizer.state[empty]["exp_avg"].shape == optimizer.state[empty]["exp_avg_sq"].shape == (0, 8)
    assert float(optimizer.state[empty]["step"]) == 1.0
    if order != "all":
        assert torch.allclose(optimizer.master_param(full), torch.full((4,), 0.99899), rtol=0, atol=2**-24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_gradients_leave_parameter_and_state(dtype: torch.dtype, backend: str) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedShardedAdamW(params, backend=backend)
    train(optimizer, 1)
    before = snapshot(optimizer)
    set_grads(params, 1)
    params[0].grad = params[4].grad = None
    optimizer.step()
    after = snapshot(optimizer)
    for name, value in after.items():
        untouched = name.endswith(("parameter 0", "parameter 4"))
        if untouched:
            assert_bits_equal(value, before[name], name, exact=name.startswith("remainder"))
    assert [float(after[f"step of parameter {i}"]) for i in range(5)] == [1, 2, 2, 2, 1]
    optimizer.zero_grad()
    before = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_a_first_step_without_any_gradient() -> None:
    optimizer = FusedShardedAdam(make_params())
    optimizer.step()
    assert all(float(state["step"]) == 0.0 for state in optimizer.state.values())


def test_unused_parameters_have_state() -> None:
    """Without, a checkpoint could not be loaded into a run that uses them."""
    used, unused = make_params(((3,), (4,)))
    optimizer = FusedShardedAdam([used, unused])
    set_grads([used], 0)
    optimizer.step()
    assert set(optimizer.state[unused]) == {"step", "exp_avg", "exp_avg_sq"}
    assert float(optimizer.state[unused]["step"]) == 0.0
    assert set(optimizer.state_dict()["state"]) == {0, 1}


def test_frozen_parameters_are_left_alone_until_they_are_unfrozen(backend: str) -> None:
    free, frozen = make_params(((3,), (4,)))
    frozen.requires_grad_(False)
    start = frozen.detach().clone()
    optimizer = FusedShardedAdamW([free, frozen], weight_decay=0.5, lr=0.1, backend=backend)
    for step in range(2):
        set_grads([free], step)
        optimizer.step()
    assert torch.equal(frozen, start)
    assert frozen not in optimizer.state
    frozen.requires_grad_(True)
    set_grads([free, frozen], 2)
    optimizer.step()
    assert float(optimizer.state[frozen]["step"]) == 1.0
    assert float(optimizer.state[free]["step"]) == 3.0
    assert not torch.equal(frozen, start)
    # Frozen again, and later on: its state stays.
    frozen.requires_grad_(False)
    frozen.grad = None
    kept = frozen.detach().clone()
    optimizer.step()
    assert torch.equal(frozen, kept)
    assert float(optimizer.state[frozen]["step"]) == 1.0


def test_a_frozen_parameter_with_a_gradient_is_stepped_as_in_torch() -> None:
    free, frozen = make_params(((3,), (4,)))
    frozen.requires_grad_(False)
    others = copy.deepcopy([free, frozen])
    start = clones(others)
    optimizer, expected = FusedShardedAdam([free, frozen]), torch.optim.Adam(others, foreach=False)
    for step in range(3):
        for params, each in (([free, frozen], optimizer), (others, expected)):
            set_grads(params[: 1 + step % 2], step)
            each.step()
    assert_close_to_torch([free, frozen], others, start, 3)


# ---- shared and meta parameters --------------------------------------------------------------------------------------


def test_a_shared_parameter_is_stepped_once() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    optimizer = FusedShardedAdam(module.parameters(), lr=0.125, eps=0.0)
    start = module[0].weight.detach().clone()
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    moved = (module[0].weight - start).abs()
    # A second step would double it. Half an ulp of a value below 1, and eight half ulps of the update.
    assert torch.allclose(moved, torch.full_like(moved, 0.125), rtol=0, atol=2**-25 + 8 * 2**-27)
    assert len(optimizer.state) == 1


def test_a_parameter_listed_twice_is_stepped_twice_as_in_torch(backend: str) -> None:
    param = make_params(((7,),))[0]
    other, start = copy.deepcopy(param), param.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = FusedShardedAdam([param, param], backend=backend)
        expected = torch.optim.Adam([other, other], foreach=False)
    assert sum("duplicate parameters" in str(w.message) for w in caught) == 2
    for step in range(3):
        set_grads([param], step)
        set_grads([other], step)
        optimizer.step()
        expected.step()
    assert float(optimizer.state[param]["step"]) == 6.0
    assert_close_to_torch([param], [other], [start], 6)


@pytest.fixture
def swapped_parameters() -> Iterator[None]:
    """``to_empty`` then keeps the parameter objects, which an optimizer needs."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("early_step", [False, True])
def test_a_meta_model_materialised_after_the_optimizer(
    early_step: bool, dtype: torch.dtype, backend: str, swapped_parameters: None
) -> None:
    with torch.device("meta"):
        module = nn.Linear(5, 3, dtype=dtype)
    optimizer = FusedShardedAdamW(module.parameters(), max_grad_norm=1.0, backend=backend)
    assert optimizer.skipped_steps.item() == 0.0
    optimizer.init_states()
    if early_step:
        optimizer.step()
    assert not optimizer.state
    module.to_empty(device="cpu")
    assert parameters(optimizer)[0] is module.weight
    nn.init.constant_(module.weight, 0.5)
    nn.init.zeros_(module.bias)
    other = copy.deepcopy(module)
    expected = FusedShardedAdamW(other.parameters(), max_grad_norm=1.0, backend=backend)
    train(optimizer, 2)
    train(expected, 2)
    assert_same(snapshot(optimizer), snapshot(expected))
    assert optimizer.skipped_steps.device.type == "cpu"


def test_meta_parameters_beside_real_ones_are_skipped() -> None:
    real, meta = make_params(((3,),))[0], nn.Parameter(torch.empty(2, device="meta"))
    optimizer = FusedShardedAdam([meta, real])
    set_grads([real], 0)
    optimizer.step()
    assert list(optimizer.state) == [real]
    assert optimizer.skipped_steps.item() == 0.0


def test_integrations_are_asked_about_new_tensors_only() -> None:
    """Not each time that other parameters have gradients: looking at a whole model takes longer than the step."""
    params = make_params(((3,), (2,)))
    optimizer = FusedShardedAdamW(params)
    with mock.patch.object(attachers, "attach") as attach:
        for has_grad in ((True, True), (True, False), (False, True), (True, True)):
            for param, has in zip(params, has_grad, strict=True):
                param.grad = torch.ones_like(param) if has else None
            optimizer.step()
        assert attach.call_count == 1
        params[0].data = params[0].data.bfloat16()
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert attach.call_count == 2
