"""``shardops doctor``: shows what ``shardops.doctor`` finds on this machine.

Exit code 0 only if on every device the backend that is chosen is a fused one and gives the reference's bits.
"""

from __future__ import annotations

import argparse
from typing import Any

from .. import doctor
from . import _show

_UNKNOWN = "-"


def add_parser(subparsers: Any) -> None:
    """Adds the command's options to ``argparse``'s subparsers."""
    parser = subparsers.add_parser(
        "doctor",
        help="which backends run on this machine, whether they compute rightly, and what to do where not",
        description="Versions, devices, backends with the remedy where one cannot run, how the library was built, and "
        "a self-test of each backend: equal bits with the reference. Exit code 0 only if the best backend for each "
        "device works.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; shardops/doctor.py describes its keys")


def run(options: argparse.Namespace) -> int:
    """Examines, prints, and returns the exit code."""
    found = doctor.examine()
    if options.json:
        _show.print_json(found)
    else:
        _show_all(found)
    return 0 if found["ok"] else 1


def _show_all(found: dict[str, Any]) -> None:
    _show.table("Versions and tools", ["what", "found"], _tools(found))
    _show.table("Devices", ["device", "name", "memory", "more"], [_device(device) for device in found["devices"]])
    rows = [row for device_type, backends in found["backends"].items() for row in _backends(device_type, backends)]
    _show.table("Backends", ["device type", "backend", "can run", "why not, and the remedy"], rows)
    rows = [
        [
            name,
            "available" if group["available"] else "not available",
            group["version"] or _UNKNOWN,
            group["reason"] or "",
        ]
        for name, group in found["communication"].items()
    ]
    _show.table("Communication", ["library", "state", "version", "why not, and the remedy"], rows)
    rows = [
        [test["device"], test["backend"], test["primitive"], test["case"], "equal" if test["ok"] else "FAILED"]
        for test in found["self_tests"]
    ]
    if rows:
        _show.table("Self-tests: bits beside the reference's", ["device", "backend", "primitive", "case", "bits"], rows)
    _show.say()
    for warning in found["warnings"]:
        _show.say(f"warning: {warning}")
    for problem in found["problems"]:
        _show.say(f"PROBLEM: {problem}")
    if found["ok"]:
        chosen = ", ".join(f"{kind}: {b['chosen']}" for kind, b in found["backends"].items() if b["devices"])
        _show.say(f"All is well. What runs when no backend is named: {chosen}.")


def _tools(found: dict[str, Any]) -> list[list[str]]:
    library, sets = found["library"], found["instruction_sets"]
    rows = [[name, version or _UNKNOWN] for name, version in found["versions"].items()]
    for name, tool in found["compilers"].items():
        rows.append([name, f"{tool['version'] or 'version unknown'} ({tool['path']})" if tool["path"] else "not found"])
    rows.append(["op library", library["path"] if library["found"] else f"not built ({library['path']} is not there)"])
    rows += [[f"built with: {key}", library[key]] for key in ("compiler", "flags", "nvcc") if library[key]]
    if library["cuda_architectures"]:
        rows.append(["built for", library["cuda_architectures"]])
    if sets["found"]:
        rows.append(["instruction sets", f"{', '.join(sets['found'])}; used: {sets['used'] or 'none, see below'}"])
    rows.append(["torch's instruction set", sets["torch"]])
    rows += [[f"${name}", repr(value)] for name, value in found["environment"].items()]
    return rows


def _device(device: dict[str, Any]) -> list[str]:
    if device["type"] == "cpu":
        more = f"{device['cores']} cores; threads used: {device['threads']}"
    else:
        more = f"capability {device['capability']}, driver {device['driver'] or 'unknown'}"
    return [device["device"], device["name"], f"{device['memory'] / 2**30:.1f} GiB", more]


def _backends(device_type: str, backends: dict[str, Any]) -> list[list[str]]:
    is_here = backends["devices"] > 0
    rows = []
    for name, reason in backends["reasons"].items():
        words = ["no" if reason else "yes" if is_here else "would, not tested"]
        if name == backends["chosen"]:
            words.append("chosen")
        elif (name, device_type) == ("triton", "cpu"):
            words.append("not chosen on a CPU")
        rows.append([device_type if is_here else f"{device_type} (none here)", name, ", ".join(words), reason or ""])
    return rows
