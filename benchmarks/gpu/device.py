"""The thin layer between the session's parts and a device: clocks, streams, graphs, memory, launches.

The CPU's stands in with a wall clock and plain calls, so that everything above it runs in a dry run, and ``missing``
says what it lacks.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Cycles of torch.cuda._sleep in a second, at the most; with a slower clock it sleeps longer.
_CYCLES = 2.0e9
_LONGEST_LEAD = 0.02


class Device:
    """What both devices have; made by :func:`open_device`."""

    kind: str
    backends: tuple[str, ...]  # that are looked at, beside the reference

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device(self.kind, index) if self.kind == "cuda" else torch.device(self.kind)

    def missing(self, feature: str) -> str | None:
        """Why the device has no such feature and stands in for it; None if it has."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits for all work; raises what went wrong in it."""

    def timed(self, function: Callable[[], Any], lead: float = 0.0) -> tuple[float, float]:
        """Seconds on the device's clock and on the host's, of one call with nothing of it in a cache.

        lead: seconds by which the host runs ahead of the device, so that launches do not wait for Python.
        """
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Memory that can be allocated."""
        raise NotImplementedError

    def peak_of(self, function: Callable[[], Any]) -> tuple[int, int]:
        """Bytes allocated before the call, and the most during it."""
        raise NotImplementedError

    def allocated(self) -> int:
        """Bytes allocated now."""
        return 0

    def release(self) -> None:
        """Gives back what nobody uses any more."""

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a graph; returns what replays it. It was called before, and is not by the capture."""
        raise NotImplementedError

    def on_other_stream(self, function: Callable[[], Any]) -> None:
        """Calls it on a stream that is not the default one, after all work so far and before all later work."""
        raise NotImplementedError

    @contextmanager
    def forbid_syncs(self) -> Iterator[None]:
        """Within it, a call that makes the host wait for the device raises."""
        yield

    def count_launches(self, function: Callable[[], Any]) -> dict[str, int]:
        """Kernels, copies and fills that the device ran for a call, by torch's profiler."""
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if self.kind == "cuda" else activity.CPU]) as profile:
            function()
            self.synchronize()
        counts = {"kernels": 0, "copies": 0, "fills": 0, "host events": 0}
        for event in profile.events():
            if event.device_type != torch.autograd.DeviceType.CUDA:
                counts["host events"] += 1
            elif event.name.startswith("Memcpy"):
                counts["copies"] += 1
            elif event.name.startswith("Memset"):
                counts["fills"] += 1
            else:
                counts["kernels"] += 1
        return counts

    def info(self) -> dict[str, Any]:
        """Of the record."""
        return {"device": self.kind}


class CpuDevice(Device):
    """Stands in for a GPU: the same calls, a wall clock, no figures worth a look."""

    kind = "cpu"
    # The reference too, so that parts see more than one.
    backends = ("cpp", "triton", "reference")

    def missing(self, feature: str) -> str | None:
        return f"a CPU has no {feature}: plain calls stood in"

    def timed(self, function: Callable[[], Any], lead: float = 0.0) -> tuple[float, float]:
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
        return seconds, seconds

    def free_bytes(self) -> int:
        return 1 << 30

    def peak_of(self, function: Callable[[], Any]) -> tuple[int, int]:
        function()
        return 0, 0

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return function

    def on_other_stream(self, function: Callable[[], Any]) -> None:
        function()


class CudaDevice(Device):
    """A GPU, by CUDA events."""

    kind = "cuda"
    backends = ("cpp", "triton")

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        torch.cuda.set_device(self.torch_device)
        self.properties: Any = torch.cuda.get_device_properties(self.torch_device)
        self._flushing: Tensor | None = None
        self._graphs: list[Any] = []

    @property
    def cache_bytes(self) -> int:
        return int(getattr(self.properties, "L2_cache_size", 64 << 20))

    def missing(self, feature: str) -> str | None:
        if feature == "second device" and torch.cuda.device_count() < 2:
            return "there is one device only"
        return None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def timed(self, function: Callable[[], Any], lead: float = 0.0) -> tuple[float, float]:
        if self._flushing is None:
            self._flushing = torch.empty(3 * self.cache_bytes, dtype=torch.uint8, device=self.torch_device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushing.zero_()
        if lead > 0 and hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(int(min(lead, _LONGEST_LEAD) * _CYCLES))
        start.record()
        began = time.perf_counter()
        function()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def peak_of(self, function: Callable[[], Any]) -> tuple[int, int]:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        function()
        self.synchronize()
        return before, torch.cuda.max_memory_allocated(self.torch_device)

    def allocated(self) -> int:
        self.synchronize()
        return torch.cuda.memory_allocated(self.torch_device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        self._graphs.append(graph)  # its memory must outlive the tensors made in it
        return graph.replay

    def on_other_stream(self, function: Callable[[], Any]) -> None:
        stream = torch.cuda.Stream(self.torch_device)
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)

    @contextmanager
    def forbid_syncs(self) -> Iterator[None]:
        self.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def info(self) -> dict[str, Any]:
        properties = self.properties
        return {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GB": properties.total_memory / 1e9,
            "L2 MB": self.cache_bytes / 1e6,
            "devices": torch.cuda.device_count(),
        }


def open_device(kind: str, index: int = 0) -> Device:
    """``"cuda"`` or ``"cpu"``.

    Raises:
        RuntimeError: no GPU that torch can use.
    """
    if kind == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            importlib.import_module("triton_interpreter")  # repairs it: the stock one rounds otherwise than a GPU
        return CpuDevice()
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} finds no GPU it can use (built for CUDA {torch.version.cuda}); run this on a "
            "machine with one, or with --dry-run on a CPU"
        )
    return CudaDevice(index)
