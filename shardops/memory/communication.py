"""Bytes that a rank holds beside its states to compute and to communicate: gathered parameters, buckets, shadows.

Formulas of what trainers allocate at their fullest moment. Allocators' fragments and a device's context are not in it.
"""

from __future__ import annotations

import heapq

import torch

from .models import Group, ModelSpec
from .options import Options


def buffer_nbytes(model: ModelSpec, options: Options, reduced: int) -> int:
    """Bytes of everything that is neither a parameter, a gradient, a state nor an activation.

    With ``options.buffers`` False, or None and only a count known, these are the shadows alone: 2 bytes for each padded
    element that FSDP2 would have to cast, one after another, to what it gathers. Else also:

    - Stage 3 (FSDP2), the larger of two moments. At a block: the root's parameters and gradients unsharded, the two
      largest blocks' parameters (one computes, the next one is under way), and a block's unsharded gradients beside
      the reduce-scatter's input. At the end: the root's gradients beside its reduce-scatter's input, and a block's
      input that is not freed yet. Parameters are gathered in the compute dtype, gradients are made in it and reduced,
      padded, in ``reduce_dtype``. Of 16-bit parameters with float32 gradients (``plug_in(fp32_gradients=True)``)
      FSDP2's own rounded ones, too.
    - Stage 0 over several ranks: DistributedDataParallel's buckets, which are as large as all gradients unless these
      are views of them (``gradient_as_bucket_view``: torch's documentation of it).
    - Stages 1 and 2: two buckets, one that is filled and one that is reduced.
    - Compute in a narrower dtype without FSDP2: the copies that autocast keeps of all parameters from forward to
      backward.
    - The optimizer's step counters.

    Args:
        model: what is trained.
        options: how.
        reduced: bytes of the gradients that a rank holds, if all of them were kept.
    """
    nbytes = _shadows(model, options)
    wanted = model.has_shapes if options.buffers is None else options.buffers
    if not wanted:
        return nbytes
    nbytes += 4 * model.tensors
    if options.zero == 3:
        return nbytes + _fsdp2(model, options)
    nbytes += sum(
        count * spec.numel * options.compute_dtype_of(spec).itemsize
        for spec, count in model.specs()
        if options.compute_dtype_of(spec).itemsize < options.param_dtype_of(spec).itemsize
    )
    if options.world_size == 1:
        return nbytes
    if options.zero == 0:
        return nbytes if options.gradient_as_bucket_view else nbytes + reduced
    return nbytes + 2 * min(options.bucket_bytes, reduced * (options.world_size if options.zero == 2 else 1))


def _padded_numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _shadows(model: ModelSpec, options: Options) -> int:
    return sum(
        count * _padded_numel(spec.padded_shape(options.world_size)) * options.compute_dtype_of(spec).itemsize
        for spec, count in model.specs()
        if options.has_shadow(spec)
    )


def _fsdp2(model: ModelSpec, options: Options) -> int:
    model = model.stand_in or model
    blocks = [(_gathered(group, options), times) for group, times in model.blocks]
    two = sum(heapq.nlargest(2, (size for size, times in blocks for _ in range(min(times, 2)))))
    made, root_reduced = _gradients(model.root, options)
    of_blocks = [_gradients(group, options) for group, _ in model.blocks]
    at_a_block = _gathered(model.root, options) + made + two + max(map(sum, of_blocks), default=0)
    at_the_root = made + root_reduced + max((reduced for _, reduced in of_blocks), default=0)

    rounded = [_rounded(group, options) for group in (model.root, *(group for group, _ in model.blocks))]
    times = [1, *(times for _, times in model.blocks)]
    held = max(rounded) if options.gradient_release else sum(a * b for a, b in zip(rounded, times, strict=True))
    return max(at_a_block, at_the_root) + held


def _gathered(group: Group, options: Options) -> int:
    """A group's parameters on one rank, padded, in the compute dtype."""
    return sum(
        count
        * options.world_size
        * _padded_numel(spec.padded_shape(options.world_size))
        * options.compute_dtype_of(spec).itemsize
        for spec, count in group
    )


def _gradients(group: Group, options: Options) -> tuple[int, int]:
    """A group's unsharded gradients; and the padded copy that is reduced, with what it gives if that is rounded yet."""
    made = reduced = 0
    for spec, count in group:
        if spec.is_trainable:
            shard = _padded_numel(spec.padded_shape(options.world_size))
            is_rounded = options.reduce_dtype.itemsize > options.param_dtype_of(spec).itemsize
            made += count * spec.numel * options.compute_dtype_of(spec).itemsize
            reduced += count * shard * (options.world_size + is_rounded) * options.reduce_dtype.itemsize
    return made, reduced


def _rounded(group: Group, options: Options) -> int:
    """A group's gradients as FSDP2 rounds them to 16 bits, where the step reads float32 ones."""
    return sum(
        count * _padded_numel(spec.padded_shape(options.world_size)) * options.param_dtype_of(spec).itemsize
        for spec, count in group
        if spec.is_trainable and options.grad_dtype_of(spec).itemsize > options.param_dtype_of(spec).itemsize
    )
