"""How a model is trained, as far as memory goes: the planner's options, checked, and as they stand in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ..optim.masters import BFLOAT16_ONLY, MASTER_WEIGHTS
from ..optim.moments import STATE_DTYPES
from ..optim.offload import BUCKET_BYTES
from ..optim.options import check_offload, state_dtype_name
from .activations import Activations
from .models import ModelSpec, ParameterSpec
from .sizes import dtype_name, parse_dtype

STAGES = (0, 1, 2, 3)
DDP_BUCKET_BYTES = 25 << 20  # bucket_cap_mb of DistributedDataParallel
_FLAGS = ("gradient_release", "amsgrad", "shadows", "gradient_as_bucket_view")


@dataclass(frozen=True)
class Options:
    """What :func:`shardops.memory.plan` takes beside the model; see there.

    Attributes:
        buffers: None: where shapes are known.
        activations: bytes, or what they follow from.
    """

    world_size: int = 1
    zero: int = 0
    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    master: str = "auto"
    amsgrad: bool = False
    gradient_release: bool = False
    offload_state: str | None = None
    offload_bucket_bytes: int = BUCKET_BYTES
    shadows: bool = True
    buffers: bool | None = None
    bucket_bytes: int = DDP_BUCKET_BYTES
    gradient_as_bucket_view: bool = False
    activations: Activations | int | None = None

    def param_dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype that a parameter is kept in."""
        return self.param_dtype or spec.dtype or torch.bfloat16

    def compute_dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype that its unsharded or cast copy is in."""
        return self.compute_dtype or self.param_dtype_of(spec)

    def grad_dtype_of(self, spec: ParameterSpec) -> torch.dtype:
        """The dtype of the gradient that a step reads."""
        return self.grad_dtype or self.param_dtype_of(spec)

    def has_shadow(self, spec: ParameterSpec) -> bool:
        """Whether the step keeps a rounded copy for FSDP2's gathers: see ``shardops.fsdp.plug_in``."""
        rounds = self.param_dtype_of(spec) == torch.float32 != self.compute_dtype_of(spec)
        return self.shadows and self.zero == 3 and spec.is_trainable and rounds

    def conflict(self) -> str | None:
        """Why these cannot go together; None if they can."""
        if self.gradient_release and self.world_size > 1 and self.zero < 3:
            return (
                f"gradient_release is True with zero={self.zero} on {self.world_size} ranks, where gradients are "
                "reduced after they would have been stepped by and freed: take zero=3 (FSDP2), or one rank"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        """As keyword arguments for ``plan``, of types that JSON has."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        content |= {name: dtype_name(value) for name, value in content.items() if isinstance(value, torch.dtype | None)}
        if isinstance(self.activations, Activations):
            content["activations"] = asdict(self.activations)
        return content


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from the keyword arguments of :func:`shardops.memory.plan`; those that are left out have its defaults.

    Raises:
        ValueError: a value outside its range, or options that cannot go together.
        TypeError: a value of the wrong kind.
    """
    values = dict(given)
    for name in ("param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"):
        if values.get(name) is not None:
            values[name] = parse_dtype(values[name], name)
    values["state_dtype"] = _state_dtype(values.get("state_dtype", "float32"))
    values["activations"] = _activations(values.get("activations"))
    options = Options(**values)
    for name in _FLAGS:
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name} is {getattr(options, name)!r}; it is True or False")
    if options.buffers not in (None, True, False):
        raise TypeError(f"buffers is {options.buffers!r}; it is True, False, or None for True where shapes are known")
    _check_integer("world_size", options.world_size)
    _check_integer("bucket_bytes", options.bucket_bytes)
    if isinstance(options.zero, bool) or options.zero not in STAGES:
        raise ValueError(f"zero is {options.zero!r}; it is a stage, 0 to 3: 3 is FSDP")
    if options.master not in MASTER_WEIGHTS:
        raise ValueError(f"master is {options.master!r}; it is one of {', '.join(map(repr, MASTER_WEIGHTS))}")
    check_offload(options.offload_state, options.offload_bucket_bytes)
    conflict = options.conflict()
    if conflict is not None:
        raise ValueError(conflict)
    return options


def check_against(options: Options, model: ModelSpec) -> None:
    """Raises ValueError if the model's parameters cannot be trained so."""
    if isinstance(options.activations, Activations) and model.decoder is None:
        raise ValueError(
            "activations are asked for, and the model is not known to be a decoder, whose sizes they follow from; give "
            "a config.json, or the bytes that you have measured, as activations=12_000_000_000 (--activations 12GB)"
        )
    for spec, _ in model.specs():
        if not spec.is_trainable:
            continue
        param_dtype = options.param_dtype_of(spec)
        if param_dtype == torch.float16 and options.master in BFLOAT16_ONLY:
            raise ValueError(
                f"master is {options.master!r} and parameters are float16; remainders complete, and stochastic "
                "rounding rounds to, bfloat16 only: use 'auto' or 'fp32'"
            )
        narrows = options.grad_dtype_of(spec).itemsize < param_dtype.itemsize
        if options.zero == 3 and narrows:
            raise ValueError(
                f"grad_dtype is {dtype_name(options.grad_dtype)} and parameters are {dtype_name(param_dtype)}; FSDP2 "
                "gives each gradient its parameter's dtype: leave grad_dtype out, or lower param_dtype"
            )


def _state_dtype(given: Any) -> Any:
    name = state_dtype_name(given)
    if isinstance(name, str):
        name = {"fp32": "float32", "bf16": "bfloat16"}.get(name, name)
    if name not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {given!r}; it is one of {', '.join(map(repr, STATE_DTYPES))}")
    return name


def _activations(given: Any) -> Activations | int | None:
    if isinstance(given, Mapping):
        return Activations(**given)
    if given is None or isinstance(given, Activations):
        return given
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"activations is {given!r}; it is a number of bytes, shardops.memory.Activations, or a dict of its fields"
        )
    if given < 0:
        raise ValueError(f"activations is {given}; bytes are at least 0")
    return given


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it is an integer")
    if value < 1:
        raise ValueError(f"{name} is {value}; it is at least 1")
