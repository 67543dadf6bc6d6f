"""The primitives as typed functions. Each has a reference, a C++ and a Triton kernel behind one contract."""

from __future__ import annotations

from . import _geometry, _library  # noqa: F401  (defines an op that the library implements)
from .cast_gather import cast_gather
from .flatten_shard import flatten_shard, unflatten_shard
from .grad_norm import grad_norm
from .sharded_adam import sharded_adam

_library.load()

__all__ = ["cast_gather", "flatten_shard", "grad_norm", "sharded_adam", "unflatten_shard"]
