"""Master weights: exact in every storage, converted between storages, kept by a resume, never stale."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_helpers import assert_same, clones, make_params, one, parameters, set_grads, snapshot, train
from reference import assert_bits_equal, from_patterns, split
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.optim import checkpoint

# Parameter dtype and storage of its master.
STORAGES = [(torch.bfloat16, "split32"), (torch.bfloat16, "fp32"), (torch.float16, "fp32")]
LOW = (torch.bfloat16, torch.float16)


def _masters(optimizer: FusedShardedAdam) -> list[Tensor]:
    return clones(optimizer.master_param(param) for param in parameters(optimizer))


# ---- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_the_master_is_an_fp32_run_bit_for_bit(dtype: torch.dtype, storage: str, backend: str) -> None:
    params = make_params(dtype=dtype)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "amsgrad": True, "max_grad_norm": 3.0}
    optimizer = FusedShardedAdamW(params, master_weights=storage, backend=backend, **options)
    expected = FusedShardedAdamW(wide, backend=backend, **options)
    train(optimizer, 20)
    train(expected, 20, dtype=dtype)
    for param, other in zip(params, wide, strict=True):
        assert_bits_equal(optimizer.master_param(param), other)
        rounded = split(other.detach())[0] if storage == "split32" else other.detach().to(dtype)
        assert_bits_equal(param, rounded)


@pytest.mark.parametrize(
    "pattern", [0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0x80000000, 0x00000001, 0x00008000]
)
def test_split_masters_of_awkward_values(pattern: int, backend: str) -> None:
    """Ties, the largest number (whose bfloat16 is inf), -0.0, denormals: unchanged by a step of 0, and resumed."""
    value = from_patterns([pattern] * 3)
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedShardedAdam([param], lr=0.0, backend=backend)
    optimizer.init_states()
    high, remainder = split(value)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["remainder"] = remainder
    optimizer.load_state_dict(saved)
    param.data.copy_(high)
    param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
        assert_bits_equal(optimizer.master_param(param), value)
        assert_bits_equal(param, high)


def test_a_nan_master_stays_a_nan(backend: str) -> None:
    param = one([1.0, 2.0], [float("nan"), 1.0], torch.bfloat16)
    optimizer = FusedShardedAdam([param], backend=backend)
    for _ in range(2):
        optimizer.step()
    assert optimizer.master_param(param).isnan().tolist() == param.isnan().tolist() == [True, False]


def test_the_master_of_an_fp32_parameter_is_the_parameter() -> None:
    optimizer = FusedShardedAdam(make_params())
    train(optimizer, 1)
    for param in parameters(optimizer):
        assert optimizer.master_param(param).data_ptr() == param.data_ptr()
        assert not optimizer.master_param(param).requires_grad


@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_the_master_before_the_first_step_is_the_parameter(dtype: torch.dtype, storage: str) -> None:
    optimizer = FusedShardedAdam(make_params(dtype=dtype), master_weights=storage)
    for param in parameters(optimizer):
        assert_bits_equal(optimizer.master_param(param), param.detach().float())


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storages", [("split32", "fp32", "split32"), ("fp32", "split32", "fp32")])
def test_conversions_between_storages_lose_nothing(
    storages: tuple[str, ...], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint._said.clear()
    whole = FusedShardedAdamW(make_params(dtype=torch.bfloat16), master_weights=storages[0], backend=backend)
    train(whole, 9)
    params = make_params(dtype=torch.bfloat16)
    optimizer: Any = None
    with caplog.at_level(logging.WARNING, logger="shardops"):
        for part, storage in enumerate(storages):
            previous, optimizer = optimizer, FusedShardedAdamW(params, master_weights=storage, backend=backend)
            if previous is not None:
                optimizer.load_state_dict(copy.deepcopy(previous.state_dict()))
            train(optimizer, 3, first=3 * part)
    for mine, theirs in zip(_masters(optimizer), _masters(whole), strict=True):
        assert_bits_equal(mine, theirs)
    # One message for each direction, however many parameters there are.
    assert len(caplog.records) == 2
    assert all("states keep master weights as" in record.message for record in caplog.records)


def test_a_master_at_a_tie_survives_the_conversion(backend: str) -> None:
    """split32 has 0x3F808000 under the bfloat16 0x3F81, an fp32 master under 0x3F80: both belong to it."""
    value = from_patterns([0x3F808000])
    high, remainder = split(value)
    source = FusedShardedAdam([nn.Parameter(high.clone())], lr=0.0, backend=backend)
    source.init_states()
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["remainder"] = remainder
    param = nn.Parameter(high.clone())
    optimizer = FusedShardedAdam([param], lr=0.0, master_weights="fp32", backend=backend)
    optimizer.load_state_dict(saved)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert_bits_equal(optimizer.master_param(param), value)
    assert_bits_equal(param, value.bfloat16())


def test_fp32_and_low_precision_runs_exchange_states(backend: str) -> None:
    """An fp32 run's state under a bf16 model starts with no remainder; the other way the parameter is the master."""
    wide = FusedShardedAdam(make_params(), backend=backend)
    train(wide, 2)
    low = FusedShardedAdam(make_params(dtype=torch.bfloat16), backend=backend)
    low.load_state_dict(copy.deepcopy(wide.state_dict()))
    start = clones(parameters(low))
    low.init_states()
    for mine, first in zip(_masters(low), start, strict=True):
        assert_bits_equal(mine, first.float())
    train(low, 1, first=2)
    wide.load_state_dict(copy.deepcopy(low.state_dict()))
    train(wide, 1, first=3)
    assert set(wide.state[parameters(wide)[0]]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("split32", "fp32"), ("fp32", "split32")])
def test_before_a_step_the_master_can_be_read_in_either_storage(saved_as: str, loaded_as: str) -> None:
    source = FusedShardedAdam(make_params(dtype=torch.bfloat16), master_weights=saved_as)
    train(source, 3)
    optimizer = FusedShardedAdam(clones_of(source), master_weights=loaded_as)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    for mine, theirs in zip(_masters(optimizer), _masters(source), strict=True):
        assert_bits_equal(mine, theirs)


def clones_of(optimizer: FusedShardedAdam) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in clones(parameters(optimizer))]


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer first, read between"])
@pytest.mark.parametrize("used_before", ["new", "states made", "trained"])
@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_a_resume_keeps_the_master(dtype: torch.dtype, storage: str, used_before: str, order: str) -> None:
    def build(seed: int) -> tuple[nn.Module, FusedShardedAdamW]:
        torch.manual_seed(seed)
        module = nn.Linear(6, 5).to(dtype)
        return module, FusedShardedAdamW(module.parameters(), lr=1e-4, master_weights=storage)

    module, optimizer = build(0)
    train(optimizer, 3)
    saved = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
    train(optimizer, 3, first=3)

    resumed, optimizer2 = build(1)
    if used_before == "states made":
        optimizer2.init_states()
    if used_before == "trained":
        train(optimizer2, 2, first=40)
    if order == "model first":
        resumed.load_state_dict(saved[0])
    optimizer2.load_state_dict(saved[1])
    if order == "optimizer first, read between":
        optimizer2.state_dict()
        copy.deepcopy(optimizer2)
    if order != "model first":
        resumed.load_state_dict(saved[0])
    train(optimizer2, 3, first=3)
    assert_same(snapshot(optimizer2), snapshot(optimizer))


@pytest.mark.parametrize("dtype", LOW)
def test_other_weights_than_the_loaded_masters_count(dtype: torch.dtype, backend: str) -> None:
    """A pretrained optimizer state under other weights must not bring the old weights back."""
    source = FusedShardedAdam(make_params(dtype=dtype), master_weights="fp32", backend=backend)
    train(source, 3)
    params = make_params(dtype=dtype, seed=4)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = FusedShardedAdam(params, master_weights="fp32", backend=backend)
    expected = FusedShardedAdam(wide, backend=backend)
    for each in (optimizer, expected):
        saved = copy.deepcopy(source.state_dict())
        each.load_state_dict(saved)
    train(optimizer, 2, first=3)
    train(expected, 2, first=3, dtype=dtype)
    for mine, theirs in zip(_masters(optimizer), wide, strict=True):
        assert_bits_equal(mine, theirs)


# ---- written by somebody else ----------------------------------------------------------------------------------------


def _mul(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.75)


def _load(module: nn.Module) -> None:
    module.load_state_dict({name: torch.full_like(value, 0.3125) for name, value in module.state_dict().items()})


def _initialise(module: nn.Module) -> None:
    nn.init.zeros_(module.weight)
    nn.init.ones_(module.bias)


def _same_values(module: nn.Module) -> None:
    """Weights rounded to the parameter's dtype, as an export that is read back."""
    module.load_state_dict(copy.deepcopy(module.state_dict()))


WRITERS = [_mul, _load, _initialise, _same_values]


def _trained(dtype: torch.dtype, storage: str, backend: str | None = None) -> tuple[nn.Module, FusedShardedAdamW]:
    torch.manual_seed(0)
    module = nn.Linear(6, 5).to(dtype)
    optimizer = FusedShardedAdamW(module.parameters(), lr=1e-4, master_weights=storage, backend=backend)
    train(optimizer, 5)
    assert any((master != p).any() for master, p in zip(_masters(optimizer), module.parameters(), strict=True))
    return module, optimizer


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_the_step_starts_from_what_was_written(
    dtype: torch.dtype, storage: str, writer: Callable[[nn.Module], None], backend: str
) -> None:
    """As an fp32 run that starts from the written weights with the same moments."""
    module, optimizer = _trained(dtype, storage, backend)
    writer(module)
    wide = [nn.Parameter(param.detach().float()) for param in module.parameters()]
    expected = FusedShardedAdamW(wide, lr=1e-4, backend=backend)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 2, first=5)
    train(expected, 2, first=5, dtype=dtype)
    for mine, theirs in zip(_masters(optimizer), wide, strict=True):
        assert_bits_equal(mine, theirs)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
@pytest.mark.parametrize("reader", ["master_param", "state_dict", "deepcopy", "pickle"])
def test_nobody_reads_a_stale_master(
    reader: str, dtype: torch.dtype, storage: str, writer: Callable[[nn.Module], None]
) -> None:
    module, optimizer = _trained(dtype, storage)
    writer(module)
    written = [param.detach().float() for param in module.parameters()]
    if reader == "state_dict":
        params = clones_of(optimizer)
        other = FusedShardedAdamW(params, master_weights=storage)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif reader == "master_param":
        other = optimizer
    else:
        other = copy.deepcopy(optimizer) if reader == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for master, value in zip(_masters(other), written, strict=True):
        assert_bits_equal(master, value)


@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_only_what_was_written_is_reset(dtype: torch.dtype, storage: str) -> None:
    module, optimizer = _trained(dtype, storage)
    before = _masters(optimizer)
    with torch.no_grad():
        module.bias.add_(1.0)
    assert_bits_equal(optimizer.master_param(module.weight), before[0])
    assert_bits_equal(optimizer.master_param(module.bias), module.bias.detach().float())


@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_our_own_writes_are_not_somebody_elses(dtype: torch.dtype, storage: str) -> None:
    """Neither are steps in which a parameter has no gradient, skipped ones, nor groups that join."""
    optimizer, expected = (FusedShardedAdamW(make_params(dtype=dtype), master_weights=storage) for _ in range(2))
    train(optimizer, 3)
    train(expected, 3)
    optimizer.zero_grad()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    set_grads(parameters(optimizer), 3)
    parameters(optimizer)[0].grad[0, 0] = float("inf")
    scaler.step(optimizer)
    optimizer.state_dict()
    assert_same(snapshot(optimizer), snapshot(expected))
    for each in (optimizer, expected):
        each.add_param_group({"params": make_params(dtype=dtype, seed=3)})
    train(optimizer, 2, first=4)
    train(expected, 2, first=4)
    assert_same(snapshot(optimizer), snapshot(expected))


@pytest.mark.parametrize(("dtype", "storage"), STORAGES)
def test_parameters_that_are_views_of_one_buffer(dtype: torch.dtype, storage: str, backend: str) -> None:
    """They have one version counter between them: our write to the one is no foreign write to the other."""
    apart = make_params(((5,), (7,)), dtype)
    flat = torch.cat(clones(apart))
    views = [nn.Parameter(flat[:5]), nn.Parameter(flat[5:])]
    optimizer, expected = (
        FusedShardedAdamW([{"params": p[:1], "lr": 1e-4}, {"params": p[1:]}], master_weights=storage, backend=backend)
        for p in (views, apart)
    )
    train(optimizer, 6)
    train(expected, 6)
    assert_same(snapshot(optimizer), snapshot(expected))
    with torch.no_grad():
        flat.mul_(2.0)
    for param in views:
        assert_bits_equal(optimizer.master_param(param), param.detach().float())
