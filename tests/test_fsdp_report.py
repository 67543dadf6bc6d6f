"""What the FSDP plug-in leaves to torch, and says so: the bits are stock's there, and nothing is attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Net, Tensors, run, values
from fsdp_watch import BF16, ELIDED, MODES, SHADOW, STOCK, Run, equal_to_stock, net
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import shardops
from shardops import FusedShardedAdamW
from shardops.integrations.fsdp.torch_fsdp import is_foreign, owners
from shardops.shadow import shadow_of


def told(run: Run) -> dict[str, tuple[str, str]]:
    """By name, path and reason of every parameter."""
    plugged = shardops.fsdp.plug_in(run.model, run.optimizer, elide_copy_in=run.mode == ELIDED)
    return {item.name: (item.path, item.why) for item in plugged.attachments}


def assert_stock(run: Run, reason: str, names: set[str] | None = None) -> None:
    """These parameters (None: all) are stock for this reason, the others are not; and copy-in stays for it."""
    report = told(run)
    assert set(report) == {name for name, _ in run.model.named_parameters()}
    names = set(report) if names is None else names
    for name, (path, why) in report.items():
        if name in names:
            assert path == "stock", (name, path)
            assert reason in why, (name, why)
        else:
            assert path in (SHADOW, ELIDED), (name, path, why)
            assert run.mode == SHADOW or path == ELIDED or ("copy-in stays" in why and reason in why), (name, why)
    text = str(shardops.fsdp.plug_in_of(run.optimizer))
    assert f"stock: {len(names)} parameter{'' if len(names) == 1 else 's'}, " in text
    assert reason in text
    by_name = dict(run.model.named_parameters())
    for owner in owners(run.model):
        name = next(name for name, param in by_name.items() if param is owner.param)
        assert (shadow_of(owner.local) is None) == (name in names), name


def offloaded(mode: str) -> Run:
    run = Run(mode, net(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    run.train(range(3))
    if mode != STOCK:
        run.reshard()
        assert_stock(run, "CPU offload: torch sends a copy of the shard")
    return run


def sharded_on_columns(mode: str) -> Run:
    """Some parameters on dim 1: those and only those are stock; nothing of their group is elided."""
    model = Net()
    model.embedding, model.head = nn.Embedding(11, 8), nn.Linear(8, 11)
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 8))])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    fully_shard(model.blocks[0], mp_policy=BF16, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    run = Run(mode, fully_shard(model, mp_policy=BF16))
    run.train(range(3))
    if mode != STOCK:
        run.reshard()
        assert_stock(run, "sharded on dim 1", {"blocks.0.0.weight", "blocks.0.2.weight"})
    with run.watch() as watch:
        run.backward(3)
    assert run.is_stock or watch.casts == 4  # two parameters, gathered twice
    return run


def foreign(mode: str) -> Run:
    """A hook that somebody else put on a local tensor stays, and is the one that is called."""
    run: Run | None = None
    model = net()
    calls = []
    owner = next(o for o in owners(model) if o.param is model.blocks[0].up.weight)
    fsdp_param, local = owner.fsdp_param, owner.local

    def pre(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        calls.append(mesh)
        data = fsdp_param._sharded_param_data.view(fsdp_param.padded_sharded_param_size)
        return (data.to(mp_policy.param_dtype),), None

    def post(outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], ())

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    run = Run(mode, model)
    run.train(range(3))
    if mode != STOCK:
        run.reshard()
        assert_stock(run, "Tensor brings an all-gather hook of its own", {"blocks.0.up.weight"})
        shardops.fsdp.plug_in_of(run.optimizer).remove()
    assert local.fsdp_pre_all_gather is pre
    assert len(calls) == 6
    return run


class Subclass(torch.Tensor):
    pass


def nothing_to_cast() -> None:
    """Low-precision parameters, fp32 compute, a parameter of nobody's: each has its reason."""
    run = Run(SHADOW, net(MixedPrecisionPolicy()))
    assert_stock(run, "computes in float32: nothing is cast")
    run = Run(SHADOW, net(MixedPrecisionPolicy(param_dtype=torch.float64)))
    assert_stock(run, "computes in float64")
    model = net()
    other = nn.Parameter(torch.ones(5))
    run = Run(SHADOW, model, [*model.parameters(), other])
    report = told(run)
    assert report.pop("parameter 15") == ("stock", "not sharded by FSDP")
    assert set(report.values()) == {(SHADOW, "")}
    model = net().to(torch.bfloat16)
    run = Run(SHADOW, model)
    assert set(told(run).values()) == {("exact master", "")}
    assert not any(shadow_of(owner.local) for owner in owners(model))
    assert is_foreign(torch.ones(2).as_subclass(Subclass))
    assert not is_foreign(torch.ones(2))


def on_meta(mode: str) -> Run:
    """The model is sharded on the meta device, the optimizer made there; it is attached once there is memory."""
    model = Net().to("meta")
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16)
    run = Run(mode, fully_shard(model, mp_policy=BF16))
    if mode != STOCK:
        assert_stock(run, "on the meta device: looked at again at the next step")
    run.model.to_empty(device="cpu")
    run.model.load_state_dict(net(seed=3).state_dict())
    run.train(range(1))
    if mode != STOCK:
        paths = {item.path for item in shardops.fsdp.plug_in_of(run.optimizer).attachments}
        assert paths == {mode}
        run.reshard()
        run.assert_shadows()
    run.train(range(1, 2))
    run.assert_sent(run.train(range(2, 4)))
    return run


def refused() -> None:
    model = net()
    with pytest.raises(TypeError, match="optimizer is of type AdamW; FusedShardedAdam"):
        shardops.fsdp.plug_in(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with shardops.fsdp.disabled():
        optimizer = FusedShardedAdamW(net().parameters())
    with pytest.raises(ValueError, match="15 parameters are none of the model's 15: shard the model first"):
        shardops.fsdp.plug_in(model, optimizer)
    assert not any(shadow_of(owner.local) for owner in owners(model))


def text() -> None:
    """One line for each path and reason; names are the root's."""
    model = net(frozen=True)
    with shardops.fsdp.disabled():
        optimizer = FusedShardedAdamW(model.parameters())
    assert str(shardops.fsdp.plug_in_of(optimizer)) == "no parameters"
    report = shardops.fsdp.plug_in(model, optimizer)
    assert report is shardops.fsdp.plug_in_of(optimizer)
    assert str(report) == (
        "shadow: 13 parameters, 493 elements (blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.down.weight, ...)\n"
        "stock: 2 parameters, 104 elements (blocks.0.up.weight, blocks.0.up.bias): frozen: the step never writes it"
    )
    assert [(item.name, item.shape, item.numel) for item in report.attached()][-1] == ("head.bias", (11,), 11)
    report = shardops.fsdp.plug_in(model, optimizer, elide_copy_in=True)
    assert str(report).startswith("shadow, copy-in elided: 15 parameters, 597 elements (blocks.0.norm.weight, ")
    assert "\n" not in str(report)
    run = Run(SHADOW, Tensors(values([(4, 2)], seed=0)))  # not under FSDP2 at all
    assert str(shardops.fsdp.plug_in_of(run.optimizer)) == (
        "stock: 1 parameter, 8 elements (parameter 0): not sharded by FSDP"
    )


def reports() -> None:
    for drive in (offloaded, sharded_on_columns, foreign, on_meta):
        equal_to_stock(drive)
    nothing_to_cast()
    refused()
    text()


def test_reports(tmp_path: Path) -> None:
    run(tmp_path, 2, reports)


def a_smaller_world(mode: str) -> Run:
    """``reshard_after_forward=2`` of four ranks: stock, since torch refuses hooks there; other groups are not."""
    model = Net()
    fully_shard(model.blocks[0], mp_policy=BF16, reshard_after_forward=2)
    fully_shard(model.blocks[1], mp_policy=BF16)
    run = Run(mode, fully_shard(model, mp_policy=BF16))
    run.train(range(1))
    if mode != STOCK:
        names = {name for name, _ in model.named_parameters() if "blocks.0" in name}
        assert_stock(run, "reshard_after_forward is an int", names)
    run.train(range(1, 3))
    with run.watch() as watch:
        run.backward(3)
    # Six parameters in the forward; in the backward, torch's own smaller shards of them.
    assert run.is_stock or watch.casts == 6
    model.blocks[0].set_reshard_after_forward(True)
    run.optimizer.zero_grad()
    if mode == ELIDED:
        shardops.fsdp.plug_in(model, run.optimizer, elide_copy_in=True)
    elif mode == SHADOW:
        shardops.fsdp.plug_in(model, run.optimizer)
    run.train(range(4, 6))
    run.assert_sent(run.train(range(6, 7)))
    return run


def smaller_worlds() -> None:
    equal_to_stock(a_smaller_world, MODES)


def test_resharding_to_a_smaller_world(tmp_path: Path) -> None:
    run(tmp_path, 4, smaller_worlds)
