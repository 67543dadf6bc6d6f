"""NVIDIA machine code as its disassembler prints it: one instruction, what it reads and writes, and cycles of jumps.

Only what a proof needs is read: registers, widths of accesses, targets of jumps. ``gpu_code`` builds on it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# /*0010*/   @!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10] ;
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)(?!\w)")
_FIRST_BIT = {"R": 0, "UR": 256, "P": 512, "UP": 520}
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
LOADS = ("LDG", "LD", "LDGSTS")
STORES = ("STG", "ST")
ATOMICS = ("ATOMG", "ATOM", "RED", "REDG")
# A bit for all of a thread's local memory, where an address may be kept for a while.
_LOCAL_MEMORY = 1 << 528
# Asynchronous copies of whole tiles, whose size is in no operand; a kernel with one needs another way of counting.
BULK = re.compile(r"UBLK|UTMA|CPASYNC")
# After a predicate, these write a register as well.
_TWO_RESULTS = ("LOP3", "SHFL", "ATOMG", "ATOM")
_WITHOUT_RESULT = (*STORES, "STS", "STL", "LDGSTS", "RED", "REDG", "BRA", "EXIT", "CALL", "RET", "BSSY", "BSYNC", "BAR")


def registers(text: str, count: int = 1) -> int:
    """The registers named, as bits; each stands for ``count`` neighbours."""
    bits = 0
    for kind, number in _REGISTER.findall(text):
        bits |= ((1 << (count if kind in ("R", "UR") else 1)) - 1) << (_FIRST_BIT[kind] + int(number))
    return bits


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    predicate: str  # "" or, as in "@!P0", "!P0"
    opcode: str
    operands: str
    function: str  # the kernel's name, or that of a subroutine of its own
    label_targets: tuple[int, ...]  # indices of instructions

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def nbytes(self) -> int:
        """What a memory instruction moves for one thread."""
        return next((_BYTES[part] for part in self.modifiers if part in _BYTES), 4)

    @property
    def addressed_by(self) -> str:
        """The address operand, without the descriptor that newer GPUs put before it."""
        return "".join(re.findall(r"\[[^\]]*\]", re.sub(r"desc\[[^\]]*\]", "", self.operands)))

    @functools.cached_property
    def _results_and_sources(self) -> tuple[str, str]:
        """The operands, split where those that are written end: carries and the like may follow the first one."""
        if self.base in _WITHOUT_RESULT:
            return "", self.operands
        operands = self.operands.split(",")
        end = 1
        if (operands[0].startswith(("P", "UP")) and self.base in _TWO_RESULTS) or "ENL2" in self.modifiers:
            end = 2
        while end < len(operands) and re.fullmatch(r"\s*U?P[T\d]\s*", operands[end]):
            end += 1
        return ",".join(operands[:end]), ",".join(operands[end:])

    @functools.cached_property
    def written(self) -> int:
        """Registers written, as bits. Where a width is unknown, the lower half of a pair."""
        if self.base == "STL":
            return _LOCAL_MEMORY
        wide = self.base in ("DADD", "DMUL", "DFMA", "FADD2", "FMUL2", "FFMA2") or "WIDE" in self.modifiers
        wide |= self.base == "CS2R" and "32" not in self.modifiers
        wide |= any(part in ("64", "F64", "U64", "S64") for part in self.modifiers[:1]) and self.base != "SHF"
        # The widest load names both of its halves.
        count = min(self.nbytes // 4, 4) if self.base.startswith("LD") else 2 if wide else 1
        return registers(self._results_and_sources[0], max(count, 1))

    @functools.cached_property
    def read(self) -> int:
        """Registers read, as bits; the guarding predicate too."""
        sources = registers(f"{self.predicate.lstrip('!')} {self._results_and_sources[1]}")
        return sources | (_LOCAL_MEMORY if self.base == "LDL" else 0)

    @property
    def is_fp64(self) -> bool:
        return bool(re.match(r"D(ADD|MUL|FMA|SETP|MNMX)\b|MUFU\.\w*64H|(F2F|I2F|F2I|FRND)\..*F64", self.opcode))


def cycles(successors: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """The parts of a graph in which every node can be reached from every one (Tarjan's, without recursion).

    Only those with a cycle: a node alone is one of them if it follows itself.
    """
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    done: set[int] = set()
    found: list[frozenset[int]] = []
    for root in range(len(successors)):
        work = [(root, 0)] if root not in order else []
        while work:
            node, edge = work.pop()
            if edge == 0:
                order[node] = lowest[node] = len(order)
                stack.append(node)
            elif (child := successors[node][edge - 1]) not in done:
                lowest[node] = min(lowest[node], lowest[child])
            for number in range(edge, len(successors[node])):
                child = successors[node][number]
                if child not in order:
                    work += [(node, number + 1), (child, 0)]
                    break
                if child not in done:
                    lowest[node] = min(lowest[node], order[child])
            else:
                if lowest[node] == order[node]:
                    start = len(stack) - stack[::-1].index(node) - 1
                    component = stack[start:]
                    del stack[start:]
                    done.update(component)
                    if len(component) > 1 or node in successors[node]:
                        found.append(frozenset(component))
    return found


def on_cycles(successors: Sequence[Sequence[int]]) -> set[int]:
    """Nodes of a graph that can be reached from themselves."""
    return set().union(*cycles(successors))


def on_every_cycle(component: Collection[int], successors: Sequence[Sequence[int]]) -> set[int]:
    """Those of a part of :func:`cycles` without which it has no cycle: no way round it leaves them out."""
    following = {node: [child for child in successors[node] if child in component] for node in component}
    before: dict[int, list[int]] = {node: [] for node in component}
    for node, children in following.items():
        for child in children:
            before[child].append(node)
    # Nodes that can only be passed together are one; the first of each.
    firsts = {node for node in component if len(before[node]) != 1 or len(following[before[node][0]]) != 1}
    if not firsts:
        return set(component)
    chains: dict[int, list[int]] = {}
    for first in firsts:
        chains[first] = [first]
        while len(children := following[chains[first][-1]]) == 1 and children[0] not in firsts:
            chains[first].append(children[0])
    after = {first: following[chain[-1]] for first, chain in chains.items()}
    return {node for first in firsts if _is_acyclic(after, first) for node in chains[first]}


def _is_acyclic(following: dict[int, list[int]], without: int) -> bool:
    """Whether nodes can be taken away one by one, each when none leads to it any more."""
    leading = dict.fromkeys(following, 0)
    for node, children in following.items():
        for child in children if node != without else ():
            leading[child] += 1
    waiting = [without, *(node for node, number in leading.items() if not number and node != without)]
    for node in waiting:
        for child in following[node] if node != without else ():
            leading[child] -= 1
            if not leading[child] and child != without:
                waiting.append(child)
    return len(waiting) == len(following)


def reached(successors: Sequence[Sequence[int]], start: int) -> set[int]:
    """The nodes that can be reached from one, itself among them."""
    found, waiting = {start}, [start]
    while waiting:
        for node in successors[waiting.pop()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found
