"""torch's own database of optimizer inputs: everything in it that Adam and AdamW take, against torch's for-loop code.

Not supported, with an error that says so: ``differentiable=True`` (kernels update in place), betas given as tensors
(numbers in every kernel's signature; torch takes tensors for capturable code), and float64 parameters.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from optim_helpers import PAIRS, assert_close_to_torch, clones, make_params, parameters, train

# torch's database imports it; a machine without a network may lack it.
pytest.importorskip("expecttest")
from torch.testing._internal import common_optimizers

STEPS = 7


def _database(device: str, dtype: torch.dtype, *, cliquey: bool) -> dict[str, dict[str, Any]]:
    """Name -> constructor keywords of Adam. AdamW's inputs are the same function in torch."""
    info = next(entry for entry in common_optimizers.optim_db if entry.optim_cls is torch.optim.Adam)
    if cliquey:
        inputs = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info)
    else:
        inputs = info.optim_inputs_func(device, dtype)
    return {f"{entry.desc}": entry.kwargs for entry in inputs}


def _has_tensor_betas(kwargs: dict[str, Any]) -> bool:
    return any(isinstance(beta, torch.Tensor) for beta in kwargs.get("betas", ()))


# The lists grow with the device: cuda's has capturable ones, mps's a tensor lr. All their keywords make sense on a CPU.
INPUTS = {
    name: kwargs
    for device in ("cpu", "cuda", "mps")
    for name, kwargs in _database(device, torch.float32, cliquey=False).items()
}
SUPPORTED = {name: kwargs for name, kwargs in INPUTS.items() if not _has_tensor_betas(kwargs)}
TENSOR_BETAS = {name: kwargs for name, kwargs in INPUTS.items() if _has_tensor_betas(kwargs)}
CLIQUEY = _database("cpu", torch.float32, cliquey=True)


def _reference_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    # torch refuses capturable on a CPU; it does not change the arithmetic beyond rounding.
    options = {name: value for name, value in kwargs.items() if name not in ("capturable", "foreach", "fused")}
    return copy.deepcopy(options) | {"foreach": False, "fused": False}


def test_the_database_is_not_empty() -> None:
    assert {"default", "non-default lr", "nonzero weight_decay", "maximize", "amsgrad"} <= set(SUPPORTED)
    assert {"capturable", "Tensor lr"} <= set(SUPPORTED)
    assert len(TENSOR_BETAS) == 2


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("pair", PAIRS)
def test_input_equals_the_for_loop(pair: str, name: str, backend: str) -> None:
    kwargs = copy.deepcopy(SUPPORTED[name])
    ours, theirs = PAIRS[pair]
    params = make_params()
    optimizer = ours(params, backend=backend, **kwargs)
    expected = theirs(copy.deepcopy(params), **_reference_options(kwargs))
    start = clones(params)
    train(optimizer, STEPS)
    train(expected, STEPS)
    assert_close_to_torch(params, parameters(expected), start, STEPS)
    for mine, other in zip(params, parameters(expected), strict=True):
        state, expected_state = optimizer.state[mine], expected.state[other]
        assert set(state) == set(expected_state)
        assert float(state["step"]) == float(expected_state["step"]) == STEPS
        # A sum of seven terms whose rounding errors, 2^-24 of the largest each, add at worst.
        for key in set(state) - {"step"}:
            limit = STEPS * 2**-23 * float(expected_state[key].abs().amax()) if mine.numel() else 0.0
            torch.testing.assert_close(state[key], expected_state[key], rtol=0, atol=limit)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", PAIRS)
def test_low_precision_master_equals_an_fp32_run(pair: str, dtype: torch.dtype, name: str) -> None:
    """Given the same gradients, the master of a low-precision parameter goes where an fp32 parameter would."""
    kwargs = copy.deepcopy(SUPPORTED[name])
    ours, theirs = PAIRS[pair]
    params = make_params(dtype=dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in params]
    optimizer, expected = ours(params, **kwargs), theirs(wide, **_reference_options(kwargs))
    start = clones(wide)
    train(optimizer, STEPS)
    train(expected, STEPS, dtype=dtype)
    masters = [optimizer.master_param(param) for param in params]
    assert_close_to_torch(masters, wide, start, STEPS)
    for param, master in zip(params, masters, strict=True):
        assert param.dtype == dtype
        # Ties go away from zero in one of the storages: half a unit either way.
        torch.testing.assert_close(param.detach().float(), master, rtol=torch.finfo(dtype).eps / 2, atol=2**-25)


def test_the_bound_notices_a_wrong_learning_rate() -> None:
    """The comparison above is fine enough to see 1e-5 of an update."""
    params = make_params()
    right, wrong = PAIRS["Adam"][1](params, lr=1e-2), PAIRS["Adam"][1](copy.deepcopy(params), lr=1e-2 * (1 + 1e-5))
    start = clones(params)
    train(right, STEPS)
    train(wrong, STEPS)
    with pytest.raises(AssertionError, match="is rounding"):
        assert_close_to_torch(parameters(wrong), params, start, STEPS)


@pytest.mark.parametrize("name", CLIQUEY)
@pytest.mark.parametrize("pair", PAIRS)
def test_foreach_fused_and_differentiable(pair: str, name: str) -> None:
    """The options foreach and fused change nothing; differentiable raises."""
    kwargs = copy.deepcopy(CLIQUEY[name])
    ours = PAIRS[pair][0]
    params = make_params()
    if kwargs.get("differentiable"):
        with pytest.raises(ValueError, match=r"differentiable is True.*torch\.optim\.Adam"):
            ours(params, **kwargs)
        return
    plain = {k: v for k, v in kwargs.items() if k not in ("foreach", "fused", "differentiable")}
    optimizer, expected = ours(params, **kwargs), ours(copy.deepcopy(params), **plain)
    train(optimizer, 3)
    train(expected, 3)
    assert all(torch.equal(a, b) for a, b in zip(params, parameters(expected), strict=True))


@pytest.mark.parametrize("name", TENSOR_BETAS)
@pytest.mark.parametrize("pair", PAIRS)
def test_tensor_betas_are_refused(pair: str, name: str) -> None:
    with pytest.raises(TypeError, match=r"betas is \(tensor.*a pair of numbers"):
        PAIRS[pair][0](make_params(), **copy.deepcopy(TENSOR_BETAS[name]))


# torch's error -> ours, where the text is ours. None: not an error here, because the option has no effect here.
OUR_ERRORS: dict[str, tuple[type[Exception], str] | None] = {
    "beta1 should be between 0 and 1": (ValueError, r"betas\[0\] is 1\.0; a decay rate is at least 0 and below 1"),
    "weight_decay should > 0": (ValueError, "weight_decay is -1; it is at least 0"),
    "Tensor lr must be 1-element": (ValueError, r"lr is a tensor of shape \(2,\); it has one element"),
    "lr as Tensor doesn't work with foreach & not capturable": None,
    "betas must be either both floats or both Tensors": (TypeError, "betas is .*tensor.*; it is a pair of numbers"),
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": (TypeError, "pair of numbers"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_databases_errors(pair: str) -> None:
    info = next(entry for entry in common_optimizers.optim_db if entry.optim_cls is torch.optim.Adam)
    seen = set()
    for entry in info.optim_error_inputs_func("cpu", torch.float32):
        options = entry.optimizer_error_input
        seen.add(options.desc)
        error: tuple[type[Exception], str] | None = (entry.error_type, entry.error_regex)
        if options.desc in OUR_ERRORS:
            error = OUR_ERRORS[options.desc]
        params = make_params() if options.params is None else options.params
        if error is None:
            PAIRS[pair][0](params, **options.kwargs)
        elif issubclass(error[0], Warning):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                PAIRS[pair][0](params, **options.kwargs)
            assert any(re.match(error[1], str(w.message)) for w in caught), options.desc
        else:
            with pytest.raises(error[0], match=error[1]):
                PAIRS[pair][0](params, **options.kwargs)
    assert set(OUR_ERRORS) <= seen
