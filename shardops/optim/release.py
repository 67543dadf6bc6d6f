"""Gradient release: parameters are stepped in backward, each as soon as its gradient is there, which is then freed.

Deliveries (``deliveries.py``) say when that is. Here the gradients are clipped, stepped by through the same plan and
launches as an ordinary step's, and let go of.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import NormLayout, shard_groups
from ..plan import Bucket, StalePlanError, UpdatePlan
from ..reductions import found_on_any_rank
from . import attachers, clipping
from .deliveries import Delivery, release_of
from .launch import launch_all
from .running_norm import RunningNorm
from .tracking import Part


class GradientRelease:
    """What :func:`shardops.enable_gradient_release` returns: a handle, and a context manager that ends with ``remove``.

    Attributes:
        clip_grad_value: as given.
        max_grad_norm: as given.

    Args:
        optimizer: whose parameters are stepped.
        deliver: makes the deliveries of parameters.
        confirm: called once more before the first parameter is stepped; raises if none may be.
        clip_grad_value: as :func:`shardops.enable_gradient_release`.
        max_grad_norm: likewise.
    """

    def __init__(
        self,
        optimizer: Any,
        deliver: Callable[[GradientRelease, list[Tensor]], list[Delivery]],
        confirm: Callable[[], None],
        clip_grad_value: float | None,
        max_grad_norm: float | None,
    ) -> None:
        self.clip_grad_value = clip_grad_value
        self.max_grad_norm = max_grad_norm
        self._optimizer = weakref.ref(optimizer)
        self._deliver = deliver
        self._confirm: Callable[[], None] | None = confirm
        self._deliveries: list[Delivery] = []
        self._delivered: set[int] = set()  # ids of the parameters that were given to _deliver
        self._lock = threading.RLock()  # autograd has a thread for each device
        # Of the iteration under way: its learning rates (None: none is), who was stepped, and where values were bad.
        self._rates: list[Any] | None = None
        self._stepped: set[int] = set()
        self._found: Tensor | None = None
        # Made of the plan: parts by id of their delivery, with the groups that decide on skipping.
        self._plan: UpdatePlan | None = None
        self._parts: dict[int, tuple[Part, list[Any]]] = {}
        self._norm: RunningNorm | None = None
        self._norm_group: Any = None
        self._is_looked_at = False  # whether integrations have had their second look; see _look_again
        # The norm of the last iteration, the last one that can be clipped by, and the coefficient from that.
        self._last_norm: Tensor | None = None
        self._usable_norm: Tensor | None = None
        self._coefficient: Tensor | None = None
        _refuse(optimizer)
        self._new_params(optimizer)
        attachers.attach(optimizer)  # outside of backward, as the making of states
        with torch.no_grad():
            self._follow_plan(optimizer)

    # ---- the handle --------------------------------------------------------------------------------------------------

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last iteration, float32 device scalar; None before, or without max_grad_norm.

        The next iteration is clipped by it. It is in no state dict: to go on from a checkpoint as if there had been no
        break, save it and set it again.
        """
        return self._last_norm

    @last_grad_norm.setter
    def last_grad_norm(self, norm: Tensor | float) -> None:
        if self.max_grad_norm is None:
            raise ValueError("without max_grad_norm nothing is clipped by a norm; give it to enable_gradient_release")
        optimizer = self._optimizer()
        assert optimizer is not None
        device = optimizer.skipped_steps.device
        self._last_norm = torch.as_tensor(norm, dtype=torch.float32, device=device).detach().reshape(()).clone()
        self._take_norm(self._last_norm)

    def remove(self) -> None:
        """Gives backward and the optimizer's ``step`` back as they were. What was stepped stays stepped."""
        for delivery in self._deliveries:
            delivery.remove()
        self._deliveries, self._delivered = [], set()
        self._plan, self._parts, self._norm = None, {}, None
        self._rates, self._stepped, self._found = None, set(), None
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._release is self:
            optimizer._release = None

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _new_params(self, optimizer: Any) -> list[Tensor]:
        """The optimizer's parameters that no delivery was made for yet.

        Raises:
            ValueError: another optimizer steps one in backward.
        """
        params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        new = [param for key, param in params.items() if key not in self._delivered]
        for param in new:
            if release_of(param) not in (None, self):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is stepped in backward by another optimizer already; "
                    "call remove() on that one's handle first"
                )
        return new

    def _hang(self, optimizer: Any) -> None:
        """Puts hooks on all parameters that lack theirs."""
        new = self._new_params(optimizer)
        if new:
            self._deliveries += self._deliver(self, new)
            self._delivered.update(map(id, new))
        for delivery in self._deliveries:
            delivery.ensure()

    # ---- in backward -------------------------------------------------------------------------------------------------

    def check_unstepped(self, params: Iterable[Any]) -> None:
        """Raises RuntimeError if one of them was stepped in this iteration."""
        for param in params:
            if id(param) in self._stepped:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} got a second gradient before optimizer.step(), and was "
                    "stepped by the first one already: gradients cannot be accumulated under gradient release (several "
                    "backward calls, a weight used in several regions of reentrant checkpointing). Call "
                    "optimizer.step() after each backward, make one larger batch of the small ones, or call remove() "
                    "on the handle of enable_gradient_release. This gradient changed nothing"
                )

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step_by(self, params: Sequence[Any], delivery: Delivery | None = None) -> None:
        """Steps parameters by the gradients that they have, and clears these.

        Args:
            params: with gradients.
            delivery: they are some of its parameters; None: of no one's.

        Raises:
            RuntimeError: one was stepped in this iteration.
            TypeError, ValueError: a gradient that does not fit its parameter. None of them is stepped when it raises.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            self.check_unstepped(params)
            if self._rates is None:
                self._begin(optimizer)
            part, groups, buckets = self._refreshed(optimizer, params, delivery)
            try:
                for param in self._step(optimizer, part, groups, buckets) if buckets else ():
                    param.grad = None
            finally:
                part.plan.release_grads()

    def _begin(self, optimizer: Any) -> None:
        _refuse(optimizer)
        self._follow_plan(optimizer)
        if self._confirm is not None:
            self._confirm()
            self._confirm = None
        for delivery in self._deliveries:
            delivery.check()
        self._rates = _rates(optimizer)

    def _follow_plan(self, optimizer: Any) -> None:
        """Makes anew what was made of another plan than the optimizer's."""
        tracker = optimizer._tracker
        plan = tracker.plan(optimizer, use_device_steps=_skips(optimizer))
        if plan.is_stale():
            tracker.forget_plan()
            plan = tracker.plan(optimizer, use_device_steps=_skips(optimizer))
        needs_norm = self.max_grad_norm is not None or _skips(optimizer)
        if plan is not self._plan or (needs_norm and self._norm is None) or self._norm_group != optimizer.process_group:
            params = [entry.param for entry in plan.entries]
            before, self._norm = self._norm, None
            if needs_norm:
                layout = NormLayout(params, *clipping.norm_groups(optimizer))
                self._norm = RunningNorm(layout, optimizer.backend)
            if before is not None and self._norm is not None and self._plan is not None:
                places = {id(param): index for index, param in enumerate(params)}
                now = {i: places.get(id(entry.param), -1) for i, entry in enumerate(self._plan.entries)}
                self._norm.take_over(before, now)
            self._norm_group = optimizer.process_group
            self._plan, self._parts = plan, {}
            self._hang(optimizer)

    def _refreshed(
        self, optimizer: Any, params: Sequence[Any], delivery: Delivery | None
    ) -> tuple[Part, list[Any], list[Bucket]]:
        """What to step: a part of the plan, with the groups that decide on skipping it, and its buckets."""
        wanted = set(map(id, params))
        for attempt in range(3):
            known = None if delivery is None else self._parts.get(id(delivery))
            if known is None:
                part = optimizer._tracker.part(params if delivery is None else delivery.params)
                known = part, shard_groups([entry.param for entry in part.plan.entries]) if _skips(optimizer) else []
                if delivery is not None:
                    self._parts[id(delivery)] = known
            part, groups = known
            grads = [entry.param.grad if id(entry.param) in wanted else None for entry in part.plan.entries]
            is_planned = wanted <= {id(entry.param) for entry in part.plan.entries}
            try:
                if is_planned or attempt > 0:  # else unfrozen in the midst of an iteration
                    return part, groups, part.plan.refresh(grads)
            except StalePlanError:
                optimizer._tracker.forget_plan()
            self._parts.pop(id(delivery), None)
            self._follow_plan(optimizer)
        raise AssertionError("parameters are cast or moved while their backward runs")

    def _step(self, optimizer: Any, part: Part, groups: list[Any], buckets: list[Bucket]) -> list[Tensor]:
        """Updates the buckets' parameters, and returns them."""
        if self.clip_grad_value is not None:
            for bucket in buckets:
                torch._foreach_clamp_min_(bucket.grads, -self.clip_grad_value)
                torch._foreach_clamp_max_(bucket.grads, self.clip_grad_value)
        found = None
        if self._norm is not None:
            grads = {
                part.indices[member]: grad
                for bucket in buckets
                for member, grad in zip(bucket.members, bucket.grads, strict=True)
            }
            found = self._norm.add(grads, are_checked=all(bucket.regular for bucket in buckets))
        found = found_on_any_rank(found, part.plan.entries[0].param.device, groups) if _skips(optimizer) else None
        if found is not None:
            self._found = found if self._found is None else torch.maximum(self._found, found.to(self._found.device))
        tracker = optimizer._tracker
        tracker.refresh_masters(part=part)
        updated = [part.plan.entries[member].param for bucket in buckets for member in bucket.members]
        self._stepped.update(map(id, updated))
        launch_all(optimizer, buckets, self._coefficient, None, found)
        tracker.record_writes(updated, may_be_skipped=found is not None, part=part)
        return updated

    # ---- optimizer.step() --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """What ``optimizer.step`` does instead of a step: ends the iteration.

        Gradients that are there still are stepped by: of parameters without a hook, or set by hand.

        Raises:
            RuntimeError: a GradScaler calls; a parameter that was stepped has a gradient again; the learning rate is
                another than in backward (the iteration is ended then).
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            for name in ("found_inf", "grad_scale"):  # the scaler would have taken them away after the step
                optimizer.__dict__.pop(name, None)
            raise RuntimeError(
                "a GradScaler steps this optimizer, whose parameters are stepped in backward: whether a gradient is "
                "finite is known too late, and backward has stepped by scaled gradients. Use bfloat16, which needs no "
                "scaler (GradScaler(enabled=False)), or call remove() on the handle of enable_gradient_release; what "
                "the last backward wrote is to be loaded anew"
            )
        with self._lock:
            rest = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
            rest = list({id(param): param for param in rest}.values())
            if rest:
                self.step_by(rest)
                self._hang(optimizer)
            elif self._rates is None:
                self._begin(optimizer)  # every rank takes part in the norm
            if self.max_grad_norm is not None:
                assert self._norm is not None
                self._last_norm = self._norm.norm()
                self._take_norm(self._last_norm)
            elif self._norm is not None:
                self._norm.forget()
            optimizer._count_skipped(self._found)
            self._look_again(optimizer)
            rates, self._rates, self._stepped, self._found = self._rates, None, set(), None
        assert rates is not None
        if rates != _rates(optimizer)[: len(rates)]:  # groups may have been added
            raise RuntimeError(
                "the learning rate was changed between backward and optimizer.step(); under gradient release backward "
                "has stepped by the one before. Set it before backward, as a scheduler does that is stepped after "
                "optimizer.step()"
            )

    def _look_again(self, optimizer: Any) -> None:
        """Lets integrations attach what they could not in backward, where gathers are under way; parts then follow."""
        has_new_parts = optimizer._tracker.is_attached
        if has_new_parts and not self._is_looked_at:
            attachers.attach(optimizer)
            self._parts = {}
        self._is_looked_at = has_new_parts

    def _take_norm(self, norm: Tensor) -> None:
        """The next iteration is clipped by this norm, or by the one before if it is 0 or not finite."""
        before = torch.zeros_like(norm) if self._usable_norm is None else self._usable_norm
        self._usable_norm = torch.where(norm.isfinite() & (norm > 0.0), norm, before)
        assert self.max_grad_norm is not None
        self._coefficient = torch.clamp(self.max_grad_norm / (self._usable_norm + 1e-6), max=1.0)


def _skips(optimizer: Any) -> bool:
    """Whether gradients that are not finite are skipped: quantised moments would not forget them."""
    return any(group.get("state_dtype") == "int8" for group in optimizer.param_groups)


def _rates(optimizer: Any) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]


def _refuse(optimizer: Any) -> None:
    """Raises for what cannot go together with stepping in backward."""
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"the optimizer has max_grad_norm={optimizer.max_grad_norm}, for a norm that is known only after backward, "
            "when all parameters have been stepped: build it with max_grad_norm=None, and give enable_gradient_release "
            "max_grad_norm, which clips by the norm of the iteration before, or clip_grad_value"
        )
    if optimizer._shared_norm is not None:
        raise ValueError(
            "the optimizer shares its gradient norm (share_grad_norm), and its gradients are gone when that is taken; "
            "call remove() on that handle"
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "backward is captured in a CUDA graph; gradient release decides in Python what to step, which a replay "
            "does not repeat: run it eagerly, or call remove() on the handle of enable_gradient_release"
        )
