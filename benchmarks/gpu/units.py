"""What a part is made of: units, run one after the other in a child process, and the log each writes its findings to.

A unit that raises leaves the others running; one whose process dies or hangs is marked failed by the parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpu.record import status_of

if TYPE_CHECKING:  # the import of torch takes seconds
    from gpu.device import Device


class Skip(Exception):
    """Raised by a unit that cannot run here; its text is the reason."""


@dataclass(frozen=True)
class Context:
    """What a part's units are made from.

    Attributes:
        device: that everything runs on.
        backends: those that run on it and were not excluded, in the order of preference.
        absent: those that do not, and why.
        quick: fewer sizes and repeats.
        deadline: of the part, on ``time.monotonic``'s clock.
    """

    device: Device
    backends: tuple[str, ...]
    absent: dict[str, str]
    quick: bool
    deadline: float

    @property
    def is_dry(self) -> bool:
        """Whether a CPU stands in, with tiny sizes."""
        return self.device.kind == "cpu"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


@dataclass
class Log:
    """The findings of one unit."""

    name: str
    save: Callable[[bool], None] = lambda at_once: None  # writes what there is so far, so that a kill leaves it
    synchronize: Callable[[], None] = lambda: None  # raises if the device is lost: nothing more can be found then
    info: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    backend: str | None = None  # whose kernels run now: to blame if the process dies

    def check(
        self,
        name: str,
        backend: str | None,
        function: Callable[[], int | None],
        *,
        stand_in: str | None = None,
    ) -> bool:
        """Runs a check, which raises if it finds something wrong, and may return how much it compared.

        stand_in: why its result says nothing of the device; it is then skipped, unless it fails. Returns whether it
        did not fail. Where the device is lost, the error goes on and ends the unit.
        """
        self.backend = backend
        row: dict[str, Any] = {"name": name, "backend": backend, "status": "ok", "reason": None, "count": None}
        self.checks.append(row)
        self.save(False)
        try:
            row["count"] = function()
            if stand_in is not None:
                row["status"], row["reason"] = "skipped", stand_in
        except Skip as reason:
            row["status"], row["reason"] = "skipped", str(reason)
        except Exception as error:
            row["status"], row["reason"] = "failed", brief(error)
            self.synchronize()
        return row["status"] != "failed"

    def skip(self, name: str, backend: str | None, reason: str) -> None:
        """A check that cannot be made here."""
        self.checks.append({"name": name, "backend": backend, "status": "skipped", "reason": reason, "count": None})


@dataclass(frozen=True)
class Unit:
    """One piece of a part: ``run`` writes to the log, raises Skip, or raises. ``limit``: after it, it hangs."""

    name: str
    run: Callable[[Log], None]
    limit: float = 90.0


def brief(error: BaseException, most: int = 600) -> str:
    """An error in a record: its type and what it says."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= most else text[: most - 3] + ".."


def run_unit(unit: Unit, log: Log) -> dict[str, Any]:
    """The unit's entry in the record."""
    began = time.perf_counter()
    status, reason = "ok", None
    try:
        unit.run(log)
        status, reason = status_of(log.checks)
    except Skip as skip:
        status, reason = "skipped", str(skip)
    except Exception as error:
        status, reason = "failed", brief(error)
    return entry(unit.name, status, reason, time.perf_counter() - began, log)


def entry(name: str, status: str, reason: str | None, seconds: float, log: Log | None = None) -> dict[str, Any]:
    """A unit as the record has it."""
    log = log or Log(name)
    return {
        "name": name,
        "status": status,
        "reason": reason,
        "seconds": seconds,
        "info": log.info,
        "checks": log.checks,
        "measurements": log.measurements,
    }
