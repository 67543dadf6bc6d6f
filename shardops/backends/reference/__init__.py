"""The reference backend: plain torch, any device; the readable specification that the others equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cast_gather import cast_gather
from .flatten_shard import flatten_shard, unflatten_shard
from .grad_norm import grad_norm
from .sharded_adam import sharded_adam


def unavailable_reason(device_type: str) -> str | None:
    """None: plain torch runs wherever its tensors are."""
    return None


KERNELS: dict[str, Callable[..., Any]] = {
    "flatten_shard": flatten_shard,
    "unflatten_shard": unflatten_shard,
    "cast_gather": cast_gather,
    "grad_norm": grad_norm,
    "sharded_adam": sharded_adam,
}
