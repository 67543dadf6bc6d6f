"""FusedShardedAdam and FusedShardedAdamW, drop-ins for torch.optim.Adam and AdamW over plain and sharded parameters.

The optimizer validates options, keeps states and counts steps; ``plan.py`` makes launches of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..collectives import sharded_norm
from ..ops import _registry
from ..plan import Bucket, Entry, UpdatePlan
from . import checkpoint
from .options import check_group, check_max_grad_norm, state_dtype_name
from .state import (
    StepCounters,
    create_state,
    fp32_copy,
    join_master,
    master_key,
    master_storage,
    refresh_master,
)

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
            stays as it is. None: no clipping.
        process_group: the group that FSDP1 shards over, for ``max_grad_norm``; None: the default group for FSDP1
            parameters. DTensors know their own. Other parameters are taken to be whole on every rank.
        backend: of the kernels: ``"cpp"``, ``"triton"``, ``"reference"``; None: the best available one. A name never
            falls back.

    Attributes:
        last_grad_norm: float32 device scalar, the norm that the last step clipped by (unscaled); None before.
        last_found_inf: float32 device scalar, 1 if the last step was skipped for non-finite gradients; None before.
        skipped_steps: float32 device scalar, steps skipped so far.

    Raises:
        ValueError: an option outside its range.
        TypeError: a parameter that cannot be stepped (complex, integer, float64, sparse).
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
        self._reset_plan()
        super().__init__(params, defaults)
        for device in dict.fromkeys(p.device for group in self.param_groups for p in group["params"]):
            if not device.type == "meta":
                _registry.resolve("sharded_adam", device.type, backend)  # a missing backend is an error now, not later

    # ---- construction and copies -------------------------------------------------------------------------------------

    def _reset_plan(self) -> None:
        self._counters = StepCounters()
        self._plan: UpdatePlan | None = None
        self._state_dicts: list[Any] = []
        self._versions: dict[int, tuple[int, int]] = {}  # position of a parameter -> its versions after our last write
        self.last_grad_norm: Tensor | None = None
        self.last_found_inf: Tensor | None = None
        self._skipped: Tensor | None = None

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped because gradients were not finite, as a float32 device scalar."""
        if self._skipped is None:
            device = next((p.device for group in self.param_groups for p in group["params"]), None)
            self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        return self._skipped

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be copied or pickled; the copy takes the default one.
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "process_group" not in self.__dict__:  # a copy or an unpickled optimizer, not load_state_dict
            self.process_group = None
            self._reset_plan()
        super().__setstate__(state)
        self._plan = None
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch; options that it does not give are the optimizer's defaults.

        Raises:
            ValueError, TypeError: an option or a parameter that cannot be stepped; nothing is added then.
        """
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
        """Allocates the states of all parameters that require gradients, at step 0. The first step does it otherwise."""
        self._current_plan(use_device_steps=False)

    def _current_plan(self, use_device_steps: bool) -> UpdatePlan:
        """The plan over all parameters with states, made anew if a parameter or state was added or replaced."""
        params = [(i, p) for i, group in enumerate(self.param_groups) for p in group["params"]]
        if self._plan is not None and self._is_current(params, use_device_steps):
            return self._plan
        homes = []
        kept = []
        for position, (group_index, param) in enumerate(params):
            group = self.param_groups[group_index]
            if param.is_meta or not (param.requires_grad or param.grad is not None or param in self.state):
                continue
            if not self.state[param]:
                self.state[param].update(create_state(param, group))
                self._versions[position] = _versions(param)
            else:
                checkpoint.complete_state(param, self.state[param], group)
            on_device = group["capturable"] or use_device_steps
            homes.append((self.state[param], param.device if on_device else torch.device("cpu")))
            kept.append((group_index, param, position))
        self._counters.bind(homes)
        entries = []
        for (group_index, param, position), (state, home) in zip(kept, homes, strict=True):
            storage = master_storage(param, self.param_groups[group_index])
            entries.append(
                Entry(
                    param=param,
                    group_index=group_index,
                    state=state,
                    master_key=master_key(storage),
                    steps=self._counters.buffers[home],
                    step_position=self._counters.position(state["step"]),
                )
            )
        self._plan = UpdatePlan(entries)
        self._plan_params = params
        self._plan_positions = [position for *_, position in kept]
        self._plan_tensors = [dict(entry.state) for entry in entries]
        self._state_dicts = list(self.state.values())
        self._device_steps = use_device_steps
        return self._plan

    def _is_current(self, params: list[tuple[int, Tensor]], use_device_steps: bool) -> bool:
        assert self._plan is not None
        if len(params) != len(self._plan_params) or use_device_steps != self._device_steps:
            return False
        if not all(p is q and i == j for (i, p), (j, q) in zip(params, self._plan_params, strict=True)):
            return False
        if len(self.state) != len(self._state_dicts) or not all(map(is_, self.state.values(), self._state_dicts)):
            return False
        for entry, tensors in zip(self._plan.entries, self._plan_tensors, strict=True):
            if len(entry.state) != len(tensors) or not all(map(is_, entry.state.values(), tensors.values())):
                return False
        return True

    def _refresh_masters(self, plan: UpdatePlan) -> None:
        """Masters of parameters that somebody else wrote since our last step follow the parameter.

        A parameter without a recorded version was just loaded together with its state: the two belong together.
        """
        for entry, position in zip(plan.entries, self._plan_positions, strict=True):
            if entry.master_key is None:
                continue
            written = self._versions.get(position)
            if written is not None and written != _versions(entry.param):
                refresh_master(entry.param, entry.state)

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
                state = self.state.get(param, {})
                if param.dtype == torch.float32:
                    return param.detach()
                if "master_param" in state:
                    master: Tensor = state["master_param"]
                    return master
                return join_master(param, state["remainder"]) if "remainder" in state else fp32_copy(param)
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's; pass one it was built with"
        )

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[misc]
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
        self._cuda_graph_capture_health_check()  # type: ignore[attr-defined]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_state_initialisation():
            self.init_states()
            return loss
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        plan = self._current_plan(use_device_steps=found_inf is not None)
        grads = [entry.param.grad for entry in plan.entries]
        buckets = plan.refresh(grads)
        self._refresh_masters(plan)
        coefficient = None
        if self.max_grad_norm is not None:
            coefficient = self._clip_coefficient(plan, grads, grad_scale)
        for bucket in buckets:
            self._launch(bucket, coefficient, grad_scale, found_inf)
        self._record(plan, grads, found_inf)
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

    def _clip_coefficient(
        self, plan: UpdatePlan, grads: list[Tensor | None], grad_scale: Tensor | None
    ) -> Tensor:
        """The factor for gradients, as a device scalar: ``clamp(max_grad_norm / (norm + 1e-6), max=1)`` as in torch."""
        assert self.max_grad_norm is not None
        sources = [(entry.param, grad) for entry, grad in zip(plan.entries, grads, strict=True)]
        device = sources[0][0].device if sources else torch.device("cpu")
        norm = sharded_norm(sources, device, group=checkpoint.plain_group(self), backend=self.backend)
        if grad_scale is not None:
            norm = norm / grad_scale.to(device).reshape(())
        self.last_grad_norm = norm
        return torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)

    def _launch(
        self, bucket: Bucket, coefficient: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        group = self.param_groups[bucket.group_index]
        lr = group["lr"]
        lr_tensor = None
        if isinstance(lr, Tensor):
            if lr.device.type == "cpu":
                lr = float(lr)
            else:
                lr, lr_tensor = 0.0, _beside(lr, bucket)
        beta1, beta2 = group["betas"]
        scalars = [_beside(scalar, bucket) for scalar in (coefficient, grad_scale, found_inf)]
        if bucket.regular:
            kernel = _registry.resolve("sharded_adam", bucket.device.type, self.backend)
            kernel(
                bucket.params,
                bucket.grads,
                bucket.exp_avgs,
                bucket.exp_avg_sqs,
                bucket.max_exp_avg_sqs,
                bucket.masters,
                bucket.shadows,
                bucket.steps,
                bucket.step_index,
                lr,
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                group["decoupled_weight_decay"],
                group["maximize"],
                lr_tensor,
                *scalars,
            )
            return
        # Strided parameters or gradients: the op orders them first.
        clip_coef, grad_scale, found_inf = scalars
        ops.sharded_adam(
            bucket.params,
            bucket.grads,
            bucket.exp_avgs,
            bucket.exp_avg_sqs,
            bucket.steps,
            lr=lr if lr_tensor is None else lr_tensor,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            max_exp_avg_sqs=bucket.max_exp_avg_sqs,
            masters=bucket.masters,
            shadows=bucket.shadows,
            step_index=bucket.step_index,
            clip_coef=clip_coef,
            grad_scale=grad_scale,
            found_inf=found_inf,
            backend=self.backend,
        )

    def _record(self, plan: UpdatePlan, grads: list[Tensor | None], found_inf: Tensor | None) -> None:
        updated = [entry.param for entry, grad in zip(plan.entries, grads, strict=True) if grad is not None]
        # Kernels write behind autograd's back; this makes "modified by an inplace operation" errors work, and our own
        # detection of other writers.
        torch.autograd.graph.increment_version(updated)
        for entry, position in zip(plan.entries, self._plan_positions, strict=True):
            if entry.master_key is not None:
                self._versions[position] = _versions(entry.param)
        if found_inf is None:
            if self.last_found_inf is None or self._skipped is not None:
                self.last_found_inf = torch.zeros_like(self.skipped_steps)
        else:
            self.last_found_inf = (found_inf != 0).float().reshape(())
            self._skipped = self.skipped_steps + self.last_found_inf.to(self.skipped_steps.device)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch. Under FSDP1, remainders are given as the fp32 masters they stand for (see ``checkpoint``)."""
        return checkpoint.exported(self, super().state_dict())

    @torch._disable_dynamo  # type: ignore[misc]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch, from this optimizer or from torch.optim.Adam / AdamW; dtypes of saved states are kept.

        Options in the param groups are taken from the state dict, but ``master_weights`` and ``state_dtype`` stay this
        optimizer's: states saved in another mode are converted through fp32 at the next step.

        Raises:
            ValueError: other groups or shapes than this optimizer's; nothing is loaded then.
        """
        with checkpoint.uncast_loading(self):
            super().load_state_dict(state_dict)


class FusedShardedAdamW(FusedShardedAdam):
    """AdamW (Loshchilov & Hutter 2019): :class:`FusedShardedAdam` with decoupled weight decay, 1e-2 unless given."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("decoupled_weight_decay", True)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _versions(param: Tensor) -> tuple[int, int]:
    """Counts of in-place writes: an operation on a DTensor moves its own count, not its local tensor's."""
    return param._version, getattr(param, "_local_tensor", param)._version


def _is_zero(lr: float | Tensor) -> bool:
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.device.type == "cpu" else False


def _beside(scalar: Tensor | None, bucket: Bucket) -> Tensor | None:
    """A scalar on the bucket's device, without a sync."""
    return None if scalar is None else scalar.to(bucket.device, non_blocking=True)
