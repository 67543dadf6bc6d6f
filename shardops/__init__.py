"""Fused kernels for the update path of sharded training, and FusedShardedAdam, a drop-in for torch.optim.AdamW."""

from __future__ import annotations

import importlib
from typing import Any

from . import backends as _backends  # noqa: F401  (imported first: the function below takes the package's name)
from . import fsdp, ops
from .casting import cast_model
from .clipping import clip_grad_norm_, share_grad_norm
from .collectives import all_gather_cast, grad_norm
from .ops._registry import backends
from .optim import FusedShardedAdam, FusedShardedAdamW
from .release import GradientRelease, enable_gradient_release

__version__ = "0.1.0"
__all__ = [
    "FusedShardedAdam",
    "FusedShardedAdamW",
    "GradientRelease",
    "all_gather_cast",
    "backends",
    "cast_model",
    "clip_grad_norm_",
    "enable_gradient_release",
    "fsdp",
    "grad_norm",
    "memory",
    "ops",
    "share_grad_norm",
]


def __getattr__(name: str) -> Any:
    """``shardops.memory`` is imported when it is first asked for: training needs none of it."""
    if name == "memory":
        return importlib.import_module(".memory", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
