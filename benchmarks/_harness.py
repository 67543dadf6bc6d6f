"""What the benchmarks share: alternating runs in one process, medians, counted bytes, the machine and its versions.

Machines differ and drift; only ratios of functions that alternated in one process are compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import shardops

HERE = Path(__file__).resolve().parent


def alternate(functions: dict[str, Callable[[], Any]], rounds: int = 15, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each function, one call a round, in turn: drift of the machine meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(warmup + rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_ >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drops what C++ writes to the error stream: the profiler tells of each start and stop."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def peak_allocation(function: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator handed out beyond what it had at the start, at any moment."""
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    now = peak = 0
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def paired_ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> float:
    """The median over rounds of ``times[numerator] / times[denominator]``, round by round."""
    pairs = zip(times[numerator], times[denominator], strict=True)
    return statistics.median(a / b for a, b in pairs)


class _Stream(ctypes.Structure):
    """As in streams.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("lines", ctypes.c_int64),
        ("mode", ctypes.c_int32),
        ("through", ctypes.c_int32),
    )


_MODES = {"read": 0, "write": 1, "update": 2}
_LINE = 64
# Of the longest array at a time: of 128 to 16,384 bytes none was faster, and shorter pieces are slower.
_STEP_NBYTES = 1024
# Less than this is not worth another thread: waking it takes longer.
_THREAD_NBYTES = 1 << 18
# From this many written bytes on the package's copies write past the caches (csrc/ops.cpp): so may their limit.
_THROUGH_NBYTES = 16 << 20


@functools.cache
def load_streams() -> ctypes.CDLL:
    """Compiles streams.cpp for this very CPU and loads it.

    Raises:
        OSError: there is no compiler; CXX names one.
        subprocess.CalledProcessError: it refuses.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory(prefix="shardops-bench-") as directory:
        path = Path(directory) / "streams.so"
        subprocess.run([*compiler, *flags, str(HERE / "streams.cpp"), "-o", str(path)], check=True, capture_output=True)
        library = ctypes.CDLL(str(path))
    library.streams.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    library.streams.restype = ctypes.c_uint64
    return library


def streams_limit(arrays: Sequence[tuple[int, str]]) -> tuple[Callable[[], Any], int]:
    """A pass over arrays of these sizes in bytes that are each "read", written ("write") or both ("update").

    On as many threads as torch uses at the call, or fewer if the pass is short. Nothing is computed, so that no kernel
    over the same arrays is much faster.

    Args:
        arrays: size and mode of each; sizes are rounded down to whole cache lines, to one at least.

    Returns:
        The pass, and the bytes that it reads and writes.

    Raises:
        ValueError: an unknown mode.
    """
    library = load_streams()
    unknown = sorted({mode for _, mode in arrays} - set(_MODES))
    if unknown:
        raise ValueError(f"modes are {', '.join(map(repr, unknown))}; each is one of {', '.join(map(repr, _MODES))}")
    lines = [max(nbytes // _LINE, 1) for nbytes, _ in arrays]
    # Ones: pages that nobody wrote may be one and the same page of zeros, in the cache whenever it is read.
    held = [torch.ones((count + 1) * _LINE, dtype=torch.uint8) for count in lines]
    written = sum(count * _LINE for count, (_, mode) in zip(lines, arrays, strict=True) if mode == "write")
    table = (_Stream * len(arrays))()
    for entry, tensor, count, (_, mode) in zip(table, held, lines, arrays, strict=True):
        aligned = -(-tensor.data_ptr() // _LINE) * _LINE
        entry.data, entry.lines, entry.mode = aligned, count, _MODES[mode]
        entry.through = mode == "write" and written >= _THROUGH_NBYTES
    steps = max(max(lines) * _LINE // _STEP_NBYTES, 1)
    moved = sum(count * _LINE * (2 if mode == "update" else 1) for count, (_, mode) in zip(lines, arrays, strict=True))

    def run(held: list[torch.Tensor] = held) -> None:  # keeps the memory
        threads = min(torch.get_num_threads(), moved // _THREAD_NBYTES + 1)
        library.streams(table, len(arrays), steps, threads)

    return run, moved


def machine() -> dict[str, Any]:
    """Versions, processor, threads and revision, for the record."""
    # With "-dirty", if there is what no revision has: runs of it are of no revision.
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    revision = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    capability = None
    if shardops.backends("cpu")["cpp"] == "available":
        from shardops import _host

        capability = _host.cpu_capability()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": capability,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "shardops": shardops.__version__,
        "revision": revision.stdout.strip() or None,
    }


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(f"\n{title}")
        for row in [header, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
