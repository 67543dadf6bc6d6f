"""What a test demands of a GPU kernel's machine code: one dataclass of demands, one function that names what is wrong.

``gpu_code`` tells the facts; ``test_gpu_code`` shows of each check that it can fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_code import Code

# ---- what the source asked for ---------------------------------------------------------------------------------------


def inexact_operations(ptx: str) -> set[str]:
    """Float operations of PTX that approximate, flush denormals to zero, or round a product and a sum at once."""
    # An instruction begins its line, or follows another one of inline assembly.
    begin = r"(?:^|[;{])\s*(?:@!?%?\w+\s+)?"
    operations = set(re.findall(begin + r"([a-z][a-z0-9_.:]*\.(?:f16|bf16|f32|f64)\w*)\s", ptx, re.M))
    pattern = r"approx|full|ftz|^(fma|mad|rsqrt|ex2|lg2|sin|cos|tanh)\."
    return {operation for operation in operations if re.search(pattern, operation)}


# ---- occupancy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on one multiprocessor share."""

    warps: int
    blocks: int
    registers: int
    shared: int


# CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability": resident
# warps and blocks, 32-bit registers and shared memory per multiprocessor.
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 65536, 164 * 1024),
    90: Multiprocessor(64, 32, 65536, 228 * 1024),
    100: Multiprocessor(64, 32, 65536, 228 * 1024),
}
# A warp gets registers in units of 256, warps come in fours (one for each quarter of a multiprocessor), shared memory
# comes in units of 128 bytes, and each block costs 1 KiB of it for the system.
_REGISTER_UNIT, _WARP_UNIT, _SHARED_UNIT, _SYSTEM_SHARED = 256, 4, 128, 1024


def occupancy(code: Code, threads: int, dynamic_shared: int = 0) -> float:
    """The share of a multiprocessor's warps that blocks of so many threads can fill."""
    limits = MULTIPROCESSORS[code.arch]
    warps = -(-threads // 32)
    a_warp = -(-code.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = limits.registers // a_warp // _WARP_UNIT * _WARP_UNIT // warps
    # From sm_90 on, what is used statically is told with the system's part.
    system = 0 if code.static_shared >= _SYSTEM_SHARED and code.arch >= 90 else _SYSTEM_SHARED
    shared = -(-(system + code.static_shared + dynamic_shared) // _SHARED_UNIT) * _SHARED_UNIT
    blocks = min(limits.blocks, limits.warps // warps, by_registers, limits.shared // shared)
    return blocks * warps / limits.warps


# ---- what is checked -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demands:
    """What a kernel has to be, counted by hand or from its options."""

    threads: int
    shared: int | None = 0  # the most dynamic shared memory, in bytes; None: any
    occupancy: float = 0.5
    fp64: bool = False  # True: float64 is meant, outside of loops
    fp64_loops: bool = False  # True: in loops too
    # Bytes of each access that one thread makes to elements on the wide path; None: not looked at.
    loads: Sequence[int] | None = None
    stores: Sequence[int] | None = None
    # Bytes that one thread loads and stores in a round of the masked path's loop, which may be unrolled.
    round: tuple[int, int] = (0, 0)


def problems(code: Code, ptx: str, demands: Demands, dynamic_shared: int = 0) -> dict[str, str]:
    """What is wrong with a kernel, by name of the check: nothing, of one that is as it has to be."""
    found = {}
    if code.spills or code.stack or code.local:
        found["local memory"] = f"{code.spills} accesses to it, stack {code.stack}, local {code.local} bytes"
    if demands.shared is not None and dynamic_shared > demands.shared:
        found["shared memory"] = f"{dynamic_shared} bytes, should be at most {demands.shared}"
    outside = Counter() if demands.fp64 else code.fp64(in_loop=False)
    inside = Counter() if demands.fp64_loops else code.fp64(in_loop=True)
    if outside or inside:
        found["fp64"] = f"outside of loops {dict(outside)}, in loops {dict(inside)}"
    asked = inexact_operations(ptx)
    fused = {operation for operation in asked if operation.startswith(("fma", "mad"))}
    if approximate := [*sorted(asked - fused), *code.approximate()]:
        found["approximate"] = ", ".join(approximate)
    if fusions := [*sorted(fused), *code.fused()]:
        found["fused"] = ", ".join(fusions)
    found |= _traffic_problems(code, demands)
    share = occupancy(code, demands.threads, dynamic_shared)
    if share < demands.occupancy:
        found["occupancy"] = f"{share} of the warps with {code.registers} registers, should be {demands.occupancy}"
    return found


def _traffic_problems(code: Code, demands: Demands) -> dict[str, str]:
    """Widths and bytes of the accesses to elements, against the least there can be.

    Addresses that all threads of a block have in common are those of tables, whose bytes all elements share; they are
    left out, though not in loops, where no table is read. An access of the full width needs none beside it, so widths
    compare what is narrower; bytes compare all. Loops may be unrolled: loads and stores then grow alike.
    """
    if demands.loads is None or demands.stores is None:
        return {}
    found = {}
    rounds = set()
    for kind, expected, a_round in (
        ("load", demands.loads, demands.round[0]),
        ("store", demands.stores, demands.round[1]),
    ):
        actual = code.widths(kind, code.wide_path, per_thread=True)
        narrow = [Counter({width: c[width] for width in c if width < 16}) for c in (actual, Counter(expected))]
        if narrow[0] != narrow[1]:
            found["width"] = f"{kind}s below 16 bytes are {dict(narrow[0])}, should be {dict(narrow[1])}"
        moved, looped = sum(actual.elements()), sum(code.widths(kind, code.loops).elements())
        if a_round:
            rounds.add(looped / a_round)
        if moved != sum(expected) or (looped and not a_round):
            found["bytes"] = (
                f"a thread {kind}s {moved} bytes, {looped} in loops; the least is {sum(expected)}, {a_round}"
            )
    if len(rounds) > 1 or any(number < 1 or number % 1 for number in rounds):
        found["bytes"] = (
            f"loops do {sorted(rounds)} rounds of {demands.round} bytes loaded and stored: not as many of both"
        )
    return found


def amd_problems(assembly: str) -> dict[str, str]:
    """What is wrong with the assembly that triton prints for an AMD GPU (scalar registers may be kept in vector ones).

    A correctly rounded float32 division takes five fused multiply-adds and ends in v_div_fixup; a root takes two beside
    v_sqrt, or five beside v_rsq. A 64-bit integer meets float32 in halves, by multiply-adds with 2^32 or -2^32.
    """
    found = {}
    for key in ("private_segment_fixed_size", "vgpr_spill_count"):
        (number,) = re.findall(rf"^\s+\.{key}:\s+(\d+)$", assembly, re.M)
        if number != "0":
            found["local memory"] = f"{key} {number}"
    if set(re.findall(r"float_denorm_mode_32 (\d)", assembly)) != {"3"}:
        found["denormals"] = "flushed to zero"
    operations = Counter(re.findall(r"\bv_(\w+?)_f32(?:_e\d\d)?\b", assembly))
    names = ("fma", "fmac", "fmaak", "fmamk", "mad", "mac")
    number = sum(operations[name] + 2 * operations[f"pk_{name}"] for name in names)
    halves = len(re.findall(r"(?:v_fma\w*_f32|s_mov_b32)\S* .*\b0x[4c]f800000\b", assembly))
    expected = 5 * operations["div_fixup"] + 2 * operations["sqrt"] + 5 * operations["rsq"] + halves
    if number != expected:
        found["fused"] = f"{number} multiply-adds where divisions and roots take {expected}"
    return found
