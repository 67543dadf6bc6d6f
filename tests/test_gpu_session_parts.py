"""What the GPU session's parts are made of: comparisons that find what is wrong, clocks, the device layer.

Each comparison is given a kernel that errs, and must say so; the layer over CUDA is called with stand-ins for torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from adam_modes import SPLIT24
from gpu import adam_cases, bits, copy_cases, graphs, many, measure, patterns, start, sweep
from gpu.device import CpuDevice, CudaDevice, open_device
from gpu.measure import Contender
from gpu.units import Context, Log, Skip, Unit, run_unit
from reference import AdamLists
from torch import Tensor

from shardops import ops

CPU = torch.device("cpu")


@pytest.fixture
def context() -> Context:
    return Context(CpuDevice(), ("cpp", "reference"), {}, False, float("inf"))


# ---- comparisons that find what is wrong -----------------------------------------------------------------------------


def flip(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[-1:] ^= 1


def erring(function: Callable[..., Any], calls: set[int], flipped: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function that is right, but for one bit in the calls (of cpp) of these numbers."""
    count = iter(range(1000))

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if (kwargs.get("backend") or args[-1]) == "cpp" and next(count) in calls:
            flip(flipped(result, *args))
        return result

    return run


# Two calls of cpp in each run: the first run is compared with the reference, the second one with the first.
@pytest.mark.parametrize(
    ("calls", "words"), [({1}, "the reference on the device, step 1"), ({3}, "a second run, step 1")]
)
def test_a_wrong_bit_of_an_update_is_found(monkeypatch: pytest.MonkeyPatch, calls: set[int], words: str) -> None:
    (case,) = islice(adam_cases.format_cases("int8", SPLIT24, 0), 1)
    assert adam_cases.compare(case, "cpp", CPU, adam_cases.run(case, "cpp", CPU)) > 1000
    update = AdamLists.update

    def wrong(lists: AdamLists, backend: str, **options: Any) -> AdamLists:
        return run(lists, options, backend)

    run = erring(
        lambda lists, options, backend: update(lists, backend, **options), calls, lambda lists, *_: lists.masters[0]
    )
    monkeypatch.setattr(AdamLists, "update", wrong)
    with pytest.raises(AssertionError, match=words):
        adam_cases.compare(case, "cpp", CPU, None)


def test_other_bits_on_the_host_are_found() -> None:
    (case,) = islice(adam_cases.format_cases("fp32", adam_cases.FP32, 0), 1)
    host = adam_cases.run(case, "cpp", CPU)
    flip(host[0].exp_avgs[0])
    with pytest.raises(AssertionError, match="cpp on the CPU, step 0"):
        adam_cases.compare(case, "cpp", CPU, host)
    case.options["lr"] = 0.0
    case.options["weight_decay"] = 0.0
    with pytest.raises(AssertionError, match="shows nothing"):
        adam_cases.compare(case, "cpp", CPU, None)


def test_a_case_moves_whole_storages() -> None:
    """Alignment and strides come along, or a case off its alignment would not be one on a GPU."""
    tensor = torch.arange(20.0)[3:15].view(3, 4).t()
    copy = adam_cases.placed(tensor, CPU)
    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.storage_offset()) == (tensor.stride(), 3)
    assert copy.untyped_storage().nbytes() == 80
    assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(("calls", "words"), [({0}, "the reference on the device"), ({1}, "a second run")])
@pytest.mark.parametrize("kind", ["flatten", "gather", "norm"])
def test_a_wrong_bit_of_a_copy_is_found(kind: str, calls: set[int], words: str) -> None:
    cases: dict[str, Iterator[copy_cases.Case]] = {
        "flatten": copy_cases.flatten_cases("flat", torch.bfloat16),
        "gather": copy_cases.gather_cases(),
        "norm": copy_cases.norm_cases(2.0),
    }
    name, tensors, call, exact = next(cases[kind])
    assert copy_cases.compare((name, tensors, call, exact), "cpp", CPU, None) > 0
    wrong = erring(call, calls, lambda result, *_: result[0])
    with pytest.raises(AssertionError, match=words):
        copy_cases.compare((name, tensors, wrong, exact), "cpp", CPU, None)
    host = copy_cases.run((name, tensors, call, exact), "cpp", CPU)
    flip(host[0])
    with pytest.raises(AssertionError, match="cpp on the CPU"):
        copy_cases.compare((name, tensors, call, exact), "cpp", CPU, host)


def test_wrong_casts_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in patterns.CASTS:
        assert patterns.check_casts(context, "cpp", dtype) == 15 * (1 << 17)

    def truncated(tensors: list[Tensor], dtype: torch.dtype, **_: Any) -> Tensor:
        cut = tensors[0].view(torch.int32) & (-65536 if dtype == torch.bfloat16 else -8192)
        return cut.view(torch.float32).to(dtype)

    monkeypatch.setattr(ops, "cast_gather", truncated)
    for dtype, first in ((torch.bfloat16, "0x00008001"), (torch.float16, "0x33000001")):
        with pytest.raises(AssertionError, match=rf"beside integers: \d+ patterns are wrong, the first is {first}"):
            patterns.check_casts(context, "cpp", dtype)


def test_wrong_splits_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patterns.check_split32(context, "cpp") == 15 * (1 << 17)
    assert patterns.check_split24(context, "cpp") == 1 << 16
    update = ops.sharded_adam

    def ties_to_even(params: list[Tensor], *lists: Any, shadows: list[Tensor], **rest: Any) -> None:
        update(params, *lists, shadows=shadows, **rest)
        params[0].copy_(shadows[0].bfloat16())

    def decoded_otherwise(*lists: Any, shadows: list[Tensor], **rest: Any) -> None:
        update(*lists, shadows=shadows, **rest)
        flip(shadows[0][1:2])

    monkeypatch.setattr(ops, "sharded_adam", decoded_otherwise)
    for check in (patterns.check_split32, patterns.check_split24):
        with pytest.raises(AssertionError, match="decoded master: 1 patterns"):
            check(context, "cpp")
    monkeypatch.setattr(ops, "sharded_adam", ties_to_even)
    with pytest.raises(AssertionError, match="bf16 after the round trip"):
        patterns.check_split32(context, "cpp")
    with pytest.raises(AssertionError, match="bf16 after the round trip"):
        patterns.check_split24(context, "cpp")


def test_a_wrong_end_of_a_long_tensor_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    numel, piece = (1 << 14) + 40, (1 << 8) + 40
    assert bits._long_update(context, "cpp", numel, piece) == 2 * piece
    assert bits._long_copy(context, "cpp", numel, piece) == 2 * numel
    update, gather = ops.sharded_adam, ops.cast_gather

    def wrong_update(params: list[Tensor], *lists: Any, **rest: Any) -> None:
        update(params, *lists, **rest)
        if params[0].numel() == numel:
            flip(params[0])

    def wrong_gather(*args: Any, **rest: Any) -> Tensor:
        found = gather(*args, **rest)
        flip(found)
        return found

    monkeypatch.setattr(ops, "sharded_adam", wrong_update)
    monkeypatch.setattr(ops, "cast_gather", wrong_gather)
    with pytest.raises(AssertionError, match="last elements of tensor 0"):
        bits._long_update(context, "cpp", numel, piece)
    with pytest.raises(AssertionError, match="cast_gather from"):
        bits._long_copy(context, "cpp", numel, piece)


def test_a_first_launch_that_errs_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, str]:
        log = Log("launch")
        start.launches(context, "cpp", log)
        return {check["name"]: check["status"] for check in log.checks}

    assert "failed" not in found().values()
    norm = ops.grad_norm
    monkeypatch.setattr(ops, "grad_norm", erring(norm, {0, 1}, lambda result, *_: result[0]))
    assert {name for name, status in found().items() if status == "failed"} == {
        "grad_norm",
        "grad_norm, on another stream",
    }


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_a_replay_that_does_nothing_is_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in graphs.MODES:
        assert graphs._check_step(context, "cpp", mode) > 1000
    assert graphs._check_op(context, "cpp", "cast_gather") > 1000
    monkeypatch.setattr(CpuDevice, "capture", lambda *_: lambda: None)
    for mode in graphs.MODES:
        with pytest.raises(AssertionError, match="replay 0"):
            graphs._check_step(context, "cpp", mode)
    for name in ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam"):
        with pytest.raises(AssertionError, match="replay 0"):
            graphs._check_op(context, "cpp", name)


def test_growth_and_syncs_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter((1000, 1016))
    monkeypatch.setattr(CpuDevice, "allocated", lambda self: next(allocated))
    with pytest.raises(AssertionError, match="16 more bytes"):
        graphs._check_growth(context, "cpp", "fp32, clipped")

    @contextmanager
    def forbidden(self: CpuDevice) -> Iterator[None]:
        def step(optimizer: Any) -> None:
            raise RuntimeError("called a synchronizing operation")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs.shardops.FusedShardedAdamW, "step", step)
            yield

    monkeypatch.setattr(CpuDevice, "forbid_syncs", forbidden)
    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs._check_syncs(context, "cpp", "fp32, clipped")


# ---- clocks and logs -------------------------------------------------------------------------------------------------


def test_a_contender_that_raises_is_left_out(context: Context) -> None:
    log = Log("unit")
    calls: list[str] = []
    contenders = [
        Contender("ours", lambda: calls.append("ours"), "ours", 100, "cpp"),
        Contender("broken", lambda: 1 / 0, "peer"),
        Contender("torch", lambda: calls.append("torch"), "torch", 200),
    ]
    found = measure.measure(context, log, "case", contenders, elements=1, tensors=1, nbytes=100)
    assert found is log.measurements[0]
    assert "ZeroDivisionError" in found["contenders"]["broken"]["error"]
    assert found["contenders"]["broken"]["median_s"] is None
    assert found["ratios"].keys() == {"ours"}
    assert found["ratios"]["ours"].keys() == {"torch"}
    timed = calls[6:]  # after three calls of each
    assert timed == ["ours", "torch"] * found["rounds"]
    with pytest.raises(Skip, match="no time left"):
        measure.measure(
            Context(CpuDevice(), (), {}, False, 0.0), log, "late", contenders, elements=1, tensors=1, nbytes=1
        )


def test_a_lost_device_ends_the_unit() -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    log = Log("unit", synchronize=lost)
    ran: list[int] = []

    def unit(log: Log) -> None:
        log.check("skips", "cpp", lambda: (_ for _ in ()).throw(Skip("not here")))
        log.check("stands in", "cpp", lambda: 5, stand_in="a CPU")
        log.check("fails", "triton", lambda: 1 // 0)
        ran.append(1)

    found = run_unit(Unit("unit", unit), log)
    assert not ran
    assert (found["status"], log.backend) == ("failed", "triton")
    assert "illegal memory access" in found["reason"]
    assert [check["status"] for check in found["checks"]] == ["skipped", "skipped", "failed"]
    assert [check["reason"] for check in found["checks"][:2]] == ["not here", "a CPU"]


def test_the_decoder_is_one_of_eight_billion() -> None:
    shapes = many.decoder_shapes(1)
    assert len(shapes) == many.DECODER == 291
    assert sum(torch.Size(shape).numel() for shape in shapes) == 8_030_261_248


def test_swept_constants_are_put_back() -> None:
    pytest.importorskip("triton")
    from shardops.backends.triton import _launch, sharded_adam

    before = (_launch.THREADS, _launch.NUM_WARPS, sharded_adam.VECTOR)
    settings = sweep.update_settings(False)
    with pytest.raises(ZeroDivisionError), sweep.constants(settings["8 elements a thread, 128 threads"]):
        assert (_launch.THREADS, _launch.NUM_WARPS, sharded_adam.VECTOR) == (128, 4, 8)
        _ = 1 / 0
    assert before == (_launch.THREADS, _launch.NUM_WARPS, sharded_adam.VECTOR)
    for setting in (*settings.values(), *sweep.update_settings(True).values(), *sweep.copy_settings().values()):
        with sweep.constants(setting):  # all name what is there
            pass


# ---- the layer over CUDA ---------------------------------------------------------------------------------------------


class FakeCuda:
    """Stands in for what the layer calls in torch.cuda, under names that torch.cuda has; lists the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        properties = SimpleNamespace(L2_cache_size=100, name="fake", major=9, minor=0, multi_processor_count=1)
        properties.total_memory = 1e9
        values = {"get_device_properties": properties, "mem_get_info": (500, 1000), "memory_reserved": 300}
        values |= {"memory_allocated": 200, "max_memory_allocated": 250, "get_sync_debug_mode": 0, "device_count": 1}
        for name in (
            "set_device",
            "synchronize",
            "reset_peak_memory_stats",
            "_sleep",
            "empty_cache",
            "set_sync_debug_mode",
        ):
            values[name] = None
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, self._call(name, value))
        stream = SimpleNamespace(wait_stream=self._call("wait_stream", None))
        event = SimpleNamespace(record=self._call("record", None), synchronize=self._call("wait", None))
        event.elapsed_time = lambda other: 2.5
        graph = SimpleNamespace(replay=self._call("replay", None))
        for name, value in {"Stream": stream, "current_stream": stream, "Event": event, "CUDAGraph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, self._context(name))

    def _call(self, name: str, value: Any) -> Callable[..., Any]:
        def run(*args: Any, **_: Any) -> Any:
            self.calls.append((name, *args) if name in ("_sleep", "set_sync_debug_mode") else name)
            return value

        return run

    def _context(self, name: str) -> Callable[..., Any]:
        @contextmanager
        def run(_: Any) -> Iterator[None]:
            self.calls.append(f"{name} begins")
            yield
            self.calls.append(f"{name} ends")

        return run


def test_the_cuda_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    device = CudaDevice()
    device.torch_device = CPU  # where tensors can be

    def said(function: Callable[[], Any]) -> list[Any]:
        fake.calls.clear()
        function()
        return list(fake.calls)

    def work() -> None:
        fake.calls.append("work")

    assert device.timed(work, 0.01)[0] == 2.5e-3
    assert device._flushing is not None
    assert device._flushing.numel() == 300
    device._flushing = SimpleNamespace(zero_=lambda: fake.calls.append("flush"))  # type: ignore[assignment]
    timed = said(lambda: device.timed(work, 0.01))
    assert timed == ["flush", ("_sleep", 20_000_000), "record", "work", "record", "wait"]
    assert said(lambda: device.timed(work)) == ["flush", "record", "work", "record", "wait"]
    assert device.free_bytes() == 500 + 300 - 200
    assert device.peak_of(work) == (200, 250)
    assert said(lambda: device.peak_of(work))[:2] == ["synchronize", "reset_peak_memory_stats"]
    replay = device.capture(work)
    assert said(lambda: device.capture(work)) == ["synchronize", "graph begins", "work", "graph ends"]
    assert said(replay) == ["replay"]
    assert said(lambda: device.on_other_stream(work)) == [
        "wait_stream",
        "stream begins",
        "work",
        "stream ends",
        "wait_stream",
    ]
    fake.calls.clear()
    with pytest.raises(ZeroDivisionError), device.forbid_syncs():
        _ = 1 / 0
    assert fake.calls[-2:] == [("set_sync_debug_mode", "error"), ("set_sync_debug_mode", 0)]
    assert device.missing("second device")
    assert device.missing("graphs") is None
    assert device.info()["compute capability"] == "9.0"
    assert "empty_cache" in said(device.release)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"finds no GPU.*--dry-run"):
        open_device("cuda")
