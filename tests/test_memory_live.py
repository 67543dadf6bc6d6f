"""Planned bytes are live bytes: every mode of parameters, masters and moments in one process, and ``measure``.

Not within two percent but equal. On several ranks: test_memory_sharded.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardops
from shardops.memory import Activations, live_nbytes, measure, plan
from shardops.memory.measure import HELD

STATE_DTYPES = ("float32", "bfloat16", "int8")
MASTERS = ("auto", "fp32", "split32", "split24", "stochastic", "none")
# The parameters' dtype, with the masters that it can have.
MODES = [
    *itertools.product((torch.bfloat16,), STATE_DTYPES, MASTERS),
    *itertools.product((torch.float32,), STATE_DTYPES, ("auto",)),
    *itertools.product((torch.float16,), STATE_DTYPES, ("auto", "none")),
]


class Block(nn.Module):
    """Rows that no world size divides: with codes, too short for them, and of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(200, 67)
        self.down = nn.Linear(67, 200, bias=False)
        self.gain = nn.Parameter(torch.ones(1, 200))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """A tied head, a frozen parameter, blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(35, 200)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(200, 35)
        self.head.weight = self.embedding.weight
        self.blocks[0].gain.requires_grad_(False)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(8)
    return F.cross_entropy(model(tokens).float(), tokens)


def optimizer_of(model: nn.Module, state_dtype: str, master: str, **options: Any) -> shardops.FusedShardedAdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    return shardops.FusedShardedAdamW(params, state_dtype=state_dtype, master_weights=master, **options)


def held(nbytes: dict[str, int]) -> dict[str, int]:
    return {name: nbytes[name] for name in HELD}


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("dtype", "state_dtype", "master"), MODES)
def test_one_rank(dtype: torch.dtype, state_dtype: str, master: str, amsgrad: bool) -> None:
    model = Net(dtype)
    options: dict[str, Any] = {"state_dtype": state_dtype, "master": master, "amsgrad": amsgrad}
    optimizer = optimizer_of(model, state_dtype, master, amsgrad=amsgrad)
    loss_of(model).backward()
    optimizer.step()
    assert live_nbytes(model.parameters(), optimizer) == held(plan(model, **options).per_rank)


def test_live_bytes_count_each_storage_once() -> None:
    base = torch.zeros(100)
    params = [nn.Parameter(base[:30]), nn.Parameter(base[30:]), nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))]
    params[2].grad = torch.zeros(20, dtype=torch.bfloat16)[3:8]
    assert live_nbytes(params) == dict.fromkeys(HELD, 0) | {"parameters": 410, "gradients": 40}


@pytest.mark.parametrize("gradient_release", [False, True])
@pytest.mark.parametrize("has_loss", [False, True])
def test_measure(has_loss: bool, gradient_release: bool) -> None:
    def factory() -> Any:
        model = Net(torch.float32)
        return (model, loss_of) if has_loss else model

    options: dict[str, Any] = {"param_dtype": "bf16", "state_dtype": "int8", "master": "split24"}
    found = measure(factory, gradient_release=gradient_release, device_memory="1GB", **options)
    planned = found.planned.per_rank
    assert held(found.measured) == held(planned)
    assert found.deviation == 0.0
    assert found.measured["buffers"] == planned["buffers"] == 4 * 13
    largest = 2 * 67 * 200
    assert (found.measured["gradients"] == largest) == gradient_release
    assert found.has_backward == has_loss
    assert (found.measured["activations"] > 0) == has_loss
    assert found.planned.fits
    content = found.to_json()
    assert content["planned"] == {name: planned[name] for name in found.measured}
    assert content["measured"] == found.measured


class Answer:
    """What a Hugging Face model returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class WithLoss(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Answer:  # type: ignore[override]
        return Answer((super().forward(x) * scale).sum())


@pytest.mark.parametrize(
    "factory",
    [
        lambda: (nn.Linear(3, 2), torch.ones(4, 3)),
        lambda: (WithLoss(3, 2), torch.ones(4, 3)),
        lambda: (WithLoss(3, 2), {"x": torch.ones(4, 3), "scale": 2.0}),
        lambda: (nn.Linear(3, 2), torch.ones(4, 3), lambda module, batch: module(batch).sum()),
        f"{__name__}:factory_by_name",
    ],
)
def test_factories(factory: Any) -> None:
    found = measure(factory)
    assert found.has_backward
    assert found.measured["activations"] == 4 * 3 * 4  # the input
    assert found.deviation == 0.0


def factory_by_name() -> Any:
    return nn.Linear(3, 2), torch.ones(4, 3)


def test_a_deviation_is_seen() -> None:
    """A parameter that is a part of a larger storage holds all of that."""

    def factory() -> nn.Module:
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(torch.zeros(3, 3)[:2])
        return model

    assert measure(factory).deviation == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("factory", "options", "error", "message"),
    [
        (factory_by_name, {"world_size": 2}, TypeError, "world_size cannot be measured in one process"),
        (lambda: 3, {}, TypeError, "the factory returned a int; it is a module"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, ValueError, "on the meta device"),
        ("builtins", {}, ValueError, "the factory is 'builtins'; it is MODULE:FACTORY"),
        ("math:pi", {}, TypeError, "'math:pi' is a float; it is a function"),
        (lambda: (nn.LSTM(2, 2), torch.ones(1, 2)), {}, TypeError, "returned a tuple without a loss"),
    ],
)
def test_what_cannot_be_measured(factory: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(factory, **options)


# ---- activations -----------------------------------------------------------------------------------------------------


def dropped(x: Tensor) -> Tensor:
    """F.dropout as GPUs have it, with a mask in bytes; on a CPU that one keeps a mask in the input's dtype."""
    return torch.native_dropout(x, 0.1, True)[0]


class GptBlock(nn.Module):
    """Exactly what Korthikanti et al. count: GELU over 4 h, three dropouts, softmax in the compute dtype."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q = q * (hidden // self.heads) ** -0.5
        scores = dropped(torch.softmax(q @ k.transpose(-1, -2), -1))
        attended = (scores @ v).transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + dropped(self.out(attended))
        return x + dropped(self.down(F.gelu(self.up(self.norm_2(x)))))


class Gpt(nn.Module):
    def __init__(self, hidden: int, heads: int, layers: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(GptBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = dropped(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def test_activations_are_what_autograd_saves() -> None:
    """Within 1 %: the formula has no statistics of norms, and no tokens."""
    hidden, heads, layers, vocabulary, batch, sequence = 128, 4, 3, 300, 2, 96
    config = {"model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_layer": layers}
    config |= {"n_positions": sequence, "vocab_size": vocabulary}

    def factory() -> Any:
        model = Gpt(hidden, heads, layers, vocabulary, sequence).to(torch.bfloat16)
        tokens = torch.randint(vocabulary, (batch, sequence))
        return model, tokens, lambda module, tokens: module(tokens)

    found = measure(factory).measured["activations"]
    run_ = Activations(batch, sequence, flash_attention=False)
    planned = plan(config, activations=run_).per_rank["activations"]
    assert found == pytest.approx(planned, rel=0.01)
