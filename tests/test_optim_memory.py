"""What a step allocates: nothing of a parameter's size, and next to nothing once states are there."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardops


def allocated(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that one step takes from torch's allocator, freed again or not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        optimizer.step()
    events = record.profiler.kineto_results.events()
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_allocates_no_temporary_of_a_parameters_size(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    params = [torch.nn.Parameter(torch.randn(300, 1000).to(dtype)) for _ in range(4)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = shardops.FusedShardedAdamW(params, max_grad_norm=max_grad_norm, backend="cpp")
    first = allocated(optimizer)
    resident = sum(
        value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values()
    )
    # The first step makes the states: this also shows that the count sees allocations.
    assert first >= resident
    assert allocated(optimizer) <= 0.01 * resident


def test_the_count_sees_a_temporary() -> None:
    """A strided gradient is copied in order, alone: the one temporary that there is, of one gradient's size."""
    param = torch.nn.Parameter(torch.randn(300, 1000))
    param.grad = torch.randn(1000, 300).t()
    optimizer = shardops.FusedShardedAdamW([param], backend="cpp")
    allocated(optimizer)
    copied = allocated(optimizer)
    assert 300 * 1000 * 4 <= copied <= 1.05 * 300 * 1000 * 4


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradients_are_let_go(max_grad_norm: float | None) -> None:
    """Cleared after the step, they are gone, and their memory is free for the next backward's."""
    params = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    optimizer = shardops.FusedShardedAdamW(params, max_grad_norm=max_grad_norm)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        held = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        optimizer.zero_grad()
        assert [grad() for grad in held] == [None] * 3
