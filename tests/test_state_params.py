"""The storage modes under every option and kind of parameter, and when others write, cast, freeze or add some.

In all of them a step is torch's step from the same fp32 states; what is stored of it is tested elsewhere.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from optim_helpers import PAIRS, assert_same, clones, make_params, parameters, set_grads, snapshot, train
from reference import DTYPES, assert_bits_equal
from test_state_modes import MODES, STATE_DTYPES, make
from torch import Tensor, nn

from shardops import FusedShardedAdamW

SHAPES = ((32, 200), (7, 5), (67,), (), (0, 256))


def _masters(optimizer: Any) -> list[Tensor]:
    return clones(optimizer.master_param(param) for param in parameters(optimizer))


def _twin(optimizer: Any, torchs: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Torch's optimizer over the masters, with the states in fp32."""
    twin = torchs([nn.Parameter(master) for master in _masters(optimizer)], foreach=False, **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict(precision="float32")))
    return twin


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"maximize": True, "weight_decay": 0.3}),
        ("Adam", {"weight_decay": 0.3}),
        ("Adam", {"weight_decay": 0.3, "amsgrad": True, "maximize": True, "betas": (0.8, 0.95)}),
        ("AdamW", {"lr": torch.tensor(1e-2)}),
    ],
    ids=str,
)
def test_a_step_is_torchs_from_the_same_states(pair: str, options: dict[str, Any], state_dtype: str) -> None:
    """Also the third one, whose states went through their storage twice."""
    options = {"lr": 3e-3, **options}
    ours, theirs = PAIRS[pair]
    optimizer = ours(
        make_params(SHAPES, dtype=torch.bfloat16), state_dtype=state_dtype, master_weights="split32", **options
    )
    train(optimizer, 2)
    twin = _twin(optimizer, theirs, **options)
    start = _masters(optimizer)
    train(optimizer, 1, first=2)
    train(twin, 1, first=2, dtype=torch.bfloat16)
    for index, (master, other) in enumerate(zip(_masters(optimizer), parameters(twin), strict=True)):
        assert float(twin.state[other]["step"]) == 3.0
        if other.numel():
            bound = 2**-23 * (start[index].abs().max() + 8 * (other.detach() - start[index]).abs().max())
            assert (master - other.detach()).abs().max() <= bound
            assert (master - start[index]).abs().max() >= 1e-4
        if options.get("amsgrad"):
            largest = optimizer.state[parameters(optimizer)[index]]["max_exp_avg_sq"]
            assert torch.allclose(largest, twin.state[other]["max_exp_avg_sq"], rtol=2**-20, atol=0)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"lr": torch.tensor(2**-10)}, {"max_grad_norm": 1e9}], ids=str
)
def test_options_that_change_nothing(options: dict[str, Any], mode: tuple[str, str], backend: str) -> None:
    optimizer, plain = (make(*mode, shapes=SHAPES, backend=backend, **{"lr": 2**-10, **each}) for each in (options, {}))
    for each in (optimizer, plain):
        train(each, 2)
    assert_same(snapshot(optimizer), snapshot(plain))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_backends_agree_bit_for_bit(mode: tuple[str, str]) -> None:
    pair = [
        make(*mode, shapes=SHAPES, amsgrad=True, max_grad_norm=1.0, weight_decay=0.1, backend=backend)
        for backend in ("cpp", "reference")
    ]
    for each in pair:
        train(each, 3)
    assert_same(snapshot(pair[0]), snapshot(pair[1]))


def test_a_closure() -> None:
    optimizer, plain = (make("int8", "split24", shapes=SHAPES) for _ in range(2))
    train(plain, 1)

    def closure() -> float:
        assert torch.is_grad_enabled()
        set_grads(parameters(optimizer), 0)
        return 4.5

    assert optimizer.step(closure) == 4.5
    assert_same(snapshot(optimizer), snapshot(plain))


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_of_different_modes(backend: str) -> None:
    """Each as in an optimizer of its own, with the salts of one."""
    params = make_params([(32, 256)] * len(MODES), dtype=torch.bfloat16)
    groups = [
        {"params": [param], "state_dtype": mode[0], "master_weights": mode[1], "lr": 1e-3 * (1 + index)}
        for index, (param, mode) in enumerate(zip(params, MODES, strict=True))
    ]
    optimizer = FusedShardedAdamW(copy.deepcopy(groups), backend=backend)
    train(optimizer, 2)
    for index, group in enumerate(groups):
        padding = [{"params": [param], "lr": 0.0} for param in make_params([()] * index)]
        alone = FusedShardedAdamW([*padding, group], backend=backend)
        for step in range(2):
            set_grads(params, step)
            alone.step()
        mine, expected = parameters(optimizer)[index], group["params"][0]
        assert_bits_equal(mine, expected)
        assert set(optimizer.state[mine]) == set(alone.state[expected])
        for key, value in alone.state[expected].items():
            assert_bits_equal(optimizer.state[mine][key], value, key, exact=key == "remainder")


def test_a_group_added_in_mid_training() -> None:
    first, second = make_params([(32, 200)] * 2, dtype=torch.bfloat16)
    optimizer = FusedShardedAdamW([first], state_dtype="int8", master_weights="split24")
    train(optimizer, 1)
    salt = optimizer.state[first]["salt"].clone()
    optimizer.add_param_group({"params": [second], "state_dtype": torch.bfloat16})
    train(optimizer, 2, first=1)
    assert optimizer.param_groups[1]["master_weights"] == "split24"
    assert optimizer.state[second]["exp_avg"].dtype == torch.bfloat16
    assert [float(optimizer.state[param]["step"]) for param in (first, second)] == [3.0, 2.0]
    assert optimizer.state[first]["salt"] == salt != optimizer.state[second]["salt"]
    resumed = FusedShardedAdamW(
        [
            {"params": [copy.deepcopy(first)]},
            {"params": [copy.deepcopy(second)], "state_dtype": "bfloat16"},
        ],
        state_dtype="int8",
        master_weights="split24",
    )
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        train(each, 1, first=3)
    assert_same(snapshot(resumed), snapshot(optimizer))


@pytest.mark.parametrize("mode", [("int8", "split24"), ("bfloat16", "stochastic")], ids="-".join)
def test_a_parameter_listed_twice_makes_two_steps(mode: tuple[str, str], backend: str) -> None:
    """As in torch; each with its own dither, since each is a step of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about this
        param, other = (make_params([(32, 200)], dtype=torch.bfloat16)[0] for _ in range(2))
        options: dict[str, Any] = {"state_dtype": mode[0], "master_weights": mode[1], "backend": backend}
        optimizer, plain = FusedShardedAdamW([param, param], **options), FusedShardedAdamW([other], **options)
    param.grad = other.grad = torch.full_like(param, 0.25)
    optimizer.step()
    plain.step()
    plain.step()
    assert_bits_equal(param, other)
    for key, value in plain.state[other].items():
        assert_bits_equal(optimizer.state[param][key], value, key)


# ---- what others do between steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["in place", "load_state_dict", "data", "data replaced"])
@pytest.mark.parametrize("master", ["split24", "split32", "fp32"])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_write_resets_the_master(state_dtype: str, master: str, write: str, backend: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(200, 32).bfloat16()
    optimizer = FusedShardedAdamW(
        module.parameters(), state_dtype=state_dtype, master_weights=master, lr=1e-4, backend=backend
    )
    train(optimizer, 3)
    before = _masters(optimizer)
    assert all((m != p.float()).any() for m, p in zip(before, module.parameters(), strict=True))
    with torch.no_grad():
        if write == "in place":
            module.weight.mul_(0.5)
        elif write == "load_state_dict":
            module.load_state_dict({"weight": module.weight * 0.5, "bias": module.bias.clone()})
        elif write == "data":
            module.weight.data.mul_(0.5)
        else:
            module.weight.data = module.weight.data * 0.5
    if write.startswith("data"):
        optimizer.refresh_masters()
    written = module.weight.detach().float()
    assert_bits_equal(optimizer.master_param(module.weight), written)
    if write == "in place":  # the others keep theirs
        assert_bits_equal(optimizer.master_param(module.bias), before[1])
    if master != "fp32":
        assert not optimizer.state[module.weight]["remainder"].any()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(optimizer, 1, first=3)
    moved = (optimizer.master_param(module.weight) - written).abs()
    assert 2e-5 <= moved.mean() <= 1e-4  # of what it was written to, by one update
    assert moved.max() <= 2e-4


@pytest.mark.parametrize("after", DTYPES)
@pytest.mark.parametrize(
    ("master", "before"),
    [(m, d) for m in ("auto", "none", "split24") for d in DTYPES if (m, d) != ("split24", torch.float16)],
)
def test_a_model_cast_in_mid_training(master: str, before: torch.dtype, after: torch.dtype, backend: str) -> None:
    """Moments stay; the master is the parameter's, in the storage of its new dtype."""
    torch.manual_seed(0)
    module = nn.Linear(200, 32).to(before)
    optimizer = FusedShardedAdamW(module.parameters(), state_dtype="int8", master_weights=master, backend=backend)
    train(optimizer, 2)
    module.to(after)
    optimizer.zero_grad()
    set_grads(module.parameters(), 2)
    if master == "split24" and after == torch.float16:
        kept = snapshot(optimizer)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'split24' and a parameter .* has become float16; .* cast it back"):
                optimizer.step()
            assert_same(snapshot(optimizer), kept)
        module.to(before)
        train(optimizer, 1, first=2)
        assert float(optimizer.state[module.weight]["step"]) == 3.0
        return
    twin = _twin(optimizer, torch.optim.AdamW)
    for param, other in zip(module.parameters(), parameters(twin), strict=True):
        other.grad = param.grad.float()
    optimizer.step()
    twin.step()
    wanted = make("int8", master, dtype=after, shapes=[(32, 200)])
    wanted.init_states()
    assert set(optimizer.state[module.weight]) == set(wanted.state[parameters(wanted)[0]])
    if after == torch.float32 or master == "auto":
        for master_weight, other in zip(_masters(optimizer), parameters(twin), strict=True):
            assert (master_weight - other.detach()).abs().max() <= 2**-24


@pytest.mark.parametrize("mode", [("int8", "split24"), ("bfloat16", "stochastic")], ids="-".join)
def test_frozen_and_unfrozen(mode: tuple[str, str], backend: str) -> None:
    optimizer = make(*mode, shapes=[(32, 200), (64, 128)], backend=backend)
    free, frozen = parameters(optimizer)
    frozen.requires_grad_(False)
    set_grads([free], 0)
    optimizer.step()
    assert frozen not in optimizer.state
    frozen.requires_grad_(True)
    train(optimizer, 1, first=1)
    frozen.requires_grad_(False)
    frozen.grad = None
    kept = {key: value for key, value in snapshot(optimizer).items() if key.endswith("parameter 1")}
    kept["parameter 1"] = frozen.detach().clone()
    set_grads([free], 2)
    optimizer.step()
    after = snapshot(optimizer)
    for key, value in kept.items():
        assert_bits_equal(after[key], value, key)
    assert [float(optimizer.state[param]["step"]) for param in (free, frozen)] == [3.0, 1.0]


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_parameters_without_elements_or_dimensions(mode: tuple[str, str], backend: str) -> None:
    """Alone in their launches, too."""
    for shapes in ([()], [(0, 256)], [(32, 0)], [(1,)], [(0,), (), (33, 128)]):
        optimizer = make(*mode, shapes=shapes, lr=0.125, eps=0.0, weight_decay=0.0, backend=backend)
        start = _masters(optimizer)
        train(optimizer, 1)
        for param, first in zip(parameters(optimizer), start, strict=True):
            assert float(optimizer.state[param]["step"]) == 1.0
            moved = optimizer.master_param(param) - first
            assert torch.allclose(moved.abs(), torch.full_like(moved, 0.125), rtol=0, atol=2**-9)


def test_gradients_that_are_missing(backend: str) -> None:
    optimizer = make("int8", "split24", shapes=[(32, 200), (64, 128), (7,)], backend=backend)
    train(optimizer, 1)
    before = snapshot(optimizer)
    set_grads(parameters(optimizer), 1)
    parameters(optimizer)[0].grad = parameters(optimizer)[2].grad = None
    optimizer.step()
    after = snapshot(optimizer)
    for key, value in before.items():
        if not key.endswith("parameter 1"):
            assert_bits_equal(after[key], value, key)
    assert not torch.equal(after["parameter 1"], before["parameter 1"])
    optimizer.zero_grad()
    before = snapshot(optimizer)
    optimizer.step()  # by none at all: no norm is infinite
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps.item() == 0.0
