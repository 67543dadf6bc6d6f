"""Parameters that are bf16 themselves under FSDP2 and FSDP1: exact masters, gradients in fp32, and other writers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import Net, local, loss_of, run, set_gradients
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

import shardops
import shardops.gradients
from shardops import FusedShardedAdamW

FP32_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded_net(dtype: torch.dtype = torch.bfloat16, policy: MixedPrecisionPolicy = FP32_REDUCE, **options: Any) -> Net:
    """A Net whose weights are bf16 values, whatever dtype holds them."""
    model = Net(tied=True).bfloat16().to(dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


def fp32_values(param: Any) -> Tensor:
    """The local fp32 gradient that a step will read."""
    assert param.grad.dtype == torch.bfloat16
    values = param.grad._shardops_fp32_gradient
    assert values.dtype == torch.float32
    return values


# ---- fp32 gradients --------------------------------------------------------------------------------------------------


def gradients_are_the_fp32_models() -> None:
    """They are the .grad of a model with fp32 parameters of the same values; .grad is them, rounded."""
    low, high = sharded_net(), sharded_net(torch.float32)
    optimizer = FusedShardedAdamW(low.parameters())
    report = shardops.fsdp.plug_in(low, optimizer, fp32_gradients=True)
    assert {a.path for a in report.attachments} == {"exact master, float32 gradients"}
    for step, model in ((step, model) for step in range(3) for model in (low, high)):
        loss_of(model, step).backward()  # the second and third are accumulated into .grad
        if step == 0 and model is low:
            for param in low.parameters():
                assert_bits_equal(local(param.grad), fp32_values(param).bfloat16(), "rounded")
    inexact = 0
    for (name, param), twin in zip(low.named_parameters(), high.parameters(), strict=True):
        assert_bits_equal(fp32_values(param), local(twin.grad), name)
        inexact += int((local(param.grad).float() != local(twin.grad)).sum())
    assert inexact > 0


def training_is_the_fp32_models(**options: Any) -> None:
    """Masters and moments follow an fp32 model's, bit for bit, under the same gradients and with the same clipping."""
    low = sharded_net(**options)
    optimizer = FusedShardedAdamW(low.parameters(), lr=1e-2, max_grad_norm=0.5)
    shardops.fsdp.plug_in(low, optimizer, fp32_gradients=True)
    twins = [nn.Parameter(p.detach().float()) for p in low.parameters()]
    twin_optimizer = FusedShardedAdamW(twins, lr=1e-2, max_grad_norm=0.5)
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(2):
            # Reduced each time in even steps, only at the last microbatch in odd ones.
            low.set_requires_gradient_sync(micro == 1 or step % 2 == 0)
            loss_of(low, 2 * step + micro).backward()
        for param, twin in zip(low.parameters(), twins, strict=True):
            values = fp32_values(param).clone()
            twin.grad = DTensor.from_local(
                values, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        optimizer.step()
        twin_optimizer.step()
        assert_bits_equal(optimizer.last_grad_norm, twin_optimizer.last_grad_norm, "norm")
        assert twin_optimizer.last_grad_norm > 0.5
    for param, twin in zip(low.parameters(), twins, strict=True):
        assert_bits_equal(local(optimizer.master_param(param)), local(twin), "master")
        for key in ("exp_avg", "exp_avg_sq"):
            assert_bits_equal(local(optimizer.state[param][key]), local(twin_optimizer.state[twin][key]), key)


def writing_grad_afterwards_counts() -> None:
    """Where .grad was written, it is what is stepped by, as it is: nobody's clipping or clearing is passed over."""

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # moves no version counter

    def scale_locally(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():  # as GradScaler.unscale_ does
            local(param.grad).mul_(0.375)

    def zero_and_go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 1).backward()

    def zero_one_element(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            local(param.grad).view(-1)[:1] = 0.0

    for write in (clip, scale_locally, zero_and_go_on, zero_one_element):
        models = [sharded_net() for _ in range(2)]
        optimizers = [FusedShardedAdamW(model.parameters(), lr=1e-2) for model in models]
        shardops.fsdp.plug_in(models[0], optimizers[0], fp32_gradients=True)
        for model in models:
            loss_of(model, 0).backward()
        exact = [fp32_values(p).clone() for p in models[0].parameters()]
        for model, optimizer in zip(models, optimizers, strict=True):
            write(model, optimizer)
        for param, twin, was in zip(models[0].parameters(), models[1].parameters(), exact, strict=True):
            # The other model knows no fp32 gradients: its .grad is what the writer made of the rounded ones.
            assert_bits_equal(local(param.grad), local(twin.grad), f"{write.__name__}, .grad")
            expected = local(twin.grad).float()
            if write is zero_one_element:
                expected = torch.cat((expected.view(-1)[:1], was.view(-1)[1:])).view_as(was)
            twin.grad = None
            param_grad = shardops.gradients.local_gradient(param.grad)
            assert param_grad.dtype == torch.float32
            if write is zero_and_go_on:
                # A small first gradient may pass for unwritten under a large second one: within .grad's rounding.
                torch.testing.assert_close(param_grad, expected, rtol=2**-8, atol=0)
            else:
                assert_bits_equal(param_grad, expected, f"{write.__name__}, fp32")


def own_clipping_is_exact() -> None:
    """clip_grad_norm_ takes the norm of the fp32 values, scales these, and rounds them to .grad once."""
    model = sharded_net()
    optimizer = FusedShardedAdamW(model.parameters())
    shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    loss_of(model, 0).backward()
    exact = [fp32_values(p).clone() for p in model.parameters()]
    twins = [
        DTensor.from_local(e, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        for e, p in zip(exact, model.parameters(), strict=True)
    ]
    norm = shardops.clip_grad_norm_(model.parameters(), 0.1)
    assert_bits_equal(norm, shardops.grad_norm(twins), "norm")
    coefficient = 0.1 / (norm + 1e-6)
    assert coefficient < 1
    for param, value in zip(model.parameters(), exact, strict=True):
        assert_bits_equal(fp32_values(param), value * coefficient, "scaled")
        assert_bits_equal(local(param.grad), (value * coefficient).bfloat16(), "rounded")


def other_hooks_and_late_plug_in() -> None:
    """A user's all-reduce hook goes on, and comes back; gradients begun before plugging in are stepped as they are."""
    model = sharded_net()
    calls: list[int] = []
    model.set_all_reduce_hook(lambda output: calls.append(output.numel()))
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    assert len(calls) == 1
    report = shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    loss_of(model, 1).backward()
    assert len(calls) == 2
    assert not any(hasattr(p.grad, "_shardops_fp32_gradient") for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    assert all(hasattr(p.grad, "_shardops_fp32_gradient") for p in model.parameters())
    assert len(calls) == 3
    report.remove()
    loss_of(model, 3).backward()
    assert len(calls) == 4


def where_there_are_none() -> None:
    """Gradients reduced in bf16, and fp32 parameters' own."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded_net(policy=policy)
    optimizer = FusedShardedAdamW(model.parameters())
    report = shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    assert "gradients are reduced in bfloat16: set MixedPrecisionPolicy(reduce_dtype=float32)" in str(report)
    loss_of(model, 0).backward()
    optimizer.step()
    model = sharded_net(torch.float32)
    report = shardops.fsdp.plug_in(model, FusedShardedAdamW(model.parameters()), fp32_gradients=True)
    assert {a.path for a in report.attachments} == {"shadow"}


def fp32_gradients() -> None:
    gradients_are_the_fp32_models()
    training_is_the_fp32_models()
    training_is_the_fp32_models(reshard_after_forward=False)
    writing_grad_afterwards_counts()
    own_clipping_is_exact()
    other_hooks_and_late_plug_in()
    where_there_are_none()


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp32_gradients(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, fp32_gradients)


def fp32_gradients_replicated() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training_is_the_fp32_models(mesh=mesh)


def test_fp32_gradients_replicated(tmp_path: Path) -> None:
    run(tmp_path, 4, fp32_gradients_replicated)


# ---- other writers ---------------------------------------------------------------------------------------------------


def after_writing(model: nn.Module, optimizer: FusedShardedAdamW, write: Callable[[], None], label: str) -> None:
    """The masters are what was written, exactly, and the next step starts there."""
    optimizer.step()
    remainders = [local(optimizer.state[p]["remainder"]) for p in model.parameters() if p in optimizer.state]
    assert any(bool((r.view(torch.int16) != 0).any()) for r in remainders), "nothing that could be stale"
    write()
    params = [p for p in optimizer.param_groups[0]["params"] if p.numel()]
    for param in params:
        assert_bits_equal(local(optimizer.master_param(param)), local(param).float(), label)
    twins = [nn.Parameter(local(p).float()) for p in params]
    twin_optimizer = FusedShardedAdamW(twins, lr=1e-2)
    twin_optimizer.init_states()
    for param, twin in zip(params, twins, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            twin_optimizer.state[twin][key].copy_(local(optimizer.state[param][key]))
        twin.grad = local(param.grad).float()
    optimizer.step()
    twin_optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        assert_bits_equal(local(optimizer.master_param(param)), twin.detach(), f"{label}, stepped")


def writers_of_fsdp2(folder: str) -> None:
    other = Net(tied=True, seed=5).bfloat16()

    def scaled(model: Net) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)

    def written_locally(model: Net) -> None:
        for param in model.parameters():
            param.to_local().detach().fill_(0.25)

    def loaded(model: Net) -> None:
        saved = sharded_net()
        with torch.no_grad():
            for param, source in zip(saved.parameters(), other.parameters(), strict=True):
                set_gradients([param], [source.detach()])
                param.copy_(param.grad)
        model.load_state_dict(saved.state_dict())

    def loaded_from_disk(model: Net) -> None:
        saved = sharded_net()
        loaded(saved)
        dcp.save(saved.state_dict(), checkpoint_id=folder)
        dcp.load(model.state_dict(), checkpoint_id=folder)  # into the parameters, in place; moves no version counter

    def stepped_by_another(model: Net) -> None:
        torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()  # moves no version counter

    def written_unseen(model: Net) -> None:
        for param in model.parameters():
            param.data.fill_(0.125)
        optimizer.refresh_masters()

    for write in (scaled, written_locally, loaded, loaded_from_disk, stepped_by_another, written_unseen):
        model = sharded_net()
        optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        after_writing(model, optimizer, lambda write=write, model=model: write(model), write.__name__)
    state_dicts_that_nobody_writes(f"{folder}-together")
    hooks_go_with_their_optimizer()


def state_dicts_that_nobody_writes(folder: str) -> None:
    """A state dict that is only read leaves masters exact; one loaded in place with the optimizer's brings its own."""
    models = [sharded_net() for _ in range(3)]
    optimizers = [FusedShardedAdamW(model.parameters(), lr=1e-2) for model in models]
    for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
        loss_of(model, 0).backward()
        optimizer.step()
    dcp.save(models[1].state_dict(), checkpoint_id=f"{folder}-model")
    dcp.save({"model": models[1].state_dict(), "state": optimizers[1].state_dict()["state"]}, checkpoint_id=folder)
    loss_of(models[2], 3).backward()  # elsewhere, with other masters
    optimizers[2].step()
    read = {"model": models[2].state_dict(), "state": optimizers[2].state_dict()["state"]}
    dcp.load(read, checkpoint_id=folder)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
    for param, *others in zip(*(model.parameters() for model in models), strict=True):
        expected = local(optimizers[0].master_param(param))
        for other, optimizer in zip(others, optimizers[1:], strict=True):
            assert_bits_equal(local(optimizer.master_param(other)), expected, "master")


def hooks_go_with_their_optimizer() -> None:
    """Optimizers that are made and dropped leave no hooks on the modules."""
    model = sharded_net()
    before = len(model.head._state_dict_hooks)
    for _ in range(3):
        optimizer = FusedShardedAdamW(model.parameters())
        assert len(model.head._state_dict_hooks) > before
        del optimizer
        gc.collect()
    assert len(model.head._state_dict_hooks) == before


def writers_of_fsdp1() -> None:
    warnings.simplefilter("ignore")  # FSDP1 is deprecated and says so in many places

    def summoned(model: FSDP) -> None:
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)

    def loaded(model: FSDP) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    def written(model: FSDP) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)

    for orig in (True, False):
        for write in (summoned, loaded, written):
            model = Net(tied=True).bfloat16()
            options: dict[str, Any] = {"use_orig_params": orig, "device_id": torch.device("cpu")}
            for index, block in enumerate(model.blocks):
                model.blocks[index] = FSDP(block, **options)
            model = FSDP(model, **options)
            optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
            loss_of(model, 0).backward()
            label = f"{write.__name__}, use_orig_params={orig}"
            after_writing(model, optimizer, lambda write=write, model=model: write(model), label)


@pytest.mark.parametrize("world_size", [2])
def test_other_writers(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, writers_of_fsdp2, str(tmp_path / "checkpoint"))
    run(tmp_path, world_size, writers_of_fsdp1)


# ---- FSDP1's groups --------------------------------------------------------------------------------------------------


def norms_of_fsdp1_strategies() -> None:
    """Plugged in, the norm is right under every strategy; FSDP1's parameters do not say what they are sharded over."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    norms = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD):
        for orig in (True, False):
            options: dict[str, Any] = {"use_orig_params": orig, "device_id": torch.device("cpu")}
            if strategy == ShardingStrategy.HYBRID_SHARD:
                options["device_mesh"] = mesh
            model = Net(tied=True)
            # One block differs in its strategy from the rest: the groups of one optimizer may be several.
            model.blocks[0] = FSDP(model.blocks[0], use_orig_params=orig, device_id=torch.device("cpu"))
            model = FSDP(model, sharding_strategy=strategy, **options)
            optimizer = FusedShardedAdamW(model.parameters(), max_grad_norm=1.0)
            shardops.fsdp.plug_in(model, optimizer)
            loss_of(model, 0).backward()
            optimizer.step()
            norms.append(float(optimizer.last_grad_norm))
    plain = Net(tied=True)
    for rank in range(dist.get_world_size()):
        (loss_of(plain, 0, rank) / dist.get_world_size()).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    # The gradients are means over ranks in different orders; that, not the norm, makes the last bits.
    assert norms == pytest.approx([expected] * len(norms), rel=1e-6)


def test_norms_of_fsdp1_strategies(tmp_path: Path) -> None:
    run(tmp_path, 4, norms_of_fsdp1_strategies)
