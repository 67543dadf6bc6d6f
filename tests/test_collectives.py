"""all_gather_cast and grad_norm over 1 to 4 ranks, and the harness that the distributed tests run on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import UNEVEN, RankError, assert_ranks_agree, exact_values, run, values
from reference import DTYPES, assert_bits_equal, awkward, strided, ulps, unaligned
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardops

# ---- the harness -----------------------------------------------------------------------------------------------------


def rank_and_argument(argument: str) -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), argument


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_harness_returns_results_by_rank(tmp_path: Path) -> None:
    assert run(tmp_path, 3, rank_and_argument, "x") == [(rank, 3, "x") for rank in range(3)]


def test_harness_reports_the_rank_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback(.|\n)*KeyError: 'only here'"):
        run(tmp_path, 2, fail_on_one)


def test_harness_ends_a_hang(tmp_path: Path) -> None:
    """The message shows where the rank was: the deadline of the ranks' own collectives, and their stacks."""
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2: no answer(.|\n)*in hang_on_one"):
        run(tmp_path, 2, hang_on_one, deadline=3.0)
    assert time.monotonic() - start < 40.0


# ---- all_gather_cast -------------------------------------------------------------------------------------------------


def shards_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A rank's shards: uneven shapes, an empty one, one that starts at an odd element and one with gaps."""
    shards = [awkward(math.prod(s), 100 * rank + i, dtype).view(s) for i, s in enumerate((*UNEVEN, (0, 4)))]
    return [*shards, unaligned(awkward(17, 100 * rank + 50, dtype)), strided(awkward(9, 100 * rank + 51, dtype))]


def gather_all() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for source in DTYPES:
        for target in DTYPES:
            label = f"{source} -> {target}"
            mine = shards_of(rank, source)
            expected = [
                torch.stack([theirs.to(target) for theirs in same_shard])
                for same_shard in zip(*(shards_of(r, source) for r in range(world_size)), strict=True)
            ]
            before = [shard.clone() for shard in mine]
            views = shardops.all_gather_cast(mine, target)
            later, work = shardops.all_gather_cast(mine, target, async_op=True)
            work.wait()
            named = shardops.all_gather_cast(mine, target, backend="reference")
            for got in (views, later, named):
                assert len(got) == len(expected)
                for index, (view, values_) in enumerate(zip(got, expected, strict=True)):
                    assert_bits_equal(view, values_, f"{label}, shard {index}")
                # One buffer, each view in its place of a rank's row.
                assert len({view.untyped_storage().data_ptr() for view in got}) == 1
                offsets = torch.tensor([0, *(shard.numel() for shard in mine)]).cumsum(0)[:-1].tolist()
                assert [view.storage_offset() for view in got] == offsets
                row = sum(shard.numel() for shard in mine)
                assert all(view.stride(0) == row for view in got if view.numel() > 0 and world_size > 1)
            for shard, was in zip(mine, before, strict=True):
                assert_bits_equal(shard, was, f"{label}, input", exact=True)


def gather_in_group() -> None:
    """Ranks 1 and 2 of 3 among themselves."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    (view,) = shardops.all_gather_cast([torch.full((2, 2), float(rank))], torch.bfloat16, group=group)
    assert_bits_equal(view, torch.tensor([1.0, 2.0]).bfloat16()[:, None, None].expand(2, 2, 2))


def gather_nothing() -> None:
    with pytest.raises(ValueError, match="shards is empty"):
        shardops.all_gather_cast([], torch.float32)
    with pytest.raises(TypeError, match="int64"):
        shardops.all_gather_cast([torch.zeros(2, dtype=torch.int64)], torch.float32)
    views = shardops.all_gather_cast([torch.zeros(0, 3)], torch.bfloat16)
    assert_bits_equal(views[0], torch.zeros(dist.get_world_size(), 0, 3, dtype=torch.bfloat16))


def gather() -> None:
    gather_all()
    gather_nothing()
    if dist.get_world_size() == 3:
        gather_in_group()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_cast(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, gather)


# ---- grad_norm -------------------------------------------------------------------------------------------------------


def exact_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """With an exact sum: squares of float32 numbers are exact in float64, and fsum rounds once."""
    flat = torch.cat([t.reshape(-1).double() for t in tensors]).abs()
    if norm_type == math.inf:
        return float(flat.max())
    return math.fsum(flat.tolist()) if norm_type == 1.0 else math.sqrt(math.fsum(flat.square().tolist()))


def norm_of_plain_shards() -> None:
    """Plain tensors sharded over a group, as FSDP1's and ZeRO's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    if world_size == 2:  # a published case: 3 and 4 make 5
        grads = [torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0])]
        assert shardops.grad_norm(grads, group=group) == 5.0
        assert shardops.grad_norm(grads, group=group, norm_type=math.inf) == 4.0
        assert shardops.grad_norm(grads, group=group, norm_type=1.0) == 7.0
        assert shardops.grad_norm(grads) == (3.0 if rank == 0 else 4.0)  # without a group: whole on every rank

    # Rank 1 has other numbers of tensors and elements than rank 0; the last rank has none, and may not hang the rest.
    everyone = [values(UNEVEN[: len(UNEVEN) - r], seed=r) for r in range(world_size)]
    if world_size > 1:
        everyone[-1] = []
    for norm_type in (1.0, 2.0, math.inf):
        norm = shardops.grad_norm(everyone[rank], group=group, norm_type=norm_type)
        assert (norm.dtype, norm.shape) == (torch.float32, ())
        # The sum is float64 with compensation, so the norm may differ from the exact one by its own rounding only.
        expected = exact_norm([t for theirs in everyone for t in theirs], norm_type)
        assert ulps(float(norm), expected) <= 1, (norm_type, float(norm), expected)
        assert_ranks_agree({"norm": norm}, f"norm {norm_type}")


def norm_sees_nonfinite() -> None:
    """One rank's NaN or inf is every rank's, whatever the others hold and however a collective's maximum treats NaN."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for where in range(world_size):
        for bad in (math.nan, math.inf, -math.inf):
            grads = [torch.tensor([1.0, bad if rank == where else 2.0])]
            for norm_type in (1.0, 2.0, math.inf):
                norm = shardops.grad_norm(grads, group=dist.group.WORLD, norm_type=norm_type)
                assert norm.isnan() if math.isnan(bad) else norm == math.inf, (where, bad, norm_type, norm)
    # An inf on one rank and a NaN on another is NaN.
    if world_size > 1:
        grads = [torch.tensor([math.inf if rank == 0 else math.nan])]
        for norm_type in (1.0, 2.0, math.inf):
            assert shardops.grad_norm(grads, group=dist.group.WORLD, norm_type=norm_type).isnan()


def norm_of_dtensors() -> None:
    """Sharded on any dimension, uneven, replicated: replicas count once."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = values(UNEVEN, seed=5)
    for norm_type in (1.0, 2.0, math.inf):
        placements = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], [Replicate()], [Shard(2)], [Shard(0)]]
        grads = [distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in zip(tensors, placements, strict=True)]
        norm = shardops.grad_norm(grads, norm_type=norm_type)
        expected = exact_norm(tensors, norm_type)
        assert ulps(float(norm), expected) <= 1, (norm_type, float(norm), expected)
        assert_ranks_agree({"norm": norm})
        replicated = [distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in tensors]
        assert ulps(float(shardops.grad_norm(replicated, norm_type=norm_type)), expected) <= 1
    # A generator, bf16, and values whose sum has no rounding: the same bits at any world size.
    grads = (
        distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in exact_values(UNEVEN, 6, torch.bfloat16)
    )
    total = math.fsum(float(x) ** 2 for t in exact_values(UNEVEN, 6) for x in t.reshape(-1))
    assert shardops.grad_norm(grads) == torch.tensor(math.sqrt(total), dtype=torch.float64).float()


def norm_refuses() -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="still pending"):
        shardops.grad_norm([pending])
    with pytest.raises(ValueError, match="norm_type is 3"):
        shardops.grad_norm([torch.ones(1)], norm_type=3)
    assert shardops.grad_norm([]) == 0.0
    assert shardops.grad_norm([], group=dist.group.WORLD) == 0.0
    assert shardops.grad_norm(torch.tensor([3.0, 4.0])) == 5.0
    with pytest.raises(TypeError, match=r"grads\[1\] is None; .* leave out parameters without a gradient"):
        shardops.grad_norm([torch.ones(2), None])


def norm_all() -> None:
    norm_of_plain_shards()
    norm_sees_nonfinite()
    norm_of_dtensors()
    norm_refuses()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_grad_norm(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, norm_all)
