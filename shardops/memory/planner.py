"""The planner: bytes of every component on a rank, whether they fit a device, and what would make them fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..optim.offload import BUCKET_BYTES
from .activations import Activations
from .components import STATES, rank_nbytes
from .configs import decoder_of_config, model_of_config, read_config
from .models import ModelSpec, config_of_module, model_of_count, model_of_module
from .options import DDP_BUCKET_BYTES, Options, check_against, make_options
from .search import Suggestion, search
from .sizes import format_size, is_count, parse_count, parse_size

_ASSUMED = (
    "a number of parameters has no shapes: for activations, buffers and gradient release it is taken for a decoder "
    "with {layers} layers of width {hidden}, heads 128 wide, a gated MLP and {vocabulary:,} tokens; a config.json or a "
    "module is exact"
)


@dataclass(frozen=True)
class MemoryPlan:
    """What a rank holds while it trains.

    Attributes:
        per_rank: bytes on the device of the rank that holds the most, by ``parameters``, ``gradients``, ``master``,
            ``exp_avg``, ``exp_avg_sq`` (with amsgrad its maximum, too), ``activations``, ``buffers``, ``total``.
        bytes_per_parameter: of parameters, gradients, master and moments on that rank, over all of the model's
            parameters: 16 for Adam in mixed precision, 16 / N under FSDP.
        parameters: number of the model's parameters, tied ones once.
        fits: whether the total is at most the device's memory; None: no device was given.
        device_memory: bytes of it.
        suggestions: if it does not fit, the cheapest changes that make it fit, one of each kind, the cheapest first.
        options: what was planned for, as keyword arguments of :func:`plan`.
        host: bytes of offloaded states in the host's memory, for this rank.
        notes: what was assumed; if nothing makes it fit, the least that was found.
        not_counted: ``"activations"`` and ``"buffers"``, where nobody asked for them and nothing tells how many.
        ranks: ``per_rank`` of each rank, if asked for.
    """

    per_rank: dict[str, int]
    bytes_per_parameter: float
    parameters: int
    fits: bool | None
    device_memory: int | None
    suggestions: list[Suggestion]
    options: dict[str, Any]
    host: int = 0
    notes: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = ()
    ranks: list[dict[str, int]] | None = None

    @property
    def verdict(self) -> str:
        """Whether it fits and by how much, as one line."""
        total = format_size(self.per_rank["total"])
        if self.device_memory is None:
            return f"{total} a rank"
        left = self.device_memory - self.per_rank["total"]
        how = f"fits, with {format_size(left)} left" if left >= 0 else f"does not fit: {format_size(-left)} too much"
        missing = " and ".join(self.not_counted)
        without = f", {missing} not counted" if missing else ""
        return f"{total} a rank on {format_size(self.device_memory)}{without}: {how}"

    def to_json(self) -> dict[str, Any]:
        """Everything, of types that JSON has; ``ranks`` only if there are any."""
        content = asdict(self)
        content |= {"notes": list(self.notes), "not_counted": list(self.not_counted)}
        if self.ranks is None:
            del content["ranks"]
        return content


def plan(
    model: Any,
    *,
    world_size: int = 1,
    zero: int = 0,
    device_memory: str | int | None = None,
    param_dtype: torch.dtype | str | None = None,
    compute_dtype: torch.dtype | str | None = None,
    grad_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str = torch.float32,
    state_dtype: torch.dtype | str = torch.float32,
    master: str = "auto",
    amsgrad: bool = False,
    gradient_release: bool = False,
    offload_state: str | None = None,
    offload_bucket_bytes: int = BUCKET_BYTES,
    shadows: bool = True,
    activations: Activations | Mapping[str, Any] | int | None = None,
    buffers: bool | None = None,
    bucket_bytes: int = DDP_BUCKET_BYTES,
    gradient_as_bucket_view: bool = False,
    ranks: bool = False,
    suggest: bool = True,
) -> MemoryPlan:
    """Bytes that each rank of a training run holds, by component.

    States are those that ``FusedShardedAdamW`` makes, byte for byte; parameters and gradients of stage 3 are FSDP2's,
    with its padding; stages 1 and 2 are the formula of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models" (2020), section 5 and figure 1. ``device_memory`` is compared with tensors alone: leave
    room for the device's context and the allocator's fragments.

    Args:
        model: a number of parameters (an int, or text as ``"13B"``); the path of a Hugging Face style config.json, or
            its content (llama, mistral, mixtral, qwen2, qwen3, gpt2); or an ``nn.Module``, which may be on the meta
            device: tied parameters count once, frozen ones have no gradients and states.
        world_size: ranks that the model is replicated or sharded over.
        zero: 0: replicated; 1: the optimizer's states are sharded, 2: gradients too; 3: all of it (FSDP2).
        device_memory: of one rank: bytes, or text as ``"80GB"`` or ``"74GiB"``.
        param_dtype: of the parameters; None: a module's own, else bfloat16. Dtypes are ``torch.dtype`` or their names.
        compute_dtype: None: the parameters'. Under FSDP2 what is gathered is of it.
        grad_dtype: of the gradients that a step reads; None: the parameters'.
        reduce_dtype: of FSDP2's reduce-scatter.
        state_dtype: of the moments: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``.
        master: the optimizer's ``master_weights``.
        amsgrad: the optimizer's.
        gradient_release: gradients of one parameter, under FSDP2 of one group, at a time.
        offload_state: ``"cpu"``: states are in host memory (``MemoryPlan.host``), and staged on the device.
        offload_bucket_bytes: the most that staging takes.
        shadows: under FSDP2 with float32 parameters and narrower compute the step keeps rounded copies of parameters,
            counted among ``buffers``; False: removed, ``shardops.fsdp.plug_in_of(optimizer).remove()``.
        activations: :class:`Activations` or a dict of its fields, for a decoder, which a number of parameters is taken
            for; or bytes; None: not counted.
        buffers: count what communication takes, see ``shardops/memory/communication.py``; None: where shapes are
            known, so that a number of parameters gives the formula's figures.
        bucket_bytes: of one bucket of stages 1 and 2.
        gradient_as_bucket_view: DistributedDataParallel's; without it its buckets are a second copy of all gradients.
        ranks: list every rank, too.
        suggest: look for changes if it does not fit.

    Raises:
        ValueError: a value outside its range, options that do not go together, an unknown kind of config.
        TypeError: a value of the wrong kind; a trainable parameter that the optimizer does not step.
        FileNotFoundError: text that is neither a count nor a file.

    Example:
        >>> found = plan("13B", master="fp32", device_memory="80GB")
        >>> found.per_rank["total"], found.fits
        (208000000000, False)
    """
    made = make_options(
        {
            "world_size": world_size,
            "zero": zero,
            "param_dtype": param_dtype,
            "compute_dtype": compute_dtype,
            "grad_dtype": grad_dtype,
            "reduce_dtype": reduce_dtype,
            "state_dtype": state_dtype,
            "master": master,
            "amsgrad": amsgrad,
            "gradient_release": gradient_release,
            "offload_state": offload_state,
            "offload_bucket_bytes": offload_bucket_bytes,
            "shadows": shadows,
            "activations": activations,
            "buffers": buffers,
            "bucket_bytes": bucket_bytes,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
    )
    spec = read_model(model)
    check_against(made, spec)
    limit = None if device_memory is None else parse_size(device_memory)
    per_rank, host = rank_nbytes(spec, made)
    held = sum(per_rank[name] for name in ("parameters", "gradients", *STATES))
    fits = None if limit is None else per_rank["total"] <= limit
    suggestions: list[Suggestion] = []
    notes: list[str] = []
    if suggest and limit is not None and not fits:
        suggestions, least = search(spec, made, limit)
        if not suggestions:
            notes.append(f"nothing that was tried fits {format_size(limit)}; the least is {least.text}")
    is_assumed = made.buffers or made.gradient_release or any(map(_releases, suggestions))
    if spec.decoder and not spec.has_shapes and (is_assumed or isinstance(made.activations, Activations)):
        notes.append(_ASSUMED.format(**vars(spec.decoder)))
    if made.zero in (1, 2):
        notes.append(f"zero={made.zero} is planned by formula: shardops has no such stage yet")
    return MemoryPlan(
        per_rank=per_rank,
        bytes_per_parameter=held / spec.numel,
        parameters=spec.numel,
        fits=fits,
        device_memory=limit,
        suggestions=suggestions,
        options=made.to_json(),
        host=host,
        notes=tuple(notes),
        not_counted=tuple(name for name in ("activations", "buffers") if _is_left_out(name, spec, made)),
        ranks=[rank_nbytes(spec, made, rank)[0] for rank in range(made.world_size)] if ranks else None,
    )


def read_model(model: Any) -> ModelSpec:
    """The parameters of what :func:`plan` is given.

    Raises:
        TypeError: neither a count, a config nor a module; see also :func:`plan`.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, nn.Module):
        spec = model_of_module(model, decoder_of_config(config_of_module(model)))
    elif is_count(model):
        spec = model_of_count(parse_count(model))
    elif isinstance(model, Mapping):
        spec = model_of_config(model)
    elif isinstance(model, (str, Path)):
        spec = model_of_config(read_config(model))
    else:
        raise TypeError(
            f"model is a {type(model).__name__}; it is a number of parameters (13B), a Hugging Face style config.json "
            "or its content, or an nn.Module"
        )
    if not spec.numel:
        raise ValueError("the model has no parameters; there is nothing to plan")
    return spec


def _is_left_out(name: str, spec: ModelSpec, options: Options) -> bool:
    """Whether nobody asked for it, nor to leave it out, and it is not counted by itself."""
    return getattr(options, name) is None and not (name == "buffers" and spec.has_shapes)


def _releases(suggestion: Suggestion) -> bool:
    return "gradient_release" in suggestion.changes
