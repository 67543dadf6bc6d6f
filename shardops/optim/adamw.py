"""FusedShardedAdamW: the same optimizer with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .adam import FusedShardedAdam
from .offload import BUCKET_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedShardedAdamW(FusedShardedAdam):
    """AdamW (Loshchilov & Hutter 2019): :class:`FusedShardedAdam` with decoupled weight decay, 1e-2 unless given.

    Takes the arguments of ``torch.optim.AdamW``, in its order; the others, attributes and errors are
    :class:`FusedShardedAdam`'s.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        max_grad_norm: float | None = None,
        process_group: ProcessGroup | None = None,
        seed: int = 0,
        offload_state: str | None = None,
        offload_bucket_bytes: int = BUCKET_BYTES,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
            process_group=process_group,
            seed=seed,
            offload_state=offload_state,
            offload_bucket_bytes=offload_bucket_bytes,
            backend=backend,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as torch's AdamW: it stays decoupled, whatever it loads
            group["decoupled_weight_decay"] = True
