"""Which backends can run and why not: the C++ backend's reasons on GPUs, and what no backend does on a device."""

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
from shardops.backends import cpp

PACKAGE = Path(shardops.__file__).resolve().parent


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    cpp._cuda_reason.cache_clear()
    yield
    cpp._cuda_reason.cache_clear()


def has_cuda_kernels(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: answer)


def test_a_library_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    has_cuda_kernels(monkeypatch, False)
    reason = shardops.backends("cuda")["cpp"]
    assert "without CUDA kernels" in reason
    assert "CUDA_HOME" in reason
    assert shardops.backends("cpu")["cpp"] == "available"


@pytest.mark.parametrize(
    ("capabilities", "refused"),
    [([], None), ([(8, 0)], None), ([(9, 0), (10, 0)], None), ([(12, 0)], None), ([(9, 0), (7, 5)], 1), ([(7, 0)], 0)],
)
def test_gpus_that_are_too_old(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], refused: int | None
) -> None:
    has_cuda_kernels(monkeypatch, True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    reason = shardops.backends("cuda")["cpp"]
    if refused is None:
        assert reason == "available"
    else:
        major, minor = capabilities[refused]
        assert f"GPU {refused} has compute capability {major}.{minor}" in reason
        assert "8.0 and later" in reason


def test_a_torch_for_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    has_cuda_kernels(monkeypatch, True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "for NVIDIA GPUs" in shardops.backends("cuda")["cpp"]


def test_a_device_type_without_kernels() -> None:
    assert "'xpu'" in str(cpp.unavailable_reason("xpu"))


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends").rglob("*.py")), ids=lambda path: path.stem)
def test_no_number_is_copied_to_a_device(path: Path) -> None:
    """``torch.tensor(number, device=...)`` copies from pageable memory, which waits, and ends a capture."""
    found = re.findall(r"torch\.(?:as_)?tensor\([^()]*(?:\([^()]*\)[^()]*)*device=", path.read_text())
    assert not found


@pytest.mark.parametrize("content", [None, "not a library"])
def test_a_library_that_cannot_be_loaded(tmp_path: Path, content: str | None) -> None:
    """The package imports, the backend says why, and another one runs."""
    library = tmp_path / "_ops.so"
    if content is not None:
        library.write_text(content)
    script = (
        "import torch, shardops; print(shardops.backends('cpu')['cpp'])\n"
        "print(shardops.ops.cast_gather([torch.ones(2)], torch.bfloat16).tolist())"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SHARDOPS_LIBRARY": str(library), "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    reason, result = child.stdout.strip().split("\n")
    assert reason.startswith(f"SHARDOPS_LIBRARY names {library}, which cannot be loaded (")
    assert ("there is no such file" if content is None else "_ops.so") in reason
    assert reason.endswith("name another library, or unset it")
    assert result == "[1.0, 1.0]"
