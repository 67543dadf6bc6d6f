"""FusedShardedAdamW inside transformers' Trainer: under DDP, under accelerate's FSDP2, and sharded by transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_all_equal, local, run, states
from torch import Tensor, nn
from trainers import (
    BF16_BOUND,
    LR,
    SAVED_AT,
    STEPS,
    Make,
    assert_follows,
    assert_moved,
    assert_same,
    assert_shadows,
    assert_shadows_are_sent,
    assert_stepped,
    launched,
    needs,
    stock_gathers,
)

from shardops import FusedShardedAdamW

VOCABULARY = 11


class Tokens(torch.utils.data.Dataset):
    """Rows of six tokens; what follows can be learned."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (tokens + 3 * torch.arange(6)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """The Trainer's hook for a loss of one's own: in fp32; the model's own is rounded to bf16 by accelerate's FSDP2."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each parameter."""
    return {name: local(param).clone() for name, param in model.named_parameters()}


def observer(shadows: bool) -> Any:
    """A callback that looks at the optimizer after its first step, and keeps the weights from before."""
    from transformers import TrainerCallback

    class Observer(TrainerCallback):
        first: dict[str, Tensor]

        def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            self.first = weights(model)

        def on_step_end(self, _: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **__: Any) -> None:
            if state.global_step == 1 and isinstance(optimizer.optimizer, FusedShardedAdamW):
                assert_stepped(list(model.parameters()), [optimizer.optimizer], steps=1)
                assert_shadows(list(model.parameters()), shadows)

    return Observer()


def tiny_llama(seed: int) -> Any:
    """Two layers; 11 and 13 rows divide by nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 12, "intermediate_size": 13, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes))


def sharded_while_loading(folder: str, seed: int) -> Any:
    """FSDP2 by transformers itself: bf16 compute, fp32 gradients."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        tiny_llama(seed).save_pretrained(f"{folder}/model-{seed}")
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=True)
    return LlamaForCausalLM.from_pretrained(f"{folder}/model-{seed}", dtype=torch.float32, distributed_config=config)


def trainer(
    kind: str, make: Make, folder: str, look: Any, seed: int = 0, lr: float = LR, save_strategy: str = "no"
) -> Any:
    """A Trainer of a fresh model.

    Args:
        kind: ``"ddp"``, ``"fsdp2"`` by accelerate, or ``"loading"``: sharded by transformers while it is loaded.
        make: the optimizer's class.
        folder: for checkpoints.
        look: a callback.
        seed: of the model; batches are the same for all seeds.
        lr: the optimizer's, which a checkpoint brings along.
        save_strategy: "steps" for a checkpoint.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = sharded_while_loading(folder, seed) if kind == "loading" else tiny_llama(seed)
    options: dict[str, Any] = {} if kind == "loading" else {"bf16": True}
    if kind == "fsdp2":
        # accelerate takes no FSDP plug-in for CPUs' processes; the Trainer takes a state that says otherwise.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}
        options |= {"fsdp": True, "fsdp_config": layers, "accelerator_config": {"use_configured_state": True}}
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        seed=0,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        warmup_steps=2,
        logging_steps=1,
        save_strategy=save_strategy,
        save_steps=SAVED_AT,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    if kind == "fsdp2":
        optimizer = {"optimizer_cls_and_kwargs": (make, {"lr": lr})}
    else:
        optimizer = {"optimizers": (make(model.parameters(), lr=lr), None)}
    data = {"train_dataset": Tokens(), "compute_loss_func": loss_of}
    made = Trainer(model=model, args=arguments, callbacks=[look], **data, **optimizer)
    assert made.accelerator.is_fsdp2 == (kind == "fsdp2")
    return made


def losses_of(trained: Any) -> list[Tensor]:
    """The loss of each step, averaged over the ranks."""
    logged = [
        torch.tensor(entry["loss"], dtype=torch.float64) for entry in trained.state.log_history if "loss" in entry
    ]
    assert len(logged) == STEPS
    return logged


def local_states(trained: Any) -> dict[str, Tensor]:
    return {name: local(tensor) for name, tensor in states(trained.optimizer.optimizer)}


def check(kind: str, folder: str) -> None:
    shadows = kind != "ddp"
    theirs = trainer(kind, torch.optim.AdamW, f"{folder}/torch", observer(False))
    theirs.train()
    look = observer(shadows)
    is_resumable = kind != "loading"
    ours = trainer(kind, FusedShardedAdamW, f"{folder}/ours", look, save_strategy="steps" if is_resumable else "no")
    ours.train()
    assert_follows(losses_of(ours), losses_of(theirs), BF16_BOUND)
    assert_moved(look.first, weights(ours.model))

    if shadows:
        with stock_gathers():
            stock = trainer(kind, FusedShardedAdamW, f"{folder}/stock", observer(False))
            stock.train()
        assert_same(losses_of(ours), losses_of(stock), "loss beside stock gathers'")
        assert_all_equal(weights(ours.model), weights(stock.model), "beside stock gathers: parameter")
    if is_resumable:
        resumed = trainer(kind, FusedShardedAdamW, f"{folder}/resumed", observer(shadows), seed=1, lr=LR / 8)
        resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-{SAVED_AT}")
        assert_same(losses_of(resumed), losses_of(ours), "resumed: loss")
        assert_all_equal(weights(resumed.model), weights(ours.model), "resumed: parameter")
        assert_all_equal(local_states(resumed), local_states(ours), "resumed: state")
        assert_shadows(list(resumed.model.parameters()), shadows)
        ours = resumed
    if shadows:
        tokens = torch.stack([Tokens()[i]["labels"] for i in range(4)])
        assert_shadows_are_sent(
            list(ours.model.parameters()),
            lambda: loss_of(ours.model(input_ids=tokens), tokens, num_items_in_batch=tokens[:, 1:].numel()),
        )


def every_kind(folder: str) -> None:
    launched()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not "cpu:1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for kind in ("ddp", "fsdp2", "loading"):
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by the run before
        check(kind, f"{folder}/{kind}")


def test_trainer(tmp_path: Path) -> None:
    """``optimizers=`` under DDP and for a model sharded while it was loaded.

    With accelerate's FSDP2 the Trainer refuses ``optimizers=`` and takes a class, to build the optimizer itself. It
    makes no checkpoint of an optimizer's states for a model sharded while it was loaded.
    """
    needs("transformers", "5.24")
    needs("accelerate", "1.15")
    run(tmp_path, 2, every_kind, str(tmp_path))
