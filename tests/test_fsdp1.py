"""FusedShardedAdamW over FSDP1's flat parameters, and over slices of them (use_orig_params)."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import Net, assert_all_equal, assert_ranks_agree, local, loss_of, run, states, train
from reference import AdamOracle, assert_bits_equal, rms, ulps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from shardops import FusedShardedAdamW

BF16_COMPUTE = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded_net(
    orig: bool, dtype: torch.dtype = torch.float32, mixed: bool = False, seed: int = 0, mesh: DeviceMesh | None = None
) -> FSDP:
    """A Net sharded block by block and at the root, with a tied weight."""
    model = Net(tied=True, seed=seed).to(dtype)
    options: dict[str, Any] = {
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
        "mixed_precision": BF16_COMPUTE if mixed else None,
        "device_mesh": mesh,
    }
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, **options)
    return FSDP(model, **options)


def quiet() -> None:
    """FSDP1 is deprecated and says so in many places; that is not what is tested."""
    warnings.simplefilter("ignore")


def full_weights(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}


def state_dict_type(model: FSDP, kind: StateDictType) -> AbstractContextManager[Any]:
    """FSDP1's context; full state dicts are not "offloaded".

    On a CPU, offloading is no copy, and torch then returns one buffer, reused for each state, under all their names.
    """
    if kind == StateDictType.SHARDED_STATE_DICT:
        return FSDP.state_dict_type(model, kind)
    offload = {"offload_to_cpu": False}
    return FSDP.state_dict_type(model, kind, FullStateDictConfig(**offload), FullOptimStateDictConfig(**offload))


def full_states(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All states by parameter and name, gathered on every rank."""
    with state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)["state"]
    return {f"{name}.{key}": state[name][key] for name in sorted(state) for key in sorted(state[name])}


# ---- the step --------------------------------------------------------------------------------------------------------


def mirrored_run(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """use_orig_params=True beside an unsharded optimizer under the gathered gradients: bit for bit."""
    model = sharded_net(True, dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    twins = {name: nn.Parameter(p) for name, p in full_weights(model).items()}
    twin_optimizer = FusedShardedAdamW(twins.values(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            for name, param in model.named_parameters():
                assert param.grad.dtype == dtype
                twins[name.replace("_fsdp_wrapped_module.", "")].grad = param.grad.clone()
        optimizer.step()
        twin_optimizer.step()
    weights, gathered = full_weights(model), full_states(model, optimizer)
    assert_all_equal(weights, {name: p.detach() for name, p in twins.items()}, "parameter")
    for name, twin in twins.items():
        for key, value in twin_optimizer.state[twin].items():
            if key == "remainder":  # exported as the master it stands for
                key, value = "master_param", twin_optimizer.master_param(twin)
            assert_bits_equal(gathered[f"{name}.{key}"], value, f"{name}.{key}")
    assert len(gathered) == len(twins) * len(twin_optimizer.state[twin])
    # Slices of flat parameters: on some rank one is empty or starts where no vector does.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(p.numel(), p.storage_offset() % 4) for p in model.parameters()])
    assert any(numel == 0 for slices in everyone for numel, _ in slices)
    assert any(offset or numel % 4 for slices in everyone for numel, offset in slices)
    return weights, gathered


def flat_run(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same training with whole flat parameters."""
    model = sharded_net(False, dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(6))
    assert all(p.dim() == 1 for p in model.parameters())
    return full_weights_by_state_dict(model), full_states(model, optimizer)


def full_weights_by_state_dict(model: FSDP) -> dict[str, Tensor]:
    with state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def step_is_the_unsharded_one() -> None:
    quiet()
    for dtype in (torch.float32, torch.bfloat16):
        weights, gathered = mirrored_run(dtype)
        if dist.get_world_size() > 2:  # sums of three gradients: their order depends on where a shard begins
            continue
        flat_weights, flat_states = flat_run(dtype)
        flat_weights.pop("head.weight")  # tied: listed twice in a state dict
        assert_all_equal(flat_weights, {name: weights[name] for name in flat_weights}, f"flat {dtype} parameter")
        assert_all_equal(flat_states, gathered, f"flat {dtype} state")


@pytest.mark.parametrize("world_size", [2, 3])
def test_step_is_the_unsharded_one(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, step_is_the_unsharded_one)


# ---- training as torch.optim.AdamW, and clipping ---------------------------------------------------------------------


def training_follows_torch(orig: bool, mixed: bool) -> None:
    model = sharded_net(orig, mixed=mixed)
    params = list(model.parameters())
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    oracles = [AdamOracle(p.detach(), lr=1e-2, weight_decay=1e-2, decoupled_weight_decay=True) for p in params]
    theirs, ours = torch.optim.AdamW(params, lr=1e-2), FusedShardedAdamW(twins, lr=1e-2)
    losses = []
    for step in range(20):
        theirs.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.detach())
        for param, twin, oracle in zip(params, twins, oracles, strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
            if param.grad is not None:
                oracle.step(param.grad)
        theirs.step()
        ours.step()
    expected = torch.cat([oracle.param.reshape(-1) for oracle in oracles])
    our_rms, their_rms = (rms(torch.cat([p.detach().reshape(-1) for p in ps]), expected) for ps in (twins, params))
    assert 0 < our_rms <= 1.05 * their_rms, (our_rms, their_rms)

    model = sharded_net(orig, mixed=mixed)
    own = train(model, FusedShardedAdamW(model.parameters(), lr=1e-2), range(20))
    assert_bits_equal(own[0], losses[0], "the first loss, before any step")
    # In fp32 torch's losses are within 2e-6 of float64's here, and so are ours: 2^-17 covers both. Under bf16 compute
    # an fp32 ulp may cross a tie, which moves one weight of about 0.3 by 2^-8 of it, and the loss by 1e-4. A beta2 of
    # 0.99 moves losses by 0.003, an lr 2 % off by 0.02.
    bound = 2**-10 if mixed else 2**-17
    for step, (a, b) in enumerate(zip(own, losses, strict=True)):
        assert abs(float(a) - float(b)) <= bound, (step, float(a), float(b))
    assert own[-1] < own[0]


def squares(params: list[nn.Parameter]) -> list[float]:
    """Of this rank's gradients; exact, as float64."""
    return [float(x) ** 2 for p in params if p.grad is not None for x in p.grad.reshape(-1)]


def gathered_squares(params: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> list[float]:
    """Of all ranks of a group."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, squares(params), group=group)
    return [x for theirs in everyone for x in theirs]


def assert_norm(norm: Tensor, exact_squares: list[float]) -> None:
    """Within an ulp of the exact one, and the same bits on all ranks."""
    exact = math.sqrt(math.fsum(exact_squares))
    assert ulps(float(norm), exact) <= 1, (float(norm), exact)
    assert_ranks_agree({"norm": norm})


def clipping(orig: bool, dtype: torch.dtype) -> None:
    model = sharded_net(orig, dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        norm = optimizer.last_grad_norm
        assert_norm(norm, gathered_squares(list(model.parameters())))
        assert norm > 0.5
    # Torch's norm is a float32 norm of float32 norms (rounded to the gradients' dtype in the end): a few roundings.
    torch_norm = model.clip_grad_norm_(0.5).float()
    torch.testing.assert_close(norm, torch_norm, rtol=2**-20 if dtype == torch.float32 else 2**-8, atol=0)


def clipping_beside_whole_parameters(orig: bool) -> None:
    """Parameters that FSDP1 was told to ignore are whole on every rank, and count once."""
    net = Net()
    model = FSDP(net, use_orig_params=orig, device_id=torch.device("cpu"), ignored_modules=[net.head])
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    loss_of(model, 0).backward()
    whole = list(net.head.parameters())
    for param in whole:
        dist.all_reduce(param.grad)
    optimizer.step()
    sharded = [p for p in model.parameters() if not any(p is q for q in whole)]
    assert len(sharded) > 0
    assert_norm(optimizer.last_grad_norm, gathered_squares(sharded) + squares(whole))


def clipping_hybrid() -> None:
    """Sharded over pairs and replicated between them: the group that it is sharded over is given."""
    quiet()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["shard"].get_group()
    for orig in (True, False):
        model = FSDP(
            Net(),
            use_orig_params=orig,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, process_group=group)
        loss_of(model, 0).backward()
        optimizer.step()
        assert_norm(optimizer.last_grad_norm, gathered_squares(list(model.parameters()), group))


def test_clipping_hybrid(tmp_path: Path) -> None:
    run(tmp_path, 4, clipping_hybrid)


def training_and_clipping() -> None:
    quiet()
    for orig in (True, False):
        for mixed in (False, True):
            training_follows_torch(orig, mixed)
        for dtype in (torch.float32, torch.bfloat16):
            clipping(orig, dtype)
        clipping_beside_whole_parameters(orig)


def test_training_and_clipping(tmp_path: Path) -> None:
    run(tmp_path, 2, training_and_clipping)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def load_optimizer(model: FSDP, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))


def resumed_run(orig: bool, dtype: torch.dtype, kind: StateDictType, optimizer_first: bool) -> None:
    """A run resumed from FSDP1's own state dicts continues as the uninterrupted one, bit for bit."""
    model = sharded_net(orig, dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    with state_dict_type(model, kind):
        weights, saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    before = full_states(model, optimizer)
    assert all(value == 3 for name, value in before.items() if name.endswith("step"))
    expected_losses = train(model, optimizer, range(3, 6))

    other = sharded_net(orig, dtype, seed=1)
    resumed = FusedShardedAdamW(other.parameters(), lr=1e-3)
    with state_dict_type(other, kind):
        if optimizer_first:
            load_optimizer(other, resumed, saved)
            other.load_state_dict(weights)
        else:
            other.load_state_dict(weights)
            load_optimizer(other, resumed, saved)
    assert resumed.param_groups[0]["lr"] == 1e-2
    losses = train(other, resumed, range(3, 6))
    label = f"orig={orig} {dtype} {kind.name}"
    for step, (a, b) in enumerate(zip(losses, expected_losses, strict=True)):
        assert_bits_equal(a, b, f"{label} loss {step}")
    assert_all_equal(full_weights(other), full_weights(model), f"{label} parameter")
    assert_all_equal(full_states(other, resumed), full_states(model, optimizer), f"{label} state")
    if dtype == torch.bfloat16:  # split again, not kept as fp32
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            if theirs.numel():
                assert set(resumed.state[ours]) == {"step", "exp_avg", "exp_avg_sq", "remainder"}
                assert_bits_equal(
                    resumed.state[ours]["remainder"], optimizer.state[theirs]["remainder"], label, exact=True
                )


def resumed_runs() -> None:
    quiet()
    for dtype in (torch.float32, torch.bfloat16):
        for orig in (True, False):
            for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
                resumed_run(orig, dtype, kind, optimizer_first=kind == StateDictType.FULL_STATE_DICT)


def test_resumed_run(tmp_path: Path) -> None:
    run(tmp_path, 2, resumed_runs)


def save_full(dtype: torch.dtype) -> tuple[Any, Any, dict[str, Tensor]]:
    quiet()
    model = sharded_net(True, dtype)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    with state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer), full_states(model, optimizer)


def load_full(dtype: torch.dtype, weights: Any, saved: Any, expected: dict[str, Tensor]) -> None:
    quiet()
    for orig in (True, False):
        model = sharded_net(orig, dtype, seed=1)
        optimizer = FusedShardedAdamW(model.parameters())
        with state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(weights)
            load_optimizer(model, optimizer, saved)
        assert_all_equal(full_states(model, optimizer), expected, f"orig={orig}, before a step")
        optimizer.step()  # no gradients: nothing moves, but masters are stored this optimizer's way
        assert_all_equal(full_states(model, optimizer), expected, f"orig={orig}, after a step without gradients")
        train(model, optimizer, range(3, 4))
        after = full_states(model, optimizer)
        assert all(value == 4 for name, value in after.items() if name.endswith("step"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_state_dict_at_another_world_size(tmp_path: Path, dtype: torch.dtype) -> None:
    """Saved on 2 ranks from slices; loaded on 3 and on 1, into slices and into flat parameters."""
    saved = run(tmp_path, 2, save_full, dtype)[0]
    for world_size in (3, 1):
        run(tmp_path, world_size, load_full, dtype, *saved)


def distributed_checkpoint(orig: bool, dtype: torch.dtype, folder: str, options: StateDictOptions) -> None:
    """Through torch.distributed.checkpoint.state_dict; sharded files on disk unless full."""
    full = options.full_state_dict
    label = f"orig={orig} {dtype} full={full} flatten={options.flatten_optimizer_state_dict}"
    # A mesh: states are DTensors. As ShardedTensors torch loses track of those that a rank holds no part of, and takes
    # the checkpoint for one of an older version ("Missing key: optimizer.param_groups"), its own AdamW's too.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded_net(orig, dtype, mesh=mesh)
    optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    weights, saved = get_state_dict(model, optimizer, options=options)
    if not full:
        dcp.save({"model": weights, "optimizer": saved}, checkpoint_id=folder)
    expected_losses = train(model, optimizer, range(3, 6))

    other = sharded_net(orig, dtype, seed=1, mesh=mesh)
    resumed = FusedShardedAdamW(other.parameters(), lr=1e-3)
    if full:
        loaded = {"model": weights, "optimizer": saved}
    else:
        into = get_state_dict(other, resumed, options=options)
        assert all(float(local(t).abs().sum()) == 0 for n, t in states(resumed) if "master" not in n), label
        loaded = dict(zip(("model", "optimizer"), into, strict=True))
        dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
    )
    assert resumed.param_groups[0]["lr"] == 1e-2
    losses = train(other, resumed, range(3, 6))
    for step, (a, b) in enumerate(zip(losses, expected_losses, strict=True)):
        assert_bits_equal(a, b, f"{label} loss {step}")
    for (name, ours), (_, theirs) in zip(states(resumed), states(optimizer), strict=True):
        assert_bits_equal(ours, theirs, f"{label} state {name}", exact="remainder" in name)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_bits_equal(ours.detach(), theirs.detach(), f"{label} parameter")


def distributed_checkpoints(folder: str) -> None:
    quiet()
    for dtype in (torch.float32, torch.bfloat16):
        for orig in (True, False):
            distributed_checkpoint(orig, dtype, f"{folder}/{dtype}-{orig}", StateDictOptions())
        distributed_checkpoint(True, dtype, "", StateDictOptions(full_state_dict=True))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    distributed_checkpoint(True, torch.float32, f"{folder}/flat", flat)


def test_distributed_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 2, distributed_checkpoints, str(tmp_path / "checkpoints"))


def torch_interchange() -> None:
    """A checkpoint of torch's AdamW continues under this optimizer: same moments and steps, in fp32."""
    quiet()
    for orig in (True, False):
        model = sharded_net(orig)
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, theirs, range(3))
        expected = full_states(model, theirs)
        with state_dict_type(model, StateDictType.FULL_STATE_DICT):
            saved = FSDP.optim_state_dict(model, theirs)
        ours = FusedShardedAdamW(model.parameters(), lr=1e-3)
        load_optimizer(model, ours, saved)
        assert_all_equal(full_states(model, ours), expected, "torch -> shardops")
        train(model, ours, range(3, 5))
        back = torch.optim.AdamW(model.parameters())
        with state_dict_type(model, StateDictType.FULL_STATE_DICT):
            load_optimizer(model, back, FSDP.optim_state_dict(model, ours))
        assert_all_equal(full_states(model, back), full_states(model, ours), "shardops -> torch")
        train(model, back, range(5, 6))


def test_torch_interchange(tmp_path: Path) -> None:
    run(tmp_path, 2, torch_interchange)
