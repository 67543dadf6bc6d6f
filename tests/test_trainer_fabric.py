"""FusedShardedAdamW inside Lightning Fabric: FSDP2 by its ModelParallelStrategy, and FSDP1."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from distributed import Block, Net, loss_of, run
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from trainers import BF16_BOUND, Make, Session, check, launched, needs

MICROBATCHES = 2


def session(fabric: Any, model: Any, optimizer: torch.optim.Optimizer, wrapped: Any) -> Session:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert wrapped.optimizer is optimizer
    assert isinstance(wrapped, type(optimizer))

    def train(steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            wrapped.zero_grad()
            micro = []
            for i in range(MICROBATCHES):
                with fabric.no_backward_sync(model, enabled=i < MICROBATCHES - 1):
                    loss = loss_of(model, MICROBATCHES * step + i)
                    fabric.backward(loss / MICROBATCHES)
                micro.append(loss.detach())
            norm = fabric.clip_gradients(model, wrapped, max_norm=0.5)
            assert norm > 0.5
            wrapped.step()
            scheduler.step()
            losses.append(torch.stack(micro).mean())
        return losses

    def save(folder: str) -> None:
        fabric.save(folder, {"model": model, "optimizer": wrapped, "scheduler": scheduler.state_dict()})

    def load(folder: str) -> None:
        state = {"model": model, "optimizer": wrapped, "scheduler": None}
        fabric.load(folder, state)
        scheduler.load_state_dict(state["scheduler"])

    return Session([model], [optimizer], lambda index: loss_of(model, index), train, save, load)


def fsdp2(folder: str) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    launched()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def parallelize(model: Net, mesh: Any) -> Net:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"], mp_policy=policy)
        return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy)

    for is_distributed in (True, False):  # checkpoints are a folder of shards, or a file of full states

        def start(make: Make, seed: int, lr: float, is_distributed: bool = is_distributed) -> Session:
            strategy = ModelParallelStrategy(parallelize, 2, 1, save_distributed_checkpoint=is_distributed)
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            model = fabric.setup(Net(seed=seed))
            optimizer = make(model.parameters(), lr=lr)
            return session(fabric, model, optimizer, fabric.setup_optimizers(optimizer))

        check(start, f"{folder}/fsdp2-{is_distributed}", bound=BF16_BOUND, shadows=True)


def test_fsdp2(tmp_path: Path) -> None:
    needs("lightning-fabric", "2.6")
    run(tmp_path, 2, fsdp2, str(tmp_path))


def fsdp1(folder: str) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import FSDPStrategy

    class OnCPU(FSDPStrategy):
        """Fabric refuses the class itself on a CPU, and names FSDP1 no device there, which FSDP1 refuses."""

        def setup_module(self, module: nn.Module) -> nn.Module:
            return FSDP(
                module, device_id=self.root_device, mixed_precision=self.mixed_precision_config, **self._fsdp_kwargs
            )

    launched()
    warnings.simplefilter("ignore")  # FSDP1 is deprecated and says so in many places
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def start(make: Make, seed: int, lr: float) -> Session:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=OnCPU(mixed_precision=mixed, auto_wrap_policy={Block}))
        fabric.launch()
        net = Net(seed=seed)
        optimizer = make(net.parameters(), lr=lr)  # before the model is sharded
        model, wrapped = fabric.setup(net, optimizer)
        return session(fabric, model, optimizer, wrapped)

    check(start, f"{folder}/fsdp1", bound=BF16_BOUND, shadows=False)


def test_fsdp1(tmp_path: Path) -> None:
    """Checkpoints are sharded ones: full ones crash in torch, since offloading to the CPU is no copy on a CPU."""
    needs("lightning-fabric", "2.6")
    run(tmp_path, 2, fsdp1, str(tmp_path))
