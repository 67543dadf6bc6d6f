"""How contenders are timed: in turn, each call with cold caches, every round kept, ratios round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _harness import paired_ratio

from gpu.units import Context, Log, Skip, brief

ROUNDS, QUICK_ROUNDS, DRY_ROUNDS = 20, 7, 3
_FEWEST = 3
_WARMUP = 2


@dataclass
class Contender:
    """One of those that take turns.

    Attributes:
        name: in tables.
        run: the call that is timed.
        kind: "ours", "copy" (a device copy of as many bytes), "torch" or "peer".
        nbytes: that it must move; None: not counted.
        backend: of ours.
    """

    name: str
    run: Callable[[], Any]
    kind: str
    nbytes: int | None = None
    backend: str | None = None


def rounds_of(context: Context) -> int:
    """How often each contender is timed, if there is time."""
    if context.is_dry:
        return DRY_ROUNDS
    return QUICK_ROUNDS if context.quick else ROUNDS


def copy_of(nbytes: int, device: torch.device) -> Contender:
    """A device copy that reads and writes as many bytes together."""
    half = max(nbytes // 2, 1)
    source, target = (torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return Contender("device copy", lambda: target.copy_(source), "copy", 2 * half)


def _warm(context: Context, contender: Contender) -> float:
    """Seconds on the host's clock of a call that compiles and allocates nothing any more."""
    for _ in range(_WARMUP):
        contender.run()
    context.device.synchronize()
    return context.device.timed(contender.run)[1]


def measure(
    context: Context,
    log: Log,
    case: str,
    contenders: Sequence[Contender],
    *,
    elements: int,
    tensors: int,
    nbytes: int | None,
    against: Sequence[str] = (),
    with_lead: bool = True,
) -> dict[str, Any]:
    """Times contenders in turn and adds the measurement to the log.

    Args:
        context: of the part.
        log: of the unit.
        case: what is measured.
        contenders: one that raises is left out, with its error.
        elements: of all tensors together.
        tensors: their number.
        nbytes: that ours must move.
        against: names of contenders that a target speaks of.
        with_lead: let the host run ahead, so that the device's clock sees no gap between launches.
    """
    if context.left() <= 0:
        raise Skip("no time left")
    found: dict[str, dict[str, Any]] = {}
    leads: dict[str, float] = {}
    for contender in contenders:
        log.backend = contender.backend
        log.save(True)
        row: dict[str, Any] = {"kind": contender.kind, "backend": contender.backend, "bytes": contender.nbytes}
        found[contender.name] = row | {"error": None, "device_s": [], "host_s": []}
        try:
            leads[contender.name] = 2.0 * _warm(context, contender) + 5e-5 if with_lead else 0.0
        except Exception as error:
            found[contender.name]["error"] = brief(error)
            context.device.synchronize()  # raises if the device is lost, which ends the unit
            context.device.release()
    log.backend = None
    live = [contender for contender in contenders if contender.name in leads]
    most = rounds_of(context)
    seconds = min(max(context.left() * 0.2, 0.0), 15.0)
    for done in range(most):
        for contender in live:
            device_s, host_s = context.device.timed(contender.run, leads[contender.name])
            found[contender.name]["device_s"].append(device_s)
            found[contender.name]["host_s"].append(host_s)
            seconds -= max(device_s, host_s)
        if seconds <= 0 and done + 1 >= _FEWEST:
            break
    for row in found.values():
        row |= _summary(row)
    measurement = {
        "case": case,
        "elements": elements,
        "tensors": tensors,
        "bytes": nbytes,
        "rounds": len(found[live[0].name]["device_s"]) if live else 0,
        "against": list(against),
        "contenders": found,
        "ratios": _ratios(live, {name: row["device_s"] for name, row in found.items()}),
    }
    log.measurements.append(measurement)
    log.save(True)
    return measurement


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    if not row["device_s"]:
        return {"median_s": None, "host_median_s": None, "gb_s": None}
    median = statistics.median(row["device_s"])
    gigabytes = row["bytes"] / median / 1e9 if row["bytes"] and median > 0 else None
    return {"median_s": median, "host_median_s": statistics.median(row["host_s"]), "gb_s": gigabytes}


def _ratios(live: Sequence[Contender], times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    ours = [contender.name for contender in live if contender.kind == "ours" and min(times[contender.name]) > 0]
    return {
        mine: {other.name: paired_ratio(times, other.name, mine) for other in live if other.name != mine}
        for mine in ours
    }
