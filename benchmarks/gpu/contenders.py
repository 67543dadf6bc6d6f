"""Tensors and calls that are timed: updates in several storages, copies, norms, and torch's own ways beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.measure import Contender
from shardops import ops

FP32, BF16 = torch.float32, torch.bfloat16
WORLD_SIZE = 8
COLUMNS = 1024
Shapes = Sequence[tuple[int, ...]]


def shapes_of(elements: int) -> list[tuple[int, ...]]:
    """About so many elements in a few matrices, whose rows go evenly over the ranks."""
    if elements <= 1000:
        return [(8, elements // 8)]
    count = {4: 2, 5: 4, 6: 16, 7: 24, 8: 48, 9: 96}[round(math.log10(elements))]
    rows = max(round(elements / count / COLUMNS / 8), 1) * 8
    return [(rows, COLUMNS)] * count


def randn(shapes: Shapes, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> list[Tensor]:
    """Normally distributed values."""
    return [torch.randn(shape, dtype=dtype, device=device).mul_(scale) for shape in shapes]


def nbytes_of(*lists: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensors in lists for tensor in tensors)


# ---- updates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A storage of parameters, masters and moments; gradients are of the parameters' dtype."""

    param: torch.dtype = FP32
    master: torch.dtype | None = None
    is_int8: bool = False
    shadow: torch.dtype | None = None


FORMATS = {
    "fp32": Format(),
    "bf16, split32": Format(BF16, BF16),
    "bf16, split24, int8 moments": Format(BF16, torch.int8, is_int8=True),
    "fp32, bf16 shadow": Format(shadow=BF16),
}


@dataclass
class Update:
    """The lists of one update, all on a device."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: Tensor
    more: dict[str, Any] = field(default_factory=dict)  # masters, shadows, block_words, dither

    @property
    def nbytes(self) -> int:
        """That a step reads and writes, by the tensors' sizes."""
        both = nbytes_of(self.params, self.exp_avgs, self.exp_avg_sqs, self.more["masters"], self.more["block_words"])
        return 2 * both + nbytes_of(self.grads, self.more["shadows"])

    def run(self, backend: str | None, **options: Any) -> None:
        """One AdamW step."""
        lists = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps)
        decay: dict[str, Any] = {"weight_decay": 1e-2, "decoupled_weight_decay": True}
        ops.sharded_adam(*lists, lr=1e-6, backend=backend, **decay, **self.more, **options)


def _random(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    info = torch.iinfo(dtype)
    return [torch.randint(info.min, info.max, shape, dtype=dtype, device=device) for shape in shapes]


def build_update(storage: Format, shapes: Shapes, device: torch.device) -> Update:
    """Lists with values, as in the middle of a training run."""
    params, grads = randn(shapes, storage.param, device), randn(shapes, storage.param, device, 1e-2)
    more: dict[str, Any] = {"masters": [], "shadows": [], "block_words": [], "dither": None}
    if storage.master is BF16:
        more["masters"] = [t.view(BF16) for t in _random(shapes, torch.int16, device)]
    elif storage.master is torch.int8:
        more["masters"] = _random(shapes, torch.int8, device)
    if storage.shadow is not None:
        more["shadows"] = [torch.empty(shape, dtype=storage.shadow, device=device) for shape in shapes]
    if storage.is_int8:
        exp_avgs, exp_avg_sqs = _random(shapes, torch.int8, device), _random(shapes, torch.uint8, device)
        more["block_words"] = [
            torch.zeros(rows, math.ceil(columns / 128), 2, dtype=torch.int32, device=device) for rows, columns in shapes
        ]
    else:
        exp_avgs = randn(shapes, FP32, device, 1e-3)
        exp_avg_sqs = [t.square_().mul_(1e-6) for t in randn(shapes, FP32, device)]
    if storage.is_int8 or storage.master is torch.int8:  # as the optimizer gives it
        table = [[1000 + i, 0, rows * columns, rows * columns] for i, (rows, columns) in enumerate(shapes)]
        more["dither"] = torch.tensor(table, dtype=torch.int64)
    return Update(params, grads, exp_avgs, exp_avg_sqs, torch.ones(len(shapes), device=device), more)


def parameters(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    """Parameters and gradients over the same memory."""
    made = [torch.nn.Parameter(param) for param in params]
    for param, grad in zip(made, grads, strict=True):
        param.grad = grad
    return made


def torch_steps(update: Update) -> list[Contender]:
    """Fused and foreach AdamW of torch over the same parameters; over bfloat16 ones: bfloat16 moments, no master."""
    contenders = []
    note = "" if update.params[0].dtype == FP32 else ", bf16 moments, no master"
    nbytes = 6 * nbytes_of(update.params) + nbytes_of(update.grads)
    for kind in ("fused", "foreach"):
        optimizer = torch.optim.AdamW(parameters(update.params, update.grads), lr=1e-6, **{kind: True})  # type: ignore[arg-type]
        contenders.append(Contender(f"torch {kind}{note}", optimizer.step, "torch", nbytes))
    return contenders


# ---- copies and norms ------------------------------------------------------------------------------------------------


@dataclass
class Copy:
    """One copy or norm: what it must move, ours by backend, and torch's."""

    nbytes: int
    ours: Callable[[str], Any]
    torchs: dict[str, Callable[[], Any]]
    against: list[str]


def flatten(layout: str, target: torch.dtype, shapes: Shapes, device: torch.device) -> Copy:
    tensors = randn(shapes, BF16, device)
    rest: dict[str, Any] = {"layout": layout, "dtype": target, "align": 1}
    ours, theirs = (ops.flatten_shard(tensors, WORLD_SIZE, backend="reference", **rest) for _ in range(2))
    flat = theirs.view(-1)
    torchs: dict[str, Callable[[], Any]] = {"torch.cat": lambda: torch.cat([t.view(-1) for t in tensors], out=flat)}
    if layout == "per_param":
        torchs = {"torch._chunk_cat": lambda: torch._chunk_cat(tensors, 0, WORLD_SIZE, out=theirs)}

    def run(backend: str) -> None:
        ops.flatten_shard(tensors, WORLD_SIZE, out=ours, backend=backend, **rest)

    return Copy(nbytes_of(tensors, [ours]), run, torchs, [name for name in torchs if name != "torch.cat"])


def unflatten(layout: str, shapes: Shapes, device: torch.device) -> Copy:
    outs = randn(shapes, BF16, device)
    buffer = ops.flatten_shard(outs, WORLD_SIZE, layout=layout, align=1, backend="reference")
    numels = [out.numel() for out in outs]
    if layout == "flat":
        theirs, split_sizes, source, dim = (
            [torch.empty(n, dtype=BF16, device=device) for n in numels],
            numels,
            buffer,
            0,
        )
        source = buffer.view(-1)[: sum(numels)]
    else:
        split_sizes, source, dim = [n // WORLD_SIZE for n in numels], buffer, 1
        theirs = [torch.empty(WORLD_SIZE, size, dtype=BF16, device=device) for size in split_sizes]
    name = "torch.split_with_sizes_copy"
    torchs = {name: lambda: torch.split_with_sizes_copy(source, split_sizes, dim, out=theirs)}

    def run(backend: str) -> None:
        ops.unflatten_shard(buffer, outs, layout=layout, backend=backend)

    return Copy(nbytes_of(outs, [buffer]), run, torchs, [name])


def gather(shapes: Shapes, device: torch.device) -> Copy:
    shards = randn(shapes, FP32, device)
    numels = [shard.numel() for shard in shards]
    ours, theirs = (torch.empty(sum(numels), dtype=BF16, device=device) for _ in range(2))
    views = [view.view(shard.shape) for view, shard in zip(theirs.split(numels), shards, strict=True)]
    torchs: dict[str, Callable[[], Any]] = {
        "torch._foreach_copy_": lambda: torch._foreach_copy_(views, shards),
        "torch.cat of .to": lambda: torch.cat([shard.view(-1).to(BF16) for shard in shards], out=theirs),
    }
    run = partial(_gather, shards, ours)
    return Copy(nbytes_of(shards, [ours]), run, torchs, ["torch._foreach_copy_"])


def _gather(shards: list[Tensor], out: Tensor, backend: str) -> None:
    ops.cast_gather(shards, out.dtype, out=out, backend=backend)


def norm(dtype: torch.dtype, shapes: Shapes, device: torch.device) -> Copy:
    grads = randn(shapes, dtype, device)
    torchs: dict[str, Callable[[], Any]] = {
        "torch._foreach_norm": lambda: torch._foreach_norm(grads, 2.0),
        "torch get_total_norm": lambda: torch.nn.utils.get_total_norm(grads, 2.0),
    }
    return Copy(nbytes_of(grads), lambda backend: ops.grad_norm(grads, 2.0, backend=backend), torchs, [])


COPIES: dict[str, Callable[[Shapes, torch.device], Copy]] = {
    "flatten_shard, per_param, bf16": partial(flatten, "per_param", BF16),
    "flatten_shard, per_param, bf16 to fp32": partial(flatten, "per_param", FP32),
    "flatten_shard, flat, bf16": partial(flatten, "flat", BF16),
    "unflatten_shard, per_param, bf16": partial(unflatten, "per_param"),
    "unflatten_shard, flat, bf16": partial(unflatten, "flat"),
    "cast_gather, fp32 to bf16": gather,
    "grad_norm, fp32": partial(norm, FP32),
    "grad_norm, bf16": partial(norm, BF16),
}
