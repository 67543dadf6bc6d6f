"""FusedShardedAdam and FusedShardedAdamW: the optimizer, its states and its checkpoints."""

from .adam import FusedShardedAdam
from .adamw import FusedShardedAdamW

__all__ = ["FusedShardedAdam", "FusedShardedAdamW"]
