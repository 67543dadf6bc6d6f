"""What every launcher needs: addresses of tensors, tables in device memory, and the tensors' device made current.

A kernel reads two int64 tables. A row describes one tensor (or segment): addresses, then its numel (or its number of
blocks) in the last column. A chunk entry is one program's work: which row, and which chunk of it. Nothing here waits
for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

THREADS = 256
# 64 is right for CDNA; on RDNA it only makes accesses narrower.
WARP_SIZE = 64 if torch.version.hip else 32
NUM_WARPS = THREADS // WARP_SIZE

Table = npt.NDArray[np.int64]
# Of launches that a CUDA graph recorded: the tables on the host, by what they are of. A replay copies from them (and
# needs no target kept: that is memory of the graph's own, written at each replay). A graph does not say when it goes,
# so they stay: at most 120 bytes a tensor for each launch at new addresses, and once 8 for each program.
_captured: dict[object, Tensor] = {}
# Pinned memory for such tables, by their size: none may be allocated while a graph is captured. A launch outside, which
# every kernel needs to be compiled, leaves some.
_spare: dict[int, list[Tensor]] = {}
_SPARES = 16  # of a size: as many launches with lists of one length, and none of their tables before, in one graph


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes a GPU tensor's device the current one, on which triton launches; nothing for a CPU tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def addresses(tensors: Sequence[Tensor], name: str, like: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    """The tensors' addresses, after the checks that keep a kernel inside them; ``like`` has their numels and device.

    The typed functions of ``ops`` check more and explain more; these guard calls that reach an op directly.
    """
    if len(tensors) != len(like):
        raise ValueError(f"{name} has {len(tensors)} tensors, the call needs {len(like)}; give one for each")
    found = []
    for index, (tensor, other) in enumerate(zip(tensors, like, strict=True)):
        if tensor.dtype != dtype or tensor.device != like[0].device or tensor.numel() != other.numel():
            raise ValueError(
                f"{name}[{index}] is {tensor.dtype} on {tensor.device} with {tensor.numel()} elements; "
                f"the call needs {dtype} on {like[0].device} with {other.numel()}"
            )
        found.append(tensor.data_ptr())
    return found


def chunk_entries(numels: Table, chunk_numel: int) -> Table:
    """``row << 32 | chunk`` for each program, so that it learns its work from one load.

    Numels 5, 0, 3 in chunks of 4 -> (0, 0) (0, 1) (2, 0).
    """
    counts = -(-numels // chunk_numel)
    rows = np.repeat(np.arange(len(numels), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return (rows << 32) | (np.arange(len(rows), dtype=np.int64) - first[rows])


def _host_memory(size: int, is_pinned: bool) -> Tensor:
    """Pinned for a GPU, since a copy from pageable memory waits for the stream, and a graph cannot hold it."""
    return torch.empty(size, dtype=torch.int64, pin_memory=is_pinned)


def _upload(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, non_blocking=True)


def _fill(host: Tensor, table: Table) -> Tensor:
    host.numpy()[:] = table
    return host


# By content, since addresses rarely change from step to step. By stream, since another one might run ahead of the copy.
@functools.lru_cache(maxsize=64)
def _cached_rows(content: bytes, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    table = np.frombuffer(content, dtype=np.int64)
    is_pinned = device.type == "cuda"
    if is_pinned and len(spare := _spare.setdefault(table.size, [])) < _SPARES:
        spare.append(_host_memory(table.size, is_pinned))
    host = _fill(_host_memory(table.size, is_pinned), table)
    return host, _upload(host, device)


@functools.lru_cache(maxsize=16)
def _host_chunks(numels: bytes, chunk_numel: int, is_pinned: bool) -> Tensor:
    entries = chunk_entries(np.frombuffer(numels, dtype=np.int64), chunk_numel)
    return _fill(_host_memory(entries.size, is_pinned), entries)


@functools.lru_cache(maxsize=16)
def _cached_chunks(numels: bytes, chunk_numel: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    host = _host_chunks(numels, chunk_numel, device.type == "cuda")
    return host, _upload(host, device)


def _captured_tables(content: bytes, numels: bytes, chunk_numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Not from the caches: a graph copies its tables itself, whatever has become of earlier copies by then."""
    rows = _captured.get(content)
    if rows is None:
        table = np.frombuffer(content, dtype=np.int64)
        spare = _spare.get(table.size)
        rows = _captured[content] = _fill(spare.pop() if spare else _host_memory(table.size, True), table)
    chunks = _captured.get((numels, chunk_numel))
    if chunks is None:
        chunks = _captured[numels, chunk_numel] = _host_chunks(numels, chunk_numel, True)
    return _upload(rows, device), _upload(chunks, device)


def tables(rows: Table, chunk_numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (numel in the last column) and their chunk entries, one for each program, in device memory."""
    content, numels = rows.tobytes(), rows[:, -1].tobytes()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _captured_tables(content, numels, chunk_numel, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cached_rows(content, device, stream)[1], _cached_chunks(numels, chunk_numel, device, stream)[1]
