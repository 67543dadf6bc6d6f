"""The part under compute-sanitizer: small calls of every primitive in a process of their own, once for each tool.

``python benchmarks/gpu/sanitizer.py --sanitized-child --device cuda --backends triton`` is that process.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started by itself, as by the sanitizer
    BENCHMARKS = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests"), str(BENCHMARKS.parent)]

from gpu.units import Context, Log, Skip, Unit

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DONE = "sanitized calls:"
_TIMEOUT = 110.0
_FOUND = 97  # exit status by which the sanitizer says that it found something


def find_sanitizer() -> str | None:
    """On the path, or where CUDA is."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda"]
    candidates = [Path(place) / "bin" / "compute-sanitizer" for place in places if place]
    found = shutil.which("compute-sanitizer")
    return found or next((str(path) for path in candidates if path.exists()), None)


def errors_in(output: str) -> tuple[int | None, list[str]]:
    """The sanitizer's own count of errors, or hazards (None: it gave none), and the first lines that say more."""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
    said = [line.strip("= ").strip() for line in output.splitlines() if line.startswith("=========")]
    telling = [line for line in said if line and not re.match(r"COMPUTE-SANITIZER|.*SUMMARY", line)]
    return (sum(int(a or b) for a, b in counts) if counts else None), telling[:8]


def command_of(context: Context, tool: str | None) -> list[str]:
    """The child alone for no tool."""
    child = [sys.executable, str(Path(__file__).resolve()), "--sanitized-child", "--device", context.device.kind]
    child += ["--backends", *(name for name in context.backends if name != "reference")]
    if tool is None:
        return child
    sanitizer = find_sanitizer()
    if sanitizer is None:
        raise Skip("compute-sanitizer was not found (on the path, under CUDA_HOME and /usr/local/cuda)")
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20", "--target-processes", "all"]
    return [sanitizer, *options, *child]


def run_tool(context: Context, tool: str | None, log: Log) -> None:
    """One run; errors found, or a child that does not come to its end, fail the unit."""
    command = command_of(context, tool)
    # Each tensor in an allocation of its own: else an access past its end is inside torch's pool, and goes unseen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    timeout = min(_TIMEOUT, max(context.left() - 2.0, 5.0))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        log.info["output"] = output[-2000:]
        raise Skip(f"no end after {timeout:.0f} s") from None
    if "Device not supported" in output:  # as on some virtual machines
        raise Skip("compute-sanitizer does not support this device: it said 'Device not supported'")
    count, said = errors_in(output)
    log.info |= {"exit status": process.returncode, "errors": count, "first": said}
    if DONE not in output:
        raise RuntimeError(f"the calls did not come to their end, exit status {process.returncode}: {output[-400:]}")
    if process.returncode or count:
        raise RuntimeError(f"{tool} found {count} errors: {' | '.join(said)[:400]}")
    if tool is not None and count is None:
        raise RuntimeError(f"{tool} gave no summary: {output[-400:]}")


def units(context: Context) -> list[Unit]:
    def unit(name: str, tool: str | None) -> Unit:
        return Unit(name, partial(run_tool, context, tool), limit=_TIMEOUT + 20.0)

    # The child without a tool shows that it works, also where there is no sanitizer.
    tools = TOOLS[:2] if context.quick else TOOLS
    return [*(unit(tool, tool) for tool in tools), unit("no tool", None)]


# ---- the child -------------------------------------------------------------------------------------------------------


def calls(device: Any, backends: list[str]) -> int:
    """Small calls of everything, with tails, empty tensors and addresses off their alignment; how many there were."""
    import torch

    from gpu import adam_cases, copy_cases

    cases: list[tuple[Any, Any]] = []
    for moments, master in adam_cases.SOME:
        cases += [(adam_cases, case) for case in islice(adam_cases.format_cases(moments, master, 1), 2)]
        # The first of these lies off its alignment.
        cases += [(adam_cases, case) for case in islice(adam_cases.option_cases(moments, master, 20), 1)]
    for layout in copy_cases.LAYOUTS:
        cases += [(copy_cases, case) for case in islice(copy_cases.flatten_cases(layout, torch.bfloat16), 6)]
    cases += [(copy_cases, case) for case in islice(copy_cases.gather_cases(), 4)]
    cases += [(copy_cases, case) for case in islice(copy_cases.norm_cases(2.0), 3)]
    for module, case in cases:
        for backend in backends:
            module.run(case, backend, device)
    return len(cases) * len(backends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitized-child", action="store_true", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backends", nargs="+", required=True)
    arguments = parser.parse_args()
    from gpu.device import open_device

    device = open_device(arguments.device)
    count = calls(device.torch_device, arguments.backends)
    device.synchronize()
    print(DONE, count, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
