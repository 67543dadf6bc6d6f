"""Copy with cast and scale: the one kernel under flatten_shard, unflatten_shard and cast_gather.

A segment is a range of a tensor beside a range of a flat buffer; a launch copies all segments of one source dtype.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _launch
from ._math import aligned_pointer, load_block, misaligned, store_block

# A program's blocks, one after the other. The reads that find the work (entry, then row, then data) cost as much time
# as a block's own copy, which moves a fifth of what an Adam program does.
ROUNDS = 4
# A copy without cast moves bits, not numbers: a signalling NaN's payload survives.
_BITS = {2: tl.int16, 4: tl.int32}


@triton.jit
def _convert(values, scale, TARGET: tl.constexpr, SCALED: tl.constexpr):
    """``cast(float32(values) * scale)``; the values themselves if there is nothing to do."""
    if SCALED:
        values = values.to(tl.float32) * scale
    elif values.dtype != TARGET:
        values = values.to(tl.float32)
    return values.to(TARGET)


@triton.jit(do_not_specialize=["rows", "chunks", "scale"])
def copy_kernel(
    rows,
    chunks,
    scale,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    SCALED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """``target[i] = cast(source[i] * scale)``, or 0 where the source's address is 0.

    A row is (source address, target address, numel); a program copies ``ROUNDS * BLOCK`` elements of one.
    """
    entry = tl.load(chunks + tl.program_id(0).to(tl.int64))
    row = rows + (entry >> 32) * 3
    offset = (entry & 0xFFFFFFFF) * (ROUNDS * BLOCK)

    source = tl.load(row)
    target = tl.load(row + 1)
    remaining = tl.load(row + 2) - offset
    is_padding = source == 0
    aligned = (misaligned(source, SOURCE, VECTOR) | misaligned(target, TARGET, VECTOR)) == 0

    if aligned & (remaining >= ROUNDS * BLOCK) & (source != 0):
        source_block = aligned_pointer(source, SOURCE, VECTOR) + offset
        target_block = aligned_pointer(target, TARGET, VECTOR) + offset
        lanes = tl.arange(0, BLOCK)
        for start in tl.static_range(0, ROUNDS * BLOCK, BLOCK):
            values = load_block(source_block + start, lanes, remaining - start, False)
            values = _convert(values, scale, TARGET, SCALED)
            store_block(target_block + start, lanes, remaining - start, values, False)
    else:
        source_block = source.to(tl.pointer_type(SOURCE)) + offset
        target_block = target.to(tl.pointer_type(TARGET)) + offset
        # One element a thread: neighbours in a warp are neighbours in memory whatever the alignment.
        for start in tl.range(0, tl.minimum(remaining, ROUNDS * BLOCK), BLOCK // VECTOR):
            lanes = tl.arange(0, BLOCK // VECTOR)
            present = tl.where(is_padding, 0, remaining - start)
            values = load_block(source_block + start, lanes, present, True)
            values = _convert(values, scale, TARGET, SCALED)
            # Chosen, not multiplied: zero times an infinite scale is NaN.
            values = tl.where(is_padding, tl.zeros([BLOCK // VECTOR], TARGET), values)
            store_block(target_block + start, lanes, remaining - start, values, True)


def _check(buffer: Tensor, tensors: Sequence[Tensor], segments: _launch.Table) -> None:
    for index, tensor in enumerate((buffer, *tensors)):
        if tensor.device != buffer.device or not tensor.is_contiguous() or tensor.dtype not in _launch.DTYPES:
            label = f"tensor {index - 1}" if index else "the buffer"
            raise ValueError(
                f"{label} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; a copy needs "
                f"contiguous float tensors on {buffer.device}"
            )
    if not len(segments):
        return
    index, tensor_offset, buffer_offset, numel = segments.T
    numels = np.array([*(tensor.numel() for tensor in tensors), 0], dtype=np.int64)  # -1, padding, is the last
    inside = (index >= -1) & (index < len(tensors)) & (segments[:, 1:].min(axis=1) >= 0)
    inside &= buffer_offset + numel <= buffer.numel()
    inside &= (index == -1) | (tensor_offset + numel <= numels[np.clip(index, -1, len(tensors) - 1)])
    if not inside.all():
        raise ValueError(f"segment {segments[~inside][0].tolist()} reaches outside its tensor or the buffer")


def copy_segments(
    buffer: Tensor, tensors: Sequence[Tensor], segments: _launch.Table, scale: float | None, *, into_buffer: bool
) -> None:
    """Copies between a flat buffer and tensors.

    Args:
        segments: int64 ``[n, 4]``: tensor (-1: padding), offset in it, offset in the buffer, numel.
        into_buffer: from the tensors into the buffer, where padding becomes zero; False: the other way.
    """
    _check(buffer, tensors, segments)
    is_padding = segments[:, 0] < 0
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors)) or [buffer.dtype]
    # A last element for padding, which has index -1: address 0, and the first dtype's launch.
    starts = np.array([*(tensor.data_ptr() for tensor in tensors), 0], dtype=np.int64)
    codes = np.array([*(dtypes.index(tensor.dtype) for tensor in tensors), 0], dtype=np.int64)[segments[:, 0]]
    for code, dtype in enumerate(dtypes):
        chosen = (codes == code) & (into_buffer | ~is_padding)
        index, tensor_offset, buffer_offset, numel = segments[chosen].T
        ends = [
            np.where(index < 0, 0, starts[index] + tensor_offset * dtype.itemsize),
            buffer.data_ptr() + buffer_offset * buffer.dtype.itemsize,
        ]
        source, target = (dtype, buffer.dtype) if into_buffer else (buffer.dtype, dtype)
        rows = np.stack([*(ends if into_buffer else ends[::-1]), numel], axis=1)
        _launch_copy(rows, source, target, scale, buffer)


def _launch_copy(
    rows: _launch.Table, source: torch.dtype, target: torch.dtype, scale: float | None, beside: Tensor
) -> None:
    as_bits = source == target and scale is None
    # One 128-bit access a thread of the wider elements; more of the narrower would go through shared memory.
    vector = 16 // max(source.itemsize, target.itemsize)
    block = vector * _launch.THREADS
    with _launch.on_device(beside):
        table, chunks = _launch.tables(rows, ROUNDS * block, beside.device)
        if not chunks.numel():
            return
        copy_kernel[(chunks.numel(),)](
            table,
            chunks,
            # Rounded as the reference rounds it: a double past float32's range is infinite.
            1.0 if scale is None else torch.tensor(scale, dtype=torch.float32).item(),
            SOURCE=_BITS[source.itemsize] if as_bits else _launch.DTYPES[source],
            TARGET=_BITS[target.itemsize] if as_bits else _launch.DTYPES[target],
            SCALED=scale is not None,
            VECTOR=vector,
            BLOCK=block,
            ROUNDS=ROUNDS,
            num_warps=_launch.NUM_WARPS,
            enable_fp_fusion=False,
        )
