"""The AdamW update and whole optimizers' steps: ``python -m pytest benchmarks/bench_sharded_adam.py -s``.

The update is the op on its lists of tensors beside torch's way to the same end on such lists; a step is an optimizer's,
with all that it does around the update. Bytes are those that must be read and written, counted from the tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from _records import Case
from _suite import OURS, Suite, random_tensors, reading, shapes_of, updating, writing
from gpu import contenders
from gpu.bandwidth import PEERS
from gpu.contenders import FORMATS, Update, build_update, nbytes_of, parameters
from gpu.measure import Contender
from gpu.units import brief
from torch import Tensor, nn
from torch.optim.adamw import adamw  # torch.optim itself hides the module

import shardops

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# case -> (storage of gpu/contenders.py, options of the optimizer, or None where it has none that means it)
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "fp32": ("fp32", {}),
    "bf16 + split32": ("bf16, split32", {}),
    "bf16 + split24 + int8": ("bf16, split24, int8 moments", {"master_weights": "split24", "state_dtype": "int8"}),
    "fp32 + bf16 shadow": ("fp32, bf16 shadow", None),
}
# Torch's way to the same end, which the speed is compared with; it keeps and moves what ours does not have to.
STOCK = {
    "fp32": "torch fused",
    "bf16 + split32": "torch fused, fp32 masters",
    "bf16 + split24 + int8": "torch fused, fp32 masters",
    "fp32 + bf16 shadow": "torch fused, then _foreach_copy_",
}
# Of an element: ours 16 and 2 of a shadow; torch's masters, their gradients and moments 16, bf16 moments 4 or a copy 2,
# foreach's temporaries 12; the limit's arrays 18.
UPDATE_BYTES = 72
LR = 1e-6
# Beside gpu/bandwidth.py's: for the CPU.
CPU_PEERS: dict[str, tuple[str, str, torch.dtype, dict[str, Any]]] = {
    "DeepSpeedCPUAdam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam", FLOAT32, {"adamw_mode": True}),
    **{name: PEERS[name] for name in ("torchao AdamW8bit", "bitsandbytes AdamW8bit")},
}


def note_of(dtype: torch.dtype) -> str:
    """What torch does otherwise over parameters of a dtype."""
    return "" if dtype == FLOAT32 else ", bf16 moments, no master"


def over_masters(
    params: list[Tensor], grads: list[Tensor], step_of: Callable[[list[Tensor], list[Tensor]], Callable[[], Any]]
) -> tuple[Callable[[], None], int]:
    """Mixed precision as torch has it: gradients to fp32, a step of fp32 masters, and the parameters from these.

    Args:
        params: low-precision.
        grads: theirs.
        step_of: makes the step of masters and their gradients.

    Returns:
        The call, and the bytes that it reads and writes.
    """
    masters = [param.detach().float() for param in params]
    master_grads = [torch.zeros_like(master) for master in masters]
    step = step_of(masters, master_grads)

    @torch.no_grad()
    def run() -> None:
        torch._foreach_copy_(master_grads, grads)
        step()
        torch._foreach_copy_(params, masters)

    return run, 9 * nbytes_of(masters) + nbytes_of(params, grads)


def torch_updates(update: Update, case: str) -> list[Contender]:
    """Torch's way to the same end, and its three updates of these parameters with moments of their dtype."""
    params, grads = update.params, update.grads
    scalars: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "lr": LR, "weight_decay": 1e-2, "eps": 1e-8}

    def adamw_of(params: list[Tensor], grads: list[Tensor], **way: bool) -> Callable[[], None]:
        exp_avgs, exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
        device = params[0].device if way.get("fused") else torch.device("cpu")
        steps = [torch.zeros((), device=device) for _ in params]

        @torch.no_grad()
        def run() -> None:
            adamw(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **way, **scalars)

        return run

    nbytes = 6 * nbytes_of(params) + nbytes_of(grads)
    ways: dict[str, dict[str, bool]] = {
        "fused": {"fused": True, "foreach": False},
        "foreach": {"fused": False, "foreach": True},
        "for-loop": {"fused": False, "foreach": False},
    }
    found = []
    if params[0].dtype != FLOAT32:
        run, moved = over_masters(params, grads, partial(adamw_of, **ways["fused"]))
        found.append(Contender(STOCK[case], run, "torch", moved))
    elif shadows := update.more["shadows"]:
        step = adamw_of(params, grads, **ways["fused"])
        copies = [torch.empty_like(shadow) for shadow in shadows]

        def step_and_copy() -> None:
            step()
            torch._foreach_copy_(copies, params)

        found.append(Contender(STOCK[case], step_and_copy, "torch", nbytes + nbytes_of(params, copies)))
    note = ", no shadow" if update.more["shadows"] else note_of(params[0].dtype)
    for name, way in ways.items():
        found.append(Contender(f"torch {name}{note}", adamw_of(params, grads, **way), "torch", nbytes))
    return found


def streams_of(update: Update) -> list[tuple[int, str]]:
    """What the update reads and writes."""
    moments = (update.exp_avgs, update.exp_avg_sqs, update.more["masters"], update.more["block_words"])
    return [*updating(update.params, *moments), *reading(update.grads), *writing(update.more["shadows"])]


@pytest.mark.parametrize("case", CASES)
def test_sharded_adam(benchmark: Any, suite: Suite, case: str, grid: tuple[int, int]) -> None:
    shapes = shapes_of(*grid)
    suite.room(f"sharded_adam, {case}, {grid}", grid[0] * UPDATE_BYTES)
    update = build_update(FORMATS[CASES[case][0]], shapes, suite.torch_device)
    dtype = update.params[0].dtype
    found = [*suite.ours(update.run, update.nbytes), *torch_updates(update, case)]
    suite.measure(benchmark, Case("sharded_adam", case, dtype, shapes, found, STOCK[case], streams_of(update)))


# ---- whole optimizers ------------------------------------------------------------------------------------------------


def made(suite: Suite, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    """Parameters with gradients, of one contender: ours look after writes of others, which no training run has."""
    values, grads = (random_tensors(shapes, dtype, suite.torch_device) for _ in range(2))
    return parameters(values, [grad.mul_(1e-2) for grad in grads])


def ours(suite: Suite, dtype: torch.dtype, shapes: Sequence[Sequence[int]], name: str = OURS, **options: Any) -> Any:
    """Contenders with an optimizer for each backend, and the last of these."""
    found = []
    for backend in suite.backends:
        optimizer = shardops.FusedShardedAdamW(made(suite, dtype, shapes), lr=LR, backend=backend, **options)
        optimizer.step()
        found.append(Contender(f"{name} [{backend}]", optimizer.step, "ours", step_nbytes(optimizer), backend))
    return found, optimizer


def stocks(suite: Suite, dtype: torch.dtype, shapes: Sequence[Sequence[int]], *ways: str) -> list[Contender]:
    """Torch's optimizers; over low-precision parameters also its fused one over fp32 masters, first."""

    def step_of(params: Sequence[Tensor], grads: Sequence[Tensor], way: str = "fused") -> Callable[[], Any]:
        return torch.optim.AdamW(parameters(params, grads), lr=LR, **{way: True}).step  # type: ignore[arg-type]

    def values_and_grads() -> tuple[list[Tensor], list[Tensor]]:
        params = made(suite, dtype, shapes)
        return [param.detach() for param in params], [param.grad for param in params if param.grad is not None]

    found = []
    if dtype != FLOAT32:
        run, nbytes = over_masters(*values_and_grads(), step_of)
        found.append(Contender(STOCK["bf16 + split32"], run, "torch", nbytes))
    for way in ways:
        params, grads = values_and_grads()
        nbytes = 7 * nbytes_of(params)  # parameters and two moments of their dtype, read and written; gradients
        found.append(Contender(f"torch {way}{note_of(dtype)}", step_of(params, grads, way), "torch", nbytes))
    return found


def states_of(optimizer: Any) -> list[list[Tensor]]:
    """Moments, masters and what belongs to them: a list of each kind. Counters and the like are no streams."""
    kinds: dict[str, list[Tensor]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                kinds.setdefault(key, []).append(value)
    return list(kinds.values())


def gradients_of(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters, and their gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return params, [param.grad for param in params if param.grad is not None]


def step_nbytes(optimizer: Any) -> int:
    """That the update of a step reads and writes; int8 moments make a step read the gradients once more."""
    params, grads = gradients_of(optimizer)
    return 2 * nbytes_of(params, *states_of(optimizer)) + nbytes_of(grads)


def step_streams(optimizer: Any) -> list[tuple[int, str]]:
    """Of the same, for the limit: each kind of state is an array of its own."""
    params, grads = gradients_of(optimizer)
    return [*updating(params, *states_of(optimizer)), *reading(grads)]


@pytest.mark.parametrize("case", ["fp32", "bf16 + split32"])
def test_step(benchmark: Any, suite: Suite, case: str) -> None:
    """One step of 24 M elements, the README's figures; in as many rounds at every scale."""
    storage, options = CASES[case]
    dtype = FORMATS[storage].param
    shapes = [(suite.scale.step // 24,)] * 24
    what = f"optimizer step, {case}"
    suite.room(what, suite.scale.step * 110)
    mine, optimizer = ours(suite, dtype, shapes, **(options or {}))
    found = [*mine, *stocks(suite, dtype, shapes, "fused", "foreach")]
    seconds = None if suite.name == "tiny" else 15.0
    streams = step_streams(optimizer)
    suite.measure(benchmark, Case("sharded_adam", what, dtype, shapes, found, STOCK[case], streams), seconds=seconds)


def test_host_time(benchmark: Any, suite: Suite) -> None:
    """What a step costs the host: 1,000 tensors of 16 elements, on one thread."""
    if suite.device.kind != "cpu":
        suite.skip("host time", "on a GPU benchmarks/gpu_session.py measures it, in its part 'many'")
    count = 1000 if suite.name != "tiny" else 10
    shapes = [(16,)] * count
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, _ = ours(suite, FLOAT32, shapes)
        found += ours(suite, FLOAT32, shapes, f"{OURS}, clipped", max_grad_norm=1.0)[0]
        found += stocks(suite, FLOAT32, shapes, "fused", "foreach")
        seconds = None if suite.name == "tiny" else 15.0
        case = Case("sharded_adam", "optimizer step, host time, fp32", FLOAT32, shapes, found, "torch fused")
        records = suite.measure(benchmark, case, seconds=seconds)
    finally:
        torch.set_num_threads(threads)
    for record in records:
        print(f"{record['contender']}: {record['median_s'] / count * 1e6:.2f} us a tensor")


# ---- memory ---------------------------------------------------------------------------------------------------------


# (case, contender) -> dtype of the parameters, and options of ours or the way of torch's. Every mixed-precision case
# starts from bf16 parameters and gradients.
MEMORY: dict[tuple[str, str], tuple[torch.dtype, Any]] = {
    ("fp32", "torch fused"): (FLOAT32, "fused"),
    ("fp32", "torch foreach"): (FLOAT32, "foreach"),
    ("fp32", OURS): (FLOAT32, {}),
    ("bf16 + fp32 masters", "torch fused"): (BFLOAT16, "fused"),
    ("bf16 + fp32 masters", OURS): (BFLOAT16, {"master_weights": "fp32"}),
    ("bf16 + split32", OURS): (BFLOAT16, {}),
    ("bf16 + split32 + bf16", OURS): (BFLOAT16, {"state_dtype": BFLOAT16}),
    ("bf16 + split32 + int8", OURS): (BFLOAT16, {"state_dtype": "int8"}),
    ("bf16 + split24 + int8", OURS): (BFLOAT16, {"state_dtype": "int8", "master_weights": "split24"}),
}


def torch_over_masters(params: list[nn.Parameter], way: str) -> tuple[Callable[[], Any], Any, list[Tensor]]:
    """The step of torch's optimizer over fp32 masters, that optimizer, and the masters with their gradients."""
    optimizers, tensors = [], []

    def step_of(masters: list[Tensor], master_grads: list[Tensor]) -> Callable[[], Any]:
        tensors.extend([*masters, *master_grads])
        optimizers.append(torch.optim.AdamW(parameters(masters, master_grads), lr=LR, **{way: True}))  # type: ignore[arg-type]
        return optimizers[0].step

    grads = [param.grad for param in params if param.grad is not None]
    step, _ = over_masters([param.detach() for param in params], grads, step_of)
    return step, optimizers[0], tensors


def memory_of(suite: Suite, dtype: torch.dtype, how: Any, backend: str | None) -> dict[str, int]:
    """What an optimizer holds around its third step, and the most within it; backend None: torch's."""
    params = made(suite, dtype, contenders.shapes_of(suite.scale.peers))
    tensors = [tensor for param in params for tensor in (param.detach(), param.grad) if tensor is not None]
    if backend is not None:
        optimizer: Any = shardops.FusedShardedAdamW(params, lr=LR, backend=backend, **how)
        step: Callable[[], Any] = optimizer.step
    elif dtype == FLOAT32:
        optimizer = torch.optim.AdamW(params, lr=LR, **{how: True})
        step = optimizer.step
    else:
        step, optimizer, masters = torch_over_masters(params, how)
        tensors += masters
    for _ in range(2):  # states are made in the first, plans by the second
        step()
    before, most = suite.device.peak_of(step)
    resident = nbytes_of(tensors, *states_of(optimizer))
    numel = sum(param.numel() for param in params)
    return {"numel": numel, "resident": resident, "peak": resident + most - before}


@pytest.mark.parametrize(("case", "name"), MEMORY, ids=[", ".join(key) for key in MEMORY])
def test_memory(benchmark: Any, suite: Suite, case: str, name: str) -> None:
    """Bytes that are held around a step, and within it. Counted: their times are no figures."""
    suite.room(f"memory, {case}", suite.scale.peers * 60)
    dtype, how = MEMORY[case, name]
    records = []
    for backend in suite.backends if name == OURS else (None,):
        found = memory_of(suite, dtype, how, backend)
        suite.device.release()
        records.append({"case": case, "contender": name if backend is None else f"{name} {backend}", **found})
        each, peak = found["resident"] / found["numel"], found["peak"] / found["resident"]
        print(f"memory, {case}, {records[-1]['contender']}: {each:.2f} bytes a parameter, {peak:.3f} of it in the step")
    benchmark.extra_info["memory"] = records
    benchmark.pedantic(len, (records,), rounds=1)  # a benchmark without a time would not be kept


# ---- peers -----------------------------------------------------------------------------------------------------------


def peer_steps(suite: Suite, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[Contender]:
    """Those that can be made; why the others cannot goes into ``suite.missing``."""
    found = []
    peers = CPU_PEERS if suite.device.kind == "cpu" else PEERS
    for name, (module, attribute, their_dtype, options) in peers.items():
        if their_dtype != dtype:
            continue
        try:
            kind: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
            step = kind(made(suite, dtype, shapes), lr=LR, **options).step
        except (Exception, SystemExit) as error:
            suite.missing[name] = brief(error, 200)
            continue
        found.append(Contender(name, partial(step), "peer"))
    return found


@pytest.mark.parametrize("case", ["fp32", "bf16 + split24 + int8"])
def test_peers(benchmark: Any, suite: Suite, case: str) -> None:
    """Whole steps beside other libraries', those of ``requirements-peers.txt``; some compile when they are made."""
    storage, options = CASES[case]
    dtype, shapes = FORMATS[storage].param, contenders.shapes_of(suite.scale.peers)
    what = f"optimizer step beside peers, {case}"
    suite.room(what, suite.scale.peers * 150)
    mine, _ = ours(suite, dtype, shapes, **(options or {}))
    found = [*mine, *stocks(suite, dtype, shapes, "fused"), *peer_steps(suite, dtype, shapes)]
    seconds = None if suite.name == "tiny" else 100.0  # their compilation counts; the rounds get 15 at most
    suite.measure(benchmark, Case("sharded_adam", what, dtype, shapes, found, STOCK[case]), seconds=seconds)
