"""Low-precision parameters under FSDP2: optimizers that come and go, gradients that are gone, state dicts that stay."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from distributed import local, loss_of, run
from reference import assert_bits_equal
from test_fsdp_masters import fp32_values, sharded_net

import shardops
from shardops import FusedShardedAdamW


def several_optimizers() -> None:
    """One after another, and two at once: each steps by the values that were reduced; the last leaves no hooks."""
    model = sharded_net()
    params = list(model.parameters())
    loss_of(model, 0).backward()
    assert not any(hasattr(p.grad, "_shardops_fp32_gradient") for p in params)
    optimizer = FusedShardedAdamW(params)
    shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    expected = [fp32_values(p).clone() for p in params]
    assert not all(torch.equal(value, value.bfloat16().float()) for value in expected)
    for _ in range(2):
        optimizer.zero_grad()
        del optimizer
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in params)  # type: ignore[attr-defined]
        optimizer, other = FusedShardedAdamW(params[::2]), FusedShardedAdamW(params[1::2])
        reports = [shardops.fsdp.plug_in(model, each, fp32_gradients=True) for each in (optimizer, other)]
        loss_of(model, 0).backward()
        for param, value in zip(params, expected, strict=True):
            assert_bits_equal(fp32_values(param), value, "several optimizers")
        other.zero_grad()
        reports[1].remove()
        del other
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    assert_bits_equal(fp32_values(params[0]), expected[0], "the other was removed")
    reports[0].remove()
    assert not any(p._post_accumulate_grad_hooks for p in params)  # type: ignore[attr-defined]


def cleared_by_a_hook_before_ours() -> None:
    """An optimizer in the backward clears .grad in its hook: there is nothing to complete."""
    model = sharded_net()
    params = list(model.parameters())
    cleared = model.blocks[0].up.weight  # others of its group come after it
    cleared.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    optimizer = FusedShardedAdamW(params)
    shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    loss_of(model, 0).backward()
    assert cleared.grad is None
    for param in params:
        if param.grad is not None:
            assert_bits_equal(fp32_values(param).bfloat16(), local(param.grad), "the parameters after it")


def written_late_through_a_state_dict(folder: str) -> None:
    """A state dict that was made before training, and is loaded into after it, once it is kept and once dropped."""
    saved = sharded_net()
    with torch.no_grad():
        for param in saved.parameters():
            param.fill_(0.125)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    for master_weights in ("split32", "fp32"):
        model = sharded_net()
        optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, master_weights=master_weights)
        optimizer.init_states()
        kept: Any = model.state_dict()
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        masters = [optimizer.master_param(p).clone() for p in model.parameters()]
        optimizer.zero_grad()
        optimizer.step()
        for param, master in zip(model.parameters(), masters, strict=True):
            assert_bits_equal(local(optimizer.master_param(param)), local(master), "nobody has written")
        for is_dropped in (False, True):
            dcp.load(kept, checkpoint_id=folder)
            if is_dropped:
                kept = None
            for param in model.parameters():
                assert_bits_equal(local(optimizer.master_param(param)), local(param).float(), master_weights)
                assert bool((local(param) == 0.125).all())
            optimizer.zero_grad()
            loss_of(model, 2).backward()
            optimizer.step()
            exact = [local(optimizer.master_param(p)) for p in model.parameters()]
            assert any(not torch.equal(m, m.bfloat16().float()) for m in exact), "the next step's masters are kept"
        assert not optimizer._tracker._aliases
    sources = sharded_net(), sharded_net()
    optimizers = [FusedShardedAdamW(source.parameters(), lr=1e-2) for source in sources]
    for optimizer in optimizers:
        optimizer.init_states()
    read = {"model": sources[1].state_dict(), "state": optimizers[1].state_dict()["state"]}
    for step, (source, optimizer) in enumerate(zip(sources, optimizers, strict=True)):
        loss_of(source, step).backward()
        optimizer.step()
    together = {"model": sources[0].state_dict(), "state": optimizers[0].state_dict()["state"]}
    dcp.save(together, checkpoint_id=f"{folder}-together")
    dcp.load(read, checkpoint_id=f"{folder}-together")
    for param, other in zip(*(source.parameters() for source in sources), strict=True):
        expected = local(optimizers[0].master_param(param))
        assert_bits_equal(local(optimizers[1].master_param(other)), expected, "loaded late, with its master")


def lifetimes(folder: str) -> None:
    several_optimizers()
    cleared_by_a_hook_before_ours()
    written_late_through_a_state_dict(folder)


def test_lifetimes(tmp_path: Path) -> None:
    run(tmp_path, 2, lifetimes, str(tmp_path / "checkpoint"))
