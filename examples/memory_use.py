"""Memory of a run: what is resident and for which component, measured while it runs; a cap that is enforced.

Components are counted from live tensors' storages, each once; what the process holds beyond them (activations,
temporaries, Python and its libraries) is the rest of the resident memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardops.memory import components as planned

SIZE_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
COMPONENTS = ("parameters", "gradients", "exp_avg", "exp_avg_sq", "master", "counters")
# State key -> share of it by component.
STATE_SHARES = planned.STATE_SHARES | {"step": {"counters": 1.0}, "salt": {"counters": 1.0}}
# What allocators say when they have nothing left: torch's on CPUs, C++'s, oneDNN's, CUDA's.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|bad_alloc|out of memory|not enough memory|could not create a memory",
    re.IGNORECASE,
)
# glibc's mallopt: from this size on an allocation is a mapping of its own, and goes back to the system when it is
# freed. Otherwise the bound grows to 32 MiB with what is freed, and holes between gradients stay resident.
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD = 2**20


class Stateful(Protocol):
    """What steps the parameters, with the tensors that it keeps for that."""

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Pairs of a key of STATE_SHARES and a live tensor."""
        ...


def parse_bytes(text: str) -> int:
    """`80GB` (10**9), `22GiB` (2**30), `500MB` or a plain number as bytes.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if match is None or match[2] not in SIZE_SUFFIXES:
        raise ValueError(f"{text!r} is no amount of memory: write 80GB (10**9 bytes), 22GiB (2**30) or bytes")
    return round(float(match[1]) * SIZE_SUFFIXES[match[2]])


def _kilobytes(path: str, field: str) -> int:
    """A field of /proc/self/status or /proc/meminfo, in bytes."""
    with open(path) as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"{path} has no {field}: this example measures memory on Linux only")


def _status(field: str) -> int:
    return _kilobytes("/proc/self/status", field)


def available_bytes() -> int:
    """Host memory that this process holds or can still have without anything else giving way."""
    return _status("VmRSS") + _kilobytes("/proc/meminfo", "MemAvailable")


def resident_bytes(device: torch.device) -> int:
    """Memory held now: of the process on a CPU, of torch's tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """The most host memory that this process has held at any time, as the system counts: within some 100 KiB."""
    return _status("VmHWM")  # not getrusage's, which takes over what the parent held before exec


def peak_bytes(device: torch.device) -> int:
    """The most that `resident_bytes` has been at any time, seen or not."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes()


def return_freed_memory() -> None:
    """Have glibc give large allocations back at once, so that resident memory is what is in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has another allocator
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def _read_only_mappings() -> int:
    """Bytes of files that are mapped and not writable: code and constants of the libraries."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, *_, inode = line.split()[:5]
            if inode != "0" and "w" not in permissions:
                first, end = (int(address, 16) for address in addresses.split("-"))
                total += end - first
    return total


def enforce_cap(cap: int, device: torch.device) -> str:
    """Make allocations fail that would pass the cap; returns a line saying what is bounded.

    On a GPU torch's allocator is bounded. On a CPU resident memory is: RLIMIT_DATA bounds all private writable memory
    (heap and anonymous mappings, touched or not), and is set to the cap less the size of the files that are mapped
    read-only, which is the most that these can ever hold. (Linux ignores RLIMIT_RSS, and RLIMIT_AS counts addresses
    that are only reserved.) Call it when all libraries are loaded.

    Raises:
        ValueError: the cap is more than the GPU has, or less than the process holds already; nothing is set then.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if cap > total:
            raise ValueError(f"the memory cap is {cap / 1e9:.2f} GB, but the GPU has {total / 1e9:.2f} GB: lower it")
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
        return f"cap: {cap / 1e9:.2f} GB of GPU memory in torch's allocator"
    files = _read_only_mappings()
    held = _status("VmData") + files
    if cap < held:
        raise ValueError(
            f"the memory cap is {cap / 1e9:.2f} GB, but Python and torch alone may hold {held / 1e9:.2f} GB before "
            "there is a model: raise it"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (cap - files, hard))
    return f"cap: {cap / 1e9:.2f} GB resident, {(cap - files) / 1e9:.2f} GB of it for data (RLIMIT_DATA)"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; other errors are not to be mistaken for it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    )


def state_bytes(update: Stateful) -> dict[str, float]:
    """Bytes by component of the tensors that the optimizer keeps; storages are counted once."""
    nbytes = dict.fromkeys(COMPONENTS, 0.0)
    seen: set[int] = set()
    for key, tensor in update.state_tensors():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            for component, share in STATE_SHARES[key].items():
                nbytes[component] += share * storage.nbytes()
    return nbytes


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes."""

    components: dict[str, float]
    resident: int

    @property
    def rest(self) -> float:
        """Activations, temporaries, and on a CPU also Python and its libraries."""
        # New zeros are resident once they are written to, so that the states may count for more than they hold.
        return max(0.0, self.resident - sum(self.components.values()))


class MemoryWatch:
    """Looks at memory whenever a gradient is ready, and after each step.

    Made before gradient release is enabled: hooks run in the order of their registration, and a released gradient has
    to be seen before it is gone.

    Args:
        model: on one device, with all its parameters in memory.
        update: what steps it.
        show: called with every sample.
    """

    def __init__(self, model: nn.Module, update: Stateful, show: Callable[[Sample], None]) -> None:
        self._parameters = list(model.parameters())
        self._update = update
        self._show = show
        self._device = self._parameters[0].device
        self._parameter_bytes = float(sum(p.nbytes for p in self._parameters))
        self.largest_gradients = 0  # bytes alive at once
        self.largest: Sample | None = None  # by resident memory
        self._states = state_bytes(update)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        self.sample()

    def sample(self) -> Sample:
        """Look now."""
        gradients = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
        components = self._states | {"parameters": self._parameter_bytes, "gradients": float(gradients)}
        sample = Sample(components, resident_bytes(self._device))
        self.largest_gradients = max(self.largest_gradients, gradients)
        if self.largest is None or sample.resident > self.largest.resident:
            self.largest = sample
        self._show(sample)
        return sample

    def count_states(self) -> Sample:
        """Count what the optimizer keeps anew, as its first step makes most of it, and look."""
        self._states = state_bytes(self._update)
        return self.sample()

    def bytes_per_parameter(self) -> dict[str, float]:
        """By component, with the most that gradients held at once, and in total."""
        numel = sum(p.numel() for p in self._parameters)
        nbytes = self.sample().components | {"gradients": float(self.largest_gradients)}
        return {name: value / numel for name, value in nbytes.items()} | {"total": sum(nbytes.values()) / numel}
