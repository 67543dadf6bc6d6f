"""Planned bytes are live bytes on each rank: FSDP2 over uneven shards, and DistributedDataParallel, in every mode.

Beside them the buffers that FSDP2 has at its fullest moment, which are planned by a formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run
from test_memory_live import MODES, Net, held, loss_of, optimizer_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import shardops
from shardops.memory import live_nbytes, plan
from shardops.shadow import shadow_of

BF16 = torch.bfloat16
# Every dtype, every storage of moments and every master, not all of their combinations: those are in one process.
FEWER_MODES = [mode for mode in MODES if (mode[1] == "int8") == (mode[0] == BF16)]


def sharded(model: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def planned(model: nn.Module, **options: Any) -> dict[str, int]:
    """Of this rank."""
    ranks = plan(model, world_size=dist.get_world_size(), ranks=True, **options).ranks
    assert ranks is not None
    return ranks[dist.get_rank()]


def fsdp2() -> None:
    for dtype, state_dtype, master in FEWER_MODES:
        model = sharded(Net(dtype))
        expected = planned(model, zero=3, state_dtype=state_dtype, master=master)
        optimizer = optimizer_of(model, state_dtype, master)
        loss_of(model).backward()
        optimizer.step()
        model.reshard()
        found = live_nbytes(model.parameters(), optimizer)
        assert found == held(expected), (dtype, state_dtype, master, dist.get_rank())


def shadows() -> None:
    model = sharded(Net(torch.float32), BF16)
    options: dict[str, Any] = {"zero": 3, "compute_dtype": BF16}
    expected = planned(model, **options)["buffers"] - planned(model, shadows=False, **options)["buffers"]
    optimizer = optimizer_of(model, "float32", "auto")
    loss_of(model).backward()
    optimizer.step()
    model.reshard()
    found = [shadow_of(param._local_tensor) for param in model.parameters()]
    assert sum(shadow.padded.untyped_storage().nbytes() for shadow in found if shadow is not None) == expected > 0
    assert live_nbytes(model.parameters(), optimizer) == held(planned(model, **options))


def fp32_gradients() -> None:
    """Beside them FSDP2's own, rounded."""
    model = sharded(Net(BF16), BF16)
    options: dict[str, Any] = {"zero": 3, "buffers": True}
    optimizer = optimizer_of(model, "float32", "auto")
    shardops.fsdp.plug_in(model, optimizer, fp32_gradients=True)
    loss_of(model).backward()
    optimizer.step()
    model.reshard()
    expected = planned(model, grad_dtype=torch.float32, **options)
    assert live_nbytes(model.parameters(), optimizer) == held(expected)
    rounded = {g.to_local().untyped_storage() for p in model.parameters() if (g := p.grad) is not None}
    stored = sum({storage.data_ptr(): storage.nbytes() for storage in rounded}.values())
    assert stored == expected["buffers"] - planned(model, **options)["buffers"]


def released(releases: bool) -> None:
    """Gradients at their most are those of the largest group, if they are released; else of all."""
    model = sharded(Net(BF16))
    expected = planned(model, zero=3, gradient_release=releases)
    params = list(model.parameters())  # sharded: while a forward or backward runs the root's are not
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, live_nbytes(params)["gradients"])

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(look)
    optimizer = optimizer_of(model, "int8", "split24")
    if releases:
        shardops.enable_gradient_release(model, optimizer)
    loss_of(model).backward()
    optimizer.step()
    assert most == expected["gradients"]


def ddp() -> None:
    for as_views in (False, True):
        model = DistributedDataParallel(Net(BF16), gradient_as_bucket_view=as_views)
        expected = planned(model, state_dtype="int8", master="split32")
        optimizer = optimizer_of(model, "int8", "split32")
        loss_of(model).backward()
        optimizer.step()
        assert live_nbytes(model.parameters(), optimizer) == held(expected)


def everything() -> None:
    fsdp2()
    shadows()
    fp32_gradients()
    released(False)
    released(True)
    ddp()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, everything)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Blocks of equal size between an embedding and a head; activations are next to nothing."""

    def __init__(self, width: int, vocabulary: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak_nbytes(step: Any) -> int:
    """The most that torch's allocator held at once beyond what it held before, but for what gloo copies."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events: list[tuple[int, int, int, bool]] = []

    def walk(nodes: Any, is_copied: bool) -> None:
        for node in nodes:
            if node.typed[0].name == "Allocation":
                allocation = node.typed[1]
                events.append((node.start_time_ns, allocation.ptr, allocation.alloc_size, is_copied))
            walk(node.children, is_copied or node.name == "aten::clone")

    walk(record.profiler.kineto_results.experimental_event_tree(), False)
    copied: set[int] = set()
    now = most = 0
    for _, address, nbytes, is_copied in sorted(events):
        if nbytes > 0 and is_copied:
            copied.add(address)
        elif nbytes < 0 and address in copied:
            copied.remove(address)
        else:
            now += nbytes
            most = max(most, now)
    return most


def fullest(vocabulary: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes at the fullest moment of a backward: measured, planned."""
    model = sharded(Plain(512, vocabulary, 4).to(dtype), BF16)
    optimizer = shardops.FusedShardedAdamW(model.parameters())
    tokens = torch.arange(4)

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    expected = planned(model, zero=3, compute_dtype=BF16, shadows=False)
    return peak_nbytes(step), expected["buffers"] + expected["gradients"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("vocabulary", [100, 4000])
def test_what_fsdp2_holds_at_its_fullest(tmp_path: Path, vocabulary: int, dtype: torch.dtype) -> None:
    for measured, expected in run(tmp_path, 2, fullest, vocabulary, dtype):
        assert 0.7 * expected <= measured <= 1.05 * expected, measured / expected
