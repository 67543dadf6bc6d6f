"""FusedShardedAdamW as torchtitan builds it: one optimizer for each part of the model, a container, and schedulers.

A rank has several parts under pipeline parallelism with virtual stages. Written here in torchtitan's manner; nothing is
imported from it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from distributed import Net, batch, local, run
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from trainers import BF16_BOUND, FP32_BOUND, Make, Session, check

from shardops import FusedShardedAdamW

# One dict of "state.<parameter>.<key>" for all parts, so that a pipeline's stages may be cut otherwise on loading.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Models(Stateful):
    """The weights of all parts, in one dict."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


class Optimizers(torch.optim.Optimizer, Stateful):
    """An optimizer for each part, stepped together; itself one for the sake of its hooks only."""

    def __init__(self, parts: list[nn.Module], make: Make, options: dict[str, Any]) -> None:
        self.parts = parts
        self.optimizers: Any = self._build(make, options)
        super().__init__([param for part in parts for param in part.parameters()], options)

    def _build(self, make: Make, options: dict[str, Any]) -> list[Any]:
        return [make([p for p in part.parameters() if p.requires_grad], **options) for part in self.parts]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        saved = [
            get_optimizer_state_dict(part, optimizers, options=FLAT)
            for part, optimizers in zip(self.parts, self.optimizers, strict=True)
        ]
        return {name: value for part in saved for name, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizers in zip(self.parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizers, optim_state_dict=state_dict, options=FLAT)


class InBackward(Optimizers):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def _build(self, make: Make, options: dict[str, Any]) -> list[Any]:
        built = []
        for part in self.parts:
            by_param = {param: make([param], **options) for param in part.parameters()}

            def step(param: Tensor, by_param: dict[Any, torch.optim.Optimizer] = by_param) -> None:
                by_param[param].step()
                by_param[param].zero_grad()

            for param in by_param:
                param.register_post_accumulate_grad_hook(step)
            built.append(list(by_param.values()))
        return built

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for optimizers in self.optimizers for optimizer in optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        pass

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        pass


class Schedulers(Stateful):
    """A scheduler for each optimizer, all in the same state, of which one is saved."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step) for o in optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(copy.deepcopy(state_dict))


def build_parts(seed: int, policy: MixedPrecisionPolicy, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Two parts, sharded on the meta device, then materialised and initialised."""
    with torch.device("meta"):
        net = Net().to(dtype)
    stages = ({"embedding": net.embedding, "block_0": net.blocks[0]}, {"block_1": net.blocks[1], "head": net.head})
    parts = [nn.Sequential(OrderedDict(stage)) for stage in stages]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    initial = Net(seed=seed).to(dtype)
    values = [*initial.embedding.parameters(), *initial.blocks.parameters(), *initial.head.parameters()]
    for part in parts:
        for module in part:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.to_empty(device="cpu")
        with torch.no_grad():
            for param in part.parameters():
                param.copy_(distribute_tensor(values.pop(0).detach(), param.device_mesh, param.placements))
    return parts


def session(parts: list[nn.Module], optimizers: Optimizers) -> Session:
    schedulers = Schedulers(optimizers)

    def loss_of(index: int) -> Tensor:
        x, targets = batch(index, torch.distributed.get_rank())
        for part in parts:
            x = part(x)
        return nn.functional.cross_entropy(x.float(), targets)

    def train(steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            optimizers.zero_grad()
            loss = loss_of(step)
            loss.backward()
            if not isinstance(optimizers, InBackward):
                norm = nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 0.5)
                assert norm.full_tensor() > 0.5
            optimizers.step()
            schedulers.step()
            losses.append(loss.detach())
        return losses

    checkpoint = {"model": Models(parts), "optimizer": optimizers, "lr_scheduler": schedulers}
    return Session(
        parts,
        list(optimizers),
        loss_of,
        train,
        lambda folder: dcp.save(checkpoint, checkpoint_id=folder),
        lambda folder: dcp.load(checkpoint, checkpoint_id=folder),
    )


def masters_survive_the_container() -> None:
    """bf16 parameters: the container's step, an optimizer's like another, is not taken for a writer of theirs.

    It would have their remainders cleared, and each step would start from the rounded parameter.
    """
    parts = build_parts(0, MixedPrecisionPolicy(), torch.bfloat16)
    params = [param for part in parts for param in part.parameters()]
    twins = [nn.Parameter(local(param).float()) for param in params]
    optimizers = Optimizers(parts, FusedShardedAdamW, {"lr": 1e-4})
    trained = session(parts, optimizers)
    twin_optimizer = FusedShardedAdamW(twins, lr=1e-4)
    for step in range(3):
        optimizers.zero_grad()
        trained.loss(step).backward()
        for param, twin in zip(params, twins, strict=True):
            twin.grad = local(param.grad).float()
        optimizers.step()
        twin_optimizer.step()
    owners = [optimizer for optimizer in optimizers for _ in optimizer.param_groups[0]["params"]]
    for owner, param, twin in zip(owners, params, twins, strict=True):
        assert_bits_equal(local(owner.master_param(param)), twin.detach(), "master")


def cases(folder: str) -> None:
    masters_survive_the_container()
    for container, param_dtype in ((Optimizers, None), (Optimizers, torch.bfloat16), (InBackward, torch.bfloat16)):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)

        def start(
            make: Make, seed: int, lr: float, container: Any = container, policy: MixedPrecisionPolicy = policy
        ) -> Session:
            parts = build_parts(seed, policy)
            options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
            return session(parts, container(parts, make, options))

        check(
            start,
            f"{folder}/{container.__name__}-{param_dtype}",
            bound=FP32_BOUND if param_dtype is None else BF16_BOUND,
            shadows=param_dtype is not None,
        )


def test_optimizer_for_each_model_part(tmp_path: Path) -> None:
    run(tmp_path, 2, cases, str(tmp_path))
