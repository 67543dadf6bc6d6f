"""sharded_adam: one Adam step over lists of local tensors, in one pass over memory and one launch.

Unscale, clip, moments, decay, master weights, the parameter and its low-precision shadow together. The arithmetic is
specified by ``backends/reference/sharded_adam.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _adam_formats, _checks, _geometry, _library, _registry
from ._adam_formats import ROUNDINGS, Rounding

_library.define(
    "sharded_adam",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] shadows, Tensor(h!)[] block_words, "
    "Tensor(g!) steps, Tensor? step_index, Tensor? dither, int rounding, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, bool decoupled_weight_decay, bool maximize, Tensor? lr_tensor, "
    "Tensor? clip_coef, Tensor? grad_scale, Tensor? found_inf) -> ()",
    lambda *args: None,
    _registry.deferred("sharded_adam", lambda params, *_: params[0].device),
)

# Lists that fit together and lie in memory as the kernels want it.
_SEEN: _geometry.Seen[bool] = _geometry.Seen()


def sharded_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Tensor,
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    shadows: Sequence[Tensor] = (),
    block_words: Sequence[Tensor] = (),
    step_index: Tensor | None = None,
    dither: Tensor | None = None,
    rounding: Rounding | None = None,
    clip_coef: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Updates parameters, moments, masters, shadows and steps in place.

    Adam: Kingma & Ba 2015; AdamW: Loshchilov & Hutter 2019.

    In float32, with the tensor's ``t = step + 1``::

        grad        = float32(grad) / grad_scale * clip_coef
        exp_avg    += (1 - beta1) * (grad - exp_avg)
        exp_avg_sq  = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
        master      = master * (1 - lr * weight_decay)
                      - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

    Args:
        params: float32, bfloat16 or float16, ND, one dtype. The lists below have one tensor for each, of its shape.
        grads: float32, bfloat16 or float16, one dtype. Not written: they stay scaled and unclipped.
        exp_avgs: float32, bfloat16, or the int8 codes of block-quantised moments.
        exp_avg_sqs: float32, bfloat16, or uint8 codes, as ``exp_avgs``.
        steps: float32 counters of the steps done before this one, 1D, on the parameters' device, or on the CPU if
            there is no ``found_inf``; one is added to those used, unless ``found_inf`` is set.
        lr: a number, or one float32 or float64 element on the parameters' device, read without a sync.
        beta1, beta2, eps, weight_decay: as torch's Adam.
        decoupled_weight_decay: AdamW's decay; False: an L2 penalty added to the gradient.
        maximize: ascend.
        max_exp_avg_sqs: float32, for amsgrad; empty: no amsgrad.
        masters: empty for float32 parameters, which are their own, or with ``rounding``; float32 masters; or, for
            bfloat16 parameters, the 16-bit remainders that complete them to float32 (an int16 each, in a tensor typed
            bfloat16), or int8 remainders that complete them to its upper 24 bits.
        shadows: copies of the updated parameters in one dtype, rounded to nearest even from the master; or empty.
        block_words: of block-quantised moments, int32 ``[rows, blocks, 2]`` each: blocks of 128 within a row, the last
            one of a row may be shorter. The elements of a parameter in row-major order make ``rows`` rows.
        step_index: int64 ``[len(params)]`` on the CPU: each parameter's counter in ``steps``, no two alike; None: its
            position.
        dither: int64 ``[len(params), 4]`` on the CPU: (salt in [0, 2^32), first, columns, stride) of each parameter,
            for whatever is stored in fewer bits than it is computed in: bfloat16 and quantised moments, 24-bit masters,
            stochastic rounding. Element ``i`` of a local tensor is element
            ``first + (i // columns) * stride + i % columns`` of the global one, by which the dither is chosen (within a
            block: by its position there). None: round to nearest, ties away from zero.
        rounding: of low-precision parameters without masters: to ``"nearest"`` even, or ``"stochastic"`` by dither
            (bfloat16 only). None: they need masters.
        clip_coef: float32 scalar that multiplies gradients.
        grad_scale: float32 scalar that divides gradients, as in torch's fused Adam.
        found_inf: float32 scalar; if not 0, nothing is written.
        backend: None takes the best one available; a name never falls back.

    Raises:
        ValueError: lists of different lengths, shapes that differ, several devices or dtypes in a list, an element to
            be written that lies under several others (an expanded tensor). Nothing is written then.
        TypeError: something that is not a dense float tensor.
    """
    params, grads = list(params), list(grads)
    if not params:
        if grads:
            raise ValueError(f"params is empty, grads has {len(grads)} tensors; give one gradient for each parameter")
        return
    lists = {
        "params": params,
        "grads": grads,
        "exp_avgs": list(exp_avgs),
        "exp_avg_sqs": list(exp_avg_sqs),
        "max_exp_avg_sqs": list(max_exp_avg_sqs),
        "masters": list(masters),
        "shadows": list(shadows),
        "block_words": list(block_words),
    }
    # Blocks and the elements' indices are counted in row-major order.
    is_ordered = dither is not None or bool(block_words)
    tensors = [tensor for members in lists.values() for tensor in members]
    key = _SEEN.key(tensors, rounding, is_ordered, *map(len, lists.values()))
    is_seen = _SEEN.get(key) is not None
    if not is_seen:
        _adam_formats.check_lists(lists, rounding)
    _adam_formats.check_dither(dither, rounding, params)
    device = params[0].device
    _check_scalars({"clip_coef": clip_coef, "grad_scale": grad_scale, "found_inf": found_inf}, device, (torch.float32,))
    if isinstance(lr, Tensor):
        _check_scalars({"lr": lr}, device, (torch.float32, torch.float64))
    _check_steps(steps, step_index, len(params), device, may_be_on_cpu=found_inf is None)

    dense = lists
    write_back: list[tuple[Tensor, Tensor]] = []
    if not is_seen:
        detached = {name: [tensor.detach() for tensor in members] for name, members in lists.items()}
        dense, write_back = _dense_lists(detached, is_ordered)
        if all(all(map(operator.is_, dense[name], members)) for name, members in detached.items()):
            _SEEN.put(key, True)
    with torch.no_grad():
        _registry.resolve("sharded_adam", device.type, backend)(
            *dense.values(),
            steps,
            step_index,
            dither,
            0 if rounding is None else 1 + ROUNDINGS.index(rounding),
            0.0 if isinstance(lr, Tensor) else float(lr),
            float(beta1),
            float(beta2),
            float(eps),
            float(weight_decay),
            decoupled_weight_decay,
            maximize,
            lr if isinstance(lr, Tensor) else None,
            clip_coef,
            grad_scale,
            found_inf,
        )
        for target, updated in write_back:
            target.copy_(updated)
    written = [tensor for name, tensors in lists.items() if name != "grads" for tensor in tensors]
    _library.mark_written([*written, steps])


def _check_scalars(scalars: dict[str, Tensor | None], device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    for name, scalar in scalars.items():
        if scalar is None:
            continue
        if not isinstance(scalar, Tensor) or scalar.numel() != 1 or scalar.dtype not in dtypes:
            raise ValueError(f"{name} is {scalar!r}; it is a tensor of one element, {' or '.join(map(str, dtypes))}")
        if scalar.device != device:
            raise ValueError(f"{name} is on {scalar.device}, the parameters on {device}; move it there")


def _check_steps(
    steps: Tensor, step_index: Tensor | None, count: int, device: torch.device, may_be_on_cpu: bool
) -> None:
    if steps.dim() != 1 or steps.dtype != torch.float32 or not steps.is_contiguous():
        raise ValueError(
            f"steps has shape {tuple(steps.shape)}, dtype {steps.dtype}, strides {steps.stride()}; "
            "it is contiguous, 1D, float32"
        )
    if steps.device != device and not (may_be_on_cpu and steps.device.type == "cpu"):
        raise ValueError(
            f"steps is on {steps.device}, the parameters on {device}; move it there"
            + (", or to the CPU" if may_be_on_cpu else ": with found_inf the device decides whether it counts")
        )
    if step_index is None:
        if steps.numel() < count:
            raise ValueError(f"steps has {steps.numel()} counters for {count} parameters; give one for each")
    elif step_index.shape != (count,) or step_index.dtype != torch.int64 or step_index.device.type != "cpu":
        raise ValueError(
            f"step_index has shape {tuple(step_index.shape)}, dtype {step_index.dtype}, device {step_index.device}; "
            f"it is int64 of shape ({count},) on the CPU"
        )
    elif not _library.is_traced():  # under a trace there are no values to look at
        positions = step_index.tolist()
        if min(positions) < 0 or max(positions) >= steps.numel() or len(set(positions)) < count:
            raise ValueError(
                f"step_index is {positions}, steps has {steps.numel()} counters; it names each parameter's own, "
                f"from 0 to {steps.numel() - 1}"
            )


def _dense_lists(
    lists: dict[str, list[Tensor]], is_ordered: bool
) -> tuple[dict[str, list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """The lists with every parameter's tensors in one gapless memory order, and what to copy back afterwards.

    Kernels walk memory. Where a parameter has gaps, or one of its tensors another order, those tensors alone are
    replaced by row-major copies; the updated ones are returned as (target, copy). ``is_ordered``: the order must be
    row-major. The words of blocks have a shape of their own.
    """
    dense = {name: list(tensors) for name, tensors in lists.items()}
    write_back: list[tuple[Tensor, Tensor]] = []
    for index, param in enumerate(lists["params"]):
        present = [name for name, tensors in lists.items() if tensors and name != "block_words"]
        strides = {lists[name][index].stride() for name in present}
        if len(strides) == 1 and (param.is_contiguous() if is_ordered else _checks.is_dense(param)):
            continue
        for name in present:
            tensor = lists[name][index]
            if tensor.is_contiguous():
                continue
            if name != "grads" and any(
                stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            ):
                raise ValueError(
                    f"{name}[{index}] has shape {tuple(tensor.shape)} and strides {tensor.stride()}: several of its "
                    "elements are one; pass a tensor that is not expanded"
                )
            dense[name][index] = tensor.contiguous()
            if name != "grads":
                write_back.append((tensor, dense[name][index]))
    return dense, write_back
