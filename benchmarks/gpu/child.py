"""One process of a part: runs its units until they are done or the time is over, and keeps a file of what it found.

Started by runner.py. Exit status 3: the device answers no more, and a new process has to go on after this unit.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
for place in (BENCHMARKS.parent, BENCHMARKS.parent / "tests", BENCHMARKS):
    sys.path.insert(0, str(place))

from gpu.record import plain, write_atomically  # noqa: E402
from gpu.units import Context, Log, Unit, brief, entry, run_unit  # noqa: E402

LOST = 3
_SAVES_APART = 0.1  # seconds
_DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


class Findings:
    """The file that the parent reads: units done, the one that runs, and the names of all of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.planned: list[str] = []
        self.units: list[dict[str, Any]] = []
        self.running: Log | None = None
        self.limit, self.began = 0.0, 0.0
        self.notes: dict[str, Any] = {}
        self._saved = 0.0
        self._texts: list[str] = []  # of units done: they grow to a megabyte, and a save is made at every contender

    def save(self, at_once: bool = True) -> None:
        """Writes the file; ``at_once`` False: not if that was a moment ago."""
        if not at_once and time.monotonic() - self._saved < _SAVES_APART:
            return
        self._saved = time.monotonic()
        running: dict[str, Any] | None = None
        if self.running is not None:
            log, seconds = self.running, time.time() - self.began
            running = {"entry": entry(log.name, "running", None, seconds, log), "backend": log.backend}
            running |= {"limit": self.limit, "began": self.began}
        self._texts += [json.dumps(plain(unit)) for unit in self.units[len(self._texts) :]]
        rest = json.dumps(plain({"planned": self.planned, "running": running, "notes": self.notes}))
        write_atomically(self.path, f'{{"units": [{", ".join(self._texts)}], {rest[1:]}')


def run_all(units: list[Unit], context: Context, findings: Findings) -> int:
    """Runs them in order; returns the exit status."""
    findings.planned = [unit.name for unit in units]
    for unit in units:
        if context.left() <= 0:
            findings.units.append(entry(unit.name, "skipped", "no time left", 0.0))
            continue
        log = Log(unit.name, findings.save, context.device.synchronize)
        findings.running, findings.limit, findings.began = log, unit.limit, time.time()
        findings.save()
        found = run_unit(unit, log)
        try:
            context.device.synchronize()
        except Exception as error:
            said = f"{found['reason']}; then the device: " if found["reason"] else "the device: "
            found |= {"status": "failed", "reason": said + brief(error)}
            findings.units.append(found)
            findings.notes["lost by"] = log.backend
            findings.running = None
            findings.save()
            return LOST
        findings.units.append(found)
        findings.running = None
        findings.save()
    findings.save()
    return 0


def open_context(arguments: argparse.Namespace) -> Context:
    """The device, and the backends that are there."""
    import shardops
    from gpu.device import open_device

    device = open_device(arguments.device)
    reasons = shardops.backends(device.kind)
    absent = {name: reasons[name] for name in device.backends if reasons[name] != "available"}
    absent |= dict.fromkeys(arguments.exclude, "excluded: see the part that it failed in")
    return Context(
        device=device,
        backends=tuple(name for name in device.backends if name not in absent),
        absent=absent,
        quick=arguments.quick,
        deadline=arguments.deadline,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True, help="module:function that makes the units of a context")
    parser.add_argument("--device", required=True)
    parser.add_argument("--findings", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="on time.monotonic's clock")
    parser.add_argument("--slice", default="0/1", help="K/N: every N-th unit from the K-th on")
    parser.add_argument("--skip", default="[]", help="names of units already done, as JSON")
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    findings = Findings(arguments.findings)
    context = open_context(arguments)
    findings.notes["absent"] = context.absent
    module, _, function = arguments.part.partition(":")
    index, count = map(int, arguments.slice.split("/"))
    units: list[Unit] = getattr(importlib.import_module(module), function)(context)
    done = set(json.loads(arguments.skip))
    return run_all([unit for unit in units[index::count] if unit.name not in done], context, findings)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # with a lost device, the interpreter's own end may hang
