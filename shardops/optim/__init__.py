"""FusedShardedAdam and FusedShardedAdamW: the optimizer, its states and its checkpoints."""

from .adam import FusedShardedAdam, FusedShardedAdamW

__all__ = ["FusedShardedAdam", "FusedShardedAdamW"]
