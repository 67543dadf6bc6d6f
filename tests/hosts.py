"""Two hosts on one machine: network namespaces with a cable between them, and torchrun started in each.

A process in one of them sees the cable and its own loopback only, so ranks of two hosts meet over the cable or not at
all. Nothing outside the two namespaces is touched, and addresses and ports in them are free by construction.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CABLE = "cable0"
PORT = 29400

_PREFIX = "shardops"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # looked up here: little may be done between fork and exec


class NoHostsError(RuntimeError):
    """This machine refuses network namespaces; the text says why."""


@dataclass(frozen=True)
class Host:
    """A network namespace's name, and its address on the cable."""

    name: str
    address: str


@dataclass(frozen=True)
class Finished:
    """What torchrun left on one host."""

    returncode: int
    output: str = field(repr=False)  # torchrun's and its ranks'
    ended: float  # time.monotonic()
    logs: Path  # torchrun's --log-dir, with the ranks' error files


def _tool() -> str:
    tool = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None:
        raise NoHostsError("there is no `ip` command (package iproute2) to make network namespaces with")
    return tool


def _ip(*words: str) -> str:
    """Runs the `ip` command and returns what it printed; raises CalledProcessError, whose stderr says why not."""
    return subprocess.run([_tool(), *words], check=True, capture_output=True, text=True).stdout


def _remove(name: str) -> None:
    """Kills whatever runs in a namespace and removes it, its end of the cable, and so the cable."""
    while pids := _ip("netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def _remove_abandoned() -> None:
    """Removes the namespaces of test processes that were killed before they could."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if (owner := re.fullmatch(rf"{_PREFIX}-(\d+)-\d+", name)) and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts, and in the end removes them with all that still runs there.

    Raises:
        NoHostsError: the machine has no namespaces, or none for this user.
    """
    first, second = (Host(f"{_PREFIX}-{os.getpid()}-{i}", f"10.77.0.{i + 1}") for i in range(2))
    with ExitStack() as stack:
        try:
            _remove_abandoned()
            for host in (first, second):
                _ip("netns", "add", host.name)
                stack.callback(_remove, host.name)
                _ip("netns", "exec", host.name, "true")
            ends = [("name", CABLE, "netns", host.name) for host in (first, second)]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except subprocess.CalledProcessError as error:
            raise NoHostsError(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from error
        for host in (first, second):
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second


def _end_with_parent() -> None:
    """Has this process killed when the one that started it ends, however that comes."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def namespace(pid: int | str = "self") -> int:
    """Which network namespace a process is in."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def end_with_torchrun() -> None:
    """Ends this rank with its torchrun, or at once where that has ended already and somebody outside adopted it."""
    _end_with_parent()
    if namespace(os.getppid()) != namespace():
        raise SystemExit("torchrun has ended")


_launches = itertools.count()


def torchrun(
    hosts: Sequence[Host], folder: Path, script: Path, *arguments: str | Path, deadline: float
) -> list[Finished]:
    """Runs a job of two ranks a host, with a rendezvous on the first host, to its end.

    Args:
        hosts: one torchrun is started in each.
        folder: for outputs and logs.
        script: what each rank runs, with ``arguments``.
        arguments: of the script.
        deadline: seconds until it is killed.

    Returns:
        How it ended, by host.

    Raises:
        AssertionError: the job hung.
    """
    label = f"{script.stem}-{next(_launches)}"
    unwanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    running: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    ended: list[float] = []
    end = time.monotonic() + deadline
    try:
        for index, host in enumerate(hosts):
            output, logs = folder / f"{label}-host-{index}.txt", folder / f"{label}-host-{index}"
            command = [
                *(_tool(), "netns", "exec", host.name, sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(hosts)}", "--nproc-per-node=2", "--max-restarts=0", f"--rdzv-id={label}"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:{PORT}"),
                # Both hosts bear this machine's name, from which torchrun would guess the store's place and addresses.
                *(f"--rdzv-conf=is_host={index == 0}", f"--local-addr={host.address}"),
                *(f"--log-dir={logs}", script, *arguments),
            ]
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    list(map(str, command)),
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_end_with_parent,
                )
            running.append((process, output, logs))
        for process, _, _ in running:
            process.wait(timeout=max(0.0, end - time.monotonic()))
            ended.append(time.monotonic())
    except subprocess.TimeoutExpired as error:
        texts = [f"---- {output.stem}\n{output.read_text(errors='replace')}" for _, output, _ in running]
        raise AssertionError("\n".join([f"the job ran for {deadline} seconds", *texts])) from error
    finally:
        for process, _, _ in running:
            process.kill()  # does nothing to one that has ended; ranks end with their torchrun
            process.wait()
    return [
        Finished(process.returncode, output.read_text(errors="replace"), when, logs)
        for (process, output, logs), when in zip(running, ended, strict=True)
    ]
