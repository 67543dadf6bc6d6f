"""The reader of GPU machine code, on listings written out here, and on CUDA sources where nvcc is installed."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import gpu_code
import pytest
import sass
from gpu_checks import inexact_operations, occupancy
from gpu_code import Code, read_object

LISTING = """
	.target	sm_90
        .other          kernel,@"STO_CUDA_ENTRY STV_DEFAULT"
kernel:
.text.kernel:
"""
USAGE = " Function kernel:\n  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568"


def listed(lines: str) -> Code:
    """A kernel of these lines of machine code; a line that ends in a colon is a label."""
    text = LISTING
    for number, line in enumerate(line.strip() for line in lines.strip().splitlines()):
        text += f"{line}\n" if line.endswith(":") else f"        /*{16 * number:04x}*/  {line} ;\n"
    (code,) = gpu_code.parse(text, USAGE).values()
    return code


def in_loops(code: Code) -> list[str]:
    return [instruction.opcode for index, instruction in enumerate(code.instructions) if index in code.loops]


def test_loops_are_cycles_of_jumps() -> None:
    code = listed("""
        DADD R0, R2, R4
        .L_x_0:
        DMUL R0, R2, R4
        @P1 BRA `(.L_x_2)
        .L_x_1:
        DFMA R0, R2, R4, R6
        @!P0 BRA `(.L_x_0)
        EXIT
        .L_x_2:
        F2F.F32.F64 R0, R2
        BRA `(.L_x_1)
    """)
    # The block behind the exit is part of the loop as well.
    assert in_loops(code) == ["DMUL", "BRA", "DFMA", "BRA", "F2F.F32.F64", "BRA"]
    assert sum(code.fp64(in_loop=False).values()) == 1
    assert sum(code.fp64(in_loop=True).values()) == 3


def test_a_jump_back_from_a_block_out_of_line_is_no_loop() -> None:
    code = listed("""
        @P1 BRA `(.L_x_1)
        .L_x_0:
        DMUL R0, R2, R4
        EXIT
        .L_x_1:
        DADD R0, R2, R4
        BRA `(.L_x_0)
    """)
    assert in_loops(code) == []


@pytest.mark.parametrize("jump", ["BRA P1, `(.L_x_0)", "BRA.DIV UR4, `(.L_x_0)", "@P0 EXIT", "@P0 RET.REL.NODEC R4"])
def test_a_conditional_jump_goes_on(jump: str) -> None:
    code = listed(f".L_x_0:\n{jump}\nDMUL R0, R2, R4\nBRA `(.L_x_0)")
    assert "DMUL" in in_loops(code)


@pytest.mark.parametrize("end", ["EXIT", "RET.REL.NODEC R4", "BRA `(.L_x_1)"])
def test_a_sure_jump_does_not_go_on(end: str) -> None:
    code = listed(f".L_x_0:\n{end}\nDMUL R0, R2, R4\nBRA `(.L_x_0)\n.L_x_1:\nEXIT")
    assert in_loops(code) == []


def test_a_subroutine_called_from_a_loop_is_in_it() -> None:
    lines = """
        {before}
        .L_x_0:
        {inside}
        @P0 BRA `(.L_x_0)
        EXIT
        $__internal_0_$__cuda_sm20_div_rn_f64_full:
        DMUL R0, R2, R4
        RET.REL.NODEC R8
    """
    call = "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_rn_f64_full)"
    assert "DMUL" in in_loops(listed(lines.format(before="NOP", inside=call)))
    assert "DMUL" not in in_loops(listed(lines.format(before=call, inside="NOP")))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("MOV R2, R1", False),
        ("MOV R2, R0", True),
        ("IMAD.WIDE.U32 R2, R0, 0x4, R4", True),
        ("LEA R6, P1, R0, R4, 0x2\nIADD3.X R3, RZ, R5, RZ, P1, !PT", True),  # by the carry
        ("MOV R2, R0\nMOV R2, R1", False),  # overwritten
        ("MOV R2, R0\n@P0 MOV R2, R1", True),  # perhaps overwritten
        ("ISETP.LT.AND P0, PT, R0, 0x1, PT\n@P0 MOV R2, R1", True),
        ("MOV R2, R0\nLDG.E.64 R2, desc[UR4][R4.64]", False),  # the pair is overwritten
        ("LDG.E.64 R2, desc[UR4][R4.64+0x8]", False),
        ("R2UR UR8, R0\nMOV R2, R1", False),  # the descriptor is no address
        ("IADD3 R4, R0, R4, RZ\nLDG.E.64 R2, desc[UR4][R4.64+0x8]", True),
        ("LDG.E.128 R0, desc[UR4][R4.64]\nMOV R2, R0", False),
        ("STL [R1], R0\nLDL R2, [R1]", True),  # through local memory
        ("STL [R1], R5\nLDL R2, [R1]", False),
        ("R2UR UR6, R0\nMOV R2, UR6", True),
        ("ISETP.LT.AND P0, PT, R0, 0x1, PT\nIADD3 R2, P0, PT, R4, R5, RZ", False),  # the carry is written, not read
        ("ISETP.LT.AND P0, PT, R0, 0x1, PT\nIADD3.X R2, PT, PT, R4, R5, RZ, P0, !PT", True),
        ("MOV R2, R0\nSHFL.BFLY PT, R2, R5, 0x10, 0x1f", False),
        ("MOV R3, R0\nLOP3.LUT P0, R3, R5, 0xf, RZ, 0xc0, !PT\nMOV R2, R3", False),
        ("MOV R2, R0\nLDG.E.ENL2.256 R4, R0, desc[UR4][R12.64]", False),  # R4 to R7 and R0 to R3
        ("MOV R2, R0\nLDGSTS.E.128 [R2], desc[UR4][R4.64]", True),  # into shared memory
        ("SHFL.BFLY PT, R2, R0, 0x10, 0x1f", True),
        ("FCHK P0, R0, R5\nMOV R2, R0", True),  # R0 is read, not written
        ("BRA P1, `(.L_x_9)\nMOV R2, R0\n.L_x_9:", True),  # on one way
    ],
)
def test_which_addresses_depend_on_the_thread(lines: str, expected: bool) -> None:
    code = listed(f"S2R R0, SR_TID.X\n{lines}\nLDG.E R8, desc[UR8][R2.64]\nEXIT")
    assert code.accesses[-1].per_thread == expected


def test_a_block_index_is_no_thread_index() -> None:
    code = listed("S2R R2, SR_CTAID.X\nLDG.E R8, desc[UR8][R2.64]\nEXIT")
    assert not code.accesses[0].per_thread


@pytest.mark.parametrize(
    ("opcode", "kind", "nbytes"),
    [("LDG.E", "load", 4), ("LDG.E.U8.CONSTANT", "load", 1), ("LDG.E.S16", "load", 2), ("LD.E.64", "load", 8),
     ("LDG.E.LTC128B.64", "load", 8), ("LDG.E.EF.128", "load", 16), ("LDG.E.ENL2.256", "load", 32),
     ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "atomic", 4), ("ATOMG.E.ADD.64.STRONG.GPU", "atomic", 8)],
)  # fmt: skip
def test_kinds_and_widths_of_accesses(opcode: str, kind: str, nbytes: int) -> None:
    (access,) = listed(f"@P0 {opcode} R8, desc[UR8][R2.64]\nSTS [R2], R4\nLDC R1, c[0x0][0x28]\nEXIT").accesses
    assert (access.kind, access.nbytes, access.predicated, access.in_loop) == (kind, nbytes, True, False)


def test_the_wide_path_leaves_out_the_other_way_of_its_branch() -> None:
    code = listed("""
        S2R R2, SR_TID.X
        LDG.E R9, desc[UR8][R2.64]
        @P0 BRA `(.L_x_0)
        LDG.E.128 R4, desc[UR8][R2.64]
        BRA `(.L_x_1)
        .L_x_0:
        @P1 LDG.E.U16 R8, desc[UR8][R2.64]
        .L_x_1:
        STG.E.64 desc[UR8][R2.64], R8
        EXIT
    """)
    assert code.widths("load", code.wide_path) == {4: 1, 16: 1}
    assert code.widths("store", code.wide_path) == {8: 1}


@pytest.mark.parametrize(("line", "text"), [("BRX R2 -0x10", "computed jump"), ("UBLKCP [UR4], [UR6], UR8", "in bulk")])
def test_what_cannot_be_read_is_refused(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _ = listed(f"{line}\nEXIT").accesses, listed(f"{line}\nEXIT").loops


@pytest.mark.parametrize(
    ("lines", "text"),
    [("MUFU.TANH R0, R1", "MUFU.TANH"), ("MUFU.RSQ R0, R1", "1 MUFU.RSQ for 0"),
     ("MUFU.RCP R0, R1", "1 MUFU.RCP for 0"), ("EXIT\n_Z6helperf:\nMUFU.RCP R0, R1", "_Z6helperf")],
)  # fmt: skip
def test_approximations_are_named(lines: str, text: str) -> None:
    assert any(text in problem for problem in listed(f"{lines}\nEXIT").approximate())


def test_seeds_of_correctly_rounded_results_are_no_approximations() -> None:
    code = listed("""
        MUFU.RCP R0, R1
        FCHK P0, R1, R2
        I2F.U32.RP R3, R4
        MUFU.RCP R3, R3
        ISETP.GT.U32.AND P0, PT, R20, 0x727fffff, PT
        MUFU.RSQ R5, R6
        ISETP.GT.U32.AND P0, PT, R20, 0x1ffffff, PT
        MUFU.RCP R7, R8
        EXIT
        $__internal_0_$__cuda_sm20_sqrt_rn_f32_slowpath:
        MUFU.RSQ R5, R6
        RET.REL.NODEC R4
    """)
    assert code.approximate() == []


@pytest.mark.parametrize(
    ("line", "is_fused"),
    [("FFMA R0, R1, R2, R3", True), ("DFMA R0, R2, R4, R6", True), ("FFMA2 R0, R2.F32x2.HI_LO, R4.F32, R6.F32", True),
     ("HFMA2.BF16_V2 R0, R1, R2, R3", True), ("HFMA2.MMA R0, -RZ, RZ, 0, 1.5", False), ("FFMA R0, RZ, R3, R5", False),
     ("HFMA2.BF16_V2 R0, -RZ.H0_H0, RZ.H0_H0, |R16|", False), ("IMAD R0, R1, R2, R3", False)],
)  # fmt: skip
def test_fusions_are_told_from_constants(line: str, is_fused: bool) -> None:
    assert bool(listed(f"{line}\nEXIT").fused()) == is_fused


def test_cycles_of_random_graphs() -> None:
    generator = random.Random(0)
    for _ in range(300):
        size = generator.randint(1, 12)
        graph = [[generator.randrange(size) for _ in range(generator.randint(0, 2))] for _ in range(size)]
        expected = {
            node for node in range(size) if any(node in sass.reached(graph, following) for following in graph[node])
        }
        assert sass.on_cycles(graph) == expected, graph
        for part in sass.cycles(graph):
            assert all(part <= sass.reached(graph, node) for node in part), graph
            needed = set()
            for node in part:
                others = [
                    [n for n in graph[m] if n in part - {node}] if m in part - {node} else [] for m in range(size)
                ]
                needed |= set() if sass.on_cycles(others) else {node}
            assert sass.on_every_cycle(part, graph) == needed, graph


def test_accesses_of_a_loop_are_told_from_those_it_may_leave_out() -> None:
    code = listed("""
        LDG.E R9, desc[UR4][R2.64]
        .L_x_0:
        LDG.E.128 R4, desc[UR4][R2.64]
        @P1 LDG.E R8, desc[UR4][R2.64]
        @P2 BRA `(.L_x_1)
        STG.E.64 desc[UR4][R2.64], R4
        .L_x_1:
        @P3 BRA `(.L_x_2)
        STG.E.U16 desc[UR4][R2.64], R4
        @!P0 BRA `(.L_x_0)
        EXIT
        .L_x_2:
        STG.E.U8 desc[UR4][R2.64], R4
        EXIT
    """)
    (loop,) = code.loop_traffic
    assert loop == {("load", 16, True): 1, ("load", 4, False): 1, ("store", 8, False): 1, ("store", 2, True): 1}
    assert code.other_traffic == {("load", 4, False): 1, ("store", 1, False): 1}


def test_a_call_into_the_kernel_itself_is_a_jump() -> None:
    """How the assembler may leave a loop on sm_80; what is before the loop is not called from it."""
    code = listed("""
        DMUL R0, R2, R4
        .L_x_0:
        DFMA R0, R2, R4, R6
        @P0 CALL.REL.NOINC `(.L_x_1)
        BRA `(.L_x_0)
        .L_x_1:
        DADD R0, R2, R4
        EXIT
    """)
    assert in_loops(code) == ["DFMA", "CALL.REL.NOINC", "BRA"]
    assert code.successors[2] == (4, 3)


@pytest.mark.parametrize(
    ("ptx", "is_exact"),
    [("div.rn.f32 %r1, %r2, %r3;", True), ("div.full.f32 %r1, %r2, %r3;", False), ("rcp.rn.f32 %r1, %r2;", True),
     ("rsqrt.approx.f32 %r1, %r2;", False), ("mad.lo.s32 %r1, %r2, %r3, %r4;", True), ("add.ftz.f32 %r1, %r2;", False),
     ("@%p1 fma.rn.f64 %rd1, %rd2, %rd3, %rd4;", False), ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", False),
     ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", False), ("cvt.rn.bf16.f32 %rs1, %r2;", True)],
)  # fmt: skip
def test_what_ptx_asks_for(ptx: str, is_exact: bool) -> None:
    assert (not inexact_operations(f"\t{ptx}\n")) == is_exact


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [(80, 256, 32, 0, 1.0), (80, 256, 33, 0, 0.75), (90, 256, 40, 0, 0.75), (90, 256, 64, 0, 0.5),
     (90, 256, 65, 0, 0.375), (100, 128, 80, 0, 0.375), (90, 256, 255, 0, 0.125), (90, 32, 16, 0, 0.5),
     (80, 256, 16, 48 * 1024, 0.375), (90, 256, 16, 48 * 1024, 0.5), (90, 1024, 64, 0, 0.5),
     (90, 32, 80, 0, 0.375)],
)  # fmt: skip
def test_occupancy(arch: int, threads: int, registers: int, shared: int, expected: float) -> None:
    code = Code("kernel", arch, registers, 0, 0, 0, ())
    assert occupancy(code, threads, shared) == expected


# ---- objects ---------------------------------------------------------------------------------------------------------

SOURCE = """
template <class T> struct Table { T* data[4]; long long numel[4]; };

template <class T> __global__ void scale(const __grid_constant__ Table<T> table, float factor, int which) {
  __shared__ float shared[64];
  T* data = table.data[which];
  if (threadIdx.x < 64) shared[threadIdx.x] = factor;
  __syncthreads();
#pragma unroll 1
  for (long long i = threadIdx.x; i < table.numel[which] / 4; i += 256) {
    float4 v = reinterpret_cast<float4*>(data)[i];
    v.x = __fdiv_rn(v.x, shared[3]);
    v.y = __fsqrt_rn(v.y);
    v.z = __frcp_rn(v.z);
    v.w = __fmul_rn(v.w, shared[5]);
    reinterpret_cast<float4*>(data)[i] = v;
  }
}
template __global__ void scale<float>(const __grid_constant__ Table<float>, float, int);

__global__ void indexed(const int* in, int* out) {
  int values[64];
  for (int i = 0; i < 64; i++) values[in[i] & 63] = i;
  out[threadIdx.x] = values[in[threadIdx.x] & 63];
}

__global__ void summed(const double* in, double* out, float scale, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += in[i];
  out[0] = __fdividef(scale, 3.0f + scale) + sum;
}
"""
SCALE = "void scale<float>(Table<float>, float, int)"
ARCHITECTURES = (80, 90, 100)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An object with three kernels for three architectures."""
    if shutil.which("nvcc") is None or gpu_code.tool("cuobjdump") is None:
        pytest.skip("nvcc or cuobjdump is not installed: the CUDA toolkit brings both, triton the latter")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "kernels.cu").write_text(SOURCE)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    command = ["nvcc", "-O3", "-fmad=false", *targets, "-Xcompiler", "-fPIC", "-c", "kernels.cu", "-o", "kernels.o"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return folder / "kernels.o"


def test_an_object_holds_each_kernel_for_each_architecture(built: Path) -> None:
    codes = read_object(built)
    names = (SCALE, "indexed(int const*, int*)", "summed(double const*, double*, float, int)")
    assert set(codes) == {(arch, name) for arch in ARCHITECTURES for name in names}
    for arch in ARCHITECTURES:
        scale, indexed, summed = (codes[arch, name] for name in names)
        assert scale.arch == arch
        assert 0 < scale.registers <= 64
        for kind in ("load", "store"):
            assert scale.widths(kind, scale.loops) == {16: 1}
            assert scale.widths(kind, scale.wide_path) == {}
        assert scale.approximate() == scale.fused() == []
        assert not scale.fp64(in_loop=True)
        assert (scale.spills, scale.stack) == (0, 0)
        assert indexed.stack == 256
        assert indexed.spills > 0
        assert any(opcode.startswith("DADD") for opcode in summed.fp64(in_loop=True))
        assert summed.approximate() == ["1 MUFU.RCP for 0 correctly rounded results"]
        # The system's share of 1 KiB is told with the kernel's own 256 bytes from sm_90 on, and counted once.
        assert scale.static_shared == 256 + (1024 if arch >= 90 else 0)
        bare = Code("kernel", arch, 16, 0, scale.static_shared, 0, ())
        assert occupancy(bare, 32, 31 * 1024 - 256) == (5 if arch == 80 else 7) / 64


def test_a_library_is_read_like_its_objects(built: Path, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    subprocess.run(["g++", "-shared", "-Wl,--unresolved-symbols=ignore-all", built, "-o", library], check=True)
    assert read_object(library) == read_object(built)


def test_what_holds_no_kernels_is_refused(tmp_path: Path) -> None:
    if gpu_code.tool("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed: it comes with triton")
    with pytest.raises((ValueError, RuntimeError), match=r"no machine code|failed"):
        read_object(Path(sass.__file__))
