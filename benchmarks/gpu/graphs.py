"""The part about CUDA graphs: steps and ops, captured and replayed, give the bits of eager ones; no sync, no growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from reference import assert_bits_equal
from torch import Tensor

import shardops
from gpu.contenders import BF16, FORMATS, Update, build_update, parameters
from gpu.units import Context, Log, Unit
from shardops import ops

SHAPES: list[tuple[int, ...]] = [(64, 256), (129,), (33, 128), (7, 5)]
REPLAYS = 4
OPS = ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam")
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, clipped": (torch.float32, {"max_grad_norm": 1.0}),
    "bf16, split32": (BF16, {}),
    "bf16, split24, int8 moments": (BF16, {"master_weights": "split24", "state_dtype": "int8"}),
}


def _seeded(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng).to(device=device, dtype=dtype) for shape in shapes]


def _optimizer(context: Context, backend: str, mode: str) -> Any:
    dtype, options = MODES[mode]
    device = context.device.torch_device
    params = parameters(_seeded(SHAPES, 1, dtype, device), _seeded(SHAPES, 2, dtype, device))
    return shardops.FusedShardedAdamW(params, lr=1e-2, capturable=True, backend=backend, **options)


def _params(optimizer: Any) -> list[Tensor]:
    return list(optimizer.param_groups[0]["params"])


def _give_gradients(optimizer: Any, seed: int) -> None:
    """New values where the old ones lie, as a captured backward would write them."""
    for param, grad in zip(_params(optimizer), _seeded(SHAPES, seed, torch.float32, torch.device("cpu")), strict=True):
        param.grad.copy_(grad)  # type: ignore[union-attr]


def _state(optimizer: Any) -> dict[str, Tensor]:
    """Parameters and states, by a name."""
    found = {}
    for index, param in enumerate(_params(optimizer)):
        found[f"parameter {index}"] = param.detach()
        for name, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                found[f"{name} {index}"] = value
    return found


def _check_step(context: Context, backend: str, mode: str) -> int:
    """Each replay is the eager twin's next step, with gradients that change in between."""
    captured, eager = (_optimizer(context, backend, mode) for _ in range(2))
    eager.step()
    context.device.on_other_stream(captured.step)  # a capture wants its states made, and its kernels compiled
    replay = context.device.capture(captured.step)
    count = 0
    for round_ in range(REPLAYS):
        for optimizer in (captured, eager):
            _give_gradients(optimizer, 10 + round_)
        replay()
        eager.step()
        mine, theirs = _state(captured), _state(eager)
        for name, expected in theirs.items():
            assert_bits_equal(mine[name], expected, f"replay {round_}: {name}")
            count += expected.numel()
    return count


def _ops_calls(context: Context, backend: str) -> dict[str, tuple[list[Tensor], Callable[[], list[Tensor]]]]:
    """By name: the inputs, and the call, which returns what it wrote."""
    device = context.device.torch_device
    tensors = _seeded(SHAPES, 3, torch.float32, device)
    flat = ops.flatten_shard(tensors, 4, layout="per_param", backend="reference")
    outs = [torch.zeros_like(t) for t in tensors]
    storage = FORMATS["fp32, bf16 shadow"]
    torch.manual_seed(0)
    update: Update = build_update(storage, [(64, 256), (33, 128)], device)

    def adam() -> list[Tensor]:
        update.run(backend)
        return [*update.params, *update.exp_avgs, *update.more["shadows"], update.steps]

    def unflatten() -> list[Tensor]:
        return list(ops.unflatten_shard(flat, outs, layout="per_param", backend=backend))

    return {
        "flatten_shard": (tensors, lambda: [ops.flatten_shard(tensors, 4, dtype=BF16, backend=backend)]),
        "unflatten_shard": ([flat], unflatten),
        "cast_gather": (tensors, lambda: [ops.cast_gather(tensors, BF16, backend=backend)]),
        "grad_norm": (tensors, lambda: list(ops.grad_norm(tensors, 2.0, backend=backend))),
        "sharded_adam": (update.grads, adam),
    }


def _check_op(context: Context, backend: str, name: str) -> int:
    """Replays over changed inputs give what a twin's eager calls give."""
    inputs, call = _ops_calls(context, backend)[name]
    twins, twin_call = _ops_calls(context, backend)[name]
    written: list[Tensor] = []

    def run() -> None:
        written[:] = call()

    twin_call()
    context.device.on_other_stream(run)
    replay = context.device.capture(run)
    count = 0
    for round_ in range(REPLAYS):
        for tensors in (inputs, twins):
            for index, tensor in enumerate(tensors):
                tensor.copy_(
                    _seeded([tuple(tensor.shape)], 100 * round_ + index, torch.float32, torch.device("cpu"))[0]
                )
        replay()
        for index, (mine, theirs) in enumerate(zip(written, twin_call(), strict=True)):
            assert_bits_equal(mine, theirs, f"replay {round_}: result {index}")
            count += theirs.numel()
    return count


def _check_growth(context: Context, backend: str, mode: str) -> None:
    """After the first steps, none leaves more memory behind."""
    optimizer = _optimizer(context, backend, mode)
    for _ in range(2):
        optimizer.step()
    before = context.device.allocated()
    for round_ in range(5):
        _give_gradients(optimizer, 30 + round_)
        optimizer.step()
    grown = context.device.allocated() - before
    if grown > 0:
        raise AssertionError(f"five steps after the second left {grown} more bytes allocated")


def _check_syncs(context: Context, backend: str, mode: str) -> None:
    """A step does not make the host wait."""
    optimizer = _optimizer(context, backend, mode)
    optimizer.step()  # makes the states
    for param in _params(optimizer):
        param.grad = param.grad.clone()  # type: ignore[union-attr]  # elsewhere, as after a zero_grad()
    with context.device.forbid_syncs():
        optimizer.step()


def _eager(context: Context, backend: str, log: Log) -> None:
    statistics, mode_of_torch = (context.device.missing(name) for name in ("memory statistics", "sync debug mode"))
    for mode in MODES:
        growth, syncs = (partial(check, context, backend, mode) for check in (_check_growth, _check_syncs))
        log.check(f"no growth, {mode}", backend, growth, stand_in=statistics)
        log.check(f"no sync, {mode}", backend, syncs, stand_in=mode_of_torch)


def units(context: Context) -> list[Unit]:
    """Captures last, and each a unit: one that fails may leave the device unusable; the process is then replaced."""
    made = [Unit(f"steps of {name}", partial(_eager, context, name)) for name in context.backends]
    checks: list[tuple[str, Callable[[Context, str, str], int], Sequence[str]]] = [
        ("a step", _check_step, list(MODES)),
        ("an op", _check_op, OPS),
    ]
    for backend in context.backends:
        for what, check, kinds in checks:
            for kind in kinds:
                run = partial(_capture, context, backend, kind, partial(check, context, backend, kind))
                made.append(Unit(f"capture of {what}, {kind}, {backend}", run))
    return made


def _capture(context: Context, backend: str, name: str, check: Callable[[], int], log: Log) -> None:
    log.check(name, backend, check, stand_in=context.device.missing("graphs"))
