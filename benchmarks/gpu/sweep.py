"""The part that tries other launch sizes of the Triton kernels, each beside the default one in the same rounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpu.contenders import COPIES, FORMATS, build_update, shapes_of
from gpu.measure import Contender, copy_of, measure
from gpu.units import Context, Log, Skip, Unit

TRITON = "shardops.backends.triton"
ELEMENTS, DRY_ELEMENTS = 10**8, 10**4
Setting = dict[tuple[str, str], int]  # (module, constant) -> value


def _threads(count: int) -> Setting:
    return {("_launch", "THREADS"): count, ("_launch", "NUM_WARPS"): count // (64 if torch.version.hip else 32)}


def update_settings(is_int8: bool) -> dict[str, Setting]:
    """By name; of a step of quantised blocks, BLOCK_THREADS counts."""
    if is_int8:
        return {f"{n} threads a program": {("sharded_adam", "BLOCK_THREADS"): n} for n in (64, 256, 512)}
    vectors = {f"{v} elements a thread": {("sharded_adam", "VECTOR"): v} for v in (2, 8)}
    threads = {f"{n} threads a program": _threads(n) for n in (64, 128, 512)}
    both = {("sharded_adam", "VECTOR"): 8, **_threads(128)}
    return {**vectors, **threads, "8 elements a thread, 128 threads": both}


def copy_settings() -> dict[str, Setting]:
    rounds = {f"{n} blocks a program": {("_copy", "ROUNDS"): n} for n in (1, 2, 8, 16)}
    return {**rounds, **{f"{n} threads a program": _threads(n) for n in (128, 512)}}


@contextmanager
def constants(setting: Setting) -> Iterator[None]:
    """Constants of the Triton backend's modules, changed for a while."""
    before = {}
    try:
        for (module, name), value in setting.items():
            target = importlib.import_module(f"{TRITON}.{module}")
            before[module, name] = getattr(target, name)
            setattr(target, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(importlib.import_module(f"{TRITON}.{module}"), name, value)


def _with(setting: Setting, run: Callable[[], Any]) -> None:
    with constants(setting):
        run()


def _sweep(
    context: Context, case: str, run: Callable[[], Any], settings: dict[str, Setting], nbytes: int, log: Log
) -> None:
    backend = "triton"
    copy = copy_of(nbytes, context.device.torch_device)
    default = Contender("default", run, "ours", nbytes, backend)
    others = [
        Contender(name, partial(_with, setting, run), "ours", nbytes, backend) for name, setting in settings.items()
    ]
    elements = DRY_ELEMENTS if context.is_dry else ELEMENTS
    found = measure(
        context,
        log,
        f"sweep: {case}",
        [copy, default, *others],
        elements=elements,
        tensors=len(shapes_of(elements)),
        nbytes=nbytes,
    )
    medians = {
        name: row["median_s"] for name, row in found["contenders"].items() if row["median_s"] and name != copy.name
    }
    if medians:
        log.info["fastest"] = min(medians, key=lambda name: medians[name])


def _backend(context: Context) -> str:
    if "triton" in context.backends:
        return "triton"
    if not context.is_dry:
        raise Skip(context.absent.get("triton", "triton was left out"))
    return context.backends[0]  # so that a dry run comes through here; its figures mean nothing


def _update(context: Context, name: str, log: Log) -> None:
    backend = _backend(context)
    context.device.release()
    shapes = shapes_of(DRY_ELEMENTS if context.is_dry else ELEMENTS)
    update = build_update(FORMATS[name], shapes, context.device.torch_device)
    settings = update_settings(FORMATS[name].is_int8)
    _sweep(context, f"sharded_adam, {name}", partial(update.run, backend), settings, update.nbytes, log)


def _copy(context: Context, name: str, log: Log) -> None:
    backend = _backend(context)
    context.device.release()
    copy = COPIES[name](shapes_of(DRY_ELEMENTS if context.is_dry else ELEMENTS), context.device.torch_device)
    _sweep(context, name, partial(copy.ours, backend), copy_settings(), copy.nbytes, log)


def _cuda(log: Log) -> None:
    raise Skip("the CUDA kernels read no environment variable and have no constants to change without a build")


def units(context: Context) -> list[Unit]:
    if context.quick:

        def too_long(log: Log) -> None:
            raise Skip("a quick session does not sweep")

        return [Unit("sweep", too_long)]
    updates = ("fp32", "bf16, split24, int8 moments", "bf16, split32")
    copies = ("cast_gather, fp32 to bf16", "flatten_shard, per_param, bf16")
    return [
        *(Unit(f"sharded_adam, {name}", partial(_update, context, name)) for name in updates),
        *(Unit(name, partial(_copy, context, name)) for name in copies),
        Unit("CUDA kernels", _cuda),
    ]
