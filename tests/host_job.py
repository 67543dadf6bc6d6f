"""What torchrun starts on every rank of tests/test_hosts.py: training that is killed, training that resumes, checks.

The training writes checkpoints, and takes global batches of four micro-batches at any world size: a rank of two takes
two of them by accumulation.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import UNEVEN, Net, Tensors, batch, exact_values, values, whole, whole_states
from hosts import CABLE, end_with_torchrun, namespace
from test_fsdp import BF16_COMPUTE
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardops import FusedShardedAdamW

# A collective that waits so long fails. The rank that is killed must be noticed long before.
TIMEOUT = 120.0
STEPS = 9
SAVE_EVERY = 2
KILLED_IN = 5  # so that the last checkpoint, after 4 steps, is a step and a half behind
VICTIM = 3  # on the second host, not the one with the store
MICRO_BATCHES = 4
GATHERED = 2**20  # bytes a rank that are sent to see which way they go

# ---- models ----------------------------------------------------------------------------------------------------------


class Exact(Tensors):
    """Its loss is a dot product of the parameters and a micro-batch, which therefore is the gradient.

    Micro-batches are multiples of 1/4 up to 4: their means, and the sum of the means' squares, have no rounding in
    bfloat16 and float32, in any order. So no world size can change a gradient, the norm or the clip coefficient.
    """

    def __init__(self) -> None:
        super().__init__(values(UNEVEN, seed=3))

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        products = [(p.float() * x.float()).sum() for p, x in zip(self.parameters(), inputs, strict=True)]
        return torch.stack(products).sum()


def exact_loss(model: nn.Module, step: int, micro: int) -> Tensor:
    loss: Tensor = model(exact_values(UNEVEN, seed=MICRO_BATCHES * step + micro))
    return loss


def net_loss(model: nn.Module, step: int, micro: int) -> Tensor:
    tokens, targets = batch(step, micro)
    return nn.functional.cross_entropy(model(tokens).float(), targets)


# How each model is made: the module, its parameters' dtype and its mixed precision.
MODELS: dict[str, tuple[type[nn.Module], torch.dtype, MixedPrecisionPolicy]] = {
    "fp32, bf16 compute": (Exact, torch.float32, BF16_COMPUTE),
    "bf16": (Exact, torch.bfloat16, MixedPrecisionPolicy()),
    "net": (Net, torch.float32, MixedPrecisionPolicy()),
}


class Trained:
    """A sharded model in training."""

    def __init__(self, name: str) -> None:
        make, dtype, policy = MODELS[name]
        self.loss = net_loss if make is Net else exact_loss
        self.model = make().to(dtype)
        for block in self.model.blocks if make is Net else ():
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = FusedShardedAdamW(self.model.parameters(), lr=1e-2, max_grad_norm=2.0)

    def step(self, step: int) -> list[tuple[int, Tensor]]:
        """Trains on this rank's share of a global batch; micro-batches' numbers and losses."""
        share = MICRO_BATCHES // dist.get_world_size()
        losses = []
        for index in range(share):
            micro = dist.get_rank() + index * dist.get_world_size()
            self.model.set_requires_gradient_sync(index == share - 1)
            loss = self.loss(self.model, step, micro)
            (loss / share).backward()
            losses.append((micro, loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def everything(self) -> dict[str, Tensor]:
        """Parameters and states, gathered."""
        return {n: whole(p) for n, p in self.model.named_parameters()} | whole_states(self.optimizer)


# ---- training, being killed, resuming --------------------------------------------------------------------------------


def train(models: dict[str, Trained], steps: range, checkpoints: Path | None = None) -> dict[str, Any]:
    """Losses of training steps, by model and (step, micro-batch): this rank's."""
    losses: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in models}
    for step in steps:
        for name, trained in models.items():
            losses[name] |= {(step, micro): loss for micro, loss in trained.step(step)}
        if checkpoints is not None and (step + 1) % SAVE_EVERY == 0:
            dcp.save(state_of(models) | {"steps": step + 1}, checkpoint_id=checkpoints / f"step-{step + 1}")
            saved = {name: trained.everything() for name, trained in models.items()}
            if dist.get_rank() == 0:
                torch.save(saved, checkpoints / f"everything-{step + 1}.pt")
    return {"losses": losses, "end": {name: trained.everything() for name, trained in models.items()}}


def state_of(models: dict[str, Trained]) -> dict[str, Any]:
    pairs = {name: get_state_dict(trained.model, trained.optimizer) for name, trained in models.items()}
    return {name: {"model": weights, "optimizer": state} for name, (weights, state) in pairs.items()}


def uninterrupted(checkpoints: Path, out: Path) -> None:
    """A run from the first step to the last."""
    save(out, "uninterrupted", train({name: Trained(name) for name in MODELS}, range(STEPS)))


def killed(checkpoints: Path, out: Path) -> None:
    """The same run with checkpoints, in which one rank is killed."""
    models = {name: Trained(name) for name in MODELS}
    models["net"].optimizer.register_step_pre_hook(functools.partial(die, out))
    # Torchrun's order to end, once a rank of a host is dead, would hide what the others see: they go on until they do.
    signal.signal(signal.SIGTERM, lambda *_: None)
    train(models, range(STEPS), checkpoints)


def die(out: Path, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Kills the victim after the backward of its last step; the others' next is the all-reduce of the norm."""
    counters = [state["step"] for state in optimizer.state.values()]
    if not counters or counters[0] != KILLED_IN:
        return
    # Nobody waits for the victim's part of the backward any more once its flag has come.
    flag = torch.zeros(1)
    if dist.get_rank() != VICTIM:
        dist.send(flag, VICTIM)
        return
    for rank in range(dist.get_world_size()):
        if rank != VICTIM:
            dist.recv(flag, rank)
    save(out, "killed", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(checkpoints: Path, out: Path) -> None:
    """Loads the newest complete checkpoint and trains to the last step."""
    # `.metadata` is written last; all numbers have one digit.
    newest = max(checkpoints.glob("step-*/.metadata")).parent
    models = {name: Trained(name) for name in MODELS}
    state = state_of(models) | {"steps": 0}
    dcp.load(state, checkpoint_id=newest)
    for name, trained in models.items():
        parts = state[name]
        set_state_dict(
            trained.model,
            trained.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
    loaded = {name: trained.everything() for name, trained in models.items()}
    start = state["steps"]
    save(out, "resumed", train(models, range(start, STEPS)) | {"start": start, "loaded": loaded})


# ---- checks ----------------------------------------------------------------------------------------------------------

# Functions of the single-host tests: module, name and names of arguments. In SLOW_CHECKS those that take long beside
# what they add.
CHECKS = (
    "test_fsdp step_is_the_unsharded_one",
    "test_fsdp clipping_all",
    "test_fsdp_equality over_world_sizes",
    "test_mesh hsdp",
    "test_collectives gather",
    "test_collectives norm_all",
)
SLOW_CHECKS = (
    "test_fsdp uneven_rows",
    "test_fsdp master_is_an_fp32_run",
    "test_fsdp training",
    "test_fsdp accumulation_and_offload",
    "test_fsdp grad_scaler",
    "test_fsdp copies",
    "test_fsdp_plug_in training EVERYTHING",
    "test_fsdp_plug_in made_late",
    "test_fsdp_plug_in meshes",
    "test_fsdp_replaced conversions",
    "test_fsdp_copies training_is_stocks",
    "test_fsdp_elision eliding",
    "test_fsdp_masters fp32_gradients",
    "test_fsdp_masters fp32_gradients_replicated",
    "test_fsdp_masters writers_of_fsdp1",
    "test_fsdp_masters norms_of_fsdp1_strategies",
    "test_mesh tensor_parallel",
    "test_distributed_checkpoint creation",
    "test_distributed_checkpoint written_by_others",
    "test_fsdp1 step_is_the_unsharded_one",
    "test_fsdp1 training_and_clipping",
    "test_fsdp1 clipping_hybrid",
    "test_fsdp1 resumed_runs",
    "test_ddp everything",
)


def results_of(names: Sequence[str]) -> dict[str, Any]:
    """Calls each function from the seed that the single-host tests' harness gives it; what they return, by name."""
    results = {}
    for name in names:
        module, function, *arguments = name.split()
        found = import_module(module)
        torch.manual_seed(0)
        results[name] = getattr(found, function)(*(getattr(found, argument) for argument in arguments))
        dist.barrier()  # a rank that is ahead would be blamed for the other's failure
    return results


def checks(checkpoints: Path, out: Path) -> None:
    save(out, "checks", results_of(CHECKS))


def slow_checks(checkpoints: Path, out: Path) -> None:
    save(out, "checks", results_of(SLOW_CHECKS))


def where() -> dict[str, int]:
    """This rank's network namespace, and the bytes that its host's cable brought during a gather."""
    gathered = list(torch.zeros(dist.get_world_size(), GATHERED // 4))
    before = received()
    dist.barrier()  # nobody sends before all have read
    dist.all_gather(gathered, torch.ones(GATHERED // 4))
    dist.barrier()  # nobody reads before all is counted
    return {"namespace": namespace(), "received": received() - before}


def received() -> int:
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if CABLE in line)
    return int(line.split()[1])


def save(out: Path, name: str, result: Any) -> None:
    torch.save(result, out / f"{name}-{dist.get_rank()}.pt")


WORKS = {work.__name__: work for work in (uninterrupted, killed, resumed, checks, slow_checks)}


@record
def main() -> None:
    end_with_torchrun()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, a file a rank")
    parser.add_argument("--deadline", type=float, required=True, help="seconds until stacks are printed")
    parser.add_argument("works", nargs="+", choices=WORKS)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.deadline)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    save(arguments.out, "where", where())
    for work in arguments.works:
        WORKS[work](arguments.checkpoints, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
