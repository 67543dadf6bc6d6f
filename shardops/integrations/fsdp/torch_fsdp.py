"""What the plug-in reads of torch's FSDP2: which FSDPParam owns a sharded parameter, and in which group.

Glossary, in torch's words (``torch/distributed/fsdp/_fully_shard/``): an ``FSDPState`` belongs to a module that was
given to ``fully_shard``; its ``FSDPParamGroup`` is gathered in one collective; an ``FSDPParam`` holds the sharded
parameter (a DTensor), its local tensor, and the padded shard that is sent. All private; alike in torch 2.11 to 2.14.

Nothing here imports torch's FSDP unless it is loaded already: before that there is nothing to look at.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
GATHERED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Owner:
    """The FSDPParam of one parameter, and the FSDPParamGroup and FSDPState that it belongs to."""

    fsdp_param: Any
    group: Any
    state: Any

    @property
    def param(self) -> Any:
        """The sharded parameter, whatever is registered on the module just now."""
        return self.fsdp_param.sharded_param

    @property
    def local(self) -> Tensor:
        """Its local tensor, ND."""
        local: Tensor = self.fsdp_param._sharded_local_tensor
        return local

    @property
    def label(self) -> str:
        """The parameter's name from the root, or from its own module before FSDP has worked that out."""
        info = self.fsdp_param._module_info
        return self.fsdp_param._param_fqn or f"{type(info.module).__name__}.{info.param_name}"


def is_loaded() -> bool:
    """Whether anyone has imported FSDP2."""
    return _FULLY_SHARD in sys.modules


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of an FSDPState; torch before 2.13 has one at most, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _states(model: nn.Module | None) -> list[Any]:
    from torch.distributed._composable_state import _get_module_state, _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if model is None:
        references = list(_module_state_mapping.values())
        found = [reference() if callable(reference) else reference for reference in references]
    else:
        found = [_get_module_state(module) for module in model.modules()]
    # One state may stand for several modules: fully_shard([a, b]).
    return list({id(state): state for state in found if isinstance(state, FSDPState)}.values())


def owners(model: nn.Module | None = None) -> Iterator[Owner]:
    """All FSDPParams of a model, or of every model in this process."""
    if not is_loaded():
        return
    for state in _states(model):
        for group in groups_of(state):
            for fsdp_param in group.fsdp_params:
                yield Owner(fsdp_param, group, state)


# Id of a sharded parameter -> its owner, by weak references, and the owner's place among all; as of the last walk.
_known: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[Any], int]] = {}


def _walk() -> None:
    _known.clear()
    for place, owner in enumerate(owners()):
        _known[id(owner.param)] = (*map(weakref.ref, (owner.fsdp_param, owner.group, owner.state)), place)  # type: ignore[assignment]


def _owner_of(param: Any) -> tuple[Owner, int] | None:
    known = _known.get(id(param))
    if known is None:
        return None
    fsdp_param, group, state = (reference() for reference in known[:3])
    if fsdp_param is None or group is None or state is None or fsdp_param.sharded_param is not param:
        return None
    return Owner(fsdp_param, group, state), known[3]


def groups_with(params: Iterable[Any]) -> list[list[Owner]]:
    """The FSDP groups that hold some of these parameters, each with all its members, in the order of their gathers.

    Modules are walked only where a DTensor is not known from before: a program may have an optimizer a parameter.
    """
    found: dict[int, tuple[int, Owner]] = {}
    is_walked = not is_loaded()
    for param in params:
        owner = _owner_of(param)
        if owner is None and not is_walked and hasattr(param, "_local_tensor"):
            _walk()
            is_walked = True
            owner = _owner_of(param)
        if owner is not None:
            place = min(owner[1], found.get(id(owner[0].group), owner[::-1])[0])
            found[id(owner[0].group)] = (place, owner[0])
    return [
        [Owner(fsdp_param, owner.group, owner.state) for fsdp_param in owner.group.fsdp_params]
        for _, owner in sorted(found.values(), key=lambda item: item[0])
    ]


def why_stock(owner: Owner) -> str | None:
    """Why the parameter's all-gathers must stay as torch makes them; None if they can send a shadow."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    fsdp_param, local = owner.fsdp_param, owner.local
    dtype = fsdp_param.mp_policy.param_dtype
    if local.is_meta:
        return "on the meta device: looked at again at the next step"
    if fsdp_param.offload_to_cpu:
        return "CPU offload: torch sends a copy of the shard, which carries no hooks"
    if is_foreign(local):
        return f"{type(local).__name__} brings an all-gather hook of its own"
    if local.dtype != torch.float32:
        return f"{name_of(local.dtype)}: no cast is to be saved"
    if dtype is None or dtype == torch.float32:
        return "computes in float32: nothing is cast"
    if dtype not in GATHERED_DTYPES:
        return f"computes in {name_of(dtype)}; shadows are bfloat16 or float16"
    if not isinstance(fsdp_param.mesh_info, FSDPMeshInfo):
        return "replicated, not sharded: nothing is gathered"
    if fsdp_param.fsdp_placement.dim != 0:
        return f"sharded on dim {fsdp_param.fsdp_placement.dim}: shadows are padded on dim 0"
    if uses_post_forward_mesh(owner.group):
        return (
            "reshard_after_forward is an int: torch raises NotImplementedError for parameters with all-gather hooks; "
            "True and False work"
        )
    return None


def is_foreign(local: Tensor) -> bool:
    """Whether the local tensor is of a subclass, or has an all-gather hook that is not ours."""
    from .hooks import PreAllGather

    hook = getattr(local, "fsdp_pre_all_gather", None)
    return type(local) is not Tensor or not (hook is None or isinstance(hook, PreAllGather))


def uses_post_forward_mesh(group: Any) -> bool:
    """Whether the group is resharded to a smaller world after the forward (``reshard_after_forward`` an int)."""
    return bool(group._use_post_forward_mesh)


def is_gather_pending(group: Any) -> bool:
    """Whether an all-gather was issued whose copy-out has not run; hooks must be there for both or for neither."""
    return group._all_gather_result is not None


def name_of(dtype: torch.dtype) -> str:
    """A dtype as people write it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
