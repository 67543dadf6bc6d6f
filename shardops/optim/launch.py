"""From a bucket and its group's options to the one kernel launch that updates it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import ops
from ..ops import _registry
from ..ops._adam_formats import ROUNDINGS
from ..plan import Bucket


def launch_all(
    optimizer: Any,
    buckets: Sequence[Bucket],
    coefficient: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Updates buckets, with states that are streamed from the host if the optimizer keeps them there."""

    def run(bucket: Bucket) -> None:
        launch(optimizer, bucket, coefficient, grad_scale, found_inf)

    if optimizer._offload is not None:
        optimizer._offload.run(buckets, run)
        return
    for bucket in buckets:
        run(bucket)


def launch(
    optimizer: Any, bucket: Bucket, coefficient: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """Updates one bucket.

    Args:
        optimizer: whose groups and backend they are.
        bucket: with this step's gradients.
        coefficient: to multiply gradients by, float32 scalar on any device; None: no clipping.
        grad_scale: divides gradients, likewise.
        found_inf: where it is not 0, nothing is written, likewise.
    """
    group = optimizer.param_groups[bucket.group_index]
    lr, lr_tensor = group["lr"], None
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr_tensor = _beside(lr, bucket)
        lr = 0.0
    lr = float(lr)
    beta1, beta2 = group["betas"]
    scalars = [_beside(scalar, bucket) for scalar in (coefficient, grad_scale, found_inf)]
    if bucket.regular:
        kernel = _registry.resolve("sharded_adam", bucket.device.type, optimizer.backend)
        kernel(
            bucket.params,
            bucket.grads,
            bucket.exp_avgs,
            bucket.exp_avg_sqs,
            bucket.max_exp_avg_sqs,
            bucket.masters,
            bucket.shadows,
            bucket.block_words,
            bucket.steps,
            bucket.step_index,
            bucket.dither,
            bucket.rounding,
            lr,
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
            group["maximize"],
            lr_tensor,
            *scalars,
        )
        return
    # Strided parameters or gradients: the op orders them first.
    clip_coef, grad_scale, found_inf = scalars
    ops.sharded_adam(
        bucket.params,
        bucket.grads,
        bucket.exp_avgs,
        bucket.exp_avg_sqs,
        bucket.steps,
        lr=lr if lr_tensor is None else lr_tensor,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        max_exp_avg_sqs=bucket.max_exp_avg_sqs,
        masters=bucket.masters,
        shadows=bucket.shadows,
        block_words=bucket.block_words,
        step_index=bucket.step_index,
        dither=bucket.dither,
        rounding=(None, *ROUNDINGS)[bucket.rounding],
        clip_coef=clip_coef,
        grad_scale=grad_scale,
        found_inf=found_inf,
        backend=optimizer.backend,
    )


def _beside(scalar: Tensor | None, bucket: Bucket) -> Tensor | None:
    """A scalar on the bucket's device, without a sync; to the host with one, since a kernel there reads it at once."""
    return None if scalar is None else scalar.to(bucket.device, non_blocking=bucket.device.type != "cpu")


def check_graph_capture(optimizer: Any) -> None:
    """Runs torch's own check that a captured step is capturable, under the name it has in this version."""
    renamed = getattr(optimizer, "_accelerator_graph_capture_health_check", None)
    (renamed or optimizer._cuda_graph_capture_health_check)()
