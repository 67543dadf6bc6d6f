"""The parts of the update path, and the bytes that each should move; the benchmark counts what they do move.

Bytes are per element that a rank sends, its padded shard: the "S" of the byte table. What is done on whole parameters
(copy-out, chunk_cat) moves ``world_size`` times its figure per element sent.
"""

from __future__ import annotations

from dataclasses import dataclass

CLIP, STEP, CAST, COPY_IN = "clip", "step", "cast", "copy-in"
COPY_OUT, CHUNK_CAT, GRADIENT_CAST = "copy-out", "chunk_cat", "gradient cast"
ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"

# Clip, step and what comes before a gather's collective: what an optimizer and its plug-in can change.
UPDATE = (CLIP, STEP, CAST, COPY_IN)
# Beside it on the same path: proportional to the whole parameters, or to how gradients arrive.
BESIDE = (COPY_OUT, CHUNK_CAT, GRADIENT_CAST)
# Collectives; under gloo on one machine they are copies by the processor.
NETWORK = (ALL_GATHER, REDUCE_SCATTER)
PARTS = (*UPDATE, *BESIDE, *NETWORK)

# Gathers of a step: with reshard_after_forward one before each forward and one before each backward.
GATHERS = 2

STOCK, SHADOW, ELIDED, MASTER = "stock", "A", "A, copy-in elided", "B"
VARIANTS = (STOCK, SHADOW, ELIDED, MASTER)


@dataclass(frozen=True)
class Sizes:
    """Elements of one rank.

    Attributes:
        local: of its shards.
        padded: of its shards as they are sent, rows of padding included.
        whole: of the whole parameters.
        world_size: number of ranks.
        tensors: number of parameters.
    """

    local: int
    padded: int
    whole: int
    world_size: int
    tensors: int

    @property
    def gathered(self) -> int:
        """Of the whole parameters as they arrive, padding included."""
        return self.padded * self.world_size


# Bytes an element, read and written, of the local shard. AdamW reads the parameter, the gradient and two moments, and
# writes all but the gradient; a shadow is 2 more to write; a bf16 parameter comes with 2 bytes of remainder.
_CLIP = {STOCK: 4 + 8, SHADOW: 4, ELIDED: 4, MASTER: 2}
_STEP = {STOCK: 16 + 12, SHADOW: 16 + 14, ELIDED: 16 + 14, MASTER: 14 + 12}
# The same of the padded shard, each gather or reduction.
_CAST = {STOCK: 4 + 2, SHADOW: 0, ELIDED: 0, MASTER: 0}
_COPY_IN = {STOCK: 2 + 2, SHADOW: 2 + 2, ELIDED: 0, MASTER: 2 + 2}
_GRADIENT_CAST = {STOCK: 0, SHADOW: 0, ELIDED: 0, MASTER: 4 + 2}


def expected_bytes(variant: str, sizes: Sizes) -> dict[str, int]:
    """What each part of a step moves on one rank by the formula."""
    return {
        CLIP: _CLIP[variant] * sizes.local,
        STEP: _STEP[variant] * sizes.local,
        CAST: _CAST[variant] * sizes.padded * GATHERS,
        COPY_IN: _COPY_IN[variant] * sizes.padded * GATHERS,
        COPY_OUT: (2 + 2) * sizes.gathered * GATHERS,
        CHUNK_CAT: 2 * sizes.whole + 4 * sizes.gathered,
        GRADIENT_CAST: _GRADIENT_CAST[variant] * sizes.padded,
    }
