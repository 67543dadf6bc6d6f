"""The first part: what machine this is, whether each backend loads, and one launch of each primitive.

On the default stream, on another one, and on a second device where there is one; results are compared already.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference import assert_bits_equal, ordinary
from torch import Tensor

import shardops
from gpu.device import Device, open_device
from gpu.units import Context, Log, Skip, Unit
from shardops import ops


def _say(*command: str) -> str | None:
    """What a command prints, if it is there and works."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    return str(getattr(importlib.import_module(module), "__version__", "present"))


def machine_of(device: Device) -> dict[str, Any]:
    """Versions, driver, device and revision, for the record."""
    from _harness import machine

    found = machine()
    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu,ecc.mode.current"
    nvcc = _say("nvcc", "--version")
    found |= {
        "kernel": platform.release(),
        "triton": _version_of("triton"),
        "numpy": _version_of("numpy"),
        "CUDA of torch": torch.version.cuda,
        "nvcc": nvcc.splitlines()[-1] if nvcc else None,
        "changes not in the revision": _say("git", "-C", str(Path(__file__).resolve().parent), "status", "--short"),
    }
    found |= device.info()
    if device.kind == "cuda":
        said = _say("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
        found["nvidia-smi"] = {query: said}
    found["backends"] = shardops.backends(device.kind)
    return found


def primitives(device: torch.device, backend: str) -> dict[str, Callable[[], list[Tensor]]]:
    """One small call of each primitive: what it wrote."""

    def tensors(count: int = 3) -> list[Tensor]:
        return [ordinary(40 + index, 33, seed=index).to(device) for index in range(count)]

    def adam() -> list[Tensor]:
        params, grads = tensors(2), tensors(2)
        moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        steps = torch.zeros(2, device=device)
        ops.sharded_adam(params, grads, *moments, steps, lr=1e-2, weight_decay=0.1, backend=backend)
        return [*params, *moments[0], *moments[1], steps]

    def unflatten() -> list[Tensor]:
        outs = [torch.full_like(t, 7.0) for t in tensors()]
        buffer = ordinary(4, 1100, seed=9).to(device)
        return list(ops.unflatten_shard(buffer, outs, layout="per_param", backend=backend))

    return {
        "flatten_shard": lambda: [ops.flatten_shard(tensors(), 4, dtype=torch.bfloat16, backend=backend)],
        "unflatten_shard": unflatten,
        "cast_gather": lambda: [ops.cast_gather(tensors(), torch.bfloat16, backend=backend)],
        "grad_norm": lambda: list(ops.grad_norm(tensors(), 2.0, backend=backend)),
        "sharded_adam": adam,
    }


def _compare(run: Callable[[], list[Tensor]], expected: list[Tensor]) -> int:
    found = [tensor.cpu() for tensor in run()]
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_bits_equal(mine, theirs, f"result {index}")
    return sum(tensor.numel() for tensor in found)


def _on_other_stream(context: Context, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    found: list[Tensor] = []
    context.device.on_other_stream(lambda: found.extend(run()))
    context.device.synchronize()
    return found


def launches(context: Context, backend: str, log: Log) -> None:
    """Every primitive once, against the reference on the CPU."""
    device = context.device
    expected = {name: run() for name, run in primitives(torch.device("cpu"), "reference").items()}
    for name, run in primitives(device.torch_device, backend).items():
        log.check(name, backend, partial(_compare, run, expected[name]))
        log.check(
            f"{name}, on another stream",
            backend,
            partial(_compare, partial(_on_other_stream, context, run), expected[name]),
            stand_in=device.missing("streams"),
        )
    reason = device.missing("second device")
    if reason is not None:
        log.skip("on a second device", backend, reason)
        return
    second = open_device(device.kind, 1).torch_device
    torch.cuda.set_device(device.torch_device)  # the tensors' device is not the current one
    for name, run in primitives(second, backend).items():
        log.check(f"{name}, on a second device", backend, partial(_compare, run, expected[name]))


def units(context: Context) -> list[Unit]:
    def describe(log: Log) -> None:
        log.info.update(machine_of(context.device))

    def absent(reason: str, log: Log) -> None:
        raise Skip(reason)

    return [
        Unit("machine", describe),
        *(Unit(f"launch {name}", partial(launches, context, name)) for name in context.backends),
        *(Unit(f"launch {name}", partial(absent, reason)) for name, reason in context.absent.items()),
    ]
