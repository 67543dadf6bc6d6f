"""Runs the primitives' tests against a build of the op library with AddressSanitizer and UndefinedBehaviorSanitizer.

Python itself is not instrumented, so the sanitizers' runtimes are preloaded; leaks are Python's own and not looked for.
A finding ends the test process with the sanitizer's report.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
# What reaches the kernels; the optimizer and the process groups above them add nothing that a sanitizer could see.
TESTS = [
    *("test_flatten_shard.py", "test_cast_gather.py", "test_grad_norm.py"),
    *("test_sharded_adam.py", "test_sharded_adam_modes.py", "test_sharded_adam_modes_refusals.py"),
]


def runtime(name: str) -> str:
    """The compiler's own copy of a sanitizer's runtime library."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> int:
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(BUILD), "--build-temp", str(BUILD / "objects")]
    subprocess.run([sys.executable, *build], cwd=ROOT, env={**os.environ, "SHARDOPS_SANITIZE": "1"}, check=True)
    environment = {
        **os.environ,
        "SHARDOPS_LIBRARY": str(BUILD / "shardops" / "_ops.so"),
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
    }
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    # --capture=sys: a sanitizer writes its report past Python, and pytest would swallow it.
    arguments = ["-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", "not slow"]
    arguments += ["-k", "cpp or not reference", *tests]
    return subprocess.run([sys.executable, *arguments, *sys.argv[1:]], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
