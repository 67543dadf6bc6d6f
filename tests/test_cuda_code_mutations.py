"""The proofs of ``test_cuda_code.py`` can fail: kernels compiled with one fault, which one check alone finds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cuda_code
import gpu_code
import pytest
from cuda_code import Change, Kernel, compile_alone, compile_kernel, native, parse_name
from gpu_checks import problems, ptx_problems
from test_cuda_code import MOST_INSTRUCTIONS, TIGHTEST

if native.find_nvcc() is None or gpu_code.tool("nvdisasm") is None:
    pytest.skip("no nvcc or no disassembler: kernels with faults cannot be made", allow_module_level=True)

ELEMENTS = Kernel("update_elements", ("split", "Bf16", "Bf16", "general"), "float")
COPY = Kernel("copy_kernel", ("float", "Bf16", "as it is", "small"))


def found(kernel: Kernel, changes: Sequence[Change] = (), flags: Sequence[str] = ()) -> dict[str, str]:
    code, ptx = compile_kernel(kernel, changes, flags)
    return problems(code, ptx, cuda_code.demands(kernel, code))


@pytest.mark.parametrize("kernel", [ELEMENTS, TIGHTEST, COPY], ids=str)
def test_a_kernel_without_fault(kernel: Kernel) -> None:
    assert found(kernel) == {}


UPDATE = "cuda/sharded_adam.cu"
STEP = "cuda/adam_step.cuh"
DECODED = "  step.update(access, avg, avg_sq);"
GRADIENTS = "    const Elements<Grad, kCount> grads = access.load(grad);"
AGAIN = "    Elements<Grad, kCount> grads = access.load(grad);\n"
AGAIN += "    grads.words[0] ^= access.load(grad + 65536).words[0];"
PLAIN = [("MUL", "mul", "*"), ("ADD", "add", "+"), ("SUB", "sub", "-")]


@pytest.mark.parametrize(
    ("fault", "change", "check", "text"),
    [
        ("registers for 8 blocks", (UPDATE, "__launch_bounds__(kThreads, kMinBlocks<kMaster, kGeneral>)",
                                    "__launch_bounds__(kThreads, 8)"), "local memory", "accesses to it, stack"),
        ("an array by the thread's number",
         (UPDATE, DECODED, "  volatile float kept[16];\n  kept[threadIdx.x % 16] = avg[0];\n"
          "  avg[0] = kept[threadIdx.x / 16];\n" + DECODED), "local memory", "stack 64"),
        ("float64 in the loop", (UPDATE, DECODED, "  avg[0] = static_cast<float>(avg[0] * 1.1);\n" + DECODED),
         "fp64", "outside of loops {}, in loops {'"),
        ("approximate quotient", ("common/platform.h", "SHARDOPS_DIV(a, b) __fdiv_rn(a, b)",
                                  "SHARDOPS_DIV(a, b) __fdividef(a, b)"), "approximate", "div.approx.f32"),
        ("a second load", (STEP, GRADIENTS, AGAIN), "loops", "accesses are (1 load of 4, 3 loads of 8,"),
        ("a second store", (STEP, "    access.store(param, params);",
                            "    access.store(param, params);\n    access.store(param + 65536, params);"),
         "loops", "3 stores of 8"),
        ("an option's store without it", (STEP, "    if (amsgrad) access.store(", "    access.store("),
         "loops", "3 stores of 16"),
        ("narrow accesses", ("cuda/access.cuh", "alignas(sizeof(T) * kCount < kAccessBytes ? sizeof(T) * kCount : "
                             "kAccessBytes)", "alignas(sizeof(T))"), "loops", "14 loads of 4, "),
        ("generic accesses", (STEP, "static_cast<T*>(__cvta_global_to_generic(address))",
                              "reinterpret_cast<T*>(address)"), "generic", "accesses that find out"),
        ("one more read of a scalar", (STEP, "const float coef = launch.clip_coef",
                                           "const float coef = launch.grad_scale ? launch.grad_scale[7] : "
                                           "launch.clip_coef"), "others", "12 loads of 4 maybe, should be 11 loads"),
    ],
)  # fmt: skip
def test_a_fault_is_found_by_its_check_alone(fault: str, change: Change, check: str, text: str) -> None:
    problem = found(ELEMENTS, [change])
    assert list(problem) == [check], (fault, problem)
    assert text in problem[check]


def test_contraction_is_found() -> None:
    changes = [
        (
            "common/platform.h",
            f"SHARDOPS_{name}(a, b) __f{function}_rn(a, b)",
            f"SHARDOPS_{name}(a, b) ((a) {sign} (b))",
        )
        for name, function, sign in PLAIN
    ]
    assert found(ELEMENTS, changes) == {}  # the flag alone keeps them apart
    problem = found(ELEMENTS, changes, ["--fmad=true"])
    assert list(problem) == ["fused"]
    assert re.fullmatch(r"fma.rn.f32, \d+ FFMA where divisions and roots take 60", problem["fused"])


def test_results_in_a_known_range_are_counted() -> None:
    """One more or less of them is a result where nobody looked at the range."""
    less = [("common/block_quant.h", "quotient_in_range(127.0f, scale)", "SHARDOPS_DIV(127.0f, scale)")]
    problem = found(TIGHTEST, less)
    assert list(problem) == ["approximate", "fused"]
    assert "9 rcp.approx.ftz.f32" in problem["approximate"]
    assert "52 fma.rn.f32" in problem["fused"]
    more = [("common/adam_math.h", "SHARDOPS_MUL(scalars.step_size, SHARDOPS_DIV(exp_avg, denominator))",
             "SHARDOPS_MUL(scalars.step_size, quotient_in_range(exp_avg, denominator))")]  # fmt: skip
    assert list(found(TIGHTEST, more)) == ["approximate", "fused"]
    problem = found(ELEMENTS, more)
    assert list(problem) == ["approximate", "fused"]
    assert "rcp.approx.ftz.f32, 10 MUFU.RCP for 5 correctly rounded results" in problem["approximate"]
    _, ptx = compile_kernel(TIGHTEST)
    assert ptx_problems(ptx, *cuda_code.IN_RANGE) == {}
    for quotients, roots in ((10, 7), (9, 8), (0, 0)):
        assert list(ptx_problems(ptx, quotients, roots)) == ["approximate", "fused"]
    assert list(ptx_problems("", 10, 8)) == ["approximate", "fused"]


def test_a_copy_of_another_batch_is_found() -> None:
    changes = [("cuda/cast_copy.cu", "constexpr uint32_t kWideInFlight = 4;", "constexpr uint32_t kWideInFlight = 3;")]
    assert "loops" in found(COPY, changes)


def test_a_low_occupancy_is_found() -> None:
    for kernel, most in ((ELEMENTS, 64), (TIGHTEST, 80)):
        code, ptx = compile_kernel(kernel)
        demands = cuda_code.demands(kernel, code)
        assert problems(replace(code, registers=most), ptx, demands) == {}
        assert list(problems(replace(code, registers=most + 8), ptx, demands)) == ["occupancy"]


def test_storages_of_another_kernel_do_not_pass() -> None:
    """As if the two translation units of update_elements had been taken for each other."""
    for moment, other in (("float", "Bf16"), ("Bf16", "float")):
        code, ptx = compile_kernel(replace(ELEMENTS, moment=moment))
        wrong = replace(ELEMENTS, moment=other)
        assert "loops" in problems(code, ptx, cuda_code.demands(wrong, code))


def test_moments_are_told_from_the_plainest_kernel() -> None:
    for moment in ("float", "Bf16"):
        plainest = Kernel("update_elements", ("param", "float", "float", "lean"), moment)
        _, ptx = compile_kernel(plainest)
        name = "_ZN8shardops12_GLOBAL__N_115update_elementsILNS_6MasterE0EffLb0EEEvNS_10AdamLaunchE"
        assert cuda_code.name_kernels({name: ptx}) == {name: plainest}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void shardops::(anonymous namespace)::update_blocks<(shardops::Master)2, shardops::Bf16, float, true, "
         "false>(shardops::AdamLaunch)", Kernel("update_blocks", ("split24", "Bf16", "float", "general", "scalar"))),
        ("void shardops::_GLOBAL__N__12ab::update_blocks<(shardops::Master)0, float, float, (bool)0, (bool)1>(X)",
         Kernel("update_blocks", ("param", "float", "float", "lean", "wide"))),
        ("void shardops::(anonymous namespace)::copy_kernel<unsigned int, unsigned int, false, shardops::(anonymous "
         "namespace)::CopyLaunch<4096> >(X)", Kernel("copy_kernel", ("unsigned int", "unsigned int", "as it is",
                                                                     "small"))),
        ("shardops::(anonymous namespace)::make_scalars(X)", Kernel("make_scalars", ())),
    ],
)  # fmt: skip
def test_names_of_kernels(name: str, expected: Kernel) -> None:
    assert parse_name(name) == expected
    assert expected in cuda_code.KERNELS


def test_sizes_of_parameters(tmp_path: Path) -> None:
    """All of a kernel's parameters are counted, and the compiler itself refuses more than there may be."""
    path = tmp_path / "large.cu"

    def size(nbytes: int) -> int:
        text = "struct Large { char bytes[%d]; };\n__global__ void large(const __grid_constant__ Large large, int* out)"
        path.write_text(text % nbytes + " { *out = large.bytes[threadIdx.x]; }")
        return cuda_code.parameter_bytes(compile_alone(path, [])[1])

    assert size(32744) == 32744 + 8
    with pytest.raises(RuntimeError, match="32776 bytes required, max 32764 bytes allowed"):
        size(32768)


def test_rare_ways_are_counted_unless_they_are_left_out() -> None:
    code, _ = compile_kernel(TIGHTEST)
    assert len(cuda_code.executed_a_round(code)) / 8 > MOST_INSTRUCTIONS
