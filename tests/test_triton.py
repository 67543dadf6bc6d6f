"""The Triton backend: its cases run in triton's interpreter, in processes of their own.

Whether triton interprets is decided when it is imported, hence the processes. ``triton_cases/`` holds what they run;
``test_triton_code.py`` reads what the kernels become for a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
