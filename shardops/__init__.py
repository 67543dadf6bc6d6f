"""Fused kernels for the update path of sharded training, and FusedShardedAdam, a drop-in for torch.optim.AdamW."""

from __future__ import annotations

from . import ops
from .ops._registry import backends

__version__ = "0.1.0"
__all__ = ["backends", "ops"]
