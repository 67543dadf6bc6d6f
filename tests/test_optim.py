"""FusedShardedAdam(W) in place of torch's: construction, groups, schedulers, closures, hooks, and single numbers."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim_helpers import (
    PAIRS,
    SHAPES,
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
from torch import Tensor, nn
from torch.optim import lr_scheduler

from shardops import FusedShardedAdam, FusedShardedAdamW

CLASSES = (FusedShardedAdam, FusedShardedAdamW)


# ---- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_positional_arguments_are_torchs(pair: str) -> None:
    ours, theirs = PAIRS[pair]
    names = ["lr", "betas", "eps", "weight_decay", "amsgrad"]
    positional = [
        [p.name for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for cls in (ours, theirs)
    ]
    assert positional[0] == positional[1] == ["self", "params", *names]
    values = (2e-3, (0.8, 0.95), 1e-7, 0.2, True)
    group = ours(make_params(), *values).param_groups[0]
    assert [group[name] for name in names] == list(values)


@pytest.mark.parametrize("pair", PAIRS)
def test_defaults_are_torchs(pair: str) -> None:
    ours, theirs = (cls(make_params()).defaults for cls in PAIRS[pair])
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("pair", PAIRS)
def test_every_keyword_of_torchs_is_accepted(pair: str) -> None:
    ours, theirs = PAIRS[pair]
    keywords = {
        "lr": 3e-3,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "amsgrad": True,
        "maximize": True,
        "foreach": True,
        "capturable": True,
        "differentiable": False,
        "fused": True,
    }
    if pair == "Adam":
        keywords["decoupled_weight_decay"] = True
    assert set(keywords) == set(inspect.signature(theirs.__init__).parameters) - {"self", "params"}
    optimizer = ours(params=make_params(), **keywords)
    assert {name: optimizer.param_groups[0][name] for name in keywords} == keywords
    train(optimizer, 1)


def test_adamw_takes_our_own_keywords() -> None:
    params = [(f"layer.{i}", p) for i, p in enumerate(make_params())]
    optimizer = FusedShardedAdamW(
        params,
        master_weights="fp32",
        state_dtype=torch.float32,
        max_grad_norm=1.0,
        process_group=None,
        backend="reference",
    )
    train(optimizer, 2)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in params]
    assert optimizer.max_grad_norm == 1.0
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        FusedShardedAdamW(make_params(), decoupled_weight_decay=False)  # torch's AdamW has no such argument either


def test_foreach_and_fused_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="shardops"):
        FusedShardedAdamW(make_params())
        assert not caplog.records
        FusedShardedAdamW(make_params(), foreach=True, fused=False)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_decoupled_weight_decay_makes_adam_adamw() -> None:
    a = FusedShardedAdam(make_params(), weight_decay=0.1, decoupled_weight_decay=True)
    b = FusedShardedAdamW(make_params(), weight_decay=0.1)
    train(a, 3)
    train(b, 3)
    assert_same(snapshot(a), snapshot(b))


def test_repr_lists_the_options() -> None:
    text = repr(FusedShardedAdamW(make_params(), lr=0.125))
    assert text.startswith("FusedShardedAdamW (")
    assert "lr: 0.125" in text
    assert "master_weights: auto" in text


def test_it_is_an_optimizer() -> None:
    optimizer = FusedShardedAdamW(make_params())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, FusedShardedAdam)
    assert optimizer.defaults["lr"] == 1e-3


@pytest.mark.parametrize("form", ["generator", "list", "groups", "named", "named generator"])
def test_forms_of_parameters(form: str) -> None:
    params = make_params()
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    given: Any = {
        "generator": (p for p in params),
        "list": params,
        "groups": [{"params": params[:2], "lr": 0.1}, {"params": (p for p in params[2:])}],
        "named": named,
        "named generator": (item for item in named),
    }[form]
    optimizer = FusedShardedAdam(given)
    assert all(a is b for a, b in zip(parameters(optimizer), params, strict=True))
    start = clones(params)
    train(optimizer, 1)
    assert all(not torch.equal(p, s) for p, s in zip(params, start, strict=True) if p.numel())


def test_parameter_names_are_saved_and_kept() -> None:
    named = [(f"layer.{i}", p) for i, p in enumerate(make_params())]
    optimizer = FusedShardedAdam(named)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == [name for name, _ in named]
    unnamed = FusedShardedAdam(make_params()).state_dict()
    optimizer.load_state_dict(unnamed)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named]


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_groups_with_options_of_their_own(pair: str, backend: str) -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:1], "lr": 1e-2, "betas": (0.5, 0.9)},
            {"params": params[1:3], "weight_decay": 0.3, "amsgrad": True},
            {"params": params[3:], "eps": 1e-3, "maximize": True},
        ]

    ours, theirs = PAIRS[pair]
    optimizer, expected, start = twins(
        lambda p: ours(groups(p), backend=backend), lambda p: theirs(groups(p), foreach=False)
    )
    train(optimizer, 5)
    train(expected, 5)
    assert_close_to_torch(parameters(optimizer), parameters(expected), start, 5)
    assert "max_exp_avg_sq" in optimizer.state[parameters(optimizer)[1]]
    assert "max_exp_avg_sq" not in optimizer.state[parameters(optimizer)[0]]


def test_add_param_group_after_steps(backend: str) -> None:
    optimizer, expected, start = twins(
        lambda p: FusedShardedAdam(p, backend=backend),
        lambda p: torch.optim.Adam(p, foreach=False),
        shapes=SHAPES[:2],
    )
    train(optimizer, 2)
    train(expected, 2)
    more = make_params(seed=5)
    start += clones(more)
    optimizer.add_param_group({"params": more, "lr": 2e-3})
    expected.add_param_group({"params": copy.deepcopy(more), "lr": 2e-3})
    train(optimizer, 3, first=2)
    train(expected, 3, first=2)
    assert_close_to_torch(parameters(optimizer), parameters(expected), start, 5)
    assert [float(optimizer.state[p]["step"]) for p in parameters(optimizer)] == [5, 5, 3, 3, 3, 3, 3]


def test_options_of_a_group_may_change_between_steps() -> None:
    optimizer, expected, start = twins(FusedShardedAdam, lambda p: torch.optim.Adam(p, foreach=False))
    for step in range(6):
        for each in (optimizer, expected):
            each.param_groups[0].update(lr=1e-3 * (step + 1), weight_decay=0.1 * step, betas=(0.9 - 0.1 * step, 0.99))
            train(each, 1, first=step)
    assert_close_to_torch(parameters(optimizer), parameters(expected), start, 6)


def test_amsgrad_switched_on_and_off() -> None:
    params = make_params([(3,)])
    optimizer = FusedShardedAdam(params)
    train(optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.add_param_group({"params": make_params([(2,)])})  # a new plan
    train(optimizer, 1, first=2)
    state = optimizer.state[params[0]]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


# ---- learning rates --------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / 4)),  # warm-up: the first lr is 0
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),  # changes betas, too
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.7)], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, tensor_lr: bool) -> None:
    def lr() -> Any:
        return torch.tensor(4e-3) if tensor_lr else 4e-3

    optimizer, expected, start = twins(
        lambda p: FusedShardedAdam(p, lr=lr()), lambda p: torch.optim.Adam(p, lr=lr(), foreach=False)
    )
    rates = []
    schedulers = [SCHEDULERS[name](each) for each in (optimizer, expected)]
    for step in range(8):
        for each, scheduler in zip((optimizer, expected), schedulers, strict=True):
            train(each, 1, first=step)
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == float(expected.param_groups[0]["lr"])
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert len(set(rates)) > 1
    assert_close_to_torch(parameters(optimizer), parameters(expected), start, 8)


def test_a_tensor_lr_written_in_place_counts_from_the_next_step(backend: str) -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    param = one([1.0], [1.0])
    optimizer = FusedShardedAdam([param], lr=lr, eps=0.0, backend=backend)
    optimizer.step()
    assert param.item() == 0.5
    lr.fill_(0.25)
    optimizer.step()
    # exp_avg / sqrt(exp_avg_sq), each corrected, is 1 to within the rounding of six operations.
    assert param.item() == pytest.approx(0.25, abs=6 * 2**-24)


# ---- step, closures, hooks -------------------------------------------------------------------------------------------


def test_closure_runs_once_with_gradients_enabled() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedShardedAdam([param])
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == [True]
    assert param[0].item() == pytest.approx(1 - 1e-3, abs=2**-24)
    assert optimizer.step() is None


@pytest.fixture
def unhooked_classes() -> Iterator[None]:
    """Torch wraps ``step`` of a class when its first instance is built; here no instance has been built yet."""
    saved = [(cls, vars(cls).get("step")) for cls in CLASSES]
    if hasattr(FusedShardedAdam.step, "hooked"):
        FusedShardedAdam.step = FusedShardedAdam.step.__wrapped__  # type: ignore[method-assign]
    if "step" in vars(FusedShardedAdamW):
        del FusedShardedAdamW.step
    yield
    for cls, step in saved:
        if step is not None:
            cls.step = step  # type: ignore[method-assign]
        elif "step" in vars(cls):
            del cls.step


@pytest.mark.parametrize("order", [CLASSES, CLASSES[::-1]])
def test_hooks_fire_once_whichever_class_is_built_first(
    order: tuple[type[FusedShardedAdam], ...], unhooked_classes: None
) -> None:
    assert not any(hasattr(cls.step, "hooked") for cls in CLASSES)
    for cls in (*order, *order):
        optimizer = cls(make_params())
        events: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, events=events: events.append("pre"))
        optimizer.register_step_post_hook(lambda *_, events=events: events.append("post"))
        train(optimizer, 1)
        assert events == ["pre", "post"]
        assert float(optimizer.state[parameters(optimizer)[0]]["step"]) == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_profiler_names(cls: type[FusedShardedAdam]) -> None:
    optimizer = cls(make_params())
    set_grads(parameters(optimizer), 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in profile.events()]
    assert names.count(f"Optimizer.step#{cls.__name__}.step") == 1
    assert names.count(f"Optimizer.zero_grad#{cls.__name__}.zero_grad") == 1


def test_zero_grad() -> None:
    optimizer = FusedShardedAdam(make_params())
    set_grads(parameters(optimizer), 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in parameters(optimizer))
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))


def test_a_step_counts_as_a_write_for_autograd() -> None:
    """A kernel writes behind autograd's back; a backward over the overwritten value must still fail."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedShardedAdam([param])
    loss = param.square().sum()
    set_grads([param], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_left_as_they_came() -> None:
    optimizer = FusedShardedAdam(make_params(), weight_decay=0.5, maximize=True, max_grad_norm=0.01)
    set_grads(parameters(optimizer), 0)
    before = clones(p.grad for p in parameters(optimizer))
    optimizer.step()
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters(optimizer), before, strict=True))
