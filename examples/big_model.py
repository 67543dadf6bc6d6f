"""A decoder of a given number of parameters, made in bf16 piece by piece: nothing is ever held twice, or in fp32.

`choose_config` turns a count into sizes with the proportions of published models, and `build` makes the parameters one
after another on the device, where they are drawn in bf16.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import torch
from model import HEAD_STD, VOCAB_SIZE, Decoder, DecoderConfig, Linear, RMSNorm, linear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
MAX_DEVIATION = 0.01  # of the number of parameters from what was asked for
LEAST = 2_000_000  # parameters; below, sizes are too coarse to meet any count
HIDDEN_RATIO = 8 / 3  # of SwiGLU's width to the model's: as many multiplications as two matrices of 4 times it
# Width over depth: 128 at 7 billion parameters, and less for smaller models, 64 at some 100 million.
ASPECT = 128
ASPECT_PARAMETERS = 7e9
# The largest parameter's share of all, and a size that is small in any case.
LARGEST_SHARE = 1 / 400
LEAST_SLICE = 2**16
# torch's names for instructions that multiply bf16 and sum in fp32.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def parse_count(text: str) -> int:
    """`1.9B`, `350M`, `20k` or a plain integer as a number of parameters.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().replace("_", "").lower())
    if match is None:
        raise ValueError(f"{text!r} is no number of parameters: write 1.9B, 350M, 20k or an integer")
    return round(float(match[1]) * COUNT_SUFFIXES[match[2]])


def count_parameters(config: DecoderConfig) -> int:
    """Parameters of `Decoder(config)` with an untied head."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden + 2 * config.dim
    return config.layers * block + (2 * VOCAB_SIZE + 1) * config.dim


def grains(dim: int) -> tuple[int, int, int]:
    """What the width, a head's and SwiGLU's are multiples of in a decoder about `dim` wide: rounder when wider."""
    if dim >= 2048:
        return 256, 128, 128
    return (128, 128, 128) if dim >= 1024 else (64, 64, 16)


def candidates(count: int, aspect: float) -> Iterator[DecoderConfig]:
    """Decoders within MAX_DEVIATION of the count, of all widths, and of depths up to twice off the aspect."""
    # A block has at least 10 dim**2 parameters.
    for dim in range(64, math.ceil((count / 10) ** 0.5) + 1, 64):
        dim_grain, head_dim, hidden_grain = grains(dim)
        if dim % dim_grain:
            continue
        for layers in range(math.ceil(dim / aspect / 2), math.floor(dim / aspect * 2) + 1):
            rest = (count - (2 * VOCAB_SIZE + 1) * dim) / layers - 4 * dim**2 - 2 * dim
            hidden = round(rest / (3 * dim) / hidden_grain) * hidden_grain
            if not 2 * dim <= hidden <= 4 * dim:
                continue
            config = DecoderConfig(dim, layers, dim // head_dim, hidden)
            if abs(count_parameters(config) - count) <= MAX_DEVIATION * count:
                yield config


def choose_config(count: int) -> DecoderConfig:
    """The decoder of about `count` parameters whose proportions are most like published ones'.

    Raises:
        ValueError: the count is too small, or between what sizes can make.
    """
    aspect = min(ASPECT, ASPECT * (count / ASPECT_PARAMETERS) ** 0.25)

    def strangeness(config: DecoderConfig) -> float:
        depth = math.log(config.dim / config.layers / aspect)
        return abs(depth) + 2 * abs(math.log(config.hidden / config.dim / HIDDEN_RATIO))

    best = min(candidates(count, aspect), key=strangeness, default=None)
    if count < LEAST or best is None:
        raise ValueError(
            f"--params is {count:,}, and no decoder of usual proportions is within {MAX_DEVIATION:.0%} of it: ask for "
            f"{LEAST:,} or more"
        )
    return best


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices at full speed; CPUs without instructions for it do not."""
    if device.type != "cpu":
        return True
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


class SlicedLinear(nn.Module):
    """A linear layer whose weight is kept in slices of rows, as tensor parallelism has them: [..., in] -> [..., out].

    Each slice's gradient is made, and by gradient release used and freed, on its own. A whole matrix of a large model
    is some 2 % of it, and its gradient would be as much of what is held.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        largest: numel that no slice is to pass, if it can have a row.
        native: multiply bf16 as it is, without copies in fp32.
    """

    def __init__(self, in_features: int, out_features: int, largest: int, native: bool) -> None:
        super().__init__()
        pieces = math.ceil(out_features / max(1, largest // in_features))
        bounds = [out_features * i // pieces for i in range(pieces + 1)]
        self.slices = nn.ParameterList(
            torch.empty(end - first, in_features) for first, end in itertools.pairwise(bounds)
        )
        self._multiply = F.linear if native else linear

    def forward(self, x: Tensor) -> Tensor:
        products = [self._multiply(x, weight) for weight in self.slices]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class BigDecoder(Decoder):
    """A decoder that keeps one activation a block and computes the others again in backward.

    Made under `torch.device("meta")`, its parameters have no memory; `build` gives it to them.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte: int64 [batch, length] -> fp32 [batch, length, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            # Nothing in a block is random, so there is no generator state to keep.
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        assert self.head is not None
        return linear(self.norm(x), self.head.weight).float()


def build(config: DecoderConfig, device: torch.device) -> BigDecoder:
    """The decoder on `device`: matrices in bf16, the norms' weights (some 0.01 % of all) in fp32.

    Args:
        config: the decoder's sizes, with an untied head.
        device: where parameters are allocated and drawn, from its default generator.
    """
    largest = max(LEAST_SLICE, int(count_parameters(config) * LARGEST_SHARE))
    native = multiplies_bf16(device)
    with torch.device("meta"):
        model = BigDecoder(config)
        for module in list(model.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, SlicedLinear(child.in_features, child.out_features, largest, native))
    for module in model.modules():
        dtype = torch.float32 if isinstance(module, RMSNorm) else torch.bfloat16
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    _initialise(model)
    return model


def _initialise(model: BigDecoder) -> None:
    """The values that `model.Decoder` starts from, of which this is a sliced one; see there for the reasons."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, SlicedLinear):
            for weight in module.slices:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    for block in model.blocks:
        for weight in (*block.attention.out.slices, *block.mlp.down.slices):
            nn.init.zeros_(weight)
    nn.init.normal_(model.embedding.weight)
    assert model.head is not None
    nn.init.normal_(model.head.weight, std=HEAD_STD)
