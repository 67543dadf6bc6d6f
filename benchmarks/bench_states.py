"""Steps with smaller states on a CPU, beside torch and peers: ``python -m pytest benchmarks/bench_states.py -s``.

The baseline is torch's fused fp32 AdamW, 28 bytes an element; smaller states move fewer bytes and compute more. Peers
(torchao, bitsandbytes, DeepSpeed) take part where they import. All contenders of a test alternate in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _harness import alternate, machine, paired_ratio, show

import shardops

ROWS, COLUMNS, TENSORS = 976, 1024, 24
NUMEL = ROWS * COLUMNS * TENSORS
BF16 = torch.bfloat16

# name -> (dtype of the parameters, options of FusedShardedAdamW, bytes an element that a step reads and writes)
MODES: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "fp32": (torch.float32, {}, 28),
    "split32, fp32 states": (BF16, {}, 26),
    "split32, bf16 states": (BF16, {"state_dtype": BF16}, 18),
    "split32, int8 states": (BF16, {"state_dtype": "int8"}, 14.125),
    "split24, fp32 states": (BF16, {"master_weights": "split24"}, 24),
    "split24, int8 states": (BF16, {"master_weights": "split24", "state_dtype": "int8"}, 12.125),
    "stochastic, bf16 states": (BF16, {"master_weights": "stochastic", "state_dtype": BF16}, 14),
    "fp32 parameters, int8 states": (torch.float32, {"state_dtype": "int8"}, 16.125),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(TENSORS):
        param = torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator).to(dtype))
        param.grad = torch.randn(ROWS, COLUMNS, generator=generator).mul_(1e-2).to(dtype)
        params.append(param)
    return params


def ours(name: str, **options: Any) -> shardops.FusedShardedAdamW:
    dtype, mode, _ = MODES[name]
    return shardops.FusedShardedAdamW(parameters(dtype), **mode, **options)


def kernel_of(optimizer: Any) -> Callable[[], None]:
    """The kernel launches of a step alone, without int8's look at the norm."""
    from shardops.optim.launch import launch

    optimizer.step()
    _, _, buckets = optimizer._tracker.buckets(optimizer, use_device_steps=True)

    def run() -> None:
        for bucket in buckets:
            launch(optimizer, bucket, None, None, None)

    return run


def report(benchmark: Any, title: str, times: dict[str, list[float]], nbytes: dict[str, float], base: str) -> None:
    rows = []
    for name, seconds in times.items():
        median, ratio = statistics.median(seconds), paired_ratio(times, name, base)
        counted = nbytes.get(name)
        rows.append(
            [
                name,
                f"{median * 1e3:.2f}",
                f"{counted:g}" if counted else "",
                f"{NUMEL * counted / median / 1e9:.1f}" if counted else "",
                f"{ratio:.2f}",
            ]
        )
        benchmark.extra_info[name] = {"median_s": median, f"over {base}": ratio}
    benchmark.extra_info["machine"] = info = machine()
    show(
        f"{title}, {NUMEL / 1e6:.0f} M elements, {info['threads']} threads, {info['cpu_capability']}",
        ["", "ms", "bytes/el", "GB/s", f"it / {base}"],
        rows,
    )


def test_kernels(benchmark: Any, threads: int) -> None:
    """The update alone: bound by memory for wide states, by arithmetic for 8-bit ones."""
    contenders: dict[str, Callable[[], Any]] = {
        "torch fused": torch.optim.AdamW(parameters(torch.float32), fused=True).step
    }
    contenders |= {name: kernel_of(ours(name)) for name in MODES}
    times = alternate(contenders, rounds=21)
    nbytes = {"torch fused": 28.0} | {name: mode[2] for name, mode in MODES.items()}
    report(benchmark, "AdamW's update", times, nbytes, "torch fused")
    benchmark.pedantic(contenders["split24, int8 states"], rounds=3)


def test_clip_and_step(benchmark: Any, threads: int) -> None:
    """Clipping and the step together; int8 states look at the norm anyway."""
    stock = torch.optim.AdamW(parameters(torch.float32), fused=True)
    stock_params = stock.param_groups[0]["params"]

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(stock_params, 1.0, foreach=True)
        stock.step()

    contenders: dict[str, Callable[[], Any]] = {"torch clip, fused": clip_and_step}
    contenders |= {name: ours(name, max_grad_norm=1.0).step for name in MODES}
    times = alternate(contenders, rounds=21)
    report(benchmark, "clip + AdamW step", times, {}, "torch clip, fused")
    benchmark.pedantic(contenders["split24, int8 states"], rounds=3)


def peers() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    try:
        from torchao.optim import AdamW8bit

        found["torchao 8-bit, bf16 parameters"] = AdamW8bit(parameters(BF16)).step
    except ImportError:
        pass
    try:
        import bitsandbytes

        found["bitsandbytes 8-bit, bf16 parameters"] = bitsandbytes.optim.AdamW8bit(parameters(BF16)).step
    except ImportError:
        pass
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeedCPUAdam, fp32"] = DeepSpeedCPUAdam(parameters(torch.float32), adamw_mode=True).step
    except ImportError:
        pass
    return found


def test_peers(benchmark: Any, threads: int) -> None:
    """Whole steps beside other 8-bit optimizers and DeepSpeed's for the CPU, as far as they are installed."""
    contenders = peers()
    if not contenders:
        pytest.skip("none of torchao, bitsandbytes, deepspeed is installed")
    name = "split24, int8 states"
    contenders |= {mode: ours(mode).step for mode in (name, "fp32", "split32, fp32 states")}
    times = alternate(contenders, rounds=11, warmup=2)
    report(benchmark, "step beside peers", times, {}, name)
    benchmark.pedantic(contenders[name], rounds=3)
