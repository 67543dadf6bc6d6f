"""clip_grad_norm_ and the norm's all-reduces: beside torch's, and beside the exact norm over every kind of sharding."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import UNEVEN, assert_ranks_agree, exact_values, local, run, values, whole
from reference import DTYPES, assert_bits_equal, strided, ulps
from test_collectives import exact_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW

NORM_TYPES = (1.0, 2.0, math.inf)
torch_clip = torch.nn.utils.clip_grad_norm_


def with_grads(grads: Sequence[Tensor | None]) -> list[nn.Parameter]:
    """A parameter for each gradient (a vector where there is none)."""
    params = []
    for grad in grads:
        param = nn.Parameter(torch.ones(3) if grad is None else torch.zeros_like(grad))
        param.grad = None if grad is None else grad.detach().clone()
        params.append(param)
    return params


class NoHostSync(TorchDispatchMode):
    """Raises where a tensor's value comes to the host: on a device that would wait for all work before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"):
            raise AssertionError(f"{func} is a host sync")
        return func(*args, **(kwargs or {}))


# ---- beside torch's, in one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_gradients_have_torchs_bits(dtype: torch.dtype | None, max_norm: float, backend: str) -> None:
    """Scaled by a norm that is ours; dtype None: gradients of all dtypes."""
    shapes = (*UNEVEN, (0, 4), ())
    grads = values(shapes, seed=1, dtype=dtype or torch.float32)
    if dtype is None:
        grads = [grad.to(DTYPES[i % len(DTYPES)]) for i, grad in enumerate(grads)]
    grads.append(strided(grads[0]))
    ours, theirs = with_grads(grads), with_grads(grads)
    counts = [p.grad._version for p in ours]
    norm = shardops.clip_grad_norm_(ours, max_norm, backend=backend)
    assert (type(norm), norm.dtype, norm.shape) == (Tensor, torch.float32, ())
    assert ulps(float(norm), exact_norm([p.grad for p in theirs], 2.0)) <= 1
    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
    for a, b, count in zip(ours, theirs, counts, strict=True):
        assert_bits_equal(a.grad, b.grad)
        assert a.grad._version > count  # autograd sees the write


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clips_as_torch_where_the_norms_are_equal(norm_type: float) -> None:
    """Values of which torch's order of float32 sums rounds none either: 5 and 12 make 13."""
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([[0.0], [12.0]]).bfloat16()]
    if norm_type != 2.0:
        grads = [*exact_values(UNEVEN, seed=2), torch.ones(3).bfloat16()]
    ours, theirs = with_grads(grads), with_grads(grads)
    norm = shardops.clip_grad_norm_((p for p in ours), 2.0, norm_type)
    assert_bits_equal(norm, torch_clip(theirs, 2.0, norm_type), "norm")
    assert norm > 2.0
    for a, b in zip(ours, theirs, strict=True):
        assert_bits_equal(a.grad, b.grad)


def test_takes_what_torchs_takes() -> None:
    """One tensor, nothing, an exhausted generator, parameters without gradients, one that is listed twice."""

    def outcome(clip: Callable[..., Tensor], make: Callable[[list[nn.Parameter]], Any], **options: Any) -> Any:
        params = with_grads([torch.tensor([3.0, 4.0]), None, torch.tensor(12.0)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norm = clip(make(params), 1.0, **options)
        return norm, len(caught), [p.grad for p in params if p.grad is not None]

    for make in (
        lambda params: params[0],
        lambda params: [],
        lambda params: (p for p in ()),
        lambda params: params[1:2],
        lambda params: dict.fromkeys(params),
        lambda params: params + params[:1],
        lambda params: [nn.Parameter(torch.empty(2, device="meta")), *params],
    ):
        for foreach in (None, False, True):
            ours, theirs = (outcome(clip, make, foreach=foreach) for clip in (shardops.clip_grad_norm_, torch_clip))
            assert ours[1] == theirs[1] == isinstance(make([nn.Parameter()]), types.GeneratorType)  # warned of
            for a, b in zip([ours[0], *ours[2]], [theirs[0], *theirs[2]], strict=True):
                torch.testing.assert_close(a, b, rtol=2**-23, atol=0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite(bad: float, norm_type: float) -> None:
    """Scaled as torch's does; with error_if_nonfinite refused, and then nothing is touched."""
    grads = [torch.tensor([1.0, bad]), torch.ones(3)]
    for is_error in (False, True):
        ours, theirs = with_grads(grads), with_grads(grads)
        if is_error:
            for clip, params in ((shardops.clip_grad_norm_, ours), (torch_clip, theirs)):
                with pytest.raises(RuntimeError, match="cannot be clipped"):
                    clip(params, 1.0, norm_type, error_if_nonfinite=True)
        else:
            norm = shardops.clip_grad_norm_(ours, 1.0, norm_type)
            assert_bits_equal(norm, torch_clip(theirs, 1.0, norm_type))
        for a, b in zip(ours, theirs, strict=True):
            assert_bits_equal(a.grad, b.grad)


def test_refuses_before_it_writes(dtensor: Tensor) -> None:
    pending = DTensor.from_local(torch.ones(4), dtensor.device_mesh, [Partial()], run_check=False)
    cases: list[tuple[Tensor, dict[str, Any], type[Exception], str]] = [
        (pending, {}, ValueError, "still pending"),
        (torch.ones(2, dtype=torch.float64), {}, TypeError, "float64"),
        (torch.eye(2).to_sparse(), {}, TypeError, "layout torch.sparse"),
        (torch.ones(2), {"norm_type": 3}, ValueError, "norm_type is 3"),
        (torch.ones(2), {"backend": "cpp2"}, ValueError, "cpp2"),
    ]
    for grad, options, error, match in cases:
        params = with_grads([torch.full((3,), 7.0), dtensor, torch.ones(2)])
        params[2].grad = None
        params[2] = nn.Parameter(grad.detach())
        params[2].grad = grad
        with pytest.raises(error, match=match):
            shardops.clip_grad_norm_(params, 1.0, **options)
        assert_bits_equal(params[0].grad, torch.full((3,), 7.0))
        assert_bits_equal(local(params[1].grad), torch.ones(4))


def test_no_host_sync(dtensor: Tensor) -> None:
    grads = [torch.full((3,), 2.0), dtensor, torch.ones(2).bfloat16()]
    params = with_grads(grads)
    optimizers = [FusedShardedAdamW(with_grads(grads), max_grad_norm=1.0) for _ in range(2)]
    handle = shardops.share_grad_norm(optimizers)
    for optimizer in optimizers:
        optimizer.step()
    with NoHostSync():
        for norm_type in NORM_TYPES:
            shardops.clip_grad_norm_(params, 1.0, norm_type)
        for optimizer in optimizers:
            optimizer.step()  # by the shared norm
        handle.remove()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()  # the layout of its own norm is there
    with NoHostSync(), pytest.raises(AssertionError, match=r"_local_scalar_dense.* is a host sync"):
        shardops.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


# ---- over several ranks ----------------------------------------------------------------------------------------------


@contextmanager
def reductions() -> Iterator[list[int]]:
    """The sizes of the groups that are all-reduced over meanwhile."""
    sizes: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        sizes.append(dist.get_world_size(group))
        return reduce(tensor, *args, group=group, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        yield sizes


def put(tensor: Tensor, mesh: DeviceMesh, *placements: Any) -> Tensor:
    return distribute_tensor(tensor, mesh, list(placements), src_data_rank=None)


def check(
    label: str,
    grads: Sequence[Tensor],
    everything: Sequence[Tensor],
    sizes: list[int],
    group: Any = None,
    like_torch: bool = False,
) -> None:
    """Norm and clipping of this rank's gradients are those of ``everything``, in all-reduces over so many ranks."""
    for norm_type in NORM_TYPES:
        expected = exact_norm(everything, norm_type)
        with reductions() as seen:
            norm = shardops.grad_norm(grads, group=group, norm_type=norm_type)
        assert seen == sizes, (label, seen)
        assert ulps(float(norm), expected) <= 1, (label, norm_type, float(norm), expected)
        params, theirs = with_grads(grads), with_grads(grads)
        counts = [p.grad._version for p in params]
        with reductions() as seen:
            clipped = shardops.clip_grad_norm_(params, expected / 2, norm_type, group=group)
        assert seen == sizes, (label, seen)
        assert_bits_equal(clipped, norm, label)
        assert_ranks_agree({"norm": norm}, label)
        coefficient = torch.clamp(expected / 2 / (norm + 1e-6), max=1.0)
        for param, grad, count in zip(params, grads, counts, strict=True):
            # Elementwise, so of the whole tensor, and of each replica.
            assert_bits_equal(local(param.grad), local(grad) * coefficient, label)
            assert param.grad._version > count
        if like_torch and norm_type != math.inf:  # torch refuses an empty shard its inf-norm
            # A float32 norm of float32 norms: a few roundings of it, and of what is scaled by it.
            torch.testing.assert_close(norm, whole(torch_clip(theirs, expected / 2, norm_type)), rtol=2**-20, atol=0)
            for param, twin in zip(params, theirs, strict=True):
                torch.testing.assert_close(local(param.grad), local(twin.grad), rtol=2**-19, atol=0)


def over_two() -> None:
    tensors = values(UNEVEN, seed=3)
    one = init_device_mesh("cpu", (2,))
    check("FSDP", [put(t, one, Shard(0)) for t in tensors], tensors, [2], like_torch=True)
    check("replicated", [put(t, one, Replicate()) for t in tensors], tensors, [])
    for shape, sizes in (((1, 2), [2]), ((2, 1), [])):
        hybrid = init_device_mesh("cpu", shape)
        check("HSDP", [put(t, hybrid, Replicate(), Shard(0)) for t in tensors], tensors, sizes, like_torch=True)
    # Whole on every rank: no all-reduce. One of which this rank has no gradient: it takes part.
    check("DDP", tensors, tensors, [])
    params = [nn.Parameter(put(torch.zeros(4), one, Shard(0)))]
    if dist.get_rank() == 0:
        params[0].grad = put(torch.ones(4), one, Shard(0))
    assert shardops.clip_grad_norm_(params, 1.0) == torch.tensor(2.0).sqrt()


def sharded_meshes() -> None:
    tensors = values(UNEVEN, seed=4)
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = init_device_mesh("cpu", (4,))
    mixed = [
        put(tensors[0], two, Shard(0), Shard(1)),
        put(tensors[1], two, Shard(0), Replicate()),
        put(tensors[2], two, Replicate(), Shard(1)),
        put(tensors[3], two["dp"], Shard(0)),
        put(tensors[4], two["dp"], Replicate()),
        put(tensors[5], two, Replicate(), Replicate()),
        put(tensors[6], two["tp"], Shard(0)),
    ]
    check("FSDP", [put(t, one, Shard(0)) for t in tensors], tensors, [4], like_torch=True)
    check("HSDP", [put(t, two, Replicate(), Shard(0)) for t in tensors], tensors, [2], like_torch=True)
    check("TP + FSDP", [put(t, two, Shard(0), Shard(0)) for t in tensors], tensors, [4], like_torch=True)
    check("mixed meshes", mixed, tensors, [4])
    with pytest.raises(RuntimeError, match="mesh"):
        torch_clip(with_grads(mixed), 1.0)
    # Sharded over dp only, on either mesh: its group is enough.
    check("one dimension of several", mixed[1:2] + mixed[3:6], [tensors[i] for i in (1, 3, 4, 5)], [2])
    # One mesh refolded: the same four ranks. A whole plain gradient beside.
    refolded = [put(t, one, Shard(0)) for t in tensors[:3]] + [put(t, two, Shard(0), Shard(0)) for t in tensors[3:5]]
    check("refolded", [*refolded, *mixed[5:], torch.ones(3)], [*tensors, torch.ones(3)], [4])
    # No group of a mesh's ranks: one all-reduce for each dimension, over the parameters on parts of the mesh too.
    with mock.patch.object(shardops.collectives, "_default_group", return_value=None):
        check("no covering group", mixed, tensors, [2, 2])


def unrelated_meshes() -> None:
    """A mesh that only some ranks are on: these reduce over it, and only they know of it."""
    tensors = values(UNEVEN, seed=5)
    one = init_device_mesh("cpu", (4,))
    some = DeviceMesh("cpu", [0, 1])
    on_all, on_some = [put(t, one, Shard(0)) for t in tensors[:4]], [put(t, some, Shard(0)) for t in tensors[4:]]
    with reductions() as seen:
        norm = shardops.grad_norm([*on_some, *on_all])
    assert seen == ([4, 2] if dist.get_rank() < 2 else [4])
    expected = exact_norm(tensors if dist.get_rank() < 2 else tensors[:4], 2.0)
    assert ulps(float(norm), expected) <= 1
    check("given the group", [*on_some, *on_all], tensors, [4], group=dist.group.WORLD)


def different_parameters() -> None:
    """Pipeline stages and experts: what ``group`` is for."""
    rank = dist.get_rank()
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, world = stages["pp"].get_group(), dist.group.WORLD
    by_stage = [values(UNEVEN, seed=6), [*values(UNEVEN[:3], seed=7), torch.full((2, 2), 9.0)]]
    stage = by_stage[rank // 2]
    everything = [t for tensors in by_stage for t in tensors]
    sharded = [put(t, stages["dp"], Shard(0)) for t in stage]
    check("pipeline", sharded, everything, [2, 2], group=pp)
    check("pipeline, all ranks", sharded, everything, [4], group=world)
    check("pipeline of whole parameters", stage, everything, [2], group=pp)
    halves = [*sharded[:2], *(put(t, stages["dp"], Replicate()) for t in stage[2:])]
    check("pipeline, some replicated", halves, everything, [2, 2], group=pp)
    check("pipeline, some replicated, all ranks", halves, everything, [4], group=world)

    # Experts that are plain, other ones on each rank (none on the last), beside dense DTensors.
    ep = stages["dp"].get_group()  # pairs
    dense = values(UNEVEN, seed=8)
    experts = [values(UNEVEN[r:], seed=9 + r) if r < 3 else [] for r in range(4)]
    one = init_device_mesh("cpu", (4,))
    on_all = [put(t, one, Shard(0)) for t in dense]
    check("experts", [*on_all, *experts[rank]], [*dense, *(t for own in experts for t in own)], [4], group=world)
    # Pairs of ranks with two experts, the same on both pairs; dense parameters on two dimensions or one.
    pair = [*dense, *experts[0], *experts[1]]
    check("experts in pairs", [*on_all, *experts[rank % 2]], pair, [4, 2], group=ep)
    hybrid = [put(t, stages, Replicate(), Shard(0)) for t in dense]
    check("experts under HSDP", [*hybrid, *experts[rank % 2]], pair, [2], group=ep)
    # Experts sharded over the ranks that hold the same one.
    shards = [put(t, stages["pp"], Shard(0)) for t in experts[rank % 2]]
    check("sharded experts", [*on_all, *shards], pair, [4, 2, 2], group=ep)
    check("sharded experts, all ranks", [*on_all, *shards], pair, [4], group=world)
    last = dist.new_group([3])
    if rank < 3:
        with pytest.raises(ValueError, match=f"this rank, {rank}, is not in the group"):
            shardops.grad_norm(dense, group=last)


def nonfinite_on_one_rank() -> None:
    """A NaN or inf that one rank holds reaches all, through each kind of reduction."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for bad in (math.nan, math.inf):
        whole_one = torch.ones(4, 2)
        whole_one[3, 1] = bad
        for mesh, placements, group in (
            (two, (Shard(0), Shard(1)), None),
            (two["b"], (Shard(0),), two["a"].get_group()),
            (two["b"], (Shard(0),), dist.group.WORLD),
        ):
            grad = put(whole_one if group is None or dist.get_rank() > 1 else torch.ones(4, 2), mesh, *placements)
            for norm_type in NORM_TYPES:
                params = with_grads([grad])
                norm = shardops.clip_grad_norm_(params, 1.0, norm_type, group=group)
                assert norm.isnan() if math.isnan(bad) else norm == math.inf, (bad, norm_type, norm)
                with pytest.raises(RuntimeError, match="cannot be clipped"):
                    shardops.clip_grad_norm_(with_grads([grad]), 1.0, norm_type, True, group=group)


def norm_squared(optimizer: FusedShardedAdam, sizes: list[int]) -> float:
    """Of integers, so it is one; by a step, with all-reduces over so many ranks."""
    with reductions() as seen:
        optimizer.step()
    assert seen == sizes
    return round(float(optimizer.last_grad_norm) ** 2, 3)


def optimizer_groups() -> None:
    """``process_group`` without FSDP1 parameters; with them, theirs alone; and what an integration knows instead."""
    rank = dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    inner = pairs["b"].get_group()
    mine = torch.full((2,), float(1 + rank))
    params = with_grads([put(torch.ones(4), pairs["a"], Shard(0)), mine])

    ones = 4.0 * 2  # of each of the inner group's ranks
    pair = [2 * (1 + r) ** 2 for r in (rank // 2 * 2, rank // 2 * 2 + 1)]
    optimizer = FusedShardedAdamW(params, max_grad_norm=1.0, process_group=inner)
    assert norm_squared(optimizer, [2, 2]) == ones + sum(pair)
    optimizer.process_group = None
    assert norm_squared(optimizer, [2]) == 4.0 + 2 * (1 + rank) ** 2

    params = with_grads([mine, torch.full((3,), 2.0)])
    params[0]._fsdp_flattened = True
    optimizer = FusedShardedAdamW(params, max_grad_norm=1.0)
    assert norm_squared(optimizer, [4]) == 2 * (1 + 4 + 9 + 16) + 12
    optimizer.process_group = inner
    assert norm_squared(optimizer, [2]) == sum(pair) + 12
    optimizer._shard_group_of = lambda param: None  # an integration found it whole
    assert norm_squared(optimizer, []) == 2 * (1 + rank) ** 2 + 12
    optimizer.process_group = None
    optimizer._shard_group_of = lambda param: inner
    assert norm_squared(optimizer, [2]) == norm_squared(copy.copy(optimizer), [2]) == sum(pair) + 12


def over_four() -> None:
    sharded_meshes()
    unrelated_meshes()
    different_parameters()
    nonfinite_on_one_rank()
    optimizer_groups()


def test_over_two_ranks(tmp_path: Path) -> None:
    run(tmp_path, 2, over_two)


def test_over_four_ranks(tmp_path: Path) -> None:
    run(tmp_path, 4, over_four)
