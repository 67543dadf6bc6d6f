"""FusedShardedAdam, a drop-in for torch.optim.Adam over plain and sharded parameters.

The optimizer validates options, keeps states and counts steps; ``plan.py`` makes launches of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import _registry
from . import attachers, checkpoint, clipping, fp32_state, graphs, masters
from .launch import check_graph_capture, launch_all
from .offload import BUCKET_BYTES, StateOffload
from .options import check_group, check_max_grad_norm, check_offload, check_seed, state_dtype_name
from .tracking import Tracker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .release import GradientRelease

logger = logging.getLogger("shardops")
# Options that are one for all groups.
_OWN = ("seed", "offload_state", "offload_bucket_bytes", "backend")


class FusedShardedAdam(graphs.GraphCapture, torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) in one pass over memory, with fp32 master weights for low-precision parameters.

    Takes the arguments of ``torch.optim.Adam``. Parameters are float32, bfloat16 or float16: plain tensors (alone or
    under DDP), DTensors (FSDP2, HSDP, tensor parallel, uneven and empty shards) or FSDP1's, on any devices.

    Args:
        params: parameters, named parameters, or param groups; each group may have its own options but
            ``max_grad_norm``, ``process_group``, ``seed``, ``offload_state``, ``offload_bucket_bytes`` and ``backend``.
        lr: learning rate; a float, or a tensor of one element that a scheduler writes in place. Re-read each step.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: L2 penalty, or AdamW's decay if ``decoupled_weight_decay``.
        amsgrad: use the largest second moment so far.
        foreach, fused: accepted for drop-in use, without effect: the step is always fused.
        maximize: ascend.
        capturable: step counters live on the parameters' device, so that a CUDA graph can hold the step. States are
            made before the capture: by a warm-up step, or ``prepare_capture()``. The graph holds addresses: replays
            do not see what is replaced after it (states by ``load_state_dict``, parameters by casts, a cleared
            ``.grad`` unless backward is in the same graph: ``zero_grad(set_to_none=False)`` keeps it);
            ``check_captured()`` finds that. Options are part of the graph, a number as ``lr`` too; an ``lr`` tensor
            on the GPU is read at each replay. What the attributes below are after the capture, replays write.
        differentiable: True raises: kernels update in place.
        decoupled_weight_decay: AdamW.
        master_weights: of low-precision parameters; float32 ones are their own. ``"split32"``: a 16-bit remainder
            completes a bfloat16 parameter to an exact float32. ``"split24"``: an 8-bit one to its upper 24 bits, the
            last of them dithered. ``"fp32"``: a float32 copy. ``"stochastic"``: no master; the bfloat16 parameter is
            rounded stochastically. ``"none"``: no master; rounded to nearest, so that small updates are lost.
            ``"auto"``: "split32" for bfloat16, "fp32" for float16.
        state_dtype: of the moments: ``torch.float32``; ``torch.bfloat16``, dithered; or ``"int8"``: two bytes and a
            sixteenth for both, in blocks of 128 within a row. Under "int8", parameters of less than 4,096 elements or
            with rows shorter than 128 keep float32 moments, and a step with gradients that are not finite, or whose
            squares may not be (a norm, once clipped, above 1.8e19), is skipped and counted: the norm is computed for
            that, with or without clipping. See docs/precision.md.
        max_grad_norm: clip the global gradient norm (as ``torch.nn.utils.clip_grad_norm_``) inside the step. ``.grad``
            stays as it is. None: no clipping. :func:`shardops.share_grad_norm` makes one norm of several optimizers'.
        process_group: for ``max_grad_norm``. Over FSDP1 parameters: the group that they are sharded over (all others
            count once); None: the default group, which is wrong for HYBRID_SHARD and NO_SHARD: FSDP1 does not tell, so
            give it there. Without any: the group whose ranks hold different parameters (pipeline stages, experts) or
            different parts of plain ones, as ``group`` of :func:`shardops.grad_norm`; None: plain parameters are whole
            on every rank, and DTensors know their own groups.
        seed: of the dither, together with a parameter's index in the optimizer. What a state was begun with is saved
            with it.
        offload_state: ``"cpu"``: states of parameters on a GPU are in pinned host memory, and streamed through the step
            by ``offload_bucket_bytes`` of its memory. Not in CUDA graphs. Synchronise before reading ``state`` itself.
        backend: of the kernels: ``"cpp"``, ``"triton"``, ``"reference"``; None: the best available one. A name never
            falls back.

    Attributes:
        last_grad_norm: float32 device scalar, the norm (unscaled) that the last step clipped by, or under "int8" looked
            at; None before.
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
        state_dtype: torch.dtype | str = torch.float32,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | None = None,
        seed: int = 0,
        offload_state: str | None = None,
        offload_bucket_bytes: int = BUCKET_BYTES,
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
        check_seed(seed)
        check_offload(offload_state, offload_bucket_bytes)
        _registry.check_backend(backend)
        if foreach is not None or fused is not None:
            logger.debug("foreach and fused have no effect: the step is one fused kernel over all parameters")
        self.max_grad_norm = max_grad_norm
        self.process_group = process_group
        self.seed = int(seed)
        self.offload_state, self.offload_bucket_bytes = offload_state, int(offload_bucket_bytes)
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
        self._release: GradientRelease | None = None  # steps the parameters in backward
        self._offload = StateOffload(self.offload_bucket_bytes) if self.offload_state == "cpu" else None
        self.last_grad_norm: Tensor | None = None
        self.last_found_inf: Tensor | None = None
        self._skipped: Tensor | None = None
        self._captured: graphs.CapturedStep | None = None

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped because gradients were not finite, as a float32 device scalar."""
        return self._skip_count().clone()

    def _skip_count(self) -> Tensor:
        if self._skipped is None:
            params = [p for group in self.param_groups for p in group["params"] if not p.is_meta]
            if not params:  # nothing materialised yet: the device is not known
                return torch.zeros((), dtype=torch.float32, device="cpu")
            self._skipped = torch.zeros((), dtype=torch.float32, device=params[0].device)
        return self._skipped

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be copied or pickled; the copy takes the default one.
        self._tracker.follow_writes(self)
        own = {name: getattr(self, name) for name in ("max_grad_norm", *_OWN)}
        return {**super().__getstate__(), **own}

    def __copy__(self) -> FusedShardedAdam:
        # A shallow copy shares groups and states, as torch's; so it shares what we know of the parameters' writers.
        copy = self.__class__.__new__(self.__class__)
        copy.__setstate__(self.__getstate__())
        copy.process_group, copy._tracker.versions = self.process_group, self._tracker.versions
        copy._shard_group_of, copy._offload = self._shard_group_of, self._offload
        return copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "process_group" not in self.__dict__:  # a copy or an unpickled optimizer, not load_state_dict
            self.process_group = None
            self.seed = state.get("seed", 0)
            self.offload_state = state.get("offload_state")
            self.offload_bucket_bytes = state.get("offload_bucket_bytes", BUCKET_BYTES)
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
        for name in ("max_grad_norm", "process_group", *_OWN):
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
        self._tracker.plan(self, graphs.uses_device_steps(self, may_be_skipped=False))

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
                return masters.master_of(param, self.state.get(param, {}))
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
            RuntimeError: the step is captured in a CUDA graph and not capturable, or not prepared.
        """
        check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if checkpoint.is_state_initialisation(self):
            self.init_states()
            return loss
        if self._release is not None:
            self._release.close()
            return loss
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Any = getattr(self, "found_inf", None)
        # In codes one value that is not finite would spoil its whole block.
        is_guarded = any(group["state_dtype"] == "int8" for group in self.param_groups)
        may_be_skipped = found_inf is not None or is_guarded
        is_captured = graphs.is_capturing()
        if is_captured:
            graphs.check_ready(self)
        if isinstance(found_inf, int):  # GradScaler's sum over no gradients at all
            found_inf = torch.full_like(self._skip_count(), found_inf)
        plan, grads, buckets = self._tracker.buckets(self, graphs.uses_device_steps(self, may_be_skipped))
        try:
            self._tracker.refresh_masters()
            coefficient = None
            if self.max_grad_norm is not None or is_guarded:
                coefficient, found_inf = clipping.clip(self, plan, grad_scale, found_inf, is_guarded)
            launch_all(self, buckets, coefficient, grad_scale, found_inf)
            self._tracker.record_writes(plan.updated(grads), may_be_skipped=may_be_skipped)
            graphs.after_step(self, plan, grads, is_captured)
        finally:
            plan.release_grads()
        self._count_skipped(found_inf)
        return loss

    def _count_skipped(self, found_inf: Tensor | None) -> None:
        if found_inf is None:
            self.last_found_inf = torch.zeros_like(self._skip_count())
        else:
            self.last_found_inf = (found_inf != 0).float().reshape(())
            count = self._skip_count()  # in place: replays of a captured step count there
            count += self.last_found_inf.to(count.device)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, precision: str = "stored") -> dict[str, Any]:
        """As torch.

        Args:
            precision: ``"stored"``: states as they are stored, bit for bit, sharded along dim 0 or not; 8-bit codes of
                parameters sharded otherwise (tensor parallel on another dim, FSDP1) as float32 moments, and FSDP1's
                remainders as float32 masters. ``"float32"``: moments in float32, for torch.optim.AdamW and others, and
                ``master_param`` in place of remainders.

        Raises:
            ValueError: another precision.
        """
        if precision not in checkpoint.PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it is 'stored' or 'float32'")
        self._tracker.follow_writes(self)
        return checkpoint.exported(self, super().state_dict(), precision)

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
