"""Every instruction set of the C++ kernels gives the same bits, and SHARDOPS_CPU_CAPABILITY chooses one.

Run as a script, this file prints a digest of each primitive's results: the choice is made once a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adam_modes import MASTERS, MOMENTS, dither_table, mode_lists
from reference import DTYPES, adam_lists, awkward, bits, ordinary, unaligned
from torch import Tensor

from shardops import _host, ops

CAPABILITIES = ("default", "avx2", "avx512")
NUMELS = (1, 7, 31, 64, 70, 519, 4097)


def casts(backend: str) -> Iterator[Tensor]:
    for source in DTYPES:
        for target in DTYPES:
            tensors = [unaligned(awkward(numel, numel, source)) for numel in NUMELS]
            yield ops.cast_gather(tensors, target, backend=backend)
            yield ops.flatten_shard(tensors, 3, dtype=target, scale=0.3, backend=backend)
    # Results of 16 MiB and more are written past the caches.
    for source, target in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        large = unaligned(awkward(4097, 0, source).repeat(2100))
        yield ops.flatten_shard([large], 3, dtype=target, backend=backend)


def norms(backend: str) -> Iterator[Tensor]:
    for dtype in DTYPES:
        for norm_type in (1.0, 2.0, float("inf")):
            for seed, numel in enumerate(NUMELS):
                grads = [ordinary(numel, seed=seed, dtype=dtype), awkward(numel, seed, dtype, finite=True)]
                yield from ops.grad_norm(grads, norm_type, backend=backend)


def updates(backend: str) -> Iterator[Tensor]:
    formats = [(torch.float32, None), (torch.bfloat16, "split"), (torch.bfloat16, "fp32"), (torch.float16, "fp32")]
    shapes = [(numel,) for numel in NUMELS]
    for seed, (param_dtype, master) in enumerate(formats):
        for amsgrad in (False, True):
            for values in (None, awkward):
                kinds: dict[str, Any] = {"param_dtype": param_dtype, "master": master, "amsgrad": amsgrad}
                kinds |= {"grad_dtype": DTYPES[seed % 3], "shadow_dtype": DTYPES[(seed + 1) % 3]}
                lists = adam_lists(shapes, seed, values=values, **kinds).mapped(unaligned)
                lists.update(backend, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=amsgrad)
                lists.update(backend, lr=1e-2, grad_scale=torch.tensor(3.0), clip_coef=torch.tensor(0.3), beta1=0.4)
                yield from (tensor for _, tensor in lists.named())
    for seed, (moments, master) in enumerate((moments, master) for moments in MOMENTS for master in MASTERS):
        for values in (None, awkward):
            kinds = {"grad_dtype": DTYPES[seed % 3], "shadow_dtype": DTYPES[(seed + 1) % 3], "values": values}
            lists = mode_lists([(2, 129), (3, 64), (519,)], seed, moments, master, **kinds).mapped(unaligned)
            for step in range(2):
                lists.update(backend, lr=1e-2, dither=dither_table(lists, step), rounding=master.rounding)
            yield from (tensor for _, tensor in lists.named())


BATTERY: dict[str, Callable[[str], Iterator[Tensor]]] = {
    "casts": casts,
    "grad_norm": norms,
    "sharded_adam": updates,
}


def digests(backend: str) -> dict[str, str]:
    """One hash for each primitive, in which all NaNs are one."""
    results = {}
    for name, battery in BATTERY.items():
        sha = hashlib.sha256()
        for tensor in battery(backend):
            sha.update(bits(torch.where(tensor.isnan(), torch.nan, tensor)).numpy().tobytes())
        results[name] = sha.hexdigest()
    return results


def run(capability: str | None, *code: str) -> subprocess.CompletedProcess[str]:
    """This file, or code, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "SHARDOPS_CPU_CAPABILITY"}
    if capability is not None:
        environment["SHARDOPS_CPU_CAPABILITY"] = capability
    root = Path(__file__).resolve().parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *(("-c", *code) if code else (__file__,))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return digests("reference")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_same_bits_from_every_instruction_set(capability: str, expected: dict[str, str]) -> None:
    if capability not in _host.cpu_capabilities():
        pytest.skip(f"this CPU, or this build, lacks {capability}: it runs {', '.join(_host.cpu_capabilities())}")
    result = run(capability)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"capability": capability, **expected}


# The host module by itself: it needs no torch, which takes seconds to import.
CHOSEN = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_host", {_host.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.cpu_capability())
"""


def test_best_is_chosen_when_nothing_is_said() -> None:
    for unset in (None, ""):
        result = run(unset, CHOSEN)
        assert result.stdout.strip() == _host.cpu_capabilities()[-1], result.stderr


def test_list_starts_with_default() -> None:
    listed = _host.cpu_capabilities()
    assert listed == list(CAPABILITIES[: len(listed)])
    assert len(listed) >= 1


CALLS = {
    "cast_gather": "ops.cast_gather([torch.ones(3)], torch.bfloat16, backend='cpp')",
    "grad_norm": "ops.grad_norm([torch.ones(3)], backend='cpp')",
    "sharded_adam": "z = lambda: [torch.zeros(3)]; p = [torch.ones(3)]; "
    "ops.sharded_adam(p, z(), z(), z(), torch.zeros(1), lr=1.0, backend='cpp')",
}


def test_unknown_name_is_an_error_everywhere() -> None:
    """It names the value, what there is, and the remedy; a second call fails as the first did."""
    listed = ", ".join(_host.cpu_capabilities())
    lines = ["import torch", "from shardops import _host, ops", "print(_host.cpu_capabilities())"]
    for call in ("_host.cpu_capability()", *CALLS.values(), *CALLS.values()):
        lines += ["try:", f"    {call}", "    print('no error')", "except RuntimeError as error:", "    print(error)"]
    result = run("sse9", "\n".join(lines))
    assert result.returncode == 0, result.stderr
    first, *messages = (
        line for line in result.stdout.splitlines() if "SHARDOPS" in line or "error" in line or "[" in line
    )
    assert first == str(_host.cpu_capabilities())
    assert len(messages) == 7, result.stdout
    for message in messages:
        assert (
            f"SHARDOPS_CPU_CAPABILITY=sse9 cannot be used: this CPU and build run {listed}; "
            "unset it to take the best of these" in message
        )


def test_a_set_that_this_cpu_lacks_is_an_error() -> None:
    lacking = [name for name in CAPABILITIES if name not in _host.cpu_capabilities()]
    if not lacking:
        pytest.skip("this CPU runs them all")
    result = run(lacking[0], CHOSEN)
    assert result.returncode != 0
    assert f"SHARDOPS_CPU_CAPABILITY={lacking[0]} cannot be used" in result.stderr


def test_the_digest_sees_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A battery whose results do not reach the digest would agree with anything."""
    before = digests("cpp")
    for name, battery in list(BATTERY.items()):

        def changed(backend: str, battery: Callable[[str], Iterator[Tensor]] = battery) -> Iterator[Tensor]:
            results = [tensor.clone() for tensor in battery(backend)]
            bits(results[-1].view(-1)[-1:]).bitwise_xor_(1)
            yield from results

        monkeypatch.setitem(BATTERY, name, changed)
        assert digests("cpp")[name] != before[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"capability": _host.cpu_capability(), **digests("cpp")}))
