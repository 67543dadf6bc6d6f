"""The report people read, made from the record alone: what was reached, what is wrong, all measurements as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = Sequence[Any]


def cell(value: Any) -> str:
    """A value in a table: figures short, bars and line ends out of the way."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(header: Row, rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table, and an empty one."""
    lines = [f"| {' | '.join(map(cell, header))} |", f"|{'---|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows), ""]


def power_of_ten(elements: int) -> str:
    """1048576 -> ``1.05e6``."""
    return f"{elements:.2e}".replace("e+0", "e").replace("e+", "e")


def microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _head(data: dict[str, Any]) -> list[str]:
    title = "# GPU session"
    if data["options"].get("dry_run"):
        title += ": a dry run on a CPU. No figure in here says anything about a GPU."
    ended = "ended" if data["finished"] else "**did not end (yet)**"
    lines = [title, "", f"Started {data['started']}, {data['seconds']:.0f} s, {ended}.", ""]
    for name, reason in data["excluded"].items():
        lines += [f"Backend {name} was left out of later parts: {reason}.", ""]
    build = data["build"]
    if build:
        reason = f": {build['reason']}" if build["reason"] else ""
        lines += [f"Op library: {build['status']}{reason}, {build['seconds']:.0f} s.", ""]
    return lines


def verdict_table(data: dict[str, Any]) -> list[str]:
    """The targets, and what became of them."""
    rows = [
        [row["name"], row["backend"], row["threshold"], row["value"], row["outcome"], row["where"] or row["reason"]]
        for row in data["verdict"]
    ]
    return ["## Targets", "", *table(["target", "backend", "threshold", "worst", "outcome", "where, or why not"], rows)]


def parts_table(data: dict[str, Any]) -> list[str]:
    """The parts and how they ended."""
    rows = []
    for name, part in data["parts"].items():
        statuses = [check["status"] for unit in part["units"] for check in unit["checks"]]
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in ("ok", "failed", "skipped") if s in statuses)
        measured = sum(len(unit["measurements"]) for unit in part["units"])
        seconds = f"{part['seconds']:.0f} of {part['allotted']:.0f}"
        rows.append([name, part["status"], seconds, part["processes"], counts, measured, part["reason"]])
    header = ["part", "status", "seconds", "processes", "checks", "measurements", "reason"]
    return ["## Parts", "", *table(header, rows)]


def _machine(data: dict[str, Any]) -> list[str]:
    return ["## Machine", "", *table(["", ""], data["machine"].items())] if data["machine"] else []


def failures(data: dict[str, Any]) -> list[str]:
    """What is wrong, check by check."""
    rows: list[Row] = []
    for name, part in data["parts"].items():
        if part["status"] == "failed" and all(unit["status"] != "failed" for unit in part["units"]):
            rows.append([name, "", "", "", part["reason"]])
        for unit in part["units"]:
            failed = [check for check in unit["checks"] if check["status"] == "failed"]
            rows += [[name, unit["name"], check["name"], check["backend"], check["reason"]] for check in failed]
            if unit["status"] == "failed" and not failed:
                rows.append([name, unit["name"], "", "", unit["reason"]])
            for measurement in unit["measurements"]:
                for contender, found in measurement["contenders"].items():
                    if found["error"] and found["kind"] == "ours":
                        rows.append([name, measurement["case"], contender, found["backend"], found["error"]])
    if not rows:
        return ["## Failures", "", "None.", ""]
    return ["## Failures", "", *table(["part", "unit", "check", "backend", "what it said"], rows)]


def _measurement_rows(measurement: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    size = f"{power_of_ten(measurement['elements'])} in {measurement['tensors']}"
    ratios = measurement["ratios"]
    ours = list(ratios)
    for name, found in measurement["contenders"].items():
        if found["error"]:
            rows.append([size, name, "", "", "", *([""] * len(ours)), found["error"][:80]])
            continue
        beside = [ratios[mine].get(name) for mine in ours]
        cells = [f"{value:.2f}" if value is not None else "" for value in beside]
        gigabytes = f"{found['gb_s']:.0f}" if found["gb_s"] is not None else ""
        times = [microseconds(found["median_s"]), microseconds(found["host_median_s"])]
        rows.append([size, name, *times, gigabytes, *cells, ""])
    return rows


def _measurements(name: str, part: dict[str, Any]) -> list[str]:
    by_case: dict[str, list[dict[str, Any]]] = {}
    for unit in part["units"]:
        for measurement in unit["measurements"]:
            by_case.setdefault(measurement["case"], []).append(measurement)
    if not by_case:
        return []
    lines = [f"## Measured: {name}", "", "Times in microseconds, medians. A ratio is the row's time over ours.", ""]
    for case, measurements in by_case.items():
        ours = list(dict.fromkeys(mine for m in measurements for mine in m["ratios"]))
        rows = []
        for measurement in measurements:
            aligned = {**measurement, "ratios": {mine: measurement["ratios"].get(mine, {}) for mine in ours}}
            rows += _measurement_rows(aligned)
        header = ["elements", "contender", "device", "host", "GB/s", *(f"it / {mine}" for mine in ours), ""]
        lines += [f"### {case}", "", *table(header, rows)]
    return lines


def _info(name: str, part: dict[str, Any]) -> list[str]:
    rows = [[unit["name"], key, value] for unit in part["units"] for key, value in unit["info"].items()]
    return [f"## Noted: {name}", "", *table(["unit", "", ""], rows)] if rows and name != "start" else []


def _units(name: str, part: dict[str, Any]) -> list[str]:
    rows = [[unit["name"], unit["status"], unit["seconds"], unit["reason"]] for unit in part["units"]]
    return [f"## Units: {name}", "", *table(["unit", "status", "seconds", "reason"], rows)]


def render(data: dict[str, Any]) -> str:
    """The whole report."""
    lines = [*_head(data), *verdict_table(data), *parts_table(data), *failures(data), *_machine(data)]
    for name, part in data["parts"].items():
        lines += _measurements(name, part)
    for name, part in data["parts"].items():
        lines += _info(name, part)
    for name, part in data["parts"].items():
        lines += _units(name, part)
    return "\n".join(lines)
