"""quotient_in_range() and root_in_range() of csrc/common/platform.h give the bits of IEEE's operations on a GPU, too.

A GPU starts from an approximate instruction. PTX documents how far it may be off: rcp.approx by 1 ulp, in older
editions by 2^-23 for inputs from 1 to 2, which is 2 floats of its result; rsqrt.approx by 2^-22.9 of the value, in
older editions by 2^-22.4 for inputs from 1 to 4, which is 3.

What such errors may do is found without a GPU by ``cuda_twin/range_proof.cpp``, which runs the device's sequences from
every seed that is so near.

* Roots: all floats from 1 to 4 are tried. All others are the same times powers of two.
* Quotients: one can be wrong only where the exact one is nearer to the middle between two floats than the error before
  the last rounding. The program bounds that error by those of all refined inverses, solves for the dividends whose
  quotients are that near, and tries them. Where the inverse is the nearest float and the first quotient within 1 ulp,
  it is a theorem that the last one is right (P. Markstein, Computation of elementary functions on the IBM RISC
  System/6000 processor, IBM Journal of Research and Development 34, 1, 1990); but one Newton step may miss the nearest.

All are right from every seed but for the few that are counted here. These few need a seed that no GPU gives: both
sequences are those that the CUDA compiler itself makes of the IEEE operations, less the checks of the range, so with
such a seed its own division or root would be wrong. That is read in its machine code, where nvcc is installed.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gpu_code
import pytest
from gpu_code import Code

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "cuda_twin"
# Wrong cases with seeds that are 0, 1, .. floats from the nearest one, on either side.
WRONG_ROOTS = [0, 5, 21, 51]
WRONG_QUOTIENTS = [0, 3, 4]
FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Werror",
]


@cache
def fma_flags() -> list[str] | None:
    """What makes the compiler use the CPU's fused multiply-add; None if it has none."""
    if platform.machine() not in ("x86_64", "amd64"):
        return [] if platform.machine() == "aarch64" else None
    flags = Path("/proc/cpuinfo").read_text().split()
    return ["-mavx2", "-mfma"] if {"avx2", "fma"} <= set(flags) else None


# In software an fma takes a hundred times as long: then one case of so many. Not an even number of them: divisors that
# are multiples of 8 have no quotients near a middle.
SAMPLE = 257
SAMPLED = fma_flags() is None


class Found(NamedTuple):
    """Of one part of a program: how many cases, how many of them wrong, and the same by the steps of the seed."""

    cases: int
    wrong: int
    by_steps: list[int]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Found]]:
    """Runs ``range_proof`` or ``range_claims``: what was found, by its name."""
    folder = tmp_path_factory.mktemp("range")

    @cache
    def built(name: str) -> Path:
        include = [f"-I{ROOT / 'csrc'}", f"-I{FOLDER}"]
        command = ["c++", *FLAGS, *(fma_flags() or []), *include, str(FOLDER / f"{name}.cpp"), "-lpthread"]
        subprocess.run([*command, "-o", str(folder / name)], check=True)
        return folder / name

    def run(name: str = "range_proof", **options: str | int) -> dict[str, Found]:
        if SAMPLED:
            options.setdefault("stride", SAMPLE)
        words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        done = subprocess.run([built(name), *words], capture_output=True, text=True, check=True)
        print(done.stdout)
        found = re.findall(r"^(\w+): (\d+) cases, (\d+) wrong, by steps:([ \d]+)$", done.stdout, re.MULTILINE)
        assert found, done.stdout + done.stderr
        return {each: Found(int(cases), int(wrong), [*map(int, steps.split())]) for each, cases, wrong, steps in found}

    return run


def expect(found: Found, known: list[int]) -> None:
    if SAMPLED:
        assert all(few <= most for few, most in zip(found.by_steps, known, strict=False))
    else:
        assert found.by_steps[: len(known)] == known
    assert sum(found.by_steps[: len(known)]) == found.wrong


# ---- every seed ------------------------------------------------------------------------------------------------------


def test_roots_are_rounded_correctly_from_every_seed_but_a_few(program: Callable) -> None:
    found = program(part="roots")["roots"]
    assert SAMPLED or found.cases == 7 << 24
    expect(found, WRONG_ROOTS)


def test_quotients_are_rounded_correctly_from_every_seed_but_a_few(program: Callable) -> None:
    found = program(part="quotients")["quotients"]
    assert SAMPLED or found.cases > 5 << 25
    expect(found, WRONG_QUOTIENTS)


def check_the_whole_range(program: Callable, **options: int) -> None:
    for part in ("other_roots", "other_quotients"):
        found = program(part=part, **options)[part]
        assert found.cases > (10**4 if SAMPLED else 10**7)
        assert found.wrong == 0
    claims = program("range_claims", **options)
    assert {name: found.wrong for name, found in claims.items()} == {"update_ranges": 0, "block_quotients": 0}


def test_the_whole_range_is_rounded_correctly_and_kernels_stay_in_it(program: Callable) -> None:
    """Edges, zeros of both signs, all exponents at random; what the kernels' own checks let through."""
    check_the_whole_range(program, stride=SAMPLE if SAMPLED else 9)


@pytest.mark.slow
def test_the_whole_range_at_length(program: Callable) -> None:
    if SAMPLED:
        pytest.skip("the CPU has no fused multiply-add: this would take hours")
    check_the_whole_range(program, stride=1, threads=2)


@pytest.mark.slow
def test_all_dividends_of_some_divisors(program: Callable) -> None:
    """Those whose inverse some seed leaves off the nearest float, where the theorem does not hold, and others."""
    if SAMPLED:
        pytest.skip("the CPU has no fused multiply-add: this would take hours")
    found = program(part="none", rows=2000, threads=2)["whole_rows"]
    assert found.cases == 2000 * 5 << 23
    expect(found, WRONG_QUOTIENTS)


# ---- that wrong sequences are found ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("roots", {"fault": "root_unrefined"}),
        ("roots", {"fault": "root_half"}),
        ("other_roots", {"fault": "root_half"}),
        ("roots", {"root_steps": 40}),
        ("quotients", {"fault": "no_inverse"}),
        ("quotients", {"fault": "no_remainder"}),
        ("other_quotients", {"fault": "no_remainder"}),
        ("other_quotients", {"fault": "sign"}),
        ("quotients", {"quotient_steps": 40}),
    ],
    ids=str,
)
def test_faults_are_found(program: Callable, part: str, options: dict[str, str | int]) -> None:
    """Without a refinement, with a wrong factor, with a negative zero's sign lost, from seeds that are too far off."""
    found = program(part=part, stride=SAMPLE if SAMPLED else 17, **options)[part]
    assert found.wrong > (0 if SAMPLED else 20)


# ---- the compiler's own division and root ----------------------------------------------------------------------------

SOURCE = """
#include "common/platform.h"
extern "C" __global__ void own_root(float* x) { x[0] = shardops::root_in_range(x[0]); }
extern "C" __global__ void own_quotient(float* x) { x[0] = shardops::quotient_in_range(x[0], x[1]); }
extern "C" __global__ void ieee_root(float* x) { x[0] = __fsqrt_rn(x[0]); }
extern "C" __global__ void ieee_quotient(float* x) { x[0] = __fdiv_rn(x[0], x[1]); }
extern "C" __global__ void other_root(float* x) {
  float seed;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(x[0]));
  const float root = x[0] * seed;
  x[0] = __fmaf_rn(__fmaf_rn(-root, root, x[0]), 0.25f * seed, root);
}
extern "C" __global__ void other_quotient(float* x) {
  float seed;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(seed) : "f"(x[1]));
  const float inverse = __fmaf_rn(seed, __fmaf_rn(-x[1], seed, 1.0f), seed), quotient = __fmul_rn(x[0], inverse);
  x[0] = __fmaf_rn(inverse, __fmaf_rn(x[1], quotient, -x[0]), quotient);
}
"""
Signed = tuple[int, str]


def formula(code: Code) -> str:
    """The last product of a kernel's body, as a formula of its approximate instruction and of what was loaded.

    A negated product is written as what it is the negation of: rounding to nearest treats both signs alike.
    """
    body = [i for i in code.instructions if i.function == code.name]
    divisor = next((i.operands.split(",")[1].strip() for i in body if i.opcode == "MUFU.RCP"), None)
    values: dict[str, Signed] = {}

    def value(operand: str) -> Signed:
        name = operand.strip().removesuffix(".reuse")
        if name.startswith("-"):
            sign, rest = value(name[1:])
            return -sign, rest
        if re.fullmatch(r"R\d+", name):
            return values.get(name, (1, "b" if name == divisor else "a"))
        return 1, "0" if name == "RZ" else name

    last = (1, "")
    for instruction in body:
        if instruction.base not in ("MUFU", "FFMA", "FMUL"):
            continue
        target, *sources = instruction.operands.split(",")
        if instruction.base == "MUFU":
            last = (1, "seed")
        else:
            assert instruction.modifiers in ((), ("FTZ",)), instruction
            (sign, x), (other, y), (third, z) = [*map(value, sources), (1, "0")][:3]
            sign *= other
            product = "*".join(sorted((x, y)))
            last = (sign, f"({product})" if z == "0" else f"({product}{'-' if third != sign else '+'}{z})")
        values[target.strip()] = last
    return "-" * (last[0] < 0) + last[1]


@pytest.fixture(scope="module")
def formulas(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    if shutil.which("nvcc") is None or gpu_code.tool("cuobjdump") is None:
        pytest.skip("nvcc or cuobjdump is not installed: the CUDA toolkit brings both, triton the latter")
    folder = tmp_path_factory.mktemp("formulas")
    (folder / "kernels.cu").write_text(SOURCE)
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90, 100)]
    command = ["nvcc", "-std=c++20", "-O3", "--fmad=false", *targets, f"-I{ROOT / 'csrc'}", "-c", "kernels.cu"]
    subprocess.run([*command, "-o", "kernels.o"], cwd=folder, check=True)
    return {key: formula(code) for key, code in gpu_code.read_object(folder / "kernels.o").items()}


@pytest.mark.parametrize("kind", ["root", "quotient"])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_compiler_rounds_by_the_same_sequence(
    formulas: dict[tuple[int, str], str], architecture: int, kind: str
) -> None:
    own = formulas[architecture, f"own_{kind}"]
    assert "seed" in own
    assert own == formulas[architecture, f"ieee_{kind}"]
    assert own != formulas[architecture, f"other_{kind}"]
