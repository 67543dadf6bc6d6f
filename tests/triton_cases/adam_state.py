"""The lists of one call of sharded_adam in every storage, and one step of them by triton beside the reference's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton_interpreter import Watch, assert_same, float_values

from shardops import ops
from shardops.backends.reference.block_quant import encode_blocks
from shardops.backends.reference.dither import split_fp24
from shardops.backends.reference.sharded_adam import split_fp32
from shardops.backends.triton import _launch
from shardops.backends.triton.sharded_adam import VECTOR

F32, BF16, F16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
BLOCK = VECTOR * _launch.THREADS  # a chunk of the widest elements
ADAMW = {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}
# A parameter's dtype, and its master: None, "fp32", "split" (16 bits), "split24", "nearest" or "stochastic".
Form = tuple[torch.dtype, str | None]


@dataclasses.dataclass
class State:
    """The lists of one call."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]
    shadows: list[Tensor]
    block_words: list[Tensor]
    steps: Tensor
    rounding: str | None = None

    def _lists(self) -> dict[str, list[Tensor]]:
        return {k: v for k, v in vars(self).items() if isinstance(v, list)}

    def written(self) -> list[Tensor]:
        return [self.steps, *(tensor for name, ts in self._lists().items() if name != "grads" for tensor in ts)]

    def clone(self) -> State:
        """A copy whose tensors have the alignment of these."""

        def copied(tensor: Tensor) -> Tensor:
            offset = tensor.data_ptr() % 16 // tensor.element_size()
            room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
            return room[offset:].view(tensor.shape).copy_(tensor)

        lists = {name: [copied(tensor) for tensor in tensors] for name, tensors in self._lists().items()}
        return dataclasses.replace(self, **lists, steps=copied(self.steps))

    def step(self, backend: str, seed: int | None = None, **options: Any) -> Watch:
        """One step in place; triton's under a watch, which is returned."""
        with Watch(self.grads, self.written() if backend == "triton" else (), seed=seed) as watch:
            ops.sharded_adam(
                self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps, masters=self.masters,
                max_exp_avg_sqs=self.max_exp_avg_sqs, shadows=self.shadows, block_words=self.block_words,
                rounding=self.rounding, backend=backend, **options,
            )  # fmt: skip
        return watch


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins ``offset`` elements into its allocation."""
    room = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    return room[offset:].view(tensor.shape).copy_(tensor)


def make_state(
    sizes: Sequence[int | tuple[int, ...]],
    form: Form = (F32, None),
    grad: torch.dtype = F32,
    shadow: torch.dtype | None = None,
    amsgrad: bool = False,
    offset: int = 0,
    seed: int = 0,
    extreme: bool = False,
    moment: torch.dtype = F32,
) -> State:
    """Tensors of the given shapes that begin ``offset`` elements into their allocations; extreme: with any bits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [torch.Size([size] if isinstance(size, int) else size) for size in sizes]

    def make(shape: torch.Size, dtype: torch.dtype = F32, scale: float = 1.0, positive: bool = False) -> Tensor:
        numel = shape.numel() + offset
        values = torch.randn(numel, generator=generator) * scale
        if extreme:
            values = float_values(numel, F32, seed + shape.numel())
            # Not only NaN after one step.
            values = values[torch.randperm(numel, generator=generator)].nan_to_num(nan=1.0, posinf=2.0)
        return (values.abs() if positive else values).to(dtype)[offset:].view(shape)

    dtype, master = form
    fp32 = [make(shape) for shape in shapes]
    params = [moved(value.to(dtype), offset) for value in fp32]
    masters = fp32 if master == "fp32" else []
    if master in ("split", "split24"):
        pairs = [split_fp32(value) if master == "split" else split_fp24(value, None) for value in fp32]
        params, masters = ([moved(tensor, offset) for tensor in tensors] for tensors in zip(*pairs, strict=True))
    grads = [make(shape, grad) for shape in shapes]
    if extreme:
        grads = [
            float_values(shape.numel() + offset, grad, seed + 1 + shape.numel())[offset:].view(shape)
            for shape in shapes
        ]
    exp_avgs = [make(shape, scale=0.1) for shape in shapes]
    exp_avg_sqs = [make(shape, scale=0.1, positive=True) for shape in shapes]
    words: list[Tensor] = []
    if moment == BF16:
        exp_avgs, exp_avg_sqs = ([moved(t.to(BF16), offset) for t in ts] for ts in (exp_avgs, exp_avg_sqs))
    elif moment == INT8:
        coded = [encode_blocks(m, v, m.shape[0], None) for m, v in zip(exp_avgs, exp_avg_sqs, strict=True)]
        exp_avgs, exp_avg_sqs, words = ([moved(t, offset) for t in ts] for ts in zip(*coded, strict=True))
    return State(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [make(shape, scale=0.1, positive=True) for shape in shapes] if amsgrad else [],
        masters,
        [make(shape, shadow) for shape in shapes] if shadow else [],
        words,
        torch.tensor([float(n * n) for n in range(len(sizes))]),
        master if master in ("nearest", "stochastic") else None,
    )


def compare(state: State, seed: int = 0, **options: Any) -> Watch:
    """One step by triton and one by the reference from the same state; leaves triton's in ``state``."""
    expected = state.clone()
    expected.step("reference", **options)
    watch = state.step("triton", seed, **options)
    for one, other in zip(state.written(), expected.written(), strict=True):
        assert_same(one, other)
    return watch
