"""The two ways to step a big bf16 model: shardops in the formats asked for, and stock AdamW in mixed precision.

Both are generous to memory: no gradient is left alive after its step, and stock AdamW's fp32 gradients are made one at
a time, so that it needs its 16 bytes a parameter and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
STATE_DTYPES: dict[str, Any] = {"int8": "int8", "bfloat16": torch.bfloat16, "float32": torch.float32}
MASTER_WEIGHTS = ("split24", "split32", "stochastic", "none", "auto", "fp32")
# Mixed precision as in train_fsdp.py and elsewhere: bf16 weights and gradients, everything else in fp32.
STOCK_BYTES = {"parameters": 2.0, "gradients": 2.0, "exp_avg": 4.0, "exp_avg_sq": 4.0, "master": 4.0}


class Update(Protocol):
    """What a training loop needs of an optimizer here."""

    def prepare(self) -> None:
        """Called once the model's own hooks are in place."""

    def set_lr(self, lr: float) -> None:
        """Of the step to come; called before its backward."""

    def step(self) -> None:
        """After backward: updates what has not been updated yet, and frees the gradients."""

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is kept between steps: (key of memory_use.STATE_SHARES, live tensor)."""


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for state in optimizer.state.values():
        yield from ((key, value) for key, value in state.items() if isinstance(value, Tensor))


class ShardopsUpdate:
    """shardops.FusedShardedAdamW on the bf16 parameters themselves.

    Args:
        model: to be trained.
        state_dtype: a key of STATE_DTYPES.
        master_weights: one of MASTER_WEIGHTS.
        seed: of dither and stochastic rounding.
        gradient_release: step and free each gradient inside of backward.

    Raises:
        ValueError, TypeError: options that this shardops does not know.
    """

    def __init__(
        self, model: nn.Module, state_dtype: str, master_weights: str, seed: int, gradient_release: bool
    ) -> None:
        import shardops  # here, so that `--optimizer torch` runs where it is not installed

        self._model = model
        self._release = gradient_release
        self.optimizer = shardops.FusedShardedAdamW(
            model.parameters(),
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            state_dtype=STATE_DTYPES[state_dtype],
            master_weights=master_weights,
            seed=seed,
        )

    def prepare(self) -> None:
        if self._release:
            import shardops

            shardops.enable_gradient_release(self._model, self.optimizer)

    def set_lr(self, lr: float) -> None:
        _set_lr(self.optimizer, lr)

    def step(self) -> None:
        self.optimizer.step()  # with gradient release it only ends what backward has done
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return _tensors_of(self.optimizer)


class StockUpdate:
    """torch.optim.AdamW on fp32 copies of the parameters, which are rounded back to bf16 after each step."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self.optimizer = torch.optim.AdamW(self._masters, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def prepare(self) -> None:
        pass

    def set_lr(self, lr: float) -> None:
        _set_lr(self.optimizer, lr)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
            self.optimizer.step()  # it skips all others, which have no gradient
            master.grad = None
            parameter.copy_(master)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("master_param", master) for master in self._masters)
        yield from _tensors_of(self.optimizer)
