"""The optimizer's states: what they are, how they are copied, saved and loaded, and exchanged with torch's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_helpers import (
    PAIRS,
    assert_close_to_torch,
    assert_same,
    clones,
    make_params,
    one,
    parameters,
    set_grads,
    snapshot,
    train,
    twins,
)
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from shardops import FusedShardedAdam, FusedShardedAdamW

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- what there is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    ("dtype", "master_weights", "master"),
    [
        (torch.float32, "auto", {}),
        (torch.float32, "fp32", {}),
        (torch.float32, "split32", {}),
        (torch.bfloat16, "auto", {"remainder": torch.bfloat16}),
        (torch.bfloat16, "split32", {"remainder": torch.bfloat16}),
        (torch.bfloat16, "fp32", {"master_param": torch.float32}),
        (torch.float16, "auto", {"master_param": torch.float32}),
        (torch.float16, "fp32", {"master_param": torch.float32}),
    ],
)
def test_keys_dtypes_and_shapes(dtype: torch.dtype, master_weights: str, master: dict[str, Any], amsgrad: bool) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedShardedAdam(params, master_weights=master_weights, amsgrad=amsgrad)
    optimizer.init_states()
    expected = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, **master}
    if amsgrad:
        expected["max_exp_avg_sq"] = torch.float32
    for param in params:
        state = dict(optimizer.state[param])
        step = state.pop("step")
        assert step.shape == ()
        assert step.dtype == torch.float32
        assert {name: value.dtype for name, value in state.items()} == expected
        assert all(value.shape == param.shape and value.device == param.device for value in state.values())
    assert optimizer.state_dict()["param_groups"][0]["params"] == list(range(len(params)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_init_states_is_not_a_step(dtype: torch.dtype, backend: str) -> None:
    optimizer = FusedShardedAdamW(make_params(dtype=dtype), backend=backend)
    other = FusedShardedAdamW(make_params(dtype=dtype), backend=backend)
    start = clones(parameters(optimizer))
    optimizer.init_states()
    optimizer.init_states()
    for param, first in zip(parameters(optimizer), start, strict=True):
        assert torch.equal(param, first)
        assert torch.equal(optimizer.master_param(param), first.float())
        state = optimizer.state[param]
        assert not any(state[key].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    train(optimizer, 2)
    train(other, 2)
    assert_same(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize("capturable", [False, True])
def test_step_counters_share_one_buffer_that_grows(capturable: bool) -> None:
    optimizer = FusedShardedAdam(make_params(), capturable=capturable)

    def storages() -> set[int]:
        return {optimizer.state[p]["step"].untyped_storage().data_ptr() for p in parameters(optimizer)}

    train(optimizer, 2)
    assert len(storages()) == 1
    optimizer.add_param_group({"params": make_params(seed=1)})
    train(optimizer, 1, first=2)
    assert len(storages()) == 1
    steps = [optimizer.state[p]["step"] for p in parameters(optimizer)]
    assert steps[0].untyped_storage().nbytes() == 4 * len(steps)
    assert [float(step) for step in steps] == [3.0] * 5 + [1.0] * 5
    before = storages()
    train(optimizer, 1, first=3)
    assert storages() == before  # nothing was added: the addresses that a CUDA graph captured stay


# ---- copies ----------------------------------------------------------------------------------------------------------


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _torch_saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copier", [copy.deepcopy, _pickled, _torch_saved])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", [FusedShardedAdam, FusedShardedAdamW])
def test_a_copy_trains_alike_and_apart(
    cls: type[FusedShardedAdam], dtype: torch.dtype, copier: Callable[[Any], Any], backend: str
) -> None:
    optimizer = cls(make_params(dtype=dtype), lr=torch.tensor(1e-3), max_grad_norm=1.0, amsgrad=True, backend=backend)
    train(optimizer, 3)
    clone = copier(optimizer)
    assert type(clone) is cls
    assert clone.max_grad_norm == 1.0
    assert clone.backend == backend
    assert clone.skipped_steps.item() == 0.0
    assert_same(snapshot(clone), snapshot(optimizer))
    before = snapshot(optimizer)
    train(clone, 3, first=3)
    assert_same(snapshot(optimizer), before)
    train(optimizer, 3, first=3)
    assert_same(snapshot(clone), snapshot(optimizer))
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert float(clone.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_a_copy_of_an_optimizer_that_has_not_stepped() -> None:
    optimizer = FusedShardedAdamW(make_params(dtype=torch.bfloat16))
    clone = copy.deepcopy(optimizer)
    train(optimizer, 2)
    train(clone, 2)
    assert_same(snapshot(clone), snapshot(optimizer))


def test_model_and_optimizer_copied_together() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2).bfloat16()
    optimizer = FusedShardedAdamW(module.parameters())
    train(optimizer, 2)
    module2, optimizer2 = copy.deepcopy((module, optimizer))
    assert parameters(optimizer2)[0] is module2.weight
    train(optimizer, 2, first=2)
    train(optimizer2, 2, first=2)
    assert_same(snapshot(optimizer2), snapshot(optimizer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shallow_copy_shares_everything_as_torchs(dtype: torch.dtype) -> None:
    """Stepping the one or the other is stepping the same optimizer."""
    optimizer, expected = (FusedShardedAdamW(make_params(dtype=dtype)) for _ in range(2))
    train(optimizer, 1)
    shallow = copy.copy(optimizer)
    assert shallow.param_groups is optimizer.param_groups
    for step in range(1, 6):
        train(shallow if step % 2 else optimizer, 1, first=step)
    train(expected, 6)
    assert_same(snapshot(optimizer), snapshot(expected))
    assert_same(snapshot(shallow), snapshot(expected))


# ---- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stepped_before", [False, True])
def test_resume_through_a_file_is_bit_equal(
    stepped_before: bool, dtype: torch.dtype, tmp_path: Path, backend: str
) -> None:
    optimizer = FusedShardedAdamW(make_params(dtype=dtype), lr=3e-3, amsgrad=True, max_grad_norm=2.0, backend=backend)
    train(optimizer, 3)
    torch.save([optimizer.state_dict(), clones(parameters(optimizer))], tmp_path / "checkpoint.pt")
    train(optimizer, 4, first=3)

    saved, weights = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    params = make_params(dtype=dtype, seed=9)
    resumed = FusedShardedAdamW(params, lr=1.0, max_grad_norm=2.0, backend=backend)
    if stepped_before:
        train(resumed, 2, first=50)
    resumed.load_state_dict(saved)
    with torch.no_grad():
        for param, value in zip(params, weights, strict=True):
            param.copy_(value)
    train(resumed, 4, first=3)
    assert resumed.param_groups[0]["lr"] == 3e-3
    assert_same(snapshot(resumed), snapshot(optimizer))


def test_loading_copies_what_is_not_its_own() -> None:
    """Two optimizers must not train on one state; loading one's own state dict back keeps the tensors."""
    a, b = (FusedShardedAdamW(make_params(dtype=torch.bfloat16)) for _ in range(2))
    train(a, 2)
    b.load_state_dict(a.state_dict())
    before = snapshot(a)
    train(b, 2)
    assert_same(snapshot(a), before)
    addresses = {name: value.data_ptr() for name, value in a.state[parameters(a)[0]].items()}
    a.load_state_dict(a.state_dict())
    assert all(a.state[parameters(a)[0]][name].data_ptr() == addresses[name] for name in addresses if name != "step")


def test_a_state_dict_is_left_as_it_was() -> None:
    source, target = (FusedShardedAdamW(make_params(dtype=torch.bfloat16)) for _ in range(2))
    train(source, 1)
    saved = copy.deepcopy(source.state_dict())
    kept = copy.deepcopy(saved)
    target.load_state_dict(saved)
    train(target, 2, first=1)
    assert saved["param_groups"] == kept["param_groups"]
    for key, state in kept["state"].items():
        for name, value in state.items():
            assert_bits_equal(saved["state"][key][name], value, name, exact=name == "remainder")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_saved_values_are_kept_under_low_precision_parameters(dtype: torch.dtype) -> None:
    """Torch's loading would round 0.1234567 to the parameter's dtype, 0.12353516."""
    optimizer = FusedShardedAdam([one([1.0], [1.0], dtype)])
    optimizer.init_states()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"].fill_(0.1234567)
    optimizer.load_state_dict(saved)
    state = optimizer.state[parameters(optimizer)[0]]
    assert_bits_equal(state["exp_avg"], torch.tensor([0.1234567]))


def test_low_precision_moments_under_an_fp32_parameter_keep_their_values() -> None:
    """The optimizer's own state_dtype decides what they become, and fp32 holds every bfloat16 exactly."""
    optimizer = FusedShardedAdam([one([1.0], [1.0])])
    optimizer.init_states()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.tensor([0.1234567]).bfloat16()
    optimizer.load_state_dict(saved)
    optimizer.init_states()
    assert_bits_equal(optimizer.state[parameters(optimizer)[0]]["exp_avg"], torch.tensor([0.12353515625]))


def test_hooks_see_plain_tensors() -> None:
    optimizer = FusedShardedAdamW(make_params(dtype=torch.bfloat16))
    train(optimizer, 1)
    seen: list[str] = []

    def check(states: Any, name: str) -> None:
        assert all(isinstance(v, Tensor) for state in states.values() for v in state.values())
        seen.append(name)

    def before_loading(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        check(state_dict["state"], "load pre")
        first = {**state_dict["state"][0], "exp_avg": torch.full((7, 5), 0.25)}
        return {**state_dict, "state": {**state_dict["state"], 0: first}}

    optimizer.register_state_dict_pre_hook(lambda o: check(o.state, "state pre"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: check(state_dict["state"], "state post"))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda o: check(o.state, "load post"))
    for _ in range(2):
        optimizer.load_state_dict(saved)
    assert seen == ["state pre", "state post"] + ["load pre", "load post"] * 2
    assert torch.all(optimizer.state[parameters(optimizer)[0]]["exp_avg"] == 0.25)


# ---- torch's optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("to_torch", [False, True])
def test_exchange_with_torch_in_mid_training(to_torch: bool, pair: str, amsgrad: bool, backend: str) -> None:
    """Half a run here, half there, against a whole run of torch's."""
    ours, theirs = PAIRS[pair]
    options = {"lr": 2e-3, "weight_decay": 0.05, "amsgrad": amsgrad}
    a, b, start = twins(lambda p: ours(p, backend=backend, **options), lambda p: theirs(p, foreach=False, **options))
    whole = theirs(copy.deepcopy(parameters(b)), foreach=False, **options)
    first, second = (a, b) if to_torch else (b, a)
    train(first, 4)
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    with torch.no_grad():
        for target, source in zip(parameters(second), parameters(first), strict=True):
            target.copy_(source)
    train(second, 4, first=4)
    train(whole, 8)
    assert_close_to_torch(parameters(second), parameters(whole), start, 8)
    assert all(float(second.state[p]["step"]) == 8.0 for p in parameters(second))
    for group in (a.param_groups[0], b.param_groups[0]):
        assert {name: group[name] for name in options} == options


def test_exchange_of_bf16_states() -> None:
    ours = FusedShardedAdamW(make_params(dtype=torch.bfloat16))
    theirs = torch.optim.AdamW(copy.deepcopy(parameters(ours)), foreach=False)
    train(theirs, 3)
    ours.load_state_dict(theirs.state_dict())
    ours.init_states()
    for mine, other in zip(parameters(ours), parameters(theirs), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert theirs.state[other][key].dtype == torch.bfloat16
            assert_bits_equal(ours.state[mine][key], theirs.state[other][key].float())
    train(ours, 1, first=3)
    assert float(ours.state[parameters(ours)[0]]["step"]) == 4.0
    saved = copy.deepcopy(ours.state_dict())
    theirs.load_state_dict(saved)
    for mine, other in zip(parameters(ours), parameters(theirs), strict=True):
        assert_bits_equal(theirs.state[other]["exp_avg"], ours.state[mine]["exp_avg"].bfloat16())
    train(theirs, 1, first=4)


def test_adamw_stays_decoupled_whatever_it_loads() -> None:
    """Torch's does, too: state dicts of before the option exist."""
    optimizer = FusedShardedAdamW(make_params())
    optimizer.load_state_dict(torch.optim.Adam(make_params(), weight_decay=0.5).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    adam = FusedShardedAdam(make_params())
    adam.load_state_dict(torch.optim.AdamW(make_params()).state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is True  # as in torch: the option is saved with the group


def test_loading_keeps_how_this_optimizer_stores() -> None:
    optimizer = FusedShardedAdam(make_params(dtype=torch.bfloat16), master_weights="fp32")
    other = FusedShardedAdam(make_params(dtype=torch.bfloat16), lr=0.5)
    train(other, 1)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["master_weights"] == "fp32"
    assert optimizer.param_groups[0]["lr"] == 0.5


# ---- torch.distributed.checkpoint in one process ---------------------------------------------------------------------


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_asking_for_the_state_dict_is_not_a_step(dtype: torch.dtype, tensor_lr: bool, backend: str) -> None:
    """It runs step() over zero gradients with lr 0; the first real update is then lr, not 0.744 lr."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3).to(dtype)
    lr: Any = torch.tensor(0.0625) if tensor_lr else 0.0625
    optimizer = FusedShardedAdam(module.parameters(), lr=lr, weight_decay=0.1, eps=0.0, backend=backend)
    start = clones(module.parameters())
    saved = get_optimizer_state_dict(module, optimizer)
    assert set(saved["state"]) == {"weight", "bias"}
    assert optimizer.param_groups[0]["lr"] is lr
    for param, first in zip(module.parameters(), start, strict=True):
        assert param.grad is None
        assert torch.equal(param, first)
        assert not any(optimizer.state[param][key].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    set_grads(module.parameters(), 0)
    optimizer.step()
    for param, first in zip(module.parameters(), start, strict=True):
        moved = (optimizer.master_param(param) - first.float()).abs()
        # Half an ulp of a value below 1, and the roundings of the update: eight half ulps of it.
        assert torch.allclose(moved, torch.full_like(moved, 0.0625), rtol=0, atol=2**-25 + 8 * 2**-28)


def test_a_warm_up_from_zero_is_a_step() -> None:
    """A real first step with lr 0 and zero gradients is not taken for torch.distributed.checkpoint's."""
    params = make_params()
    optimizer = FusedShardedAdam(params, lr=0.0, weight_decay=0.1)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    assert optimizer.state[params[0]]["exp_avg"].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_through_distributed_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, FusedShardedAdamW]:
        torch.manual_seed(0)
        module = nn.Linear(5, 3).to(dtype)
        return module, FusedShardedAdamW(module.parameters(), max_grad_norm=1.0)

    module, optimizer = build()
    train(optimizer, 3)
    saved = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    train(optimizer, 3, first=3)
    resumed, optimizer2 = build()
    loaded = {"model": resumed.state_dict(), "optimizer": get_optimizer_state_dict(resumed, optimizer2)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, optimizer2, loaded["optimizer"])
    train(optimizer2, 3, first=3)
    assert_same(snapshot(optimizer2), snapshot(optimizer))
