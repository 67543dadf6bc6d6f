"""Single numbers that the step must produce, each once a fault of some other optimizer, and equal bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import assert_same, make_params, one, snapshot, train
from torch import Tensor
from torch.optim import lr_scheduler

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW


def test_order_of_weight_decay(backend: str) -> None:
    param = one([1.0], [1.0])
    FusedShardedAdamW([param], lr=0.1, weight_decay=0.1, backend=backend).step()
    assert param.item() == pytest.approx(0.89, abs=2**-23)  # 0.891 would be decay after the update


def test_coupled_and_decoupled_decay(backend: str) -> None:
    coupled, decoupled = one([1.0], [0.0]), one([1.0], [0.0])
    adam = FusedShardedAdam([coupled], weight_decay=0.1, backend=backend)
    adamw = FusedShardedAdamW([decoupled], weight_decay=0.1, backend=backend)
    adam.step()
    adamw.step()
    assert coupled.item() == pytest.approx(0.999, abs=2**-23)
    assert adam.state[coupled]["exp_avg"].item() == pytest.approx(0.01, rel=2**-22)
    assert adam.state[coupled]["exp_avg_sq"].item() == pytest.approx(1e-5, rel=2**-22)
    assert decoupled.item() == pytest.approx(0.9999, abs=2**-24)
    assert not adamw.state[decoupled]["exp_avg"].any()
    assert not adamw.state[decoupled]["exp_avg_sq"].any()


def test_fp16_parameters_never_divide_by_zero(backend: str) -> None:
    """An eps of 1e-8 is 0 in float16: the update is made in float32."""
    values = [1.0, -2.0, 0.5]
    still = one(values, [0.0] * 3, torch.float16)
    FusedShardedAdamW([still], lr=1e-3, weight_decay=0.01, backend=backend).step()
    assert torch.equal(still.detach(), (torch.tensor(values) * (1 - 1e-5)).half())
    moved = one(values, [1e-5] * 3, torch.float16)
    FusedShardedAdam([moved], lr=1e-2, backend=backend).step()
    # 1e-5 is a float16 denormal, 9.97e-6: eps takes a thousandth of the update. Rounding: half an ulp of 2.
    assert torch.allclose(moved.detach().float(), torch.tensor(values) - 1e-2, rtol=0, atol=1e-5 + 2**-10)


def test_bf16_master_moves_where_the_parameter_cannot(backend: str) -> None:
    param = one([1.0], [1.0], torch.bfloat16)
    optimizer = FusedShardedAdam([param], lr=1e-4, backend=backend)
    optimizer.step()
    assert param.item() == 1.0
    assert optimizer.master_param(param).item() == pytest.approx(0.9999, abs=2**-24)
    for _ in range(99):
        optimizer.step()
    assert param.item() == pytest.approx(0.99, abs=2**-9)  # half a bf16 ulp below 1; without a master it would stay 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_low_precision_parameters_are_fp32(dtype: torch.dtype) -> None:
    params = make_params(dtype=dtype)
    optimizer = FusedShardedAdam(params, amsgrad=True)
    train(optimizer, 1)
    for param in params:
        state = optimizer.state[param]
        assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")} == {torch.float32}


def test_nan_and_inf_gradients_propagate_as_in_torch(backend: str) -> None:
    def run(make: Callable[..., Any]) -> Tensor:
        param = one([1.0, 2.0, 3.0, 4.0], [float("nan"), float("inf"), float("-inf"), 1.0])
        make([param]).step()
        return param.detach()

    ours = run(lambda p: FusedShardedAdam(p, backend=backend))
    expected = run(lambda p: torch.optim.Adam(p, foreach=False))
    assert torch.equal(ours.isnan(), expected.isnan())
    assert ours[3] == expected[3]


def test_backends_agree_over_twenty_mixed_steps() -> None:
    def run(backend: str, threads: int) -> dict[str, Tensor]:
        params = make_params(((64, 48), (130,), (), (5, 300)))
        low = make_params(((33, 17), (9,)), torch.bfloat16, seed=1) + make_params(((41,),), torch.float16, seed=2)
        groups = [
            {"params": [params[0], low[0], low[2]], "amsgrad": True},
            {"params": params[1:3], "weight_decay": 0.3, "decoupled_weight_decay": False, "maximize": True},
            {"params": [params[3], low[1]], "betas": (0.4, 0.9), "eps": 1e-5, "master_weights": "fp32"},
        ]
        optimizer = FusedShardedAdamW(groups, lr=torch.tensor(3e-3), max_grad_norm=5.0, backend=backend)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 20)
        torch.set_num_threads(threads)
        for step in range(20):
            train(optimizer, 1, first=step)
            scheduler.step()
        torch.set_num_threads(1)
        return snapshot(optimizer)

    expected = run("reference", 1)
    assert_same(run("cpp", 1), expected)
    assert_same(run("cpp", 3), expected)


def test_results_do_not_depend_on_the_number_of_threads(backend: str) -> None:
    """Enough elements that the kernel divides them."""

    def run(threads: int) -> dict[str, Tensor]:
        optimizer = FusedShardedAdamW(make_params((((1 << 17) + 3,), (333, 77))), max_grad_norm=1.0, backend=backend)
        torch.set_num_threads(threads)
        train(optimizer, 2)
        torch.set_num_threads(1)
        return snapshot(optimizer)

    assert_same(run(4), run(1))


def test_the_default_backend_is_the_best_available() -> None:
    assert shardops.backends("cpu")["cpp"] == "available"
    default, named = FusedShardedAdam(make_params()), FusedShardedAdam(make_params(), backend="cpp")
    train(default, 2)
    train(named, 2)
    assert_same(snapshot(default), snapshot(named))
