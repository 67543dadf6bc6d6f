"""The CUDA kernels' twins as a backend of the tests, ``"cuda_twin"``: the kernels' own files and the glue above them,
compiled as C++ for the CPU, run on CPU tensors. Equal bits here are equal bits on a GPU, which rounds the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import sys
import types
from pathlib import Path

import torch

from shardops.ops import _registry

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import native

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "cuda_twin"
BUILD = ROOT / "build" / "cuda_twin"
NAME = "cuda_twin"
PRIMITIVES = ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam")

# Words and halves of them are read as what they are not, as on a GPU; fibers are left by longjmp.
FLAGS = (
    *("-DSHARDOPS_TWIN", f"-I{FOLDER}", f"-I{ROOT / 'csrc'}"),
    *("-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-clobbered"),
)


def library_path() -> Path:
    """Where the twins' library lies; SHARDOPS_TWIN_LIBRARY names another build."""
    return Path(os.environ.get("SHARDOPS_TWIN_LIBRARY") or BUILD / "twin.so")


def build(target: Path, extra: tuple[str, ...] = (), link: tuple[str, ...] = ()) -> None:
    """Compiles the twins; nothing is done where all is up to date."""
    include, torch_link = native.torch_flags()
    flags = (*include, *FLAGS)
    objects = [
        *native.cuda_kernels(nvcc=False, flags=flags),
        *native.cuda_glue(flags),
        *native.shared_checks(flags),
        native.Compile(FOLDER / "schemas.cpp", flags),
        native.Compile(FOLDER / "traffic.cpp", flags),
        native.Compile(FOLDER / "probes.cpp", flags),
    ]
    # -O1: half of the time of compiling, and the twins' own time does not matter.
    common = [flag for flag in native.COMMON_FLAGS if flag != "-O3"] + ["-O1", *extra]
    native.build_shared_object(target.parent, target, objects, common, [*torch_link, *link])


@functools.cache
def load() -> ctypes.CDLL:
    """Builds what is not built, and loads it once a process."""
    path = library_path()
    if "SHARDOPS_TWIN_LIBRARY" not in os.environ:
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / ".lock", "w") as lock:  # of several workers, one builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            build(path)
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def register() -> None:
    """Makes the twins a backend by name, beside those of the package."""
    if NAME in _registry.BACKENDS:
        return
    load()
    module = types.ModuleType(f"shardops.backends.{NAME}")
    module.unavailable_reason = lambda device: None if device == "cpu" else "the twins run on the CPU"  # type: ignore[attr-defined]
    module.KERNELS = {name: getattr(torch.ops.shardops_twin, name).default for name in PRIMITIVES}  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    _registry.BACKENDS = (*_registry.BACKENDS, NAME)


class Traffic:
    """What the kernels moved between entering and leaving: bytes, accesses of 8 bytes and more, launches."""

    loaded: int
    stored: int
    wide_loads: int
    wide_stores: int
    launches: int

    def __enter__(self) -> Traffic:
        load().shardops_twin_reset_traffic()
        return self

    def __exit__(self, *_: object) -> None:
        counts = (ctypes.c_int64 * 5)()
        load().shardops_twin_traffic(counts)
        self.loaded, self.stored, self.wide_loads, self.wide_stores, self.launches = counts
