"""The FSDP plug-in when parameters are converted, replaced or copied: gathers stay right, and copies carry no hooks."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from distributed import run
from fsdp_watch import ELIDED, STOCK, Run, equal_to_stock, net
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardops
from shardops.integrations.fsdp.torch_fsdp import owners
from shardops.shadow import shadow_of, versions

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")

# ---- conversions and replacements ------------------------------------------------------------------------------------


def moved(run: Run) -> None:
    run.model.to("cpu")


def cast_and_back(run: Run) -> None:
    run.model.double().float()


def emptied(run: Run) -> None:
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.to_empty(device="cpu")
    run.model.load_state_dict(weights)


def assigned(run: Run) -> None:
    """The module has other parameters then, and wants another optimizer."""
    run.model.load_state_dict(net(seed=7).state_dict(), assign=True)


def assigned_the_old(run: Run) -> None:
    run.model.load_state_dict({name: tensor.clone() for name, tensor in run.model.state_dict().items()}, assign=True)


@contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def loaded_by_swap(run: Run) -> None:
    with swapping():
        run.model.load_state_dict(net(seed=7).state_dict())


def converted_by_swap(run: Run) -> None:
    with swapping():
        run.model.double().float()


CONVERSIONS = (moved, cast_and_back, emptied, assigned, assigned_the_old, loaded_by_swap, converted_by_swap)


def converted(mode: str) -> Run:
    """Attributes are gone then, gathers are stock's and right, and the next step attaches anew."""
    run = Run(mode, net(frozen=True))
    run.train(range(2))
    for step, convert in enumerate(CONVERSIONS):
        run.optimizer.zero_grad()
        convert(run)
        assert not any(hasattr(owner.local, name) for owner in owners(run.model) for name in HOOKS)
        watch = run.evaluate()
        assert (watch.casts, watch.as_they_lie) == (15, 0)
        if "assigned" in convert.__name__:
            run.build()
        run.train([step, step + 1])
        run.assert_sent(run.train([step + 2]), frozen=4)
        run.assert_shadows()
    return run


def conversions() -> None:
    equal_to_stock(converted)


def test_conversions(tmp_path: Path) -> None:
    run(tmp_path, 3, conversions)


# ---- copies ----------------------------------------------------------------------------------------------------------


def averaged(mode: str) -> Run:
    """Deep copies average the parameters, and take their place for an evaluation: no original's shadow is sent."""
    run = Run(mode, net())
    run.optimizer.zero_grad()
    averages = {name: copy.deepcopy(param) for name, param in run.model.named_parameters()}
    with torch.no_grad():  # the version counts of a parameter and its copy are equal from here on
        for param in run.model.parameters():
            param.to_local().mul_(1.0)
    for step in range(3):
        run.train([step])
        with torch.no_grad():
            for name, param in run.model.named_parameters():
                averages[name].lerp_(param, 0.5)
                assert versions(averages[name]) == versions(param) or run.is_stock
    trained = dict(run.model.named_parameters())  # a state dict would have shadows rounded anew
    run.model.load_state_dict(averages, assign=True)
    run.evaluate()
    run.model.load_state_dict(trained, assign=True)
    run.evaluate()
    return run


def into_another_model(mode: str) -> Run:
    """One model takes deep copies of another's parameters, which goes on training."""
    source = Run(mode, net())
    source.train(range(2))
    source.optimizer.zero_grad()
    run = Run(mode, net(seed=3))
    run.train(range(2))
    run.model.load_state_dict({k: copy.deepcopy(p) for k, p in source.model.named_parameters()}, assign=True)
    source.train(range(2, 3))
    run.evaluate()
    run.build()
    run.train(range(3, 5))
    run.assert_sent(run.train(range(5, 6)))
    if not run.is_stock:
        shardops.fsdp.plug_in_of(source.optimizer).remove()
    return run


def taken_over(mode: str) -> Run:
    """One model takes another's very parameters, which replaces them and then goes; both had shadows."""
    source = Run(mode, net())
    source.train(range(2))
    run = Run(mode, net(seed=3))
    run.train(range(1))
    run.model.load_state_dict(dict(source.model.named_parameters()), assign=True)
    source.model.load_state_dict({k: p.detach() * 0.5 for k, p in run.model.named_parameters()}, assign=True)
    with torch.no_grad():
        run.model.blocks[0].up.weight.mul_(1.5)
    run.evaluate()
    del source
    gc.collect()
    run.evaluate()
    run.build()
    run.train(range(2, 4))
    run.assert_sent(run.train(range(4, 5)))
    return run


def carry_no_hooks() -> None:
    """Copies, and what is saved, are plain tensors."""
    run = Run(ELIDED, net(tied=True))
    run.train(range(1))
    run.optimizer.zero_grad()
    param = run.model.blocks[0].up.weight
    assert all(hasattr(param._local_tensor, name) for name in HOOKS)
    saved: Any = {"param": param, "local": param._local_tensor, "model": run.model.state_dict()}
    saved["params"] = run.model.state_dict(keep_vars=True)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=True), copy.deepcopy(saved), {"copy": copy.copy(param._local_tensor)}]
    copies.append({"pickled": torch.load(io.BytesIO(file.getvalue()), weights_only=False)["local"]})
    found = 0
    for tensor in leaves(copies):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        assert not any(hasattr(local, name) for name in HOOKS)
        assert shadow_of(local) is None
        found += 1
    assert found > 50
    for tensor, original in ((copies[0]["param"], param), (copies[1]["param"], param)):
        assert torch.equal(tensor._local_tensor, original._local_tensor)
    run.train(range(1, 2))
    run.assert_sent(run.train(range(2, 3)))  # and the originals kept theirs


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)


def copies() -> None:
    equal_to_stock(averaged)
    for drive in (into_another_model, taken_over):
        equal_to_stock(drive, (STOCK, ELIDED))
    carry_no_hooks()


def test_copies(tmp_path: Path) -> None:
    run(tmp_path, 2, copies)
