"""use_fused_copies: putting the override in force, taking it back, and what it says of itself."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

from shardops.integrations.fsdp import copies as module
from shardops.integrations.fsdp.copies import FusedCopies, use_fused_copies

OPS = ("chunk_cat", "split_with_sizes_copy")


@pytest.fixture
def fused() -> Iterator[FusedCopies]:
    with use_fused_copies() as override:
        yield override


def call(op: str, dtype: torch.dtype = torch.float32) -> None:
    if op == "chunk_cat":
        torch.ops.fsdp.chunk_cat([torch.ones(3, 2, dtype=dtype)], 0, 2, out=torch.empty(2, 4, dtype=dtype))
    else:
        torch.ops.fsdp.split_with_sizes_copy(torch.ones(2, 4), [4], dim=1, out=[torch.empty(2, 4)])


def reached(op: str) -> set[str]:
    """The files of the Python functions that a call of the op runs."""
    files: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        call(op)
    finally:
        sys.setprofile(None)
    return files & {stock.__file__, module.__file__}


def kernels() -> list[str]:
    return [torch._C._dispatch_dump(f"fsdp::{op}") for op in OPS]


def assert_stock(before: list[str]) -> None:
    assert [reached(op) for op in OPS] == [{stock.__file__}] * 2
    assert kernels() == before


def test_removing_brings_stocks_kernels_back() -> None:
    before = kernels()
    assert_stock(before)
    for _ in range(2):
        override = use_fused_copies()
        assert [reached(op) for op in OPS] == [{module.__file__}] * 2
        override.remove()
        assert_stock(before)
        override.remove()  # again: nothing
        assert_stock(before)
    with pytest.raises(ZeroDivisionError), use_fused_copies():
        assert reached("chunk_cat") == {module.__file__}
        raise ZeroDivisionError
    assert_stock(before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_one_removed_ends_it(order: tuple[int, int]) -> None:
    before = kernels()
    overrides = [use_fused_copies(), use_fused_copies(backend="reference")]
    reached("chunk_cat")
    assert [sum(override.calls.values()) for override in overrides] == [0, 1]  # the newest
    overrides[order[0]].remove()
    assert reached("chunk_cat") == {module.__file__}
    assert overrides[order[1]].calls["chunk_cat", "fused"] == 1 + order[1]
    overrides[order[1]].remove()
    assert_stock(before)


def test_it_works_until_removed_though_nobody_keeps_it() -> None:
    before = kernels()
    use_fused_copies()
    gc.collect()
    assert reached("chunk_cat") == {module.__file__}
    module._live[-1].remove()
    assert_stock(before)


def test_it_says_what_it_replaces(fused: FusedCopies) -> None:
    reached("chunk_cat")
    call("chunk_cat", torch.float64)
    lines = repr(fused).splitlines()
    assert lines[0] == "fused copies"
    assert lines[1] == "  fsdp::chunk_cat: on cpu (cpp); 1 calls fused, 1 left to stock"
    assert lines[2] == "  fsdp::split_with_sizes_copy: on cpu (cpp); 0 calls fused, 0 left to stock"
    if not torch.cuda.is_available():
        assert lines[3:] == ["  stock on cuda: no GPU is available"]
    fused.remove()
    assert str(fused).startswith("fused copies, removed\n")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels()
    with pytest.raises(ValueError, match="backend is 'cuda', which is none of 'cpp', 'triton', 'reference'"):
        use_fused_copies(backend="cuda")
    monkeypatch.setattr(module._registry, "unavailable_reason", lambda name, device: f"no {name}; build it")
    monkeypatch.setattr(module._registry, "default_backend", lambda device: "reference")
    # Not by itself: slower than stock.
    with pytest.raises(
        RuntimeError, match=r"no device has fused copies: cpu: only the reference .* no cpp; build it /"
    ):
        use_fused_copies()
    with pytest.raises(RuntimeError, match=r"backend is 'cpp' and no device has fused copies: cpu: no cpp; build it"):
        use_fused_copies(backend="cpp")
    assert_stock(before)
    monkeypatch.undo()
    monkeypatch.setenv("SHARDOPS_BACKEND", "reference")
    with use_fused_copies() as override:
        assert override.backends["cpu"] == "reference"


def test_torchs_fsdp_is_not_imported_at_the_top() -> None:
    top = ast.parse(inspect.getsource(module)).body
    names = [ast.unparse(node) for node in top if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [name for name in names if "torch.distributed" in name]
