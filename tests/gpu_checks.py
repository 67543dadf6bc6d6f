"""What a test demands of a GPU kernel's machine code: one dataclass of demands, one function that names what is wrong.

``gpu_code`` tells the facts; ``test_gpu_code`` shows of each check that it can fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_code import Code, Traffic

# ---- what the source asked for ---------------------------------------------------------------------------------------


def inexact_operations(ptx: str) -> Counter[str]:
    """Float operations of PTX that approximate, flush denormals to zero, or round a product and a sum at once."""
    # An instruction begins its line, or follows another one of inline assembly.
    begin = r"(?:^|[;{])\s*(?:@!?%?\w+\s+)?"
    operations = Counter(re.findall(begin + r"([a-z][a-z0-9_.:]*\.(?:f16|bf16|f32|f64)\w*)\s", ptx, re.M))
    pattern = r"approx|full|ftz|^(fma|mad|rsqrt|ex2|lg2|sin|cos|tanh)\."
    return Counter({name: number for name, number in operations.items() if re.search(pattern, name)})


def ptx_problems(ptx: str, quotients: int = 0, roots: int = 0) -> dict[str, str]:
    """What is wrong with the operations that a kernel's PTX asks for.

    quotients, roots: how often csrc/common/platform.h's results in a known range are meant, no more and no fewer.
    """
    asked = inexact_operations(ptx)
    meant = {"rcp.approx.ftz.f32": quotients, "rsqrt.approx.ftz.f32": roots, "fma.rn.f32": 4 * quotients + 2 * roots}
    wrong = {name: number for name, number in asked.items() if number != meant.get(name, 0)}
    wrong |= {name: 0 for name, number in meant.items() if number and name not in asked}
    found: dict[str, list[str]] = {}
    for name in sorted(wrong):
        check = "fused" if name.startswith(("fma", "mad")) else "approximate"
        found.setdefault(check, []).append(f"{wrong[name]} {name}" if meant.get(name) else name)
    return {check: ", ".join(found[check]) for check in sorted(found)}


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
    return occupancy_of(code.arch, code.registers, code.static_shared, threads, dynamic_shared)


def occupancy_of(arch: int, registers: int, static_shared: int, threads: int, dynamic_shared: int = 0) -> float:
    """The same of a kernel whose resources alone are known."""
    limits = MULTIPROCESSORS[arch]
    warps = -(-threads // 32)
    a_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = limits.registers // a_warp // _WARP_UNIT * _WARP_UNIT // warps
    # From sm_90 on, what is used statically is told with the system's part.
    system = 0 if static_shared >= _SYSTEM_SHARED and arch >= 90 else _SYSTEM_SHARED
    shared = -(-(system + static_shared + dynamic_shared) // _SHARED_UNIT) * _SHARED_UNIT
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
    # Quotients and roots in a known range (csrc/common/platform.h): their seeds are approximations that are meant.
    in_range: tuple[int, int] = (0, 0)
    # The accesses of each loop that has any, and those outside of loops; None: not looked at.
    loops: Sequence[Traffic] | None = None
    others: Traffic | None = None


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
    asked = ptx_problems(ptx, *demands.in_range) if ptx else {}
    made = {"approximate": code.approximate(*demands.in_range), "fused": code.fused(*demands.in_range)}
    for check, names in made.items():
        if both := [*([asked[check]] if check in asked else []), *names]:
            found[check] = ", ".join(both)
    if generic := code.count(r"(LD|ST|ATOM)\b"):
        found["generic"] = f"{generic} accesses that find out at run time what memory they go to"
    found |= _traffic_problems(code, demands) | _loop_problems(code, demands)
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


def _listed(traffic: Traffic) -> str:
    """As in "4 loads of 16, 1 load of 16 maybe"."""
    names = []
    for (kind, nbytes, always), number in sorted(traffic.items()):
        names.append(f"{number} {kind}{'s' * (number > 1)} of {nbytes}{'' if always else ' maybe'}")
    return ", ".join(names) or "none"


def _loop_problems(code: Code, demands: Demands) -> dict[str, str]:
    """Each loop's accesses, one by one: their widths, and which of them every round makes."""
    found = {}
    if demands.loops is not None:
        actual, expected = (sorted(map(_listed, traffic)) for traffic in (code.loop_traffic, demands.loops))
        if actual != expected:
            found["loops"] = f"their accesses are ({'; '.join(actual)}), should be ({'; '.join(expected)})"
    if demands.others is not None and code.other_traffic != demands.others:
        found["others"] = f"outside of loops {_listed(code.other_traffic)}, should be {_listed(demands.others)}"
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
