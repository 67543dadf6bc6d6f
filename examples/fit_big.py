"""Train a decoder that stock AdamW has no room for: 8-bit moments, 24-bit masters, gradients freed in backward.

    python examples/fit_big.py --params 1.9B --memory-cap 15GB                       # on a CPU
    python examples/fit_big.py --params 13B --gradient-release --memory-cap 80GB     # on a GPU

Real steps on real text (what every Python carries) at batch 1, each on another window of it; memory by component is
measured from live tensors while it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import data
import torch
from big_model import BigDecoder, build, choose_config, count_parameters, parse_count
from big_update import MASTER_WEIGHTS, STATE_DTYPES, STOCK_BYTES, ShardopsUpdate, StockUpdate, Update
from fit_display import PlainDisplay, RichDisplay, gb, open_display, print_table
from memory_use import (
    MemoryWatch,
    available_bytes,
    enforce_cap,
    is_out_of_memory,
    parse_bytes,
    peak_bytes,
    peak_rss_bytes,
    return_freed_memory,
)
from torch import Tensor
from torch.nn import functional as F

HELD_OUT_WINDOWS = 4
# Of the steps; then the learning rate stays. With a tenth the loss of 1.9 billion parameters rose first, by half.
WARM_UP_SHARE = 0.3
# The best rates of 20 steps, of three or four tried at each width: 1e-3 at 384, 2e-4 and 5e-4 alike at 704, 3e-5 at
# 2560 (two blocks of it); 1.2e-4 was too much there. Somewhat less for models with more blocks.
BEST_LR, BEST_LR_DIM, LR_POWER = 1e-3, 384, 2.0


@dataclass
class Run:
    """What is known of a run so far; `stage` says what an allocation that fails was for."""

    stage: str = "starting"
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    held_out_losses: dict[str, float] = field(default_factory=dict)
    build_seconds: float = 0.0


def _argument(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A parser whose ValueErrors argparse shows as they are."""

    def parse_argument(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--params", type=_argument(parse_count), default="350M", help="1.9B, 350M or an integer (350M)")
    add("--steps", type=int, default=20, help="optimizer steps (20)")
    add("--sequence", type=int, default=256, help="bytes of text a step (256)")
    add("--optimizer", choices=("shardops", "torch"), default="shardops", help="torch: stock AdamW, fp32 masters")
    add("--state-dtype", choices=STATE_DTYPES, default="int8", help="of both moments (int8)")
    add("--master-weights", choices=MASTER_WEIGHTS, default="split24", help="what completes bf16 (split24)")
    add("--gradient-release", action="store_true", help="step and free each gradient inside of backward")
    add("--lr", type=float, help="learning rate after a warm-up (lower for wider models)")
    add(
        "--memory-cap",
        type=_argument(parse_bytes),
        metavar="80GB",
        help="make allocations fail that would pass it: of resident memory on a CPU (what is available at the start), "
        "of torch's tensors on a GPU (none)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where everything is (auto)")
    add("--threads", type=int, help="of the CPU (all cores)")
    add("--seed", type=int, default=0, help="of weights, windows and dither (0)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args()
    for name in ("steps", "sequence", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}, but it counts from 1: pass a positive number")
    if arguments.optimizer == "torch" and arguments.gradient_release:
        parser.error("--gradient-release is shardops' own: leave it out with --optimizer torch")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no GPU: leave it out, or install a torch that does")
    try:
        arguments.config = choose_config(arguments.params)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def make_update(arguments: argparse.Namespace, model: BigDecoder) -> Update:
    if arguments.optimizer == "torch":
        return StockUpdate(model)
    return ShardopsUpdate(
        model, arguments.state_dtype, arguments.master_weights, arguments.seed, arguments.gradient_release
    )


def window_loss(model: BigDecoder, batch: Tensor, device: torch.device) -> Tensor:
    """Mean loss over a batch of windows [batch, length + 1], in nats a byte; logits are fp32."""
    inputs, targets = data.rank_slice(batch, rank=0, world_size=1)
    return F.cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def held_out_loss(model: BigDecoder, corpus: data.Corpus, sequence: int, device: torch.device) -> float:
    """Mean loss over the same few windows of files that are never trained on, one at a time."""
    windows = [data.held_out_batch(corpus, index, 1, sequence) for index in range(HELD_OUT_WINDOWS)]
    return sum(window_loss(model, window, device).item() for window in windows) / len(windows)


def train(
    arguments: argparse.Namespace, run: Run, display: PlainDisplay | RichDisplay, device: torch.device
) -> tuple[int, MemoryWatch]:
    """All of the run; returns the number of parameters and what was seen of the memory."""
    corpus = data.Corpus.load()
    torch.manual_seed(arguments.seed)
    run.stage = "building the model"
    started = time.perf_counter()
    model = build(arguments.config, device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    run.build_seconds = time.perf_counter() - started
    sizes = "{layers} blocks, {dim} wide, {heads} heads, SwiGLU of {hidden}".format(**asdict(arguments.config))
    display.say(f"{numel:,} parameters, made in {run.build_seconds:.1f} s: {sizes}")

    run.stage = "making the optimizer"
    update = make_update(arguments, model)
    watch = MemoryWatch(model, update, display.show)
    update.prepare()
    watch.count_states()
    run.stage = "evaluating"
    run.held_out_losses["before"] = held_out_loss(model, corpus, arguments.sequence, device)
    peak_lr = arguments.lr
    if peak_lr is None:
        peak_lr = BEST_LR * (BEST_LR_DIM / arguments.config.dim) ** LR_POWER
    warm_up = max(1, round(WARM_UP_SHARE * arguments.steps))
    for step in range(arguments.steps):
        started = time.perf_counter()
        lr = peak_lr * min(1.0, (step + 1) / warm_up)
        update.set_lr(lr)
        run.stage = f"forward and backward of step {step + 1}"
        batch = data.train_batch(corpus, arguments.seed, step, 1, arguments.sequence)
        loss = window_loss(model, batch, device)
        loss.backward()
        run.stage = f"the optimizer's step {step + 1}"
        update.step()
        run.losses.append(loss.item())  # waits for a GPU
        del loss
        watch.count_states()
        run.learning_rates.append(lr)
        run.step_seconds.append(time.perf_counter() - started)
        display.step_done(step + 1, run.losses[-1], run.step_seconds[-1])
    run.stage = "evaluating"
    run.held_out_losses["after"] = held_out_loss(model, corpus, arguments.sequence, device)
    return numel, watch


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    names = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        import shardops

        names["shardops"] = shardops.__version__
    return names


def results(
    arguments: argparse.Namespace, run: Run, numel: int, watch: MemoryWatch, device: torch.device
) -> dict[str, Any]:
    """The content of the JSON file."""
    assert watch.largest is not None
    fullest = {**watch.largest.components, "rest": watch.largest.rest, "resident": watch.largest.resident}
    options = {name: value for name, value in vars(arguments).items() if name not in ("config", "json")}
    return {
        "parameters": numel,
        "losses": [loss if math.isfinite(loss) else None for loss in run.losses],  # JSON has no NaN
        "held_out_losses": run.held_out_losses,
        "peak_rss_bytes": peak_rss_bytes() if device.type == "cuda" else max(peak_rss_bytes(), watch.largest.resident),
        "peak_device_bytes": peak_bytes(device) if device.type == "cuda" else None,
        "bytes_per_parameter": watch.bytes_per_parameter(),
        "stock_bytes_per_parameter": {**STOCK_BYTES, "total": sum(STOCK_BYTES.values())},
        "fullest_moment_bytes": fullest,
        "step_seconds": run.step_seconds,
        "build_seconds": run.build_seconds,
        "learning_rates": run.learning_rates,
        "model": asdict(arguments.config),
        "options": options,
        "versions": versions(),
        "machine": machine(device),
    }


def report(content: dict[str, Any]) -> None:
    """The table, and a few lines on losses and peak memory."""
    losses, numel = content["losses"], content["parameters"]
    print_table(content["bytes_per_parameter"], numel)
    few = max(1, len(losses) // 4)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    print(f"training loss, each step on another window: {first:.4f} (first {few}) -> {last:.4f} (last {few}) nats/byte")
    held_out = content["held_out_losses"]
    print(f"held-out loss, the same {HELD_OUT_WINDOWS} windows: {held_out['before']:.4f} -> {held_out['after']:.4f}")
    if content["peak_device_bytes"] is not None:
        print(f"peak GPU memory of tensors: {gb(content['peak_device_bytes'])}")
    stock = content["stock_bytes_per_parameter"]["total"] * numel
    print(f"peak resident memory: {gb(content['peak_rss_bytes'])}; stock AdamW's tensors alone: {gb(stock)}")


def out_of_memory(arguments: argparse.Namespace, run: Run, device: torch.device) -> str:
    """What a user is told instead of a traceback."""
    numel = count_parameters(arguments.config)
    limit = f"the cap of {gb(arguments.memory_cap)}" if arguments.memory_cap else "the GPU's memory"
    message = f"out of memory: {run.stage} did not fit {limit}, after {len(run.losses)} steps of {numel:,} parameters"
    if arguments.optimizer == "torch":
        message += f" (stock AdamW needs {gb(sum(STOCK_BYTES.values()) * numel)} for its tensors)"
    return f"{message}; held at most: {gb(peak_bytes(device))}. Lower --params or --sequence, or raise --memory-cap"


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.optimizer == "shardops":
        import shardops  # noqa: F401  (its libraries count as loaded before the cap is set)
    return_freed_memory()
    if arguments.memory_cap is None and device.type == "cpu":
        arguments.memory_cap = available_bytes()  # otherwise the system kills whoever asks for more, without a word
    if arguments.memory_cap is not None:
        try:
            print(enforce_cap(arguments.memory_cap, device))
        except ValueError as error:
            raise SystemExit(str(error)) from error
    run = Run()
    display = open_display(arguments.steps)
    failure = None
    try:
        numel, watch = train(arguments, run, display, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = out_of_memory(arguments, run, device)
    finally:
        display.close()
    if failure is not None:
        raise SystemExit(failure)
    content = results(arguments, run, numel, watch, device)
    report(content)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
        print(f"measurements: {arguments.json}")


if __name__ == "__main__":
    main()
