"""8-bit moments, 24-bit masters and stochastic rounding in training: under the FSDP2 plug-in, under DDP, and skipped.

A gradient that is not finite on one rank skips the step on all of them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import (
    Mirror,
    Tensors,
    assert_all_equal,
    assert_ranks_agree,
    local,
    run,
    set_gradients,
    states,
    whole,
)
from fsdp_watch import Watch
from reference import assert_bits_equal
from test_state_modes_fsdp import MODES, everything, given_steps, gradients, optimizer_of, start
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardops
from shardops.gradients import attach_fp32
from shardops.shadow import shadow_of

# ---- gradients that are not finite on one rank ----------------------------------------------------------------------


def one_bad_gradient() -> None:
    """One value on the last rank: the step is skipped on all of them, and counted by all; nothing moves."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for mode in MODES:
        if "int8" not in mode:
            continue
        for bad in (float("nan"), float("inf")):
            for clipping in ({}, {"max_grad_norm": 1.0}):
                model = Tensors(start(mode))
                fully_shard(model)
                params = list(model.parameters())
                optimizer = optimizer_of(params, mode, **clipping)
                given_steps(params, optimizer, mode, range(2))
                before = {name: local(t).clone() for name, t in [*states(optimizer), *model.named_parameters()]}
                set_gradients(params, gradients(mode, 2))
                if rank == last:
                    local(params[0].grad).view(-1)[0] = bad
                optimizer.step()
                after = {name: local(t) for name, t in [*states(optimizer), *model.named_parameters()]}
                assert_all_equal(after, before, f"{mode}, {bad}:")
                counted = {"skipped": optimizer.skipped_steps, "found": optimizer.last_found_inf}
                assert_all_equal(counted, {"skipped": torch.tensor(1.0), "found": torch.tensor(1.0)})
                given_steps(params, optimizer, mode, range(3, 4))
                assert (float(optimizer.skipped_steps), float(optimizer.last_found_inf)) == (1.0, 0.0)
                assert optimizer.state[params[0]]["step"] == 3
                moved = [not torch.equal(local(p), before[n]) for n, p in model.named_parameters() if local(p).numel()]
                assert all(moved)


# ---- the plug-in -----------------------------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Wide(nn.Module):
    """Large enough for codes: two linears whose rows are longer than a block, with biases that are not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(200, 131)
        self.down = nn.Linear(131, 200, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def wide_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * step + dist.get_rank())
    x = torch.randn(9, 200, generator=generator)
    return (model(x.to(next(model.parameters()).dtype)).float() - x.roll(1, dims=1)).square().mean()


def wide_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = wide_loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def wide(dtype: torch.dtype, seed: int = 0) -> Wide:
    model = Wide(seed).to(dtype)
    return fully_shard(model, mp_policy=BF16)


def path_a() -> None:
    """fp32 parameters and shadows that the step writes: training is stock FSDP2's, elided or not, bit for bit."""
    mode = "int8, fp32 parameters"
    with shardops.fsdp.disabled():
        stock = wide(torch.float32)
        stock_optimizer = optimizer_of(list(stock.parameters()), mode)
        expected = wide_steps(stock, stock_optimizer, range(5))
        assert not any(shadow_of(param._local_tensor) for param in stock.parameters())
    for elided in (False, True):
        model = wide(torch.float32)
        optimizer = optimizer_of(list(model.parameters()), mode)
        if elided:
            shardops.fsdp.plug_in(model, optimizer, elide_copy_in=True)
        losses = wide_steps(model, optimizer, range(2))
        with Watch(model) as watch:
            losses += wide_steps(model, optimizer, range(2, 5))
        label = f"{mode}, elided={elided}:"
        assert watch.casts == 0, label  # the step itself wrote what was gathered, though it might have been skipped
        assert (watch.as_they_lie > 0, watch.copied_in > 0) == (elided, not elided), label
        for step, pair in enumerate(zip(losses, expected, strict=True)):
            assert_bits_equal(*pair, f"{label} loss {step}")
        model.reshard()
        twins = (list(model.parameters()), list(stock.parameters()))
        stock.reshard()
        assert_all_equal(everything(twins[0], optimizer), everything(twins[1], stock_optimizer), label)
        # A step that is skipped leaves shadows as they are: up to date, or known not to be.
        wide_loss(model, 5).backward()
        params = list(model.parameters())
        local(params[0].grad).fill_(float("nan"))
        with torch.no_grad():
            params[1].mul_(2.0)
        optimizer.step()
        assert optimizer.skipped_steps == 1
        for index, param in enumerate(params):
            shadow = shadow_of(param._local_tensor)
            assert shadow.is_current(param) == (index != 1), f"{label} shadow {index}"
            if index != 1:
                assert_bits_equal(shadow.values, param._local_tensor.detach().bfloat16(), f"{label} shadow {index}")
        shardops.fsdp.plug_in_of(optimizer).remove()


def path_b() -> None:
    """bf16 parameters under gradients in fp32; masters leave and enter as a model's state dict."""
    for mode in ("int8, split24", "int8, split32", "float32, split24", "bf16, stochastic"):
        model = wide(torch.bfloat16)
        params: list[Any] = list(model.parameters())
        optimizer = optimizer_of(params, mode)
        shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
        # Of an fp32 model the exact masters are the parameters; elsewhere a twin steps under the same gradients.
        is_exact = "split32" in mode
        twins = [nn.Parameter(p.detach().to(torch.float32 if is_exact else p.dtype, copy=True)) for p in params]
        twin_optimizer = optimizer_of(twins, mode)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            losses.append(wide_loss(model, step))
            losses[-1].backward()
            for twin, param in zip(twins, params, strict=True):
                exact = param.grad._shardops_fp32_gradient.clone()
                twin.grad = param.grad.to(twin.dtype, copy=True)
                if is_exact:
                    local(twin.grad).copy_(exact)
                else:
                    attach_fp32(twin.grad, exact)
            optimizer.step()
            twin_optimizer.step()
        assert losses[-1] < losses[0]
        made = everything(params, optimizer)
        if is_exact:
            masters = {f"parameter {i}": whole(optimizer.master_param(p)) for i, p in enumerate(params)}
            made = {name: tensor for name, tensor in made.items() if "remainder" not in name} | masters
        assert_all_equal(made, everything(twins, twin_optimizer), mode)

        model.reshard()
        saved = optimizer.fp32_state_dict(model)
        for param, value in zip(params, saved.values(), strict=True):
            assert_bits_equal(local(value), local(optimizer.master_param(param)), "the model's state dict")
        inexact = sum(int((local(saved[n]) != local(p).float()).sum()) for n, p in model.named_parameters())
        assert (inexact > 0) == ("stochastic" not in mode)
        other = wide(torch.bfloat16, seed=1)
        again = optimizer_of(list(other.parameters()), mode)
        again.load_fp32_state_dict(other, saved)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        same = [(list(other.parameters()), again), (params, optimizer)]
        assert_all_equal(everything(*same[0]), everything(*same[1]), f"{mode}, loaded:")
        given_steps(*same[0], mode, range(5, 7))
        given_steps(*same[1], mode, range(5, 7))
        assert_all_equal(everything(*same[0]), everything(*same[1]), f"{mode}, continued:")
        # All of them fit into 32 bits, and those of 24 into 24.
        third = wide(torch.bfloat16, seed=2)
        exact = optimizer_of(list(third.parameters()), "int8, split24" if "split24" in mode else "int8, split32")
        exact.load_fp32_state_dict(third, saved)
        for name, param in third.named_parameters():
            assert_bits_equal(local(exact.master_param(param)), local(saved[name]), f"{mode}, moved: {name}")


# ---- DDP -------------------------------------------------------------------------------------------------------------


def replicated() -> None:
    """Replicas stay one run, and it is that of an optimizer alone under the same gradients."""
    for mode in MODES:
        model = DistributedDataParallel(Wide().to(MODES[mode][0]), gradient_as_bucket_view=True)
        params = list(model.parameters())
        optimizer = optimizer_of(params, mode)
        mirror = Mirror(params, lambda tensors, mode=mode: optimizer_of(tensors, mode))
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = wide_loss(model, step)
            loss.backward()
            losses.append(float(loss.detach()))
            mirror.step()
            optimizer.step()
        mirror.compare(optimizer, mode)
        assert_ranks_agree(everything(params, optimizer), mode)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, losses)
        assert everyone[0] != everyone[1], "ranks saw the same data: the case shows nothing"


def trained() -> None:
    one_bad_gradient()
    path_a()
    path_b()
    replicated()


def test_trained(tmp_path: Path) -> None:
    run(tmp_path, 2, trained)
