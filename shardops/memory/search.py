"""The cheapest changes that make a model fit: every combination of a few is tried, in the order of what they cost.

Lossless changes on the hardware that there is come first: a stage that shards more, an exact master in fewer bytes,
gradient release, activations that are computed again. Then states that lose precision, then states in host memory,
which each step waits for; more ranks come last.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from .activations import CHECKPOINTING, Activations
from .components import rank_nbytes
from .models import ModelSpec
from .options import Options, check_against
from .sizes import format_size

MOST_RANKS = 1024
# Each list from the cheapest to the dearest; a change is a step to the right, or no step.
_MASTERS = ("fp32", "split32", "split24", "stochastic")
_STATE_DTYPES = ("float32", "bfloat16", "int8")
_STAGE_ORDER = (3, 1, 2)  # what shardops has, before what it has by formula only
_STAGE_TEXTS = {
    1: "ZeRO stage 1 (zero=1: by formula, not in shardops yet)",
    2: "ZeRO stage 2 (zero=2: by formula, not in shardops yet)",
    3: "FSDP2 (zero=3)",
}
_MASTER_TEXTS = {
    "split32": "exact masters in 16 bits more (master='split32')",
    "split24": "24-bit masters (master='split24')",
    "stochastic": "no masters, stochastic rounding (master='stochastic')",
}
_STATE_TEXTS = {
    "bfloat16": "moments in bfloat16 (state_dtype='bfloat16')",
    "int8": "moments in 8 bits (state_dtype='int8')",
}

# Steps to the right: stage, bucket views, master, gradient release, checkpointing, state dtype, offload, ranks.
Levels = tuple[int, ...]


@dataclass(frozen=True)
class Suggestion:
    """A change of options, and what it leads to.

    Attributes:
        text: what to do, in words, and the total.
        changes: keyword arguments of :func:`shardops.memory.plan` that differ.
        total: bytes on the fullest rank.
    """

    text: str
    changes: dict[str, Any]
    total: int


def search(model: ModelSpec, options: Options, limit: int) -> tuple[list[Suggestion], Suggestion]:
    """The cheapest change of each kind that brings a rank's total to the limit, and the change with the least total.

    Kinds differ in whether precision is lost, states are offloaded, or ranks are added. A change that does what another
    one does, and more, is not listed. If none fits, the list is empty.

    Args:
        model: what is trained.
        options: as asked for.
        limit: bytes of a rank's device.
    """
    least: tuple[int, Options] | None = None
    found: list[Levels] = []
    kinds: dict[tuple[bool, ...], Suggestion] = {}
    for levels, changed in sorted(_candidates(model, options), key=lambda candidate: _cost(candidate[0])):
        if any(all(a <= b for a, b in zip(other, levels, strict=True)) for other in found):
            continue
        total = rank_nbytes(model, changed)[0]["total"]
        if least is None or total < least[0]:
            least = total, changed
        if total <= limit:
            found.append(levels)
            kinds.setdefault(_kind(levels), _suggestion(options, changed, total))
    assert least is not None
    return list(kinds.values()), _suggestion(options, least[1], least[0])


def _cost(levels: Levels) -> tuple[int, ...]:
    stage, views, master, release, checkpointing, states, offload, ranks = levels
    exact = 1 if master > 0 else 0
    lost = (master - exact) + states
    effort = views + 2 * (stage + exact) + 4 * (release + checkpointing)
    return ranks, offload, lost, effort, *levels


def _kind(levels: Levels) -> tuple[bool, ...]:
    _, _, master, _, _, states, offload, ranks = levels
    return master > 1 or states > 0, offload > 0, ranks > 0


def _candidates(model: ModelSpec, options: Options) -> Iterator[tuple[Levels, Options]]:
    sizes = [options.world_size]
    while sizes[-1] * 2 <= MOST_RANKS:
        sizes.append(sizes[-1] * 2)
    stages = [options.zero, *(stage for stage in _STAGE_ORDER if stage > options.zero)]
    views = (True,) if options.gradient_as_bucket_view else (False, True)
    masters = _masters(model, options)
    releases = (True,) if options.gradient_release else (False, True)
    runs = _runs(options)
    states = _STATE_DTYPES[_STATE_DTYPES.index(options.state_dtype) :]
    offloads: tuple[str | None, ...] = ("cpu",) if options.offload_state else (None, "cpu")
    lists: tuple[list[Any], ...] = tuple(
        list(enumerate(each)) for each in (stages, views, releases, runs, states, offloads, sizes)
    )

    @functools.cache  # of thousands of candidates, which differ in much that does not matter here
    def is_trainable(stage: int, master: str) -> bool:
        try:
            check_against(replace(options, zero=stage, master=master), model)
        except ValueError:
            return False
        return True

    for (exact, master), *combination in product(masters, *lists):
        levels, (stage, view, release, run, state, offload, size) = zip(*combination, strict=True)
        changed = replace(
            options,
            zero=stage,
            gradient_as_bucket_view=view,
            master=master,
            gradient_release=release,
            activations=run,
            state_dtype=state,
            offload_state=offload,
            world_size=size,
        )
        if changed.conflict() is None and _is_of_use(levels, changed) and is_trainable(stage, master):
            yield (*levels[:2], exact, *levels[2:]), changed


def _is_of_use(levels: Levels, changed: Options) -> bool:
    """Whether each change does anything: stages and ranks do together, and only DistributedDataParallel has buckets."""
    stage, views, *_, ranks = levels
    if stage > 0 and changed.world_size == 1:
        return False
    if views > 0 and (changed.world_size == 1 or changed.zero > 0):
        return False
    return not (ranks > 0 and changed.zero == 0)


def _masters(model: ModelSpec, options: Options) -> list[tuple[int, str]]:
    """Levels and names: 1 is exact in fewer bytes, more loses bits. "auto" is what it means, "none" stays."""
    asked = options.master
    are_low = all(options.param_dtype_of(spec) == torch.bfloat16 for spec, _ in model.specs() if spec.is_trainable)
    if not are_low or asked == "none":
        return [(0, asked)]
    at = _MASTERS.index("split32" if asked == "auto" else asked)
    return [(0, asked), *((level, name) for level, name in enumerate(_MASTERS) if level > at)]


def _runs(options: Options) -> list[Activations | int | None]:
    asked = options.activations
    if not isinstance(asked, Activations):
        return [asked]
    kinds = list(CHECKPOINTING[CHECKPOINTING.index(asked.checkpointing) :])
    if asked.flash_attention:  # it keeps no scores that could be computed again
        kinds = [kind for kind in kinds if kind in (asked.checkpointing, "full")]
    return [replace(asked, checkpointing=kind) for kind in kinds]


def _suggestion(options: Options, changed: Options, total: int) -> Suggestion:
    before, after = options.to_json(), changed.to_json()
    changes = {name: value for name, value in after.items() if value != before[name]}
    words = []
    if "world_size" in changes:
        words.append(f"{changed.world_size} ranks (world_size={changed.world_size})")
    if "zero" in changes:
        words.append(_STAGE_TEXTS[changed.zero])
    if "gradient_as_bucket_view" in changes:
        words.append("gradients as views of DDP's buckets (gradient_as_bucket_view=True)")
    if "master" in changes:
        words.append(_MASTER_TEXTS[changed.master])
    if "state_dtype" in changes:
        words.append(_STATE_TEXTS[changed.state_dtype])
    if "gradient_release" in changes:
        words.append("gradient release (shardops.enable_gradient_release)")
    if isinstance(changed.activations, Activations) and "activations" in changes:
        words.append(f"{changed.activations.checkpointing} activation checkpointing")
    if "offload_state" in changes:
        words.append("states in host memory (offload_state='cpu')")
    return Suggestion(f"{', '.join(words) or 'as asked for'}: {format_size(total)}", changes, total)
