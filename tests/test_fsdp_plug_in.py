"""The FSDP plug-in in training: whatever FSDP2 is made to do, the bits are stock's and what is gathered are shadows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import (
    Net,
    loss_of,
    run,
)
from fsdp_watch import BF16, ELIDED, FP16, SHADOW, STOCK, Run, equal_to_stock, net
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardops
from shardops import FusedShardedAdamW
from shardops.integrations.fsdp.torch_fsdp import owners
from shardops.shadow import shadow_of

# ---- what FSDP2 is made to do ----------------------------------------------------------------------------------------
# Of a Net's 14 parameters (15 with an unused one, 1 less when tied), 12 are in two blocks and gathered twice a step
# unless they are kept after the forward; the others are the root's, gathered once.


def basic(mode: str, mp_policy: MixedPrecisionPolicy = BF16) -> Run:
    """Tied, frozen and unused parameters, two param groups, nested groups and the root's."""
    model = net(mp_policy, tied=True, frozen=True, unused=True)
    whole_groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    run = Run(mode, model, [*whole_groups, {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-3}])
    # Nothing was rounded yet: the first gathers do it.
    run.assert_sent(run.train(range(1)), casts=15, frozen=2)
    for step in range(1, 4):
        run.assert_sent(run.train([step]), frozen=4)
        run.assert_shadows()
    run.assert_sent(run.evaluate(), frozen=2)
    return run


def basic_fp16(mode: str) -> Run:
    return basic(mode, FP16)


def kept_after_forward(mode: str) -> Run:
    run = Run(mode, net(reshard_after_forward=False))
    run.train(range(1))
    run.assert_sent(run.train(range(1, 4)))
    return run


def accumulation(mode: str) -> Run:
    """Microbatches that reduce at the last one, that keep parameters, and that reduce each time."""
    run = Run(mode, net(frozen=True), max_grad_norm=1.0)
    model = run.model
    run.train(range(1))
    for step in range(2):
        run.optimizer.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2 or step == 1)
            model.set_reshard_after_backward(micro == 2)
            run.backward(10 * step + micro, scale=1 / 3)
        run.optimizer.step()
    model.set_reshard_after_backward(True)
    run.assert_sent(run.train(range(2)), frozen=8)
    return run


class Checkpointed(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def activation_checkpointing(mode: str) -> Run:
    """By a wrapper under FSDP, and by a call around FSDP's modules, which gathers for the recomputation."""
    run = None
    for outside in (False, True):
        model = Checkpointed() if outside else Net()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = fully_shard(block if outside else checkpoint_wrapper(block), mp_policy=BF16)
        run = Run(mode, fully_shard(model, mp_policy=BF16))
        run.train(range(1))
        run.assert_sent(run.train(range(1, 3)))
    assert run is not None
    return run


def prefetching(mode: str) -> Run:
    """Gathers issued ahead of their modules, and asynchronously: the copy-out comes later than the hook."""
    model = net()
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    second.set_modules_to_backward_prefetch([first])
    model._set_unshard_async_op(True)
    run = Run(mode, model)
    run.train(range(1))
    run.assert_sent(run.train(range(1, 4)))
    return run


def forwards_between_steps(mode: str) -> Run:
    """Evaluation between steps, two forwards before one backward, a backward without a step."""
    run = Run(mode, net(tied=True))
    with torch.no_grad():
        run.keep(loss_of(run.model, 50))
    run.train(range(1))
    run.assert_sent(run.evaluate(51))
    with torch.inference_mode():
        run.keep(loss_of(run.model, 52))
    run.train(range(1, 2))
    run.optimizer.zero_grad()
    loss = loss_of(run.model, 2) + loss_of(run.model, 3)
    loss.backward()
    run.keep(loss)
    run.optimizer.step()
    run.optimizer.step()  # the same gradients again
    run.backward(4)
    run.assert_sent(run.train(range(5, 7)))
    return run


def freezing(mode: str) -> Run:
    """A parameter is frozen in mid-training and trained again; another one starts frozen."""
    run = Run(mode, net(frozen=True))
    late, early = run.model.blocks[1].down.weight, run.model.blocks[0].up.weight
    run.train(range(2))
    late.requires_grad_(False)
    if mode != STOCK:
        report = shardops.fsdp.plug_in(run.model, run.optimizer, elide_copy_in=mode == ELIDED)
        assert {item.name: item.path for item in report.attachments}["blocks.1.down.weight"] == mode
    run.assert_sent(run.train(range(2, 4)), frozen=8)  # late's shadow stays right, and is sent
    for param in (late, early):
        param.requires_grad_(True)
    run.train(range(4, 6))
    run.assert_sent(run.train(range(6, 8)), frozen=4)  # the bias of early's layer is frozen still
    run.assert_shadows()
    return run


def grouped(mode: str) -> Run:
    """Several modules in one group, some of them tied; the root has no parameters of its own."""
    model = Net(tied=True)
    fully_shard([model.embedding, model.head], mp_policy=BF16)
    fully_shard(list(model.blocks), mp_policy=BF16)
    run = Run(mode, fully_shard(model, mp_policy=BF16))
    run.train(range(1))
    run.assert_sent(run.train(range(1, 4)))
    return run


EVERYTHING: tuple[Callable[[str], Run], ...] = (
    basic,
    basic_fp16,
    kept_after_forward,
    accumulation,
    activation_checkpointing,
    prefetching,
    forwards_between_steps,
    freezing,
    grouped,
)


def training(drives: tuple[Callable[[str], Run], ...]) -> None:
    for drive in drives:
        equal_to_stock(drive)


@pytest.mark.parametrize(
    ("world_size", "drives"), [(1, (basic, prefetching)), (2, EVERYTHING), (3, (basic, accumulation, grouped))]
)
def test_training(tmp_path: Path, world_size: int, drives: tuple[Callable[[str], Run], ...]) -> None:
    run(tmp_path, world_size, training, drives)


# ---- when the optimizer is made --------------------------------------------------------------------------------------


def after_a_backward(mode: str) -> Run:
    """FSDP's lazy initialisation is over, and there are gradients already."""
    model = net()
    loss_of(model, 0).backward()
    run = Run(mode, model)
    run.assert_shadows()
    run.optimizer.step()
    run.assert_sent(run.train(range(1)), casts=0)  # the step wrote all shadows
    run.train(range(1, 3))
    return run


def replaced(mode: str) -> Run:
    """A second optimizer takes over; the first one, which knows the shadows too, steps once more."""
    run = Run(mode, net())
    run.train(range(2))
    first = run.optimizer
    run.build(lr=3e-3)
    run.assert_sent(run.train(range(2, 4)))
    first.step()
    run.evaluate()
    run.train(range(4, 5))
    run.assert_sent(run.train(range(5, 6)))
    shardops.fsdp.plug_in_of(first).remove()  # takes the shadows of both away; the second's next step makes new ones
    run.evaluate()
    run.train(range(6, 8))
    run.assert_sent(run.train(range(8, 9)))
    run.assert_shadows()
    return run


def gather_under_way(mode: str) -> Run:
    """Shadows come to the root's group at the first step: until then its gather has begun without hooks."""
    model = net()
    handle = model.unshard(async_op=True)
    run = Run(mode, model)
    if mode != STOCK:
        report = shardops.fsdp.plug_in(model, run.optimizer, elide_copy_in=mode == ELIDED)
        told = {item.name: item for item in report.attachments}
        assert told["head.weight"].path == "stock"
        assert "under way" in told["head.weight"].why
        assert told["blocks.0.up.weight"].path == (ELIDED if mode == ELIDED and dist.get_world_size() > 1 else SHADOW)
    handle.wait()
    model.reshard()
    run.train(range(1))
    run.assert_sent(run.train(range(1, 3)))
    run.assert_shadows()
    return run


def unsharded(mode: str) -> Run:
    """The root's parameters after a forward are refused on every rank, with the remedy, which helps."""
    model = net(reshard_after_forward=False)
    loss_of(model, 0)
    if mode != STOCK:
        with pytest.raises(ValueError, match=r"unsharded parameter .*reshard\(\)"):
            Run(mode, model)
        with shardops.fsdp.disabled(), pytest.raises(ValueError, match=r"unsharded parameter .*reshard\(\)"):
            Run(mode, model)
        late = FusedShardedAdamW([nn.Parameter(torch.ones(1))])
        late.param_groups[0]["params"] = list(model.parameters())  # swapped, as trainers do
        with pytest.raises(ValueError, match=r"unsharded parameter .*reshard\(\)"):
            shardops.fsdp.plug_in(model, late)
        assert not any(shadow_of(owner.local) for owner in owners(model))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the remedy
            module.reshard()
    run = Run(mode, model)
    run.train(range(1))
    run.assert_sent(run.train(range(1, 3)))
    return run


def made_late() -> None:
    for drive in (after_a_backward, replaced, gather_under_way, unsharded):
        equal_to_stock(drive)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_optimizer_is_made_late(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, made_late)


# ---- two-dimensional meshes ------------------------------------------------------------------------------------------


def hsdp(mode: str) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Run(mode, net(tied=True, mesh=mesh), max_grad_norm=1.0)
    run.train(range(1))
    run.assert_sent(run.train(range(1, 4)))
    run.assert_shadows()
    return run


def tensor_parallel(mode: str) -> Run:
    """Tensor parallel under FSDP2: some parameters lie on both meshes, some on one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    for block in model.blocks:
        block.up, block.down = nn.Linear(7, 12), nn.Linear(12, 7, bias=False)
        torch.manual_seed(1)
        for layer in (block.up, block.down):
            layer.reset_parameters()
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=BF16)
    run = Run(mode, fully_shard(model, mesh=mesh["dp"], mp_policy=BF16))
    assert {p.device_mesh.ndim for p in model.parameters()} == {1, 2}

    def step(index: int) -> None:
        run.optimizer.zero_grad()
        loss = loss_of(model, index, mesh.get_local_rank("dp"))
        loss.backward()
        run.keep(loss)
        run.optimizer.step()

    step(0)
    with run.watch() as watch:
        for index in range(1, 4):
            step(index)
    run.assert_sent(watch)
    run.assert_shadows()
    return run


def meshes() -> None:
    for drive in (hsdp, tensor_parallel):
        equal_to_stock(drive)


def test_two_dimensional_meshes(tmp_path: Path) -> None:
    run(tmp_path, 4, meshes)
