"""What the tests of the FSDP plug-in share: models, runs beside stock FSDP2, and a watch on its all-gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distributed import Net, assert_all_equal, loss_of, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardops
from shardops import FusedShardedAdamW
from shardops.integrations.fsdp.torch_fsdp import owners
from shardops.shadow import shadow_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)

# How a run is made: torch's own gathers, shadows, shadows that nothing copies in.
STOCK, SHADOW, ELIDED = "stock", "shadow", "shadow, copy-in elided"
MODES = (STOCK, SHADOW, ELIDED)


class Watch(TorchDispatchMode):
    """Counts what becomes of parameters on their way into all-gathers, while it is entered.

    Attributes:
        casts: of a shard of the model's parameters to a lower precision.
        copied_in: elements that ``fsdp::all_gather_copy_in`` copied into the gather's output.
        as_they_lie: elements that it handed to the collective without a copy.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.casts = self.copied_in = self.as_they_lie = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            sent, output = result
            if sent.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
                self.copied_in += sent.numel()
            else:
                self.as_they_lie += sent.numel()
        elif func is torch.ops.aten._foreach_copy_.default:
            self._copied(zip(args[0], args[1], strict=True))
        elif func is torch.ops.aten.copy_.default:
            self._copied([args[:2]])
        elif func is torch.ops.aten._to_copy.default:
            self._copied([(result, args[0])])
        return result

    def _copied(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        shards = {owner.fsdp_param._sharded_param_data.untyped_storage().data_ptr() for owner in owners(self._model)}
        for target, source in pairs:
            if not isinstance(source, DTensor) and target.dtype.itemsize < source.dtype.itemsize:
                self.casts += source.untyped_storage().data_ptr() in shards


class Run:
    """One model and its optimizer: stock or plugged in, and what it made so far, to compare.

    Args:
        mode: one of MODES.
        model: sharded.
        params: what the optimizer takes; None: all of the model's parameters.
        options: the optimizer's.
    """

    def __init__(self, mode: str, model: nn.Module, params: Any = None, **options: Any) -> None:
        self.mode, self.model = mode, model
        self.made: dict[str, Tensor] = {}
        self.kept: dict[str, Any] = {}  # a state dict from before
        self.build(params, **options)

    def build(self, params: Any = None, **options: Any) -> None:
        """Makes an optimizer, in place of the one before."""
        params = self.model.parameters() if params is None else params
        self.optimizer = FusedShardedAdamW(params, **{"lr": 1e-2, **options})
        if self.mode == ELIDED:
            shardops.fsdp.plug_in(self.model, self.optimizer, elide_copy_in=True)

    @property
    def is_stock(self) -> bool:
        return self.mode == STOCK

    def watch(self) -> Watch:
        """To enter around gathers of the model."""
        return Watch(self.model)

    def keep(self, tensor: Tensor, label: str = "") -> None:
        """Something that must be stock's."""
        self.made[f"{len(self.made)} {label}"] = tensor.detach().clone()

    def keep_params(self, label: str = "") -> None:
        """All parameters, gathered."""
        for owner in owners(self.model):
            self.keep(whole(owner.param), f"{label} {owner.label}")

    def backward(self, step: int, scale: float = 1.0) -> None:
        """Forward and backward of a batch; keeps the loss."""
        loss = loss_of(self.model, step)
        (loss * scale).backward()
        self.keep(loss, f"loss {step}")

    def train(self, steps: Sequence[int]) -> Watch:
        """Training steps; what their gathers sent."""
        with self.watch() as watch:
            for step in steps:
                self.optimizer.zero_grad()
                self.backward(step)
                self.optimizer.step()
        return watch

    def evaluate(self, step: int = 99) -> Watch:
        """A forward whose loss is kept, from sharded parameters to sharded ones; what its gathers sent."""
        self.reshard()
        with self.watch() as watch, torch.no_grad():
            self.keep(loss_of(self.model, step), f"evaluation {step}")
        self.reshard()
        return watch

    def reshard(self) -> None:
        """Frees what a forward left gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def assert_sent(self, watch: Watch, casts: int = 0, frozen: int = 0, copied_in: bool = False) -> None:
        """Plugged in, all that was gathered were shadows, ``casts`` of them rounded anew; stock cast and copied it all.

        Args:
            watch: of some gathers.
            casts: of the plugged runs.
            frozen: more of them, of frozen parameters, which only an elided group has shadows of.
            copied_in: some groups are not elided.
        """
        world_size = dist.get_world_size()
        is_elided = self.mode == ELIDED and world_size > 1
        if self.is_stock:
            assert watch.casts >= max(1, casts + frozen)
            assert watch.as_they_lie == 0
            assert world_size == 1 or watch.copied_in > 0
            return
        casts += 0 if is_elided else frozen
        assert watch.casts == casts, (self.mode, watch.casts, casts)
        if world_size > 1:
            assert (watch.as_they_lie > 0) == is_elided, self.mode
            assert (watch.copied_in > 0) == (not is_elided or copied_in), self.mode

    def assert_shadows(self, params: Iterable[Tensor] | None = None) -> None:
        """Every shadow is its parameter rounded, with zeros below; all of ``params`` (None: the trained) have one."""
        wanted = {id(p) for p in (self.model.parameters() if params is None else params) if p.requires_grad}
        for owner in owners(self.model):
            shadow = shadow_of(owner.local)
            assert (shadow is not None) or self.is_stock or id(owner.param) not in wanted, owner.label
            if shadow is not None and shadow.is_current(owner.param):
                dtype = owner.fsdp_param.mp_policy.param_dtype
                expected = torch.zeros(owner.fsdp_param.padded_sharded_param_size, dtype=dtype)
                expected[: owner.local.shape[0]] = owner.local.detach().to(dtype)
                assert_all_equal({owner.label: shadow.padded}, {owner.label: expected})


def net(mp_policy: MixedPrecisionPolicy = BF16, **options: Any) -> Net:
    """A Net sharded block by block and at the root; options of ``Net``, the others of ``fully_shard``."""
    own = {name: options.pop(name) for name in ("tied", "frozen", "unused", "seed") if name in options}
    model = Net(**own)
    for block in model.blocks:
        fully_shard(block, mp_policy=mp_policy, **options)
    fully_shard(model, mp_policy=mp_policy, **options)
    return model


def equal_to_stock(drive: Callable[[str], Run], modes: Sequence[str] = MODES) -> None:
    """Runs in every mode; all that a run kept must have the bits that the stock run kept."""
    expected: dict[str, Tensor] | None = None
    for mode in modes:
        with shardops.fsdp.disabled() if mode == STOCK else contextlib.nullcontext():
            run = drive(mode)
            run.keep_params("in the end,")
        assert run.made
        if mode == STOCK:
            assert not any(shadow_of(owner.local) for owner in owners(run.model))
            expected = run.made
        else:
            assert expected is not None
            assert_all_equal(run.made, expected, f"{drive}, {mode}:")
            shardops.fsdp.plug_in_of(run.optimizer).remove()
