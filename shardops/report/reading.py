"""Reads JSON files of measurements, whatever wrote them, into one ``Run``: pytest-benchmark's with our records in
``extra_info["measurements"]``, and ``gpu_session.json``. A file that is neither is named with the reason, no error.
"""

from __future__ import annotations

import json
import posixpath
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import gpu_session
from .records import Measurement, Memory, Run, Source, machine_of, plural, pooled, ratios_of

Record = dict[str, Any]
# In machine_info["shardops"]: of the report's own use, or too long for a table.
_MISSING, _CPU, _GPUS, _PASS = "missing", "cpu", "gpus", "pass"
_KINDS = ("ours", "torch", "peer", "limit")
_MOST = 2.0**63


def read(path: Path | str) -> Run:
    """Reads a JSON file, or every one in a directory and below it.

    Returns:
        The run; without measurements if no file has any.

    Raises:
        FileNotFoundError: there is no such path.
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; `shardops bench --out {root}` fills it with measurements")
    files = [root] if root.is_file() else sorted(root.rglob("*.json"))
    run = Run(str(path))
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        name = name.encode(errors="replace").decode()  # Linux allows names that no text is
        try:
            source, measurements, notes = read_data(json.loads(file.read_text(encoding="utf-8")), name)
        except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            run.skipped[name] = " ".join(str(error).split())
            continue
        run.sources.append(source)
        run.measurements += measurements
        run.notes += [f"{name}: {note}" for note in notes]
    _pool(run)
    return run


def read_data(data: Any, name: str) -> tuple[Source, list[Measurement], list[str]]:
    """The measurements of one file, and what of it could not be used.

    Args:
        data: as ``json.load`` gives it.
        name: of the file.

    Raises:
        ValueError: it holds no measurements.
    """
    try:
        if isinstance(data, dict) and isinstance(data.get("benchmarks"), list):
            return _read_benchmarks(data, name)
        if isinstance(data, dict) and isinstance(data.get("parts"), dict):
            return gpu_session.read(data, name)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not laid out as its kind is: {type(error).__name__}: {error}") from error
    raise ValueError("neither pytest-benchmark's JSON nor a GPU session's")


def _read_benchmarks(data: Record, name: str) -> tuple[Source, list[Measurement], list[str]]:
    info = data.get("machine_info") or {}
    ours = info.get("shardops") if isinstance(info, dict) else None
    ours = ours if isinstance(ours, dict) else {}
    lists = [
        (benchmark.get("name", "?"), benchmark["extra_info"]["measurements"])
        for benchmark in data["benchmarks"]
        if isinstance(benchmark, dict) and isinstance((benchmark.get("extra_info") or {}).get("measurements"), list)
    ]
    if not any(records for _, records in lists):
        raise ValueError('no benchmark in it has records in extra_info["measurements"]')
    missing = {str(peer): str(reason) for peer, reason in (ours.get(_MISSING) or {}).items()}
    for benchmark in data["benchmarks"]:
        for contender, error in (benchmark.get("extra_info") or {}).get("errors", {}).items():
            missing.setdefault(str(contender), str(error))
    machine = machine_of(ours, but=(_MISSING, _PASS))
    gpus = ours.get(_GPUS) or []
    labels = {
        "cpu": str(ours.get(_CPU) or "CPU"),
        "cuda": ", ".join(dict.fromkeys(str(gpu["name"] if isinstance(gpu, dict) else gpu) for gpu in gpus)) or "GPU",
    }
    notes: list[str] = []
    source = Source(
        name,
        "pytest-benchmark",
        str(ours.get("date") or data.get("datetime") or ""),
        machine,
        labels,
        missing,
        memory=tuple(_memory(data["benchmarks"], notes)),
        number=int(ours.get(_PASS) or 1),
    )
    found: list[Measurement] = []
    for benchmark, records in lists:
        good = []
        for index, record in enumerate(records):
            try:
                good.append(_checked(record))
            except ValueError as error:
                notes.append(f"{benchmark}, measurement {index} is left out: {error}")
        found += _paired(source, good)
    if not found:
        raise ValueError(f"no record in it can be used; the first: {notes[0]}")
    return source, found, notes


def _checked(record: Any) -> Record:
    """The record, if it has what a measurement needs.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(record, dict):
        raise ValueError(f"got {record!r}, not an object")
    for key, kind in (("primitive", str), ("contender", str), ("numel", int), ("tensors", int), ("seconds", list)):
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{key!r} is {record.get(key)!r}, not of type {kind.__name__}")
    for key in ("nbytes", "threads", "median_s", "gb_s", "limit_share", "speed_over_stock"):
        if record.get(key) is not None and not _is_positive(record[key]):
            raise ValueError(f"{key!r} is {record[key]!r}, neither a positive number nor null")
    for key in ("case", "dtype", "backend", "device", "stock"):
        if not isinstance(record.get(key), (str, type(None))):
            raise ValueError(f"{key!r} is {record[key]!r}, neither a text nor null")
    for key in ("numel", "tensors"):
        if not _is_positive(record[key]):
            raise ValueError(f"{key!r} is {record[key]}, and nothing can be said of so many")
    if record.get("kind") not in _KINDS:
        raise ValueError(f"'kind' is {record.get('kind')!r}, none of {', '.join(_KINDS)}")
    seconds = record["seconds"]
    if not seconds or not all(map(_is_positive, seconds)):
        raise ValueError("'seconds' holds no positive times")
    return record


def _is_positive(value: Any) -> bool:
    """Whether it is a number that a report can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST


def _paired(source: Source, records: list[Record]) -> list[Measurement]:
    """The measurements of one benchmark: those of one case and size took turns, so their rounds are paired."""
    found = []
    for record in records:
        same = [other for other in records if _case_of(other) == _case_of(record)]
        named = [other for other in same if other["contender"] == record.get("stock")]
        # A stock that is named and not there failed; who names none has the first of torch's that was compared with.
        unnamed = [] if record.get("stock") else same
        stocks = named or [o for o in unnamed if o["kind"] == "torch" and o.get("speed_over_stock") is None]
        stock = stocks[0] if stocks and record is not stocks[0] and record["kind"] != "limit" else None
        found.append(_measurement(source, record, stock))
    return found


def _case_of(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in ("primitive", "case", "dtype", "numel", "tensors", "device", "threads"))


def _measurement(source: Source, record: Record, stock: Record | None) -> Measurement:
    seconds = tuple(float(value) for value in record["seconds"])
    backend = record.get("backend")
    contender = record["contender"]
    if record["kind"] == "ours" and backend:  # "shardops, clipped" -> "shardops cpp, clipped"
        contender = re.sub(r"^[^,]*", lambda name: f"{name[0]} {backend}", contender)
    speeds = ratios_of(stock["seconds"], seconds) if stock else ()
    speed = record.get("speed_over_stock")
    nbytes, median = record.get("nbytes"), float(record.get("median_s") or statistics.median(seconds))
    return Measurement(
        source=source,
        primitive=record["primitive"],
        case=str(record.get("case") or ""),
        dtype=str(record.get("dtype") or "").removeprefix("torch."),
        numel=record["numel"],
        tensors=record["tensors"],
        contender=contender,
        kind=record["kind"],
        backend=backend,
        device=str(record.get("device") or "cpu").split(":")[0],
        threads=record.get("threads"),
        nbytes=nbytes,
        seconds=seconds,
        median_s=median,
        gb_s=record.get("gb_s") or (nbytes / median / 1e9 if nbytes else None),
        limit_share=record.get("limit_share"),
        speed_over_stock=statistics.median(speeds) if speed is None and speeds else speed,
        speeds=speeds,
        stock=stock["contender"] if stock else None,
    )


def _memory(benchmarks: list[Any], notes: list[str]) -> Iterator[Memory]:
    """``extra_info["memory"]``, where a benchmark recorded it: records of case, contender, numel, resident and peak."""
    for benchmark in benchmarks:
        for entry in (benchmark.get("extra_info") or {}).get("memory") or []:
            record = entry if isinstance(entry, dict) else {}
            are_texts = all(isinstance(record.get(key), str) for key in ("case", "contender"))
            if are_texts and all(_is_positive(record.get(key)) for key in ("numel", "resident", "peak")):
                yield Memory(**{key: record[key] for key in Memory.__dataclass_fields__})
            else:
                notes.append(f"{benchmark.get('name', '?')}: a record of memory is left out: {entry!r:.200}")


def _pool(run: Run) -> None:
    """Puts together what passes of one run measured; of what was measured again later on one machine, that stays."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for measurement in run.measurements:
        groups.setdefault((measurement.where, *measurement.key), []).append(measurement)
    older = 0
    kept = []
    for group in groups.values():
        group.sort(key=lambda m: m.source.date)
        newest = _but_date(group[-1].source)
        # A later file of the same pass takes the place of the earlier one.
        passes = {m.source.number: m for m in group if _but_date(m.source) == newest}
        older += len(group) - len(passes)
        kept.append(pooled([passes[number] for number in sorted(passes)]))
    if older:
        run.notes.append(f"{plural(older, 'older figure')} of what was measured again later: the newest is shown")
    run.measurements = kept


def _but_date(source: Source) -> tuple[str, str, dict[str, str]]:
    """What passes of one run have in common: their folder, too, since ``shardops bench`` fills one at a time."""
    machine = {name: text for name, text in source.machine.items() if name != "date"}
    return posixpath.dirname(source.name), source.kind, machine
