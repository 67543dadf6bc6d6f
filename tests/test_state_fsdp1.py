"""8-bit moments and 24-bit masters under FSDP1: its state dicts have them in fp32, and go on bit for bit."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import torch
from distributed import assert_all_equal, run, states
from reference import assert_bits_equal
from test_fsdp1 import full_states, load_optimizer, state_dict_type
from test_state_modes_fsdp import MODES, optimizer_of
from test_state_modes_training import Wide, wide_steps
from test_state_reshard import assert_within_codec
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType, StateDictType


def fsdp1(orig: bool, mode: str, seed: int = 0) -> FSDP:
    """Cut in the middle of a weight over two ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(Wide(seed), nn.Linear(200, 200)).to(MODES[mode][0])
    return FSDP(model, use_orig_params=orig, device_id=torch.device("cpu"))


def through_fsdp1(orig: bool, mode: str, kind: StateDictType) -> None:
    """FSDP1's own state dicts are in fp32; a run resumed from them is the uninterrupted one, bit for bit."""
    label = f"orig={orig} {mode} {kind.name}"
    model = fsdp1(orig, mode)
    params = list(model.parameters())
    optimizer = optimizer_of(params, mode)
    losses = wide_steps(model, optimizer, range(3))
    assert any("block_words" in optimizer.state[p] for p in params)
    with state_dict_type(model, kind):
        weights, saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    wanted = {"step", "exp_avg", "exp_avg_sq"} | ({"master_param"} if MODES[mode][0] == torch.bfloat16 else set())
    for name, state in saved["state"].items():
        assert set(state) == wanted, (label, name)
    before = full_states(model, optimizer)
    for name, tensor in before.items():
        assert tensor.dtype == torch.float32, name
        assert name.endswith("step") or tensor.any(), name
    expected = wide_steps(model, optimizer, range(3, 6))
    assert expected[-1] < losses[0]

    other = fsdp1(orig, mode, seed=1)
    again = optimizer_of(list(other.parameters()), mode, lr=0.5)
    with state_dict_type(other, kind):
        if orig:
            other.load_state_dict(weights)
            load_optimizer(other, again, saved)
        else:
            load_optimizer(other, again, saved)
            other.load_state_dict(weights)
    assert_all_equal(full_states(other, again), before, f"{label}, loaded:")
    for step, pair in enumerate(zip(wide_steps(other, again, range(3, 6)), expected, strict=True)):
        assert_bits_equal(*pair, f"{label} loss {step}")
    for (name, mine), (_, theirs) in zip(states(again), states(optimizer), strict=True):
        assert_bits_equal(mine, theirs, f"{label} {name}", exact="remainder" in name)
    for mine, theirs in zip(other.parameters(), params, strict=True):
        assert_bits_equal(mine.detach(), theirs.detach(), f"{label} parameter")

    # To an optimizer of the whole model: by numbers, as torch counts parameters.
    if kind == StateDictType.FULL_STATE_DICT:
        plain = nn.Sequential(Wide(), nn.Linear(200, 200)).to(MODES[mode][0])
        plain.load_state_dict(weights)
        alone = optimizer_of(list(plain.parameters()), mode)
        alone.load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain))
        alone.init_states()
        for name, param in plain.named_parameters():
            if "block_words" in alone.state[param]:
                moments = {key: before[f"{name}.{key}"] for key in ("exp_avg", "exp_avg_sq")}
                assert_within_codec(param, alone, moments, f"{label}, {name} alone:")
            if "remainder" in alone.state[param]:
                assert_bits_equal(alone.master_param(param), before[f"{name}.master_param"], f"{label} {name} alone")
            assert alone.state[param]["step"] == 3


def fsdp1_runs() -> None:
    warnings.simplefilter("ignore")
    full, parts = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    for orig, kind in itertools.product((True, False), (full, parts)):
        through_fsdp1(orig, "int8, split24", kind)
    for mode in ("int8, split32", "int8, fp32 parameters"):
        through_fsdp1(True, mode, parts)
        through_fsdp1(False, mode, full)


def test_fsdp1(tmp_path: Path) -> None:
    run(tmp_path, 2, fsdp1_runs)
