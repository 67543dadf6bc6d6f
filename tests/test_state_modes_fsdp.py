"""Moments in 8 bits and bfloat16, 24-bit masters and stochastic rounding, sharded: the bits of the unsharded run.

Whatever the world size, the mesh and the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import (
    Mirror,
    Tensors,
    assert_all_equal,
    exact_values,
    local,
    run,
    set_gradients,
    states,
    values,
    whole,
    whole_states,
)
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardops import FusedShardedAdamW
from shardops.optim.elements import _local_range

# Rows that divide by nothing, fewer rows than ranks, blocks that are cut short; too few elements or too short rows for
# codes; three dimensions; shards that are empty on one rank or on all but one.
SHAPES = ((67, 200), (5, 1000), (3, 1500), (3, 130), (640, 7), (1,), (2, 24, 129), (1, 4100))
IN_CODES = (0, 1, 2, 6, 7)
# Parameters' dtype and the optimizer's options.
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8, fp32 parameters": (torch.float32, {"state_dtype": "int8"}),
    "int8, split24": (torch.bfloat16, {"state_dtype": "int8", "master_weights": "split24"}),
    "int8, split32": (torch.bfloat16, {"state_dtype": "int8", "master_weights": "split32"}),
    "bf16, stochastic": (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": "stochastic"}),
    "float32, split24": (torch.bfloat16, {"master_weights": "split24"}),
    "bf16, split24, amsgrad": (
        torch.bfloat16,
        {"state_dtype": torch.bfloat16, "master_weights": "split24", "amsgrad": True},
    ),
}
ALL_MODES = MODES | {"fp32 masters": (torch.bfloat16, {"master_weights": "fp32"})}
# Those whose moments are not in blocks: nothing of them depends on how a parameter is cut.
UNBLOCKED = [mode for mode in MODES if "int8" not in mode]


def optimizer_of(params: Sequence[Tensor], mode: str, **options: Any) -> FusedShardedAdamW:
    return FusedShardedAdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "seed": 3, **ALL_MODES[mode][1], **options})


def start(mode: str, seed: int = 0, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    return [tensor * 0.05 for tensor in values(shapes, seed=seed, dtype=ALL_MODES[mode][0])]


def gradients(mode: str, step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """The full gradients of a step, of sizes that differ from row to row as real ones do."""
    made = values(shapes, seed=100 + step, dtype=ALL_MODES[mode][0])
    return [grad * torch.logspace(0, -3, len(grad)).view(-1, *[1] * (grad.dim() - 1)).to(grad) for grad in made]


def given_steps(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, mode: str, steps: range) -> None:
    """Steps under given gradients: no collective whose order of summation would differ between world sizes."""
    shapes = [tuple(param.shape) for param in params]
    for step in steps:
        set_gradients(params, gradients(mode, step, shapes))
        optimizer.step()
    optimizer.zero_grad()


def everything(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and states, gathered."""
    return {f"parameter {i}": whole(p) for i, p in enumerate(params)} | whole_states(optimizer)


# ---- the world size --------------------------------------------------------------------------------------------------


def sharded_run(mode: str, steps: range = range(4), **options: Any) -> dict[str, Tensor]:
    model = Tensors(start(mode))
    if dist.is_initialized():
        fully_shard(model)
    params = list(model.parameters())
    optimizer = optimizer_of(params, mode, **options)
    given_steps(params, optimizer, mode, steps)
    for index, param in enumerate(params):
        stored_in_codes = "exp_avg_codes" in optimizer.state[param]
        assert stored_in_codes == ("int8" in mode and index in IN_CODES), index
    # This rank's parts: gathers would take most of the time.
    return {f"parameter {i}": local(p) for i, p in enumerate(params)} | {n: local(t) for n, t in states(optimizer)}


def joined(parts: Sequence[dict[str, Tensor]], expected: dict[str, Tensor], label: str) -> dict[str, Tensor]:
    """The whole of what each rank holds a part of; counters and salts, which all hold, must agree."""
    for part in parts:
        scalars = {name: tensor for name, tensor in part.items() if not tensor.dim()}
        assert_all_equal(scalars, {name: t for name, t in expected.items() if not t.dim()}, label)
    return {name: torch.cat([part[name] for part in parts]) if t.dim() else t for name, t in parts[0].items()}


def over_world_sizes() -> dict[str, dict[str, Tensor]]:
    return {mode: sharded_run(mode) for mode in MODES}


def test_equal_bits_over_world_sizes(tmp_path: Path) -> None:
    """Parameters, codes, words, remainders and salts are those of a run without shards."""
    expected = over_world_sizes()
    # The cases show something: dither decides bits in each of them, and rounding to nearest is another run.
    for mode in MODES:
        other = sharded_run(mode, seed=4)
        differs = {name.split(".")[-1] for name in other if not torch.equal(other[name], expected[mode][name])}
        assert "salt" in differs, mode
        assert len(differs) > 1, mode
    for world_size in (1, 2, 3, 4):
        made = run(tmp_path, world_size, over_world_sizes)
        for mode in MODES:
            label = f"world size {world_size}, {mode}:"
            whole_run = joined([part[mode] for part in made], expected[mode], label)
            assert_all_equal(whole_run, expected[mode], label)


# ---- meshes and placements -------------------------------------------------------------------------------------------


def placements_of(ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]]:
    """Shape of the mesh, of a tensor, and placements on it."""
    strided = _StridedShard
    return [
        ((ranks,), (67, 200), (Shard(0),)),
        ((ranks,), (67, 200), (Shard(1),)),
        ((ranks,), (3, 1500), (Shard(0),)),
        ((ranks,), (9, 3, 70), (Shard(1),)),
        ((ranks,), (9, 5, 70), (Shard(2),)),
        ((ranks,), (67, 200), (Replicate(),)),
        ((ranks,), (5,), (Shard(0),)),
        ((ranks,), (), (Replicate(),)),
        ((2, 2), (67, 200), (Replicate(), Shard(0))),
        ((2, 2), (67, 200), (Shard(0), Shard(1))),
        ((2, 2), (67, 201), (Shard(1), Shard(0))),
        ((2, 2), (67, 200), (Shard(0), Shard(0))),
        ((2, 2), (41, 150), (strided(0, split_factor=2), Shard(0))),
        ((2, 2), (30, 153), (strided(1, split_factor=2), Shard(1))),
        ((2, 2), (6, 10, 50), (strided(1, split_factor=2), Shard(1))),
        ((1, 2, 2), (10, 150), (Replicate(), strided(0, split_factor=2), Shard(0))),
        ((2, 2), (4, 6, 50), (Shard(2), Shard(2))),
        ((1, 4), (4, 6, 50), (Shard(2), Shard(1))),  # one of them over a single rank
    ]


def element_indices() -> None:
    """The three numbers of a shard say where its elements are in the global tensor."""
    for sizes, shape, placements in placements_of(4):
        mesh = init_device_mesh("cpu", sizes)
        indices = torch.arange(torch.Size(shape).numel()).view(shape)
        shard: Any = distribute_tensor(indices, mesh, placements, src_data_rank=None)
        first, columns, stride = _local_range(shard)
        i = torch.arange(local(shard).numel())
        assert torch.equal(first + i // columns * stride + i % columns, local(shard).reshape(-1)), placements
        assert 1 <= columns <= stride


def on_meshes(mode: str) -> None:
    """Each placement in a run of its own kind: the unsharded one's bits."""
    for sizes, shape, placements in placements_of(4):
        if torch.Size(shape).numel() < 2:
            continue
        mesh = init_device_mesh("cpu", sizes)
        tensor = start(mode, shapes=[shape])[0]
        param = nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
        optimizer = optimizer_of([param], mode)
        mirror = Mirror([param], lambda params: optimizer_of(params, mode))
        for step in range(2):
            set_gradients([param], gradients(mode, step, [shape]))
            mirror.step()
            optimizer.step()
        mirror.compare(optimizer, f"{mode}, {placements}:")


def blocks_of_parts() -> None:
    """Where rows are cut, codes are those of an optimizer over the rank's part alone."""
    for mode in ("int8, fp32 parameters", "int8, split32"):
        for sizes, placements in (
            ((4,), [Shard(1)]),
            ((2, 2), [Replicate(), Shard(1)]),
            ((2, 2), [Shard(0), Shard(1)]),
            ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
        ):
            mesh = init_device_mesh("cpu", sizes)
            whole_tensor = start(mode, shapes=[(67, 820)])[0]
            param = nn.Parameter(distribute_tensor(whole_tensor, mesh, placements, src_data_rank=None))
            alone = nn.Parameter(local(param).clone())
            optimizer, twin = optimizer_of([param], mode), optimizer_of([alone], mode)
            for step in range(3):
                set_gradients([param], gradients(mode, step, [(67, 820)]))
                alone.grad = local(param.grad).clone()
                optimizer.step()
                twin.step()
            assert "block_words" in twin.state[alone]
            mine = {name: local(tensor) for name, tensor in states(optimizer)} | {"parameter": local(param)}
            assert_all_equal(mine, dict(states(twin)) | {"parameter": alone.detach()}, f"{mode}, {placements}:")


class Parallel(nn.Module):
    """Tensor parallel by rows, by columns and not at all; then FSDP2, by rows too or, where asked, by columns."""

    def __init__(self, tensors: Sequence[Tensor], mesh: DeviceMesh, by_columns: bool = False) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            placement = (Shard(0), Shard(1), None)[index % 3]
            if placement is not None:
                tensor = distribute_tensor(tensor, mesh["tp"], [placement], src_data_rank=None)
            self.register_parameter(f"p{index}", nn.Parameter(tensor.clone()))
        fully_shard(self, mesh=mesh["dp"], shard_placement_fn=(lambda param: Shard(1)) if by_columns else None)


PARALLEL_SHAPES = ((41, 200), (33, 400), (31, 200), (3, 1400))


def under_fsdp(mode: str, mesh: DeviceMesh, by_columns: bool) -> None:
    """2-D meshes as FSDP2 makes them."""
    model = Parallel(start(mode, shapes=PARALLEL_SHAPES), mesh, by_columns)
    params: list[Any] = list(model.parameters())
    optimizer = optimizer_of(params, mode, max_grad_norm=2.0)
    mirror = Mirror(params, lambda tensors: optimizer_of(tensors, mode, max_grad_norm=2.0))
    kinds = {type(placement) for param in params for placement in param.placements}
    assert _StridedShard in kinds
    for step in range(3):
        grads = exact_values(PARALLEL_SHAPES, seed=step, dtype=MODES[mode][0])  # one norm, in any order of summation
        set_gradients(params, grads)
        for param, grad in zip(params, grads, strict=True):
            assert_bits_equal(whole(param.grad), grad, "the gathered gradient")
        mirror.step()
        optimizer.step()
    # Of a parameter whose rows are cut the codes are of other blocks: blocks_of_parts.
    cut = [i for i, p in enumerate(params) if "int8" in mode and any(getattr(x, "dim", 0) == 1 for x in p.placements)]
    assert len(cut) == ("int8" in mode) * (len(params) if by_columns else 1)
    twins = everything(mirror.params, mirror.optimizer)
    for name, tensor in everything(params, optimizer).items():
        if int(name.removeprefix("parameter ").split(".")[0]) not in cut:
            assert_bits_equal(tensor, twins[name], f"{mode}, {name}", exact="remainder" in name)


def replicas(mode: str) -> None:
    """HSDP: the unsharded bits, in both replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Tensors(start(mode))
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = optimizer_of(params, mode)
    mirror = Mirror(params, lambda tensors: optimizer_of(tensors, mode))
    for step in range(3):
        set_gradients(params, gradients(mode, step))
        mirror.step()
        optimizer.step()
    mirror.compare(optimizer, mode)
    mine = {name: local(tensor) for name, tensor in states(optimizer)}
    mine |= {f"parameter {i}": local(p) for i, p in enumerate(params)}
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert_all_equal(everyone[(dist.get_rank() + 2) % 4], mine, f"{mode}, the other replica:")


def refused() -> None:
    """Two sharded dimensions beyond the first: an error on every rank, also on those that hold nothing."""
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, placements in (
        ((4, 6, 200), [Shard(1), Shard(2)]),
        ((4, 3, 400), [Shard(2), Shard(1)]),
        ((40, 200), [_StridedShard(1, split_factor=2), Replicate()]),
        ((40, 200), [Shard(0), _StridedShard(0, split_factor=2)]),  # every other part of the rows
    ):
        for mode in MODES:
            tensor = start(mode, shapes=[shape])[0]
            param = nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
            optimizer = optimizer_of([param], mode)
            set_gradients([param], gradients(mode, 0, [shape]))
            with pytest.raises(ValueError, match="use float32 states and an exact master"):
                optimizer.step()
            assert_bits_equal(whole(param), tensor, "parameter")
            exact = FusedShardedAdamW([param])
            exact.step()
            assert exact.state[param]["step"] == 1


def placed() -> None:
    element_indices()
    for mode in UNBLOCKED:
        on_meshes(mode)
    blocks_of_parts()
    refused()


def fsdp_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mode in ("int8, split24", "int8, split32", "bf16, stochastic", "float32, split24"):
        replicas(mode)
        for by_columns in (False, True):
            under_fsdp(mode, mesh, by_columns)


@pytest.mark.parametrize("function", [placed, fsdp_meshes])
def test_meshes(tmp_path: Path, function: Callable[[], None]) -> None:
    run(tmp_path, 4, function)
