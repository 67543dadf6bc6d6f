"""Starting the ranks: under `torchrun`, or by spawning them here when there is no WORLD_SIZE.

Either way `launch` calls `work(world)` once a rank inside a process group: gloo on CPU, NCCL on
GPUs. A rank that dies ends the whole run with its error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STORE_HOST = "127.0.0.1"
# Longer than any step; torch's half an hour is long to wait for a rank that is gone.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def under_torchrun() -> bool:
    """Whether somebody else started the ranks."""
    return "WORLD_SIZE" in os.environ


def choose_world_size(requested: int | None, device_type: str) -> int:
    """The number of ranks: torchrun's, the one asked for, or one a GPU and two on a CPU."""
    if under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if requested not in (None, started):
            raise ValueError(
                f"--world-size is {requested}, but WORLD_SIZE says that {started} ranks were "
                "started: leave --world-size out under torchrun"
            )
        return started
    if requested is not None and requested < 1:
        raise ValueError(f"--world-size is {requested}, but a run has at least 1 rank")
    if device_type == "cpu":
        return requested or 2
    gpus = torch.cuda.device_count()
    if (requested or 1) > gpus:
        raise ValueError(
            f"--world-size is {requested or 1}, but there are {gpus} GPUs and NCCL wants one a "
            "rank: lower it, or pass --device cpu"
        )
    return requested or gpus


def launch(work: Callable[[World], None], world_size: int, device_type: str) -> None:
    """Run `work` on every rank; it has to be picklable, as spawned ranks start a new Python."""
    if under_torchrun():
        _run_rank(
            int(os.environ["RANK"]),
            int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
            world_size,
            device_type,
            None,
            work,
        )
        return
    # This process keeps the store's socket open and the system picks the port: no other program
    # can take it between choosing and listening.
    store = dist.TCPStore(STORE_HOST, 0, is_master=True, wait_for_workers=False)
    mp.spawn(_run_spawned_rank, args=(world_size, device_type, store.port, work), nprocs=world_size)


def _run_spawned_rank(rank: int, world_size: int, device_type: str, port: int, work: Callable[[World], None]) -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // world_size))
    # All ranks are on this machine, whose own name may resolve to nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(STORE_HOST, port, is_master=False)
    _run_rank(rank, rank, world_size, device_type, store, work)


def _run_rank(
    rank: int,
    local_rank: int,
    world_size: int,
    device_type: str,
    store: dist.Store | None,
    work: Callable[[World], None],
) -> None:
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    _make_deterministic()
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "nccl",
        store=store,
        rank=rank if store else -1,
        world_size=world_size if store else -1,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device_type == "cuda" else None,
    )
    work(World(rank, world_size, device))
    # Not in a `finally`: after an error, leaving the group would wait for ranks that still work.
    dist.destroy_process_group()
    # Without Python's own shutdown: one of gloo's threads may still be letting go of the last collective's tensors, and
    # it aborts the process if the interpreter is gone by then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _make_deterministic() -> None:
    """A resumed run repeats losses bit for bit only if every kernel sums in a fixed order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition for it
    torch.use_deterministic_algorithms(True)
    # Filling every new buffer with NaN is for finding reads of unset memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False
