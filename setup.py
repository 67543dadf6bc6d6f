"""Builds the op library (C++ on torch's stable ABI, no Python ABI) and the small pybind11 host module.

Everything else about the package is in pyproject.toml. Without a C++ compiler the package is installed without both:
it still imports, and ``shardops.backends()`` says what is missing.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
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


@dataclass(frozen=True)
class Compile:
    """One object file: its source, the flags beyond the common ones, and a tag that makes its name unique."""

    source: Path
    flags: tuple[str, ...]
    tag: str = ""


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


def op_library_objects(torch_include: list[str]) -> list[Compile]:
    isas = X86_FLAGS if is_x86() else {"isa_default": []}
    objects = [
        Compile(CSRC / "ops.cpp", tuple(torch_include)),
        Compile(CSRC / "sharded_adam_op.cpp", tuple(torch_include)),
        Compile(CSRC / "cpu" / "dispatch.cpp", ()),
        Compile(CSRC / "cpu" / "capability.cpp", ()),
    ]
    for primitive in PRIMITIVES:
        for isa, flags in isas.items():
            source = CSRC / "cpu" / f"{primitive}.cpp"
            objects.append(Compile(source, (f"-DSHARDOPS_ISA={isa}", *flags), f".{isa}"))
    return objects


def host_module_objects(torch_include: list[str], build_info: dict[str, str]) -> list[Compile]:
    # torch carries pybind11's headers, so nothing has to be fetched for them.
    python_include = ("-isystem", sysconfig.get_paths()["include"])
    info = json.dumps(json.dumps(build_info))
    return [
        Compile(CSRC / "host_module.cpp", (*torch_include, *python_include, f"-DSHARDOPS_BUILD_INFO={info}")),
        Compile(CSRC / "cpu" / "capability.cpp", (), ".host"),
    ]


class BuildExtension(build_ext):
    """Compiles with the flags above, in parallel, through ninja where it is found."""

    def build_extensions(self) -> None:
        if find_compiler() is None:
            print(
                "shardops: no C++ compiler found (looked for CXX, then c++): installing without the C++ backend.\n"
                "shardops: install one (Debian: apt-get install g++) and reinstall to get it.",
                file=sys.stderr,
            )
            return
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        if name == "_ops":  # loaded by torch.ops.load_library, not imported: no Python ABI in its name
            return str(Path(*package, "_ops.so"))
        return super().get_ext_filename(fullname)

    def get_outputs(self) -> list[str]:
        return [] if find_compiler() is None else super().get_outputs()

    def copy_extensions_to_source(self) -> None:
        if find_compiler() is not None:
            super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        sanitize = os.environ.get("SHARDOPS_SANITIZE") == "1"
        include, link = torch_flags()
        flags = [*COMMON_FLAGS, *(SANITIZE_FLAGS if sanitize else [])]
        if ext.name == "shardops._ops":
            objects = op_library_objects(include)
        else:
            compiler_version = subprocess.run(
                [*shlex.split(str(find_compiler())), "--version"], capture_output=True, text=True, check=True
            ).stdout.splitlines()[0]
            build_info = {"compiler": compiler_version, "flags": " ".join(flags)}
            objects = host_module_objects(include, build_info)
            link = []
        if sanitize:
            link = [*link, "-fsanitize=address,undefined"]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(self.build_temp).resolve() / ("sanitize" if sanitize else "release")
        directory.mkdir(parents=True, exist_ok=True)
        build_shared_object(directory, target.resolve(), objects, flags, link)


def build_shared_object(
    directory: Path, target: Path, objects: list[Compile], flags: list[str], link: list[str]
) -> None:
    """Compiles the objects into directory and links them; skips what is up to date when ninja is there to tell."""
    compiler = shlex.split(str(find_compiler()))
    outputs = [directory / f"{o.source.stem}{o.tag}.{target.stem.split('.')[0]}.o" for o in objects]
    link_command = [*compiler, "-shared", "-o", str(target), *map(str, outputs), *link, "-lpthread", "-ldl"]
    compile_commands = [
        [*compiler, *flags, *o.flags, "-c", str(o.source), "-o", str(output)]
        for o, output in zip(objects, outputs, strict=True)
    ]
    ninja = find_ninja()
    if ninja is None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(subprocess.check_call, compile_commands):
                pass
        subprocess.check_call(link_command)
        return

    def escaped(text: str) -> str:
        return text.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")

    lines = [f"builddir = {escaped(str(directory))}"]  # where ninja keeps its log
    lines += ["rule compile", "  command = $run -MMD -MF $out.d", "  depfile = $out.d", "  deps = gcc"]
    lines += ["rule link", "  command = $run"]
    for o, output, command in zip(objects, outputs, compile_commands, strict=True):
        lines += [f"build {escaped(str(output))}: compile {escaped(str(o.source))}"]
        lines += [f"  run = {shlex.join(command).replace('$', '$$')}"]
    lines += [f"build {escaped(str(target))}: link {' '.join(escaped(str(o)) for o in outputs)}"]
    lines += [f"  run = {shlex.join(link_command).replace('$', '$$')}"]
    build_file = directory / f"{target.stem.split('.')[0]}.ninja"
    build_file.write_text("\n".join(lines) + "\n")
    subprocess.check_call([ninja, "--quiet", "-f", str(build_file)])


setup(
    ext_modules=[Extension("shardops._ops", []), Extension("shardops._host", [])],
    cmdclass={"build_ext": BuildExtension},
)
