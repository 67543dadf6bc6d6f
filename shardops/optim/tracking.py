"""Keeps the plan and the masters in step with what others do to parameters and states between steps.

Users replace states, unfreeze, cast, move and write parameters; each of these must be noticed, and cheaply, since a
step over many small parameters is mostly host time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..collectives import local_tensor
from ..plan import Bucket, Entry, StalePlanError, UpdatePlan
from ..shadow import Versions, shadow_of, versions
from . import attachers, checkpoint
from .elements import dither_row, salt_of
from .masters import KEYS, adopt_master, master_storage, refresh_master, refresh_master_if, rounding
from .offload import StateOffload
from .state import StepCounters, create_state
from .writers import fingerprint, follow_other_optimizers

try:
    from .._host import same_items
except ImportError:  # built without a compiler

    def same_items(dicts: list[dict[str, Any]], snapshots: list[dict[str, Any]]) -> bool:
        """Whether each dict holds the very objects that its snapshot holds, and no others."""
        return len(dicts) == len(snapshots) and all(
            len(a) == len(b) and all(a.get(key) is value for key, value in b.items())
            for a, b in zip(dicts, snapshots, strict=True)
        )


@dataclass
class Part:
    """Some of a plan's entries, to be stepped without a look at the others.

    Attributes:
        plan: over these entries only.
        indices: of them among the whole plan's entries.
        positions: of them among the optimizer's parameters.
    """

    plan: UpdatePlan
    indices: list[int]
    positions: list[int]


class Tracker:
    """One optimizer's plan, step counters and knowledge of who wrote its parameters last.

    Attributes:
        versions: position of a parameter in the optimizer -> its versions after our last write. A parameter that is
            not in it was loaded together with its state.
        is_attached: whether a part had integrations look at the parameters since :meth:`plan` was called.
    """

    def __init__(self) -> None:
        self.versions: dict[int, Versions] = {}
        # Position -> fingerprints of the parameter and its master when a state dict exposed them.
        self._exposed: dict[int, tuple[Tensor, Tensor]] = {}
        # Position -> what state dicts hold of the parameter: the tensor, one that shares its count of writes and
        # outlives it until we have looked, and that count when we last did; and the master's own versions then.
        self._aliases: dict[int, list[tuple[weakref.ref[Tensor], Tensor, int]]] = {}
        self._masters_then: dict[int, Versions] = {}
        self._counters = StepCounters()
        self._plan: UpdatePlan | None = None
        # What the plan was made of.
        self._group_sizes: list[int] = []
        self._params: list[Tensor] = []  # all of them
        self._without_state: list[Tensor] = []
        self._positions: list[int] = []  # of the plan's entries among the parameters
        self._mastered: list[tuple[Entry, int]] = []  # entries with a master, and their positions
        self._with_master: dict[int, list[tuple[Entry, int]]] = {}  # the same by id of the parameter
        self._indices: dict[int, list[int]] = {}  # of the plan's entries, likewise
        # What integrations do before buckets are built, and whether they have since plan() was called.
        self._attach: Callable[[], None] = lambda: None
        self.is_attached = False
        self._states: list[dict[str, Any]] = []
        self._state_items: list[dict[str, Any]] = []
        self._all_states: list[Any] = []
        self._device_steps = False
        self._offload: StateOffload | None = None  # has states on the host, perhaps still on their way there

    def forget_plan(self) -> None:
        """The next step makes a new plan."""
        self._plan = None

    def buckets(self, optimizer: Any, use_device_steps: bool) -> tuple[UpdatePlan, list[Tensor | None], list[Bucket]]:
        """The plan, the gradients of its entries, and its buckets with these gradients; arguments as :meth:`plan`."""
        plan = self.plan(optimizer, use_device_steps)
        grads = plan.gradients()
        try:
            return plan, grads, plan.refresh(grads)
        except StalePlanError:  # a new plan is not; it may have other entries, and so other gradients
            self._plan = None
            return self.buckets(optimizer, use_device_steps)

    def plan(self, optimizer: Any, use_device_steps: bool) -> UpdatePlan:
        """The plan over all parameters with states, made anew if a parameter or state was added or replaced.

        Args:
            optimizer: whose states are made or completed where they are missing.
            use_device_steps: counters must live beside the parameters (capturable groups' always do).
        """
        if self._plan is None or not self._is_current(optimizer, use_device_steps):
            self._plan = self._make(optimizer, use_device_steps)
        self.is_attached = False
        return self._plan

    def part(self, params: Iterable[Tensor]) -> Part:
        """The entries of these parameters, of the plan that :meth:`plan` has just given.

        However many parts are built anew, integrations look at the parameters once.
        """
        assert self._plan is not None
        indices = sorted(index for param in params for index in self._indices.get(id(param), ()))
        entries = [self._plan.entries[index] for index in indices]
        return Part(UpdatePlan(entries, self._attach_once), indices, [self._positions[index] for index in indices])

    def _attach_once(self) -> None:
        if not self.is_attached:
            self._attach()
            self.is_attached = True

    def _synchronize(self) -> None:
        """Before states are read or written other than by a launch."""
        if self._offload is not None:
            self._offload.synchronize()

    def _make(self, optimizer: Any, use_device_steps: bool) -> UpdatePlan:
        params = [(i, param) for i, group in enumerate(optimizer.param_groups) for param in group["params"]]
        self._offload = optimizer._offload
        self._synchronize()
        homes = []
        kept = []
        self._without_state = []
        for position, (group_index, param) in enumerate(params):
            group = optimizer.param_groups[group_index]
            if not _wants_state(optimizer, param):
                self._without_state.append(param)
                continue
            state = optimizer.state[param]
            if not state:
                state.update(create_state(param, group, salt_of(optimizer.seed, position)))
                self.versions[position] = versions(param)
            else:
                salt = salt_of(optimizer.seed, position)
                checkpoint.complete_state(param, state, group, salt, is_offloaded=self._offload is not None)
            if self._offload is not None:
                self._offload.keep(param, state)
            on_device = group["capturable"] or use_device_steps
            homes.append((state, param.device if on_device else torch.device("cpu")))
            kept.append((group_index, param, position))
        self._counters.bind(homes)
        entries = []
        for (group_index, param, _), (state, home) in zip(kept, homes, strict=True):
            group = optimizer.param_groups[group_index]
            entries.append(
                Entry(
                    param=param,
                    group_index=group_index,
                    state=state,
                    master_key=KEYS[master_storage(param, group)],
                    rounding=rounding(param, group),
                    dither=dither_row(param, state),
                    steps=self._counters.buffers[home],
                    step_position=self._counters.position(state["step"]),
                )
            )
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._params = [param for _, param in params]
        self._positions = [position for *_, position in kept]
        self._mastered, self._with_master = [], {}
        self._indices = {}
        for index, (entry, position) in enumerate(zip(entries, self._positions, strict=True)):
            self._indices.setdefault(id(entry.param), []).append(index)
            if entry.master_key is not None:
                self._mastered.append((entry, position))
                self._with_master.setdefault(id(entry.param), []).append((entry, position))
        self._states = [entry.state for entry in entries]
        self._state_items = [dict(state) for state in self._states]
        self._all_states = list(optimizer.state.values())
        self._device_steps = use_device_steps
        if any(hasattr(param, "_local_tensor") for param in self._params):
            follow_other_optimizers()
        self._attach = lambda: attachers.attach(optimizer)
        return UpdatePlan(entries, before_build=self._attach)

    def _is_current(self, optimizer: Any, use_device_steps: bool) -> bool:
        """All but casts and moves of parameters, which the plan itself finds when it looks at the gradients."""
        groups = [group["params"] for group in optimizer.param_groups]
        params = [param for group in groups for param in group]
        return (
            [len(group) for group in groups] == self._group_sizes
            and all(map(is_, params, self._params))
            and use_device_steps == self._device_steps
            and not any(_wants_state(optimizer, param) for param in self._without_state)  # unfrozen, materialised
            and len(optimizer.state) == len(self._all_states)
            and all(map(is_, optimizer.state.values(), self._all_states))
            and same_items(self._states, self._state_items)
        )

    @torch.no_grad()
    def follow_writes(self, optimizer: Any) -> None:
        """Before anyone reads masters between steps."""
        self._synchronize()
        if self._plan is not None:
            if self._plan.is_stale():
                self._plan = self._make(optimizer, self._device_steps)
            self.refresh_masters(before_step=False)

    @torch.no_grad()
    def refresh_all(self, optimizer: Any) -> None:
        """Takes all parameters for written by somebody else."""
        self._synchronize()
        for entry in self.plan(optimizer, self._device_steps).entries:
            refresh_master(entry.param, entry.state)
        self._exposed.clear()
        for param in self._params:
            shadow = shadow_of(getattr(param, "_local_tensor", param))
            if shadow is not None:
                shadow.written = None

    def refresh_masters(self, before_step: bool = True, part: Part | None = None) -> None:
        """Masters of parameters that somebody else wrote since our last step follow the parameter.

        A parameter without recorded versions was just loaded together with its state: the two belong together, except
        for elements of an fp32 master that do not round to the parameter's. Only a step tells (``before_step``): until
        then weights may still be loaded, in place too.

        Args:
            before_step: a step follows.
            part: only its parameters are looked at.
        """
        for entry, position in self._members(part):
            assert entry.master_key is not None
            written = self.versions.get(position)
            exposed = self._exposed.pop(position, None)
            is_written_late = self._is_written_late(entry, position)
            if written != versions(entry.param) or exposed is not None or is_written_late:
                self._synchronize()
            if written is None:
                if before_step:
                    adopt_master(entry.param, entry.state)
            elif written != versions(entry.param):
                refresh_master(entry.param, entry.state)
            elif exposed is not None:
                # Written together, they were loaded together, and belong together.
                param, master = ((now != then).any() for now, then in zip(_fingerprints(entry), exposed, strict=True))
                refresh_master_if(param & ~master, entry.param, entry.state)
                if not before_step:
                    self._exposed[position] = _fingerprints(entry)
            elif is_written_late:
                refresh_master(entry.param, entry.state)
            if position in self._aliases:
                self._masters_then[position] = versions(entry.state[entry.master_key])

    def _members(self, part: Part | None) -> Iterable[tuple[Entry, int]]:
        """Entries that have a master, and their positions, of a part or of all."""
        if part is None:
            return self._mastered
        members = zip(part.plan.entries, part.positions, strict=True)
        return [(entry, position) for entry, position in members if entry.master_key is not None]

    def _is_written_late(self, entry: Entry, position: int) -> bool:
        """Whether what a state dict holds was written since we last looked, and the master was not, together with it.

        Fingerprints tell until the first step after the state dict was made, counts of writes from then on.
        """
        followed = self._aliases.pop(position, None)
        if followed is None:
            return False
        assert entry.master_key is not None
        is_written = any(counted._version != count for _, counted, count in followed)
        alive = [(alias, counted, counted._version) for alias, counted, _ in followed if alias() is not None]
        if alive:
            self._aliases[position] = alive
        return is_written and versions(entry.state[entry.master_key]) == self._masters_then.get(position)

    def expose(self, params: Iterable[Tensor]) -> None:
        """Before these parameters (DTensors) are handed out in a state dict, through which they can be written unseen.

        Whether they have been is found out when their masters are next needed.
        """
        self._synchronize()
        for param in params if self._plan is not None else ():
            for entry, position in self._with_master.get(id(param), ()):
                if position not in self._exposed:
                    self._exposed[position] = _fingerprints(entry)

    def follow(self, param: Tensor, alias: Tensor) -> None:
        """Has writes into the local tensor of an exposed parameter's state dict noticed after the next step too."""
        if self._plan is None or alias.is_inference():  # the latter counts no writes
            return
        for _, position in self._with_master.get(id(param), ()):
            counted = alias.detach()  # shares the count
            self._aliases.setdefault(position, []).append((weakref.ref(alias), counted, counted._version))

    def record_writes(self, updated: list[Tensor], may_be_skipped: bool, part: Part | None = None) -> None:
        """After a step that wrote these parameters, and their shadows, behind autograd's back.

        Bumping their version counters makes autograd's "modified by an inplace operation" errors work, as well as our
        own detection of other writers.

        Args:
            updated: the parameters that had a gradient.
            may_be_skipped: the kernel may have found gradients that are not finite and written nothing. What was not
                equal to its parameter before is then not known to be now.
            part: the step was of its parameters only.
        """
        plan = self._plan if part is None else part.plan
        assert plan is not None
        written = [pair for pair in plan.shadows if not may_be_skipped or pair[1].is_current(pair[0])]
        torch.autograd.graph.increment_version(updated)
        for param, shadow in written:
            shadow.written = versions(param)
        for entry, position in self._members(part):
            self.versions[position] = versions(entry.param)
            if position in self._aliases:
                assert entry.master_key is not None
                self._masters_then[position] = versions(entry.state[entry.master_key])


def _fingerprints(entry: Entry) -> tuple[Tensor, Tensor]:
    """Of a parameter and of its master or remainder."""
    assert entry.master_key is not None
    return fingerprint(local_tensor(entry.param.detach())), fingerprint(local_tensor(entry.state[entry.master_key]))


def _wants_state(optimizer: Any, param: Tensor) -> bool:
    # All that require gradients, used or not: a parameter unused in training otherwise gives "Missing key" on load.
    return not param.is_meta and (param.requires_grad or param.grad is not None or param in optimizer.state)
