"""Checkpoints of a run through torch.distributed.checkpoint, readable at any world size.

`DIR/<optimizer>/step_<N>/` holds the model, the optimizer, the learning-rate schedule and the
position in the data after N steps; the newest complete one is kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from launch import World
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

STEP_PREFIX = "step_"


def newest(directory: Path, optimizer_name: str) -> Path | None:
    """The latest complete checkpoint of one optimizer, or None."""
    # `.metadata` is written last, so that a save cut short is passed over.
    complete = [path.parent for path in (directory / optimizer_name).glob(f"{STEP_PREFIX}*/.metadata")]
    return max(complete, key=_step_of, default=None)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(STEP_PREFIX))


def save(
    directory: Path,
    optimizer_name: str,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    recipe: dict[str, Any],
    world: World,
) -> None:
    """Write the state after `step` steps, on all ranks together, then drop what is older.

    `recipe` holds the settings that decide the losses; `load` refuses to continue another one.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    target = directory / optimizer_name / f"{STEP_PREFIX}{step:08d}"
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        # The data position is the step: a global batch is a function of (seed, step).
        "run": {"step": step, "scheduler": scheduler.state_dict(), "recipe": json.dumps(recipe)},
    }
    dcp.save(state, checkpoint_id=target)
    if world.is_first:  # the rank that wrote `.metadata`, so the new checkpoint is complete
        for older in target.parent.glob(f"{STEP_PREFIX}*"):
            if _step_of(older) < step:
                shutil.rmtree(older)


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    recipe: dict[str, Any],
) -> int:
    """Restore what `save` wrote, at this world size; returns the number of steps done."""
    run = {"step": 0, "recipe": ""}
    dcp.load({"run": run}, checkpoint_id=path)
    _check_recipe(json.loads(run["recipe"]), recipe, path)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "run": {"scheduler": scheduler.state_dict()},
    }
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    scheduler.load_state_dict(state["run"]["scheduler"])
    return run["step"]


def _check_recipe(saved: dict[str, Any], current: dict[str, Any], path: Path) -> None:
    differing = [f"{name} {saved.get(name)} -> {value}" for name, value in current.items() if saved.get(name) != value]
    if differing:
        raise ValueError(
            f"this run differs from the one saved in {path} (saved -> now): "
            f"{', '.join(differing)}; its losses would not continue: resume with the saved "
            "settings, or start anew without --resume"
        )
