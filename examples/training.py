"""Training one sharded decoder with one optimizer: the part that a training script of yours shares.

`torch_update` and `shardops_update` stand side by side: the lines that differ are what shardops
asks of a program that uses torch.optim.AdamW under FSDP2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoint
import data
import torch
from launch import World
from measure import (
    Stopwatch,
    mean_loss,
    mean_over_ranks,
    next_byte_loss,
    state_bytes_per_param,
)
from metrics import MetricsLog, StepRecord, open_progress
from model import Decoder, DecoderConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.1  # of all steps
FINAL_LR_SHARE = 0.1  # of the highest learning rate


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the losses, save the optimizer and the world size."""

    model: DecoderConfig
    param_dtype: str  # "fp32" | "bf16"
    batch: int  # windows in a global batch
    sequence: int  # bytes in a window
    steps: int
    lr: float
    seed: int
    held_out_batches: int


@dataclass(frozen=True)
class RunPlan:
    """Where a run starts, stops and is saved."""

    interrupt_at: int | None
    save_every: int | None
    save: Path | None
    resume: Path | None  # one checkpoint of this optimizer

    def saves_after(self, step: int, last: int) -> bool:
        """Whether a checkpoint is due after `step` steps of a run that ends at `last`."""
        every = self.save_every is not None and step % self.save_every == 0
        return self.save is not None and (every or step == last)


@dataclass(frozen=True)
class Outcome:
    """What is known after the last step; the losses of the steps are in the metrics log."""

    steps_done: int
    held_out_loss: float  # NaN when interrupted
    state_bytes_per_param: float


def build_model(config: TrainConfig, world: World) -> nn.Module:
    """The sharded decoder: one FSDP group a block and one for the rest.

    The whole model is initialised on the CPU first, so that a seed gives the same weights at every
    world size and on every device.
    """
    torch.manual_seed(config.seed)
    model = Decoder(config.model)
    if config.param_dtype == "bf16":
        model.to(torch.bfloat16)
    model.to(world.device)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@dataclass(frozen=True)
class Update:
    """An optimizer and its update path: `apply()` clips, steps and returns the gradients' norm."""

    optimizer: Optimizer
    apply: Callable[[], Tensor]


def torch_update(model: nn.Module, lr: float) -> Update:
    """Stock torch: scale every gradient by the clip coefficient, then step."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def apply() -> Tensor:
        grad_norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        return grad_norm

    return Update(optimizer, apply)


def shardops_update(model: nn.Module, lr: float) -> Update:
    """shardops: the clip is folded into the step, and `.grad` stays unclipped."""
    try:
        import shardops  # here, so that `--optimizer torch` runs where it is not installed
    except ImportError as error:
        raise ImportError(
            f"shardops cannot be imported ({error}): install it with `pip install -e .` in the repository's root, "
            "or pass --optimizer torch"
        ) from error

    optimizer = shardops.FusedShardedAdamW(
        model.parameters(),
        lr=lr,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )

    def apply() -> Tensor:
        optimizer.step()
        return optimizer.last_grad_norm

    return Update(optimizer, apply)


UPDATES = {"torch": torch_update, "shardops": shardops_update}


def lr_share(step: int, steps: int) -> float:
    """The share of the highest learning rate at a step: linear warm-up, then half a cosine."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Session:
    """One optimizer's run on one rank: what a step works on."""

    config: TrainConfig
    world: World
    corpus: data.Corpus
    model: nn.Module
    update: Update
    scheduler: LambdaLR
    stopwatch: Stopwatch


def train_step(session: Session, optimizer_name: str, step: int) -> StepRecord:
    """Forward, backward and update on the global batch of `step`, which counts from 0."""
    config, world = session.config, session.world
    started = time.perf_counter()
    batch = data.train_batch(session.corpus, config.seed, step, config.batch, config.sequence)
    loss = next_byte_loss(session.model, batch, world)
    loss.backward()

    session.stopwatch.start()
    grad_norm = session.update.apply()
    session.stopwatch.stop()

    session.update.optimizer.zero_grad()
    lr = session.scheduler.get_last_lr()[0]
    session.scheduler.step()
    mean = mean_over_ranks(loss, world)
    if isinstance(grad_norm, DTensor):
        grad_norm = grad_norm.full_tensor()
    update_ms = session.stopwatch.milliseconds()
    return StepRecord(
        optimizer=optimizer_name,
        step=step + 1,
        loss=mean,
        tokens_per_s=config.batch * config.sequence / (time.perf_counter() - started),
        update_ms=update_ms,
        grad_norm=grad_norm.item(),
        lr=lr,
    )


def train(
    optimizer_name: str,
    config: TrainConfig,
    plan: RunPlan,
    corpus: data.Corpus,
    world: World,
    log: MetricsLog | None,
) -> Outcome:
    """Train from the seed's weights, or from a checkpoint; `log` is the first rank's."""
    model = build_model(config, world)
    update = UPDATES[optimizer_name](model, config.lr)
    optimizer = update.optimizer
    scheduler = LambdaLR(optimizer, lambda step: lr_share(step, config.steps))
    session = Session(config, world, corpus, model, update, scheduler, Stopwatch(world.device))
    recipe = {**asdict(config), "corpus": corpus.digest}

    done = 0
    if plan.resume is not None:
        done = checkpoint.load(plan.resume, model, optimizer, scheduler, recipe)
    stop = min(config.steps, plan.interrupt_at or config.steps)
    if log is not None:
        log.start_at(optimizer_name, done)
        progress = open_progress(optimizer_name, config.steps, done)
    for step in range(done, stop):
        record = train_step(session, optimizer_name, step)
        if log is not None:
            log.write(record)
            progress.update(record)
        if plan.saves_after(step + 1, stop):
            checkpoint.save(plan.save, optimizer_name, step + 1, model, optimizer, scheduler, recipe, world)
    if log is not None:
        progress.close()

    state_bytes = state_bytes_per_param(model, optimizer, world)
    held_out = math.nan
    if stop == config.steps:
        batches = [
            data.held_out_batch(corpus, index, config.batch, config.sequence)
            for index in range(config.held_out_batches)
        ]
        held_out = mean_loss(model, batches, world)
    return Outcome(max(done, stop), held_out, state_bytes)
