"""What 8-bit moments cost the update: in closed loop on a run's gradients, beside published formats and to nearest.

A small form of ``python benchmarks/quality/state_error.py``, with the same bounds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_codecs import (
    BF16,
    BF16_NEAREST,
    BNB,
    FLASH,
    FLOAT32,
    OURS,
    OURS_NEAREST,
    Errors,
    Hyper,
    bnb_exp_avg,
    bnb_exp_avg_sq,
    dynamic_map,
    flash_exp_avg,
    flash_exp_avg_sq,
    make_loops,
)
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks" / "quality"))

import state_error
from recording import Run

BETAS2 = (0.999, 0.95)
SCALES = [1.0, 1e-3, 1e-6]
WARM_UP, COUNTED = 40, 30


@functools.cache
def measured(beta2: float) -> dict[str, Any]:
    """Errors by scale and format, of a run of a small decoder whose rows are and are not multiples of a block."""
    run = Run(dim=128, layers=1, heads=2, hidden=200, steps=170, batch=2, sequence=48, beta2=beta2)
    torch.set_num_threads(1)
    record = state_error.measure(run, WARM_UP, COUNTED, SCALES, [OURS], backend=None)
    assert record["elements"] > 200_000
    return dict(record["errors"])


@pytest.mark.parametrize("beta2", BETAS2)
def test_update_is_nearer_to_fp32_than_with_published_formats(beta2: float) -> None:
    errors = measured(beta2)["1.0"]
    ours = errors[OURS]
    assert ours["nmse"] <= 1e-3
    assert max(ours["nmse_by_tensor"]) <= 2e-3
    for name, factor in ((FLASH, 1.25), (BNB, 5.0)):
        assert errors[name]["nmse"] > factor * ours["nmse"], name
        assert errors[name]["largest_error"] > 4.0 * ours["largest_error"], name
    assert ours["largest_error"] <= 0.2
    assert ours["largest_update"] <= 1.1 * ours["largest_reference"]
    assert errors[BF16]["nmse"] <= 1e-4


@pytest.mark.parametrize("beta2", BETAS2)
@pytest.mark.parametrize("scale", SCALES[1:])
def test_small_gradients_cost_nothing_more(beta2: float, scale: float) -> None:
    errors = measured(beta2)
    ours, small = errors["1.0"][OURS], errors[str(scale)][OURS]
    assert small["nmse"] == pytest.approx(ours["nmse"], rel=0.1)
    assert small["largest_update"] <= 1.1 * small["largest_reference"]
    assert small["zeroed"] == 0


@pytest.mark.parametrize("beta2", BETAS2)
def test_second_moments_of_a_run_keep_their_level(beta2: float) -> None:
    for scale in SCALES:
        ours = measured(beta2)[str(scale)][OURS]
        assert abs(ours["drift"]) < 2e-3
        assert ours["zeroed"] == 0  # nor is an exp_avg_sq ever 0 under an exp_avg that is not


def fading(step: int) -> list[Tensor]:
    """Gradients of which every other becomes a hundredth of what it was: its exp_avg_sq falls by 0.1 % a step.

    The others keep a block's largest value where it is, so that a code of the falling ones stands for one value.
    """
    grad = 1e-3 * torch.randn(64, 200, generator=torch.Generator().manual_seed(step))
    if step >= 20:
        grad[:, 1::2] *= 0.01
    return [grad]


@functools.cache
def faded() -> dict[str, Errors]:
    loops = make_loops(Hyper(), [FLOAT32, OURS, OURS_NEAREST, FLASH, BNB, BF16, BF16_NEAREST])
    errors = {name: Errors() for name in loops}
    for loop in loops.values():
        loop.start([torch.zeros(64, 200)], [torch.zeros(64, 200)], 0)
    for step in range(420):
        updates = {name: loop.step(fading(step)) for name, loop in loops.items()}
        for name, loop in loops.items():
            errors[name].add(updates[name], updates[FLOAT32])
            errors[name].add_moments(loop)
    for name, loop in loops.items():
        errors[name].end(loop, loops[FLOAT32])
    return errors


def test_a_slowly_falling_second_moment_is_followed() -> None:
    errors = faded()
    for name in (OURS, BF16):
        assert abs(errors[name].drift) < 2e-3, name
        assert errors[name].zeroed == 0, name


@pytest.mark.parametrize("name", [OURS_NEAREST, BF16_NEAREST, FLASH, BNB])
def test_to_nearest_it_freezes(name: str) -> None:
    """What the dither is for: half of the elements stay up to 40 % above where they should be."""
    assert faded()[name].drift > 0.05


def test_published_formats_are_what_their_formulas_say() -> None:
    signed, unsigned = dynamic_map(signed=True), dynamic_map(signed=False)
    assert signed.unique().numel() == unsigned.unique().numel() == 256
    assert signed[-2] == pytest.approx(1 - 0.9 / 128)  # the middle of the last of 64 intervals
    assert unsigned[-2] == pytest.approx(1 - 0.9 / 256)
    assert signed[0] == -signed[-2]
    assert unsigned[1] == pytest.approx(1e-6 * 0.325)  # the middle of the first of two

    # By hand: half of a group's largest is softsign 2/3, code 85 of 127; its square root is code 180 of 255.
    x = torch.zeros(32)
    x[:2] = torch.tensor([1.0, -0.5])
    y = 85 / 127
    assert flash_exp_avg(x)[:2].tolist() == pytest.approx([1.0, -y / (2 - y)])
    assert flash_exp_avg_sq(x.abs())[:2].tolist() == pytest.approx([1.0, (180 / 255) ** 2])
    assert flash_exp_avg(x * 1e-9).eq(0).all()  # below float16's range


@pytest.mark.parametrize(("store", "signed"), [(bnb_exp_avg, True), (bnb_exp_avg_sq, False)])
def test_dynamic_map_takes_the_nearest_value(store: Callable[[Tensor], Tensor], signed: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 300) * torch.logspace(-9, 0, 300)  # blocks cross rows, the last one is short
    values = values if signed else values.abs()
    stored = store(values).flatten()
    for start in range(0, values.numel(), 256):
        block = values.flatten()[start : start + 256]
        scale = block.abs().max()
        distance = (block[:, None] / scale - dynamic_map(signed)).abs()
        nearest = dynamic_map(signed)[distance.argmin(1)]
        assert torch.equal(stored[start : start + 256], nearest * scale)
    assert store(torch.zeros(3, 50)).eq(0).all()
