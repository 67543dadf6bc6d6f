"""FSDP2's CPUOffloadPolicy: the step of the offloaded shards is the one of shards on the device, in every mode.

Here the mesh is a CPU's, so that a copy to the host is none. What differs on a GPU's is tested apart: parameters and
gradients on the CPU under a mesh of another device (one that is not there, so that any use of it raises), a process
group that reduces nothing on the CPU, and the event that a gradient's copy to the host is waited for by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import Tensors, assert_all_equal, assert_ranks_agree, local, run, states, whole_states
from reference import assert_bits_equal, generator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import shardops
from shardops import FusedShardedAdamW, reductions
from shardops.optim import launch
from shardops.optim.offload_boundary import host_copy

BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.float32)

# Parameters' dtype, policy, options.
MODES: list[tuple[torch.dtype, MixedPrecisionPolicy, dict[str, Any]]] = [
    (torch.float32, BF16_COMPUTE, {"amsgrad": True}),
    (torch.float32, MixedPrecisionPolicy(), {"capturable": True, "lr": torch.tensor(1e-2)}),
    (torch.bfloat16, FP32_REDUCE, {"max_grad_norm": 0.05}),
    (torch.bfloat16, FP32_REDUCE, {"master_weights": "split32", "amsgrad": True}),
    (torch.bfloat16, FP32_REDUCE, {"master_weights": "fp32"}),
    (torch.float16, FP32_REDUCE, {"eps": 1e-6}),
    (torch.bfloat16, FP32_REDUCE, {"state_dtype": "int8", "master_weights": "split24", "amsgrad": True}),
    (torch.bfloat16, FP32_REDUCE, {"state_dtype": "int8", "max_grad_norm": 0.05, "seed": 3}),
    (torch.float32, BF16_COMPUTE, {"state_dtype": "int8"}),
    (torch.bfloat16, FP32_REDUCE, {"state_dtype": torch.bfloat16, "master_weights": "split24"}),
    (torch.bfloat16, FP32_REDUCE, {"state_dtype": torch.bfloat16, "master_weights": "stochastic"}),
    (torch.bfloat16, FP32_REDUCE, {"master_weights": "none"}),
]


class WideNet(nn.Module):
    """Rows long enough for blocks, uneven over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 130)
        self.middle = nn.Linear(130, 37)
        self.head = nn.Linear(37, 41, bias=False)
        rng = generator(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=rng) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.middle(self.embedding(tokens))))
        return logits


def sharded(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> WideNet:
    model = WideNet().to(dtype)
    for module in (model.middle, model):
        fully_shard(module, mp_policy=mp_policy, offload_policy=offload_policy)
    return model


def backward(model: nn.Module, step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    tokens = torch.randint(41, (9,), generator=generator(100 * step + rank))
    loss = nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % 41)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


# ---- the step --------------------------------------------------------------------------------------------------------


def every_mode() -> None:
    """Losses, norms, parameters and states of four steps, with an accumulated gradient in one of them."""
    for mode, (dtype, mp_policy, options) in enumerate(MODES):
        label = f"mode {mode}"
        runs = []
        for offload_policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
            model = sharded(dtype, mp_policy, offload_policy)
            optimizer = FusedShardedAdamW(model.parameters(), **{"lr": 1e-2, **options}, backend="cpp")
            results: dict[str, Tensor] = {}
            for step in range(4):
                optimizer.zero_grad()
                results[f"loss {step}"] = backward(model, step)
                if step == 2:
                    backward(model, step + 100)
                optimizer.step()
                if optimizer.last_grad_norm is not None:
                    results[f"norm {step}"] = optimizer.last_grad_norm
            results |= {f"master of {n}": local(optimizer.master_param(p)) for n, p in model.named_parameters()}
            results |= {n: local(p) for n, p in model.named_parameters()}
            runs.append((results, {name: local(state) for name, state in states(optimizer)}))
        assert_all_equal(runs[1][0], runs[0][0], label)
        assert_all_equal(runs[1][1], runs[0][1], label)
        assert runs[0][0]["loss 3"] < runs[0][0]["loss 0"]
        assert all(state.device.type == "cpu" for state in runs[1][1].values())


def test_every_mode(tmp_path: Path) -> None:
    run(tmp_path, 2, every_mode)


def plugged_in() -> None:
    """Torch sends a copy of the shard: nothing is attached, and the report says so."""
    for dtype, mp_policy, path, why in (
        (torch.float32, BF16_COMPUTE, "stock", "CPU offload: torch sends a copy of the shard"),
        (torch.bfloat16, FP32_REDUCE, "exact master", "CPU offload: gradients arrive on the CPU rounded"),
    ):
        models = [sharded(dtype, mp_policy, CPUOffloadPolicy(pin_memory=False)) for _ in range(2)]
        optimizers = [FusedShardedAdamW(model.parameters(), lr=1e-2) for model in models]
        report = shardops.fsdp.plug_in(models[0], optimizers[0], elide_copy_in=True, fp32_gradients=True)
        for step in range(2):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(backward(model, step))
                optimizer.step()
            assert_bits_equal(losses[0], losses[1], f"loss {step}")
        for attachment in report.attachments:
            assert attachment.path.startswith(path)
            assert why in attachment.why
        assert not any(hasattr(local(p), "fsdp_pre_all_gather") for p in models[0].parameters())
        assert_all_equal(whole_states(optimizers[0]), whole_states(optimizers[1]))


def test_plugged_in(tmp_path: Path) -> None:
    run(tmp_path, 2, plugged_in)


def scaled() -> None:
    """A GradScaler's step, its non-finite one too."""
    model = sharded(torch.float16, FP32_REDUCE, CPUOffloadPolicy(pin_memory=False))
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        rank = torch.distributed.get_rank()
        tokens = torch.randint(41, (9,), generator=generator(step + rank))
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        scaler.scale(loss * (1e30 if step == 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
        before = [local(p).clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True) if b.numel()]
        assert all(changed) if step != 1 else not any(changed)
    assert optimizer.skipped_steps == 1
    assert_ranks_agree(whole_states(optimizer))


def test_scaled(tmp_path: Path) -> None:
    run(tmp_path, 2, scaled)


# ---- a mesh of a device that is not there ----------------------------------------------------------------------------


@contextmanager
def of_another_device(mesh: DeviceMesh) -> Iterator[None]:
    """As under CPUOffloadPolicy on a GPU: the mesh is CUDA's, the local tensors are on the CPU.

    DTensors made of local tensors would move these to the mesh's device, which raises here.
    """
    mesh._device_type = "cuda"
    try:
        with pytest.raises(AssertionError, match="not compiled with CUDA"):
            DTensor.from_local(torch.zeros(2), mesh)
        yield
    finally:
        mesh._device_type = "cpu"


def on_a_mesh_of_another_device() -> None:
    """States are on the CPU, beside the parameters; steps, copies and masters work there."""
    mesh = init_device_mesh("cpu", (2,))
    for mode, (dtype, _, options) in enumerate(MODES):
        results = []
        for is_offloaded in (False, True):
            module = Tensors([torch.randn(s, generator=generator(i)) for i, s in enumerate(((41, 130), (7,), (1, 2)))])
            module = module.to(dtype)
            fully_shard(module, mesh=mesh)
            params: list[Any] = list(module.parameters())
            grads = [[torch.ones_like(p) * (0.1 * step) for p in params] for step in range(3)]
            optimizer = FusedShardedAdamW(params, **{"lr": 1e-2, **options})
            twin = FusedShardedAdamW(params, **{"lr": 1e-2, **options})

            def steps(
                params: list[Any] = params,
                grads: list[list[Tensor]] = grads,
                optimizer: FusedShardedAdamW = optimizer,
                twin: FusedShardedAdamW = twin,
                module: nn.Module = module,
            ) -> None:
                optimizer.init_states()
                for step in range(3):
                    for param, grad in zip(params, grads[step], strict=True):
                        param.grad = grad
                    optimizer.step()
                twin.load_state_dict(optimizer.state_dict())
                for param, grad in zip(params, grads[1], strict=True):
                    param.grad = grad
                twin.step()
                twin.load_fp32_state_dict(module, optimizer.fp32_state_dict(module))
                get_optimizer_state_dict(module, optimizer)
                # States that are streamed to a device are made so.
                for _, state in states(optimizer):
                    assert_bits_equal(local(host_copy(state)), local(state), exact=True)
                    assert type(host_copy(state)) is type(state)

            if is_offloaded:
                with of_another_device(mesh):
                    steps()
            else:
                steps()
            found = {f"{i}": local(p) for i, p in enumerate(params)}
            for name, each in (("optimizer", optimizer), ("twin", twin)):
                found |= {f"{name} {key}": local(state) for key, state in states(each)}
            assert all(tensor.device.type == "cpu" for tensor in found.values())
            results.append(found)
        assert_all_equal(results[1], results[0], f"mode {mode}")


def test_on_a_mesh_of_another_device(tmp_path: Path) -> None:
    run(tmp_path, 2, on_a_mesh_of_another_device)


# ---- the way between the devices -------------------------------------------------------------------------------------


def test_the_norm_is_reduced_where_the_group_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL alone has no all-reduce of CPU tensors."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    nccl, both = SimpleNamespace(_device_types=[cuda]), SimpleNamespace(_device_types=[cpu, cuda])
    device_of: Any = reductions.reducing_device
    assert device_of(nccl, cpu) == torch.device("cuda", 3)
    assert device_of(both, cpu) == cpu
    assert device_of(nccl, torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_scalars_are_waited_for_on_the_cpu() -> None:
    """A copy to the host that is not waited for leaves the kernel with what was there before."""
    for device, may_overlap in (("cpu", False), ("cuda:0", True)):
        calls: list[tuple[torch.device, bool]] = []
        scalar = SimpleNamespace(to=lambda device, non_blocking, calls=calls: calls.append((device, non_blocking)))
        bucket = SimpleNamespace(device=torch.device(device))
        launch._beside(scalar, bucket)  # type: ignore[arg-type]
        assert calls == [(torch.device(device), may_overlap)]


def gradients_are_waited_for() -> None:
    """backward() returns once every gradient's copy to the host is done: torch waits for the event of each."""
    model = sharded(torch.float32, MixedPrecisionPolicy(), CPUOffloadPolicy(pin_memory=False))
    modules: list[Any] = [model, model.middle]
    owners = [p for m in modules for g in m._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]
    assert len(owners) == 4
    waited = []
    for owner in owners:

        def under_way(_: Tensor, owner: Any = owner) -> None:
            owner.grad_offload_event = SimpleNamespace(synchronize=lambda: waited.append(owner))

        owner.sharded_param.register_post_accumulate_grad_hook(under_way)
    backward(model, 0)
    assert len(waited) == 4
    assert all(owner.grad_offload_event is None for owner in owners)


def test_gradients_are_waited_for(tmp_path: Path) -> None:
    run(tmp_path, 2, gradients_are_waited_for)
