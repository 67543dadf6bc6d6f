"""What the tests inside other people's trainers share: a launcher's environment, and what must hold in each of them.

The trainers are written for GPUs. Where one refuses a CPU, the test that uses it says how it gets past that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_all_equal, assert_ranks_agree, local, states
from packaging.version import Version
from reference import assert_bits_equal, bits_equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardops
from shardops import FusedShardedAdamW

LR = 1e-2
STEPS = 6
SAVED_AT = 3
# How far losses may be from those under torch's AdamW, as in test_fsdp.py and test_fsdp1.py: in fp32 both are within
# 2e-6 of float64's; under bf16 compute an fp32 ulp may cross a tie, which moves one weight by 2^-8 of it, and the loss
# by 1e-4.
FP32_BOUND = 2**-17
BF16_BOUND = 2**-10

Make = Callable[..., torch.optim.Optimizer]


def needs(package: str, at_least: str) -> None:
    """Skips the calling test where a package is missing or old; does not import it, which takes a second for some."""
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install {package}")
    if Version(found) < Version(at_least):
        pytest.skip(f"{package} {found} is older than {at_least}, whose interface is tested")


def launched() -> None:
    """Inside a rank: the environment that a launcher sets, for trainers that ask it who they are.

    The process group exists already, so nobody dials the address.
    """
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "HF_HUB_OFFLINE": "1",
    }


def stock_gathers() -> AbstractContextManager[Any]:
    """Within it nothing is attached to FSDP's parameters: their all-gathers cast and copy as torch's own."""
    fsdp = getattr(shardops, "fsdp", None)
    return fsdp.disabled() if hasattr(fsdp, "disabled") else nullcontext()


@dataclass
class Session:
    """A model in a trainer's hands.

    Attributes:
        parts: modules, each stepped by the optimizer at its place in ``optimizers``.
        optimizers: ours or torch's, out of the trainer's wrapper.
        loss: of this rank's batch, by the number of the batch.
        train: trains steps, returns their losses.
        save, load: a checkpoint in a folder, by the trainer's own means. None: it cannot.
    """

    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[[int], Tensor]
    train: Callable[[range], list[Tensor]]
    save: Callable[[str], None] | None = None
    load: Callable[[str], None] | None = None

    def params(self) -> list[Tensor]:
        return [param for part in self.parts for param in part.parameters()]

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of each parameter."""
        return {str(i): local(param).clone() for i, param in enumerate(self.params())}

    def states(self) -> dict[str, Tensor]:
        """This rank's part of each state."""
        found = {}
        for i, optimizer in enumerate(self.optimizers):
            found |= {f"{i}.{name}": local(tensor).clone() for name, tensor in states(optimizer)}
        return found


Start = Callable[[Make, int, float], Session]


def check(start: Start, folder: str, *, bound: float, shadows: bool) -> None:
    """Training, gathers and checkpoints of a trainer.

    Args:
        start: hands a fresh model to the trainer: given the optimizer's class, the model's seed and the lr.
        folder: for checkpoints; does not exist yet.
        bound: on the distance of losses from those under torch's AdamW.
        shadows: whether the step is to write what all-gathers send.
    """
    expected = start(torch.optim.AdamW, 0, LR).train(range(STEPS))
    run = start(FusedShardedAdamW, 0, LR)
    first = run.weights()
    losses = run.train(range(1))
    assert_stepped(run.params(), run.optimizers, steps=1)
    assert_shadows(run.params(), shadows)
    losses += run.train(range(1, SAVED_AT))
    if run.save is not None:
        run.save(folder)
    losses += run.train(range(SAVED_AT, STEPS))
    assert_follows(losses, expected, bound)
    assert_moved(first, run.weights())
    assert_shadows(run.params(), shadows)

    if shadows:
        with stock_gathers():
            stock = start(FusedShardedAdamW, 0, LR)
            assert_same(stock.train(range(STEPS)), losses, "loss beside stock gathers'")
            assert_shadows(stock.params(), False)
        assert_all_equal(run.weights(), stock.weights(), "beside stock gathers: parameter")
    if run.load is not None:
        weights, final = run.weights(), run.states()
        resumed = start(FusedShardedAdamW, 1, LR / 8)
        for session, label in ((run, "rewound"), (resumed, "resumed")):
            assert session.load is not None
            session.load(folder)
            assert_same(session.train(range(SAVED_AT, STEPS)), losses[SAVED_AT:], f"{label}: loss")
            assert_all_equal(session.weights(), weights, f"{label}: parameter")
            assert_all_equal(session.states(), final, f"{label}: state")
            assert_shadows(session.params(), shadows)
        run = resumed
    if shadows:
        assert_shadows_are_sent(run.params(), lambda: run.loss(0))


def assert_same(actual: list[Tensor], expected: list[Tensor], label: str) -> None:
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_bits_equal(a, b, f"{label} {step}")


def assert_follows(losses: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """The first loss, before any step, is torch's bit for bit; later ones are within the bound."""
    assert_bits_equal(losses[0], expected[0], "the first loss, before any step")
    for step, (a, b) in enumerate(zip(losses, expected, strict=True)):
        assert abs(float(a) - float(b)) <= bound, (step, float(a), float(b))


def assert_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """No parameter is what it was; decay alone moves each element."""
    for name, tensor in after.items():
        assert tensor.numel() == 0 or not bits_equal(tensor, before[name]), f"parameter {name} did not move"


def assert_stepped(params: list[Tensor], optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    """The optimizers step these very parameters, once each, and their states are sharded as they are."""
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    assert set(owners) == {id(param) for param in params}
    assert sum(len(group["params"]) for o in optimizers for group in o.param_groups) == len(params)
    for param in params:
        if not isinstance(param, DTensor) and param.numel() == 0:
            continue  # a parameter of FSDP1's that this rank holds nothing of
        state = owners[id(param)].state[param]
        assert state["step"] == steps
        for key in ("exp_avg", "exp_avg_sq"):
            moment = state[key]
            assert (moment.dtype, moment.shape, local(moment).shape) == (torch.float32, param.shape, local(param).shape)
            assert isinstance(moment, DTensor) == isinstance(param, DTensor)
            if isinstance(param, DTensor):
                assert (moment.device_mesh, moment.placements) == (param.device_mesh, param.placements)


def assert_shadows(params: list[Tensor], expected: bool) -> None:
    """Each local tensor has a shadow and the hook that sends it, or none has."""
    for param in params:
        for name in ("_shardops_shadow", "fsdp_pre_all_gather"):
            assert hasattr(getattr(param, "_local_tensor", param), name) == expected, (name, tuple(param.shape))


def assert_shadows_are_sent(params: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Zeroed behind everyone's back, shadows make a model of zeros: equal logits, of which there are 11."""
    with torch.no_grad():
        for param in params:
            param._local_tensor._shardops_shadow.padded.zero_()
    value = loss().detach()
    torch.testing.assert_close(float(value), math.log(11), rtol=1e-6, atol=0)
    assert_ranks_agree({"loss of zeros": value})
