"""Shapes of a decoder's parameters from a Hugging Face style ``config.json``, without that library or the weights.

Each family lists its parameters as its implementation in transformers 5 has them: the tests compare with that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import Decoder, ModelSpec, ParameterSpec, make_group


@dataclass(frozen=True)
class _Family:
    """What sets one family of SwiGLU decoders with RMS norms apart from the others.

    Attributes:
        qkv_bias: queries, keys and values have biases; None: as ``attention_bias`` says, which counts for the
            output, too.
        has_mlp_bias: ``mlp_bias`` counts.
        has_head_norms: queries and keys are normalised, each with a weight of a head's width.
        head_dim: where the config has none; None: ``hidden_size / num_attention_heads``.
        has_experts: the MLP is a router and ``num_local_experts`` experts.
    """

    qkv_bias: bool | None = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    head_dim: int | None = None
    has_experts: bool = False


_FAMILIES = {
    "llama": _Family(qkv_bias=None, has_mlp_bias=True),
    "mistral": _Family(),
    "mixtral": _Family(has_experts=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qkv_bias=None, has_head_norms=True, head_dim=128),
}
KNOWN = (*_FAMILIES, "gpt2")


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of a ``config.json``, or of the one in a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is neither a number of parameters (13B, 350M) nor a file; give one, or a config.json"
        )
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); give a Hugging Face style config.json") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds a JSON {type(content).__name__}; a config is an object")
    return content


def model_of_config(config: Mapping[str, Any]) -> ModelSpec:
    """Parameters and sizes of the decoder that a config describes.

    Raises:
        ValueError: an unknown ``model_type``; a size that is missing, or is not a positive integer.
    """
    model_type = config.get("model_type")
    if model_type not in KNOWN:
        raise ValueError(
            f"model_type is {model_type!r}; known are {', '.join(KNOWN)}: give the number of parameters instead, or "
            "the model itself, built under torch.device('meta')"
        )
    return _gpt2(config) if model_type == "gpt2" else _swiglu_decoder(config, _FAMILIES[model_type])


def decoder_of_config(config: Mapping[str, Any] | None) -> Decoder | None:
    """Sizes of a decoder of a known family; None: it is not one, or there is no config."""
    if config is None or config.get("model_type") not in KNOWN:
        return None
    return model_of_config(config).decoder


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"the config of a {config['model_type']} has no {name}; add it")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r} in the config; it is an integer of at least 1")
    return value


def _swiglu_decoder(config: Mapping[str, Any], family: _Family) -> ModelSpec:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", family.head_dim or hidden // heads)
    mlp, vocabulary = _size(config, "intermediate_size"), _size(config, "vocab_size")
    layers = _size(config, "num_hidden_layers")

    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    query, key = heads * head_dim, kv_heads * head_dim
    shapes: list[tuple[int, ...]] = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    if qkv_bias:
        shapes += [(query,), (key,), (key,)]
    if family.qkv_bias is None and attention_bias:
        shapes.append((hidden,))
    if family.has_head_norms:
        shapes += [(head_dim,), (head_dim,)]
    if family.has_experts:
        experts = _size(config, "num_local_experts")
        shapes += [(experts, hidden), (experts, 2 * mlp, hidden), (experts, hidden, mlp)]
    else:
        shapes += [(mlp, hidden), (mlp, hidden), (hidden, mlp)]
        if family.has_mlp_bias and config.get("mlp_bias", False):
            shapes += [(mlp,), (mlp,), (hidden,)]
    shapes += [(hidden,), (hidden,)]

    root: list[tuple[int, ...]] = [(vocabulary, hidden), (hidden,)]
    if not config.get("tie_word_embeddings", False):
        root.append((vocabulary, hidden))
    decoder = Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=mlp,
        vocabulary=vocabulary,
        has_dropout=bool(config.get("attention_dropout")),
        experts_per_token=_size(config, "num_experts_per_tok", 2) if family.has_experts else 1,
    )
    return _model(root, shapes, decoder)


def _gpt2(config: Mapping[str, Any]) -> ModelSpec:
    hidden, heads, layers = (_size(config, name) for name in ("n_embd", "n_head", "n_layer"))
    mlp, vocabulary = _size(config, "n_inner", 4 * hidden), _size(config, "vocab_size")
    # Its matrices are [in, out], so that rows, which states and shards follow, are those of the inputs.
    shapes: list[tuple[int, ...]] = [(hidden, 3 * hidden), (hidden, hidden), (hidden, mlp), (mlp, hidden)]
    shapes += [(3 * hidden,), (hidden,), (mlp,), (hidden,), *[(hidden,)] * 4]
    root: list[tuple[int, ...]] = [(vocabulary, hidden), (_size(config, "n_positions"), hidden), (hidden,), (hidden,)]
    if not config.get("tie_word_embeddings", True):
        root.append((vocabulary, hidden))
    decoder = Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=mlp,
        vocabulary=vocabulary,
        is_gated=False,
        has_dropout=any(config.get(name, 0.1) for name in ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
    )
    return _model(root, shapes, decoder)


def _model(root: list[tuple[int, ...]], block: list[tuple[int, ...]], decoder: Decoder) -> ModelSpec:
    return ModelSpec(
        make_group(map(ParameterSpec, root)),
        ((make_group(map(ParameterSpec, block)), decoder.layers),),
        decoder=decoder,
    )
