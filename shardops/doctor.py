"""What this machine can run and whether it computes rightly: versions, devices, backends, compilers, self-tests.

``examine()`` gives a dict that JSON can hold; ``shardops doctor`` shows it. Its keys (a value that is not known, or not
there, is None):

    schema            1; raised when a key changes its meaning or goes
    ok                on every device the backend that is chosen is a fused one and gave the reference's bits
    problems          texts, why ok is False: what was found, the reason, the remedy
    warnings          texts: what does not work and is not chosen
    versions          python, torch, triton, numpy, shardops, cuda and hip (that torch was built with): texts
    devices           a dict each: device ("cpu", "cuda:0"), type, name, capability ("9.0"), memory (bytes), driver,
                      cores and threads (of the CPU)
    backends          device type -> devices (how many there are), chosen (what runs when none is named), why
                      (SHARDOPS_BACKEND, or None), reasons: backend -> why it cannot run and the remedy, None: it can
    instruction_sets  found (the library's, that this CPU runs, from "default" to the best), used, torch (its own)
    library           path, found, and how it was built: compiler, flags, nvcc, cuda_architectures
    compilers         c++ and nvcc -> path, version
    communication     gloo and nccl -> available, reason, version
    environment       variables that change what runs, where they are set
    self_tests        a dict each: device, backend, primitive, case, ok, error, seconds
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import __version__, ops
from .backends.reference.block_quant import blocks_of
from .ops import _library, _registry

SCHEMA = 1
YARDSTICK = "reference"  # on the CPU: all other backends must give its bits
_INTERPRETED = ("triton", "cpu")  # for tests: nobody chooses it by accident, and it takes long
_FUSED = {"cpu": ("cpp",), "cuda": ("cpp", "triton")}
_GPU_NODES = {"/dev/nvidiactl": "an NVIDIA GPU", "/dev/kfd": "an AMD GPU"}
_VARIABLES = (
    *("SHARDOPS_BACKEND", "SHARDOPS_CPU_CAPABILITY", "SHARDOPS_LIBRARY", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CXX", "NVCC", "CUDA_HOME"),
)
# Vectors with and without a rest, an empty tensor, rows that end within a block of 128, and one for several threads.
_SHAPES = ((40, 33), (129,), (0, 128), (3, 256), (17_001,))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Case = tuple[str, str, Callable[[torch.device, str], dict[str, Tensor]]]  # primitive, case, what a call wrote by name


def examine() -> dict[str, Any]:
    """Looks at this machine and runs the self-tests: about a second, longer where Triton has to compile first.

    Returns:
        The dict that this module describes.
    """
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": False,
        "problems": [],
        "warnings": [],
        "versions": _versions(),
        "devices": _devices(),
        "backends": {},
        "instruction_sets": {"found": None, "used": None, "torch": torch.backends.cpu.get_cpu_capability()},
        "library": {"path": str(_library.library_path()), "found": _library.library_path().exists()},
        "compilers": {"c++": _compiler(), "nvcc": _nvcc()},
        "communication": {"gloo": _gloo(), "nccl": _nccl()},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "self_tests": [],
    }
    _read_host_module(found)
    for device_type in ("cpu", "cuda"):
        devices = [device["device"] for device in found["devices"] if device["type"] == device_type]
        found["backends"][device_type] = _backends(device_type, len(devices))
        for device in devices:
            _examine_device(found, torch.device(device), found["backends"][device_type])
    hidden = None if torch.cuda.is_available() else _unusable_gpu()
    if hidden is not None:
        found["problems"].append(hidden)
    found["ok"] = not found["problems"]
    return found


# ---- what is there ---------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {name: _version(name) for name in ("triton", "numpy")}
    return versions | {"shardops": __version__, "cuda": torch.version.cuda, "hip": torch.version.hip}


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except Exception:  # a broken installation raises more than ImportError; the backend's reason says what
        return None


def _say(*command: str) -> str | None:
    """What a command prints, if it is there and works."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> dict[str, str | None]:
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:  # a quote that does not end
        return {"path": None, "version": f"CXX is {os.environ['CXX']!r}: {error}"}
    path = shutil.which(command[0])
    said = _say(*command, "--version") if path else None
    return {"path": path, "version": said.splitlines()[0] if said else None}


def _nvcc() -> dict[str, str | None]:
    home = os.environ.get("CUDA_HOME")  # looked for as the build does
    path = shutil.which(os.environ.get("NVCC") or (str(Path(home) / "bin" / "nvcc") if home else "nvcc"))
    said = _say(path, "--version") if path else None
    release = [line for line in said.splitlines() if "release" in line] if said else []
    return {"path": path, "version": release[0] if release else None}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, Any]]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = {"name": _cpu_name(), "capability": None, "memory": memory, "driver": None}
    cpu |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    devices: list[dict[str, Any]] = [{"device": "cpu", "type": "cpu", **cpu}]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = _say("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if count else None
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "type": "cuda",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
                "driver": said.splitlines()[0] if said else None,
                "cores": None,
                "threads": None,
            }
        )
    return devices


def _unusable_gpu() -> str | None:
    """What is wrong where this machine has a GPU and torch uses none; None if nobody would expect it to."""
    present = [name for node, name in _GPU_NODES.items() if Path(node).exists()]
    is_hidden = any(os.environ.get(f"{maker}_VISIBLE_DEVICES") in ("", "-1") for maker in ("CUDA", "HIP"))
    if not present or is_hidden:
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is a build without GPU support; install the one for it (pytorch.org)"
    else:
        reason = "torch finds none that it can use; see what `python -c 'import torch; torch.zeros(1).cuda()'` says"
    return f"this machine has {present[0]}: {reason}, or hide it by CUDA_VISIBLE_DEVICES=''"


def _read_host_module(found: dict[str, Any]) -> None:
    """What the compiled host module tells: how the library was built, and the CPU's instruction sets."""
    found["library"] |= dict.fromkeys(("compiler", "flags", "nvcc", "cuda_architectures"))
    try:
        host = importlib.import_module("._host", __package__)
    except ImportError as error:
        if found["library"]["found"]:
            text = (
                f"the host module cannot be imported ({error}); it was built for another Python: install shardops again"
            )
            found["warnings"].append(text)
        return
    found["library"] |= json.loads(host.build_info())
    found["instruction_sets"]["found"] = host.cpu_capabilities()
    try:
        found["instruction_sets"]["used"] = host.cpu_capability()
    except RuntimeError as error:  # SHARDOPS_CPU_CAPABILITY names one that this CPU has not
        found["problems"].append(f"cpu: {error}")


def _gloo() -> dict[str, Any]:
    if not (dist.is_available() and dist.is_gloo_available()):
        return {"available": False, "reason": "this torch was built without gloo; install another", "version": None}
    reason = None
    try:  # a group of one finds out whether this host's name and network are fit
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        reason = f"a process group cannot be opened ({first}); name the network interface by GLOO_SOCKET_IFNAME"
    return {"available": reason is None, "reason": reason, "version": None}


def _nccl() -> dict[str, Any]:
    if not (dist.is_available() and dist.is_nccl_available()):
        reason = f"torch {torch.__version__} was built without NCCL; a CUDA build for Linux has it (pytorch.org)"
        return {"available": False, "reason": reason, "version": None}
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    unusable = None if torch.cuda.is_available() else "torch finds no GPU to use it on"
    return {"available": unusable is None, "reason": unusable, "version": version}


# ---- backends --------------------------------------------------------------------------------------------------------


def _backends(device_type: str, count: int) -> dict[str, Any]:
    reasons = {name: _registry.unavailable_reason(name, device_type) for name in _registry.BACKENDS}
    chosen = _registry.default_backend(device_type)
    why = "SHARDOPS_BACKEND" if os.environ.get("SHARDOPS_BACKEND") else None
    return {"devices": count, "chosen": chosen, "why": why, "reasons": reasons}


def _examine_device(found: dict[str, Any], device: torch.device, backends: dict[str, Any]) -> None:
    """Runs the self-tests of every backend that runs on a device, and says what of it is a problem."""
    chosen, reasons = backends["chosen"], backends["reasons"]
    if chosen not in reasons or reasons[chosen] is not None:
        reason = reasons.get(chosen, f"there is none of that name, but {', '.join(map(repr, reasons))}")
        found["problems"].append(f"{device}: {backends['why']} is {chosen!r}: {reason}; or unset {backends['why']}")
    elif chosen == YARDSTICK and backends["why"]:
        text = f"{device}: {backends['why']} is {chosen!r}, which fuses nothing; unset it to have a fused backend"
        found["problems"].append(text)
    elif chosen == YARDSTICK:
        missing = [f"{name}: {reason}" for name, reason in reasons.items() if reason and name in _FUSED[device.type]]
        found["problems"].append(
            f"{device}: no fused backend can run, all goes through {chosen!r}. {'. '.join(missing)}"
        )
    for backend, reason in reasons.items():
        place = (backend, device.type)
        if reason is not None or place == (YARDSTICK, "cpu") or (place == _INTERPRETED and backend != chosen):
            continue
        results = self_test(device, backend)
        found["self_tests"] += results
        failed = [result for result in results if not result["ok"]]
        if failed:
            names = ", ".join(f"{result['primitive']} ({result['case']})" for result in failed)
            remedy = f"SHARDOPS_BACKEND={YARDSTICK} does without it; please report `shardops doctor --json`"
            if place == _INTERPRETED:
                remedy = (
                    "triton's own interpreter is for tests, and rounds otherwise than a GPU; unset SHARDOPS_BACKEND"
                )
            text = f"{device}: backend {backend!r} fails in {names}: {failed[0]['error']}; {remedy}"
            found["problems" if backend == chosen else "warnings"].append(text)


# ---- self-tests ------------------------------------------------------------------------------------------------------


def self_test(device: torch.device, backend: str) -> list[dict[str, Any]]:
    """Small calls of every primitive on a device, compared bit for bit with the reference on the CPU.

    Args:
        device: to run on.
        backend: that can run there.

    Returns:
        What this module describes as ``self_tests``.
    """
    results = []
    for primitive, name, run in _cases():
        start = time.perf_counter()
        try:
            written = {label: tensor.cpu() for label, tensor in run(device, backend).items()}
            seconds = time.perf_counter() - start
            error = _difference(written, run(torch.device("cpu"), YARDSTICK))
        except Exception as raised:  # whatever a kernel, its compiler or its driver raises is the finding
            seconds = time.perf_counter() - start
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
        result: dict[str, Any] = {"device": str(device), "backend": backend, "primitive": primitive, "case": name}
        results.append(result | {"ok": error is None, "error": error, "seconds": round(seconds, 6)})
    return results


def _values(scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(round(1000 * scale))
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in _SHAPES]


def _cases() -> Iterator[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    yield "sharded_adam", "fp32", partial(_adam, fp32, None, fp32)
    yield "sharded_adam", "bf16 + split32", partial(_adam, bf16, bf16, fp32)
    yield "sharded_adam", "int8 + split24", partial(_adam, bf16, torch.int8, torch.int8)
    yield "cast_gather", "fp32 to bf16", _cast_gather
    for layout in ("flat", "per_param"):
        yield "flatten_shard", layout, partial(_flatten, layout)
        yield "unflatten_shard", layout, partial(_unflatten, layout)
    for norm in (2.0, math.inf):
        yield "grad_norm", f"{norm:g}-norm", partial(_grad_norm, norm)


def _to(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def _named(**lists: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}[{index}]": tensor for name, tensors in lists.items() for index, tensor in enumerate(tensors)}


def _words_shape(param: Tensor) -> tuple[int, int, int]:
    """Of the two words a block: a matrix has blocks within its rows, a vector is one row."""
    rows = param.shape[0] if param.dim() > 1 else 1
    return rows, blocks_of(param.numel() // rows if rows else 0), 2


def _adam(
    param_dtype: torch.dtype, master: torch.dtype | None, moments: torch.dtype, device: torch.device, backend: str
) -> dict[str, Tensor]:
    """Three steps from nothing, clipped, with whatever is stored in few bits dithered."""
    params, grads = _to(device, _values(1.0, param_dtype)), _to(device, _values(0.1))
    is_quantised = moments == torch.int8
    exp_avgs = [torch.zeros(p.shape, dtype=moments, device=device) for p in params]
    exp_avg_sqs = [t.view(torch.uint8) if is_quantised else torch.zeros_like(t) for t in map(torch.clone, exp_avgs)]
    masters = [torch.zeros(p.shape, dtype=master, device=device) for p in params] if master else []
    words = [torch.zeros(_words_shape(p), dtype=torch.int32, device=device) for p in params if is_quantised]
    table = [[1_000_003 * (index + 1), 0, p.numel() or 1, p.numel()] for index, p in enumerate(params)]
    steps, clip = torch.zeros(len(params), device=device), torch.ones((), device=device) * 0.3
    for _ in range(3):
        ops.sharded_adam(
            *(params, grads, exp_avgs, exp_avg_sqs, steps),
            lr=1e-2,
            weight_decay=0.1,
            decoupled_weight_decay=True,
            masters=masters,
            block_words=words,
            dither=torch.tensor(table, dtype=torch.int64) if is_quantised else None,
            clip_coef=clip,
            backend=backend,
        )
    written = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "masters": masters, "block_words": words}
    return _named(params=params, **written) | {"steps": steps}


def _cast_gather(device: torch.device, backend: str) -> dict[str, Tensor]:
    return {"out": ops.cast_gather(_to(device, _values(1.0)), torch.bfloat16, backend=backend)}


def _flatten(layout: str, device: torch.device, backend: str) -> dict[str, Tensor]:
    tensors, options = _to(device, _values(1.0)), {"scale": 0.25, "layout": layout}
    return {"out": ops.flatten_shard(tensors, 3, dtype=torch.bfloat16, backend=backend, **options)}  # type: ignore[arg-type]


def _unflatten(layout: str, device: torch.device, backend: str) -> dict[str, Tensor]:
    tensors = _values(1.0)
    buffer = ops.flatten_shard(tensors, 3, layout=layout, backend=YARDSTICK).to(device)
    outs = _to(device, [torch.full_like(tensor, 7.0) for tensor in tensors])
    ops.unflatten_shard(buffer, outs, layout=layout, scale=0.75, backend=backend)
    return _named(out_tensors=outs)


def _grad_norm(norm: float, device: torch.device, backend: str) -> dict[str, Tensor]:
    power_sum, found_inf = ops.grad_norm(_to(device, _values(1.0)), norm, backend=backend)
    return {"sum": power_sum, "found_inf": found_inf}


def _difference(written: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """What of the results differs in any bit; None: nothing."""
    for name, right in expected.items():
        found = written[name]
        if (found.dtype, found.shape) != (right.dtype, right.shape):
            return f"{name} is {found.dtype} of shape {tuple(found.shape)}, not {right.dtype} of {tuple(right.shape)}"
        mine, theirs = (t.contiguous().view(_INTEGERS[t.dtype.itemsize]).reshape(-1) for t in (found, right))
        where = (mine != theirs).nonzero()
        if len(where):
            first = int(where[0])
            values = [t.reshape(-1)[first].item() for t in (found, right)]
            count = f"{len(where)} of {right.numel()} elements"
            return (
                f"{name} differs from the reference in {count}; the first, {first}, is {values[0]!r}, not {values[1]!r}"
            )
    return None
