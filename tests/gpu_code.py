"""Reads compiled GPU code and tells what a test can prove of it without a GPU: resources, loops, accesses, arithmetic.

NVIDIA machine code is read with the disassembler of triton's wheel (or of a CUDA toolkit), from a cubin as well as from
an object or a library with several architectures in it. What is told holds of the code itself, not of a run.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import sass
from sass import Instruction

# ---- tools -----------------------------------------------------------------------------------------------------------


@functools.cache
def tool(name: str) -> str | None:
    """The path of ``cuobjdump`` or ``nvdisasm``: from triton's wheel, else from PATH; None if there is none."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        if path.exists():
            return str(path)
    return shutil.which(name)


def _run(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    path = tool(name)
    if path is None:
        raise RuntimeError(f"{name} is neither in triton's wheel nor in PATH; pip install triton, or a CUDA toolkit")
    done = subprocess.run([path, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(map(str, arguments))} failed: {done.stderr.strip()}")
    return done.stdout


# ---- one kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """A load, store or atomic operation on global memory."""

    index: int  # of its instruction
    kind: str  # "load", "store" or "atomic"
    nbytes: int  # for one thread
    in_loop: bool
    per_thread: bool  # its address depends on the thread's index; False: all threads of a block use the same one
    predicated: bool


# Of accesses: kind, bytes for one thread, and whether each pass makes it (False: under a condition).
Traffic: TypeAlias = "Counter[tuple[str, int, bool]]"


@dataclass(frozen=True)
class Code:
    """A kernel for one architecture."""

    name: str
    arch: int
    registers: int
    stack: int
    static_shared: int
    local: int
    instructions: tuple[Instruction, ...]

    def count(self, pattern: str, *, body_only: bool = False) -> int:
        """Instructions whose opcode begins like the pattern; ``body_only``: not those of subroutines."""
        kept = (i for i in self.instructions if not body_only or i.function == self.name)
        return sum(re.match(pattern, i.opcode) is not None for i in kept)

    @property
    def spills(self) -> int:
        return self.count(r"(LDL|STL)\b")

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Which instructions may come next. A call continues behind itself: :attr:`loops` looks into subroutines."""
        found = []
        for index, instruction in enumerate(self.instructions):
            base, following = instruction.base, (index + 1,) if index + 1 < len(self.instructions) else ()
            if base in ("BRX", "JMX", "BRXU"):
                raise ValueError(f"{self.name} for sm_{self.arch} has a computed jump ({instruction.opcode}): not read")
            if base in ("BRA", "JMP"):
                # A second condition may stand before the label, and .DIV jumps only where a warp has parted.
                is_sure = not instruction.predicate and instruction.operands.lstrip().startswith("`")
                found.append(instruction.label_targets + (() if is_sure else following))
            elif base == "CALL":
                # Into the function itself it is a jump: the assembler may leave a loop by one.
                own = [t for t in instruction.label_targets if self.instructions[t].function == instruction.function]
                found.append((*own, *following))
            elif base in ("EXIT", "RET", "KILL") and not instruction.predicate:
                found.append(())
            else:
                found.append(following)
        return tuple(found)

    @functools.cached_property
    def cycles(self) -> tuple[frozenset[int], ...]:
        """The instructions of each loop, with those of loops in it, in the order of the code."""
        return tuple(sorted(sass.cycles(self.successors), key=min))

    @functools.cached_property
    def loops(self) -> frozenset[int]:
        """What one thread may execute twice: instructions on a cycle of :attr:`successors`, or called from one."""
        on_cycle = frozenset().union(*self.cycles)
        called = {
            self.instructions[target].function
            for index in on_cycle
            if self.instructions[index].base == "CALL"
            for target in self.instructions[index].label_targets
            if self.instructions[target].function != self.instructions[index].function
        }
        inside = {index for index, instruction in enumerate(self.instructions) if instruction.function in called}
        return frozenset(on_cycle | inside)

    @functools.cached_property
    def per_thread(self) -> tuple[int, ...]:
        """For each instruction the registers, as bits, that may depend on the thread's index when it begins.

        Data flow only: from the special registers that tell a thread who it is, through arithmetic, loads and local
        memory. Not through shared memory, nor where a branch chooses the value.
        """
        before = [0] * len(self.instructions)
        waiting = [index for index, i in enumerate(self.instructions) if i.base in ("S2R", "S2UR")]
        while waiting:
            index = waiting.pop()
            instruction, bits = self.instructions[index], before[index]
            own = instruction.base in ("S2R", "S2UR") and re.search(r"SR_(TID|LANEID|WARPID)", instruction.operands)
            if own or instruction.read & bits:
                bits |= instruction.written
            elif not instruction.predicate and instruction.base != "STL":
                bits &= ~instruction.written
            for following in self.successors[index]:
                if bits & ~before[following]:
                    before[following] |= bits
                    waiting.append(following)
        return tuple(before)

    @functools.cached_property
    def accesses(self) -> tuple[Access, ...]:
        """All accesses to global memory."""
        found = []
        for index, instruction in enumerate(self.instructions):
            if (kind := self._access_kind(instruction)) is not None:
                depends = sass.registers(instruction.addressed_by, 2) & self.per_thread[index]
                found.append(
                    Access(
                        index, kind, instruction.nbytes, index in self.loops, bool(depends), bool(instruction.predicate)
                    )
                )
        return tuple(found)

    def _access_kind(self, instruction: Instruction) -> str | None:
        if sass.BULK.search(instruction.base):
            raise ValueError(f"{self.name} for sm_{self.arch} copies in bulk ({instruction.opcode}): not counted")
        names = {"load": sass.LOADS, "store": sass.STORES, "atomic": sass.ATOMICS}
        return next((kind for kind, bases in names.items() if instruction.base in bases), None)

    def traffic(self, within: Collection[int], always: Collection[int]) -> Traffic:
        """How many accesses of a kind and a number of bytes there are: such as each pass makes, and such as it may."""
        found: Traffic = Counter()
        for index in within:
            instruction = self.instructions[index]
            if (kind := self._access_kind(instruction)) is not None:
                found[kind, instruction.nbytes, index in always and not instruction.predicate] += 1
        return found

    @functools.cached_property
    def loop_traffic(self) -> tuple[Traffic, ...]:
        """Of each loop with accesses to global memory; a pass is one round of it."""
        found = (self.traffic(cycle, sass.on_every_cycle(cycle, self.successors)) for cycle in self.cycles)
        return tuple(traffic for traffic in found if traffic)

    @functools.cached_property
    def other_traffic(self) -> Traffic:
        """Outside of loops, where nothing is said of what is always executed."""
        return self.traffic(set(range(len(self.instructions))) - self.loops, ())

    @functools.cached_property
    def wide_path(self) -> frozenset[int]:
        """Instructions outside of loops that can share an execution with the widest unmasked access.

        Each of them is reached from that access or leads to it. A masked path, which tests each element before its
        access, is the other way of a branch: it does neither. No path that has the access executes more than these,
        nor any of these twice. Empty if there is no such access.
        """
        chosen = [a for a in self.accesses if a.per_thread and not (a.in_loop or a.predicated)]
        if not chosen:
            return frozenset()
        anchor = max(chosen, key=lambda access: access.nbytes).index
        backwards: list[list[int]] = [[] for _ in self.instructions]
        for index, following in enumerate(self.successors):
            for target in following:
                backwards[target].append(index)
        related = sass.reached(self.successors, anchor) | sass.reached(backwards, anchor)
        return frozenset(related - self.loops)

    def widths(self, kind: str, within: Collection[int], *, per_thread: bool | None = None) -> Counter[int]:
        """How many loads or stores of each number of bytes there are ``within`` some instructions."""
        chosen = (a for a in self.accesses if a.kind == kind and a.index in within)
        return Counter(access.nbytes for access in chosen if per_thread in (None, access.per_thread))

    def fp64(self, *, in_loop: bool) -> Counter[str]:
        """The float64 operations that lie in loops, or elsewhere."""
        chosen = (i for index, i in enumerate(self.instructions) if i.is_fp64 and (index in self.loops) == in_loop)
        return Counter(instruction.opcode for instruction in chosen)

    def approximate(self, quotients: int = 0, roots: int = 0) -> list[str]:
        """Approximations of a function that are not the seed of a correctly rounded one.

        quotients, roots: seeds that are meant beside those, of csrc/common/platform.h's results in a known range.

        MUFU is the unit for approximations. A correctly rounded float32 division begins with MUFU.RCP and has a check
        of its operands' range, FCHK; a root with MUFU.RSQ, a reciprocal with MUFU.RCP, each with a comparison that is
        known by its constant. A division of integers rounds its divisor up to a float (.RP) before MUFU.RCP.
        Subroutines are the slow paths of these, and the compiler names them so.
        """
        found = sorted({i.opcode for i in self.instructions if re.match(r"MUFU\.(?!(RCP|RSQ)(64H)?$)", i.opcode)})
        body = [i for i in self.instructions if i.function == self.name]
        integer = self.count(r"I2FP?\..*\.RP$", body_only=True)
        reciprocals = self.count(r"FCHK\b", body_only=True) + integer + _compared(body, _RECIPROCAL_CHECK)
        checked_roots = _compared(body, _ROOT_CHECK)
        for opcode, expected in (("MUFU.RCP", reciprocals + quotients), ("MUFU.RSQ", checked_roots + roots)):
            number = self.count(f"{opcode}$", body_only=True)
            if number != expected:
                found.append(f"{number} {opcode} for {expected} correctly rounded results")
        return found + sorted({i.function for i in self.instructions if i.function != self.name} - self._slow_paths())

    def _slow_paths(self) -> set[str]:
        names = {i.function for i in self.instructions}
        # A shuffle between threads of a warp that has parted is one, too.
        known = r"__cuda_sm\w+_(sqrt|div|rcp|dsqrt|ddiv|drcp|rem|dblrcp|shflsync)_"
        return {name for name in names if re.search(known, name)}

    def fused(self, quotients: int = 0, roots: int = 0) -> list[str]:
        """Fused multiply-adds that are not part of a correctly rounded division, root or reciprocal.

        quotients, roots: as above; of these, each takes four and two.

        Those take a fixed number: in float32 a division five, a root or a reciprocal two; in float64 a division seven,
        a root five. One more is a product and a sum that were asked for apart. The same on pairs (FFMA2) or halves has
        no such use. With two zero factors it is no product: a way to write a constant or a magnitude, or the check of a
        float64 quotient.
        """
        body = [i for i in self.instructions if i.function == self.name and not re.search(_ZEROS, i.operands)]
        refined = _compared(body, _ROOT_CHECK) + _compared(body, _RECIPROCAL_CHECK)
        seeds = (self.count(f"MUFU.{name}64H", body_only=True) for name in ("RCP", "RSQ"))
        expected = {
            "FFMA": 5 * self.count(r"FCHK\b", body_only=True) + 2 * refined + 4 * quotients + 2 * roots,
            "DFMA": sum(number * seed for number, seed in zip((7, 5), seeds, strict=True)),
        }
        found = []
        for name, most in expected.items():
            number = sum(i.base == name for i in body)
            if number != most:
                found.append(f"{number} {name} where divisions and roots take {most}")
        others = (i for i in self.instructions if re.match(r"FFMA2|[BH]FMA", i.opcode))
        return found + sorted({i.opcode for i in others if not re.search(_ZEROS, i.operands)})


# The two factors of a product that is none; the float64 check has one, the other being any number.
_ZEROS = r"^\w+, -?RZ[.\w]*, (-?RZ|R\d+, R\d+$)"
# What a correctly rounded root, and reciprocal, compares its operand's bits with to find the range of the fast path.
_ROOT_CHECK = "0x727fffff"
_RECIPROCAL_CHECK = "0x1ffffff"


def _compared(instructions: Iterable[Instruction], constant: str) -> int:
    return sum(i.base == "ISETP" and constant in i.operands.split(", ") for i in instructions)


# ---- reading ---------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\S+):$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_USAGE = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def parse(disassembly: str, usage: str) -> dict[tuple[int, str], Code]:
    """The kernels of one cubin, by architecture and mangled name."""
    arch = re.search(r"(?:\.target\s+sm_|EF_CUDA_SM)(\d+)", disassembly)
    if arch is None:
        raise ValueError(f"no architecture in what nvdisasm printed: {disassembly[:200]!r}")
    used = resources(usage)
    entries = set(re.findall(r'\.other\s+(\S+?),@"STO_CUDA_ENTRY', disassembly))
    labels: dict[str, int] = {}
    lines: dict[str, list[tuple[str, re.Match[str]]]] = {}
    section = function = ""
    for line in disassembly.splitlines():
        if instruction := sass.LINE.search(line):
            lines[section].append((function, instruction))
        elif found := _SECTION.match(line):
            section = function = found[1]
            lines[section] = []
        elif section and (found := _LABEL.match(line)):
            labels[found[1]] = len(lines[section])
            if not found[1].startswith(".L"):
                function = found[1]
    codes = {}
    for name in entries:
        registers, stack, shared, local = used[name]
        instructions = tuple(
            Instruction(
                int(match[1], 16), match[2] or "", match[3], match[4].strip(), where,
                tuple(labels[label] for label in _TARGET.findall(match[4]) if label in labels),
            )
            for where, match in lines[name]
        )  # fmt: skip
        codes[int(arch[1]), name] = Code(name, int(arch[1]), registers, stack, shared, local, instructions)
    return codes


def read_cubin(cubin: bytes | Path) -> dict[tuple[int, str], Code]:
    """The kernels of a cubin, by architecture and mangled name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin if isinstance(cubin, bytes) else cubin.read_bytes())
        # Without the disassembler's own analysis of jumps, which takes half of its time.
        return parse(_run("nvdisasm", "-ndf", "-c", path), _run("cuobjdump", "-res-usage", path))


def extract(path: Path, folder: Path, kind: str = "elf") -> list[Path]:
    """Writes the cubins of an object or library to a folder, or its PTX (``"ptx"``), and returns the files' paths."""
    _run("cuobjdump", f"-x{kind}", "all", path.resolve(), cwd=folder)
    return sorted(folder.glob("*.cubin" if kind == "elf" else f"*.{kind}"))


def read_resources(cubin: Path) -> dict[str, tuple[int, int, int, int]]:
    """Of each kernel of a cubin: registers, bytes of stack, of static shared memory and of local memory."""
    return resources(_run("cuobjdump", "-res-usage", cubin))


def resources(usage: str) -> dict[str, tuple[int, int, int, int]]:
    """The same of what cuobjdump printed."""
    return {name: (int(a), int(b), int(c), int(d)) for name, a, b, c, d in _USAGE.findall(usage)}


def demangled(names: Iterable[str]) -> dict[str, str]:
    names = sorted(names)
    filters = [path for name in ("cu++filt", "c++filt") if (path := tool(name))]
    if not filters or not names:
        return {name: name for name in names}
    done = subprocess.run(filters[:1], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split("\n"), strict=False))


def read_object(path: Path) -> dict[tuple[int, str], Code]:
    """The kernels of a cubin, or of all cubins in an object or library, by architecture and demangled name."""
    with tempfile.TemporaryDirectory() as folder:
        # An ELF file for a CUDA machine is a cubin; anything else holds some.
        header = path.read_bytes()[:20]
        if header[:4] == b"\x7fELF" and int.from_bytes(header[18:20], "little") == 190:
            cubins = [path]
        else:
            cubins = extract(path, Path(folder))
        if not cubins:
            raise ValueError(f"{path} holds no machine code for an NVIDIA GPU; compile it with -gencode code=sm_..")
        found: dict[tuple[int, str], Code] = {}
        for cubin in cubins:
            for key, code in read_cubin(cubin).items():
                if found.setdefault(key, code).instructions != code.instructions:
                    raise ValueError(f"{path} holds two different kernels {key[1]} for sm_{key[0]}")
    names = demangled({name for _, name in found})
    return {(arch, names[name]): code for (arch, name), code in found.items()}
