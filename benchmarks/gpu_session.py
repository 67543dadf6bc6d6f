"""Everything that has to be found out on a GPU, as one command of at most nine minutes: ``docs/gpu.md``.

    python benchmarks/gpu_session.py [--quick] [--out DIR] [--dry-run] [--only PART ...]

Parts run in child processes, one after the other; none stops the session. DIR/gpu_session.json (gpu/record.py describes
it) and DIR/gpu_session.md are written as it goes. This process imports no torch, so that no kernel can end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import report, verdict
from gpu.build import build
from gpu.record import JSON_NAME, REPORT_NAME, Record
from gpu.runner import Part, run_part, share_out

SECONDS, QUICK_SECONDS = 530.0, 170.0
_RESERVE = 6.0  # for the last files, and a process that ends late
_SAVES_APART = 2.0
_FAILURES_SHOWN = 30  # lines; the report has them all
# Of the build's time; what it leaves, the parts have.
_BUILD_SHARE = 0.5

_WORKERS = max(1, min(6, (os.cpu_count() or 1) // 2))


def parts_of(is_dry: bool) -> list[Part]:
    """In the order in which they run; the shares say how the time is divided, and what one leaves the others have."""
    workers = 2 if is_dry else _WORKERS
    return [
        Part("start", "gpu.start:units", 60, heeds=False),
        Part("bits", "gpu.bits:units", 150, slices=workers, heeds=False),  # most of it is Triton's compiler
        Part("sanitizer", "gpu.sanitizer:units", 90, slices=1 if is_dry else 4, heeds=False),
        Part("bandwidth", "gpu.bandwidth:units", 150),
        Part("many", "gpu.many:units", 40),
        Part("graphs", "gpu.graphs:units", 40),
        Part("sweep", "gpu.sweep:units", 40),
    ]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Everything that has to be found out on a GPU, in one command.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, in at most three minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_session"), metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes: does it all run?")
    names = [part.name for part in parts_of(False)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help=f"limit; {SECONDS:.0f}, or {QUICK_SECONDS:.0f} with --quick")
    parser.add_argument("--no-build", action="store_true", help="take the op library as it is")
    return parser.parse_args(arguments)


def run_session(parts: Sequence[Part], record: Record, deadline: float, *, device: str, quick: bool) -> None:
    """Runs the parts one after the other, and saves the record as it grows.

    deadline: on ``time.monotonic``'s clock.
    """
    data = record.data
    with tempfile.TemporaryDirectory(prefix="gpu-session-") as scratch:
        for index, part in enumerate(parts):
            left = deadline - time.monotonic()
            seconds = share_out(list(parts), index, left)
            saved = 0.0
            print(f"{part.name}: {seconds:.0f} of {left:.0f} s", flush=True)
            if seconds < 1.0:
                data["parts"][part.name] = _not_run("no time left")
            else:
                directory = Path(scratch) / part.name
                rest: dict[str, Any] = {"quick": quick, "excluded": data["excluded"], "directory": directory}
                try:
                    for entry in run_part(part, device=device, seconds=seconds, **rest):
                        data["parts"][part.name] = entry
                        if time.monotonic() - saved > _SAVES_APART:
                            record.save()
                            saved = time.monotonic()
                except Exception as error:  # of the runner itself
                    kept = data["parts"].get(part.name, _not_run(None))
                    data["parts"][part.name] = kept | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            for unit in data["parts"][part.name]["units"]:
                if part.name == "start" and unit["name"] == "machine":
                    data["machine"] = unit["info"]
            data["verdict"] = verdict.judge(data)
            record.save()
            done = data["parts"][part.name]
            print(f"{part.name}: {done['status']}, {done['seconds']:.0f} s, {done['reason'] or ''}", flush=True)


def _not_run(reason: str | None) -> dict[str, Any]:
    rest: dict[str, Any] = {"seconds": 0.0, "allotted": 0.0, "processes": 0, "absent": {}, "units": []}
    return {"status": "skipped", "reason": reason, **rest}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a part or the build failed."""
    options = options_of(arguments)
    began = time.monotonic()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are stopped on the way out
    record = Record(options.out, {**vars(options), "seconds": seconds})
    if not options.no_build:
        record.data["build"] = build(seconds * _BUILD_SHARE)
        print(f"build: {record.data['build']['status']}, {record.data['build']['reason']}", flush=True)
    record.save()
    parts = [part for part in parts_of(options.dry_run) if not options.only or part.name in options.only]
    device = "cpu" if options.dry_run else "cuda"
    run_session(parts, record, began + seconds - _RESERVE, device=device, quick=options.quick)
    record.data["finished"] = True
    record.save()
    print("\n".join(report.failures(record.data)[:_FAILURES_SHOWN]))
    print("\n".join([*report.parts_table(record.data), *report.verdict_table(record.data)]))
    print(f"{options.out / JSON_NAME} and {options.out / REPORT_NAME}")
    built = record.data["build"] or {"status": "skipped"}
    failed = [name for name, part in record.data["parts"].items() if part["status"] == "failed"]
    return 1 if failed or built["status"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
