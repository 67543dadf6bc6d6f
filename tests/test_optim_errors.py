"""Bad input to the optimizer: each error names the value received, the reason and the remedy, and changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_helpers import PAIRS, assert_same, make_params, parameters, set_grads, snapshot, train
from torch import Tensor, nn

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.ops import _library, _registry
from shardops.plan import Entry, UpdatePlan

# ---- options ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -1.0}, ValueError, r"lr is -1\.0; a learning rate is at least 0: maximize=True ascends"),
    ({"lr": math.nan}, ValueError, "lr is nan; a learning rate is at least 0"),
    ({"lr": "fast"}, TypeError, "lr is 'fast'; it is a number or a tensor of one element"),
    ({"lr": True}, TypeError, "lr is True; it is a number"),
    ({"lr": torch.tensor([1.0, 2.0])}, ValueError, r"lr is a tensor of shape \(2,\); it has one element"),
    ({"lr": torch.tensor(1)}, TypeError, r"lr is a tensor of dtype torch\.int64; use float32 or float64"),
    ({"lr": torch.tensor(-0.5)}, ValueError, r"lr is -0\.5; a learning rate is at least 0"),
    ({"lr": torch.tensor(math.nan)}, ValueError, "lr is nan; a learning rate is at least 0"),
    ({"eps": -1e-8}, ValueError, r"eps is -1e-08; it is at least 0"),
    ({"eps": math.nan}, ValueError, "eps is nan; it is at least 0"),
    ({"eps": None}, TypeError, "eps is None; it is a number"),
    ({"weight_decay": -0.1}, ValueError, r"weight_decay is -0\.1; it is at least 0"),
    ({"weight_decay": math.nan}, ValueError, "weight_decay is nan; it is at least 0"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] is 1\.0; a decay rate is at least 0 and below 1"),
    ({"betas": (0.9, 1.5)}, ValueError, r"betas\[1\] is 1\.5; a decay rate is at least 0 and below 1"),
    ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\] is -0\.1; a decay rate is at least 0 and below 1"),
    ({"betas": (0.9, math.nan)}, ValueError, r"betas\[1\] is nan; a decay rate is at least 0 and below 1"),
    ({"betas": (0.9,)}, TypeError, r"betas is \(0\.9,\); it is a pair of numbers, as \(0\.9, 0\.999\)"),
    ({"betas": 0.9}, TypeError, r"betas is 0\.9; it is a pair of numbers"),
    ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, TypeError, r"betas is \(tensor\(.*; it is a pair of numbers"),
    (
        {"differentiable": True},
        ValueError,
        r"differentiable is True; .* autograd cannot follow: use torch\.optim\.Adam",
    ),
    (
        {"master_weights": "split16"},
        ValueError,
        "master_weights is 'split16'; it is one of 'auto', 'split32', 'split24', 'fp32', 'stochastic', 'none'",
    ),
    ({"state_dtype": torch.float64}, ValueError, r"state_dtype is .*float64.*; it is torch\.float32"),
    ({"state_dtype": "int4"}, ValueError, r"state_dtype is 'int4'; it is torch\.float32"),
    ({"max_grad_norm": -1.0}, ValueError, r"max_grad_norm is -1\.0; it is at least 0, or None for no clipping"),
    ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm is nan; it is at least 0, or None"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm is '1'; it is a number, or None for no clipping"),
    ({"backend": "mkl"}, ValueError, "backend is 'mkl', which is none of 'cpp', 'triton', 'reference'; None takes the"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_bad_options(pair: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PAIRS[pair][0](make_params(), **options)


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_of_a_group(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """At construction, and when a group is added: then nothing is added."""
    if set(options) & {"max_grad_norm", "backend"}:
        error, message = ValueError, "a param group has .*, which is one for all groups; pass it to the optimizer's"
    with pytest.raises(error, match=message):
        FusedShardedAdam([{"params": make_params()}, {"params": make_params(), **options}])
    optimizer = FusedShardedAdam(make_params())
    train(optimizer, 1)
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": make_params(), **options})
    assert len(optimizer.param_groups) == 1
    assert_same(snapshot(optimizer), before)
    train(optimizer, 1, first=1)


def test_a_group_that_is_no_dict() -> None:
    optimizer = FusedShardedAdam(make_params())
    with pytest.raises(TypeError, match="param_group is a list; it is a dict with the key 'params'"):
        optimizer.add_param_group(make_params())  # type: ignore[arg-type]


def test_split32_completes_bfloat16_only() -> None:
    with pytest.raises(ValueError, match=r"'split32' and parameter 0 .*float16; .*use 'auto' or 'fp32'"):
        FusedShardedAdam(make_params(dtype=torch.float16), master_weights="split32")


# ---- parameters ------------------------------------------------------------------------------------------------------

BAD_PARAMS: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "float64": (lambda: torch.ones(2).double(), TypeError, r"dtype torch\.float64; .*use torch\.optim\.Adam for it"),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), TypeError, r"complex64; .*use torch\.optim\.Adam for it"),
    "integer": (lambda: torch.ones(2, dtype=torch.int32), TypeError, r"dtype torch\.int32; .*: leave it out"),
    "bool": (lambda: torch.ones(2, dtype=torch.bool), TypeError, r"dtype torch\.bool; .*: leave it out"),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), TypeError, r"layout torch\.sparse_coo; .*use \.to_dense\(\)"),
    "expanded": (lambda: torch.ones(1).expand(4), ValueError, r"\(4,\) has strides \(0,\): .*with \.clone\(\)"),
}


@pytest.mark.parametrize("kind", BAD_PARAMS)
def test_parameters_that_cannot_be_stepped(kind: str) -> None:
    make, error, message = BAD_PARAMS[kind]
    bad = nn.Parameter(make(), requires_grad=kind not in ("integer", "bool"))
    with pytest.raises(error, match=f"parameter 1 of shape .*{message}"):
        FusedShardedAdam([torch.zeros(3, requires_grad=True), bad])
    optimizer = FusedShardedAdam(make_params())
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": bad})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        ([1.0], TypeError, "one of the params is float"),
        (torch.ones(2), TypeError, "iterable of Tensors or dicts"),
        ([{"params": {torch.ones(2)}}], TypeError, "ordered collections"),
        ([torch.ones(2, requires_grad=True) * 2], ValueError, "can't optimize a non-leaf Tensor"),
    ],
)
def test_torchs_own_errors_remain(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedShardedAdamW(params)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _shape_differs(param: nn.Parameter) -> None:
    param.data = torch.ones(3)


def _sparse(param: nn.Parameter) -> None:
    param.grad = torch.ones(7, 5).to_sparse()


def _double(param: nn.Parameter) -> None:
    param.data = param.data.double()
    param.grad = torch.ones(7, 5, dtype=torch.float64)


BAD_GRADS: dict[str, tuple[Callable[[nn.Parameter], None], type[Exception], str]] = {
    "shape": (
        _shape_differs,
        ValueError,
        r"parameter 0.*gradient has shape \(7, 5\), the parameter \(3,\); .*run backward again",
    ),
    "sparse": (_sparse, TypeError, r"gradient with layout torch\.sparse_coo; .*sparse=False"),
    "float64": (_double, TypeError, r"gradient of dtype torch\.float64; float32, bfloat16 and float16 are supported"),
}


@pytest.mark.parametrize("group_of_its_own", [False, True])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("kind", BAD_GRADS)
def test_gradients_that_do_not_fit(kind: str, after: int, group_of_its_own: bool, backend: str) -> None:
    """None of the other parameters is stepped either, though they may be launched first."""
    spoil, error, message = BAD_GRADS[kind]
    bad, *good = make_params()
    groups = [{"params": good}, {"params": [bad]}] if group_of_its_own else [{"params": [bad, *good]}]
    optimizer = FusedShardedAdam(groups, max_grad_norm=1.0, backend=backend)
    optimizer.init_states()
    train(optimizer, after)
    set_grads(parameters(optimizer), after)
    spoil(bad)
    before = snapshot(optimizer)
    index = r"parameter 4" if group_of_its_own else "parameter 0"
    with pytest.raises(error, match=message.replace("parameter 0", index)):
        optimizer.step()
    after_error = snapshot(optimizer)
    if kind == "float64":  # the master that such a parameter would need is made before its gradient is looked at
        after_error = {name: value for name, value in after_error.items() if name in before}
    assert_same(after_error, before)


def test_sparse_embedding() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = FusedShardedAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    start = embedding.weight.detach().clone()
    with pytest.raises(TypeError, match="build the module with sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, start)


def test_a_gradient_on_another_device() -> None:
    """Torch's own setter refuses it on most ways; the plan is the last to look."""
    param = torch.ones(3)
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    plan = UpdatePlan([Entry(param, 0, state, None, torch.zeros(1), 0)])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gradient is on meta, the parameter on cpu; .*move the model before"):
            plan.refresh([torch.ones(3, device="meta")])
    plan.refresh([torch.ones(3)])
    with pytest.raises(ValueError, match="gradient is on meta, the parameter on cpu"):
        plan.refresh([torch.ones(3, device="meta")])


def test_a_closure_that_raises_changes_nothing() -> None:
    optimizer = FusedShardedAdam(make_params())
    train(optimizer, 1)
    before = snapshot(optimizer)

    def closure() -> float:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        optimizer.step(closure)
    assert_same(snapshot(optimizer), before)


# ---- state dicts -----------------------------------------------------------------------------------------------------


def _reshaped(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = torch.zeros(8)


def _not_a_tensor(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg_sq"] = [0.0] * 7


def _integers(saved: dict[str, Any]) -> None:
    saved["state"][1]["exp_avg"] = torch.zeros(7, dtype=torch.int8)


def _integer_remainder(saved: dict[str, Any]) -> None:
    saved["state"][1]["remainder"] = torch.zeros(7, dtype=torch.int16)


def _two_steps(saved: dict[str, Any]) -> None:
    saved["state"][1]["step"] = torch.zeros(2)


def _fewer(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["params"].pop()


def _another_group(saved: dict[str, Any]) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})


def _differentiable(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["differentiable"] = True


def _bad_betas(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["betas"] = (0.9, 1.0)


BAD_STATE_DICTS: dict[Callable[[dict[str, Any]], None], str] = {
    _reshaped: r"state 'exp_avg' of parameter 1 is \(8,\), the parameter has shape \(7,\); load the state of the same",
    _not_a_tensor: r"state 'exp_avg_sq' of parameter 1 is list, the parameter has shape \(7,\)",
    _integers: r"state 'exp_avg' of parameter 1 is torch\.int8 \(7,\), which this optimizer cannot read; load a",
    _integer_remainder: r"state 'remainder' of parameter 1 is torch\.int16 \(7,\), which this optimizer cannot read",
    _two_steps: r"state 'step' of parameter 1 is torch\.float32 \(2,\), which this optimizer cannot read",
    _fewer: r"param groups of \[4\] parameters, this optimizer of \[5\]; build the optimizer over the same parameters",
    _another_group: r"param groups of \[5, 0\] parameters, this optimizer of \[5\]",
    _differentiable: "differentiable is True",
    _bad_betas: r"betas\[1\] is 1\.0; a decay rate is at least 0 and below 1",
}


@pytest.mark.parametrize("spoil", BAD_STATE_DICTS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_state_dict_that_does_not_fit_is_not_loaded(spoil: Callable[[dict[str, Any]], None]) -> None:
    source = FusedShardedAdam(make_params(dtype=torch.bfloat16), lr=0.5)
    train(source, 2)
    saved = copy.deepcopy(source.state_dict())
    spoil(saved)
    optimizer = FusedShardedAdam(make_params(dtype=torch.bfloat16), lr=1e-3)
    train(optimizer, 1)
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match=BAD_STATE_DICTS[spoil]):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == groups[0]["lr"] == 1e-3
    # It trains on as if nothing had been: masters are not taken for newly loaded, either.
    untouched = FusedShardedAdam(make_params(dtype=torch.bfloat16), lr=1e-3)
    train(optimizer, 1, first=1)
    train(untouched, 2)
    assert_same(snapshot(optimizer), snapshot(untouched))


def test_master_param_of_a_stranger() -> None:
    optimizer = FusedShardedAdam(make_params())
    with pytest.raises(ValueError, match=r"shape \(2, 3\) is not one of this optimizer's; pass one it was built with"):
        optimizer.master_param(torch.ones(2, 3))


# ---- backends --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_library, "library_path", lambda: tmp_path / "_ops.so")
    _registry._resolve.cache_clear()


def test_a_named_backend_that_is_not_built_never_falls_back(unbuilt: None) -> None:
    message = "backend 'cpp' cannot run sharded_adam on 'cpu': the op library .* is not built .*install g.*'reference'"
    with pytest.raises(RuntimeError, match=message):
        FusedShardedAdam(make_params(), backend="cpp")
    assert "not built" in shardops.backends("cpu")["cpp"]


def test_without_a_name_what_there_is_runs(unbuilt: None) -> None:
    assert _registry.default_backend("cpu") == "reference"
    optimizer = FusedShardedAdam(make_params(), max_grad_norm=1.0)
    train(optimizer, 1)
    _registry._resolve.cache_clear()


def test_triton_on_a_cpu() -> None:
    if _registry.unavailable_reason("triton", "cpu") is None:
        pytest.skip("this process runs triton's interpreter")
    with pytest.raises(RuntimeError, match=r"backend 'triton' cannot run .*Available for 'cpu': 'cpp', 'reference'"):
        FusedShardedAdam(make_params(), backend="triton")


def test_an_environment_variable_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDOPS_BACKEND", "fastest")
    with pytest.raises(ValueError, match="backend is 'fastest', which is none of"):
        FusedShardedAdam(make_params())
    FusedShardedAdam(make_params(), backend="reference")
