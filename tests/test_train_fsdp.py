"""The training example, run as its users run it: files, resuming, resharding, and data that no world size changes.

The runs are made once, with both optimizers in each (`--compare`), and the tests read what they left.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
OPTIMIZERS = ("torch", "shardops")
STEPS = 6
INTERRUPTED_AT = 3
TINY = (
    "--dim 32 --layers 2 --heads 2 --hidden 48 --batch 4 --sequence 16 --held-out-batches 2 --seed 3"
    f" --device cpu --steps {STEPS}"
).split()


def train(*arguments: str | Path) -> None:
    """Run the script in a Python of its own, with this checkout's shardops."""
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(EXAMPLES / "train_fsdp.py"), *TINY, *map(str, arguments)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="session")
def runs(shared_folder: Path) -> Path:
    """A folder with the runs `whole`, `interrupted` (then resumed), and `resharded` (2 -> 1 rank)."""
    folder = shared_folder / "train_fsdp"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            saved = folder / "saved"
            two_ranks = ("--compare", "--world-size", "2")
            train(*two_ranks, "--out", folder / "whole")
            train(*two_ranks, "--out", folder / "interrupted", "--save", saved, "--interrupt-at", str(INTERRUPTED_AT))
            # Without --save, so that both resumed runs find the same checkpoint.
            train("--compare", "--world-size", "1", "--out", folder / "resharded", "--resume", saved)
            train(*two_ranks, "--out", folder / "interrupted", "--resume", saved)
            (folder / "done").touch()
    return folder


def read_steps(run: Path, optimizer: str) -> dict[int, dict[str, Any]]:
    """Step -> its line of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["optimizer"] == optimizer}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_run_writes_its_files(runs: Path, optimizer: str) -> None:
    steps = read_steps(runs / "whole", optimizer)
    assert list(steps) == list(range(1, STEPS + 1))
    assert set(steps[1]) == {"optimizer", "step", "loss", "tokens_per_s", "update_ms", "grad_norm", "lr"}
    assert steps[STEPS]["loss"] < steps[1]["loss"]
    summary = json.loads((runs / "whole" / "summary.json").read_text())["optimizers"][optimizer]
    assert math.isfinite(summary["held_out_loss"])
    # Two fp32 moments, and a few bytes more for each tensor's step counter.
    assert 8.0 <= summary["state_bytes_per_param"] < 8.2


def test_picture_is_drawn(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (runs / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_equals_uninterrupted(runs: Path, optimizer: str) -> None:
    whole, resumed = (read_steps(runs / run, optimizer) for run in ("whole", "interrupted"))
    assert list(resumed) == list(whole)
    for step, expected in whole.items():
        for value in ("loss", "grad_norm", "lr"):  # JSON keeps every bit of a float
            assert resumed[step][value] == expected[value], (step, value)
    summaries = [json.loads((runs / run / "summary.json").read_text()) for run in ("whole", "interrupted")]
    held_out = [summary["optimizers"][optimizer]["held_out_loss"] for summary in summaries]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_at_another_world_size(runs: Path, optimizer: str) -> None:
    """The same weights and batches; only what is summed in bf16 is cut differently.

    The first loss comes from the loaded weights alone, so it moves by fp32 summation order: 1e-6 of it. Later ones
    follow gradients that were rounded to bf16 once for the batch and not once a rank, each off by up to 2**-9 of
    itself, and a step of Adam is at most lr (3e-3) an element. Measured: 4e-4; without the moments, or one
    batch further in the data, a loss is off by 8e-3 or more.
    """
    whole, resharded = (read_steps(runs / run, optimizer) for run in ("whole", "resharded"))
    assert list(resharded) == list(range(INTERRUPTED_AT + 1, STEPS + 1))
    first = INTERRUPTED_AT + 1
    assert resharded[first]["loss"] == pytest.approx(whole[first]["loss"], rel=1e-6)
    for step, line in resharded.items():
        assert line["loss"] == pytest.approx(whole[step]["loss"], abs=2e-3), step
        assert line["lr"] == whole[step]["lr"]


def test_optimizers_agree(runs: Path) -> None:
    """Equal until the first update; afterwards the same losses within the last places of bf16 (measured: 4e-4)."""
    torch_steps, shardops_steps = (read_steps(runs / "whole", optimizer) for optimizer in OPTIMIZERS)
    assert torch_steps[1]["loss"] == shardops_steps[1]["loss"]
    for step, line in torch_steps.items():
        assert shardops_steps[step]["loss"] == pytest.approx(line["loss"], abs=2e-3), step


@pytest.fixture
def data(load: Callable[[str], Any]) -> Any:
    return load("data")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world-size 3", "--batch is 4, which 3 ranks cannot share equally"),
        ("--world-size 0", "--world-size is 0, but a run has at least 1 rank"),
        ("--resume nowhere", "--resume is nowhere, which is not a directory"),
        ("--interrupt-at 3", "there is no directory for them: add --save DIR"),
    ],
)
def test_refused_arguments(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py", *TINY, *arguments.split()])
    with pytest.raises(SystemExit):
        load("train_fsdp").main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_batches_do_not_depend_on_the_world_size(data: Any, world_size: int) -> None:
    text = torch.arange(251, dtype=torch.uint8)
    batch = data.sample_windows(text, "train 0 5", batch=6, length=16)
    slices = [data.rank_slice(batch, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([inputs for inputs, _ in slices]), batch[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in slices]), batch[:, 1:])


def test_batches_are_a_function_of_seed_and_step(data: Any) -> None:
    corpus = data.Corpus.load()
    batches = [data.train_batch(corpus, seed, step, 4, 16) for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], batches[3])


def test_held_out_files_are_never_trained_on(data: Any) -> None:
    corpus = data.Corpus.load()
    assert corpus.held_out_files
    assert not set(corpus.held_out_files) & set(corpus.train_files)
    train_text = corpus.train.numpy().tobytes()
    sources = data.source_files()
    for name in corpus.held_out_files:
        assert sources[name] not in train_text, name
