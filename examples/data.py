"""Real text that every Python carries: its documentation topics and its library's source files.

The text is split into training and held-out parts by file, and a step's global batch is a function
of (seed, step) alone, so that every world size sees the same batches and a resumed run goes on.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_ONE_IN = 10  # files
SEPARATOR = b"\0"  # between files; it occurs in none of them


def topics_text() -> bytes:
    """The documentation behind `help("if")` and the like, as one text."""
    from pydoc_data.topics import topics

    return SEPARATOR.join(topics[name].encode() for name in sorted(topics))


def source_files() -> dict[str, bytes]:
    """File name -> content of the standard library's top-level modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.glob("*.py"))
        # Written when Python was built: it holds that machine's settings, not text.
        if not path.name.startswith("_sysconfigdata")
    }
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no *.py file; this example trains on the standard library's sources: "
            "use a Python that carries them (not a zipped or embedded one)"
        )
    return files


def is_held_out(name: str) -> bool:
    """Whether a source file is kept from training; a hash of its name, the same on every run."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Both parts as flat byte tensors, and the names of the files in them."""

    train: Tensor  # 1D uint8
    held_out: Tensor  # 1D uint8
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    digest: str  # of both parts: two Pythons carry different text

    @classmethod
    def load(cls) -> Corpus:
        """Read the text of the running Python.

        The topics are one file and quote one another, so they stay together, in training.
        """
        files = source_files()
        held_out = {name: text for name, text in files.items() if is_held_out(name)}
        train = {name: text for name, text in files.items() if name not in held_out}
        train["pydoc_data/topics.py"] = topics_text()
        parts = [SEPARATOR.join(part.values()) for part in (train, held_out)]
        return cls(
            *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts),
            train_files=tuple(train),
            held_out_files=tuple(held_out),
            digest=hashlib.sha256(SEPARATOR.join(parts)).hexdigest(),
        )


def sample_windows(text: Tensor, key: str, batch: int, length: int) -> Tensor:
    """`batch` windows of `length + 1` bytes at places drawn from `key`: int64 [batch, length + 1].

    One byte more than the sequence, because inputs and targets are the same window one apart.
    """
    if text.numel() <= length:
        raise ValueError(
            f"a sequence of {length} bytes does not fit the text of {text.numel()} bytes: "
            f"lower --sequence below {text.numel()}"
        )
    # Seeding with a string hashes it, so neighbouring keys give unrelated draws on any platform.
    generator = random.Random(key)
    starts = [generator.randrange(text.numel() - length) for _ in range(batch)]
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


def train_batch(corpus: Corpus, seed: int, step: int, batch: int, length: int) -> Tensor:
    """The global batch of one training step: int64 [batch, length + 1]."""
    return sample_windows(corpus.train, f"train {seed} {step}", batch, length)


def held_out_batch(corpus: Corpus, index: int, batch: int, length: int) -> Tensor:
    """One of the fixed held-out batches, the same for every seed: int64 [batch, length + 1]."""
    return sample_windows(corpus.held_out, f"held-out {index}", batch, length)


def rank_slice(global_batch: Tensor, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows as (inputs, targets), each [batch / world_size, length].

    The caller has checked that the batch divides by the world size.
    """
    rows = global_batch.shape[0] // world_size
    window = global_batch[rank * rows : (rank + 1) * rows]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
