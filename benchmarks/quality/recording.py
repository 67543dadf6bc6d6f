"""A real training run as a source of gradients: the example's decoder on its text, stepped by torch's AdamW in float32.

As in train_fsdp.py, weights are float32, matrices are multiplied in bfloat16 and gradients are clipped by their norm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import model as decoder  # noqa: E402
from data import Corpus, train_batch  # noqa: E402
from training import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY, lr_share  # noqa: E402

EPS = 1e-8
MINIMUM_NUMEL, MINIMUM_ROW = 4096, 128  # smaller ones keep float32 moments


@dataclass(frozen=True)
class Run:
    """A training run, which decides its gradients."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 688  # rows that are no multiple of a block
    steps: int = 620
    batch: int = 8  # windows a step
    sequence: int = 64  # bytes a window
    lr: float = 3e-3
    beta2: float = 0.999
    seed: int = 0


class Recording:
    """The run and what it is at: iterate over it for the gradients of each step.

    Attributes:
        names: of the parameters that 8-bit states are made for.
        exp_avgs, exp_avg_sqs: their moments after the last step.
        parameters: their elements.
        losses: of the steps made.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        torch.manual_seed(run.seed)
        self._model = decoder.Decoder(decoder.DecoderConfig(run.dim, run.layers, run.heads, run.hidden))
        self._all = dict(self._model.named_parameters())
        large = {
            name: parameter
            for name, parameter in self._all.items()
            if parameter.numel() >= MINIMUM_NUMEL and parameter[0].numel() >= MINIMUM_ROW
        }
        self.names = list(large)
        self._large = list(large.values())
        self.parameters = sum(parameter.numel() for parameter in self._large)
        betas = (BETAS[0], run.beta2)
        self._optimizer = torch.optim.AdamW(
            self._all.values(), lr=run.lr, betas=betas, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.losses: list[float] = []

    def __iter__(self) -> Iterator[list[Tensor]]:
        corpus, run = Corpus.load(), self.run
        for step in range(run.steps):
            windows = train_batch(corpus, run.seed, step, run.batch, run.sequence)
            self._optimizer.zero_grad()
            loss = self._loss(windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._all.values(), MAX_GRAD_NORM)
            for group in self._optimizer.param_groups:
                group["lr"] = run.lr * lr_share(step, run.steps)
            self._optimizer.step()
            self.losses.append(loss.item())
            yield [parameter.grad for parameter in self._large if parameter.grad is not None]

    def _loss(self, windows: Tensor) -> Tensor:
        compute = {name: parameter.to(torch.bfloat16) for name, parameter in self._all.items()}
        logits = torch.func.functional_call(self._model, compute, (windows[:, :-1].contiguous(),))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def _states(self, key: str) -> list[Tensor]:
        states = [self._optimizer.state[parameter] for parameter in self._large]
        return [state[key] if state else torch.zeros_like(p) for state, p in zip(states, self._large, strict=True)]

    @property
    def exp_avgs(self) -> list[Tensor]:
        return self._states("exp_avg")

    @property
    def exp_avg_sqs(self) -> list[Tensor]:
        return self._states("exp_avg_sq")
