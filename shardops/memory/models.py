"""What the planner knows of a model: the shapes of its parameters, by the groups that FSDP2 gathers together.

Read from an ``nn.Module``, meta device or not, or made up from nothing but a number of parameters. ``configs.py`` reads
config files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layout import numel_of
from ..optim.state import PARAM_DTYPES

# A count has no shapes. Where some are needed, it is taken for a decoder as Llama 2: 12 h**2 parameters a block in a
# gated MLP and an attention with heads of 128 elements, as many of keys as of queries, as many blocks as heads, and
# untied embeddings of 32,000 tokens. Llama 2 of 7 and 13 billion parameters comes out with its own width and depth.
ASSUMED_BLOCK, ASSUMED_HEAD, ASSUMED_VOCABULARY = 12, 128, 32_000


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter, as far as its memory goes.

    Attributes:
        shape: of the whole parameter.
        dtype: that it is kept in; None: in what the plan says.
        is_trainable: it has a gradient and states.
        is_flat: it stands for many of unknown shapes, ``(1, numel)``, and is cut anywhere.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    is_trainable: bool = True
    is_flat: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return numel_of(self.shape)

    def padded_shape(self, world_size: int) -> tuple[int, ...]:
        """What FSDP2 allocates of it on every rank: a chunk of dim 0, padded with rows. A scalar is one row."""
        if self.is_flat:
            return (1, -(-self.shape[1] // world_size))
        rows, *rest = self.shape or (1,)
        return (-(-rows // world_size), *rest)

    def local_shape(self, world_size: int, rank: int) -> tuple[int, ...]:
        """What of it is this rank's, as ``torch.chunk`` along dim 0 cuts it: the first rank has the most."""
        padded = self.padded_shape(world_size)
        if self.is_flat:
            return (1, min(max(self.shape[1] - rank * padded[1], 0), padded[1]))
        rows = self.shape[0] if self.shape else 1
        return (min(max(rows - rank * padded[0], 0), padded[0]), *padded[1:])


# Parameters with how many there are of each.
Group = tuple[tuple[ParameterSpec, int], ...]


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder-only model, which its activations follow from.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention heads of queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        intermediate: width of the MLP.
        vocabulary: number of tokens.
        is_gated: the MLP multiplies two projections (SwiGLU), in place of GELU over one.
        has_dropout: on attention, on the outputs of both halves of a block, and on embeddings.
        experts_per_token: MLPs that a token goes through.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_gated: bool = True
    has_dropout: bool = False
    experts_per_token: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """The parameters of a model, each once.

    Attributes:
        root: those that are in no block; FSDP2 keeps them gathered from forward to backward.
        blocks: groups that are gathered by turns, with how many there are of each.
        buffer_nbytes: of the module's own buffers, as running means.
        decoder: None: not known to be one.
        stand_in: where only the number of parameters is known, a model of the decoder that it is taken for; None else.
    """

    root: Group
    blocks: tuple[tuple[Group, int], ...] = ()
    buffer_nbytes: int = 0
    decoder: Decoder | None = None
    stand_in: ModelSpec | None = None

    @property
    def has_shapes(self) -> bool:
        """Whether more is known than the number of parameters."""
        return self.stand_in is None

    def specs(self) -> Iterator[tuple[ParameterSpec, int]]:
        """All parameters with how many there are of each, in no order."""
        yield from self.root
        for group, times in self.blocks:
            for spec, count in group:
                yield spec, count * times

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel * count for spec, count in self.specs())

    @property
    def tensors(self) -> int:
        """Number of trainable parameters, as tensors."""
        return sum(count for spec, count in self.specs() if spec.is_trainable)


def make_group(specs: Iterable[ParameterSpec]) -> Group:
    """Equal parameters are counted, not repeated."""
    return tuple(sorted(Counter(specs).items(), key=lambda item: (-item[0].numel, item[0].shape, str(item[0]))))


def model_of_count(numel: int) -> ModelSpec:
    """A model of so many parameters of unknown shapes."""
    whole = ParameterSpec((1, numel), is_flat=True)
    decoder = _assumed_decoder(numel)
    return ModelSpec(root=((whole, 1),), decoder=decoder, stand_in=_model_of_decoder(decoder))


def _assumed_decoder(numel: int) -> Decoder:
    def total(heads: int) -> int:
        hidden = heads * ASSUMED_HEAD
        return heads * ASSUMED_BLOCK * hidden**2 + 2 * ASSUMED_VOCABULARY * hidden

    heads = 1
    while total(heads) < numel:
        heads += 1
    if heads > 1 and numel - total(heads - 1) < total(heads) - numel:
        heads -= 1
    hidden = heads * ASSUMED_HEAD
    return Decoder(
        layers=max(round((numel - 2 * ASSUMED_VOCABULARY * hidden) / (ASSUMED_BLOCK * hidden**2)), 1),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=ASSUMED_HEAD,
        # Of the 12 h**2 of a block the attention has 4, the MLP's three matrices the rest.
        intermediate=(ASSUMED_BLOCK - 4) * hidden // 3,
        vocabulary=ASSUMED_VOCABULARY,
    )


def _model_of_decoder(decoder: Decoder) -> ModelSpec:
    """Its matrices, as far as :func:`_assumed_decoder` knows them."""
    hidden, inner = decoder.hidden, decoder.intermediate
    attention = [ParameterSpec((hidden, hidden))] * 4
    mlp = [ParameterSpec((inner, hidden))] * 2 + [ParameterSpec((hidden, inner))]
    root = make_group([ParameterSpec((decoder.vocabulary, hidden))] * 2)
    return ModelSpec(root, ((make_group(attention + mlp), decoder.layers),), decoder=decoder)


def model_of_module(module: nn.Module, decoder: Decoder | None = None) -> ModelSpec:
    """The parameters of a module, tied ones once, with their dtypes; it may be on the meta device, or sharded already.

    Each module in an ``nn.ModuleList`` that is in no other one counts as a block, as models are usually given to
    ``fully_shard``; all else is the root's.

    Raises:
        TypeError: a trainable parameter is of a dtype that the optimizer does not step.
    """
    blocks = list(_blocks(module))
    groups: dict[str, list[ParameterSpec]] = {name: [] for name in ("", *blocks)}
    for name, param in module.named_parameters():
        if param.requires_grad and param.dtype not in PARAM_DTYPES:
            raise TypeError(
                f"{name} of shape {tuple(param.shape)} has dtype {param.dtype}; float32, bfloat16 and float16 can be "
                "stepped: cast it, or freeze it with requires_grad_(False)"
            )
        home = next((block for block in blocks if name.startswith(block + ".")), "")
        groups[home].append(ParameterSpec(tuple(param.shape), param.dtype, param.requires_grad))
    counted = Counter(make_group(groups[name]) for name in blocks if groups[name])
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return ModelSpec(make_group(groups[""]), tuple(counted.items()), buffer_nbytes=buffers, decoder=decoder)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.ModuleList):
            yield path
        else:
            yield from _blocks(child, path + ".")


def config_of_module(module: Any) -> dict[str, Any] | None:
    """The config that a Hugging Face model carries."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    found = to_dict() if callable(to_dict) else None
    return found if isinstance(found, dict) else None
