"""The model that is trained, the four ways of updating it, and one rank's part in measuring them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from _harness import peak_allocation
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import shardops

from . import parts, probes
from .trace import ByteTrace

BLOCKS = 8
MAX_GRAD_NORM = 1.0
LR = 1e-4
WARMUP = 3  # steps of each variant: states, plans and buffers are made in the first


class Block(nn.Module):
    """A decoder block's parameters, 12 width^2 of them and two norms, with a forward that costs next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        x = x + self.output(self.query(h) + self.key(h) + self.value(h))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks and head; the vocabulary divides by no number of ranks, so that shards are padded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4 * width + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 4 * width + 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def width_for(elements: int) -> int:
    """The model's width, a multiple of 8, that comes nearest to a number of elements."""
    return max(8, 8 * round((elements / (12 * BLOCKS + 8)) ** 0.5 / 8))


class Variant:
    """One way of updating the model: sharded model, optimizer, and a step of training.

    Attributes:
        name: of ``parts.VARIANTS``.
        sizes: of this rank.
    """

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        with torch.device("meta"):  # no rank ever holds the whole model
            model = Decoder(width).to(torch.bfloat16 if name == parts.MASTER else torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for key, param in model.named_parameters():
                local = param.to_local()
                local.fill_(1.0) if "norm" in key else local.normal_(std=0.02)
        self.model: Any = model
        params = list(model.parameters())
        if name == parts.STOCK:
            self.optimizer: Any = torch.optim.AdamW(params, lr=LR, fused=True)
        else:
            self.optimizer = shardops.FusedShardedAdamW(params, lr=LR, max_grad_norm=MAX_GRAD_NORM)
            plugged = shardops.fsdp.plug_in(model, self.optimizer, elide_copy_in=name == parts.ELIDED)
            path = {parts.SHADOW: "shadow", parts.ELIDED: "shadow, copy-in elided", parts.MASTER: "exact master"}
            assert {attachment.path for attachment in plugged.attachments} == {path[name]}, plugged
        self.sizes = _sizes(model)

    def gradients(self, tokens: Tensor) -> None:
        """A forward and a backward: two gathers and a reduction of each group."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    def update(self, switch: probes.Switch) -> None:
        """Clip and step, as a training loop calls them."""
        if self.name == parts.STOCK:
            switch(parts.CLIP)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        switch(parts.STEP)
        self.optimizer.step()
        switch(None)

    def train_step(self, tokens: Tensor, switch: probes.Switch) -> None:
        """One step of training whose parts are told to ``switch``."""
        with probes.watching(self.model, self.optimizer, switch):
            dist.barrier()  # nobody waits in a collective for a rank that still works on something else
            self.gradients(tokens)
            dist.barrier()
            self.update(switch)


def _sizes(model: nn.Module) -> parts.Sizes:
    padded = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                padded += sum(param.padded_sharded_param_size.numel() for param in group.fsdp_params)
    params: list[Any] = list(model.parameters())
    return parts.Sizes(
        local=sum(param.to_local().numel() for param in params),
        padded=padded,
        whole=sum(param.numel() for param in params),
        world_size=dist.get_world_size(),
        tensors=len(params),
    )


def measure(elements: int, repeats: int, warmup: int = WARMUP) -> dict[str, Any]:
    """One rank's measurements; called on all ranks at once.

    Args:
        elements: of a rank, about.
        repeats: steps of each variant that are timed, in turn.
        warmup: steps before these.

    Returns:
        For each variant its sizes, seconds by clock and part in each repetition, bytes of each part, operators called,
        bytes of the largest tensor that each part allocates, and the peak of what clip and step allocate.
    """
    torch.manual_seed(dist.get_rank())
    width = width_for(elements * dist.get_world_size())
    variants = [Variant(name, width) for name in parts.VARIANTS]
    tokens = torch.randint(4 * width + 1, (1, 3))
    watch = probes.Stopwatch()
    seconds: dict[str, list[dict[str, dict[str, float]]]] = {variant.name: [] for variant in variants}
    for round_ in range(warmup + repeats):
        for variant in variants:
            variant.train_step(tokens, watch.switch)
            taken = watch.take()
            if round_ >= warmup:
                seconds[variant.name].append(taken)
    return {
        variant.name: {"sizes": variant.sizes, "seconds": seconds[variant.name], **_count(variant, tokens)}
        for variant in variants
    }


def _count(variant: Variant, tokens: Tensor) -> dict[str, Any]:
    trace = ByteTrace()
    with trace:
        variant.train_step(tokens, trace.switch)
    variant.gradients(tokens)
    return {
        "bytes": {part: found.read + found.written for part, found in trace.traffic.items()},
        "calls": {part: dict(found.calls) for part, found in trace.traffic.items()},
        "largest_new": {part: found.largest_new for part, found in trace.traffic.items()},
        "update_peak": peak_allocation(lambda: variant.update(lambda part: None)),
    }
