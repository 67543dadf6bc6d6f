"""Runs a test's function on several ranks, each a process of its own, and brings results or tracebacks back.

Ranks are forked from a server that has imported torch once (multiprocessing's forkserver), so a run costs tenths of a
second and starts from a clean process. Below the harness: the models and comparisons that the distributed tests share.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reference import assert_bits_equal, ordinary
from torch import Tensor, nn

# Longest run of a function; the slowest takes ten seconds or so. A hang is then reported, with every rank's stack.
DEADLINE = 90.0
# Once one rank has failed, others may wait for it in a collective: they get this long to fail by themselves.
GRACE = 2.0

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.nn.parallel",
        "shardops",
    ]
)


class RankError(AssertionError):
    """Some rank raised or hung; the text holds what each one said."""


def run(
    tmp_path: Path, world_size: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` ranks of a fresh gloo group.

    Args:
        tmp_path: a folder for the rendezvous; the ranks' own one, ``args`` may name others.
        world_size: number of processes.
        function: of a module's top level.
        args: picklable.
        deadline: seconds until ranks that still run are killed.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: a rank raised, died or hung.
    """
    folder = tmp_path / f"run-{uuid.uuid4().hex}"
    folder.mkdir()
    # Pickled here: multiprocessing's own pickler hands tensors over as file descriptors, of which a message holds few.
    call = pickle.dumps((function, args))
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(writer, str(folder), rank, world_size, call, deadline), daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()  # only the rank holds it now: its death is the end of the stream
    try:
        outcomes = _collect([reader for reader, _ in pipes], deadline)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.join()
        for reader, _ in pipes:
            reader.close()
    failures = [(rank, text) for rank, (succeeded, text) in outcomes.items() if not succeeded]
    if failures:
        texts = []
        for rank, text in failures:
            stack = folder / f"stack-{rank}"
            if text is _NO_ANSWER and stack.exists():
                text = f"{_NO_ANSWER}; its stack shortly before the deadline:\n{stack.read_text()}"
            elif texts:  # the first one is the cause; of the others the last line is enough
                text = text.strip().splitlines()[-1]
            texts.append(f"---- rank {rank} of {world_size}: {text}")
        raise RankError("\n".join(texts))
    return [outcomes[rank][1] for rank in range(world_size)]


_NO_ANSWER = "no answer: it hung, or waited for a rank that failed"


def _collect(readers: Sequence[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """(succeeded, result or text) by rank, in the order in which they came."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = dict(zip(readers, range(len(readers)), strict=True))
    end = time.monotonic() + deadline + 20.0  # the first run of a worker also waits for the server's imports
    while waiting and (left := end - time.monotonic()) > 0:
        for reader in wait(list(waiting), timeout=left):
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            try:
                outcomes[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                outcomes[rank] = (False, "the process died without an exception")
            if not outcomes[rank][0]:
                end = min(end, time.monotonic() + GRACE)
    return outcomes | dict.fromkeys(waiting.values(), (False, _NO_ANSWER))


def _rank_main(
    writer: Connection,
    folder: str,
    rank: int,
    world_size: int,
    call: bytes,
    deadline: float,
) -> None:
    with open(os.path.join(folder, f"stack-{rank}"), "w") as stack:
        faulthandler.dump_traceback_later(deadline - 1.0, file=stack)
        try:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            if any(name == "lo" for _, name in socket.if_nameindex()):
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no look-up of the host's name
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(os.path.join(folder, "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=deadline),
            )
            function, args = pickle.loads(call)
            message = pickle.dumps((True, function(*args)))
            dist.barrier()  # nobody tears down the store or a connection that another still uses
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        writer.send_bytes(message)
        writer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without interpreter shutdown: gloo's threads may still wait for a rank that failed


# ---- values, the same on every rank ----------------------------------------------------------------------------------

# Rows that divide by nothing, fewer rows than ranks, single rows, a scalar-like one, columns that misalign shards.
UNEVEN = ((13, 5), (3, 7), (1, 6), (1,), (5,), (2, 3, 3), (41, 1))


def values(shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normally distributed tensors of these shapes."""
    return [ordinary(*shape, seed=1000 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def exact_values(shapes: Sequence[Sequence[int]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Multiples of 1/4 up to 4: their squares add up without rounding in any order, and so does their norm."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-16, 17, tuple(shape), generator=generator) / 4).to(dtype) for shape in shapes]


class Tensors(nn.Module):
    """Parameters of given shapes, and no forward: for steps under given gradients."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_parameter(f"p{index}", nn.Parameter(tensor.clone()))


class Block(nn.Module):
    """Residual, with a norm, two linears of 13 and 7 rows, and a single-row gain."""

    def __init__(self, features: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features, bias=False)
        self.gain = nn.Parameter(torch.ones(1, features))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small model in which everything is uneven over 2, 3 and 4 ranks.

    Args:
        tied: the output layer shares the input layer's weight.
        frozen: the first block's ``up`` is not trained.
        unused: a parameter that the forward never reads.
    """

    def __init__(self, *, tied: bool = False, frozen: bool = False, unused: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11)
        if unused:
            self.unused = nn.Parameter(torch.empty(3, 2))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if "norm" not in name and "gain" not in name:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].up.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets that a rank sees in a step."""
    generator = torch.Generator().manual_seed(7919 * step + rank)
    tokens = torch.randint(11, (6,), generator=generator)
    return tokens, (3 * tokens + 1) % 11


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """The mean loss over a rank's batch (None: this rank's)."""
    tokens, targets = batch(step, dist.get_rank() if rank is None else rank)
    return nn.functional.cross_entropy(model(tokens).float(), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Losses of training steps."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


# ---- looking at sharded tensors --------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor (a collective), a copy of another one."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """All states of an optimizer by name, in the order of its parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, param in enumerate(params):
        for key in sorted(optimizer.state.get(param, {})):
            yield f"{index}.{key}", optimizer.state[param][key]


def whole_states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All states by name, gathered: equal on all ranks and comparable between world sizes."""
    return {name: whole(tensor) for name, tensor in states(optimizer)}


def assert_all_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], label: str = "") -> None:
    """Two named collections have the same names and the same bits."""
    assert list(actual) == list(expected), f"{label}: names {list(actual)}, expected {list(expected)}"
    for name, tensor in actual.items():
        # A remainder is an integer whose pattern may look like a NaN.
        assert_bits_equal(tensor, expected[name], f"{label} {name}".strip(), exact="remainder" in name)


def assert_ranks_agree(tensors: dict[str, Tensor], label: str = "") -> None:
    """The tensors have the same bits on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    for rank, other in enumerate(everyone):
        assert_all_equal(other, everyone[0], f"{label} rank {rank} against rank 0".strip())


def set_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Full gradients as this rank's parts of them."""
    from torch.distributed.tensor import distribute_tensor

    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            param.grad = None
        elif hasattr(param, "placements"):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = grad.clone()


class Mirror:
    """An unsharded copy of parameters and their optimizer, stepped with the gathered gradients of the sharded ones.

    Args:
        params: sharded parameters, before their first step.
        make: makes an optimizer of parameters.
    """

    def __init__(self, params: Sequence[Tensor], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.sharded = list(params)
        self.params = [nn.Parameter(whole(p), requires_grad=p.requires_grad) for p in self.sharded]
        self.optimizer = make(self.params)

    def step(self) -> None:
        """Reads the gradients that the sharded parameters hold now, and steps."""
        for param, sharded in zip(self.params, self.sharded, strict=True):
            param.grad = None if sharded.grad is None else whole(sharded.grad)
        self.optimizer.step()

    def compare(self, optimizer: torch.optim.Optimizer, label: str = "") -> None:
        """Parameters and states are the sharded ones', bit for bit."""
        names = [str(i) for i in range(len(self.params))]
        assert_all_equal(
            dict(zip(names, map(whole, self.sharded), strict=True)),
            dict(zip(names, map(whole, self.params), strict=True)),
            f"{label} parameter",
        )
        assert_all_equal(whole_states(optimizer), whole_states(self.optimizer), f"{label} state")
