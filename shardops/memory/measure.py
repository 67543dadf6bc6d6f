"""What is really live: bytes of a model's and an optimizer's tensors, and one real step of a model beside its plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import local_tensor
from ..gradients import local_gradient
from ..optim import FusedShardedAdamW
from ..release import enable_gradient_release
from .components import COMPONENTS, STATES, state_shares
from .planner import MemoryPlan, plan
from .sizes import parse_dtype

HELD = ("parameters", "gradients", *STATES)
_OPTIMIZER_OPTIONS = ("state_dtype", "master", "amsgrad")
_OPTIONS = ("param_dtype", *_OPTIMIZER_OPTIONS, "gradient_release", "activations")


def live_nbytes(params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes of storages that this rank holds now, by component, each storage once.

    Padding of FSDP2's shards counts, as it does for the planner; step counters and salts do not.

    Args:
        params: a model's parameters, plain or sharded.
        optimizer: a FusedShardedAdam(W), whose states count; None: parameters and gradients only.

    Returns:
        ``parameters``, ``gradients`` (what a step reads), ``master``, ``exp_avg``, ``exp_avg_sq``.
    """
    params = list(params)
    seen: set[int] = set()
    nbytes = dict.fromkeys(HELD, 0)
    nbytes["parameters"] = _storages((local_tensor(param) for param in params), seen)
    grads = [param.grad for param in params]
    nbytes["gradients"] = _storages((local_gradient(grad) for grad in grads if grad is not None), seen)
    if optimizer is not None:
        pairs = [
            (key, _storages([local_tensor(value)], seen))
            for state in optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        nbytes |= state_shares(pairs)
    return nbytes


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that were not seen before; an empty one has no address and no bytes."""
    nbytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            nbytes += storage.nbytes()
    return nbytes


@dataclass(frozen=True)
class Measurement:
    """One real step beside its plan.

    Attributes:
        planned: of the same module and options, in one process.
        measured: bytes of live storages, by the planner's components: gradients at their most, activations as autograd
            saved them (0 without a forward).
        has_backward: whether a loss was computed, or gradients were made up in the parameters' place.
    """

    planned: MemoryPlan
    measured: dict[str, int]
    has_backward: bool

    @property
    def deviation(self) -> float:
        """The largest difference of parameters, gradients, master or moments from the plan, as a share of it."""
        pairs = [(self.planned.per_rank[name], self.measured[name]) for name in HELD]
        return max(abs(a - b) / max(a, 1) for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        """``planned`` and ``measured`` bytes by component, the largest deviation, and what was run."""
        return {
            "planned": {name: self.planned.per_rank[name] for name in self.measured},
            "measured": dict(self.measured),
            "deviation": self.deviation,
            "has_backward": self.has_backward,
            "plan": asdict(self.planned) | {"notes": list(self.planned.notes)},
        }


def measure(
    factory: str | Callable[[], Any],
    *,
    device_memory: str | int | None = None,
    backend: str | None = None,
    **options: Any,
) -> Measurement:
    """Builds a model, runs one real step of it in this process, and puts what was live beside the plan.

    Args:
        factory: called without arguments, or ``"MODULE:FACTORY"``. It returns a module with its parameters in memory;
            or ``(module, loss)``, of which ``loss(module)`` gives a scalar to go backward from; or
            ``(module, batch, loss)`` with ``loss(module, batch)``; or ``(module, batch)``: the module is called with
            the batch (a mapping: keyword arguments), and the loss is its ``.loss``, or the mean of the tensor that it
            returns. With a module alone gradients are made up, zeros.
        device_memory: as for :func:`plan`.
        backend: of the optimizer.
        **options: of :func:`plan` those that mean something in one process: ``param_dtype`` (the module is cast to it),
            ``state_dtype``, ``master``, ``amsgrad``, ``gradient_release``, ``activations``.

    Raises:
        TypeError: another option; a factory that returns something else.
        ValueError: parameters on the meta device, or none to train; a factory's name without a colon, or that cannot be
            imported; see also :func:`plan`.
    """
    unknown = set(options) - set(_OPTIONS)
    if unknown:
        raise TypeError(
            f"{', '.join(sorted(unknown))} cannot be measured in one process; options are {', '.join(_OPTIONS)}"
        )
    module, loss = _build(_resolve(factory) if isinstance(factory, str) else factory)
    if options.get("param_dtype") is not None:
        module.to(parse_dtype(options["param_dtype"], "param_dtype"))
    planned = plan(module, device_memory=device_memory, **options)
    trainable = [param for param in module.parameters() if param.requires_grad]
    if not trainable:
        raise ValueError("the factory's module has no parameter that requires a gradient; there is nothing to step")
    optimizer = FusedShardedAdamW(
        trainable,
        state_dtype=planned.options["state_dtype"],
        master_weights=planned.options["master"],
        amsgrad=planned.options["amsgrad"],
        backend=backend,
    )
    measured = dict.fromkeys(COMPONENTS[:-1], 0)
    watch = _Gradients(trainable)  # before release: hooks run in the order in which they were made
    release = enable_gradient_release(module, optimizer) if planned.options["gradient_release"] else None
    if loss is None:
        for param in trainable:
            param.grad = torch.zeros_like(param)
            watch.look()
            if release is not None:
                release.step_by([param])
    else:
        with _saved(module) as saved:
            value = loss(module)
        measured["activations"] = saved.nbytes
        value.backward()  # type: ignore[no-untyped-call]
        watch.look()
    optimizer.step()
    measured |= live_nbytes(module.parameters(), optimizer)
    measured["gradients"] = watch.most
    counters = {state["step"].untyped_storage().data_ptr(): state["step"] for state in optimizer.state.values()}
    measured["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
    measured["buffers"] += sum(step.untyped_storage().nbytes() for step in counters.values())
    watch.remove()
    return Measurement(planned, measured, loss is not None)


class _Gradients:
    """Looks at live gradients whenever one is ready."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.most = 0
        self._params = params
        self._handles = [param.register_post_accumulate_grad_hook(self._hook) for param in params]  # type: ignore[no-untyped-call]

    def _hook(self, param: Tensor) -> None:
        self.look()

    def look(self) -> None:
        self.most = max(self.most, live_nbytes(self._params)["gradients"])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Saved:
    """Storages that autograd saved, but for parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.nbytes = 0
        self._seen: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is used again
        _storages(module.parameters(), self._seen)

    def pack(self, tensor: Tensor) -> Tensor:
        self.nbytes += _storages([tensor], self._seen)
        self._kept.append(tensor)
        return tensor


@contextmanager
def _saved(module: nn.Module) -> Iterator[_Saved]:
    saved = _Saved(module)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved
    saved._kept.clear()


def _resolve(name: str) -> Callable[[], Any]:
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise ValueError(f"the factory is {name!r}; it is MODULE:FACTORY, as my_models:build")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the factory {name!r} cannot be imported: {error}; modules are looked for as Python does, by the command "
            "also in this folder"
        ) from error
    if not callable(found):
        raise TypeError(f"the factory {name!r} is a {type(found).__name__}; it is a function without arguments")
    return found  # type: ignore[no-any-return]


def _build(factory: Callable[[], Any]) -> tuple[nn.Module, Callable[[nn.Module], Tensor] | None]:
    made = factory()
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise TypeError(
            f"the factory returned a {type(made).__name__}; it is a module, (module, loss), (module, batch), or "
            "(module, batch, loss)"
        )
    module: nn.Module = parts[0]
    if any(param.is_meta for param in module.parameters()):
        raise ValueError(
            "the factory's module has parameters on the meta device, which cannot be stepped: build it on a device, or "
            "plan it without measuring"
        )
    if len(parts) == 1:
        return module, None
    if len(parts) == 3:
        _, batch, of_batch = parts
        return module, lambda module: of_batch(module, batch)
    second = parts[1]
    return module, second if callable(second) and not isinstance(second, Mapping) else lambda module: _loss(
        module, second
    )


def _loss(module: nn.Module, batch: Any) -> Tensor:
    output = module(**batch) if isinstance(batch, Mapping) else module(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor):
        return output.float().mean()
    raise TypeError(
        f"the module returned a {type(output).__name__} without a loss; have the factory return (module, batch, loss)"
    )
