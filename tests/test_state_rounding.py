"""What rounds a stored value: dither by salt, step and element, without a bias and without a stall.

Updates are made exact: with decay rates of 0 and eps 0 a gradient of 1 moves the master by lr.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_helpers import make_params, parameters, snapshot, train
from reference import assert_bits_equal, bits, bits_equal, from_patterns, generator
from test_state_modes import SHAPES, make
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW, ops

SHAPE = (16, 64)
EXACT_STEPS: dict[str, Any] = {"betas": (0.0, 0.0), "eps": 0.0, "maximize": True}


def _filled(value: float, grad: float = 1.0, shape: tuple[int, ...] = SHAPE) -> nn.Parameter:
    param = nn.Parameter(torch.full(shape, value, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, grad)
    return param


# ---- salts -----------------------------------------------------------------------------------------------------------


def test_salts_are_of_the_parameter_and_the_seed() -> None:
    def salts(seed: Any) -> list[int]:
        optimizer = make("int8", "split24", seed=seed)
        optimizer.init_states()
        return [int(optimizer.state[param]["salt"]) for param in parameters(optimizer)]

    found = [salts(seed) for seed in (0, 1, -1, 2**64 + 5)]
    assert len({salt for each in found for salt in each}) == 4 * len(SHAPES)
    assert all(0 <= salt < 1 << 32 for each in found for salt in each)
    assert salts(1) == found[1]
    assert salts(torch.tensor(1).numpy()[()]) == found[1]  # numpy's integers


def test_the_seed_decides_on_every_dithered_value() -> None:
    for mode in (("int8", "fp32"), ("bfloat16", "fp32"), ("float32", "split24"), ("float32", "stochastic")):
        runs = [make(*mode, shapes=[(32, 256)], seed=seed, lr=1e-4) for seed in (0, 0, 1)]
        for run in runs:
            train(run, 2)
        first, again, other = ([*s.values()] for s in map(snapshot, runs))
        assert all(bits_equal(a, b, exact=True) for a, b in zip(first, again, strict=True)), mode
        assert not all(bits_equal(a, b, exact=True) for a, b in zip(first[:-1], other[:-1], strict=True)), mode


def test_the_seed_decides_on_nothing_else() -> None:
    runs = [make("float32", "split32", seed=seed) for seed in (0, 1)]
    for run in runs:
        train(run, 2)
    for a, b in zip(*(snapshot(run).values() for run in runs), strict=True):
        assert_bits_equal(a, b, exact=True)


def test_dither_is_another_one_in_every_step_and_element(backend: str) -> None:
    """Half of the elements round up in each step, and not the same ones."""
    param = _filled(1.0)
    optimizer = FusedShardedAdam([param], master_weights="stochastic", lr=2**-8, backend=backend, **EXACT_STEPS)
    ups = []
    for _ in range(8):
        param.data.fill_(1.0)
        optimizer.step()
        ups.append((param.detach() > 1.0).view(-1))
        assert 0.45 <= ups[-1].float().mean() <= 0.55
    agreements = [(a == b).float().mean() for i, a in enumerate(ups) for b in ups[:i]]
    assert max(agreements) <= 0.9
    assert len({tuple(up.tolist()) for up in ups}) == 8


# ---- stochastic ------------------------------------------------------------------------------------------------------


def test_stochastic_rounding_has_no_bias(backend: str) -> None:
    """A quarter of a bfloat16 step, 200 times: 50 steps. Counters spread better than random numbers would."""
    param = _filled(1.0)
    optimizer = FusedShardedAdam([param], master_weights="stochastic", lr=2**-9, backend=backend, **EXACT_STEPS)
    before = param.detach().clone()
    for _ in range(200):
        optimizer.step()
        moved = (bits(param) - bits(before)).unique().tolist()
        assert moved == [0, 1]  # to a neighbour or not at all
        before.copy_(param.detach())
    moves = (param.detach().float() - 1.0) * 128
    deviation = (200 * 0.25 * 0.75) ** 0.5  # of independent roundings
    assert (moves.mean() - 50).abs() <= 3 * deviation / moves.numel() ** 0.5
    assert (moves - 50).abs().max() <= 0.5 * deviation


def test_stochastic_rounding_takes_one_of_two_neighbours(backend: str) -> None:
    """Of the fp32 master that the step makes; the nearer one more often, in proportion."""
    optimizer = make("float32", "stochastic", lr=1e-2, backend=backend)
    wide = [nn.Parameter(param.detach().float()) for param in parameters(optimizer)]
    expected = FusedShardedAdamW(wide, lr=1e-2, backend=backend)
    train(optimizer, 1)
    train(expected, 1, dtype=torch.bfloat16)
    ups, shares = [], []
    for param, master in zip(parameters(optimizer), wide, strict=True):
        pattern = bits(master)
        up = bits(param).int() - (pattern >> 16)
        assert (((up == 0) | (up == 1)) & ((up == 0) | (pattern & 0xFFFF > 0))).all()
        ups.append(up.view(-1).double())
        shares.append((pattern & 0xFFFF).view(-1).double() / 2**16)
    up, share = torch.cat(ups), torch.cat(shares)
    deviation = (share * (1 - share)).sum().sqrt()
    assert ((up - share).sum()).abs() <= 3 * deviation
    assert up[share > 0.75].mean() >= 0.8
    assert up[share < 0.25].mean() <= 0.2


@pytest.mark.parametrize("master", ["stochastic", "split24"])
def test_the_largest_values_do_not_wrap(master: str, backend: str) -> None:
    """Beyond the largest bfloat16, in fp32, and beyond that; of both signs."""
    largest = float(torch.finfo(torch.bfloat16).max)
    starts = torch.tensor([largest, largest, -largest, float("inf"), -float("inf"), float("nan"), 1.0])
    param = nn.Parameter(starts.bfloat16())
    param.grad = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]).bfloat16()
    optimizer = FusedShardedAdam([param], lr=1e36 / 3, master_weights=master, backend=backend, **EXACT_STEPS)
    for step in range(1, 25):
        optimizer.step()
        found = optimizer.master_param(param)
        assert found[3:6].tolist()[:2] == [float("inf"), -float("inf")]
        assert found[5].isnan()
        if master == "stochastic":  # no neighbour is finite: it stays
            assert found[0] == largest
            assert found[2] == -largest
        elif step < 2:  # the limit of fp32 is 3.40282e38; bfloat16's is 3.38953e38
            assert largest < found[0] < 3.4028e38
            assert -largest > found[2] > -3.4028e38
        assert found[0] > 3.3e38
        assert found[2] < -3.3e38
    assert 3.3e38 < found[1] < largest
    assert param.isnan().tolist() == [False] * 5 + [True, False]


def test_a_stochastic_nan_is_canonical(backend: str) -> None:
    """A pattern that rounding could carry into the sign."""
    param = nn.Parameter(from_patterns([0x7FFF0000, 0xFFFF0000]).bfloat16())
    param.data.view(torch.int16).copy_(torch.tensor([0x7FFF, -1], dtype=torch.int16))
    param.grad = torch.ones_like(param)
    optimizer = FusedShardedAdam([param], master_weights="stochastic", backend=backend)
    optimizer.step()
    assert param.isnan().all()


# ---- what stalls and what does not -----------------------------------------------------------------------------------


def test_split24_moves_by_less_than_it_can_hold(backend: str) -> None:
    """1.2e-7 at 1.5, 256 times less than the last of its 24 bits; to nearest it would stay for ever."""
    param, lr = _filled(1.5), 2**-23
    optimizer = FusedShardedAdam([param], master_weights="split24", lr=lr, backend=backend, **EXACT_STEPS)
    for _ in range(256):
        optimizer.step()
    moves = (optimizer.master_param(param) - 1.5) * 2**15
    assert moves.frac().abs().max() == 0.0
    assert (moves.mean() - 1.0).abs() <= 0.05
    assert (moves - 1.0).abs().max() <= 1.0

    lists: list[list[Tensor]] = [[_filled(1.5).detach()], [param.grad], *([torch.zeros(SHAPE)] for _ in range(2))]  # type: ignore[list-item]
    remainder = torch.zeros(SHAPE, dtype=torch.int8)
    for _ in range(3):
        options = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "maximize": True}
        ops.sharded_adam(*lists, torch.zeros(1), lr=lr, masters=[remainder], backend=backend, **options)
    assert (lists[0][0] == 1.5).all()
    assert not remainder.any()


def test_a_bf16_exp_avg_sq_does_not_freeze(backend: str) -> None:
    """Towards 1 at beta2 = 0.999: to nearest it stops where a step is half of its last bit."""
    param = _filled(1.0)
    optimizer = FusedShardedAdam([param], state_dtype="bfloat16", lr=0.0, backend=backend)
    for _ in range(450):
        optimizer.step()
    expected = 1 - 0.999**450  # 0.362
    found = optimizer.state[param]["exp_avg_sq"].float()
    assert (found.mean() - expected).abs() <= 0.004
    assert (found - expected).abs().max() <= 0.04

    nearest, steps = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(1)
    for _ in range(450):
        lists = ([torch.ones(4)], [torch.ones(4)], [torch.zeros(4).bfloat16()], [nearest])
        ops.sharded_adam(*lists, steps, lr=0.0)
    assert nearest.float().max() <= 0.26


def test_an_int8_exp_avg_sq_does_not_freeze(backend: str) -> None:
    """From a block's spread, down to a common value at 0.1 % a step."""
    param = _filled(1.0, shape=(32, 128))
    optimizer = FusedShardedAdam([param], state_dtype="int8", lr=0.0, backend=backend)
    first = 0.25 + torch.rand(32, 128, generator=generator(0)) * 16
    param.grad = first.bfloat16()
    optimizer.step()
    start = optimizer.state_dict(precision="float32")["state"][0]["exp_avg_sq"]
    param.grad = torch.full_like(param, 0.01)
    for _ in range(150):
        optimizer.step()
    found = optimizer.state_dict(precision="float32")["state"][0]["exp_avg_sq"]
    drift = (found / (start * 0.999**150)).log().mean()
    assert drift.abs() <= 0.01


def test_none_loses_small_updates_and_the_others_do_not(backend: str) -> None:
    """1e-4 at 1.0, whose neighbours are 2**-8 and 2**-7 away: a hundred of them are 0.01."""
    moved = {}
    for master in ("none", "stochastic", "split24", "split32", "fp32"):
        param = _filled(1.0)
        optimizer = FusedShardedAdam([param], master_weights=master, lr=1e-4, backend=backend, **EXACT_STEPS)
        for _ in range(100):
            optimizer.step()
        moved[master] = float((optimizer.master_param(param) - 1.0).mean())
    assert moved.pop("none") == 0.0
    assert all(value == pytest.approx(0.01, rel=0.02) for value in moved.values())


def test_fp16_rounds_to_nearest_under_none(backend: str) -> None:
    param = make_params([(32, 256)], dtype=torch.float16)[0]
    wide = nn.Parameter(param.detach().float())
    pair = (
        FusedShardedAdamW([param], master_weights="none", lr=1e-2, backend=backend),
        FusedShardedAdamW([wide], lr=1e-2),
    )
    for each in pair:
        train(each, 1, dtype=torch.float16)
    assert_bits_equal(param, wide.detach().half())
