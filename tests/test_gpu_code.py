"""The proofs of compiled GPU code can fail: for each check a kernel with one fault, which that check alone finds.

``test_sass.py`` tests the reader that they rest on.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
from gpu_checks import Demands, amd_problems, problems
from gpu_code import Code, read_cubin

from shardops.backends import triton as backend

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
if backend._interpreting():
    pytest.skip("this process interprets: nothing compiles; unset TRITON_INTERPRET", allow_module_level=True)

import triton.language as tl  # noqa: E402
from test_triton_code import AMD, Kernel  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

# ---- faulty kernels --------------------------------------------------------------------------------------------------

THREADS, VECTOR = 256, 4


@triton.jit
def _values(x, y, lanes, remaining, scalar, FAULT: tl.constexpr, MASKED: tl.constexpr):
    """``sqrt(x) / y + scalar * x``, written to y; FAULT says what is done wrong, and where."""
    mask = lanes < remaining if MASKED else None
    other = 0.0 if MASKED else None
    first = tl.load(x + lanes, mask=mask, other=other)
    second = tl.load(y + lanes, mask=mask, other=other)
    if FAULT == "approximate root":
        root = tl.sqrt(first)
    else:
        root = tl.sqrt_rn(first)
    if FAULT == "approximate quotient":
        quotient = root / second
    else:
        quotient = tl.div_rn(root, second)
    if FAULT == "exponential":
        quotient = tl.exp(quotient)
    if FAULT == "multiply-add":
        result = tl.fma(scalar, first, quotient)
    else:
        result = quotient + scalar * first
    if FAULT == "float64 in the loop" and MASKED:
        result = (result.to(tl.float64) * first.to(tl.float64) + second.to(tl.float64)).to(tl.float32)
    if FAULT == "float64 outside" and not MASKED:
        result = (result.to(tl.float64) * first.to(tl.float64) + second.to(tl.float64)).to(tl.float32)
    if FAULT == "another load" and not MASKED:
        result += tl.load(x + 65536 + lanes)
    if FAULT == "another load in the loop" and MASKED:
        result += tl.load(x + 65536 + lanes, mask=mask, other=0.0)
    if FAULT == "another store" and not MASKED:
        tl.store(y + 65536 + lanes, first)
    if FAULT == "two at once" and not MASKED:
        result = tl.inline_asm_elementwise(
            "{.reg .b64 a, b; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; fma.rn.f32x2 a, a, b, a; mov.b64 {$0, $1}, a;}",
            "=r,=r,r,r,r,r", [result, first], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if FAULT == "shared memory":
        result += tl.sum(first, axis=0)
    tl.store(y + lanes, result, mask=mask)


@triton.jit
def faulty_kernel(rows, scalar, FAULT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """A row is (address, address, numel); made as the kernels of the package are."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK
    x, y = tl.load(rows), tl.load(rows + 1)
    remaining = tl.load(rows + 2) - offset
    if (((x | y) & 15) == 0) & (remaining >= BLOCK):
        x_block = x.to(tl.pointer_type(tl.float32))
        y_block = y.to(tl.pointer_type(tl.float32))
        if FAULT != "no alignment":
            x_block = tl.multiple_of(x_block, 16)
            y_block = tl.multiple_of(y_block, 16)
        _values(x_block + offset, y_block + offset, tl.arange(0, BLOCK), remaining, scalar, FAULT, False)
    else:
        x_block = x.to(tl.pointer_type(tl.float32)) + offset
        y_block = y.to(tl.pointer_type(tl.float32)) + offset
        for start in tl.range(0, tl.minimum(remaining, BLOCK), BLOCK // VECTOR):
            lanes = tl.arange(0, BLOCK // VECTOR)
            _values(x_block + start, y_block + start, lanes, remaining - start, scalar, FAULT, True)


def faulty(fault: str = "none", vector: int = VECTOR) -> Kernel:
    demands = Demands(threads=THREADS, loads=[16] * (vector // 2), stores=[16] * (vector // 4), round=(8, 4))
    constants = {"FAULT": fault, "BLOCK": vector * THREADS, "VECTOR": vector}
    return Kernel(fault, faulty_kernel, {"rows": "*i64", "scalar": "fp32"}, constants, demands)


@functools.cache
def compiled(fault: str = "none", vector: int = VECTOR, arch: int = 90, **options: Any) -> tuple[Code, str, int]:
    """Its code, its PTX and the shared memory that it asks for."""
    program = faulty(fault, vector).compile(GPUTarget("cuda", arch, 32), **options)
    (code,) = read_cubin(program.asm["cubin"]).values()
    return code, program.asm["ptx"], program.metadata.shared


def found(fault: str = "none", vector: int = VECTOR, arch: int = 90, **demands: Any) -> dict[str, str]:
    code, ptx, shared = compiled(fault, vector, arch)
    return problems(code, ptx, replace(faulty(fault, vector).demands, **demands), shared)


def test_a_kernel_without_fault() -> None:
    assert found() == {}
    assert found(vector=16) == {}


@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("approximate root", "approximate", "sqrt.approx.ftz.f32, MUFU.SQRT"),
        ("approximate quotient", "approximate", "div.full.f32, 5 MUFU.RCP for 0 correctly rounded results"),
        ("exponential", "approximate", "ex2.approx.f32, MUFU.EX2"),
        ("multiply-add", "fused", "fma.rn.f32, 40 FFMA where divisions and roots take 35"),
        ("float64 outside", "fp64", "outside of loops {'"),
        ("float64 in the loop", "fp64", "outside of loops {}, in loops {'"),
        ("another load", "bytes", "a thread loads 48 bytes, 8 in loops; the least is 32, 8"),
        ("another store", "bytes", "a thread stores 32 bytes, 4 in loops; the least is 16, 4"),
        ("another load in the loop", "bytes", "loops do [1.0, 1.5] rounds"),
        ("no alignment", "width", "s below 16 bytes are {4: "),
        ("shared memory", "shared memory", "32 bytes, should be at most 0"),
    ],
)
def test_a_fault_is_found_by_its_check_alone(fault: str, check: str, text: str) -> None:
    problem = found(fault)
    assert list(problem) == [check]
    assert text in problem[check]


def test_loops_do_as_many_rounds_of_loads_as_of_stores() -> None:
    assert list(found(round=(4, 4))) == ["bytes"]
    assert list(found(round=(8, 0))) == ["bytes"]
    assert found(round=(4, 2)) == {}  # as if unrolled once


def test_float64_may_be_meant_outside_of_loops_alone() -> None:
    assert found("float64 outside", fp64=True) == {}
    assert list(found("float64 in the loop", fp64=True)) == ["fp64"]
    assert found("float64 in the loop", fp64=True, fp64_loops=True) == {}


def test_local_memory_is_found() -> None:
    demands = faulty(vector=16).demands
    spilled, ptx, _ = compiled(vector=16, maxnreg=32)
    assert list(problems(spilled, ptx, demands)) == ["local memory"]
    # Each of the three facts is looked at, and all but the last were read from this kernel.
    assert spilled.spills > 0
    assert spilled.stack > 0
    code = compiled(vector=16)[0]
    for other in (replace(code, stack=8), replace(code, local=8), replace(spilled, stack=0)):
        assert list(problems(other, ptx, demands)) == ["local memory"]


def test_a_low_occupancy_is_found() -> None:
    assert list(found(vector=32)) == ["occupancy"]
    assert found(vector=32, occupancy=0.25) == {}
    code, ptx, _ = compiled()
    assert list(problems(code, ptx, replace(faulty().demands, shared=None), 100 * 1024)) == ["occupancy"]


def test_fusion_is_found_in_what_was_asked_for_and_in_what_was_made() -> None:
    code, ptx, _ = compiled()
    fused_code, fused_ptx, _ = compiled(enable_fp_fusion=True)
    assert problems(fused_code, ptx, faulty().demands) == {"fused": "40 FFMA where divisions and roots take 35"}
    assert problems(code, fused_ptx, faulty().demands) == {"fused": "fma.rn.f32"}


def test_fusion_of_two_at_once_is_found() -> None:
    """What the assembler of an old triton does unasked on Blackwell; here it is told to."""
    code, ptx, _ = compiled("two at once", arch=100)
    assert problems(code, ptx, faulty().demands) == {"fused": "fma.rn.f32x2, FFMA2"}


def test_faults_are_found_for_amd() -> None:
    kernel = faulty()
    assembly = kernel.compile(AMD).asm["amdgcn"]
    assert amd_problems(assembly) == {}
    assert list(amd_problems(kernel.compile(AMD, enable_fp_fusion=True).asm["amdgcn"])) == ["fused"]
    pair, two = (amd_problems(assembly + text) for text in ("\tv_pk_fma_f32 v0\n", 2 * "\tv_fma_f32 v0\n"))
    assert list(pair) == ["fused"]
    assert pair == two
    for text, check in (
        (".private_segment_fixed_size:", "local memory"),
        (".vgpr_spill_count:", "local memory"),
        ("float_denorm_mode_32", "denormals"),
    ):
        assert list(amd_problems(re.sub(rf"({re.escape(text)} +)\d", r"\g<1>1", assembly))) == [check]
