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
# Tables of launches that a CUDA graph recorded: a replay reads both the copy's source and its target.
_captured: list[tuple[Tensor, Tensor]] = []


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


def _upload(table: Table, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table on the host and on the device. Pinned, since a copy from pageable memory waits for the stream."""
    host = torch.empty(table.size, dtype=torch.int64, pin_memory=device.type == "cuda")
    host.numpy()[:] = table.ravel()
    return host, host.to(device, non_blocking=True)


# By content, since addresses rarely change from step to step. By stream, since another one might run ahead of the copy.
@functools.lru_cache(maxsize=64)
def _cached_rows(content: bytes, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    return _upload(np.frombuffer(content, dtype=np.int64), device)


@functools.lru_cache(maxsize=16)
def _cached_chunks(numels: bytes, chunk_numel: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    return _upload(chunk_entries(np.frombuffer(numels, dtype=np.int64), chunk_numel), device)


def tables(rows: Table, chunk_numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (numel in the last column) and their chunk entries, one for each program, in device memory."""
    numels = np.ascontiguousarray(rows[:, -1])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Not through the cache: memory of a graph's pool holds nothing until the graph is replayed.
        built = _upload(rows, device), _upload(chunk_entries(numels, chunk_numel), device)
        _captured.extend(built)
        return built[0][1], built[1][1]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (
        _cached_rows(rows.tobytes(), device, stream)[1],
        _cached_chunks(numels.tobytes(), chunk_numel, device, stream)[1],
    )
