"""FSDP1: which group each of its parameters is sharded over. The parameters do not know, and the gradient norm must."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_group_of(model: nn.Module) -> Callable[[Tensor], ProcessGroup | None] | None:
    """Maps FSDP1's parameters of a model to the group they are sharded over, None for NO_SHARD: whole on every rank.

    HYBRID_SHARD shards over a group of its own and replicates between such groups.

    Returns:
        The map, or None if the model has no FSDP1 modules. A parameter that is not in it raises ValueError.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    groups: dict[int, ProcessGroup | None] = {}
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        handle = module._handle
        is_whole = handle._sharding_strategy.name == ShardingStrategy.NO_SHARD.name
        flat = handle.flat_param
        for param in (flat, *(getattr(flat, "_params", None) or ())):
            groups[id(param)] = None if is_whole else module.process_group
    if not groups:
        return None

    def group_of(param: Tensor) -> ProcessGroup | None:
        if id(param) not in groups:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is FSDP1's, but not of the model that was plugged in; call "
                "plug_in again with the model that the optimizer trains"
            )
        return groups[id(param)]

    return group_of
