"""The two all-gather hooks that make FSDP2 send a parameter's shadow: plain attributes of its local tensor.

FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the local tensor of each sharded parameter. Ours
hold no reference to that tensor or its parameter: ``to_empty()`` swaps these and refuses if anyone else holds them.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import Tensor

from ...shadow import ATTRIBUTE, Shadow, shadow_of


class _Uncopied(str):
    """The name of an attribute that a deep copy of its tensor does not get.

    ``Tensor.__deepcopy__`` copies a tensor's ``__dict__``, names too. A copy may become a parameter itself, of another
    module or at another time (``load_state_dict(assign=True)``), and must not send the original's shadow.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "_shardops_not_copied"


PRE, POST, _SHADOW = map(_Uncopied, ("fsdp_pre_all_gather", "fsdp_post_all_gather", ATTRIBUTE))
# torch.save() and pickle ask a tensor for its own attributes through this name.
_STATE = "__getstate__"


class PreAllGather:
    """What is sent: the padded shadow, rounded anew first if somebody else has written the parameter.

    Every rank sends a padded shard; FSDP2 checks that on ranks with padding only, and the others would hang.
    """

    def __init__(self, shadow: Shadow, fsdp_param: Any) -> None:
        self.shadow = shadow
        self._fsdp_param = weakref.ref(fsdp_param)
        # FSDP2 asks for the signature at each all-gather of each parameter; working it out costs more than the rest.
        self.__signature__ = _SIGNATURE

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        self.shadow.refresh(self._param(module), module.training)
        return (self.shadow.padded,), None

    def _param(self, module: Any) -> Any:
        """The parameter whose local tensor has this hook: another model's by now, if that took it over."""
        fsdp_param = self._fsdp_param()
        ours = () if fsdp_param is None else (fsdp_param.sharded_param,)
        for param in (*ours, *module._parameters.values()):
            if getattr(getattr(param, "_local_tensor", None), PRE, None) is self:
                return param
        raise AssertionError(f"an all-gather hook of shardops was called for no parameter of {type(module).__name__}")

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # see _Uncopied


_SIGNATURE = inspect.Signature(list(inspect.signature(PreAllGather.__call__).parameters.values())[1:])


def post_all_gather(
    outputs: tuple[Tensor, ...], metadata: None, param_dtype: Any, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The gathered shadows are the unsharded parameter; with ``out`` given, it is a view of them already."""
    return None if out is not None else (outputs[0], ())


def _no_attributes() -> dict[str, Any]:
    """What a tensor with our attributes saves of them: it is saved as if it had none."""
    return {}


def attach(fsdp_param: Any, shadow: Shadow) -> None:
    """Hangs a shadow and the hooks that send it on a parameter's local tensor; no all-gather of it may be pending."""
    attributes = fsdp_param._sharded_local_tensor.__dict__  # setattr() would not promise to keep the names as they are
    attributes[PRE] = PreAllGather(shadow, fsdp_param)
    attributes[POST] = post_all_gather
    attributes[_SHADOW] = shadow
    attributes[_STATE] = _no_attributes
    if not hasattr(fsdp_param, "_extensions_data"):
        fsdp_param._init_extensions()  # as FSDP's lazy initialisation does, which may be over


def detach(fsdp_param: Any) -> None:
    """Takes shadow and hooks away; the next all-gather casts as torch does."""
    local = fsdp_param._sharded_local_tensor
    if shadow_of(local) is not None:
        for name in (PRE, POST, _SHADOW, _STATE):
            delattr(local, name)
