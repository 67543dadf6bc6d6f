"""What the shipped CUDA kernels' machine code is, proven from the op library itself, without a GPU.

``cuda_code.py`` says what each kernel has to be; ``test_cuda_code_mutations.py`` shows that each check can fail.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import cuda_code
import gpu_code
import pytest
from cuda_code import ARCHITECTURES, KERNELS, LOW_OCCUPANCY, QUANTISED, Kernel, library, native
from gpu_checks import occupancy_of, problems, ptx_problems

if gpu_code.tool("cuobjdump") is None or gpu_code.tool("nvdisasm") is None:
    pytest.skip("no disassembler: pip install triton, or a CUDA toolkit", allow_module_level=True)
if b".nv_fatbin" not in cuda_code.LIBRARY.read_bytes():
    pytest.skip("the op library was built without nvcc: no CUDA kernels are in it", allow_module_level=True)


def skip_unknown(arch: int) -> None:
    nvcc = native.find_nvcc()
    if nvcc is not None and str(arch) not in nvcc.architectures:
        pytest.skip(f"nvcc {nvcc.version} does not know sm_{arch}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code(arch: int) -> None:
    """Every kernel is there, and all that is demanded of each holds.

    No local memory; no float64 but where meant; IEEE arithmetic, nothing fused, approximations only as seeds; accesses
    to global memory that know it, the widest and fewest, loop by loop; enough warps.
    """
    skip_unknown(arch)
    codes = library().code(arch)
    assert set(codes) == KERNELS
    found = {str(kernel): problems(code, "", cuda_code.demands(kernel, code)) for kernel, code in codes.items()}
    assert {name: problem for name, problem in found.items() if problem} == {}


def test_ptx() -> None:
    """For GPUs to come: every kernel, for the newest architecture alone, with the operations that are meant."""
    skip_unknown(ARCHITECTURES[-1])
    assert library().ptx_architectures == {ARCHITECTURES[-1]}
    assert set(library().ptx) == KERNELS
    wrong = {}
    for kernel, text in library().ptx.items():
        # As many as elements in each of the loops; of quotients one more where gradients are unscaled.
        roots, in_range = 0, (0, 0)
        if kernel.function == "update_blocks":
            roots, in_range = 8, cuda_code.IN_RANGE
        elif kernel.is_update:
            roots = cuda_code.elements_a_thread(kernel) + 1
        expected = {"div.rn.f32": roots * (1 + kernel.general), "sqrt.rn.f32": roots}
        actual = {name: len(re.findall(rf"\b{re.escape(name)}\s", text)) for name in expected}
        expected["threads of a block"] = cuda_code.THREADS.get(kernel.function, 256)
        actual["threads of a block"] = int(re.findall(r"^\.maxntid (\d+)", text, re.M)[0])
        if (problem := ptx_problems(text, *in_range)) or actual != expected:
            wrong[str(kernel)] = problem, actual, expected
    assert wrong == {}


def test_parameters_fit() -> None:
    """CUDA takes 32,764 bytes of kernel parameters; the kernels' structs come near."""
    sizes = {str(kernel): cuda_code.parameter_bytes(text) for kernel, text in library().ptx.items()}
    assert {name: size for name, size in sizes.items() if not 0 < size <= 32764} == {}
    large = [size for name, size in sizes.items() if "update" in name or "large" in name or "scalars" in name]
    assert min(large) > 32000, "the sizes are not read"


def test_reasons_for_a_low_occupancy_are_needed() -> None:
    """Each of the table's numbers is what the worst kernel of its kind has."""
    worst: dict[str, float] = defaultdict(lambda: 1.0)
    for (arch, kernel), (registers, _, shared, _) in library().resources().items():
        threads = cuda_code.THREADS.get(kernel.function, 256)
        key = cuda_code.low_occupancy(kernel)
        worst[key] = min(worst[key], occupancy_of(arch, registers, shared, threads))
    assert worst.pop("") >= 0.5
    assert worst == {key: share for key, (share, _) in LOW_OCCUPANCY.items()}


# ---- what is demanded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "storages", "loaded", "stored"),
    [
        ("float", "param float float", 16, 12), ("float", "param float Bf16", 14, 12),
        ("float", "split Bf16 Bf16", 14, 12), ("float", "split Bf16 float", 16, 12),
        ("float", "split24 Bf16 Bf16", 13, 11), ("float", "stochastic Bf16 Bf16", 12, 10),
        ("float", "nearest Fp16 float", 14, 10), ("Bf16", "param float float", 12, 8),
        ("Bf16", "split Bf16 Bf16", 10, 8), ("Bf16", "split24 Bf16 Bf16", 9, 7),
        ("Bf16", "nearest Fp16 Bf16", 8, 6), ("Bf16", "stochastic Bf16 float", 10, 6),
        ("", "param float float", 10, 6), ("", "split Bf16 Bf16", 8, 6),
        ("", "split24 Bf16 Bf16", 7, 5), ("", "stochastic Bf16 float", 8, 4),
    ],
)  # fmt: skip
def test_bytes_demanded_of_an_update(moment: str, storages: str, loaded: float, stored: float) -> None:
    """What the demands come to for an element on the wide path, so that both are not wrong alike.

    8-bit codes have 8 bytes more for a block each way, which its threads load together and one of them stores.
    """
    function, modes = ("update_elements", ("lean",)) if moment else ("update_blocks", ("lean", "wide"))
    kernel = Kernel(function, (*storages.split(), *modes), moment)
    assert kernel in KERNELS
    wide = cuda_code.update_loops(kernel)[-1]
    count = cuda_code.elements_a_thread(kernel)
    for kind, expected in (("load", loaded), ("store", stored)):
        nbytes = sum(size * number for (name, size, _), number in wide.items() if name == kind)
        words = 0 if moment else 8
        assert (nbytes - words) / count + words / QUANTISED == expected + words / QUANTISED


def test_widths_demanded_of_an_update() -> None:
    """128 bits of the widest array; twice of fp32 where all that is stored is narrower, and none below 64 but codes."""

    def loads(function: str, *arguments: str, moment: str = "") -> list[int]:
        wide = cuda_code.update_loops(Kernel(function, arguments, moment))[-1]
        return sorted(size for (kind, size, _), number in wide.items() for _ in range(number * (kind == "load")))

    assert loads("update_elements", "split", "Bf16", "Bf16", "lean", moment="float") == [8, 8, 8, 16, 16]
    assert loads("update_elements", "split24", "Bf16", "Bf16", "lean", moment="float") == [4, 8, 8, 16, 16]
    assert loads("update_elements", "split24", "Bf16", "float", "lean", moment="Bf16") == [8, 16, 16, 16, 16, 16]
    assert loads("update_blocks", "split24", "Bf16", "Bf16", "lean", "wide") == [8, 8, 8, 8, 16, 16]


# ---- instructions ----------------------------------------------------------------------------------------------------

# The kernel is written to this many; each one more is time wherever memory is not the limit.
MOST_INSTRUCTIONS = 84
TIGHTEST = Kernel("update_blocks", ("split24", "Bf16", "Bf16", "lean", "wide"))


def test_instructions_of_the_smallest_states() -> None:
    """int8 states with split24 are limited by instructions if by anything: so many an element where nothing is rare."""
    if native.find_nvcc() is None:
        pytest.skip("no nvcc, so the kernel cannot be compiled without its rare ways")
    skip_unknown(90)
    code, _ = cuda_code.compile_kernel(TIGHTEST, flags=["-DSHARDOPS_HOT_PATH_ONLY"])
    executed = cuda_code.executed_a_round(code)
    loads = Counter(access.nbytes for access in code.accesses if access.index in executed and access.kind == "load")
    (demanded,) = cuda_code.update_loops(TIGHTEST)
    assert loads == {nbytes: number for (kind, nbytes, _), number in demanded.items() if kind == "load"}
    assert len(executed) / 8 <= MOST_INSTRUCTIONS, f"{len(executed)} for eight elements"
