"""fp32 state dicts: the masters of every storage bit for bit, loaded into any other, plain and sharded."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import UNEVEN, Tensors, local, run, set_gradients, values, whole
from optim_helpers import assert_same, parameters, snapshot
from reference import assert_bits_equal, awkward, generator, split
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.shadow import shadow_of, versions

# Parameter dtype and storage of its master.
MODES = [
    (torch.float32, "auto"),
    (torch.bfloat16, "split32"),
    (torch.bfloat16, "fp32"),
    (torch.float16, "fp32"),
]
Mode = tuple[torch.dtype, str]


class _Model(nn.Module):
    """A tied weight, a frozen parameter, one outside of the optimizer, buffers and an extra state."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        rng = generator(seed)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=rng) * 0.05).to(dtype))

        self.first = nn.ParameterDict({"weight": made(7, 5), "bias": made(7), "gain": made()})
        self.last = nn.ParameterDict({"weight": self.first["weight"]})
        self.frozen = made(3).requires_grad_(False)
        self.other = made(67)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.norm.running_mean += seed
        self.extra = seed

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.loaded_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def _trained(model: _Model) -> list[nn.Parameter]:
    return [*model.first.values(), model.frozen]


def _make(mode: Mode, seed: int = 0, steps: int = 0) -> tuple[_Model, FusedShardedAdamW]:
    model = _Model(mode[0], seed)
    optimizer = FusedShardedAdamW(_trained(model), lr=1e-3, master_weights=mode[1])
    _train(optimizer, steps)
    return model, optimizer


def _train(optimizer: FusedShardedAdam, steps: int, first: int = 0) -> None:
    """Under gradients that every dtype holds: their bits are the step's alone."""
    for step in range(first, first + steps):
        rng = generator(1000 + step)
        for param in parameters(optimizer):
            grad = torch.randint(-8, 9, tuple(param.shape), generator=rng) / 8
            if param.requires_grad:
                param.grad = grad.to(param.dtype)
        optimizer.step()


def _rounded(master: Tensor, mode: Mode) -> Tensor:
    return split(master)[0] if mode[1] == "split32" else master.to(mode[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_it_has_the_models_keys_and_the_masters(mode: Mode) -> None:
    model, optimizer = _make(mode, steps=3)
    own, found = model.state_dict(), optimizer.fp32_state_dict(model)
    assert list(found) == list(own)
    trained = {f"first.{name}": param for name, param in model.first.items()}
    for key, value in found.items():
        if key == "last.weight":
            assert value is found["first.weight"]
        elif (param := trained.get(key)) is not None:
            assert_bits_equal(value, optimizer.master_param(param), key)
            assert value.dtype == torch.float32
            assert not value.requires_grad
            before = snapshot(optimizer)
            value.fill_(7.0)  # nobody's but the caller's
            assert_same(snapshot(optimizer), before)
        elif isinstance(value, Tensor):
            assert_bits_equal(value, own[key], key)
        else:
            assert value == own[key]


def test_before_the_first_step_it_makes_no_states() -> None:
    model, optimizer = _make(MODES[1])
    assert_bits_equal(optimizer.fp32_state_dict(model)["first.bias"], model.first["bias"].float())
    assert not optimizer.state


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("target", MODES, ids=str)
@pytest.mark.parametrize("source", MODES, ids=str)
def test_masters_and_training_go_from_any_storage_to_any_other(source: Mode, target: Mode, steps: int) -> None:
    """``steps``: those of the target before it loads."""
    model, optimizer = _make(source, steps=3)
    saved = optimizer.fp32_state_dict(model)
    other, resumed = _make(target, seed=1, steps=steps)
    before = snapshot(resumed)
    resumed.load_fp32_state_dict(other, saved)
    for name, value in snapshot(resumed).items():
        if name.startswith(("step", "exp_avg")):
            assert_bits_equal(value, before.get(name, torch.zeros_like(value)), name)  # no states yet: inert ones
    for key, param in other.first.items():
        assert_bits_equal(resumed.master_param(param), saved[f"first.{key}"], key)
        assert_bits_equal(param, _rounded(saved[f"first.{key}"], target), key)
    for key in ("frozen", "other"):
        assert_bits_equal(getattr(other, key), saved[key].to(target[0]), key)
    assert_bits_equal(other.norm.running_mean, model.norm.running_mean)
    assert other.extra == model.extra
    assert other.loaded_version == 1  # of the state dict's metadata

    for mine, theirs in zip(other.first.values(), model.first.values(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            resumed.state[mine][key].copy_(optimizer.state[theirs][key])
    _train(resumed, 3, first=3)
    _train(optimizer, 3, first=3)
    for mine, theirs in zip(other.first.values(), model.first.values(), strict=True):
        assert_bits_equal(resumed.master_param(mine), optimizer.master_param(theirs))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_values_of_every_pattern_are_loaded_exactly(mode: Mode) -> None:
    """Ties, infinities, NaNs, denormals: the master has them, and still after a step that adds nothing."""
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(4096, dtype=mode[0]))})
    optimizer = FusedShardedAdam(model.parameters(), lr=0.0, master_weights=mode[1])
    value = awkward(4096, seed=3)
    optimizer.load_fp32_state_dict(model, {"x": value})
    high, low = split(torch.where(value.isnan(), float("nan"), value))
    for _ in range(2):
        assert_bits_equal(optimizer.master_param(model["x"]), value)
        assert_bits_equal(model["x"], high if mode[1] == "split32" else value.to(mode[0]))
        if mode[1] == "split32":
            assert_bits_equal(optimizer.state[model["x"]]["remainder"], low, exact=True)
        model["x"].grad = torch.zeros_like(model["x"])
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_values_are_masters_too(dtype: torch.dtype) -> None:
    model, optimizer = _make(MODES[1], steps=2)
    saved = {key: value.to(dtype) for key, value in optimizer.fp32_state_dict(model).items() if key != "_extra_state"}
    optimizer.load_fp32_state_dict(model, saved, strict=False)
    assert_bits_equal(optimizer.master_param(model.first["bias"]), saved["first.bias"].float())


def test_each_of_two_optimizers_loads_its_own() -> None:
    """What one's state dict has of the other's parameters is rounded; loading it must not cost the other's masters."""
    model, optimizer = _make(MODES[1], steps=2)
    second = FusedShardedAdamW([model.other], lr=1e-3)
    _train(second, 3)
    saved = [copy.deepcopy(each.fp32_state_dict(model)) for each in (optimizer, second)]
    fresh, mine = _make(MODES[1], seed=1)
    theirs = FusedShardedAdamW([fresh.other], lr=1e-3)
    for each, state_dict in zip((mine, theirs), saved, strict=True):
        each.load_fp32_state_dict(fresh, state_dict)
    assert_bits_equal(mine.master_param(fresh.first["weight"]), saved[0]["first.weight"])
    assert_bits_equal(theirs.master_param(fresh.other), saved[1]["other"])
    assert saved[1]["other"].ne(saved[0]["other"].float()).any()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_model_that_was_cast_is_loaded_in_its_new_dtype(mode: Mode) -> None:
    """Autograd, too, sees that the parameters were written."""
    model, optimizer = _make(mode, steps=2)
    saved = {
        key: value + 1 if key == "first.bias" else value for key, value in optimizer.fp32_state_dict(model).items()
    }
    model.to(torch.float32 if mode[0] != torch.float32 else torch.bfloat16)
    before = model.first["bias"]._version
    optimizer.load_fp32_state_dict(model, saved)
    assert model.first["bias"]._version > before
    for key, param in model.first.items():
        assert_bits_equal(optimizer.master_param(param), saved[f"first.{key}"], key)


def test_other_writers_are_still_noticed_after_a_load() -> None:
    model, optimizer = _make(MODES[1], steps=2)
    optimizer.load_fp32_state_dict(model, optimizer.fp32_state_dict(model))
    with torch.no_grad():
        model.first["bias"].fill_(0.3)
    assert_bits_equal(optimizer.master_param(model.first["bias"]), torch.full((7,), 0.3).bfloat16().float())


def test_keys_are_the_state_dicts_where_a_wrapper_renames_them() -> None:
    model, optimizer = _make(MODES[1], steps=2)
    model.first = checkpoint_wrapper(model.first)
    saved = {
        key: value + 1 if key == "first.bias" else value for key, value in optimizer.fp32_state_dict(model).items()
    }
    assert saved["first.bias"].dtype == torch.float32
    optimizer.load_fp32_state_dict(model, saved)
    assert_bits_equal(optimizer.master_param(model.first["bias"]), saved["first.bias"])


def test_only_what_both_have_is_loaded_if_not_strict() -> None:
    model, optimizer = _make(MODES[1], steps=2)
    before = copy.deepcopy(optimizer.fp32_state_dict(model))
    bias = torch.rand(7)
    optimizer.load_fp32_state_dict(model, OrderedDict({"first.bias": bias, "more": bias}), strict=False)
    after = optimizer.fp32_state_dict(model)
    assert_bits_equal(after["first.bias"], bias)
    assert_bits_equal(after["first.weight"], before["first.weight"])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda s: s.pop("first.gain"), ValueError, r"lacks 1 keys of the model, \['first.gain'\].*strict=False"),
        (lambda s: s.update(more=torch.ones(1)), ValueError, r"has 1 that the model has not, \['more'\]"),
        (lambda s: s.update({"first.gain": torch.ones(1)}), ValueError, r"'first.gain' has shape \(1,\).* \(\)"),
        (lambda s: s.update({"norm.running_var": torch.ones(3)}), ValueError, r"'norm.running_var' has shape \(3,\)"),
        (lambda s: s.update({"first.gain": torch.tensor(1)}), TypeError, "'first.gain' is torch.int64"),
        (lambda s: s.update({"first.gain": torch.tensor(1.0).double()}), TypeError, r"torch.float64.*\.float\(\)"),
        (lambda s: s.update({"first.gain": 1.0}), TypeError, "'first.gain' is 1.0, a float"),
    ],
    ids=["missing", "unexpected", "shape", "buffer", "int", "float64", "number"],
)
def test_a_refused_state_dict_writes_nothing(change: Any, error: type[Exception], match: str) -> None:
    model, optimizer = _make(MODES[1], steps=2)
    saved = OrderedDict((key, v + 1 if isinstance(v, Tensor) else v) for key, v in model.state_dict().items())
    change(saved)
    before, own = snapshot(optimizer), copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        optimizer.load_fp32_state_dict(model, saved)
    assert_same(snapshot(optimizer), before)
    assert all(not isinstance(value, Tensor) or value.equal(own[key]) for key, value in model.state_dict().items())


def test_a_model_that_does_not_fit_is_refused() -> None:
    model, optimizer = _make(MODES[1], steps=1)
    saved = optimizer.fp32_state_dict(model)
    calls: tuple[Any, ...] = (optimizer.fp32_state_dict, lambda m: optimizer.load_fp32_state_dict(m, saved, False))
    for call in calls:
        with pytest.raises(ValueError, match=r"2 parameters of this optimizer, of shapes \[\(7,\), \(\)\].*ModuleList"):
            call(model.last)
    model.other._fsdp_flattened = True  # as FSDP1 marks its own
    for call in calls:
        with pytest.raises(TypeError, match=r"FSDP1 modules.*optim_state_dict"):
            call(model)
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        FusedShardedAdam(meta.parameters()).load_fp32_state_dict(meta, {}, strict=False)


def test_a_dtensor_for_a_plain_parameter_is_refused(dtensor: Tensor) -> None:
    model = nn.ParameterDict({"x": torch.zeros(4)})
    optimizer = FusedShardedAdam(model.parameters())
    with pytest.raises(ValueError, match=r"'x' is a DTensor, .*full_tensor"):
        optimizer.load_fp32_state_dict(model, {"x": dtensor})


# ---- sharded ---------------------------------------------------------------------------------------------------------


def _sharded(dtype: torch.dtype, storage: str, seed: int) -> tuple[Tensors, FusedShardedAdamW]:
    model = Tensors(values(UNEVEN, seed, dtype))
    model.p1.requires_grad_(False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, FusedShardedAdamW(model.parameters(), lr=1e-2, master_weights=storage)


def _step(model: Tensors, optimizer: FusedShardedAdamW, steps: range) -> None:
    for step in steps:
        grads = [(grad * 8).round() / 8 for grad in values(UNEVEN, 100 + step)]
        set_gradients(list(model.parameters()), [g.to(p.dtype) for g, p in zip(grads, model.parameters(), strict=True)])
        model.p1.grad = None
        optimizer.step()


def _sharded_cases() -> None:
    modes = MODES[:3]
    for source, target in [(a, b) for a in modes for b in modes]:
        model, optimizer = _sharded(*source, 0)
        _step(model, optimizer, range(2))
        saved = optimizer.fp32_state_dict(model)
        full = {key: whole(value) for key, value in saved.items()}
        for state_dict in (saved, full):
            other, resumed = _sharded(*target, 1)
            _step(other, resumed, range(1))
            if target[0] == torch.float32:
                assert all(shadow_of(param._local_tensor).is_current(param) for param in resumed.state)
            before = {key: versions(param) for key, param in other.named_parameters()}
            resumed.load_fp32_state_dict(other, state_dict)
            for (key, param), twin in zip(other.named_parameters(), model.parameters(), strict=True):
                if param.requires_grad:
                    assert all(new > old for new, old in zip(versions(param), before[key], strict=True))
                    shadow = shadow_of(param._local_tensor)
                    assert shadow is None or not shadow.is_current(param)
                    assert saved[key].placements == param.placements
                    assert saved[key].device_mesh == param.device_mesh
                    assert_bits_equal(local(resumed.master_param(param)), local(saved[key]), key)
                    assert_bits_equal(local(param), _rounded(local(saved[key]), target), key)
                    for name in ("step", "exp_avg", "exp_avg_sq"):
                        resumed.state[param][name].copy_(optimizer.state[twin][name])
                else:
                    assert saved[key].dtype == source[0]
                    assert_bits_equal(local(param), local(saved[key]).to(target[0]), key)
            _step(other, resumed, range(2, 4))
            again, expected = _sharded(*source, 0)
            _step(again, expected, range(4))
            for (key, param), twin in zip(other.named_parameters(), again.parameters(), strict=True):
                if param.requires_grad:
                    assert_bits_equal(local(resumed.master_param(param)), local(expected.master_param(twin)), key)
    _exposed_before_the_load()
    _sharded_refusals()
    _under_ddp()


def _exposed_before_the_load() -> None:
    """A load that changes the parameter alone, its remainder being what it was, is no stranger's write."""
    model, optimizer = _sharded(torch.bfloat16, "split32", 0)
    _step(model, optimizer, range(1))
    shifted = {key: 2 * value for key, value in optimizer.fp32_state_dict(model).items()}
    shifted["p0"] = optimizer.fp32_state_dict(model)["p0"]
    # One unit of the bf16's last place, with the remainder as it is.
    shifted["p0"]._local_tensor.copy_((shifted["p0"]._local_tensor.view(torch.int32) + (1 << 16)).view(torch.float32))
    handed_out = model.state_dict()
    optimizer.load_fp32_state_dict(model, shifted)
    assert handed_out["p0"]._local_tensor.data_ptr() == model.p0._local_tensor.data_ptr()
    assert_bits_equal(local(optimizer.master_param(model.p0)), local(shifted["p0"]))
    # It still reaches the parameters, and whoever writes through it is noticed.
    handed_out["p0"]._local_tensor.data.fill_(0.5)  # moves no version counter
    assert_bits_equal(local(optimizer.master_param(model.p0)), torch.full_like(local(shifted["p0"]), 0.5))
    # Also where steps were made between the state dict and the load.
    _step(model, optimizer, range(1, 2))
    optimizer.load_fp32_state_dict(model, shifted)
    with torch.no_grad():
        handed_out["p0"]._local_tensor.fill_(0.25)
    assert_bits_equal(local(optimizer.master_param(model.p0)), torch.full_like(local(shifted["p0"]), 0.25))


def _sharded_refusals() -> None:
    model, optimizer = _sharded(torch.bfloat16, "split32", 0)
    saved = optimizer.fp32_state_dict(model)
    mesh = init_device_mesh("cpu", (2,))
    refused = [
        (distribute_tensor(torch.ones(13, 5), mesh, [Replicate()]), r"'p0' has placements \(Replicate.*redistribute"),
        (local(saved["p0"]), r"'p0' has shape \([67], 5\)"),
    ]
    before = {key: whole(value) for key, value in saved.items()}
    for value, match in refused:
        with pytest.raises(ValueError, match=match):
            optimizer.load_fp32_state_dict(model, {**saved, "p0": value, "p4": saved["p4"] + 1})
    for key, value in optimizer.fp32_state_dict(model).items():
        assert_bits_equal(whole(value), before[key], key)


def _under_ddp() -> None:
    model, optimizer = _make(MODES[1], steps=2)
    wrapped = nn.parallel.DistributedDataParallel(model)
    saved = optimizer.fp32_state_dict(wrapped)
    assert list(saved) == list(wrapped.state_dict())
    other, resumed = _make(MODES[0], seed=1)
    resumed.load_fp32_state_dict(nn.parallel.DistributedDataParallel(other), saved)
    assert_bits_equal(other.first["weight"], optimizer.master_param(model.first["weight"]))


def test_sharded_masters_go_from_any_storage_to_any_other(tmp_path: Path) -> None:
    """Uneven and empty shards; DTensors and full tensors are loaded alike, shadows and other writers are not missed."""
    run(tmp_path, 2, _sharded_cases)
