"""Storage modes loaded into each other, exchanged with torch's AdamW, and their masters by name.

Another mode gets what it can hold: exactly, or as near as its codes allow.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from adam_modes import decode_24, decode_blocks, encode_24, encode_blocks, patterns
from optim_helpers import assert_same, clones, make_params, parameters, set_grads, snapshot, train
from reference import assert_bits_equal, from_patterns, generator
from test_state_modes import MASTERS, MODES, STATE_DTYPES, make
from torch import Tensor, nn

from shardops import FusedShardedAdam, FusedShardedAdamW
from shardops.optim import checkpoint
from shardops.optim.requantise import requantise

SHAPES = ((32, 200), (7, 5), (), (0, 256))
EXACT = ("split32", "fp32")  # masters that hold every fp32
Mode = tuple[str, str]


@torch.no_grad()
def _set(params: list[Any], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def _masters(optimizer: FusedShardedAdam) -> list[Tensor]:
    return clones(optimizer.master_param(param) for param in parameters(optimizer))


def _moments(optimizer: FusedShardedAdam) -> list[dict[str, Tensor]]:
    """fp32 moments of every parameter, as they are exported."""
    states = optimizer.state_dict(precision="float32")["state"]
    keys = ("exp_avg", "exp_avg_sq")
    return [{key: states[index][key].clone() for key in keys} for index in range(len(parameters(optimizer)))]


def _assert_moments_equal(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for key, value in theirs.items():
            # Zeros of either sign are one: codes have no sign of zero.
            assert_bits_equal(mine[key] + 0.0, value + 0.0, f"{key} of parameter {index}")


# ---- from every mode to every other ----------------------------------------------------------------------------------


def _assert_near_codes(state: dict[str, Any], exported: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Decoded moments are within half a code of what was to be stored, and codes are as fine as blocks allow."""
    words = state["block_words"].long() & 0xFFFFFFFF
    first = state["exp_avg_codes"]
    columns = first.shape[1:].numel()
    step = ((words[..., 1] & 0xFFFF) << 13).repeat_interleave(128, dim=1)[:, :columns]
    off = [torch.from_numpy(patterns(m["exp_avg_sq"]).astype("int64")).view(first.shape) for m in (exported, wanted)]
    assert ((off[0] - off[1]).abs() <= 0.501 * step).all()
    size_of_a_code, _ = decode_blocks(torch.ones_like(first), state["exp_avg_sq_codes"], state["block_words"])
    error = (exported["exp_avg"] - wanted["exp_avg"]).abs()
    assert (error <= 0.501 * size_of_a_code).all()
    for start in range(0, columns, 128):
        place = (slice(None), slice(start, start + 128))
        assert (first[place].int().abs().amax(1) >= 126).all()
        spread = off[1][place].amax(1) - off[1][place].amin(1)
        assert (step[place][:, 0] <= (spread / 253.0 + (1 << 13)).clamp(min=9 << 13)).all()


@pytest.mark.parametrize("target", MODES, ids="-".join)
@pytest.mark.parametrize("source", MODES, ids="-".join)
def test_every_mode_loads_every_other(source: Mode, target: Mode) -> None:
    optimizer = make(*source, shapes=SHAPES, amsgrad=True)
    train(optimizer, 3)
    moments, masters = _moments(optimizer), _masters(optimizer)
    largest = [optimizer.state[param]["max_exp_avg_sq"].clone() for param in parameters(optimizer)]
    other = make(*target, shapes=SHAPES, params_seed=9, amsgrad=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _set(parameters(other), clones(parameters(optimizer)))
    other.init_states()  # where states are converted, too

    exported = _moments(other)
    own = make(*target, shapes=SHAPES, amsgrad=True)
    own.init_states()
    for index, (mine, theirs) in enumerate(zip(parameters(other), parameters(optimizer), strict=True)):
        state = other.state[mine]
        assert set(state) == set(own.state[parameters(own)[index]])
        assert float(state["step"]) == 3.0
        assert_bits_equal(mine, theirs)
        assert_bits_equal(state["max_exp_avg_sq"], largest[index])
        if "exp_avg_codes" in state and source[0] != "int8":
            _assert_near_codes(state, exported[index], moments[index])
        else:
            kept = {key: value.bfloat16().float() for key, value in moments[index].items()}
            _assert_moments_equal([exported[index]], [kept if target[0] == "bfloat16" else moments[index]])
        master = other.master_param(mine)
        if target[1] in EXACT or source[1] == "split24":
            expected = theirs.detach().float() if target[1] in ("stochastic", "none") else masters[index]
            assert_bits_equal(master, expected)
        elif target[1] == "split24":
            off = (master.view(torch.int32) - masters[index].view(torch.int32)).abs()
            assert (off <= torch.where(state["remainder"] == 127, 255, 128)).all()
        else:
            assert_bits_equal(master, theirs.detach().float())
    train(other, 1, first=3)
    assert all(param.isfinite().all() for param in parameters(other))
    assert all(float(other.state[param]["step"]) == 4.0 for param in parameters(other))


@pytest.mark.parametrize("target", ["split32", "split24"])
def test_fp32_masters_at_ties(target: str) -> None:
    """Rounded to even by their own storage: one of them downwards, a whole remainder and one bit away."""
    param, values = make_params([(4,)], dtype=torch.bfloat16)[0], [0x3F808000, 0x3F818000, 0xBF808000, 0x40003412]
    source = FusedShardedAdam([param], master_weights="fp32")
    source.init_states()
    source.load_fp32_state_dict(nn.ParameterDict({"p": param}), {"p": from_patterns(values)})
    other = FusedShardedAdam(copy.deepcopy([param]), master_weights=target)
    other.load_state_dict(source.state_dict())
    other.init_states()
    lost = {"split32": 1, "split24": 256}[target]
    kept = {"split32": 0x40003412, "split24": 0x40003400}[target]
    expected = from_patterns([0x3F808000 - lost, 0x3F818000, 0xBF808000 - lost, kept])
    assert_bits_equal(parameters(other)[0], from_patterns(values).bfloat16())
    assert_bits_equal(other.master_param(parameters(other)[0]), expected)


def test_a_conversion_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_said", set())
    source = make("float32", "fp32", shapes=SHAPES)
    train(source, 1)
    with caplog.at_level(logging.WARNING, logger="shardops"):
        for _ in range(2):
            other = make("int8", "split24", shapes=SHAPES)
            other.load_state_dict(source.state_dict())
            train(other, 2)
            train(source, 1)
    said = [record.getMessage() for record in caplog.records if record.name == "shardops"]
    assert said == [
        "states keep master weights as 'master_param'; converting to 'remainder' (split24)",
        "states keep moments as float32; converting to int8",
    ]


def test_a_state_with_some_of_its_codes_is_refused() -> None:
    optimizer = make("int8", "split24", shapes=SHAPES)
    train(optimizer, 1)
    before = snapshot(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["block_words"]
    with pytest.raises(ValueError, match="parameter 0 has no 'block_words', without which its other codes cannot"):
        optimizer.load_state_dict(saved)
    for key, value in (("block_words", torch.zeros(32, 3, 2, dtype=torch.int32)), ("exp_avg_codes", torch.ones(32))):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0][key] = value
        with pytest.raises(ValueError, match=f"state '{key}' of parameter 0 is"):
            optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_codes"] = saved["state"][0]["exp_avg_codes"].float()
    with pytest.raises(ValueError, match=r"'exp_avg_codes' of parameter 0 is torch\.float32 .* cannot read"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)


# ---- fp32 and torch --------------------------------------------------------------------------------------------------


def test_precision_has_two_names() -> None:
    optimizer = make("int8", "split24", shapes=SHAPES)
    with pytest.raises(ValueError, match="precision is 'fp32'; it is 'stored' or 'float32'"):
        optimizer.state_dict(precision="fp32")


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_exchange_with_torch(state_dtype: str, master: str) -> None:
    """Exported in mid-run, torch's AdamW makes the step that this optimizer makes; and the run comes back."""
    options: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}
    optimizer = make(state_dtype, master, shapes=SHAPES, **options)
    train(optimizer, 3)
    before = snapshot(optimizer)
    exported = optimizer.state_dict(precision="float32")
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"master_param"} if master in (*EXACT, "split24") else set())
    for index, state in exported["state"].items():
        assert set(state) == keys
        assert all(value.dtype == torch.float32 for value in state.values())
        if "master_param" in keys:
            assert_bits_equal(state["master_param"], optimizer.master_param(parameters(optimizer)[index]))
    assert_same(snapshot(optimizer), before)

    theirs = torch.optim.AdamW([nn.Parameter(master) for master in _masters(optimizer)], foreach=False)
    theirs.load_state_dict(copy.deepcopy(exported))
    train(optimizer, 1, first=3)
    train(theirs, 1, first=3, dtype=torch.bfloat16)
    for mine, other in zip(parameters(optimizer), parameters(theirs), strict=True):
        assert theirs.param_groups[0]["lr"] == 2e-3
        assert float(theirs.state[other]["step"]) == 4.0
        size = other.detach().abs() + 4 * 2e-3
        rounding = {"split24": 2.0**-15, "stochastic": 2.0**-7, "none": 2.0**-8}.get(master, 0.0)
        off = (optimizer.master_param(mine) - other.detach()).abs()
        assert (off <= (rounding + 2**-22) * size).all()

    back = make(state_dtype, master, shapes=SHAPES, params_seed=9)
    back.load_state_dict(theirs.state_dict())
    _set(parameters(back), clones(parameters(theirs)))
    train(back, 1, first=4)
    assert back.param_groups[0]["lr"] == 2e-3
    assert back.param_groups[0]["state_dtype"] == state_dtype
    assert all(float(back.state[param]["step"]) == 5.0 for param in parameters(back))
    train(theirs, 1, first=4, dtype=torch.bfloat16)
    for mine, other in zip(parameters(back), parameters(theirs), strict=True):
        codes = {"float32": 0.0, "bfloat16": 0.02, "int8": 0.15}[state_dtype] * 2e-3
        size = other.detach().abs() + 4 * 2e-3
        # It went through a bfloat16 parameter; torch carried master_param along, which is kept where it rounds to that.
        assert ((back.master_param(mine) - other.detach()).abs() <= (rounding + 2**-7) * size + codes).all()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("columns", [128, 200, 129, 1000])
def test_fp32_and_back_to_codes_is_exact(columns: int, amsgrad: bool, backend: str) -> None:
    """The codes that come back decode to the same bits, and the run goes on as if they had never been away."""
    shapes = [(-(-4096 // columns), columns)]
    optimizer, other = (
        make("int8", "split24", shapes=shapes, amsgrad=amsgrad, weight_decay=0.1, backend=backend) for _ in range(2)
    )
    dead = torch.rand(shapes[0], generator=generator(3)) < 0.1  # elements that never get a gradient
    dead[1, :128] = True  # and a block of them
    for step in range(12):
        set_grads(parameters(optimizer), step, scale=10.0 ** -(step % 3))
        parameters(optimizer)[0].grad.masked_fill_(dead, 0.0)
        optimizer.step()
    exported = copy.deepcopy(optimizer.state_dict(precision="float32"))
    assert (exported["state"][0]["exp_avg_sq"] == 0).equal(dead)
    other.load_state_dict(exported)
    _set(parameters(other), clones(parameters(optimizer)))
    other.init_states()
    _assert_moments_equal(_moments(other), _moments(optimizer))
    for each in (optimizer, other):
        train(each, 2, first=12)
    _assert_moments_equal(_moments(other), _moments(optimizer))
    assert_bits_equal(parameters(other)[0], parameters(optimizer)[0])


def test_codes_of_all_sizes_are_found_again() -> None:
    """Blocks of any spread, of denormals too, most of them with a short end and zeros."""
    rng = generator(0)
    rows, columns = 300, 200
    squares = torch.randn(rows, columns, generator=rng).square()
    spread = torch.rand(rows, 1, generator=rng) * 40
    squares = squares * torch.exp2(-spread * torch.rand(rows, columns, generator=rng)) * torch.exp2(spread * 3 - 100)
    first = torch.randn(rows, columns, generator=rng) * squares.sqrt()
    squares[torch.rand(rows, columns, generator=rng) < 0.05] = 0.0
    first[torch.rand(rows, columns, generator=rng) < 0.05] = 0.0
    first[squares == 0] = 0.0
    stored = decode_blocks(*encode_blocks(first, squares, rows, salt=77, step=3))
    found = requantise(*stored)
    for actual, expected in zip(decode_blocks(*found), stored, strict=True):
        assert_bits_equal(actual + 0.0, expected + 0.0)


def test_states_that_were_never_codes_become_the_nearest(backend: str) -> None:
    """As encoded without dither."""
    theirs = torch.optim.AdamW(make_params([(32, 200)]), foreach=False)
    train(theirs, 5)
    optimizer = make("int8", "split24", shapes=[(32, 200)], backend=backend)
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.init_states()
    state, wanted = optimizer.state[parameters(optimizer)[0]], theirs.state[parameters(theirs)[0]]
    expected = encode_blocks(wanted["exp_avg"], wanted["exp_avg_sq"], 32, salt=None)
    for key, codes in zip(("exp_avg_codes", "exp_avg_sq_codes", "block_words"), expected, strict=True):
        assert_bits_equal(state[key], codes, key)


# ---- masters by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", MODES, ids="-".join)
@pytest.mark.parametrize("source", [("int8", "split24"), ("float32", "split32"), ("int8", "none")], ids="-".join)
def test_fp32_state_dicts(source: Mode, target: Mode) -> None:
    """Out of every mode as it is, into every mode as far as it goes; moments and steps stay."""

    def build(mode: Mode, seed: int, steps: int) -> tuple[nn.Module, FusedShardedAdamW]:
        torch.manual_seed(seed)
        module = nn.Linear(200, 32).bfloat16()
        optimizer = FusedShardedAdamW(module.parameters(), state_dtype=mode[0], master_weights=mode[1])
        train(optimizer, steps)
        return module, optimizer

    model, optimizer = build(source, 0, 3)
    found = optimizer.fp32_state_dict(model)
    for key, param in model.named_parameters():
        assert_bits_equal(found[key], optimizer.master_param(param), key)
    other_model, other = build(target, 1, 2)
    moments = _moments(other)
    other.load_fp32_state_dict(other_model, found)
    for (key, param), state in zip(other_model.named_parameters(), other.state.values(), strict=True):
        value, half = found[key], patterns(torch.zeros(found[key].shape)) + 0x80000000
        if target[1] == "split24":
            assert_bits_equal(param, encode_24(value, half)[0], key)
            value = decode_24(*encode_24(value, half))
        elif target[1] not in EXACT:
            value = value.bfloat16().float()
        assert_bits_equal(other.master_param(param), value, key)
        assert float(state["step"]) == 2.0
    _assert_moments_equal(_moments(other), moments)
    masters = _masters(other)
    other.init_states()  # the write was its own: remainders stay
    for mine, kept in zip(_masters(other), masters, strict=True):
        assert_bits_equal(mine, kept)
