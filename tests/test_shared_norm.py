"""share_grad_norm: several optimizers clip by one norm, taken once a step and never stale."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import UNEVEN, assert_ranks_agree, exact_values, local, run, values
from optim_helpers import assert_same, make_params, snapshot
from reference import assert_bits_equal, ulps
from test_clipping import norm_squared, put, reductions, with_grads
from test_collectives import exact_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardops
from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.collectives import NormLayout
from shardops.optim import clipping

MAX_NORM = 2.0


def set_exact(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    for param, grad in zip(params, exact_values([p.shape for p in params], seed), strict=True):
        param.grad = (grad * scale).to(param.dtype)


def parts(**options: Any) -> tuple[list[nn.Parameter], list[FusedShardedAdam]]:
    """Parameters, and three optimizers that share a norm over them; the last does not clip."""
    params = make_params(((7, 5), (3,), (4, 2), (6,), (2, 2)))
    split = (params[:2], params[2:4], params[4:])
    maxima = (MAX_NORM, MAX_NORM, None)
    optimizers = [FusedShardedAdamW(p, lr=1e-2, max_grad_norm=m, **options) for p, m in zip(split, maxima, strict=True)]
    return params, optimizers


@contextmanager
def passes() -> Iterator[list[int]]:
    """For each norm that is taken meanwhile, the number of gradients."""
    counts: list[int] = []
    norm = NormLayout.norm

    def counted(self: NormLayout, grads: Sequence[Tensor | None], *args: Any, **options: Any) -> Tensor:
        counts.append(sum(grad is not None for grad in grads))
        return norm(self, grads, *args, **options)

    with mock.patch.object(NormLayout, "norm", counted):
        yield counts


def exact(params: Sequence[Tensor]) -> Tensor:
    return torch.tensor(exact_norm([p.grad for p in params if p.grad is not None]))


# ---- one process -----------------------------------------------------------------------------------------------------


def test_clips_as_one_optimizer_over_all(backend: str) -> None:
    params, optimizers = parts(backend=backend)
    twins = copy.deepcopy(params)
    clipped = FusedShardedAdamW(twins[:4], lr=1e-2, backend=backend)
    unclipped = FusedShardedAdamW(twins[4:], lr=1e-2, backend=backend)
    shardops.share_grad_norm(optimizers)
    for step in range(3):
        set_exact(params, step)
        set_exact(twins, step)
        if step == 1:
            params[2].grad = twins[2].grad = None
        with passes() as counts:
            for optimizer in optimizers if step < 2 else reversed(optimizers):
                optimizer.step()
        assert counts == [5 if step != 1 else 4]
        for optimizer in optimizers[:2]:
            assert_bits_equal(optimizer.last_grad_norm, exact(twins), "norm")
        assert optimizers[2].last_grad_norm is None
        coefficient = MAX_NORM / (exact(twins) + 1e-6)
        assert coefficient < 1.0
        for twin in twins[:4]:
            twin.grad = None if twin.grad is None else twin.grad * coefficient
        clipped.step()
        unclipped.step()
        for param, twin in zip(params, twins, strict=True):
            assert_bits_equal(param.detach(), twin.detach())


def test_the_norm_is_never_stale(dtensor: Tensor) -> None:
    """What the first step may leave to the second, and what makes it take the norm anew."""

    def in_place(params: list[nn.Parameter]) -> None:
        params[2].grad.mul_(3)

    def replaced(params: list[nn.Parameter]) -> None:
        params[3].grad = params[3].grad.clone()

    def dtensor_written(params: list[nn.Parameter]) -> None:
        params[-1].grad.mul_(3)

    def local_written(params: list[nn.Parameter]) -> None:
        params[-1].grad.to_local().mul_(3)

    def cleared(params: list[nn.Parameter]) -> None:
        params[2].grad = None

    def zeroed(params: list[nn.Parameter]) -> None:
        params[3].grad.zero_()

    def added(params: list[nn.Parameter]) -> None:
        params.insert(0, nn.Parameter(torch.ones(2)))
        params[0].grad = torch.full((2,), 8.0)
        optimizers[1].add_param_group({"params": params[:1]})

    def of_the_first(params: list[nn.Parameter]) -> None:
        params[0].grad = None  # as optimizers[0].zero_grad()
        params[1].grad.zero_()

    for change in (in_place, replaced, dtensor_written, local_written, cleared, zeroed, added, of_the_first):
        params, optimizers = parts()
        params.append(nn.Parameter(dtensor.clone()))
        optimizers[1].add_param_group({"params": params[-1:]})
        shardops.share_grad_norm(optimizers)
        set_exact(params[:-1], 1)
        params[-1].grad = dtensor.clone()
        optimizers[0].step()
        first = optimizers[0].last_grad_norm
        change(params)
        with passes() as counts:
            optimizers[1].step()
        is_kept = change is of_the_first
        assert counts == ([] if is_kept else [sum(p.grad is not None for p in params)]), change
        if is_kept:
            assert_bits_equal(optimizers[1].last_grad_norm, first)
        else:
            expected = exact(params[:-1] + with_grads([params[-1].grad.to_local()]))
            assert_bits_equal(optimizers[1].last_grad_norm, expected, change.__name__)


def test_stepping_twice_takes_it_twice() -> None:
    params, optimizers = parts()
    shardops.share_grad_norm(optimizers)
    set_exact(params, 1)
    with passes() as counts:
        optimizers[0].step()
        optimizers[0].step()  # without a backward between
        assert len(counts) == 2
        optimizers[1].step()
        assert len(counts) == 2
        optimizers[1].step()
        assert len(counts) == 3
        optimizers[0].step()
        assert len(counts) == 3
    # A group that is added, and an optimizer that clips from now on.
    more = with_grads([torch.full((4,), 8.0)])
    optimizers[0].add_param_group({"params": more})
    optimizers[2].max_grad_norm = 1.0
    with passes() as counts:
        for optimizer in optimizers:
            optimizer.step()
            assert_bits_equal(optimizer.last_grad_norm, exact([*params, *more]))
    assert counts == [6]


def test_a_parameter_of_two_optimizers_counts_once() -> None:
    (param,) = with_grads([torch.tensor([3.0, 4.0])])
    optimizers = [FusedShardedAdam([param], max_grad_norm=1.0) for _ in range(2)]
    shardops.share_grad_norm(optimizers)
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.last_grad_norm == 5.0


def test_gradients_are_let_go() -> None:
    """Gradients that are cleared after a step are gone, whether or not all have used the norm."""
    params, optimizers = parts()
    shardops.share_grad_norm(optimizers)
    set_exact(params, 1)
    grads = [weakref.ref(p.grad) for p in params]
    optimizers[0].step()
    for param in params:
        param.grad = None
    assert [grad() is not None for grad in grads] == [False] * 5
    set_exact(params, 2)
    with passes() as sizes:
        for optimizer in optimizers:
            optimizer.step()
    assert len(sizes) == 1, "none of the new gradients were taken for the old"


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_under_a_grad_scaler(is_unscaled: bool) -> None:
    """The scaled run is the plain one; an overflow in one part skips the step of all that clip by the norm."""
    params, optimizers = parts()
    twins, plain = parts()
    for group in (optimizers, plain):
        shardops.share_grad_norm(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for step in range(4):
        set_exact(params, step, scaler.get_scale())
        before = [snapshot(optimizer) for optimizer in optimizers]
        if step == 2:
            params[0].grad[0, 0] = math.nan
        if is_unscaled:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        with passes() as counts:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        assert counts == [5]
        skipped = [step == 2, step == 2, False]
        assert [bool(optimizer.last_found_inf) for optimizer in optimizers] == skipped
        set_exact(twins, step)
        for optimizer, twin, is_skipped, was in zip(optimizers, plain, skipped, before, strict=True):
            if is_skipped:
                assert_same(snapshot(optimizer), was)
                assert optimizer.last_grad_norm.isnan()
                continue
            twin.step()
            assert_same(snapshot(optimizer), snapshot(twin))
            if twin.max_grad_norm is not None:
                assert_bits_equal(optimizer.last_grad_norm, twin.last_grad_norm)
    assert scaler.get_scale() == 512.0
    assert [float(optimizer.skipped_steps) for optimizer in optimizers] == [1.0, 1.0, 0.0]


def test_refuses_gradients_of_other_scales() -> None:
    params, optimizers = parts()
    shardops.share_grad_norm(optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    set_exact(params, 1, 1024.0)
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    with pytest.raises(RuntimeError, match="are scaled, those of an optimizer that shares its norm are unscaled"):
        scaler.step(optimizers[1])


def test_refusals_and_removal() -> None:
    params, optimizers = parts()
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "optimizers is empty"),
        ([optimizers[0], torch.optim.AdamW(params)], TypeError, r"optimizers\[1\] is of type AdamW"),
        ([*optimizers, optimizers[1]], ValueError, r"optimizers\[3\] is listed twice"),
    ]
    for bad, error, match in cases:
        with pytest.raises(error, match=match):
            shardops.share_grad_norm(bad)
    handle = shardops.share_grad_norm(iter(optimizers[:2]))
    with pytest.raises(ValueError, match=r"optimizers\[1\] shares a norm already; call remove\(\)"):
        shardops.share_grad_norm([optimizers[2], optimizers[1]])
    set_exact(params, 1)
    optimizers[0].step()
    assert_bits_equal(optimizers[0].last_grad_norm, exact(params[:4]))
    handle.remove()
    optimizers[1].step()
    assert_bits_equal(optimizers[1].last_grad_norm, exact(params[2:4]))
    again = shardops.share_grad_norm(optimizers)
    handle.remove()  # nothing is left to it
    optimizers[1].step()
    assert_bits_equal(optimizers[1].last_grad_norm, exact(params))
    again.remove()
    # A gradient that cannot be counted stops the step of all, before anything is written.
    handle = shardops.share_grad_norm(optimizers)
    before = snapshot(optimizers[0])
    params[4].grad = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match="layout"):
        optimizers[0].step()
    assert_same(snapshot(optimizers[0]), before)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_do_not_share(copied: Callable[[Any], Any]) -> None:
    params, optimizers = parts()
    shardops.share_grad_norm(optimizers)
    set_exact(params, 1)
    optimizers[0].step()
    other = copied(optimizers[0])
    theirs = other.param_groups[0]["params"]
    set_exact(theirs, 2)
    with passes() as counts:
        other.step()
    assert counts == [2]
    assert_bits_equal(other.last_grad_norm, exact(theirs))
    # A state that is loaded leaves the sharing as it is.
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    set_exact(params, 3)
    optimizers[0].step()
    assert_bits_equal(optimizers[0].last_grad_norm, exact(params))


# ---- over several ranks ----------------------------------------------------------------------------------------------


def stepped(optimizers: Sequence[FusedShardedAdam], everything: Sequence[Tensor], sizes: list[int]) -> None:
    """All clip by the norm of ``everything``, taken once with all-reduces over so many ranks; then by a kept layout."""
    for layouts in (1, 0):
        made = mock.patch.object(clipping, "NormLayout", wraps=NormLayout)
        with reductions() as seen, passes() as counts, made as make:
            for optimizer in optimizers:
                optimizer.step()
        assert (seen, len(counts), make.call_count) == (sizes, 1, layouts)
        for optimizer in optimizers:
            assert ulps(float(optimizer.last_grad_norm), exact_norm(everything)) <= 1
            assert_ranks_agree({"norm": optimizer.last_grad_norm})


def optimizers_of(*grads: Sequence[Tensor], groups: Sequence[Any] = ()) -> list[FusedShardedAdam]:
    groups = groups or [None] * len(grads)
    optimizers = [
        FusedShardedAdamW(with_grads(own), max_grad_norm=1.0, process_group=group)
        for own, group in zip(grads, groups, strict=True)
    ]
    shardops.share_grad_norm(optimizers)
    return optimizers


def shared_over_four() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = init_device_mesh("cpu", (4,))
    tensors = values(UNEVEN, seed=3)
    on_one = [put(t, one, Shard(0)) for t in tensors[:3]]
    on_two = [put(tensors[3], two, Shard(0), Replicate()), put(tensors[4], two, Replicate(), Shard(0))]
    on_parts = [put(tensors[5], two["dp"], Shard(0)), put(tensors[6], two["tp"], Replicate())]
    stepped(optimizers_of(on_one, on_two, on_parts), tensors, [4])
    stepped(optimizers_of(on_one, [torch.ones(2)]), [*tensors[:3], torch.ones(2)], [4])

    # Stages; dense parameters beside experts, which alone have a group.
    stages = [values(UNEVEN, seed=5), values(UNEVEN[2:], seed=6)]
    mine = [put(t, two["tp"], Shard(0)) for t in stages[rank // 2]]
    everything = [t for stage in stages for t in stage]
    stepped(optimizers_of(mine[:2], mine[2:], groups=[two["dp"].get_group()] * 2), everything, [2, 2])
    experts = [values(UNEVEN[r:], seed=7 + r) if r < 3 else [] for r in range(4)]
    own = experts[rank] or [torch.zeros(1)]
    both = [*tensors[:3], *(t for expert in experts for t in expert)]
    stepped(optimizers_of(on_one, own, groups=[None, world]), both, [4])
    # A parameter that FSDP1 takes the place of, and the shard group that an integration finds, then not.
    mine = 3.0 * (1 + rank % 2) ** 2
    optimizers = optimizers_of([torch.ones(2)], [torch.full((3,), 1.0 + rank % 2)])
    optimizers[1]._shard_group_of = lambda param: two["tp"].get_group()
    assert norm_squared(optimizers[1], []) == 2 + mine
    optimizers[1].param_groups[0]["params"] = with_grads([torch.full((3,), 1.0 + rank % 2)])
    optimizers[1].param_groups[0]["params"][0]._fsdp_flattened = True
    assert norm_squared(optimizers[1], [2]) == 2 + 3 + 12
    optimizers[1]._shard_group_of = lambda param: None
    assert norm_squared(optimizers[1], []) == 2 + mine

    # A gradient that is sharded otherwise than before makes another layout; one that is a pending sum is refused.
    optimizers = optimizers_of(on_one[:1], on_two[:1])
    optimizers[0].step()
    (param,) = optimizers[1].param_groups[0]["params"]
    param.grad = distribute_tensor(tensors[3] * 2, two, [Replicate(), Replicate()], src_data_rank=None)
    optimizers[0].step()
    expected = exact_norm([tensors[0], tensors[3] * 2])
    assert ulps(float(optimizers[0].last_grad_norm), expected) <= 1
    param.grad = DTensor.from_local(tensors[3], two, [Replicate(), Partial()], run_check=False)
    before = snapshot(optimizers[0])
    with pytest.raises(ValueError, match="still pending"):
        optimizers[0].step()
    for name, tensor in snapshot(optimizers[0]).items():
        assert_bits_equal(local(tensor), local(before[name]), name)


def test_over_four_ranks(tmp_path: Path) -> None:
    run(tmp_path, 4, shared_over_four)
