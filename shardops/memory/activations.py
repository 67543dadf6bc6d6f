"""Activations of a decoder-only model: what one step's backward needs of its forward, by a formula.

Counted as Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1:
inputs of matrix products, of norms and of nonlinearities in the compute dtype, dropout masks in a byte, logits in
float32. For GPT's blocks that is their equation 1, ``s b h (34 + 5 a s / h)`` bytes a layer. Not counted: buffers that
live for one operation, gradients of activations, and what an implementation keeps beyond this, as norms in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from .models import Decoder

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Activations:
    """What one rank runs through the model at once.

    Attributes:
        batch: sequences of one microbatch of a rank.
        sequence: tokens of each.
        checkpointing: ``"none"``; ``"selective"``: scores of the attention (softmax and its dropout) are computed again
            in backward (Korthikanti et al., section 5); ``"full"``: each layer keeps its input only, and backward holds
            one layer's activations beside these.
        flash_attention: scores are never in memory; of each row its logarithmic sum is, in float32.

    Raises:
        ValueError: a value outside of these.
    """

    batch: int
    sequence: int
    checkpointing: str = "none"
    flash_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it is an integer of at least 1")
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"checkpointing is {self.checkpointing!r}; it is one of {', '.join(map(repr, CHECKPOINTING))}"
            )


def layer_nbytes(decoder: Decoder, run: Activations, itemsize: int) -> int:
    """Bytes that one layer keeps for backward; under full checkpointing while it is computed again.

    Args:
        decoder: the model's sizes.
        run: batch and sequence; what of the attention is kept.
        itemsize: of the compute dtype, in bytes.
    """
    tokens = run.batch * run.sequence
    query, key = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    # Input of the projections; queries, keys and values; input of the output projection.
    attention = itemsize * tokens * (decoder.hidden + query + 2 * key + query)
    if run.flash_attention:
        attention += 4 * decoder.heads * tokens
    elif run.checkpointing != "selective":
        each = itemsize + (1 + itemsize if decoder.has_dropout else 0)  # softmax; the mask, and what it leaves
        attention += each * decoder.heads * tokens * run.sequence
    # Both projections, the nonlinearity and the product; or the projection and the nonlinearity.
    inner = (4 if decoder.is_gated else 2) * decoder.intermediate * decoder.experts_per_token
    mlp = itemsize * tokens * (decoder.hidden + inner)
    norms = 2 * itemsize * tokens * decoder.hidden
    masks = 2 * tokens * decoder.hidden if decoder.has_dropout else 0
    return attention + mlp + norms + masks


def activation_nbytes(decoder: Decoder, run: Activations, itemsize: int) -> int:
    """Bytes that a step's backward begins with; with full checkpointing the most that it comes to hold.

    Beside the layers the inputs of the last norm and of the output layer, and the logits: ``4 s b h (1 + v / h)`` in
    two-byte compute (Korthikanti et al., section 4.3).

    Args:
        decoder: the model's sizes.
        run: batch, sequence, checkpointing.
        itemsize: of the compute dtype, in bytes.
    """
    tokens = run.batch * run.sequence
    layer = layer_nbytes(decoder, run, itemsize)
    if run.checkpointing == "full":
        layers = decoder.layers * itemsize * tokens * decoder.hidden + layer
    else:
        layers = decoder.layers * layer
    ends = 2 * itemsize * tokens * decoder.hidden + 4 * tokens * decoder.vocabulary
    if decoder.has_dropout:
        ends += tokens * decoder.hidden  # the embeddings' mask
    return layers + ends
