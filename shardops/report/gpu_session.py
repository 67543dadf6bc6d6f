"""Reads the record that ``benchmarks/gpu_session.py`` writes, version 1, into the report's measurements.

Its cases are texts such as "sharded_adam, bf16, split32": the primitive up to the first comma, the rest its case.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .records import Measurement, Memory, Source, machine_of, ratios_of

Record = dict[str, Any]
SCHEMA = 1
# Cases that do not begin with a primitive: (beginning, primitive, case; None: the text after the beginning).
_RENAMED = (
    ("clip, step, cast", "update_path", "clip, step, cast"),
    ("step of ", "optimizer_step", "fp32"),  # of so many tensors, which the record counts
    ("sweep: ", "sweep", None),
)
_KINDS = {"copy": "limit"}
_UNIT_OF_MEMORY = "peak"
_NOT_OF_THE_TABLE = ("nvidia-smi", "changes not in the revision")


def read(data: Record, name: str) -> tuple[Source, list[Measurement], list[str]]:
    """The measurements of a session.

    Args:
        data: the file.
        name: of the file.

    Returns:
        Source, measurements and notes.

    Raises:
        ValueError: another version, or no measurement in it.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"a GPU session of schema {data.get('schema')!r}; this reads {SCHEMA}")
    is_dry = bool((data.get("options") or {}).get("dry_run"))
    source = _source(data, name, is_dry)
    device = "cpu" if is_dry else "cuda"
    found = [
        measurement
        for part in data["parts"].values()
        for unit in part["units"]
        for record in unit["measurements"]
        for measurement in _measurements(source, record, device)
    ]
    if not found:
        raise ValueError("a GPU session in which nothing was measured")
    return source, found, []


def _source(data: Record, name: str, is_dry: bool) -> Source:
    machine = data.get("machine") or {}
    device = str(machine.get("device") or "GPU")
    cpu = str(machine.get("cpu") or "CPU")
    warnings = []
    if is_dry:
        warnings.append(f"{name} is of a dry run on a CPU: no figure of it says anything about a GPU.")
    if not data.get("finished"):
        warnings.append(f"{name} is of a session that did not come to its end.")
    failed = [part for part, found in data["parts"].items() if found.get("status") == "failed"]
    if failed:
        warnings.append(
            f"{name}: these parts failed, so its figures may be of kernels that are wrong: {', '.join(failed)}."
        )
    return Source(
        name,
        "GPU session",
        str(data.get("started") or ""),
        machine_of(machine, but=_NOT_OF_THE_TABLE),
        {"cuda": device, "cpu": f"{cpu} (dry run)"},
        dict(_missing(data)),
        tuple(warnings),
        tuple(_memory(data)),
    )


def _missing(data: Record) -> Iterator[tuple[str, str]]:
    """Backends, units and contenders that did not take part, with the reason."""
    for backend, reason in (data.get("excluded") or {}).items():
        yield f"shardops {backend}", str(reason)
    for part in data["parts"].values():
        for backend, reason in (part.get("absent") or {}).items():
            yield f"shardops {backend}", str(reason)
    for name, part in data["parts"].items():
        if part.get("status") == "skipped":
            yield f"part {name}", str(part.get("reason"))
        for unit in part.get("units") or []:
            # What only its backend's absence kept from running has been named.
            if unit.get("status") == "skipped" and name == "bandwidth":
                yield str(unit["name"]), str(unit.get("reason"))
            for record in unit.get("measurements") or []:
                for contender, row in record["contenders"].items():
                    if row["error"]:
                        yield f"{contender}: {record['case']}, {record['elements']:,} elements", str(row["error"])


def _memory(data: Record) -> Iterator[Memory]:
    for part in data["parts"].values():
        for unit in part.get("units") or []:
            for row in (unit.get("info") or {}).get(_UNIT_OF_MEMORY) or []:
                if row["resident"]:  # none in a dry run: a CPU's allocator keeps no count
                    contender = f"shardops {row['backend']}"
                    yield Memory(row["case"], contender, row["elements"], row["resident"], row["peak"])


def _named(case: str) -> tuple[str, str]:
    """Primitive and case."""
    if case.startswith("beside "):
        return "sharded_adam", case
    for beginning, primitive, name in _RENAMED:
        if case.startswith(beginning):
            return primitive, case.removeprefix(beginning) if name is None else name
    primitive, _, rest = case.partition(", ")
    return primitive, rest


def _measurements(source: Source, record: Record, device: str) -> Iterator[Measurement]:
    primitive, case = _named(record["case"])
    rows = {name: row for name, row in record["contenders"].items() if row["device_s"] and row["median_s"]}
    limit = next((row for row in rows.values() if row["kind"] == "copy"), None)
    torchs = [name for name, row in rows.items() if row["kind"] == "torch"]
    peers = [name for name, row in rows.items() if row["kind"] == "peer"]
    # Whom targets speak of, or who stands first; a peer where torch does not take part.
    stock = next((name for name in (*(record.get("against") or []), *torchs, *peers) if name in rows), None)
    for name, row in rows.items():
        kind = _KINDS.get(row["kind"], row["kind"])
        is_compared = stock is not None and name != stock and kind != "limit"
        speeds = ratios_of(rows[stock]["device_s"], row["device_s"]) if stock and is_compared else ()
        shares = ratios_of(limit["device_s"], row["device_s"]) if limit and row["bytes"] and kind != "limit" else ()
        yield Measurement(
            source=source,
            primitive=primitive,
            case=case,
            dtype="",
            numel=record["elements"],
            tensors=record["tensors"],
            contender=f"shardops {name}" if kind == "ours" else name,
            kind=kind,
            backend=row["backend"],
            device=device,
            threads=None,
            nbytes=row["bytes"],
            seconds=tuple(row["device_s"]),
            median_s=row["median_s"],
            gb_s=row["gb_s"],
            # The limit moves its own bytes: rates are compared, not times.
            limit_share=statistics.median(shares) * row["bytes"] / limit["bytes"] if limit and shares else None,
            speed_over_stock=statistics.median(speeds) if speeds else None,
            speeds=speeds,
            stock=stock if is_compared else None,
        )
