"""``offload_state="cpu"``: an optimizer whose states are streamed trains as one whose states are beside its parameters.

The device is the tests' own, so parameters and states are on the CPU both, and the copies between them are real.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Tensors, assert_all_equal, local, run
from offload_device import FakeDevice
from optim_helpers import assert_same, make_params, parameters, set_grads, snapshot
from reference import generator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardops
from shardops import FusedShardedAdamW
from shardops.optim import offload
from shardops.optim.offload_boundary import host_copy

SHAPES = ((7, 5), (7,), (), (0, 4), (3, 67), (37, 130), (130, 37))
MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"amsgrad": True, "max_grad_norm": 0.5}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master_weights": "fp32", "capturable": True}),
    (torch.float16, {"eps": 1e-6}),
    (torch.bfloat16, {"state_dtype": "int8", "master_weights": "split24", "amsgrad": True}),
    (torch.float32, {"state_dtype": "int8"}),
    (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": "split24", "seed": 5}),
    (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": "stochastic"}),
    (torch.bfloat16, {"master_weights": "none"}),
]
in_modes = pytest.mark.parametrize(("dtype", "options"), MODES)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Copies in come early, all else late."""
    found = FakeDevice(eager=["copy in"])
    monkeypatch.setattr(offload, "boundary_of", lambda _: found)
    return found


def make(dtype: torch.dtype, *, is_offloaded: bool, **options: Any) -> FusedShardedAdamW:
    if is_offloaded:
        options = {"offload_state": "cpu", "offload_bucket_bytes": 20_000, **options}
    return FusedShardedAdamW(make_params(SHAPES, dtype), lr=1e-2, **options)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(parameters(optimizer), step)
        if step % 3 == 1:
            parameters(optimizer)[4].grad = None
        optimizer.step()
        optimizer.zero_grad()


def settled(optimizer: Any, device: FakeDevice) -> dict[str, Tensor]:
    device.finish("compute")
    optimizer.state_dict()
    return snapshot(optimizer)


@in_modes
def test_it_trains_as_without(dtype: torch.dtype, options: dict[str, Any], device: FakeDevice) -> None:
    ours, plain = (make(dtype, is_offloaded=is_offloaded, **options) for is_offloaded in (True, False))
    for optimizer in (ours, plain):
        train(optimizer, range(4))
    assert_same(settled(ours, device), settled(plain, device))
    assert device.launches > 4 * 4
    assert sum(device.allocated) <= 20_000


@in_modes
def test_states_are_complete_wherever_they_are_read(
    dtype: torch.dtype, options: dict[str, Any], device: FakeDevice
) -> None:
    """After a step whose copies are still under way."""
    plain = make(dtype, is_offloaded=False, **options)
    train(plain, range(2))
    for read in (
        lambda o: o.state_dict(),
        lambda o: o.state_dict(precision="float32"),
        lambda o: pickle.dumps(o),
        copy.deepcopy,
    ):
        ours = make(dtype, is_offloaded=True, **options)
        train(ours, range(2))
        read(ours)
        states = {k: v for k, v in snapshot(ours).items() if not k.startswith("parameter")}
        assert_same(states, {k: v for k, v in snapshot(plain).items() if not k.startswith("parameter")})
    for param, twin in zip(parameters(ours), parameters(plain), strict=True):
        device.finish("compute")
        assert torch.equal(ours.master_param(param), plain.master_param(twin))


@pytest.mark.parametrize(("dtype", "options"), MODES[2:6:2] + MODES[7:8])
def test_checkpoints_go_both_ways(dtype: torch.dtype, options: dict[str, Any], device: FakeDevice) -> None:
    kinds = (True, False)
    whole = make(dtype, is_offloaded=False, **options)
    train(whole, range(4))
    for source_kind, target_kind in ((a, b) for a in kinds for b in kinds):
        source = make(dtype, is_offloaded=source_kind, **options)
        target = make(dtype, is_offloaded=target_kind, **options)
        train(target, range(1))  # copies of its own are under way
        train(source, range(2))
        device.finish("compute")
        with torch.no_grad():
            for param, saved in zip(parameters(target), parameters(source), strict=True):
                param.copy_(saved)
        target.load_state_dict(source.state_dict())
        train(target, range(2, 4))
        assert_same(settled(target, device), settled(whole, device))


@pytest.mark.parametrize("mode", ["split32", "fp32"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_parameters_written_by_others_are_followed(mode: str, is_seen: bool, device: FakeDevice) -> None:
    """While copies of the last step's masters are under way to the host."""
    results = []
    for is_offloaded in (True, False):
        optimizer = make(torch.bfloat16, is_offloaded=is_offloaded, master_weights=mode)
        train(optimizer, range(2))
        device.finish("compute")
        with torch.no_grad():
            for param in parameters(optimizer):
                (param if is_seen else param.data).mul_(1.5)
        if not is_seen:
            optimizer.refresh_masters()
        train(optimizer, range(2, 3))
        results.append(settled(optimizer, device))
    assert_same(*results)


def test_a_skipped_step_writes_nothing(device: FakeDevice) -> None:
    results = []
    for is_offloaded in (True, False):
        optimizer = make(torch.bfloat16, is_offloaded=is_offloaded, state_dtype="int8")
        train(optimizer, range(2))
        set_grads(parameters(optimizer), 2, scale=float("inf"))
        optimizer.step()
        train(optimizer, range(3, 4))
        assert optimizer.skipped_steps == 1
        results.append(settled(optimizer, device))
    assert_same(*results)


def test_copies_stream_on_their_own(device: FakeDevice) -> None:
    """A pickled and a deep copy keep the option; a shallow one shares states, and so who waits for them."""
    optimizer = make(torch.float32, is_offloaded=True)
    train(optimizer, range(1))
    others: list[Any] = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for other in others:
        assert other.offload_state == "cpu"
        assert other._offload is not optimizer._offload
        assert other._offload.nbytes == 20_000
    assert copy.copy(optimizer)._offload is optimizer._offload
    plain = make(torch.float32, is_offloaded=False)
    assert copy.deepcopy(plain)._offload is None


# ---- sharded parameters, and gradients released in backward ----------------------------------------------------------


def sharded() -> None:
    """DTensors of uneven shards, their words of blocks too; and a state dict of theirs."""
    device = FakeDevice(eager=["copy in"])
    vars(offload)["boundary_of"] = lambda _: device  # in this process, which ends with the test
    results = []
    offloaded: dict[str, Any] = {"offload_state": "cpu", "offload_bucket_bytes": 20_000}
    for options in ({}, offloaded):
        module = Tensors(
            [torch.randn(shape, generator=generator(i)) for i, shape in enumerate(((41, 130), (7,), (1, 2)))]
        )
        fully_shard(module.bfloat16())
        optimizer = FusedShardedAdamW(
            module.parameters(), lr=1e-2, state_dtype="int8", master_weights="split24", **options
        )
        for step in range(3):
            for param in module.parameters():
                param.grad = torch.ones_like(param) * (step - 0.5)
            optimizer.step()
        saved: Any = get_optimizer_state_dict(module, optimizer)
        results.append((saved["state"], {name: local(p) for name, p in module.named_parameters()}))
        device.finish("compute")
    (expected, params), (actual, ours) = results
    assert_all_equal(ours, params)
    assert list(actual) == list(expected)
    for name, state in expected.items():
        assert all(type(actual[name][key]) is type(value) for key, value in state.items())
        assert_all_equal({k: local(v) for k, v in actual[name].items()}, {k: local(v) for k, v in state.items()}, name)
    assert isinstance(actual["p0"]["block_words"], DTensor)


def test_sharded(tmp_path: Path) -> None:
    run(tmp_path, 2, sharded)


def test_gradients_released_in_backward(device: FakeDevice) -> None:
    """Each part of the step is streamed on its own."""
    results = []
    for is_offloaded in (True, False):
        model = nn.Sequential(nn.Linear(130, 41), nn.Linear(41, 5)).bfloat16()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.01)
        options: dict[str, Any] = {"offload_state": "cpu", "offload_bucket_bytes": 20_000} if is_offloaded else {}
        optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, **options)
        handle = shardops.enable_gradient_release(model, optimizer)
        for step in range(3):
            model(torch.full((2, 130), 0.1 * step + 0.1, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            device.finish("compute")
        handle.remove()
        results.append(settled(optimizer, device))
    assert_same(*results)
    assert device.launches >= 3 * 4


# ---- what is refused, and where nothing is streamed ------------------------------------------------------------------


def test_bad_options() -> None:
    param = make_params()
    with pytest.raises(ValueError, match="offload_state is 'disk'"):
        FusedShardedAdamW(param, offload_state="disk")
    with pytest.raises(ValueError, match="offload_bucket_bytes is 0"):
        FusedShardedAdamW(param, offload_state="cpu", offload_bucket_bytes=0)
    with pytest.raises(TypeError, match="offload_bucket_bytes is '1 GB'"):
        FusedShardedAdamW(param, offload_state="cpu", offload_bucket_bytes="1 GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload_state='cpu', which is one for all groups"):
        FusedShardedAdamW([{"params": param, "offload_state": "cpu"}])


def test_on_the_cpu_nothing_is_streamed() -> None:
    ours, plain = (make(torch.bfloat16, is_offloaded=is_offloaded) for is_offloaded in (True, False))
    for optimizer in (ours, plain):
        train(optimizer, range(2))
    assert_same(snapshot(ours), snapshot(plain))


def test_a_host_copy_has_the_layout() -> None:
    strided = torch.randn(6, 4).t()
    found = host_copy(strided)
    assert found.stride() == strided.stride()
    assert torch.equal(found, strided)
    assert found.data_ptr() != strided.data_ptr()
