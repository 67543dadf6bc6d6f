"""Copy-in elided: which inputs the override hands over as they lie, and that removing the plug-in leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import Tensors, run, values, whole
from fsdp_watch import BF16, ELIDED, MODES, SHADOW, STOCK, Run, equal_to_stock, net
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import shardops
from shardops import FusedShardedAdamW
from shardops.integrations.fsdp import elision
from shardops.integrations.fsdp.torch_fsdp import owners
from shardops.shadow import shadow_of

# ---- the op ----------------------------------------------------------------------------------------------------------


def copy_in(inputs: list[Tensor]) -> bool:
    """Calls the op as FSDP2 does; whether it handed the inputs over as they lie. What it gives are the inputs."""
    numels = [tensor.numel() for tensor in inputs]
    flat = torch.cat([tensor.clone() for tensor in inputs])
    output = torch.full((sum(numels) * 2,), 7, dtype=inputs[0].dtype)
    sent, same = torch.ops.fsdp.all_gather_copy_in(inputs, output, numels, sum(numels), 1)
    assert same.data_ptr() == output.data_ptr()
    assert_bits_equal(sent, flat)
    assert (output[: sum(numels)] == 7).all()
    is_copied = sent.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    if is_copied:
        assert sent.data_ptr() == output[sum(numels) :].data_ptr()
    else:
        assert (output == 7).all()
        assert sent.untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr()
    return not is_copied


def the_override() -> None:
    """Registered memory only, in order, without gaps and in its own dtype; all else is copied, as torch does."""
    run = Run(ELIDED, fully_shard(Tensors(values([(6, 4)] * 4, seed=0)), mp_policy=BF16))
    set_gradients_to_one(run)
    run.optimizer.step()
    shadows = [shadow_of(owner.local).padded.view(-1) for owner in owners(run.model)]
    assert copy_in(shadows)
    assert copy_in(shadows[:2])
    assert copy_in(shadows[1:])
    assert copy_in([torch.cat(shadows)]) is False  # a temporary
    assert copy_in(list(torch.cat(shadows).split(12))) is False
    assert copy_in(shadows[::-1]) is False
    assert copy_in([shadows[0], shadows[2]]) is False
    assert copy_in([shadows[0], shadows[0]]) is False
    other = torch.ones(48, dtype=torch.bfloat16).split(12)
    assert copy_in([shadows[0], *other[1:]]) is False
    assert copy_in([other[0], *shadows[1:]]) is False
    assert copy_in([tensor.view(torch.float16) for tensor in shadows]) is False
    assert copy_in([tensor.view(torch.int16) for tensor in shadows]) is False
    shardops.fsdp.plug_in_of(run.optimizer).remove()
    assert copy_in(shadows) is False


def set_gradients_to_one(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)


# ---- groups that fall back, and back ---------------------------------------------------------------------------------


def one_moved(mode: str) -> Run:
    """A layer's parameters lose their shadows: its group is copied in until the next step, others are not."""
    run = Run(mode, net())
    run.train(range(2))
    run.optimizer.zero_grad()
    run.model.blocks[0].up.to("cpu")
    run.assert_sent(run.evaluate(), casts=2, copied_in=True)
    run.train(range(2, 4))
    run.assert_sent(run.train(range(4, 5)))
    return run


def plugged_late(mode: str) -> Run:
    """Stock, then shadows, then elided, then shadows again, then stock again."""
    with shardops.fsdp.disabled():
        run = Run(STOCK, net(frozen=True))
        run.train(range(2))
        run.optimizer.zero_grad()
    if mode == STOCK:
        run.train(range(2, 10))
        return run
    assert not any(shadow_of(owner.local) for owner in owners(run.model))
    for step, run.mode in ((2, SHADOW), (4, ELIDED), (6, SHADOW)):
        report = shardops.fsdp.plug_in(run.model, run.optimizer, elide_copy_in=run.mode == ELIDED)
        paths = {item.path for item in report.attachments}
        assert paths == ({ELIDED} if run.mode == ELIDED else {SHADOW, "stock"})
        run.train([step])
        run.assert_sent(run.train([step + 1]), frozen=4)
        run.assert_shadows()
    report.remove()
    run.mode = STOCK
    run.assert_sent(run.train(range(8, 10)))
    assert not any(shadow_of(owner.local) for owner in owners(run.model))
    assert not report.attachments
    return run


def split(mode: str) -> Run:
    """Two optimizers share every group, a third kind trains what is left: shadows are fine, eliding is refused."""
    model = net()
    named = [p for n, p in model.named_parameters() if "gain" not in n]
    run = Run(mode, model, params=named[0::2])
    parts = [run.optimizer, FusedShardedAdamW(named[1::2], lr=3e-3)]
    others: list[torch.optim.Optimizer] = [torch.optim.SGD([b.gain for b in run.model.blocks], lr=0.1)]
    for part in parts if mode == ELIDED else ():
        report = shardops.fsdp.plug_in(run.model, part, elide_copy_in=True)
        assert {item.path for item in report.attachments} == {SHADOW}
        assert all("copy-in stays" in item.why and "another optimizer's" in item.why for item in report.attachments)
    for step in range(4):
        with run.watch() as watch:
            run.model.zero_grad()
            run.backward(step)
        if mode != STOCK:
            # Of the two gains there are no shadows: two casts in each of their gathers.
            assert (watch.casts, watch.as_they_lie) == (4 + (13 if step == 0 else 0), 0)
        for optimizer in (*parts, *others):
            optimizer.step()
    for part in parts:
        shardops.fsdp.plug_in_of(part).remove()
    return run


# ---- removal ---------------------------------------------------------------------------------------------------------


def dispatched() -> str:
    return str(torch._C._dispatch_dump("fsdp::all_gather_copy_in"))


def shadows_of(model: nn.Module) -> list[weakref.ref[Any]]:
    found = [shadow_of(owner.local) for owner in owners(model)]
    assert all(shadow is not None for shadow in found)
    return [weakref.ref(shadow) for shadow in found] + [weakref.ref(s.owner) for s in found if s and s.owner]


def removal() -> None:
    """Of one of two models' plug-ins, then of the other's: hooks, memory and the op's override go, at once."""
    gc.collect()  # models of other tests, and with them the override
    elision.release()
    before = dispatched()
    runs = [Run(ELIDED, net(tied=True, seed=seed)) for seed in (0, 1)]
    plain = Run(SHADOW, net(seed=2))
    assert dispatched() != before
    gc.collect()
    gc.disable()  # so that nothing waits for a collection
    try:
        for run in (*runs, plain):
            run.train(range(2))
        for done, run in enumerate((*runs, plain)):
            held = shadows_of(run.model)
            shardops.fsdp.plug_in_of(run.optimizer).remove()
            assert not any(reference() for reference in held)
            assert not any(hasattr(owner.local, "fsdp_pre_all_gather") for owner in owners(run.model))
            assert not any(hasattr(owner.local, "fsdp_post_all_gather") for owner in owners(run.model))
            assert (dispatched() == before) == (done > 0)
            run.mode = STOCK
            for each in (*runs, plain):
                each.assert_sent(each.train(range(2, 4)))
    finally:
        gc.enable()
    # It stays away, also where the plan is made anew, until it is asked for again.
    for run, mode in zip(runs, (ELIDED, SHADOW), strict=True):
        run.optimizer.zero_grad()
        run.model.to("cpu")
        run.assert_sent(run.train(range(4, 6)))
        run.mode = mode
        shardops.fsdp.plug_in(run.model, run.optimizer, elide_copy_in=mode == ELIDED)
        run.train(range(6, 7))
        run.assert_sent(run.train(range(7, 8)))
        shardops.fsdp.plug_in_of(run.optimizer).remove()
    assert dispatched() == before


def remains_of_a_group() -> None:
    """Shadows of frozen parameters too, which the optimizer does not hold, when the group is no longer whole."""
    model = net(frozen=True)
    run = Run(ELIDED, model, [param for param in model.parameters() if param.requires_grad])
    run.train(range(1))
    held = shadows_of(run.model)
    run.optimizer.zero_grad()
    run.model.blocks[0].down.to("cpu")
    shardops.fsdp.plug_in_of(run.optimizer).remove()
    assert not any(reference() for reference in held)
    assert elision._library is None


def removed_under_a_gather() -> None:
    """The gather under way keeps what it reads, and its copy-out is right; the next one is stock's."""
    run = Run(ELIDED, net())
    run.train(range(2))
    run.optimizer.zero_grad()
    handle = run.model.unshard(async_op=True)
    group = next(owner.group for owner in owners(run.model) if owner.param is run.model.head.weight)
    kept = weakref.ref(group._all_gather_result.all_gather_output)
    assert kept()._shardops_input.numel() * dist.get_world_size() == kept().numel()
    held = shadows_of(run.model)
    shardops.fsdp.plug_in_of(run.optimizer).remove()
    assert not any(reference() for reference in held)
    assert kept()._shardops_input.any()
    expected = whole(run.model.head.weight).bfloat16()
    handle.wait()
    assert_bits_equal(run.model.head.weight.detach(), expected)
    run.model.reshard()
    run.evaluate()
    del group
    assert kept() is None


def gone_with_the_model() -> None:
    """Nothing of ours keeps a model, its optimizer or their memory."""
    run = Run(ELIDED, net())
    run.train(range(2))
    held = [*shadows_of(run.model), weakref.ref(run.model), weakref.ref(run.optimizer)]
    held += [weakref.ref(owner.fsdp_param) for owner in owners(run.model)]
    del run
    gc.collect()
    assert not any(reference() for reference in held)


def eliding() -> None:
    the_override()
    for drive in (one_moved, plugged_late, split):
        equal_to_stock(drive)
    removal()
    remains_of_a_group()
    removed_under_a_gather()
    gone_with_the_model()


def test_eliding(tmp_path: Path) -> None:
    run(tmp_path, 2, eliding)


# ---- memory ----------------------------------------------------------------------------------------------------------


def allocations(function: Callable[[], Any]) -> Counter[int]:
    """How many times the function took how many bytes from torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    return Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


def memory() -> None:
    """At rest a step allocates nothing of a shard's size, and a gather one temporary less than stock: the cast."""
    features = 256
    shard = 2 * features * features * 2 // dist.get_world_size()  # bytes in bf16, of two layers
    gathers = {}
    for mode in MODES:
        with shardops.fsdp.disabled() if mode == STOCK else contextlib.nullcontext():
            layers = [nn.Linear(features, features, bias=False) for _ in range(2)]
            model = fully_shard(nn.Sequential(*layers), mp_policy=BF16)
            run = Run(mode, model, max_grad_norm=1.0)
            for _ in range(3):
                set_gradients_to_one(run)
                model.unshard()
                model.reshard()
                run.optimizer.step()
            largest = max(allocations(run.optimizer.step))
            assert largest < shard // 100, (mode, largest)
            gathers[mode] = allocations(model.unshard)
            model.reshard()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
            assert allocations(model.unshard) == gathers[mode], mode  # rounded anew, into the shadows
            model.reshard()
            shardops.fsdp.plug_in_of(run.optimizer).remove()
    for mode in MODES[1:]:
        assert gathers[STOCK] - gathers[mode] == Counter({shard: 1}), (mode, gathers)
        assert gathers[mode] - gathers[STOCK] == Counter(), (mode, gathers)


def test_memory(tmp_path: Path) -> None:
    run(tmp_path, 2, memory)
