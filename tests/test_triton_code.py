"""What the Triton kernels' machine code is, proven from the code itself: for NVIDIA and AMD, without a GPU.

Every kernel is compiled as its launcher compiles it. ``test_gpu_code.py`` shows that each check can fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_checks import Demands, amd_problems, occupancy, problems
from gpu_code import read_cubin

from shardops.backends import triton as backend

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
if backend._interpreting():
    pytest.skip("this process interprets: nothing compiles; unset TRITON_INTERPRET", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shardops.backends.triton import _adam_blocks, _adam_elements, _adam_scalars, _copy, _launch, grad_norm  # noqa: E402
from shardops.backends.triton import sharded_adam as adam  # noqa: E402
from shardops.backends.triton._block_quant import BLOCK as QUANTISED  # noqa: E402

ARCHITECTURES = (80, 90, 100)
AMD = GPUTarget("hip", "gfx942", 64)

# The kernels that fill less than half of a multiprocessor's warps: how many on the worst architecture, with
# triton 3.6 or 3.9, and why.
_BLOCKS = "eight elements a thread with their dither, and the extremes of a block, in registers"
_ROWS = "a thread's 64 elements in registers, so that a block is read once for its largest magnitude and its sum"
LOW_OCCUPANCY = {
    "bf16 split24, bf16 moments": (0.375, "eight elements a thread, without which bfloat16 is read by half the width"),
    "bf16 stochastic": (0.25, "a 64-bit division for each element, to find its row in a strided shard"),
    "bf16 split24, int8": (0.3125, _BLOCKS),
    "norm 2 of fp32": (0.375, _ROWS),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel with its arguments' types (None: the argument is None), and what its machine code has to be."""

    name: str
    function: Any
    signature: dict[str, str | None]
    constants: dict[str, Any]
    demands: Demands

    def compile(self, target: GPUTarget, **options: Any) -> Any:
        constants = self.constants | {name: None for name, kind in self.signature.items() if kind is None}
        types = {name: "constexpr" if name in constants else self.signature[name] for name in self.function.arg_names}
        return triton.compile(
            ASTSource(fn=self.function, signature=types, constexprs=constants),
            target=target,
            options={"num_warps": self.demands.threads // target.warp_size, "enable_fp_fusion": False} | options,
        )


def pieces(nbytes: int) -> list[int]:
    """The widest accesses that move so many bytes of one array."""
    return [16] * (nbytes // 16) + [nbytes % 16] * (nbytes % 16 > 0)


def size(kind: Any) -> int:
    return int(kind.primitive_bitwidth // 8)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def copy(source: Any, target: Any, scaled: bool) -> Kernel:
    vector = 16 // max(size(source), size(target))
    constants = {"SOURCE": source, "TARGET": target, "SCALED": scaled}
    constants |= {"VECTOR": vector, "BLOCK": _launch.THREADS * vector, "ROUNDS": _copy.ROUNDS}
    demands = Demands(
        threads=_launch.THREADS,
        loads=pieces(vector * size(source)) * _copy.ROUNDS,
        stores=pieces(vector * size(target)) * _copy.ROUNDS,
        # Two loops have become of the one: the other stores zeros where there is no source.
        round=(size(source), 2 * size(target)),
    )
    signature: dict[str, str | None] = {"rows": "*i64", "chunks": "*i64", "scale": "fp32"}
    name = f"copy {source} to {target}{' scaled' if scaled else ''}"
    return Kernel(name, _copy.copy_kernel, signature, constants, demands)


def update(
    name: str,
    param: Any,
    grad: Any,
    moment: Any,
    master: Any = None,
    shadow: Any = None,
    *,
    amsgrad: bool = False,
    strided: bool = False,
    scaled: bool = False,
) -> Kernel:
    """The kernel that ``sharded_adam`` launches for these storages; int16: the bits of bfloat16."""
    quantised = moment == tl.int8
    state = [moment, moment, *([tl.float32] if amsgrad else [])]
    # A float32 master is read in the parameter's place; a remainder is read beside it.
    loaded = [grad, *state, *([] if master == tl.float32 else [param]), *([master] if master is not None else [])]
    stored = [param, *state, *(kind for kind in (master, shadow) if kind is not None)]
    vector = adam.VECTOR if tl.float32 in stored else adam.NARROW_VECTOR
    threads = adam.BLOCK_THREADS if quantised else _launch.THREADS
    scalar = "*fp32" if scaled else None
    signature = {"rows": "*i64", "chunks": "*i64", "scalars": "*fp32", "grad_scale": scalar, "found_inf": scalar}
    constants = {"PARAM": param, "GRAD": grad, "MASTER": master, "SHADOW": shadow, "COUPLED": amsgrad}
    constants |= {"FROM_GRAD": False, "AMSGRAD": amsgrad, "STRIDED": strided, "VECTOR": vector}
    if quantised:
        constants |= {"BLOCKS": vector * threads // QUANTISED.value}
    else:
        dithered = moment == tl.int16 or master == tl.int8
        constants |= {"MOMENT": moment, "DITHERED": dithered, "BLOCK": vector * threads}
    # A block's two words are read by all of its threads at one address, and written by one of them.
    words = [4, 4] if quantised else []
    demands = Demands(
        threads=threads,
        shared=4 * vector * threads // QUANTISED.value if quantised else 0,
        occupancy=LOW_OCCUPANCY.get(name, (0.5,))[0],
        loads=sum((pieces(vector * size(kind)) for kind in loaded), words),
        stores=sum((pieces(vector * size(kind)) for kind in stored), words),
        round=(sum(map(size, loaded)) + sum(words), sum(map(size, stored)) + sum(words)),
    )
    function = _adam_blocks.update_blocks_kernel if quantised else _adam_elements.update_kernel
    return Kernel(name, function, signature, constants, demands)


def scalars(lr_tensor: str | None) -> Kernel:
    optional = None if lr_tensor is None else "*fp32"
    signature = {"rows": "*i64", "scalars": "*fp32", "count": "i32"}
    signature |= dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), "fp64")
    signature |= {"lr_tensor": lr_tensor, "clip_coef": optional, "found_inf": optional}
    constants = {"DECOUPLED": True, "FROM_GRAD": False, "MAXIMIZE": False, "TENSORS": adam.TENSORS}
    demands = Demands(threads=_launch.THREADS // 2, shared=None, fp64=True, fp64_loops=True)
    return Kernel(f"scalars, lr {lr_tensor or 'float64'}", _adam_scalars.scalars_kernel, signature, constants, demands)


def norm_blocks(kind: Any, p: int) -> Kernel:
    name = f"norm {p} of {kind}"
    constants = {"DTYPE": kind, "P": p, "VECTOR": grad_norm.VECTOR, "LANES": grad_norm.LANES, "ROWS": grad_norm.ROWS}
    demands = Demands(
        threads=grad_norm.LANES // grad_norm.VECTOR,
        occupancy=LOW_OCCUPANCY.get(name, (0.5,))[0],
        fp64=True,
        loads=pieces(grad_norm.VECTOR * size(kind)) * grad_norm.ROWS,
        stores=[8],
        round=(grad_norm.VECTOR * size(kind), 0),
        shared=None,
    )
    signature: dict[str, str | None] = {"rows": "*i64", "chunks": "*i64", "blocks": "*fp64"}
    return Kernel(name, grad_norm.block_kernel, signature, constants, demands)


def norm_combine(p: int) -> Kernel:
    signature: dict[str, str | None] = {"blocks": "*fp64", "count": "i32", "total": "*fp64", "nonfinite": "*fp32"}
    constants = {"P": p, "LANES": grad_norm.LANES, "UNROLL": grad_norm._UNROLL}
    demands = Demands(threads=_launch.THREADS, shared=None, fp64=True, fp64_loops=True)
    return Kernel(f"norm {p}, combined", grad_norm.combine_kernel, signature, constants, demands)


KERNELS = [
    copy(tl.float32, tl.bfloat16, True),
    copy(tl.bfloat16, tl.float32, False),
    copy(tl.int16, tl.int16, False),
    update("fp32", tl.float32, tl.float32, tl.float32),
    update("fp32, scaled, bf16 shadow", tl.float32, tl.float32, tl.float32, None, tl.bfloat16, scaled=True),
    update("fp32, amsgrad", tl.float32, tl.float32, tl.float32, amsgrad=True),
    update("bf16 split32", tl.int16, tl.bfloat16, tl.float32, tl.int16),
    update("bf16 split32, scaled, bf16 shadow", tl.int16, tl.bfloat16, tl.float32, tl.int16, tl.bfloat16, scaled=True),
    update("bf16 split32, fp32 gradient", tl.int16, tl.float32, tl.float32, tl.int16),
    update("fp16, fp32 master", tl.float16, tl.float16, tl.float32, tl.float32, tl.float32, amsgrad=True, scaled=True),
    update("bf16 split24, bf16 moments", tl.int16, tl.bfloat16, tl.int16, tl.int8),
    update(
        "bf16 stochastic", tl.int16, tl.bfloat16, tl.int16, None, tl.bfloat16, amsgrad=True, strided=True, scaled=True
    ),
    update("bf16 split24, int8", tl.int16, tl.bfloat16, tl.int8, tl.int8),
    update("fp32, int8", tl.float32, tl.float32, tl.int8, None, tl.bfloat16, amsgrad=True, strided=True, scaled=True),
    *(scalars(lr_tensor) for lr_tensor in (None, "*fp64")),
    norm_blocks(tl.bfloat16, 0),
    norm_blocks(tl.float32, 2),
    *(norm_combine(p) for p in (0, 2)),
]


# ---- proofs ----------------------------------------------------------------------------------------------------------


def assembler_reason(monkeypatch: pytest.MonkeyPatch, arch: int) -> str | None:
    """Why the backend refuses a machine with such a GPU: that triton's code for it is not claimed to be right."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: divmod(arch, 10))
    backend._assembler_reason.cache_clear()
    reason = backend._assembler_reason()
    backend._assembler_reason.cache_clear()
    return reason


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_machine_code(kernel: Kernel, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No local memory, no float64 but where meant, IEEE arithmetic, nothing fused, the widest and fewest accesses."""
    if reason := assembler_reason(monkeypatch, arch):
        pytest.skip(reason)
    program = kernel.compile(GPUTarget("cuda", arch, 32))
    (code,) = read_cubin(program.asm["cubin"]).values()
    assert problems(code, program.asm["ptx"], kernel.demands, program.metadata.shared) == {}
    if arch == ARCHITECTURES[-1] and kernel.name in LOW_OCCUPANCY:
        share = occupancy(code, kernel.demands.threads, program.metadata.shared)
        assert share < 0.5, f"the reason for {kernel.name} in LOW_OCCUPANCY is needed no more"


# Every kernel, in the storages that differ most.
AMD_NAMES = ("copy fp32 to bf16 scaled", "copy bf16 to fp32", "fp32", "fp16, fp32 master", "bf16 stochastic")
AMD_NAMES += ("bf16 split24, int8", "fp32, int8", "scalars, lr *fp64", "norm 2 of fp32", "norm 0, combined")
AMD_KERNELS = [kernel for kernel in KERNELS if kernel.name in AMD_NAMES]


@pytest.mark.parametrize("kernel", AMD_KERNELS, ids=lambda kernel: kernel.name)
def test_amd_machine_code(kernel: Kernel) -> None:
    """No scratch memory, no vector register spilled, denormals kept, nothing fused."""
    assert {kernel.function for kernel in AMD_KERNELS} == {kernel.function for kernel in KERNELS}
    assert amd_problems(kernel.compile(AMD).asm["amdgcn"]) == {}


@pytest.mark.parametrize(
    ("name", "loaded", "stored"),
    [("fp32", 16, 12), ("fp32, scaled, bf16 shadow", 16, 14), ("fp32, amsgrad", 20, 16), ("bf16 split32", 14, 12),
     ("bf16 split32, scaled, bf16 shadow", 14, 14), ("bf16 split32, fp32 gradient", 16, 12),
     ("fp16, fp32 master", 18, 22), ("bf16 split24, bf16 moments", 9, 7), ("bf16 stochastic", 12, 12),
     ("bf16 split24, int8", 7 + 8 / 128, 5 + 8 / 128)],
)  # fmt: skip
def test_bytes_demanded_of_an_update(name: str, loaded: float, stored: float) -> None:
    """What the demands come to for an element, so that both are not wrong alike."""
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    vector = kernel.constants["VECTOR"]
    words = 2 * 4 if "int8" in name else 0
    for accesses, expected in ((kernel.demands.loads, loaded), (kernel.demands.stores, stored)):
        assert accesses is not None
        assert (sum(accesses) - words) / vector + words / QUANTISED.value == expected


def test_values_of_arguments_do_not_recompile() -> None:
    """What triton compiles for depends on types alone: not on a rate, a count or the alignment of an address."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    kernels = {kernel.function for kernel in KERNELS}
    assert len(kernels) == 6
    target = CUDABackend(GPUTarget("cuda", 90, 32))
    for kernel in kernels:
        bind = create_function_from_signature(kernel.signature, kernel.params, target)
        found = set()
        for number in (0, 1, 3, 16):
            arguments: dict[str, Any] = {}
            for parameter in kernel.params:
                address = torch.zeros(64, dtype=torch.int64)[number:]
                value = {"count": number, "scale": float(number)}.get(parameter.name, address)
                is_float = "float64" in str(parameter._param.annotation)
                arguments[parameter.name] = 0 if parameter.is_constexpr else float(number) if is_float else value
            found.add(str(bind(**arguments)[1]))
        assert len(found) == 1, kernel
