"""The FSDP plug-in when others write, convert, replace or copy parameters: no shadow is stale, copies carry none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import Net, loss_of, run
from fsdp_watch import ELIDED, STOCK, Run, equal_to_stock, net
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import shardops
from shardops.shadow import shadow_of

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")

# ---- writes ----------------------------------------------------------------------------------------------------------


def target(model: Net) -> nn.Parameter:
    """The parameter that is written: 13 rows, uneven on every number of ranks."""
    return model.blocks[0].up.weight


def multiplied(run: Run, folder: Path) -> int:
    target(run.model).mul_(1.5)
    return 1


def copied(run: Run, folder: Path) -> int:
    target(run.model).copy_(target(run.model).detach() * 0.5)
    return 1


def in_inference_mode(run: Run, folder: Path) -> int:
    with torch.inference_mode():
        target(run.model).mul_(1.5)
    return 1


def on_the_local_tensor(run: Run, folder: Path) -> int:
    target(run.model).to_local().mul_(1.25)
    return 1


def initialised(run: Run, folder: Path) -> int:
    nn.init.constant_(target(run.model), 0.25)
    return 1


def state_dict_loaded(run: Run, folder: Path) -> int:
    run.model.load_state_dict(net(seed=7).state_dict())
    return 15


def full_state_dict_loaded(run: Run, folder: Path) -> int:
    weights = Net(seed=7).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(run.model, weights, options=options)
    return 15


def checkpoint_loaded(run: Run, folder: Path) -> int:
    if run.is_stock:
        dcp.save(net(seed=7).state_dict(), checkpoint_id=folder / "checkpoint", no_dist=False)
    dcp.load(run.model.state_dict(), checkpoint_id=folder / "checkpoint")
    return 15


def kept_state_dict_loaded(run: Run, folder: Path) -> int:
    """Into tensors that were handed out before the training: their own version counters tell."""
    dcp.load(run.kept, checkpoint_id=folder / "checkpoint")
    return sum(param.to_local().numel() > 0 for param in run.model.parameters())  # an empty shard is not written


def kept_state_dict_written(run: Run, folder: Path) -> int:
    run.kept["blocks.0.up.weight"].to_local().view(-1).mul_(2.0)
    return 1


def stepped_by(make: Callable[..., torch.optim.Optimizer], run: Run, folder: Path, **options: Any) -> int:
    """An optimizer of another kind over the same parameters; gradients are there from the last step."""
    make(run.model.parameters(), lr=0.05, **options).step()
    return 15


def stepped_by_sgd(run: Run, folder: Path) -> int:
    return stepped_by(torch.optim.SGD, run, folder)


def stepped_by_foreach_sgd(run: Run, folder: Path) -> int:
    return stepped_by(torch.optim.SGD, run, folder, foreach=True)


def stepped_by_fused_adamw(run: Run, folder: Path) -> int:
    return stepped_by(torch.optim.AdamW, run, folder, fused=True)


WRITERS: tuple[Callable[[Run, Path], int], ...] = (
    multiplied,
    copied,
    in_inference_mode,
    on_the_local_tensor,
    initialised,
    state_dict_loaded,
    full_state_dict_loaded,
    checkpoint_loaded,
    kept_state_dict_loaded,
    kept_state_dict_written,
    stepped_by_sgd,
    stepped_by_foreach_sgd,
    stepped_by_fused_adamw,
)


def written(folder: Path, mode: str) -> Run:
    """What was written is rounded anew in the next gather, once; everything else is sent as it is."""
    run = Run(mode, net())
    run.train(range(1))
    run.kept = run.model.state_dict()
    for step, write in enumerate(WRITERS):
        run.train([step])
        with torch.no_grad():
            writes = write(run, folder)
        if not run.is_stock:
            local = target(run.model)._local_tensor
            assert not torch.equal(shadow_of(local).values, local.bfloat16()), write.__name__
        run.assert_sent(run.evaluate(), casts=writes)
        run.assert_sent(run.evaluate())
    run.assert_sent(run.train(range(20, 22)))
    return run


def through_a_tied_name(mode: str) -> Run:
    """A state dict has a tied parameter twice; a write to either is seen."""
    run = Run(mode, net(tied=True))
    kept = run.model.state_dict()
    run.train(range(2))
    with torch.no_grad():
        for name in ("embedding.weight", "head.weight"):
            kept[name].to_local().mul_(1.5)
            run.assert_sent(run.evaluate(), casts=1)
    return run


def in_evaluation(mode: str) -> Run:
    """Averages swapped in and out through ``.data`` around an evaluation: there, everything is rounded anew."""
    run = Run(mode, net())
    run.train(range(2))
    trained = [param.detach().clone() for param in run.model.parameters()]
    run.model.eval()
    with torch.no_grad():
        for factor in (2.0, 0.5, 1.0):
            for param, value in zip(run.model.parameters(), trained, strict=True):
                param.data.copy_(value * factor)
            if factor != 1.0:
                run.assert_sent(run.evaluate(), casts=15)
    run.model.train()
    run.train(range(2, 3))
    run.assert_sent(run.train(range(3, 4)))
    return run


def invisible(mode: str) -> Run:
    """Writes that no version counter tells of are sent once shadows are refreshed, and not before."""
    run = Run(mode, net())
    run.train(range(2))
    param = target(run.model)
    with torch.no_grad():
        for write in (
            lambda: param.data.mul_(1.5),
            lambda: torch._foreach_mul_([param], 0.5),
            lambda: dist.broadcast(param.to_local().view(-1)[:8], src=0),
        ):
            write()
            if not run.is_stock:
                shadow = shadow_of(param._local_tensor)
                assert shadow.is_current(param)
                assert dist.get_rank() == 0 or not torch.equal(shadow.values, param._local_tensor.bfloat16())
                shardops.fsdp.plug_in_of(run.optimizer).refresh_shadows()
            run.assert_sent(run.evaluate(), casts=15)
    run.train(range(2, 4))
    return run


def during_a_step(mode: str) -> Run:
    """Writes between the backward and a step that skips, that has no gradient for the parameter, that does neither."""
    run = Run(mode, net())
    param, optimizer = target(run.model), run.optimizer
    run.train(range(2))
    for kind in ("skipped", "not skipped", "skipped and current", "no gradient"):
        optimizer.zero_grad()
        run.backward(2)
        with torch.no_grad():
            if kind != "skipped and current":
                param.mul_(1.5)
        if kind == "no gradient":
            param.grad = None
        else:
            optimizer.grad_scale = torch.tensor(1.0)
            optimizer.found_inf = torch.tensor(0.0 if kind == "not skipped" else 1.0)
        optimizer.step()
        if kind != "no gradient":
            assert bool(optimizer.last_found_inf) == (kind != "not skipped")
            del optimizer.grad_scale, optimizer.found_inf
        run.assert_shadows()
        # A step that may have been skipped does not vouch for a shadow that was stale before it.
        run.assert_sent(run.evaluate(), casts=0 if kind == "skipped and current" else 1)
    return run


def scaled(mode: str) -> Run:
    """A GradScaler, with an inf in one step, after a write; in the others nothing is cast."""
    run = Run(mode, net(), max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(6):
        run.optimizer.zero_grad()
        with run.watch() as watch:
            loss = loss_of(run.model, step)
            scaler.scale(loss).backward()
        run.keep(loss)
        if step == 2:
            with torch.no_grad():
                target(run.model).mul_(1.5)
                run.model.head.weight.grad.to_local().fill_(torch.inf)
        if step > 0:
            run.assert_sent(watch, casts=1 if step == 3 else 0)
        scaler.step(run.optimizer)
        scaler.update()
        assert bool(run.optimizer.last_found_inf) == (step == 2)
        run.assert_shadows()
    assert run.optimizer.skipped_steps == 1
    return run


def writes(folder: Path) -> None:
    equal_to_stock(during_a_step)
    for drive in (through_a_tied_name, partial(written, folder), in_evaluation, invisible, scaled):
        equal_to_stock(drive, (STOCK, ELIDED))


def test_writes(tmp_path: Path) -> None:
    run(tmp_path, 2, writes, tmp_path)
