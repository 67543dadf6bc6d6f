"""Two hosts, each with a torchrun and two ranks: the single-host tests, a rank that dies in a step, and going on after.

The jobs are run once, and the tests read what they left: a run to the last step, then the same run with a rank that is
killed; the killed run resumed on both hosts, then the single-host tests.
"""

from __future__ import annotations

import json
import pickle
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_job
import pytest
import torch
from distributed import assert_all_equal, run
from filelock import FileLock
from hosts import Finished, Host, NoHostsError, torchrun, two_hosts
from reference import assert_bits_equal
from torch import Tensor

SCRIPT = Path(host_job.__file__)
# Longest run of a job, of which the slowest takes some ten seconds. A hang is then reported, with every rank's stack.
DEADLINE = 240.0
# Seconds from a rank's death to the end of torchrun on both hosts. It takes ten where five processes want each core.
NOTICED = host_job.TIMEOUT / 2
LAST_SAVED = host_job.KILLED_IN // host_job.SAVE_EVERY * host_job.SAVE_EVERY  # steps done
SAME_AT_ANY_WORLD_SIZE = ("test_fsdp step_is_the_unsharded_one", "test_fsdp_equality over_world_sizes")
EXACT = ("fp32, bf16 compute", "bf16")

Losses = dict[tuple[int, int], Tensor]  # by step and micro-batch


@contextmanager
def hosts_or_skip() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as hosts:
            yield hosts
    except NoHostsError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")


def job(folder: Path, hosts: tuple[Host, ...], name: str, *works: str, deadline: float = DEADLINE) -> list[Finished]:
    """Runs host_job.py on these hosts; its results are in a folder of the job's name."""
    (folder / name).mkdir()
    arguments = ("--checkpoints", folder / "saved", "--out", folder / name, "--deadline", str(deadline - 5.0), *works)
    return torchrun(hosts, folder, SCRIPT, *arguments, deadline=deadline)


def assert_succeeded(finished: list[Finished]) -> None:
    for host, end in enumerate(finished):
        assert end.returncode == 0, f"torchrun on host {host} failed:\n{end.output}"


@dataclass(frozen=True)
class Jobs:
    """Where the jobs left their results, and how they ended, by host."""

    folder: Path
    ended: dict[str, list[Finished]]

    def results(self, name: str, what: str) -> list[Any]:
        """What the ranks of a job saved, by rank."""
        paths = sorted((self.folder / name).glob(f"{what}-*.pt"))
        assert paths, "\n".join([f"no {what!r} of the job {name!r}", *(end.output for end in self.ended.get(name, []))])
        return [torch.load(path) for path in paths]

    def losses(self, name: str, what: str, model: str) -> Losses:
        """All ranks' losses of a run."""
        return {key: loss for result in self.results(name, what) for key, loss in result["losses"][model].items()}


@pytest.fixture(scope="session")
def jobs(shared_folder: Path) -> Jobs:
    done = shared_folder / "hosts"
    with FileLock(f"{done}.lock"):
        if not done.exists():
            folder = shared_folder / f"hosts-{uuid.uuid4().hex}"
            (folder / "saved").mkdir(parents=True)
            with hosts_or_skip() as hosts:
                ended = {
                    "killed": job(folder, hosts, "killed", "uninterrupted", "killed"),
                    "resumed": job(folder, hosts, "resumed", "resumed", "checks"),
                }
            done.write_bytes(pickle.dumps(Jobs(folder, ended)))
        made: Jobs = pickle.loads(done.read_bytes())
    return made


def assert_on_two_hosts(where: list[dict[str, int]]) -> None:
    """Two ranks in each of two namespaces, and what they gathered of the other host came over the cable."""
    first, second = where[0]["namespace"], where[2]["namespace"]
    assert first != second
    assert [rank["namespace"] for rank in where] == [first, first, second, second]
    assert all(rank["received"] >= 2 * host_job.GATHERED for rank in where), where


@pytest.mark.parametrize("name", ["killed", "resumed"])
def test_ranks_are_on_two_hosts(jobs: Jobs, name: str) -> None:
    assert_on_two_hosts(jobs.results(name, "where"))


def test_single_host_checks_hold(jobs: Jobs, tmp_path: Path) -> None:
    """They passed in the ranks, and the sharded steps on two hosts are those of a single process, bit for bit."""
    assert_succeeded(jobs.ended["resumed"])
    (expected,) = run(tmp_path, 1, host_job.results_of, SAME_AT_ANY_WORLD_SIZE)
    results = jobs.results("resumed", "checks")
    assert len(results) == 4
    for result in results:
        assert list(result) == list(host_job.CHECKS)
        for name in SAME_AT_ANY_WORLD_SIZE:
            assert_all_equal(result[name], expected[name], name)


def test_killed_rank_ends_the_job(jobs: Jobs) -> None:
    """All other ranks raise, in the collective that waits for the dead one and before its timeout; so does torchrun."""
    (died,) = jobs.results("killed", "killed")
    for host, end in enumerate(jobs.ended["killed"]):
        assert end.returncode == 1, f"host {host}: {end.returncode}\n{end.output}"
        assert 0.0 < end.ended - died < NOTICED
    dead_host, dead_local_rank = divmod(host_job.VICTIM, 2)
    assert "exitcode  : -9" in jobs.ended["killed"][dead_host].output
    for host, end in enumerate(jobs.ended["killed"]):
        # torchrun's own records of what its ranks raised; who is killed leaves none.
        records = {int(path.parent.name): json.loads(path.read_text()) for path in end.logs.glob("*/*/*/error.json")}
        survivors = [local_rank for local_rank in (0, 1) if (host, local_rank) != (dead_host, dead_local_rank)]
        assert sorted(records) == survivors
        for entry in records.values():
            message, stack = entry["message"]["message"], entry["message"]["extraInfo"]["py_callstack"]
            assert re.match(r"RuntimeError: .*gloo/transport", message), message
            assert "timed out" not in message.lower(), message
            assert re.search(r"optimizer\.step\(\)(.|\n)*collectives\.py(.|\n)*dist\.all_reduce", stack), stack
    # In the middle of a step: models before the one whose step it was had been stepped, and no checkpoint was due.
    assert {path.name for path in (jobs.folder / "saved").glob("step-*")} == {
        f"step-{steps}" for steps in range(host_job.SAVE_EVERY, LAST_SAVED + 1, host_job.SAVE_EVERY)
    }


def assert_resumed(jobs: Jobs, name: str, world_size: int, models: Sequence[str]) -> None:
    """A job loaded the last checkpoint and came to the uninterrupted run's losses and end, bit for bit."""
    results = jobs.results(name, "resumed")
    assert len(results) == world_size
    uninterrupted = jobs.results("killed", "uninterrupted")[0]
    saved = torch.load(jobs.folder / "saved" / f"everything-{LAST_SAVED}.pt")
    for result in results:
        assert result["start"] == LAST_SAVED
        for model in host_job.MODELS:
            assert_all_equal(result["loaded"][model], saved[model], f"{model}, loaded:")
        for model in models:
            assert_all_equal(result["end"][model], uninterrupted["end"][model], f"{model}, in the end:")
    for model in models:
        losses, expected = jobs.losses(name, "resumed", model), jobs.losses("killed", "uninterrupted", model)
        steps = range(LAST_SAVED, host_job.STEPS)
        assert sorted(losses) == [(step, micro) for step in steps for micro in range(host_job.MICRO_BATCHES)]
        for key, loss in losses.items():
            assert_bits_equal(loss, expected[key], f"{model}: loss of (step, micro-batch) {key}")


def test_resumed(jobs: Jobs) -> None:
    assert_resumed(jobs, "resumed", 4, list(host_job.MODELS))


def test_resumed_on_one_host(jobs: Jobs, tmp_path: Path) -> None:
    """On half the ranks each takes two micro-batches, so that gradients are summed in another order.

    The exact models' sums have no rounding: the same bits. The network's have some: of the loss, about 2, it moved one
    of 20 values by one ulp of 2^-23. Eight are allowed it; a step of lr moves each parameter by 2^-7.
    """
    name = f"one host {uuid.uuid4().hex}"
    (jobs.folder / name).mkdir()
    run(tmp_path, 2, host_job.resumed, jobs.folder / "saved", jobs.folder / name)
    assert_resumed(jobs, name, 2, EXACT)
    losses, expected = jobs.losses(name, "resumed", "net"), jobs.losses("killed", "uninterrupted", "net")
    assert len(losses) == (host_job.STEPS - LAST_SAVED) * host_job.MICRO_BATCHES
    for (step, micro), loss in losses.items():
        # The first step's come from the loaded parameters alone.
        atol = 0.0 if step == LAST_SAVED else 8 * 2**-23
        torch.testing.assert_close(loss, expected[step, micro], rtol=0, atol=atol)


@pytest.mark.slow
def test_more_single_host_checks(tmp_path: Path) -> None:
    """The longer single-host tests."""
    with hosts_or_skip() as hosts:
        assert_succeeded(job(tmp_path, hosts, "checked", "slow_checks", deadline=600.0))
    results = [torch.load(tmp_path / "checked" / f"where-{rank}.pt") for rank in range(4)]
    assert_on_two_hosts(results)
