"""What stands for a CUDA graph without a GPU, and optimizers whose steps it records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_helpers import make_params, parameters, set_grads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardops import FusedShardedAdamW

MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"amsgrad": True, "max_grad_norm": 0.5}),
    (torch.bfloat16, {"max_grad_norm": 0.5}),
    (torch.float16, {"eps": 1e-6}),
    (torch.bfloat16, {"state_dtype": "int8", "master_weights": "split24", "max_grad_norm": 0.5}),
    (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": "stochastic"}),
]
in_modes = pytest.mark.parametrize(("dtype", "options"), MODES)
SHAPES = ((7, 5), (7,), (), (0, 4), (37, 130))


class Graph(TorchDispatchMode):
    """Stands for a CUDA graph: what runs under it is recorded, and runs again on the same tensors.

    Unlike in a graph, what is recorded runs, so that a capture is a step.
    """

    is_capturing = False

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Graph:
        Graph.is_capturing = True
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        Graph.is_capturing = False
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self._calls:
            for result, again in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(result, Tensor) and result.data_ptr() != again.data_ptr():
                    result.copy_(again)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> FusedShardedAdamW:
    """With gradients that are written where they are."""
    optimizer = FusedShardedAdamW(make_params(SHAPES, dtype), **{"lr": 1e-2, "capturable": True, **options})
    for param in parameters(optimizer):
        param.grad = torch.zeros_like(param)
    write_grads(optimizer, 0)
    return optimizer


def write_grads(optimizer: Any, step: int, is_bad: bool = False) -> None:
    kept: list[Any] = [param.grad for param in parameters(optimizer)]
    set_grads(parameters(optimizer), step)
    for param, grad in zip(parameters(optimizer), kept, strict=True):
        param.grad = grad.copy_(param.grad)
    if is_bad:
        kept[0].view(-1)[0] = float("nan")


def capture(optimizer: Any) -> Graph:
    with Graph() as graph:
        optimizer.step()
    return graph
