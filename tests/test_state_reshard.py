"""Checkpoints of 8-bit and bfloat16 moments, 24-bit masters and stochastic rounding: resharded, resumed, converted.

Sharded along dim 0 they travel bit for bit between any world sizes; sharded otherwise, moments travel in fp32, which is
exact under the same sharding and within the codec's error under another.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import Tensors, assert_all_equal, local, run, states, whole
from reference import assert_bits_equal
from test_state_modes_fsdp import (
    MODES,
    everything,
    given_steps,
    optimizer_of,
    start,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardops import FusedShardedAdamW
from shardops.backends.reference import block_quant
from shardops.optim.moments import CODE_KEYS, fp32_moments

FULL = StateDictOptions(full_state_dict=True)
# As SHAPES, but fewer.
UNEVEN = ((67, 200), (3, 1500), (41, 7), (1,), (1, 4100))


def sharded(mode: str, number: int = 0, **options: Any) -> tuple[Tensors, FusedShardedAdamW]:
    model = Tensors(start(mode, number, UNEVEN))
    if dist.is_initialized():
        fully_shard(model)
    return model, optimizer_of(list(model.parameters()), mode, **options)


def spoiled(mode: str, seed: int = 9) -> tuple[Tensors, FusedShardedAdamW]:
    """A run to load into, with other numbers, another salt, and states of another step."""
    model, optimizer = sharded(mode, number=1, lr=0.5, seed=seed)
    given_steps(list(model.parameters()), optimizer, mode, range(7, 9))
    return model, optimizer


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of what this rank holds."""
    named = [*((f"parameter {i}", p) for i, p in enumerate(model.parameters())), *states(optimizer)]
    return {name: local(tensor).clone() for name, tensor in named}


def proceed(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str, steps: range) -> dict[str, Tensor]:
    given_steps(list(model.parameters()), optimizer, mode, steps)
    return held(model, optimizer)


def assert_holds(model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Tensor], label: str) -> None:
    """This rank holds its parts of these whole tensors."""
    named = [*((f"parameter {i}", p) for i, p in enumerate(model.parameters())), *states(optimizer)]
    assert_all_equal(held(model, optimizer), {name: local(part_of(t, expected[name])) for name, t in named}, label)


def part_of(like: Any, value: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not hasattr(like, "placements"):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def files(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What one checkpoint on disk holds."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_files(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    into = files(model, optimizer)
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])


# ---- another world size ----------------------------------------------------------------------------------------------

Saved = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]


def save(folder: str) -> Saved:
    """What each mode holds when saved, and three steps later."""
    results = {}
    for mode in MODES:
        model, optimizer = sharded(mode)
        proceed(model, optimizer, mode, range(3))
        dcp.save(files(model, optimizer), checkpoint_id=f"{folder}/{mode}")
        params = list(model.parameters())
        before = everything(params, optimizer)
        proceed(model, optimizer, mode, range(3, 6))
        results[mode] = (before, everything(params, optimizer))
    return results


def load_and_save(folder: str, into: str, expected: Saved) -> None:
    for mode in MODES:
        model, optimizer = spoiled(mode)
        load_files(model, optimizer, f"{folder}/{mode}")
        assert_holds(model, optimizer, expected[mode][0], f"{mode}, loaded:")
        dcp.save(files(model, optimizer), checkpoint_id=f"{into}/{mode}")
        proceed(model, optimizer, mode, range(3, 6))
        assert_holds(model, optimizer, expected[mode][1], f"{mode}, continued:")
        if dist.get_world_size() == 3:  # rolled back, in place into the very states and parameters of the run
            load_files(model, optimizer, f"{into}/{mode}")
            assert_holds(model, optimizer, expected[mode][0], f"{mode}, rolled back:")


def test_another_world_size(tmp_path: Path) -> None:
    """Saved on 2 ranks, loaded and saved on 3, then on 1, then on 4: the same bytes, and the same bits go on."""
    folders = [str(tmp_path / f"checkpoint {i}") for i in range(4)]
    expected = run(tmp_path, 2, save, folders[0])[0]
    for mode, (first, last) in expected.items():
        assert not torch.equal(first["parameter 0"], last["parameter 0"]), mode
    for number, world_size in enumerate((3, 1, 4)):
        run(tmp_path, world_size, load_and_save, folders[number], folders[number + 1], expected)


# ---- resumed at the same world size ----------------------------------------------------------------------------------

WAYS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full": FULL,
    "rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}


def resumed(mode: str, folder: str) -> None:
    """Every way of saving after 3 steps and loading gives a run that continues as the uninterrupted one."""
    model, optimizer = sharded(mode)
    proceed(model, optimizer, mode, range(3))
    saved: dict[str, Any] = {}
    for way, options in WAYS.items():
        if way == "rank 0":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        saved[way] = copy.deepcopy(
            (get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options))
        )
    assert bool(saved["rank 0"][1]) == (dist.get_rank() == 0)
    own = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    # A group of its own: its collectives run in another thread, beside the training's.
    group = dist.new_group(backend="gloo")
    pending = dcp.async_save(files(model, optimizer), checkpoint_id=folder, process_group=group)
    expected = proceed(model, optimizer, mode, range(3, 6))  # while the save may still be writing
    pending.result()
    for way in [*WAYS, "own", "files", "new"]:
        other, again = sharded(mode, number=1, lr=0.5, seed=9) if way == "new" else spoiled(mode)
        if way == "own":
            again.load_state_dict(own[1])
            other.load_state_dict(own[0])
        elif way in ("files", "new"):
            load_files(other, again, folder)
        else:
            weights, state = saved[way]
            set_optimizer_state_dict(other, again, state, options=WAYS[way])
            set_model_state_dict(other, weights, options=WAYS[way])
        assert_all_equal(proceed(other, again, mode, range(3, 6)), expected, f"{mode}, {way}:")


def inert(mode: str) -> None:
    """Asking for the optimizer's state before training leaves steps and moments at 0."""
    model, optimizer = sharded(mode)
    weights = {name: local(p).clone() for name, p in model.named_parameters()}
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert len(state) == len(UNEVEN)
    for name, tensor in states(optimizer):
        assert name.endswith("salt") or not local(tensor).any(), name
    assert_all_equal({name: local(p) for name, p in model.named_parameters()}, weights, mode)
    expected = proceed(*sharded(mode), mode, range(2))
    assert_all_equal(proceed(model, optimizer, mode, range(2)), expected, f"{mode}, after being asked:")


def test_resumed(tmp_path: Path) -> None:
    run(tmp_path, 2, resumed_runs, str(tmp_path / "checkpoint"))


def resumed_runs(folder: str) -> None:
    for mode in ("int8, split24", "int8, fp32 parameters", "bf16, stochastic", "bf16, split24, amsgrad"):
        resumed(mode, f"{folder}/{mode}")
        inert(mode)
    between_modes()


# ---- between modes, through torch's full state dicts ----------------------------------------------------------------

BETWEEN = [
    ("int8, split32", "float32, split24"),
    ("float32, split24", "int8, split32"),
    ("int8, split24", "fp32 masters"),
    ("fp32 masters", "int8, split24"),
    ("int8, split24", "int8, split32"),
    ("bf16, stochastic", "int8, split32"),
]


def between_modes() -> None:
    """A full state dict saved in one mode is what another mode goes on from, not what it held itself.

    torch fills what the saved state has no counterpart of from the optimizer that loads it.
    """
    for first, second in BETWEEN:
        model, optimizer = sharded(first)
        proceed(model, optimizer, first, range(3))
        weights, state = get_state_dict(model, optimizer, options=FULL)
        plain, expected = sharded(second, number=1)
        plain.load_state_dict(copy.deepcopy(model.state_dict()))
        expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other, again = spoiled(second, seed=3)  # salts that were not saved are the loading optimizer's
        set_optimizer_state_dict(other, again, copy.deepcopy(state), options=FULL)
        set_model_state_dict(other, copy.deepcopy(weights), options=FULL)
        assert any("salt" in state for state in again.state.values()) == (second != "fp32 masters")
        last = [proceed(*pair, second, range(3, 5)) for pair in ((other, again), (plain, expected))]
        assert_all_equal(*last, f"{first} -> {second}:")
        if "stochastic" in first:
            continue
        # From rank 0 alone torch would hand over a part: rank 0, which knows, says so before anything is loaded.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        refused = pytest.raises(ValueError, match="saved in another mode than this optimizer's")
        with refused if dist.get_rank() == 0 else contextlib.nullcontext():
            set_optimizer_state_dict(
                other, again, copy.deepcopy(state) if dist.get_rank() == 0 else {}, options=options
            )


# ---- rows that are cut -----------------------------------------------------------------------------------------------


def assert_within_codec(param: Tensor, optimizer: FusedShardedAdamW, saved: dict[str, Tensor], label: str) -> None:
    """Moments that were encoded once more, in other blocks, are within half a code of those that were saved.

    Args:
        saved: fp32 moments of the whole parameter.
    """
    state = optimizer.state[param]
    _, square_codes, words = (local(state[key]) for key in CODE_KEYS)
    exp_avg, exp_avg_sq = (local(moment) for moment in fp32_moments(param, state).values())
    before = [local(part_of(param, saved[key])) for key in ("exp_avg", "exp_avg_sq")]
    rows = words.shape[0]
    if not words.numel():
        return
    highest, packed = (words.long() & 0xFFFFFFFF).chunk(2, dim=-1)
    step = (packed & 0xFFFF) << block_quant.STEP_BITS
    raw = block_quant.raw_patterns(block_quant.in_blocks(square_codes, rows)[0], highest, step)
    scale = block_quant.floats(packed & 0xFFFF0000) * block_quant.ratio_to_exp_avg(raw)
    # Half a code of exp_avg_sq is half a step of float patterns, each 2^-23 of a value at most.
    bounds = [scale / 254, step * 0.5 * 2.0**-23 * block_quant.in_blocks(before[1], rows)[0]]
    for key, now, then, bound in zip(("exp_avg", "exp_avg_sq"), (exp_avg, exp_avg_sq), before, bounds, strict=True):
        bound = block_quant.from_blocks(bound.expand(raw.shape), now.shape)
        assert ((now - then).abs() <= bound * (1 + 2**-10)).all(), f"{label} {key}"
        assert ((now - then).abs() > bound / 4).any(), f"{label} {key}: nothing was rounded"


class Columns(Tensors):
    """Every parameter tensor parallel by columns."""

    def __init__(self, tensors: list[Tensor], mesh: DeviceMesh) -> None:
        super().__init__(tensors)
        for name, param in list(self.named_parameters()):
            shard = distribute_tensor(param.detach(), mesh, [Shard(1)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(shard))


CUT_SHAPES = ((67, 400), (9, 1030), (40, 520))


def cut_rows(mode: str, folder: str) -> None:
    """Parameters sharded by columns: fp32 in state dicts; exact under the same sharding, a code's error elsewhere."""
    numbers = [start(mode, number, CUT_SHAPES) for number in range(2)]
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))

    def build(kind: str, number: int = 1, **options: Any) -> tuple[nn.Module, FusedShardedAdamW]:
        tensors = numbers[number]
        model = {
            "tp 2": lambda: fully_shard(Columns(tensors, meshes[0]["tp"]), mesh=meshes[0]["dp"]),
            "tp 4": lambda: Columns(tensors, meshes[1]),
            "fsdp": lambda: fully_shard(Tensors(tensors), mesh=meshes[1]),
            "plain": lambda: Tensors(tensors),
        }[kind]()
        optimizer = optimizer_of(list(model.parameters()), mode, **options)
        proceed(model, optimizer, mode, range(7, 7 + number))  # the one that loads held other moments
        return model, optimizer

    for kind, others in (("tp 2", ("tp 2", "tp 4", "fsdp", "plain")), ("fsdp", ("tp 2", "tp 4")), ("tp 4", ("tp 4",))):
        model, optimizer = build(kind, 0)
        given_steps(list(model.parameters()), optimizer, mode, range(3))
        moments = [{k: whole(t) for k, t in fp32_moments(p, optimizer.state[p]).items()} for p in model.parameters()]
        masters = [whole(optimizer.master_param(p)) for p in model.parameters()]
        sharded_state = get_optimizer_state_dict(model, optimizer)["state"]
        for name, saved in zip(sharded_state, moments, strict=True):
            if kind != "fsdp":
                assert not sharded_state[name].keys() & set(CODE_KEYS)
                for key, moment in saved.items():
                    assert_bits_equal(whole(sharded_state[name][key]), moment, f"exported {key}")
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))  # counters go on in it otherwise
        dcp.save(files(model, optimizer), checkpoint_id=f"{folder}/{kind}")
        expected = proceed(model, optimizer, mode, range(3, 6))
        for other_kind in others:
            for way in ("full", "files") if "fsdp" not in (kind, other_kind) and other_kind != "plain" else ("full",):
                label = f"{mode}, {kind} -> {other_kind}, {way}:"
                other, again = build(other_kind, lr=0.5, seed=9)
                if way == "files":
                    load_files(other, again, f"{folder}/{kind}")
                else:
                    set_model_state_dict(other, copy.deepcopy(weights), options=FULL)
                    set_optimizer_state_dict(other, again, copy.deepcopy(state), options=FULL)
                again.init_states()  # converts
                for param, saved, master in zip(other.parameters(), moments, masters, strict=True):
                    assert_bits_equal(whole(again.master_param(param)), master, f"{label} master")
                    if kind == other_kind:
                        for key, moment in fp32_moments(param, again.state[param]).items():
                            assert_bits_equal(whole(moment), saved[key], f"{label} {key}")
                    else:
                        assert_within_codec(param, again, saved, label)
                after = proceed(other, again, mode, range(3, 6))
                if kind == other_kind:
                    assert_all_equal(after, expected, label)
                else:
                    assert list(after) == list(expected)


def cut(folder: str) -> None:
    for mode in ("int8, split24", "int8, fp32 parameters"):
        cut_rows(mode, f"{folder}/{mode}")


def test_cut_rows(tmp_path: Path) -> None:
    run(tmp_path, 4, cut, str(tmp_path / "checkpoints"))
