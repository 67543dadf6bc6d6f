"""The CUDA kernels of the op library as they are shipped: which there are, their code, and what each of them has to be.

``test_cuda_code.py`` proves it of the library; ``test_cuda_code_mutations.py`` shows that each check can fail.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gpu_code
import sass
from gpu_checks import Demands
from gpu_code import Code, Traffic

import shardops

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import native

LIBRARY = Path(shardops.__file__).parent / "_ops.so"
ARCHITECTURES = tuple(map(int, native.CUDA_ARCHITECTURES))
QUANTISED = 128  # elements of a block of 8-bit codes

# ---- which kernels there are -----------------------------------------------------------------------------------------

MASTERS = ("param", "split", "split24", "float32", "nearest", "stochastic")  # the enumerators of Master, in order
SIZES = {"float": 4, "Bf16": 2, "Fp16": 2, "unsigned int": 4, "unsigned short": 2}
REMAINDERS = {"split": 2, "split24": 1}


@dataclass(frozen=True)
class Kernel:
    """A kernel of csrc/cuda by its function and template arguments, written as C++ does but for Master and bool."""

    function: str
    arguments: tuple[str, ...]
    moment: str = ""  # of update_elements: what its translation unit was compiled for

    def __str__(self) -> str:
        return f"{self.function}<{', '.join((*self.arguments, *([self.moment] if self.moment else [])))}>"

    @property
    def is_update(self) -> bool:
        return self.function in ("update_elements", "update_blocks")

    @property
    def general(self) -> bool:
        return "general" in self.arguments

    @property
    def wide(self) -> bool:
        return "scalar" not in self.arguments


def _updates() -> Iterable[Kernel]:
    """As adam_kinds.cuh chooses them."""
    storages = [("param", "float"), ("nearest", "Fp16")]
    storages += [(master, "Bf16") for master in ("split", "split24", "stochastic", "nearest")]
    for (master, param), grad, mode in itertools.product(storages, ("float", "Bf16", "Fp16"), ("lean", "general")):
        if grad == "Fp16" and mode == "lean":
            continue  # comes with a loss scale
        for moment in ("float", "Bf16"):
            yield Kernel("update_elements", (master, param, grad, mode), moment)
        for access in ("wide", "scalar") if mode == "general" else ("wide",):
            yield Kernel("update_blocks", (master, param, grad, mode, access))


def _all_kernels() -> Iterable[Kernel]:
    yield from _updates()
    yield Kernel("make_scalars", ())
    floats, parameters = ("float", "Bf16", "Fp16"), ("large", "small")
    for target, source, size in itertools.product(floats, floats, parameters):
        yield Kernel("copy_kernel", (target, source, "scaled", size))
        if target != source:
            yield Kernel("copy_kernel", (target, source, "as it is", size))
    for bits, size in itertools.product(("unsigned int", "unsigned short"), parameters):
        yield Kernel("copy_kernel", (bits, bits, "as it is", size))
    for source, norm, size in itertools.product(floats, ("1", "2", "inf"), parameters):
        yield Kernel("norm_blocks_kernel", (source, norm, size))
    yield from (Kernel("combine_kernel", (norm,)) for norm in ("2", "inf"))


KERNELS = frozenset(_all_kernels())


def parse_name(demangled: str, moment: str = "") -> Kernel:
    """The kernel that a demangler's name means."""
    plain = re.sub(r"shardops::|\(anonymous namespace\)::|_GLOBAL__N_\w+::|^void |\(bool\)", "", demangled)
    found = re.match(r"(\w+)(?:<(.*)>)?\(", plain)
    if found is None:
        raise ValueError(f"{demangled!r} is no kernel's name: a function with its parameters")
    function, arguments = found[1], found[2].split(", ") if found[2] else []
    for index, text in enumerate(arguments):
        text = re.sub(r"^\(Master\)(\d)$", lambda match: MASTERS[int(match[1])], text)
        text = re.sub(r"^\(Norm\)(\d)$", lambda match: ("1", "2", "inf")[int(match[1])], text)
        text = re.sub(r"^\w+Launch<(\d+)>\s*$", lambda match: "large" if int(match[1]) > 4096 else "small", text)
        arguments[index] = text
    flags = {"copy_kernel": {2: ("as it is", "scaled")}, "update_elements": {3: ("lean", "general")}}
    flags["update_blocks"] = {3: ("lean", "general"), 4: ("scalar", "wide")}
    for index, names in flags.get(function, {}).items():
        arguments[index] = names[arguments[index] in ("true", "1")]
    return Kernel(function, tuple(arguments), moment if function == "update_elements" else "")


# ---- the library -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """What is in a library: every kernel's PTX, and resources and machine code for each architecture."""

    kernels: dict[str, Kernel]  # by mangled name
    ptx: dict[Kernel, str]
    ptx_architectures: frozenset[int]
    cubins: tuple[tuple[int, Path], ...]
    folder: tempfile.TemporaryDirectory[str]

    def resources(self) -> dict[tuple[int, Kernel], tuple[int, int, int, int]]:
        """Registers, stack, static shared and local memory of each kernel; costs much less than its code."""
        return {
            (arch, self.kernels.get(name, Kernel(name, ()))): numbers
            for arch, cubin in self.cubins
            for name, numbers in gpu_code.read_resources(cubin).items()
        }

    def code(self, arch: int) -> dict[Kernel, Code]:
        """The machine code for one architecture; seconds of disassembling."""
        codes = (code for number, cubin in self.cubins if number == arch for code in gpu_code.read_cubin(cubin).items())
        return {self.kernels.get(name, Kernel(name, ())): code for (_, name), code in codes}


def entries(ptx: str) -> dict[str, str]:
    """The kernels of a PTX file, by mangled name."""
    parts = re.split(r"^(?:\.visible |\.weak )?\.entry (\w+)\(", ptx, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def name_kernels(texts: dict[str, str]) -> dict[str, Kernel]:
    """The kernels of PTX, by mangled name. Of those compiled twice under one name, one has 16-bit moments.

    That is seen in the plainest of them, whose other arrays are all fp32; were it seen wrongly, the demands would fail.
    """
    names = gpu_code.demangled(texts)
    plainest = Kernel("update_elements", ("param", "float", "float", "lean"))
    moments = {
        mangled.split("update_elements")[0]: "Bf16" if re.search(r"\bst\.global\S*16\s", text) else "float"
        for mangled, text in texts.items()
        if parse_name(names[mangled]) == plainest
    }
    return {m: parse_name(name, moments.get(m.split("update_elements")[0], "")) for m, name in names.items()}


@functools.cache
def library(path: Path = LIBRARY) -> Library:
    """The op library, read once a process."""
    folder = tempfile.TemporaryDirectory()
    files = [file.read_text() for file in gpu_code.extract(path, Path(folder.name), "ptx")]
    texts = {name: text for file in files for name, text in entries(file).items()}
    kernels = name_kernels(texts)
    cubins = [(int(re.findall(r"sm_(\d+)", p.name)[-1]), p) for p in gpu_code.extract(path, Path(folder.name))]
    return Library(
        kernels,
        {kernels[name]: text for name, text in texts.items()},
        frozenset(int(number) for file in files for number in re.findall(r"^\.target sm_(\d+)", file, re.M)),
        tuple(cubins),
        folder,
    )


# ---- single kernels --------------------------------------------------------------------------------------------------

SOURCES = {"update_elements": "sharded_adam", "update_blocks": "sharded_adam_blocks", "copy_kernel": "cast_copy"}
Change = tuple[str, str, str]  # a file of csrc, what is in it, and what is put there


def compile_kernel(
    kernel: Kernel, changes: Iterable[Change] = (), flags: Iterable[str] = (), arch: int = 90
) -> tuple[Code, str]:
    """One kernel alone, as it is shipped but for changes and flags: its machine code and its PTX. Takes a second."""
    changes = list(changes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (*native.CSRC.glob("common/*.h"), *native.CSRC.glob("cuda/*")):
            text, relative = source.read_text(), source.relative_to(native.CSRC)
            for _, old, new in (change for change in changes if change[0] == str(relative)):
                if text.count(old) != 1:
                    raise ValueError(f"{old!r} is in {relative} {text.count(old)} times, should be once")
                text = text.replace(old, new)
            (folder / relative).parent.mkdir(exist_ok=True)
            (folder / relative).write_text(text)
        path = folder / "cuda" / f"{SOURCES[kernel.function]}.cu"
        # What launches the kernels would instantiate all of them.
        head = re.split(r"^(?:struct Launcher|std::vector<CopySegment> merged)", path.read_text(), flags=re.M)[0]
        path.write_text(f"{head}template __global__ void {_spelled(kernel)};\n}}\n}}\n")
        if kernel.moment:
            flags = [*flags, f"-DSHARDOPS_MOMENT={kernel.moment}"]
        return compile_alone(path, flags, arch)


def _spelled(kernel: Kernel) -> str:
    """As an explicit instantiation has it."""
    if kernel.function == "copy_kernel":
        launch = f"CopyLaunch<k{kernel.arguments[3].capitalize()}Parameters>"
        scaled = "true" if kernel.arguments[2] == "scaled" else "false"
        arguments = ", ".join((*kernel.arguments[:2], scaled, launch))
    else:
        launch, (master, *types), modes = "AdamLaunch", kernel.arguments[:3], kernel.arguments[3:]
        flags = ("true" if mode in ("general", "wide") else "false" for mode in modes)
        arguments = ", ".join((f"Master::k{master.capitalize()}", *types, *flags))
    return f"{kernel.function}<{arguments}>(const __grid_constant__ {launch})"


def compile_alone(path: Path, flags: Iterable[str], arch: int = 90) -> tuple[Code, str]:
    """The machine code and the PTX of the one kernel in a file."""
    nvcc = native.find_nvcc()
    if nvcc is None:
        raise RuntimeError("there is no nvcc: put one of CUDA 12.1 or later in PATH, or set CUDA_HOME")
    target = path.with_suffix(".fatbin")
    code = f"-gencode=arch=compute_{arch},code=[sm_{arch},compute_{arch}]"
    command = [nvcc.path, "-std=c++20", "-O3", "--fmad=false", "-w", code, *flags, "-fatbin", path, "-o", target]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc refuses {path.name}: {done.stderr.strip()}")
    found = library(target)
    ((_, machine),) = found.code(arch).items()
    ((_, ptx),) = found.ptx.items()
    return machine, ptx


def executed_a_round(code: Code) -> frozenset[int]:
    """Instructions of the one loop with accesses that are executed where a warp does not part and nothing traps."""
    successors = [
        () if i.base == "BPT" else following[-1:] if i.opcode.startswith("BRA.DIV") else following
        for i, following in zip(code.instructions, code.successors, strict=True)
    ]
    (found,) = (cycle for cycle in sass.cycles(successors) if code.traffic(cycle, ()))
    return found


# ---- what each has to be ---------------------------------------------------------------------------------------------

THREADS = {"update_blocks": 128, "norm_blocks_kernel": 64, "make_scalars": 64}  # of a block; others have 256
# Of 8-bit codes: quotients and roots whose operands are in a known range. Each element has one of both, a block's two
# scales have a quotient.
IN_RANGE = (10, 8)

_BLOCKS = "eight elements a thread, the extremes of their block and their codes in registers from load to store"
_ROWS = "a thread's 64 elements in registers, so that a block is read once for its largest magnitude and its sum"
_EIGHT = "eight elements a thread, without which 16-bit storages are read by half the width, and every option"
# The kernels that may fill less than half of a multiprocessor's warps: how many they have to, and why.
LOW_OCCUPANCY = {
    "blocks, lean, wide": (0.375, _BLOCKS),
    "blocks, general, wide": (0.3125, f"{_BLOCKS}, and every option"),
    "blocks, general, scalar": (0.25, f"{_BLOCKS}, and an address and a bound for each of the eight"),
    "elements, general, 16 bits": (0.375, _EIGHT),
    "norm of fp32": (0.375, _ROWS),
}


def low_occupancy(kernel: Kernel) -> str:
    """The kernel's key in LOW_OCCUPANCY, if it may have one."""
    if kernel.function == "update_blocks":
        return f"blocks, {', '.join(kernel.arguments[3:])}"
    if kernel.function == "update_elements" and kernel.general and elements_a_thread(kernel) == 8:
        return "elements, general, 16 bits"
    return "norm of fp32" if kernel.function == "norm_blocks_kernel" and kernel.arguments[0] == "float" else ""


def elements_a_thread(kernel: Kernel) -> int:
    """Of an update on its wide path: 16 bytes of the widest storage, of 16-bit ones as many as of fp32 twice."""
    return 4 if kernel.moment == "float" or (kernel.moment and kernel.arguments[0] == "param") else 8


def accesses(kind: str, nbytes: int, always: bool = True, number: int = 1) -> Traffic:
    """The widest accesses that move so many bytes of one array, as often as there are such arrays."""
    found: Traffic = Counter({(kind, 16, always): nbytes // 16 * number, (kind, nbytes % 16, always): number})
    return Counter({key: count for key, count in found.items() if key[1] and count})


def update_arrays(kernel: Kernel) -> dict[str, list[int]]:
    """Bytes an element of the arrays that an update loads and stores: always, and under an option."""
    master, param, grad = kernel.arguments[:3]
    state = [SIZES[param], *([REMAINDERS[master]] if master in REMAINDERS else [])]
    state += [SIZES[kernel.moment] if kernel.moment else 1] * 2
    shadows = [4, 2, 2]  # one of three dtypes
    optional = [4, *shadows, *(shadows if master == "param" else [])]  # amsgrad's maximum; a copy for the parameter
    return {
        "load": [SIZES[grad], *state],
        "store": state,
        "load maybe": [4] if kernel.general else [],
        "store maybe": optional if kernel.general else [],
    }


def update_traffic(kernel: Kernel, count: int, *, conditional: str = "") -> Traffic:
    """Of a round with so many elements that lie one after another; conditional: kinds that each round may leave out."""
    found: Traffic = Counter()
    for name, sizes in update_arrays(kernel).items():
        kind = name.split()[0]
        for size in sizes:
            found += accesses(kind, size * count, "maybe" not in name and kind not in conditional)
    return found


def update_loops(kernel: Kernel) -> list[Traffic]:
    """Of its loop over single elements, if it has one, and of the wide one."""
    if kernel.moment:
        return [update_traffic(kernel, count) for count in (1, elements_a_thread(kernel))]
    if kernel.wide:  # a block past the last one is loaded, not stored; its two words are loaded by all threads at once
        words = accesses("load", 8) + accesses("store", 8, False)
        return [update_traffic(kernel, 8, conditional="store") + words]
    one = update_traffic(kernel, 1, conditional="load store")
    words = accesses("load", 4, False, 2) + accesses("store", 4, False, 2)
    return [Counter({key: 8 * number for key, number in one.items()}) + words]


def _copy_traffic(kernel: Kernel, unrolled: tuple[int, int]) -> tuple[list[Traffic], Traffic]:
    """The loops that zero and those that copy, by as many elements as 16 bytes hold or by one; and what is beside them.

    unrolled: how many batches a round of either copy has: with a second one comes a batch that is in no loop.
    """
    target, source = SIZES[kernel.arguments[0]], SIZES[kernel.arguments[1]]
    count = 16 // max(target, source)

    def both(elements: int, number: int) -> Traffic:
        return accesses("load", source * elements, True, number) + accesses("store", target * elements, True, number)

    loops = [accesses("store", target * elements) for elements in (1, count, 1)]
    others = both(1, 2)  # before the first aligned element, and after the last
    for elements, batch, batches in ((count, 4, unrolled[0]), (1, 8, unrolled[1])):
        loops += [both(elements, batch * batches), both(elements, 1)]
        others += both(elements, batch) if batches > 1 else Counter()
    return loops, Counter({(kind, nbytes, False): number for (kind, nbytes, _), number in others.items()})


def demands(kernel: Kernel, code: Code) -> Demands:
    """Counted from the kernel's options; from the code only whether a round of a copy has two of its batches."""
    threads = THREADS.get(kernel.function, 256)
    occupancy = LOW_OCCUPANCY.get(low_occupancy(kernel), (0.5,))[0]
    if kernel.is_update:
        dithered = kernel.moment != "float" or kernel.arguments[0] in ("split24", "stochastic")
        # Scalars of the step, the clip coefficient, found_inf; the step's number; the options' scalars, grad_scale.
        others: Traffic = Counter({("load", 4, False): 8 + dithered + 3 * kernel.general})
        if not kernel.moment:
            return Demands(threads, occupancy=occupancy, in_range=IN_RANGE, loops=update_loops(kernel), others=others)
        return Demands(threads, occupancy=occupancy, loops=update_loops(kernel), others=others)
    if kernel.function == "copy_kernel":
        one = SIZES[kernel.arguments[1]]
        wide = 16 // max(SIZES[kernel.arguments[0]], one) * one
        seen = code.other_traffic
        unrolled = 2 if seen["load", wide, False] else 1, 2 if seen["load", one, False] > 2 else 1
        loops, others = _copy_traffic(kernel, unrolled)
        return Demands(threads, loops=loops, others=others)
    if kernel.function == "norm_blocks_kernel":
        size, norm = SIZES[kernel.arguments[0]], kernel.arguments[1]
        loops = [accesses("load", size, False, 4)] * (
            1 if norm == "inf" else 2
        )  # a tensor's last block, for its bounds
        rows = accesses("load", 4 * size, False, 16) + accesses("load", size, False, 64) + accesses("store", 8, False)
        return Demands(threads, occupancy=occupancy, fp64=True, loops=loops, others=rows)
    if kernel.function == "combine_kernel":
        others = accesses("store", 8, False) + accesses("store", 4, False)
        loops = [accesses("load", 8, False, 16)]
        return Demands(threads, fp64=True, fp64_loops=True, loops=loops, others=others)
    others = accesses("load", 4, False, 3) + accesses("load", 8, False) + accesses("store", 4, False, 11)
    return Demands(threads, fp64=True, fp64_loops=True, loops=[], others=others)


def parameter_bytes(ptx: str) -> int:
    """The size of a kernel's parameters, of whose PTX this is."""
    size = 0
    declarations = r"^\.param (?:\.align (\d+) )?\.[busf](\d+)[^,\n]*? \w+(?:\[(\d+)\])?,?$"
    for align, bits, count in re.findall(declarations, ptx, re.M):
        width = int(bits) // 8
        step = int(align or width)
        size = -(-size // step) * step + width * int(count or 1)
    return size
