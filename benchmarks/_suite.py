"""What the benchmarks of the primitives share: sizes and rounds by scale, the device, and a case's measurement.

``gpu/measure.py`` measures it, on a CPU as on a GPU: contenders take turns beside the limit of the same run. What is
kept is in ``_records.py``.
"""

from __future__ import annotations

import gc
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _harness import peak_allocation, show, streams_limit
from _records import Case, machine_of, records_of, table_of
from gpu import measure as timing
from gpu.device import CpuDevice, Device, open_device
from gpu.many import DECODER, decoder_shapes
from gpu.measure import Contender
from gpu.units import Context, Log
from torch import Tensor

import shardops

SMALL = 5000
LIMITS = {"cpu": "same-streams limit", "cuda": "device copy"}
OURS = "shardops"


# ---- scales and shapes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        sizes: number of tensors -> elements of all of them together, about.
        ranks: (ranks, elements of each, timed steps) of the update path under FSDP2.
        step: elements of the optimizer's step, in 24 tensors.
        peers: elements of the steps beside other libraries.
        seconds: for the rounds of a case; three are made anyway.
    """

    sizes: dict[int, tuple[int, ...]]
    ranks: tuple[tuple[int, int, int], ...]
    step: int
    peers: int
    seconds: float


SCALES = {
    # For tests: all of the code, no figure worth a look.
    "tiny": Scale({1: (10**3,), DECODER: (10**5,)}, (), 24 * 128, 10**4, 0.1),
    "quick": Scale(
        {1: (10**3, 10**5, 10**7), DECODER: (10**5, 10**7), SMALL: (10**5,)}, ((2, 10**6, 5),), 24_000_000, 10**7, 1.0
    ),
    "full": Scale(
        {
            1: tuple(10**n for n in range(3, 10)),
            DECODER: tuple(10**n for n in range(5, 9)),
            SMALL: tuple(10**n for n in range(5, 8)),
        },
        ((2, 10**6, 9), (2, 3 * 10**7, 9)),
        24_000_000,
        10**7,
        2.5,
    ),
}


def grid_of(scale: Scale) -> list[tuple[int, int]]:
    """(elements, tensors) of each case."""
    return [(numel, tensors) for tensors, sizes in scale.sizes.items() for numel in sizes]


def shapes_of(numel: int, tensors: int) -> list[tuple[int, ...]]:
    """Shapes with two dimensions and about so many elements together.

    One: rows of 1,024 that go evenly over 8 ranks; 291: a decoder of 7 to 8 billion parameters with every width
    divided, rows uneven; any other number: all alike, four rows each.
    """
    if tensors == 1:
        return [(8, numel // 8)] if numel < 8192 else [(max(round(numel / 8192), 1) * 8, 1024)]
    if tensors == DECODER:
        whole = sum(math.prod(shape) for shape in decoder_shapes(1))
        divisor = max(round(math.sqrt(whole / numel)), 1)
        return [shape if len(shape) == 2 else (1, *shape) for shape in decoder_shapes(divisor)]
    return [(4, max(numel // tensors // 4, 1))] * tensors


def random_tensors(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Normally distributed values that repeat: drawing 10^9 of them takes longer than all measurements of them."""
    tensors = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    drawn = torch.randn(min(max(tensor.numel() for tensor in tensors), 1 << 22), device=device).to(dtype)
    for tensor in tensors:
        for part in tensor.view(-1).split(drawn.numel()):
            part.copy_(drawn[: part.numel()])
    return tensors


# ---- devices ---------------------------------------------------------------------------------------------------------


class HostDevice(CpuDevice):
    """A CPU that is measured, where ``gpu.device.CpuDevice`` only stands in for a GPU."""

    _AGAIN = 2e-2  # calls shorter than this are timed after one that fills the caches
    _LEAST = 2e-3  # together, of calls that are shorter than this

    def __init__(self) -> None:
        super().__init__()
        # The reference is measured only where nothing else is there.
        self.backends = ("cpp",) if shardops.backends("cpu")["cpp"] == "available" else ("reference",)

    def missing(self, feature: str) -> str | None:
        return f"a CPU has no {feature}"

    def timed(self, function: Callable[[], Any], lead: float = 0.0) -> tuple[float, float]:
        seconds, _ = super().timed(function)
        if seconds < self._AGAIN:
            count = max(math.ceil(self._LEAST / max(seconds, 1e-6)), 1)
            start = time.perf_counter()
            for _ in range(count):
                function()
            seconds = (time.perf_counter() - start) / count
        return seconds, seconds

    def peak_of(self, function: Callable[[], Any]) -> tuple[int, int]:
        """What was there before is not known, and left out of both."""
        return 0, peak_allocation(function)

    def free_bytes(self) -> int:
        """What Linux says is available, or what is left of the control group's limit."""
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        try:
            most, now = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
            return free if most == "max" else min(free, int(most) - int(now))
        except (OSError, ValueError):
            return free

    def release(self) -> None:
        gc.collect()


def open_measured(kind: str) -> Device:
    """``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU where torch finds one.

    Raises:
        RuntimeError: no GPU that torch can use.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return HostDevice() if kind == "cpu" else open_device(kind)


@dataclass(frozen=True)
class _Rounds(Context):
    """A case's context; a CPU is measured in as many rounds as a GPU."""

    is_tiny: bool = False

    @property
    def is_dry(self) -> bool:
        return self.is_tiny


# ---- cases ----------------------------------------------------------------------------------------------------------


def reading(*lists: Sequence[Tensor]) -> list[tuple[int, str]]:
    """The stream of tensors that are read, as :attr:`Case.streams` has it."""
    return _streams(lists, "read")


def writing(*lists: Sequence[Tensor]) -> list[tuple[int, str]]:
    """Likewise, written."""
    return _streams(lists, "write")


def updating(*lists: Sequence[Tensor]) -> list[tuple[int, str]]:
    """Likewise, read and written."""
    return _streams(lists, "update")


def _streams(lists: Sequence[Sequence[Tensor]], mode: str) -> list[tuple[int, str]]:
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in lists]
    return [(size, mode) for size in sizes if size]


class Suite:
    """One run of the benchmarks.

    Attributes:
        scale: how much is measured.
        device: on which.
        backends: of ours, on that device.
        missing: peers, cases and limits that were not measured -> why.
    """

    def __init__(self, scale: str = "quick", device: str = "auto") -> None:
        self.name, self.scale = scale, SCALES[scale]
        self.device = open_measured(device)
        said = shardops.backends(self.device.kind)
        self.backends = tuple(name for name in self.device.backends if said[name] == "available")
        if not self.backends:
            raise RuntimeError(f"no fused backend runs on {self.device.kind}, nothing of ours can be measured: {said}")
        self.missing: dict[str, str] = {}
        self._tables: dict[str, list[list[dict[str, Any]]]] = {}

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def room(self, what: str, nbytes: int) -> None:
        """Skips the test if so many bytes are not free."""
        self.device.release()
        free = self.device.free_bytes()
        if nbytes > 0.85 * free:
            self.skip(what, f"{nbytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")

    def skip(self, what: str, reason: str) -> None:
        """Skips the test and keeps the reason for the report."""
        self.missing[what] = reason
        pytest.skip(reason)

    def ours(self, run: Callable[[str], Any], nbytes: int | None, name: str = OURS) -> list[Contender]:
        """One contender for each backend; ``run`` gets its name."""

        def call(backend: str) -> Callable[[], Any]:
            return lambda: run(backend)

        return [Contender(f"{name} [{b}]", call(b), "ours", nbytes, b) for b in self.backends]

    def measure(self, benchmark: Any, case: Case, *, seconds: float | None = None) -> list[dict[str, Any]]:
        """Measures a case and hands its records to pytest-benchmark.

        Args:
            benchmark: the fixture; it times the first of ours once more.
            case: a peer that raises is left out, and whatever runs out of a GPU's memory.
            seconds: for the rounds, with as many of them as there is time for; None: as the scale says.

        Returns:
            The records.

        Raises:
            RuntimeError: ours or torch's raised.
        """
        limit = self._limit(case)
        contenders = [*limit, *case.contenders]
        budget = self.scale.seconds if seconds is None else seconds
        is_quick = self.name != "full" and seconds is None
        # A fifth of what is left until the deadline goes to the rounds (gpu/measure.py).
        deadline = time.monotonic() + 5 * budget
        context = _Rounds(self.device, self.backends, {}, is_quick, deadline, is_tiny=self.name == "tiny")
        rest: dict[str, Any] = {"elements": case.numel, "tensors": len(case.shapes), "nbytes": None}
        found = timing.measure(context, Log(case.case), case.case, contenders, **rest)
        errors = {name: row["error"] for name, row in found["contenders"].items() if row["error"]}
        peers = {c.name for c in contenders if c.kind == "peer"}
        broken = {name: error for name, error in errors.items() if name not in peers and "OutOfMemory" not in error}
        if broken:
            raise RuntimeError(f"{case.primitive}, {case.case}: {broken}")
        what = f"{case.primitive}, {case.case}, {case.numel:,} elements: "
        self.missing |= {name if name in peers else what + name: error for name, error in errors.items()}
        records = records_of(case, found["contenders"], self.device.kind)
        benchmark.group = f"{case.primitive}, {case.case}"
        self.keep(benchmark, records, errors)
        first = case.contenders[0].run

        def run() -> None:
            first()
            self.device.synchronize()

        benchmark.pedantic(run, rounds=3)
        return records

    def keep(self, benchmark: Any, records: list[dict[str, Any]], errors: dict[str, str] | None = None) -> None:
        """Records into the JSON file, and into the tables that :meth:`show_tables` prints."""
        benchmark.extra_info["measurements"] = records
        if errors:
            benchmark.extra_info["errors"] = errors
        self._tables.setdefault(f"{records[0]['primitive']}, {records[0]['case']}", []).append(records)

    def _limit(self, case: Case) -> list[Contender]:
        if not case.streams:
            return []
        if self.device.kind == "cuda":
            nbytes = sum(size * (2 if mode == "update" else 1) for size, mode in case.streams)
            return [timing.copy_of(nbytes, self.torch_device)]
        try:
            run, nbytes = streams_limit(case.streams)
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
            self.missing[LIMITS["cpu"]] = f"it needs a C++ compiler; CXX names one: {said}"
            return []
        return [Contender(LIMITS["cpu"], run, "limit", nbytes)]

    def machine(self) -> dict[str, Any]:
        """For ``machine_info["shardops"]``."""
        return {**machine_of(self.device), "scale": self.name, "missing": self.missing}

    def show_tables(self) -> None:
        """Prints a table for each case of a primitive, a row for each size, and forgets them."""
        for title, measured in self._tables.items():
            show(f"{title}; {self.device.kind}, {torch.get_num_threads()} threads", *table_of(measured))
        self._tables.clear()
