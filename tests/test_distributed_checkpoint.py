"""Checkpoints of FSDP2 runs: every way through torch.distributed.checkpoint, resharding, and torch's own optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import (
    UNEVEN,
    Net,
    Tensors,
    assert_all_equal,
    assert_ranks_agree,
    exact_values,
    local,
    run,
    set_gradients,
    states,
    train,
    values,
    whole,
    whole_states,
)
from reference import assert_bits_equal
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shardops import FusedShardedAdamW

# Parameter dtype and options of the optimizer: each way of storing master weights, and optional states.
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32-amsgrad": (torch.float32, {"amsgrad": True}),
    "bf16-split": (torch.bfloat16, {}),
    "bf16-master": (torch.bfloat16, {"master_weights": "fp32"}),
}


def net_and_optimizer(case: str, seed: int = 0, **options: Any) -> tuple[Net, FusedShardedAdamW]:
    """A sharded Net with an unused parameter and a frozen layer, and two groups with options of their own."""
    dtype, case_options = CASES[case]
    model = Net(unused=True, frozen=True, seed=seed).to(dtype)
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    gains = [p for name, p in model.named_parameters() if p.ndim == 1 or "gain" in name]
    others = [p for p in model.parameters() if not any(p is q for q in gains)]
    groups = [{"params": others}, {"params": gains, "weight_decay": 0.0, "betas": (0.8, 0.99), "lr": 2e-2}]
    return model, FusedShardedAdamW(groups, **{"lr": 1e-2, **case_options, **options})


def assert_same_run(a: tuple[Net, FusedShardedAdamW], b: tuple[Net, FusedShardedAdamW], label: str) -> None:
    """Parameters, states and groups' options, bit for bit."""
    for (name, p), q in zip(a[0].named_parameters(), b[0].parameters(), strict=True):
        assert_bits_equal(local(p), local(q), f"{label} {name}")
    mine, theirs = ({n: local(t) for n, t in states(o)} for o in (a[1], b[1]))
    assert_all_equal(mine, theirs, label)
    for group, other in zip(a[1].param_groups, b[1].param_groups, strict=True):
        # torch's full state dicts turn the pair of betas into a list.
        options, others = ({**g, "params": None, "betas": tuple(g["betas"])} for g in (group, other))
        assert options == others, (label, options, others)


def spoiled(case: str) -> tuple[Net, FusedShardedAdamW]:
    """A run to load into, whose every number is another one's."""
    return net_and_optimizer(case, seed=1, lr=0.5, weight_decay=0.5, eps=0.5)


# ---- resumed at the same world size ----------------------------------------------------------------------------------

# Ways to carry a state over, beside files on disk.
WAYS = {
    "sharded": StateDictOptions(),
    "sharded, flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}


def resumed(case: str, folder: str) -> None:
    """Every way of saving after 3 steps and loading gives a run that continues as the uninterrupted one."""
    original = net_and_optimizer(case)
    model, optimizer = original
    train(model, optimizer, range(3))
    saved = {
        way: copy.deepcopy(get_state_dict(model, optimizer, options=options))
        for way, options in WAYS.items()
        if way != "rank 0"
    }
    # Only rank 0 gets the states when they are full and offloaded.
    saved["rank 0"] = copy.deepcopy(
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    )
    assert bool(saved["rank 0"][1]) == (dist.get_rank() == 0)
    dcp.save(dict(zip(("model", "optimizer"), saved["sharded"], strict=True)), checkpoint_id=folder)
    # A group of its own: its collectives run in another thread, beside the training's.
    pending = dcp.async_save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=f"{folder}-async",
        process_group=dist.new_group(backend="gloo"),
    )
    own = copy.deepcopy(optimizer.state_dict())
    own_weights = copy.deepcopy(model.state_dict())
    expected = train(model, optimizer, range(3, 6))  # while the asynchronous save may still be writing
    pending.result()

    for way in [*WAYS, "files", "async files", "own"]:
        other, again = spoiled(case)
        if way == "own":
            again.load_state_dict(own)  # before the weights
            other.load_state_dict(own_weights)
        elif "files" in way:
            into = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
            dcp.load(into, checkpoint_id=folder if way == "files" else f"{folder}-async")
            set_state_dict(other, again, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        else:
            weights, state = copy.deepcopy(saved[way])
            options = WAYS[way]
            if way in ("full", "rank 0"):  # optimizer first; torch broadcasts only when they are loaded apart
                set_optimizer_state_dict(other, again, state, options=options)
                set_model_state_dict(other, weights, options=options)
            else:
                set_state_dict(other, again, model_state_dict=weights, optim_state_dict=state, options=options)
        losses = train(other, again, range(3, 6))
        label = f"{case}, {way}:"
        for step, (a, b) in enumerate(zip(losses, expected, strict=True)):
            assert_bits_equal(a, b, f"{label} loss {step}")
        assert_same_run((other, again), original, label)
    # Rolled back: files are loaded in place into the very states and parameters of the live run.
    final = everything(model, optimizer)
    into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    losses = train(model, optimizer, range(3, 6))
    for step, (a, b) in enumerate(zip(losses, expected, strict=True)):
        assert_bits_equal(a, b, f"{case}, rolled back: loss {step}")
    assert_all_equal(everything(model, optimizer), final, f"{case}, rolled back:")
    # The unused parameter has a state that never moved, the frozen one has none; other counters ran.
    assert optimizer.state[model.unused]["step"] == 0
    assert model.blocks[0].up.weight not in optimizer.state
    assert optimizer.state[model.head.weight]["step"] == 6


@pytest.mark.parametrize(
    ("world_size", "case"), [(2, "fp32-amsgrad"), (2, "bf16-split"), (3, "fp32"), (3, "bf16-master")]
)
def test_resumed(tmp_path: Path, world_size: int, case: str) -> None:
    run(tmp_path, world_size, resumed, case, str(tmp_path / "checkpoint"))


# ---- another world size ----------------------------------------------------------------------------------------------


def tensors_and_optimizer(case: str, seed: int) -> tuple[Tensors, FusedShardedAdamW]:
    dtype, options = CASES[case]
    model = Tensors(values(UNEVEN, seed=seed, dtype=dtype))
    fully_shard(model)
    return model, FusedShardedAdamW(model.parameters(), lr=1e-2, **options)


def given_steps(model: Tensors, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps under given gradients: no collective whose order of summation would differ between world sizes."""
    params = list(model.parameters())
    for step in steps:
        set_gradients(params, list(exact_values(UNEVEN, seed=step, dtype=params[0].dtype)))
        optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {n: whole(p) for n, p in model.named_parameters()} | whole_states(optimizer)


def save_resharded(folder: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What each case holds when saved, and three steps later."""
    results = {}
    for case in CASES:
        model, optimizer = tensors_and_optimizer(case, seed=0)
        given_steps(model, optimizer, range(3))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{case}")
        held = everything(model, optimizer)
        given_steps(model, optimizer, range(3, 6))
        results[case] = (held, everything(model, optimizer))
    return results


def load_resharded(folder: str, expected: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    for case in CASES:
        model, optimizer = tensors_and_optimizer(case, seed=1)
        weights, state = get_state_dict(model, optimizer)
        into = {"model": weights, "optimizer": state}
        dcp.load(into, checkpoint_id=f"{folder}/{case}")
        set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        assert_all_equal(everything(model, optimizer), expected[case][0], f"{case}, loaded:")
        given_steps(model, optimizer, range(3, 6))
        assert_all_equal(everything(model, optimizer), expected[case][1], f"{case}, continued:")


def test_another_world_size(tmp_path: Path) -> None:
    """Saved on 2 ranks, loaded on 3, 1 and 4 (more ranks than some parameters have rows): the same bits go on."""
    folder = str(tmp_path / "checkpoints")
    expected = run(tmp_path, 2, save_resharded, folder)[0]
    for world_size in (3, 1, 4):
        run(tmp_path, world_size, load_resharded, folder, expected)


# ---- state creation is not a step ------------------------------------------------------------------------------------


def inert_creation() -> None:
    """Asking for the optimizer's state before training leaves steps and moments at 0; the first update is lr."""
    for dtype in (torch.float32, torch.bfloat16):
        for lr in (1e-3, torch.tensor(1e-3)):
            model = Tensors([torch.ones(5, 3, dtype=dtype), torch.ones(1, dtype=dtype)])
            fully_shard(model)
            optimizer = FusedShardedAdamW(model.parameters(), lr=lr, weight_decay=0.1, max_grad_norm=1e6)
            state = get_optimizer_state_dict(model, optimizer)
            assert sorted(state["state"]) == ["p0", "p1"]
            for _, tensor in states(optimizer):
                assert not whole(tensor).any()
            for param in model.parameters():
                assert_bits_equal(whole(param), torch.ones(param.shape, dtype=dtype), "a parameter before training")
                assert param.grad is None
            assert optimizer.param_groups[0]["lr"] == lr
            optimizer.param_groups[0]["weight_decay"] = 0.0
            params = list(model.parameters())
            set_gradients(params, [torch.full(p.shape, 0.5, dtype=dtype) for p in params])
            optimizer.step()
            for param in params:
                assert optimizer.state[param]["step"] == 1
                # Adam's first update is lr * sign(g) but for eps; 2^-24 is half an ulp of the parameter.
                master = whole(optimizer.master_param(param))
                torch.testing.assert_close(master, torch.full(param.shape, 1 - 1e-3), rtol=0, atol=2**-23)


def warm_up() -> None:
    """Real steps at lr = 0, with a rank that holds nothing: counted on all ranks, moments move, parameters stay."""
    rank = dist.get_rank()
    model = Tensors([torch.ones(1, 4), torch.ones(1)])
    fully_shard(model)
    params = list(model.parameters())
    if rank > 0:
        assert all(local(p).numel() == 0 for p in params)
    optimizer = FusedShardedAdamW(params, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 2) / 2)
    assert optimizer.param_groups[0]["lr"] == 0.0
    for step in range(3):
        set_gradients(params, [torch.full(p.shape, 0.5 if step else 0.0) for p in params])
        optimizer.step()
        scheduler.step()
        counters = {str(i): optimizer.state[p]["step"] for i, p in enumerate(params)}
        assert all(counter == step + 1 for counter in counters.values())
        assert_ranks_agree(counters)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        assert all(saved["state"][name]["step"] == step + 1 for name in ("p0", "p1"))
        if step == 0:
            for param in params:
                assert_bits_equal(whole(param), torch.ones(param.shape), "lr is 0")
    assert float(whole(params[1])) < 1.0


def creation() -> None:
    inert_creation()
    warm_up()


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_creation_is_inert(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, creation)


# ---- torch.optim.AdamW's checkpoints ---------------------------------------------------------------------------------


def from_torch(folder: str) -> None:
    """Torch's AdamW saves, this optimizer goes on, saves, and torch's loads that: the same states in fp32."""
    model = Net()
    fully_shard(model)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99))
    train(model, theirs, range(3))
    weights, state = get_state_dict(model, theirs)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/torch")

    other = Net(seed=1)
    fully_shard(other)
    ours = FusedShardedAdamW(other.parameters(), lr=0.5)
    into = dict(zip(("model", "optimizer"), get_state_dict(other, ours), strict=True))
    # Partial: torch's groups have not our options (master_weights, state_dtype), which keep this optimizer's values.
    dcp.load(into, checkpoint_id=f"{folder}/torch", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(other, ours, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert ours.param_groups[0]["betas"] == (0.8, 0.99)
    assert ours.param_groups[0]["lr"] == 1e-2
    assert_all_equal(whole_states(ours), whole_states(theirs), "torch -> shardops")
    losses = train(other, ours, range(3, 6))
    expected = train(model, theirs, range(3, 6))
    for step, (a, b) in enumerate(zip(losses, expected, strict=True)):
        # The same states under two kernels: an ulp or two of a loss of about 2.
        torch.testing.assert_close(a, b, rtol=2**-20, atol=0)
        if step == 0:
            assert_bits_equal(a, b, "the first loss after loading")

    weights, state = get_state_dict(other, ours)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/ours")
    third = Net(seed=2)
    fully_shard(third)
    back = torch.optim.AdamW(third.parameters())
    into = dict(zip(("model", "optimizer"), get_state_dict(third, back), strict=True))
    dcp.load(into, checkpoint_id=f"{folder}/ours")
    set_state_dict(third, back, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert_all_equal(whole_states(back), whole_states(ours), "shardops -> torch")
    train(third, back, range(6, 7))


def between_modes() -> None:
    """A bf16 run saved with one storage of masters goes on with the other, bit for bit."""
    for first, second in (("bf16-split", "bf16-master"), ("bf16-master", "bf16-split")):
        model, optimizer = tensors_and_optimizer(first, seed=0)
        given_steps(model, optimizer, range(3))
        other, again = tensors_and_optimizer(second, seed=1)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        given_steps(other, again, range(3, 6))
        given_steps(model, optimizer, range(3, 6))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            label = f"{first} -> {second}"
            assert_bits_equal(whole(optimizer.master_param(p)), whole(again.master_param(q)), f"{label} master")
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert_bits_equal(whole(optimizer.state[p][key]), whole(again.state[q][key]), f"{label} {key}")
        assert {name.split(".")[1] for name, _ in states(again)} == {
            "step",
            "exp_avg",
            "exp_avg_sq",
            "master_param" if second == "bf16-master" else "remainder",
        }


def from_torch_in_bf16() -> None:
    """Torch keeps the moments of bf16 parameters in bf16: they are taken as they are, and go on in fp32."""
    model, _ = tensors_and_optimizer("bf16-split", seed=0)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given_steps(model, theirs, range(3))
    ours = FusedShardedAdamW(model.parameters(), lr=0.5)
    ours.load_state_dict(theirs.state_dict())
    ours.init_states()  # converts, as the next step would
    for param in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert theirs.state[param][key].dtype == torch.bfloat16
            assert_bits_equal(whole(ours.state[param][key]), whole(theirs.state[param][key]).float(), key)
        assert_bits_equal(whole(ours.master_param(param)), whole(param).float(), "master")
    given_steps(model, ours, range(3, 4))
    assert all(ours.state[param]["step"] == 4 for param in model.parameters())
    assert all(ours.state[param]["remainder"].dtype == torch.bfloat16 for param in model.parameters())


def interchange(folder: str) -> None:
    from_torch(folder)
    from_torch_in_bf16()
    between_modes()


def test_interchange(tmp_path: Path) -> None:
    run(tmp_path, 2, interchange, str(tmp_path))


# ---- weights written by others ---------------------------------------------------------------------------------------


def written_by_others() -> None:
    """A DTensor parameter written between steps takes its master along: no remainder is applied to other weights."""
    for case in ("bf16-split", "bf16-master"):
        for write in (
            lambda p: p.mul_(2.0),  # through the DTensor
            lambda p: p.to_local().mul_(2.0),  # through its local tensor
        ):
            model, optimizer = tensors_and_optimizer(case, seed=0)
            given_steps(model, optimizer, range(2))
            with torch.no_grad():
                for param in model.parameters():
                    write(param)
            expected = [whole(p).float() for p in model.parameters()]
            for param, value in zip(model.parameters(), expected, strict=True):
                assert_bits_equal(whole(optimizer.master_param(param)), value, "master after a write")
            # A step at lr 0 shows what the kernel took for the master.
            optimizer.param_groups[0]["lr"] = 0.0
            given_steps(model, optimizer, range(2, 3))
            for param, value in zip(model.parameters(), expected, strict=True):
                assert_bits_equal(whole(optimizer.master_param(param)), value, "master after a step at lr 0")


def test_written_by_others(tmp_path: Path) -> None:
    run(tmp_path, 2, written_by_others)
