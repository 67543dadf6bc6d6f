"""Bytes of each component on one rank, from the very functions with which the optimizer makes its states.

Those are asked for states of parameters on the meta device: what the planner says and what a step allocates cannot
drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from ..optim.masters import create_master, master_storage
from ..optim.moments import create_moments, moment_storage
from .activations import Activations, activation_nbytes
from .communication import buffer_nbytes
from .models import Group, ModelSpec, ParameterSpec
from .options import Options

COMPONENTS = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "activations", "buffers", "total")
# What belongs to the optimizer and can be sharded by ZeRO's first stage, or offloaded.
STATES = ("master", "exp_avg", "exp_avg_sq")
# State key -> share of it by component. A block's two words are 64 bits: 16 scale exp_avg's codes, and 48 (the largest
# value and the step of the grid) exp_avg_sq's.
STATE_SHARES: dict[str, dict[str, float]] = {
    "exp_avg": {"exp_avg": 1.0},
    "exp_avg_codes": {"exp_avg": 1.0},
    "exp_avg_sq": {"exp_avg_sq": 1.0},
    "exp_avg_sq_codes": {"exp_avg_sq": 1.0},
    "max_exp_avg_sq": {"exp_avg_sq": 1.0},
    "block_words": {"exp_avg": 0.25, "exp_avg_sq": 0.75},
    "remainder": {"master": 1.0},
    "master_param": {"master": 1.0},
}
Shape = tuple[int, ...]


def state_shares(states: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by component of states, given as pairs of a key and its bytes; step counters and salts are in none."""
    nbytes = dict.fromkeys(STATES, 0.0)
    for key, size in states:
        for component, share in STATE_SHARES.get(key, {}).items():
            nbytes[component] += share * size
    return {name: int(value) for name, value in nbytes.items()}


@lru_cache(maxsize=4096)
def _states_of(
    shape: Shape, local: Shape, dtype: torch.dtype, master: str, state_dtype: str, amsgrad: bool
) -> tuple[int, ...]:
    """Bytes of STATES that the optimizer makes for a rank's part of a parameter."""
    group = {"master_weights": master, "state_dtype": state_dtype}
    whole, part = (torch.empty(each, dtype=dtype, device="meta") for each in (shape, local))
    # Which storage a parameter has follows from its global shape, how large that is from the local one.
    states: dict[str, Tensor] = create_moments(part, moment_storage(whole, group))
    states |= create_master(part, master_storage(whole, group))
    found = state_shares((key, state.nbytes) for key, state in states.items())
    if amsgrad:
        found["exp_avg_sq"] += 4 * part.numel()
    return tuple(found[name] for name in STATES)


def _shape_numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _spec_nbytes(spec: ParameterSpec, options: Options, rank: int) -> dict[str, int]:
    """Parameter, gradient and states of one parameter, sharded if stage 3 shards it."""
    shards = options.world_size if options.zero == 3 else 1
    local, padded = spec.shape, spec.numel
    if shards > 1:
        local, padded = spec.local_shape(shards, rank), _shape_numel(spec.padded_shape(shards))
    dtype = options.param_dtype_of(spec)
    nbytes = {"parameters": padded * dtype.itemsize}
    if spec.is_trainable:
        nbytes["gradients"] = padded * options.grad_dtype_of(spec).itemsize
        found = _states_of(spec.shape, local, dtype, options.master, options.state_dtype, options.amsgrad)
        nbytes |= dict(zip(STATES, found, strict=True))
    return nbytes


def rank_nbytes(model: ModelSpec, options: Options, rank: int = 0) -> tuple[dict[str, int], int]:
    """Bytes of each component on the device of one rank, with their total, and bytes of its states on the host.

    The first rank has the most of every parameter.

    Args:
        model: what is trained.
        options: how.
        rank: one of ``options.world_size``.
    """
    nbytes = dict.fromkeys(COMPONENTS, 0)
    for spec, count in model.specs():
        for name, value in _spec_nbytes(spec, options, rank).items():
            nbytes[name] += count * value
    # Rajbhandari et al. (2020), section 5: equal parts of everything, however parameters are cut.
    by_stage = {1: STATES, 2: (*STATES, "gradients")}
    for name in by_stage.get(options.zero, ()):
        nbytes[name] = -(-nbytes[name] // options.world_size)
    reduced = nbytes["gradients"]
    if options.gradient_release:
        nbytes["gradients"] = min(_largest_gradients(model, options), reduced)
    nbytes["buffers"] = model.buffer_nbytes + buffer_nbytes(model, options, reduced)
    host = 0
    if options.offload_state == "cpu":
        host = sum(nbytes[name] for name in STATES)
        nbytes |= dict.fromkeys(STATES, 0)
        nbytes["buffers"] += min(options.offload_bucket_bytes, host)  # staging memory
    nbytes["activations"] = _activations(model, options)
    nbytes["total"] = sum(nbytes.values())
    return nbytes, host


def _activations(model: ModelSpec, options: Options) -> int:
    if isinstance(options.activations, Activations):
        assert model.decoder is not None
        dtype = options.compute_dtype or options.param_dtype
        if dtype is None:  # the largest parameters', as norms may be kept in float32
            dtype = options.param_dtype_of(max(model.specs(), key=lambda item: item[0].numel * item[1])[0])
        return activation_nbytes(model.decoder, options.activations, dtype.itemsize)
    return options.activations or 0


def _largest_gradients(model: ModelSpec, options: Options) -> int:
    """The most bytes of gradients that gradient release has at once: of a parameter, under FSDP2 of a group."""
    shards = options.world_size if options.zero == 3 else 1
    model = model.stand_in or model

    def gradient(spec: ParameterSpec) -> int:
        numel = _shape_numel(spec.padded_shape(shards)) if spec.is_trainable else 0
        return numel * options.grad_dtype_of(spec).itemsize

    groups: list[Group] = [model.root, *(group for group, _ in model.blocks)]
    if options.zero == 3:
        return max(sum(count * gradient(spec) for spec, count in group) for group in groups)
    return max((gradient(spec) for spec, _ in model.specs()), default=0)
