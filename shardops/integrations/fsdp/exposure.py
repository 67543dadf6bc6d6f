"""State dicts expose parameters: what ``model.state_dict()`` returns shares their memory, not their version counters.

``torch.distributed.checkpoint.load(model.state_dict())`` fills it in place, at once or after more training, and the
parameters' counters do not tell. So shadows follow the counters of what was returned, and the optimizer compares
fingerprints before it uses masters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...optim import FusedShardedAdam
from ...shadow import shadow_of
from .torch_fsdp import Owner


class Exposures:
    """Hooks on the modules that parameters are registered on, called whenever their state dict is made.

    They go with this object, which goes with its optimizer.
    """

    def __init__(self, optimizer: FusedShardedAdam) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDPParams
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)

    def follow(self, owners: Sequence[Owner]) -> None:
        """Hooks those that are not hooked yet."""
        for owner in owners:
            if owner.fsdp_param not in self._followed:
                self._followed.add(owner.fsdp_param)
                self._hook(owner.fsdp_param)

    def _hook(self, fsdp_param: Any) -> None:
        info = fsdp_param._module_info
        homes = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
        for module, name in homes:
            hook = _exposed(name, weakref.ref(fsdp_param), self._optimizer)
            self._handles.append(module.register_state_dict_post_hook(hook))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _exposed(name: str, found: weakref.ref[Any], optimizers: weakref.ref[FusedShardedAdam]) -> Callable[..., None]:
    def exposed(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        fsdp_param, optimizer = found(), optimizers()
        if fsdp_param is None:
            return
        local = fsdp_param._sharded_local_tensor
        shadow = shadow_of(local)
        alias = getattr(state_dict.get(prefix + name), "_local_tensor", None)
        if shadow is not None:
            if alias is None:
                shadow.written = None
            elif alias is not local:  # as with keep_vars=True
                shadow.follow(alias)
        if optimizer is not None:
            optimizer._tracker.expose([fsdp_param.sharded_param])
            if alias is not None and alias is not local:
                optimizer._tracker.follow(fsdp_param.sharded_param, alias)

    return exposed
