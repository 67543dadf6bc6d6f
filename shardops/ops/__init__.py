"""The primitives as typed functions. Each has a reference, a C++ and a Triton kernel behind one contract."""

from __future__ import annotations

import torch

from . import _library
from .cast_gather import cast_gather
from .flatten_shard import flatten_shard, unflatten_shard
from .grad_norm import grad_norm
from .sharded_adam import sharded_adam

# After the schemas, to which the library adds its implementations.
if _library.library_path().exists():
    torch.ops.load_library(_library.library_path())

__all__ = ["cast_gather", "flatten_shard", "grad_norm", "sharded_adam", "unflatten_shard"]
