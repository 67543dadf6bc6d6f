"""The record of a session: one JSON file, written anew after every part and now and then within one.

The report is made from this file alone, so that both say the same. Version 1 of the file, all times in seconds::

    schema      1
    started     UTC, ISO 8601;  ``finished`` says whether the session came to its end
    seconds     of the session so far
    options     quick, dry_run, only, seconds (the limit), out
    build       status, reason, seconds: whether the op library had to be built, and how that went
    machine     what the part "start" found: GPU, driver, versions, revision, backends and why one is missing
    excluded    backend -> why later parts leave it out: a process died or hung in its kernels
    parts       name -> part, in the order run
    verdict     targets: name, backend, threshold, value (the worst one found), where, outcome ("reached", "missed" or
                "not measured"), reason

    part        status ("ok", "failed", "skipped", "running"), reason, seconds, allotted, processes, units,
                absent (backend -> why it does not take part)
    unit        name, status, reason, seconds, info, checks, measurements
    check       name, backend, status ("ok", "failed", "skipped"), reason, count (what was compared)
    measurement case, elements, tensors, bytes (ours must move), rounds, against (the contenders that targets name),
                contenders, ratios
    contender   kind ("ours", "copy", "torch", "peer"), backend, bytes, error, device_s and host_s (every round, raw),
                median_s, host_median_s, gb_s
    ratios      ours -> contender -> median over rounds of the contender's time over ours: above 1, ours is faster

A part is "failed" if a unit of it is; a unit, if a check of it is, if it raised or if its process died. A check that
came out right by means that stand in for a GPU's, as in a dry run, is "skipped" and gives the reason.
"""

from __future__ import annotations

import json
import math
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu import report

SCHEMA = 1
JSON_NAME, REPORT_NAME = "gpu_session.json", "gpu_session.md"


def plain(value: Any) -> Any:
    """The value as strict JSON has it: what is not finite becomes a text, what JSON does not know its ``str``."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write_atomically(path: Path, text: str) -> None:
    """A reader, or what a kill leaves behind, is the old file or the new one."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text)
    os.replace(scratch, path)


def status_of(items: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Status and reason of what consists of items that have both."""
    failed = [item for item in items if item["status"] == "failed"]
    if failed:
        names = ", ".join(str(item["name"]) for item in failed[:3]) + (", .." if len(failed) > 3 else "")
        return "failed", f"{len(failed)} of {len(items)} failed: {names}"
    skipped = [item for item in items if item["status"] == "skipped"]
    if items and len(skipped) == len(items):
        reasons = list(dict.fromkeys(str(item["reason"]) for item in skipped))
        return "skipped", "; ".join(reasons[:3])
    return "ok", f"{len(skipped)} of {len(items)} skipped" if skipped else None


class Record:
    """The session's data, and the two files made from it."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._began = time.monotonic()
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "finished": False,
            "seconds": 0.0,
            "options": options,
            "build": None,
            "machine": {},
            "excluded": {},
            "parts": {},
            "verdict": [],
        }

    def save(self) -> None:
        """Writes both files."""
        self.data["seconds"] = time.monotonic() - self._began
        data = plain(self.data)
        text = json.dumps(data, indent=1, allow_nan=False)
        write_atomically(self.directory / JSON_NAME, text + "\n")
        write_atomically(self.directory / REPORT_NAME, report.render(data))
