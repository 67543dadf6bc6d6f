"""Trains the example's decoder once for each mode of the optimizer and seed, and appends what it measured to a file.

    python benchmarks/quality/train_modes.py --out runs/quality/training.jsonl

In one process and one thread: several of these commands may share a file, each takes runs that no other has, and a
command that was stopped is started again with the runs that are missing. ``report.py`` makes tables and plots of it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import model as decoder  # noqa: E402
from data import Corpus, held_out_batch, train_batch  # noqa: E402
from training import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY, lr_share  # noqa: E402

import shardops  # noqa: E402

REFERENCE = "fp32"
# What the optimizer is given; parameters are bfloat16 in every mode, so that models differ in nothing else.
MODES: dict[str, dict[str, Any]] = {
    REFERENCE: {"master_weights": "split32"},
    "int8+split32": {"state_dtype": "int8", "master_weights": "split32"},
    "int8+split24": {"state_dtype": "int8", "master_weights": "split24"},
    "bf16+stochastic": {"state_dtype": torch.bfloat16, "master_weights": "stochastic"},
    # The control: fp32 again, from weights one of which differs by its last bit. Training is chaotic, and this is how
    # far two runs come apart that no optimizer tells apart.
    "fp32 nudged": {"master_weights": "split32"},
}
NUDGED = ("fp32 nudged",)


@dataclass(frozen=True)
class Settings:
    """What all runs in a file have in common."""

    dim: int = 448
    layers: int = 4
    heads: int = 7
    hidden: int = 1216
    steps: int = 2000
    batch: int = 4  # windows a step
    sequence: int = 64  # bytes a window
    lr: float = 1e-3
    beta2: float = BETAS[1]
    evaluate_every: int = 250
    windows: int = 256  # held-out, on the way
    last_windows: int = 2048  # held-out, after the last step
    compute: str = "bf16"  # what matrices are multiplied in: bf16 on CPUs that can, else fp32

    @property
    def config(self) -> decoder.DecoderConfig:
        return decoder.DecoderConfig(self.dim, self.layers, self.heads, self.hidden)


def build(settings: Settings, seed: int, nudged: bool) -> nn.Module:
    """The decoder in bfloat16, from the weights of the seed."""
    if settings.compute == "bf16":
        decoder.matmul_dtype = lambda x: x.dtype  # the example multiplies in fp32 on a CPU: most have no bf16 product
    torch.manual_seed(seed)
    model = decoder.Decoder(settings.config).to(torch.bfloat16)
    if nudged:
        with torch.no_grad():
            model.blocks[0].attention.qkv.weight.view(torch.int16)[0, 0] ^= 1
    return model


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of windows [batch, sequence + 1], in nats a byte."""
    return F.cross_entropy(model(windows[:, :-1].contiguous()).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, settings: Settings, windows: int) -> float:
    """Over the first of the fixed held-out windows, the same for every seed and mode."""
    batch = 32
    losses = [
        loss_of(model, held_out_batch(corpus, index, batch, settings.sequence)).item()
        for index in range(math.ceil(windows / batch))
    ]
    return sum(losses) / len(losses)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's live tensors, masters included."""
    values = (value for state in optimizer.state.values() for value in state.values())
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train(settings: Settings, mode: str, seed: int, corpus: Corpus) -> dict[str, Any]:
    """One run; the record that goes to the file."""
    began = time.perf_counter()
    model = build(settings, seed, mode in NUDGED)
    optimizer = shardops.FusedShardedAdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(BETAS[0], settings.beta2),
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        **MODES[mode],
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    losses: list[float] = []
    held_out: list[tuple[int, float]] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * lr_share(step, settings.steps)
        loss = loss_of(model, train_batch(corpus, seed, step, settings.batch, settings.sequence))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        done = step + 1
        if done % settings.evaluate_every == 0 and done < settings.steps:
            held_out.append((done, held_out_loss(model, corpus, settings, settings.windows)))
        if done in (20, 100) or done % 250 == 0:
            seconds = time.perf_counter() - began
            print(f"{mode}, seed {seed}: {done} steps in {seconds:.0f} s, loss {losses[-1]:.3f}", flush=True)
    held_out.append((settings.steps, held_out_loss(model, corpus, settings, settings.windows)))
    last = held_out_loss(model, corpus, settings, settings.last_windows)
    return {
        "mode": mode,
        "seed": seed,
        "settings": asdict(settings),
        "parameters": parameters,
        "held_out_loss": last,
        "held_out_curve": held_out,
        "train_curve": [[at + 50, sum(losses[at : at + 50]) / 50] for at in range(0, settings.steps - 49, 50)],
        "state_bytes_per_parameter": state_bytes(optimizer) / parameters,
        "seconds": time.perf_counter() - began,
        "corpus": corpus.digest,
        "torch": torch.__version__,
        "shardops": str(Path(shardops.__file__).parent),
        "machine": platform.machine(),
    }


def finished(out: Path) -> list[dict[str, Any]]:
    """The records in a file; none if there is no file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@contextlib.contextmanager
def claimed(out: Path, mode: str, seed: int) -> Iterator[bool]:
    """Whether this process has a run for itself; the claim ends with the process, however that ends."""
    folder = out.with_suffix(".claims")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{mode} {seed}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality/training.jsonl"), help="one line a run")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="each with all modes, in turn")
    for name, value in asdict(defaults).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    arguments = parser.parse_args()
    settings = Settings(**{name: getattr(arguments, name) for name in asdict(defaults)})
    if settings.compute not in ("bf16", "fp32"):
        parser.error(f"--compute is {settings.compute!r}; it is bf16 or fp32")

    torch.set_num_threads(1)
    corpus = Corpus.load()
    for seed in arguments.seeds:
        for mode in arguments.modes:
            with claimed(arguments.out, mode, seed) as mine:
                done = finished(arguments.out)
                if any(record["settings"] != asdict(settings) for record in done):
                    parser.error(f"{arguments.out} holds runs of other settings: choose another --out")
                if not mine or any((record["mode"], record["seed"]) == (mode, seed) for record in done):
                    continue
                record = train(settings, mode, seed, corpus)
                with arguments.out.open("a") as file:  # one write of a line: several processes may append
                    file.write(json.dumps(record) + "\n")
                print(f"{mode}, seed {seed}: held-out loss {record['held_out_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
