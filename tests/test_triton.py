"""The Triton backend: its cases run in triton's interpreter, in processes of their own; its kernels compile for a GPU.

Whether triton interprets is decided when it is imported, hence the processes. ``triton_cases/`` holds what they run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardops
from shardops.backends import triton as backend

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

pytest.importorskip("triton", reason="triton is not installed: pip install triton")


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment, without what would make a child a worker of ours."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_INTERPRET", "SHARDOPS_BACKEND"))
    }
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {k: v for k, v in changes.items() if v is not None}


@pytest.mark.parametrize("cases", sorted(path.stem for path in (TESTS / "triton_cases").glob("*_cases.py")))
def test_interpreted(cases: str) -> None:
    """Every test of a file in ``triton_cases`` passes; a failure shows the child's report."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "triton_interpreter"]
    child = subprocess.run(
        [*command, "--tb=short", str(TESTS / "triton_cases" / f"{cases}.py")],
        env=environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"), cwd=ROOT, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    closing = child.stdout.strip().rpartition("\n")[2]  # warnings before it may speak of errors
    passed = re.search(r"(\d+) passed", closing)
    if child.returncode or not passed or int(passed[1]) < 10 or re.search("failed|skipped|error", closing):
        pytest.fail(f"{cases}, exit status {child.returncode}\n{child.stdout}\n{child.stderr}", pytrace=False)


def test_without_the_interpreter_a_cpu_has_no_triton() -> None:
    script = (
        "import torch, shardops; print(shardops.backends('cpu')['triton'])\n"
        "try: shardops.ops.cast_gather([torch.ones(2)], torch.float16, backend='triton')\n"
        "except RuntimeError as error: print(error)\n"
        "from shardops.backends import triton; print(triton.unavailable_reason('cuda'))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True, timeout=300
    )
    reason, error, cuda = child.stdout.strip().split("\n")
    assert "TRITON_INTERPRET=1" in reason
    assert error.startswith("backend 'triton' cannot run cast_gather on 'cpu'")
    assert reason in error
    assert cuda == "None"


def test_without_triton_the_backend_imports_and_says_why() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import shardops; from shardops.backends import triton\n"
        "print(sorted(triton.KERNELS)); print(shardops.backends('cuda')['triton'])"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True, timeout=300
    )
    kernels, reason = child.stdout.strip().split("\n")
    assert kernels == str(sorted(backend.KERNELS))
    assert "triton cannot be imported" in reason
    assert "pip install triton" in reason


@pytest.mark.parametrize(
    ("version", "capabilities", "refused"),
    [("3.6.0", [], False), ("3.6.0", [(9, 0), (8, 6)], False), ("3.6.0", [(9, 0), (10, 0)], True),
     ("3.5.1+git", [(12, 0)], True), ("3.7.0", [(12, 0)], False), ("3.10.0", [(10, 3)], False)],
)  # fmt: skip
def test_an_assembler_that_fuses_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, capabilities: list[tuple[int, int]], refused: bool
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    backend._assembler_reason.cache_clear()
    reason = backend._assembler_reason()
    backend._assembler_reason.cache_clear()
    assert (reason is not None) == refused
    assert reason is None or "install triton 3.7" in reason


def test_triton_on_a_cpu_is_never_the_default() -> None:
    assert shardops.ops._registry.default_backend("cpu") != "triton"


# ---- ahead-of-time compilation ---------------------------------------------------------------------------------------


def compiled(kernel: Any, signature: dict[str, str | None], constants: dict[str, Any], num_warps: int) -> Any:
    """A kernel compiled for an H100 with the options of its launcher; a type of None: the argument is None."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {name: None for name, kind in signature.items() if kind is None}
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    return triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )


def check_compiled(program: Any, tmp_path: Path) -> None:
    """IEEE arithmetic only, no fusion, and nothing spilled."""
    import triton

    ptx = program.asm["ptx"]
    operations = set(re.findall(r"\b(?:div|sqrt|rsqrt|rcp|fma|mul|add|sub|ex2|lg2)\.[a-z0-9.]*f(?:32x2|32|64)\b", ptx))
    inexact = [op for op in operations if re.search(r"approx|full|ftz|fma|rcp|rsqrt", op)]
    assert not inexact
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(program.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups())  # type: ignore[union-attr]
    assert (stack, local) == (0, 0)
    assert registers <= 128


if backend.unavailable_reason("cuda") is None:
    import triton.language as tl

    COPIES = [
        (tl.float32, tl.bfloat16, True),
        (tl.bfloat16, tl.float32, False),
        (tl.float16, tl.bfloat16, False),
        (tl.int16, tl.int16, False),
    ]
    UPDATES = [
        # param, grad, moment, master, shadow, amsgrad and coupled, optional scalars
        (tl.float32, tl.float32, tl.float32, None, None, False, None),
        (tl.int16, tl.bfloat16, tl.float32, tl.int16, tl.bfloat16, False, "*fp32"),
        (tl.float16, tl.float16, tl.float32, tl.float32, tl.float32, True, "*fp32"),
        (tl.int16, tl.bfloat16, tl.int16, tl.int8, None, False, None),
        (tl.int16, tl.bfloat16, tl.int16, None, tl.bfloat16, True, "*fp32"),
        # Moments in blocks.
        (tl.int16, tl.bfloat16, tl.int8, tl.int8, None, False, None),
        (tl.float32, tl.float32, tl.int8, None, tl.bfloat16, True, "*fp32"),
    ]
else:  # this process interprets: nothing compiles
    COPIES, UPDATES = [], []


@pytest.mark.parametrize(("source", "target", "scaled"), COPIES, ids=str)
def test_copy_compiles(source: Any, target: Any, scaled: bool, tmp_path: Path) -> None:
    from shardops.backends.triton._copy import ROUNDS, copy_kernel

    vector = 128 // max(source.primitive_bitwidth, target.primitive_bitwidth)
    constants = {"SOURCE": source, "TARGET": target, "SCALED": scaled}
    constants |= {"VECTOR": vector, "BLOCK": 256 * vector, "ROUNDS": ROUNDS}
    program = compiled(copy_kernel, {"rows": "*i64", "chunks": "*i64", "scale": "fp32"}, constants, 8)
    check_compiled(program, tmp_path)
    assert program.metadata.shared == 0
    # The wide path: 128 bits a thread of the wider elements.
    assert re.search(r"ld\.global\.v\d", program.asm["ptx"])
    assert re.search(r"st\.global\.v\d", program.asm["ptx"])


@pytest.mark.parametrize(("param", "grad", "moment", "master", "shadow", "others", "scalar"), UPDATES, ids=str)
def test_update_compiles(
    param: Any, grad: Any, moment: Any, master: Any, shadow: Any, others: bool, scalar: str | None, tmp_path: Path
) -> None:
    from shardops.backends.triton import _adam_blocks, _adam_elements, _launch, sharded_adam

    stored = [kind for kind in (param, moment, master, shadow, tl.float32 if others else None) if kind is not None]
    vector = sharded_adam.VECTOR if tl.float32 in stored else sharded_adam.NARROW_VECTOR
    threads = sharded_adam.BLOCK_THREADS if moment == tl.int8 else _launch.THREADS
    block = vector * threads
    signature = {"rows": "*i64", "chunks": "*i64", "scalars": "*fp32", "grad_scale": scalar, "found_inf": scalar}
    constants = {"PARAM": param, "GRAD": grad, "MASTER": master, "SHADOW": shadow, "COUPLED": others}
    constants |= {"FROM_GRAD": False, "AMSGRAD": others, "STRIDED": others and master is None, "VECTOR": vector}
    quantised = moment == tl.int8
    if quantised:
        program = compiled(
            _adam_blocks.update_blocks_kernel, signature, constants | {"BLOCKS": block // 128}, threads // 32
        )
    else:
        dithered = moment == tl.int16 or master == tl.int8
        constants |= {"MOMENT": moment, "DITHERED": dithered, "BLOCK": block}
        program = compiled(_adam_elements.update_kernel, signature, constants, threads // 32)
    check_compiled(program, tmp_path)
    # The wide paths keep their elements in registers; the words of blocks change hands, since few threads store them.
    assert program.metadata.shared <= (4 * block // 128 if quantised else 0)
    ptx = program.asm["ptx"]
    assert {"div.rn.f32", "sqrt.rn.f32"} <= set(re.findall(r"(?:div|sqrt)\.[a-z.]*f32", ptx))
    assert not re.search(r"(?:add|sub|mul|div|sqrt)\.[a-z.]*f64", ptx)
    # 128 bits of the widest elements stored.
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v4\.b32", ptx)


@pytest.mark.parametrize("lr_tensor", [None, "*fp32", "*fp64"])
def test_scalars_compile(lr_tensor: str | None, tmp_path: Path) -> None:
    if backend.unavailable_reason("cuda") is not None:
        pytest.skip("this process interprets")
    from shardops.backends.triton._adam_scalars import TENSORS, scalars_kernel

    options = dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), "fp64")
    scalar = None if lr_tensor is None else "*fp32"
    signature = {"rows": "*i64", "scalars": "*fp32", "count": "i32", **options}
    signature |= {"lr_tensor": lr_tensor, "clip_coef": scalar, "found_inf": scalar}
    constants = {"DECOUPLED": True, "FROM_GRAD": False, "MAXIMIZE": False, "TENSORS": TENSORS}
    check_compiled(compiled(scalars_kernel, signature, constants, 4), tmp_path)


@pytest.mark.parametrize("p", [0, 2])
def test_grad_norm_compiles(p: int, tmp_path: Path) -> None:
    if backend.unavailable_reason("cuda") is not None:
        pytest.skip("this process interprets")
    import triton.language as tl

    from shardops.backends.triton.grad_norm import LANES, ROWS, VECTOR, block_kernel, combine_kernel

    constants = {"DTYPE": tl.bfloat16, "P": p, "VECTOR": VECTOR, "LANES": LANES, "ROWS": ROWS}
    blocks = compiled(block_kernel, {"rows": "*i64", "chunks": "*i64", "blocks": "*fp64"}, constants, 2)
    check_compiled(blocks, tmp_path)
    signature = {"blocks": "*fp64", "count": "i32", "total": "*fp64", "nonfinite": "*fp32"}
    check_compiled(compiled(combine_kernel, signature, {"P": p, "LANES": LANES, "UNROLL": 16}, 8), tmp_path)


def test_values_of_arguments_do_not_recompile() -> None:
    """What triton compiles for depends on types alone: not on a rate, a count or the alignment of an address."""
    if backend.unavailable_reason("cuda") is not None:
        pytest.skip("this process interprets")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from shardops.backends.triton import _adam_blocks, _adam_elements, _adam_scalars, _copy, grad_norm

    kernels = (
        _adam_scalars.scalars_kernel,
        _copy.copy_kernel,
        grad_norm.block_kernel,
        grad_norm.combine_kernel,
        _adam_elements.update_kernel,
        _adam_blocks.update_blocks_kernel,
    )
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


def test_launchers_never_wait_for_the_device() -> None:
    """No ``.item()``, ``.cpu()`` or ``.tolist()`` of anything but a tensor that the host made."""
    folder = Path(backend.__file__).parent
    found = {
        f"{path.name}: {line.strip()}"
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\.(item|cpu|tolist|nonzero|synchronize)\(", line)
    }
    allowed = ("torch.tensor(scale", "step_index is", "dither is", "segments[~inside]")
    assert all(any(text in line for text in allowed) for line in found)
    assert torch.tensor(0.3, dtype=torch.float32).item() != 0.3  # what the one .item() is for
