"""``shardops doctor``: what it finds on this machine, and that it finds what is broken.

Breaks a backend, hides the library, names a backend that cannot run, pretends a GPU: each must end in exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardops import doctor
from shardops.backends import cpp
from shardops.cli import main
from shardops.ops import _registry

KEYS = {
    "schema": int,
    "ok": bool,
    "problems": list,
    "warnings": list,
    "versions": dict,
    "devices": list,
    "backends": dict,
    "instruction_sets": dict,
    "library": dict,
    "compilers": dict,
    "communication": dict,
    "environment": dict,
    "self_tests": list,
}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in doctor._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_GPU_NODES", {})
    _registry._resolve.cache_clear()
    yield
    _registry._resolve.cache_clear()


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, dict[str, Any]]]:
    """The exit code of ``shardops doctor --json``, and what it printed: nothing but JSON."""

    def run() -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


Examine = Callable[[], tuple[int, dict[str, Any]]]


def broken(primitive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the C++ backend write one wrong bit in the last tensor that has elements."""
    right = cpp.KERNELS[primitive]

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        # Mutated arguments come first, but for unflatten_shard's; grad_norm returns its results.
        written = result or (arguments[1] if primitive == "unflatten_shard" else arguments[0])
        tensors = [written] if isinstance(written, Tensor) else list(written)
        last = [tensor for tensor in tensors if tensor.numel()][0 if primitive == "grad_norm" else -1]
        last.view(INTEGERS[last.dtype.itemsize]).reshape(-1)[-1:].bitwise_xor_(1)
        return result

    monkeypatch.setitem(cpp.KERNELS, primitive, wrong)


# ---- a sound machine -------------------------------------------------------------------------------------------------


def test_json_of_this_machine(examine: Examine) -> None:
    code, found = examine()
    assert code == 0, found["problems"]
    assert {name: type(value) for name, value in found.items()} == KEYS
    assert (found["ok"], found["problems"], found["warnings"]) == (True, [], [])
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"].keys() == {"python", "torch", "triton", "numpy", "shardops", "cuda", "hip"}
    cpu = found["devices"][0]
    assert cpu.keys() == {"device", "type", "name", "capability", "memory", "driver", "cores", "threads"}
    assert (cpu["device"], cpu["threads"]) == ("cpu", torch.get_num_threads())
    assert cpu["memory"] > 1 << 28
    backends = found["backends"]["cpu"]
    assert (backends["devices"], backends["chosen"], backends["why"]) == (1, "cpp", None)
    assert backends["reasons"].keys() == set(_registry.BACKENDS)
    assert "TRITON_INTERPRET" in backends["reasons"]["triton"]
    assert found["library"]["found"]
    assert "-ffp-contract=off" in found["library"]["flags"]
    sets = found["instruction_sets"]
    assert sets["used"] == sets["found"][-1]
    for group in found["communication"].values():
        assert group["available"] == (group["reason"] is None)
    assert found["communication"]["gloo"]["available"]


def test_every_primitive_is_tested(examine: Examine) -> None:
    _, found = examine()
    tests = found["self_tests"]
    assert {test["primitive"] for test in tests} == set(cpp.PRIMITIVES)
    assert {(test["device"], test["backend"], test["ok"], test["error"]) for test in tests} == {
        ("cpu", "cpp", True, None)
    }
    cases = {test["case"] for test in tests if test["primitive"] == "sharded_adam"}
    assert cases == {"fp32", "bf16 + split32", "int8 + split24"}
    assert sum(test["seconds"] for test in tests) < 1.0


@pytest.mark.parametrize("case", list(doctor._cases()), ids=lambda case: f"{case[0]}, {case[1]}")
def test_the_yardstick_writes_something(case: doctor.Case) -> None:
    """Equal zeros would show nothing."""
    written = case[2](torch.device("cpu"), "reference")
    for name, tensor in written.items():
        assert name == "found_inf" or not tensor.numel() or bool((tensor != 0).any()), name
        if tensor.is_floating_point() and not name.startswith("masters"):  # bits of remainders
            assert bool(tensor.isfinite().all()), name


def test_it_is_shown_with_rich_and_without(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    texts = []
    for _ in range(2):
        assert main(["doctor"]) == 0
        texts.append(capsys.readouterr().out)
        monkeypatch.setitem(sys.modules, "rich", None)
    assert "━" in texts[0]
    assert "━" not in texts[1]
    for text in texts:
        assert "All is well. What runs when no backend is named: cpu: cpp" in text
        assert "int8 + split24" in text
        assert torch.__version__ in text
        assert "FAILED" not in text


# ---- broken ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("primitive", cpp.PRIMITIVES)
def test_one_wrong_bit_is_found(primitive: str, monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    broken(primitive, monkeypatch)
    code, found = examine()
    assert (code, found["ok"]) == (1, False)
    for test in found["self_tests"]:
        assert test["ok"] == (test["primitive"] != primitive), test
    (problem,) = found["problems"]
    assert problem.startswith(f"cpu: backend 'cpp' fails in {primitive}")
    assert "differs from the reference in 1 of" in problem
    assert "SHARDOPS_BACKEND=reference" in problem


def test_what_differs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cpp.KERNELS, "cast_gather", lambda out, shards: out.fill_(2.0))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text
    assert "All is well" not in text
    assert "PROBLEM: cpu: backend 'cpp' fails in cast_gather (fp32 to bf16): out differs from the reference in" in text
    assert f"elements; the first, 0, is 2.0, not {doctor._values(1.0)[0].bfloat16()[0, 0].item()!r}" in text


def test_a_backend_that_raises(monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setitem(cpp.KERNELS, "grad_norm", fails)
    code, found = examine()
    assert code == 1
    errors = {test["error"] for test in found["self_tests"] if test["primitive"] == "grad_norm"}
    assert errors == {"RuntimeError: no kernel image is available"}
    assert "RuntimeError: no kernel image is available" in found["problems"][0]


def test_other_shapes_and_dtypes_are_differences() -> None:
    expected = {"out": torch.zeros(3)}
    assert doctor._difference({"out": torch.zeros(3)}, expected) is None
    assert "not torch.float32 of (3,)" in str(doctor._difference({"out": torch.zeros(4)}, expected))
    assert "is torch.float16" in str(doctor._difference({"out": torch.zeros(3).half()}, expected))
    assert "1 of 3 elements; the first, 2, is -0.0, not 0.0" in str(
        doctor._difference({"out": torch.tensor([0.0, 0.0, -0.0])}, expected)
    )


@pytest.mark.parametrize(("chosen", "where"), [("cpp", "problems"), ("triton", "warnings")])
def test_only_the_chosen_backend_decides(chosen: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"device": "cuda:0", "primitive": "grad_norm", "case": "2-norm", "error": "wrong", "seconds": 0.0}
    monkeypatch.setattr(
        doctor, "self_test", lambda device, backend: [result | {"backend": backend, "ok": backend != "cpp"}]
    )
    found: dict[str, Any] = {"problems": [], "warnings": [], "self_tests": []}
    reasons = dict.fromkeys(_registry.BACKENDS)
    doctor._examine_device(found, torch.device("cuda:0"), {"chosen": chosen, "why": None, "reasons": reasons})
    assert len(found["problems"] + found["warnings"]) == 1
    assert found[where][0].startswith("cuda:0: backend 'cpp' fails in grad_norm (2-norm): wrong")
    assert [test["backend"] for test in found["self_tests"]] == list(_registry.BACKENDS)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    monkeypatch.setenv("SHARDOPS_LIBRARY", "/not/there.so")
    code, found = examine()
    assert code == 1
    assert not found["library"]["found"]
    assert found["backends"]["cpu"]["chosen"] == "reference"
    assert found["environment"] == {"SHARDOPS_LIBRARY": "/not/there.so"}
    (problem,) = found["problems"]
    assert problem.startswith("cpu: no fused backend can run")
    assert "install g++" in problem
    assert found["self_tests"] == []


def test_without_the_host_module_and_triton(monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    monkeypatch.setitem(sys.modules, "shardops._host", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    code, found = examine()
    assert code == 0
    assert found["versions"]["triton"] is None
    assert (found["library"]["flags"], found["instruction_sets"]["used"]) == (None, None)
    assert "host module cannot be imported" in found["warnings"][0]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SHARDOPS_BACKEND", "reference", "which fuses nothing; unset it"),
        ("SHARDOPS_BACKEND", "triton", "in its interpreter"),
        ("SHARDOPS_BACKEND", "cuda", "there is none of that name"),
        ("SHARDOPS_CPU_CAPABILITY", "avx9", "this CPU and build run default"),
    ],
)
def test_variables_that_spoil_it(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, examine: Examine
) -> None:
    monkeypatch.setenv(name, value)
    code, found = examine()
    assert code == 1
    assert reason in found["problems"][0]
    assert found["environment"] == {name: value}


# ---- devices and communication that are not here ---------------------------------------------------------------------


def test_a_gpu_on_which_nothing_works(monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, on which things do work")
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    code, found = examine()
    assert code == 1
    device = found["devices"][1]
    assert (device["device"], device["name"], device["capability"]) == ("cuda:0", "A GPU", "9.0")
    assert device["memory"] == 80 << 30
    assert found["backends"]["cuda"]["devices"] == 1
    assert found["problems"][0].startswith("cuda:0: backend 'cpp' fails in sharded_adam (fp32), ")
    assert {test["ok"] for test in found["self_tests"] if test["device"] == "cuda:0"} == {False}
    assert {test["ok"] for test in found["self_tests"] if test["device"] == "cpu"} == {True}


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examine: Examine) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "_GPU_NODES", {str(tmp_path): "an NVIDIA GPU"})
    code, found = examine()
    assert code == 1
    assert "this machine has an NVIDIA GPU: torch" in found["problems"][0]
    assert "without GPU support" in found["problems"][0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch finds none" in str(doctor._unusable_gpu())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._unusable_gpu() is None


def test_gloo_that_cannot_open_a_group(monkeypatch: pytest.MonkeyPatch, examine: Examine) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("unable to resolve the host's name\nat gloo/rendezvous.cc")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fails)
    code, found = examine()
    gloo = found["communication"]["gloo"]
    assert (code, gloo["available"]) == (0, False)
    assert "(unable to resolve the host's name); name the network interface by GLOO_SOCKET_IFNAME" in gloo["reason"]
