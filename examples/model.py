"""A Llama-style decoder over bytes: RMSNorm, rotary positions, SwiGLU, tied or untied head.

It is small enough for a CPU and ordinary enough that what it shows of an optimizer carries over
to larger models; nothing in it knows of FSDP or of shardops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB_SIZE = 256  # a token is a byte
NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
HEAD_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder; the head's size is `dim // heads` and must be even (RoPE turns pairs)."""

    dim: int = 320
    layers: int = 4
    heads: int = 5
    hidden: int = 864
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but sizes start at 1")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim {self.dim} over {self.heads} heads gives {self.dim / self.heads:g} values a "
                "head, but rotary positions need an even whole number: choose dim as a multiple of "
                f"{2 * self.heads}"
            )


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype to multiply `x` in: its own on an accelerator, fp32 on a CPU.

    Most CPUs have no bf16 multiply-add, and torch's bf16 GEMM then runs at about a tenth of the
    fp32 speed. The arithmetic stays that of a bf16 GEMM: operands hold bf16 values, products are
    summed in fp32, and the caller rounds the result once.
    """
    return torch.float32 if x.device.type == "cpu" else x.dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`: [..., in] and [out, in] -> [..., out], in the dtype of `x`."""
    dtype = matmul_dtype(x)
    return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)


class Linear(nn.Linear):
    """A linear layer without bias, computed by `linear` above."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 inside: [..., dim] -> [..., dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, NORM_EPS).to(x.dtype)


@lru_cache(maxsize=8)
def rope_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [length, head_dim // 2] in fp32.

    A cached function and not a buffer: FSDP's mixed precision casts what is passed into a block,
    and `model.to(bfloat16)` casts buffers; angles rounded to bf16 would blur the positions.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROPE_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_dim / 2]) by their position's angle.

    [batch, heads, length, head_dim] -> the same shape, in the dtype to multiply in.
    """
    cos, sin = rope_table(x.shape[-2], x.shape[-1], x.device)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(matmul_dtype(x))


class Attention(nn.Module):
    """Causal self-attention: [batch, length, dim] -> [batch, length, dim]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, -1]
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value.to(matmul_dtype(x)), is_causal=True)
        return self.out(mixed.to(x.dtype).transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): [..., dim] -> [..., dim]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.hidden)
        self.up = Linear(config.dim, config.hidden)
        self.down = Linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm decoder block, the unit that FSDP gathers: [batch, length, dim] -> the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out: int64 [batch, length] -> fp32 [batch, length, 256]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        # A tied head is no parameter at all, so that no name occurs twice in a checkpoint.
        self.head = None if config.tied else Linear(config.dim, VOCAB_SIZE)
        self._initialise()

    def _initialise(self) -> None:
        """Every block starts as the identity: what writes into the residual stream is zero.

        A byte's embedding has unit variance: with a standard deviation of 0.05 the loss after 120
        steps was 2.48 instead of 2.34 nats/byte. A tied head turns the embedding into logits, so
        there it stays small.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.zeros_(parameter)
            elif name == "head.weight":
                nn.init.normal_(parameter, std=HEAD_STD)
            elif name == "embedding.weight":
                nn.init.normal_(parameter, std=HEAD_STD if self.head is None else 1.0)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        head_weight = self.embedding.weight if self.head is None else self.head.weight
        return linear(x, head_weight).float()
