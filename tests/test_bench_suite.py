"""The benchmarks at tiny sizes: records have their keys, bytes and paired ratios are right, peers may be missing.

``test_bench_command.py`` runs the command around them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _harness
import _suite
import bench_cast_gather
import bench_flatten_shard
import bench_grad_norm
import bench_sharded_adam
import bench_update_path
from _records import Case, records_of
from _suite import HostDevice, Suite, shapes_of
from gpu.measure import Contender
from update_path import parts

KEYS = {
    *("primitive", "case", "dtype", "numel", "tensors", "contender", "kind", "backend", "device", "nbytes", "seconds"),
    *("median_s", "gb_s", "limit_share", "speed_over_stock", "threads"),
}
GRID = (10**4, 1)  # 8 rows of 1,024: blocks of 128 without a rest
LIMIT = "same-streams limit"


class Fixture:
    """Stands in for pytest-benchmark's."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.group = ""
        self.calls = 0

    def pedantic(self, function: Callable[..., Any], args: Any = (), rounds: int = 1) -> Any:
        self.calls += 1
        return function(*args)


@pytest.fixture
def suite() -> Suite:
    return Suite("tiny", "cpu")


def measured(test: Callable[..., None], suite: Suite, *args: Any) -> dict[str, dict[str, Any]]:
    """The records that a benchmark leaves, by contender."""
    fixture = Fixture()
    test(fixture, suite, *args)
    assert fixture.calls == 1
    records = fixture.extra_info["measurements"]
    json.dumps(records, allow_nan=False)
    for record in records:
        assert set(record) >= KEYS
        assert len(record["seconds"]) == 3
        assert min(record["seconds"]) > 0
        assert record["median_s"] == statistics.median(record["seconds"])
        assert record["device"] == "cpu"
        assert record["threads"] == 1
        assert (record["speed_over_stock"] is None) == (record["contender"] in (record["stock"], LIMIT))
        if record["nbytes"]:
            assert record["gb_s"] == pytest.approx(record["nbytes"] / record["median_s"] / 1e9)
        assert (record["backend"] == "cpp") == (record["kind"] == "ours")
        assert (record["kind"] == "limit") == (record["contender"] == LIMIT)
    found = {record["contender"]: record for record in records}
    assert len(found) == len(records)
    return found


def per_element(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: record["nbytes"] / record["numel"] for name, record in found.items() if record["nbytes"]}


ADAM = {
    "fp32": (28.0, 28, "torch fused", 28),
    "bf16 + split32": (26.0, 14, "torch fused, fp32 masters", 40),
    "bf16 + split24 + int8": (12.125, 14, "torch fused, fp32 masters", 40),
    "fp32 + bf16 shadow": (30.0, 28, "torch fused, then _foreach_copy_", 34),
}


@pytest.mark.parametrize("case", ADAM)
def test_bytes_of_an_update(suite: Suite, case: str) -> None:
    """Beside torch's way to the same end: fp32 masters' cast gradients (6), their step (28), and the cast back (6)."""
    ours, torchs, stock, stocks = ADAM[case]
    found = measured(bench_sharded_adam.test_sharded_adam, suite, case, GRID)
    note = {"fp32": "", "fp32 + bf16 shadow": ", no shadow"}.get(case, ", bf16 moments, no master")
    ways = {f"torch {way}{note}": torchs for way in ("fused", "foreach", "for-loop")}
    assert per_element(found) == {"shardops": ours, LIMIT: ours, **ways, stock: stocks}
    assert all(record["limit_share"] for record in found.values())
    assert {record["stock"] for record in found.values()} == {stock}
    assert {record["dtype"] for record in found.values()} == {"float32" if "fp32" in case else "bfloat16"}


def test_mixed_precision_of_torch_steps_its_masters() -> None:
    params = [torch.randn(5, 7).bfloat16(), torch.randn(3).bfloat16()]
    grads = [torch.randn_like(param) for param in params]
    models = [torch.nn.Parameter(param.float()) for param in params]
    for model, grad in zip(models, grads, strict=True):
        model.grad = grad.float()
    expected = torch.optim.AdamW(models, lr=1e-2, fused=True)

    def step_of(masters: list[torch.Tensor], master_grads: list[torch.Tensor]) -> Callable[[], Any]:
        made = [torch.nn.Parameter(master) for master in masters]
        for param, grad in zip(made, master_grads, strict=True):
            param.grad = grad
        return torch.optim.AdamW(made, lr=1e-2, fused=True).step

    run, nbytes = bench_sharded_adam.over_masters(params, grads, step_of)
    for _ in range(2):
        run()
        expected.step()
    assert nbytes == 40 * 38
    assert all(torch.equal(param, model.bfloat16()) for param, model in zip(params, models, strict=True))


COPIES: list[tuple[Callable[..., None], str, float, dict[str, float]]] = [
    (bench_cast_gather.test_cast_gather, "fp32 to bf16", 6, {"torch._foreach_copy_": 6, "torch.cat of .to": 6}),
    (bench_cast_gather.test_cast_gather, "bf16", 4, {"torch._foreach_copy_": 4, "torch.cat of .to": 4}),
    (
        bench_flatten_shard.test_flatten_shard,
        "per_param, bf16 to fp32",
        6,
        {"torch._chunk_cat": 6, "pad and torch.cat": 6},
    ),
    (bench_flatten_shard.test_flatten_shard, "flat, bf16", 4, {"torch.cat": 4}),
    (bench_flatten_shard.test_unflatten_shard, "per_param, fp32", 8, {"torch.split_with_sizes_copy": 8}),
    (bench_grad_norm.test_grad_norm, "bf16", 2, {"torch get_total_norm": 2, "torch._foreach_norm": 2}),
    (bench_grad_norm.test_clip_grad_norm, "fp32", 12, {"torch clip_grad_norm_, foreach": 12}),
]


@pytest.mark.parametrize(
    ("test", "case", "ours", "torchs"), COPIES, ids=[f"{t.__name__}, {c}" for t, c, _, _ in COPIES]
)
def test_bytes_of_copies_and_norms(
    suite: Suite, test: Callable[..., None], case: str, ours: float, torchs: dict[str, float]
) -> None:
    assert per_element(measured(test, suite, case, GRID)) == {"shardops": ours, LIMIT: ours, **torchs}


def test_uneven_rows_are_padded_by_torch_only(suite: Suite) -> None:
    """A decoder's 291 tensors over 8 ranks: torch's results hold padding, which ours neither reads nor writes."""
    found = per_element(measured(bench_flatten_shard.test_unflatten_shard, suite, "per_param, bf16", (10**5, 291)))
    assert found["shardops"] == 4
    assert found["torch.split_with_sizes_copy"] > 4.4
    found = per_element(measured(bench_flatten_shard.test_flatten_shard, suite, "per_param, bf16", (10**5, 291)))
    assert found["shardops"] == found["pad and torch.cat"] > 4.4  # here all write it


def test_bytes_of_the_passes(suite: Suite) -> None:
    """The norm's 4 and the step's 30, beside 12 of clipping, 28 of the step and 6 of the cast."""
    found = measured(bench_update_path.test_passes, suite, GRID)
    assert per_element(found) == {"shardops": 34, LIMIT: 34, bench_update_path.STOCK_PASSES: 46}


def test_steps_of_optimizers(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    assert per_element(measured(bench_sharded_adam.test_step, suite, "fp32"))["shardops"] == 28
    found = per_element(measured(bench_sharded_adam.test_step, suite, "bf16 + split32"))
    assert (found["shardops"], found[LIMIT], found["torch fused, bf16 moments, no master"]) == (26, 26, 14)
    assert found["torch fused, fp32 masters"] == 40
    measured(bench_sharded_adam.test_host_time, suite)
    assert capsys.readouterr().out.count("us a tensor") == 4
    suite.show_tables()
    printed = capsys.readouterr().out
    assert "optimizer step, bf16 + split32" in printed
    assert "3,072 in 24" in printed
    suite.show_tables()
    assert capsys.readouterr().out == ""


BYTES = {
    ("fp32", "torch fused"): 16,
    ("fp32", "torch foreach"): 16,
    ("fp32", "shardops"): 16,
    ("bf16 + fp32 masters", "torch fused"): 20,  # with fp32 gradients
    ("bf16 + fp32 masters", "shardops"): 16,
    ("bf16 + split32", "shardops"): 14,
    ("bf16 + split32 + bf16", "shardops"): 10,
    ("bf16 + split32 + int8", "shardops"): 8.0625,
    ("bf16 + split24 + int8", "shardops"): 7.0625,
}


@pytest.mark.parametrize(("case", "name"), bench_sharded_adam.MEMORY)
def test_memory(suite: Suite, case: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixture = Fixture()
    bench_sharded_adam.test_memory(fixture, suite, case, name)
    (record,) = fixture.extra_info["memory"]
    assert set(record) == {"case", "contender", "numel", "resident", "peak"}
    assert (record["case"], record["contender"]) == (case, "shardops cpp" if name == "shardops" else name)
    assert record["resident"] / record["numel"] == BYTES[case, name]
    temporaries = (record["peak"] - record["resident"]) / record["numel"]
    # foreach makes a square root of each second moment; a step of ours, nothing that grows with the parameters.
    assert temporaries == (pytest.approx(4, abs=0.1) if name == "torch foreach" else pytest.approx(0, abs=0.1))
    assert f"{BYTES[case, name]:.2f} bytes a parameter" in capsys.readouterr().out


# ---- ratios ----------------------------------------------------------------------------------------------------------


def row(kind: str, seconds: list[float], nbytes: int | None, backend: str | None = None) -> dict[str, Any]:
    median = statistics.median(seconds)
    rest = {"median_s": median, "gb_s": nbytes and nbytes / median / 1e9}
    return {"kind": kind, "backend": backend, "bytes": nbytes, "device_s": seconds, **rest}


def test_ratios_are_paired_and_shares_count_bytes() -> None:
    """By medians alone, stock over ours would be 3 / 2 and the limit over ours 2 / 2."""
    case = Case("sharded_adam", "made up", torch.float32, [(2, 5), (10,)], [], "stock")
    rows = {
        "limit": row("copy", [1.0, 2.0, 6.0], 200),
        "ours [cpp]": row("ours", [2.0, 1.0, 4.0], 100, "cpp"),
        "stock": row("torch", [3.0, 3.0, 4.0], 50),
        "peer": row("peer", [1.0, 1.0, 1.0], None),
        "broken": {**row("peer", [1.0], None), "device_s": []},
    }
    limit, ours, stock, peer = records_of(case, rows, "cpu")
    assert (ours["contender"], ours["backend"], limit["kind"]) == ("ours", "cpp", "limit")
    assert (ours["numel"], ours["tensors"]) == (20, 2)
    assert ours["speed_over_stock"] == 1.5  # of 1.5, 3, 1
    assert ours["limit_share"] == 1.5 * 100 / 200  # of 0.5, 2, 1.5
    assert stock["limit_share"] == pytest.approx(2 / 3 * 50 / 200)  # of 1/3, 2/3, 1.5
    assert limit["limit_share"] == 1
    assert (peer["limit_share"], peer["gb_s"], peer["speed_over_stock"]) == (None, None, 3)
    assert stock["speed_over_stock"] is None
    assert limit["speed_over_stock"] is None


def test_records_of_ranks() -> None:
    """Parts of the update together, means over ranks, bytes of rank 0; what is beside the update does not count."""
    sizes = parts.Sizes(local=9, padded=10, whole=18, world_size=2, tensors=3)

    def rank(scale: float) -> dict[str, Any]:
        found = {}
        for index, name in enumerate(parts.VARIANTS):
            seconds = dict.fromkeys(parts.UPDATE, scale * (4 - index)) | {parts.COPY_OUT: 1e3}
            clocks = {"wall": seconds, "cpu": dict.fromkeys(seconds, 7.0)}
            nbytes = dict.fromkeys(parts.UPDATE, 100 - index) | {parts.COPY_OUT: 10**6}
            found[name] = {"sizes": sizes, "seconds": [clocks, clocks], "bytes": nbytes}
        return found

    stock, shadow, _, master = bench_update_path.records_of([rank(1.0), rank(3.0)], "cpp")
    assert set(stock) >= KEYS
    assert stock["seconds"] == [32.0, 32.0]  # 2 on average, of 4 parts, times 4
    assert (stock["kind"], stock["backend"], stock["speed_over_stock"]) == ("torch", None, None)
    assert (shadow["contender"], shadow["kind"], shadow["backend"]) == ("shardops, path A", "ours", "cpp")
    assert shadow["speed_over_stock"] == pytest.approx(4 / 3)
    assert (master["nbytes"], master["numel"], master["tensors"]) == (4 * 97, 10, 3)
    assert len({record["case"] for record in (stock, shadow, master)}) == 1
    assert "2 ranks" in stock["case"]


# ---- who takes part --------------------------------------------------------------------------------------------------


class Peer:
    """An optimizer of another's: good, one that cannot be made, one whose step fails."""

    def __init__(self, params: Any, lr: float, how: str = "good") -> None:
        if how == "unmade":
            raise OSError("its library cannot be built here")
        self.how = how

    def step(self) -> None:
        if self.how == "fails":
            raise ValueError("it wants a GPU")


def test_peers_may_be_missing_or_fail(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peer_made_up", types.SimpleNamespace(Peer=Peer))
    peers = {
        "good": ("peer_made_up", "Peer", torch.float32, {}),
        "absent": ("no_such_module", "Peer", torch.float32, {}),
        "another": ("peer_made_up", "Other", torch.float32, {}),
        "unmade": ("peer_made_up", "Peer", torch.float32, {"how": "unmade"}),
        "fails": ("peer_made_up", "Peer", torch.float32, {"how": "fails"}),
        "of bf16": ("no_such_module", "Peer", torch.bfloat16, {}),
    }
    monkeypatch.setattr(bench_sharded_adam, "CPU_PEERS", peers)
    found = measured(bench_sharded_adam.test_peers, suite, "fp32")
    assert set(found) == {"shardops", "torch fused", "good"}
    assert (found["good"]["kind"], found["good"]["nbytes"], found["good"]["gb_s"]) == ("peer", None, None)
    assert found["good"]["speed_over_stock"] > 0
    assert set(suite.missing) == {"absent", "another", "unmade", "fails"}
    assert "No module named 'no_such_module'" in suite.missing["absent"]
    assert "cannot be built here" in suite.missing["unmade"]
    assert "it wants a GPU" in suite.missing["fails"]
    assert suite.machine()["missing"] == suite.missing

    found = measured(bench_sharded_adam.test_peers, suite, "bf16 + split24 + int8")
    assert per_element(found)["shardops"] == 12.125
    assert "of bf16" in suite.missing


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_ours_and_torchs_must_run(suite: Suite, kind: str) -> None:
    def fails() -> None:
        raise ValueError("spoilt")

    others = [Contender("fine", lambda: None, "ours", 8, "cpp"), Contender("it", fails, kind, 8)]
    with pytest.raises(RuntimeError, match=r"it.*spoilt"):
        suite.measure(Fixture(), Case("grad_norm", "made up", torch.float32, [(2,)], others, "fine"))


def test_memory_that_is_not_there(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10**8 < suite.device.free_bytes() < 10**14
    suite.room("small", 1000)
    assert suite.missing == {}
    monkeypatch.setattr(suite.device, "free_bytes", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match=r"GB are needed"):
        suite.room("sharded_adam, fp32", 900)
    assert "GB are free" in suite.missing["sharded_adam, fp32"]


def test_no_compiler_no_limit(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    _harness.load_streams.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        found = measured(bench_grad_norm.test_grad_norm, suite, "fp32", GRID)
    finally:
        _harness.load_streams.cache_clear()
    assert LIMIT not in found
    assert found["shardops"]["limit_share"] is None
    assert "no-such-compiler" in suite.missing[LIMIT]


class Gpu(HostDevice):
    """A GPU as far as the suite asks."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.torch_device, self.backends = torch.device("cpu"), ("cpp", "triton")


def test_on_a_gpu(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a copy of as many bytes; what is about the host and its processes is left out."""
    suite.device = Gpu()
    fixture = Fixture()
    bench_cast_gather.test_cast_gather(fixture, suite, "fp32 to bf16", GRID)
    limit, ours = fixture.extra_info["measurements"][:2]
    assert (limit["contender"], limit["kind"], limit["nbytes"]) == ("device copy", "limit", 6 * 8192)
    assert ours["device"] == "cuda"
    assert ours["limit_share"] > 0
    bench_sharded_adam.test_sharded_adam(fixture, suite, "fp32", GRID)
    assert fixture.extra_info["measurements"][0]["nbytes"] == 28 * 8192
    with pytest.raises(pytest.skip.Exception):
        bench_sharded_adam.test_host_time(fixture, suite)
    with pytest.raises(pytest.skip.Exception):
        bench_update_path.test_update_path(fixture, suite, Path(), (2, 1000, 1))
    assert set(suite.missing) == {"host time", "update_path, FSDP2, 2 ranks"}
    monkeypatch.setattr(_suite, "open_measured", lambda kind: Gpu())
    said = {"cpp": "no kernels for it", "triton": "not installed", "reference": "available"}
    monkeypatch.setattr(_suite.shardops, "backends", lambda kind: said)
    with pytest.raises(RuntimeError, match=r"no fused backend runs on cuda.*no kernels for it"):
        Suite("tiny", "cuda")


# ---- sizes, clocks and the limit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", _suite.SCALES)
def test_shapes(scale: str) -> None:
    grid = _suite.grid_of(_suite.SCALES[scale])
    assert len(set(grid)) == len(grid)
    for numel, tensors in grid:
        shapes = shapes_of(numel, tensors)
        assert len(shapes) == tensors
        assert all(len(shape) == 2 and min(shape) >= 1 for shape in shapes)
        assert sum(rows * columns for rows, columns in shapes) == pytest.approx(
            numel, rel=0.2
        )  # whole rows, for 8 ranks


def test_random_tensors_fill_all() -> None:
    small, large = _suite.random_tensors([(3, 4), (2, 3_000_000)], torch.bfloat16, torch.device("cpu"))
    assert small.shape == (3, 4)
    assert large.dtype == torch.bfloat16
    assert float(large.float().std()) == pytest.approx(1, abs=0.01)
    assert float(large[1, -1000:].float().std()) == pytest.approx(1, abs=0.2)


def test_a_cpu_is_timed_by_several_short_calls_or_one_long() -> None:
    device, calls = HostDevice(), []
    seconds, host = device.timed(lambda: calls.append(0))
    assert len(calls) > 100
    assert seconds == host < 1e-4
    calls.clear()
    seconds, _ = device.timed(lambda: (calls.append(0), time.sleep(0.03)))
    assert len(calls) == 1
    assert seconds >= 0.03


@pytest.mark.parametrize("threads", [1, 3])
def test_the_limit_touches_every_line_once(threads: int) -> None:
    torch.set_num_threads(threads)  # back to one for the next test (conftest.py)
    arrays = [(64 * 10_000, "update"), (64 * 77 + 5, "read"), (64 * 301, "write"), (40, "update")]
    run, nbytes = _harness.streams_limit(arrays)
    assert nbytes == 64 * (2 * 10_000 + 77 + 301 + 2 * 1)
    (held,) = run.__defaults__
    before = [tensor.clone() for tensor in held]
    run()
    changed = [int((tensor != was).view(-1, 64).any(1).sum()) for tensor, was in zip(held, before, strict=True)]
    offsets = [bool(tensor.data_ptr() % 64) for tensor in held]  # lines that straddle the tensor's rows count twice
    for count, off, (size, mode) in zip(changed, offsets, arrays, strict=True):
        lines = max(size // 64, 1)
        assert count == 0 if mode == "read" else lines <= count <= lines + off
    updated = (held[0].view(torch.int64) - before[0].view(torch.int64)).unique()
    assert set(updated.tolist()) == {0, 1}
    with pytest.raises(ValueError, match="'append'; each is one of 'read', 'write', 'update'"):
        _harness.streams_limit([(64, "append")])
