"""Gradient scaling and clipping: under torch.amp.GradScaler, by hand, and against clip_grad_norm_ and a plain step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from optim_helpers import (
    assert_close_to_torch,
    assert_same,
    clones,
    make_params,
    one,
    set_grads,
    snapshot,
    train,
    twins,
)
from reference import assert_bits_equal, ordinary, ulps
from torch import Tensor, nn

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW

SCALE = 65536.0


def _scaled(scaler: Any, params: Sequence[Tensor], step: int) -> None:
    """The gradients of ``set_grads``, as a backward of the scaled loss leaves them."""
    scaler.scale(torch.zeros(()))  # the first call makes the scale
    set_grads(params, step)
    for param in params:
        param.grad.mul_(scaler.get_scale())


# ---- the contract with GradScaler ------------------------------------------------------------------------------------


def test_grad_scale_is_divided_out_once(backend: str) -> None:
    param = one([1.0, 1.0], [65536.0, 131072.0])
    optimizer = FusedShardedAdamW([param], lr=1e-3, weight_decay=0.01, backend=backend)
    optimizer.grad_scale = torch.tensor(SCALE)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert param.detach().tolist() == pytest.approx([0.99899, 0.99899], abs=2**-24)
    assert optimizer.state[param]["exp_avg"].tolist() == pytest.approx([0.1, 0.2], rel=2**-23)


def test_scaler_training_equals_plain_training(backend: str) -> None:
    """Scales are powers of two, so dividing by them is exact: bit for bit."""
    params = make_params()
    optimizer = FusedShardedAdamW(params, backend=backend)
    plain = FusedShardedAdamW(copy.deepcopy(params), backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
        _scaled(scaler, params, step)
        scaler.step(optimizer)
        scaler.update()
    train(plain, 6)
    assert scaler.get_scale() == 1024.0 * 2**3
    assert_same(snapshot(optimizer), snapshot(plain))
    assert optimizer.skipped_steps.item() == 0.0
    assert optimizer.last_found_inf.item() == 0.0
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_changes_nothing(
    bad: float, dtype: torch.dtype, max_grad_norm: float | None, backend: str
) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedShardedAdamW(params, max_grad_norm=max_grad_norm, amsgrad=True, backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _scaled(scaler, params, 0)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(optimizer)
    _scaled(scaler, params, 1)
    params[0].grad[3, 2] = bad
    scaler.step(optimizer)
    scaler.update()
    assert_same(snapshot(optimizer), before)
    assert optimizer.last_found_inf.item() == 1.0
    assert optimizer.skipped_steps.item() == 1.0
    assert scaler.get_scale() == 2.0
    _scaled(scaler, params, 1)
    scaler.step(optimizer)
    assert float(optimizer.state[params[0]]["step"]) == 2.0
    assert optimizer.last_found_inf.item() == 0.0
    assert optimizer.skipped_steps.item() == 1.0


def test_the_first_step_may_be_skipped(backend: str) -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = FusedShardedAdam(params, backend=backend)
    start = clones(params)
    scaler = torch.amp.GradScaler("cpu")
    _scaled(scaler, params, 0)
    params[1].grad[0] = math.inf
    scaler.step(optimizer)
    for param, first in zip(params, start, strict=True):
        assert torch.equal(param, first)
        state = optimizer.state[param]
        assert not any(state[key].any() for key in ("step", "exp_avg", "exp_avg_sq", "remainder"))


def test_after_an_explicit_unscale_the_step_does_not_divide_again(backend: str) -> None:
    params = make_params()
    optimizer = FusedShardedAdamW(params, backend=backend)
    plain = FusedShardedAdamW(copy.deepcopy(params), backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        _scaled(scaler, params, step)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    train(plain, 3)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_after_an_explicit_unscale_inf_still_skips() -> None:
    params = make_params()
    optimizer = FusedShardedAdamW(params)
    start = clones(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    _scaled(scaler, params, 0)
    params[0].grad[0, 0] = math.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True))
    assert optimizer.skipped_steps.item() == 1.0


def test_max_grad_norm_under_a_scaler_equals_unscale_and_clip(backend: str) -> None:
    params = make_params()
    folded = FusedShardedAdamW(params, max_grad_norm=0.5, backend=backend)
    explicit = FusedShardedAdamW(copy.deepcopy(params), backend=backend)
    others = explicit.param_groups[0]["params"]
    scalers = [torch.amp.GradScaler("cpu", init_scale=SCALE) for _ in range(2)]
    start = clones(params)
    for step in range(5):
        _scaled(scalers[0], params, step)
        scalers[0].step(folded)
        scalers[0].update()
        _scaled(scalers[1], others, step)
        scalers[1].unscale_(explicit)
        norm = nn.utils.clip_grad_norm_(others, 0.5)
        # torch adds up in fp32, in another order: an ulp or two of the norm of five tensors.
        assert folded.last_grad_norm.item() == pytest.approx(norm.item(), rel=2**-22)
        scalers[1].step(explicit)
        scalers[1].update()
    assert_close_to_torch(params, others, start, 5)


def test_a_scaler_without_any_gradient() -> None:
    """GradScaler then hands over the integer 0 as found_inf; torch's fused Adam takes it, too."""
    params = make_params()
    optimizer = FusedShardedAdam(params)
    start = clones(params)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True))
    assert optimizer.last_found_inf.item() == 0.0


def test_a_disabled_scaler_is_a_plain_step() -> None:
    optimizer, plain, _ = twins(FusedShardedAdam, FusedShardedAdam)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    set_grads(optimizer.param_groups[0]["params"], 0)
    scaler.step(optimizer)
    train(plain, 1)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_steps_with_and_without_a_scaler_may_alternate() -> None:
    optimizer, plain, _ = twins(FusedShardedAdam, FusedShardedAdam)
    params = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        if step % 2:
            _scaled(scaler, params, step)
            scaler.step(optimizer)
            scaler.update()
        else:
            train(optimizer, 1, first=step)
    train(plain, 4)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_counters_before_any_step() -> None:
    optimizer = FusedShardedAdam(make_params(), max_grad_norm=1.0)
    assert optimizer.last_grad_norm is None
    assert optimizer.last_found_inf is None
    assert optimizer.skipped_steps.item() == 0.0
    assert optimizer.skipped_steps.dtype == torch.float32


# ---- clipping --------------------------------------------------------------------------------------------------------


def test_a_norm_that_is_exact_clips_bit_for_bit(backend: str) -> None:
    """A norm of 3, 4 and 12 is 13 in any order of summation; the coefficient and the product are torch's then."""
    values = ([3.0, 0.0], [[4.0], [0.0]], 12.0)
    params = [one([0.5, 0.25], values[0]), one([[1.0], [2.0]], values[1]), one(0.75, values[2])]
    clipped = copy.deepcopy(params)
    for param, copied in zip(params, clipped, strict=True):
        copied.grad = param.grad.clone()
    folded, explicit = FusedShardedAdamW(params, max_grad_norm=2.0, backend=backend), FusedShardedAdamW(clipped)
    for _ in range(3):
        folded.step()
        for param, copied in zip(params, clipped, strict=True):
            copied.grad.copy_(param.grad)
        assert nn.utils.clip_grad_norm_(clipped, 2.0) == folded.last_grad_norm == 13.0
        explicit.step()
    assert_same(snapshot(folded), snapshot(explicit))
    assert torch.equal(params[0].grad, torch.tensor(values[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1e6, math.inf])
def test_max_grad_norm_equals_clip_grad_norm(max_grad_norm: float, dtype: torch.dtype, backend: str) -> None:
    params = make_params(dtype=dtype)
    folded = FusedShardedAdamW(params, max_grad_norm=max_grad_norm, backend=backend)
    # The comparison clips fp32 gradients: clip_grad_norm_ on low precision ones would round them.
    wide = [nn.Parameter(param.detach().float().clone()) for param in params]
    explicit = torch.optim.AdamW(wide, foreach=False)
    start = clones(wide)
    for step in range(5):
        train(folded, 1, first=step)
        before = clones(param.grad for param in params)
        set_grads(wide, step, dtype=dtype)
        norm = nn.utils.clip_grad_norm_(wide, max_grad_norm)
        explicit.step()
        assert folded.last_grad_norm.item() == pytest.approx(norm.item(), rel=2**-22)  # torch's order of fp32 sums
        assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    # One ulp more a step than without clipping: the coefficient's, which every gradient shares.
    assert_close_to_torch([folded.master_param(p) for p in params], wide, start, 5, slack=1.5)
    if max_grad_norm >= 1e6:
        unclipped = FusedShardedAdamW(make_params(dtype=dtype), backend=backend)
        train(unclipped, 5)
        assert_same(snapshot(folded), snapshot(unclipped))


def test_the_norm_is_over_all_groups_and_dtypes(backend: str) -> None:
    params = [one([3.0], [3.0]), one([1.0], [4.0], torch.bfloat16), one([1.0], [12.0], torch.float16)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1}]
    optimizer = FusedShardedAdam(groups, max_grad_norm=1.0, backend=backend)
    params.append(one([1.0], [84.0]))
    params[3].requires_grad_(False)
    optimizer.add_param_group({"params": params[3:]})  # frozen, yet with a gradient: torch clips and steps it, too
    optimizer.step()
    assert optimizer.last_grad_norm.item() == 85.0


def test_none_gradients_do_not_count() -> None:
    params = [one([1.0], [3.0]), one([1.0], [4.0]), nn.Parameter(torch.ones(2))]
    optimizer = FusedShardedAdam(params, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_grad_norm.item() == 5.0
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.last_grad_norm.item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_as_torch_does(bad: float, backend: str) -> None:
    def run(make: Any, clip: bool) -> list[Tensor]:
        params = [one([1.0, 2.0], [bad, 1.0]), one([3.0], [2.0])]
        optimizer = make(params)
        if clip:
            nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return clones(params)

    ours = run(lambda p: FusedShardedAdam(p, max_grad_norm=1.0, backend=backend), clip=False)
    expected = run(lambda p: torch.optim.Adam(p, foreach=False), clip=True)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-23, atol=0, equal_nan=True)


# ---- grad_norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf, 1, 2, "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grad_norm_is_the_correctly_rounded_norm(norm_type: Any, dtype: torch.dtype, backend: str) -> None:
    grads = [ordinary(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(33, 7), (5,), (), (0, 3), (1001,)])]
    exact = torch.linalg.vector_norm(torch.cat([g.double().reshape(-1) for g in grads]), float(norm_type))
    result = shardops.grad_norm(grads, norm_type=norm_type, backend=backend)
    assert result.dtype == torch.float32
    assert result.shape == ()
    # Compensated sums: the result is the float64 one, rounded, but for a last bit at a tie.
    assert ulps(result.item(), exact.item()) <= (0 if float(norm_type) == math.inf else 1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_grad_norm_of_values_that_are_not_finite(norm_type: float, backend: str) -> None:
    def norm(*values: float) -> float:
        grads = [torch.ones(3), torch.tensor(values)]
        return shardops.grad_norm(grads, norm_type=norm_type, backend=backend).item()

    assert norm(1.0, -math.inf) == math.inf
    assert math.isnan(norm(1.0, math.nan))
    assert math.isnan(norm(math.inf, math.nan))


def test_grad_norm_of_nothing_and_of_empty_tensors(backend: str) -> None:
    for grads in ([], [torch.empty(0, 4)], iter([torch.empty(0)])):
        assert_bits_equal(shardops.grad_norm(grads, backend=backend), torch.tensor(0.0))


def test_grad_norm_takes_mixed_dtypes_and_leaves_them(backend: str) -> None:
    grads = [torch.full((1,), 3.0), torch.full((1, 1), -4.0, dtype=torch.bfloat16), torch.full((), 12.0).half()]
    before = clones(grads)
    assert shardops.grad_norm((g for g in grads), backend=backend).item() == 13.0
    assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))


def test_grad_norm_neither_overflows_nor_underflows(backend: str) -> None:
    """Squares of these values are not fp32 numbers; their norms are."""
    for scale in (1e30, 1e-30):
        result = shardops.grad_norm([torch.tensor([3.0, 4.0]) * scale], backend=backend).item()
        assert result == pytest.approx(5.0 * scale, rel=2**-22)


@pytest.mark.parametrize("norm_type", [0.0, 3.0, -1.0, math.nan])
def test_grad_norm_refuses_other_norms(norm_type: float) -> None:
    with pytest.raises(ValueError, match=r"norm_type is .*; 1, 2 and inf are supported"):
        shardops.grad_norm([torch.ones(2)], norm_type=norm_type)
