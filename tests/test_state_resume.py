"""Runs in every storage mode that are saved and resumed, copied, or put into another memory order: bit for bit.

Loading into another mode is tested in test_state_conversions.py.
"""

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
from optim_helpers import assert_same, clones, parameters, set_grads, snapshot, train
from reference import channels_last, transposed
from test_state_modes import MODES, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from shardops import FusedShardedAdamW

SHAPES = ((32, 200), (7, 5), (), (0, 256))
Mode = tuple[str, str]


@torch.no_grad()
def _set(params: list[Any], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _torch_saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("way", [_pickled, _torch_saved])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_resume_is_bit_equal(mode: Mode, way: Callable[[Any], Any]) -> None:
    """Under another seed too: what a state was begun with is saved with it."""
    options: dict[str, Any] = {"amsgrad": True, "max_grad_norm": 2.0, "shapes": SHAPES}
    optimizer = make(*mode, seed=1, **options)
    train(optimizer, 2)
    saved, weights = way((optimizer.state_dict(), clones(parameters(optimizer))))
    resumed = make(*mode, seed=2, params_seed=9, **options)
    resumed.load_state_dict(saved)
    _set(parameters(resumed), weights)
    for each in (optimizer, resumed):
        train(each, 2, first=2)
    assert_same(snapshot(resumed), snapshot(optimizer))


@pytest.mark.parametrize("way", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_a_copied_optimizer_trains_alike(mode: Mode, way: Callable[[Any], Any]) -> None:
    """With the seed, for states that are yet to be made."""
    optimizer = make(*mode, seed=5, shapes=SHAPES)
    late = parameters(optimizer)[0]
    late.requires_grad_(False)
    train_early = parameters(optimizer)[1:]
    set_grads(train_early, 0)
    optimizer.step()
    clone = way(optimizer)
    for each in (optimizer, clone):
        parameters(each)[0].requires_grad_(True)
        train(each, 2, first=1)
    assert late in optimizer.state
    assert_same(snapshot(clone), snapshot(optimizer))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(("shape", "order"), [((128, 160), transposed), ((8, 16, 8, 8), channels_last)])
def test_memory_order_does_not_matter(
    shape: tuple[int, ...], order: Callable[[Tensor], Tensor], mode: Mode, backend: str
) -> None:
    """Blocks and dithers go by an element's place in the tensor: a run changes over at any time."""
    ordered, other = (make(*mode, shapes=[shape], backend=backend) for _ in range(2))
    (param,) = parameters(other)
    param.data = order(param.data)
    for each in (ordered, other):
        train(each, 2)
    assert not param.is_contiguous()
    assert_same(snapshot(other), snapshot(ordered))
    saved, weights = copy.deepcopy((ordered.state_dict(), clones(parameters(ordered))))
    other.load_state_dict(saved)
    _set([param], weights)
    for each in (ordered, other):
        train(each, 1, first=2)
    code = other.state[param].get("exp_avg_codes", other.state[param].get("exp_avg"))
    assert code is not None
    assert code.stride() == param.stride()
    assert_same(snapshot(other), snapshot(ordered))


@pytest.mark.parametrize("mode", [("int8", "split24"), ("bfloat16", "stochastic"), ("int8", "fp32")], ids="-".join)
def test_resume_through_an_asynchronous_distributed_checkpoint(mode: Mode, tmp_path: Path) -> None:
    """The run goes on while it is saved."""

    def build(seed: int) -> tuple[nn.Module, FusedShardedAdamW]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(200, 32), nn.Linear(32, 3)).bfloat16()
        params = module.parameters()
        return module, FusedShardedAdamW(params, state_dtype=mode[0], master_weights=mode[1], seed=seed)

    module, optimizer = build(0)
    train(optimizer, 2)
    saved = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    future: Any = dcp.async_save(saved, checkpoint_id=tmp_path, no_dist=True)
    train(optimizer, 2, first=2)
    future.result()
    resumed, other = build(1)
    loaded = {"model": resumed.state_dict(), "optimizer": get_optimizer_state_dict(resumed, other)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    train(other, 2, first=2)
    assert_same(snapshot(other), snapshot(optimizer))


def test_an_optimizer_that_was_pickled_without_a_seed_steps() -> None:
    """As one from before there was dither."""
    optimizer = FusedShardedAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], master_weights="split24")
    pickled = optimizer.__getstate__()
    del pickled["seed"]
    again = FusedShardedAdamW.__new__(FusedShardedAdamW)
    again.__setstate__(pickled)
    again.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.bfloat16)
    again.step()
    assert again.seed == 0
    assert float(again.state[again.param_groups[0]["params"][0]]["step"]) == 1.0
