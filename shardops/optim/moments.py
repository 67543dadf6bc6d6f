"""How a parameter's moments are stored: fp32, bf16, or block-quantised codes, and the ways between these.

========== ============================================ ====================================================
float32    ``exp_avg``, ``exp_avg_sq``                  of the parameter's shape
bfloat16   ``exp_avg``, ``exp_avg_sq``                  of the parameter's shape
int8       ``exp_avg_codes``, ``exp_avg_sq_codes``      int8 and uint8, of the parameter's shape
           ``block_words``                              int32 ``[dim 0, blocks, 2]``, a block 128 of a row
========== ============================================ ====================================================

Rows are those of the global tensor, so that resharding along dim 0 moves codes as they are. Where a rank holds parts of
rows (tensor parallel on another dim, FSDP1's slices) blocks are of what it holds, and state dicts have fp32 instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..backends.reference.block_quant import BLOCK, blocks_of, decode_blocks
from ..collectives import local_tensor
from .like import is_fsdp1, zeros_like
from .masters import Group, State
from .requantise import requantise

STATE_DTYPES = ("float32", "bfloat16", "int8")
MomentStorage = Literal["float32", "bfloat16", "int8"]
CODE_KEYS = ("exp_avg_codes", "exp_avg_sq_codes", "block_words")
# Below these, codes save nothing worth their words.
SMALLEST_NUMEL = 4096  # of the global tensor
SMALLEST_ROW = BLOCK
# Elements that are converted at once: in torch it takes some twenty times their memory.
_PIECE = 1 << 20


def moment_storage(param: Tensor, group: Group) -> MomentStorage:
    """How the parameter's moments are stored under its group's ``state_dtype``."""
    storage: MomentStorage = group["state_dtype"]
    if storage != "int8":
        return storage
    row = param.numel() if is_fsdp1(param) else param.shape[1:].numel() if param.dim() else 0
    return "int8" if param.numel() >= SMALLEST_NUMEL and row >= SMALLEST_ROW else "float32"


def found_storage(state: State) -> str | None:
    """How a state stores moments; "mixed": in two dtypes, as somebody put them together; None: it has not both."""
    if all(key in state for key in CODE_KEYS):
        return "int8"
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    dtypes = {str(state[key].dtype).removeprefix("torch.") for key in ("exp_avg", "exp_avg_sq")}
    return dtypes.pop() if len(dtypes) == 1 else "mixed"


def is_cut_by_rows(param: Any) -> bool:
    """Whether every rank holds whole rows of the global tensor: then blocks are the global tensor's."""
    return not is_fsdp1(param) and all(
        placement.is_replicate() or getattr(placement, "dim", None) == 0
        for placement in getattr(param, "placements", ())
    )


def local_rows(param: Tensor) -> int:
    """Rows of the local tensor, within which blocks lie; FSDP1's flat slices are one."""
    local = local_tensor(param)
    return 1 if is_fsdp1(param) or not local.dim() else local.shape[0]


def create_moments(param: Tensor, storage: MomentStorage) -> State:
    """Moments of zero."""
    if storage != "int8":
        dtype = torch.float32 if storage == "float32" else torch.bfloat16
        return {"exp_avg": zeros_like(param, dtype), "exp_avg_sq": zeros_like(param, dtype)}
    return {
        "exp_avg_codes": zeros_like(param, torch.int8),
        "exp_avg_sq_codes": zeros_like(param, torch.uint8),
        "block_words": _zero_words(param),
    }


def words_shape(param: Tensor, local: bool) -> tuple[int, int, int]:
    """Shape of ``block_words`` of the whole parameter, or of this rank's part."""
    values = local_tensor(param) if local else param
    rows = local_rows(param) if local else param.shape[0]
    columns = values.numel() // rows if rows else values.shape[1:].numel()
    return rows, blocks_of(columns), 2


def _zero_words(param: Any) -> Tensor:
    local = torch.zeros(words_shape(param, local=True), dtype=torch.int32, device=local_tensor(param).device)
    return placed_words(param, local)


def placed_words(param: Any, local: Tensor) -> Tensor:
    """A rank's words as the state has them: a DTensor of the parameter's placements where blocks are global."""
    if not hasattr(param, "_local_tensor") or not is_cut_by_rows(param):
        return local
    from torch.distributed.tensor import DTensor

    shape = torch.Size(words_shape(param, local=False))
    strides = (shape[1] * 2, 2, 1)
    # A local tensor is moved to the mesh's device, where offloaded parameters are not, unless it is on the meta device.
    layout = DTensor.from_local(
        local.to("meta"), param.device_mesh, param.placements, run_check=False, shape=shape, stride=strides
    )
    words = torch.empty_like(layout, device=local.device)
    local_tensor(words).copy_(local)
    return words


def fp32_moments(param: Tensor, state: State) -> State:
    """``exp_avg`` and ``exp_avg_sq`` in float32, of the parameter's layout; the state's own if they are."""
    if found_storage(state) != "int8":
        return {key: _in_fp32(param, state[key]) for key in ("exp_avg", "exp_avg_sq")}
    moments = {"exp_avg": zeros_like(param, torch.float32), "exp_avg_sq": zeros_like(param, torch.float32)}
    targets = [local_tensor(moment) for moment in moments.values()]
    codes, square_codes, words = (local_tensor(state[key]).contiguous() for key in CODE_KEYS)
    for target, value in zip(targets, decode(codes, square_codes, words), strict=True):
        target.copy_(value)
    return moments


def _in_fp32(param: Tensor, moment: Tensor) -> Tensor:
    if moment.dtype == torch.float32:
        return moment
    copy = zeros_like(param, torch.float32)
    copy.copy_(moment)
    return copy


def decode(codes: Tensor, square_codes: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """float32 moments of contiguous local codes, piece by piece."""
    rows = words.shape[0]
    moments = (
        torch.empty(codes.shape, dtype=torch.float32, device=codes.device),
        torch.empty(codes.shape, dtype=torch.float32, device=codes.device),
    )
    flat = [tensor.view(rows, -1) for tensor in (*moments, codes, square_codes)] if codes.numel() else []
    for piece in _pieces(rows, codes.numel() // rows if rows else 0):
        exp_avg, exp_avg_sq, code, square_code = (tensor[piece.elements] for tensor in flat)
        decoded = decode_blocks(code, square_code, words[piece.blocks])
        exp_avg.copy_(decoded[0])
        exp_avg_sq.copy_(decoded[1])
    return moments


def convert_moments(param: Tensor, state: State, storage: MomentStorage) -> None:
    """Replaces a state's moments by themselves in another storage, through fp32.

    fp32 values that came out of codes of the same blocks go back into codes that decode to the same bits.
    """
    moments = fp32_moments(param, state)
    for key in ("exp_avg", "exp_avg_sq", *CODE_KEYS):
        state.pop(key, None)
    if storage == "float32":
        state.update(moments)
        return
    created = create_moments(param, storage)
    if storage == "bfloat16":
        for key, moment in moments.items():
            created[key].copy_(moment)
    else:
        _encode(
            *(local_tensor(moment).contiguous() for moment in moments.values()),
            *(local_tensor(created[key]) for key in CODE_KEYS),
        )
    state.update(created)


def _encode(exp_avg: Tensor, exp_avg_sq: Tensor, codes: Tensor, square_codes: Tensor, words: Tensor) -> None:
    """Fills codes and words of contiguous local moments, piece by piece."""
    rows = words.shape[0]
    targets = (
        torch.empty_like(codes, memory_format=torch.contiguous_format),
        torch.empty_like(square_codes, memory_format=torch.contiguous_format),
    )
    flat = [tensor.view(rows, -1) for tensor in (exp_avg, exp_avg_sq, *targets)] if codes.numel() else []
    for piece in _pieces(rows, codes.numel() // rows if rows else 0):
        avg, avg_sq, *into = (tensor[piece.elements] for tensor in flat)
        for target, value in zip((*into, words[piece.blocks]), requantise(avg, avg_sq), strict=True):
            target.copy_(value)
    codes.copy_(targets[0])
    square_codes.copy_(targets[1])


class _Piece:
    """A rectangle of rows and columns, on block boundaries."""

    def __init__(self, rows: slice, first: int, last: int) -> None:
        self.elements = (rows, slice(first, last))
        self.blocks = (rows, slice(first // BLOCK, blocks_of(last)))


def _pieces(rows: int, columns: int) -> Iterator[_Piece]:
    if not rows or not columns:
        return
    width = min(columns, _PIECE)
    height = max(1, _PIECE // width)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield _Piece(slice(row, min(row + height, rows)), column, min(column + width, columns))
