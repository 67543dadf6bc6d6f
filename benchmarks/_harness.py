"""What the benchmarks share: alternating runs in one process, medians, counted bytes, the machine and its versions.

Machines differ and drift; only ratios of functions that alternated in one process are compared.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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


def paired_ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> float:
    """The median over rounds of ``times[numerator] / times[denominator]``, round by round."""
    pairs = zip(times[numerator], times[denominator], strict=True)
    return statistics.median(a / b for a, b in pairs)


def load_streams() -> ctypes.CDLL:
    """Compiles streams.cpp for this very CPU and loads it."""
    directory = Path(tempfile.mkdtemp(prefix="shardops-bench-"))
    library = directory / "streams.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, str(HERE / "streams.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def machine() -> dict[str, Any]:
    """Versions, processor, threads and revision, for the record."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
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
