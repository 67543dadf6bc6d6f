"""FusedShardedAdam, a drop-in for torch.optim.Adam over plain and sharded parameters.

The optimizer validates options, keeps states and counts steps; ``plan.py`` makes launches of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import _registry
from ..plan import UpdatePlan
from . import attachers, checkpoint, clipping, fp32_state
from .launch import launch
from .options import check_group, check_max_grad_norm, state_dtype_name
from .tracking import Tracker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("shardops")


class FusedShardedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) in one pass over memory, with fp32 master weights for low-precision parameters.

    Takes the arguments of ``torch.optim.Adam``. Parameters are float32, bfloat16 or float16: plain tensors (alone or
    under DDP), DTensors (FSDP2, HSDP, tensor parallel, uneven and empty shards) or FSDP1's, on any devices.

    Args:
        params: parameters, named parameters, or param groups; each group may have its own options but
            ``max_grad_norm``, ``process_group`` and ``backend``.
        lr: learning rate; a float, or a tensor of one element that a scheduler writes in place. Re-read each step.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 penalty, or AdamW's decay if ``decoupled_weight_decay``.
        amsgrad: use the largest second moment so far.
        foreach, fused: accepted for drop-in use, without effect: the step is always fused.
        maximize: ascend.
        capturable: step counters live on the parameters' device, for CUDA graphs.
        differentiable: True raises: kernels update in place.
        decoupled_weight_decay: AdamW.
        master_weights: ``"auto"``: float32 parameters are their own master, bfloat16 ones are completed to an exact
            float32 by a 16-bit remainder ("split32"), float16 ones get a float32 copy ("fp32"). ``"split32"``,
            ``"fp32"``: that storage for low-precision parameters.
        state_dtype: of the moments: ``torch.float32``.
        max_grad_norm: clip the global gradient norm (as ``torch.nn.utils.clip_grad_norm_``) inside the step. ``.grad``
            stays as it is. None: no clipping. :func:`shardops.share_grad_norm` makes one norm of several optimizers'.
        process_group: for ``max_grad_norm``. Over FSDP1 parameters: the group that they are sharded over (all others
            count once); None: the default group, which is wrong for HYBRID_SHARD and NO_SHARD: FSDP1 does not tell, so
            give it there. Without any: the group whose ranks hold different parameters (pipeline stages, experts) or
            different parts of plain ones, as ``group`` of :func:`shardops.grad_norm`; None: plain parameters are whole
            on every rank, and DTensors know their own groups.
        backend: of the kernels: ``"cpp"``, ``"triton"``, ``"reference"``; None: the best available one. A name never
            falls back.

    Attributes:
        last_grad_norm: float32 device scalar, the norm that the last step clipped by (unscaled); None before.
        last_found_inf: float32 device scalar, 1 if the last step was skipped for non-finite gradients; None before.
        skipped_steps: float32 device scalar, steps skipped so far.

    Raises:
        ValueError: an option outside its range; FSDP2's unsharded parameters, as they are registered after a forward.
        TypeError: a parameter that cannot be stepped (complex, integer, float64, sparse), an option of another kind.
        RuntimeError: the named backend cannot run on a parameter's device.
    """

    # GradScaler then hands grad_scale and found_inf over instead of syncing; the kernel divides and skips.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: str = "auto",
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | None = None,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "master_weights": master_weights,
            "state_dtype": state_dtype_name(state_dtype),
        }
        check_group(defaults)
        check_max_grad_norm(max_grad_norm)
        _registry.check_backend(backend)
        if foreach is not None or fused is not None:
            logger.debug("foreach and fused have no effect: the step is one fused kernel over all parameters")
        self.max_grad_norm = max_grad_norm
        self.process_group = process_group
        self.backend = backend
        self._reset()
        super().__init__(params, defaults)
        for device in dict.fromkeys(p.device for group in self.param_groups for p in group["params"]):
            if device.type != "meta":
                _registry.resolve("sharded_adam", device.type, backend)  # a missing backend is an error now, not later
        attachers.attach(self)

    # ---- construction and copies -------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._tracker = Tracker()
        # Where an integration knows it: the group that an FSDP1 parameter is sharded over, None for a whole one.
        self._shard_group_of: clipping.GroupOf | None = None
        self._shared_norm: clipping.SharedNorm | None = None
        self.last_grad_norm: Tensor | None = None
        self.last_found_inf: Tensor | None = None
        self._skipped: Tensor | None = None

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped because gradients were not finite, as a float32 device scalar."""
        if self._skipped is None:
            params = [p for group in self.param_groups for p in group["params"] if not p.is_meta]
            if not params:  # nothing materialised yet: the device is not known
                return torch.zeros((), dtype=torch.float32, device="cpu")
            self._skipped = torch.zeros((), dtype=torch.float32, device=params[0].device)
        return self._skipped

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be copied or pickled; the copy takes the default one.
        self._tracker.follow_writes(self)
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "backend": self.backend}

    def __copy__(self) -> FusedShardedAdam:
        # A shallow copy shares groups and states, as torch's; so it shares what we know of the parameters' writers.
        copy = self.__class__.__new__(self.__class__)
        copy.__setstate__(self.__getstate__())
        copy.process_group, copy._tracker.versions = self.process_group, self._tracker.versions
        copy._shard_group_of = self._shard_group_of
        return copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "process_group" not in self.__dict__:  # a copy or an unpickled optimizer, not load_state_dict
            self.process_group = None
            self._reset()
        super().__setstate__(state)
        self._tracker.forget_plan()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch; options that it does not give are the optimizer's defaults.

        Raises:
            ValueError, TypeError: an option or a parameter that cannot be stepped; nothing is added then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group is a {type(param_group).__name__}; it is a dict with the key 'params'")
        for name in ("max_grad_norm", "process_group", "backend"):
            if name in param_group:
                raise ValueError(
                    f"a param group has {name}={param_group[name]!r}, which is one for all groups; "
                    "pass it to the optimizer's constructor"
                )
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)  # a generator is read once
        tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        check_group({**self.defaults, **param_group}, tensors)
        own = {"state_dtype": state_dtype_name(param_group["state_dtype"])} if "state_dtype" in param_group else {}
        super().add_param_group({**param_group, "params": params, **own})

    # ---- states ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def init_states(self) -> None:
        """Allocates the states of all parameters that require gradients, at step 0; otherwise the first step does."""
        self._tracker.plan(self, use_device_steps=False)

    def master_param(self, param: Tensor) -> Tensor:
        """The fp32 master weight of a parameter, exact, whatever the storage.

        Returns:
            float32 of the parameter's shape, a DTensor for a DTensor. It may be the optimizer's own tensor or the
            parameter itself: clone it before writing.

        Raises:
            ValueError: not a parameter of this optimizer.
        """
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                self._tracker.follow_writes(self)
                return fp32_state.master_of(param, self.state.get(param, {}))
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's; pass one it was built with"
        )

    def refresh_masters(self) -> None:
        """Makes the master weights, and what is kept beside fp32 parameters for gathers, what the parameters are now.

        Needed after writes that move no version counter: through ``.data``, by torch's ``_foreach`` functions on
        DTensors outside of an optimizer's step, by collectives and others' kernels (NumPy's too) on local tensors,
        and, for DTensors that are not FSDP2's, by ``torch.distributed.checkpoint.load`` into ``model.state_dict()``.
        """
        self._tracker.refresh_all(self)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss; called with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            TypeError, ValueError: a gradient that does not fit its parameter; nothing is written then.
        """
        _check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_state_initialisation():
            self.init_states()
            return loss
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Any = getattr(self, "found_inf", None)
        if isinstance(found_inf, int):  # GradScaler's sum over no gradients at all
            found_inf = torch.full_like(self.skipped_steps, found_inf)
        plan, grads, buckets = self._tracker.buckets(self, use_device_steps=found_inf is not None)
        try:
            self._tracker.refresh_masters()
            coefficient = None
            if self.max_grad_norm is not None:
                coefficient = self._clip_coefficient(plan, grad_scale)
                if found_inf is not None and self._shared_norm is not None:  # others' gradients reach us through it
                    found_inf = found_inf + (~self.last_grad_norm.isfinite()).to(found_inf)  # type: ignore[union-attr]
            for bucket in buckets:
                launch(self, bucket, coefficient, grad_scale, found_inf)
            self._tracker.record_writes(
                [entry.param for entry, grad in zip(plan.entries, grads, strict=True) if grad is not None],
                may_be_skipped=found_inf is not None,
            )
        finally:
            plan.release_grads()
        self._count_skipped(found_inf)
        return loss

    def _is_state_initialisation(self) -> bool:
        """Whether torch.distributed.checkpoint runs a step only to have states made (get_optimizer_state_dict).

        It sets zero gradients and lr 0 and calls ``step``; a real step would count as one and move the moments under
        weight decay. Values alone cannot tell it from a warm-up's first step, and ranks must agree: hence the caller.
        """
        if self.state or not all(_is_zero(group["lr"]) for group in self.param_groups):
            return False
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_code.co_name == "_init_optim_state":
                return bool(frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"))
        return False

    def _clip_coefficient(self, plan: UpdatePlan, grad_scale: Tensor | None) -> Tensor:
        """The factor for gradients, as a device scalar: ``clamp(max_grad_norm / (norm + 1e-6), max=1)`` as in torch."""
        assert self.max_grad_norm is not None
        norm = clipping.grad_norm(self, plan, is_scaled=grad_scale is not None)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device).reshape(())
        self.last_grad_norm = norm
        return torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)

    def _count_skipped(self, found_inf: Tensor | None) -> None:
        if found_inf is None:
            self.last_found_inf = torch.zeros_like(self.skipped_steps)
        else:
            self.last_found_inf = (found_inf != 0).float().reshape(())
            self._skipped = self.skipped_steps + self.last_found_inf.to(self.skipped_steps.device)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch. Under FSDP1, remainders are given as the fp32 masters they stand for (see ``checkpoint``)."""
        self._tracker.follow_writes(self)
        return checkpoint.exported(self, super().state_dict())

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch, from this optimizer or from torch.optim.Adam / AdamW; dtypes of saved states are kept.

        Options in the param groups are taken from the state dict, but ``master_weights`` and ``state_dtype`` stay this
        optimizer's: states saved in another mode are converted through fp32 at the next step.

        Raises:
            ValueError: other groups or shapes than this optimizer's; nothing is loaded then.
        """
        with checkpoint.uncast_loading(self):
            super().load_state_dict(state_dict)

    def fp32_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The model's state dict with the exact fp32 masters of the parameters that this optimizer trains.

        No collective. The keys are those of ``model.state_dict()``, tied weights under all their names.

        Args:
            model: has all of the optimizer's parameters; of several models, a ``torch.nn.ModuleList``.

        Returns:
            The masters as detached float32 copies of the parameters' shapes, DTensors of the same mesh and placements
            for DTensors. All else as ``model.state_dict()`` has it: buffers, and parameters that are frozen or another
            optimizer's.

        Raises:
            TypeError: FSDP1 modules, which have state dicts of their own.
            ValueError: parameters of this optimizer that are not in the model, or on the meta device.
        """
        return fp32_state.fp32_state_dict(self, model)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_fp32_state_dict(self, model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Sets parameters and masters from :meth:`fp32_state_dict`'s values, exactly, whatever storage they came from.

        A master becomes the value bit for bit (under ``split32`` any NaN becomes the canonical one), its parameter the
        value rounded as a step rounds it. Moments and step counters stay; states are made at step 0 where there are
        none yet. All else goes through ``model.load_state_dict``; a parameter of another optimizer is not touched where
        it has its value already, so that each of a model's optimizers can load its own.

        Args:
            model: as for :meth:`fp32_state_dict`.
            state_dict: float32, bfloat16 or float16 tensors for trained parameters. For a DTensor: a DTensor of the
                same mesh and placements, or the full tensor, the same on every rank (nothing is sent).
            strict: the keys must be the model's; False: loads those that are.

        Raises:
            TypeError: FSDP1 modules; a value that is not a tensor or not of these dtypes.
            ValueError: missing or unexpected keys, another shape or other placements, a DTensor for a plain tensor,
                parameters of this optimizer that are not in the model, or on the meta device. Nothing is written when
                it raises.
        """
        fp32_state.load_fp32_state_dict(self, model, state_dict, strict)


def _check_graph_capture(optimizer: Any) -> None:
    """Runs torch's own check that a captured step is capturable, under the name it has in this version."""
    renamed = getattr(optimizer, "_accelerator_graph_capture_health_check", None)
    (renamed or optimizer._cuda_graph_capture_health_check)()


def _is_zero(lr: float | Tensor) -> bool:
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.device.type == "cpu" else False
