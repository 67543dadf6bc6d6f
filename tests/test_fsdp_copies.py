"""use_fused_copies: FSDP2's chunk_cat and split_with_sizes_copy by the fused kernels behave as stock's, bit for bit."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Net, assert_all_equal, batch, loss_of, run, train, whole
from reference import DTYPES, assert_bits_equal, awkward, strided, transposed, unaligned, whole_storage
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

from shardops import ops
from shardops.integrations.fsdp import copies as module
from shardops.integrations.fsdp.copies import FusedCopies, use_fused_copies

# Uneven rows, fewer rows than chunks, one row, vectors, and sizes on both sides of a vector register's width.
SHAPES = ((13, 5), (3, 7), (1, 6), (1,), (5,), (2, 3, 3), (41, 1), (16, 64), (33,))
WORLDS = (1, 2, 3, 5)
OPS = ("chunk_cat", "split_with_sizes_copy")


@pytest.fixture
def fused() -> Iterator[FusedCopies]:
    with use_fused_copies() as override:
        yield override


def gradients(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [awkward(math.prod(shape), i, dtype).view(shape) for i, shape in enumerate(shapes)]


def columns(shapes: Sequence[tuple[int, ...]], world: int) -> list[int]:
    """Elements of one rank's chunk of each tensor."""
    return [math.ceil(shape[0] / world) * math.prod(shape[1:]) for shape in shapes]


def chunk_cat(tensors: list[Tensor], world: int, out: Tensor) -> Tensor:
    torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=world, out=out)
    return out


def split(buffer: Tensor, sizes: list[int], out: list[Tensor]) -> list[Tensor]:
    torch.ops.fsdp.split_with_sizes_copy(buffer, sizes, dim=1, out=out)
    return out


def filled(*shape: int, dtype: torch.dtype) -> Tensor:
    """Not where a cache line starts, and with guard elements on both sides."""
    return unaligned(torch.full(shape, 99.0, dtype=dtype))


def assert_guarded(tensor: Tensor) -> None:
    edges = whole_storage(tensor)
    assert edges[:1].tolist() + edges[-3:].tolist() == [77.0] * 4, "a store went beside the tensor"


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_chunk_cat_has_stocks_bits(fused: FusedCopies, source: torch.dtype, target: torch.dtype) -> None:
    plain = gradients(source)
    twisted = [transposed(t) if t.dim() == 2 else strided(t) if t.dim() == 1 else t for t in plain]
    offset = [unaligned(t, i % 5) for i, t in enumerate(plain)]
    assert not any(t.is_contiguous() for t in twisted[:2])
    for world in WORLDS:
        expected = torch._chunk_cat(plain, 0, world).to(target)
        by_stock = torch.empty(world, sum(columns(SHAPES, world)), dtype=target)
        stock.chunk_cat(plain, 0, world, out=by_stock)
        for tensors in (plain, twisted, offset):
            out = chunk_cat(tensors, world, filled(*by_stock.shape, dtype=target))
            # Which NaN a narrowing makes differs between the CPUs that torch runs on.
            exact = source == target or (source, target) == (torch.bfloat16, torch.float32)
            assert_bits_equal(out, by_stock, f"{world} chunks", exact=exact)
            assert_bits_equal(out, expected, f"{world} chunks, cast apart")
            assert_guarded(out)
    assert fused.calls == {("chunk_cat", "fused"): 3 * len(WORLDS)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_has_stocks_bits(fused: FusedCopies, dtype: torch.dtype) -> None:
    for world in WORLDS:
        sizes = columns(SHAPES, world)
        buffer = unaligned(awkward(world * sum(sizes), world, dtype).view(world, -1))
        expected = [torch.empty(world, size, dtype=dtype) for size in sizes]
        stock.split_with_sizes_copy(buffer, sizes, dim=1, out=expected)
        out = split(buffer, sizes, [filled(world, size, dtype=dtype) for size in sizes])
        for index, (actual, wanted) in enumerate(zip(out, expected, strict=True)):
            assert_bits_equal(actual, wanted, f"{world} ranks, tensor {index}", exact=True)
            assert_guarded(actual)
    assert fused.calls == {("split_with_sizes_copy", "fused"): len(WORLDS)}


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2],
    ids=str,
)
def test_results_larger_than_caches(fused: FusedCopies, source: torch.dtype, target: torch.dtype) -> None:
    """From 16 MiB on the kernels store past the caches, in other loops: ranges long and short, at odd starts."""
    shapes = ((2051, 2048), (7, 5), (2050, 1023), (3000,), (1, 2049), (2100, 1024))
    numel = sum(map(math.prod, shapes))
    flat = unaligned(awkward(4099, 0, source).repeat(numel // 4099 + 1))
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    tensors = [flat[ends[i] : ends[i + 1]].view(shape) for i, shape in enumerate(shapes)]
    assert numel * target.itemsize >= 16 << 20
    by_stock = torch.empty(3, sum(columns(shapes, 3)), dtype=target)
    stock.chunk_cat(tensors, 0, 3, out=by_stock)
    out = chunk_cat(tensors, 3, filled(*by_stock.shape, dtype=target))
    assert_bits_equal(out, by_stock)
    assert_guarded(out)
    scaled = [
        ops.flatten_shard(tensors, 3, dtype=target, scale=0.3, layout="per_param", backend=name)
        for name in ("cpp", "reference")
    ]
    assert_bits_equal(*scaled, "scaled")
    if source == target:
        sizes = columns(shapes, 3)
        parts = split(out, sizes, [filled(3, size, dtype=target) for size in sizes])
        for part, wanted in zip(parts, by_stock.split(sizes, dim=1), strict=True):
            assert_bits_equal(part, wanted.contiguous(), exact=True)
            assert_guarded(part)
    assert fused.calls["chunk_cat", "stock"] == fused.calls["split_with_sizes_copy", "stock"] == 0


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_lists_that_look_alike_are_not_confused(fused: FusedCopies) -> None:
    a, b = gradients(torch.float32, [(4, 6), (3, 8)])
    lists = [[a, b], [b, a], [transposed(a), b], [transposed(b), a], [a.bfloat16(), b.bfloat16()]]
    # Each twice in a row too: the second time it is the list that was expected.
    for tensors, world in itertools.product([*lists, *lists], (2, 2, 4)):
        shape = world, sum(columns([tuple(t.shape) for t in tensors], world))
        by_stock = torch.empty(shape)
        stock.chunk_cat(tensors, 0, world, out=by_stock)
        assert_bits_equal(chunk_cat(tensors, world, torch.empty(shape)), by_stock)
    buffer = torch.arange(16.0).view(2, 8)
    for sizes in ([3, 5], [3, 5], [5, 3], [4, 4], [3, 5]):
        parts = split(buffer, sizes, [torch.empty(2, size) for size in sizes])
        assert torch.cat(parts, dim=1).equal(buffer)
    assert buffer.equal(torch.arange(16.0).view(2, 8))
    assert set(fused.calls) == {(op, "fused") for op in OPS}
    # The same tensors, cut otherwise: stock resizes what is written.
    assert chunk_cat([a], 2, torch.empty(2, 12)).shape == (2, 12)
    assert chunk_cat([a], 4, torch.empty(2, 12)).shape == (4, 6)
    assert chunk_cat([a], 2, torch.empty(5)).shape == (2, 12)
    assert [part.shape[1] for part in split(buffer, [5, 3], [torch.empty(2, 3), torch.empty(2, 5)])] == [5, 3]


def test_a_copy_is_planned_once_and_few_plans_are_kept(fused: FusedCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watch(name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(name) or function(*args))

    watch("_plan_chunk_cat")
    watch("_geometry_of")
    monkeypatch.setattr(module, "_PLANS", 2)

    def looked_at(*numels: int) -> list[str]:
        calls.clear()
        chunk_cat([torch.ones(numel) for numel in numels], 1, torch.empty(1, sum(numels)))
        return calls

    new, known, expected = ["_geometry_of", "_plan_chunk_cat"], ["_geometry_of"], []
    assert looked_at(1, 2) == new
    assert looked_at(1, 2) == expected
    assert looked_at(2, 1) == new
    assert looked_at(1, 2) == known  # not the last of the two that look alike
    assert looked_at(1, 2) == expected
    assert looked_at(4) == new  # the third: the first one is forgotten
    assert looked_at(2, 1) == known
    assert looked_at(1, 2) == new


def test_without_the_op_librarys_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._geometry, "geometry_hash", lambda tensors: None)
    with use_fused_copies(backend="reference") as override:
        for tensors in (gradients(torch.float32), gradients(torch.float32)[::-1]):
            out = torch.empty(2, sum(columns([t.shape for t in tensors], 2)))
            assert_bits_equal(chunk_cat(tensors, 2, out), torch._chunk_cat(tensors, 0, 2))
    assert override.calls == {("chunk_cat", "fused"): 2}


# ---- what stock does beside copying ----------------------------------------------------------------------------------


def both(call: Callable[[], Any]) -> tuple[list[Any], FusedCopies]:
    """What a call returns, or its exception: without the override and with it."""

    def outcome() -> Any:
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    by_stock = outcome()
    with use_fused_copies() as override:
        return [by_stock, outcome()], override


def versions(mode: Callable[[], Any], preserve: bool) -> list[int]:
    out, parts = torch.zeros(2, 11), [torch.zeros(2, 4), torch.zeros(2, 7)]
    tensors = [out, *parts]
    with mode():
        for _ in range(2):
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors if preserve else [])):
                chunk_cat([torch.ones(2, 4), torch.ones(2, 7)], 2, out)
                split(out, [4, 7], parts)
    assert out.min() == 1
    assert parts[1].min() == 1
    return [tensor._version for tensor in tensors]


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_version_counters_move_as_stocks(mode: Callable[[], Any], preserve: bool) -> None:
    (by_stock, by_fused), override = both(lambda: versions(mode, preserve))
    assert by_fused == by_stock == [0 if preserve else 2] * 3
    assert override.calls == {(op, "fused"): 2 for op in OPS}


def test_inference_tensors(fused: FusedCopies) -> None:
    """Written in inference mode; outside of it torch refuses, and so does the override, in stock's words."""
    gradient, buffer = torch.ones(3, 2), torch.ones(2, 4)
    with torch.inference_mode():
        outs = [torch.zeros(2, 4), torch.zeros(2, 4)]
        chunk_cat([gradient], 2, outs[0])
        split(buffer, [4], outs[1:])
    assert torch.equal(outs[0], torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]))
    assert torch.equal(outs[1], buffer)
    # What was planned in inference mode serves outside of it.
    assert torch.equal(chunk_cat([gradient], 2, torch.zeros(2, 4)), outs[0])
    assert set(fused.calls) == {(op, "fused") for op in OPS}
    for call in (lambda: chunk_cat([gradient], 2, outs[0]), lambda: split(buffer, [4], outs[1:])):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            call()
    assert fused.calls["chunk_cat", "stock"] == fused.calls["split_with_sizes_copy", "stock"] == 1


def test_parameters_and_dtensors_locals(fused: FusedCopies, dtensor: Tensor) -> None:
    tensors = [torch.nn.Parameter(torch.full((3,), 2.0)), dtensor.to_local()]
    assert chunk_cat(tensors, 2, torch.empty(2, 4)).tolist() == [[2, 2, 1, 1], [2, 0, 1, 1]]
    assert fused.calls == {("chunk_cat", "fused"): 1}


def cat_case(tensors: list[Tensor], out: Tensor, dim: int = 0, world: int = 2) -> Callable[[], Any]:
    def call() -> Any:
        result = out.detach().clone(memory_format=torch.preserve_format).requires_grad_(out.requires_grad)
        torch.ops.fsdp.chunk_cat(tensors, dim, world, out=result)
        return result.tolist()

    return call


def split_case(buffer: Tensor, sizes: list[int], out: list[Tensor], dim: int = 1) -> Callable[[], Any]:
    def call() -> Any:
        results = [t.clone(memory_format=torch.preserve_format) for t in out]
        torch.ops.fsdp.split_with_sizes_copy(buffer, sizes, dim, out=results)
        return [result.tolist() for result in results]

    return call


GRID = torch.arange(12.0).view(2, 6)
PAIR = [torch.empty(2, 2), torch.empty(2, 4)]
UNCOVERED = {
    "another dim": cat_case([GRID], torch.empty(2, 2, 3), dim=1),
    "dim from the end": cat_case([GRID], torch.empty(2, 6), dim=-2),
    "float64": cat_case([GRID.double()], torch.empty(2, 6).double()),
    "float64 out": cat_case([GRID], torch.empty(2, 6).double()),
    "integers": cat_case([GRID.long()], torch.empty(2, 6).long()),
    "bytes": cat_case([GRID.byte()], torch.empty(2, 6).byte()),
    "dtypes that differ": cat_case([GRID, GRID.bfloat16()], torch.empty(2, 12)),
    "no chunks": cat_case([GRID], torch.empty(2, 6), world=0),
    "no tensors": cat_case([], torch.empty(2, 0)),
    "an out to be resized": cat_case([GRID], torch.empty(5)),
    "a strided out": cat_case([GRID], torch.empty(6, 2).t()),
    "an out that requires a gradient": cat_case([GRID], torch.empty(2, 6, requires_grad=True)),
    "split on dim 0": split_case(GRID[:, :2].clone(), [1, 1], [torch.empty(2, 1), torch.empty(2, 1)], dim=0),
    "split of bytes": split_case(GRID.byte(), [2, 4], [t.byte() for t in PAIR]),
    "split of float64": split_case(GRID.double(), [2, 4], [t.double() for t in PAIR]),
    "split with a cast": split_case(GRID, [2, 4], [t.bfloat16() for t in PAIR]),
    "split into too few": split_case(GRID, [2, 4], PAIR[:1]),
    "split sizes that miss a column": split_case(GRID, [2, 3], [torch.empty(2, 2), torch.empty(2, 3)]),
    "split outs of other sizes": split_case(GRID, [2, 4], PAIR[::-1]),
    "split into a strided out": split_case(GRID, [2, 4], [torch.empty(2, 2).t(), PAIR[1]]),
    "split with an empty part": split_case(GRID, [6, 0], [torch.empty(2, 6), torch.empty(2, 0)]),
    "split of three dims": split_case(GRID.view(1, 2, 6), [1, 1], [torch.empty(1, 1, 6)] * 2),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("case", UNCOVERED)
def test_stock_does_what_the_kernels_do_not_cover(case: str) -> None:
    (by_stock, by_override), override = both(UNCOVERED[case])
    assert by_override == by_stock
    assert override.calls == {("split_with_sizes_copy" if "split" in case else "chunk_cat", "stock"): 1}


@pytest.mark.parametrize("tensors", [[torch.tensor(1.0)], [torch.empty(0, 3)], [torch.ones(2), torch.empty(2, 0)]])
def test_scalars_and_empty_tensors_reach_stock(
    fused: FusedCopies, monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor]
) -> None:
    """Looked at by a stand-in: torch 2.13's own function ends the process on some of them."""
    seen: list[Any] = []
    monkeypatch.setattr(stock, "chunk_cat", lambda *args, **kwargs: seen.append((args, kwargs)))
    out = torch.empty(2, 1)
    torch.ops.fsdp.chunk_cat(tensors, 0, 2, out=out)
    (((given, dim, chunks), options),) = seen
    assert all(a is b for a, b in zip(given, tensors, strict=True))
    assert (dim, chunks, options["out"].data_ptr()) == (0, 2, out.data_ptr())


def test_memory_that_overlaps_is_refused(fused: FusedCopies) -> None:
    tensor = torch.ones(4, 3)
    for call in (lambda: chunk_cat([tensor], 2, tensor.view(2, 6)), lambda: split(tensor[:2], [3], [tensor[1:3]])):
        with pytest.raises(RuntimeError, match=r"tensor 0 shares memory with the flat buffer"):
            call()
    assert torch.equal(tensor, torch.ones(4, 3))


def test_meta_and_fake_tensors_as_before(fused: FusedCopies) -> None:
    with FakeTensorMode():
        fake = torch.ones(3, 2)
        chunk_cat([fake], 2, torch.empty(2, 4))
        split(torch.ones(2, 4), [4], [torch.empty(2, 4)])
    meta = torch.empty(0, device="meta")
    assert chunk_cat([torch.empty(3, 2, device="meta")], 2, meta).shape == (2, 4)
    assert not fused.calls


# ---- training --------------------------------------------------------------------------------------------------------

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RUNS: list[tuple[MixedPrecisionPolicy, dict[str, Any]]] = [
    (MIXED, {"frozen": True}),
    (MIXED, {"tied": True}),
    (MixedPrecisionPolicy(), {"tied": True, "frozen": True}),
    (MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.bfloat16), {}),
]
STEPS = 4


def trained(policy: MixedPrecisionPolicy, options: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, gathered parameters, and logits in inference mode."""
    model = Net(**options)
    groups = [*model.blocks, model]
    for group in groups:
        fully_shard(group, mp_policy=policy)
    params = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.AdamW(params, lr=1e-2), range(STEPS))
    found = {f"loss {i}": loss for i, loss in enumerate(losses)}
    found |= {name: whole(param) for name, param in model.named_parameters()}
    with torch.inference_mode():
        found["logits"] = model(batch(0, 0)[0])
        found["inference loss"] = loss_of(model, STEPS)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def training_is_stocks() -> None:
    for policy, options in RUNS:
        by_stock = trained(policy, options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's own of an override, which comes once a process
            override = use_fused_copies()
        with override:
            by_override = trained(policy, options)
        assert_all_equal(by_override, by_stock, f"{policy} {options}")
        assert by_stock["loss 0"] != by_stock[f"loss {STEPS - 1}"]
        # Three groups, each reduced once a step and gathered at least once.
        assert override.calls["chunk_cat", "fused"] == 3 * STEPS
        assert override.calls["split_with_sizes_copy", "fused"] >= 3 * (STEPS + 1)
        assert set(override.calls) == {(op, "fused") for op in OPS}, override


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_under_fsdp2_is_stocks(tmp_path: Path, world_size: int) -> None:
    run(tmp_path, world_size, training_is_stocks)
