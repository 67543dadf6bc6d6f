"""Files of measurements for the report's tests, and runs that are read from them.

``report_data`` holds a file of the benchmarks, whose figures are made up so that each is known, and a GPU session's,
cut from a dry run on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardops.report import Measurement, Run, read

CPU = "Made-up CPU of a test"
DATA = Path(__file__).resolve().parent / "report_data"
Json = dict[str, Any]


def load(name: str) -> Json:
    return json.loads((DATA / name).read_text())


def run_of(directory: Path, *files: tuple[str, Any]) -> Run:
    """The run of files with these contents; a text is written as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return read(directory)


def only(run: Run, **wanted: Any) -> Measurement:
    (found,) = [m for m in run.measurements if all(getattr(m, name) == value for name, value in wanted.items())]
    return found


def records(data: Json) -> list[Json]:
    return [record for benchmark in data["benchmarks"] for record in benchmark["extra_info"]["measurements"]]


def gpu(data: Json) -> Json:
    """The session as a GPU would have made it."""
    data["options"]["dry_run"] = False
    data["machine"]["device"] = "Some GPU"
    return data
