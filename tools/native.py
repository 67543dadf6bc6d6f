"""Compiles and links the native code: compilers, flags, sources of the op library, and ninja where it is found.

``setup.py`` builds what is shipped with it; the tests build the CUDA kernels' twins.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# No -march=native: the library chooses by CPUID at run time. No contraction: an fma where the source says multiply and
# add would give other bits on other CPUs.
COMMON_FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
# One translation unit of each primitive for each instruction set. AVX-512 at full width: the loops wait for memory.
X86_FLAGS = {
    "isa_default": [],
    "isa_avx2": ["-march=x86-64-v3"],
    "isa_avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
PRIMITIVES = ["sharded_adam", "cast_copy", "grad_norm"]
SANITIZE_FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

# A register that has to be spilled to memory is an error: kernels are written to fit.
NVCC_FLAGS = [
    *("-std=c++20", "-O3", "--fmad=false", "-Xptxas", "-warn-spills,-Werror", "-Xfatbin", "-compress-all"),
    *("-Xcompiler", "-fPIC,-g0,-Wall,-Wextra,-Wno-unknown-pragmas,-fvisibility=hidden"),
]
# Machine code for these, and PTX of the last one for GPUs to come.
CUDA_ARCHITECTURES = ("80", "90", "100")
# Kernel parameters of 32,764 bytes came with 12.1.
OLDEST_NVCC = (12, 1)


@dataclass(frozen=True)
class Compile:
    """One object file: its source, the flags beyond the common ones, and a tag that makes its name unique."""

    source: Path
    flags: tuple[str, ...] = ()
    tag: str = ""
    nvcc: bool = False


def is_x86() -> bool:
    return os.uname().machine in ("x86_64", "amd64")


def find_compiler() -> str | None:
    wanted = os.environ.get("CXX", "c++")
    return shutil.which(shlex.split(wanted)[0]) and wanted


def find_ninja() -> str | None:
    beside = Path(sys.executable).with_name("ninja")
    return str(beside) if beside.exists() else shutil.which("ninja")


def torch_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags for torch's stable ABI as of 2.10, which torch 2.11 and later keep."""
    import torch

    package = Path(torch.__file__).parent
    include = ["-isystem", str(package / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    library = str(package / "lib")
    return include, [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu"]


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """nvcc, the architectures that it and the kernels know, and where its runtime library lies."""

    path: str
    version: tuple[int, int]
    architectures: tuple[str, ...]
    libraries: tuple[str, ...]

    def flags(self) -> list[str]:
        code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.architectures]
        newest = self.architectures[-1]
        return [*NVCC_FLAGS, *code, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


@functools.cache
def find_nvcc() -> Nvcc | None:
    """Nvcc of ``NVCC``, ``CUDA_HOME`` or the path, if it can build the kernels; None says why on stderr.

    ``SHARDOPS_CUDA=0`` builds without.
    """
    home = os.environ.get("CUDA_HOME")
    wanted = os.environ.get("NVCC") or (home and str(Path(home) / "bin" / "nvcc")) or "nvcc"
    path = shutil.which(wanted)
    if path is None or os.environ.get("SHARDOPS_CUDA") == "0":
        return None

    def ask(*arguments: str) -> str:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    try:
        release = ask("--version").split("release ")[1].split(",")[0]
        version = (int(release.split(".")[0]), int(release.split(".")[1]))
        if version < OLDEST_NVCC:
            needed = ".".join(map(str, OLDEST_NVCC))
            print(f"shardops: nvcc is {release}, CUDA kernels need {needed}: building without", file=sys.stderr)
            return None
        known = ask("--list-gpu-code").split()
        top = next(line.split("=", 1)[1] for line in ask("--dryrun", "-x", "cu", "-c", os.devnull).splitlines()
                   if line.startswith("#$ TOP="))  # fmt: skip
    except (subprocess.CalledProcessError, IndexError, StopIteration, OSError) as error:
        print(f"shardops: {path} does not work ({error}): building without CUDA kernels", file=sys.stderr)
        return None
    folders = [Path(top) / folder for folder in ("lib64", "lib", f"targets/{os.uname().machine}-linux/lib")]
    libraries = tuple(str(folder.resolve()) for folder in folders if (folder / "libcudart_static.a").exists())
    if not libraries:
        print(f"shardops: no libcudart_static.a below {top}: building without CUDA kernels", file=sys.stderr)
        return None
    architectures = tuple(a for a in CUDA_ARCHITECTURES if f"sm_{a}" in known)
    return Nvcc(path, version, architectures, libraries)


def cuda_kernels(*, nvcc: bool, flags: tuple[str, ...] = (), tag: str = "") -> list[Compile]:
    """The kernels' objects: for a GPU, or with other flags for the twins."""
    objects = [
        Compile(CSRC / "cuda" / f"{name}.cu", flags, f".cuda{tag}", nvcc)
        for name in ("sharded_adam_blocks", "cast_copy", "grad_norm", "adam_scalars", "device")
    ]
    for moment in ("float", "Bf16"):
        source = CSRC / "cuda" / "sharded_adam.cu"
        objects.append(Compile(source, (f"-DSHARDOPS_MOMENT={moment}", *flags), f".{moment}.cuda{tag}", nvcc))
    return objects


def cuda_glue(flags: tuple[str, ...], tag: str = "") -> list[Compile]:
    return [Compile(CSRC / f"{name}.cpp", flags, tag) for name in ("cuda_ops", "cuda_sharded_adam_op")]


# ---- the op library --------------------------------------------------------------------------------------------------


def shared_checks(flags: tuple[str, ...], tag: str = "") -> list[Compile]:
    """What the ops of all devices check with."""
    return [Compile(CSRC / f"{name}.cpp", flags, tag) for name in ("adam_arguments", "copy_arguments")]


def op_library_objects(torch_include: list[str], nvcc: Nvcc | None) -> list[Compile]:
    flags = tuple(torch_include)
    isas = X86_FLAGS if is_x86() else {"isa_default": []}
    objects = [
        Compile(CSRC / "ops.cpp", flags),
        Compile(CSRC / "sharded_adam_op.cpp", flags),
        *shared_checks(flags),
        Compile(CSRC / "cpu" / "dispatch.cpp"),
        Compile(CSRC / "cpu" / "capability.cpp"),
    ]
    for primitive in PRIMITIVES:
        for isa, isa_flags in isas.items():
            source = CSRC / "cpu" / f"{primitive}.cpp"
            objects.append(Compile(source, (f"-DSHARDOPS_ISA={isa}", *isa_flags), f".{isa}"))
    if nvcc is not None:
        # The slowest first, so that they do not run alone at the end.
        objects = [*cuda_kernels(nvcc=True), *cuda_glue(flags), *objects]
    return objects


# ---- building --------------------------------------------------------------------------------------------------------


def build_shared_object(
    directory: Path, target: Path, objects: list[Compile], flags: list[str], link: list[str]
) -> None:
    """Compiles the objects into directory and links them; skips what is up to date when ninja is there to tell."""
    compiler = shlex.split(str(find_compiler()))
    nvcc = find_nvcc() if any(o.nvcc for o in objects) else None

    def command(o: Compile, output: Path) -> list[str]:
        if o.nvcc:
            assert nvcc is not None
            return [nvcc.path, *nvcc.flags(), *o.flags, "-c", str(o.source), "-o", str(output)]
        language = ["-x", "c++"] if o.source.suffix == ".cu" else []
        return [*compiler, *flags, *o.flags, *language, "-c", str(o.source), "-o", str(output)]

    directory.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    outputs = [directory / f"{o.source.stem}{o.tag}.{target.stem.split('.')[0]}.o" for o in objects]
    cuda = [*(f"-L{folder}" for folder in nvcc.libraries), "-lcudart_static", "-lrt"] if nvcc is not None else []
    link_command = [*compiler, "-shared", "-o", str(target), *map(str, outputs), *link, *cuda, "-lpthread", "-ldl"]
    if nvcc is not None:
        link_command.append("-Wl,--exclude-libs,ALL")
    commands = [command(o, output) for o, output in zip(objects, outputs, strict=True)]
    ninja = find_ninja()
    if ninja is None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(subprocess.check_call, commands):
                pass
        subprocess.check_call(link_command)
        return

    def escaped(text: str) -> str:
        return text.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")

    lines = [f"builddir = {escaped(str(directory))}"]  # where ninja keeps its log
    lines += ["rule compile", "  command = $run -MMD -MF $out.d", "  depfile = $out.d", "  deps = gcc"]
    lines += ["rule link", "  command = $run"]
    for o, output, run in zip(objects, outputs, commands, strict=True):
        lines += [f"build {escaped(str(output))}: compile {escaped(str(o.source))}"]
        lines += [f"  run = {shlex.join(run).replace('$', '$$')}"]
    lines += [f"build {escaped(str(target))}: link {' '.join(escaped(str(o)) for o in outputs)}"]
    lines += [f"  run = {shlex.join(link_command).replace('$', '$$')}"]
    build_file = directory / f"{target.stem.split('.')[0]}.ninja"
    build_file.write_text("\n".join(lines) + "\n")
    subprocess.check_call([ninja, "--quiet", "-f", str(build_file)])
