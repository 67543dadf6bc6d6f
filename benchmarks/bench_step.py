"""The optimizer step on a CPU beside its limit and torch: ``python -m pytest benchmarks/bench_step.py -s``.

Within a test all contenders alternate in one process; ratios are medians over rounds. GB/s count the bytes that a step
must read and write: fp32 16 + 12 an element; bf16 with exact master and fp32 moments 14 + 12.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _harness import alternate, load_streams, machine, paired_ratio, show

import shardops

NUMEL = 24_000_000
# Shaped like a decoder's blocks: a few large matrices, and vectors between them.
TENSORS = 24


def parameters(dtype: torch.dtype, numel: int, count: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(count):
        param = torch.nn.Parameter(torch.randn(numel // count, generator=generator).to(dtype))
        param.grad = torch.randn(numel // count, generator=generator).mul_(1e-2).to(dtype)
        params.append(param)
    return params


def streams_limit(dtype: torch.dtype, numel: int) -> Callable[[], Any]:
    """A pass over arrays of the step's sizes and widths, on as many threads as torch uses."""
    library = load_streams()
    width = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    param, grad, remainder = (torch.zeros(numel, dtype=width) for _ in range(3))
    exp_avg, exp_avg_sq = (torch.zeros(numel, dtype=torch.int32) for _ in range(2))
    arrays = [param, grad, exp_avg, exp_avg_sq]
    function = library.streams_fp32
    if dtype == torch.bfloat16:
        arrays.append(remainder)
        function = library.streams_bf16_split
    from ctypes import c_int, c_int64, c_void_p

    function.argtypes = [*[c_void_p] * len(arrays), c_int64, c_int]

    def run() -> None:
        function(*(array.data_ptr() for array in arrays), numel, torch.get_num_threads())

    return run


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 28), (torch.bfloat16, 26)])
def test_bandwidth(benchmark: Any, dtype: torch.dtype, nbytes: int) -> None:
    optimizers = {
        "torch fused": torch.optim.AdamW(parameters(dtype, NUMEL, TENSORS), fused=True),
        "torch foreach": torch.optim.AdamW(parameters(dtype, NUMEL, TENSORS), foreach=True),
        "shardops": shardops.FusedShardedAdamW(parameters(dtype, NUMEL, TENSORS)),
    }
    contenders = {"same-streams limit": streams_limit(dtype, NUMEL)}
    contenders |= {name: optimizer.step for name, optimizer in optimizers.items()}
    times = alternate(contenders)
    # torch over bf16 parameters keeps bf16 moments and no master: 8 + 6 bytes, and other results.
    counted = dict.fromkeys(contenders, nbytes)
    if dtype == torch.bfloat16:
        counted["torch fused"] = counted["torch foreach"] = 14
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        share = paired_ratio(times, "same-streams limit", name)
        rows.append(
            [
                name,
                f"{median * 1e3:.2f}",
                f"{counted[name]}",
                f"{NUMEL * counted[name] / median / 1e9:.2f}",
                f"{share:.2f}",
                f"{paired_ratio(times, 'torch fused', name):.2f}",
            ]
        )
        benchmark.extra_info[name] = {"median_s": median, "limit_share": share}
    info = machine()
    benchmark.extra_info["machine"] = info
    show(
        f"AdamW step, {str(dtype).removeprefix('torch.')}, {NUMEL / 1e6:.0f} M elements, {info['threads']} threads",
        ["", "ms", "bytes/el", "GB/s", "limit / it", "torch fused / it"],
        rows,
    )
    benchmark.pedantic(optimizers["shardops"].step, rounds=3)


def test_host_time(benchmark: Any) -> None:
    """Microseconds a parameter tensor at 1,000 tensors of 16 elements, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    count = 1000
    optimizers = {
        "torch fused": torch.optim.AdamW(parameters(torch.float32, 16 * count, count), fused=True),
        "torch foreach": torch.optim.AdamW(parameters(torch.float32, 16 * count, count), foreach=True),
        "shardops": shardops.FusedShardedAdamW(parameters(torch.float32, 16 * count, count)),
        "shardops, clipped": shardops.FusedShardedAdamW(
            parameters(torch.float32, 16 * count, count), max_grad_norm=1.0
        ),
    }
    try:
        times = alternate({name: optimizer.step for name, optimizer in optimizers.items()}, rounds=41)
        rows = []
        for name, seconds in times.items():
            per_tensor = statistics.median(seconds) / count * 1e6
            rows.append([name, f"{per_tensor:.2f}", f"{paired_ratio(times, 'torch fused', name):.2f}"])
            benchmark.extra_info[name] = {"us_per_tensor": per_tensor}
        benchmark.extra_info["machine"] = machine()
        show(
            f"host time of a step, {count} tensors of 16 elements, 1 thread",
            ["", "us a tensor", "torch fused / it"],
            rows,
        )
        benchmark.pedantic(optimizers["shardops"].step, rounds=10)
    finally:
        torch.set_num_threads(threads)
