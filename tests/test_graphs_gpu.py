"""The capturable step on fake tensors that stand for a GPU's: nothing waits for it, or copies from or to the host."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graph_helpers import SHAPES, in_modes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardops import FusedShardedAdamW
from shardops.backends.triton import _launch
from shardops.optim import clipping, graphs

# ---- nothing waits for the GPU, or copies from and to the host -------------------------------------------------------


class OnFakeGpu(TorchFunctionMode):
    """Fake CUDA tensors in a torch that was built without CUDA: some of its bindings look for the device first."""

    PAST_BINDINGS: dict[Any, Any] = {  # noqa: RUF012
        Tensor.__getitem__: lambda x, index: x.select(0, index),
        Tensor.__invert__: torch.ops.aten.bitwise_not.default,
        Tensor.copy_: torch.ops.aten.copy_.default,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.PAST_BINDINGS.get(func, func)(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Notes copies between devices, numbers read from a GPU, and what the update was launched with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.launches: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((args, kwargs)))
        if on_gpu and torch.Tag.data_dependent_output in func.tags:
            self.found.append(str(func))
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device != result.device:
                self.found.append(f"{func} from {source.device} to {result.device}")
        if func is torch.ops.shardops.sharded_adam.default:
            self.launches.append(args)
        return result


def on_gpu(value: float) -> Tensor:
    return torch.full((), value, device="cuda")


@in_modes
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_host_is_not_waited_for(
    dtype: torch.dtype, options: dict[str, Any], is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(), OnFakeGpu():
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
        optimizer: Any = FusedShardedAdamW(params, lr=on_gpu(1e-2), capturable=True, **options)
        for param in params:
            param.grad = torch.zeros_like(param)
        if is_scaled:
            optimizer.grad_scale, optimizer.found_inf = on_gpu(4.0), on_gpu(0.0)
        optimizer.prepare_capture()
        for module in (graphs, clipping):
            monkeypatch.setattr(module, "is_capturing", lambda: True)
        monkeypatch.setattr(graphs, "address_of", id)
        with Watch() as watch:
            optimizer.step()
        assert watch.found == []
        assert watch.launches
        for launch in watch.launches:
            assert all(x.is_cuda for tensors in launch[:9] for x in tree_leaves(tensors))  # counters too
            assert launch[19] is optimizer.param_groups[0]["lr"]
            assert all(x is None or x.is_cuda for x in launch[20:])
            assert [x is not None for x in launch[20:22]] == ["max_grad_norm" in options, is_scaled]


BAD: list[Callable[[Tensor], Any]] = [
    lambda x: torch.tensor(1.0, device="cuda"),
    lambda x: torch.ops.aten._to_copy.default(torch.zeros(2), device=torch.device("cuda"), non_blocking=True),
    lambda x: x.copy_(torch.zeros(2)),
    lambda x: x.cpu(),
    lambda x: x.sum().item(),
    lambda x: bool(x.any()),
]


@pytest.mark.parametrize("bad", BAD)
def test_waiting_is_seen(bad: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode(), OnFakeGpu(), Watch() as watch, contextlib.suppress(DataDependentOutputException):
        bad(torch.zeros(2, device="cuda"))
    assert len(watch.found) == 1


# ---- the Triton launcher's tables ------------------------------------------------------------------------------------


def test_tables_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied by the graph itself from pinned memory that is there before it, and shared by captures of the same."""
    pinned: list[int] = []
    uploads: list[Tensor] = []

    def host_memory(size: int, is_pinned: bool) -> Tensor:
        assert is_pinned
        pinned.append(size)
        return torch.zeros(size, dtype=torch.int64)

    monkeypatch.setattr(_launch, "_host_memory", host_memory)
    monkeypatch.setattr(_launch, "_upload", lambda host, _: uploads.append(host) or host.clone())
    for name in ("_captured", "_spare"):
        monkeypatch.setattr(_launch, name, {})
    for cached in (_launch._cached_rows, _launch._cached_chunks, _launch._host_chunks):
        cached.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=1))

    def tables(*firsts: int, is_captured: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
        for first in firsts:
            rows = np.array([[first, 5000], [3, 70]], dtype=np.int64)
            table, chunks = _launch.tables(rows, 4096, torch.device("cuda"))
            assert table.tolist() == rows.ravel().tolist()
            assert chunks.tolist() == [0, 1, 1 << 32]

    tables(1, 2, is_captured=False)
    assert sorted(pinned) == [3, 4, 4, 4, 4]
    tables(1, 2, is_captured=False)
    assert len(uploads) == 3  # rows of two lists, and their chunks
    tables(8, 9, 8, is_captured=True)
    assert len(uploads) == 9  # at each launch
    assert len({id(host) for host in uploads[3:]}) == 3
    tables(8, 9, is_captured=True)
    assert len(pinned) == 5
    assert len(_launch._captured) == 3
    tables(10, is_captured=True)
    assert len(pinned) == 6  # no launch outside had left any
    assert {id(host) for host in _launch._captured.values()} <= {id(host) for host in uploads}
    for cached in (_launch._cached_rows, _launch._cached_chunks, _launch._host_chunks):
        cached.cache_clear()
