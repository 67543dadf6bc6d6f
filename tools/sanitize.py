"""Runs the native code under sanitizers: the op library, and the CUDA kernels' twins, which are C++ for the CPU here.

AddressSanitizer and UndefinedBehaviorSanitizer watch the primitives' tests over both, ThreadSanitizer the kernels whose
threads talk to each other. A finding ends the process with the sanitizer's report.

Python itself is not instrumented, so the sanitizers' runtimes are preloaded; leaks are Python's own and not looked for.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for twin

BUILD = ROOT / "build" / "sanitize"
TWIN = BUILD / "twin" / "twin.so"
# What reaches the kernels; the optimizer and the process groups above them add nothing that a sanitizer could see.
TESTS = [
    *("test_flatten_shard.py", "test_cast_gather.py", "test_grad_norm.py"),
    *("test_sharded_adam.py", "test_sharded_adam_modes.py", "test_sharded_adam_modes_refusals.py"),
]
# Kernels whose threads do not talk run in a loop. Those that do run on the system's threads, since fibers that are left
# by longjmp and AddressSanitizer do not go together; that is slow: a few cases, and the programs below.
TWIN_TESTS = {
    "cuda_twin": ["test_sharded_adam.py", "test_cast_gather.py", "test_flatten_shard.py"],
    "cuda_twin and (three_and_four or empty_tensors)": ["test_grad_norm.py"],
}
# Of undefined behaviour what a GPU faults on; all of its kinds take twice the time to compile.
ADDRESS = ("-fsanitize=address,alignment,bounds", "-fno-sanitize-recover=alignment,bounds")
# Compiling is most of the time here, and unoptimised code is compiled soonest.
TWIN_FLAGS = ("-O0", "-g1", *ADDRESS, "-DSHARDOPS_TWIN_THREADS")
RACE_FLAGS = (
    *("-std=c++20", "-O0", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas"),
    *("-DSHARDOPS_TWIN_THREADS", "-DSHARDOPS_ISA=isa_default"),
)
RACE = 66  # ThreadSanitizer's exit status


@dataclass(frozen=True)
class Program:
    """One of tests/cuda_twin/*_race.cpp, with the CUDA kernels and the CPU kernels that it compares."""

    name: str
    kernels: str
    cpu: str
    flags: tuple[str, ...]
    expected: int = 0

    @property
    def path(self) -> Path:
        return BUILD / f"{self.name}.{'race' if self.expected else self.flags[0].split('=')[1].split(',')[0]}"

    def build(self) -> None:
        folder = ROOT / "tests" / "cuda_twin"
        sources = [folder / f"{self.name}.cpp", "-x", "c++", ROOT / "csrc/cuda" / self.kernels, ROOT / self.cpu]
        include = [f"-I{folder}", f"-I{ROOT / 'csrc'}"]
        command = [*compiler(), *RACE_FLAGS, *self.flags, *include, *map(str, sources), "-o", str(self.path)]
        subprocess.run([*command, "-lpthread"], check=True)


THREAD = ("-fsanitize=thread",)
NORM = ("norm_race", "grad_norm.cu", "csrc/cpu/grad_norm.cpp")
BLOCKS = ("blocks_race", "sharded_adam_blocks.cu", "csrc/cpu/sharded_adam.cpp")
PROGRAMS = [  # the slowest to compile first
    *(Program(*BLOCKS, ADDRESS), Program(*BLOCKS, THREAD)),
    *(Program(*NORM, ADDRESS), Program(*NORM, THREAD)),
    # Without the block's barriers there is a race, and it has to be found.
    Program(*NORM, (*THREAD, "-DSHARDOPS_TWIN_NO_SYNC"), RACE),
]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def runtime(name: str) -> str:
    """The compiler's own copy of a sanitizer's runtime library."""
    found = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run_tests(selection: str, tests: list[str], variables: dict[str, str], arguments: list[str]) -> int:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
        **variables,
    }
    # --capture=sys: a sanitizer writes its report past Python, and pytest would swallow it.
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["-k", selection, *(str(ROOT / "tests" / name) for name in tests), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def check_op_library(arguments: list[str]) -> int:
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(BUILD), "--build-temp", str(BUILD / "objects")]
    subprocess.run([sys.executable, *build], cwd=ROOT, env={**os.environ, "SHARDOPS_SANITIZE": "1"}, check=True)
    # The twins of this run are not instrumented.
    return run_tests(
        "(cpp or not reference) and not cuda_twin", TESTS,
        {"SHARDOPS_LIBRARY": str(BUILD / "shardops" / "_ops.so")}, arguments,
    )  # fmt: skip


def check_twins(arguments: list[str]) -> int:
    import twin

    twin.build(TWIN, TWIN_FLAGS, ADDRESS[:1])
    codes = [
        run_tests(selection, tests, {"SHARDOPS_TWIN_LIBRARY": str(TWIN)}, arguments)
        for selection, tests in TWIN_TESTS.items()
    ]
    return max(codes)


def run_program(program: Program) -> int:
    """0 if it ends as expected. Threads that part where a barrier is missing may wait forever: then once more."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    for _ in range(5 if program.expected else 1):
        try:
            done = subprocess.run(
                [program.path], env=environment, capture_output=True, text=True, timeout=20 if program.expected else 300
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == program.expected and (not program.expected or "data race" in done.stderr):
            print(f"{program.path.name}: as expected, exit status {done.returncode}")
            return 0
        print(f"{program.path.name}: exit status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
        return 1
    print(f"{program.path.name}: did not end in time", file=sys.stderr)
    return 1


def check_programs() -> int:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Program.build, PROGRAMS))
    return max(run_program(program) for program in PROGRAMS)


def main() -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    arguments = sys.argv[1:]
    return check_op_library(arguments) or check_twins(arguments) or check_programs()


if __name__ == "__main__":
    sys.exit(main())
