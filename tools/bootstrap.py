"""Sets up the virtual environment for `make`: what requirements-dev.txt names, and shardops itself, built in place.

Where the interpreter that runs this has torch >= 2.11 already (a GPU machine, perhaps without a network), the
environment sees it and no other torch is fetched; other packages that cannot be had are named and done without.
With ``--only`` it sets up a second environment, for tests with other versions: the source tree is used as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements-dev.txt"
MINIMUM_TORCH = (2, 11)
# Without these shardops cannot be built or imported; all others only make tools and niceties work.
NEEDED = {"torch", "numpy", "setuptools"}
# They belong to the torch that is there.
WITH_TORCH = {"torch", "triton"}

# Prints the requirements that the environment does not satisfy, one a line; runs inside it.
MISSING = """
import sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
for line in sys.stdin:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        continue
    try:
        if requirement.specifier.contains(version(requirement.name), prereleases=True):
            continue
    except PackageNotFoundError:
        pass
    print(str(requirement).split(";")[0].strip())
"""


def torch_version(python: str) -> tuple[int, ...] | None:
    """The version of torch that an interpreter imports, None if it has none."""
    probe = "import torch; print(torch.__version__)"
    result = subprocess.run([python, "-c", probe], capture_output=True, text=True, cwd="/")
    if result.returncode != 0:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", result.stdout)[:2])


def requirements() -> list[str]:
    lines = (line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


def missing(python: str, wanted: list[str]) -> list[str]:
    command = [python, "-c", MISSING]
    result = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, check=True)
    return result.stdout.split("\n")[:-1]


def install(python: str, wanted: list[str]) -> bool:
    return subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted]).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these packages, and shardops not installed")
    parser.add_argument("--override", nargs="+", default=[], metavar="REQUIREMENT", help="instead of what is pinned")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment lies (default: .venv)")
    arguments = parser.parse_args()
    directory = arguments.venv.resolve()
    python = str(directory / "bin" / "python")

    present = torch_version(sys.executable)
    use_present = present is not None and present >= MINIMUM_TORCH
    if not Path(python).exists():
        print(f"creating {directory.name}" + (" around the torch that is here" if use_present else ""))
        venv.create(directory, with_pip=True, system_site_packages=use_present)

    wanted = requirements()
    if use_present:
        wanted = [line for line in wanted if name_of(line) not in WITH_TORCH]
    if arguments.only:
        wanted = [line for line in wanted if name_of(line) in arguments.only]
    overridden = {name_of(line) for line in arguments.override}
    wanted = [line for line in wanted if name_of(line) not in overridden] + arguments.override
    absent = missing(python, wanted)
    if absent and not install(python, absent):
        print("not all could be installed together; trying one by one", file=sys.stderr)
        failed = [line for line in absent if not install(python, [line])]
        # Another version than the pinned one serves as well, if it is there; not in place of one asked for by name.
        lost = [line for line in failed if name_of(line) in overridden or missing(python, [name_of(line)])]
        if failed:
            print(f"not installed: {', '.join(failed)}; going on without these versions", file=sys.stderr)
        if any(name_of(line) in NEEDED | overridden for line in lost):
            print(f"cannot go on without {', '.join(lost)}", file=sys.stderr)
            return 1

    if arguments.only:
        return 0
    build = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--editable", str(ROOT)]
    return subprocess.run([python, *build], env={**os.environ, "PIP_NO_INDEX": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
