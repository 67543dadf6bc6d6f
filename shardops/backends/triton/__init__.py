"""The Triton backend: one launch for each list of tensors, on any GPU that torch calls ``"cuda"`` (NVIDIA, AMD).

Nothing here imports triton before a kernel is called, so that the package imports where triton is missing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

# Primitive -> the module of this folder that holds its launcher.
_MODULES = {
    "flatten_shard": "flatten_shard",
    "unflatten_shard": "flatten_shard",
    "cast_gather": "cast_gather",
    "grad_norm": "grad_norm",
    "sharded_adam": "sharded_adam",
}


@functools.cache
def _interpreting() -> bool | str:
    """Whether kernels run in triton's interpreter, as decided at its import; a text: why it cannot be imported."""
    try:
        # Imports triton, and decorates the first kernels.
        kernels = importlib.import_module("._math", __name__)
    except Exception as error:  # a broken installation raises more than ImportError
        return f"{type(error).__name__}: {error}"
    return bool(kernels.INTERPRETING)


@functools.cache
def _assembler_reason() -> str | None:
    """Why the assembler that triton brings cannot be used for a GPU of this machine; None if it can."""
    version = importlib.import_module("triton").__version__
    count = torch.cuda.device_count() if torch.version.cuda else 0
    newest = max((torch.cuda.get_device_capability(index) for index in range(count)), default=(0, 0))
    if newest >= (10, 0) and tuple(map(int, version.split(".")[:2])) < (3, 7):
        # Seen in the machine code: mul.rn.f32x2 and add.rn.f32x2 become FFMA2 in spite of --fmad=false.
        return (
            f"the assembler of triton {version} fuses multiplications and additions on Blackwell though told not to, "
            "so that results would differ from other backends' in the last bit; install triton 3.7 or later"
        )
    return None


def unavailable_reason(device_type: str) -> str | None:
    """Why triton cannot run on a device type, with the remedy; None if it can."""
    interpreting = _interpreting()
    if isinstance(interpreting, str):
        return (
            f"triton cannot be imported ({interpreting}); "
            "install the version that belongs to this torch: pip install triton"
        )
    if device_type == "cpu":
        if interpreting:
            return None
        return (
            "triton runs on a GPU; on a CPU only in its interpreter: set TRITON_INTERPRET=1 before the first import, "
            "for tests"
        )
    if device_type != "cuda":
        return f"the Triton kernels are for device type 'cuda', not {device_type!r}; name another backend"
    if interpreting:
        return "triton was imported with TRITON_INTERPRET=1, which runs kernels on the CPU; unset it"
    return _assembler_reason()


def _deferred(primitive: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        module = importlib.import_module(f".{_MODULES[primitive]}", __name__)
        return getattr(module, primitive)(*args)

    run.__name__ = run.__qualname__ = primitive
    return run


KERNELS: dict[str, Callable[..., Any]] = {primitive: _deferred(primitive) for primitive in _MODULES}
