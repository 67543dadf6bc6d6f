"""Storage modes of moments and masters: what is kept, in how many bytes, what is refused, and what is skipped.

Kinds of parameters and options: test_state_params.py; rounding: test_state_rounding.py; what is saved and loaded:
test_state_resume.py and test_state_conversions.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from optim_helpers import assert_same, clones, make_params, parameters, set_grads, snapshot, train
from reference import assert_bits_equal
from test_optim_memory import allocated
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW

STATE_DTYPES = ("float32", "bfloat16", "int8")
MASTERS = ("split32", "split24", "fp32", "stochastic", "none")
MODES = tuple(itertools.product(STATE_DTYPES, MASTERS))
# Blocks, a short last block in each row, fp32 under int8, a vector, a scalar, an empty tensor.
SHAPES = ((32, 256), (30, 200), (7, 5), (67,), (), (0, 256))
MOMENTS: dict[str, dict[str, torch.dtype]] = {
    "float32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bfloat16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "int8": {"exp_avg_codes": torch.int8, "exp_avg_sq_codes": torch.uint8, "block_words": torch.int32},
}
MASTER_STATES: dict[str, dict[str, torch.dtype]] = {
    "auto": {"remainder": torch.bfloat16},
    "split32": {"remainder": torch.bfloat16},
    "split24": {"remainder": torch.int8},
    "fp32": {"master_param": torch.float32},
    "stochastic": {},
    "none": {},
}


def make(
    state_dtype: Any, master: str, *, dtype: torch.dtype = torch.bfloat16, shapes: Any = SHAPES, **options: Any
) -> FusedShardedAdamW:
    params = make_params(shapes, dtype=dtype, seed=options.pop("params_seed", 0))
    return FusedShardedAdamW(params, state_dtype=state_dtype, master_weights=master, **options)


# ---- what there is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("master", MASTER_STATES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_dtypes_and_shapes(dtype: torch.dtype, state_dtype: str, master: str, amsgrad: bool) -> None:
    optimizer = make(state_dtype, master, dtype=dtype, amsgrad=amsgrad)
    optimizer.init_states()
    for index, param in enumerate(parameters(optimizer)):
        has_codes = state_dtype == "int8" and index < 2
        expected = dict(MOMENTS["float32" if state_dtype == "int8" and not has_codes else state_dtype])
        if dtype == torch.bfloat16:
            expected |= MASTER_STATES[master]
        if amsgrad:
            expected["max_exp_avg_sq"] = torch.float32
        shapes = dict.fromkeys(expected, tuple(param.shape))
        if has_codes:
            shapes["block_words"] = (param.shape[0], 2, 2)
        is_split24 = dtype == torch.bfloat16 and master == "split24"
        is_stochastic = dtype == torch.bfloat16 and master == "stochastic"
        if has_codes or state_dtype == "bfloat16" or is_split24 or is_stochastic:
            expected["salt"], shapes["salt"] = torch.int64, ()
        state = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        assert {name: value.dtype for name, value in state.items()} == expected
        assert {name: tuple(value.shape) for name, value in state.items()} == shapes
        assert all(not value.any() for name, value in state.items() if name not in ("salt", "master_param"))
        assert_bits_equal(optimizer.master_param(param), param.detach().float())


@pytest.mark.parametrize(
    ("shape", "has_codes"),
    [
        ((32, 128), True),
        ((31, 132), False),  # 4,092 elements
        ((4096, 127), False),
        ((1, 4096), True),
        ((2, 64, 32), True),  # a row is all dimensions but the first
        ((2048, 64), False),
        ((64, 2, 64), True),
        ((8192,), False),
    ],
)
def test_small_parameters_and_short_rows_keep_fp32_moments(shape: tuple[int, ...], has_codes: bool) -> None:
    optimizer = make("int8", "split24", shapes=[shape])
    train(optimizer, 1)
    state = optimizer.state[parameters(optimizer)[0]]
    assert ("exp_avg_codes" in state) == ("block_words" in state) == has_codes
    assert ("exp_avg" in state) != has_codes


@pytest.mark.parametrize(
    ("state_dtype", "master", "expected"),
    [
        ("int8", "split24", 7.0625),
        ("int8", "split32", 8.0625),
        ("int8", "fp32", 10.0625),
        ("int8", "stochastic", 6.0625),
        ("int8", "none", 6.0625),
        ("bfloat16", "split24", 9),
        ("bfloat16", "split32", 10),
        ("bfloat16", "fp32", 12),
        ("bfloat16", "stochastic", 8),
        ("float32", "split24", 13),
        ("float32", "split32", 14),
        ("float32", "fp32", 16),
        ("float32", "none", 12),
    ],
)
def test_bytes_per_parameter(state_dtype: str, master: str, expected: float) -> None:
    """Parameter, gradient and what a step leaves behind, as the storages are."""
    optimizer = make(state_dtype, master, shapes=[(512, 1024)], backend="cpp")
    train(optimizer, 1)
    (param,) = parameters(optimizer)
    state = optimizer.state[param]
    held = [param, param.grad, *(value for value in state.values() if value.dim())]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) / param.numel() == expected
    assert {name for name, value in state.items() if not value.dim()} <= {"step", "salt"}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(("state_dtype", "master"), [("int8", "split24"), ("bfloat16", "stochastic")])
def test_a_step_allocates_no_temporary_of_a_parameters_size(
    state_dtype: str, master: str, max_grad_norm: float | None
) -> None:
    shapes = [(300, 1000)] * 4
    optimizer = make(state_dtype, master, shapes=shapes, max_grad_norm=max_grad_norm, backend="cpp")
    set_grads(parameters(optimizer), 0)
    first = allocated(optimizer)
    resident = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert first >= resident
    assert allocated(optimizer) <= 0.01 * resident


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
        (torch.int8, "int8"),
    ],
)
def test_state_dtype_is_given_as_a_dtype_or_by_name(given: Any, name: str) -> None:
    """The group keeps the name, for the optimizer and for a group of its own alike."""
    first, second = make_params([(32, 256)] * 2, dtype=torch.bfloat16)
    optimizer = FusedShardedAdam([first], state_dtype=given)
    assert optimizer.param_groups[0]["state_dtype"] == name
    other = FusedShardedAdam([{"params": [first]}, {"params": [second], "state_dtype": given}])
    assert [group["state_dtype"] for group in other.param_groups] == ["float32", name]
    other.init_states()
    assert set(MOMENTS[name]) <= set(other.state[second])
    assert set(MOMENTS["float32"]) <= set(other.state[first])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state_dtype": torch.float16}, ValueError, r"state_dtype is .*float16.*; it is torch\.float32"),
        ({"state_dtype": 8}, ValueError, "state_dtype is 8; it is"),
        ({"state_dtype": None}, ValueError, "state_dtype is None; it is"),
        ({"state_dtype": torch.uint8}, ValueError, "state_dtype is .*uint8.*; it is"),
        ({"seed": 1.0}, TypeError, r"seed is 1\.0; it is an integer"),
        ({"seed": None}, TypeError, "seed is None; it is an integer"),
        ({"seed": True}, TypeError, "seed is True; it is an integer"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedShardedAdam(make_params(), **options)


def test_a_group_has_its_own_modes_but_no_seed() -> None:
    optimizer = make("int8", "split24")
    before = len(optimizer.param_groups)
    for option in ({"seed": 3}, {"state_dtype": "int4"}, {"master_weights": "split16"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            optimizer.add_param_group({"params": make_params(seed=1), **option})
    assert len(optimizer.param_groups) == before


@pytest.mark.parametrize("master", ["split32", "split24", "stochastic"])
def test_float16_has_neither_remainders_nor_stochastic_rounding(master: str) -> None:
    params = make_params(dtype=torch.float16)
    with pytest.raises(ValueError, match=f"master_weights is '{master}' and parameter 0 .* float16; .* use 'auto'"):
        FusedShardedAdam(params, master_weights=master)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("master", ["auto", "fp32", "none"])
def test_float16_parameters(master: str, state_dtype: str, backend: str) -> None:
    """The moments' storage is no business of the parameter's dtype."""
    optimizer = make(state_dtype, master, dtype=torch.float16, lr=2**-6, eps=0.0, weight_decay=0.0, backend=backend)
    start = clones(parameters(optimizer))
    train(optimizer, 1)
    for param, first in zip(parameters(optimizer), start, strict=True):
        assert ("master_param" in optimizer.state[param]) == (master != "none")
        moved = (param.detach().float() - first.float()).abs()
        assert torch.allclose(moved, torch.full_like(moved, 2**-6), rtol=0, atol=2**-12)


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def _spoiled(step: int, params: list[Tensor], value: float) -> None:
    set_grads(params, step)
    params[0].grad.reshape(-1)[5] = value


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("master", ["split24", "fp32"])
def test_int8_skips_a_step_that_is_not_finite(
    master: str, value: float, max_grad_norm: float | None, backend: str
) -> None:
    """Wholly, as if the gradients had never been: dithers too."""
    optimizer, expected = (
        make("int8", master, max_grad_norm=max_grad_norm, amsgrad=True, backend=backend) for _ in range(2)
    )
    for each in (optimizer, expected):
        train(each, 2)
    before = snapshot(optimizer)
    for count in (1, 2):
        _spoiled(7, parameters(optimizer), value)
        optimizer.step()
        assert_same(snapshot(optimizer), before)
        assert optimizer.last_found_inf.item() == 1.0
        assert optimizer.skipped_steps.item() == count
        assert not optimizer.last_grad_norm.isfinite()
    for each in (optimizer, expected):
        train(each, 2, first=2)
    assert optimizer.last_found_inf.item() == 0.0
    assert optimizer.skipped_steps.item() == 2.0
    assert_same(snapshot(optimizer), snapshot(expected))


def test_int8_skips_where_only_an_fp32_group_is_not_finite(backend: str) -> None:
    """A step is made by all groups or by none."""
    quantised, plain = make_params([(32, 256), (7,)], dtype=torch.bfloat16)
    groups = [{"params": [quantised], "state_dtype": "int8"}, {"params": [plain]}]
    optimizer = FusedShardedAdamW(groups, backend=backend)
    train(optimizer, 1)
    before = snapshot(optimizer)
    set_grads([quantised, plain], 1)
    plain.grad[3] = float("nan")
    optimizer.step()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_under_a_grad_scaler(state_dtype: str, backend: str) -> None:
    """Scales are powers of two: a run of scaled gradients is the plain one bit for bit, skipped steps left out."""
    optimizer, plain = (make(state_dtype, "split24", dtype=torch.bfloat16, backend=backend) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for step, is_bad in enumerate([False, True, False, True, False]):
        set_grads(parameters(optimizer), step)
        for param in parameters(optimizer):
            param.grad.mul_(scaler.get_scale())
        if is_bad:
            parameters(optimizer)[1].grad[3, 7] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_found_inf.item() == is_bad
    for step in (0, 2, 4):
        train(plain, 1, first=step)
    assert scaler.get_scale() == 256.0
    assert optimizer.skipped_steps.item() == 2.0
    assert_same(snapshot(optimizer), snapshot(plain))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_it_propagates_through_other_states_as_in_torch(state_dtype: str, value: float, backend: str) -> None:
    optimizer = make(state_dtype, "fp32", backend=backend)
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in parameters(optimizer)], foreach=False)
    for each in (optimizer, theirs):
        _spoiled(0, parameters(each), value)
        each.step()
        train(each, 1, first=1)
    assert optimizer.skipped_steps.item() == 0.0
    for mine, other in zip(parameters(optimizer), parameters(theirs), strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][key].isfinite(), theirs.state[other][key].isfinite())
    assert parameters(optimizer)[0].isnan().sum() == 1


@pytest.mark.parametrize(("value", "max_grad_norm"), [(1e25, None), (-3e38, None), (1e25, 1e20)])
def test_int8_skips_gradients_whose_squares_are_infinite(
    value: float, max_grad_norm: float | None, backend: str
) -> None:
    """An infinite exp_avg_sq would stay, and the exp_avg beside it take all codes of their block."""
    optimizer = make("int8", "split24", max_grad_norm=max_grad_norm, backend=backend)
    train(optimizer, 1)
    before = snapshot(optimizer)
    _spoiled(1, parameters(optimizer), value)
    optimizer.step()
    assert optimizer.last_grad_norm.isfinite()
    assert optimizer.skipped_steps.item() == 1.0
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize(("value", "max_grad_norm"), [(1e18, None), (1e25, 1.0)])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_huge_gradient_does_not_spoil_its_neighbours(
    state_dtype: str, value: float, max_grad_norm: float | None, backend: str
) -> None:
    """The steps of exp_avg_sq become a sixth of an octave in its block: near the fp32 run, and the rest nearer."""
    shapes = [(32, 256)]
    pair = [
        make(dtype, "fp32", shapes=shapes, max_grad_norm=max_grad_norm, backend=backend)
        for dtype in (state_dtype, "float32")
    ]
    moved = []
    for each in pair:
        train(each, 2)
        _spoiled(2, parameters(each), value)
        each.step()
        assert each.skipped_steps.item() == 0.0
        start = each.master_param(parameters(each)[0]).clone()
        train(each, 3, first=3)
        moved.append((each.master_param(parameters(each)[0]) - start).view(-1))
    error = (moved[0] - moved[1]).abs() / 1e-3  # in learning rates, of three steps
    assert error[:128].max() <= 0.5
    assert error[128:].max() <= 0.1
