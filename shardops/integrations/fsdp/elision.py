"""Copy-in elided: the shadows of one FSDP group lie back to back, so their buffer is the all-gather's input as it is.

``fsdp::all_gather_copy_in`` copies a group's inputs into the output buffer before the collective. The override returns
the buffer of shadows in place of that copy, for registered buffers only: any other contiguous input may be a temporary
whose memory is freed while the gather still reads it. One override serves the process, while any buffer needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...shadow import Shadow, shadow_of
from . import hooks
from .overrides import override
from .torch_fsdp import Owner

_DEVICES = ("CPU", "CUDA")
_library: Any = None


class ShadowBuffer:
    """The memory of one group's shadows, registered for as long as it lives. Shadows keep it; it keeps none of them.

    Attributes:
        buffer: padded shadows in the group's order, 1D.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        _buffers[self.buffer.untyped_storage().data_ptr()] = self


# By the address of their storage.
_buffers: weakref.WeakValueDictionary[int, ShadowBuffer] = weakref.WeakValueDictionary()


def is_elided(members: Sequence[Owner]) -> bool:
    """Whether the group's shadows lie back to back in one registered buffer."""
    shadows = [shadow_of(member.local) for member in members]
    padded = [shadow.padded for shadow in shadows if shadow is not None]
    return len(padded) == len(members) and find(padded, sum(tensor.numel() for tensor in padded)) is not None


def is_of_a_buffer(local: Tensor) -> bool:
    """Whether a local tensor's shadow was laid beside others, be they there still or not."""
    shadow = shadow_of(local)
    return shadow is not None and isinstance(shadow.owner, ShadowBuffer)


def elide(members: Sequence[Owner]) -> None:
    """Lays the shadows of a group's parameters back to back; all of them must be fit for one."""
    sizes = [member.fsdp_param.padded_sharded_param_size for member in members]
    numels = [size.numel() for size in sizes]
    owner = ShadowBuffer(sum(numels), members[0].fsdp_param.mp_policy.param_dtype, members[0].local.device)
    for member, part, size in zip(members, torch.split(owner.buffer, numels), sizes, strict=True):
        hooks.attach(member.fsdp_param, Shadow(part.view(size), member.local.shape[0], owner=owner))
    _install()


def find(inputs: Sequence[Tensor], numel: int) -> Tensor | None:
    """The part of a registered buffer that the inputs are, in order and without gaps; None if they are not."""
    if not inputs:
        return None
    address = inputs[0].untyped_storage().data_ptr()
    registered = _buffers.get(address)
    if registered is None:
        return None
    start = end = inputs[0].storage_offset()
    for tensor in inputs:
        if (
            tensor.storage_offset() != end
            or tensor.dtype != registered.buffer.dtype
            or tensor.untyped_storage().data_ptr() != address
        ):
            return None
        end += tensor.numel()
    return registered.buffer[start:end] if end - start == numel else None


def _all_gather_copy_in(
    all_gather_inputs: list[Tensor],
    all_gather_output: Tensor,
    inp_split_sizes: list[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    elided = find(all_gather_inputs, all_gather_input_numel)
    if elided is not None:
        # The output lives until the gather has been waited for; so must its input, though the shadows be dropped.
        all_gather_output._shardops_input = elided  # type: ignore[attr-defined]
        return elided, all_gather_output
    all_gather_input = all_gather_output.narrow(0, all_gather_input_numel * rank, all_gather_input_numel)
    with torch.no_grad():
        torch._foreach_copy_(torch.split(all_gather_input, inp_split_sizes), all_gather_inputs)
    return all_gather_input, all_gather_output


def _install() -> None:
    global _library
    if _library is None:
        _library = override({("all_gather_copy_in", device): _all_gather_copy_in for device in _DEVICES})


def release() -> None:
    """Takes the override back once no buffer needs it."""
    global _library
    if _library is not None and not _buffers:
        _library._destroy()
        _library = None
