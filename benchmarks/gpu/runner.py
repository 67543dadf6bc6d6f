"""Runs a part in child processes: shares out its units, replaces a process that died or hangs, and keeps to the time.

The parent imports no torch: whatever a kernel does to a process, the session goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.record import status_of

CHILD = Path(__file__).resolve().parent / "child.py"
# Of one slice; each start costs seconds, and a part that needs more has shown what it had to.
MOST_PROCESSES = 5
_GRACE = 4.0  # seconds that a process may still take to end after its deadline
_POLL = 0.1


@dataclass(frozen=True)
class Part:
    """One part of the session.

    Attributes:
        name: in the record.
        target: ``module:function`` that makes the units.
        share: of the time; what a part leaves goes to those after it.
        slices: processes at a time.
        heeds: leaves out the backends that failed before.
    """

    name: str
    target: str
    share: float
    slices: int = 1
    heeds: bool = True


@dataclass
class Slice:
    """One process at a time, and what all of this slice's processes found."""

    index: int
    directory: Path
    units: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    planned: list[str] = field(default_factory=list)
    running: dict[str, Any] | None = None
    blamed: set[str] = field(default_factory=set)
    process: subprocess.Popen[bytes] | None = None
    started: int = 0
    error: str | None = None  # of a process that did not come to its first unit
    _earlier: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0  # the version of the findings that was read last

    @property
    def findings(self) -> Path:
        return self.directory / f"findings-{self.index}-{self.started}.json"

    @property
    def output(self) -> Path:
        return self.directory / f"output-{self.index}-{self.started}.txt"

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """A process for what is not done yet."""
        self.started += 1
        self._earlier, self.running, self._read = self.units, None, 0
        done = json.dumps([unit["name"] for unit in self.units])
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--findings", str(self.findings), "--skip", done],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that it ends with all that it started
            )

    def read(self) -> None:
        """Takes over what the process wrote."""
        if not self.findings.exists():
            return
        version = self.findings.stat().st_mtime_ns
        if version == self._read:
            return
        self._read = version
        data = json.loads(self.findings.read_text())
        self.units = [*self._earlier, *data["units"]]
        self.notes, self.running = data["notes"], data["running"]
        self.planned = self.planned or data["planned"]

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def fail_running(self, reason: str) -> None:
        """The unit that ran is done, and failed."""
        if self.running is not None:
            self.units = [*self.units, self.running["entry"] | {"status": "failed", "reason": reason}]
            if self.running["backend"]:
                self.blamed.add(self.running["backend"])
            self.running = None

    def last_words(self) -> str:
        lines = self.output.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-500:]

    def step(self, deadline: float) -> str:
        """Looks after the process; "running", "done", or "again" where another should go on."""
        assert self.process is not None
        status = self.process.poll()
        self.read()
        now = time.monotonic()
        if status is None:
            if now > deadline + _GRACE:
                self.stop()
                self.read()
                self.fail_running("stopped: the part's time was over")
                return "done"
            if self.running and time.time() - self.running["began"] > self.running["limit"]:
                self.stop()
                self.read()
                self.fail_running(f"stopped: no end after {self.running['limit'] if self.running else 0:.0f} s")
                return "again"
            return "running"
        if status == 0:
            return "done"
        lost = self.notes.get("lost by")
        if lost:
            self.blamed.add(lost)
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        if self.running is None and not lost and len(self.units) == len(self._earlier):
            self.error = f"its process ended before any unit, {how}: {self.last_words()}"
            return "done"
        self.fail_running(f"its process ended, {how}: {self.last_words()}")
        return "again"

    def close(self) -> None:
        """What never ran is listed too."""
        done = {unit["name"] for unit in self.units}
        reason = self.error or "no time left"
        for name in self.planned:
            if name not in done:
                skipped = {"name": name, "status": "skipped", "reason": reason, "seconds": 0.0}
                self.units.append({**skipped, "info": {}, "checks": [], "measurements": []})


def run_part(
    part: Part,
    *,
    device: str,
    seconds: float,
    quick: bool,
    excluded: dict[str, str],
    directory: Path,
) -> Iterator[dict[str, Any]]:
    """Yields the part's entry as it grows, the finished one last; names of excluded backends are added to."""
    began = time.monotonic()
    deadline = began + seconds
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if part.slices > 1 or device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
    directory.mkdir(parents=True, exist_ok=True)
    slices = [Slice(index, directory) for index in range(part.slices)]

    def launch(one: Slice) -> None:
        command = [sys.executable, str(CHILD), "--part", part.target, "--device", device]
        command += ["--deadline", repr(deadline), "--slice", f"{one.index}/{part.slices}"]
        command += ["--quick"] if quick else []
        out = sorted({*(excluded if part.heeds else ()), *(one.blamed if part.heeds else ())})
        one.start([*command, "--exclude", *out], environment)

    def found(status: str | None = None) -> dict[str, Any]:
        units = [unit for one in slices for unit in one.units]
        units += [one.running["entry"] for one in slices if one.running]
        summary, reason = status_of(units)
        errors = [one.error for one in slices if one.error]
        if errors:
            summary, reason = "failed", errors[0]
        absent = {name: text for one in slices for name, text in one.notes.get("absent", {}).items()}
        return {
            "status": status or summary,
            "reason": reason,
            "seconds": time.monotonic() - began,
            "allotted": seconds,
            "processes": sum(one.started for one in slices),
            "absent": absent,
            "units": units,
        }

    try:
        for one in slices:
            launch(one)
        working = list(slices)
        while working:
            for one in list(working):
                outcome = one.step(deadline)
                if outcome == "again" and one.started < MOST_PROCESSES and time.monotonic() < deadline:
                    launch(one)
                elif outcome != "running":
                    working.remove(one)
                    if outcome == "again" and one.started >= MOST_PROCESSES:
                        one.error = f"{one.started} processes died or hung, and no other was started"
            yield found("running")
            time.sleep(_POLL)
    finally:
        for one in slices:
            one.stop()
    for one in slices:
        one.close()
        if part.heeds or part.name == "start":
            for name in one.blamed:
                excluded.setdefault(name, f"a process died or hung in it, in the part {part.name}")
    yield found()


def share_out(parts: list[Part], index: int, left: float) -> float:
    """Seconds for the part at ``index``, of what is left for it and those after it."""
    total = sum(part.share for part in parts[index:])
    return left * parts[index].share / total if total else left
