"""The kernel of sharded_adam for block-quantised moments: a tile of whole blocks is decoded, updated and encoded."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from ._adam_formats import load_dither, load_row, pointer, step_elements, store_master
from ._adam_scalars import BLOCK_COLUMNS, COLUMNS, SCALARS
from ._adam_scalars import WORDS as WORDS_ADDRESS
from ._block_quant import BLOCK, WORDS, decode_blocks, encode_blocks
from ._math import dither_words, load_block, store_block


@triton.jit
def _update_tile(
    addresses,
    tile,
    lengths,
    words_block,
    words_remaining,
    scalars,
    dither,
    grad_scale,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """BLOCKS blocks that begin at the elements ``tile``; where MASKED, with ``lengths`` elements each, or none."""
    lanes = tl.arange(0, BLOCK)[None, :]
    exp_avg_block = pointer(addresses[2], tile, tl.int8, VECTOR, MASKED)
    exp_avg_sq_block = pointer(addresses[3], tile, tl.uint8, VECTOR, MASKED)
    word = tl.arange(0, BLOCKS)[:, None] * WORDS
    highest = load_block(words_block, word, words_remaining, MASKED)
    packed = load_block(words_block + 1, word, words_remaining, MASKED)
    exp_avg, exp_avg_sq = decode_blocks(
        load_block(exp_avg_block, lanes, lengths, MASKED),
        load_block(exp_avg_sq_block, lanes, lengths, MASKED),
        highest,
        packed,
    )

    master, exp_avg, exp_avg_sq = step_elements(
        addresses, tile, lanes, lengths, scalars, grad_scale, exp_avg, exp_avg_sq,
        PARAM, GRAD, MASTER, COUPLED, FROM_GRAD, AMSGRAD, VECTOR, MASKED,
    )  # fmt: skip

    words = None
    if MASTER == tl.int8 or (MASTER is None and PARAM == tl.int16):  # noqa: SIM300
        words = dither_words(dither, tile, lanes, STRIDED)
    store_master(addresses, tile, lanes, lengths, master, words, PARAM, MASTER, SHADOW, VECTOR, MASKED)

    words = lanes.to(tl.uint32) * dither[1] + dither[0]
    exp_avg_codes, exp_avg_sq_codes, highest, packed = encode_blocks(
        exp_avg, exp_avg_sq, words, lanes < lengths, MASKED
    )
    store_block(exp_avg_block, lanes, lengths, exp_avg_codes, MASKED)
    store_block(exp_avg_sq_block, lanes, lengths, exp_avg_sq_codes, MASKED)
    store_block(words_block, word, words_remaining, highest, MASKED)
    store_block(words_block + 1, word, words_remaining, packed, MASKED)


@triton.jit(do_not_specialize=["rows", "chunks", "scalars", "grad_scale", "found_inf"])
def update_blocks_kernel(
    rows,
    chunks,
    scalars,
    grad_scale,
    found_inf,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    SHADOW: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STRIDED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A chunk of BLOCKS blocks of one tensor: decode, :func:`adam_update`, encode. Types as in ``_adam_formats``.

    Rows of 300 elements in tiles of 4 blocks: (0, 0..127) (0, 128..255) (0, 256..299) (1, 0..127).
    """
    entry = tl.load(chunks + tl.program_id(0).to(tl.int64))
    tensor = entry >> 32
    row = rows + tensor * COLUMNS
    first_block = (entry & 0xFFFFFFFF) * BLOCKS
    remaining = tl.load(row + (COLUMNS - 1)) - first_block
    if found_inf is not None:
        # With nothing remaining, every access is masked off.
        remaining = tl.where(tl.load(found_inf) == 0.0, remaining, 0)

    scalars = scalars + tensor * SCALARS
    addresses, unaligned, values = load_row(row, scalars, PARAM, GRAD, tl.int8, MASTER, SHADOW, AMSGRAD, VECTOR)
    words = tl.load(row + WORDS_ADDRESS).to(tl.pointer_type(tl.uint32)) + first_block * WORDS
    columns = tl.load(row + BLOCK_COLUMNS)
    dither = load_dither(row, scalars)
    if grad_scale is not None:
        grad_scale = tl.load(grad_scale)

    if (unaligned == 0) & (columns % BLOCK == 0) & (remaining >= BLOCKS):
        tile = first_block * BLOCK + tl.arange(0, BLOCKS)[:, None] * BLOCK
        _update_tile(
            addresses, tile, BLOCK, words, 0, values, dither, grad_scale,
            PARAM, GRAD, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, STRIDED, VECTOR, BLOCKS, False,
        )  # fmt: skip
    else:
        # One element a thread: neighbours in a warp are neighbours in memory whatever the alignment.
        blocks_a_row = (columns + (BLOCK - 1)) // BLOCK
        number = tl.arange(0, BLOCKS // VECTOR)[:, None]
        for start in tl.range(0, tl.minimum(remaining, BLOCKS), BLOCKS // VECTOR):
            block = first_block + start + number
            matrix_row = block // blocks_a_row
            column = (block - matrix_row * blocks_a_row) * BLOCK
            lengths = tl.where(number < remaining - start, tl.minimum(columns - column, BLOCK), 0)
            _update_tile(
                addresses, matrix_row * columns + column, lengths, words + start * WORDS, (remaining - start) * WORDS,
                values, dither, grad_scale, PARAM, GRAD, MASTER, SHADOW, COUPLED, FROM_GRAD, AMSGRAD, STRIDED, VECTOR,
                BLOCKS // VECTOR, True,
            )  # fmt: skip
