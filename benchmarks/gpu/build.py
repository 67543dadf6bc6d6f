"""Builds the op library in place, if there is none or it is older than its sources; in a process with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def why_build(root: Path = ROOT) -> str | None:
    """Why the library has to be built; None if it is there and no source is newer."""
    library = root / "shardops" / "_ops.so"
    if not library.exists():
        return "there was none"
    built = library.stat().st_mtime
    sources = [path for path in (root / "csrc").rglob("*") if path.is_file()]
    newer = [path for path in [*sources, root / "setup.py"] if path.exists() and path.stat().st_mtime > built]
    return f"{newer[0].relative_to(root)} was newer" if newer else None


def build(seconds: float, root: Path = ROOT) -> dict[str, Any]:
    """Builds if needed: status ("ok", "failed", "skipped"), the reason, and the seconds it took."""
    began = time.monotonic()

    def entry(status: str, reason: str) -> dict[str, Any]:
        return {"status": status, "reason": reason, "seconds": time.monotonic() - began}

    if os.environ.get("SHARDOPS_LIBRARY"):
        return entry("skipped", f"SHARDOPS_LIBRARY names {os.environ['SHARDOPS_LIBRARY']}")
    reason = why_build(root)
    if reason is None:
        return entry("skipped", "it is newer than its sources")
    process = subprocess.Popen(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that compilers end with it
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return entry("failed", f"built since {reason}: no end after {seconds:.0f} s")
    if process.returncode:
        return entry("failed", f"built since {reason}: {' | '.join(output.strip().splitlines()[-6:])[-900:]}")
    return entry("ok", f"built since {reason}")
