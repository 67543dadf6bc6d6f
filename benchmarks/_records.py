"""What the benchmarks keep of a case: a record for each contender, tables of them, and the machine.

A record is what a report is made from; every ratio in it is the median over rounds that belong together.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy
import torch
from _harness import machine, paired_ratio
from gpu.device import Device
from gpu.measure import Contender

import shardops


@dataclass(frozen=True)
class Record:
    """One contender in one case at one size; ``asdict`` of it is what the JSON file holds.

    Attributes:
        primitive: "sharded_adam", "cast_gather", "flatten_shard", "unflatten_shard", "grad_norm" or "update_path".
        case: storage, layout and the like, such as "bf16 + split32".
        dtype: of the parameters, or of what is read.
        numel: elements of all tensors together.
        tensors: their number.
        contender: "shardops", "torch fused", ..
        kind: "ours", "torch", "peer" or "limit".
        backend: of ours.
        device: "cpu" or "cuda".
        nbytes: that this contender must read and write, counted; None: not counted.
        seconds: every round.
        median_s: their median.
        gb_s: ``nbytes / median_s / 1e9``.
        limit_share: of the limit's bandwidth in the same run, paired, each with the bytes of its own.
        speed_over_stock: stock's time over this one's, paired: above 1 is faster; None of stock and of the limit.
        threads: that torch computes with on a CPU.
        stock: the contender that ``speed_over_stock`` compares with.
    """

    primitive: str
    case: str
    dtype: str
    numel: int
    tensors: int
    contender: str
    kind: str
    backend: str | None
    device: str
    nbytes: int | None
    seconds: list[float]
    median_s: float
    gb_s: float | None
    limit_share: float | None
    speed_over_stock: float | None
    threads: int
    stock: str


@dataclass
class Case:
    """Contenders that do the same work.

    Attributes:
        primitive: "sharded_adam", "cast_gather", ..
        case: storage, layout and the like.
        dtype: of the parameters, or of what is read.
        shapes: of the tensors.
        contenders: ours first; a name of ours may end in its backend, "[cpp]".
        stock: the contender that all are compared with.
        streams: size in bytes and mode of each array that ours reads or writes, for the limit; empty: no limit.
    """

    primitive: str
    case: str
    dtype: torch.dtype
    shapes: Sequence[Sequence[int]]
    contenders: list[Contender]
    stock: str
    streams: list[tuple[int, str]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def records_of(case: Case, rows: dict[str, dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """The records of what ``gpu.measure.measure`` found."""
    times = {name: row["device_s"] for name, row in rows.items() if row["device_s"]}
    limit = next((name for name, row in rows.items() if row["kind"] in ("limit", "copy") and name in times), None)
    records = []
    for name, seconds in times.items():
        row = rows[name]
        share = speed = None
        if limit is not None and row["bytes"]:
            share = paired_ratio(times, limit, name) * row["bytes"] / rows[limit]["bytes"]
        if name not in (case.stock, limit) and case.stock in times:
            speed = paired_ratio(times, case.stock, name)
        record = Record(
            primitive=case.primitive,
            case=case.case,
            dtype=str(case.dtype).removeprefix("torch."),
            numel=case.numel,
            tensors=len(case.shapes),
            contender=name.removesuffix(f" [{row['backend']}]"),
            kind="limit" if name == limit else row["kind"],
            backend=row["backend"],
            device=device,
            nbytes=row["bytes"],
            seconds=seconds,
            median_s=row["median_s"],
            gb_s=row["gb_s"],
            limit_share=share,
            speed_over_stock=speed,
            threads=torch.get_num_threads(),
            stock=case.stock,
        )
        records.append(asdict(record))
    return records


def machine_of(device: Device) -> dict[str, Any]:
    """Machine, versions, revision and date, for the record."""
    found = machine()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    compiler = None
    if shardops.backends("cpu")["cpp"] == "available":
        from shardops import _host

        compiler = json.loads(_host.build_info())["compiler"]
    versions = {"python": found["python"], "torch": found["torch"], "triton": triton_version}
    versions |= {"numpy": numpy.__version__, "compiler": compiler, "shardops": found["shardops"]}
    versions["CUDA of torch"] = torch.version.cuda
    count = torch.cuda.device_count() if device.kind == "cuda" else 0
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": found["cpu"],
        "cores": found["cores"],
        "cpu_capability": found["cpu_capability"],
        "threads": found["threads"],
        "device": device.kind,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "versions": versions,
        "revision": found["revision"],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backends": shardops.backends(device.kind),
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_of(measured: list[list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a case, each size's records in turn."""
    header = ["", "ms", "bytes/el", "GB/s", "of the limit", "stock / it"]
    rows = []
    for records in measured:
        size = f"{records[0]['numel']:,} in {records[0]['tensors']:,}"
        rows += [[size, *[""] * (len(header) - 1)], *map(_cells, records)]
    return header, rows


def _cells(record: dict[str, Any]) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    name = f"  {record['contender']}" + (f", {record['backend']}" if record["backend"] else "")
    per_element = record["nbytes"] / record["numel"] if record["nbytes"] else None
    return [
        name,
        f"{record['median_s'] * 1e3:.3g}" if record["median_s"] < 1e-2 else f"{record['median_s'] * 1e3:.2f}",
        cell(per_element, ".4g"),
        cell(record["gb_s"], ".2f"),
        cell(record["limit_share"], ".2f"),
        cell(record["speed_over_stock"], ".2f"),
    ]
