"""Gradient release on plain parameters: the bits of ordinary steps, one gradient at a time, clipped and skipped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_helpers import clones
from reference import assert_bits_equal
from release_helpers import INT8, assert_same, iterate, loss_of, make
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW, enable_gradient_release

MODES = [
    {},
    {"amsgrad": True, "maximize": True},
    {"capturable": True, "lr": torch.tensor(1e-2)},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "master_weights": "fp32"},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "master_weights": "split24", **INT8},
    {"dtype": torch.bfloat16, "master_weights": "stochastic", "state_dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "master_weights": "none"},
    INT8,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()) or "fp32")
def test_the_bits_are_those_of_ordinary_steps(mode: dict[str, Any]) -> None:
    """Tied, frozen, sometimes unused parameters, several groups, a scheduler; a state dict in between."""
    pairs = [make(**mode) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.7**step) for _, o in pairs]
    enable_gradient_release(*pairs[0])
    for step in range(4):
        loss_of(pairs[0][0], step).backward()
        assert all(param.grad is None for param in pairs[0][0].parameters())
        pairs[0][1].step()
        pairs[0][1].zero_grad(set_to_none=step < 2)
        iterate(*pairs[1], step)
        for scheduler in schedulers:
            scheduler.step()
        assert_same(*pairs[0], *pairs[1], f"step {step}")
    (model, optimizer), (twin, twin_optimizer) = pairs
    assert ("exp_avg_codes" in optimizer.state[model.down.weight]) == (mode.get("state_dtype") == "int8")
    if optimizer.last_found_inf is not None:
        assert not optimizer.last_found_inf
        assert not optimizer.skipped_steps
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if param.requires_grad:
            assert_bits_equal(optimizer.master_param(param), twin_optimizer.master_param(other), "master")


def test_a_parameter_is_stepped_in_backward_and_a_tied_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    release = enable_gradient_release(model, optimizer)
    stepped: list[int] = []
    ordinary = release._step

    def spy(optimizer: Any, part: Any, *rest: Any) -> Any:
        assert sum(param.grad is not None for param in model.parameters()) == 1
        stepped.extend(id(entry.param) for entry in part.plan.entries)
        return ordinary(optimizer, part, *rest)

    monkeypatch.setattr(release, "_step", spy)
    loss_of(model, 1).backward()
    expected = [id(param) for param in model.parameters() if param.requires_grad]
    assert sorted(stepped) == sorted(expected)
    before = clones(model.parameters())
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert len(stepped) == len(expected)


def test_a_loaded_checkpoint_goes_on(tmp_path: Any) -> None:
    """Of a normal run into a released one and back; weights written in between count, as at ordinary steps."""
    (model, optimizer), (twin, twin_optimizer) = make(torch.bfloat16), make(torch.bfloat16)
    enable_gradient_release(model, optimizer)
    iterate(twin, twin_optimizer, 0)
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    for step in range(1, 4):
        with torch.no_grad():
            for written in (model, twin) if step > 1 else ():
                written.up.weight.mul_(1.01)
        iterate(model, optimizer, step)
        iterate(twin, twin_optimizer, step)
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")


def test_closures_and_checkpointing() -> None:
    """Backward within step(closure), and recomputation in backward."""
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    enable_gradient_release(model, optimizer)

    class Recomputed(nn.Module):
        def forward(self, tokens: Tensor, step: int) -> Any:
            x = checkpoint(lambda t: torch.tanh(model.up(model.embedding(t))), tokens, use_reentrant=False)
            return checkpoint(lambda x: model.head(model.frozen(model.down(x))), x, use_reentrant=False)

    for step in (0, 2, 4):

        def closure(step: int = step) -> Tensor:
            loss = loss_of(Recomputed(), step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
        iterate(twin, twin_optimizer, step)
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")


# ---- memory ----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = all(found.alias_info is None for found in func._schema.returns)  # no view, not in place
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and is_new:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        self.peak = max(self.peak, self.nbytes())
        return result

    def nbytes(self) -> int:
        return sum(size for _, size in self._storages.values())


def peak_of(layers: int, *, released: bool) -> int:
    """Bytes that a backward makes at most, beside the parameters, in gradients of one of them."""
    width = 64
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = FusedShardedAdamW(model.parameters(), backend="cpp")
    if released:
        enable_gradient_release(model, optimizer)
    optimizer.init_states()
    loss = model(torch.ones(1, width)).sum()
    live = Live()
    with live:
        loss.backward()
    return live.peak // (4 * width * width)


def test_gradients_of_one_parameter_are_alive_at_a_time() -> None:
    assert peak_of(8, released=False) == 8
    assert peak_of(8, released=True) == 1
    assert peak_of(16, released=True) == 1


# ---- clipping --------------------------------------------------------------------------------------------------------


def test_clipping_by_value_is_torchs() -> None:
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    enable_gradient_release(model, optimizer, clip_grad_value=1e-3)
    for step in range(3):
        iterate(model, optimizer, step)
        loss_of(twin, step).backward()
        assert max(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None) > 1e-3
        nn.utils.clip_grad_value_(twin.parameters(), 1e-3)
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")


def test_clipping_by_the_norm_of_the_step_before() -> None:
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    release = enable_gradient_release(model, optimizer, max_grad_norm=0.05)
    assert release.last_grad_norm is None
    norm: Any = None
    for step in range(4):
        iterate(model, optimizer, step)
        loss_of(twin, step).backward()
        grads = [param.grad for param in twin.parameters() if param.grad is not None]
        true_norm = shardops.grad_norm(grads)
        assert true_norm > 0.05
        if norm is not None:
            torch._foreach_mul_(grads, torch.clamp(0.05 / (norm + 1e-6), max=1.0))
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")
        norm = release.last_grad_norm
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        torch.testing.assert_close(norm, true_norm, rtol=1e-6, atol=0.0)


def test_the_norm_to_clip_by_can_be_given() -> None:
    """As after a checkpoint: the first iteration is then clipped too."""
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    first = enable_gradient_release(model, optimizer, max_grad_norm=0.1)
    iterate(model, optimizer, 0)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    second = enable_gradient_release(twin, twin_optimizer, max_grad_norm=0.1)
    second.last_grad_norm = float(first.last_grad_norm)
    for step in (1, 2):
        iterate(model, optimizer, step)
        iterate(twin, twin_optimizer, step)
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")
    with pytest.raises(ValueError, match="without max_grad_norm"):
        enable_gradient_release(*make()).last_grad_norm = 1.0


def test_a_norm_that_is_no_measure_is_passed_over() -> None:
    """NaN in an iteration, and one without gradients, leave the norm to clip by as it was."""
    weight = nn.Parameter(torch.zeros(2))
    holder = nn.ParameterList([weight])
    optimizer = FusedShardedAdam([weight], lr=0.0)
    release = enable_gradient_release(holder, optimizer, max_grad_norm=1.0)
    for factor, norm, coefficient in ((4.0, 4.0, 0.25), (float("nan"), float("nan"), 0.25), (None, 0.0, 0.25)):
        if factor is not None:
            (weight[0] * factor).backward()
        optimizer.step()
        assert_bits_equal(release.last_grad_norm, torch.tensor(norm), "norm")
        torch.testing.assert_close(release._coefficient, torch.tensor(coefficient), rtol=1e-6, atol=0.0)
        optimizer.state.clear()


def test_the_norm_is_of_all_that_came_in_an_iteration() -> None:
    """Also if parameters are added between backward and step, where they are stepped."""
    model, optimizer = make()
    twin, _ = make()
    release = enable_gradient_release(model, optimizer, max_grad_norm=float("inf"))
    loss_of(model, 1).backward()
    loss_of(twin, 1).backward()
    added = nn.Parameter(torch.ones(3))
    added.grad = torch.full((3,), 2.0)
    optimizer.add_param_group({"params": [added]})
    optimizer.step()
    grads = [param.grad for param in twin.parameters() if param.grad is not None]
    torch.testing.assert_close(release.last_grad_norm, shardops.grad_norm([torch.full((3,), 2.0), *grads]))
    assert release.last_grad_norm > 3.5


def test_measuring_only_clips_nothing() -> None:
    (model, optimizer), (twin, twin_optimizer) = make(), make()
    release = enable_gradient_release(model, optimizer, max_grad_norm=float("inf"))
    for step in range(3):
        iterate(model, optimizer, step)
        iterate(twin, twin_optimizer, step)
        assert_same(model, optimizer, twin, twin_optimizer, f"step {step}")
    assert release.last_grad_norm > 0.0


# ---- gradients that are not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, INT8], ids=["fp32", "int8"])
def test_gradients_that_are_not_finite(options: dict[str, Any]) -> None:
    """Only the parameter that has one is skipped under 8-bit moments, also one with fp32 moments; else it spreads."""
    model = nn.ParameterList([nn.Parameter(torch.ones(32, 128)), nn.Parameter(torch.ones(3)), torch.ones(40, 128)])
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, **options)
    enable_gradient_release(model, optimizer)

    def backward(*factors: float) -> None:
        sum((param * factor).sum() for param, factor in zip(model, factors, strict=True)).backward()
        optimizer.step()

    backward(1.0, 1.0, 1.0)
    assert optimizer.last_found_inf == 0
    before = clones(model)
    states = copy.deepcopy(optimizer.state_dict()["state"])
    backward(float("inf"), float("nan"), 1.0)
    after = optimizer.state_dict()["state"]
    assert optimizer.last_found_inf == (1 if options else 0)
    assert optimizer.skipped_steps == (1 if options else 0)
    assert all(param.grad is None for param in model)
    assert not torch.equal(before[2], model[2])
    for index in (0, 1):
        if options:
            assert torch.equal(before[index], model[index])
            for key, value in states[index].items():
                assert_bits_equal(after[index][key], value, key, exact=True)
        else:
            assert model[index].isnan().all()
    if options:
        backward(1.0, 1.0, 1.0)
        assert optimizer.last_found_inf == 0
        assert optimizer.skipped_steps == 1
        assert [int(optimizer.state[param]["step"]) for param in model] == [2, 2, 3]
