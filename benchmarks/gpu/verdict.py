"""The targets, and whether the record reaches them: decided from the record alone, by the worst value found.

A target is "not measured" where there is nothing to decide it from, or in a dry run; the reason says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

BACKENDS = ("cpp", "triton")
LARGE = 10**8 * 0.99  # sizes are rounded to whole rows
# The stock ways that ours must not be slower than, at every size.
STOCK = ("torch fused", "torch._chunk_cat", "torch._foreach_copy_", "torch.split_with_sizes_copy")
PATH, TORCH_PATH = "clip, step, cast", "torch: clip_grad_norm_, fused, _foreach_copy_"
STEP_CASE = "step of 291 tensors"
COPY = "device copy"

Record = dict[str, Any]
# (value, where it was found)
Found = Iterator[tuple[float, str]]


@dataclass(frozen=True)
class Target:
    """One promise: the worst of what ``values`` finds for a backend is compared with the threshold."""

    name: str
    threshold: float
    is_least: bool  # the value must be at least the threshold; False: at most
    values: Callable[[Record, str], Found]


def measurements(record: Record, *parts: str) -> Iterator[dict[str, Any]]:
    for name in parts:
        for unit in record["parts"].get(name, {"units": []})["units"]:
            yield from unit["measurements"]


def _where(measurement: dict[str, Any]) -> str:
    return f"{measurement['case']}, {measurement['elements']:.2e} elements in {measurement['tensors']}"


def _ratio(measurement: dict[str, Any], ours: str, other: str) -> float | None:
    value = measurement["ratios"].get(ours, {}).get(other)
    return value if isinstance(value, (int, float)) else None


def copy_share(record: Record, backend: str) -> Found:
    """Of the copy's bandwidth, at large sizes."""
    for found in measurements(record, "bandwidth"):
        value = _ratio(found, backend, COPY)
        if value is not None and found["elements"] >= LARGE and found["case"] != PATH:
            yield value, _where(found)


def beside(stock: str) -> Callable[[Record, str], Found]:
    """Speed over a stock way's, at every size and in both parts that measure it."""

    def values(record: Record, backend: str) -> Found:
        for found in measurements(record, "bandwidth", "many"):
            value = _ratio(found, backend, stock)
            if value is not None and stock in found["against"]:
                yield value, _where(found)

    return values


def fp32_step(record: Record, backend: str) -> Found:
    """Speed over torch fused, at large sizes."""
    for found in measurements(record, "bandwidth"):
        value = _ratio(found, backend, "torch fused")
        if value is not None and found["case"] == "sharded_adam, fp32" and found["elements"] >= LARGE:
            yield value, _where(found)


def path(record: Record, backend: str) -> Found:
    """Speed of clip, step and cast over torch's three passes, at large sizes."""
    for found in measurements(record, "bandwidth"):
        value = _ratio(found, backend, TORCH_PATH)
        if value is not None and found["case"] == PATH and found["elements"] >= LARGE:
            yield value, _where(found)


def host_time(suffix: str) -> Callable[[Record, str], Found]:
    """Microseconds of the host in a step of 291 tensors."""

    def values(record: Record, backend: str) -> Found:
        for found in measurements(record, "many"):
            row = found["contenders"].get(backend + suffix)
            if found["case"] == STEP_CASE and row and row["host_median_s"] is not None:
                yield row["host_median_s"] * 1e6, _where(found)

    return values


def peak(record: Record, backend: str) -> Found:
    """Peak memory in a step over what is resident before it."""
    for unit in record["parts"].get("bandwidth", {"units": []})["units"]:
        for row in unit["info"].get("peak", []):
            if row["backend"] == backend and row["resident"]:
                yield row["peak"] / row["resident"], f"{row['case']}, {row['elements']:.0e} elements"


TARGETS = (
    Target("share of a device copy's bandwidth, every primitive, 1e8 elements or more", 0.92, True, copy_share),
    *(Target(f"speed over {stock}, every size", 0.95, True, beside(stock)) for stock in STOCK),
    Target("fp32 step, speed over torch fused, 1e8 elements or more", 1.0, True, fp32_step),
    Target("clip + step + cast, speed over torch's three passes, 1e8 elements or more", 1.6, True, path),
    Target("host time of a step of 291 tensors, us", 100.0, False, host_time("")),
    Target("host time of a clipped step of 291 tensors, us", 100.0, False, host_time(", clipped")),
    Target("peak memory in a step over resident", 1.01, False, peak),
)


def judge(record: Record) -> list[dict[str, Any]]:
    """A row for each target and backend."""
    is_dry = bool(record["options"].get("dry_run"))
    rows = []
    for target in TARGETS:
        for backend in BACKENDS:
            found = list(target.values(record, backend))
            row: dict[str, Any] = {"name": target.name, "backend": backend, "threshold": target.threshold}
            row |= {"value": None, "where": None, "outcome": "not measured", "reason": None}
            rows.append(row)
            if is_dry:
                row["reason"] = "a dry run measures nothing"
            elif not found:
                row["reason"] = _why_not(record, backend)
            else:
                value, where = (min if target.is_least else max)(found, key=lambda pair: pair[0])
                reached = value >= target.threshold if target.is_least else value <= target.threshold
                row |= {"value": value, "where": where, "outcome": "reached" if reached else "missed"}
    return rows


def _why_not(record: Record, backend: str) -> str:
    if backend in record["excluded"]:
        return str(record["excluded"][backend])
    for part in record["parts"].values():
        if backend in part.get("absent", {}):
            return str(part["absent"][backend])
    return "its measurements failed, were skipped or are not there: see the parts"
