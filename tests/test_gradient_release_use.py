"""Gradient release in use: what may happen between backward and step, what is refused, and what remove() puts back."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_helpers import clones
from reference import assert_bits_equal
from release_helpers import assert_same, iterate, loss_of, make
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardops
from shardops import FusedShardedAdamW, enable_gradient_release

# ---- second gradients ------------------------------------------------------------------------------------------------


def test_a_second_gradient_raises_and_changes_nothing() -> None:
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    enable_gradient_release(model, optimizer)
    loss_of(model, 0).backward()
    before, states = clones(model.parameters()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer.step\(\)"):
        loss_of(model, 2).backward()
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(RuntimeError, match="second gradient"):  # it is still there
        optimizer.step()
    assert str(states) == str(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    iterate(twin, twin_optimizer, 0)
    for step in (1, 2):
        iterate(model, optimizer, step)
        iterate(twin, twin_optimizer, step)
    assert_same(model, optimizer, twin, twin_optimizer)


def test_reentrant_checkpointing_runs_hooks_once_for_each_use() -> None:
    """Once used, a weight is stepped as ever; a weight that two regions use gets two gradients, which is noticed."""

    def run(first: nn.Module, second: nn.Module, model: nn.Module, optimizer: Any) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        x = checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True)
        x.square().sum().backward()
        optimizer.step()

    generator = torch.Generator().manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for values in zip(*(model.parameters() for model in models), strict=True):
        value = torch.randn(values[0].shape, generator=generator)
        for param in values:
            param.data.copy_(value)
    optimizers = [FusedShardedAdamW(model.parameters()) for model in models]
    enable_gradient_release(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        run(model[0], model[1], model, optimizer)
    optimizers[1].zero_grad()
    assert_same(models[0], optimizers[0], models[1], optimizers[1])
    with pytest.raises(RuntimeError, match="second gradient"):
        run(models[0][0], models[0][0], models[0], optimizers[0])


def test_losses_over_different_parameters_may_be_several() -> None:
    pairs = [make() for _ in range(2)]
    enable_gradient_release(*pairs[0])
    for model, optimizer in pairs:
        model.up.weight.square().sum().backward()
        model.down.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(*pairs[0], *pairs[1])


def test_autograd_finds_a_parameter_that_it_needs_changed() -> None:
    """What was saved past the parameter's own gradient: an error, not a wrong gradient."""
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = FusedShardedAdamW([weight, other])
    enable_gradient_release(nn.ParameterList([weight, other]), optimizer)
    x = other * weight.detach()  # saved for other's gradient, which comes last
    loss = (torch.tanh(x) * 2.0 + weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- between backward and step, and changes of the optimizer ---------------------------------------------------------


def test_what_backward_did_not_step_step_does() -> None:
    """Gradients set by hand, of parameters unfrozen or added since; the latter two have hooks from then on."""
    pairs = [make() for _ in range(2)]
    extra = [nn.Parameter(torch.ones(3)) for _ in pairs]
    release = enable_gradient_release(*pairs[0])
    for (model, optimizer), added in zip(pairs, extra, strict=True):
        model.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": [added], "lr": 0.5})
        added.grad = torch.ones(3)
        iterate(model, optimizer, 0)
        for step in (1, 2):
            added.square().sum().backward()
            iterate(model, optimizer, step)
    assert_bits_equal(extra[0].detach(), extra[1].detach(), "added")
    assert_same(*pairs[0], *pairs[1])
    assert extra[0].grad is None
    assert len(extra[0]._post_accumulate_grad_hooks) == 1
    assert all(len(param._post_accumulate_grad_hooks) == 1 for param in pairs[0][0].parameters())
    release.remove()
    assert not extra[0]._post_accumulate_grad_hooks


def test_hooks_that_were_lost_come_back() -> None:
    """As swapping a parameter for a converted one takes them away; the iteration until then is stepped by step()."""
    pairs = [make() for _ in range(2)]
    enable_gradient_release(*pairs[0])
    weight = pairs[0][0].up.weight
    weight._post_accumulate_grad_hooks.clear()
    for step in range(2):
        loss_of(pairs[0][0], step).backward()
        assert (weight.grad is not None) == (step == 0)
        pairs[0][1].step()
        iterate(*pairs[1], step)
    assert_same(*pairs[0], *pairs[1])


def test_a_model_that_is_cast_between_iterations() -> None:
    pairs = [make() for _ in range(2)]
    enable_gradient_release(*pairs[0])
    for model, optimizer in pairs:
        iterate(model, optimizer, 0)
        model.to(torch.bfloat16)
        iterate(model, optimizer, 1)
    assert_same(*pairs[0], *pairs[1])


def test_a_learning_rate_that_comes_too_late_raises() -> None:
    for lr in (1e-2, torch.tensor(1e-2)):
        model, optimizer = make(lr=lr)
        enable_gradient_release(model, optimizer)
        iterate(model, optimizer, 0)
        loss_of(model, 1).backward()
        for group in optimizer.param_groups:
            if isinstance(lr, Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] = 0.5
        with pytest.raises(RuntimeError, match="learning rate was changed between backward"):
            optimizer.step()
        iterate(model, optimizer, 2)  # it was ended


def test_a_grad_scaler_is_refused_and_a_disabled_one_is_not() -> None:
    model, optimizer = make()
    enable_gradient_release(model, optimizer)
    for enabled in (False, True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(loss_of(model, 0)).backward()
        if enabled:
            with pytest.raises(RuntimeError, match="GradScaler"):
                scaler.step(optimizer)
            optimizer.step()  # ends the iteration
        else:
            scaler.step(optimizer)
            scaler.update()


def test_step_hooks_run_around_the_end_of_the_iteration() -> None:
    model, optimizer = make()
    enable_gradient_release(model, optimizer)
    seen: list[tuple[str, bool, float]] = []

    def hook(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            has_grads = any(param.grad is not None for param in model.parameters())
            seen.append((name, has_grads, float(optimizer.state[model.up.weight]["step"])))

        return note

    optimizer.register_step_pre_hook(hook("pre"))
    optimizer.register_step_post_hook(hook("post"))
    iterate(model, optimizer, 0)
    assert seen == [("pre", False, 1.0), ("post", False, 1.0)]


def test_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(capturable=True)
    enable_gradient_release(model, optimizer)
    loss = loss_of(model, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        loss.backward()


def test_states_wanted_before_training_are_inert() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = make()
    enable_gradient_release(model, optimizer)
    optimizer.state.clear()
    before = clones(model.parameters())
    found = get_optimizer_state_dict(model, optimizer)["state"]
    assert all(float(state["step"]) == 0.0 for state in found.values())
    assert all(map(torch.equal, before, model.parameters()))
    iterate(model, optimizer, 0)
    assert float(optimizer.state[model.up.weight]["step"]) == 1.0


def test_plans_are_looked_at_once_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    enable_gradient_release(model, optimizer)
    looks = []
    ordinary = optimizer._tracker.plan
    monkeypatch.setattr(
        optimizer._tracker, "plan", lambda *args, **kwargs: looks.append(1) or ordinary(*args, **kwargs)
    )
    for step in range(3):
        iterate(model, optimizer, step)
    assert len(looks) == 3


# ---- the handle ------------------------------------------------------------------------------------------------------


def test_remove_puts_everything_back() -> None:
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    iterate(model, optimizer, 0)
    iterate(twin, twin_optimizer, 0)
    with enable_gradient_release(model, optimizer) as release:
        iterate(model, optimizer, 1)
        loss_of(model, 2).backward()
    assert optimizer._release is None
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    iterate(twin, twin_optimizer, 1)
    iterate(twin, twin_optimizer, 2)
    for step in (3, 4):
        loss_of(model, step).backward()
        assert model.up.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        iterate(twin, twin_optimizer, step)
    assert_same(model, optimizer, twin, twin_optimizer)
    release.remove()  # does nothing
    again = enable_gradient_release(model, optimizer)
    release.remove()  # nor to another's
    assert optimizer._release is again


def test_copies_are_not_released() -> None:
    model, optimizer = make()
    enable_gradient_release(model, optimizer)
    iterate(model, optimizer, 0)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin_optimizer._release is None
    assert copy.copy(optimizer)._release is None
    loss_of(twin, 1).backward()
    assert twin.up.weight.grad is not None
    twin_optimizer.step()
    twin_optimizer.zero_grad()
    iterate(model, optimizer, 1)
    assert_same(model, optimizer, twin, twin_optimizer)


def test_nothing_keeps_the_model_or_the_optimizer() -> None:
    model, optimizer = make()
    handle = enable_gradient_release(model, optimizer)
    iterate(model, optimizer, 0)
    found = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(handle)]
    del optimizer, handle
    gc.collect()
    assert found[0]() is None
    assert found[2]() is None
    loss_of(model, 1).backward()  # the hooks do nothing
    assert model.up.weight.grad is not None
    del model
    gc.collect()
    assert found[1]() is None


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_ddp_and_fsdp1_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, optimizer = make()
    wrapped = DistributedDataParallel(nn.ModuleList([model]))
    for seen in (wrapped, wrapped.module, model):  # its parameters do not tell
        with pytest.raises(ValueError, match="DistributedDataParallel, which reduces gradients after"):
            enable_gradient_release(seen, optimizer)
    assert not optimizer.state
    late, optimizer = make()
    enable_gradient_release(late, optimizer)
    wrapped = DistributedDataParallel(nn.ModuleList([late]))
    with pytest.raises(ValueError, match="DistributedDataParallel, which reduces gradients after"):
        loss_of(late, 0).backward()
    for use_orig_params in (False, True):
        sharded = FullyShardedDataParallel(
            nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(ValueError, match="FSDP1"):
            enable_gradient_release(sharded, FusedShardedAdamW(sharded.parameters()))


def _shared(optimizer: Any) -> None:
    shardops.share_grad_norm([optimizer])


def _enabled(optimizer: Any) -> None:
    model = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
    enable_gradient_release(model, optimizer)


def _with_gradient(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.zeros_like(param)


REFUSED: list[tuple[dict[str, Any], Callable[[Any], None] | None, dict[str, Any], str]] = [
    ({"max_grad_norm": 1.0}, None, {}, "the optimizer has max_grad_norm=1.0, for a norm that is known only after"),
    ({}, _shared, {}, "shares its gradient norm"),
    ({}, _enabled, {}, "releases gradients already"),
    ({}, _with_gradient, {}, r"has a gradient, to which the next one would be added"),
    ({}, None, {"clip_grad_value": 1.0, "max_grad_norm": 1.0}, "give one of them"),
    ({}, None, {"clip_grad_value": -1.0}, "clip_grad_value is -1.0; it is at least 0"),
    ({}, None, {"clip_grad_value": "1"}, "clip_grad_value is '1'; it is a number"),
    ({}, None, {"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
]


@pytest.mark.parametrize(("options", "prepare", "arguments", "message"), REFUSED, ids=[case[3] for case in REFUSED])
def test_what_cannot_work_is_refused(
    options: dict[str, Any], prepare: Callable[[Any], None] | None, arguments: dict[str, Any], message: str
) -> None:
    model, optimizer = make(**options)
    if prepare is not None:
        prepare(optimizer)
    hooks = [len(param._post_accumulate_grad_hooks or {}) for param in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        enable_gradient_release(model, optimizer, **arguments)
    assert hooks == [len(param._post_accumulate_grad_hooks or {}) for param in model.parameters()]


def test_other_models_optimizers_and_late_norms_are_refused() -> None:
    model, optimizer = make()
    with pytest.raises(TypeError, match="optimizer is of type AdamW"):
        enable_gradient_release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"3 of the optimizer's \d parameters are not the model's"):
        enable_gradient_release(nn.ModuleList([model.embedding, model.up, model.frozen]), optimizer)
    enable_gradient_release(model, optimizer)
    second = FusedShardedAdamW([model.up.weight])
    with pytest.raises(ValueError, match="stepped in backward by another optimizer already"):
        enable_gradient_release(model, second)
    optimizer.max_grad_norm = 1.0
    before = clones(model.parameters())
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0"):
        loss_of(model, 0).backward()
    assert all(map(torch.equal, before, model.parameters()))
