"""FusedShardedAdamW inside accelerate: it takes the optimizer first, shards afterwards, and swaps the parameters."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from distributed import Net, loss_of, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from trainers import BF16_BOUND, FP32_BOUND, Make, Session, check, launched, needs

MICROBATCHES = 2


def accelerator(version: int, mixed_precision: str, **options: Any) -> Any:
    """An Accelerator that shards with FSDP on a CPU.

    It ignores an FSDP plug-in where it finds the processes to be CPUs' ("MULTI_CPU"), and takes DDP without a word. So
    it is told that they are GPUs', of which each has the device "cpu".
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not "cpu:1", which FSDP1 refuses
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **{"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False, **options},
    )
    made = Accelerator(
        cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin, gradient_accumulation_steps=MICROBATCHES
    )
    assert made.distributed_type == DistributedType.FSDP
    return made


def session(acc: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, is_saved: bool = True) -> Session:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, wrapped, scheduler = acc.prepare(model, optimizer, scheduler)
    assert wrapped.optimizer is optimizer

    def train(steps: range) -> list[Tensor]:
        losses = []
        for index in range(MICROBATCHES * steps.start, MICROBATCHES * steps.stop):
            with acc.accumulate(model):  # steps, schedules and clears in the last microbatch only
                loss = loss_of(model, index)
                acc.backward(loss)
                if acc.sync_gradients:
                    assert acc.clip_grad_norm_(model.parameters(), 0.5) > 0.5
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
            losses.append(loss.detach())
        return [torch.stack(losses[i : i + MICROBATCHES]).mean() for i in range(0, len(losses), MICROBATCHES)]

    def load(folder: str) -> None:
        if not acc.is_fsdp2 and hasattr(optimizer, "init_states"):
            # It reads into what FSDP1 finds in the optimizer, so into nothing where no step was made yet.
            optimizer.init_states()
        acc.load_state(folder)

    steps = (acc.save_state, load) if is_saved else (None, None)
    return Session([model], [optimizer], lambda index: loss_of(model, index), train, *steps)


# Mixed precision, and options of the plug-in: fp32 for the tight bound; as most people run it; and sharded on the meta
# device and materialised after the optimizer has seen the parameters, kept whole between forward and backward, with
# checkpoints of full states.
FSDP2_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no", {}),
    ("bf16", {}),
    (
        "bf16",
        {"cpu_ram_efficient_loading": True, "reshard_after_forward": False, "state_dict_type": "FULL_STATE_DICT"},
    ),
)


def fsdp2(folder: str) -> None:
    launched()
    for case, (mixed_precision, options) in enumerate(FSDP2_CASES):

        def start(make: Make, seed: int, lr: float, mixed: str = mixed_precision, options: Any = options) -> Session:
            model = Net(seed=seed)
            return session(accelerator(2, mixed, **options), model, make(model.parameters(), lr=lr))

        is_mixed = mixed_precision == "bf16"
        bound = BF16_BOUND if is_mixed else FP32_BOUND
        check(start, f"{folder}/fsdp2-{case}", bound=bound, shadows=is_mixed)


def test_fsdp2(tmp_path: Path) -> None:
    needs("accelerate", "1.15")
    run(tmp_path, 2, fsdp2, str(tmp_path))


def fsdp1(folder: str) -> None:
    launched()
    warnings.simplefilter("ignore")  # FSDP1 is deprecated and says so in many places
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), "device_mesh": mesh}

    def start(make: Make, seed: int, lr: float) -> Session:
        acc = accelerator(1, "no", use_orig_params=True, sync_module_states=False)
        model = Net(seed=seed)
        return session(acc, model, make(model.parameters(), lr=lr), is_saved=False)

    def start_wrapped(make: Make, seed: int, lr: float) -> Session:
        acc = accelerator(1, "bf16", use_orig_params=True, sync_module_states=False)
        model = Net(seed=seed)
        optimizer = make(model.parameters(), lr=lr)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FSDP(block, mixed_precision=policy, **options)
        return session(acc, FSDP(model, mixed_precision=policy, **options), optimizer)

    check(start, "", bound=FP32_BOUND, shadows=False)
    check(start_wrapped, f"{folder}/fsdp1", bound=BF16_BOUND, shadows=False)


def test_fsdp1(tmp_path: Path) -> None:
    """Wrapped by accelerate, in fp32; and by the user over a mesh, in bf16 and with checkpoints.

    What accelerate wraps itself it cannot load again on a CPU, torch's AdamW neither: full states crash in torch, since
    offloading to the CPU is no copy there, and sharded ones are ShardedTensors, of which torch finds no param_groups.
    """
    needs("accelerate", "1.15")
    run(tmp_path, 2, fsdp1, str(tmp_path))
