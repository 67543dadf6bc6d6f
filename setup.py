"""Builds the op library (C++ and CUDA on torch's stable ABI, no Python ABI) and the small pybind11 host module.

Everything else about the package is in pyproject.toml. Without a C++ compiler the package is installed without both,
without nvcc the library has no CUDA kernels: it still imports, and ``shardops.backends()`` says what is missing.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import native
from native import CSRC, Compile, find_compiler


def host_module_objects(torch_include: list[str], build_info: dict[str, str]) -> list[Compile]:
    # torch carries pybind11's headers, so nothing has to be fetched for them.
    python_include = ("-isystem", sysconfig.get_paths()["include"])
    info = json.dumps(json.dumps(build_info))
    return [
        Compile(CSRC / "host_module.cpp", (*torch_include, *python_include, f"-DSHARDOPS_BUILD_INFO={info}")),
        Compile(CSRC / "cpu" / "capability.cpp", (), ".host"),
    ]


class BuildExtension(build_ext):
    """Compiles with the flags of tools/native.py, in parallel, through ninja where it is found."""

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
        nvcc = None if sanitize else native.find_nvcc()  # sanitizers see nothing of a GPU
        include, link = native.torch_flags()
        flags = [*native.COMMON_FLAGS, *(native.SANITIZE_FLAGS if sanitize else [])]
        if ext.name == "shardops._ops":
            objects = native.op_library_objects(include, nvcc)
        else:
            compiler_version = subprocess.run(
                [*shlex.split(str(find_compiler())), "--version"], capture_output=True, text=True, check=True
            ).stdout.splitlines()[0]
            build_info = {"compiler": compiler_version, "flags": " ".join(flags)}
            if nvcc is not None:
                build_info["nvcc"] = ".".join(map(str, nvcc.version))
                build_info["cuda_architectures"] = " ".join(f"sm_{a}" for a in nvcc.architectures)
            objects = host_module_objects(include, build_info)
            link = []
        if sanitize:
            link = [*link, "-fsanitize=address,undefined"]
        target = Path(self.get_ext_fullpath(ext.name))
        directory = Path(self.build_temp).resolve() / ("sanitize" if sanitize else "release")
        native.build_shared_object(directory, target.resolve(), objects, flags, link)


setup(
    ext_modules=[Extension("shardops._ops", []), Extension("shardops._host", [])],
    cmdclass={"build_ext": BuildExtension},
)
