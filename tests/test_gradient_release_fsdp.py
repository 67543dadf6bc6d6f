"""Gradient release under FSDP2 on two ranks: the bits of ordinary steps, a group at a time, freed, and refusals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Net, assert_all_equal, assert_ranks_agree, local, loss_of, run, states
from reference import ordinary
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import shardops
from shardops import FusedShardedAdamW, enable_gradient_release
from shardops.integrations.fsdp import torch_fsdp
from shardops.shadow import shadow_of, versions

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(
    dtype: torch.dtype = torch.float32, net: dict[str, bool] | None = None, shard: Any = fully_shard, **options: Any
) -> Net:
    """A Net in four groups, everything uneven over two ranks."""
    model = Net(**{"tied": True, **(net or {})}).to(dtype)
    for block in model.blocks:
        shard(block.down, **options)
        shard(block, **options)
    shard(model, **options)
    return model


def groups_of(model: nn.Module) -> list[Any]:
    """The FSDP groups that train something."""
    found = {id(owner.group): owner.group for owner in torch_fsdp.owners(model) if owner.param.requires_grad}
    return list(found.values())


def optimizer_of(model: nn.Module, **options: Any) -> FusedShardedAdamW:
    return FusedShardedAdamW(model.parameters(), **{"lr": 1e-2, **options})


def local_values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What this rank holds of parameters and states."""
    for module in model.modules():  # those of the root are unsharded after a forward
        if isinstance(module, FSDPModule):
            module.reshard()
    values = {name: local(param).clone() for name, param in model.named_parameters()}
    return values | {name: local(state).clone() for name, state in states(optimizer)}


def iterate(model: nn.Module, optimizer: Any, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextlib.contextmanager
def watched(release: Any) -> Iterator[list[tuple[set[int], list[StorageWeakRef]]]]:
    """For each release: the parameters, and the storages of their gradients."""
    seen: list[tuple[set[int], list[StorageWeakRef]]] = []
    wrapped = release._step

    def spy(optimizer: Any, part: Any, groups: Any, buckets: Any) -> Any:
        storages = {id(s): s for b in buckets for s in [grad.untyped_storage() for grad in b.grads]}
        params = {id(part.plan.entries[member].param) for b in buckets for member in b.members}
        seen.append((params, [StorageWeakRef(storage) for storage in storages.values()]))
        del storages
        return wrapped(optimizer, part, groups, buckets)

    release._step = spy
    yield seen
    del release._step


# ---- the bits of ordinary steps --------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Of the model, of plug_in, of the optimizer.
    "fp32": ({}, {}, {}),
    "shadows": ({"mp_policy": MIXED, "net": {"frozen": True, "unused": True}}, {}, {"amsgrad": True}),
    "copy-in elided": ({"mp_policy": MIXED, "reshard_after_forward": False}, {"elide_copy_in": True}, {}),
    "exact master": ({"dtype": torch.bfloat16, "mp_policy": MIXED, "reshard_after_forward": False}, {}, {}),
    "fp32 gradients": ({"dtype": torch.bfloat16, "mp_policy": MIXED}, {"fp32_gradients": True}, {}),
    "split24": ({"dtype": torch.bfloat16, "mp_policy": MIXED}, {}, {"master_weights": "split24"}),
    "offload": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}, {}),
}


def pair(case: str) -> tuple[list[Net], list[FusedShardedAdamW], Any]:
    """A released model and an ordinary one."""
    model_options, plug, options = CASES[case]
    models = [sharded(**model_options) for _ in range(2)]
    optimizers = [optimizer_of(model, **options) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        if plug:
            shardops.fsdp.plug_in(model, optimizer, **plug)
    return models, optimizers, enable_gradient_release(models[0], optimizers[0])


def steps_are_the_ordinary_ones(case: str) -> None:
    """Losses, parameters, states and shadows; each group in one release, of one flat buffer, gone with it."""
    models, optimizers, release = pair(case)
    for step in range(4):
        with watched(release) as seen:
            losses = [loss_of(model, step) for model in models]
            losses[0].backward()
        assert all(owner.param.grad is None for owner in torch_fsdp.owners(models[0]))
        if case != "offload":
            expected = [{id(p.sharded_param) for p in g.fsdp_params} for g in groups_of(models[0])]
            stepped = [params for params, _ in seen]
            assert len(stepped) == len(expected)
            assert all(any(params <= group for group in expected) for params in stepped)
            assert all(len(storages) == 1 for _, storages in seen)
        assert alive_now([storage for _, storages in seen for storage in storages], 0) == 0
        optimizers[0].step()
        optimizers[0].zero_grad()
        losses[1].backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_all_equal({"loss": losses[0].detach()}, {"loss": losses[1].detach()}, f"{case}, step {step}")
        for owner in torch_fsdp.owners(models[0]):
            shadow = shadow_of(owner.local)
            if shadow is not None and step > 0 and owner.param.requires_grad and "unused" not in owner.label:
                assert shadow.written == versions(owner.param), owner.label
                assert torch.equal(shadow.values, owner.local.bfloat16()), owner.label
        values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_all_equal(*values, f"{case}, step {step}")
    assert any(shadow_of(owner.local) is not None for owner in torch_fsdp.owners(models[0])) == (
        case in ("shadows", "copy-in elided")
    )
    release.remove()
    assert not any(
        getattr(p, "_post_accumulate_grad_hooks", None) and case != "fp32 gradients" for p in _params(models[0])
    )
    iterate(models[0], optimizers[0], 5)
    iterate(models[1], optimizers[1], 5)
    values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    assert_all_equal(*values, f"{case}, removed")


def _params(model: nn.Module) -> list[Any]:
    return [owner.param for owner in torch_fsdp.owners(model)]


def all_cases() -> None:
    for case in CASES:
        steps_are_the_ordinary_ones(case)


def test_steps_are_the_ordinary_ones(tmp_path: Path) -> None:
    run(tmp_path, 2, all_cases)


# ---- what is freed when, replicas, accumulation, materialisation -----------------------------------------------------


def alive_now(storages: list[Any], most: int) -> int:
    """How many are alive; if more than ``most``, after a while: gloo's thread lets go a moment after a work is done."""
    deadline = time.monotonic() + 5
    while (alive := sum(not storage.expired() for storage in storages)) > most and time.monotonic() < deadline:
        time.sleep(1e-3)
    return alive


def groups_are_freed_before_the_next_is_stepped() -> None:
    """Of FSDP the gradients of one group are alive; of HSDP also those of the group before, which FSDP2 keeps."""
    meshes = {1: init_device_mesh("cpu", (2,)), 2: init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp"))}
    for alive, mesh in meshes.items():
        model = sharded(mesh=mesh)
        optimizer = optimizer_of(model)
        release = enable_gradient_release(model, optimizer)
        with watched(release) as seen:
            counts: list[int] = []
            wrapped = release._step

            def spy(*args: Any, most: int = alive, seen: Any = seen, counts: Any = counts, step: Any = wrapped) -> Any:
                result = step(*args)
                counts.append(alive_now([s for _, storages in seen for s in storages], most))
                return result

            release._step = spy
            loss_of(model, 0).backward()
        assert len(counts) == len(groups_of(model))
        assert max(counts) == alive, (alive, counts)
        assert alive_now([storage for _, storages in seen for storage in storages], 0) == 0


def replicas_step_alike(mesh: Any, shard: Any) -> None:
    """The gradient is complete when it is stepped by."""
    models = [sharded(shard=shard, mesh=mesh, mp_policy=MIXED) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    enable_gradient_release(models[0], optimizers[0])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            iterate(model, optimizer, step)
        values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_all_equal(*values, f"replicas, step {step}")
    assert_ranks_agree(values[0], "replicas")


def fsdp_accumulates_by_itself() -> None:
    """Without gradient synchronisation FSDP2 keeps unsharded sums; they are reduced, and stepped by, once."""
    models, optimizers, _ = pair("shadows")
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.set_requires_gradient_sync(False)
            loss_of(model, 2 * step).backward()
            model.set_requires_gradient_sync(True)
            iterate(model, optimizer, 2 * step + 1)
        values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_all_equal(*values, f"accumulated, step {step}")


def modules_may_run_twice() -> None:
    """Autograd adds up what the uses give before FSDP2 reduces it; between them the parameters are gathered again."""
    models, optimizers, release = pair("shadows")
    for model in models:
        model.blocks.append(model.blocks[0])
    for step in range(3):
        with watched(release) as seen:
            iterate(models[0], optimizers[0], step)
        assert len(seen) == len(groups_of(models[0]))
        iterate(models[1], optimizers[1], step)
        values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_all_equal(*values, f"run twice, step {step}")


def models_are_materialised_late() -> None:
    """Local tensors that are replaced take the hooks with them: step() does the first iteration, backward the next."""
    models = []
    optimizers = []
    for _ in range(2):
        with torch.device("meta"):
            model = Net(tied=True)
        for block in model.blocks:
            fully_shard(block, mp_policy=MIXED)
        fully_shard(model, mp_policy=MIXED)
        models.append(model)
        optimizers.append(optimizer_of(model))
    enable_gradient_release(models[0], optimizers[0])
    for model in models:
        model.to_empty(device="cpu")
        for index, param in enumerate(model.parameters()):
            local(param).fill_(0.1 + 0.01 * index)
    for step in range(3):
        loss_of(models[0], step).backward()
        if step:
            assert all(param.grad is None for param in _params(models[0]))
        optimizers[0].step()
        optimizers[0].zero_grad()
        iterate(models[1], optimizers[1], step)
        values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert_all_equal(*values, f"materialised, step {step}")
        assert all(shadow_of(owner.local) is not None for owner in torch_fsdp.owners(models[0]))  # attached again


def parameters_that_are_not_fsdps_wait_for_step() -> None:
    """Whoever reduces their gradients, does it after backward. In the norm they count once, beside sharded ones."""
    models = [sharded() for _ in range(2)]
    for model in models:
        model.plain = nn.Parameter(torch.ones(7))
    optimizers = [optimizer_of(model) for model in models]
    release = enable_gradient_release(models[0], optimizers[0], max_grad_norm=float("inf"))
    for model, optimizer in zip(models, optimizers, strict=True):
        (loss_of(model, 0) + (model.plain * (1 + dist.get_rank())).sum()).backward()
        dist.all_reduce(model.plain.grad)
        assert float(model.plain.grad[0]) == 3.0
        norm = shardops.grad_norm([param.grad for param in model.parameters() if param.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    assert_all_equal(*values, "plain")
    torch.testing.assert_close(release.last_grad_norm, norm, rtol=1e-6, atol=0.0)


def lifetimes() -> None:
    groups_are_freed_before_the_next_is_stepped()
    replicas_step_alike(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp")), fully_shard)
    replicas_step_alike(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), replicate)
    fsdp_accumulates_by_itself()
    modules_may_run_twice()
    models_are_materialised_late()
    parameters_that_are_not_fsdps_wait_for_step()


def test_lifetimes_replicas_and_accumulation(tmp_path: Path) -> None:
    run(tmp_path, 2, lifetimes)


# ---- norms, and gradients that are not finite ------------------------------------------------------------------------


def the_norm_is_global() -> None:
    """Of FSDP2 and HSDP, replicas counted once; the next iteration is clipped by it."""
    meshes = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp"))]
    for mesh in meshes:
        models = [sharded(mesh=mesh) for _ in range(2)]
        optimizers = [optimizer_of(model) for model in models]
        release = enable_gradient_release(models[0], optimizers[0], max_grad_norm=0.1)
        norm: Any = None
        for step in range(3):
            iterate(models[0], optimizers[0], step)
            loss_of(models[1], step).backward()
            grads = [param.grad for param in models[1].parameters() if param.grad is not None]
            true_norm = shardops.grad_norm(grads)
            assert true_norm > 0.1
            if norm is not None:
                torch._foreach_mul_([local(grad) for grad in grads], torch.clamp(0.1 / (norm + 1e-6), max=1.0))
            optimizers[1].step()
            optimizers[1].zero_grad()
            norm = release.last_grad_norm
            torch.testing.assert_close(norm, true_norm, rtol=1e-6, atol=0.0)
            assert_ranks_agree({"norm": norm}, "norm")
            values = [local_values(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
            assert_all_equal(*values, f"clipped, step {step}")


class Factors(nn.Module):
    """The sum of a weight times what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 128))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


def ranks_skip_together() -> None:
    """8-bit moments: the bits of ordinary steps; an infinite gradient in one rank's rows of a group has all ranks skip
    the group, and nobody another one.
    """
    models = [nn.ModuleList([Factors(), Factors()]) for _ in range(2)]
    for module in (*models[0], *models[1]):
        fully_shard(module)
    optimizers = [FusedShardedAdamW(model.parameters(), state_dtype="int8", lr=1e-2) for model in models]
    enable_gradient_release(models[0], optimizers[0])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            factors = ordinary(2, 64, 128, seed=step)
            (model[0](factors[0]) + model[1](factors[1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_all_equal(*map(local_values, models, optimizers), f"8 bits, step {step}")
    model, optimizer = models[0], optimizers[0]
    good, bad = torch.ones(64, 128), torch.ones(64, 128)
    bad[40, 3] = float("inf")  # the second rank's
    for factors, skipped in ((good, 0), (bad, 1), (good, 1)):
        before = [local(module.weight).clone() for module in model]
        (model[0](factors) + model[1](good)).backward()
        optimizer.step()
        assert torch.equal(before[0], local(model[0].weight)) == (factors is bad)
        assert not torch.equal(before[1], local(model[1].weight))
        assert optimizer.last_found_inf == (factors is bad)
        assert optimizer.skipped_steps == skipped
    assert [int(optimizer.state[module.weight]["step"]) for module in model] == [5, 6]


def norms() -> None:
    the_norm_is_global()
    ranks_skip_together()


def test_norms_and_skips(tmp_path: Path) -> None:
    run(tmp_path, 2, norms)


# ---- what is refused -------------------------------------------------------------------------------------------------


def raises_in_backward(loss: Callable[[], Tensor], match: str, model: nn.Module) -> None:
    """The error, on every rank, and no parameter written."""
    before = [local(param).clone() for param in _params(model)]
    found = loss()
    with pytest.raises(RuntimeError, match=match):
        found.backward()
    assert all(map(torch.equal, before, map(local, _params(model))))


def refusals() -> None:
    # A second backward.
    model = sharded(mp_policy=MIXED)
    optimizer = optimizer_of(model)
    enable_gradient_release(model, optimizer)
    loss_of(model, 0).backward()
    raises_in_backward(lambda: loss_of(model, 1), "second gradient", model)

    # A gradient from before.
    model = sharded()
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match="has a gradient"):
        loss_of(model, 0).backward()
        enable_gradient_release(model, optimizer)
    optimizer.zero_grad()
    enable_gradient_release(model, optimizer)
    model.reshard()
    model.head.bias.grad = torch.zeros_like(model.head.bias)
    with pytest.raises(RuntimeError, match="had a gradient before this backward"):
        loss_of(model, 1).backward()

    # An FSDP2 group of which another optimizer steps a part, without and with gradient release.
    for is_enabled in (False, True):
        models = [sharded() for _ in range(2)]
        halves = []
        for model in models:
            params = list(model.parameters())
            halves.append([FusedShardedAdamW(params[::2], lr=1e-2), FusedShardedAdamW(params[1::2], lr=1e-2)])
        enable_gradient_release(models[0], halves[0][0])
        if not is_enabled:
            raises_in_backward(lambda model=models[0]: loss_of(model, 0), "in one FSDP2 group with", models[0])
            continue
        enable_gradient_release(models[0], halves[0][1])
        for step in range(2):
            loss_of(models[0], step).backward()
            assert all(param.grad is None for param in _params(models[0]))
            loss_of(models[1], step).backward()
            for optimizer in (*halves[0], *halves[1]):
                optimizer.step()
                optimizer.zero_grad()
        for first, second in zip(halves[0], halves[1], strict=True):
            assert_all_equal(local_values(models[0], first), local_values(models[1], second), "halves")

    # fp32 gradients that would come too late.
    model = sharded(torch.bfloat16, mp_policy=MIXED)
    optimizer = optimizer_of(model)
    enable_gradient_release(model, optimizer)
    shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    raises_in_backward(lambda: loss_of(model, 0), "came after enable_gradient_release", model)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2, refusals)
