"""What the glue above the CUDA kernels refuses, before anything is written, and how a launch that fails is told.

The calls go past the typed functions. At the end: what the twins themselves refuse to run, since a GPU would not.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import twin
from adam_modes import FP32, MASTERS, SPLIT32, Master, dither_table, mode_lists
from reference import AdamLists, clone_storage, whole_storage
from torch import Tensor

META = torch.ones((), device="meta")
SEGMENTS = torch.tensor([[0, 0, 0, 4], [1, 0, 4, 4]])
ERROR = "too many resources requested for launch"


@pytest.fixture(autouse=True)
def _registered() -> None:
    twin.register()


def run_on_cpu(name: str, *arguments: Any) -> Any:
    """The op's own implementation, also where a tensor of another device would lead to that one's."""
    op = getattr(torch.ops.shardops_twin, name).default
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments)


def step(lists: AdamLists, **options: Any) -> None:
    rounding = {None: 0, "nearest": 1, "stochastic": 2}[options.get("rounding")]
    run_on_cpu(
        "sharded_adam",
        *(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, lists.masters),
        *(lists.shadows, lists.block_words, lists.steps, options.get("step_index"), options.get("dither"), rounding),
        *(1e-2, 0.9, 0.999, 1e-8, 0.0, True, False),
        *(options.get(name) for name in ("lr", "clip_coef", "grad_scale", "found_inf")),
    )


def misaligned(tensor: Tensor) -> Tensor:
    """An equal tensor that starts one byte after an element's address."""
    size = tensor.dtype.itemsize
    memory = torch.zeros((tensor.numel() + 2) * size, dtype=torch.uint8)
    start = -memory.data_ptr() % size + 1
    found = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, offset=start, count=tensor.numel())
    return found.view(tensor.shape).copy_(tensor)


def assert_refused(lists: AdamLists, message: str, **options: Any) -> None:
    tensors = [tensor for _, tensor in lists.named() if not tensor.is_meta]
    before = [whole_storage(clone_storage(tensor)) for tensor in tensors]
    with twin.Traffic() as traffic, pytest.raises(RuntimeError, match=message):
        step(lists, **options)
    assert traffic.launches == 0
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(whole_storage(tensor).view(torch.uint8), was.view(torch.uint8))


# ---- sharded_adam ----------------------------------------------------------------------------------------------------

ONE_ELEMENT = "must be one element beside the parameters"
SCALARS: list[tuple[dict[str, Tensor], str]] = [
    *(({name: META}, f"{name} {ONE_ELEMENT}") for name in ("clip_coef", "grad_scale", "found_inf", "lr")),
    *(({name: torch.ones(2)}, f"{name} {ONE_ELEMENT}") for name in ("clip_coef", "grad_scale", "found_inf", "lr")),
    *(
        ({name: torch.ones((), dtype=torch.float64)}, f"{name} must be float32")
        for name in ("clip_coef", "grad_scale", "found_inf")
    ),
    ({"lr": META.double()}, f"lr {ONE_ELEMENT}"),
    ({"lr": torch.ones((), dtype=torch.bfloat16)}, "lr must be float32 or float64"),
    ({"lr": torch.ones((), dtype=torch.int64)}, "lr must be float32 or float64"),
    ({"step_index": torch.tensor([0, 0])}, "step_index holds 0 twice; each of params has a counter of its own"),
    ({"step_index": torch.tensor([0, 2])}, "step_index holds 2, steps has 2 elements"),
]


@pytest.mark.parametrize(("options", "message"), SCALARS, ids=str)
def test_scalars_that_the_kernels_cannot_read(options: dict[str, Tensor], message: str) -> None:
    lists = mode_lists([(3, 130), (7,)], 1, "fp32", SPLIT32)
    step(lists.clone())
    assert_refused(lists, message, **options)


@pytest.mark.parametrize("found", [None, torch.tensor(0.0)], ids=["host", "device"])
def test_steps_that_the_kernels_cannot_count(found: Tensor | None) -> None:
    for steps, message in (
        (torch.zeros(1), "step_index holds 1, steps has 1 elements"),
        (torch.zeros(2, dtype=torch.float64), "steps must be a contiguous float32 tensor"),
        (torch.zeros(4)[::2], "steps must be a contiguous float32 tensor"),
    ):
        lists = mode_lists([(3, 130), (7,)], 1, "fp32", SPLIT32)
        lists.steps = steps
        assert_refused(lists, message, found_inf=found)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_tensors_where_the_kernels_cannot_go(moments: str, master: Master) -> None:
    """Of each list: one on another device, and one between the addresses of its elements."""
    kinds: dict[str, Any] = {"grad_dtype": torch.bfloat16, "shadow_dtype": torch.float16, "amsgrad": True}
    plain = mode_lists([(3, 130), (130,)], 1, moments, master, **kinds)
    options = {"dither": dither_table(plain, 5), "rounding": master.rounding}
    step(plain.clone(), **options)
    for name in (name for name, tensors in vars(plain).items() if name != "steps" and tensors):
        first, second = getattr(plain, name)
        lists = plain.clone()
        setattr(lists, name, [first.clone(), second.to("meta")])
        assert_refused(lists, rf"{name}\[1\] is on another device", **options)
        if second.dtype.itemsize > 1:
            setattr(lists, name, [first.clone(), misaligned(second)])
            size = second.dtype.itemsize
            assert_refused(lists, rf"{name}\[1\] starts at an address that is no multiple .* {size} bytes", **options)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("found", [None, torch.tensor(0.0)], ids=["host", "device"])
def test_a_step_that_is_not_launched(moments: str, found: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the primitive and CUDA's reason; the counters stay."""
    lists = mode_lists([(3, 130), (130,)], 1, moments, FP32)
    before = lists.clone()
    for lr in (None, torch.tensor(0.1)):
        primitive = "sharded_adam" if found is None and lr is None else "sharded_adam's scalars"
        with monkeypatch.context() as patch, pytest.raises(RuntimeError) as caught:
            patch.setenv("SHARDOPS_TWIN_LAUNCH_ERROR", ERROR)
            step(lists, found_inf=found, lr=lr)
        assert f"CUDA could not launch {primitive}: {ERROR}; an earlier kernel's" in str(caught.value)
        lists.assert_same(before)
        step(lists.clone(), found_inf=found, lr=lr)


# ---- copies and norm -------------------------------------------------------------------------------------------------


def flatten(buffer: Tensor, tensors: list[Tensor]) -> None:
    run_on_cpu("flatten_shard", buffer, tensors, SEGMENTS, None)


def unflatten(buffer: Tensor, tensors: list[Tensor]) -> None:
    run_on_cpu("unflatten_shard", buffer, tensors, SEGMENTS, None)


def gather(buffer: Tensor, tensors: list[Tensor]) -> None:
    run_on_cpu("cast_gather", buffer, tensors)


def norm(buffer: Tensor, tensors: list[Tensor]) -> None:
    run_on_cpu("grad_norm", [buffer, *tensors], 2.0)


CALLS: list[tuple[Callable[[Tensor, list[Tensor]], None], str]] = [
    (flatten, "flatten_shard"),
    (unflatten, "unflatten_shard"),
    (gather, "cast_gather"),
    (norm, "grad_norm"),
]
each_call = pytest.mark.parametrize(("call", "primitive"), CALLS, ids=[name for _, name in CALLS])


@each_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_memory_where_the_kernels_cannot_go(
    call: Callable[[Tensor, list[Tensor]], None], primitive: str, dtype: torch.dtype, position: int
) -> None:
    for make, message in (
        (lambda t: t.to("meta"), "is on another device|is not on the CPU"),
        (misaligned, rf"\[[01]\] starts at an address that is no multiple .* {dtype.itemsize} bytes"),
    ):
        if primitive == "grad_norm":
            message = message.replace("[01]", "[012]")
        tensors = [torch.full((n,), 2.0, dtype=dtype) for n in (8, 4, 4)]
        call(tensors[0].clone(), [t.clone() for t in tensors[1:]])
        tensors[position] = make(tensors[position])
        with twin.Traffic() as traffic, pytest.raises(RuntimeError, match=message):
            call(tensors[0], tensors[1:])
        assert traffic.launches == 0
        assert all((t == 2).all() for t in tensors if not t.is_meta)


@each_call
def test_a_copy_that_is_not_launched(
    call: Callable[[Tensor, list[Tensor]], None], primitive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.full((n,), 2.0) for n in (8, 4, 4)]
    monkeypatch.setenv("SHARDOPS_TWIN_LAUNCH_ERROR", ERROR)
    with pytest.raises(RuntimeError, match=f"CUDA could not launch {primitive}: {ERROR}; an earlier kernel's"):
        call(tensors[0], tensors[1:])
    assert all((t == 2).all() for t in tensors)


# ---- the twins themselves --------------------------------------------------------------------------------------------

TALKATIVE = """
#include <cstdio>
#include "cuda/launch.cuh"

struct Arguments { bool shuffles; };

void kernel(const Arguments& arguments) {
  if (arguments.shuffles) {
    __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
  } else {
    __syncthreads();
  }
}

int main(int count, char** words) {
  const Arguments arguments{words[1][0] == 's'};
  const char* error = words[2][0] == 't' ? shardops::launch<true>(kernel, 1, 64, nullptr, arguments)
                                         : shardops::launch<false>(kernel, 1, 64, nullptr, arguments);
  std::puts("ended");
  return count == 3 && error == nullptr ? 0 : 1;
}
"""


def test_threads_that_talk_must_say_so(tmp_path: Path) -> None:
    """Else the twin would run them one after the other, and a GPU's result would be another one."""
    source, program = tmp_path / "talkative.cpp", tmp_path / "talkative"
    source.write_text(TALKATIVE)
    compiler = str(twin.native.find_compiler()).split()
    subprocess.run(
        [*compiler, "-std=c++20", "-O0", *twin.FLAGS, str(source), "-o", str(program), "-lpthread"], check=True
    )
    for way in ("shuffles", "waits"):
        done = subprocess.run([program, way, "talks"], capture_output=True, text=True, check=True)
        assert done.stdout == "ended\n"
        done = subprocess.run([program, way, "is silent"], capture_output=True, text=True)
        assert done.returncode < 0, "it did not abort"
        assert "a kernel whose launch says that its threads do not talk waits for one" in done.stderr
        assert "ended" not in done.stdout
