"""What the tests of gradient release share: a model with every kind of parameter, its optimizer, and comparisons."""

from __future__ import annotations

from typing import Any

import torch
from reference import assert_bits_equal
from torch import Tensor, nn

from shardops import FusedShardedAdamW

INT8 = {"state_dtype": "int8"}


class Tied(nn.Module):
    """A weight used twice, a frozen one, one used in odd steps only, and one large enough for 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 160)
        self.down = nn.Linear(160, 32, bias=False)
        self.frozen = nn.Linear(32, 8)
        self.sometimes = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 11)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.frozen(self.down(torch.tanh(self.up(self.embedding(tokens)))))
        return self.head(x + self.sometimes if step % 2 else x)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens, step).float(), (3 * tokens + 1) % 11)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tied, FusedShardedAdamW]:
    """A model and its optimizer, with other options for vectors than for matrices."""
    model = Tied().to(dtype)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
    return model, FusedShardedAdamW(groups, **{"lr": 1e-2, **options})


def assert_same(model: nn.Module, optimizer: Any, twin: nn.Module, twin_optimizer: Any, label: str = "") -> None:
    """Parameters and state dicts have the same bits."""
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_bits_equal(param.detach(), other.detach(), f"{label} {name}")
    ours, theirs = optimizer.state_dict(), twin_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for index, state in ours["state"].items():
        assert list(state) == list(theirs["state"][index])
        for key, value in state.items():
            exact = value.dtype != torch.float32
            assert_bits_equal(value, theirs["state"][index][key], f"{label} {index}.{key}", exact=exact)


def iterate(model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
