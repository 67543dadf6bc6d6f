"""FusedShardedAdamW on two-dimensional meshes: HSDP (replicate, shard), and tensor parallel under FSDP2."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import (
    UNEVEN,
    Block,
    Mirror,
    Net,
    Tensors,
    assert_all_equal,
    assert_ranks_agree,
    exact_values,
    local,
    loss_of,
    run,
    states,
    values,
    whole,
)
from reference import assert_bits_equal, ulps
from test_clipping import reductions
from test_collectives import exact_norm
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardops
from shardops import FusedShardedAdamW


def make(tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    return FusedShardedAdamW(tensors, lr=1e-2)


# ---- HSDP ------------------------------------------------------------------------------------------------------------


def hsdp_tensors(tensors: list[Tensor], mesh: DeviceMesh) -> list[nn.Parameter]:
    module = Tensors(tensors)
    fully_shard(module, mesh=mesh)
    return list(module.parameters())


def hsdp_step(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Under given gradients and clipping: the unsharded step, and replicas with the same bits."""
    params = hsdp_tensors(values(UNEVEN, seed=0, dtype=dtype), mesh)
    assert all(p.placements == (Replicate(), Shard(0)) for p in params)
    optimizer = FusedShardedAdamW(params, lr=1e-2, max_grad_norm=2.0)
    mirror = Mirror(params, lambda tensors: FusedShardedAdamW(tensors, lr=1e-2, max_grad_norm=2.0))
    for step in range(3):
        # Exact: the same norm, and so the same coefficient, in any order of summation.
        for param, grad in zip(params, exact_values(UNEVEN, seed=step, dtype=dtype), strict=True):
            param.grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
        mirror.step()
        with reductions() as seen:
            optimizer.step()
        assert seen == [2]  # over the shards of one replica
        assert_bits_equal(optimizer.last_grad_norm, mirror.optimizer.last_grad_norm, "norm")
        assert optimizer.last_grad_norm > 2.0
    mirror.compare(optimizer)
    # full_tensor reads one replica: look at each one's own tensors.
    mine = [(name, local(tensor)) for name, tensor in states(optimizer)]
    mine += [(f"parameter {i}", local(p)) for i, p in enumerate(params)]
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(mine))
    replicas = mesh.mesh[:, mesh.get_local_rank("shard")].tolist()
    for other in replicas:
        assert_all_equal(everyone[other], dict(mine), f"replica on rank {other}")


def hsdp_training(mesh: DeviceMesh) -> None:
    """Real gradients, with a norm that is the unsharded one: replicas count once, all ranks have the same bits."""
    model = Net(tied=True, frozen=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)  # measured, never clipped
    mirror = Mirror(list(model.parameters()), make)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        mirror.step()
        optimizer.step()
        expected = exact_norm([whole(p.grad) for p in params])
        assert ulps(float(optimizer.last_grad_norm), expected) <= 1
        assert_ranks_agree({"norm": optimizer.last_grad_norm})
        torch_norm = torch.nn.utils.get_total_norm([p.grad for p in params]).full_tensor()
        # A float32 norm of float32 norms: a few roundings.
        torch.testing.assert_close(optimizer.last_grad_norm, torch_norm, rtol=2**-20, atol=0)
    mirror.compare(optimizer)


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dtype in (torch.float32, torch.bfloat16):
        hsdp_step(mesh, dtype)
    hsdp_training(mesh)


def test_hsdp(tmp_path: Path) -> None:
    run(tmp_path, 4, hsdp)


# ---- tensor parallel under FSDP2 -------------------------------------------------------------------------------------

# What each tensor of TP_SHAPES is on the tensor-parallel mesh; None: it is not on it, as a norm's weight.
TP_SHAPES = ((12, 5), (7, 6), (9,), (5, 3), (4, 2))
TP_PLACEMENTS = (Shard(0), Shard(1), Replicate(), None, Shard(0))


def tp_tensors(tensors: list[Tensor], mesh: DeviceMesh) -> list[nn.Parameter]:
    module = Tensors(tensors)
    for (name, param), placement in zip(list(module.named_parameters()), TP_PLACEMENTS, strict=True):
        if placement is not None:
            shard = distribute_tensor(param.detach(), mesh["tp"], [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shard))
    fully_shard(module, mesh=mesh["dp"])
    return list(module.parameters())


def tp_step(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Under given gradients: norm, clipping and step are the unsharded ones, for every mixture of meshes."""
    params = tp_tensors(values(TP_SHAPES, seed=0, dtype=dtype), mesh)
    assert {p.device_mesh.ndim for p in params} == {1, 2}
    optimizer = FusedShardedAdamW(params, lr=1e-2, max_grad_norm=2.0)
    mirror = Mirror(params, lambda tensors: FusedShardedAdamW(tensors, lr=1e-2, max_grad_norm=2.0))
    for step in range(3):
        grads = exact_values(TP_SHAPES, seed=step, dtype=dtype)
        for param, sharded, grad in zip(params, tp_tensors(grads, mesh), grads, strict=True):
            param.grad = sharded.detach()  # a gradient is sharded as its parameter
            assert_bits_equal(whole(param.grad), grad, "the gathered gradient")
        mirror.step()
        with reductions() as seen:
            optimizer.step()
        assert seen == [4]
        assert_bits_equal(optimizer.last_grad_norm, mirror.optimizer.last_grad_norm, "norm")
        assert_ranks_agree({"norm": optimizer.last_grad_norm})
    mirror.compare(optimizer)
    for norm_type in (1.0, 2.0, math.inf):
        grads = values(TP_SHAPES, seed=7, dtype=dtype)
        norm = shardops.grad_norm(tp_tensors(grads, mesh), norm_type=norm_type)
        assert ulps(float(norm), exact_norm(grads, norm_type)) <= 1, norm_type
        assert_ranks_agree({"norm": norm})


class Model(nn.Module):
    """Two blocks whose hidden features are tensor parallel; norms and gains are whole on every rank of that mesh."""

    def __init__(self, mesh: DeviceMesh | None, seed: int = 0) -> None:
        super().__init__()
        net = Net(seed=seed)
        self.embedding, self.head = net.embedding, net.head
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(hidden=12) for _ in range(2))
        if mesh is not None:
            for block in self.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(self, mesh=mesh["dp"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tp_training(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Real gradients; then a full state dict, which a plain model continues and a sharded one loads again."""
    model = Model(mesh).to(dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)  # measured, never clipped
    mirror = Mirror(list(model.parameters()), make)

    def train(trained: nn.Module, with_optimizer: torch.optim.Optimizer, steps: range, observe: bool = False) -> None:
        for step in steps:
            with_optimizer.zero_grad()
            loss_of(trained, step, mesh.get_local_rank("dp")).backward()  # ranks of one TP group share a batch
            if observe:
                mirror.step()
            with_optimizer.step()

    train(model, optimizer, range(4), observe=True)
    expected = exact_norm([whole(p.grad) for p in model.parameters()])
    assert ulps(float(optimizer.last_grad_norm), expected) <= 1
    assert_ranks_agree({"norm": optimizer.last_grad_norm})
    mirror.compare(optimizer)

    options = StateDictOptions(full_state_dict=True)
    weights, saved = get_state_dict(model, optimizer, options=options)
    names = [name for name, _ in model.named_parameters()]
    for name, twin in zip(names, mirror.params, strict=True):
        assert_all_equal(
            {key: saved["state"][name][key] for key in sorted(saved["state"][name])},
            {key: mirror.optimizer.state[twin][key] for key in sorted(mirror.optimizer.state[twin])},
            f"full state of {name}",
        )
    other = Model(mesh, seed=1).to(dtype)
    resumed = FusedShardedAdamW(other.parameters(), max_grad_norm=1e9)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=saved, options=options)
    for trained, with_optimizer in ((model, optimizer), (other, resumed)):
        train(trained, with_optimizer, range(4, 6))
    for (name, a), (_, b) in zip(states(resumed), states(optimizer), strict=True):
        assert_bits_equal(local(a), local(b), f"resumed state {name}", exact="remainder" in name)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert_bits_equal(local(a), local(b), "resumed parameter")


def refused(mesh: DeviceMesh) -> None:
    """A gradient that is a pending sum, or sharded otherwise than its parameter, is an error before anything moves."""
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()], src_data_rank=None))
    optimizer = FusedShardedAdamW([param], lr=1e-2, max_grad_norm=1.0)
    pending = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Partial()], run_check=False)
    with pytest.raises(ValueError, match="still pending"):
        shardops.grad_norm([pending])
    for placements in ([Shard(0), Partial()], [Shard(1), Replicate()], [Replicate(), Replicate()]):
        if placements[1].is_partial():
            grad = pending
        else:
            grad = distribute_tensor(torch.ones(4, 2), mesh, placements, src_data_rank=None)
        # Autograd refuses none of these itself when the tensor is handed to .grad.
        param.grad = grad
        with pytest.raises(ValueError, match="redistribute the gradient to the parameter's placements"):
            optimizer.step()
        assert_bits_equal(whole(param), torch.ones(4, 2))
        assert all(not tensor.any() for _, tensor in states(optimizer))
    with pytest.raises(ValueError, match="a pending sum cannot be stepped"):
        FusedShardedAdamW([nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial(), Shard(0)]))])


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dtype in (torch.float32, torch.bfloat16):
        tp_step(mesh, dtype)
        tp_training(mesh, dtype)
    refused(mesh)


def test_tensor_parallel(tmp_path: Path) -> None:
    run(tmp_path, 4, tensor_parallel)
